"""Codes of FP8 by a GPU's conversion. Oracle: ml_dtypes, of every 16-bit float and of the float32
numbers beside every value of the formats and every tie.

No GPU runs here: the conversion is XLA's own on this machine, whose meaning is the same on each.
`make cuda` looks at the instruction, `experiments/benchmarks/gpu_training.py` at its results.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import qtoolkit as qt
from qtoolkit.casts.internal import has_native_codes, native_codes

FORMATS = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def numbers(dtype, largest):
    """Float32 numbers up to the largest value of the format."""
    halves = np.arange(2**16, dtype=np.uint16)
    x = [halves.view(kind).astype(np.float32) for kind in (np.float16, ml_dtypes.bfloat16)]
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / 2
    for near in (values, ties):
        x += [near, *(np.nextafter(near, np.float32(end)) for end in (np.inf, -np.inf))]
    x = np.concatenate(x)
    return x[np.abs(x) <= largest]


@pytest.mark.quick
@pytest.mark.parametrize("name", FORMATS)
def test_both_ways_give_the_codes_of_ml_dtypes(name):
    fmt, dtype = qt.format(name), FORMATS[name]
    x = numbers(dtype, float(fmt.max_finite))
    expected = x.astype(dtype).view(np.uint8)
    np.testing.assert_array_equal(jax.jit(lambda x: native_codes(x, fmt))(x), expected)
    converted = jax.jit(lambda x: jax.lax.bitcast_convert_type(x.astype(dtype), jnp.uint8))(x)
    np.testing.assert_array_equal(converted, expected)


def test_formats_without_a_conversion_have_none():
    assert [
        name
        for name in ("e4m3fn", "e5m2", "e4m3fnuz", "int8", "e2m1fn")
        if has_native_codes(qt.format(name))
    ] == list(FORMATS)
