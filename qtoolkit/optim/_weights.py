"""Weights of few bits: rounded stochastically, or with float32 copies in the state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import GradientTransformation, GradientTransformationExtraArgs

from qtoolkit.casts import round_to_format
from qtoolkit.casts.internal import (
    FLOATS,
    check_holds,
    exact_float32,
    in_dtype,
    serializable,
)
from qtoolkit.formats import Format, FormatLike, format
from qtoolkit.optim._arguments import check_integer, check_transform, key_words, leaf_path

_HALVES = FLOATS[1:]


@serializable
class StochasticRoundState(NamedTuple):
    """The state of `stochastic_round_updates`: uint32 scalars, a seed and the number of updates."""

    seed: jax.Array
    step: jax.Array


def stochastic_round_updates(
    fmt: FormatLike | None = None, *, seed: int = 0
) -> GradientTransformationExtraArgs:
    """Change updates `u` such that weights `p` become `p + u`, stochastically rounded.

    Make it the last transform of a chain. With rounding to nearest, an update below 2**-9 leaves a
    bfloat16 weight of 1 unchanged. Rounded stochastically, the weight moves by 2**-7 now and then,
    and by the update on average.

        tx = optax.chain(optax.adamw(1e-3), qtoolkit.optim.stochastic_round_updates())
        state = tx.init(params)                            # bfloat16
        updates, state = tx.update(grads, state, params)   # float32
        params = optax.apply_updates(params, updates)      # bfloat16, exactly what was drawn

    `optax.apply_updates(params, updates)` gives `round_to_format(p + u, fmt,
    rounding="stochastic")` bit for bit, where u is the update in float32 and p + u their float32
    sum: the difference to p is exact, or so small that it rounds away. Numbers below 2**-126, which
    XLA's addition flushes to 0, are 0. Infinities and NaN stay unchanged.

    Args:
      fmt: What weights are rounded to, a format or any spelling of one that their dtype holds: with
        "e4m3fn" bfloat16 weights stay on the values of E4M3. None: the dtype of each weight;
        float32 weights then are updated as ever.
      seed: 0 to 2**32 - 1, of all random bits, with step, path and element. Under `vmap` and in
        `shard_map` give each its own, as `state._replace(seed=...)`.

    Returns:
      A transform whose state is a `StochasticRoundState`. Updates are float32, but for those of
      float32 weights where `fmt` is None, which stay as they are.

    Raises:
      ValueError: The dtype of a weight does not hold `fmt`; an unknown format or seed.
      TypeError: The update has no `params`, or they are of other types than float32, float16 and
        bfloat16, to which optax cannot add.

    Source: arXiv:2010.06192 (bfloat16 training by stochastic rounding).

    Examples:
      >>> params = jnp.ones(10_000, jnp.bfloat16)  # the next bfloat16 number is 1.0078
      >>> tx = optax.chain(optax.sgd(1.0), qt.optim.stochastic_round_updates())
      >>> updates, state = tx.update(jnp.full(10_000, -0.001), tx.init(params), params)
      >>> moved = optax.apply_updates(params, updates)
      >>> np.unique(moved), f"{np.float64(moved).mean():.4f}"
      (array([1, 1.00781], dtype=bfloat16), '1.0010')
    """
    where = "stochastic_round_updates"
    check_integer(where, "seed", seed, 0, 2**32 - 1)
    target = None if fmt is None else format(fmt)

    def init(params: Any) -> StochasticRoundState:
        jax.tree.map_with_path(lambda path, p: _target(where, path, p, target), params)
        return StochasticRoundState(jnp.uint32(seed), jnp.uint32(0))

    def update(
        updates: Any, state: StochasticRoundState, params: Any = None, **_: Any
    ) -> tuple[Any, StochasticRoundState]:
        _check_params(where, params)
        step = state.step + jnp.uint32(1)

        def rounded(path: Any, u: jax.Array, p: jax.Array) -> jax.Array:
            param_fmt = _target(where, path, p, target)
            if param_fmt is None:
                return u
            old = exact_float32(p)
            new = old + exact_float32(u.astype(jnp.float32) if u.dtype not in FLOATS else u)
            # By the path, so that the bits of a weight do not depend on the others in the tree.
            key = key_words(state.seed, step, leaf_path(path))
            weight = round_to_format(new, param_fmt, rounding="stochastic", key=key)
            return _difference(jnp.where(jnp.isfinite(new), weight, new), old)

        updates = jax.tree.map_with_path(rounded, updates, params)
        return updates, StochasticRoundState(state.seed, step)

    return GradientTransformationExtraArgs(init, update)


@serializable
class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
      master: The float32 weights; None where the weights themselves are float32.
      inner: The state of the wrapped transform.
    """

    master: Any
    inner: Any


