"""What `rewritten` finds in the trace of a function: products, and the parameters in them."""

import dataclasses
from typing import Any, NamedTuple

import jax

from qtoolkit.products._bilinear import Bilinear
from qtoolkit.products._features import LAST
from qtoolkit.scaling import QArray


class Found(NamedTuple):
    """A product found in a trace.

    Attributes:
      name: The name of its primitive.
      function: The product as a function of lhs, rhs and extra.
      lhs, rhs, extra: Its operands.
      parameters: For lhs and rhs the name of the parameter from which alone, beside constants, the
        operand is computed, such as "kernel"; "" for an activation.
      dtype: The dtype of the result.
      origins: For lhs and rhs the parameter that the operand is, up to a transpose or a cast; None
        for others, or if nobody asked.
      features: The axes of lhs and rhs along which features lie, counted from the end.
    """

    name: str
    function: Bilinear
    lhs: jax.Array | QArray
    rhs: jax.Array | QArray
    extra: tuple[jax.Array, ...]
    parameters: tuple[str, str]
    dtype: Any
    origins: tuple["Origin | None", "Origin | None"] = (None, None)
    features: tuple[int, int] = (LAST, LAST)

    @property
    def kernel(self) -> int | None:
        """Which operand is the kernel: 0, 1, or None for two activations; 1 for two parameters."""
        lhs, rhs = self.parameters
        return 1 if rhs else 0 if lhs else None


class Names:
    """Names the products of a method, in the order in which they run. State is kept by these names.

    A product is named by its kernel: "up", and "up#2" when "up" is multiplied a second time. Were
    all products numbered, an `if` in the method that skips one would give its state to the next.
    Products of two activations have no kernel and are numbered: "0", "1".
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.counts: dict[str, int] = {}

    def __call__(self, found: Found) -> str:
        kernel = "" if found.kernel is None else found.parameters[found.kernel]
        before = self.counts.get(kernel, 0)
        self.counts[kernel] = before + 1
        if not kernel:
            return f"{self.prefix}{before}"
        return f"{self.prefix}{kernel}" + (f"#{before + 1}" if before else "")


@dataclasses.dataclass(frozen=True)
class Standing:
    """Wraps a `QArray` among the arguments of `rewritten`.

    The function is traced with an ordinary array of its shape in its place; products then get the
    `QArray`. JAX must see one leaf here, so this is no pytree, as the `QArray` itself would be.
    """

    array: QArray


@dataclasses.dataclass(frozen=True)
class Origin:
    """Follows a parameter through a trace, to find out what else than products uses it.

    Attributes:
      name: The name of the parameter in the model.
      parameter: Its name in the module that multiplies it.
      other_uses: A set to which `name` is added once anything but a product uses the parameter.
      order: The permutation by which it has been transposed so far; None if it has not.
    """

    name: Any
    parameter: str
    other_uses: set[Any]
    order: tuple[int, ...] | None = None

    def moved(self, eqn: Any, is_cast: bool) -> "Origin | None":
        """The parameter after an equation with no other operand; None if that counts as a use."""
        name = eqn.primitive.name
        if is_cast or name in ("copy", "copy_p", "stop_gradient", "sharding_constraint"):
            return self
        if name != "transpose":
            return None
        order = eqn.params["permutation"]
        before = self.order
        return dataclasses.replace(
            self, order=tuple(order if before is None else (before[axis] for axis in order))
        )
