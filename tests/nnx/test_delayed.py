"""Delayed scaling in nnx: what a step sees, what it leaves behind, and every way to run one.

Oracles: NumPy for the histories (buckets of an eighth of a binade), `Current` scaling for what the
first step and plain gradients do. `../training/test_delayed_replay.py` replays many steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from refused import refused
from state_of import history_of, state_of

import qtoolkit as qt
from qtoolkit.products import Delayed, Operand, Recipe

CURRENT = Recipe()
DELAYED = Recipe(
    Operand(qt.BlockFormat.tensor("e4m3fn"), scaling=Delayed(4)),
    Operand(qt.BlockFormat.tensor("e5m2"), scaling=Delayed(4)),
)


FORWARD = Recipe(DELAYED.forward[0], "e5m2")


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.a = nnx.Linear(16, 16, rngs=rngs)
        self.b = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


@pytest.fixture
def x():
    return jnp.float32(np.random.default_rng(0).normal(size=(8, 16)))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@nnx.jit
def step(model, x):
    return qt.nnx.value_and_grad(loss)(model, x)


def kept(layer):
    return state_of(layer)["kernel"]


def newest(layer):
    return history_of(layer)[..., 0]


def edge(amax):
    """The upper edge of the bucket of a magnitude: three bits of its fraction are kept."""
    bits = np.asarray(amax, np.float32).view(np.uint32)
    return (((bits >> 20) + 1) << 20).view(np.float32)


def test_the_first_step_scales_as_current_scaling_does(x):
    value, grads = step(qt.nnx.wrap(Net(), DELAYED), x)
    expected, wanted = nnx.jit(nnx.value_and_grad(loss))(qt.nnx.wrap(Net(), CURRENT), x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), grads, wanted)


def test_gradients_clip_as_those_of_the_plain_model(x):
    """Flax's fp8_ops: the global norm went from 5.1 to 28.8 by the scales in it."""
    model = qt.nnx.wrap(Net(), DELAYED)
    _, plain = nnx.jit(nnx.value_and_grad(loss))(Net(), x)
    _, grads = step(model, x)
    assert jax.tree.structure(jax.tree.leaves(grads)) == jax.tree.structure(jax.tree.leaves(plain))
    np.testing.assert_allclose(optax.tree.norm(grads), optax.tree.norm(plain), rtol=0.05)
    _, grads = nnx.jit(qt.nnx.value_and_grad(loss, wrt=nnx.PathContains("b")))(model, x)
    assert set(nnx.to_pure_dict(grads)) == {"b"}


@pytest.mark.exhaustive
def test_gradients_with_probes_may_go_to_an_optimizer(x):
    model = qt.nnx.wrap(Net(), DELAYED)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    both = nnx.DiffState(0, nnx.Any(nnx.Param, qt.nnx.Probe))
    grads = nnx.grad(loss, argnums=both)(model, x)
    optimizer.update(model, grads)
    assert float(jnp.max(jnp.abs(kept(model.a)["probe"][...]))) == 0


def test_plain_gradients_scale_cotangents_currently(x):
    """`test_recording` says more of plain gradients. Nobody observes cotangents then, and their
    scales would go stale."""
    model, other = qt.nnx.wrap(Net(), DELAYED), qt.nnx.wrap(Net(), FORWARD)
    for one in (model, other):
        step(one, 1e-3 * x)
    before = newest(model.b)
    with pytest.warns(RuntimeWarning, match="scales of cotangents are computed in the same step"):
        value, grads = nnx.jit(nnx.value_and_grad(loss))(model, x)
    expected, wanted = nnx.jit(qt.nnx.value_and_grad(loss))(other, x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), grads, wanted)
    assert newest(model.b)[2] == before[2]
    assert (newest(model.b)[:2] >= before[:2]).all()


