"""What the packages above need of scaling and users do not: the engine that quantizes."""

from qtoolkit.scaling._engine import (
    Scales,
    block_codes,
    block_values,
    element_values,
    find_scales,
    operand_values,
    scaled_values,
)
from qtoolkit.scaling._quantize import check_quantize
from qtoolkit.scaling._scales import kept_range, scale_from

__all__ = [
    "Scales",
    "block_codes",
    "block_values",
    "check_quantize",
    "element_values",
    "find_scales",
    "kept_range",
    "operand_values",
    "scale_from",
    "scaled_values",
]
