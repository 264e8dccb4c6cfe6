"""All 2**32 float32 inputs to every format that ml_dtypes has, against ml_dtypes. Minutes."""

import ml_dtypes  # noqa: F401  (registers the dtypes)
import numpy as np
import pytest

from qtoolkit import encode
from qtoolkit.formats import FORMATS, FloatFormat

CHUNK = 2**24


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fmt", [f for f in FORMATS if isinstance(f, FloatFormat)], ids=lambda fmt: fmt.name
)
def test_every_float32_pattern(fmt):
    """Saturation "none" is ml_dtypes' own; "finite" is that of the clipped input."""
    largest = np.float32(float(fmt.max_finite))
    compared = nans = 0
    for start in range(0, 2**32, CHUNK):
        x = np.arange(start, start + CHUNK, dtype=np.uint64).astype(np.uint32).view(np.float32)
        number = ~np.isnan(x)
        with np.errstate(invalid="ignore", over="ignore"):
            unclamped = x.astype(fmt.dtype).view(fmt.code_dtype)
            clamped = np.clip(x, -largest, largest).astype(fmt.dtype).view(fmt.code_dtype)
        for saturation, expected in (("none", unclamped), ("finite", clamped)):
            got = np.asarray(encode(x, fmt, saturation=saturation))
            np.testing.assert_array_equal(got[number], expected[number])
            assert np.isin(got[~number], fmt.nan_codes).all()
        compared += int(number.sum())
        nans += int((~number).sum())
    assert compared + nans == 2**32
    print(f"{fmt.name}: {compared:,} numbers and {nans:,} NaNs, two saturations, all equal")