@pytest.mark.exhaustive
def test_a_stack_that_arrives_whole_observes_for_all(x):
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Linear(16, 16, rngs=rngs)

    model = qt.nnx.wrap(make(nnx.Rngs(0).split(3)), DELAYED)
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})

    def forward(layers, x):
        body = nnx.scan(
            lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry
        )
        return jnp.mean(body(x, layers) ** 2)

    qt.nnx.value_and_grad(forward)(model, x)
    assert (newest(model) == newest(model)[0]).all()
    assert newest(model)[0, 1] == edge(np.abs(model.kernel[...]).max())


def test_each_use_of_a_shared_layer_has_a_history(x):
    class Twice(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
            self.alias = self.a

        def __call__(self, x):
            x = 100 * nnx.relu(self.a(x))
            return self.alias(x)

    model = qt.nnx.wrap(Twice(), DELAYED, inputs=(x,))
    hidden = 100 * nnx.relu(model.a(x))
    step(model, x)
    assert newest(model.a)[0] == edge(np.abs(x).max())
    second = history_of(model.alias, name="kernel#2")[..., 0]
    assert second[0] == edge(np.abs(hidden).max())
    assert newest(model.a)[1] == second[1] == edge(np.abs(model.a.kernel[...]).max())
    assert kept(model.alias)["history"] is kept(model.a)["history"]


@pytest.mark.exhaustive
def test_parts_of_a_model(x):
    """LoRA parameters alone; a trunk behind `stop_gradient`, which is never observed."""
    base = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    lora = nnx.LoRA(16, 2, 16, base_module=base, rngs=nnx.Rngs(1))
    model = qt.nnx.wrap(lora, DELAYED)
    _, grads = qt.nnx.value_and_grad(loss, wrt=nnx.LoRAParam)(model, x)
    assert len(jax.tree.leaves(grads)) == 2
    assert newest(model.base_module)[0] == edge(np.abs(x).max())
    histories = [history_of(model, name=name)[0, 0] for name in ("lora_a", "lora_b")]
    assert histories[0] == edge(np.abs(x).max())

    class Trunk(Net):
        def __call__(self, x):
            return self.b(jax.lax.stop_gradient(self.a(x)))

    model = qt.nnx.wrap(Trunk(), DELAYED)
    step(model, x)
    assert newest(model.a).max() == 0
    assert newest(model.b).min() > 0


@pytest.mark.sample("conv")
@pytest.mark.parametrize("layer", ["conv", "einsum", "attention"])
def test_other_layers_have_histories(layer, x):
    rngs = nnx.Rngs(0)
    model, batch = {
        "conv": (nnx.Conv(16, 8, (3,), rngs=rngs), x[None]),
        "einsum": (nnx.Einsum("bi,io->bo", (16, 8), rngs=rngs), x),
        "attention": (nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs), x[None]),
    }[layer]
    model = qt.nnx.wrap(model, DELAYED)
    step(model, batch)
    names = ("0", "1") if layer == "attention" else ("kernel",)
    assert set(state_of(model)) == set(names)
    histories = [history_of(model, name=name)[:, 0] for name in names]
    assert all((history > 0).all() for history in histories)
    if layer != "attention":
        assert histories[0][0] == edge(np.abs(batch).max())


def test_keys_advance_once_a_step(x):
    model = qt.nnx.wrap(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), qt.recipes.nvfp4)
    _, first = step(model, x)
    _, second = step(model, x)
    assert int(kept(model)["key"][...][1]) == 2
    assert not np.array_equal(first["kernel"], second["kernel"])  # other draws for the same values


@pytest.mark.quick
def test_a_call_without_a_gradient_is_scaled_by_the_first():
    """As `Delayed` says; the same parameters under current scales take what is larger."""
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    small = jnp.float32(np.random.default_rng(0).normal(size=(4, 8)))
    large = 64 * small

    def step(second):
        wrapped = qt.nnx.wrap(model, DELAYED)

        def loss(first):
            other = first if second is None else second
            return jnp.sum(first(small)), jax.lax.stop_gradient(other(large))

        for _ in range(2):
            _, seen = qt.nnx.value_and_grad(loss, has_aux=True)(wrapped)[0]
        return float(jnp.linalg.norm(seen))

    plain = float(jnp.linalg.norm(model(large)))
    assert step(None) < plain / 8
    current = qt.nnx.wrap(model, CURRENT)
    assert current.kernel is model.kernel
    assert abs(step(current) / plain - 1) < 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["fp8_lm", "nvfp4", "int4_lsq"])
