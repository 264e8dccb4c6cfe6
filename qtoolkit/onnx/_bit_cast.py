"""BitCast."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qtoolkit.casts.internal import elementwise, without_derivative
from qtoolkit.onnx._operator import Operator
from qtoolkit.onnx._types import CAST_TYPES, DTYPES, FLOAT6, FORMATS, DataType, TypeLike

_TYPES: dict[DataType, int] = {
    **{t: 26 for t in CAST_TYPES if t not in (DataType.STRING, *FLOAT6)},
    **dict.fromkeys((DataType.COMPLEX64, DataType.COMPLEX128), 26),
}
_BITS = {
    **{t: fmt.bits for t, fmt in FORMATS.items()},
    DataType.BOOL: 8,
    DataType.COMPLEX64: 64,
    DataType.COMPLEX128: 128,
}


def bit_cast(x: ArrayLike, to: TypeLike, *, opset: int = 28) -> jax.Array:
    """Read the bits of each element of `x` as another type of the same width.

    Widths are those of the type: int4 goes to uint4 and float4e2m1, not to int8. A bool has 8 bits,
    but JAX stores only whether they are 0: to bool, every other pattern becomes True. The real part
    of a complex64 is its lower half.

    Args:
      x: An array of any type of ONNX but string and float6, any shape; or a number of Python, which
        has 64 bits.
      to: As in `cast`.
      opset: 26 to 28.

    Returns:
      Shape of `x`, dtype of `to`.

    Raises:
      TypeError: `x` or `to` is string, float6 or no type of ONNX; 64-bit types where JAX has them
        off; or a derivative is asked for.
      ValueError: The widths differ.

    Gradient: none.

    Source: ONNX BitCast 26.

    Examples:
      >>> qt.onnx.bit_cast(jnp.asarray([1.0, -0.0]), "UINT32")
      Array([1065353216, 2147483648], dtype=uint32)
      >>> qt.onnx.bit_cast(np.uint8([0x7E, 0x7F]), "FLOAT8E4M3FN")
      Array([448, nan], dtype=float8_e4m3fn)
    """
    operator = Operator("onnx.bit_cast", opset, first=26)
    source, target = operator.type_of("x", x, _TYPES), operator.data_type("to", to)
    operator.check_type("to", target, _TYPES)
    widths = tuple(_BITS[t] for t in (source, target))
    if widths[0] != widths[1]:
        same = ", ".join(t.name for t in _TYPES if _BITS[t] == widths[0])
        raise ValueError(
            f"{operator.name}: x is {source.name} of {widths[0]} bits, to={target.name} has "
            f"{widths[1]}; expected one of the same width: {same}"
        )
    for each in (target, source):
        operator.check_64_bits(each)
    if isinstance(x, np.ndarray | np.generic) and not x.dtype.isnative:
        x = x.astype(DTYPES[source])
    x = without_derivative(jnp.asarray(x, DTYPES[source]), _NO_DERIVATIVE)
    return _bit_cast(x, source, target)


_NO_DERIVATIVE = (
    "onnx.bit_cast: has no derivative; differentiate what the bits stand for, e.g. with fake_cast, "
    "or pass jax.lax.stop_gradient(x)"
)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _bit_cast(x: jax.Array, source: DataType, target: DataType) -> jax.Array:
    return x if source is target else _reread(x, source, target)


@elementwise
def _reread(x: jax.Array, source: DataType, target: DataType) -> jax.Array:
    if source is DataType.BOOL:
        x = x.astype(jnp.uint8)
    if source is DataType.COMPLEX64:
        low, high = (lax.bitcast_convert_type(part, jnp.uint32) for part in (x.real, x.imag))
        x = low.astype(jnp.uint64) | high.astype(jnp.uint64) << np.uint64(32)
    if target is DataType.BOOL:
        return lax.bitcast_convert_type(x, jnp.uint8) != 0
    if target is DataType.COMPLEX64:
        bits = lax.bitcast_convert_type(x, jnp.uint64)
        words = (word.astype(jnp.uint32) for word in (bits, bits >> np.uint64(32)))
        return lax.complex(*(lax.bitcast_convert_type(word, jnp.float32) for word in words))
    return lax.bitcast_convert_type(x, DTYPES[target])
