"""Codes of fewer than eight bits, several to a byte."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qtoolkit.formats import FormatLike, format
from qtoolkit.formats.internal import packed_words

WIDTHS = (1, 2, 4, 6)


def pack(codes: ArrayLike, fmt: FormatLike | int, *, axis: int = -1) -> jax.Array:
    """Pack codes into bytes along an axis, the first code in the lowest bits.

    Eight codes of one bit, four of two or two of four share a byte; four codes of six bits share
    three bytes, little-endian. An axis that does not fill its last group ends with zero codes.

    Args:
      codes: uint8, at least one axis; bits above the width are dropped.
      fmt: 1, 2, 4 or 6, or a format of that width, or any spelling of one.
      axis: The axis to pack.

    Returns:
      uint8, shape of `codes` but for `axis`, which has ceil(n / group) * bytes of a group.

    Raises:
      TypeError: `codes` are not uint8.
      ValueError: Another width, or no such axis.

    Examples:
      >>> codes = np.uint8([1, 2, 3, 4, 5])
      >>> [hex(byte) for byte in qt.pack(codes, "e2m1fn").tolist()]  # two to a byte
      ['0x21', '0x43', '0x5']
    """
    bits, axis = _arguments("pack", codes, fmt, axis)
    return _pack(jnp.asarray(codes), bits, axis)


def unpack(
    packed: ArrayLike, fmt: FormatLike | int, size: int | None = None, *, axis: int = -1
) -> jax.Array:
    """The codes that `pack` has packed.

    Args:
      packed: uint8, at least one axis.
      fmt, axis: As given to `pack`.
      size: Number of codes along `axis`; None for all that the bytes hold, the zero codes of the
        last group included.

    Returns:
      uint8 codes.

    Raises:
      TypeError: `packed` is not uint8.
      ValueError: As `pack`; or the bytes along `axis` are not as many as `size` codes need.

    Examples:
      >>> packed = qt.pack(np.uint8([1, 2, 3, 4, 5]), "e2m1fn")
      >>> qt.unpack(packed, "e2m1fn")
      Array([1, 2, 3, 4, 5, 0], dtype=uint8)
      >>> qt.unpack(packed, "e2m1fn", size=5)
      Array([1, 2, 3, 4, 5], dtype=uint8)
    """
    bits, axis = _arguments("unpack", packed, fmt, axis)
    group, width = _group(bits)
    count = np.shape(packed)[axis]
    if count % width:
        raise ValueError(
            f"unpack: axis {axis} has {count} bytes, expected a multiple of {width} for {bits} bits"
        )
    most = count // width * group
    size = most if size is None else size
    if not isinstance(size, int | np.integer) or size < 0 or -(-size // group) * width != count:
        raise ValueError(
            f"unpack: size={size} with {count} bytes along axis {axis}, expected "
            f"{max(most - group, 0) + (count > 0)} to {most}"
        )
    return _unpack(jnp.asarray(packed), bits, int(size), axis)


def _arguments(where: str, codes: ArrayLike, fmt: FormatLike | int, axis: int) -> tuple[int, int]:
    dtype = getattr(codes, "dtype", None)
    if dtype != np.uint8:
        got = f"dtype {dtype}" if dtype is not None else f"type {type(codes).__name__}"
        raise TypeError(
            f"{where}: got {got}, expected uint8, as encode returns codes; write "
            f"{where}(qtoolkit.encode(x, fmt), fmt)"
        )
    if isinstance(fmt, int | np.integer) and not isinstance(fmt, bool):
        bits = int(fmt)
    else:
        bits = format(fmt).bits  # type: ignore[arg-type]  # bool is an int
    if bits not in WIDTHS:
        raise ValueError(f"{where}: {bits} bits, expected one of {', '.join(map(str, WIDTHS))}")
    rank = np.ndim(codes)
    if not isinstance(axis, int | np.integer) or not -rank <= axis < rank:
        expected = f"an integer from {-rank} to {rank - 1}" if rank else "an array with axes"
        raise ValueError(
            f"{where}: axis={axis!r} of an array with {rank} axes, expected {expected}"
        )
    return bits, int(axis) % rank


def _group(bits: int) -> tuple[int, int]:
    """Codes and bytes of a group."""
    return (4, 3) if bits == 6 else (8 // bits, 1)


@jax.jit(static_argnums=(1, 2))
def _pack(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    group, width = _group(bits)
    dtype = np.dtype(np.uint8 if width == 1 else np.uint32)
    codes = jnp.moveaxis(codes, axis, -1) & np.uint8((1 << bits) - 1)
    words = packed_words(codes, bits, group, dtype)
    if width > 1:
        parts = [(words >> np.uint32(8 * i)).astype(jnp.uint8) for i in range(width)]
        words = jnp.stack(parts, axis=-1).reshape((*words.shape[:-1], words.shape[-1] * width))
    return jnp.moveaxis(words, -1, axis)


@jax.jit(static_argnums=(1, 2, 3))
def _unpack(packed: jax.Array, bits: int, size: int, axis: int) -> jax.Array:
    group, width = _group(bits)
    before, after = packed.shape[:axis], packed.shape[axis + 1 :]
    groups = packed.shape[axis] // width
    grouped = packed.reshape((*before, groups, width, *after)).astype(jnp.uint32)
    word = sum(jnp.take(grouped, i, axis=axis + 1) << np.uint32(8 * i) for i in range(width))
    mask = np.uint32((1 << bits) - 1)
    parts = [((word >> np.uint32(bits * i)) & mask).astype(jnp.uint8) for i in range(group)]
    codes = jnp.stack(parts, axis=axis + 1).reshape((*before, groups * group, *after))
    return jax.lax.slice_in_dim(codes, 0, size, axis=axis)
