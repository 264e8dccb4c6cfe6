"""Any shape, any array, eager, jitted and mapped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import SHIPPED, SOURCES, assert_same_bits, codes, values32

import qtoolkit as qt

SHAPES = [(), (0,), (3, 0, 2), (7,), (1, 1), (2, 3, 5)]


def _input(shape, source):
    x = np.random.default_rng(3).normal(0, 50, shape)
    return np.asarray(x, np.float32).astype(SOURCES[source])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_any_shape_of_numpy_and_jax_arrays(shape, source):
    x = _input(shape, source)
    for name in ("e4m3fn", "int8") if source == "float32" else ("e5m2fnuz",):
        spec = SHIPPED[name]
        code = codes(x, spec, "finite").reshape(shape)
        value = values32(code, spec).astype(SOURCES[source]).reshape(shape)
        for given in (x, jnp.asarray(x)):
            assert_same_bits(qt.encode(given, name), code, x)
            assert_same_bits(qt.round_to_format(given, name), value, x)
            assert_same_bits(np.asarray(qt.cast(given, name)).view(np.uint8), code, x)
        for given in (code, jnp.asarray(code)):
            got = qt.decode(given, name, SOURCES[source])
            assert isinstance(got, jax.Array)
            assert_same_bits(got, value, code)


def test_numpy_scalars_and_views():
    x = _input((6, 8), "float32")
    assert_same_bits(qt.encode(x[1, 1], "e5m2"), codes(x, SHIPPED["e5m2"], "finite")[1, 1])
    for view in (x.T, x[::-2, 1::3], np.broadcast_to(x[0], (4, 8)), np.asfortranarray(x)):
        assert_same_bits(qt.encode(view, "e5m2"), codes(view, SHIPPED["e5m2"], "finite"), view)


@pytest.mark.parametrize(
    ("name", "source"), [("e4m3fn", "float32"), ("int8", "bfloat16"), ("e5m2fnuz", "float16")]
)
def test_vmap_jit_and_scan_give_the_bits_of_the_eager_call(name, source):
    x = _input((4, 3, 5), source)
    for function in (qt.encode, qt.round_to_format, qt.cast):

        def one(x, function=function):
            return function(x, name, saturation="none")

        expected = one(x)
        assert_same_bits(jax.jit(one)(x), expected, x)
        assert_same_bits(jax.vmap(one)(x), expected, x)
        assert_same_bits(jax.vmap(one, in_axes=1, out_axes=1)(x), expected, x)
        assert_same_bits(jax.jit(jax.vmap(jax.vmap(one)))(x), expected, x)
        assert_same_bits(jax.lax.map(one, x), expected, x)
    code = qt.encode(x, name)
    expected = qt.decode(code, name)
    assert_same_bits(jax.vmap(lambda c: qt.decode(c, name))(code), expected)
    assert_same_bits(jax.jit(lambda c: qt.decode(c, name))(code), expected)


def test_formats_and_spellings_are_static_arguments():
    x = _input((9,), "float32")
    jitted = jax.jit(qt.encode, static_argnames=("fmt", "rounding", "saturation"))
    spellings = ("e4m3fn", "F8_E4M3", qt.format("e4m3fn"), jnp.float8_e4m3fn, np.dtype("int8"))
    for spec in spellings:
        assert_same_bits(jitted(x, fmt=spec), qt.encode(x, spec))


def test_the_input_is_left_as_it_is():
    x = _input((64,), "float32")
    kept = x.copy()
    given = jnp.asarray(x)
    for function in (qt.encode, qt.round_to_format, qt.cast):
        function(x, "e4m3fn")
        function(given, "e4m3fn")
    assert_same_bits(x, kept)
    assert_same_bits(given, kept)


def test_another_promotion_mode_or_x64_changes_nothing():
    x = _input((64,), "float32")
    expected = {name: np.asarray(qt.encode(x, name, saturation="none")) for name in SHIPPED}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for name, code in expected.items():
            assert_same_bits(qt.encode(x, name, saturation="none"), code, x)
            value = qt.round_to_format(x, name)
            assert_same_bits(value, qt.decode(qt.encode(x, name), name), x)
