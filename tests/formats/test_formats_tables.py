"""Table formats: HiFloat8, posits and NF4 against decoders of their papers; user-made tables."""

import copy
import math
import pickle
import re
import statistics
from fractions import Fraction

import numpy as np
import pytest
from each import each
from refused import refused

import qtoolkit as qt
from qtoolkit import formats
from qtoolkit.formats import Overflow, TableFormat

pytestmark = pytest.mark.quick


def hifloat8(code: int) -> float:
    """arXiv:2409.16626, table 2, read as text: sign, dot, exponent in sign-magnitude, mantissa."""
    if code in (0x00, 0x80):
        return math.nan if code else 0.0
    if code in (0x6F, 0xEF):
        return math.inf if code == 0x6F else -math.inf
    sign, dot, rest = re.fullmatch(r"([01])(11|10|01|001|0001|0000)([01]*)", f"{code:08b}").groups()
    if dot == "0000":
        value = Fraction(2) ** (int(rest, 2) - 23)
    else:
        width = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0}[dot]
        exponent_text, mantissa_text = rest[:width], rest[width:]
        exponent = int("1" + exponent_text[1:], 2) if width else 0
        if exponent_text[:1] == "1":
            exponent = -exponent
        mantissa = Fraction(int(mantissa_text, 2), 2 ** len(mantissa_text))
        value = (1 + mantissa) * Fraction(2) ** exponent
    return float(-value if sign == "1" else value)


def posit(code: int, bits: int) -> float:
    """Standard for Posit Arithmetic (2022), section 3.3: the formula that needs no complement."""
    if code == 0:
        return 0.0
    text = f"{code:0{bits}b}"
    if set(text[1:]) == {"0"}:
        return math.nan
    sign = int(text[0])
    run = re.match("0+|1+", text[1:]).group()
    regime = len(run) - 1 if run[0] == "1" else -len(run)
    tail = text[1 + len(run) + 1 :]
    exponent = int((tail + "00")[:2], 2)
    fraction = Fraction(int(tail[2:] or "0", 2), 2 ** max(len(tail) - 2, 0))
    scale = (1 - 2 * sign) * (4 * regime + exponent + sign)
    return float(((1 - 3 * sign) + fraction) * Fraction(2) ** scale)


def same(ours, theirs):
    return ours == theirs or (math.isnan(ours) and math.isnan(theirs))


@each("code", range(256))
def test_hifloat8_and_posit8_code_by_code(code):
    assert same(formats.HIFLOAT8.value(code), hifloat8(code))
    assert same(formats.POSIT8.value(code), posit(code, 8))


def test_hifloat8_landmarks():
    fmt = qt.format("hif8")
    assert fmt is formats.HIFLOAT8
    assert (fmt.value(0x08), fmt.value(0x88), fmt.value(0x6E)) == (1, -1, 2**15)
    assert (fmt.max_finite, fmt.lowest) == (2**15, -(2**15))
    assert (fmt.min_positive, fmt.value(0x7E)) == (Fraction(1, 2**22), Fraction(1, 2**15))
    assert (fmt.inf_code, fmt.nan_code, fmt.nan_codes, fmt.max_code) == (0x6F, 0x80, (0x80,), 0x6E)
    assert (fmt.finite_count, fmt.overflow, fmt.beyond) == (253, Overflow.INF, 49152)
    assert fmt.mantissa_bits == 3
    exponents = {math.frexp(value)[1] for value in fmt.finite if value > 0}
    assert len(exponents) == 38


def test_posit8_landmarks_and_ties():
    fmt = formats.POSIT8
    assert (fmt.value(0x40), fmt.value(0xC0), fmt.max_finite) == (1, -1, 2**24)
    assert (fmt.min_positive, fmt.nan_codes, fmt.finite_count) == (Fraction(1, 2**24), (0x80,), 255)
    assert (fmt.overflow, fmt.beyond, fmt.has_inf) == (Overflow.NAN, None, False)
    # In order of value the codes are the two's-complement integers from -127 to 127.
    assert fmt.codes == tuple(c % 256 for c in range(-127, 128))
    # Between neighbours decides the posit of a bit more; zero is nobody's neighbour.
    assert len(fmt.ties) == 254
    for c, tie in zip(range(-127, 127), fmt.ties, strict=True):
        assert tie == (0 if c in (-1, 0) else posit((2 * c + 1) % 512, 9))
    ties = dict(zip(fmt.finite, fmt.ties, strict=False))
    assert ties[1.0] == 1.0625  # the midpoint, where fraction bits are left
    assert ties[2.0**20] == 2.0**22  # the geometric mean, where exponent bits are cut off
    assert ties[2.0**-24] == 2.0**-22


