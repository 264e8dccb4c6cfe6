"""Numerics, sensitivity, calibrate, freeze of linen modules, against operands captured by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from refused import refused
from state_of import by_kernel, keyed_by_kernel, state_of

import qtoolkit as qt
from qtoolkit.scaling import Percentile

INT8 = qt.Recipe(qt.BlockFormat.tensor("int8"), gradient=None)
X = jnp.float32(np.random.default_rng(0).normal(size=(6, 8)))


class Net(nn.Module):
    """A layer of Flax, a product of its own, and a trunk behind a stop."""

    @nn.compact
    def __call__(self, x):
        x = jax.lax.stop_gradient(nn.Dense(8, name="trunk")(x))
        x = nn.relu(nn.Dense(8, name="a")(x))
        return x @ self.param("kernel", nn.initializers.lecun_normal(), (8, 4))


MODULE = qt.linen.wrap(Net(), INT8)


def loss_fn(variables, x):
    return jnp.mean(MODULE.apply(variables, x) ** 2)


@pytest.fixture(scope="module")
def variables():
    return jax.jit(MODULE.init)(jax.random.key(1), X)


@pytest.mark.quick
def test_each_number_is_that_of_metrics_of_the_captured_operand(variables):
    found = qt.linen.numerics(MODULE, variables, X, loss_fn)
    params = variables["params"]

    def dense(x, layer):
        kernel = qt.fake_quantize(layer["kernel"], "int8")
        return qt.fake_quantize(x, "int8") @ kernel + layer["bias"]

    trunk = dense(X, params["trunk"])
    hidden = nn.relu(dense(trunk, params["a"]))
    captured = {
        ("a", "lhs"): trunk,
        ("a", "rhs"): params["a"]["kernel"],
        ("", "lhs"): hidden,
        ("", "rhs"): params["kernel"],
    }
    rows = {(row.path, row.operand): row.tally for row in found.rows}
    for key, x in captured.items():
        expected = qt.metrics(x, "int8")
        np.testing.assert_allclose(rows[key].amax, jnp.abs(x).max(), rtol=1e-6)
        np.testing.assert_allclose(rows[key].sqnr_db, expected.sqnr_db, atol=1e-2)
        np.testing.assert_allclose(rows[key].flushed_fraction, expected.flushed, rtol=1e-6)
    assert by_kernel(found.unreached) == ["trunk:kernel"]


@pytest.mark.quick
def test_a_frozen_module_does_not_depend_on_the_batch(variables):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="b")(nn.relu(nn.Dense(8, name="a")(x)))

    module = qt.linen.wrap(Two(), INT8)
    variables = jax.jit(module.init)(jax.random.key(1), X)
    batches = [X, 2 * X]
    found = qt.linen.calibrate(module, variables, batches, "percentile", fraction=0.9)
    state = Percentile.of(qt.BlockFormat.tensor("int8"), X.shape, fraction=0.9)
    for batch in batches:
        state = state.observe(batch)
    amax, *_ = keyed_by_kernel(found.amaxes("a"))["kernel"]
    np.testing.assert_array_equal(amax, state.amax().reshape(()))
    frozen, held = qt.linen.freeze(module, variables, found)
    others = X.at[1:].multiply(50)
    apply = jax.jit(frozen.apply)
    np.testing.assert_array_equal(apply(held, X)[0], apply(held, others)[0])
    plain = jax.jit(module.apply)
    assert np.any(np.asarray(plain(variables, X)[0] != plain(variables, others)[0]))
    refused(ValueError, r"dot_general of a: not calibrated", frozen.apply, variables, X)


@pytest.mark.exhaustive
def test_layers_that_scan_stacks_share_a_row_and_a_scale():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(8, name="dense")(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return scanned(name="blocks")(x, None)[0]

    module = qt.linen.wrap(Stack(), INT8)
    variables = jax.jit(module.init)(jax.random.key(0), X)

    def loss(variables, x):
        return jnp.sum(module.apply(variables, x) ** 2)

    found = qt.linen.numerics(module, variables, X, loss)
    kernel = next(row for row in found.rows if row.operand == "rhs")
    stacked = variables["params"]["blocks"]["dense"]["kernel"]
    assert float(kernel.tally.uses) == 3
    assert float(kernel.tally.elements) == stacked.size
    rounded = np.stack([qt.fake_quantize(k, "int8") for k in stacked]).astype(np.float64)
    wide = np.asarray(stacked, np.float64)
    expected = 10 * np.log10(np.sum(wide**2) / np.sum((wide - rounded) ** 2))
    np.testing.assert_allclose(kernel.tally.sqnr_db, expected, atol=1e-4)
    largest = float(jnp.abs(stacked).max())
    assert largest <= float(kernel.tally.amax) <= 1.125 * largest


def test_sensitivity(variables):
    found = qt.linen.sensitivity(MODULE, variables, X, loss_fn)
    assert set(found.paths) == {"trunk", "a", ""}
    np.testing.assert_allclose(found.quantized, loss_fn(variables, X), rtol=1e-5)
    plain = jnp.mean(Net().apply(variables, X) ** 2)
    np.testing.assert_allclose(found.wide, plain, rtol=1e-5)


def test_bad_input(variables):
    with refused(ValueError, "no quantized matmul ran"):
        qt.linen.numerics(Net(), variables, X, lambda v, x: jnp.sum(Net().apply(v, x)))
    refused(TypeError, "module has type int", qt.linen.numerics, 1, variables, X, loss_fn)
    refused(TypeError, "variables has type int", qt.linen.calibrate, MODULE, 1, [X])
    refused(ValueError, "there are no batches", qt.linen.calibrate, MODULE, variables, [])
    found = qt.products.Calibration((), ())
    refused(ValueError, "freeze: Net is not wrapped", qt.linen.freeze, Net(), variables, found)
    refused(TypeError, "calibration has type int", qt.linen.freeze, MODULE, variables, 1)


def test_debug_nans_finds_none_in_a_frozen_module():
    """The scale of an operand that was not calibrated is NaN. Oracle: the module before freeze."""
    module = qt.linen.wrap(nn.Dense(4), qt.Recipe((None, "e4m3fn"), gradient=None))
    x = jnp.ones((2, 4))
    with jax.debug_nans(True):
        variables = module.init(jax.random.key(0), x)
        found = qt.linen.calibrate(module, variables, [x])
        frozen, calibrated = qt.linen.freeze(module, variables, found)
        kept = state_of(calibrated)["kernel"]["amax"]
        assert np.isnan(np.asarray(kept)[0])
        expected = module.apply(variables, x)
        for apply in (frozen.apply, jax.jit(frozen.apply)):
            np.testing.assert_array_equal(apply(calibrated, x), expected)
