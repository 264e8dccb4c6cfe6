"""Random bits for stochastic rounding, from a counter: a hash of a key and an element's index.

Nothing is drawn in order, so the bits fuse into the loop that uses them and are the same under
`jit`, in any fusion and under any sharding.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qtoolkit.casts._modes import Rounding, Stochastic
from qtoolkit.casts._serialization import serializable

_UNSIGNED = (np.dtype("uint8"), np.dtype("uint16"), np.dtype("uint32"))


@serializable
class Draw(NamedTuple):
    """The source of the random bits of one cast: a key and an offset, or the caller's bits."""

    words: jax.Array | None  # uint32[n], what the key is made of
    offset: jax.Array | None  # uint32[2], low word first; None for zero
    bits: jax.Array | None

    def random(self, shape: tuple[int, ...], rounding: Rounding) -> jax.Array:
        """uint32 numbers below 2**rounding.bits, one for each element of `shape`."""
        assert isinstance(rounding, Stochastic)
        if self.bits is None:
            assert self.words is not None
            hashed = counter_bits(self.words, shape, self.offset)
            return hashed >> np.uint32(32 - rounding.bits)
        low = self.bits.astype(jnp.uint32) & np.uint32((1 << rounding.bits) - 1)
        return jnp.broadcast_to(low, shape)


def check_draw(
    where: str,
    shape: tuple[int, ...],
    rounding: Rounding,
    key: Any,
    random_bits: ArrayLike | None,
    index_offset: Any,
) -> Draw:
    """The draw that the arguments of a cast describe. ValueError where `rounding` needs none."""
    is_offset = not (isinstance(index_offset, int) and index_offset == 0)
    if is_offset and (key is None or not isinstance(rounding, Stochastic)):
        raise ValueError(
            f"{where}: index_offset is given without a key for stochastic rounding, expected "
            "rounding='stochastic' and key=; or remove index_offset"
        )
    if not isinstance(rounding, Stochastic):
        name = "key" if key is not None else "random_bits"
        raise ValueError(
            f"{where}: {name} is given, but rounding={rounding!r} uses no random bits; "
            "remove it or use rounding='stochastic'"
        )
    if (key is None) == (random_bits is None):
        got = "neither key nor" if key is None else "both key and"
        raise ValueError(
            f"{where}: stochastic rounding got {got} random_bits, expected one of them, "
            "e.g. key=jax.random.key(0)"
        )
    if random_bits is None:
        return Draw(key_words(where, key), _offset_words(where, index_offset), None)
    _check_random_bits(where, shape, rounding, random_bits)
    return Draw(None, None, jnp.asarray(random_bits))


def _check_random_bits(
    where: str, shape: tuple[int, ...], rounding: Stochastic, random_bits: ArrayLike
) -> None:
    dtype = getattr(random_bits, "dtype", None)
    if dtype not in _UNSIGNED:
        raise TypeError(
            f"{where}: random_bits has {dtype or type(random_bits).__name__}, expected an array of "
            "uint8, uint16 or uint32"
        )
    if 8 * dtype.itemsize < rounding.bits:
        raise ValueError(
            f"{where}: random_bits has dtype {dtype}, expected at least the {rounding.bits} bits "
            "of the rounding"
        )
    got = np.shape(random_bits)
    try:
        fits = np.broadcast_shapes(got, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{where}: random_bits has shape {got}, expected one that broadcasts to that of x, "
            f"{shape}"
        )


def key_words(where: str, key: Any) -> jax.Array:
    """uint32[2] or uint32[4]: the words of a key of `jax.random`, new style or old."""
    dtype = key.dtype if isinstance(key, jax.Array | np.ndarray) else None
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(key)
    elif dtype == np.uint32 and np.ndim(key) >= 1 and np.shape(key)[-1] in (2, 4):
        words = jnp.asarray(key)  # as jax.random.PRNGKey makes them
    else:
        got = f"dtype {dtype}" if dtype is not None else f"type {type(key).__name__}"
        is_flax = type(key).__module__.startswith("flax.")
        example = "rngs.params() of nnx.Rngs" if is_flax else "jax.random.key(0)"
        raise TypeError(f"{where}: key has {got}, expected a key of jax.random, e.g. {example}")
    if words.ndim != 1:
        raise ValueError(
            f"{where}: key holds {math.prod(words.shape[:-1])} keys of shape {words.shape[:-1]}, "
            "expected one; use jax.vmap over x and the keys"
        )
    return words


