"""What a quantized product rounds its operands and cotangents to."""

import dataclasses
from typing import TYPE_CHECKING

from qtoolkit.formats import E4M3FN, E5M2, BlockFormat, SpecLike, spec

_FORWARD, _GRADIENT = BlockFormat.tensor(E4M3FN), BlockFormat.tensor(E5M2)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Formats of a quantized product and of its derivatives. Frozen, hence hashable.

    Every operand and cotangent is divided by its own current scale, which maps its largest finite
    magnitude to that of the format. Nothing is kept from step to step.

    Attributes:
      forward: What both operands are rounded to, in the product and in the products of its
        derivatives: whatever `qtoolkit.spec` takes that has one scale for the tensor, or none. An
        element format of up to 8 bits stands for one scale, wider ones for none. None leaves them
        as they are.
      gradient: What the cotangent that flows back is rounded to; None leaves it as it is.

    Raises:
      ValueError: Unknown format, or one with a scale for each block, a second scale or zero points.
      TypeError: No format.

    Source: arXiv:2209.05433 (E4M3 forward, E5M2 for gradients).
    """

    forward: BlockFormat | None = _FORWARD
    gradient: BlockFormat | None = _GRADIENT

    if TYPE_CHECKING:  # what may be given; the attributes are what `__post_init__` makes of it

        def __init__(
            self, forward: SpecLike | None = _FORWARD, gradient: SpecLike | None = _GRADIENT
        ) -> None: ...

    def __post_init__(self) -> None:
        for field in ("forward", "gradient"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, _one_scale(field, getattr(self, field)))


def _one_scale(field: str, given: SpecLike) -> BlockFormat:
    found = spec(given)
    is_tensor = found.scale is None or (found.block == () and found.other_axes is None)
    if not is_tensor or found.tensor_scale is not None or found.zero_point or found.has_powers:
        raise ValueError(
            f"Recipe: {field}={found.name}, expected a format with one scale for the tensor; "
            f"quantized products take no scales of blocks yet: use {found.element.name!r}, or "
            "qtoolkit.fake_quantize on the operands"
        )
    return found
