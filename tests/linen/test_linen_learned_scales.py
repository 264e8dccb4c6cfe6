"""LSQ and LSQ+ in wrapped linen modules: scales as a collection that trains beside "params".

Oracles: `qt.gradients.lsq` around products that are written by hand, without linen; and NumPy for
what starts a scale and for the codes that are served.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization
from flax.training.train_state import TrainState
from refused import refused
from state_of import history_of, shapes_of, state_of, states_of, with_parts

import qtoolkit as qt
from qtoolkit.gradients import lsq, lsq_plus
from qtoolkit.products import Delayed, Learned, Operand, Recipe
from qtoolkit.scaling import QArray

KEY = jax.random.key(1)
X = jnp.float32(np.random.default_rng(0).normal(size=(16, 8)))
LSQ = qt.recipes.int4_lsq
INT4 = Operand("int4", scaling=Learned())
SCALES = "qtoolkit_scales"


class Net(nn.Module):
    """A layer of Flax that runs twice, and a product of one's own."""

    @nn.compact
    def __call__(self, x):
        shared = nn.Dense(8, name="shared")
        x = nn.relu(shared(jnp.tanh(shared(x))))
        return x @ self.param("kernel", nn.initializers.lecun_normal(), (8, 4))


MODULE = qt.linen.wrap(Net(), LSQ)


def loss(variables, x, module=MODULE):
    return jnp.sum(jnp.sin(module.apply(variables, x)))


@pytest.fixture(scope="module")
def variables():
    return qt.linen.start_scales(MODULE, jax.jit(MODULE.init)(KEY, X), X)


def kept(variables, path=""):
    return state_of({SCALES: variables[SCALES]}, path)["kernel"]


def of_shared(variables):
    """Of the layer that runs twice: of the first run, and of the second one around it."""
    uses = state_of({SCALES: variables[SCALES]}, "shared")
    return uses["kernel#2"], uses["kernel"]


def first_scale(x, largest=7):
    """LSQ's, by NumPy."""
    return 2 * np.mean(np.abs(np.asarray(x, np.float64))) / np.sqrt(largest)


def close(got, expected, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, expected)


@pytest.mark.quick
def test_parameters_are_those_of_the_plain_model():
    plain, made = jax.jit(Net().init)(KEY, X), jax.jit(MODULE.init)(KEY, X)
    assert set(made) == {"params", SCALES}
    jax.tree.map(np.testing.assert_array_equal, made["params"], plain["params"])
    both = {"lhs_scale", "rhs_scale"}
    assert shapes_of(made) == {"": {"kernel": both}, "shared": {"kernel": both, "kernel#2": both}}
    assert all(np.isnan(scale) for scale in jax.tree.leaves(made[SCALES]))


@pytest.mark.quick
def test_scales_start_as_lsq_has_it(variables):
    """Each use of a kernel has its own; a plain model's parameters have none yet."""
    params = variables["params"]
    for use in of_shared(variables):
        wanted = first_scale(params["shared"]["kernel"])
        np.testing.assert_allclose(use["rhs_scale"], wanted, rtol=1e-5)
    np.testing.assert_allclose(of_shared(variables)[0]["lhs_scale"], first_scale(X), rtol=1e-5)
    np.testing.assert_allclose(
        kept(variables)["rhs_scale"], first_scale(params["kernel"]), rtol=1e-5
    )
    from_params = qt.linen.start_scales(MODULE, {"params": params}, X)
    close(from_params[SCALES], variables[SCALES], rtol=0, atol=0)
    again = qt.linen.start_scales(MODULE, variables, 100 * X)  # started already
    close(again[SCALES], variables[SCALES], rtol=0, atol=0)
    dense = qt.linen.wrap(nn.Dense(4), LSQ)
    started = qt.linen.start_scales(dense, jax.jit(dense.init)(KEY, X), (X,))
    np.testing.assert_allclose(kept(started)["lhs_scale"], first_scale(X), rtol=1e-5)


def by_hand(variables, x):
    """The network in plain JAX, with `lsq` around the operands."""
    params = variables["params"]
    own, (first, second) = kept(variables), of_shared(variables)

    def product(x, kernel, scales):
        return lsq(x, scales["lhs_scale"], "int4") @ lsq(kernel, scales["rhs_scale"], "int4")

    def dense(x, scales):
        return product(x, params["shared"]["kernel"], scales) + params["shared"]["bias"]

    hidden = nn.relu(dense(jnp.tanh(dense(x, first)), second))
    return jnp.sum(jnp.sin(product(hidden, params["kernel"], own)))


