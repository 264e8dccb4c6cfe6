"""The short ways of rounding and encoding in products, against NumPy's float64 and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from casts_oracle import FLOATS, every_16_bit_input, float32_inputs

import qtoolkit as qt
from qtoolkit.casts.internal import (
    codes_through_float16,
    has_unlimited_values,
    is_part_of_float16,
    unlimited_values,
)
from qtoolkit.formats import E4M3FN, FORMATS, Overflow, Specials

UNLIMITED = (*("e4m3fn", "e5m2", "e3m4", "e4m3_ieee", "float16"), *("e2m1fn", "e2m3fn", "e3m2fn"))


def rounded(x, fmt):
    """`x` in whole steps, by float64: exact, since steps are powers of two; ties to even."""
    wide = np.float64(x)
    _, exponent = np.frexp(wide)
    step = np.ldexp(1.0, np.maximum(exponent - 1, fmt.min_exponent) - fmt.mantissa_bits)
    return np.where(np.isfinite(wide), np.rint(wide / step) * step, wide).astype(np.float32)


def test_the_formats_are_these():
    names = [fmt.name for fmt in map(qt.format, FORMATS) if has_unlimited_values(fmt)]
    assert set(UNLIMITED) <= set(names)
    for name in ("bfloat16", "tf32", "float32", "e4m3fnuz", "e8m0fnu", "int8", "ue4m3", "nf4"):
        assert name not in names


@pytest.mark.parametrize("name", UNLIMITED)
@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_unlimited_values_are_whole_steps(name, wrap):
    """Among the inputs: all values and ties, their neighbours, NaNs, all of float16, subnormals."""
    fmt = qt.format(name)
    x = np.concatenate(
        [
            float32_inputs(FLOATS[name], 2**12),
            *(np.float32(every_16_bit_input(dtype)) for dtype in ("float16", "bfloat16")),
        ]
    )
    x = x[~(np.abs(x) > 2.0**100) | np.isinf(x)]
    got = np.asarray(wrap(lambda x: unlimited_values(x, fmt))(jnp.asarray(x)))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, rounded(x, fmt))
    number = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(x)[number])
    inside = np.abs(x) <= np.float32(fmt.max_finite)
    np.testing.assert_array_equal(got[inside], qt.round_to_format(x[inside], fmt))


@pytest.mark.parametrize("name", UNLIMITED)
def test_amax_over_its_own_scale_becomes_the_largest_value(name):
    """For every significand of amax, with IEEE quotients by NumPy. Only its exponent is left."""
    fmt = qt.format(name)
    amax = np.float32(1) + np.arange(2**23, dtype=np.float32) * np.float32(2.0**-23)
    scale = amax / np.float32(fmt.max_finite)
    largest = np.float32(fmt.max_finite)
    assert (unlimited_values(jnp.asarray(amax / scale), fmt) == largest).all()


def test_codes_through_float16():
    """Each value's code, by ml_dtypes; for infinities and NaNs the code of NaN, of either sign."""
    fmt = qt.format("e4m3fn")
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = np.concatenate([values, np.float32([np.inf, -np.inf])])
    got = np.asarray(jax.jit(lambda x: codes_through_float16(x, fmt))(x))
    number = np.isfinite(x)
    np.testing.assert_array_equal(got[number], codes[number[:256]])
    assert np.isin(got[~number], fmt.nan_codes).all()
    assert (~number).sum() == 4


@pytest.mark.parametrize("bias", [-112, -111, 7, 100, 126])
@pytest.mark.parametrize("mantissa", [1, 3])
def test_codes_of_user_formats(bias, mantissa):
    """Where numbers would be subnormal in float32, at both ends, the way is not taken."""
    fmt = qt.FloatFormat(
        name="made",
        exponent_bits=4,
        mantissa_bits=mantissa,
        bias=bias,
        specials=Specials.FN,
        overflow=Overflow.NAN,
    )
    assert is_part_of_float16(fmt) == (-89 <= bias <= 123 - mantissa)
    x = np.append(fmt.values(), np.float64([np.inf, -np.inf])).astype(np.float32)
    if is_part_of_float16(fmt):
        np.testing.assert_array_equal(
            codes_through_float16(jnp.asarray(x), fmt), qt.encode(x, fmt, saturation="none")
        )


def test_e4m3fn_alone_is_a_part_of_float16():
    """Others have infinities, no NaN, or one that is no largest code."""
    assert [fmt for fmt in map(qt.format, FORMATS) if is_part_of_float16(fmt)] == [E4M3FN]
