"""`with_`: formats made of others. Oracle: the values that the fields say, written out by hand."""

import dataclasses
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refused import refused

import qtoolkit as qt
from qtoolkit.formats import Overflow

pytestmark = pytest.mark.quick


def test_another_bias_scales_every_value():
    """Oracle: ml_dtypes' float8_e4m3fn, times 2**(7 - 5)."""
    fmt = qt.format("e4m3fn").with_(bias=5)
    assert (fmt.name, fmt.dtype, fmt.max_finite) == ("e4m3fn(bias=5)", None, 448 * 4)
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 4
    np.testing.assert_array_equal(fmt.values(), expected)
    x = jnp.asarray(expected[np.isfinite(expected)], jnp.float32)
    np.testing.assert_array_equal(qt.fake_cast(x, fmt), x)
    recipe = qt.Recipe(forward=qt.BlockFormat.tensor(fmt))
    assert qt.recipes.from_json(qt.recipes.to_json(recipe)) == recipe
    assert qt.format("e4m3fn") != fmt


def test_with_keeps_the_dtype_where_values_stay():
    fmt = qt.format("e4m3fn")
    assert fmt.with_(bias=7) is fmt
    clamping = fmt.with_(overflow=Overflow.MAX)
    assert (clamping.name, clamping.dtype) == ("e4m3fn(overflow=MAX)", fmt.dtype)
    assert fmt.with_(bias=5, name="mine").with_(overflow=Overflow.MAX).name == "mine(overflow=MAX)"
    assert qt.format("int8").with_(bits=5, signed=False).max_finite == 31
    midpoints = qt.format("posit8").with_(ties=None)
    assert float(qt.fake_cast(jnp.float32(1e-30), midpoints)) == 0


def test_blocks():
    mxfp4 = qt.spec("mxfp4")
    assert mxfp4.with_(block=(16,)) == dataclasses.replace(mxfp4, block=(16,))
    assert mxfp4.with_(element="e4m3fn", block=[32]).name == "mxfp8_e4m3"  # and its rule
    assert mxfp4.with_(rule="floor").with_(block=(16,)).rule == "floor"
    assert qt.spec("nvfp4").with_(axes=(0,)) == qt.spec("nvfp4").along(0)
    assert qt.spec("int8").with_(element="int4").largest == Fraction(7)


def test_errors_say_what_to_write():
    fmt = qt.format("e4m3fn")
    with refused(TypeError, r"^e4m3fn: with_\(bais=...\).* did you mean 'bias'\? It has"):
        fmt.with_(bais=5)
    with refused(TypeError, r"^mxfp4: with_\(z=...\), .* no field 'z'; it has element, "):
        qt.spec("mxfp4").with_(z=5)
    refused(ValueError, "name='E5M2' is that of another format", fmt.with_, bias=5, name="E5M2")
    refused(ValueError, "; write dtype_name=None", dataclasses.replace, fmt, bias=5)
    refused(ValueError, r"bias=100000", fmt.with_, bias=100_000)
