"""encode, cast and round_to_format against the exact oracle, bit for bit."""

import contextlib
import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import (
    DTYPES,
    FLOATS,
    ROUNDINGS,
    SATURATIONS,
    SHIPPED,
    SMALL,
    SOURCES,
    SPECS,
    TABLES,
    VARIANTS,
    Float,
    Int,
    Table,
    assert_same_bits,
    assert_same_variants,
    bits_of,
    codes,
    codes_by_comparison,
    every_16_bit_input,
    every_code,
    every_p3109,
    float32_inputs,
    float64_inputs,
    fraction_code,
    in_one_jit,
    inputs,
    magnitudes,
    op_by_op,
    p3109,
    p3109_name,
    stochastic_codes,
    values32,
    values64,
)
from each import each
from jax import lax
from refused import refused

import qtoolkit as qt

OTHER_P3109 = {
    p3109_name(*fields): p3109(*fields)
    for fields in [
        *((3, 1, True, True), (3, 2, True, False), (3, 3, False, True), (3, 1, False, False)),
        *((4, 1, True, False), (4, 2, True, True), (4, 4, False, False), (5, 3, True, True)),
        *((5, 1, False, True), (6, 3, True, False), (6, 4, False, True), (7, 4, True, True)),
    ]
}
# All roundings, all saturations, not all pairs.
SOME = [(r, "none") for r in ROUNDINGS] + [("nearest_even", "finite"), ("to_odd", "propagate")]
NARROW = {**SMALL, **every_p3109(8), **OTHER_P3109}
OF_P3109 = (
    "binary8p1se",
    "binary8p3se",
    "binary8p4sf",
    "binary8p2uf",
    "binary8p1ue",
    "binary6p3sf",
)
# Compiled as users compile them: what is shipped, and one format for each other way of rounding.
COMPILED = {*SHIPPED, *OF_P3109, *TABLES, "e8m0fnu", "ue4m3", "e2m1fn", "int4", "uint8", "bool"}


# --- the oracle itself ----------------------------------------------------------------------------


@pytest.mark.sample("e4m3fn", "e2m1fn")
@pytest.mark.parametrize(
    "name", ["e4m3fn", "e5m2fnuz", "e3m4", "ue4m3", "e8m0fnu", "e2m1fn", "binary8p1ue", "float64"]
)
def test_the_oracle_equals_rational_arithmetic(name):
    """Fractions, two neighbours and one comparison; deterministic and stochastic."""
    spec = FLOATS[name] if name in FLOATS else every_p3109(8)[name]
    rng = np.random.default_rng(1)
    pool = float64_inputs(spec if name != "float64" else FLOATS["float16"])
    x = rng.choice(pool[np.isfinite(pool) & (pool != 0)], 250)
    got = every_code(x, spec)
    for (rounding, saturation), row in zip(VARIANTS, got, strict=True):
        expected = [fraction_code(Fraction(v), spec, saturation, rounding) for v in x.tolist()]
        np.testing.assert_array_equal(row, np.array(expected, spec.unsigned))
    for variant, bits in itertools.product("ABC", (1, 5, 24)):
        random = rng.integers(0, 2**bits, x.size)
        got = stochastic_codes(x, spec, variant, bits, random, "none")
        expected = [
            fraction_code(Fraction(v), spec, "none", "stochastic", (variant, bits, int(r)))
            for v, r in zip(x.tolist(), random, strict=True)
        ]
        np.testing.assert_array_equal(got, np.array(expected, spec.unsigned))


@pytest.mark.sample("e4m3fn")
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e8m0fnu", "e2m3fn", "binary8p2ue"])
def test_the_oracle_equals_a_search_among_all_values(name):
    spec = NARROW[name]
    for x in (every_16_bit_input("bfloat16"), float32_inputs(spec, 2**14)):
        expected = [codes_by_comparison(x, spec, s, r) for r, s in VARIANTS]
        assert_same_variants(every_code(x, spec), np.stack(expected), x)


# --- every input of 16 bits -----------------------------------------------------------------------


