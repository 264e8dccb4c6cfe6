"""Every code of the 120 formats for which the P3109 working group has tables."""

import collections
import csv
import gzip
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


@pytest.mark.quick
def test_the_values_of_the_tables():
    """What `decode` gives and what this suite's oracle has; float32 holds every value.

    Properties and exact values of the formats: `test_formats_p3109`.
    """
    tables = collections.defaultdict(list)
    with gzip.open(TABLES, "rt") as file:
        for name, _, text, _ in list(csv.reader(file))[1:]:
            special = text in ("NaN", "Inf", "-Inf")
            tables[name.lower()].append(float(text) if special else float.fromhex(text))
    specs = {name: spec for bits in range(3, 9) for name, spec in every_p3109(bits).items()}
    assert specs.keys() == tables.keys()
    for name, spec in specs.items():
        every = np.arange(len(tables[name]), dtype=np.uint8)
        np.testing.assert_array_equal(values64(spec), tables[name], err_msg=name)
        assert_same_bits(qt.decode(every, name), np.float32(tables[name]), every)


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
