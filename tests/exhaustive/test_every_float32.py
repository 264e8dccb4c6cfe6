"""All 2**32 float32 inputs to every narrow float format of ml_dtypes, against ml_dtypes. Minutes.

Where ml_dtypes differs the difference is stated, counted and checked against what is right.
"""

import concurrent.futures
import os

import jax
import ml_dtypes
import numpy as np
import pytest

import qtoolkit as qt
from qtoolkit.casts.internal import has_unlimited_values, unlimited_values

CHUNK = 2**20  # stays in the caches
# numpy's own for float16. Largest values typed in: what is clipped before is our "finite".
FORMATS = {
    "float16": (np.float16, 65504),
    "bfloat16": (ml_dtypes.bfloat16, (2 - 2**-7) * 2.0**127),
    "e5m2": (ml_dtypes.float8_e5m2, 57344),
    "e4m3fn": (ml_dtypes.float8_e4m3fn, 448),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 240),
    "e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, 57344),
    "e4m3b11fnuz": (ml_dtypes.float8_e4m3b11fnuz, 30),
    "e4m3_ieee": (ml_dtypes.float8_e4m3, 240),
    "e3m4": (ml_dtypes.float8_e3m4, 15.5),
    "e2m3fn": (ml_dtypes.float6_e2m3fn, 7.5),
    "e3m2fn": (ml_dtypes.float6_e3m2fn, 28),
    "e2m1fn": (ml_dtypes.float4_e2m1fn, 6),
}
WITHOUT_NAN = ("e2m3fn", "e3m2fn", "e2m1fn")


def _chunks(check):
    """Calls `check` on all patterns, a chunk each; returns the sums of what it counts."""

    def one(start):
        return check(np.arange(CHUNK, dtype=np.uint32) + np.uint32(start))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        counts = list(threads.map(one, range(0, 2**32, CHUNK)))
    return np.sum(counts, axis=0).tolist()


def _theirs(x, dtype):
    # numpy's error state is each thread's own.
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return x.astype(dtype).view(np.dtype(f"uint{8 * np.dtype(dtype).itemsize}"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMATS)
def test_every_float32_pattern(name):
    """Saturation "none" is ml_dtypes' own; "finite" is that of the clipped input."""
    dtype, largest = FORMATS[name]
    fmt = qt.format(name)
    nan_codes = (fmt.max_code,) if name in WITHOUT_NAN else fmt.nan_codes
    largest = np.float32(largest)

    def check(pattern):
        x = pattern.view(np.float32)
        nan = np.isnan(x)
        for saturation, before in (("none", x), ("finite", np.clip(x, -largest, largest))):
            got = np.asarray(qt.encode(x, name, saturation=saturation))
            differs = got != _theirs(before, dtype)
            assert not np.any(differs & ~nan)
            assert np.isin(got[nan], nan_codes).all()
        return int((~nan).sum()), int(nan.sum())

    numbers, nans = _chunks(check)
    assert numbers + nans == 2**32
    said = ", which ml_dtypes makes zero," if name in WITHOUT_NAN else ""
    print(f"{name}: {numbers:,} numbers and {nans:,} NaNs{said} in two saturations, all right")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [name for name in FORMATS if has_unlimited_values(qt.format(name))]
)
def test_every_float32_pattern_without_limit(name):
    """`unlimited_values`, which products round with; clipped, it is the cast of the clipped input.

    Up to 2**100: no quotient of a product is larger than the largest value of its format.
    """
    dtype, largest = FORMATS[name]
    largest = np.float32(largest)
    rounded = jax.jit(lambda x: unlimited_values(x, qt.format(name)))

    def check(pattern):
        x = pattern.view(np.float32)
        number, near = ~np.isnan(x), ~(np.abs(x) > np.float32(2.0**100))
        got = np.asarray(rounded(x))
        assert np.array_equal(np.isnan(got), ~number)
        assert np.array_equal(got[np.isinf(x)], x[np.isinf(x)])
        x, got = x[number & near], got[number & near]
        clipped = np.clip(got, -largest, largest)
        expected = np.clip(x, -largest, largest).astype(dtype).astype(np.float32)
        assert np.array_equal(clipped.view(np.uint32), expected.view(np.uint32))
        return int(number.sum()), int((~number).sum())

    numbers, nans = _chunks(check)
    assert numbers + nans == 2**32


@pytest.mark.exhaustive
def test_every_float32_pattern_to_e8m0():
    """ml_dtypes sends ties away from zero, and has two faults at the low end.

    What lies between 2**-127 and 1.5 * 2**-127 it rounds up, to code 1; what is positive and below
    2**-128, and so nearer to zero, which E8M0 does not have, it makes code 0 and not NaN.
    """

    def check(pattern):
        x = pattern.view(np.float32)
        got = np.asarray(qt.encode(x, "e8m0fnu", rounding="nearest_away", saturation="none"))
        theirs = _theirs(x, ml_dtypes.float8_e8m0fnu)
        # Compared as patterns: 2**-127 is 0x400000, 1.5 times as much 0x600000, 2**-128 0x200000.
        up = (pattern > 0x400000) & (pattern < 0x600000)
        tiny = (pattern > 0) & (pattern < 0x200000)
        assert np.all(got[up] == 0)
        assert np.all(theirs[up] == 1)
        assert np.all(got[tiny] == 255)
        assert np.all(theirs[tiny] == 0)
        same = ~(up | tiny)
        np.testing.assert_array_equal(got[same], theirs[same])
        return int(same.sum()), int(up.sum()), int(tiny.sum())

    same, up, tiny = _chunks(check)
    assert same + up + tiny == 2**32
    print(f"e8m0fnu: {same:,} patterns equal, {up:,} and {tiny:,} where ml_dtypes is wrong")


@pytest.mark.exhaustive
def test_every_float32_pattern_to_e8m0_and_ties_to_even():
    """The same with our default: only ties differ, the powers of two times 1.5."""

    def check(pattern):
        x = pattern.view(np.float32)
        even = np.asarray(qt.encode(x, "e8m0fnu", saturation="none"))
        away = np.asarray(qt.encode(x, "e8m0fnu", rounding="nearest_away", saturation="none"))
        differ = even != away
        ties = ((pattern & 0x7FFFFF) == 0x400000) & (pattern < 0x7F800000) & (pattern >= 0x800000)
        ties |= pattern == 0x600000
        assert not np.any(differ & ~ties)
        # One of them is beyond: from 2**127, code 254, up to 255, which is NaN.
        assert np.all((even[differ] % 2 == 0) & (away[differ] == even[differ] + 1))
        return int(differ.sum()), int(ties.sum())

    differ, ties = _chunks(check)
    print(f"e8m0fnu: {ties} ties, {differ} of them to the lower, even code")
    assert ties == 255
    assert differ == 128
