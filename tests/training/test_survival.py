"""Every recipe in both shells under every way to run a step: one table, two nets.

`Structured` has a layer that runs behind `stop_gradient` and again in a branch that may be skipped,
and a stack that is scanned and rematerialized. `Simple` has one product, and is run under each
transformation and on meshes. The shapes never change, so that each net is traced once for a shell
and recipe. Oracles: the nets unquantized, the same step called without the transformation, NumPy
for the histories.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import qtoolkit as qt
from qtoolkit.products import Delayed, Operand, Recipe

WIDTH = 32
X = jnp.float32(np.random.default_rng(0).normal(size=(8, WIDTH)))
RECIPES = {
    "plain": None,
    "current": qt.recipes.te_current,
    "delayed": Recipe(
        Operand(qt.BlockFormat.tensor("e4m3fn"), scaling=Delayed(4)),
        Operand(qt.BlockFormat.tensor("e5m2"), scaling=Delayed(4)),
    ),
    "token": qt.recipes.token_scaled,
    "mxfp8": qt.recipes.mxfp8,
    "nvfp4": qt.recipes.nvfp4,
}
CASES = [(shell, recipe) for shell in ("nnx", "linen") for recipe in RECIPES if recipe != "plain"]


def cases(is_usual, of_delayed=()):
    """All shells and recipes; those that are not usual are exhaustive."""
    marked = [
        pytest.param(*case, marks=pytest.mark.exhaustive if not is_usual(*case) else marks)
        for case in CASES
        for marks in [of_delayed if case[1] == "delayed" else ()]
    ]
    return pytest.mark.parametrize(("shell", "recipe"), marked)


# Each case compiles programs of its own. Outside of `make exhaustive` all recipes are trained, and
# mapped those with a history or keys; a history is what may not survive the other checks.
QUICK = pytest.mark.quick
TRAINED = cases(lambda shell, recipe: shell == "nnx" or recipe in ("delayed", "nvfp4"), QUICK)
MAPPED = cases(lambda shell, recipe: recipe in ("delayed", "nvfp4"), QUICK)
STATEFUL = cases(lambda shell, recipe: recipe == "delayed")


def nearness(recipe):
    """The least cosine between gradients and those of the unquantized net."""
    return 0.8 if recipe == "nvfp4" else 0.97


def repeats(recipe):
    """The same between two programs of one net: XLA may sum in another order, and then a value
    falls to the other side of a rounding boundary, which is far away in E2M1."""
    return 0.9 if recipe == "nvfp4" else 0.999


class NnxStructured(nnx.Module):
    def __init__(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.shared = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.stack = stacked(nnx.Rngs(1).split(2))

    def __call__(self, x, use):
        x = jax.lax.stop_gradient(self.shared(x))
        body = nnx.remat(lambda x, layer: jnp.tanh(layer(x)))
        x = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)
        return nnx.cond(use, lambda layer, x: layer(x), lambda layer, x: x, self.shared, x)


class NnxSimple(nnx.Module):
    def __init__(self):
        self.gain = nnx.Param(jnp.ones(WIDTH))
        self.shared = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x, use):
        return self.shared(x * self.gain[...])


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(WIDTH)(x)), None


class LinenStructured(nn.Module):
    @nn.compact
    def __call__(self, x, use):
        shared = nn.Dense(WIDTH, name="shared")
        x = jax.lax.stop_gradient(shared(x))
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(Body), length=2, **axes)(name="stack")(x, None)
        return nn.cond(use, lambda layer, x: layer(x), lambda layer, x: x, shared, x)


class LinenSimple(nn.Module):
    @nn.compact
    def __call__(self, x, use):
        gain = self.param("gain", nn.initializers.ones, (WIDTH,))
        return nn.Dense(WIDTH, name="shared")(x * gain)


class Net(NamedTuple):
    """A net as a pure function: `step(params, kept, x, use)` gives (value, gradients, kept)."""

    params: Any
    kept: Any
    step: Callable[..., Any]


def nnx_net(model, recipe):
    if recipe is not None:
        model = qt.nnx.wrap(model, recipe, inputs=(X, jnp.asarray(True)))
    graph, params, kept = nnx.split(model, nnx.Param, ...)

    def loss(model, x, use):
        return jnp.mean((model(x, use) - 1) ** 2)

    @jax.jit
    def step(params, kept, x, use):
        model = nnx.merge(graph, params, kept, copy=True)
        value, grads = qt.nnx.value_and_grad(loss)(model, x, use)
        return value, grads, nnx.split(model, nnx.Param, ...)[2]

    return Net(params, kept, step)


def linen_net(module, recipe):
    module = module if recipe is None else qt.linen.wrap(module, recipe)
    variables = jax.jit(module.init)(jax.random.key(0), X, True)

    def loss(variables, x, use):
        return jnp.mean((module.apply(variables, x, use) - 1) ** 2)

    @jax.jit
    def step(params, kept, x, use):
        variables = {"params": params, **({"qtoolkit": kept} if kept else {})}
        return qt.linen.value_and_grad(loss)(variables, x, use)

    return Net(variables["params"], variables.get("qtoolkit", {}), step)


NETS = {
    ("nnx", "structured"): (nnx_net, NnxStructured),
    ("nnx", "simple"): (nnx_net, NnxSimple),
    ("linen", "structured"): (linen_net, LinenStructured),
    ("linen", "simple"): (linen_net, LinenSimple),
}


@functools.cache
def made(shell, recipe, kind):
    make, net = NETS[shell, kind]
    return make(net(), RECIPES[recipe])


# The numbers are what is tested, not the speed.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TRANSFORM = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 2)


class Trainer:
    """A training step with donated arguments, and where it stands."""

    def __init__(self, net):
        self.net, self.traces = net, 0
        self.restart()

        @functools.partial(compiled, donate_argnums=(0, 1, 2))
        def train(params, optimizer, kept, x, use):
            self.traces += 1
            value, grads, kept = net.step(params, kept, x, use)
            updates, optimizer = TRANSFORM.update(grads, optimizer, params)
            return (optax.apply_updates(params, updates), optimizer, kept), (value, grads)

        self.train = train

    def restart(self, state=None):
        net = self.net
        state = state or (net.params, TRANSFORM.init(net.params), net.kept)
        self.state = jax.tree.map(jnp.array, state)  # copies, which may be donated

    def __call__(self, x, use=True):
        self.state, (value, grads) = self.train(*self.state, x, use)
        return float(value), grads

    def saved(self):
        return jax.tree.map(np.array, self.state)


@functools.cache
def trainer(shell, recipe, kind="structured"):
    return Trainer(made(shell, recipe, kind))


def fresh(*names):
    made = trainer(*names)
    made.restart()
    return made


def named(tree, *words):
    """The leaves whose path has all these words."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    shown = [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in paths]
    return [leaf for path, leaf in shown if all(word in path for word in words)]


