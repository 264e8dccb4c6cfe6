"""What derivatives keep of a rounded operand: its codes and scales."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from qtoolkit.casts.internal import (
    UNCLAMPED,
    codes_of,
    codes_through_float16,
    dtype_from_codes,
    elementwise,
    exact_float32,
    is_part_of_float16,
    to_stored,
    values_of,
)
from qtoolkit.formats import (
    E4M3FN,
    FloatFormat,
    Format,
    IntFormat,
    Overflow,
)
from qtoolkit.products._rounded import Rounded, Rounding
from qtoolkit.products._wire import gathered
from qtoolkit.products._zero_points import of_differences
from qtoolkit.scaling.internal import (
    Blocks,
    Scales,
)

Array = jax.Array

CODES = "qtoolkit_codes"  # for jax.checkpoint_policies.save_only_these_names


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedCodes:
    """A rounded operand as the forward product saves it for derivatives: 8-bit codes and scales.

    Attributes:
      codes: Codes of the format `container`, their axes in the order `order` where that is given.
      scales: As in `Rounded`.
      carrier: Zeros with the tangent of the operand. Codes are integers and have no tangent, so
        second derivatives flow through this array. It is a constant: compiled programs do not
        store it.
      how: How the operand was rounded.
      container: The format of the codes.
    """

    codes: Array
    scales: Scales
    carrier: Array
    how: Rounding = dataclasses.field(metadata={"static": True})
    container: Format = dataclasses.field(metadata={"static": True})
    order: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})


def in_place(codes: Array, order: tuple[int, ...] | None) -> Array:
    """`codes`, whose axes are in the order `order`, with their axes in place."""
    return codes if order is None else lax.transpose(codes, np.argsort(order))


def to_residual(
    operand: Rounded, x: Array, how: Rounding, contracted: tuple[int, ...] = ()
) -> SavedCodes | Rounded:
    """The form in which derivatives keep an operand that was rounded from `x`.

    Args:
      contracted: The axes over which the derivative sums.
    """
    fmt = codes_format(how)
    if fmt is None:
        return operand
    codes, order = operand.codes_for(contracted)
    if codes is None:
        codes = code_values(lax.stop_gradient(operand.q), fmt)
    codes = checkpoint_name(codes, CODES)
    scales = jax.tree.map(lambda scale: checkpoint_name(scale, CODES), operand.scales)
    return SavedCodes(codes, lax.stop_gradient(scales), _carrier(x), how, fmt, order)


@elementwise
def code_values(q: Array, fmt: Format) -> Array:
    """The codes of an array that holds values of `fmt`, infinities and NaNs.

    If the format has no infinity, infinities become NaN: either makes a sum non-finite. Formats
    without a NaN give a finite number for it; their scales must say so, see `poisoned`.
    """
    wide = exact_float32(q)
    # These formats would clamp an infinity. Others keep it or make it a NaN.
    if isinstance(fmt, IntFormat) or fmt.overflow is Overflow.MAX:
        wide = jnp.where(jnp.isinf(wide), np.float32(np.nan), wide)
    if is_part_of_float16(fmt):
        return codes_through_float16(wide, fmt).astype(fmt.code_dtype)
    return codes_of(wide, fmt, UNCLAMPED)


def poisoned(scale: Array, x: Array, blocks: Blocks, fmt: FloatFormat) -> Array:
    """Stored scales, with a NaN for each block in which `x` holds an infinity or a NaN.

    For elements whose format has neither: a matmul with such a block is still not finite.
    """
    is_bad = jnp.any(
        ~jnp.isfinite(exact_float32(blocks.split(x))), blocks.element_axes, keepdims=True
    )
    nan = to_stored(jnp.full_like(scale, np.nan, dtype=jnp.float32), fmt)
    return jnp.where(blocks.gather(is_bad), nan, scale)


def from_residual(saved: SavedCodes | Rounded) -> Rounded:
    """The rounded operand: the inverse of `to_residual`."""
    if isinstance(saved, Rounded):
        return saved
    how = saved.how
    assert how.operand is not None
    codes, scales = in_place(saved.codes, saved.order), saved.scales
    if (axis_name := how.operand.gather) is not None:
        axis = how.operand.gather_axis
        codes, scales = gathered((codes, scales), codes.shape, axis_name, axis)
    q = _restored(codes, scales, saved.carrier, how, saved.container)
    spec = of_differences(how.operand.spec)
    return Rounded(q, scales, spec, codes if how.makes_codes else None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _restored(codes: Array, scales: Scales, carrier: Array, how: Rounding, fmt: Format) -> Array:
    dtype = carrier.dtype
    if isinstance(fmt, FloatFormat) and fmt.dtype is not None and fmt.bits == 8:
        # One operation to compile, where `values_of` has seventeen; it runs a tenth slower.
        return dtype_from_codes(codes, fmt).astype(dtype)
    return values_of(codes, fmt, jnp.float32).astype(dtype)


@_restored.defjvp
def _restored_jvp(how: Rounding, fmt: Format, primals: Any, tangents: Any) -> tuple[Array, Array]:
    codes, scales, carrier = primals
    q = _restored(codes, scales, carrier, how, fmt)
    return q, how.scaled_tangent(carrier, tangents[2], scales).astype(q.dtype)


@jax.custom_jvp
def _carrier(x: Array) -> Array:
    return jnp.zeros_like(x)


@_carrier.defjvp
def _carrier_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _carrier(*primals), tangents[0]


def codes_format(how: Rounding) -> Format | None:
    """The format of the saved codes; None where the operand itself is saved."""
    return None if how.operand is None else _container(of_differences(how.operand.spec).element)


@functools.lru_cache
def _container(fmt: Format) -> Format | None:
    """A format of at most 8 bits with all values of `fmt` and a NaN: `fmt`, E4M3FN, or None."""
    if fmt.bits > 8:
        return None
    if fmt.has_nan:
        return fmt
    values = fmt.values()
    return E4M3FN if np.isin(values, E4M3FN.values()).all() else None
