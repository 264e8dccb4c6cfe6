"""Names of this package that higher packages use, but users do not."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.products import _flow as flow
from qtoolkit.products._bilinear import Axes, Einsum
from qtoolkit.products._cache import KVCacheLike, cache_format
from qtoolkit.products._calls import (
    MeasuredStep,
    NoMatmulsError,
    RunsLaterError,
    check_result,
    hashes,
    in_module,
    is_eager,
    is_in_program,
    is_step_by_step,
    needs_numbers,
    own_traces,
    refusing_kept_arrays,
    remembering_no_matmuls,
    runs_step_by_step,
    step_of,
    tracing_function,
)
from qtoolkit.products._checks import check_not_none, check_recipe
from qtoolkit.products._flow import Kept
from qtoolkit.products._input_scales import input_scale
from qtoolkit.products._inputs import (
    NEEDS_NUMBERS,
    Batch,
    Contents,
    is_traced_numpy,
    is_whole,
    naming_missing_inputs,
    with_numbers,
    write_back,
)
from qtoolkit.products._joined import joined_amax
from qtoolkit.products._json import spec_from_json, spec_to_json
from qtoolkit.products._kernels import KernelUse, KernelUses
from qtoolkit.products._learned import check_storable, stored_by_learned_scale
from qtoolkit.products._lines import warn
from qtoolkit.products._loops import Body, unrolled
from qtoolkit.products._matching import (
    FoundModule,
    check_rules,
    kernels_as_modules,
    training_rules,
    unused_rules,
)
from qtoolkit.products._matmul import Key, Planted, matching
from qtoolkit.products._numerics import HEADER as NUMERICS_HEADER
from qtoolkit.products._origins import Parameter
from qtoolkit.products._place import MODEL, Place, listed
from qtoolkit.products._plan import State
from qtoolkit.products._policies import FirstLast
from qtoolkit.products._program import Program
from qtoolkit.products._quantizing import Module, Quantizing, StaticResult, Traced, compiled
from qtoolkit.products._report import (
    check_all_quantized,
    report_of,
    strict_inputs,
    text_table,
    traced_with_axes,
)
from qtoolkit.products._residuals import code_values, poisoned
from qtoolkit.products._rounded import rounding_of
from qtoolkit.products._sensitivity import exactly
from qtoolkit.products._states import (
    AMAX,
    HISTORY,
    LEARNED,
    MOVING,
    PROBE,
    advance,
    as_float32,
    check_started,
    fixed_scale,
    lead_of,
    needs_state,
    not_started,
    observe,
    of_kernel,
    planted_with,
    probe_of,
    read_by,
    started,
    state_of,
    taken_over,
    uncalibrated,
    unstarted,
)
from qtoolkit.products._zero_points import moved_by, of_differences