def same(trees, others):
    jax.tree.map(np.testing.assert_array_equal, trees, others)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


def cosine(tree, other):
    a, b = flat(tree), flat(other)
    return a @ b / np.sqrt((a @ a) * (b @ b))


def edge(amax):
    """The upper edge of the bucket of a magnitude: three bits of its fraction are kept."""
    bits = np.asarray(amax, np.float32).view(np.uint32)
    return (((bits >> 20) + 1) << 20).view(np.float32)


@TRAINED
def test_donation_accumulation_and_clipping_in_one_trace(shell, recipe):
    train = fresh(shell, recipe)
    losses, grads = zip(*(train(X) for _ in range(10)), strict=True)
    assert losses[-1] < 0.9 * losses[0]
    _, wanted = fresh(shell, "plain")(X)
    assert jax.tree.structure(grads[0]) == jax.tree.structure(train.net.params)  # no probes
    assert 1 - 1e-9 > cosine(grads[0], wanted) > nearness(recipe)
    np.testing.assert_allclose(optax.tree.norm(grads[0]), optax.tree.norm(wanted), rtol=0.2)
    train(X, use=False)
    assert train.traces == 1


@STATEFUL
def test_bad_batches_are_seen_and_leave_no_trace(shell, recipe):
    train = fresh(shell, recipe)
    train(X)
    before = train.saved()
    for bad in (np.inf, np.nan):
        train.restart(before)
        value, grads = train(X.at[0, 0].set(bad))
        assert not (np.isfinite(value) and np.isfinite(flat(grads)).all())
        same(named(train.state[2], "history"), named(before[2], "history"))
        # What runs behind `stop_gradient` is never observed.
        kept = (named(train.state[2], name) for name in ("history", "bad"))
        counts = [(count, history.any()) for history, count in zip(*kept, strict=True)]
        assert all(np.all(count == is_observed) for count, is_observed in counts)
        assert recipe != "delayed" or sum(is_observed for _, is_observed in counts) == 2
        # The step that was spoilt is skipped; the state that it left goes on.
        train.restart((*before[:2], train.state[2]))
        assert np.isfinite(train(X)[0])
    for batch in (0 * X, X):
        value, grads = train(batch)
        assert np.isfinite(value)
        assert np.isfinite(flat(grads)).all()


@STATEFUL
def test_skipped_or_stopped_layers_keep_their_state(shell, recipe):
    train = fresh(shell, recipe)
    _, grads = train(X, use=False)
    np.testing.assert_array_equal(flat(named(grads, "shared")), 0)
    assert np.abs(flat(named(grads, "stack"))).max() > 0
    same(named(train.state[2], "history", "shared"), named(train.net.kept, "history", "shared"))
    before = train.saved()[0]
    train(X, use=True)
    histories = [named(train.state[2], "history", layer) for layer in ("shared", "stack")]
    assert all(bool(found) == (recipe == "delayed") for found in histories)
    if recipe == "delayed":
        # Of the layer's two uses, that with tanh before it; its input X, above 3, is not observed.
        (shared,), (stack,) = ([x for x in found if x.any()] for found in histories)
        assert 0 < shared[0, 0] <= edge(1.0)
        (kernel,) = named(before, "shared", "kernel")
        assert shared[1, 0] == edge(np.abs(kernel).max())
        assert (stack[..., :2] > 0).all()  # two steps, the newest first
        assert (stack[..., 2:] == 0).all()


