"""Sums of errors. Oracle: exact fractions, an element at a time."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from qtoolkit.scaling.internal import ErrorSums, error_sums


def exact(x, y):
    pairs = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
    finite = [(Fraction(a), Fraction(b)) for a, b in pairs if np.isfinite([a, b]).all()]
    return {
        "signal": float(sum(a * a for a, _ in finite)),
        "noise": float(sum((a - b) ** 2 for a, b in finite)),
        "max_error": float(max((abs(a - b) for a, b in finite), default=0)),
        "nonfinite": len(pairs) - len(finite),
        "size": len(pairs),
        "nonzero": sum(a != 0 for a, _ in finite),
        "flushed": sum(a != 0 and b == 0 for a, b in finite),
        "differing": sum(a != b and not (np.isnan(a) and np.isnan(b)) for a, b in pairs),
    }


def awkward(scale, dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=5000) * scale).astype(dtype)
    y = (x * rng.choice([1, 1.125, 0], 5000)).astype(dtype)
    x[:4], y[:4] = [np.nan, np.inf, 0, 1], [np.nan, 1, 0, -np.inf]
    return x, y


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1, 1e-3, 1e-25, 1e-42, 1e30])
def test_sums_are_those_of_exact_arithmetic(scale, dtype):
    x, y = awkward(scale, dtype)
    found, expected = error_sums(x, y, x > scale), exact(x, y)
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-5), name
    assert found.saturated == np.count_nonzero(x > scale)


def test_sums_of_parts_are_those_of_the_whole():
    x, y = awkward(1, np.float64)
    total = ErrorSums()
    for part in (slice(0, 7), slice(7, 7), slice(7, None)):
        total.add(error_sums(x[part], y[part]))
    whole = dataclasses.asdict(error_sums(x, y))
    assert dataclasses.asdict(total) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("signal", "noise", "decibels"),
    [(100, 1, 20), (1, 0, np.inf), (0, 0, None), (0, 1, None), (np.inf, 1, None)],
)
def test_decibels(signal, noise, decibels):
    assert ErrorSums(signal, noise).sqnr_db == decibels
