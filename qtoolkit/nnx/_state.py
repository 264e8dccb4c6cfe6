"""The state of wrapped layers: histories of magnitudes, keys, calibrated and learned scales."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from flax.errors import TraceContextError

from qtoolkit.nnx._function import PRODUCTS
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    AMAX,
    LEARNED,
    MOVING,
    PROBE,
    Planted,
    advance,
    as_float32,
    flow,
    lead_of,
    observe,
    probe_of,
    started,
    taken_over,
    uncalibrated,
    unstarted,
)


class _Statistic(nnx.BatchStat):
    """State of matmuls, which `nnx.split(model, nnx.Param, nnx.BatchStat)` therefore knows.

    Flax's error for filters that miss it prints the variable: the comment says what to write.
    """

    def __nnx_repr__(self) -> Iterator[Any]:
        head, *rest = super().__nnx_repr__()
        hint = "nnx.split(model, nnx.Param, nnx.BatchStat) takes it"
        yield dataclasses.replace(head, comment=f"{head.comment}; {hint}")
        yield from rest


class ScalingState(_Statistic):
    """Histories and keys: state that is saved with a model and never differentiated.

    It is an `nnx.BatchStat`: loops that carry statistics of batches carry it, too.

    Examples:
      >>> model = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
      >>> state = nnx.to_flat_state(nnx.state(model, qt.nnx.ScalingState))
      >>> [(path[-1], variable.get_value().shape) for path, variable in state]
      [('bad', ()), ('history', (3, 1024))]
    """


class Probe(_Statistic):
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

    def planted(self, zeros: jax.Array | None, *, has_probe: bool) -> Planted:
        """What the matmul is given, see `Program.run`."""
        arrays = self.arrays
        if not has_probe:
            arrays.pop(PROBE, None)
        return Planted(arrays, zeros, lead_of(arrays))

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
        """Raises if a scale has no value yet. Under `jit` nobody can look: NaN makes NaN."""
        values = {
            name: variable.get_value()
            for name, variable in self.variables.items()
            if name == AMAX or name in LEARNED
        }
        for name, value in values.items():
            is_known = not isinstance(value, jax.core.Tracer) and value.is_fully_addressable
            if not is_known or not np.isnan(np.asarray(value)).any():
                continue
            if name == AMAX:
                raise ValueError(
                    f"nnx: {self.path}: the layer is not calibrated, though its recipe has "
                    "Static() scaling; expected scales from a calibration: wrap the model with a "
                    "recipe without Static(), and write qtoolkit.nnx.freeze(wrapped, "
                    "qtoolkit.nnx.calibrate(wrapped, batches))"
                )
            raise ValueError(
                f"nnx: {self.path}: the learned scale of {name.split('_')[0]} has not been "
                "started; write qtoolkit.nnx.start_scales(wrapped, batch) before the optimizer is "
                "made"
            )

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


def value_and_grad(
    loss: Callable[..., Any],
    wrt: Any = nnx.Param,
    *,
    has_aux: bool = False,
    metrics: bool = False,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` for wrapped models: each call also updates delayed scales and keys.

        loss, grads = qtoolkit.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)

    `nnx.grad` and `nnx.value_and_grad` work as well: the forward pass then updates the histories of
    inputs and kernels, and cotangents have current scales; a warning says so. With `graph=False`
    they differentiate by every array of an argument: split the model, and pass parameters and state
    as two. Under `jax.grad` of a function that closes over the model all scales are current ones
    and no history is updated; a warning says so. Of a copy that `nnx.merge` makes, return the
    state, as for statistics of BatchNorm. The devices of `jax.pmap` and `jax.shard_map` share one
    history. Modules from `qtoolkit.linen.wrap` in `nnx.bridge.ToNNX` have current scales here: wrap
    the nnx model around them instead.

    A step with an infinity or a NaN in an operand or a cotangent does not change the histories of
    that matmul. Its state `bad` counts such steps, and those with an operand that is more than
    twice as large as the history by which it is scaled: without a `margin` such elements saturate.

    Args:
      loss: A function of the model and further arguments that returns a scalar or (scalar, aux).
      wrt: What to differentiate by, as a filter of nnx.
      has_aux: As in `nnx.value_and_grad`.
      metrics: Whether to measure what rounding did in this very step. The function then returns
        them as its third result: {"layers/0:0": {"lhs": {"saturated": ...}}}, by matmul and
        operand, with "saturated", "underflowed" and "bad", and "amax" and "scale", which may be up
        to 12.5 % too large if the matmul runs several times. The first three are shares of at most
        65,536 elements, evenly spaced, and of the largest finite one. Bad are elements that are not
        finite, and those that are beyond the format's largest value by more than a factor of 2.

    Returns:
      A function of (model, *args, **kwargs) that returns (value, gradients), or ((value, aux),
      gradients). The model is one `nnx.Module`; pass several as `nnx.List([...])` or
      `nnx.Dict(...)`. Gradients hold what `wrt` selects and no probes, so they can be clipped by
      their global norm or averaged like those of the plain model.

    Raises:
      TypeError: `wrt` is no filter but the number of an argument, or a `nnx.DiffState`.

    Raises (when it is called):
      TypeError: The model is no `nnx.Module`; `wrt` selects kernels of a model from `quantize`,
        which have no derivative.
      ValueError: `wrt` selects nothing.

    Examples:
      >>> model = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
      >>> def loss(model, x):
      ...     return model(x).mean()
      >>> value, grads = qt.nnx.value_and_grad(loss)(model, jnp.asarray([[0.3, 448.0]]))
      >>> [f"{g:.4f}" for g in grads["kernel"][...].ravel()]  # x, of which 0.3 was rounded
      ['0.3125', '448.0000']
    """
    if isinstance(wrt, nnx.DiffState) or type(wrt) is int:
        raise TypeError(
            f"value_and_grad: wrt={wrt!r}, expected a filter of Variables of the model, the first "
            "argument of the loss, e.g. wrt=nnx.Param"
        )

    def function(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        _check_model(model)
        return flow.value_and_grad(_Step(model, wrt, has_aux), loss, args, kwargs, metrics=metrics)

    return function


class _Step:
    """A training step of an nnx model, see `products._flow.Step`."""

    package = "nnx"

    def __init__(self, model: nnx.Module, wrt: Any, has_aux: bool) -> None:
        self.model, self.has_aux = model, has_aux
        self.wanted = nnx.All(wrt, nnx.Not(_Statistic))
        trained = nnx.state(model, self.wanted)
        if not trained:
            raise ValueError(
                f"value_and_grad: wrt={wrt!r} selects nothing that {type(model).__name__} trains, "
                "expected a filter of its Variables, e.g. wrt=nnx.Param"
            )
        self.trained = nnx.to_pure_dict(trained)

    def called(self, loss: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from qtoolkit.nnx._call import bound_function  # it imports this file

        return bound_function(loss, self.model, args, kwargs)

    def differentiated(
        self, loss: Callable[..., Any], zeros: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any, Any, Any]:
        both = nnx.DiffState(0, nnx.Any(self.wanted, Probe))
        # `compat`: in the graph mode, whatever mode the user has set for nnx.
        graded = nnx.compat.value_and_grad(loss, argnums=(both, 1), has_aux=self.has_aux)
        value, (found, rows) = graded(self.model, zeros, *args, **kwargs)
        probes, grads = nnx.split_state(found, Probe, ...)
        return value, grads, probes, rows

    def finished(self, value: Any, grads: Any, probes: Any) -> tuple[Any, ...]:
        roll(self.model, probes)
        return value, grads


def _check_model(model: Any) -> None:
    if isinstance(model, nnx.Pytree):
        return
    parts = tuple(model) if isinstance(model, tuple | list) else ()
    what = "pass several models as one, nnx.List([...]) or nnx.Dict(...), which the loss gets"
    if isinstance(model, linen.Module):
        what = "use qtoolkit.linen.value_and_grad"
    elif any(isinstance(part, nnx.GraphDef) for part in parts):
        what = "write nnx.merge(*model)"
    raise TypeError(
        f"value_and_grad: model has type {type(model).__name__}, expected an nnx.Module; {what}"
    )


def roll(model: nnx.Module, probes: Any) -> None:
    """Updates histories and keys after a step, from the gradients of the model's probes.

    `value_and_grad` calls it. Call it yourself in training loops that differentiate by themselves,
    or that add up micro-batches.

    Args:
      model: A model from `wrap`; its histories and keys are changed.
      probes: A state with the gradients of its `Probe` variables; or their sum, or mean, over
        several micro-batches.

    Raises:
      TypeError: `probes` is no `nnx.State`.
      ValueError: The model has delayed scales, and `probes` has a gradient for none of them.

    Examples:
      >>> model = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
      >>> wrt = nnx.DiffState(0, nnx.Any(nnx.Param, qt.nnx.Probe))
      >>> grads = nnx.grad(lambda model: model(jnp.full((1, 2), 448.0)).sum(), argnums=wrt)(model)
      >>> qt.nnx.roll(model, nnx.filter_state(grads, qt.nnx.Probe))
      >>> bad, history = jax.tree.leaves(nnx.state(model, qt.nnx.ScalingState))
      >>> float(history.max())  # 448, known to 12.5 %
      480.0
    """
    differentiate = (
        "differentiate by probes, too, with wrt = nnx.DiffState(0, nnx.Any(nnx.Param, "
        "qtoolkit.nnx.Probe)), or use qtoolkit.nnx.value_and_grad, which updates"
    )
    if not isinstance(probes, nnx.State):
        raise TypeError(
            f"roll: probes has type {type(probes).__name__}, expected an nnx.State with the "
            f"gradients of the model's probes; {differentiate}"
        )
    histograms = {tuple(path): probe[...] for path, probe in nnx.to_flat_state(probes)}
    products = [
        ((*path, "probe"), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, ProductState)
    ]
    delayed = [path for path, product in products if hasattr(product, "history")]
    # Without this, gradients of parameters alone would update no history, silently.
    if delayed and not any(path in histograms for path in delayed):
        raise ValueError(
            f"roll: probes has no gradient for any of the {len(delayed)} delayed matmuls of "
            f"{type(model).__name__}, expected one for each; {differentiate}"
        )
    for path, product in products:
        product.roll(histograms.get(path))
