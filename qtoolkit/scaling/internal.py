"""What the packages above need of scaling and users do not: the engine that quantizes."""

from qtoolkit.scaling._blocks import magnitude_max
from qtoolkit.scaling._engine import (
    Scales,
    block_codes,
    block_values,
    element_values,
    find_scales,
    operand_values,
    scaled_values,
    single_scale,
    unscaled_values,
)
from qtoolkit.scaling._history import BUCKETS, amax_of, histogram, rolled
from qtoolkit.scaling._quantize import check_quantize
from qtoolkit.scaling._scales import effective, kept_range, scale_from, tensor_scale_from

__all__ = [
    "BUCKETS",
    "Scales",
    "amax_of",
    "block_codes",
    "block_values",
    "check_quantize",
    "effective",
    "element_values",
    "find_scales",
    "histogram",
    "kept_range",
    "magnitude_max",
    "operand_values",
    "rolled",
    "scale_from",
    "scaled_values",
    "single_scale",
    "tensor_scale_from",
    "unscaled_values",
]
