"""A rounding mode is one row of `MODES`: every way to round follows it.

Oracle: a search among all values of the format, in float64.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import qtoolkit as qt
from qtoolkit.casts import _modes
from qtoolkit.casts.internal import codes_of

NEW = {
    "half_to_zero": _modes.Mode("never", "never", "always"),
    "half_up": _modes.Mode("never", "positive", "always"),
    "away_from_zero": _modes.Mode("always", "always", "always"),
    "to_even": _modes.Mode("odd", "odd", "odd"),
}
# By addition, by shifts of the pattern, by integers, by tables.
FORMATS = ("e4m3fn", "e5m2", "ue4m3", "bfloat16", "e8m0fnu", "int4", "uint8", "hifloat8", "nf4")


def values_of(name):
    """All finite values in rising order, and whether their codes are odd."""
    fmt = qt.format(name)
    values = fmt.values()
    codes = [c for c in np.argsort(values, kind="stable") if np.isfinite(values[c])]
    codes = [c for c in codes if values[c] or not np.signbit(values[c])]  # one zero
    return values[codes], np.array(codes) % 2 == 1


def expected(x, mode, values, odd):
    low = np.clip(np.searchsorted(values, x, side="right") - 1, 0, len(values) - 2)
    ends = np.stack([values[low], values[low + 1]])
    smaller = (np.abs(ends[0]) > np.abs(ends[1])).astype(int)
    floor, ceiling = (np.take_along_axis(ends, i[None], 0)[0] for i in (smaller, 1 - smaller))
    when = {
        "never": np.zeros(x.shape, bool),
        "always": np.ones(x.shape, bool),
        "positive": x > 0,
        "odd": np.where(smaller, odd[low + 1], odd[low]),
    }
    position = np.sign(np.abs(x - floor) - np.abs(ceiling - x)).astype(int)  # below, at, above
    up = np.choose(position + 1, [when[word] for word in mode])
    exact = np.isin(x, values)
    return np.where(exact, x, np.where(up, ceiling, floor))


@pytest.mark.parametrize("mode", NEW)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_follows_a_new_row(monkeypatch, name, mode):
    monkeypatch.setitem(_modes.MODES, mode, NEW[mode])
    monkeypatch.setattr(_modes, "ROUNDINGS", (*_modes.ROUNDINGS, mode))
    values, odd = values_of(name)
    middle = (values[1:] + values[:-1]) / 2
    quarters = [(values[:-1] + middle) / 2, (values[1:] + middle) / 2]
    x = np.concatenate([values, middle, *quarters])
    x = x[(x.astype(np.float32) == x) & (np.abs(x) >= 2.0**-126)]
    codes = codes_of(jnp.asarray(x, jnp.float32), qt.format(name), qt.casts.Projection(mode))
    np.testing.assert_array_equal(qt.decode(codes, name), expected(x, NEW[mode], values, odd))
