"""QArray's ways of moving data, against the same moves of the numbers it stands for."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refused import refused

import qtoolkit as qt
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling import QArray

SHAPE = (4, 6, 32)
SPECS = {
    "tensor": "int8",
    "channel": BlockFormat.channel("e4m3fn"),
    "token": BlockFormat.token("int4"),
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "middle": BlockFormat(element="e2m1fn", block=(4,), axes=(1,)),
    "tiles": BlockFormat(element="int8", block=(3, 8)),
    "zero points": BlockFormat.channel("uint8", zero_point=True),
    "unscaled": "bfloat16",
}
X = np.random.default_rng(0).normal(size=SHAPE) * np.exp2(np.arange(4.0) * 3)[:, None, None]
X = (X * np.exp2(np.arange(6.0))[:, None]).astype(np.float32)


def same(got, expected):
    got = got.dequantize()
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


def attempted(function):
    """What it returns, or the message of its error."""
    try:
        return function(), None
    except (IndexError, ValueError) as error:
        return None, str(error)


@pytest.fixture(scope="module", params=list(SPECS))
def quantized(request):
    q = qt.quantize(X, SPECS[request.param])
    return q, np.asarray(q.dequantize())


@pytest.mark.sample("tensor-0", "token-(2, 1)", "middle-(0, 0, 0)")
@pytest.mark.parametrize(
    "index",
    [
        *(0, -1, slice(1, 3), slice(None, None, -2), (2, 1), (slice(1, 2), -2), (..., slice(None))),
        *((1, ...), np.array([3, 0, 0]), np.array([[1], [2]]), np.int32(1), (np.array(2), 3)),
        *((slice(None), slice(0, 3)), (slice(None), slice(None), slice(8, 16)), (0, 0, 0)),
    ],
    ids=str,
)
def test_indexing_is_that_of_the_numbers_or_an_error(quantized, index):
    q, y = quantized
    lengths = q.blocks.lengths
    got, error = attempted(lambda: q[index])
    if got is None:
        assert any(1 < b < n for b, n in zip(lengths, SHAPE, strict=True)) or lengths[0] > 1, error
        assert error.startswith("QArray: ")
        return
    same(got, y[index])
    QArray(*(getattr(got, f.name) for f in dataclasses.fields(got)))  # its invariants hold


@pytest.mark.sample("tensor-order0", "unscaled-order2")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (-1, 0, 1)])
def test_axes_move_with_their_blocks(quantized, order):
    q, y = quantized
    same(q.transpose(order), y.transpose(order))
    same(q.transpose(*order), y.transpose(order))
    same(q.T, y.T)
    same(q.transpose(None).transpose(), y)


@pytest.mark.parametrize(
    ("spec", "turned"),
    [
        ("mxfp4", "mxfp4@-2"),
        ("nvfp4", "nvfp4@-2"),
        ("deepseek_1x128", "deepseek_1x128@-1,-2"),
        ("deepseek_128x128", "deepseek_128x128"),
        (BlockFormat.token("int8"), "int8 by token@-2"),
        (BlockFormat.channel("int8"), "int8 by channel@-2"),
        (BlockFormat(element="int8", block=(2, 32)), "int8 by blocks of 2x32@-1,-2"),
    ],
)
def test_transposed_arrays_name_their_axes(spec, turned):
    """Turned twice, an array has the structure it had: `jax.tree.map` takes both."""
    q = qt.quantize(jnp.ones((256, 384)), spec)
    assert q.T.spec.name == turned
    assert q.T.spec.scale_shape(q.T.shape) == q.T.scale.shape
    assert jax.tree.structure(q.T.T) == jax.tree.structure(q)


def test_one_index_of_a_channel_has_one_scale():
    q = qt.quantize(X, BlockFormat.channel("int8", axis=0))[0]
    assert q.spec == BlockFormat.tensor("int8")


@pytest.mark.sample("tensor-shape0", "channel-shape6", "nvfp4-shape6")
@pytest.mark.parametrize(
    "shape", [(24, 32), (4, 192), (768,), (-1, 8), (2, 2, 6, 32), (4, 6, 4, 8), (1, 4, 6, 1, 32)]
)
def test_a_reshape_keeps_the_numbers_or_would_tear_blocks(quantized, shape):
    q, y = quantized
    got, error = attempted(lambda: q.reshape(shape))
    if got is None:
        assert "would tear blocks" in error
        assert q.spec.name not in ("int8 by tensor", "bfloat16, unscaled")
        return
    same(got, y.reshape(shape))
    same(got.reshape(*SHAPE), y)


def test_which_reshapes_tear():
    q = qt.quantize(X, "mxfp4")
    assert q.reshape(24, 32).scale.shape == (24, 1)
    assert q.reshape(-1).scale.shape == (24,)
    for shape in ((-1, 8), (96, 8)):
        refused(ValueError, r"would tear blocks of \(1, 1, 32\)", q.reshape, shape)
    refused(ValueError, r"reshape\(5, 5\) of an array of shape", q.reshape, 5, 5)


@pytest.mark.sample("mxfp4")
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "token"])
def test_packed_codes(name):
    plain, q = qt.quantize(X, SPECS[name]), qt.quantize(X, SPECS[name], packed=True)
    assert q.codes.shape == (4, 6, 16)
    assert q.shape == SHAPE
    y = np.asarray(plain.dequantize())
    for got, expected in (
        (q, y),
        (q[1], y[1]),
        (q[1:3, 2], y[1:3, 2]),
        (q.reshape(24, 32), y.reshape(24, 32)),
        (q.transpose(1, 0, 2), y.transpose(1, 0, 2)),
        (q.unpack().T, y.T),
        (plain.pack(), y),
        (plain.pack().pack().unpack().unpack(), y),
    ):
        same(got, expected)
    with refused(IndexError, "is packed"):
        q[..., :16]
    with refused(ValueError, "packed last axis"):
        q.T  # noqa: B018
    refused(ValueError, "packed last axis", q.reshape, 4, 192)


def test_stacked_arrays_with_a_tensor_scale_each():
    """vmap adds an axis in front; the second scale of each array goes with it."""
    q = jax.vmap(lambda x: qt.quantize(x, "nvfp4"))(X)
    assert q.tensor_scale.shape == (4,)
    y = np.stack([qt.quantize(x, "nvfp4").dequantize() for x in X])
    same(q, y)
    for index in (3, slice(None, None, -1), slice(1, 3), np.array([2, 0]), (1, 2)):
        same(q[index], y[index])
    same(q.transpose(0, 2, 1), y.transpose(0, 2, 1))
    same(q.reshape(4, 192), y.reshape(4, 192))
    refused(ValueError, "a tensor scale of its own", q.transpose, 1, 0, 2)
    refused(ValueError, "a tensor scale of its own", q.reshape, 24, 32)


def test_moved_leaves_are_not_taken_for_right():
    q = qt.quantize(X, SPECS["middle"])
    with refused(ValueError, "scale has shape"):
        jax.tree.map(lambda leaf: leaf.swapaxes(1, 2), q).dequantize()
    refused(ValueError, "scale has shape", jax.vmap(lambda q: q.dequantize(), in_axes=2), q)


def test_a_tree_of_plain_arrays():
    q = qt.quantize(X, "nvfp4", packed=True)
    paths = [path[0].name for path, _ in jax.tree_util.tree_flatten_with_path(q)[0]]
    assert paths == ["codes", "scale", "tensor_scale"]
    assert q.nbytes == 4 * 6 * 16 + 4 * 6 * 2 + 4
    assert repr(q) == (
        "QArray(nvfp4, float32[4,6,32]: codes uint8[4,6,16], scale float8_e4m3fn[4,6,2], "
        "tensor_scale float32[])"
    )
    for again in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), jax.jit(lambda q: q)(q)):
        same(again, q.dequantize())
    abstract = jax.eval_shape(lambda x: qt.quantize(x, "nvfp4", packed=True), X)
    assert abstract.nbytes == q.nbytes
    assert abstract.shape == SHAPE
    total = jax.lax.scan(lambda sum, row: (sum + row.dequantize().sum(), None), 0.0, q_stack())[0]
    np.testing.assert_allclose(total, q_stack().dequantize().sum(), rtol=1e-5)


def q_stack():
    return qt.quantize(X, "mxfp4")


def test_a_traced_index():
    q = qt.quantize(X, "mxfp4")
    rows = jax.jit(lambda q, i: q[i].dequantize())
    for i in range(4):
        np.testing.assert_array_equal(rows(q, i), q.dequantize()[i])


def test_it_is_no_array():
    q = qt.quantize(X, "int8")
    for use in (np.asarray, jnp.asarray, lambda q: qt.encode(q, "int8"), jnp.sum):
        with pytest.raises(TypeError):
            use(q)
    assert [part.shape for part in q] == [(6, 32)] * 4
    refused(TypeError, "without axes", len, qt.quantize(np.float32(1), "int8"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"codes": jnp.zeros(SHAPE, jnp.int32)}, TypeError, "codes have int32, expected uint8"),
        ({"scale": jnp.ones((4, 6, 2))}, TypeError, "scale has float32, expected float8_e8m0fnu"),
        ({"scale": None}, ValueError, "scale is None, and mxfp4 needs an array"),
        ({"zero_point": jnp.zeros((4, 6, 1), jnp.int32)}, ValueError, "zero_point is given"),
        ({"tensor_scale": jnp.ones(())}, ValueError, "tensor_scale is given"),
        ({"dtype": "float64"}, TypeError, "dtype float64, expected float32"),
        ({"spec": "mxfp4"}, TypeError, "spec is a str, expected a BlockFormat"),
        ({"lengths": (0, 32)}, ValueError, "expected a tuple of positive integers"),
        ({"lengths": (1, 64)}, ValueError, "expected none longer than its axis"),
        ({"packed_size": 32}, ValueError, "expected 16 bytes there"),
    ],
)
def test_invariants_are_checked(change, error, message):
    q = qt.quantize(X, "mxfp4")
    refused(error, message, dataclasses.replace, q, **change)


def test_elements_in_their_own_dtype():
    q = qt.quantize(X, BlockFormat.tensor("e4m3fn"))
    assert q.elements.dtype == jnp.float8_e4m3fn
    scaled = q.elements.astype(jnp.float32) * q.scale
    np.testing.assert_array_equal(scaled, q.dequantize())
    with refused(TypeError, "JAX has no arrays of nf4"):
        qt.quantize(X.reshape(-1), "nf4").elements  # noqa: B018


def test_derivative_by_the_scale():
    q = qt.quantize(X, BlockFormat.channel("int8"))
    weights = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)

    def loss(scale):
        return jnp.sum(dataclasses.replace(q, scale=scale).dequantize() * weights)

    expected = np.sum(weights * np.asarray(q.elements, np.float32), axis=(0, 1), keepdims=True)
    np.testing.assert_allclose(jax.grad(loss)(q.scale), expected, rtol=1e-4, atol=1e-3)
    mx = qt.quantize(X, "mxfp4")
    by_scale = jax.grad(lambda s: jnp.sum(dataclasses.replace(mx, scale=s).dequantize()))
    refused(TypeError, "float8_e8m0fnu, which has no derivative", by_scale, mx.scale)


def test_infinite_cotangents_reach_the_gradient_of_the_scale():
    """Also where the code is 0, as 0 * inf is NaN: a loss scaler must not take such a step."""
    q = qt.quantize(np.array([0.0, 1.0, 2.0], np.float32), BlockFormat.tensor("e4m3fn"))
    _, back = jax.vjp(lambda scale: dataclasses.replace(q, scale=scale).dequantize(), q.scale)
    cases = ([np.inf, 1, 1], np.nan), ([np.nan, 1, 1], np.nan), ([0, np.inf, 1], np.inf)
    for bad, expected in cases:
        (gradient,) = back(jnp.array(bad, jnp.float32))
        np.testing.assert_array_equal(gradient, np.full(q.scale.shape, expected))


def test_masked_elements_do_not_change_gradients_of_scales():
    """A NaN under a cotangent of 0, as behind a mask; also in forward mode."""
    q = qt.quantize(np.array([np.nan, 1.0, 2.0], np.float32), BlockFormat.tensor("e4m3fn"))

    def masked(scale):
        return jnp.where(jnp.arange(3) > 0, dataclasses.replace(q, scale=scale).dequantize(), 0)

    expected = np.full(q.scale.shape, 3 / float(q.scale[0]))
    by_scale = jax.grad(lambda scale: jnp.sum(masked(scale)))(q.scale)
    np.testing.assert_allclose(by_scale, expected, rtol=2.0**-4)
    _, dots = jax.jvp(masked, (q.scale,), (jnp.ones_like(q.scale),))
    assert float(dots.sum()) == float(by_scale.sum())
