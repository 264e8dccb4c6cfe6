"""Dequantizes codes by their scales, with a derivative by the scales."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from qtoolkit.casts.internal import FLOATS, linear_in_dtype, linear_product, spread
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling._blocks import Blocks
from qtoolkit.scaling._elements import Scales
from qtoolkit.scaling._engine import dequantized
from qtoolkit.scaling._scales import differentiable_scale

_differentiable = jax.custom_jvp(dequantized, nondiff_argnums=(2, 3, 4))


def _dequantize_jvp(
    blocks: Blocks, spec: BlockFormat, dtype: Any, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (codes, scales), (_, dots) = primals, tangents
    y = _differentiable(codes, scales, blocks, spec, dtype)
    floats = {"scale": scales.scale, "tensor_scale": scales.tensor_scale}
    moving = {n: a for n, a in floats.items() if not isinstance(getattr(dots, n), SymbolicZero)}
    moving = {name: a for name, a in moving.items() if a is not None}
    for name, a in moving.items():
        if a.dtype not in FLOATS:
            raise TypeError(
                f"dequantize: {name} has dtype {a.dtype}, which has no derivative; learn a float32 "
                "scale, e.g. with qtoolkit.gradients.lsq"
            )

    def product(moving: dict[str, jax.Array]) -> jax.Array:
        q = dequantized(codes, Scales(None, None, scales.zero_point), blocks, spec, jnp.float32)
        scale = differentiable_scale(
            moving.get("scale", scales.scale),
            moving.get("tensor_scale", scales.tensor_scale),
            spec,
        )
        view = blocks.split(q)
        scale = spread(blocks.spread(scale), view)
        return blocks.join(linear_product(view, scale, zero_absorbs=False))

    _, y_dot = jax.jvp(product, (moving,), ({name: getattr(dots, name) for name in moving},))
    return y, linear_in_dtype(y_dot, y.dtype)


_differentiable.defjvp(_dequantize_jvp, symbolic_zeros=True)
dequantize = jax.jit(_differentiable, static_argnums=(2, 3, 4))
