"""Which parameters of a model are kernels that can be stored as codes: those of its matmuls."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from qtoolkit.products._bilinear import Axes
from qtoolkit.products._matmul import Key, Matmul
from qtoolkit.products._operand import Operand
from qtoolkit.products._program import Program
from qtoolkit.products._quantizing import Quantizing
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._states import needs_state


class KernelUse(NamedTuple):
    """How a matmul uses a parameter.

    Attributes:
      operand: How it is rounded, with its axes in the matmul.
      shape: The shape of one kernel; the parameter may be a stack of them.
      recipe: The recipe of the matmul.
      key: That of the matmul.
    """

    operand: Operand | None
    axes: Axes
    shape: tuple[int, ...]
    recipe: Recipe
    key: Key

    def is_like(self, other: "KernelUse") -> bool:
        """Whether both round the parameter in the same way."""
        has_state = any(needs_state(one.recipe) for one in (self, other))
        return self == other or (self[:3] == other[:3] and not has_state)


@dataclasses.dataclass(frozen=True)
class KernelUses:
    """The kernels of a program, by the full path of the parameter.

    Attributes:
      others: The parameters that something else uses, too.
      tables: Those that are looked up by a recipe that rounds the rows.
    """

    uses: Mapping[str, list[KernelUse]]
    others: frozenset[str]
    tables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, program: Program, multiply: Quantizing) -> "KernelUses":
        uses: dict[str, list[KernelUse]] = {}
        others = {parameter.full_path for parameter in program.other_uses}
        for matmul in program.matmuls:
            recipe = multiply.recipe_of(matmul)
            if matmul.parameter is None:
                continue
            use = None if recipe is None else _use_of(matmul, recipe)
            if use is None:
                others.add(matmul.parameter.full_path)
            else:
                uses.setdefault(matmul.parameter.full_path, []).append(use)
        tables = set()
        for lookup in program.lookups:
            full_path, recipe = lookup.parameter.full_path, lookup.recipe
            if recipe is None:
                others.add(full_path)
                continue
            key = Key(*lookup.parameter)
            use = KernelUse(lookup.operand, lookup.axes, lookup.shape, recipe, key)
            uses.setdefault(full_path, []).append(use)
            tables.add(full_path)
        return cls(uses, frozenset(others), frozenset(tables))

    def storable(self, path: str) -> KernelUse | None:
        """How matmuls use a parameter; None if they differ, or something else uses it, too."""
        first, *rest = self.uses.get(path, [None])
        if first is None or path in self.others:
            return None
        return first if all(use is not None and use.is_like(first) for use in rest) else None


def _use_of(matmul: Matmul, recipe: Recipe) -> KernelUse | None:
    side = matmul.kernel
    assert side is not None
    assert matmul.function is not None
    order, shape = matmul.origins[side].order, tuple(matmul.types[side].shape)
    if order is None:
        return None
    axes = matmul.function.axes(*(x.shape for x in matmul.types[:2]))[side]
    operand = recipe.forward[1]
    if order:
        axes = axes.reordered(order)
        shape = tuple(shape[order.index(axis)] for axis in range(len(order)))
        if operand is not None and operand.spec.axes:  # those of the operand
            spec = operand.spec.along(*(order[axis] for axis in operand.spec.axes))
            operand = dataclasses.replace(operand, spec=spec)
    return KernelUse(operand, axes, shape, recipe, matmul.key)
