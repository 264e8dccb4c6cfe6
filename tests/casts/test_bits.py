"""Float16 converted as on GPUs and TPUs, run here: XLA's CPU takes another version."""

import jax.numpy as jnp
import numpy as np
from casts_oracle import assert_same_bits

from qtoolkit.casts._bits import _by_widening_magnitudes, _narrowed_by_hand


def numbers_and_halves():
    """All float16 numbers and NaNs of either sign, as float32; and their patterns in float16."""
    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC00000], np.uint32).view(np.float32)
    x = np.concatenate([numbers, nans])
    with np.errstate(invalid="ignore"):
        half = x.astype(np.float16).view(np.uint16)
    return x, np.where(np.isnan(x), (half & 0x8000) | 0x7E00, half).astype(np.uint16)


def test_float16_keeps_the_sign_of_nans():
    x, half = numbers_and_halves()
    np.testing.assert_array_equal(np.asarray(_narrowed_by_hand(x)).view(np.uint16), half)
    patterns = _by_widening_magnitudes(jnp.asarray(half.view(np.float16)))
    wide = half.view(np.float16).astype(np.float32)
    assert_same_bits(np.asarray(patterns).view(np.float32), wide)
