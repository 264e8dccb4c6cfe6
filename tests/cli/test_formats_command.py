"""`qtoolkit formats`: the tables, and the page of one format."""

import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from command import run as run_command
from each import each

import qtoolkit as qt
from qtoolkit.cli import _formats
from qtoolkit.formats import BLOCK_FORMATS, FORMATS, FloatFormat, IntFormat, TableFormat

NAMES = [fmt.name for fmt in FORMATS]
PAGES = [*NAMES, "binary8p3se", "binary8p1se", "binary3p1ue", "binary16p16uf", "int1", "uint3"]
CLAMPED = "clamped to the largest value"
POSIT_INFINITY = '; infinity becomes NaN with saturation="propagate" or "none"'


def run(*arguments, columns=80):
    return run_command("formats", *arguments, env={"COLUMNS": str(columns)})


def number(text):
    """What `exact` wrote."""
    if text.startswith("-"):
        return -number(text[1:])
    if match := re.fullmatch(r"2-2\^-(\d+)", text):
        return 2 - Fraction(1, 2 ** int(match[1]))
    if match := re.fullmatch(r"2\^(\d+)-1", text):
        return Fraction(2 ** int(match[1]) - 1)
    factor, _, power = text.rpartition("*") if "*" in text or "^" not in text else ("", "", text)
    if "^" not in power:
        return Fraction(power)
    scale = Fraction(2) ** int(power.removeprefix("2^"))
    return (number(factor.strip("()")) if factor else 1) * scale


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (448, "448"),
        (-8, "-8"),
        (999999, "999999"),
        (Fraction(1, 512), "2^-9"),
        (Fraction(7, 512), "7*2^-9"),
        (Fraction(31, 2), "15.5"),
        (Fraction(-7, 4), "-1.75"),
        (2**24, "2^24"),
        (3 * 2**30, "3*2^30"),
        (2**63 - 1, "2^63-1"),
        (-(2**63), "-2^63"),
        ((2 - Fraction(1, 128)) * 2**127, "(2-2^-7)*2^127"),
        (2 - Fraction(1, 2**14), "2-2^-14"),
        (Fraction(float(np.float32(0.0795803))), "0.0795803"),
    ],
)
def test_numbers_are_exact_and_short(value, text):
    assert _formats.exact(Fraction(value)) == text
    if text != "0.0795803":  # the float32 of that name, which is how NF4 is published
        assert number(text) == value


def test_four_tables_of_at_most_100_columns():
    result = run()
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    tables = [block.splitlines() for block in result.stdout.split("\n\n")]
    assert [lines[0].split()[0] for lines in tables] == [
        *("floats", "tables", "integers", "blocks"),
        "Also:",
    ]
    for lines, kind in zip(tables, (FloatFormat, TableFormat, IntFormat), strict=False):
        listed = [line.split()[0] for line in lines[1:]]
        assert listed == [fmt.name for fmt in FORMATS if isinstance(fmt, kind)]
    blocks = {line.split()[0]: line.split() for line in tables[3][1:]}
    assert list(blocks) == [fmt.name for fmt in BLOCK_FORMATS]
    assert blocks["nvfp4"][1:] == ["e2m1fn", "16", "e4m3fn", "amax", "float32", "4.5"]
    assert blocks["mxfp8_e4m3"][1:] == ["e4m3fn", "32", "e8m0fnu", "rceil", "none", "8.25"]
    assert blocks["deepseek_128x128"][2] == "128x128"
    assert "`qtoolkit formats NAME`" in result.stdout


def test_a_block_format_has_a_page_with_that_of_its_elements():
    result = run("MXINT8")
    assert result.exit_code == 0
    assert result.stdout.startswith("mxint8: blocks of 32 int8 with scales in e8m0fnu\n")
    assert "count 2^-6" in result.stdout
    assert "int8: two's complement integer of 8 bits" in result.stdout


def test_rows():
    rows = {line.split()[0]: line.split() for line in run().stdout.splitlines() if line}
    for line in (
        "e4m3fn 8 1/4/3 7 448 2^-6 2^-9 2^-3 no 0x7F, FF",
        "e5m2 8 1/5/2 15 57344 2^-14 2^-16 2^-2 yes 0x7D-7F, FD-FF",
        "e4m3fnuz 8 1/4/3 8 240 2^-7 2^-10 2^-3 no 0x80",
        "e8m0fnu 8 0/8/0 127 2^127 2^-127 2^-127 1 no 0xFF",
        "e2m1fn 4 1/2/1 1 6 1 2^-1 2^-1 no none",
        "float32 32 1/8/23 127 (2-2^-23)*2^127 2^-126 2^-149 2^-23 yes 2^24-2 codes",
        "float16 16 1/5/10 15 65504 2^-14 2^-24 2^-10 yes 2046 codes",
        "hifloat8 8 253 -32768 32768 2^-22 yes 0x80",
        "posit8 8 255 -2^24 2^24 2^-24 no 0x80",
        "nf4 4 16 -1 1 0.0795803 no none",
        "int64 64 -2^63 2^63-1",
        "uint4 4 0 15",
        "bool 1 0 1",
    ):
        assert rows[line.split()[0]] == line.split()