@pytest.mark.sample(
    *("e5m2-float16", "int2-float16", "binary8p6sf-float16", "binary8p4uf-bfloat16"),
    "binary5p1ue-bfloat16",
)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NARROW)
def test_every_16_bit_input_to_every_narrow_format(name, source):
    """All 2**16 inputs, six roundings, three saturations, against the integer oracle.

    Compiled, all of their pairs go to what is shipped, and `SOME` to one format for each path.
    """
    x = every_16_bit_input(source)
    expected = every_code(x, NARROW[name])
    if name in SHIPPED:
        assert_same_variants(in_one_jit(qt.encode, name)(x), expected, x)
        return
    assert_same_variants(op_by_op(qt.encode, name)(x), expected, x)
    if name in COMPILED:
        some = [VARIANTS.index(variant) for variant in SOME]
        assert_same_variants(in_one_jit(qt.encode, name, SOME)(x), expected[some], x, SOME)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1fn", "e8m0fnu", "nf4", "int4"])
def test_every_bfloat16_quickly(name):
    """Against the integer oracle."""
    x = every_16_bit_input("bfloat16")
    some = [("nearest_even", "finite"), ("toward_negative", "none"), ("to_odd", "propagate")]
    assert_same_variants(in_one_jit(qt.encode, name, some)(x), every_code(x, SMALL[name], some), x)


# --- float32 --------------------------------------------------------------------------------------

# The ways of rounding, at and beyond the edges between them.
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
    "beyond float32": Float(8, 2, 60, "none", "max"),
    "below float32": Float(8, 2, 200, "fn", "nan"),
    "e2m2": Float(2, 2, 1, "ieee", "inf"),
    "e2m2, nan": Float(2, 2, 1, "ieee", "nan"),
    "e2m2, max": Float(2, 2, 1, "ieee", "max"),
    "e2m2fn": Float(2, 2, 1, "fn", "nan"),
    "e2m2fn, max": Float(2, 2, 1, "fn", "max"),
    "e2m2fnuz": Float(2, 2, 1, "fnuz", "nan"),
    "e2m2, extended, nan": Float(2, 2, 1, "extended", "nan"),
    "e2m2, all finite": Float(2, 2, 1, "none", "max"),
    "e2m2, unsigned": Float(2, 2, 1, "ieee", "inf", signed=False),
    "e2m2, unsigned, all finite": Float(2, 2, 1, "none", "max", signed=False),
    "e3m0": Float(3, 0, 3, "none", "max"),
    "e4m3, nan": Float(4, 3, 7, "ieee", "nan"),
    "e5m1": Float(5, 1, 15, "ieee", "inf"),
    "all subnormal": Float(1, 2, 0, "ieee", "inf"),
    "e1m2fn, max": Float(1, 2, 1, "fn", "max"),
    "e1m1fn": Float(1, 1, 0, "fn", "nan"),
    "e8m0, bias 100": Float(8, 0, 100, "fn", "nan", signed=False, zero=False),
    "e5m0, all finite": Float(5, 0, 15, "none", "max", signed=False, zero=False),
    "long mantissa": Float(2, 16, 1, "fn", "nan"),
    "all of 32 bits": Float(4, 27, 7, "fn", "nan"),
}
WIDE = {
    **{name: FLOATS[name] for name in ("float16", "bfloat16", "tf32")},
    **{
        p3109_name(*fields): p3109(*fields)
        for fields in [
            *((9, 3, True, True), (10, 6, True, False), (11, 1, False, False)),
            *((12, 5, False, True), (16, 8, True, True), (16, 11, True, False)),
            *((16, 1, True, True), (16, 16, False, True)),
        ]
    },
}

FROM_FLOAT32 = {**SMALL, **{name: NARROW[name] for name in OF_P3109}, **WIDE}


def _float32_inputs(spec, random=2**14):
    """Where float64 does not hold the format, those of float32 and a format of its precision."""
    if isinstance(spec, Float) and (spec.exponent > 10 or spec.bits > 20):
        spec = Float(8, min(spec.mantissa, 7), 127, "ieee", "inf")
    return float32_inputs(spec, random)


