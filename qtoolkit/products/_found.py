"""What a rewritten function finds: its products, their names, its parameters."""

import dataclasses
from typing import Any, NamedTuple

import jax

from qtoolkit.products._bilinear import Bilinear
from qtoolkit.products._features import LAST
from qtoolkit.scaling import QArray


class Found(NamedTuple):
    """A product found in a trace.

    Attributes:
      name: Of its primitive.
      function: What it computes.
      lhs, rhs, extra: Its operands.
      parameters: The parameter that lhs and rhs follow from, beside constants and others: "kernel",
        "" for an activation.
      dtype: Of the result.
      origins: The parameters that lhs and rhs are, if somebody asked for them.
      features: Where the features of lhs and rhs lie, from the end.
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
        """Which operand is a kernel, None where both are activations; of two parameters, rhs."""
        lhs, rhs = self.parameters
        return 1 if rhs else 0 if lhs else None


class Names:
    """The names of a method's products, in the order in which they run.

    A product is named by its kernel, so that a branch of Python that leaves one out does not give
    what it keeps to the next: "up", and "up#2" where it is multiplied again. Those of two
    activations are numbered among themselves: "0", "1".
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
    """A `QArray` among the arguments of a traced function, which sees an array of its shape.

    It is no pytree: to JAX it is one leaf.
    """

    array: QArray


@dataclasses.dataclass(frozen=True)
class Origin:
    """A parameter whose uses are looked for.

    Attributes:
      name: Of the parameter, in the model.
      parameter: Its name in the module that multiplies.
      other_uses: Where the name is put once the parameter is used by anything but a product.
      order: Its axes in the order in which they now are, None for the order they had.
    """

    name: Any
    parameter: str
    other_uses: set[Any]
    order: tuple[int, ...] | None = None

    def moved(self, eqn: Any, is_cast: bool) -> "Origin | None":
        """The parameter after an equation of it alone, None where that is another use of it."""
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
