"""Flax's msgpack of quantized arrays: what comes back is what went in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import qtoolkit as qt
import qtoolkit.nnx


@pytest.mark.sample(1)
@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4", "int8", "bfloat16"])
def test_quantized_arrays_go_through_bytes(spec):
    assert qtoolkit.nnx.wrap  # importing it registers them
    x = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    tree = {"w": qt.quantize(x, spec), "b": jnp.ones(3)}
    target = {"w": qt.quantize(np.zeros_like(x), spec), "b": jnp.zeros(3)}
    again = serialization.from_bytes(target, serialization.to_bytes(tree))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for got, expected in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
        assert got.dtype == expected.dtype
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    np.testing.assert_array_equal(again["w"].dequantize(), tree["w"].dequantize())
