"""Names of this package that higher packages use, but users do not."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.post_training._allocation import allocated
from qtoolkit.post_training._methods import (
    PlainModel,
    checked_batches,
    input_statistics,
    settings,
)
from qtoolkit.post_training._quantize import Storable, quantize_kernels
from qtoolkit.post_training._storing import (
    AS_WRAPPED,
    einsum_axes,
    kept_or_serving_rules,
    not_wrapped,
    serving_rules,
    stored_kernel,
)