@pytest.mark.sample("e5m2")
@pytest.mark.parametrize("name", FROM_FLOAT32)
def test_float32_values_ties_and_neighbours(name):
    """All values and ties of the format +-1 ulp and random patterns, against the integer oracle."""
    spec = FROM_FLOAT32[name]
    x = _float32_inputs(spec)
    run = in_one_jit if name in SPECS or name in COMPILED else op_by_op
    assert_same_variants(run(qt.encode, name, SOME)(x), every_code(x, spec, SOME), x, SOME)


# Compiled as a user's own: subnormal steps, beyond float32 at either end, and 32 bits of code.
COMPILED_USER = ("least step 2**-126", "float32's subnormals", "beyond float32", "all of 32 bits")


@pytest.mark.sample("least step 2**-125", "long mantissa")
@pytest.mark.parametrize("name", USER)
def test_user_made_float_formats_equal_the_exact_oracle(name):
    """Against the integer oracle; bits 17 to 32 of the code included."""
    run = in_one_jit if name in COMPILED_USER else op_by_op
    spec = USER[name]
    fmt = spec.as_format(name)
    x = _float32_inputs(spec)
    with jax.enable_x64(spec.mantissa > 23):  # such significands take 64-bit integers
        got = run(qt.encode, fmt, SOME)(x)
    assert_same_variants(got, every_code(x, spec, SOME), x, SOME)


@pytest.mark.sample(
    "least step 2**-126-float16", "e8m5-float16", "e8m1-float16", "e8m1-bfloat16", "e2m2-bfloat16"
)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["least step 2**-126", "e8m5", "e8m1", "e2m2", "e2m2fn, max"])
def test_user_made_float_formats_on_every_16_bit_input(name, source):
    """Against the integer oracle."""
    spec = USER[name]
    x = every_16_bit_input(source)
    variants = [("nearest_even", s) for s in SATURATIONS]
    got = op_by_op(qt.encode, spec.as_format(name), variants)(x)
    assert_same_variants(got, every_code(x, spec, variants), x, variants)


@pytest.mark.sample("finite")
@pytest.mark.parametrize("saturation", SATURATIONS)
def test_float32_as_a_format_is_the_identity_but_for_nans(saturation):
    """NaN payloads are dropped; the oracle is the input itself."""
    x = float32_inputs(SHIPPED["float16"], 2**16)
    nan = (np.uint32(0x7FC00000) | (bits_of(x) & np.uint32(0x80000000))).astype(np.uint32)
    expected = np.where(np.isnan(x), nan, bits_of(x))
    if saturation == "finite":
        largest = (bits_of(x) & np.uint32(0x80000000)) | np.uint32(0x7F7FFFFF)
        expected = np.where(np.isinf(x), largest, expected)
    for rounding in ROUNDINGS:
        options = {"rounding": rounding, "saturation": saturation}
        assert_same_bits(qt.encode(x, "float32", **options), expected, x)
        got = qt.round_to_format(x, "float32", **options)
        assert_same_bits(got, expected.view(np.float32), x)


# --- the other casts ------------------------------------------------------------------------------


@functools.cache
def _held(name: str) -> tuple[str, ...]:
    """The sources that hold every finite value of the format."""
    spec = NARROW[name] if name in NARROW else WIDE[name]
    values = magnitudes(spec)[:-1] if isinstance(spec, Float) else values64(spec)
    values = values[np.isfinite(values)]

    def holds(dtype):
        with np.errstate(over="ignore", under="ignore"):
            return np.array_equal(values.astype(np.float32).astype(dtype), values)

    return tuple(source for source, dtype in SOURCES.items() if holds(dtype))


HELD = [
    (name, source)
    for name in [*SMALL, "float16", "bfloat16", "tf32", "binary8p1se", "binary8p8uf"]
    for source in _held(name)[: 3 if name in SHIPPED or name in ("e8m0fnu", "hifloat8") else 1]
]