@pytest.mark.quick
def test_gradients_are_those_of_lsq(variables):
    value, grads = jax.jit(jax.value_and_grad(loss))(variables, X)
    expected, wanted = jax.jit(jax.value_and_grad(by_hand))(variables, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    close(grads, wanted)
    assert all(float(g) != 0 for g in jax.tree.leaves(wanted[SCALES]))


@pytest.mark.exhaustive
def test_gradients_are_those_of_lsq_plus():
    recipe = Recipe((Operand("uint4", scaling=Learned(offset=True)), INT4), gradient=None)
    module, x = qt.linen.wrap(nn.Dense(4), recipe), X + 0.7
    variables = qt.linen.start_scales(module, jax.jit(module.init)(KEY, x), x)
    scales = kept(variables)
    assert set(scales) == {"lhs_scale", "lhs_offset", "rhs_scale"}
    np.testing.assert_allclose(scales["lhs_scale"], (x.max() - x.min()) / 15, rtol=1e-6)
    np.testing.assert_allclose(scales["lhs_offset"], x.min(), rtol=1e-6)
    # So that some elements saturate, else offsets have no gradient.
    others = {"lhs_scale": scales["lhs_scale"] * 0.5, "lhs_offset": jnp.float32(-1.0)}
    variables = {**variables, SCALES: with_parts(variables[SCALES], **others)}

    def hand(variables):
        layer, learned = variables["params"], kept(variables)
        y = lsq_plus(x, learned["lhs_scale"], learned["lhs_offset"], "uint4") @ lsq(
            layer["kernel"], learned["rhs_scale"], "int4"
        )
        return jnp.sum(jnp.sin(y + layer["bias"]))

    expected = jax.grad(hand)(variables)
    close(jax.grad(lambda variables: loss(variables, x, module))(variables), expected)
    assert float(kept(expected)["lhs_offset"]) != 0


@pytest.mark.exhaustive
def test_both_operands_of_attention_are_rounded_as_inputs():
    """Scales of two activations, also where kernels alone, or inputs alone, are learned."""
    x = X.reshape(2, 8, 8)
    plain = nn.MultiHeadDotProductAttention(2)
    module = qt.linen.wrap(plain, LSQ)
    variables = jax.jit(module.init)(KEY, x)
    both = {"lhs_scale", "rhs_scale"}
    assert shapes_of(variables)[""] == {"0": both, "1": both}
    variables = qt.linen.start_scales(module, variables, x)
    assert np.all(np.isfinite(jax.jit(module.apply)(variables, x)))
    kernels = qt.linen.wrap(plain, Recipe((None, INT4), gradient=None))
    kernels = jax.eval_shape(kernels.init, KEY, x)
    assert not state_of(kernels)
    assert set(kept(kernels, "query")) == {"rhs_scale"}
    inputs = qt.linen.wrap(plain, Recipe((INT4, None), gradient=None))
    inputs = jax.eval_shape(inputs.init, KEY, x)
    assert shapes_of(inputs)[""]["0"] == both
    assert set(kept(inputs, "query")) == {"lhs_scale"}


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


def stack_by_hand(layers, scales_of, x):
    for i in range(3):
        scales = scales_of(i)
        kernel = lsq(layers["kernel"][i], scales["rhs_scale"], "int4")
        x = jnp.tanh(lsq(x, scales["lhs_scale"], "int4") @ kernel + layers["bias"][i])
    return jnp.sum(jnp.sin(x))


@pytest.mark.exhaustive
def test_layers_that_scan_stacks_have_scales_of_their_own():
    module = qt.linen.wrap(Stack(), LSQ)
    variables = qt.linen.start_scales(module, jax.jit(module.init)(KEY, X), X)
    dense = variables["params"]["blocks"]["dense"]
    wanted = [first_scale(kernel) for kernel in dense["kernel"]]
    np.testing.assert_allclose(kept(variables, "blocks/dense")["rhs_scale"], wanted, rtol=1e-5)

    def hand(variables):
        learned = kept(variables, "blocks/dense")
        layers = variables["params"]["blocks"]["dense"]
        return stack_by_hand(layers, lambda i: jax.tree.map(lambda s: s[i], learned), X)

    close(
        jax.jit(jax.grad(loss), static_argnums=2)(variables, X, module), jax.grad(hand)(variables)
    )
    served, weights = qt.linen.quantize(module, variables, "wrapped", X)
    got, expected = (jax.jit(m.apply)(v, X) for m, v in ((served, weights), (module, variables)))
    np.testing.assert_array_equal(got, expected)
    array = weights["params"]["blocks"]["dense"]["kernel"]
    scale = kept(variables, "blocks/dense")["rhs_scale"]
    np.testing.assert_array_equal(array.scale, scale.reshape(3, 1, 1))


class Inside(nn.Module):
    """Wrapped inside of the scan: a scale for each layer."""

    @nn.compact
    def __call__(self, x):
        def body(module, x, _):
            return nn.tanh(qt.linen.wrap(nn.Dense(8, parent=None), LSQ).copy(name="dense")(x)), None

        axes = {"params": 0, SCALES: 0}
        scanned = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=3)
        return scanned(self, x, None)[0]


