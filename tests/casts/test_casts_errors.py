"""Bad input: what was got, what was expected, what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import Float
from each import each
from refused import got, refused

import qtoolkit as qt

CASTS = {"round_to_format": qt.round_to_format, "encode": qt.encode, "cast": qt.cast}
DIFFERENTIABLE = {"fake_cast": qt.fake_cast, "round_cotangent": qt.round_cotangent}
DIFFERENTIABLE["fake_convert"] = lambda x, fmt, **kwargs: qt.fake_convert(x, fmt=fmt, **kwargs)
EVERY = {**CASTS, **DIFFERENTIABLE}
X = np.ones(3, np.float32)
KEY = jax.random.key(0)
MADE = Float(4, 3, 7, "fn", "nan").as_format("made")
X64 = r"enable them with jax\.config\.update\('jax_enable_x64', True\)"


NO_NUMBERS = [
    *(np.ones(2, np.complex64), np.complex128(1), jnp.ones(2, jnp.complex64), 1j),
    *(np.array(["1"]), np.array([b"1"]), np.str_("1"), np.array([1.0, None], object)),
    *(np.array([1], "M8[s]"), np.array([1], "m8[s]"), np.zeros(2, np.dtype([("a", "f4")]))),
    *(KEY, [1.0, 2.0], (), "1.0", b"1", None, object()),
]
NO_FLOATS = [np.ones(2, np.int32), np.ones(2, bool), jnp.ones(2, jnp.float8_e4m3fn), 1]


@pytest.mark.quick
@each("name", CASTS)
@each("x", NO_NUMBERS)
def test_wrong_sources(name, x):
    expected = rf"^{name}: x has {got(x)}, expected an array of a float, integer or bool dtype; "
    refused(TypeError, expected, CASTS[name], x, "e4m3fn")


@each("name", CASTS)
@each("x", [2**64, -(2**63) - 1, 10**400])
def test_integers_of_python_beyond_64_bits(name, x):
    refused(TypeError, rf"^{name}: x is an integer of more than 64 bits", CASTS[name], x, "e4m3fn")


@each("name", DIFFERENTIABLE)
@each("x", [*NO_NUMBERS, *NO_FLOATS])
def test_differentiable_casts_refuse_sources_without_derivative(name, x):
    expected = rf"^{name}: x has {got(x)}, expected float32, .*convert it first"
    refused(TypeError, expected, DIFFERENTIABLE[name], x, "e4m3fn")


@pytest.mark.quick
@pytest.mark.parametrize("x", [np.ones(2), np.float64(1), 1.0], ids=repr)
def test_float64_without_x64(x):
    """What is not taken; what is, tests/gradients/test_64_bits.py has."""
    # Of at most 32 bits, whatever x64 is.
    with refused(TypeError, r"^round_cotangent: x has (dtype|type) float"):
        qt.round_cotangent(x, "e4m3fn")
    with jax.enable_x64(True), pytest.raises(TypeError, match="expected float32, float16 or"):
        qt.round_cotangent(x, "e4m3fn")
    for fmt in ("float64", "int64", "uint64", "int33"):
        needs = f"format {fmt} needs 64-bit types, which are off in JAX; {X64}"
        for name in ("encode", "cast"):
            refused(TypeError, f"^{name}: {needs}", EVERY[name], x, fmt)
        with refused(TypeError, f"^decode: {needs}"):
            qt.decode(
                np.ones(2, np.uint64), fmt, np.float64 if fmt == "float64" else fmt[:-2] + "64"
            )
    for dtype in (np.float64, np.int64):
        with refused(TypeError, f"^decode: format {np.dtype(dtype)} needs 64-bit"):
            qt.decode(np.ones(2, np.uint8), "int8", dtype)


@pytest.mark.parametrize("x", [np.ones(2, np.int64), np.uint64(1), 1], ids=repr)
def test_64_bit_integers_without_x64(x):
    refused(TypeError, rf"^encode: format int64 needs 64-bit types.*{X64}", qt.encode, x, "int64")
    assert qt.encode(x, "int8").dtype == np.uint8


def test_wide_integers_to_tables_beyond_exact_floats():
    big = qt.TableFormat(
        name="big", values_by_code=(0.0, 2.0**40), overflow=qt.formats.Overflow.MAX
    )
    why = r"^encode: x has dtype int32 and big reaches to 1099511627776\.0, beyond what is exact"
    refused(TypeError, why, qt.encode, jnp.ones(2, jnp.int32), big)
    assert qt.encode(np.ones(2), big).dtype == np.uint8


@pytest.mark.parametrize("name", [*CASTS, "decode"])
def test_unknown_formats_raise_with_the_closest_names(name):
    function = CASTS.get(name, qt.decode)
    x = X if name != "decode" else np.ones(3, np.uint8)
    refused(ValueError, r"unknown format 'e4m3fm'; did you mean 'e4m3fn'", function, x, "e4m3fm")
    refused(ValueError, r"'zzzzzzzz'; `qtoolkit formats` lists all$", function, x, "zzzzzzzz")
    for missing in ("int0", "int65", "uint65"):
        refused(ValueError, rf"unknown format '{missing}'", function, x, missing)
    for missing in ("binary2p1se", "binary8p8se", "binary8p9ue", "binary17p3se"):
        expected = r"p3109: bits=\d+, precision=\d, expected 3 to 16 bits and a precision of 1 to"
        refused(ValueError, expected, function, x, missing)
    refused(TypeError, r"format: got 7 of type int", function, x, 7)
    refused(TypeError, r"format: got None of type NoneType", function, x, None)


@each("name", EVERY)
@each("bad", ["nearest", "", "NEAREST_EVEN", "Stochastic", None, 0])
def test_unknown_roundings(name, bad):
    expected = rf"^{name}: rounding={bad!r}, expected .*nearest_even.*a qtoolkit\.Stochastic"
    refused(ValueError, expected, EVERY[name], X, "e4m3fn", rounding=bad)
    with refused(ValueError, rf"^{name}: rounding=<class"):
        EVERY[name](X, "e4m3fn", rounding=qt.Stochastic)


@each("name", EVERY)
@each("bad", ["satfinite", "", "Finite", None, True])
def test_unknown_saturations(name, bad):
    expected = rf"^{name}: saturation={bad!r}, expected one of finite, propagate, none"
    refused(ValueError, expected, EVERY[name], X, "e4m3fn", saturation=bad)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("option", ["rounding", "saturation"])
def test_options_of_an_unhashable_or_array_type(name, option):
    refused((TypeError, ValueError), name, EVERY[name], X, "e4m3fn", **{option: ["finite"]})


# The bad input of stochastic rounding.


@pytest.mark.quick
def test_what_is_no_stochastic_rounding():
    for bits in (0, -1, 25, 64, 8.0, "8", None):
        refused(ValueError, rf"Stochastic: bits={bits!r}", qt.Stochastic, "A", bits=bits)
    for variant in ("D", "a", "", None, 0):
        refused(ValueError, rf"Stochastic: variant={variant!r}", qt.Stochastic, variant)


@pytest.mark.quick
@pytest.mark.parametrize("name", EVERY)
def test_neither_or_both_of_key_and_random_bits(name):
    function = EVERY[name]
    random = np.zeros(3, np.uint16)
    for rounding in ("stochastic", qt.Stochastic("A", bits=4)):
        with refused(ValueError, rf"^{name}: stochastic rounding got neither key nor"):
            function(X, "e4m3fn", rounding=rounding)
        with refused(ValueError, rf"^{name}: stochastic rounding got both key and"):
            function(X, "e4m3fn", rounding=rounding, key=KEY, random_bits=random)
    for given in ({"key": KEY}, {"random_bits": random}):
        (what,) = given
        unused = rf"^{name}: {what} is given, but rounding='to_odd' uses no random bits; remove it"
        refused(ValueError, unused, function, X, "e4m3fn", rounding="to_odd", **given)


@pytest.mark.quick
@each("name", EVERY)
@each("key", [
    *(0, 1.5, "key", [0, 1]), *(np.zeros(2, d) for d in (np.float32, np.int32, np.uint8, object)),
    *(jnp.zeros(shape, jnp.uint32) for shape in ((), 3, (2, 0))),
])  # fmt: skip
def test_what_is_no_key(name, key):
    with refused(TypeError, rf"^{name}: key has {got(key)}"):
        EVERY[name](X, "e4m3fn", rounding="stochastic", key=key)


@pytest.mark.parametrize("name", EVERY)
def test_several_keys(name):
    keys = jax.random.split(KEY, 3)
    for several in (keys, jax.random.key_data(keys), keys[:1]):
        count = len(several)
        expected = rf"^{name}: key holds {count} keys of shape \({count},\), .*use jax\.vmap"
        refused(ValueError, expected, EVERY[name], X, "e4m3fn", rounding="stochastic", key=several)


@pytest.mark.parametrize("name", EVERY)
def test_wrong_random_bits(name):
    def call(random, **kwargs):
        EVERY[name](X, "e4m3fn", rounding="stochastic", random_bits=random, **kwargs)

    arrays = (np.zeros(3, dtype) for dtype in (np.int32, np.float32, bool, np.uint64))
    for random in (*arrays, 3, [1, 2, 3], "a"):
        refused(
            TypeError, rf"^{name}: random_bits has .*, expected an array of uint8", call, random
        )
    for shape in ((2,), (4,), (2, 3), (3, 1)):
        text = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        expected = rf"^{name}: random_bits has shape \({text}\), .*broadcasts to .*\(3,\)"
        refused(ValueError, expected, call, np.zeros(shape, np.uint16))
    few = rf"^{name}: random_bits has dtype uint8, expected at least the 16 bits of the rounding"
    refused(ValueError, few, call, np.zeros(3, np.uint8))


@pytest.mark.quick
@each("name", EVERY)
def test_wrong_offsets(name):
    def call(offset):
        EVERY[name](X, "e4m3fn", rounding="stochastic", key=KEY, index_offset=offset)

    for offset in (-1, 2**64, np.int64(-3), np.array(-1), -(2**70), jnp.int32(-1)):
        refused(ValueError, rf"^{name}: index_offset=-?\d+", call, offset)
    for offset in (1.0, True, None, "3", np.ones(3, int), np.float32(1), jnp.ones((), bool)):
        refused(TypeError, rf"^{name}: index_offset is ", call, offset)


# Formats without what is asked for.


@pytest.mark.parametrize("name", EVERY)
def test_tables_that_are_not_rounded_stochastically(name):
    """Float32 cannot measure distances of 1e-39, of which XLA's CPU makes zeros."""
    fmt = qt.TableFormat(name="tiny", values_by_code=(0.0, 2.0**-130, 1.0, 2.0))
    why = rf"^{name}: stochastic rounding to tiny, whose values or gaps float32 does not hold"
    refused(ValueError, why, EVERY[name], X, fmt, rounding="stochastic", key=KEY)


