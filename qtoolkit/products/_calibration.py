"""Calibration: statistics of the operands of a model's matmuls over many batches."""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from qtoolkit.casts.internal import exact_float32, serializable
from qtoolkit.formats import BlockFormat
from qtoolkit.products._inputs import Batch
from qtoolkit.products._instruments import Tapped, tapped
from qtoolkit.products._operand import Operand
from qtoolkit.products._place import MODEL, Place, listed
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rounded import Rounded
from qtoolkit.scaling import (
    MSE,
    AbsMax,
    AmaxHistory,
    Bins,
    MinMax,
    MovingAverage,
    Observer,
    Percentile,
)
from qtoolkit.scaling.internal import (
    amax_of,
    extreme,
    marked,
    marked_size,
    observed_summary,
    occurrences,
)

OBSERVERS: dict[str, type[Observer]] = {
    "absmax": AbsMax,
    "moving_average": MovingAverage,
    "percentile": Percentile,
    "mse": MSE,
    "amax_history": AmaxHistory,
}
_HISTOGRAMS = (Percentile, MSE)
# Amaxes of several runs of a product are told apart to this many mantissa bits: 2**-3 = 12.5 %.
BITS = 3
MARKED = marked_size(BITS)
_STATIC: Any = {"static": True}


@dataclasses.dataclass(frozen=True)
class _SummaryTap:
    """Measures [uses, bad uses, marked amax, histogram] of an operand; no histogram without `bins`.

    A use is one run of the product in the step. It is bad if the operand held a NaN or an infinity.
    `marked` encodes the amax such that the amaxes of several runs can be added, and the largest
    read from the sum.
    """

    bins: Bins | None
    roles: tuple[int, ...] = (0, 1)

    @property
    def size(self) -> int:
        return 2 + MARKED + (0 if self.bins is None else self.bins.count)

    def __call__(self, x: jax.Array, rounded: Rounded) -> jax.Array:
        amax, is_bad = amax_of(x)
        pieces = [jnp.ones((1,), jnp.float32), is_bad.astype(jnp.float32).reshape(1)]
        pieces.append(marked(amax.reshape(1), BITS))
        if self.bins is not None:
            index = self.bins.index(exact_float32(x))
            pieces.append(occurrences(index, self.bins.count).astype(jnp.float32))
        return jnp.concatenate(pieces)


def summary_of(bins: Bins | None, function: Callable[..., Any], *arguments: Any) -> Tapped:
    """Runs a pure function once and measures the operands of its products.

    Args:
      bins: The bins of the histograms; None to make no histograms.
      function: Takes and returns pytrees. A product on which no float of the result depends is not
        measured, since measurements come out as gradients of these floats.
    """
    measured, _ = tapped("calibrate", _SummaryTap(bins), total_of(function), *arguments)
    return measured


