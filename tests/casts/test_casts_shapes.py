"""Any shape, any array, eager, jitted and mapped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import DTYPES, SHIPPED, SOURCES, SPECS, assert_same_bits, codes, values32

import qtoolkit as qt

SHAPES = [(), (0,), (3, 0, 2), (7,), (1, 1), (2, 3, 5)]


def _input(shape, source):
    x = np.random.default_rng(3).normal(0, 50, shape)
    return np.asarray(x, np.float32).astype(SOURCES[source])


@pytest.mark.sample("float32-()", "bfloat16-(0,)")
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


@pytest.mark.sample("e4m3fn-float32")
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


@pytest.mark.sample("float8_e5m2-()", "float16-(0,)")
@pytest.mark.parametrize("shape", [(), (0,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("source", [*DTYPES.values(), "float6_e2m3fn", "float6_e3m2fn"])
def test_any_shape_of_any_dtype(shape, source):
    """NumPy arrays of every dtype; those JAX has, as JAX arrays too."""
    dtype = np.dtype(source)
    x = np.random.default_rng(4).integers(0, 2, shape).astype(dtype)
    as_float32 = codes(x.astype(np.float32), SPECS["e5m2"], "finite")
    expected = np.asarray(as_float32, np.uint8).reshape(shape)
    if source.startswith("float6"):
        assert_same_bits(qt.encode(x, "e5m2"), expected)
        return
    assert_same_bits(qt.encode(x, "e5m2"), expected)
    assert_same_bits(np.asarray(qt.cast(x, "e5m2")).view(np.uint8), expected)
    if dtype.itemsize < 8:
        assert_same_bits(qt.encode(jnp.asarray(x), "e5m2"), expected)
        same = qt.round_to_format(x, dtype)
        assert same.dtype == dtype
        assert same.shape == shape
    with jax.enable_x64(True):
        assert_same_bits(qt.encode(jnp.asarray(x), "e5m2"), expected)


@pytest.mark.sample("float64", "e8m0fnu")
@pytest.mark.quick
@pytest.mark.parametrize("fmt", SPECS)
def test_any_shape_of_any_format(fmt):
    """0-d, empty and broadcast views; `decode` gives back what `encode` was given."""
    with jax.enable_x64(SPECS[fmt].bits > 32):
        dtype = np.float64 if SPECS[fmt].bits > 32 or "32" in fmt else np.float32
        values = np.array([1, 0] if fmt not in ("e8m0fnu",) else [1, 2], dtype)
        for x in (values[0], values[:0], np.broadcast_to(values, (3, 2)), values[::-1][:, None]):
            code = qt.encode(x, fmt)
            assert code.dtype == qt.format(fmt).code_dtype
            assert code.shape == np.shape(x)
            if dtype == np.float32:
                assert_same_bits(qt.decode(code, fmt), np.asarray(x, dtype))


@pytest.mark.parametrize("dtype", [np.longlong, np.ulonglong])
def test_the_other_64_bit_integers_of_numpy(dtype):
    """They equal int64 and uint64, but are types of their own, which JAX does not know."""
    x = np.array([0, 3, 2**62 + 1], dtype)
    same = x.astype(np.int64 if dtype is np.longlong else np.uint64)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for fmt in ("float32", "e4m3fn", "int8"):
                np.testing.assert_array_equal(qt.encode(x, fmt), qt.encode(same, fmt))


@pytest.mark.sample("to_odd", "nearest_away")
@pytest.mark.parametrize("rounding", ["to_odd", "toward_negative", "nearest_away"])
def test_large_and_many_axes(rounding):
    x = _input((2, 1, 3, 1, 2, 1, 4), "float32")
    for name in ("e4m3fn", "bfloat16", "int8"):
        expected = codes(x, SHIPPED[name], "none", rounding).reshape(x.shape)
        assert_same_bits(qt.encode(x, name, rounding=rounding, saturation="none"), expected, x)
