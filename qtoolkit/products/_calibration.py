"""Calibration: statistics of the operands of a model's matmuls over many batches."""

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qtoolkit.casts.internal import exact_float32, serializable
from qtoolkit.formats import BlockFormat
from qtoolkit.products._inputs import Batch
from qtoolkit.products._matmul import Call, Key, Matmul
from qtoolkit.products._operand import Operand
from qtoolkit.products._place import MODEL, Place, listed
from qtoolkit.products._quantizing import Quantizing, StaticResult, Traced, compiled
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._taps import Seen
from qtoolkit.scaling import (
    MSE,
    AbsMax,
    Bins,
    MinMax,
    MovingAverage,
    Percentile,
    QArray,
)
from qtoolkit.scaling.internal import (
    Observer,
    amax_of,
    observed_summary,
    occurrences,
)

OBSERVERS: dict[str, type[Observer]] = {
    "absmax": AbsMax,
    "moving_average": MovingAverage,
    "percentile": Percentile,
    "mse": MSE,
}
_HISTOGRAMS = (Percentile, MSE)
_STATIC: Any = {"static": True}


@dataclasses.dataclass(frozen=True, eq=False)
class _Summarizing:
    """A `multiply` that also sees the operands that can be calibrated, by side.

    Largest: the amax. Total: [uses, bad uses], and the counts of a histogram if there are bins. A
    use is one run of the matmul. It is bad if the operand held a NaN or an infinity.

    Attributes:
      bins: The bins of the histograms; None to make none.
    """

    quantizing: Quantizing
    bins: Bins | None

    def __call__(self, matmul: Matmul, call: Call, planted: Any) -> tuple[Any, Seen | None]:
        out, _ = self.quantizing(matmul, call, planted)
        recipe = self.quantizing.recipe_of(matmul)
        if recipe is None:
            return out, None
        operands = (call.lhs, call.rhs) if matmul.kernel != 0 else (call.rhs, call.lhs)
        largest, total = {}, {}
        for side in calibrated_sides(recipe):
            if not isinstance(operands[side], QArray):
                largest[side], total[side] = self._summary(operands[side])
        return out, Seen(largest, total)

    def _summary(self, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        amax, is_bad = amax_of(x)
        uses = jnp.stack([jnp.ones_like(amax), is_bad.astype(jnp.float32)])
        if self.bins is None:
            return amax, (uses,)
        counts = occurrences(self.bins.index(exact_float32(x)), self.bins.count)
        return amax, (uses, counts.astype(jnp.float32))


def calibrated_sides(recipe: Recipe) -> list[int]:
    return [i for i, o in enumerate(recipe.forward) if o is not None and o.is_calibratable]


class Summary(NamedTuple):
    """What one batch tells of each matmul that ran.

    Attributes:
      seen: By the key of the matmul, see `_Summarizing`.
      recipes: Likewise, in the order in which they run.
    """

    seen: Mapping[Key, Seen]
    recipes: dict[Key, Recipe]


def summary_of(
    traced: Traced, bins: Bins | None, leaves: list[Any], planted: Mapping[Key, Any]
) -> Summary:
    seen, static = _summary_by(bins)(traced, leaves, planted)
    return Summary(seen, dict(static.value))


@functools.lru_cache(maxsize=64)
def _summary_by(bins: Bins | None) -> Callable[..., Any]:
    @compiled
    def summary(traced: Traced, leaves: list[Any], planted: Mapping[Key, Any]) -> Any:
        program, multiply, planted = traced.measuring(leaves, planted)
        _, seen = program.run(leaves, _Summarizing(multiply, bins), planted)
        pairs = ((matmul.key, multiply.recipe_of(matmul)) for matmul in program.matmuls)
        recipes = dict.fromkeys((key, recipe) for key, recipe in pairs if recipe is not None)
        return seen, StaticResult(tuple(recipes))

    return summary


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Statistics of the operands of a model's matmuls. A pytree of observers.

    Attributes:
      states: An observer of `qtoolkit.scaling` for each operand.
      keys: For each observer the path of the layer, the name of the matmul in that layer, and 0
        for lhs or 1 for rhs.
    """

    states: tuple[Observer, ...]
    keys: tuple[tuple[str, str, int], ...] = dataclasses.field(metadata=_STATIC)

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
        return Calibration(tuple(states.values()), tuple(states))

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
    summarize: Callable[[Bins | None, Batch], Summary],
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
    number = 0
    for number, batch in enumerate(batches, start=1):  # noqa: B007
        summary = summarize(bins, Batch.of(batch))
        _check_summary(summary)
        for place, recipe in summary.recipes.items():
            seen = summary.seen.get(place, Seen({}, {}))
            for side in calibrated_sides(recipe):
                if side not in seen.total or not float(seen.total[side][0][0]):
                    continue  # it is stored, or in a branch that did not run
                key = (*place, side)
                state = states.get(key)
                if state is None:
                    operand: Any = recipe.forward[side]
                    state = _new_observer(kind, operand, options)
                # An NVFP4 operand has `AbsMax` also if others have histograms.
                counts = 2 if isinstance(state, _HISTOGRAMS) else 1
                states[key] = _after(state, seen.largest[side], *seen.total[side][:counts])
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
    return Calibration(tuple(states.values()), tuple(states))


def _check_summary(summary: Summary) -> None:
    """Raises if nothing was measured: called under `jit`, no product ran, or a frozen model."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(summary.seen)):
        raise TypeError(
            "calibrate: called inside jit, shard_map or another transformation, expected a "
            "call outside, where it compiles by itself; batches may be sharded, and "
            "calibrations of several runs merge: a.merge(b)"
        )
    if not summary.recipes:
        raise ValueError(
            "calibrate: no quantized matmul ran, expected a wrapped model; wrap it first"
        )
    if any(recipe.is_calibrated for recipe in summary.recipes.values()):
        raise ValueError(
            "calibrate: the recipe has Static() scaling, as freeze makes it, and keeps its "
            "scales, expected one with current scaling, e.g. te_current; calibrate the model "
            "wrapped with that, and freeze it"
        )


def _checked_observer(like: Any, options: dict[str, Any]) -> type[Observer]:
    known = ", ".join(OBSERVERS)
    if like is MinMax or like == "minmax":
        raise ValueError(
            "calibrate: MinMax finds zero points, and calibrated scales have none; expected one of "
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
def _after(state: Observer, amax: jax.Array, uses: jax.Array, *histogram: jax.Array) -> Observer:
    counts = (n.astype(jnp.uint32).reshape(*state.shape, -1) for n in histogram)
    return observed_summary(state, uses[1] == 0, amax.reshape(state.shape), *counts)


def check_calibrated(where: str, missing: Iterable[str]) -> None:
    """Raises if there are layers without calibration; names them."""
    names = [path or MODEL for path in missing]
    if names:
        raise ValueError(
            f"{where}: not calibrated: {listed(names)}; expected every quantized layer: calibrate "
            "with batches that reach them, or exclude them by a rule with None (the model itself: "
            "'^$')"
        )