def test_which_source_holds_which_format():
    """By hand."""
    assert _held("e4m3fn") == ("float32", "float16", "bfloat16")
    assert _held("e8m0fnu") == ("float32", "bfloat16")
    assert _held("float16") == ("float32", "float16")
    assert _held("bfloat16") == ("float32", "bfloat16")
    assert _held("nf4") == _held("tf32") == ("float32",)


@pytest.mark.sample("e5m2-float32", "uint4-float32")
@pytest.mark.parametrize(("name", "source"), HELD)
def test_round_to_format_equals_decode_of_encode_and_the_oracle(name, source):
    """The value that the integer oracle's code stands for."""
    spec = SPECS[name] if name in SPECS else NARROW[name]
    some = VARIANTS[: 3 if source == "float32" else 1] + VARIANTS[11:17:3]
    x = float32_inputs(spec, 2**12) if source == "float32" else every_16_bit_input(source)
    expected = every_code(x, spec, some)

    @jax.jit
    def rounded_and_decoded(x, code):
        rounded = [
            qt.round_to_format(x, name, rounding=rounding, saturation=saturation)
            for rounding, saturation in some
        ]
        return rounded, qt.decode(code, name, SOURCES[source])

    got, decoded = rounded_and_decoded(x, expected)
    for row, value, code in zip(got, decoded, expected, strict=True):
        assert row.dtype == SOURCES[source]
        assert_same_bits(row, value, x)
        with np.errstate(invalid="ignore"):
            assert_same_bits(row, values32(code, spec).astype(SOURCES[source]), x)