@pytest.mark.exhaustive
def test_wrapped_inside_of_a_scan_each_layer_has_its_scale():
    module = Inside()
    variables = qt.linen.start_scales(module, jax.jit(module.init)(KEY, X), X)
    scales = kept(variables, "dense")
    assert scales["rhs_scale"].shape == (3,)
    factors = jnp.asarray([0.5, 1.0, 1.5])
    variables = {**variables, SCALES: jax.tree.map(lambda s: s * factors, variables[SCALES])}

    def hand(variables):
        learned = kept(variables, "dense")
        layers = variables["params"]["dense"]
        return stack_by_hand(layers, lambda i: jax.tree.map(lambda s: s[i], learned), X)

    close(jax.grad(lambda v: loss(v, X, module))(variables), jax.grad(hand)(variables))


@pytest.mark.exhaustive
def test_a_train_state_with_an_optimizer_for_scales(variables):
    """And the state comes back from bytes, bit for bit."""
    rates = {"params": optax.sgd(0.1), SCALES: optax.sgd(0.0)}
    labels = {"params": "params", SCALES: SCALES}
    state = TrainState.create(
        apply_fn=MODULE.apply, params=variables, tx=optax.multi_transform(rates, labels)
    )
    step = jax.jit(lambda state, x: state.apply_gradients(grads=jax.grad(loss)(state.params, x)))
    after = step(state, X)
    close(after.params[SCALES], variables[SCALES], rtol=0, atol=0)
    by_hand_grads = jax.grad(by_hand)(variables, X)["params"]
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], by_hand_grads)
    close(after.params["params"], moved)

    state = state.replace(tx=optax.adam(1e-2)).replace(opt_state=optax.adam(1e-2).init(variables))
    first = loss(variables, X)
    for _ in range(10):
        state = step(state, X)
    assert loss(state.params, X) < first
    assert all(
        a != b
        for a, b in zip(
            *map(jax.tree.leaves, (state.params[SCALES], variables[SCALES])), strict=True
        )
    )
    restored = serialization.from_bytes(state, serialization.to_bytes(state))
    close(step(restored, X).params, step(state, X).params, rtol=0, atol=0)


def test_orbax(variables, tmp_path):
    import orbax.checkpoint as checkpoint  # an extra of the tests

    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", variables)
    shapes = jax.eval_shape(MODULE.init, KEY, X)
    with checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", shapes)
    np.testing.assert_array_equal(MODULE.apply(restored, X), MODULE.apply(variables, X))


@pytest.mark.exhaustive
def test_value_and_grad_of_both_collections():
    """Beside delayed scales of cotangents, whose histories roll."""
    cotangent = Operand("e5m2", scaling=Delayed(history=3))
    module = qt.linen.wrap(nn.Dense(4), Recipe((INT4, INT4), cotangent))
    variables = qt.linen.start_scales(module, jax.jit(module.init)(KEY, X), X)
    graded = qt.linen.value_and_grad(lambda v: loss(v, X, module), wrt=("params", SCALES))
    value, grads, state = jax.jit(graded)(variables)
    np.testing.assert_allclose(value, loss(variables, X, module), rtol=1e-5)
    assert history_of(state).max() > 0
    expected = jax.grad(lambda v: loss(v, X, module))({n: variables[n] for n in ("params", SCALES)})
    close(grads, expected)
    _, alone, _ = qt.linen.value_and_grad(lambda v: loss(v, X, module), wrt=SCALES)(variables)
    close(alone, expected[SCALES])


@pytest.mark.quick
def test_served_as_it_was_trained(variables):
    """Oracle for the codes: NumPy, two's complement, low nibble first."""
    served, weights = qt.linen.quantize(MODULE, variables, "wrapped", X)
    apply = jax.jit(served.apply)
    np.testing.assert_array_equal(apply(weights, X), jax.jit(MODULE.apply)(variables, X))
    array, scale = weights["params"]["kernel"], np.float32(kept(variables)["rhs_scale"])
    assert isinstance(array, QArray)
    q = np.clip(np.rint(np.asarray(variables["params"]["kernel"]) / scale), -8, 7).astype(int) % 16
    np.testing.assert_array_equal(array.codes, (q[:, ::2] + 16 * q[:, 1::2]).astype(np.uint8))
    again, same = qt.linen.quantize(Net(), weights, LSQ, X)
    np.testing.assert_array_equal(again.apply(same, X), served.apply(weights, X))


