"""Names of this package that higher packages use, but users do not."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.products import _flow as flow
from qtoolkit.products._allocation import allocated
from qtoolkit.products._analyses import Matmul, MatmulNames
from qtoolkit.products._bilinear import Axes
from qtoolkit.products._bytecode import (
    computes_matmul,
    matmul_attributes,
    overridden,
)
from qtoolkit.products._cache import cache_format, cached
from qtoolkit.products._control_flow import run_in
from qtoolkit.products._flow import Kept
from qtoolkit.products._forward_state import (
    ForwardState,
    moves_forward,
    present_trace,
)
from qtoolkit.products._inputs import Batch, Constant, as_jax, naming_missing_inputs, with_numbers
from qtoolkit.products._instruments import kernels_in, set_variable, without_measuring
from qtoolkit.products._json import spec_from_json, spec_to_json
from qtoolkit.products._kernels import Kernel, Kernels, noted_kernels, noting_kernels
from qtoolkit.products._layer import LayerRecipe, in_high_precision, quantizing_dot
from qtoolkit.products._lifted_state import LiftingTrace, state_after
from qtoolkit.products._lines import warn
from qtoolkit.products._matching import (
    Module,
    check_rules,
    kernels_as_modules,
    recipes_of,
    training_rules,
    unused_rules,
)
from qtoolkit.products._matmul_trace import MatmulTrace, Multiply, is_watched, replacing_matmuls
from qtoolkit.products._numerics import HEADER as NUMERICS_HEADER
from qtoolkit.products._place import MODEL, Mark, Place
from qtoolkit.products._plan import State
from qtoolkit.products._policies import FirstLast
from qtoolkit.products._post_training import (
    PlainModel,
    checked_batches,
    input_statistics,
    settings,
)
from qtoolkit.products._recipe import check_recipe
from qtoolkit.products._report import (
    BY_RULE,
    check_all_quantized,
    strict_inputs,
)
from qtoolkit.products._states import (
    AMAX,
    HISTORY,
    LEARNED,
    MOVING,
    PROBE,
    advance,
    needs_state,
    observe,
    of_kernel,
    probe_of,
    started,
    taken_over,
    uncalibrated,
    unstarted,
)
from qtoolkit.products._stored import (
    AS_WRAPPED,
    einsum_axes,
    kept_or_serving_rules,
    not_wrapped,
    serving_rules,
    stored_kernel,
)
