"""Quotients as GPUs and TPUs compute them, run here: XLA's CPU takes another version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import assert_same_bits
from jax import lax

from qtoolkit.casts._affine import _corrected_quotient


def off_by(units):
    """Division whose results are this many units in the last place too large."""

    def divide(a, b):
        place = lax.bitcast_convert_type(a / b, jnp.int32) + np.int32(units)
        return lax.bitcast_convert_type(place, jnp.float32)

    return divide


@pytest.mark.cpu  # a GPU's division is off already
@pytest.mark.parametrize("units", range(-3, 4))
def test_quotients_are_ieee_however_the_division_is_off(units):
    """Oracle: NumPy's division, over all exponents whose quotients are normal numbers."""
    rng = np.random.default_rng(units + 3)
    patterns = rng.integers(0, 2**32, (2, 2**18), dtype=np.uint32)
    a, b = patterns.view(np.float32)
    b[2**12 : 2**13] = a[2**12 : 2**13]
    b[2**13 : 2**14] = 448
    with np.errstate(all="ignore"):
        b[: 2**12] = np.nextafter(a[: 2**12], np.float32(np.inf))  # next to one
        expected = a / b
    least, largest = np.float32(2.0**-126), np.float32(2.0**127)
    kept = np.ones(a.shape, bool)
    for x in (a, b, expected):
        kept &= (np.abs(x) >= least) & (np.abs(x) < largest)
    assert kept.mean() > 0.5
    got = jax.jit(lambda a, b: _corrected_quotient(a, b, off_by(units)))(a[kept], b[kept])
    assert_same_bits(np.asarray(got), expected[kept])


@pytest.mark.cpu  # which reads subnormals as zero
def test_other_quotients_are_the_divisions_own():
    a = np.array([0, -0.0, 1, 3e38, np.inf, 1, np.nan, 1, 2.0**-126, -3e38], np.float32)
    b = np.array([2, 3, 0, 0.1, 2, np.inf, 1, np.nan, 4, 0.5], np.float32)
    with np.errstate(all="ignore"):
        expected = a / b
    expected[8] = 0  # subnormal, which XLA's CPU makes zero
    np.testing.assert_array_equal(jax.jit(_corrected_quotient)(a, b), expected)
