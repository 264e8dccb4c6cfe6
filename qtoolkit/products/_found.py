"""What a trace finds while a function runs: products, and the parameters in them."""

from typing import Any, NamedTuple

import jax

from qtoolkit.products._bilinear import Bilinear
from qtoolkit.products._sources import ACTIVATION, Source
from qtoolkit.scaling import QArray

LAST = -1  # the axis, from the end, along which features lie if nothing else is known


class Found(NamedTuple):
    """A product found in a trace.

    Attributes:
      name: The name of its primitive.
      function: The product as a function of lhs, rhs and extra.
      lhs, rhs, extra: Its operands.
      parameters: For lhs and rhs the name of the parameter from which alone, beside constants, the
        operand is computed, such as "kernel"; "" for an activation.
      dtype: The dtype of the result.
      sources: Where lhs and rhs come from.
      features: The axes of lhs and rhs along which features lie, counted from the end.
    """

    name: str
    function: Bilinear
    lhs: jax.Array | QArray
    rhs: jax.Array | QArray
    extra: tuple[jax.Array, ...]
    parameters: tuple[str, str]
    dtype: Any
    sources: tuple[Source, Source] = (ACTIVATION, ACTIVATION)
    features: tuple[int, int] = (LAST, LAST)

    @property
    def kernel(self) -> int | None:
        """Which operand is the kernel: 0, 1, or None for two activations; 1 for two parameters."""
        lhs, rhs = self.parameters
        return 1 if rhs else 0 if lhs else None

    @property
    def kernel_name(self) -> str:
        """The name of the kernel's parameter; "" for two activations."""
        return "" if self.kernel is None else self.parameters[self.kernel]


class Names:
    """Names the products of a method, in the order in which they run. State is kept by these names.

    A product is named by its kernel: "up", and "up#2" when "up" is multiplied a second time. Were
    all products numbered, an `if` in the method that skips one would give its state to the next.
    Products of two activations have no kernel and are numbered: "0", "1".
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, found: Found) -> str:
        kernel = found.kernel_name
        before = self.counts.get(kernel, 0)
        self.counts[kernel] = before + 1
        if not kernel:
            return str(before)
        return kernel + (f"#{before + 1}" if before else "")
