"""linen.value_and_grad: histories, keys, and what changes them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax.core import freeze
from refused import refused
from state_of import histories_of, history_of, state_of, states_of

import qtoolkit as qt
from qtoolkit import Recipe, recipes
from qtoolkit.casts import Projection
from qtoolkit.linen import FakeConvert, Fp8Dense, value_and_grad, wrap
from qtoolkit.products import Delayed, Operand

KEY = jax.random.key(1)
X = jnp.float32(np.random.default_rng(0).normal(size=(8, 4)))
DELAYED = Operand("e4m3fn", scaling=Delayed(history=3))
RECIPE = Recipe(DELAYED, Operand("e5m2", scaling=Delayed(history=3)))
DENSE = wrap(nn.Dense(4, use_bias=False), RECIPE)


class Two(nn.Module):
    """A layer that runs twice, and one that may be skipped."""

    @nn.compact
    def __call__(self, x, both=True):
        twice = nn.Dense(4, name="twice")
        x = twice(2 * twice(x))
        last = nn.Dense(4, name="last")
        return last(x) if both else x


def loss(variables, x, module=DENSE, **options):
    return jnp.sum(module.apply(variables, x, **options) ** 2)


# One compilation for all tests.
step = jax.jit(value_and_grad(loss))


@pytest.fixture(scope="module")
def variables():
    return jax.jit(DENSE.init)(KEY, X)


def kept(variables, path=""):
    return jax.tree.map(np.asarray, state_of(variables, path)["kernel"])


def after(variables, *batches):
    for batch in batches:
        *_, state = step(variables, batch)
        variables = {**variables, "qtoolkit": state}
    return variables


def bucket(amax):
    """The upper edge of an array's bucket: 3 mantissa bits, at most 12.5 % above."""
    edge = (np.float32(amax).view(np.uint32) >> 20) + 1
    return (edge << 20).astype(np.uint32).view(np.float32)


def cast(x, scale, fmt=ml_dtypes.float8_e4m3fn, limit=448):
    """x ~ q * scale: q clipped and rounded by ml_dtypes, times scale."""
    return np.clip(x / scale, -limit, limit).astype(fmt).astype(np.float32) * scale


def test_init_keeps_one_history_for_each_product(variables):
    assert set(variables) == {"params", "qtoolkit"}
    state = kept(variables)
    np.testing.assert_array_equal(state["history"], np.zeros((3, 3)))
    assert state["bad"] == 0
    plain = nn.Dense(4, use_bias=False).init(KEY, X)
    np.testing.assert_array_equal(variables["params"]["kernel"], plain["params"]["kernel"])


def test_zeros_leave_the_history_of_an_operand(variables):
    good = after(variables, X)
    zeros = after(good, 0 * X)
    np.testing.assert_array_equal(kept(zeros)["history"][[0, 2]], kept(good)["history"][[0, 2]])
    assert kept(zeros)["bad"] == 0


def test_a_layer_used_twice_keeps_the_magnitudes_of_each_use():
    module = wrap(Two(), RECIPE)
    variables = jax.jit(module.init)(KEY, X)
    assert set(states_of(variables)) == {"twice", "last"}
    graded = value_and_grad(lambda v: loss(v, X, module, both=False))
    _, grads, state = jax.jit(graded)(variables)
    rolled = {"qtoolkit": state}
    assert kept(rolled, "last")["history"].max() == 0
    hidden = Two().apply(variables, X, both=False, capture_intermediates=True)[1]
    inputs = np.abs(2 * hidden["intermediates"]["twice"]["__call__"][0]).max()
    uses = {use["history"][0, 0].item() for use in state_of(rolled, "twice").values()}
    # A bucket, and for the second one E4M3 in the layer before.
    np.testing.assert_allclose(sorted(uses), sorted([np.abs(X).max(), inputs]), rtol=0.2)
    np.testing.assert_array_equal(grads["last"]["kernel"], 0)