@pytest.mark.parametrize(
    ("name", "saturation", "infinity", "largest"),
    [
        # Without an infinity it is NaN, the largest value, or a limit; without a sign, the lowest.
        ("e4m3fn", "propagate", 0x7F, 0x7E),
        ("e4m3fn", "none", 0x7F, 0x7F),
        ("e2m1fn", "propagate", 0x07, 0x07),
        ("e2m1fn", "none", 0x07, 0x07),
        ("e5m2", "propagate", 0x7C, 0x7B),
        ("int8", "propagate", 0x7F, 0x7F),
        ("binary8p4sf", "none", 0x7F, 0x7F),
    ],
)
def test_formats_without_infinity_say_what_stands_for_it(name, saturation, infinity, largest):
    x = np.array([np.inf, 1e9], np.float32)
    np.testing.assert_array_equal(qt.encode(x, name, saturation=saturation), [infinity, largest])


def test_formats_without_a_sign_clamp_what_is_negative():
    x = np.array([-1, -np.inf, -0.0], np.float32)
    np.testing.assert_array_equal(qt.encode(x, "ue4m3"), [0, 0, 0])
    np.testing.assert_array_equal(qt.encode(x, "ue4m3", saturation="none"), [0x7F, 0x7F, 0])
    np.testing.assert_array_equal(qt.encode(x, "e8m0fnu", saturation="none"), [0xFF] * 3)
    np.testing.assert_array_equal(qt.encode(x, "uint8"), [0, 0, 0])