def master_weights(tx: GradientTransformation) -> GradientTransformationExtraArgs:
    """Run `tx` on float32 copies of half-precision weights, and round the weights from them.

        tx = qtoolkit.optim.master_weights(optax.adamw(1e-3))
        state = tx.init(params)                            # bfloat16; state.master is float32
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)      # state.master, rounded to nearest

    `tx` sees float32 gradients and float32 weights; its moments are float32. Weights that were
    changed elsewhere are not taken over: the copies decide. Where one step takes a weight to less
    than 2**-16 of what it was, the weight may be off by 2**-24 of that until the next step.

    Args:
      tx: Any transform of gradients whose updates are added to weights: the whole chain.

    Returns:
      A transform whose state is a `MasterWeightsState`. Updates of half-precision weights are
      float32, others those of `tx`.

    Raises:
      TypeError: `tx` is no transform; the update has no `params`.

    Source: arXiv:1710.03740, section 3.1.

    Examples:
      >>> params = jnp.ones(1, jnp.bfloat16)  # the next bfloat16 number is 1.0078
      >>> tx = qt.optim.master_weights(optax.sgd(1.0))
      >>> state = tx.init(params)
      >>> for _ in range(8):  # bfloat16 alone would stay at 1
      ...     updates, state = tx.update(jnp.full(1, -0.001, jnp.bfloat16), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params, f"{state.master[0]:.4f}"
      (Array([1.00781], dtype=bfloat16), '1.0080')
    """
    check_transform("master_weights", tx)
    extended = optax.with_extra_args_support(tx)

    def init(params: Any) -> MasterWeightsState:
        master = jax.tree.map(lambda p: exact_float32(p) if _is_half(p) else None, params)
        return MasterWeightsState(master, tx.init(_full_precision(master, params)))

    def update(
        updates: Any, state: MasterWeightsState, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterWeightsState]:
        _check_params("master_weights", params)
        updates = jax.tree.map(lambda u: exact_float32(u) if _is_half(u) else u, updates)
        merged = _full_precision(state.master, params)
        steps, inner = extended.update(updates, state.inner, merged, **extra)

        def new(master: jax.Array | None, u: jax.Array) -> jax.Array | None:
            return None if master is None else optax.apply_updates(master, u)

        def difference(master: jax.Array | None, u: jax.Array, p: jax.Array) -> jax.Array:
            if master is None:
                return u
            return _difference(exact_float32(in_dtype(master, p.dtype)), exact_float32(p))

        master = jax.tree.map(new, state.master, steps, is_leaf=_is_none)
        updates = jax.tree.map(difference, master, steps, params, is_leaf=_is_none)
        return updates, MasterWeightsState(master, inner)

    return GradientTransformationExtraArgs(init, update)


def _difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """The number that, added to `old`, gives `new`, even if `new` is not finite."""
    # optax adds it in float32 and rounds to the dtype of the weight. The difference is exact where
    # new / old lies between 1/2 and 2 (Sterbenz). Else float32 rounds it by at most 2**-24 of the
    # larger one, which the rounding to 8 or 11 bits of a weight that is not much smaller absorbs.
    return jnp.where(jnp.isfinite(new), new - old, new)


def _full_precision(master: Any, params: Any) -> Any:
    return jax.tree.map(lambda m, p: p if m is None else m, master, params, is_leaf=_is_none)


def _is_none(node: Any) -> bool:
    return node is None


def _is_half(x: Any) -> bool:
    return getattr(x, "dtype", None) in _HALVES


def _check_params(where: str, params: Any) -> None:
    if params is None:
        raise TypeError(
            f"{where}: the update got no params, expected the weights; write "
            "tx.update(grads, state, params)"
        )


def _target(where: str, path: Any, p: Any, fmt: Format | None) -> Format | None:
    """The format to which a weight is rounded; None if its updates stay as they are."""
    dtype = getattr(p, "dtype", None)
    name = f"{where}: {leaf_path(path) or 'params'}"
    if dtype not in FLOATS:
        raise TypeError(
            f"{name}: dtype {dtype or type(p).__name__}, expected {', '.join(map(str, FLOATS))}: "
            "optax.apply_updates adds in these; exclude others with optax.masked, and hold 8-bit "
            "weights as values, e.g. bfloat16 with fmt='e4m3fn'"
        )
    if fmt is None:
        return None if dtype == np.float32 else format(dtype)
    check_holds(name, fmt, dtype)
    return fmt