def test_has_aux_and_errors(variables):
    def with_aux(variables, x):
        return loss(variables, x), {"aux": x[0]}

    graded = jax.jit(value_and_grad(with_aux, has_aux=True))
    (value, aux), grads, state = graded(variables, X)
    np.testing.assert_array_equal(aux["aux"], X[0])
    assert grads.keys() == {"kernel"}
    assert states_of(state).keys() == {""}
    np.testing.assert_allclose(value, step(variables, X)[0], rtol=1e-6)
    with refused(TypeError, r"^value_and_grad: variables has the keys kernel"):
        value_and_grad(loss)(variables["params"], X)


STOCHASTIC = wrap(
    nn.Dense(4, use_bias=False),
    Recipe(Operand("e4m3fn", projection=Projection(rounding="stochastic"))),
)


@pytest.mark.quick
def test_keys_of_stochastic_rounding():
    variables = jax.jit(STOCHASTIC.init)(KEY, X)
    assert kept(variables).keys() == {"key"}
    run = jax.jit(lambda v, rngs: STOCHASTIC.apply(v, X, rngs=rngs))
    first = run(variables, {})
    np.testing.assert_array_equal(run(variables, {}), first)
    *_, state = jax.jit(value_and_grad(lambda v: loss(v, X, STOCHASTIC)))(variables)
    assert np.any(run({**variables, "qtoolkit": state}, {}) != first)  # the next step draws anew
    one, other = ({"qtoolkit": jax.random.key(seed)} for seed in (3, 4))
    np.testing.assert_array_equal(run(variables, one), run(variables, one))
    assert np.any(run(variables, one) != run(variables, other))
    assert np.any(run(variables, one) != first)
    run({"params": variables["params"]}, {})  # bits that follow from the values


@pytest.mark.exhaustive
def test_layers_with_a_recipe_of_their_own():
    from qtoolkit.linen import Fp8Conv, Fp8Einsum

    dense = Fp8Dense(4, use_bias=False, recipe=RECIPE)
    variables = jax.jit(dense.init)(KEY, X)
    np.testing.assert_array_equal(dense.apply(variables, X), DENSE.apply(variables, X))
    assert kept(variables).keys() == {"history", "bad"}
    for layer, plain in (
        (Fp8Conv(4, (3,)), nn.Conv(4, (3,))),
        (Fp8Einsum((4, 4), "bi,io->bo"), nn.Einsum((4, 4), "bi,io->bo")),
    ):
        params = jax.jit(layer.init)(KEY, X)
        expected = wrap(plain).apply(params, X)
        np.testing.assert_array_equal(layer.apply(params, X), expected)
        assert np.any(expected != plain.apply(params, X))
    layer = FakeConvert("e4m3fn", use_shift=True)
    out, params = layer.init_with_output(KEY, X.astype(jnp.bfloat16))
    assert params["params"].keys() == {"scale", "shift"}
    expected = np.asarray(X.astype(jnp.bfloat16)).astype(ml_dtypes.float8_e4m3fn)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected.astype(np.float32))


def test_fake_convert_takes_what_the_function_takes():
    x = jnp.full((512,), 1.0625)  # halfway between 1 and 1.125
    up = FakeConvert("e4m3fn", rounding="toward_positive", gradient="zero")
    variables = up.init(KEY, x)
    assert np.all(up.apply(variables, x) == 1.125)
    assert np.all(jax.grad(lambda x: up.apply(variables, x).sum())(x) == 0)
    either = FakeConvert("e4m3fn", rounding="stochastic")
    one, other = (either.apply(variables, x, rngs={"qtoolkit": jax.random.key(n)}) for n in (0, 1))
    assert 0.3 < np.mean(one != other) < 0.7
    with refused(TypeError, r"Fp8Dense: recipe has .*; write qtoolkit\.recipes\.mxfp8"):
        Fp8Dense(4, recipe="mxfp8").init(KEY, X)