@pytest.mark.sample("e4m3fn-float32")
@pytest.mark.parametrize(
    ("name", "source"), [(name, source) for name in SHIPPED for source in _held(name)]
)
def test_casts_inside_a_larger_jit_keep_their_bits(name, source):
    """Work before and after that XLA may fuse, all on bits, so that nothing but the cast rounds."""
    spec = SHIPPED[name]
    dtype = SOURCES[source]
    x = inputs(source, spec, random=2**16)
    x = x[: x.size // 2 * 2]
    unsigned = bits_of(x).dtype

    @functools.partial(jax.jit, static_argnums=1)
    def larger(flipped, saturation):
        x = lax.bitcast_convert_type(~flipped, dtype).reshape(-1, 2).T
        rounded = qt.round_to_format(x, name, saturation=saturation)
        code = qt.encode(x, name, saturation=saturation)
        own = qt.cast(x, name, saturation=saturation)
        own = lax.bitcast_convert_type(own, code.dtype)
        back = qt.decode(code, name, dtype)
        patterns = [lax.bitcast_convert_type(v, unsigned) for v in (rounded, back)]
        checksum = sum(jnp.sum(v.astype(jnp.uint32)) for v in (*patterns, code, own))
        return [v.T.reshape(-1) for v in (*patterns, code, own)], checksum

    for saturation in SATURATIONS if source == "float32" else ("none",):
        (rounded, back, code, own), _ = larger(~bits_of(x), saturation)
        expected = codes(x, spec, saturation)
        with np.errstate(invalid="ignore"):
            values = bits_of(values32(expected, spec).astype(dtype))
        assert_same_bits(rounded, values, x)
        assert_same_bits(back, values, x)
        assert_same_bits(code, expected, x)
        assert_same_bits(own, expected, x)


@pytest.mark.sample("e5m2", "e4m3_ieee", "int2")
@pytest.mark.parametrize("name", [name for name in DTYPES if SPECS[name].bits <= 32])
def test_cast_has_the_formats_dtype_and_the_bits_of_encode(name):
    """numpy's view of the result, against the integer oracle."""
    spec = SPECS[name]
    x = _float32_inputs(spec, 2**12)
    some = VARIANTS[1:18:6]
    got = jax.jit(lambda x: [qt.cast(x, name, rounding=r, saturation=s) for r, s in some])(x)
    for row, expected in zip(got, every_code(x, spec, some), strict=True):
        assert row.dtype == qt.format(name).dtype == np.dtype(DTYPES[name])
        mask = expected.dtype.type(2**spec.bits - 1)  # numpy may sign-extend int4 in its byte
        assert_same_bits(bits_of(row) & mask, expected, x)


@pytest.mark.parametrize(
    "name", ["e2m3fn", "e3m2fn", "e1m2fn", "ue4m3", "tf32", "nf4", "binary8p3se", "int5", "uint13"]
)
def test_cast_names_encode_where_jax_has_no_dtype(name):
    refused(TypeError, rf"cast: .*{name}.*encode", qt.cast, np.ones(3, np.float32), name)


# --- stochastic rounding --------------------------------------------------------------------------


def _between(spec, seed) -> np.ndarray:
    """Fractions of a step in the lowest, a middle and the top binade, and beyond the edge."""
    rng = np.random.default_rng(seed)
    if isinstance(spec, Int):
        lows = np.array([0, 1, 2, spec.highest - 1, spec.highest, spec.highest + 1], float)
        highs = lows + 1
    else:
        table = np.array([float(spec.fraction(c)) for c in range(spec.max_code + 2)])
        top = spec.max_code
        at = np.r_[0, 1, top // 2 : top // 2 + 2, top - 1, top]
        lows, highs = table[at], table[at + 1]
    parts = np.r_[0, 2.0**-12, 1 - 2.0**-12, np.arange(1, 16) / 16, rng.integers(1, 512, 6) / 512]
    points = (lows[:, None] + (highs - lows)[:, None] * parts).ravel()
    points = points[points.astype(np.float32) == points].astype(np.float32)
    beside = [np.nextafter(points, np.float32(end)) for end in (0, np.inf)]
    size = np.concatenate([points, *beside, [np.inf, np.nan, 3e38]]).astype(np.float32)
    return np.concatenate([size, -size])


@pytest.mark.sample("e4m3fn-A")
@pytest.mark.parametrize("variant", "ABC")
@pytest.mark.parametrize(
    "name", ["e4m3fn", "e5m2", "e2m1fn", "e8m0fnu", "binary8p1se", "binary8p4uf", "int4", "uint8"]
)
def test_stochastic_rounding_is_the_formula_of_p3109(name, variant):
    """Every N <= 8 and every R, against the integer oracle of StochasticA, B and C."""
    spec = NARROW[name]
    x = _between(spec, 5)
    cases = [(bits, saturation) for bits in range(1, 9) for saturation in ("finite", "none")]
    every = np.arange(256, dtype=np.uint8)

    @jax.jit
    def broadcast(x, random):
        x = jnp.broadcast_to(x[:, None], (x.size, random.size))
        return [
            qt.encode(
                x,
                name,
                rounding=qt.Stochastic(variant, bits=bits),
                saturation=saturation,
                random_bits=random,
            )
            for bits, saturation in cases
        ]

    with contextlib.nullcontext() if name in ("e4m3fn", "e8m0fnu", "int4") else jax.disable_jit():
        rows = broadcast(x, every)
    for (bits, saturation), got in zip(cases, rows, strict=True):
        low_bits = every.astype(int) % 2**bits  # only the low N bits count
        expected = stochastic_codes(x[:, None], spec, variant, bits, low_bits, saturation)
        assert_same_bits(got, expected)


@pytest.mark.sample("e4m3fn-uint16-1", "bfloat16-uint32-16")
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(np.uint16, 1), (np.uint16, 16), (np.uint32, 1), (np.uint32, 16), (np.uint32, 24)],
)
@pytest.mark.parametrize("name", ["e4m3fn", "float16", "bfloat16", "binary16p1se", "int8"])
def test_stochastic_rounding_with_many_bits(name, dtype, bits):
    """2**14 random inputs and random bits, against the integer oracle."""
    spec = {**SPECS, **WIDE}[name]
    rng = np.random.default_rng(7)
    x = rng.choice(_float32_inputs(spec), 2**14)
    random = rng.integers(0, np.iinfo(dtype).max, x.size, dtype=dtype, endpoint=True)
    for variant in "ABC":
        rounding = qt.Stochastic(variant, bits=bits)
        got = qt.encode(x, name, rounding=rounding, saturation="none", random_bits=random)
        low_bits = random.astype(np.int64) % 2**bits
        assert_same_bits(got, stochastic_codes(x, spec, variant, bits, low_bits, "none"), x)


