"""What the training benchmark trains: by JAX and Flax, and by peers.

qwix intercepts the products of a Flax nnx model. Flax's own fp8_ops (delayed scaling) are arguments
of linen layers. All round to E4M3 forward and to E5M2 in gradients, as `wrap` does.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from _language_model import CONTEXT, Block, ByteTransformer, bits_per_byte
from flax import linen, nnx

import qtoolkit as qt

TRANSFORM = optax.adamw(1e-4)


class Running:
    """A step, called again and again on what it returned."""

    def __init__(self, step: "Step") -> None:
        self.jitted, self.arguments = jax.jit(step.function), step.arguments

    def __call__(self) -> jax.Array:
        self.arguments, value = self.jitted(*self.arguments)
        return value


class Step(NamedTuple):
    """A pure training step: of `arguments`, to the next ones and the loss."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def nnx_step(model: nnx.Module, loss: Callable[..., jax.Array], batch: jax.Array) -> Step:
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = in_dtype_of(batch, params)

    def step(params: Any, rest: Any, state: Any) -> Any:
        model = nnx.merge(graph, params, rest)
        # It updates delayed scales and keys too; without them it is `nnx.value_and_grad`.
        value, grads = qt.nnx.value_and_grad(loss)(model, batch)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        updates, state = TRANSFORM.update(grads, state, params)
        return (optax.apply_updates(params, updates), rest, state), value

    return Step(step, (params, rest, TRANSFORM.init(params)))


def linen_step(module: linen.Module, batch: jax.Array) -> Step:
    """What fp8_ops keep of amaxes and scales is overwritten by its gradient."""
    params = dict(jax.jit(module.init)(jax.random.key(0), batch))
    rest = {name: params.pop(name) for name in list(params) if name != "params"}

    def step(params: Any, rest: Any, state: Any) -> Any:
        def of(variables: Any) -> jax.Array:
            return jnp.mean((module.apply(variables, batch) - 1) ** 2)

        value, grads = jax.value_and_grad(of, allow_int=True)({"params": params, **rest})
        updates, state = TRANSFORM.update(grads.pop("params"), state, params)
        return (optax.apply_updates(params, updates), grads, state), value

    params = in_dtype_of(batch, params["params"])
    return Step(step, (params, rest, TRANSFORM.init(params)))


def in_dtype_of(batch: jax.Array, params: Any) -> Any:
    """Parameters as narrow as what they meet; bytes leave them as they are."""
    if not jnp.issubdtype(batch.dtype, jnp.floating):
        return params
    return jax.tree.map(lambda p: p.astype(batch.dtype), params)


def distance_to_one(model: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


class NnxStack(nnx.Module):
    """Blocks alone: nearly all of a step is matrix products."""

    def __init__(self, width: int, heads: int, blocks: int, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(blocks)])

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        for block in self.blocks:
            x = block(x, mask)
        return x


class LinenBlock(linen.Module):
    """As `Block` of `_language_model`."""

    width: int
    heads: int
    fp8: Any

    @linen.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        attention = linen.MultiHeadDotProductAttention(
            self.heads, qkv_dot_general_cls=self.fp8, out_dot_general_cls=self.fp8
        )
        x = x + attention(linen.LayerNorm()(x), mask=mask)
        up = linen.Dense(4 * self.width, dot_general_cls=self.fp8)(linen.LayerNorm()(x))
        return x + linen.Dense(self.width, dot_general_cls=self.fp8)(linen.gelu(up))


class LinenStack(linen.Module):
    """As `NnxStack`. `fp8` is Flax's class of products by its fp8_ops, or None."""

    width: int
    heads: int
    blocks: int
    fp8: Any = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = linen.make_causal_mask(x[..., 0])
        for _ in range(self.blocks):
            x = LinenBlock(self.width, self.heads, self.fp8)(x, mask)
        return x


def language_model(width: int, tokens: int) -> tuple[nnx.Module, Any, jax.Array]:
    # One byte more than the context: the last one is only predicted.
    windows = jax.random.randint(jax.random.key(1), (tokens // CONTEXT, CONTEXT + 1), 0, 256)
    model = ByteTransformer(width, layers=6, heads=4, rngs=nnx.Rngs(0))
    return model, bits_per_byte, windows.astype(jnp.uint8)


def by_qwix(model: nnx.Module, inputs: jax.Array) -> nnx.Module | None:
    """A copy whose products qwix quantizes; None where it is not installed."""
    if importlib.util.find_spec("qwix") is None:
        print("(no row of qwix: not installed; pip install '.[bench]')")
        return None
    import qwix

    rule = qwix.QtRule(
        module_path=".*",
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
    )
    return qwix.quantize_model(nnx.clone(model), qwix.QtProvider([rule]), inputs)
