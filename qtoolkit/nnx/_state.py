"""The state of wrapped layers: histories of magnitudes, keys, calibrated and learned scales."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError

from qtoolkit.nnx._function import PRODUCTS
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    AMAX,
    LEARNED,
    MOVING,
    PROBE,
    advance,
    as_float32,
    check_started,
    lead_of,
    observe,
    probe_of,
    started,
    taken_over,
    uncalibrated,
    unstarted,
)


class Statistic(nnx.BatchStat):
    """State of matmuls, which `nnx.split(model, nnx.Param, nnx.BatchStat)` therefore knows.

    Flax's error for filters that miss it prints the variable: the comment says what to write.
    """

    def __nnx_repr__(self) -> Iterator[Any]:
        head, *rest = super().__nnx_repr__()
        hint = "nnx.split(model, nnx.Param, nnx.BatchStat) takes it"
        yield dataclasses.replace(head, comment=f"{head.comment}; {hint}")
        yield from rest


class ScalingState(Statistic):
    """Histories and keys: state that is saved with a model and never differentiated.

    It is an `nnx.BatchStat`: loops that carry statistics of batches carry it, too.

    Examples:
      >>> model = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
      >>> state = nnx.to_flat_state(nnx.state(model, qt.nnx.ScalingState))
      >>> [(path[-1], variable.get_value().shape) for path, variable in state]
      [('bad', ()), ('history', (3, 1024))]
    """


class Probe(Statistic):
    """Zeros, whose gradient carries what a step observed. Neither read nor trained.

    Examples:
      >>> model = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
      >>> len(jax.tree.leaves(nnx.state(model, qt.nnx.Probe)))
      1
      >>> graph, params, rest = nnx.split(model, nnx.Param, ...)  # probes are no parameters
      >>> sorted(params)
      ['bias', 'kernel']
    """


class LsqScale(nnx.Param):
    """A learned scale: a parameter, which trains with the model. NaN until `start_scales`.

    Examples:
      >>> model = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.int4_lsq)
      >>> jax.tree.leaves(nnx.state(model, qt.nnx.LsqScale))
      [Array(nan, dtype=float32), Array(nan, dtype=float32)]
      >>> issubclass(qt.nnx.LsqScale, nnx.Param)
      True
    """


class LsqOffset(nnx.Param):
    """A learned offset, which belongs to an `LsqScale`.

    Examples:
      >>> learned = qt.Operand("uint4", scaling=qt.products.Learned(offset=True))
      >>> recipe = qt.Recipe((learned, None), gradient=None)
      >>> model = qt.nnx.Fp8Linear(2, 1, rngs=nnx.Rngs(0), recipe=recipe)
      >>> qt.nnx.start_scales(model, jnp.asarray([[-0.25, 3.5]]))
      >>> jax.tree.leaves(nnx.state(model, qt.nnx.LsqOffset))
      [Array(-0.25, dtype=float32)]
    """


class Products(nnx.Module):
    """The states of the matmuls in a module's own methods, as attributes named like the matmuls.

    Not an `nnx.Dict`: a kernel may be called "keys" or "values", as methods of a dictionary are.
    """

    def __init__(self, states: dict[str, "ProductState"]) -> None:
        for name, state in states.items():
            setattr(self, name, state)


class ProductState(nnx.Module):
    """The state of one matmul.

    Attributes:
      recipe: The recipe of the matmul.
      history: float32[..., 3, steps], the largest magnitudes of lhs, rhs and the cotangent, the
        newest step first; absent if the recipe has no `Delayed` scaling.
      bad: uint32[...], the steps with an infinity or a NaN, which the history skips, and those with
        an array that was more than twice as large as its history, by which it was scaled.
      probe: float32[..., 3, buckets].
      amax: float32[..., 3], what calibration found, of lhs, rhs, and 0; NaN before `freeze`.
      scales, offsets: float32[...] each, for lhs and rhs, if these are learned.
      key: uint32[..., 2], an identity and a count of steps, for stochastic rounding.
      step: uint32[...], a count of steps, for a warm-up.

    The leading axes belong to stacks of layers, as `nnx.vmap` makes them.
    """

    def __init__(self, recipe: Recipe, lead: tuple[int, ...], path: str) -> None:
        self.path = path
        state = started(recipe, path, lead)
        for name, value in {**state, **uncalibrated(recipe, lead)}.items():
            setattr(self, name, ScalingState(value))
        if recipe.is_delayed:
            self.probe = Probe(probe_of(state))
        if any(recipe.learned):
            learned = unstarted(recipe, lead)
            self.scales, self.offsets = (
                nnx.List([kind(learned[n]) if n in learned else None for n in LEARNED[first::2]])
                for first, kind in enumerate((LsqScale, LsqOffset))
            )
        self.recipe = recipe  # the last one: now it is complete

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "recipe") and not hasattr(self, name):
            raise ValueError(
                f"nnx.update: the state has {name} for a matmul whose recipe keeps none, expected "
                "the state of a model wrapped by the same recipe; wrap the model by the recipe of "
                "the state, or take the rest of it: nnx.filter_state(state, nnx.Not(nnx.Any("
                "qtoolkit.nnx.ScalingState, qtoolkit.nnx.Probe)))"
            )
        super().__setattr__(name, value)

    @property
    def variables(self) -> dict[str, nnx.Variable[Any]]:
        """Its variables by the names of `products._states`."""
        found = {n: getattr(self, n) for n in (*MOVING, PROBE, AMAX) if hasattr(self, n)}
        pairs = zip(getattr(self, "scales", ()), getattr(self, "offsets", ()), strict=True)
        learned = dict(zip(LEARNED, (x for pair in pairs for x in pair), strict=False))
        return found | {name: x for name, x in learned.items() if x is not None}

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """Its arrays, of float32 also if somebody has cast all floats of the model."""
        return as_float32({name: variable[...] for name, variable in self.variables.items()})

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of its arrays, which belong to stacks of layers."""
        arrays = self.arrays
        return tuple(next(iter(arrays.values())).shape[: lead_of(arrays)])

    def write(self, state: Mapping[str, jax.Array]) -> None:
        """Stores arrays in its variables, which nnx brings out of `nnx.jit`, `nnx.grad`, ..."""
        variables = self.variables
        for name, value in state.items():
            before = variables[name].get_value()
            if value is not before:
                # Not `[...] = value`: it asks a tracer for its sharding, and JAX searches the whole
                # trace for the message of the error. Six blocks were traced in 1.6 s, not 0.8 s.
                variables[name].set_value(value.astype(before.dtype))

    @property
    def is_writable(self) -> bool:
        """Whether nnx lets its variables be written in this trace: not what it closes over."""
        try:
            for variable in self.variables.values():
                variable.set_value(variable.get_value())
        except TraceContextError:
            return False
        return True

    def check_started(self) -> None:
        values = {name: variable.get_value() for name, variable in self.variables.items()}
        check_started(f"nnx: {self.path}", values)

    def take_over(self, was: "ProductState") -> None:
        """Takes over the state that the matmul had under another recipe, where it is valid.

        Learned scales are shared, as parameters are.
        """
        self.write(taken_over(self.recipe, self.arrays, was.recipe, was.arrays))
        for side, operand in enumerate(self.recipe.forward):
            if self.recipe.learned[side] and operand == was.recipe.forward[side]:
                self.scales[side], self.offsets[side] = was.scales[side], was.offsets[side]

    def roll(self, histograms: jax.Array | None) -> None:
        """Updates history and key after a step; takes the gradient of the probe, or None."""
        self.write(advance(observe(self.arrays, histograms)))


def product_states(layer: Any) -> dict[str, ProductState]:
    """The states of a module's matmuls, by name."""
    kept = vars(layer).get(PRODUCTS)
    states = {} if kept is None else vars(kept)
    return {name: state for name, state in states.items() if isinstance(state, ProductState)}
