"""Loss scaling for gradients of few exponent bits."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import GradientTransformation, GradientTransformationExtraArgs

from qtoolkit.casts.internal import FLOATS, exact_float32
from qtoolkit.optim._arguments import check_integer, check_transform, injected


class DynamicLossScaleState(NamedTuple):
    """The state of `dynamic_loss_scale`.

    Attributes:
      scale: float32 scalar, by which the loss of the next step is to be multiplied.
      good_steps: int32 scalar, steps since the scale last changed.
      skipped: int32 scalar, all steps that were skipped.
      inner: The state of the wrapped transform.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    inner: Any


def dynamic_loss_scale(
    tx: GradientTransformation,
    *,
    initial: float = 2.0**16,
    factor: float = 2.0,
    period: int = 2000,
    least: float = 1.0,
    largest: float = 2.0**24,
) -> GradientTransformationExtraArgs:
    """Run `tx` on gradients of a scaled loss; skip steps with an infinity or a NaN.

        tx = qtoolkit.optim.dynamic_loss_scale(optax.adamw(1e-3))
        state = tx.init(params)
        scale = qtoolkit.optim.loss_scale(state)
        grads = jax.grad(lambda p: loss(p).astype("float32") * scale)(params)
        updates, state = tx.update(grads, state, params)   # grads are divided by the scale
        params = optax.apply_updates(params, updates)

    Make it the outermost transform. Then clipping and moments see float32 gradients of the loss
    itself, and a skipped step changes none of their state, not even counts. A skipped step
    halves the scale; `period` good steps in a row double it. Scales are powers of two, so dividing
    by one changes only exponents: if the scale makes nothing overflow, only those steps are skipped
    in which the gradients of the loss itself are not finite.
    `optax.MultiSteps` belongs inside, as `MultiSteps(tx, k).gradient_transformation()`: outside,
    its mean would stay NaN for ever.

    Args:
      tx: Any transform of gradients: the whole chain.
      initial: The first scale.
      factor: The number by which the scale is multiplied or divided.
      period: How many good steps it takes until the scale grows.
      least, largest: The bounds of the scale.

    Returns:
      A transform whose state is a `DynamicLossScaleState`. Updates have the dtypes that `tx` gives
      for float32 gradients.

    Raises:
      ValueError: A scale or a factor is no power of two, or not in order; `period` below 1.
      TypeError: `tx` is no transform.

    Source: arXiv:1710.03740, section 3.2; the numbers are those of torch.amp.GradScaler.

    Examples:
      >>> tx = qt.optim.dynamic_loss_scale(optax.sgd(1.0), initial=1024.0)
      >>> params = jnp.asarray([1.0])
      >>> state = tx.init(params)
      >>> for scaled in (512.0, jnp.inf):  # gradients of the scaled loss
      ...     updates, state = tx.update(jnp.asarray([scaled]), state, params)
      ...     print(updates, state.scale, state.skipped)
      [-0.5] 1024.0 0
      [0.] 512.0 1
    """
    where = "dynamic_loss_scale"
    check_transform(where, tx)
    numbers = {"initial": initial, "factor": factor, "least": least, "largest": largest}
    for name, value in numbers.items():
        _check_power(where, name, value)
    check_integer(where, "period", period, 1, 2**31 - 1)
    if factor <= 1 or not least <= initial <= largest:
        raise ValueError(
            f"{where}: factor={factor}, least={least}, initial={initial}, largest={largest}; "
            "expected a factor above 1, and scales in rising order"
        )
    extended = optax.with_extra_args_support(tx)

    def init(params: Any) -> DynamicLossScaleState:
        # Two separate arrays: JAX cannot donate a buffer that occurs twice.
        good, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return DynamicLossScaleState(jnp.float32(initial), good, skipped, tx.init(params))

    def update(
        updates: Any, state: DynamicLossScaleState, params: Any = None, **extra: Any
    ) -> tuple[Any, DynamicLossScaleState]:
        is_good = jnp.array(True)
        for gradient in jax.tree.leaves(updates):
            if jnp.issubdtype(gradient.dtype, jnp.inexact):
                is_good &= jnp.all(jnp.isfinite(gradient))
        unscaled = jax.tree.map(lambda g: _divided(g, state.scale), updates)
        steps, inner = extended.update(unscaled, state.inner, params, **extra)

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(is_good, new, old)

        grows = state.good_steps + 1 >= period
        grown = jnp.where(grows, jnp.minimum(state.scale * factor, largest), state.scale)
        shrunk = jnp.maximum(state.scale / factor, least)
        return jax.tree.map(lambda u: chosen(u, jnp.zeros_like(u)), steps), DynamicLossScaleState(
            chosen(grown, shrunk),
            chosen(jnp.where(grows, 0, state.good_steps + 1), jnp.zeros_like(state.good_steps)),
            state.skipped + chosen(jnp.int32(0), jnp.int32(1)),
            jax.tree.map(chosen, inner, state.inner),
        )

    return GradientTransformationExtraArgs(init, update)


def loss_scale(state: Any) -> jax.Array:
    """The scale by which to multiply the loss, from any state that holds that of one scaler.

        scaler = qtoolkit.optim.dynamic_loss_scale(optax.adamw(1e-3))
        tx = optax.masked(scaler, True)                    # or optimizer.opt_state of nnx
        state = tx.init(params)
        scale = qtoolkit.optim.loss_scale(state)           # 65536.0

    Args:
      state: What `init` or `update` of `dynamic_loss_scale` returned, or of anything around it:
        `optax.chain`, `MultiSteps`, the `opt_state` of `nnx.Optimizer` or of a TrainState.

    Returns:
      float32 scalar.

    Raises:
      ValueError: There is no such state in `state`, or more than one.

    Examples:
      >>> scaler = qt.optim.dynamic_loss_scale(optax.adam(1e-3))
      >>> state = optax.masked(scaler, True).init(jnp.ones(2))
      >>> qt.optim.loss_scale(state)
      Array(65536., dtype=float32)
    """
    nodes = jax.tree.leaves(state, is_leaf=_is_scaler)
    scalers = [node for node in nodes if _is_scaler(node)]
    if len(scalers) != 1:
        raise ValueError(
            f"loss_scale: the state holds {len(scalers)} states of dynamic_loss_scale, expected "
            "one: put dynamic_loss_scale(...) around the whole optimizer"
        )
    (scale,) = jax.tree.leaves(scalers[0].scale)  # inside a Variable where Flax keeps the state
    return scale


def _is_scaler(node: Any) -> bool:
    return isinstance(node, DynamicLossScaleState)


def _divided(g: jax.Array, scale: jax.Array) -> jax.Array:
    if not jnp.issubdtype(g.dtype, jnp.floating):
        return g
    x = exact_float32(g) if g.dtype in FLOATS else g.astype(jnp.promote_types(g, jnp.float32))
    return x * (1 / scale)  # exact: powers of two


def _check_power(where: str, name: str, value: Any) -> None:
    if isinstance(value, jax.Array):
        raise TypeError(injected(where, name))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 2.0**-64 <= value <= 2.0**64 or math.frexp(value)[0] != 0.5:
        raise ValueError(
            f"{where}: {name}={value!r}, expected a power of two from 2**-64 to 2**64, e.g. "
            f"{np.float32(2.0**15):g}"
        )
