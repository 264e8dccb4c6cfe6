"""What holds for every block format: one result however it is run, zeros, powers of two, slopes.

All arrays have one shape, so each format compiles once; many properties then run the same calls.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from blocks_oracle import F32, PRESETS, Blocks, quantize, same_numbers, spread
from casts_oracle import Int, bits_of, values32
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from refused import refused

import qtoolkit as qt
from qtoolkit.formats import BlockFormat

SHAPE = (130, 160)
ASYMMETRIC = Blocks("uint8", block=(32,), zero_point=True)
ALL = {**PRESETS, "uint8": ASYMMETRIC}
del ALL["deepseek_1x128_e8m0"]  # as mxfp8_e4m3, and as the 128x128 blocks that are here
POWERS = [name for name, blocks in ALL.items() if blocks.powers]
KEY = jax.random.key(3)


def spec_of(name):
    return name if name in PRESETS else ALL[name].as_format()


def numbers(seed=0, shape=SHAPE, low=-6, high=6):
    """Rows of many magnitudes, with zeros of both signs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(low, high + 1, (*shape[:-1], 1)))
    x[..., ::7], x[..., 1::13] = 0, -0.0
    return x.astype(F32)


def fake(x, name):
    return np.asarray(qt.fake_quantize(x, spec_of(name)))


def same_bits(got, expected, where=""):
    np.testing.assert_array_equal(bits_of(got), bits_of(expected), where)


# One result.


@pytest.mark.sample("mxfp8_e4m3")
@pytest.mark.parametrize("name", ALL)
def test_fake_quantize_is_quantize_and_dequantize(name):
    """Bit for bit, NaNs and infinities included; data and scales may be subnormal beside E8M0."""
    x = numbers()
    x[2, 3], x[5, 7], x[129, 159] = np.nan, np.inf, -np.inf
    if ALL[name].powers:
        x[10:20] *= F32(2.0**-138)
        x[20:30] *= F32(2.0**119)
    same_bits(fake(x, name), qt.quantize(x, spec_of(name)).dequantize())


