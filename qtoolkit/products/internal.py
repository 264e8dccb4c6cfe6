"""Names of this package that higher packages use, but users do not."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.products import _flow as flow
from qtoolkit.products._allocation import allocated
from qtoolkit.products._bilinear import Axes
from qtoolkit.products._cache import cache_format, cached
from qtoolkit.products._calibration import Batch, check_calibrated
from qtoolkit.products._constant import Constant
from qtoolkit.products._context import held
from qtoolkit.products._finding import kernels_in, layers_in
from qtoolkit.products._flow import Kept
from qtoolkit.products._found import Found, Names
from qtoolkit.products._inputs import as_jax, with_numbers
from qtoolkit.products._inspection import (
    computes_product,
    overridden,
    product_attributes,
    returns_later,
)
from qtoolkit.products._json import spec_from_json, spec_to_json
from qtoolkit.products._matching import (
    Module,
    check_rules,
    kernels_as_modules,
    recipes_of,
    training_rules,
    unused_rules,
)
from qtoolkit.products._numerics import HEADER as NUMERICS_HEADER
from qtoolkit.products._place import MODEL, Marked, Place
from qtoolkit.products._plan import State
from qtoolkit.products._policies import FirstLast
from qtoolkit.products._post_training import PlainModel, input_statistics, settings, tuned
from qtoolkit.products._recipe import check_recipe
from qtoolkit.products._recording import (
    Track,
    present_trace,
    rolled_later,
)
from qtoolkit.products._report import (
    BY_RULE,
    check_all_quantized,
    lacks_history,
    report_of,
    strict_inputs,
)
from qtoolkit.products._rewrite import Multiply, Replacing, replacing
from qtoolkit.products._site import Site, enclosing, leaving
from qtoolkit.products._states import (
    AMAX,
    HISTORY,
    LEARNED,
    MOVING,
    PROBE,
    advance,
    observe,
    of_kernel,
    probe_of,
    started,
    taken_over,
    uncalibrated,
    unstarted,
)
from qtoolkit.products._stored import check_trainable, einsum_axes, serving_rules, stored_kernel
from qtoolkit.products._taps import unmeasured
from qtoolkit.products._watching import metrics_of, products_in, watching, zeros_for