@pytest.mark.exhaustive
@pytest.mark.quick
def test_wrapped_again_the_collection_goes_on_or_is_refused(variables):
    """Histories of as many steps are magnitudes still; others are another recipe's."""
    moved = after(variables, X)
    again = wrap(DENSE, Recipe(Operand("e5m2", scaling=Delayed(history=3)), "e5m2"))
    history = kept(moved)["history"]
    assert history[1, 0] > 0
    y = again.apply(moved, X)
    kernel = np.asarray(moved["params"]["kernel"])
    scales = [history[side].max() / 57344 for side in (0, 1)]
    pairs = zip((X, kernel), scales, strict=True)
    wanted = [cast(a, s, ml_dtypes.float8_e5m2, 57344) for a, s in pairs]
    np.testing.assert_allclose(y, wanted[0] @ wanted[1], rtol=1e-5, atol=1e-5)
    longer = wrap(DENSE, Recipe(Operand("e4m3fn", scaling=Delayed(history=5))))
    refused(ValueError, "kernel: a history of 3 steps, expected 5", longer.apply, moved, X)
    fresh = {**moved, "qtoolkit": jax.jit(longer.init)(KEY, X)["qtoolkit"]}
    assert kept(fresh)["history"].shape == (3, 5)
    longer.apply(fresh, X)
    current = wrap(DENSE, Recipe())
    refused(ValueError, "kernel: .* history of delayed scales", current.apply, moved, X)


class Containers(nn.Module):
    """Kernels in a list, in a dictionary with numbers, and in a box with the names of axes."""

    @nn.compact
    def __call__(self, x):
        normal = jax.nn.initializers.normal()
        listed = self.param("listed", lambda key: [normal(key, (16, 16)), jnp.eye(16)])
        keyed = self.param("keyed", lambda key: {0: normal(key, (16, 16)), 1: 2 * jnp.eye(16)})
        boxed = self.param("boxed", nn.with_partitioning(normal, (None, "d")), (16, 16))
        return x @ listed[1] @ keyed[1] @ keyed[0] @ boxed @ listed[0]


@pytest.mark.exhaustive
def test_kernels_in_containers_have_names_of_their_own():
    """The same ones at `init`, which makes the kernels, as in a step, which is given them."""
    module, x = wrap(Containers(), recipes.te_delayed_hybrid), jnp.ones((4, 16))
    variables = module.init(jax.random.key(0), x)
    names = ["listed.1", "keyed.1", "keyed.0", "boxed", "listed.0"]
    assert set(state_of(variables)) == set(names)
    _, _, state = value_and_grad(lambda v: module.apply(v, x).sum())(variables)
    for name, amax in (("listed.1", 1), ("keyed.1", 2)):
        newest = history_of(state, name=name)[:, 0]
        assert amax <= newest[1] <= amax * 1.125  # known to 12.5 %
    assert all(np.all(history[:, 0] > 0) for history in histories_of(state))


class Branching(nn.Module):
    @nn.compact
    def __call__(self, x, is_scaled=True):
        kernel = nn.initializers.lecun_normal()
        large, small = (self.param(name, kernel, (16, 16)) for name in ("large", "small"))
        if is_scaled:
            x = (1e4 * x) @ large
        return x @ small


def test_a_skipped_branch_gives_its_history_to_no_other():
    """Oracle: the largest magnitudes by NumPy."""
    module = wrap(Branching(), recipes.te_delayed_hybrid)
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))
    variables = module.init(jax.random.key(1), x)
    assert set(state_of(variables)) == {"large", "small"}
    _, _, state = value_and_grad(lambda v: module.apply(v, x).sum())(variables)
    before = history_of(state, name="large")
    _, _, state = value_and_grad(lambda v: module.apply(v, x, False).sum())(
        {**variables, "qtoolkit": state}
    )
    large, small = (history_of(state, name=name) for name in ("large", "small"))
    np.testing.assert_array_equal(large, before)
    newest = np.abs(x).max(), np.abs(variables["params"]["small"]).max()
    for got, amax in zip(small[:2, 0], newest, strict=True):
        assert amax <= got <= amax * 1.125  # known to 12.5 %


