"""Convert-1 against OpenVINO's core, and against ml_dtypes and numpy where the core has defects."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import openvino_oracle as core
import pytest
from each import each
from refused import refused

import qtoolkit
from qtoolkit.openvino import convert

HALVES = [np.float16, ml_dtypes.bfloat16]
FLOATS = ["bf16", "f16", "f32", "f8e4m3", "f8e5m2"]
INTEGERS = ["i8", "i16", "i32", "u8", "u16", "u32"]


def every(dtype):
    """All of its values; all integers of 32 bits near zero and the limits, and random ones."""
    dtype = np.dtype(dtype)
    if dtype.itemsize <= 2:
        return np.arange(2 ** (8 * dtype.itemsize), dtype=f"uint{8 * dtype.itemsize}").view(dtype)
    info = np.iinfo(dtype)
    rng = np.random.default_rng(0)
    near = [limit + np.arange(-300, 301) for limit in (0, 2**24, 65504, 2**31 - 301)]
    random = rng.integers(info.min, info.max, 10_000, dtype, endpoint=True)
    return np.concatenate([random, *(part.astype(dtype) for part in near)])


def float32s():
    """Random patterns, NaNs and subnormals among them, and numbers just below powers of two."""
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    near = 2.0 ** rng.integers(-28, 17, 50_000) * (1 - rng.uniform(-(2**-8), 2**-8, 50_000))
    halfway = 2.0 ** rng.integers(-12, 10, 20_000) * (1 + rng.integers(0, 2**6, 20_000) / 2**6)
    around = halfway * (1 + rng.integers(-3, 4, 20_000) * 2.0**-20)
    return np.concatenate([patterns, near.astype(np.float32), around.astype(np.float32)])


@pytest.fixture(autouse=True)
def _numpy_is_quiet():
    """About overflow and NaNs in the oracles' casts."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


# "openvino": the core's bits.


@pytest.mark.quick
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", [*HALVES, np.float32])
def test_openvino_arithmetic_has_the_bits_of_the_core(source, target):
    x = float32s() if source == np.float32 else every(source)
    got = convert(x, target, arithmetic="openvino")
    core.assert_same_numbers(got, core.convert(x, target))


# "exact": to nearest even, once.


@pytest.mark.sample(
    *("float16-bf16", "float16-f32", "float16-f8e8m0", "bfloat16-f8e5m2", "float32-f16"),
    "float32-f8e4m3",
)
@pytest.mark.quick
@pytest.mark.parametrize("target", [*FLOATS, "f8e8m0"])
@pytest.mark.parametrize("source", [*HALVES, np.float32])
def test_exact_to_floats(source, target):
    x = float32s() if source == np.float32 else every(source)
    got = convert(x, target)
    dtype = core.TYPES[target]
    if target != "f8e8m0":  # ml_dtypes makes NaN of what lies below it
        core.assert_same_numbers(got, x.astype(dtype))
    expected = core.convert(x, target)
    nan, negative = np.isnan(x), np.signbit(x)
    twice = source == np.float32 and target in ("f8e4m3", "f8e5m2")
    if target == "bf16" or twice:
        # The core's own rules: truncated or half up, and float32 by way of float16.
        differ = np.asarray(got) != expected
        differ &= ~(nan | (np.isnan(got) & np.isnan(expected)))
        assert differ.mean() < (0.3 if target == "bf16" else 0.02)
        assert differ.any() == (source == np.float32 or (source, target) == (np.float16, "bf16"))
    elif target == "f8e5m2":  # it cuts NaNs, some to infinities
        core.assert_same_numbers(got[~nan], expected[~nan])
    elif target == "f8e8m0":  # it makes the lowest value of negative NaNs
        core.assert_same_numbers(got[~(nan & negative)], expected[~(nan & negative)])
    else:
        core.assert_same_numbers(got, expected)


@pytest.mark.parametrize("source", HALVES)
def test_exact_to_f4e2m1(source):
    x = every(source)
    got = np.asarray(convert(x, "f4e2m1"))
    assert got.dtype == ml_dtypes.float4_e2m1fn
    expected = core.converted_to_nibbles(x, "f4e2m1")
    compared = ~(np.isnan(x) & np.signbit(x))  # of which the core makes -6
    np.testing.assert_array_equal(got.view(np.uint8)[compared], expected[compared])
    assert (got[np.isnan(x)].astype(np.float32) == 6).all()


