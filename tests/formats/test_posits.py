"""Posits of any width, against the standard read as text: values by its formula, rounding on bits.

Oracle of the rounding: the exact number written out as an endless posit, cut to n bits.
"""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from refused import refused

import qtoolkit as qt

SMALL = [(n, es) for n in range(2, 9) for es in range(4)]


def value(code, n, es):
    """Standard for Posit Arithmetic (2022), 4.2: ((1 - 3s) + f) 2**((1 - 2s)(2**es r + e + s))."""
    if code in (0, 2 ** (n - 1)):
        return math.nan if code else 0.0
    s = code >> (n - 1)
    tail = [(code >> place) & 1 for place in reversed(range(n - 1))]
    k = next((i for i, bit in enumerate(tail) if bit != tail[0]), len(tail))
    r = -k if tail[0] == 0 else k - 1
    rest = tail[k + 1 :] + [0] * es
    e = int("0" + "".join(map(str, rest[:es])), 2)
    f = sum(Fraction(bit, 2 ** (i + 1)) for i, bit in enumerate(rest[es:]))
    return float(((1 - 3 * s) + f) * Fraction(2) ** ((1 - 2 * s) * (2**es * r + e + s)))


def code_of(x, n, es):
    """The endless posit of `x` cut to n bits: to nearest, ties to even, never to 0 or NaR."""
    if x == 0:
        return 0
    exact = abs(Fraction(float(x)))
    scale = 0
    while exact >= 2:
        exact, scale = exact / 2, scale + 1
    while exact < 1:
        exact, scale = exact * 2, scale - 1
    regime, exponent = divmod(scale, 2**es)
    text = "1" * (regime + 1) + "0" if regime >= 0 else "0" * -regime + "1"
    text += f"{exponent:0{es}b}" if es else ""
    fraction = exact - 1
    while fraction or len(text) < n + 2:
        fraction *= 2
        text += str(int(fraction >= 1))
        fraction -= fraction >= 1
    kept, rest = int(text[: n - 1], 2), text[n - 1 :]
    half, sticky = rest[0] == "1", "1" in rest[1:]
    kept += half and (sticky or kept % 2 == 1)
    kept = min(max(kept, 1), 2 ** (n - 1) - 1)
    return kept if x > 0 else 2**n - kept


@pytest.mark.sample("2-0", "3-1", "4-2", "5-1", "6-2", "8-2")
@pytest.mark.parametrize(("n", "es"), [*SMALL, (12, 2), (16, 1), (16, 2)])
def test_values_and_rounding_by_the_standard(n, es):
    fmt = qt.posit(n, es)
    np.testing.assert_array_equal(fmt.values(), [value(code, n, es) for code in range(2**n)])
    assert fmt.codes == tuple(code % 2**n for code in range(1 - 2 ** (n - 1), 2 ** (n - 1)))
    rng = np.random.default_rng(n)
    some = np.float32(rng.choice(fmt.finite, 200))
    ties = np.float32(rng.choice(fmt.ties, 200))
    x = np.concatenate([some, ties, rng.normal(size=200), rng.choice(fmt.finite, 200) * 1.3])
    x = np.concatenate([x, [0, -0.0, 1e-30, -1e-38, 3e38, -3e38, 2.0**-149]]).astype(np.float32)
    x = np.concatenate([np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(np.inf))])
    expected = [code_of(number, n, es) for number in x.tolist()]
    np.testing.assert_array_equal(qt.encode(jnp.asarray(x), fmt), expected)
    inexact = x[np.isfinite(x)].astype(np.float64) * (1 + 1e-12)
    expected = [code_of(number, n, es) for number in inexact.tolist()]
    np.testing.assert_array_equal(qt.encode(inexact, fmt), expected)
    infinite = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan])
    nar = 2 ** (n - 1)
    np.testing.assert_array_equal(qt.encode(infinite, fmt), [nar - 1, nar + 1, nar])
    np.testing.assert_array_equal(qt.encode(infinite, fmt, saturation="propagate"), [nar] * 3)


@pytest.mark.quick
def test_names_and_what_is_refused():
    assert qt.posit(8) is qt.formats.POSIT8 is qt.format("posit8") is qt.format("posit8es2")
    for n, es, name in ((16, 2, "posit16"), (8, 1, "posit8es1"), (6, 0, "posit6es0")):
        fmt = qt.posit(n, es)
        assert (fmt.name, fmt.bits, qt.format(name.upper())) == (name, n, fmt)
        recipe = qt.Recipe(forward=qt.BlockFormat.tensor(fmt))
        assert qt.recipes.from_json(qt.recipes.to_json(recipe)) == recipe
    for arguments, why in (
        ((1, 2), "n=1, expected 2 to 16 bits"),
        ((17, 2), "n=17, expected 2 to 16 bits"),
        ((8, -1), "es=-1 with n=8, expected 0 or more"),
        ((16, 8), r"es=8 with n=16, .*2\*\*\(2\*\*es \* 14\), that is a float64"),
    ):
        refused(ValueError, f"^posit: {why}", qt.posit, *arguments)
    refused(TypeError, r"^posit: es=1\.5", qt.posit, 8, 1.5)
    refused(ValueError, r"^posit: n=32", qt.format, "posit32")
