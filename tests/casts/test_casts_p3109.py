"""Every code of the 120 formats for which the P3109 working group has tables."""

import csv
import functools
import gzip
import math
from fractions import Fraction
from pathlib import Path

import gfloat
import gfloat.formats
import numpy as np
import pytest
from casts_oracle import assert_same_bits, every_p3109, p3109, p3109_name, values64
from refused import refused

import qtoolkit as qt

# P3109/Public, folder "Value Tables/Hexadecimal", of the interim report v4.0.
TABLES = Path(__file__).parent.parent / "data" / "p3109_value_tables_k3_to_k8.csv.gz"


@functools.cache
def _tables() -> dict[str, list[tuple[int, Fraction | float, bool]]]:
    """By format: code, value, whether it is subnormal."""
    tables: dict[str, list] = {}
    with gzip.open(TABLES, "rt") as file:
        for name, code, text, subnormal in list(csv.reader(file))[1:]:
            value = float(text) if text in ("NaN", "Inf", "-Inf") else _fraction(text)
            tables.setdefault(name, []).append((int(code, 16), value, subnormal == "*"))
    return tables


def _fraction(text: str) -> Fraction:
    """A C99 hexadecimal float, exactly."""
    significand, exponent = text.lower().replace("0x", "").split("p")
    digits, _, places = significand.partition(".")
    value = Fraction(int(digits + places, 16), 16 ** len(places))
    return value * Fraction(2) ** int(exponent)


def test_there_are_13296_rows_of_120_formats():
    tables = _tables()
    assert len(tables) == 120
    assert sum(map(len, tables.values())) == 13296
    ours = {name for bits in range(3, 9) for name in every_p3109(bits)}
    assert {name.lower() for name in tables} == ours


@pytest.mark.quick
@pytest.mark.parametrize("bits", range(3, 9))
def test_every_code_has_the_value_of_the_tables(bits):
    """Fractions on both sides; also what the properties say, and this suite's own oracle."""
    for name, spec in every_p3109(bits).items():
        fmt = qt.format(name)
        rows = _tables()[name.replace("binary", "Binary", 1)]
        assert [code for code, _, _ in rows] == list(range(2**bits))
        for code, expected, _ in rows:
            for got in (fmt.value(code), spec.value(code)):
                same = got == expected or (math.isnan(got) and math.isnan(expected))
                assert same, f"{name} {code:#x}: got {got}, expected {expected}"
        finite = {code: value for code, value, _ in rows if math.isfinite(value)}
        assert fmt.max_finite == max(finite.values())
        assert fmt.lowest == min(finite.values())
        assert fmt.finite_count == len(finite)
        assert fmt.max_code == max(finite, key=finite.get)
        assert fmt.min_subnormal == min(v for v in finite.values() if v > 0)
        assert list(fmt.nan_codes) == [code for code, v, _ in rows if math.isnan(v)]
        assert fmt.nan_code == fmt.nan_codes[0]
        assert fmt.has_inf == any(v == math.inf for _, v, _ in rows)
        if fmt.has_inf:
            assert rows[fmt.inf_code][1] == math.inf
        for code, value, subnormal in rows:
            if code in finite and value != 0:
                assert subnormal == (abs(value) < fmt.min_normal)


@pytest.mark.sample("3")
@pytest.mark.parametrize("bits", range(3, 9))
def test_decode_gives_the_values_of_the_tables(bits):
    """float32 holds every value of these formats."""
    every = np.arange(2**bits, dtype=np.uint8)
    for name in every_p3109(bits):
        rows = _tables()[name.replace("binary", "Binary", 1)]
        expected = np.array([float(value) for _, value, _ in rows])
        assert_same_bits(qt.decode(every, name), expected.astype(np.float32), every)
        np.testing.assert_array_equal(qt.format(name).values(), expected)


def test_names_and_the_constructor_agree():
    for bits in range(3, 9):
        for name, spec in every_p3109(bits).items():
            signed, extended = name[-2] == "s", name[-1] == "e"
            made = qt.p3109(bits, spec.mantissa + 1, signed=signed, extended=extended)
            assert made == qt.format(name) == qt.format(name.replace("b", "B", 1))
            assert made.name == name
            assert made.bits == bits
    assert qt.p3109(8, 3) == qt.format("Binary8p3se")


@pytest.mark.sample("binary9p4se")
@pytest.mark.parametrize(
    "fields",
    [
        *((9, 4, True, True), (10, 1, False, False), (12, 5, True, False), (16, 16, False, True)),
        *((16, 11, True, True), (16, 8, False, False)),
    ],
    ids=lambda fields: p3109_name(*fields),
)
def test_wider_formats_decode_as_gfloat(fields):
    """The tables end at 8 bits; here gfloat's decode and this suite's oracle."""
    bits, precision, signed, extended = fields
    info = gfloat.formats.format_info_p3109(
        bits,
        precision,
        gfloat.Signedness.Signed if signed else gfloat.Signedness.Unsigned,
        gfloat.Domain.Extended if extended else gfloat.Domain.Finite,
    )
    every = np.arange(2**bits)
    expected = gfloat.decode_ndarray(info, every)
    np.testing.assert_array_equal(values64(p3109(*fields)), expected)
    np.testing.assert_array_equal(qt.format(p3109_name(*fields)).values(), expected)


def test_the_widest_range_has_exact_values():
    """Binary16p1se reaches 2**+-16383, which no float of JAX holds."""
    fmt, spec = qt.p3109(16, 1), p3109(16, 1, True, True)
    for code in (1, 2, 16384, fmt.max_code, fmt.sign_code + 1):
        assert fmt.value(code) == spec.value(code)
    assert fmt.max_finite == Fraction(2) ** (fmt.max_code - 2**14)
    refused(ValueError, "binary16p1se", qt.decode, np.zeros(1, np.uint16), fmt)