@pytest.mark.quick
def test_the_other_steps_know_learned_scales(variables):
    report = qt.linen.report(MODULE, variables, X)
    learned = "int4 by tensor, learned"
    forward = [p.operands for p in report.quantized if p.part == "forward"]
    assert set(forward) == {f"{learned} x {learned}"}
    assert qt.linen.wrap(Net(), LSQ, strict=(X,)) == MODULE
    found = qt.linen.calibrate(MODULE, variables, [X])
    frozen, held = qt.linen.freeze(MODULE, variables, found)
    np.testing.assert_array_equal(frozen.apply(held, X), MODULE.apply(variables, X))
    ranked = qt.linen.sensitivity(MODULE, variables, X, loss)
    np.testing.assert_allclose(ranked.quantized, loss(variables, X), rtol=1e-5)


def test_a_layer_with_a_recipe_of_its_own_inside_of_a_model():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = qt.linen.Fp8Dense(8, recipe=LSQ, name="a")(x)
            return qt.linen.Fp8Dense(4, recipe=LSQ, name="b")(nn.relu(x))

    module = Two()
    variables = qt.linen.start_scales(module, jax.jit(module.init)(KEY, X), X)
    for name, layer in variables["params"].items():
        got = kept(variables, name)["rhs_scale"]
        np.testing.assert_allclose(got, first_scale(layer["kernel"]), rtol=1e-5)


def test_the_example_runs(run_example):
    run_example(qt.linen.start_scales, model=nn.Dense(4), key=KEY, batch=X)


class Branch(nn.Module):
    @nn.compact
    def __call__(self, x, both=True):
        y = nn.Dense(8, name="a")(x)
        return nn.Dense(8, name="b")(y) if both else y


@pytest.mark.quick
def test_what_cannot_be(variables):
    plain = {"params": variables["params"]}
    with refused(ValueError, r"there is none for lhs; .*qtoolkit\.linen\.start_scales"):
        MODULE.apply(plain, X)
    fresh = jax.jit(MODULE.init)(KEY, X)
    refused(ValueError, r"shared: .* not been started.*linen\.start_scales", MODULE.apply, fresh, X)
    assert np.isnan(jax.jit(MODULE.apply)(fresh, X)).all()
    with refused(ValueError, "quantize: kernel has a learned scale that has no"):
        qt.linen.quantize(MODULE, fresh, "wrapped", X)
    with pytest.raises(ValueError, match=r"sensitivity: .* learned scale of .* has not been"):
        qt.linen.sensitivity(MODULE, fresh, X, loss)
    with refused(ValueError, "start_scales: Dense has no learned scale"):
        qt.linen.start_scales(qt.linen.wrap(nn.Dense(4)), nn.Dense(4).init(KEY, X), X)
    with refused(TypeError, "start_scales: variables has type list"):
        qt.linen.start_scales(MODULE, [], X)
    branch = qt.linen.wrap(Branch(), LSQ)
    with refused(ValueError, "start_scales: not calibrated: b"):
        qt.linen.start_scales(branch, branch.init(KEY, X), (X, False))
    started = qt.linen.start_scales(branch, {"params": branch.init(KEY, X)["params"]}, (X, False))
    assert set(states_of(started)) == {"a"}
    served, weights = qt.linen.quantize(branch, started, "wrapped", {"x": X, "both": False})
    np.testing.assert_array_equal(
        served.apply(weights, X, both=False), branch.apply(started, X, both=False)
    )
    for wrt in ("scales", 0):
        refused(ValueError, rf"wrt={wrt!r}", qt.linen.value_and_grad(loss, wrt=wrt), variables, X)
    with refused(ValueError, "quantize: recipe is 'wrapped' for Net, which is not"):
        qt.linen.quantize(Net(), plain, "wrapped", X)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(bad):
    """Loss scalers see what they see of the plain model: an infinity is not clamped, a NaN no 0."""
    plain, x = nn.Dense(4), X.at[3, 2].set(bad)
    layer = qt.linen.wrap(plain, LSQ)
    started = qt.linen.start_scales(layer, layer.init(KEY, X), X)

    def gradients(module, variables):
        return jax.grad(lambda v: jnp.sum(jnp.square(module.apply(v, x))))(variables)["params"]

    ours = gradients(layer, started), layer.apply(started, x)
    params = {"params": started["params"]}
    expected = gradients(plain, params), plain.apply(params, x)
    for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
    assert np.isfinite(ours[1]).any()
    assert not np.isfinite(ours[1]).all()
