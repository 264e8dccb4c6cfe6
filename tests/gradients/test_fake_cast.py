"""fake_cast: its values are those of decode(encode(x)), its derivative the estimator's slope."""

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refused import refused

from qtoolkit import Stochastic, decode, encode, fake_cast, format
from qtoolkit.casts import DETERMINISTIC, SATURATIONS
from qtoolkit.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FLOAT16, FORMATS, INT8, TableFormat
from qtoolkit.gradients import Estimator, Ramp

EIGHT_BITS = [E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, INT8]
EDGES = {E4M3FN: (-448.0, 448.0), E5M2: (-57344.0, 57344.0), INT8: (-128.0, 127.0)}
EDGES |= {
    format("e8m0fnu"): (2.0**-127, 2.0**127),
    format("ue4m3"): (0.0, 448.0),
    format("uint4"): (0.0, 15.0),
    format("bool"): (0.0, 1.0),
    format("e2m1fn"): (-6.0, 6.0),
    format("nf4"): (-1.0, 1.0),
    format("hifloat8"): (-32768.0, 32768.0),
    format("binary8p3ue"): (0.0, 1.25 * 2.0**31),
}
KEY = jax.random.key(5)
MODES = {
    **{rounding: {"rounding": rounding} for rounding in DETERMINISTIC},
    "A": {"rounding": Stochastic("A", bits=8), "key": KEY},
    "B": {"rounding": "stochastic", "key": KEY},
    "C": {"rounding": Stochastic("C", bits=24), "key": KEY},
    "random_bits": {"rounding": Stochastic("B", bits=8), "random_bits": np.uint8(77)},
}


def all_inputs(dtype):
    return np.arange(2**16, dtype=np.uint16).view(dtype)


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


