"""What the casts say when they are differentiated."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import qtoolkit as qt

X = np.array([-3.0, -0.25, 0.0, 1.5, 400.0], np.float32)
SMALL = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")


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
        with pytest.raises(TypeError, match=_both_names(where)):
            transform(X)
    with pytest.raises(TypeError, match=_both_names(where)):
        jax.jvp(loss, (X,), (np.ones_like(X),))
    with pytest.raises(TypeError, match=_both_names(where)):
        jax.linearize(loss, X)
    with pytest.raises(TypeError, match=_both_names(where)):
        jax.vmap(jax.grad(lambda x: jnp.sum(function(x, name))))(X[:, None])


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


def test_decode_is_not_differentiable_but_does_not_block_its_surroundings():
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


@pytest.mark.parametrize("saturation", ["finite", "propagate", "none"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_cast_to_16_bits_has_gradient_one_inside_and_zero_outside(name, saturation):
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


@pytest.mark.parametrize(("source", "name"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_cast_between_16_bit_formats_has_a_gradient_in_the_dtype_of_x(source, name):
    values = np.array([0, 1, -60000, 65504, np.inf, -np.inf, np.nan], np.float32)
    x = values.astype(ml_dtypes.bfloat16 if source == "bfloat16" else np.float16)
    gradient = jax.grad(lambda x: jnp.sum(qt.cast(x, name)).astype(jnp.float32))(x)
    assert gradient.dtype == x.dtype
    # bfloat16 reads 65504 as 65536, which float16 does not hold.
    expected = [1, 1, 1, source == "float16", 0, 0, 0]
    np.testing.assert_array_equal(np.asarray(gradient).astype(np.float32), expected)
