"""The formats of IEEE P3109: the working group's tables row by row, its formulas to 16 bits."""

import csv
import gzip
import math
import re
from fractions import Fraction
from pathlib import Path

import gfloat
import gfloat.formats
import numpy as np
import pytest
from each import each
from refused import refused

import qtoolkit as qt
from qtoolkit import formats
from qtoolkit.formats import Overflow, Specials

pytestmark = pytest.mark.quick

TABLES = Path(__file__).parents[1] / "data" / "p3109_value_tables_k3_to_k8.csv.gz"
EVERY = [
    (bits, precision, signed, extended)
    for bits in range(3, 17)
    for signed in (True, False)
    for precision in range(1, bits + (not signed))
    for extended in (True, False)
]


def build(bits, precision, signed, extended):
    return qt.p3109(bits, precision, signed=signed, extended=extended)


def two(exponent):
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def test_every_row_of_the_value_tables():
    """Interim report v4.0, K = 3 to 8: 120 formats, 13,296 code points."""
    seen = {}
    with gzip.open(TABLES, "rt", newline="") as file:
        for row in csv.DictReader(file):
            fmt = seen.get(row["format"]) or qt.format(row["format"])
            seen[row["format"]] = fmt
            code, text = int(row["codepoint"], 16), row["value"]
            value = fmt.value(code)
            if text == "NaN":
                assert math.isnan(value), row
                assert fmt.nan_codes == (code,)
            elif text.endswith("Inf"):
                assert value == float(text), row
                assert fmt.inf_code == code or text == "-Inf"
            else:
                assert value == Fraction(float.fromhex(text)), row
                assert type(value) is Fraction
                assert (0 < abs(value) < fmt.min_normal) == (row["subnormal"] == "*"), row
            # Also without the name's parser.
            k, p, s, e = re.fullmatch(r"Binary(\d)p(\d)([su])([ef])", row["format"]).groups()
            if code == 0:
                assert build(int(k), int(p), s == "s", e == "e") == fmt
    assert len(seen) == 120
    assert sum(1 << fmt.bits for fmt in seen.values()) == 13296
    assert len(set(seen.values())) == 120


@each(("bits", "precision", "signed", "extended"), EVERY)
def test_formulas(bits, precision, signed, extended):
    fmt = build(bits, precision, signed, extended)
    bias = 2 ** (bits - precision - 1) if signed else 2 ** (bits - precision)
    assert (fmt.bits, fmt.mantissa_bits, fmt.bias) == (bits, precision - 1, bias)
    assert (fmt.signed, fmt.has_inf, fmt.has_negative_zero) == (signed, extended, False)
    assert fmt.overflow is (Overflow.INF if extended else Overflow.MAX)
    assert fmt.min_normal == two(1 - bias)
    assert fmt.min_subnormal == two(2 - bias - precision)
    assert fmt.epsilon == two(1 - precision)
    nan = 2 ** (bits - 1) if signed else 2**bits - 1
    inf = (2 ** (bits - 1) - 1 if signed else 2**bits - 2) if extended else None
    highest = (nan if inf is None else inf) - 1
    assert (fmt.nan_codes, fmt.nan_code, fmt.inf_code) == ((nan,), nan, inf)
    assert (fmt.max_code, fmt.value(0)) == (highest, 0)
    assert fmt.finite_count == 2**bits - 1 - (1 + signed) * extended
    # The top significand is 2 - 2**(1-P); each code less at the top is one step, or one binade,
    # less; the highest exponent is the bias less one where sign and range are symmetric.
    steps = 2 ** (precision - 1)
    below = extended + (not signed)  # codes at the top that are Inf or, unsigned, NaN
    binades, left = divmod(steps - 1 - below, steps)  # of the top binade, counted from its start
    expected = two(bias - 1 + binades) * (1 + Fraction(left, steps))
    assert fmt.max_finite == expected
    assert fmt.lowest == (-expected if signed else 0)
    if extended:
        assert fmt.value(inf) == math.inf
        if signed:
            assert fmt.value(2**bits - 1) == -math.inf
    elif signed:
        assert fmt.value(2**bits - 1) == -expected
    assert math.isnan(fmt.value(nan))
    assert qt.format(fmt.name.replace("b", "B", 1)) == fmt
    assert fmt.name == f"binary{bits}p{precision}{'su'[not signed]}{'fe'[extended]}"
    assert fmt.code_dtype == np.dtype("uint8" if bits <= 8 else "uint16")
    assert fmt.dtype is None


# gfloat computes in float64, which holds no more than these.
IN_FLOAT64 = [case for case in EVERY if 2 ** (case[0] - case[1] - case[2]) <= 512]


