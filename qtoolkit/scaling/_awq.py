"""AWQ: factors for the channels of a matmul, searched on the error of its result."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit import formats
from qtoolkit.casts.internal import (
    NEAREST,
    check_differentiable,
    exact_float32,
    nearest_power_of_two,
)
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.scaling._blocks import scale_shape
from qtoolkit.scaling._contraction import Contraction, check_inputs, squared_error
from qtoolkit.scaling._engine import block_values
from qtoolkit.scaling._find_scales import find_scales
from qtoolkit.scaling._hessian import Hessian

Array = jax.Array
_LIMIT = np.float32(2.0**20)


def awq_factors(
    w: Array | Sequence[Array],
    spec: SpecLike,
    hessian: Hessian,
    *,
    axis: int | tuple[int, ...] = 0,
    grid: int = 20,
    power_of_two: bool = False,
) -> Array:
    """Search AWQ's factors: channels with large inputs are multiplied before they are rounded.

    The factors are mean |x| to a power between 0 and 1, centred on 1. The power is the one with the
    least squared error of `(x / factors) @ rounded(factors * w)`, found from H, so that no inputs
    need be stored. `equalize` applies them: `x, w = equalize(x, w, factors)`.

    Args:
      w: The kernel, float32, float16 or bfloat16; or several that share their inputs, such as those
        of queries, keys and values, for which the errors are added.
      spec, axis: As in `gptq`.
      hessian: Of the inputs.
      grid: How many powers are tried; the first is 0, factors of 1.
      power_of_two: Whether to round factors to powers of two. Then `equalize` rounds nothing.

    Returns:
      [channels], float32, positive. 1 for channels whose inputs were all zeros.

    Raises:
      TypeError, ValueError: As `gptq`; or `grid` is less than 2.

    Source: arXiv:2306.00978 (AWQ), section 3.2, equations 4 and 5.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (512, 32)) * jnp.ones(32).at[3].set(30.0)
      >>> w = jax.random.normal(jax.random.key(1), (32, 8))
      >>> hessian = qt.scaling.Hessian.of(32).observe(x)
      >>> factors = qt.scaling.awq_factors(w, "int4_group32", hessian)
      >>> bool(factors[3] > 2 * jnp.median(factors))
      True
    """
    kernels = tuple(w) if isinstance(w, list | tuple) else (w,)
    if not kernels:
        raise ValueError("awq_factors: there are no kernels, expected one or more")
    if isinstance(grid, bool) or not isinstance(grid, int) or grid < 2:
        raise ValueError(f"awq_factors: grid={grid!r}, expected an integer of 2 or more")
    resolved = formats.spec(spec)
    arrays, hows = [], []
    for kernel in kernels:
        array = lax.stop_gradient(check_differentiable("awq_factors", kernel, wide=False))
        how = Contraction.of("awq_factors", array.shape, axis)
        hows.append((how.along(resolved, array.shape), how))
        arrays.append(array)
    return searched("awq_factors", arrays, hessian, hows, grid, power_of_two)


def searched(
    where: str,
    kernels: Sequence[Array],
    hessian: Hessian,
    hows: Sequence[tuple[BlockFormat, Contraction]],
    grid: int = 20,
    power_of_two: bool = False,
) -> Array:
    """`awq_factors` for kernels whose axes are known, each with its format."""
    for w, (spec, how) in zip(kernels, hows, strict=True):
        scale_shape(where, spec, w.shape)
        check_inputs(where, w, hessian, how)
    return _searched(tuple(kernels), hessian, tuple(hows), grid, bool(power_of_two))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _searched(
    kernels: tuple[Array, ...],
    hessian: Hessian,
    hows: tuple[tuple[BlockFormat, Contraction], ...],
    grid: int,
    power_of_two: bool,
) -> Array:
    how, shape = hows[0][1], kernels[0].shape
    sums = how.pooled(exact_float32(hessian.magnitude), shape)
    mean = sums / jnp.maximum(jnp.sum(hessian.rows), 1).astype(jnp.float32)
    total = hessian.total.reshape(-1, *hessian.total.shape[-2:])

    def factors_of(power: Array) -> Array:
        # In logarithms, so that neither the power nor the centre overflows.
        logs = jnp.where(mean > 0, power * jnp.log2(jnp.where(mean > 0, mean, 1)), 0)
        is_live = mean > 0
        top = jnp.max(logs, -1, keepdims=True, where=is_live, initial=-np.inf)
        low = jnp.min(logs, -1, keepdims=True, where=is_live, initial=np.inf)
        centre = jnp.where(top >= low, (top + low) / 2, 0)
        factors = jnp.clip(jnp.exp2(logs - centre), 1 / _LIMIT, _LIMIT)
        factors = jnp.where(is_live & (power > 0), factors, 1)
        return nearest_power_of_two(factors) if power_of_two else factors

    def loss_of(power: Array) -> Array:
        factors = factors_of(power)
        return sum(
            (_loss(w, factors, total, *how) for w, how in zip(kernels, hows, strict=True)),
            jnp.zeros((), total.dtype),
        )

    powers = jnp.linspace(0, 1, grid, dtype=jnp.float32)
    losses = lax.map(loss_of, powers)
    return factors_of(powers[jnp.argmin(losses)])


def _loss(w: Array, factors: Array, total: Array, spec: BlockFormat, how: Contraction) -> Array:
    wide, factors = exact_float32(w), how.factors(factors, w.shape)
    scaled = wide * factors
    scales, nonzero = find_scales(scaled, spec)
    values = block_values(scaled, spec, NEAREST, scales, nonzero)
    return squared_error(how.matrices(values / factors - wide), total)