def _custom(dense, x):
    """`nn.custom_vjp` with the derivative that the layer has anyway."""
    layer = nn.custom_vjp(
        lambda dense, x: dense(x),
        lambda dense, x: nn.vjp(lambda dense, x: dense(x), dense, x),
        lambda pullback, cotangent: pullback(cotangent),
    )
    return layer(dense, x)


def _grad(dense, x):
    return nn.grad(lambda dense, x: (dense(x) ** 2).sum(), dense, x)[0]


DIFFERENTIATED = {
    "nn.custom_vjp": _custom,
    "nn.vjp": lambda dense, x: nn.vjp(lambda dense, x: dense(x), dense, x)[0],
    "nn.grad": _grad,
}


class Differentiated(nn.Module):
    """Its layer runs in a transformation of Flax that differentiates."""

    by: str

    @nn.compact
    def __call__(self, x):
        return DIFFERENTIATED[self.by](nn.Dense(4), x)


@pytest.mark.parametrize("by", ["nn.vjp", "nn.grad"])
def test_layers_keep_state_where_the_model_differentiates(by):
    """Oracle: NumPy for the history; `Current` scaling for the first step."""
    module = Differentiated(by)
    delayed, current = (wrap(module, r) for r in (recipes.te_delayed_hybrid, Recipe()))
    variables = delayed.init(KEY, X)
    value, _, state = value_and_grad(loss)(variables, X, delayed)
    params = {"params": variables["params"]}
    assert value == loss(params, X, current)
    np.testing.assert_array_equal(history_of(state, "Dense_0")[0, 0], bucket(np.abs(X).max()))
    found = qt.linen.calibrate(current, params, [X])
    assert set(found.paths) == {"Dense_0"}
    qt.linen.freeze(current, params, found)
    report = qt.linen.report(delayed, variables, X)
    assert {p.path for p in report.quantized} == {"Dense_0"}


def test_a_custom_derivative_stays_as_it_is():
    module = Differentiated("nn.custom_vjp")
    wrapped = wrap(module, recipes.te_delayed_hybrid)
    variables = wrapped.init(KEY, X)
    assert set(variables) == {"params"}
    expected = jax.jit(module.apply)(variables, X)
    np.testing.assert_array_equal(wrapped.apply(variables, X), expected)
    report = qt.linen.report(wrapped, variables, X)
    assert {p.reason.split(":")[0] for p in report.left} == {"inside of custom_vjp"}


def test_a_loss_may_return_a_state_that_no_step_changes():
    module = wrap(nn.Dense(4), Recipe())
    variables = module.init(KEY, X)
    frozen, variables = qt.linen.freeze(
        module, variables, qt.linen.calibrate(module, variables, [X])
    )

    def of(variables):
        y, updates = frozen.apply(variables, X, mutable=True)
        return y.sum(), updates

    (_, updates), _, state = value_and_grad(of, has_aux=True)(variables)
    jax.tree.map(np.testing.assert_array_equal, updates["qtoolkit"], state)


def test_a_history_is_refused_by_a_module_of_another_recipe():
    """It was ignored, and the layer had current scales for ever. Without it the variables pass."""
    variables = wrap(nn.Dense(4), RECIPE).init(KEY, X)
    current = wrap(nn.Dense(4), qt.recipes.te_current)
    with refused(ValueError, r"history of delayed scales.* without the collection"):
        current.apply(variables, X)
    without = {"params": variables["params"]}
    expected = current.apply(current.init(KEY, X), X)
    np.testing.assert_array_equal(current.apply(without, X), expected)


def test_the_state_of_a_frozen_dict_is_one(variables):
    """As a loop needs it that carries the variables. Oracle: the same with a dictionary."""
    frozen = freeze(variables)
    _, _, state = value_and_grad(loss)(frozen, X)
    assert jax.tree.structure(state) == jax.tree.structure(frozen["qtoolkit"])
    jax.tree.map(np.testing.assert_array_equal, state.unfreeze(), after(variables, X)["qtoolkit"])