@pytest.mark.sample("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_have_the_dtype_of_x(dtype):
    x = numbers().astype({"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype])
    for name in ("mxfp4", "int4_group32")[dtype == "float16" :]:
        y = qt.fake_quantize(x, name)
        assert y.dtype == x.dtype
        same_bits(y, qt.quantize(x, name).dequantize())


@pytest.mark.sample("mxfp4")
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_group32", "uint8"])
def test_the_same_bits_in_any_fusion(name):
    """Eager, jitted, mapped, and inside a larger computation; numpy does the rest of that."""
    x, spec = numbers(), spec_of(name)
    q = qt.quantize(x, spec)
    y = np.asarray(q.dequantize())

    @jax.jit
    def larger(x):
        halves = x * 0.5 + x * 0.5
        inner = qt.quantize(halves, spec)
        back, direct = inner.dequantize(), qt.fake_quantize(halves, spec)
        first = back * 2 + 1
        second = jnp.where(direct > 0, direct * 3 - halves, -direct)
        return inner, first, second, jnp.max(direct, axis=0), direct.T

    inner, first, second, largest, transposed = larger(x)
    same_bits(inner.codes, q.codes)
    same_bits(inner.scale, q.scale)
    same_bits(first, y * 2 + 1)
    np.testing.assert_array_equal(largest, y.max(axis=0))
    same_bits(transposed, y.T)
    # Additions may be fused with the products before them; the difference is one rounding.
    near = np.where(y > 0, y.astype(np.float64) * 3 - x, -y)
    np.testing.assert_allclose(second, near, rtol=1e-6, atol=1e-6 * np.abs(x).max())

    cube = x.reshape(2, 65, 160)
    mapped = jax.vmap(lambda x: qt.fake_quantize(x, spec))(cube)
    each = jax.jit(lambda x: qt.fake_quantize(x, spec))
    for rows, got in zip(cube, mapped, strict=True):
        same_bits(got, each(rows))


@pytest.mark.sample("int16 by tensor")
@pytest.mark.parametrize(
    "spec",
    [
        BlockFormat.tensor("int16"),
        BlockFormat.token("int16"),
        BlockFormat.channel("int16"),
        BlockFormat(element="int16", block=(32,)),
    ],
    ids=str,
)
def test_products_around_it_are_not_merged(spec):
    """(x * c) * (1 / s) is not x * (c * (1 / s)); 16 bits are enough to see it."""
    x = np.random.default_rng(8).normal(size=(512, 128)).astype(F32)
    c, s = F32(3.3), F32(0.7)
    expected = qt.quantize(x * c, spec)
    got, direct = jax.jit(lambda x: (qt.quantize(x * c, spec), qt.fake_quantize(x * c, spec) * s))(
        x
    )
    same_bits(got.scale, expected.scale)
    same_bits(got.codes, expected.codes)
    same_bits(direct, np.asarray(expected.dequantize()) * s)


def test_mapped_arrays_and_keys():
    """`vmap` over x and keys, and of whole `QArray`s."""
    x = numbers(shape=(3, 8, 64))
    keys = jax.random.split(KEY, 3)
    spec = BlockFormat(element="e2m1fn", block=(32,), scale="e4m3fn", tensor_scale="float32")

    def run(x, key):
        return qt.quantize(x, spec, rounding="stochastic", key=key)

    mapped = jax.vmap(run)(x, keys)
    values = jax.vmap(lambda q: q.dequantize())(mapped)
    for i in range(3):
        one = run(x[i], keys[i])
        same_bits(mapped.codes[i], one.codes)
        same_bits(mapped.scale[i], one.scale)
        same_bits(values[i], one.dequantize())


# Zeros, powers of two, elements apart.


@pytest.mark.sample("mxfp8_e4m3", "mxint8", "nf4_block64")
@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros(name):
    """Among others, in blocks of zeros, beside infinities and beside tiny numbers."""
    x = numbers()
    x[3], x[4] = 0, -0.0
    x[5] = 0
    x[5, ::32] = np.inf
    x[6] = np.where(x[6] != 0, F32(2.0**-126), x[6])
    x[7] = np.where(x[7] != 0, F32(2.0**-149), x[7])
    y = fake(x, name)
    assert np.all(y[x == 0] == 0)
    if not isinstance(ALL[name].spec, Int) and name != "nf4_block64":
        same_bits(y[x == 0], x[x == 0])  # the sign stays where elements have one
    assert np.all(np.isfinite(y))
    q = qt.quantize(x, spec_of(name))
    scale = np.asarray(q.scale).astype(F32).view(np.uint32)
    assert np.all((scale > 0) & (scale < 0x7F800000))


@pytest.mark.sample("mxfp8_e4m3")
@pytest.mark.parametrize("name", list(ALL))
def test_amax_keeps_its_gradient(name):
    """A scale that was rounded leaves the largest element of a block beyond the range by little."""
    slope = jax.grad(lambda x: jnp.sum(qt.fake_quantize(x, spec_of(name))))(jnp.asarray(numbers()))
    if name not in ("mxfp4", "mxfp6_e2m3", "mxint8"):  # "even" and "floor" do clip
        np.testing.assert_array_equal(slope, np.ones(SHAPE, F32))


@pytest.mark.sample("mxfp8_e4m3", "mxfp6_e2m3", "mxint8")
@pytest.mark.parametrize("name", POWERS)
def test_powers_of_two_round_a_second_time_to_the_same(name):
    for seed in (1, 2):
        x = numbers(seed)
        x[:40] *= F32(2.0**-130)
        once = fake(x, name)
        same_bits(fake(once, name), once)


@pytest.mark.parametrize("name", [n for n, blocks in ALL.items() if not blocks.amax_epsilon])
def test_results_scale_with_powers_of_two(name):
    x = numbers()
    y = fake(x, name)
    for power in (-60, 13, 60):
        by = F32(2.0**power)
        same_bits(fake(x * by, name), y * by, str(power))


@pytest.mark.parametrize("name", [n for n, b in ALL.items() if not isinstance(b.spec, Int)])
def test_results_change_sign_with_the_data(name):
    if name != "nf4_block64":  # whose values are not symmetric
        x = numbers()
        same_bits(fake(-x, name), -fake(x, name))


@pytest.mark.parametrize("name", ALL)
def test_a_nan_or_infinity_changes_nothing_else(name):
    """In place of a zero, for an infinity has no part in the scale; a NaN at most its block."""
    blocks, x = ALL[name], numbers()
    at = (67, 42)
    x[at] = 0
    before = fake(x, name)
    others = np.ones(SHAPE, bool)
    others[at] = False
    for value in (np.inf, -np.inf, np.nan):
        x[at] = value
        after = fake(x, name)
        apart = others
        if np.isnan(value):
            assert np.isnan(after[at])
            if not blocks.has_nan:
                length = blocks.block[-1]
                apart = others.copy()
                apart[67, 42 // length * length :][:length] = False
                assert np.all(np.isnan(after[~apart]))
        else:
            assert np.isfinite(after[at])
            assert after[at] == 0 or (after[at] > 0) == (value > 0)
        same_bits(after[apart], before[apart])


def test_saturation_says_what_infinities_become():
    x = numbers()
    x[3, 4], x[5, 6], x[7, 8] = np.inf, -np.inf, np.nan
    places = (3, 5, 7), (4, 6, 8)
    expected = {
        ("mxfp8_e4m3", "none"): [np.nan] * 3,
        ("mxfp8_e5m2", "propagate"): [np.inf, -np.inf, np.nan],
    }
    for (name, saturation), wanted in expected.items():
        y = np.asarray(qt.fake_quantize(x, name, saturation=saturation))
        np.testing.assert_array_equal(y[places], np.array(wanted, F32))


few = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def arrays(draw):
    """float32 of the one shape: any patterns, or numbers about a magnitude, on a grid or off."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    about = draw(st.integers(-149, 127))
    span = draw(st.sampled_from([0, 3, 30]))
    kind = draw(st.sampled_from(["patterns", "normal", "grid", "sparse"]))
    if kind == "patterns":
        return rng.integers(0, 2**32, SHAPE, dtype=np.uint32).view(F32)
    x = rng.normal(size=SHAPE) if kind != "grid" else rng.integers(-16, 17, SHAPE) / 4
    if kind == "sparse":
        x[rng.random(SHAPE) < 0.95] = 0
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(x, rng.integers(about - span, about + span + 1, SHAPE)).astype(F32)


@few
@given(x=arrays(), name=st.sampled_from(["mxfp8_e4m3", "mxfp4", "mxint8"]))
def test_any_array_with_powers_of_two(x, name):
    """All at once, on whatever float32 holds: the oracle, both ways, twice."""
    expected = quantize(x, PRESETS[name])
    q = qt.quantize(x, name)
    same_bits(q.scale, expected.scale)
    values = np.asarray(q.dequantize())
    same_numbers(values, expected.dequantize())
    y = fake(x, name)
    same_bits(y, values)
    known = np.isfinite(y)
    assert np.all(y[known & (x == 0)] == 0)
    whole = np.where(known, y, 0)
    same_bits(fake(whole, name), whole)


@few
@given(x=arrays(), name=st.sampled_from(["nvfp4", "int4_group32", "nf4_block64", "uint8"]))
def test_any_array_with_other_scales(x, name):
    """On any finite numbers, subnormals and all: finite, of x's sign, one way as the other."""
    small = np.where(np.abs(x) < 2.0**127, x, F32(1))  # below what may round to infinity
    y = fake(small, name)
    same_bits(y, qt.quantize(small, spec_of(name)).dequantize())
    assert np.all(np.isfinite(y))
    assert np.all(y[small == 0] == 0)
    assert np.all(y * np.sign(small) >= 0)


# Derivatives.

FLOOR = Blocks("e4m3fn", block=(32,), scale="e8m0fnu", rule="floor")
SMALL = (6, 64)


def edges(limit=448.0):
    """Blocks whose scale is 2**0 under "floor": elements at the largest, one step past, beyond."""
    x = np.zeros(SMALL, F32)
    up, down = (np.nextafter(F32(limit), F32(to)) for to in (np.inf, 0))
    x[:, :8] = [limit, up, down, 511, 464, np.nextafter(F32(464), F32(500)), -0.0, 3]
    x[:, 8:16] = -x[:, :8]
    x[:, 32:40] = [np.inf, -np.inf, 300, np.nan, 1, 448.5, -300, 2.0**-140]
    return x


def test_the_clipped_slope_at_the_edges():
    """Scaled elements are exact here: 1 within half a step beyond the largest, else 0."""
    x, spec = edges(), FLOOR.as_format()
    with np.errstate(invalid="ignore"):
        inside = np.abs(x) <= 464
    assert np.sum(~inside) == 6 * 7
    ct = np.random.default_rng(0).normal(size=SMALL).astype(F32)

    @jax.jit
    def derivatives(x, ct):
        def run(x):
            return qt.fake_quantize(x, spec)

        y, pull = jax.vjp(run, x)
        return y, pull(ct)[0], jax.jvp(run, (x,), (ct,))[1]

    y, cotangent, tangent = derivatives(x, ct)
    same_bits(y, qt.fake_quantize(x, spec))
    same_numbers(cotangent, np.where(inside, ct, F32(0)))
    same_numbers(tangent, np.where(inside, ct, F32(0)))


def test_the_slopes_by_name_at_the_edges():
    x, spec = edges(), BlockFormat(element="e4m3fn", block=(32,))
    scale = np.ones((6, 2), F32)
    with np.errstate(invalid="ignore"):
        inside = (np.abs(x) <= 464).astype(F32)
    for gradient, wanted in (
        ("clipped", inside),
        ("identity", np.ones(SMALL, F32)),
        ("zero", np.zeros(SMALL, F32)),
    ):
        _, pull = jax.vjp(
            lambda x, g=gradient: qt.fake_quantize(x, spec, scale=scale, gradient=g), x
        )
        same_numbers(pull(np.ones(SMALL, F32))[0], wanted, gradient)


def test_slopes_end_where_a_narrow_range_ends():
    """-127.9 is clamped to -127 as 127.9 is to 127; the slopes are those of the other side."""
    u = np.array([127.0, 127.4, 127.6, 127.9, 1000], F32)
    spec = BlockFormat.tensor("int8", narrow_range=True)
    for rule in ("clipped", qt.gradients.Ramp(0.25)):

        def slopes(x, rule=rule):
            run = functools.partial(qt.fake_quantize, spec=spec, scale=1.0, gradient=rule)
            return jax.grad(lambda x: run(x).sum())(x)

        same_numbers(slopes(-u)[1:], slopes(u)[1:], rule)
        same_numbers(slopes(-u)[1], slopes(-u)[0], rule)
    got = jax.grad(lambda x: qt.fake_quantize(x, "mxint8").sum())(
        np.array([1.998, -1.998, 1] + [0] * 29, F32)
    )
    same_numbers(got[:3], F32([0, 0, 1]))


@pytest.mark.parametrize(
    ("name", "half_step"), [("nvfp4", 1), ("int4_group32", 0.5), ("uint8", 0.5), ("mxint8", 0.5)]
)
def test_the_clipped_slope_of_other_scales(name, half_step):
    """With a scale of half what amax gives, a part is clipped: half a step beyond the range."""
    blocks = ALL[name]
    x = numbers(shape=SMALL)
    given = quantize(x, blocks)
    scale = np.asarray(given.scale).astype(F32) / 2
    extra = {"scale": scale}
    if blocks.tensor_scale:
        extra["tensor_scale"] = given.tensor_scale
    if blocks.zero_point:
        extra["zero_point"] = given.zero_point
    expected = quantize(x, blocks, **extra)
    u = x.astype(np.float64) / expected.factor
    if blocks.zero_point:
        u = u + spread(given.zero_point, blocks, SMALL)
    ends = [float(values32(np.arange(2**blocks.spec.bits), blocks.spec).astype(float).min())]
    ends.append(float(blocks.largest / 2**blocks.element_exponent))
    ends = [ends[0] + blocks.narrow_range - half_step, ends[1] + half_step]
    spec = spec_of(name)

    @jax.jit
    def slope_at(x):
        return jax.grad(lambda x: jnp.sum(qt.fake_quantize(x, spec, **extra)))(x)

    slope = np.asarray(slope_at(x))
    margin = 1e-6 * max(map(abs, ends))
    within = (u > ends[0] + margin) & (u < ends[1] - margin)
    beyond = (u < ends[0] - margin) | (u > ends[1] + margin)
    assert within.any()
    assert beyond.any()
    assert np.all(slope[within] == 1)
    assert np.all(slope[beyond] == 0)


def test_scales_are_constants_of_the_derivative():
    """The slope of the element that is amax is that of all others, and given scales get none."""
    x = jnp.asarray(numbers(shape=SMALL))
    for name in ("mxfp8_e4m3", "int4_group32"):
        slope = jax.grad(lambda x, n=name: jnp.sum(qt.fake_quantize(x, n, gradient="identity")))(x)
        np.testing.assert_array_equal(slope, np.ones(SMALL, F32))
    scale = jnp.full((6, 2), 0.25, F32)

    def loss(scale, x):
        return jnp.sum(qt.fake_quantize(x, "int4_group32", scale=scale) ** 2)

    by_scale, by_x = jax.jit(jax.grad(loss, (0, 1)))(scale, x)
    np.testing.assert_array_equal(by_scale, np.zeros((6, 2), F32))
    assert np.any(np.asarray(by_x) != 0)


@pytest.mark.exhaustive
def test_derivatives_mapped_jitted_and_twice():
    x = jnp.asarray(numbers(shape=(2, *SMALL)))
    spec = "int4_group32"

    def loss(x):
        return jnp.sum(jnp.sin(qt.fake_quantize(x, spec)))

    y = qt.fake_quantize(x, spec)
    each = jax.vmap(jax.grad(loss))(x)
    whole = jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x))))(x)
    np.testing.assert_array_equal(each, whole)
    slope = jax.grad(lambda x: jnp.sum(qt.fake_quantize(x, spec)))(x)
    np.testing.assert_allclose(each, jnp.cos(y) * slope, rtol=1e-6)
    # A straight-through slope is constant, so the second derivative is that of the sine.
    _, second = jax.jvp(jax.grad(loss), (x[0],), (jnp.ones_like(x[0]),))
    np.testing.assert_allclose(second, -jnp.sin(y[0]) * slope[0], rtol=1e-6, atol=1e-7)
    kept = jax.grad(jax.checkpoint(loss))(x[0])
    np.testing.assert_array_equal(kept, each[0])


@pytest.mark.sample("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_derivatives_have_the_dtype_of_x(dtype):
    x = jnp.asarray(numbers(shape=SMALL), dtype)
    slope = jax.grad(lambda x: jnp.sum(qt.fake_quantize(x, "int4_group32", gradient="identity")))(x)
    assert slope.dtype == dtype
    np.testing.assert_array_equal(slope, np.ones(SMALL, dtype))


def test_quantize_has_no_derivative():
    x = jnp.asarray(numbers(shape=SMALL))
    with refused(TypeError, "quantize: has no derivative; differentiate fake_quantize"):
        jax.grad(lambda x: jnp.sum(qt.quantize(x, "int4_group32").dequantize()))(x)
    slope = jax.grad(
        lambda x: jnp.sum(x * qt.quantize(jax.lax.stop_gradient(x), "int4_group32").dequantize())
    )(x)
    same_bits(slope, qt.fake_quantize(x, "int4_group32"))
