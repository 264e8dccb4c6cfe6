"""Integers as sources and as destinations, at every power of two and beside it.

The oracle is `casts_oracle.every_code`: two's complement and shifts, from the exact integer.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import (
    DTYPES,
    ROUNDINGS,
    SHIPPED,
    SPECS,
    VARIANTS,
    Int,
    assert_same_bits,
    assert_same_variants,
    bits_of,
    codes,
    every_code,
    in_one_jit,
    integer_inputs,
    op_by_op,
    p3109,
    stochastic_codes,
    values64,
)
from each import each

import qtoolkit as qt

SOURCES_64 = ["int64", "uint64"]
SOURCES_32 = ["int32", "uint32", "int16", "uint16", "int8", "uint8"]
TO = [
    *("float32", "float16", "bfloat16", "tf32", "e4m3fn", "e5m2", "e8m0fnu", "ue4m3", "e2m1fn"),
    *("hifloat8", "posit8", "nf4", "int8", "uint8", "int16", "int32", "uint32", "int4", "bool"),
    *("binary8p1se", "binary8p5uf", "binary16p3se", "int17", "uint31"),
]


def _spec(name: str):
    if name in SPECS:
        return SPECS[name]
    if name.startswith("binary"):
        bits, rest = name.removeprefix("binary").split("p")
        return p3109(int(bits), int(rest[:-2]), rest[-2] == "s", rest[-1] == "e")
    return Int(int(name.removeprefix("u").removeprefix("int")), not name.startswith("u"))


SOME = [
    *(("nearest_even", "finite"), ("nearest_even", "none"), ("nearest_away", "none")),
    *(("toward_zero", "none"), ("toward_positive", "propagate"), ("toward_negative", "none")),
    *(("to_odd", "none"), ("to_odd", "finite")),
]


# Compiled as users compile them: what is shipped, and one format for each other path.
COMPILED = {*SHIPPED, "float32", "int32", "e8m0fnu", "e2m1fn", "hifloat8", "nf4", "binary16p3se"}


@pytest.mark.sample("float32-int64")
@pytest.mark.parametrize("source", SOURCES_64)
@pytest.mark.parametrize("name", TO)
def test_64_bit_integers_with_and_without_x64(name, source):
    """float32 and float64 would both round twice: 2**53 + 1 and the sums of three powers tell."""
    x, spec = integer_inputs(source), _spec(name)
    expected = every_code(x, spec, SOME)
    run = in_one_jit if name in COMPILED else op_by_op
    with jax.enable_x64(True):
        assert_same_variants(run(qt.encode, name, SOME)(x), expected, x, SOME)
    with contextlib.nullcontext() if name in COMPILED else jax.disable_jit():
        for (rounding, saturation), row in list(zip(SOME, expected, strict=True))[1:6:2]:
            got = qt.encode(x, name, rounding=rounding, saturation=saturation)
            assert_same_bits(got, row, x)


@pytest.mark.sample("float32-int32", "e4m3fn-uint16")
@pytest.mark.parametrize(
    ("name", "source"),
    [
        (name, source)
        for source in SOURCES_32
        for name in (TO if source == "int32" else ("e4m3fn", "bfloat16", "float32", "int4", "nf4"))
    ]
    + [("uint32", "uint32"), ("int32", "uint32"), ("tf32", "uint32"), ("binary8p1se", "uint32")],
)
def test_integers_of_32_bits_and_less(name, source):
    x, spec = integer_inputs(source), _spec(name)
    run = in_one_jit if name in COMPILED else op_by_op
    assert_same_variants(run(qt.encode, name, SOME)(x), every_code(x, spec, SOME), x, SOME)


@pytest.mark.sample("int4")
@pytest.mark.parametrize("source", ["int4", "uint4", "int2", "uint2", "bool"])
def test_integers_of_less_than_a_byte_as_sources(source):
    spec = SPECS[source]
    x = np.array([int(spec.value(code)) for code in range(2**spec.bits)]).astype(source)
    for name in ("e4m3fn", "bfloat16", "uint4", "int2", "bool"):
        expected = every_code(x.astype(np.int64), _spec(name), SOME)
        got = in_one_jit(qt.encode, name, SOME)(jnp.asarray(x))
        assert_same_variants(got, expected, x, SOME)
        assert_same_bits(qt.encode(x, name), expected[0], x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("source", ["float32", "int64", "uint64", "float64"])
def test_every_width_as_a_destination(source, signed):
    """1 to 64 bits, all of them from float32 and int64; widths above 32 need x64."""
    rng = np.random.default_rng(8)
    if source in SOURCES_64:
        x = rng.permutation(integer_inputs(source))[:4096]
    else:
        powers = 2.0 ** np.arange(-2, 70)
        near = [powers, powers - 0.5, powers + 0.5, powers * 1.5, powers - 1, powers + 1]
        x = np.concatenate([*near, rng.normal(0, 9, 99), [0, np.inf, np.nan, 1e300, 1e-300, 1e38]])
        with np.errstate(over="ignore", under="ignore"):
            x = np.concatenate([x, -x, np.nextafter(x, 0)]).astype(source)
    edges = (1, 2, 3, 8, 23, 24, 25, 30, 31, 32, 33, 52, 53, 54, 61, 62, 63, 64)
    widths = range(1, 65) if source in ("float32", "int64") else edges
    names = [f"{'' if signed else 'u'}int{bits}" for bits in widths]
    some = [("nearest_even", "none"), ("nearest_away", "finite"), ("toward_negative", "none")]

    @jax.jit
    def compiled(x):
        return [[qt.encode(x, name, rounding=r, saturation=s) for r, s in some] for name in names]

    with jax.enable_x64(True):
        got = compiled(x)
    for bits, rows in zip(widths, got, strict=True):
        expected = every_code(x, Int(bits, signed), some)
        for row, wanted in zip(rows, expected, strict=True):
            assert_same_bits(row, wanted, x)


@pytest.mark.sample("int2", "int8", "int32", "uint2", "uint8", "bool")
@pytest.mark.parametrize("name", [n for n in DTYPES if "int" in n and "64" not in n] + ["bool"])
def test_cast_to_integers_has_their_dtype(name):
    """numpy's `astype` of the clipped and rounded input is the oracle."""
    spec = SPECS[name]
    x = np.concatenate([np.arange(-700, 700) / 4, [3e9, -3e9, np.inf, -np.inf, 0.0]])
    x = x.astype(np.float32)
    got = np.asarray(qt.cast(x, name))
    assert got.dtype == np.dtype(DTYPES[name])
    if name == "bool":
        np.testing.assert_array_equal(got, x != 0)
    else:
        wide = np.clip(np.rint(x.astype(np.float64)), spec.lowest, spec.highest)
        np.testing.assert_array_equal(got.astype(np.int64), wide.astype(np.int64))