def test_printed_properties_equal_ml_dtypes_finfo():
    header, *rows = (re.split(r"  +", line) for line in run().stdout.splitlines() if line)
    for row in (dict(zip(header, row, strict=False)) for row in rows):
        fmt = next((f for f in FORMATS if f.name == row["floats"]), None)
        if isinstance(fmt, FloatFormat) and fmt.dtype:
            info = ml_dtypes.finfo(fmt.dtype)
            assert number(row["max"]) == Fraction(float(info.max))
            assert number(row["min normal"]) == Fraction(float(info.smallest_normal))
            assert number(row["smallest"]) == Fraction(float(info.smallest_subnormal))
            assert number(row["eps"]) == Fraction(float(info.eps))


def properties(text):
    pairs = re.findall(r"^  (\S[\w ]*?)  +(\S.*(?:\n    .*)*)", text.split("\n\n")[0], re.MULTILINE)
    return {name: " ".join(value.split()) for name, value in pairs}


@each("name", PAGES)
@each("columns", [80, 120])
def test_every_page_is_plain_text_of_the_width(name, columns):
    result = run(name, columns=columns)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns
    fmt = qt.format(name)
    found = properties(result.stdout)
    assert result.stdout.startswith(f"{name}: ")
    if name != "nf4":
        assert (number(found["max"]), number(found["lowest"])) == (fmt.max_finite, fmt.lowest)
    assert found["finite values"] == f"{fmt.finite_count:,}"


def test_the_page_of_e4m3fn():
    lines = run("F8_E4M3").stdout.splitlines()
    assert lines[0] == "e4m3fn: float of 8 bits (1 sign, 4 exponent, 3 mantissa), bias 7"
    assert "  zero           0x00, -0 is 0x80" in lines
    assert "  infinity       none" in lines
    assert "  NaN            0x7F, FF (2)" in lines
    assert "  stored as      codes of dtype uint8, or values of dtype float8_e4m3fn" in lines


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("e5m2", {"infinity": "0x7C, -Inf is 0xFC", "NaN": "0x7D-7F, FD-FF (6)"}),
        ("e8m0", {"zero": "none", "min subnormal": "no subnormals", "NaN": "0xFF (1)"}),
        ("float32", {"NaN": "0x7F800001-7FFFFFFF, FF800001-FFFFFFFF (2^24-2)"}),
        ("binary8p3se", {"zero": "0x00", "infinity": "0x7F, -Inf is 0xFF", "NaN": "0x80 (1)"}),
        ("binary8p3ue", {"infinity": "0xFE", "NaN": "0xFF (1)"}),
        ("hifloat8", {"infinity": "0x6F, -Inf is 0xEF", "NaN": "0x80 (1)"}),
        ("posit8", {"infinity": "none", "zero": "0x00", "overflow": CLAMPED + POSIT_INFINITY}),
        ("nf4", {"NaN": "none", "zero": "0x7", "smallest": "0.0795803"}),
        ("e4m3fn", {"overflow": CLAMPED + '; becomes NaN with saturation="none"'}),
        ("e2m1", {"overflow": CLAMPED}),
        ("bool", {"stored as": "codes of dtype uint8, or values of dtype bool"}),
    ],
)
def test_special_values(name, expected):
    found = properties(run(name).stdout)
    assert {field: found[field] for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "e4m3fm",
            "unknown format 'e4m3fm'; did you mean 'e4m3fn' or 'ue4m3' or 'e4m3fnuz'? `qtoo",
        ),
        ("complex64", "unknown format 'complex64'; `qtoolkit formats` lists all"),
        (
            "mxfp",
            "unknown format 'mxfp'; did you mean the block format 'mxfp8_e4m3' or 'mxfp8_e5m2'",
        ),
        ("E4M3", "'E4M3' is ambiguous, expected 'e4m3fn' (largest value 448) or 'e4m3_ieee' (larg"),
        ("Binary8p9se", "p3109: bits=8, precision=9, expected 3 to 16 bits and a precision of 1"),
        ("a\nb", r"unknown format 'a\nb'; "),
    ],
)
def test_unknown_names_are_one_line(name, message):
    result = run(name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"qtoolkit: {message}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("formats mxfp", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"]),
        ("formats e2m", ["e2m3fn", "e2m1fn"]),
        ("convert --format e5", ["e5m2", "e5m2fnuz"]),  # what a file can hold
    ],
)
def test_the_shell_completes_names_of_formats(line, expected):
    """Typer's script for bash sets these variables."""
    words = ["qtoolkit", *line.split()]
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    env = {"_QTOOLKIT_COMPLETE": "complete_bash", **asked}
    result = run_command(prog_name="qtoolkit", env=env)
    assert result.stdout.split() == expected