@STATEFUL
def test_restored_with_and_without_its_state(shell, recipe):
    train = fresh(shell, recipe)
    train(X)
    saved = train.saved()
    value, grads = train(3 * X)
    train.restart(saved)
    again, repeated = train(3 * X)
    assert again == value
    same(repeated, grads)
    train.restart((*saved[:2], train.net.kept))
    alone, _ = train(3 * X)
    assert np.isfinite(alone)
    # Scales of the step before are not those of this batch; all others follow from the batch.
    assert (alone != value) == (recipe == "delayed")


BATCHES = jnp.stack([X, 3 * X])


@functools.cache
def transformed(shell, recipe):
    """A loop over micro-batches of mapped steps, and a derivative of the gradient."""
    net = made(shell, recipe, "simple")

    @compiled
    def program(params, kept):
        def micro(kept, x):
            pair = jnp.stack([x, 2 * x])
            values, grads, after = jax.vmap(net.step, (None, None, 0, None))(params, kept, pair, 1)
            return jax.tree.map(lambda leaf: leaf[0], after), (values, grads)

        looped = jax.lax.scan(micro, kept, BATCHES)
        ones = jax.tree.map(jnp.ones_like, params)
        second = jax.jvp(lambda p: net.step(p, kept, X, 1)[1], (params,), (ones,))[1]
        return looped, second

    return program(net.params, net.kept)


@MAPPED
def test_mapped_steps_and_micro_batches_are_single_steps(shell, recipe):
    (kept, (values, grads)), second = transformed(shell, recipe)
    train = fresh(shell, recipe, "simple")
    params, optimizer, state = train.saved()
    for i, batch in enumerate(BATCHES):
        for j in (1, 0):  # the state of the first of a pair is what the loop passes on
            train.restart((params, optimizer, state))
            value, wanted = train((1 + j) * batch, 1)
            np.testing.assert_allclose(values[i, j], value, rtol=1e-2)
            got = jax.tree.map(lambda leaf, at=(i, j): leaf[at], grads)
            assert cosine(got, wanted) > repeats(recipe)
        state = train.saved()[2]
    same(named(kept, "history"), named(state, "history"))
    assert np.isfinite(flat(second)).all()
    assert cosine(second, transformed(shell, "plain")[1]) > nearness(recipe)
    if recipe == "delayed":
        (history,) = named(kept, "history")
        np.testing.assert_array_equal(history[0, :2], edge([3 * np.abs(X).max(), np.abs(X).max()]))


@pytest.mark.devices(4)
@STATEFUL
def test_four_devices(shell, recipe):
    """A batch that is spread by jit gives what one device gives, and so does a shard with all."""
    net, train = made(shell, recipe, "simple"), fresh(shell, recipe, "simple")
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    @compiled
    def program(params, kept, placed, each):
        def shard(x):
            value, grads, _ = net.step(params, kept, x, 1)
            return jax.lax.pmean((value, grads), "d")

        sharded = jax.shard_map(shard, in_specs=jax.P("d"), out_specs=jax.P())(each)
        return net.step(params, kept, placed, 1), sharded

    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P("d"))
        placed, each = (jax.device_put(x, place) for x in (X, jnp.tile(X, (4, 1))))
        spread, sharded = program(net.params, net.kept, placed, each)
    value, grads = train(X, 1)
    for got in (spread[:2], sharded):
        np.testing.assert_allclose(got[0], value, rtol=1e-2)
        assert cosine(got[1], grads) > repeats(recipe)
    same(named(spread[2], "history"), named(train.state[2], "history"))


@pytest.mark.devices(4)
@STATEFUL
def test_pmap(shell, recipe):
    """Devices that see the same batch leave the same state, each that of a device alone."""
    net, train = made(shell, recipe, "simple"), fresh(shell, recipe, "simple")
    step = jax.pmap(net.step, in_axes=(None, None, 0, None), devices=jax.devices()[:4])
    values, grads, kept = step(net.params, net.kept, jnp.tile(X, (4, 1, 1)), 1)
    value, wanted = train(X, 1)
    for i in range(4):
        got = jax.tree.map(lambda leaf, at=i: leaf[at], grads)
        np.testing.assert_allclose(values[i], value, rtol=1e-2)
        assert cosine(got, wanted) > repeats(recipe)
        mine = jax.tree.map(lambda leaf, at=i: leaf[at], kept)
        same(named(mine, "history"), named(train.state[2], "history"))