@each(("bits", "precision", "signed", "extended"), IN_FLOAT64)
def test_gfloat_agrees(bits, precision, signed, extended):
    fmt = build(bits, precision, signed, extended)
    info = gfloat.formats.format_info_p3109(
        bits,
        precision,
        gfloat.Signedness.Signed if signed else gfloat.Signedness.Unsigned,
        gfloat.Domain.Extended if extended else gfloat.Domain.Finite,
    )
    assert fmt.max_finite == Fraction(info.max)
    assert fmt.lowest == Fraction(info.min)
    assert fmt.min_subnormal == Fraction(info.smallest)
    rng = np.random.default_rng(bits * 100 + precision)
    edges = {0, 1, fmt.max_code, fmt.max_code + 1, 1 << (bits - 1), (1 << bits) - 1}
    for code in edges | {int(code) for code in rng.integers(0, 1 << bits, 20)}:
        ours, theirs = float(fmt.value(code)), gfloat.decode_float(info, code).fval
        assert ours == theirs or (math.isnan(ours) and math.isnan(theirs))


# P3109, table of the 8-bit signed formats: bias, max extended, max finite, min normal, subnormal.
SIGNED_8 = {
    1: (64, two(62), two(63), two(-63), None),
    2: (32, 2147483648, 3221225472, two(-31), two(-32)),
    3: (16, 49152, 57344, two(-15), two(-17)),
    4: (8, 224, 240, two(-7), two(-10)),
    5: (4, 15, Fraction(31, 2), two(-3), two(-7)),
    6: (2, Fraction(31, 8), Fraction(63, 16), two(-1), two(-6)),
    7: (1, Fraction(63, 32), Fraction(127, 64), 1, two(-6)),
}


@pytest.mark.parametrize("precision", SIGNED_8)
def test_the_published_8_bit_table(precision):
    bias, extended, finite, normal, subnormal = SIGNED_8[precision]
    for fmt, largest in (
        (qt.p3109(8, precision), extended),
        (qt.p3109(8, precision, extended=False), finite),
    ):
        assert (fmt.bias, fmt.max_finite, fmt.min_normal) == (bias, largest, normal)
        assert fmt.min_subnormal == (normal if subnormal is None else subnormal)


def test_two_of_them_are_the_fnuz_formats():
    for fmt, other in (("8p3sf", formats.E5M2FNUZ), ("8p4sf", formats.E4M3FNUZ)):
        np.testing.assert_array_equal(qt.format(f"binary{fmt}").values(), other.values())


def test_names():
    fmt = qt.p3109(8, 3)
    assert (fmt.name, fmt.specials) == ("binary8p3se", Specials.EXTENDED)
    for name in ("Binary8p3se", "BINARY8P3SE", "binary8p3SE", "binary8p3", fmt.name):
        assert qt.format(name) == fmt
    assert qt.format("binary8p3") == qt.p3109(8, 3, signed=True, extended=True)
    assert qt.format("Binary8p8uf") == qt.p3109(8, 8, signed=False, extended=False)
    assert qt.format("binary16").name == "float16"  # IEEE 754's, not P3109's
    assert hash(qt.p3109(8, 3)) == hash(fmt)
    assert qt.p3109(8, 3) != qt.p3109(8, 3, extended=False)


@pytest.mark.parametrize(
    ("arguments", "range_"),
    [
        ({"bits": 2, "precision": 1}, "bits - 1"),
        ({"bits": 17, "precision": 3}, "bits - 1"),
        ({"bits": 8, "precision": 0}, "bits - 1"),
        ({"bits": 8, "precision": 8}, "bits - 1"),
        ({"bits": 8, "precision": 9, "signed": False}, "bits"),
        ({"bits": -8, "precision": -9}, "bits - 1"),
    ],
)
def test_out_of_range(arguments, range_):
    bits, precision = arguments["bits"], arguments["precision"]
    message = (
        f"^p3109: bits={bits}, precision={precision}, expected 3 to 16 bits and a precision of "
        f"1 to {range_}$"
    )
    refused(ValueError, message, qt.p3109, **arguments)


@pytest.mark.parametrize("name", ["Binary8p9se", "binary2p1se", "binary17p3uf", "Binary8p8se"])
def test_names_out_of_range(name):
    refused(ValueError, r"^p3109: bits=\d+, precision=\d", qt.format, name)


@pytest.mark.parametrize("name", ["binary8p3s", "binary8p3xe", "binary8", "8p3se", "binary8p3se "])
def test_what_is_no_p3109_name(name):
    refused(ValueError, f"^format: unknown format '{name}'", qt.format, name)


def test_what_float64_does_not_hold_has_no_list_of_values():
    fmt = qt.p3109(16, 1)
    assert fmt.max_finite == two(2**14 - 2)
    assert fmt.value(1) == two(1 - 2**14)
    refused(ValueError, r"^binary16p1se: float64 does not hold every value; use", fmt.values)
    assert qt.p3109(16, 8).values().shape == (65536,)


def test_widths_may_be_integers_of_numpy():
    for bits in np.arange(3, 17, dtype=np.int8):
        assert qt.p3109(bits, np.uint8(2)) == qt.p3109(int(bits), 2)
        assert qt.IntFormat(name="made", bits=bits) == qt.IntFormat(name="made", bits=int(bits))
        assert qt.IntFormat(name="made", bits=bits).max_finite == 2 ** (int(bits) - 1) - 1