def test_wrapped_again_without_state_a_model_is_as_wrapped_once(first):
    """For nnx.jit and checkpoints, too: what was data before is none now."""

    class Model(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.linear(self.attention(x))

    x = jnp.ones((1, 2, 8))
    wrapped = qt.nnx.wrap(Model(), getattr(qt.recipes, first))
    again = {
        "wrap": lambda model: qt.nnx.wrap(model, CURRENT),
        "rules": lambda model: qt.nnx.wrap(model, qt.Rules({"attention$": None}, CURRENT)),
        "left": lambda model: qt.nnx.wrap(model, qt.Rules({"linear": None}, CURRENT)),
        "quantize": lambda model: qt.nnx.quantize(model, qt.recipes.weight_only_e4m3),
    }
    for name, change in again.items():
        new, once = change(wrapped), change(Model())
        assert nnx.graphdef(new) == nnx.graphdef(once), name
        assert jax.tree.structure(nnx.state(new)) == jax.tree.structure(nnx.state(once))
        run = nnx.jit(lambda model, x: model(x))
        np.testing.assert_array_equal(run(new, x), run(once, x))


@pytest.mark.quick
def test_wrapped_again_histories_go_on_and_nothing_stale_stays(x):
    """Magnitudes are those of the arrays, whatever the recipe rounds them to."""
    first = qt.nnx.wrap(Net(), DELAYED)
    step(first, x)
    before = history_of(first.a)
    e5m2 = Operand(qt.BlockFormat.tensor("e5m2"), scaling=Delayed(4, margin=1))
    second = qt.nnx.wrap(first, Recipe(e5m2))
    np.testing.assert_array_equal(history_of(second.a), before)
    assert before[:, 0].all()
    step(second, 2 * x)  # each model has a history of its own
    assert history_of(second.a)[0, 0] == 2 * before[0, 0]
    np.testing.assert_array_equal(history_of(first.a), before)
    longer = Operand(qt.BlockFormat.tensor("e5m2"), scaling=Delayed(8))
    assert not np.any(history_of(qt.nnx.wrap(first, Recipe(longer)).a))
    plain = qt.nnx.wrap(first, CURRENT)
    assert not jax.tree.leaves(nnx.state(plain, qt.nnx.ScalingState))
    np.testing.assert_array_equal(plain(x), qt.nnx.wrap(Net(), CURRENT)(x))


class Tied(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(11, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.embed.attend(x)


@pytest.mark.exhaustive
def test_a_module_wrapped_twice_is_as_wrapped_once(x):
    x = x[:, :8]
    delayed = qt.nnx.wrap(Tied(), DELAYED)
    jax.block_until_ready(step(delayed, x))
    assert jax.tree.leaves(nnx.state(delayed, qt.nnx.ScalingState))
    plain, once = qt.nnx.wrap(delayed, CURRENT), qt.nnx.wrap(Tied(), CURRENT)
    assert nnx.graphdef(plain) == nnx.graphdef(once)
    np.testing.assert_array_equal(plain(x), once(x))
    left = qt.nnx.wrap(Net(), qt.Rules({"a": CURRENT}))
    both = qt.nnx.wrap(left, CURRENT)
    assert nnx.graphdef(both) == nnx.graphdef(qt.nnx.wrap(Net(), CURRENT))


@pytest.mark.sample("a")
@pytest.mark.quick
@pytest.mark.parametrize("name", ["a", "attention"])
def test_wrapped_again_a_layer_that_a_rule_leaves_is_plain(x, name):
    """As wrapped once, of which `test_coverage` says that it is plain."""
    if name == "a":
        net = Net()
    else:
        layers = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0)), Net()
        net, x, name = nnx.Sequential(*layers), x[None], "layers/0"
    rules = qt.Rules({name: None}, default=DELAYED)
    again, once = qt.nnx.wrap(qt.nnx.wrap(net, CURRENT), rules), qt.nnx.wrap(net, rules)
    assert str(qt.nnx.report(again, x)) == str(qt.nnx.report(once, x))
    np.testing.assert_array_equal(again(x), once(x))


def test_keys_belong_to_places(x):
    """Layers that were wrapped alone draw as those of a model that is wrapped whole."""
    layers = [nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in (0, 1)]
    alone = [qt.nnx.wrap(layer, qt.recipes.nvfp4) for layer in layers]
    again = qt.nnx.wrap(nnx.Sequential(*alone), qt.recipes.nvfp4)
    once = qt.nnx.wrap(nnx.Sequential(*layers), qt.recipes.nvfp4)
    for one, other in zip(again.layers, once.layers, strict=True):
        np.testing.assert_array_equal(kept(one)["key"][...], kept(other)["key"][...])


def test_a_history_does_not_know_of_a_transform():
    with refused(ValueError, "observes the array, not its transform"):
        Operand("e4m3fn", scaling=Delayed(4), transform=qt.products.Hadamard())


def test_several_models_are_passed_as_one(x):
    """A tuple of models fails with what to write instead; `nnx.List` is rolled in each part."""

    def both(models, x):
        return jnp.mean(models[1](models[0](x)) ** 2)

    models = [qt.nnx.wrap(nnx.Linear(16, 16, rngs=nnx.Rngs(i)), DELAYED) for i in (0, 1)]
    for given in (tuple(models), models, dict(enumerate(models))):
        with refused(TypeError, r"expected an nnx.Module; pass several models as one"):
            qt.nnx.value_and_grad(both)(given, x)
    _, grads = nnx.jit(qt.nnx.value_and_grad(both))(nnx.List(models), x)
    assert sorted(grads) == [0, 1]
    assert all(newest(model).min() > 0 for model in models)


def test_what_is_no_module_of_nnx_is_named(x):
    refused(TypeError, r"type tuple", qt.nnx.value_and_grad(loss), nnx.split(Net()), x)
    refused(TypeError, r"type Dense", qt.nnx.value_and_grad(loss), linen.Dense(3), x)


@pytest.mark.parametrize("wrt", ["kernel", nnx.LoRAParam, qt.nnx.ScalingState])
def test_gradients_by_nothing_are_refused(x, wrt):
    """They were an empty state, which trains nothing, silently."""
    with refused(ValueError, r"wrt=.* selects nothing that Net trains"):
        qt.nnx.value_and_grad(loss, wrt)(qt.nnx.wrap(Net(), DELAYED), x)


@pytest.mark.parametrize("wrt", [0, nnx.DiffState(0, nnx.Param)])
def test_wrt_is_a_filter_and_no_number_of_an_argument(wrt):
    refused(TypeError, r"wrt=", qt.nnx.value_and_grad, lambda model: 0.0, wrt)


def test_gradients_without_probes_are_not_rolled_in_silence(x):
    """Oracle: the histories, which stay as they were."""
    model = qt.nnx.wrap(Net(), DELAYED)
    grads = nnx.state(model, nnx.Param)
    with refused(ValueError, r"roll: probes has no gradient for any of the 2 delayed"):
        qt.nnx.roll(model, grads)
    for wrong in (None, {}, model):
        refused(TypeError, r"roll: probes has type ", qt.nnx.roll, model, wrong)
    assert not any(jax.tree.leaves(jax.tree.map(jnp.any, nnx.state(model, qt.nnx.ScalingState))))
    stochastic = qt.nnx.wrap(Net(), qt.recipes.nvfp4)  # has keys alone: there is nothing to find
    qt.nnx.roll(stochastic, nnx.State({}))