@pytest.mark.sample("int2")
@pytest.mark.parametrize(
    "name", ["int2", "uint2", "int4", "uint4", "int8", "uint8", "int5", "int16"]
)
def test_encode_of_decode_gives_every_code_back(name):
    spec = _spec(name)
    every = np.arange(2**spec.bits, dtype=spec.unsigned)
    value = np.asarray(qt.decode(every, name))
    np.testing.assert_array_equal(value, values64(spec))
    for rounding in ROUNDINGS:
        assert_same_bits(qt.encode(value, name, rounding=rounding), every, value)


@pytest.mark.sample("int32-A")
@pytest.mark.parametrize("variant", "ABC")
@pytest.mark.parametrize("source", ["int32", "float32"])
def test_stochastic_rounding_to_and_from_integers(source, variant):
    """Integers as sources have no fraction of one, but one of bfloat16's or e4m3fn's step."""
    rng = np.random.default_rng(9)
    x = rng.permutation(integer_inputs("int32"))[:4096].astype(source)
    random = rng.integers(0, 2**8, x.size, dtype=np.uint8)
    for name in ("bfloat16", "e4m3fn", "int8", "int32", "uint4"):
        for saturation in ("finite", "none"):
            got = qt.encode(
                x,
                name,
                rounding=qt.Stochastic(variant, bits=5),
                saturation=saturation,
                random_bits=random,
            )
            expected = stochastic_codes(x, SPECS[name], variant, 5, random % 32, saturation)
            assert_same_bits(got, expected, x)


@pytest.mark.quick
@pytest.mark.parametrize("enabled", [False, True], ids=["x32", "x64"])
@each(("x", "name", "rounding", "code"), [
    # float32 has 24 bits; a conversion through float64 would lose the last one.
    (2**62 + 2**38, "float32", "nearest_even", 0x5E800000),
    (2**62 + 2**38 + 1, "float32", "nearest_even", 0x5E800001),
    (2**62 + 2**38 - 1, "float32", "toward_positive", 0x5E800001),
    (-(2**62) - 2**38 - 1, "float32", "nearest_even", 0xDE800001),
    (2**63 - 1, "float32", "nearest_even", 0x5F000000),
    (2**63 - 1, "float32", "toward_zero", 0x5EFFFFFF),
    (-(2**63), "float32", "nearest_even", 0xDF000000),
    (257, "bfloat16", "nearest_even", 0x4380),
    (2**40 + 2**32 + 1, "bfloat16", "nearest_even", 0x5381),
    (65519, "float16", "nearest_even", 0x7BFF), (65520, "float16", "toward_negative", 0x7BFF),
    (17, "e4m3fn", "nearest_away", 0x59), (300, "int8", "nearest_even", 127),
    (-300, "uint8", "nearest_even", 0), (2**63 - 1, "int32", "nearest_even", 2**31 - 1),
])  # fmt: skip
def test_integers_by_hand(x, name, rounding, code, enabled):
    with jax.enable_x64(enabled):
        for given in (x, np.int64(x), np.array([x])):
            assert np.asarray(qt.encode(given, name, rounding=rounding)).ravel()[0] == code


def test_the_wrapped_bits_are_those_of_python():
    """ "none" keeps the low bits; Python's % is the oracle."""
    x = [2**63 + 5, 2**64 - 1, 12345678901234567890, 255, 256, 2**33 + 7]
    given = np.array(x, np.uint64)
    for bits in (1, 7, 8, 13, 31, 32):
        got = qt.encode(given, f"uint{bits}", saturation="none")
        assert np.asarray(got).tolist() == [v % 2**bits for v in x]
        got = qt.encode(-(given >> np.uint64(1)).astype(np.int64), f"int{bits}", saturation="none")
        assert np.asarray(got).tolist() == [-(v // 2) % 2**bits for v in x]
    assert bits_of(codes(given, Int(8, False), "none")).tolist() == [v % 256 for v in x]


def test_what_is_tried_of_the_variants_has_all_modes():
    assert {r for r, _ in SOME} == set(ROUNDINGS)
    assert {s for _, s in SOME} == {s for _, s in VARIANTS}