def made(*fields):
    return Float(*fields, "ieee", "inf").as_format("made")


@each(("hint", "dtype", "formats"), [
    ("use float32", jnp.float16, ["bfloat16", "e8m0fnu", made(5, 2, 40), made(5, 2, 8),
                                  made(3, 12, 3)]),
    ("use float32", jnp.bfloat16, ["float16", "nf4", made(3, 8, 3),
                                   qt.IntFormat(name="int10", bits=10)]),
    ("use float32", jnp.int32, ["e4m3fn"]),
    ("use float32", jnp.uint8, ["int8"]),
    ("use float32", jnp.float8_e5m2, ["e4m3fn"]),
    ("use float32", jnp.float8_e8m0fnu, ["e2m1fn"]),
    ("use float64", jnp.float32, ["int32", "uint32", made(8, 3, 126), made(3, 2, -125),
                                  Float(8, 3, 127, "fn", "nan").as_format("wide")]),
])  # fmt: skip
def test_dtypes_that_do_not_hold_the_format(hint, dtype, formats):
    for fmt in map(qt.format, formats):
        why = f"dtype {np.dtype(dtype)} does not hold every finite value of {fmt.name}.*{hint}"
        refused(ValueError, f"^round_to_format: {why}", qt.round_to_format, jnp.ones(2, dtype), fmt)
        if dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
            for name, function in DIFFERENTIABLE.items():
                refused(ValueError, f"^{name}: {why}", function, jnp.ones(2, dtype), fmt)
        code = np.ones(2, fmt.code_dtype)
        refused(ValueError, f"^decode: {why}", qt.decode, code, fmt, dtype)
        assert qt.encode(jnp.ones(2, dtype), fmt).dtype == code.dtype  # codes do not need it


