"""Which parameters of a linen module are kernels: noted while it runs, for `quantize`."""

import contextvars
import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from qtoolkit.products import Operand, Recipe
from qtoolkit.products.internal import Axes, Matmul, set_variable


class Kernel(NamedTuple):
    """How a matmul uses a parameter.

    Attributes:
      operand: How it is rounded, with its axes in the matmul.
      shape: The shape of one kernel; the parameter may be a stack of them.
      recipe: The recipe of the matmul.
      layer, product: Where collections hold its state: the keys of the layer, then the matmul's.
    """

    operand: Operand | None
    axes: Axes
    shape: tuple[int, ...]
    recipe: Recipe
    layer: tuple[str, ...]
    product: str


@dataclasses.dataclass
class Kernels:
    """The parameters that matmuls use as kernels, and those that something else uses, by path."""

    uses: dict[Any, list[Kernel]] = dataclasses.field(default_factory=dict)
    other_uses: set[Any] = dataclasses.field(default_factory=set)

    def note(
        self,
        found: Matmul,
        paths: Mapping[Any, Any],
        recipe: Recipe,
        layer: tuple[str, ...],
        product: str,
    ) -> None:
        """Notes how a matmul uses parameters; `paths` are those of its module's own."""
        axes = found.function.axes(found.lhs.shape, found.rhs.shape)
        for side, source in enumerate(found.sources):
            path, order = paths.get(source.parameter), source.order
            if path is None or order is None:
                continue
            if found.parameters[1 - side]:
                self.other_uses.add(path)
                continue
            shape = (found.lhs, found.rhs)[side].shape
            own = axes[side]
            if order:
                own = own.reordered(order)
                shape = tuple(shape[order.index(axis)] for axis in range(len(order)))
            kernel = Kernel(recipe.forward[1], own, shape, recipe, layer, product)
            self.uses.setdefault(path, []).append(kernel)


_kernels: contextvars.ContextVar[Kernels | None] = contextvars.ContextVar("kernels", default=None)


def noting_kernels() -> AbstractContextManager[Kernels]:
    """In this context wrapped modules record how they use their parameters."""
    return set_variable(_kernels, Kernels())


def noted_kernels() -> Kernels | None:
    """Where to note kernels; None: nobody asks."""
    return _kernels.get()
