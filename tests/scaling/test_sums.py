"""Sums of errors. Oracle: exact fractions, an element at a time."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qtoolkit.scaling.internal import WeightErrors, error_sums, weight_errors


def exact(x, y):
    pairs = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
    finite = [(Fraction(a), Fraction(b)) for a, b in pairs if np.isfinite([a, b]).all()]
    total = {
        "signal": sum((a * a for a, _ in finite), Fraction(0)),
        "noise": sum(((a - b) ** 2 for a, b in finite), Fraction(0)),
    }
    counts = {
        "elements": len(pairs),
        "compared": len(finite),
        "nonfinite": sum(not np.isfinite(a) for a, _ in pairs),
        "nonzero": sum(np.isfinite(a) and a != 0 for a, _ in pairs),
        "flushed": sum(np.isfinite(a) and a != 0 and b == 0 for a, b in pairs),
    }
    max_error = float(max((abs(a - b) for a, b in finite), default=0))
    differing = sum(a != b and not (np.isnan(a) and np.isnan(b)) for a, b in pairs)
    return total, counts, max_error, differing


def awkward(scale, dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=5000) * scale).astype(dtype)
    y = (x * rng.choice([1, 1.125, 0], 5000)).astype(dtype)
    x[:4], y[:4] = [np.nan, np.inf, 0, 1], [np.nan, 1, 0, -np.inf]
    return x, y


def check(found, x, y, *, rel=1e-5):
    totals, counts, _, _ = exact(x, y)
    for name, value in counts.items():
        assert int(getattr(found, name)) == value, name
    # A sum is the number of slot i times 2**(64 i - 384).
    for row, expected in zip(np.asarray(found.moments)[:2], totals.values(), strict=True):
        pairs = enumerate(row.astype(float))
        got = sum((Fraction(n) * Fraction(2) ** (64 * i - 384) for i, n in pairs), Fraction(0))
        assert abs(got - expected) <= Fraction(rel) * expected
    decibels = 10 * np.log10(float(totals["signal"] / totals["noise"]))
    assert found.sqnr_db == pytest.approx(decibels, abs=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1, 1e-3, 1e-25, 1e-42, 1e30])
def test_sums_of_weights_are_those_of_exact_arithmetic(scale, dtype):
    x, y = awkward(scale, dtype)
    found = weight_errors(x, y, x > scale)
    check(found, x, y)
    _, _, max_error, differing = exact(x, y)
    assert found.max_error == pytest.approx(max_error, rel=1e-5)
    assert found.differing == differing
    assert int(found.saturated) == np.count_nonzero(x > scale)


@pytest.mark.parametrize("scale", [1, 1e-25, 1e-42, 1e30])
def test_sums_in_programs_are_those_of_exact_arithmetic(scale):
    """The record of both halves is that of the whole; figures are the same traced and known."""
    x, y = awkward(scale, np.float32)
    parts = [error_sums(*map(jnp.asarray, (a, b, a > scale))).sums for a, b in zip(
        np.split(x, 2), np.split(y, 2), strict=True
    )]  # fmt: skip
    found = parts[0] + parts[1]
    check(found, x, y, rel=1e-6)
    assert int(found.saturated) == np.count_nonzero(x > scale)
    fields = dataclasses.asdict(found)
    names = ("sqnr_db", "cosine", "saturated_fraction", "flushed_fraction")
    traced = jax.jit(lambda fields: [getattr(type(found)(**fields), name) for name in names])
    for name, value in zip(names, traced(fields), strict=True):
        assert value.dtype == np.float32, name
        np.testing.assert_allclose(value, getattr(found, name), rtol=1e-6, atol=1e-4)


def test_sums_of_parts_are_those_of_the_whole():
    x, y = awkward(1, np.float64)
    total = WeightErrors()
    for part in (slice(0, 7), slice(7, 7), slice(7, None)):
        total += weight_errors(x[part], y[part])
    for name, value in dataclasses.asdict(weight_errors(x, y)).items():
        np.testing.assert_allclose(getattr(total, name), value, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("x", "y", "decibels"),
    [
        ([10, 0], [9, 0], 20),
        ([1, 0], [1, 0], np.inf),
        ([0, 0], [0, 0], None),
        ([0, 0], [1, 0], None),
        ([1e200, 1], [1, 1], None),
    ],
)
def test_decibels_of_weights(x, y, decibels):
    got = weight_errors(np.array(x, np.float64), np.array(y, np.float64)).known_sqnr_db
    assert got == (None if decibels is None else pytest.approx(decibels))