def _offset_words(where: str, offset: Any) -> jax.Array | None:
    if isinstance(offset, np.ndarray) and offset.ndim == 0 and offset.dtype.kind in "iu":
        offset = offset[()]
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        if not 0 <= offset < 2**64:
            raise ValueError(f"{where}: index_offset={offset}, expected 0 to 2**64 - 1")
        low_first = [int(offset) & 0xFFFFFFFF, int(offset) >> 32]
        return jnp.asarray(np.array(low_first, np.uint32)) if offset else None
    dtype = getattr(offset, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or np.shape(offset):
        raise TypeError(
            f"{where}: index_offset is {offset!r}, expected an integer: the number of elements "
            "before the first one of x"
        )
    offset = jnp.asarray(offset)
    is_known = not isinstance(offset, jax.core.Tracer) and offset.is_fully_addressable
    if is_known and int(offset) < 0:
        raise ValueError(f"{where}: index_offset={offset}, expected 0 to 2**64 - 1")
    low = offset.astype(jnp.uint32)
    high = (offset >> 32).astype(jnp.uint32) if dtype.itemsize == 8 else jnp.zeros_like(low)
    return jnp.stack([low, high])


def counter_bits(
    words: jax.Array, shape: tuple[int, ...], offset: jax.Array | None = None
) -> jax.Array:
    """uint32 numbers, one for each element of `shape`: a hash of `words` and its index."""
    return hashed_index(mixed_key(words), shape, offset)


def hashed_index(
    mixed: tuple[jax.Array, jax.Array, jax.Array],
    shape: tuple[int, ...],
    offset: jax.Array | None = None,
) -> jax.Array:
    """`counter_bits` with the result of `mixed_key` for a key."""
    # Three rounds of multiply, add and xorshift, each with a word of the key. Two rounds fail
    # chi-square and correlation tests of neighbouring elements for some keys, and so do hashes that
    # multiply by a word of the key. Multipliers: the golden ratio, and MurmurHash3's finalizer.
    first, second, third = mixed
    low, high = element_index(shape)
    if offset is not None:
        low = low + offset[0]
        carry = (low < offset[0]).astype(jnp.uint32)
        high = carry + offset[1] + (np.uint32(0) if high is None else high)
    if high is not None:
        first = first ^ hash_words(high)  # 0 where the high word is 0
        second = second ^ hash_words(high * np.uint32(0x9E3779B1))
    h = (low ^ first) * np.uint32(0x9E3779B1) + second
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B) + third
    return (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)


def mixed_key(words: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three words that each depend on all of `words`; together they differ for different keys."""
    mixed, other = jnp.uint32(0x9E3779B9), jnp.uint32(0xC2B2AE35)
    for word in range(words.shape[0]):
        mixed = hash_words(mixed + words[word])
        other = hash_words(other ^ mixed) + words[word]
    return hash_words(mixed ^ other), hash_words(other + np.uint32(0x85EBCA6B)), mixed


def hash_words(h: jax.Array) -> jax.Array:
    """A permutation of 32 bits in which each depends on all (C. Wellons' hash-prospector)."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return h ^ (h >> np.uint32(15))


def element_index(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
    """The index of each element in C order: its low word, uint32, and its high word.

    The high word is None if there are at most 2**32 elements. Sizes may be symbolic.
    """
    is_known = all(isinstance(size, int) for size in shape)
    low = jnp.zeros(shape, jnp.uint32)
    high = None if is_known and math.prod(shape) <= 2**32 else jnp.zeros(shape, jnp.uint32)
    for axis, (size, stride) in enumerate(zip(shape, _strides(shape), strict=True)):
        index = lax.broadcasted_iota(jnp.uint32, shape, axis)
        if is_known and size > 2**32:
            # The bits above 32 come from an iota of floats, whose error is far below 2**32.
            rest = lax.broadcasted_iota(jnp.float32, shape, axis) - index.astype(jnp.float32)
            above = (rest * np.float32(2.0**-32) + np.float32(0.5)).astype(jnp.uint32)
            assert high is not None
            high = high + above * stride[0]
        part = index * stride[0]
        low = low + part
        if high is not None:
            carry = (low < part).astype(jnp.uint32)
            high = high + carry + _high_product(index, stride[0]) + index * stride[1]
    return low, high


Word = np.uint32 | jax.Array


def _strides(shape: tuple[int, ...]) -> list[tuple[Word, Word]]:
    """The stride of each axis, in elements, as low and high word."""
    strides: list[tuple[Word, Word]] = []
    stride: int | tuple[jax.Array, jax.Array] = 1
    for size in reversed(shape):
        if isinstance(stride, int):
            strides.append((np.uint32(stride & 0xFFFFFFFF), np.uint32(stride >> 32)))
        else:
            strides.append(stride)
        if isinstance(stride, int) and isinstance(size, int):
            stride *= size
            continue
        low, high = (jnp.asarray(word) for word in strides[-1])
        count = jnp.asarray(size).astype(jnp.uint32)
        stride = low * count, high * count + _high_product(low, count)
    return strides[::-1]


def _high_product(a: jax.Array, b: Word) -> jax.Array:
    """The upper 32 bits of the 64-bit product of `a` and `b`."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    middle = a_high * b_low + ((a_low * b_low) >> half)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (other >> half)