# --- by hand --------------------------------------------------------------------------------------


def assert_codes(name, options, cases):
    """Of cases (x, a code for each of the options), all numbers at once."""
    x = np.array([x for x, _ in cases], np.float32)
    got = [np.asarray(qt.encode(x, name, **option)).tolist() for option in options]
    for row, (value, wanted) in zip(zip(*got, strict=True), cases, strict=True):
        assert row == wanted, f"{name}: {value}"


OF_SATURATIONS = [{"saturation": saturation} for saturation in SATURATIONS]
OVERFLOW = {
    "int8": [
        (np.inf, (0x7F, 0x7F, 0x7F)), (-np.inf, (0x80, 0x80, 0x80)), (np.nan, (0, 0, 0)),
        (300.0, (0x7F, 0x7F, 300 - 256)), (-300.0, (0x80, 0x80, 512 - 300)),
        (128.0, (0x7F, 0x7F, 0x80)), (-129.0, (0x80, 0x80, 0x7F)),
        (16777215.0, (0x7F, 0x7F, 0xFF)), (-16777215.0, (0x80, 0x80, 0x01)),
        (2.0**40 + 2.0**17, (0x7F, 0x7F, 0)), (1e30, (0x7F, 0x7F, int(np.float32(1e30)) % 256)),
        (127.5, (0x7F, 0x7F, 0x80)), (2.5, (2, 2, 2)), (3.5, (4, 4, 4)), (-0.5, (0, 0, 0)),
    ],
    "e4m3fn": [
        (464.0, (0x7E, 0x7E, 0x7E)),  # the tie beyond 448 goes to the even code
        (465.0, (0x7E, 0x7E, 0x7F)), (-465.0, (0xFE, 0xFE, 0xFF)), (np.inf, (0x7E, 0x7F, 0x7F)),
        (-(2.0**-10), (0x80, 0x80, 0x80)),
    ],
    "e5m2": [
        (61439.0, (0x7B, 0x7B, 0x7B)), (61440.0, (0x7B, 0x7B, 0x7C)), (-np.inf, (0xFB, 0xFC, 0xFC)),
    ],
    "e4m3fnuz": [
        (247.0, (0x7F, 0x7F, 0x7F)), (248.0, (0x7F, 0x7F, 0x80)), (-np.inf, (0xFF, 0x80, 0x80)),
        (-0.0, (0, 0, 0)), (-(2.0**-11), (0, 0, 0)),
    ],
    "e5m2fnuz": [(np.nan, (0x80, 0x80, 0x80))],
    "float16": [(65519.0, (0x7BFF, 0x7BFF, 0x7BFF)), (65520.0, (0x7BFF, 0x7BFF, 0x7C00))],
    "bfloat16": [
        (2.0**-134, (0, 0, 0)), (1.5 * 2.0**-133, (2, 2, 2)),
        (3.4028235e38, (0x7F7F, 0x7F7F, 0x7F80)),
    ],
    "e2m1fn": [
        (np.nan, (7, 7, 7)), (-np.nan, (7, 7, 7)), (-np.inf, (15, 15, 15)), (5.0, (6, 6, 6)),
        (-0.1, (8, 8, 8)),
    ],
    "e2m3fn": [(100.0, (31, 31, 31))],
    "ue4m3": [
        (-0.0, (0, 0, 0)), (-(2.0**-10), (0, 0, 0)), (-1.0, (0, 0, 0x7F)),
        (-np.inf, (0, 0, 0x7F)), (np.inf, (0x7E, 0x7F, 0x7F)), (-np.nan, (0x7F, 0x7F, 0x7F)),
    ],
    "e8m0fnu": [
        (1.0, (127, 127, 127)),
        (1.5, (128, 128, 128)),  # the tie between 2**0 and 2**1: codes 127 and 128
        (3.0, (128, 128, 128)), (0.0, (0, 0, 255)), (-1.0, (0, 0, 255)),
        (2.0**-128, (0, 0, 0)),  # the tie between zero, code -1, and 2**-127, code 0
        (2.0**-129, (0, 0, 255)), (1.5 * 2.0**127, (254, 254, 254)),
        (1.75 * 2.0**127, (254, 254, 255)), (np.inf, (254, 255, 255)),
    ],
    "binary8p3se": [
        (53248.0, (0x7E, 0x7E, 0x7E)),  # halfway beyond 49152, an even code
        (53249.0, (0x7E, 0x7E, 0x7F)), (-np.inf, (0xFE, 0xFF, 0xFF)), (-0.0, (0, 0, 0)),
        (-np.nan, (0x80, 0x80, 0x80)),
    ],
    "binary8p1ue": [(-1.0, (0, 0, 0xFF))],
    "binary8p1uf": [(-1.0, (0, 0, 0xFF))],
    "bool": [
        (0.0, (0, 0, 0)), (-0.0, (0, 0, 0)), (1e-45, (1, 1, 1)), (np.nan, (1, 1, 1)),
        (-np.inf, (1, 1, 1)),
    ],
}  # fmt: skip