def test_nf4():
    """The constants of bitsandbytes, and where they come from: quantiles of N(0, 1)."""
    fmt = formats.NF4
    published = (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
    np.testing.assert_array_equal(fmt.values().astype(np.float32), np.float32(published))
    assert fmt.values().astype(np.float32).tolist() == fmt.values().tolist()
    assert fmt.codes == tuple(range(16))
    quantile, offset = statistics.NormalDist().inv_cdf, 0.9677083
    positive = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    expected = np.array(sorted([*positive, 0.0, *negative])) / max(positive)
    np.testing.assert_allclose(fmt.values(), expected, atol=1e-6)
    assert (fmt.bits, fmt.signed, fmt.has_nan, fmt.has_inf) == (4, True, False, False)
    assert (fmt.nan_code, fmt.inf_code, fmt.overflow) == (None, None, Overflow.MAX)
    assert (fmt.max_finite, fmt.lowest, fmt.min_positive) == (1, -1, Fraction(fmt.finite[8]))
    assert (fmt.ties, fmt.beyond, fmt.mantissa_bits) == (None, None, 23)


@pytest.mark.parametrize(
    "fmt", [formats.HIFLOAT8, formats.POSIT8, formats.NF4], ids=lambda f: f.name
)
def test_a_table_as_the_rest_of_the_library_sees_it(fmt):
    assert (fmt.dtype, fmt.code_dtype, fmt.needs_scale) == (None, np.dtype(np.uint8), True)
    values = fmt.values()
    assert (values.dtype, values.shape) == (np.dtype(np.float64), (2**fmt.bits,))
    np.testing.assert_array_equal(values, fmt.values_by_code)
    assert all(fmt.values_by_code[c] == v for c, v in zip(fmt.codes, fmt.finite, strict=True))
    assert list(fmt.finite) == sorted(fmt.finite)
    for code in (-1, 2**fmt.bits):
        refused(ValueError, rf"^{fmt.name}: code {code}", fmt.value, code)


def made(values, **fields):
    return TableFormat(name="made", values_by_code=values, **fields)


def test_tables_of_ones_own():
    fmt = made(np.array([0, 3, -1, np.nan]), overflow=Overflow.NAN, ties=[-0.25, 1.0])
    assert (fmt.finite, fmt.codes, fmt.bits) == ((-1.0, 0.0, 3.0), (2, 0, 1), 2)
    assert (fmt.max_code, fmt.nan_codes, fmt.mantissa_bits) == (1, (3,), 1)
    assert fmt.ties == (-0.25, 1.0)
    assert fmt.signed
    assert not made((0, 1)).signed
    assert made((math.inf, -math.inf, 0, 5), overflow=Overflow.INF, beyond=6).inf_code == 0
    wide = made(tuple(range(2**16)))
    assert (wide.bits, wide.code_dtype, wide.codes[-1]) == (16, np.dtype(np.uint16), 2**16 - 1)


def test_equal_hashable_and_picklable_whichever_nan():
    first, second = (made((0, 1, float("nan"), 2), overflow=Overflow.NAN) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    for fmt in (first, formats.HIFLOAT8, formats.POSIT8):
        for other in (copy.copy(fmt), copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt))):
            assert other == fmt
            assert hash(other) == hash(fmt)
            assert other.spellings == fmt.spellings


@each(("why", "cases"), [
    ("values, expected one for each code of 1 to 16 bits", [
        ((1.0,), {}), ((0, 1, 2), {}), ((), {}), (range(2**17), {}),
    ]),
    ("expected two finite values or more, each only once", [
        ((1, math.nan), {}), ((1, 1), {}), ((0.0, -0.0), {}),
    ]),
    ("no positive finite value, expected at least one", [((-1, 0), {})]),
    ("NaN and each infinity must come at most once", [
        ((0, 1, math.nan, math.nan), {}), ((0, 1, math.inf, math.inf), {}),
    ]),
    ("overflow=INF, but no code is inf", [
        ((0, 1), {"overflow": Overflow.INF}), ((0, 1, 2, -math.inf), {"overflow": Overflow.INF}),
    ]),
    ("overflow=NAN, but no code is nan", [((0, 1), {"overflow": Overflow.NAN})]),
    ("expected 1 ties, each between its neighbouring values", [
        ((0, 1), {"ties": ties}) for ties in ((), (2,), (math.nan,))
    ]),
    ("expected more than the largest magnitude", [
        ((0, 1), {"beyond": 1.0}), ((-9, 1), {"beyond": 2.0}), ((0, 1), {"beyond": math.nan}),
    ]),
])  # fmt: skip
def test_bad_tables_raise(why, cases):
    for values, fields in cases:
        refused(ValueError, rf"^TableFormat 'made': .*{why}", made, values, **fields)


def test_bad_types_raise():
    refused(TypeError, r"^TableFormat 'made': overflow='inf'", made, (0, 1), overflow="inf")
    with pytest.raises(TypeError, match="positional"):
        TableFormat("made", (0, 1))
