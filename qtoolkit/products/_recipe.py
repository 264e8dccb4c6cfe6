"""What a quantized product rounds its operands and cotangents to."""

import dataclasses

from qtoolkit.formats import E4M3FN, E5M2, Format, format

SCALINGS = ("tensor",)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Formats and scaling of a quantized product and of its derivatives. Frozen, hence hashable.

    Attributes:
      forward: Format of both operands, in the product and in the products of its derivatives; any
        spelling is resolved. None leaves them as they are.
      gradient: Format of the cotangent that flows back; None leaves it as it is.
      scaling: "tensor": every operand and cotangent is divided by its own current scale, which maps
        its largest finite magnitude to that of the format. Nothing is kept from step to step.
        Formats of more than 8 bits are used without a scale.

    Source: arXiv:2209.05433 (E4M3 forward, E5M2 for gradients).
    """

    forward: Format | None = E4M3FN
    gradient: Format | None = E5M2
    scaling: str = "tensor"

    def __post_init__(self) -> None:
        for field in ("forward", "gradient"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, format(getattr(self, field)))
        if self.scaling not in SCALINGS:
            raise ValueError(
                f"Recipe: scaling={self.scaling!r}, expected one of {', '.join(SCALINGS)}"
            )
