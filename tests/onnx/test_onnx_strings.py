"""Text to numbers and numbers to text.

Oracles: rational arithmetic (`fractions`) on the text, and numpy's shortest digits.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from each import each
from onnx_oracle import DTYPES, FIELDS, FLOAT8, INTEGERS, codes, nearest, wide
from refused import refused

from qtoolkit.onnx import cast

SMALL = ("FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2", *FLOAT8)


def beside_ties(name):
    """Decimals on ties of the type and a hair beside them, at both ends of its range and between.

    The hair is far below half an ulp of float64: a double on the way would lose it.
    """
    bits, least, largest = FIELDS[name]
    rng = np.random.default_rng(2)
    top = int(math.log2(float(largest)))
    result = []
    for exponent in [least - 1, least, 0, 1, top - 1, *rng.integers(least, top, 6).tolist()]:
        step = Fraction(2) ** (max(exponent, least) - bits + 1)
        for odd in (*rng.integers(2 ** (bits - 1), 2**bits, 3).tolist(), 2**bits - 1, 0):
            tie = (odd + Fraction(1, 2)) * step
            result += [tie, tie * (1 + Fraction(1, 10**40)), tie * (1 - Fraction(1, 10**40))]
    return result


def decimal(x: Fraction, scientific: bool) -> str:
    """A finite decimal in full, or cut far behind its first digits."""
    shift = 0
    while x.denominator != 1 and shift < 1200:
        x, shift = x * 10, shift + 1
    digits = str(int(x)).rjust(1 if scientific else shift + 1, "0")
    if scientific:
        return f"{digits[0]}.{digits[1:]}E{len(digits) - 1 - shift:+d}"
    return f"{digits[: len(digits) - shift]}.{digits[len(digits) - shift :]}"


@pytest.mark.sample("DOUBLE", "FLOAT16", "FLOAT8E4M3FNUZ")
@pytest.mark.parametrize("name", FIELDS)
def test_text_is_rounded_once_to_every_float_type(name):
    numbers = beside_ties(name)
    texts, wanted = [], []
    for i, x in enumerate(numbers):
        text = ("-" if i % 3 == 0 else "+" if i % 3 == 1 else "") + decimal(x, i % 2 == 0)
        texts.append(text)
        mantissa, _, exponent = text.partition("E")
        exact = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
        wanted.append(float(nearest(exact, name)))
    assert len(set(wanted)) > 20
    with jax.enable_x64(True):
        got = np.asarray(cast(np.array(texts), name))
    assert got.dtype == DTYPES[name]
    np.testing.assert_array_equal(got.astype(np.float64), wanted)


def test_a_double_on_the_way_would_round_twice():
    text = "1.00048828125" + "0" * 30 + "1"  # just above the tie of 1 and 1 + 2**-10
    assert cast(text, "FLOAT16") == np.float16(1 + 2.0**-10)
    assert np.float64(text).astype(np.float16) == 1


@pytest.mark.quick
def test_the_page_s_words():
    texts = np.array(["3.14", "1000", "1e-5", "1E8", "+INF", "INF", "-INF", "NaN", "inf", "nAn"])
    wanted = np.float32([3.14, 1000, 1e-5, 1e8, np.inf, np.inf, -np.inf, np.nan, np.inf, np.nan])
    for x in (
        texts,
        texts.astype(np.bytes_),
        texts.astype(object),
        texts.astype(np.dtypes.StringDType()),
        texts.astype(np.bytes_).astype(object),
    ):
        np.testing.assert_array_equal(cast(x, "FLOAT"), wanted)
        assert cast(x.reshape(2, 5), "FLOAT").shape == (2, 5)
    assert cast("100.5", "INT32") == 100
    assert cast(np.array([314.15926]), "STRING") == "314.15926"


@each(("text", "number"), [
    (" 1.5\t", 1.5), ("5.", 5.0), (".5", 0.5), ("+.5e+1", 5.0), ("-0", -0.0), ("00012", 12.0),
    ("1e400", np.inf), ("-1e400", -np.inf), ("1e-400", 0.0), ("-1e-400", -0.0), ("0e999", 0),
    ("1e" + "9" * 5000, np.inf), ("1e-" + "9" * 5000, 0.0), ("9" * 6000, np.inf),
    ("0." + "0" * 6000 + "1e6001", 1.0), ("1" + "0" * 6000 + "e-6000", 1.0),
])  # fmt: skip
def test_forms_of_numbers(text, number):
    got = np.asarray(cast(text, "FLOAT"))
    assert got == number
    assert np.signbit(got) == np.signbit(number)


@each("text", [
    "Hello World!", "", " ", ".", "e5", "1e", "1e+", "1.5abc", "1,5", "1_000", "0x1p3", "--1",
    "infinity", "-NaN", "nan(1)", "true", "1 2", "٣", "½", "1e5.0", "+ 1", "1\x00",
])  # fmt: skip
@each("to", ["FLOAT", "INT8", "BOOL", "FLOAT8E8M0", "FLOAT6E3M2"])
def test_text_that_is_no_number(text, to):
    x = np.array([["1", "2", "3"], ["4", text, "no"]], object)
    refused(ValueError, r"onnx.cast: x\[1, 1\] is ", cast, x, to)
    refused(ValueError, r"onnx.cast: x is ", cast, text, to)


def test_elements_that_are_no_text():
    x = np.array(["1", 2.0, None], object)
    refused(TypeError, r"onnx.cast: x\[1\] is 2.0 of type float", cast, x, "FLOAT")
    missing = np.array(["1", None], np.dtypes.StringDType(na_object=None))
    refused(TypeError, r"x\[1\] is None of type NoneType", cast, missing, "STRING")
    with refused(ValueError, r"x\[0\] is b'\\xff', which is no UTF-8"):
        cast(np.array([b"\xff"]), "FLOAT")
    long = np.array(["x" * 10**5])
    with pytest.raises(ValueError, match=r"onnx\.cast") as error:
        cast(long, "FLOAT")
    assert len(str(error.value)) < 250


@pytest.mark.sample("INT2", "INT4", "INT8", "INT32", "INT64", "UINT4", "UINT16", "UINT32")
@pytest.mark.parametrize("to", INTEGERS)
def test_text_to_integers(to):
    lowest, bits = INTEGERS[to]
    highest = lowest + 2**bits - 1
    texts = ["0", "1", "-1", "0.5", "1.5", "2.5", "-0.5", "-1.5", "100.5", "1e3", "9" * 30, "NaN"]
    texts += [str(v + d) for v in (lowest, highest) for d in (-1, 0, 1)]
    texts += [f"{highest}.5", f"{highest}.4999999999999999999999", "-inf", "INF", "1e-9", "1e5000"]
    texts += ["-1e5000", "3" + "0" * 5000 + "7"]
    wanted = []
    for text in texts:
        word = text.lower().lstrip("-")
        if word in ("inf", "nan"):
            wanted.append(0 if word == "nan" else lowest if text[0] == "-" else highest)
            continue
        mantissa, _, exponent = text.partition("e")
        whole, _, fraction = mantissa.partition(".")
        sign = "-" if text[0] == "-" else ""
        chunks = [whole.lstrip("-")[i : i + 1000] for i in range(0, len(whole.lstrip("-")), 1000)]
        size = 0
        for chunk in chunks:  # Python reads no more than 4300 digits at once
            size = size * 10 ** len(chunk) + int(chunk)
        exact = (size + Fraction(f"0.{fraction or 0}")) * Fraction(10) ** int(exponent or 0)
        exact = -exact if sign else exact
        if bits <= 4:
            wanted.append((round(exact) - lowest) % 2**bits + lowest)
        else:
            wanted.append(min(max(int(exact), lowest), highest))
    with jax.enable_x64(True):
        got = np.asarray(cast(np.array(texts), to))
    assert got.dtype == DTYPES[to]
    assert got.astype(object).tolist() == wanted


def test_text_to_the_other_types():
    x = np.array(["0", "-0.0", "0e9", "1e-9999", "NaN", "-INF", "0.1"])
    np.testing.assert_array_equal(cast(x, "BOOL"), [False, False, False, True, True, True, True])
    # "up": 2**-3 is 0.125, and no double lies between it and the second.
    x = np.array(["0.125", "0.125" + "0" * 40 + "1", "0", "1e99", "nan"])
    got = codes(cast(x, "FLOAT8E8M0"), "FLOAT8E8M0").tolist()
    assert got == [124, 125, 0, 254, 255]
    got = cast(np.array(["1.25", "1.25" + "0" * 40 + "1", "9", "-0"]), "FLOAT4E2M1")
    assert codes(got, "FLOAT4E2M1").tolist() == [2, 3, 7, 8]
    assert cast(np.array(["1e9", "nan"]), "FLOAT8E4M3FN", saturate=False).tolist()[0] != 448
    np.testing.assert_array_equal(cast(np.array([b"a", b"\xc3\xa9"]), "STRING"), ["a", "é"])


def test_text_inside_jit_is_a_constant():
    texts = np.array(["1.5", "2"])
    compiled = jax.jit(lambda y: y + cast(texts, "FLOAT") + cast(texts, "INT8").astype(np.float32))
    np.testing.assert_array_equal(compiled(jnp.zeros(2)), [2.5, 4])


@pytest.mark.sample("FLOAT16", "DOUBLE")
@pytest.mark.parametrize("name", ["FLOAT16", "FLOAT", "DOUBLE"])
def test_ieee_floats_print_the_fewest_digits_in_plain_notation(name):
    rng = np.random.default_rng(4)
    width = DTYPES[name].itemsize
    patterns = rng.integers(0, 2**63, 2000, np.uint64).astype(f"uint{8 * width}")
    x = np.concatenate(
        [patterns.view(DTYPES[name]), np.array([1e-5, 1e4, 1, -0.0, 0.1], DTYPES[name])]
    )
    with np.errstate(over="ignore"):
        x = x[np.isfinite(x)]
    with jax.enable_x64(True):
        texts = cast(x, "STRING")
        assert texts.dtype.kind == "U"
        back = np.asarray(cast(texts, name))
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(np.signbit(back), np.signbit(x))
    for text, value in zip(texts.tolist(), x, strict=True):
        assert set(text) <= set("-.0123456789")
        scientific = np.format_float_scientific(value, unique=True, trim="-")
        assert Fraction(text) == Fraction(scientific)
        assert "." not in text or not text.endswith(("0", "."))


def test_known_numbers_in_print():
    x = np.array([1, 1e-5, 123456789, 0.1, -2.5, 1e10, np.inf, -np.inf, np.nan, -np.nan, -0.0])
    wanted = "1 0.00001 123456790 0.1 -2.5 10000000000 INF -INF NaN NaN -0"
    assert cast(x.astype(np.float32), "STRING").tolist() == wanted.split()
    assert cast(np.array([True, False]), "STRING").tolist() == ["1", "0"]
    big = np.array([2**64 - 1], np.uint64)
    assert cast(big, "STRING").tolist() == ["18446744073709551615"]
    assert cast(np.array([-(2**63)]), "STRING").tolist() == ["-9223372036854775808"]
    assert cast(jnp.asarray([-8, 7], jnp.int4), "STRING").tolist() == ["-8", "7"]
    assert cast(1.5, str) == "1.5"
    assert cast(np.ones((2, 0), np.float32), str).shape == (2, 0)


@pytest.mark.sample("BFLOAT16", "FLOAT8E4M3FNUZ")
@pytest.mark.parametrize("name", ["BFLOAT16", *SMALL])
def test_narrow_floats_print_the_fewest_digits(name):
    """Every number of the type: what is printed reads back, and nothing shorter does."""
    bits = {"BFLOAT16": 16, "FLOAT4E2M1": 4, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}.get(name, 8)
    x = np.arange(2**bits, dtype=f"uint{max(bits, 8)}").view(DTYPES[name])
    if name == "BFLOAT16":
        x = x[np.random.default_rng(1).integers(0, x.size, 1500)]
    texts = cast(x, "STRING")
    back = codes(cast(texts, name, saturate=False), name)
    np.testing.assert_array_equal(back, canonical(x, name))
    shorter, index = [], []
    largest = np.nanmax(np.where(np.isfinite(wide(x)), wide(x), np.nan))
    for i, text in enumerate(texts.tolist()):
        digits = text.lstrip("-").replace(".", "").strip("0")
        # To the largest number reads whatever is larger.
        if len(digits) < 2 or not digits.isdigit() or abs(wide(x)[i]) == largest:
            continue
        # All numbers of one digit fewer next to this one.
        value, places = Fraction(text.lstrip("-")), len(digits) - 1
        unit = Fraction(10) ** (math.floor(math.log10(value)) - places + 1)
        for count in (value // unit, value // unit + 1):
            shorter.append(decimal(count * unit, True))
            index.append(i)
    back = codes(cast(np.array(shorter), name), name)
    sign = back.dtype.type(2 ** (bits - 1) - 1)
    original = codes(x, name)[index] & sign
    same = (back & sign) == original
    assert not same.any(), [(texts[index[i]], shorter[i]) for i in np.flatnonzero(same)]


def canonical(x, name):
    """Codes with one NaN, as text has no other: "NaN"."""
    bits = codes(x, name)
    is_nan = np.isnan(x.astype(np.float32))
    return np.where(is_nan, codes(np.array([np.nan], np.float32).astype(x.dtype), name), bits)


def test_e8m0_prints_its_numbers_in_full():
    x = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    texts = cast(x, "STRING")
    assert [Fraction(text) for text in texts] == [Fraction(2) ** (c - 127) for c in range(255)]
    for round_mode in ("up", "down", "nearest"):
        back = cast(texts, "FLOAT8E8M0", round_mode=round_mode)
        np.testing.assert_array_equal(codes(back, "FLOAT8E8M0"), np.arange(255))