@pytest.mark.quick
@each(("name", "cases"), OVERFLOW.items())
def test_overflow_and_underflow_by_hand(name, cases):
    """OFP8 1.0; OCP MX 1.0; arXiv:2206.02915; saturation words of IEEE P3109."""
    assert_codes(name, OF_SATURATIONS, cases)


# In the order of ROUNDINGS; 2**-9 is the step of e4m3fn's subnormals.
ROUNDED = {
    "e4m3fn": [
        (2.0**-10, (0, 1, 0, 1, 0, 1)), (-(2.0**-10), (0x80, 0x81, 0x80, 0x80, 0x81, 0x81)),
        (2.0**-126, (0, 0, 0, 1, 0, 1)), (17.0, (0x58, 0x59, 0x58, 0x59, 0x58, 0x59)),
        (19.0, (0x5A, 0x5A, 0x59, 0x5A, 0x59, 0x59)),
        (464.0, (0x7E, 0x7F, 0x7E, 0x7F, 0x7E, 0x7F)),
        (-1e9, (0xFF, 0xFF, 0xFE, 0xFE, 0xFF, 0xFF)), (np.inf, (0x7F,) * 6),
    ],
    "e5m2": [
        (60000.0, (0x7B, 0x7B, 0x7B, 0x7C, 0x7B, 0x7B)),
        (1e9, (0x7C, 0x7C, 0x7B, 0x7C, 0x7B, 0x7B)), (np.inf, (0x7C,) * 6),
    ],
    "int8": [(2.5, (2, 3, 2, 3, 2, 3)), (-2.5, (0xFE, 0xFD, 0xFE, 0xFE, 0xFD, 0xFD))],
    "e8m0fnu": [
        (1.25, (127, 127, 127, 128, 127, 127)), (2.5, (128, 128, 128, 129, 128, 129)),
        (2.0**-149, (255, 255, 255, 0, 255, 255)),
    ],
}  # fmt: skip


@pytest.mark.quick
@each(("name", "cases"), ROUNDED.items())
def test_roundings_by_hand(name, cases):
    assert_codes(name, [{"rounding": r, "saturation": "none"} for r in ROUNDINGS], cases)


def test_every_kind_of_format_is_here():
    kinds = {type(spec) for spec in NARROW.values()}
    assert kinds == {Float, Int, Table}
    assert {spec.kind for spec in NARROW.values() if isinstance(spec, Float)} == {
        *("ieee", "fn", "fnuz", "extended", "none")
    }
