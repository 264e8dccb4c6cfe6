"""A wrapped model on a mesh of eight devices, data, tensor and fully sharded parallel.

Oracle: the same model on one device. What is kept of a step, histories and scales, is compared bit
for bit; losses up to the order of sums.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from refused import refused

import qtoolkit as qt
from qtoolkit.optim import quantize_state
from qtoolkit.products import Delayed, Operand, Recipe

pytestmark = pytest.mark.devices(8)

BATCHES = np.random.default_rng(0).normal(size=(3, 16, 32)).astype(np.float32)


def delayed(axis_names=()):
    forward, gradient = (Operand(fmt, scaling=Delayed(4)) for fmt in ("e4m3fn", "e5m2"))
    return Recipe(forward, gradient, axis_names=axis_names)


class Net(nnx.Module):
    """On Explicit meshes sums over a sharded axis say where their results go."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x, result=None):
        return self.down(nnx.relu(self.up(x)), out_sharding=result)


# The shards of a batch, and of both kernels.
PLACES = {
    "data": (P("data"), (P(), P())),
    "data and tensor": (P("data"), (P(None, "model"), P("model", None))),
    "fully sharded": (P(("data", "model")), (P(("data", "model")), P(("data", "model")))),
}


def trained(mesh=None, rows=None, kernels=None, *, gather=False, result=None, recipe=None):
    """Losses of three steps, what the layers keep, and the kernels."""
    model = qt.nnx.wrap(Net(), recipe or delayed())
    if mesh is not None:
        for layer, spec in zip((model.up, model.down), kernels, strict=True):
            layer.kernel.set_value(jax.device_put(layer.kernel[...], NamedSharding(mesh, spec)))
    tx = quantize_state(optax.adam(1e-2), "e4m3fn", rounding="nearest_even", min_size=1024)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss(model, x):
        if gather:  # as fully sharded training does: whole kernels for the time of a product
            model = nnx.clone(model)
            for layer in (model.up, model.down):
                layer.kernel.set_value(jax.reshard(layer.kernel[...], P()))
        return jnp.mean((model(x, result) - 1) ** 2)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = qt.nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    losses = []
    for batch in BATCHES:
        x = batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, rows))
        losses.append(float(step(model, optimizer, x)))
    kept = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, qt.nnx.ScalingState)))
    return losses, kept, model


@functools.cache
def alone():
    return trained()[:2]


@pytest.mark.sample("data-AxisType.Auto")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", PLACES)
def test_eight_devices_do_what_one_does(name, kind):
    rows, kernels = PLACES[name]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    explicit = kind is AxisType.Explicit
    with jax.set_mesh(mesh):
        losses, kept, model = trained(
            mesh,
            rows,
            kernels,
            gather=explicit and name == "fully sharded",
            result=rows if explicit and name != "fully sharded" else None,
        )
    assert model.up.kernel[...].sharding.is_equivalent_to(NamedSharding(mesh, kernels[0]), 2)
    wanted, wanted_kept = alone()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, kept, wanted_kept)


def shards(recipe, names=("data",)):
    """Loss and gradients of eight shards of a batch inside shard_map."""
    model = qt.nnx.wrap(Net(), recipe)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def value(params, x):
        y = nnx.merge(graph, params, rest)(x)
        return jax.lax.pmean(jnp.mean((y - 1) ** 2), names)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P())}
    run = jax.jit(jax.shard_map(jax.value_and_grad(value), mesh=mesh, **specs))
    return run(params, BATCHES[0])


def test_shards_that_share_scales_do_what_one_device_does():
    """With `axis_names`; without them every shard has scales of its own, and the loss differs."""

    def one_device(recipe):
        model = qt.nnx.wrap(Net(), recipe)
        return nnx.value_and_grad(lambda m: jnp.mean((m(BATCHES[0]) - 1) ** 2))(model)

    loss, grads = one_device(Recipe())
    got, got_grads = shards(Recipe(axis_names=("data",)))
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
    assert abs(float(shards(Recipe())[0]) / float(loss) - 1) > 1e-5


def shared_histories(step, state):
    """What eight shards keep after three steps, each of its own part of the batch."""

    def of_shard(state, batches):
        for x in batches:
            state = step(state, x)
        return jax.tree.map(lambda x: x[None], state)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P(None, "data")), "out_specs": P("data"), "check_vma": False}
    return jax.jit(jax.shard_map(of_shard, mesh=mesh, **specs))(state, SPREAD)


# The shards have other magnitudes each; in the second step one of them has an infinity.
SPREAD = (BATCHES * 2.0 ** np.arange(16)[:, None]).astype(np.float32)
SPREAD[1, 5, 0] = np.inf


def nnx_step(recipe):
    graph, state = nnx.split(qt.nnx.wrap(Net(), recipe))

    def step(state, x):
        model = nnx.merge(graph, state)
        qt.nnx.value_and_grad(lambda model: jnp.sum(model(x)))(model)
        return nnx.state(model)

    return step, state, lambda state: nnx.filter_state(state, qt.nnx.ScalingState)


def linen_step(recipe):
    module = qt.linen.wrap(linen.Sequential([linen.Dense(64), linen.relu, linen.Dense(32)]), recipe)
    variables = module.init(jax.random.key(0), jnp.asarray(BATCHES[0]))

    def step(variables, x):
        graded = qt.linen.value_and_grad(lambda variables: jnp.sum(module.apply(variables, x)))
        return {**variables, "qtoolkit": graded(variables)[2]}

    return step, variables, lambda variables: variables["qtoolkit"]


@pytest.mark.parametrize("made", [nnx_step, linen_step])
def test_shards_that_share_scales_share_histories(made):
    """With `check_vma=False`; the oracle is one device that sees the whole batch."""
    step, state, kept_of = made(delayed())
    for x in SPREAD:
        state = step(state, jnp.asarray(x))
    wanted = jax.tree.leaves(kept_of(state))
    step, state, kept_of = made(delayed(("data",)))
    for got, want in zip(
        jax.tree.leaves(kept_of(shared_histories(step, state))), wanted, strict=True
    ):
        np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
    assert sum(int(x) for x in wanted if x.dtype == jnp.uint32) == 2


@pytest.mark.quick
def test_an_axis_that_is_not_there():
    recipe = Recipe(axis_names=("batch",))
    message = r"axis_names=\('batch',\) are not all axes of a jax.shard_map.*omit axis_names"
    with refused(ValueError, message):
        qt.einsum("ij,jk->ik", jnp.ones((4, 4)), jnp.ones((4, 4)), recipe=recipe)
    refused(ValueError, message, shards, recipe)
