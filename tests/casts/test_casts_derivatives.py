"""What the casts say when they are differentiated."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from each import each
from refused import refused

import qtoolkit as qt

X = np.array([-3.0, -0.25, 0.0, 1.5, 400.0], np.float32)
SMALL = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
MODES = {
    "to_odd": {"rounding": "to_odd", "saturation": "none"},
    "toward_zero": {"rounding": "toward_zero", "saturation": "propagate"},
    "stochastic": {"rounding": "stochastic", "key": jax.random.key(0)},
    "random_bits": {"rounding": qt.Stochastic("A", bits=8), "random_bits": np.full(5, 3, np.uint8)},
}


def _round(x, name):
    return qt.round_to_format(x, name)


def _encode(x, name):
    return qt.encode(x, name).astype(jnp.float32)


def _cast(x, name):
    return qt.cast(x, name).astype(jnp.float32)


CASES = [
    *((_round, "round_to_format", name) for name in (*SMALL, "int8", "bfloat16", "float16")),
    *((_encode, "encode", name) for name in (*SMALL, "int8", "bfloat16")),
    *((_cast, "cast", name) for name in (*SMALL, "int8")),
]


def _both_names(name):
    return rf"(?s)^{name}: .*fake_cast"


@pytest.mark.quick
@pytest.mark.parametrize(("function", "where", "name"), CASES)
def test_a_derivative_raises_and_names_fake_cast(function, where, name):
    def loss(x):
        return jnp.sum(function(x, name))

    for transform in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        refused(TypeError, _both_names(where), transform, X)
    refused(TypeError, _both_names(where), jax.jvp, loss, (X,), (np.ones_like(X),))
    refused(TypeError, _both_names(where), jax.linearize, loss, X)
    with refused(TypeError, _both_names(where)):
        jax.vmap(jax.grad(lambda x: jnp.sum(function(x, name))))(X[:, None])


@each("mode", MODES)
@each(("where", "name"), [
    ("round_to_format", "e4m3fn"), ("encode", "bfloat16"), ("encode", "e2m1fn"),
    *(("cast", name) for name in ("int4", "e8m0fnu", "bool")),
])  # fmt: skip
def test_no_mode_has_a_derivative(where, name, mode):
    def loss(x):
        return jnp.sum(getattr(qt, where)(x, name, **MODES[mode]).astype(jnp.float32))

    for transform in (jax.grad(loss), jax.grad(jax.jit(loss))):
        refused(TypeError, _both_names(where), transform, X)
    refused(TypeError, _both_names(where), jax.jvp, loss, (X,), (np.ones_like(X),))


@pytest.mark.parametrize("name", ["nf4", "hifloat8", "posit8", "e2m3fn", "tf32", "binary8p3se"])
def test_codes_of_formats_without_a_dtype_have_none_either(name):
    for where, function in (("encode", _encode), ("round_to_format", _round)):
        with refused(TypeError, _both_names(where)):
            jax.grad(lambda x, f=function: jnp.sum(f(x, name)))(X)


@pytest.mark.sample("_round-e4m3fn")
@pytest.mark.parametrize(
    ("function", "name"),
    [(_round, "e4m3fn"), (_round, "int8"), (_encode, "e5m2fnuz"), (_cast, "e5m2"), (_cast, "int8")],
)
def test_no_derivative_asked_for_none_refused(function, name):
    data = jnp.asarray(X)

    def loss(w, x):
        frozen = jax.lax.stop_gradient(w)
        return jnp.sum(w * function(x, name)) + jnp.sum(function(frozen, name))

    w = np.full_like(X, 0.5)
    expected = np.asarray(function(data, name))
    for transform in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        np.testing.assert_array_equal(transform(w, data), expected)
    _, tangent = jax.jvp(lambda w: jnp.sum(w * function(data, name)), (w,), (np.ones_like(w),))
    np.testing.assert_allclose(tangent, expected.sum(), rtol=1e-6)  # a sum of five, in any order

    def scanned(w):
        def step(total, x):
            return total + w * function(x, name), None

        return jax.lax.scan(step, jnp.float32(0), data)[0]

    # float32 sums of five terms; rtol covers their order.
    np.testing.assert_allclose(jax.grad(scanned)(jnp.float32(2)), expected.sum(), rtol=1e-6)


def test_decode_has_no_derivative_but_its_neighbours_do():
    code = jnp.asarray(np.arange(256, dtype=np.uint8))
    gradient = jax.grad(lambda w: jnp.sum(w * jnp.nan_to_num(qt.decode(code, "e4m3fn"))))
    expected = np.nan_to_num(np.asarray(qt.decode(code, "e4m3fn")))
    np.testing.assert_array_equal(gradient(jnp.ones(256, jnp.float32)), expected)


# The edges: the largest value, what rounds beyond it, and what is not finite.
F16_MAX = np.float32(65504)
BF16_MAX = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]
EDGES = {
    "float16": [0, -0.0, 1e-8, 1.0, F16_MAX, np.nextafter(F16_MAX, np.float32(1e9)), 65519.0, 7e4],
    "bfloat16": [
        *(0, -0.0, 1e-40, 1.0, BF16_MAX),
        *(np.nextafter(BF16_MAX, np.float32(np.inf)), np.finfo(np.float32).max),
    ],
}


@pytest.mark.sample("float16-finite")
@pytest.mark.parametrize("saturation", ["finite", "propagate", "none"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_gradient_of_casts_to_16_bits_is_clipped(name, saturation):
    x = np.array(EDGES[name] + [np.inf, np.nan], np.float32)
    x = np.concatenate([x, -x])
    largest = {"float16": F16_MAX, "bfloat16": BF16_MAX}[name]
    expected = (np.abs(x) <= largest).astype(np.float32)
    assert 0 < expected.sum() < expected.size

    def loss(x):
        return jnp.sum(qt.cast(x, name, saturation=saturation).astype(jnp.float32))

    each = jax.vmap(jax.grad(loss))(x[:, None])[:, 0]
    for got in (jax.grad(loss)(x), jax.jit(jax.grad(loss))(x), jax.grad(jax.jit(loss))(x), each):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, expected)
    cast = lambda x: qt.cast(x, name, saturation=saturation)  # noqa: E731
    primal, tangent = jax.jvp(cast, (x,), (np.full_like(x, 0.5),))
    assert primal.dtype == tangent.dtype == qt.format(name).dtype
    np.testing.assert_array_equal(
        np.asarray(primal).view(np.uint16), np.asarray(cast(x)).view(np.uint16)
    )
    np.testing.assert_array_equal(np.asarray(tangent).astype(np.float32), 0.5 * expected)
    second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x)
    np.testing.assert_array_equal(second, np.zeros_like(x))


@pytest.mark.sample("float16-bfloat16")
@pytest.mark.parametrize(("source", "name"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_gradient_of_casts_between_16_bit_formats(source, name):
    values = np.array([0, 1, -60000, 65504, np.inf, -np.inf, np.nan], np.float32)
    x = values.astype(ml_dtypes.bfloat16 if source == "bfloat16" else np.float16)
    gradient = jax.grad(lambda x: jnp.sum(qt.cast(x, name)).astype(jnp.float32))(x)
    assert gradient.dtype == x.dtype
    # bfloat16 reads 65504 as 65536, which float16 does not hold.
    expected = [1, 1, 1, source == "float16", 0, 0, 0]
    np.testing.assert_array_equal(np.asarray(gradient).astype(np.float32), expected)


@pytest.mark.sample("to_odd")
@pytest.mark.parametrize("mode", MODES)
def test_cast_to_bfloat16_has_the_same_gradient_in_every_mode(mode):
    x = np.array([1.1, BF16_MAX, np.finfo(np.float32).max, -np.inf, np.nan], np.float32)
    cast = lambda x: qt.cast(x, "bfloat16", **MODES[mode])  # noqa: E731
    for run in (cast, jax.jit(cast)):
        tangent = jax.jvp(run, (x,), (np.ones_like(x),))[1]
        np.testing.assert_array_equal(np.asarray(tangent).astype(np.float32), [1, 1, 0, 0, 0])
        (pulled,) = jax.vjp(run, x)[1](tangent)
        np.testing.assert_array_equal(pulled, [1, 1, 0, 0, 0])


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
def test_cast_to_float32_is_the_identity_of_finite_numbers(source):
    """The slope at infinities and NaN is zero, as everywhere."""
    x = jnp.asarray([1.5, -0.0, 60000.0, np.inf, np.nan], source)
    got = jax.grad(lambda x: jnp.sum(qt.cast(x, "float32")))(x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), [1, 1, 1, 0, 0])


def test_cast_with_float64():
    """Both ways: the largest float32 and the float64 beside it; float64 keeps all of float32."""
    with jax.enable_x64(True):
        largest = np.float64(np.finfo(np.float32).max)
        x = np.array([0.1, largest, np.nextafter(largest, np.inf), -1e300, np.inf, np.nan])
        narrow = jax.grad(lambda x: jnp.sum(jnp.nan_to_num(qt.cast(x, "float32"))))(x)
        assert narrow.dtype == np.float64
        _, tangent = jax.jvp(lambda x: qt.cast(x, "float32"), (x,), (np.ones_like(x),))
        assert tangent.dtype == np.float32
        np.testing.assert_array_equal(tangent, [1, 1, 0, 0, 0, 0])
        wide = np.array([0.1, largest, -np.inf], np.float32)
        got = jax.grad(lambda x: jnp.sum(qt.cast(x, "float64")))(wide)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, [1, 1, 0])
        for name in ("e4m3fn", "int8", "int64", "bool"):
            with refused(TypeError, _both_names("cast")):
                jax.grad(lambda x, name=name: jnp.sum(_cast(x, name)))(x)


def test_integers_have_no_tangents_to_lose():
    """JAX gives integers tangents of type float0: nothing to refuse, and zeros come out."""
    x = jnp.arange(5)
    zero = np.zeros(5, jax.dtypes.float0)
    primal, tangent = jax.jvp(lambda x: qt.cast(x, "bfloat16"), (x,), (zero,))
    assert primal.dtype == tangent.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(tangent).astype(np.float32), np.zeros(5))
    weighed = jax.grad(lambda w: jnp.sum(w * qt.cast(x, "float32")))(jnp.ones(5, jnp.float32))
    np.testing.assert_array_equal(weighed, np.arange(5))


def test_decode_of_narrow_arrays_and_keys_do_not_block():
    """Keys and random bits are integers: no derivative is asked for by passing them."""
    w = np.full_like(X, 0.5)

    def loss(w, key):
        return jnp.sum(w * qt.round_to_format(X, "e4m3fn", rounding="stochastic", key=key))

    key = jax.random.key(1)
    expected = qt.round_to_format(X, "e4m3fn", rounding="stochastic", key=key)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(w, key), expected)
    narrow = qt.cast(X, "e4m3fn")
    got = jax.grad(lambda w: jnp.sum(w * qt.decode(narrow, "e4m3fn")))(w)
    np.testing.assert_array_equal(got, np.asarray(qt.round_to_format(X, "e4m3fn")))