@pytest.mark.sample(
    *("float16-i8", "float16-i32", "float16-u16", "float16-u32", "bfloat16-i8", "bfloat16-u8"),
    *("bfloat16-u32", "bfloat16-boolean", "float32-i16", "float32-u16", "float32-boolean"),
)
@pytest.mark.quick
@pytest.mark.parametrize("target", [*INTEGERS, "boolean"])
@pytest.mark.parametrize("source", [*HALVES, np.float32])
def test_exact_floats_to_integers(source, target):
    x = float32s() if source == np.float32 else every(source)
    got = np.asarray(convert(x, target))
    dtype = core.TYPES[target]
    expected = core.convert(x, target)
    if target == "boolean":
        core.assert_same_numbers(got, expected)
        return
    info = np.iinfo(dtype)
    wide = x.astype(np.float64)
    inside = np.isfinite(wide) & (np.trunc(wide) >= info.min) & (np.trunc(wide) <= info.max)
    core.assert_same_numbers(got[inside], expected[inside])
    # Beyond, where the page has no result: the closest integer, and 0 for NaN.
    assert (got[wide > info.max] == info.max).all()
    assert (got[wide <= info.min - 1.0] == info.min).all()
    assert (got[np.isnan(wide)] == 0).all()


@pytest.mark.sample(
    "i8-i8", "u8-i16", "i16-i32", "i16-f8e5m2", "u16-boolean", "u32-i8", "u32-f32", "boolean-f8e4m3"
)
@pytest.mark.quick
@pytest.mark.parametrize("target", [*INTEGERS, *FLOATS, "boolean"])
@pytest.mark.parametrize("source", ["i8", "u8", "i16", "u16", "i32", "u32", "boolean"])
def test_exact_from_integers(source, target):
    dtype = core.TYPES[source]
    x = np.array([False, True]) if source == "boolean" else every(dtype)
    got = convert(x, target)
    expected = core.convert(x, target)
    if target in ("bf16", "f8e4m3", "f8e5m2", "f16", "f32"):
        # numpy and ml_dtypes go by way of float32, exactly up to 2**24; beyond, see qtoolkit.cast.
        small = np.abs(x.astype(np.int64)) <= 2**24
        own = x.astype(np.float32).astype(core.TYPES[target])
        core.assert_same_numbers(got[small], own[small])
        # The core: bf16 by its own rule; to f8 by way of float16, f16 from 32 bits clamped.
        few = np.abs(x.astype(np.int64)) <= 2**8 if target == "bf16" else small
        few = few & (np.abs(x.astype(np.int64)) <= 2**11 if target != "f32" else small)
        core.assert_same_numbers(got[few], expected[few])
    else:
        core.assert_same_numbers(got, expected)


@pytest.mark.parametrize("target", ["i4", "u4", "u2"])
def test_integers_of_few_bits_wrap(target):
    x = np.arange(-(2**15), 2**15, dtype=np.int16)
    got = np.asarray(convert(x, target))
    bits = int(target[1])
    assert got.dtype == f"{'int' if target[0] == 'i' else 'uint'}{bits}"
    np.testing.assert_array_equal(got.astype(np.int16) & (2**bits - 1), x & (2**bits - 1))
    if bits == 4:
        nibbles = core.converted_to_nibbles(x, target)
        np.testing.assert_array_equal(got.astype(np.int16) & 15, nibbles)


