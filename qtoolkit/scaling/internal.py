"""What the packages above need of scaling and users do not: the engine that quantizes."""

from qtoolkit.scaling._amax import check_axes
from qtoolkit.scaling._blocks import Blocks, explicit_spec, magnitude_max
from qtoolkit.scaling._engine import (
    Scales,
    block_codes,
    block_values,
    blocks_of,
    element_values,
    find_scales,
    operand_values,
    scaled_values,
    single_scale,
    unscaled_values,
)
from qtoolkit.scaling._hadamard import computed_now
from qtoolkit.scaling._history import BUCKETS, amax_of, histogram, rolled
from qtoolkit.scaling._metrics import occurrences
from qtoolkit.scaling._observer import Observer, observed_summary
from qtoolkit.scaling._quantize import check_quantize
from qtoolkit.scaling._scales import effective, kept_range, scale_from, tensor_scale_from
from qtoolkit.scaling._tally import (
    LOWEST_EXPONENT,
    TALLY_SHAPES,
    TALLY_SIZE,
    extreme,
    marked,
    marked_size,
    tally_of,
    tally_vector,
)

__all__ = [
    "BUCKETS",
    "LOWEST_EXPONENT",
    "TALLY_SHAPES",
    "TALLY_SIZE",
    "Blocks",
    "Observer",
    "Scales",
    "amax_of",
    "block_codes",
    "block_values",
    "blocks_of",
    "check_axes",
    "check_quantize",
    "computed_now",
    "effective",
    "element_values",
    "explicit_spec",
    "extreme",
    "find_scales",
    "histogram",
    "kept_range",
    "magnitude_max",
    "marked",
    "marked_size",
    "observed_summary",
    "occurrences",
    "operand_values",
    "rolled",
    "scale_from",
    "scaled_values",
    "single_scale",
    "tally_of",
    "tally_vector",
    "tensor_scale_from",
    "unscaled_values",
]
