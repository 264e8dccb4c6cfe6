"""FP8 codes by the conversion that a GPU has, where it has one."""

import functools
from collections.abc import Callable
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._elementwise import by_platform
from qtoolkit.casts._projection import UNCLAMPED
from qtoolkit.casts._sources import codes_of
from qtoolkit.formats import E4M3FN, E5M2, FloatFormat, Format


def has_native_codes(fmt: Format) -> TypeGuard[FloatFormat]:
    """Whether `native_codes` encodes to `fmt`."""
    return fmt in (E4M3FN, E5M2)


def native_codes(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The codes of float32 `x`, rounded to nearest even: uint8. Elementwise.

    Args:
      x: Each element at most the largest value of `fmt`.

    On GPUs of NVIDIA from compute capability 8.9 on, XLA converts by one instruction,
    `cvt.rn.satfinite.e4m3x2.f32`, where the arithmetic on bit patterns takes some thirty. The two
    are equal by definition: PTX ISA says of `.rn` that it rounds to nearest even, of these formats
    that they have subnormal numbers, and saturation changes nothing in the range of `x`. The
    benchmark `gpu_training.py` compares all 2**32 numbers.
    """
    return _conversions(fmt)(x)


@functools.lru_cache
def _conversions(fmt: FloatFormat) -> Callable[[jax.Array], jax.Array]:
    def by_integers(x: jax.Array) -> jax.Array:
        return codes_of(x, fmt, UNCLAMPED)

    def by_hardware(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x.astype(fmt.dtype), jnp.uint8)

    return by_platform(
        f"{fmt.name}_codes",
        cpu=by_integers,
        others=by_integers,
        cuda=by_hardware,
        aval=lambda x: x.update(dtype=np.dtype(np.uint8), weak_type=False),
    )