@pytest.mark.sample(
    *("e4m3fn-float16-finite", "e4m3fn-bfloat16-none", "e4m3fnuz-float16-propagate"),
    "int8-float16-none",
)
@pytest.mark.quick
@pytest.mark.parametrize("saturation", ["finite", "propagate", "none"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("fmt", EIGHT_BITS, ids=lambda fmt: fmt.name)
def test_equals_decode_of_encode_on_every_16_bit_input(fmt, dtype, saturation):
    x = all_inputs(dtype)
    expected = decode(encode(x, fmt, saturation=saturation), fmt, dtype)
    got = fake_cast(x, fmt, saturation=saturation)
    np.testing.assert_array_equal(bits(got), bits(expected))


def modes_of(fmt):
    return {
        name: MODES[name] for name in (DETERMINISTIC if isinstance(fmt, TableFormat) else MODES)
    }


EVERY = [fmt for fmt in FORMATS if fmt.bits < 32 or fmt.name == "float32"]
EVERY += map(format, ("binary8p1se", "binary8p3sf", "binary12p6ue", "int5", "uint13"))
# Compiled as users compile them: what is shipped, and one format for each other way of rounding.
COMPILED = ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "bfloat16", "float16", "int8", "binary8p1se"]
COMPILED += ["e8m0fnu", "ue4m3", "e2m1fn", "int4", "bool", "nf4", "hifloat8", "float32"]


@pytest.mark.sample("float32", "e2m3fn")
@pytest.mark.quick
@pytest.mark.parametrize("fmt", EVERY, ids=lambda fmt: fmt.name)
def test_every_format_and_mode_equals_decode_of_encode(fmt):
    """Oracle: the two steps; what differs is that no code is made in between."""
    rng = np.random.default_rng(1)
    largest, step = float(fmt.max_finite), float(max(fmt.min_positive, 2.0**-126))
    near = np.exp2(rng.uniform(np.log2(step) - 4, min(np.log2(largest) + 2, 127), 4096))
    values = [near, -near, rng.integers(0, 2**32, 4096, np.uint32).view(np.float32)]
    values += [[0.0, -0.0, np.inf, -np.inf, np.nan, largest, -largest, 1e-45, -1e-40]]
    with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs; large limits
        x = np.concatenate(values).astype(np.float32)
    pairs = enumerate(modes_of(fmt).values())
    how = [{**mode, "saturation": SATURATIONS[i % 3]} for i, mode in pairs]

    @jax.jit
    def both(x):
        got = [fake_cast(x, fmt, **h) for h in how]
        return got, [decode(encode(x, fmt, **h), fmt, x.dtype) for h in how]

    with contextlib.nullcontext() if fmt.name in COMPILED else jax.disable_jit():
        results = both(x)
    for h, got, expected in zip(how, *results, strict=True):
        np.testing.assert_array_equal(bits(got), bits(expected), err_msg=str(h))


@pytest.mark.sample("e4m3fn")
@pytest.mark.parametrize("fmt", ["e4m3fn", "e8m0fnu", "bool", "nf4", "float32"])
def test_float64(fmt):
    """Rounded once from float64; the slope's limits are float64's as well."""
    with jax.enable_x64(True):
        fmt = format(fmt)
        largest = float(fmt.max_finite)
        tie = np.array([1.0625, 1.1875, 3.5, 0.3])
        x = np.concatenate([tie, tie + 2.0**-45, tie - 2.0**-45, [1e300, np.inf, np.nan, -0.0]])
        x = np.concatenate([x, -x, [largest, np.nextafter(largest, np.inf)]])
        for mode in modes_of(fmt).values():
            got = fake_cast(x, fmt, saturation="none", **mode)
            assert got.dtype == np.float64
            expected = decode(encode(x, fmt, saturation="none", **mode), fmt, np.float64)
            np.testing.assert_array_equal(bits(got), bits(expected))
        slope = jax.jvp(lambda x: fake_cast(x, fmt), (x,), (np.ones_like(x),))[1]
        assert slope.dtype == np.float64
        with np.errstate(invalid="ignore"):
            inside = (x >= float(fmt.lowest)) & (x <= largest)
        np.testing.assert_array_equal(slope, inside.astype(np.float64))


@pytest.mark.parametrize("fmt", ["e5m2", "int8"])
def test_a_python_float_is_a_float64(fmt):
    with jax.enable_x64(True):
        assert fake_cast(1.3, fmt).dtype == jnp.float64
        assert jax.grad(lambda x: fake_cast(x, fmt))(1.3) == 1


@pytest.mark.sample("e4m3fn-nearest_even", "e4m3fn-to_odd", "e5m2-toward_positive")
@pytest.mark.parametrize(
    ("fmt", "name"),
    [(E4M3FN, name) for name in MODES]
    + [(INT8, "to_odd"), (INT8, "C")]
    + [(fmt, "toward_positive") for fmt in EDGES],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_mode_has_the_same_clipped_slope(fmt, name):
    """Whatever the rounding: one within the finite range, zero beyond, at infinities and NaN."""
    lower, upper = map(np.float32, EDGES[fmt])
    up = np.float32(np.inf)
    inside = [lower, upper, (lower + upper) / 2, np.nextafter(upper, lower)]
    outside = [np.nextafter(upper, up), np.nextafter(lower, -up), np.inf, -np.inf, np.nan]
    if lower < 2.0**-126 and lower >= 0:  # XLA compares float32's subnormals as zeros
        outside[1] = np.float32(-1)
        inside = inside[1:]
    x = np.float32([*inside, *outside])
    expected = [1.0] * len(inside) + [0.0] * len(outside)

    @jax.jit
    def slopes(x):
        casts = [lambda x, s=s: fake_cast(x, fmt, saturation=s, **MODES[name]) for s in SATURATIONS]
        forward = [jax.jvp(cast, (x,), (jnp.ones_like(x),))[1] for cast in casts]
        return forward + [jax.vjp(cast, x)[1](jnp.ones_like(x))[0] for cast in casts]

    for slope in slopes(x):
        np.testing.assert_array_equal(slope, expected)


@pytest.mark.sample("e4m3fn", "e4m3fnuz", "float16")
@pytest.mark.parametrize("fmt", [*EIGHT_BITS, FLOAT16], ids=lambda fmt: fmt.name)
def test_equals_decode_of_encode_on_random_float32_patterns(fmt):
    x = np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint32).view(np.float32)
    np.testing.assert_array_equal(bits(fake_cast(x, fmt)), bits(decode(encode(x, fmt), fmt)))


@pytest.mark.sample("eager-e4m3fn", "eager-int8", "jit-e5m2", "jit-int8")
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, INT8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_clipped_slope_at_the_edges(fmt, wrap):
    lower, upper = EDGES[fmt]
    up, down = np.float32(np.inf), np.float32(-np.inf)
    inside = [lower, np.nextafter(np.float32(lower), up), -0.0, 0.0, 1e-30, upper]
    outside = [np.nextafter(np.float32(upper), up), np.nextafter(np.float32(lower), down)]
    outside += [np.inf, -np.inf, np.nan, 3e38]
    x = jnp.asarray([*inside, *outside], jnp.float32)
    gradient = wrap(jax.grad(lambda x: jnp.sum(fake_cast(x, fmt))))(x)
    np.testing.assert_array_equal(gradient, [1.0] * len(inside) + [0.0] * len(outside))


@pytest.mark.parametrize(("gradient", "expected"), [("identity", [1, 1, 1, 1]), ("zero", [0] * 4)])
def test_other_estimators(gradient, expected):
    x = jnp.asarray([1.0, 1e6, jnp.inf, jnp.nan], jnp.float32)
    got = jax.grad(lambda x: jnp.sum(fake_cast(x, E4M3FN, gradient=gradient)))(x)
    np.testing.assert_array_equal(got, expected)


def test_no_nan_from_an_infinite_cotangent_outside_the_range():
    x = jnp.asarray([1e6, 1.0], jnp.float32)
    _, pullback = jax.vjp(lambda x: fake_cast(x, E4M3FN), x)
    np.testing.assert_array_equal(pullback(jnp.full(2, jnp.inf))[0], [0, np.inf])


def test_an_estimator_of_the_users_own():
    class Half:
        def slope(self, x, lower, upper, fmt):
            assert (lower, upper, fmt) == (-448.0, 448.0, E4M3FN)
            return jnp.full_like(x, 0.5)

    assert isinstance(Half(), Estimator)
    assert jax.grad(lambda x: fake_cast(x, E4M3FN, gradient=Half()))(jnp.float32(3)) == 0.5


@pytest.mark.sample("float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_every_transformation_gives_the_same_derivative(dtype):
    x = jnp.asarray([-500.0, -2.0, 0.3, 7.0, 460.0], dtype)
    slope = np.asarray([0, 1, 1, 1, 0], np.float32)

    def f(x):
        return fake_cast(x, E4M3FN)

    tangent = jnp.full_like(x, 2)
    results = {
        "jvp": jax.jvp(f, (x,), (tangent,))[1],
        "linearize": jax.linearize(f, x)[1](tangent),
        "vjp": jax.vjp(f, x)[1](tangent)[0],
        "vmap": jax.vmap(jax.grad(lambda x: 2 * f(x)))(x),
        "remat": jax.vjp(jax.checkpoint(f), x)[1](tangent)[0],
        "scan": jax.grad(lambda x: 2 * jnp.sum(jax.lax.scan(lambda c, v: (c, f(v)), 0, x)[1]))(x),
    }
    for name, got in results.items():
        assert got.dtype == dtype, name
        np.testing.assert_array_equal(np.asarray(got, np.float32), 2 * slope, err_msg=name)


def test_hessian_of_a_square_is_that_of_the_estimate():
    x = jnp.asarray([1.1, 449.0, -3.0], jnp.float32)
    for estimate, slope in (("clipped", [1, 0, 1]), ("identity", [1, 1, 1]), ("zero", [0, 0, 0])):
        h = jax.hessian(lambda x, g=estimate: jnp.sum(fake_cast(x, E4M3FN, gradient=g) ** 2))(x)
        np.testing.assert_array_equal(h, 2 * np.diag(slope))


def test_errors():
    x = jnp.ones(3, jnp.float32)
    refused(TypeError, r"fake_cast: x has dtype int32", fake_cast, jnp.ones(3, jnp.int32), E4M3FN)
    refused(TypeError, r"fake_cast: x has type int", fake_cast, 1, E4M3FN)
    refused(TypeError, r"fake_cast: format float64 needs 64-bit types", fake_cast, x, "float64")
    with refused(ValueError, r"fake_cast: dtype float32 does not hold every finite"):
        fake_cast(x, "int32")
    refused(ValueError, r"unknown format 'e4m3fm'; did you mean 'e4m3fn'", fake_cast, x, "e4m3fm")
    with refused(ValueError, r"fake_cast: stochastic rounding got neither key nor"):
        fake_cast(x, E4M3FN, rounding="stochastic")
    with refused(TypeError, r"fake_cast: key has type int"):
        fake_cast(x, E4M3FN, rounding="stochastic", key=0)
    refused(ValueError, r"fake_cast: rounding='up'", fake_cast, x, E4M3FN, rounding="up")
    refused(ValueError, r"saturation=True", fake_cast, x, E4M3FN, saturation=True)
    refused(ValueError, r"gradient='ste'", fake_cast, x, E4M3FN, gradient="ste")
    refused(ValueError, r"gradient=<class .*Ramp'>", fake_cast, x, E4M3FN, gradient=Ramp)
    with refused(ValueError, r"float16 does not hold every finite value of bfloat16"):
        fake_cast(x.astype(jnp.float16), "bfloat16")
