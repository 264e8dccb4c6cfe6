"""The state of wrapped layers: histories of magnitudes, keys, calibrated and learned scales."""

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from qtoolkit.nnx._bridged import bridged_probes, bridged_state, is_bridged_probe, roll_bridged
from qtoolkit.products import Learned, Operand, Recipe
from qtoolkit.products.internal import State, check_trainable
from qtoolkit.scaling.internal import BUCKETS, rolled


class _Statistic(nnx.BatchStat):
    """State of products, which `nnx.split(model, nnx.Param, nnx.BatchStat)` therefore knows.

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
    """A learned offset, beside an `LsqScale`.

    Examples:
      >>> learned = qt.Operand("uint4", scaling=qt.products.Learned(offset=True))
      >>> recipe = qt.Recipe((learned, None), gradient=None)
      >>> model = qt.nnx.Fp8Linear(2, 1, rngs=nnx.Rngs(0), recipe=recipe)
      >>> qt.nnx.start_scales(model, jnp.asarray([[-0.25, 3.5]]))
      >>> jax.tree.leaves(nnx.state(model, qt.nnx.LsqOffset))
      [Array(-0.25, dtype=float32)]
    """


class Products(nnx.Module):
    """The states of the products in a module's own methods, as attributes named like the products.

    Not an `nnx.Dict`: a kernel may be called "keys" or "values", as methods of a dictionary are.
    """

    def __init__(self, states: dict[str, "ProductState"]) -> None:
        for name, state in states.items():
            setattr(self, name, state)


class ProductState(nnx.Module):
    """The state of one product.

    Attributes:
      recipe: The recipe of the product.
      history: float32[..., 3, steps], the largest magnitudes of lhs, rhs and the cotangent, the
        newest step first; absent if the recipe has no `Delayed` scaling.
      bad: uint32[...], the steps with an infinity or a NaN, which were left out.
      probe: float32[..., 3, buckets].
      amax: float32[..., 3], what calibration found, of lhs, rhs, and 0; NaN before `freeze`.
      scales, offsets: float32[...] each, for lhs and rhs, if these are learned.
      key: uint32[..., 2], an identity and a count of steps, for stochastic rounding.

    The leading axes belong to stacks of layers, as `nnx.vmap` makes them.
    """

    def __init__(self, recipe: Recipe, lead: tuple[int, ...], path: str) -> None:
        if recipe.is_delayed:
            self.history = ScalingState(jnp.zeros((*lead, 3, recipe.history), jnp.float32))
            self.bad = ScalingState(jnp.zeros(lead, jnp.uint32))
            self.probe = Probe(jnp.zeros((*lead, 3, BUCKETS), jnp.float32))
        if recipe.is_calibrated:
            unknown = [o is not None and o.is_calibrated for o in recipe.forward]
            with jax.debug_nans(False):  # no error: NaN says that an operand is not calibrated
                amax = jnp.where(jnp.array([*unknown, False]), jnp.float32(jnp.nan), 0)
                self.amax = ScalingState(jnp.broadcast_to(amax, (*lead, 3)))
        if any(recipe.learned):
            self.scales = nnx.List([_started(LsqScale, o, lead) for o in recipe.forward])
            self.offsets = nnx.List([_started(LsqOffset, o, lead) for o in recipe.forward])
        if recipe.is_stochastic:
            identity = np.arange(int(np.prod(lead, dtype=int)), dtype=np.uint32).reshape(lead)
            identity = identity + np.uint32(zlib.crc32(path.encode()))
            self.key = ScalingState(jnp.stack([identity, jnp.zeros_like(identity)], axis=-1))
        self.recipe = recipe  # the last one: now it is complete

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "recipe") and not hasattr(self, name):
            raise ValueError(
                f"nnx.update: the state has {name} for a product whose recipe keeps none, expected "
                "the state of a model wrapped by the same recipe; wrap the model by the recipe of "
                "the state, or take the rest of it: nnx.filter_state(state, nnx.Not(nnx.Any("
                "qtoolkit.nnx.ScalingState, qtoolkit.nnx.Probe)))"
            )
        super().__setattr__(name, value)

    def go_on(self, was: "ProductState") -> None:
        """Takes over the state `was` that the product had under another recipe, where it is valid.

        A history holds magnitudes of the arrays before rounding, so it is copied if it has the same
        number of steps. Calibrated and learned values are taken over only if the operand, with its
        format and transform, is the same; learned scales are shared, as parameters are. The count
        of steps in the key goes on, but the key's identity is that of the layer's new path.
        """
        kept = [name for name in vars(self) if hasattr(was, name)]
        if "history" in kept and self.history.shape == was.history.shape:
            self.history[...], self.bad[...] = was.history[...], was.bad[...]
        if "amax" in kept:
            pairs = zip(self.recipe.forward, was.recipe.forward, strict=True)
            is_same = jnp.array([*(one == other for one, other in pairs), False])
            is_known = is_same & jnp.isnan(self.amax[...]) & (was.amax[...] > 0)
            with jax.debug_nans(False):
                self.amax[...] = jnp.where(is_known, was.amax[...], self.amax[...])
        if "key" in kept:
            self.key[...] = self.key[...].at[..., 1].set(was.key[..., 1])
        for side, operand in enumerate(self.recipe.forward):
            if self.recipe.learned[side] and operand == was.recipe.forward[side]:
                self.scales[side], self.offsets[side] = was.scales[side], was.offsets[side]

    def state(self) -> State:
        """The state in the form that the product takes.

        The states of a whole stack of layers arrive here if a scan runs over something else than
        these layers. Then the product uses the largest magnitudes over the stack, and the probe of
        each layer gets what the product observes.
        """
        self._check()
        amax = probe = key = None
        if hasattr(self, "history"):
            history, probe = self.history[...], self.probe[...]
            amax = jnp.max(history, axis=-1)
            amax = jnp.max(amax.reshape(-1, 3), axis=0)
            probe = jnp.sum(probe.reshape(-1, *probe.shape[-2:]), axis=0)
        if hasattr(self, "amax"):
            amax = jnp.max(self.amax[...].reshape(-1, 3), axis=0)
            if not isinstance(amax, jax.core.Tracer) and bool(jnp.any(jnp.isnan(amax))):
                raise ValueError(
                    "nnx: a layer is not calibrated, though its recipe has Static() scaling; "
                    "expected scales from a calibration: wrap the model with a recipe without "
                    "Static(), and write qtoolkit.nnx.freeze(wrapped, qtoolkit.nnx.calibrate("
                    "wrapped, batches))"
                )
        if hasattr(self, "key"):
            key = self.key[...].reshape(-1, 2)[0]
        return State(amax, probe, key, learned=self._learned())

    def _check(self) -> None:
        """Raises if what a checkpoint or a loop has put here cannot be the state of this recipe."""
        steps = self.history.shape[-1] if hasattr(self, "history") else self.recipe.history
        if steps != self.recipe.history:
            raise ValueError(
                f"nnx: a product has a history of {steps} steps, expected {self.recipe.history}, "
                "as its recipe says: it is of a model wrapped by another recipe; wrap the model by "
                "that one, or restore it without its qtoolkit.nnx.ScalingState"
            )
        for name in ("bad", "key"):
            dtype = getattr(self, name).dtype if hasattr(self, name) else np.uint32
            if dtype != np.uint32:
                raise ValueError(
                    f"nnx: {name} of a product has dtype {dtype}, expected uint32: it was averaged "
                    "with the statistics of batches; average only nnx.All(nnx.BatchStat, nnx.Not("
                    "nnx.Any(qtoolkit.nnx.ScalingState, qtoolkit.nnx.Probe)))"
                )

    def _learned(self) -> Any:
        """((scale, offset) of lhs, (scale, offset) of rhs); for a whole stack, their means."""
        if not hasattr(self, "scales"):
            return None
        pairs = zip(self.scales, self.offsets, strict=True)
        lhs, rhs = (tuple(x if x is None else jnp.mean(x[...]) for x in pair) for pair in pairs)
        return lhs, rhs

    def roll(self, counts: jax.Array | None) -> None:
        """Updates history and key after a step; `counts` is the gradient of the probe, or None."""
        if counts is not None:
            self.history[...], self.bad[...] = rolled(self.history[...], self.bad[...], counts)
        if hasattr(self, "key"):
            self.key[...] = self.key[...] + jnp.array([0, 1], jnp.uint32)


def _started(kind: type[nnx.Param], operand: Operand | None, lead: tuple[int, ...]) -> Any:
    scaling = None if operand is None else operand.scaling
    if not isinstance(scaling, Learned) or (kind is LsqOffset and not scaling.offset):
        return None
    with jax.debug_nans(False):  # no error: NaN says that the scale is not started
        return kind(jnp.full(lead, jnp.nan, jnp.float32))


def value_and_grad(
    loss: Callable[..., Any], wrt: Any = nnx.Param, *, has_aux: bool = False
) -> Callable[..., Any]:
    """`nnx.value_and_grad` for wrapped models: each call also updates delayed scales and keys.

        loss, grads = qtoolkit.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)

    The state of modules from `qtoolkit.linen.wrap` inside `nnx.bridge.ToNNX` is updated, too.
    `nnx.grad` and `nnx.value_and_grad` work as well; products then scale by their own magnitudes,
    as `Current` does, and no history moves. A step with an infinity or a NaN in an operand or a
    cotangent changes no history of that product, and is counted in its `bad`.

    Args:
      loss: A function of the model and further arguments that returns a scalar or (scalar, aux).
      wrt: What to differentiate by, as a filter of nnx.
      has_aux: As in `nnx.value_and_grad`.

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
        wanted = nnx.All(wrt, nnx.Not(nnx.Any(_Statistic, bridged_state())))
        trained = nnx.state(model, wanted)
        if not trained:
            raise ValueError(
                f"value_and_grad: wrt={wrt!r} selects nothing that {type(model).__name__} trains, "
                "expected a filter of its Variables, e.g. wrt=nnx.Param"
            )
        check_trainable(nnx.to_pure_dict(trained))
        probe = nnx.Any(Probe, is_bridged_probe)
        both = nnx.DiffState(0, nnx.Any(wanted, probe))
        graded = nnx.value_and_grad(loss, argnums=both, has_aux=has_aux)
        with bridged_probes(model):
            value, found = graded(model, *args, **kwargs)
        probes, grads = nnx.split_state(found, probe, ...)
        roll(model, probes)
        return value, grads

    return function


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
        "qtoolkit.nnx.Probe)), or use qtoolkit.nnx.value_and_grad, which rolls"
    )
    if not isinstance(probes, nnx.State):
        raise TypeError(
            f"roll: probes has type {type(probes).__name__}, expected an nnx.State with the "
            f"gradients of the model's probes; {differentiate}"
        )
    counts = {tuple(path): probe[...] for path, probe in nnx.to_flat_state(probes)}
    products = [
        ((*path, "probe"), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, ProductState)
    ]
    delayed = [path for path, product in products if hasattr(product, "history")]
    # Without this, gradients of parameters alone would leave every history as it is, silently.
    if delayed and not any(path in counts for path in delayed):
        raise ValueError(
            f"roll: probes has no gradient for any of the {len(delayed)} delayed products of "
            f"{type(model).__name__}, expected one for each; {differentiate}"
        )
    for path, product in products:
        product.roll(counts.get(path))
    roll_bridged(model, counts)
