"""A format for each layer under a size: the multiple-choice knapsack, and its table."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.formats import Rules
from qtoolkit.post_training._storing import serving_rules
from qtoolkit.products import Recipe, Sensitivity
from qtoolkit.products.internal import MODEL, exactly, text_table

_UNITS = 4096  # sizes are rounded up to the limit over this number


@dataclasses.dataclass(frozen=True, init=False)
class Allocation(Rules[Recipe]):
    """The rules that `allocate` returns, with the table that they come from.

    Attributes:
      paths: The layers.
      names: The choices.
      chosen: For each layer the index of its choice.
      bytes: [layers, choices], the bytes of a kernel.
      costs: [layers, choices], what the loss grows by if that layer alone takes that choice.
      limit: The bytes that were allowed.
      gap: By how much the sum of the costs is above the least possible one, at most.
    """

    paths: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    chosen: tuple[int, ...] = ()
    bytes: tuple[tuple[int, ...], ...] = ()
    costs: tuple[tuple[float, ...], ...] = ()
    limit: int = 0
    gap: float = 0.0

    def __init__(
        self,
        paths: Sequence[str],
        names: Sequence[str],
        recipes: Sequence[Recipe | None],
        sizes: Any,
        costs: Any,
        limit: int,
    ) -> None:
        chosen, gap = knapsack(sizes, costs, limit)
        rules = {exactly(path): recipes[i] for path, i in zip(paths, chosen, strict=True)}
        super().__init__(rules, default=None)
        vars(self).update(
            paths=tuple(paths),
            names=tuple(names),
            chosen=chosen,
            bytes=tuple(tuple(map(int, row)) for row in sizes),
            costs=tuple(tuple(map(float, row)) for row in costs),
            limit=int(limit),
            gap=gap,
        )

    @property
    def size(self) -> int:
        """The bytes of all kernels as they were chosen."""
        return sum(row[i] for row, i in zip(self.bytes, self.chosen, strict=True))

    @property
    def cost(self) -> float:
        """The sum of the costs of the choices: what the loss grows by if they just add up."""
        return sum(row[i] for row, i in zip(self.costs, self.chosen, strict=True))

    def __str__(self) -> str:
        rows = [("layer", "format", "bytes", "loss added", *self.names)]
        for path, i, sizes, costs in zip(
            self.paths, self.chosen, self.bytes, self.costs, strict=True
        ):
            shown = (f"{cost:+.3g}" for cost in costs)
            rows.append((path or MODEL, self.names[i], f"{sizes[i]:,}", f"{costs[i]:+.3g}", *shown))
        total = f"{self.size:,} of {self.limit:,}"
        rows.append(("(all)", "", total, f"{self.cost:+.3g}", *("" for _ in self.names)))
        above = f"at most {self.gap:.3g} above" if self.gap > 0 else "equal to"
        gap = f"the sum of the costs is {above} the least possible one"
        return "\n".join([*text_table(rows), gap])


def knapsack(sizes: Any, costs: Any, limit: int) -> tuple[tuple[int, ...], float]:
    """The choice for each layer with the least sum of costs whose sizes sum to `limit` at most.

    Exact by dynamic programming where sizes are multiples of limit / 4096; others are rounded up to
    such multiples. The same with sizes rounded down gives a sum that none can be below.

    Args:
      sizes, costs: [layers, choices]. A NaN costs more than all else.

    Returns:
      The index of the choice for each layer, and the gap between its sum and that lower bound.

    Raises:
      ValueError: The limit is less than the smallest sizes take.
    """
    sizes, costs = np.asarray(sizes, np.int64), np.asarray(costs, np.float64)
    least = int(sizes.min(1).sum())
    if limit < least:
        raise ValueError(
            f"allocate: bytes={limit:,}, and the smallest choice of each layer takes {least:,} in "
            "all, expected at least that; add a smaller format to choices"
        )
    finite = np.where(np.isfinite(costs), costs, np.nan)
    worst = np.nanmax(np.abs(finite), initial=1.0) * (2 * len(costs) + 1)
    costs = np.where(np.isnan(finite), worst, finite)
    unit = max(limit / _UNITS, 1)
    chosen, total = _least(np.ceil(sizes / unit).astype(int), costs, int(limit / unit))
    if chosen is None:  # rounded up, not even the smallest sizes fit
        chosen = tuple(int(i) for i in sizes.argmin(1))
        total = float(costs[np.arange(len(costs)), chosen].sum())
    _, bound = _least(np.floor(sizes / unit).astype(int), costs, int(limit / unit))
    return chosen, max(total - bound, 0.0)


def _least(
    sizes: np.ndarray, costs: np.ndarray, limit: int
) -> tuple[tuple[int, ...] | None, float]:
    """Dynamic programming over integer sizes: the choices and the sum of their costs."""
    best, steps = np.zeros(limit + 1), []
    for row, cost in zip(sizes, costs, strict=True):
        options = np.full((len(row), limit + 1), np.inf)
        for i, size in enumerate(row):
            if size <= limit:
                options[i, size:] = best[: limit + 1 - size] + cost[i]
        steps.append(options.argmin(0))
        best = options.min(0)
    total, place = float(best[limit]), limit
    if not np.isfinite(total):
        return None, total
    chosen = []
    for step, row in zip(steps[::-1], sizes[::-1], strict=True):
        chosen.append(int(step[place]))
        place -= int(row[chosen[-1]])
    return tuple(chosen[::-1]), total


def allocated(
    choices: Any,
    limit: int,
    measured: Callable[[Any], tuple[Sensitivity, Mapping[str, int], Mapping[str, int]]],
) -> Allocation:
    """The allocation of a model whose layers are measured with each choice.

    Args:
      measured: From a choice to the sensitivity of the layers, and the bytes of their kernels as
        they are stored then and as they are.
    """
    is_list = isinstance(choices, list | tuple)
    if not is_list or all(choice is None for choice in choices):
        raise ValueError(
            f"allocate: choices={choices!r}, expected a list of formats, e.g. "
            '["int4_group32", "e4m3fn", None]'
        )
    rules = [None if choice is None else serving_rules(choice) for choice in choices]
    if any(rule is not None and rule.rules for rule in rules):
        raise TypeError("allocate: a choice is Rules, expected a format, a Recipe or None")
    recipes = [None if rule is None else rule.default for rule in rules]
    rows = [None if choice is None else measured(choice) for choice in choices]
    unquantized = next(row[2] for row in rows if row is not None)
    free = dict.fromkeys(unquantized, 0.0)
    sizes = [unquantized if row is None else row[1] for row in rows]
    costs = [free if row is None else dict(row[0].ranking) for row in rows]
    paths = [path for path in unquantized if all(path in row for row in (*sizes, *costs))]
    if not paths:
        raise ValueError(
            "allocate: no layer has a kernel that every choice stores, expected nnx.Linear, "
            "linen.Dense and the like, reached by the batch"
        )
    names = ["high precision" if recipe is None else _named(recipe) for recipe in recipes]
    bytes_, added = ([[row[path] for row in each] for path in paths] for each in (sizes, costs))
    return Allocation(paths, names, recipes, bytes_, added, limit)


def _named(recipe: Recipe) -> str:
    shown = ["" if operand is None else operand.spec.name for operand in recipe.forward]
    return " x ".join(filter(None, shown))
