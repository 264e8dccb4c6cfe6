"""encode, cast and round_to_format against the exact oracle, bit for bit."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import (
    SATURATIONS,
    SHIPPED,
    SOURCES,
    Float,
    Int,
    assert_same_bits,
    bits_of,
    codes,
    float32_inputs,
    fraction_code,
    inputs,
    values32,
)
from jax import lax

import qtoolkit as qt

# By hand: which sources hold every finite value of which format.
HOLDS = {
    "e4m3fn": ("float32", "float16", "bfloat16"),
    "e5m2": ("float32", "float16", "bfloat16"),
    "e4m3fnuz": ("float32", "float16", "bfloat16"),
    "e5m2fnuz": ("float32", "float16", "bfloat16"),
    "bfloat16": ("float32", "bfloat16"),
    "float16": ("float32", "float16"),
    "int8": ("float32", "float16", "bfloat16"),
}
HELD = [(name, source) for name, sources in HOLDS.items() for source in sources]


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_the_oracle_equals_rational_arithmetic(name):
    spec = SHIPPED[name]
    rng = np.random.default_rng(1)
    table = [spec.fraction(code) for code in range(spec.max_code + 2)]
    points = [*table, *((a + b) / 2 for a, b in itertools.pairwise(table))]
    x = np.array([float(p) for p in points], np.float32)
    spread = np.ldexp(rng.random(100), rng.integers(-20, 18, 100)).astype(np.float32)
    x = np.concatenate(
        [x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(1e9)), spread]
    )
    x = np.concatenate([x, -x])
    expected = [fraction_code(Fraction(float(v)), spec) for v in x]
    zero = (x == 0) & np.signbit(x)  # a Fraction has no -0
    expected = np.array(expected) + zero * (spec.kind != "fnuz") * spec.sign
    np.testing.assert_array_equal(codes(x, spec, "none"), expected)


@pytest.mark.parametrize("saturation", SATURATIONS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", SHIPPED)
def test_encode_equals_the_exact_oracle(name, source, saturation):
    """All 2**16 inputs of 16 bits; every tie, value, neighbour and 2**20 patterns of float32."""
    x = inputs(source, SHIPPED[name])
    got = qt.encode(x, name, saturation=saturation)
    assert_same_bits(got, codes(x, SHIPPED[name], saturation), x)


@pytest.mark.quick
@pytest.mark.parametrize("saturation", SATURATIONS)
@pytest.mark.parametrize("name", SHIPPED)
def test_encode_equals_the_exact_oracle_quickly(name, saturation):
    x = inputs("bfloat16", SHIPPED[name])
    got = qt.encode(x, name, saturation=saturation)
    assert_same_bits(got, codes(x, SHIPPED[name], saturation), x)


@pytest.mark.parametrize("saturation", SATURATIONS)
@pytest.mark.parametrize(("name", "source"), HELD)
def test_round_to_format_equals_decode_of_encode_and_the_oracle(name, source, saturation):
    spec = SHIPPED[name]
    x = inputs(source, spec, random=2**18)
    got = qt.round_to_format(x, name, saturation=saturation)
    code = qt.encode(x, name, saturation=saturation)
    assert got.dtype == SOURCES[source]
    assert_same_bits(got, qt.decode(code, name, SOURCES[source]), x)
    expected = values32(codes(x, spec, saturation), spec)
    with np.errstate(invalid="ignore"):
        assert_same_bits(got, expected.astype(SOURCES[source]), x)


@pytest.mark.parametrize(
    ("name", "source", "saturation"),
    [
        (name, source, saturation)
        for name, source in HELD
        for saturation in (SATURATIONS if source == "float32" else ("none",))
    ],
)
def test_casts_inside_a_larger_jit_keep_their_bits(name, source, saturation):
    """Work before and after that XLA may fuse, all on bits, so that nothing but the cast rounds."""
    spec = SHIPPED[name]
    dtype = SOURCES[source]
    x = inputs(source, spec, random=2**16)
    unsigned = bits_of(x).dtype

    @jax.jit
    def larger(flipped):
        x = lax.bitcast_convert_type(~flipped, dtype).reshape(-1, 2).T
        rounded = qt.round_to_format(x, name, saturation=saturation)
        code = qt.encode(x, name, saturation=saturation)
        own = qt.cast(x, name, saturation=saturation)
        own = lax.bitcast_convert_type(own, code.dtype)
        back = qt.decode(code, name, dtype)
        patterns = [lax.bitcast_convert_type(v, unsigned) for v in (rounded, back)]
        checksum = sum(jnp.sum(v.astype(jnp.uint32)) for v in (*patterns, code, own))
        return [v.T.reshape(-1) for v in (*patterns, code, own)], checksum

    assert x.size % 2 == 0
    (rounded, back, code, own), _ = larger(~bits_of(x))
    eager = qt.round_to_format(x, name, saturation=saturation)
    assert_same_bits(rounded, bits_of(eager), x)
    assert_same_bits(back, bits_of(eager), x)
    expected = codes(x, spec, saturation)
    assert_same_bits(code, expected, x)
    assert_same_bits(own, expected, x)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", SHIPPED)
def test_cast_has_the_dtype_of_the_format_and_the_bits_of_encode(name, source):
    x = inputs(source, SHIPPED[name], random=2**16)
    for saturation in SATURATIONS:
        got = qt.cast(x, name, saturation=saturation)
        assert got.dtype == qt.format(name).dtype
        assert got.dtype.name == qt.format(name).dtype_name
        code = qt.encode(x, name, saturation=saturation)
        assert code.dtype == SHIPPED[name].unsigned
        np.testing.assert_array_equal(bits_of(got), np.asarray(code))


# The arithmetic ways of rounding, at and beyond the edges between them.
USER = {
    "least step 2**-125": Float(7, 3, 123, "ieee", "inf"),
    "least step 2**-126": Float(7, 3, 124, "ieee", "inf"),
    "least step 2**-126, fnuz": Float(7, 3, 124, "fnuz", "nan"),
    "least step 2**-126, fn": Float(7, 3, 124, "fn", "nan"),
    "float32's subnormals": Float(7, 3, 127, "fn", "max"),
    "e8m5": Float(8, 5, 127, "ieee", "inf"),
    "e8m5, nan": Float(8, 5, 127, "ieee", "nan"),
    "tf32": Float(8, 10, 127, "ieee", "inf"),
    "e8m1": Float(8, 1, 127, "ieee", "inf"),
    "max exponent 103": Float(7, 2, 24, "fn", "nan"),
    "max exponent 104": Float(7, 2, 23, "fn", "nan"),
    "max exponent 127": Float(7, 2, 0, "fn", "nan"),
    "max exponent 127, fnuz": Float(7, 2, 0, "fnuz", "nan"),
    "negative bias": Float(3, 2, -20, "ieee", "inf"),
    "e2m2": Float(2, 2, 1, "ieee", "inf"),
    "e2m2, nan": Float(2, 2, 1, "ieee", "nan"),
    "e2m2, max": Float(2, 2, 1, "ieee", "max"),
    "e2m2fn": Float(2, 2, 1, "fn", "nan"),
    "e2m2fn, max": Float(2, 2, 1, "fn", "max"),
    "e2m2fnuz": Float(2, 2, 1, "fnuz", "nan"),
    "e4m3, nan": Float(4, 3, 7, "ieee", "nan"),
    "e5m1": Float(5, 1, 15, "ieee", "inf"),
    "all subnormal": Float(1, 2, 0, "ieee", "inf"),
    "e1m2fn, max": Float(1, 2, 1, "fn", "max"),
    "e1m1fn": Float(1, 1, 0, "fn", "nan"),
    "long mantissa": Float(2, 16, 1, "fn", "nan"),
}


@pytest.mark.parametrize("saturation", SATURATIONS)
@pytest.mark.parametrize("name", USER)
def test_user_made_float_formats_equal_the_exact_oracle(name, saturation):
    spec = USER[name]
    fmt = spec.as_format(name)
    x = float32_inputs(spec, random=2**16)
    expected = codes(x, spec, saturation)
    assert_same_bits(qt.encode(x, fmt, saturation=saturation), expected, x)
    rounded = qt.round_to_format(x, fmt, saturation=saturation)
    assert_same_bits(rounded, values32(expected, spec), x)
    if saturation == "none":
        every = np.arange(2 * spec.sign, dtype=spec.unsigned)
        assert_same_bits(qt.decode(every, fmt), values32(every, spec), every)


@pytest.mark.parametrize("saturation", SATURATIONS)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["least step 2**-126", "e8m5", "e8m1", "e2m2", "e2m2fn, max"])
def test_user_made_float_formats_on_every_16_bit_input(name, source, saturation):
    spec = USER[name]
    x = inputs(source, spec)
    got = qt.encode(x, spec.as_format(name), saturation=saturation)
    assert_same_bits(got, codes(x, spec, saturation), x)


@pytest.mark.parametrize("saturation", SATURATIONS)
def test_float32_as_a_format_is_the_identity_but_for_nans(saturation):
    fmt = Float(8, 23, 127, "ieee", "inf").as_format("float32")
    x = float32_inputs(SHIPPED["float16"])
    nan = (np.uint32(0x7FC00000) | (bits_of(x) & np.uint32(0x80000000))).astype(np.uint32)
    expected = np.where(np.isnan(x), nan, bits_of(x))
    if saturation == "finite":
        largest = (bits_of(x) & np.uint32(0x80000000)) | np.uint32(0x7F7FFFFF)
        expected = np.where(np.isinf(x), largest, expected)
    assert_same_bits(qt.encode(x, fmt, saturation=saturation), expected, x)
    got = qt.round_to_format(x, fmt, saturation=saturation)
    assert_same_bits(got, expected.view(np.float32), x)


@pytest.mark.parametrize("saturation", SATURATIONS)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [1, 4, 8, 32])
def test_integer_formats_equal_the_exact_oracle(bits, signed, saturation):
    spec = Int(bits, signed)
    fmt = spec.as_format(f"{bits} bits")
    for source in SOURCES if saturation == "none" and bits in (4, 8) else ("float32",):
        x = inputs(source, spec, random=2**17)
        expected = codes(x, spec, saturation)
        assert_same_bits(qt.encode(x, fmt, saturation=saturation), expected, x)
        if bits <= 8:
            rounded = qt.round_to_format(x, fmt, saturation=saturation)
            assert_same_bits(rounded, values32(expected, spec).astype(SOURCES[source]), x)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("x", "saturation", "code"),
    [
        (2.5, "none", 2),
        (3.5, "none", 4),
        (-0.5, "none", 0),
        (128.0, "none", 0x80),
        (-129.0, "none", 0x7F),
        (300.0, "none", 300 - 256),
        (2.0**40 + 2.0**17, "none", 0),
        (2.0**33 + 2.0**10 * 3 + 2.0**10, "none", 0),
        (16777215.0, "none", 0xFF),
        (-16777215.0, "none", 0x01),
        (1e30, "none", int(np.float32(1e30)) % 256),
        (np.inf, "none", 0x7F),
        (-np.inf, "none", 0x80),
        (np.nan, "none", 0),
        (np.inf, "propagate", 0x7F),
        (-np.inf, "propagate", 0x80),
        (300.0, "propagate", 0x7F),
        (-300.0, "finite", 0x80),
        (127.5, "finite", 0x7F),
        (-128.5, "finite", 0x80),
        (np.nan, "finite", 0),
    ],
)
def test_int8_by_hand(x, saturation, code):
    assert int(qt.encode(np.float32(x), "int8", saturation=saturation)) == code


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "x", "by_saturation"),
    [
        ("e4m3fn", 464.0, (0x7E, 0x7E, 0x7E)),  # the tie beyond 448 goes to the even code
        ("e4m3fn", 465.0, (0x7E, 0x7E, 0x7F)),
        ("e4m3fn", -465.0, (0xFE, 0xFE, 0xFF)),
        ("e4m3fn", np.inf, (0x7E, 0x7F, 0x7F)),
        ("e5m2", 61439.0, (0x7B, 0x7B, 0x7B)),
        ("e5m2", 61440.0, (0x7B, 0x7B, 0x7C)),
        ("e5m2", -np.inf, (0xFB, 0xFC, 0xFC)),
        ("e4m3fnuz", 247.0, (0x7F, 0x7F, 0x7F)),
        ("e4m3fnuz", 248.0, (0x7F, 0x7F, 0x80)),
        ("e4m3fnuz", -np.inf, (0xFF, 0x80, 0x80)),
        ("e4m3fnuz", -0.0, (0x00, 0x00, 0x00)),
        ("e4m3fnuz", -(2.0**-11), (0x00, 0x00, 0x00)),
        ("e4m3fn", -(2.0**-10), (0x80, 0x80, 0x80)),
        ("e5m2fnuz", np.nan, (0x80, 0x80, 0x80)),
        ("float16", 65519.0, (0x7BFF, 0x7BFF, 0x7BFF)),
        ("float16", 65520.0, (0x7BFF, 0x7BFF, 0x7C00)),
        ("bfloat16", 2.0**-134, (0, 0, 0)),
        ("bfloat16", 1.5 * 2.0**-133, (2, 2, 2)),
        ("bfloat16", 3.4028235e38, (0x7F7F, 0x7F7F, 0x7F80)),
    ],
)
def test_overflow_and_underflow_by_hand(name, x, by_saturation):
    """OFP8 1.0; arXiv:2206.02915; saturation words of IEEE P3109."""
    got = [int(qt.encode(np.float32(x), name, saturation=s)) for s in SATURATIONS]
    assert got == list(by_saturation)
