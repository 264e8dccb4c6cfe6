"""Which parameters of a model are kernels: noted while it is traced, for `quantize`."""

import contextvars
import dataclasses
import inspect
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from qtoolkit.products._analyses import Matmul
from qtoolkit.products._bilinear import Axes
from qtoolkit.products._instruments import set_variable
from qtoolkit.products._matmul_trace import MatmulTrace
from qtoolkit.products._operand import Operand
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._states import needs_state


class Kernel(NamedTuple):
    """How a matmul uses a parameter.

    Attributes:
      operand: How it is rounded, with its axes in the matmul.
      shape: The shape of one kernel; the parameter may be a stack of them.
      recipe: The recipe of the matmul.
      layer, product: Where the state of the matmul is: the keys of the layer, then the matmul's.
    """

    operand: Operand | None
    axes: Axes
    shape: tuple[int, ...]
    recipe: Recipe
    layer: Any
    product: str

    def is_like(self, other: "Kernel") -> bool:
        """Whether both round the parameter in the same way."""
        has_state = any(needs_state(one.recipe) for one in (self, other))
        return self == other or (self[:3] == other[:3] and not has_state)


@dataclasses.dataclass
class Kernels:
    """The parameters that matmuls use as kernels, and those that something else uses, by path.

    Attributes:
      paths: The paths of parameters that are known before the model runs, by array ids (nnx).
    """

    uses: dict[Any, list[Kernel]] = dataclasses.field(default_factory=dict)
    other_uses: set[Any] = dataclasses.field(default_factory=set)
    paths: dict[int, Any] = dataclasses.field(default_factory=dict)

    def note(
        self, found: Matmul, paths: Mapping[Any, Any], recipe: Recipe, layer: Any, product: str
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

    def note_others(
        self, trace: MatmulTrace, out: Any, paths: Mapping[Any, Any], own: Collection[Any]
    ) -> None:
        """Notes the parameters that a method used otherwise, or returned, after its run.

        Those of other modules than its own may go into loops, in which these modules run.
        """
        if inspect.isgenerator(out) or inspect.isasyncgen(out) or inspect.iscoroutine(out):
            uses = set(own)  # it has not run yet, so nobody knows
        else:
            sources = (trace.known_of(x).source for x in jax.tree.leaves(out))
            uses = {x.parameter for x in sources if x.order is not None}
        uses |= {key for key, is_loop in trace.other_uses or () if key in own or not is_loop}
        self.other_uses |= {paths[key] for key in uses if key in paths}

    def storable(self, *paths: Any) -> Kernel | None:
        """How matmuls use a parameter of these paths; None if they differ, or others use it too."""
        uses = [use for path in paths for use in self.uses.get(path, ())]
        is_apart = not self.other_uses.intersection(paths)
        return uses[0] if uses and is_apart and all(use.is_like(uses[0]) for use in uses) else None


_kernels: contextvars.ContextVar[Kernels | None] = contextvars.ContextVar("kernels", default=None)


def noting_kernels() -> AbstractContextManager[Kernels]:
    """In this context wrapped modules record how they use their parameters."""
    return set_variable(_kernels, Kernels())


def noted_kernels() -> Kernels | None:
    """Where to note kernels; None: nobody asks."""
    return _kernels.get()