@pytest.mark.sample("f16-f8e4m3", "f32-f8e4m3", "i16-f8e4m3", "i16-f8e5m2", "boolean-f8e5m2")
@pytest.mark.parametrize("source", ["f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("target", ["f16", "f32", "i16", "boolean"])
def test_exact_from_float8(source, target):
    x = every(core.TYPES[source])
    if target == "i16":
        x = x[np.abs(x.astype(np.float32)) < 2**15]
    core.assert_same_numbers(convert(x, target), core.convert(x, target))


def test_64_bits():
    rng = np.random.default_rng(2)
    x = rng.integers(-(2**62), 2**62, 1000)
    # NumPy's 64 bits are rounded from their exact values where JAX has them off.
    core.assert_same_numbers(convert(x, "i32"), core.convert(x, "i32"))
    core.assert_same_numbers(convert(x, "u8"), core.convert(x, "u8"))
    just_above = np.array([1 + 2**-4 + 2**-40])
    assert float(convert(just_above, "f8e4m3")[0]) == 1.125  # by way of float32: 1
    for target in ("i64", "u64", "f64"):
        with refused(TypeError, r"openvino\.convert: format \w+64 needs 64-bit types"):
            convert(x, target)
        with jax.enable_x64(True):
            core.assert_same_numbers(convert(x, target), core.convert(x, target))
            core.assert_same_numbers(
                convert(np.float32([1.5, -0.0, 3e9]), target).astype(np.float64),
                core.convert(np.float32([1.5, -0.0, 3e9]), target).astype(np.float64),
            )


@pytest.mark.quick
def test_names_dtypes_numbers_and_jit():
    x = jnp.array([1.0625 + 2**-20, 500.0, -1.7])
    assert convert(x, "F8E4M3").dtype == jnp.float8_e4m3fn
    assert convert(x, jnp.float8_e5m2).dtype == jnp.float8_e5m2
    assert convert(x, bool).dtype == bool
    np.testing.assert_array_equal(convert(x, qtoolkit.format("int8")), [1, 127, -1])
    for arithmetic in ("exact", "openvino"):
        whole = convert(x, "f8e4m3", arithmetic=arithmetic)
        jitted = jax.jit(lambda x, a=arithmetic: convert(x, "f8e4m3", arithmetic=a))(x)
        mapped = jax.vmap(lambda x, a=arithmetic: convert(x, "f8e4m3", arithmetic=a))(x)
        np.testing.assert_array_equal(jitted.astype(np.float32), whole.astype(np.float32))
        np.testing.assert_array_equal(mapped.astype(np.float32), whole.astype(np.float32))
    assert convert(2.7, "i8") == 2
    assert convert(2**40 + 3, "u8") == 3
    assert convert(True, "f16") == 1


@pytest.mark.quick
@pytest.mark.parametrize("arithmetic", ["exact", "openvino"])
def test_derivatives(arithmetic):
    def f(x, target):
        return convert(x, target, arithmetic=arithmetic).astype(jnp.float32)

    x = jnp.array([1.1, 1e5, -65504.0, np.inf, np.nan])
    np.testing.assert_array_equal(jax.vmap(jax.grad(lambda x: f(x, "f16")))(x), [1, 0, 1, 0, 0])
    np.testing.assert_array_equal(
        jax.vmap(jax.jit(jax.grad(lambda x: f(x, "bf16"))))(x), [1, 1, 1, 0, 0]
    )
    for target in ("f8e4m3", "f8e5m2"):
        with refused(
            TypeError, r"openvino\.convert: has no derivative to e\dm\d.*differentiate fake_cast"
        ):
            jax.grad(lambda x, target=target: f(x, target))(1.0)
    if arithmetic == "exact":
        with refused(TypeError, r"openvino\.convert: has no derivative to int32"):
            jax.grad(lambda x: f(x, "i32"))(1.0)


@pytest.mark.quick
@each(("error", "got", "x", "target", "options"), [
    *((ValueError, f"destination_type: '{t}'", 1.0, t, {}) for t in ("fp8", "e4m3fn")),
    *((TypeError, "destination_type: got .*", 1.0, t, {}) for t in (np.complex64, None)),
    *((TypeError, f"nothing converts to '{t}'", 1.0, t, {}) for t in ("string", "dynamic")),
    (TypeError, r"no dtype for nf4; use qtoolkit.encode\(x, 'nf4'\)", 1.0, "nf4", {}),
    (TypeError, r"no dtype for u6; use qtoolkit.encode\(x, 'uint6'\)", 1.0, "u6", {}),
    (TypeError, "x has type list", [1.0], "f16", {}),
    (TypeError, "x has dtype complex64", np.complex64(1), "f16", {}),
    (ValueError, "arithmetic='fast'", 1.0, "f16", {"arithmetic": "fast"}),
    (TypeError, "arithmetic=.* from i64 to f16", 1, "f16", {"arithmetic": "openvino"}),
    (TypeError, "arithmetic=.* from f32 to i8", np.float32(1), "i8", {"arithmetic": "openvino"}),
])  # fmt: skip
def test_errors(error, got, x, target, options):
    refused(error, rf"^openvino\.convert: .*{got}", convert, x, target, **options)