def test_formats_beyond_float64_point_to_exact_values():
    fmt = Float(12, 3, 2047, "ieee", "inf").as_format("huge")
    with refused(ValueError, r"^decode: .*huge.*use format\.value\(code\), which is exact"):
        qt.decode(np.ones(2, np.uint16), fmt)


@each(("codes", "fmt", "wanted"), [
    *((np.ones(2, dtype), "e4m3fn", "uint8") for dtype in (np.uint16, np.int8, np.float32)),
    *((x, "e4m3fn", "uint8") for x in (jnp.ones(2, jnp.float8_e5m2), [1, 2], 1, "a")),
    *((np.ones(2, np.uint8), fmt, "uint16") for fmt in ("bfloat16", made(8, 5, 127))),
])  # fmt: skip
def test_decode_refuses_other_codes(codes, fmt, wanted):
    refused(TypeError, rf"^decode: codes have .*{got(codes)}, exp.*{wanted}", qt.decode, codes, fmt)


@each("dtype", [np.complex64, "<U1", object, "M8[s]", np.longdouble, "abc", -1])
def test_decode_refuses_other_target_dtypes(dtype):
    expected = r"^decode: got dtype .*, expected a float or integer dtype of JAX"
    refused(TypeError, expected, qt.decode, np.ones(2, np.uint8), "e4m3fn", dtype)


@pytest.mark.parametrize(
    "fmt", [MADE, "e2m3fn", "tf32", "ue4m3", "nf4", "hifloat8", "int5", "uint12", qt.p3109(8, 3)]
)
def test_cast_needs_a_dtype_and_names_encode(fmt):
    name = qt.format(fmt).name
    refused(TypeError, f"^cast: format {name} has no .*dtype.*use encode", qt.cast, X, fmt)
    assert qt.encode(X, fmt).dtype == qt.format(fmt).code_dtype


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        qt.encode(X, "e4m3fn", "nearest_even")