def total_of(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A function that returns the sum of all floats in the result of `function`.

    Its gradient reaches every product on which one of these floats depends.
    """

    def total(*arguments: Any) -> jax.Array:
        leaves = jax.tree.leaves(function(*arguments))
        floats = [
            x for x in leaves if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return sum((jnp.sum(x.astype(jnp.float32)) for x in floats), jnp.float32(0))

    return total


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Statistics of the operands of a model's matmuls. A pytree of observers.

    Attributes:
      states: An observer of `qtoolkit.scaling` for each operand.
      keys: For each observer the path of the layer, the name of the matmul in that layer, and 0
        for lhs or 1 for rhs.
      unreached: Matmuls that ran and need a scale, but could not be measured: no gradient of the
        model's output reached them.
    """

    states: tuple[Observer, ...]
    keys: tuple[tuple[str, str, int], ...] = dataclasses.field(metadata=_STATIC)
    unreached: tuple[Place, ...] = dataclasses.field(default=(), metadata=_STATIC)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the layers that were calibrated."""
        return tuple(dict.fromkeys(path for path, *_ in self.keys))

    def amaxes(self, path: str) -> dict[str, jax.Array]:
        """For each matmul of a layer its amaxes [lhs, rhs, 0], float32[3]; 0 where unknown.

        The third entry is that of the cotangent, which is not calibrated: `State.amax` has it.
        """
        by_name: dict[str, list[jax.Array]] = {}
        for (where, name, side), state in zip(self.keys, self.states, strict=True):
            if where == path:
                amaxes = by_name.setdefault(name, [jnp.zeros((), jnp.float32)] * 3)
                amaxes[side] = state.amax().reshape(())
        return {name: jnp.stack(amaxes) for name, amaxes in by_name.items()}

    def partly_known(self, path: str, recipe: Recipe) -> tuple[str, ...]:
        """Names, for messages, the matmuls of a layer that were calibrated incompletely.

        Complete is a matmul with an observer for each operand that `recipe` calibrates.
        """
        needed = sum(o is not None and o.is_calibratable for o in recipe.forward)
        names = collections.Counter(name for where, name, _ in self.keys if where == path)
        return tuple(
            f"{Place(path, name)} ({known} of its {needed} operands)"
            for name, known in names.items()
            if known < needed
        )

    def merge(self, other: "Calibration") -> "Calibration":
        """The calibration that one run over the batches of both would have given.

        Raises:
          TypeError, ValueError: An operand has observers of different kinds in the two.
        """
        states = dict(zip(self.keys, self.states, strict=True))
        for key, state in zip(other.keys, other.states, strict=True):
            states[key] = states[key].merge(state) if key in states else state
        reached = {(path, name) for path, name, _ in states}
        missing = dict.fromkeys((*self.unreached, *other.unreached))
        unreached = tuple(place for place in missing if tuple(place) not in reached)
        return Calibration(tuple(states.values()), tuple(states), unreached)

    def merge_across(self, axis_name: str | tuple[str, ...]) -> "Calibration":
        """The calibration over the batches of all devices along these axes of `jax.shard_map`."""
        states = tuple(state.merge_across(axis_name) for state in self.states)
        return dataclasses.replace(self, states=states)

    def __str__(self) -> str:
        lines = []
        for (path, name, side), state in zip(self.keys, self.states, strict=True):
            operand = ("lhs", "rhs")[side]
            amax = float(jnp.max(state.amax()))
            lines.append(f"{Place(path, name)} {operand}: amax {amax:.4g}, {state!r}")
        return "\n".join(lines)


def calibration_of(
    summarize: Callable[[Bins | None, Batch], Tapped],
    batches: Iterable[Any],
    observer: Any,
    options: dict[str, Any],
) -> Calibration:
    """Observes the operands of a model's products over all batches.

    Args:
      summarize: Called with bins and a batch, it returns the batch's summary. Bins are None for
        observers without histograms.
      batches: Taken one by one; none is kept.
      observer: A key of `OBSERVERS`, or a class of `qtoolkit.scaling`.
      options: Keyword arguments for the observer's `of`.
    """
    kind = _checked_observer(observer, options)
    if hasattr(batches, "dtype") or isinstance(batches, dict):
        raise TypeError(
            f"calibrate: batches has type {type(batches).__name__}, expected an iterable of "
            "batches; write calibrate(wrapped, [batch])"
        )
    bins = (options.get("bins") or Bins()) if issubclass(kind, _HISTOGRAMS) else None
    states: dict[tuple[str, str, int], Observer] = {}
    places: dict[Place, None] = {}
    number = 0
    for number, batch in enumerate(batches, start=1):  # noqa: B007
        summary = summarize(bins, Batch.of(batch))
        _check_summary(summary)
        products = zip(summary.places, summary.recipes, summary.rows, strict=True)
        for place, recipe, rows in products:
            for side, operand in enumerate(recipe.forward):
                if operand is None or not operand.is_calibratable:
                    continue
                places[place] = None
                if not float(rows[side][0]):  # no gradient reached it: nothing is known
                    continue
                key = (*place, side)
                state = states.get(key)
                state = _new_observer(kind, operand, options) if state is None else state
                states[key] = _after(state, rows[side])
    if not number:
        raise ValueError("calibrate: there are no batches, expected one or more")
    never = [key for key, state in states.items() if not int(state.count)]
    if never:
        path, name, side = never[0]
        raise ValueError(
            f"calibrate: {Place(path, name)}: all {int(states[never[0]].bad)} batches of its "
            f"{('lhs', 'rhs')[side]} have a NaN or an infinity, expected a finite one; so for "
            f"{len(never)} operands in all"
        )
    reached = {(path, name) for path, name, _ in states}
    unreached = tuple(place for place in places if tuple(place) not in reached)
    return Calibration(tuple(states.values()), tuple(states), unreached)


def _check_summary(summary: Tapped) -> None:
    """Raises if nothing was measured: called under `jit`, no product ran, or a frozen model."""
    if any(isinstance(rows, jax.core.Tracer) for rows in summary.rows):
        raise TypeError(
            "calibrate: called inside jit, shard_map or another transformation, expected a "
            "call outside, where it compiles by itself; batches may be sharded, and "
            "calibrations of several runs merge: a.merge(b)"
        )
    if not summary.places:
        raise ValueError(
            "calibrate: no quantized matmul ran, expected a wrapped model; wrap it first"
        )
    if any(recipe.is_calibrated for recipe in summary.recipes):
        raise ValueError(
            "calibrate: the recipe has Static() scaling, as freeze makes it, and keeps its "
            "scales, expected one with current scaling, e.g. te_current; calibrate the model "
            "wrapped with that, and freeze it"
        )


def _checked_observer(like: Any, options: dict[str, Any]) -> type[Observer]:
    known = ", ".join(OBSERVERS)
    if like is MinMax or like == "minmax":
        raise ValueError(
            "calibrate: MinMax is for zero points, which matmuls do not take; expected one of "
            f"{known}"
        )
    kind = OBSERVERS.get(like) if isinstance(like, str) else like
    if not (isinstance(kind, type) and issubclass(kind, Observer)):
        raise ValueError(f"calibrate: observer={like!r}, expected one of {known}")
    of: Any = kind.of  # type: ignore[attr-defined]
    names = [name for name in inspect.signature(of).parameters if name not in ("spec", "shape")]
    wrong = [name for name in options if name not in names]
    if wrong:
        raise TypeError(
            f"calibrate: {kind.__name__} has no option {wrong[0]!r}, expected "
            f"{' or '.join(names) or 'none'}"
        )
    return kind


def _new_observer(kind: type[Observer], operand: Operand, options: dict[str, Any]) -> Observer:
    if operand.spec.tensor_scale:  # its second scale is for the amax of the whole tensor
        return AbsMax.of(BlockFormat.tensor(operand.spec.element), (1,))
    made: Any = kind
    return made.of(operand.spec, (1,), **options)


@jax.jit
def _after(state: Observer, row: jax.Array) -> Observer:
    amax = extreme(row[2 : 2 + MARKED], BITS, lowest=False)
    counts = None
    if isinstance(state, _HISTOGRAMS):
        counts = row[2 + MARKED :].astype(jnp.uint32).reshape(*state.shape, -1)
    return observed_summary(state, amax.reshape(state.shape), counts, row[1] == 0)


def check_calibrated(where: str, missing: Iterable[str]) -> None:
    """Raises if there are layers without calibration; names them."""
    names = [path or MODEL for path in missing]
    if names:
        raise ValueError(
            f"{where}: not calibrated: {listed(names)}; expected every quantized layer: calibrate "
            "with batches that reach them, or exclude them by a rule with None (the model itself: "
            "'^$')"
        )
