"""Kernels whose matmul divides and rotates its inputs.

Oracles: Sylvester's matrices in NumPy, float64 sums, and matmuls of the dequantized kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from jax import lax
from refused import refused

import qtoolkit as qt
from qtoolkit.scaling.internal import InputTransform

PLAIN = qt.Recipe((None, None), gradient=None)


def sylvester(block):
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(block)


def stored(shape, along, block, spec="int8", seed=None):
    """A kernel, its factors along some axes, and the QArray of both."""
    random = np.random.default_rng(0)
    w = random.normal(size=shape).astype(np.float32)
    sizes = [n if axis in along else 1 for axis, n in enumerate(shape)]
    factors = jnp.asarray(np.exp(random.normal(size=sizes)), jnp.float32)
    transform = InputTransform(factors, (block, seed, along[-1] - len(shape)))
    spec = qt.spec(spec).along(along[-1]) if "group" in spec else qt.spec(spec)
    q = qt.quantize(transform.of_kernel(jnp.asarray(w)), spec)
    return w, np.asarray(factors), dataclasses.replace(q, **transform._asdict())


def test_dequantizing_undoes_rotation_and_factors():
    w, factors, q = stored((32, 24), (0,), 16)
    turned = np.kron(np.eye(2), sylvester(16))
    expected = (turned @ np.asarray(q.unpack().codes.view(np.int8), np.float64)) / factors
    expected *= float(q.scale.reshape(()))
    np.testing.assert_allclose(q.dequantize(), expected, rtol=1e-5, atol=1e-5)
    plain = dataclasses.replace(q, factors=None, rotation=None)
    np.testing.assert_allclose(
        plain.dequantize(), turned @ (w * factors), atol=float(q.scale.reshape(())) * 0.51
    )
    assert "factors float32[32,1], rotated in blocks of 16" in repr(q)
    assert q.nbytes == plain.nbytes + 4 * 32
    halved = dataclasses.replace(q, dtype="bfloat16").dequantize()
    np.testing.assert_array_equal(halved, q.dequantize().astype(jnp.bfloat16))


def test_views_move_factors_and_rotation_along():
    q = stored((2, 32, 24), (1,), 16)[2]
    wide = np.asarray(q.dequantize())
    np.testing.assert_array_equal(q.T.dequantize(), wide.T)
    np.testing.assert_array_equal(q.transpose(1, 0, 2)[:, 1].dequantize(), wide[1])
    np.testing.assert_array_equal(q[1].dequantize(), wide[1])
    np.testing.assert_array_equal(q[1, :, 3].dequantize(), wide[1, :, 3])
    np.testing.assert_array_equal(q[jnp.asarray([1, 1, 0])].dequantize(), wide[[1, 1, 0]])
    np.testing.assert_array_equal(q.reshape(2, 1, 32, 24).dequantize(), wide[:, None])
    mapped = jax.vmap(lambda one: one.dequantize())(jax.tree.map(lambda x: x[None], q))
    np.testing.assert_array_equal(mapped[0], wide)
    refused(ValueError, "splits or merges axes of an array with factors", q.reshape, 64, 24)
    with refused(IndexError, "axis 1, which is rotated"):
        q[:, :16]
    refused(ValueError, r"factors have shape \(2,\)", dataclasses.replace, q, factors=jnp.ones(2))


def of_dot(x, w):
    return qt.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=PLAIN)


def of_einsum(x, w):  # the kernel is on the left, and the axes are in another order
    return qt.einsum("hdk,bdh->bk", w, x, recipe=PLAIN)


def of_conv(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    options = {"dimension_numbers": numbers, "feature_group_count": 2, "recipe": PLAIN}
    return qt.conv_general_dilated(x, w, (1, 1), "SAME", **options)


def of_ragged(x, w):
    return qt.ragged_dot(x, w, jnp.asarray([3, 0, 2]), recipe=PLAIN)


PRODUCTS = {
    "dot": (of_dot, (5, 32), (32, 24), (0,)),
    "einsum": (of_einsum, (5, 16, 2), (2, 16, 24), (0, 1)),
    "conv": (of_conv, (2, 5, 5, 32), (3, 3, 16, 8), (2,)),
    "ragged": (of_ragged, (5, 32), (3, 32, 24), (1,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_the_dequantized_kernel(name):
    function, x_shape, w_shape, along = PRODUCTS[name]
    q = stored(w_shape, along, 16, seed=3)[2]
    x = jax.random.normal(jax.random.key(1), x_shape)
    expected = function(x, q.dequantize())
    np.testing.assert_allclose(jax.jit(function)(x, q), expected, rtol=1e-4, atol=1e-4)
    gradient = jax.grad(lambda x: jnp.sum(function(x, q) ** 2))(x)
    expected = jax.grad(lambda x: jnp.sum(function(x, q.dequantize()) ** 2))(x)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4 * scale)


def test_activations_are_divided_and_rotated_then_rounded():
    _, factors, q = stored((32, 24), (0,), 16)
    x = jax.random.normal(jax.random.key(1), (5, 32)) * factors[:, 0]
    turned = np.kron(np.eye(2), sylvester(16))
    inputs = (np.asarray(x, np.float64) / factors[:, 0]) @ turned
    scale = np.abs(inputs).max() / 127
    rounded = np.clip(np.rint(inputs / scale), -128, 127) * scale
    codes = np.asarray(q.codes.view(np.int8), np.float64) * float(q.scale.reshape(()))
    recipe = qt.Recipe(("int8", "int8"), gradient=None)
    y = qt.dot_general(x, q, (((1,), (0,)), ((), ())), recipe=recipe)
    np.testing.assert_allclose(y, rounded @ codes, rtol=1e-4, atol=1e-3)


def test_a_served_layer_keeps_factors_and_rotations(tmp_path):
    q = stored((32, 24), (0,), 16, "int4_group32")[2].pack()
    layer = qt.nnx.quantize(nnx.Linear(32, 24, rngs=nnx.Rngs(0)), "int4_group32")
    layer.kernel.set_value(q)
    x = jax.random.normal(jax.random.key(1), (5, 32))
    expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64)
    graph, state = nnx.split(layer)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    np.testing.assert_allclose(run(state, x), expected, rtol=1e-4, atol=1e-4)
    assert "int4_group32@0, factors, Hadamard, stored" in str(qt.nnx.report(layer, x))

    qt.checkpoints.save(tmp_path / "layer.safetensors", state)
    other = qt.nnx.quantize(nnx.Linear(32, 24, rngs=nnx.Rngs(1)), "int4_group32")
    loaded = qt.checkpoints.load(tmp_path / "layer.safetensors", like=nnx.state(other))
    nnx.update(other, loaded)
    assert other.kernel.get_value().rotation == (16, None, -2)
    np.testing.assert_array_equal(other(x), layer(x))
    restored = serialization.from_bytes(jax.tree.map(jnp.zeros_like, q), serialization.to_bytes(q))
    np.testing.assert_array_equal(restored.dequantize(), q.dequantize())
    with pytest.raises(
        qt.checkpoints.CheckpointError, match="a QArray whose matmul applies factors to its inputs"
    ) as caught:
        qt.checkpoints.convert(
            tmp_path / "layer.safetensors",
            tmp_path / "other.safetensors",
            format="int4_group32",
            layout="compressed-tensors",
        )
    assert "\n" not in str(caught.value)


def test_a_stack_under_scan_has_a_transform_for_each_kernel():
    arrays = [stored((32, 32), (0,), 16, "int4_group32", seed)[2] for seed in (1, 1)]
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *arrays)
    x = jax.random.normal(jax.random.key(1), (5, 32))
    y, _ = lax.scan(lambda x, w: (of_dot(x, w), None), x, stack)
    expected = x @ arrays[0].dequantize() @ arrays[1].dequantize()
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)
