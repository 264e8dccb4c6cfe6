"""Names of this package that higher packages use, but users do not."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.products._allocation import allocated
from qtoolkit.products._bilinear import Axes
from qtoolkit.products._cache import cache_format, cached
from qtoolkit.products._calibration import Batch, calibration_of, check_calibrated, summary_of
from qtoolkit.products._closures import opened
from qtoolkit.products._constant import Constant
from qtoolkit.products._context import held
from qtoolkit.products._found import Found, Names, Origin, Standing
from qtoolkit.products._inputs import as_jax, with_numbers
from qtoolkit.products._inspection import (
    computes_product,
    overridden,
    product_attributes,
    returns_later,
)
from qtoolkit.products._intercepted import is_intercepted
from qtoolkit.products._json import spec_from_json, spec_to_json
from qtoolkit.products._matching import Module, check_rules, training_rules, unused_rules
from qtoolkit.products._numerics import HEADER as NUMERICS_HEADER
from qtoolkit.products._numerics import Sums, check_loss, sums_of
from qtoolkit.products._plan import State
from qtoolkit.products._post_training import PlainModel, input_statistics, settings, tuned
from qtoolkit.products._recipe import check_recipe
from qtoolkit.products._report import (
    BY_RULE,
    check_all_quantized,
    lacks_history,
    report_of,
    strict_inputs,
)
from qtoolkit.products._rewrite import rewritten, with_values
from qtoolkit.products._sensitivity import sensitivity_of
from qtoolkit.products._site import Site, enclosing, rewritten_later, scope
from qtoolkit.products._starting import first_scales
from qtoolkit.products._stored import check_trainable, einsum_axes, serving_rules, stored_kernel
from qtoolkit.products._taps import MODEL, Tapped, instrument, unmeasured
