"""Other people's trainers: histories and keys that the forward pass itself moves.

Oracles: NumPy for the magnitudes (buckets of an eighth of a binade); `qt.nnx.value_and_grad`, of
which other tests show what it does; `Current` scaling where no state is carried.
"""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from state_of import histories_of, history_of, state_of

import qtoolkit as qt
from qtoolkit.products import Delayed, Operand, Recipe

FORWARD = Recipe(Operand("e4m3fn", scaling=Delayed(4)), "e5m2")
BOTH = Recipe(Operand("e4m3fn", scaling=Delayed(4)), Operand("e5m2", scaling=Delayed(4)))
CURRENT = Recipe()
X = jnp.float32(np.random.default_rng(0).normal(size=(8, 16)))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(16, 16, rngs=rngs)
        self.b = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def histories(model):
    return histories_of(model)


def edge(amax):
    bits = np.asarray(amax, np.float32).view(np.uint32)
    return (((bits >> 20) + 1) << 20).view(np.float32)


def rematted(model, x):
    return nnx.remat(loss)(model, x)


def jitted(model, x):
    return nnx.jit(loss)(model, x)


def mapped(model, x):
    run = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))
    return jnp.mean(run(model, x) ** 2)


@pytest.mark.quick
@pytest.mark.parametrize("loss", [loss, rematted, jitted, mapped])
def test_a_plain_gradient_moves_the_histories_of_lhs_and_rhs(loss):
    model, other = (qt.nnx.wrap(Net(), FORWARD) for _ in range(2))
    steps = nnx.jit(nnx.value_and_grad(loss)), nnx.jit(qt.nnx.value_and_grad(loss))
    for factor in (1, 3):
        for step, one in zip(steps, (model, other), strict=True):
            step(one, factor * X)
    for mine, theirs in zip(histories(model), histories(other), strict=True):
        np.testing.assert_array_equal(mine[:2], theirs[:2])
        assert not mine[2].any()
    assert histories(model)[0][0, 0] == edge(3 * np.abs(X).max())


def test_the_next_step_is_scaled_by_the_history():
    """And not by its own magnitudes: what is larger saturates."""
    model = qt.nnx.wrap(Net(), FORWARD)
    step = nnx.jit(nnx.value_and_grad(loss))
    step(model, X)
    expected = loss(model, 9 * X)
    value, _ = step(model, 9 * X)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert abs(value / loss(qt.nnx.wrap(Net(), CURRENT), 9 * X) - 1) > 0.1


def test_evaluation_moves_nothing_whatever_runs_it():
    model = qt.nnx.wrap(Net(), FORWARD)
    nnx.value_and_grad(loss)(model, X)
    before = histories(model)
    model(100 * X)
    nnx.jit(loss)(model, 100 * X)
    jax.jit(lambda x: model(x))(100 * X)
    jax.jit(loss)(model, 100 * X)
    for mine, was in zip(histories(model), before, strict=True):
        np.testing.assert_array_equal(mine, was)


def test_a_user_is_told_that_cotangents_have_current_scales():
    model = qt.nnx.wrap(Net(), BOTH)
    with pytest.warns(RuntimeWarning, match=r"scales of cotangents are computed in the same step"):
        nnx.jit(nnx.value_and_grad(loss))(model, X)
    assert all(history[:2, 0].all() and not history[2].any() for history in histories(model))


@pytest.mark.parametrize("recipe", [BOTH, FORWARD, qt.recipes.nvfp4])
def test_a_user_is_told_where_no_state_is_carried(recipe):
    """The model is closed over, so nnx forbids writing to it. Oracle: `Current` scaling."""
    model = qt.nnx.wrap(Net(), recipe)
    qt.nnx.value_and_grad(loss)(model, 1e-3 * X)
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]

    def of_input(x):
        return loss(model, x)

    with pytest.warns(RuntimeWarning, match=r"histories of delayed scales and keys .* do not mo"):
        value, grad = jax.value_and_grad(of_input)(X)
    for mine, was in zip(jax.tree.leaves(nnx.state(model)), before, strict=True):
        np.testing.assert_array_equal(mine, was)
    if recipe != qt.recipes.nvfp4:
        current = qt.nnx.wrap(Net(), CURRENT)
        wanted, wanted_grad = jax.value_and_grad(lambda x: loss(current, x))(X)
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
        np.testing.assert_allclose(grad, wanted_grad, rtol=1e-4, atol=1e-7)


def merged(model, x):
    graph, state = nnx.split(model)
    run = jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x))
    return jnp.mean(run(state, x) ** 2)


@pytest.mark.filterwarnings("ignore:differentiated without value_and_grad:RuntimeWarning")
@pytest.mark.parametrize("recipe", [FORWARD, BOTH, qt.recipes.nvfp4])
def test_a_copy_that_a_loss_drops_moves_nothing(recipe):
    """As BatchNorm's statistics. Oracle: `Current` scaling."""
    model = qt.nnx.wrap(Net(), recipe)
    before = jax.tree.map(np.asarray, nnx.state(model, qt.nnx.ScalingState))
    value, grads = nnx.jit(nnx.value_and_grad(merged))(model, X)
    after = nnx.state(model, qt.nnx.ScalingState)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    if recipe != qt.recipes.nvfp4:
        wanted, expected = nnx.jit(nnx.value_and_grad(merged))(qt.nnx.wrap(Net(), CURRENT), X)
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)  # noqa: E731
        jax.tree.map(close, grads, expected)
    qt.nnx.value_and_grad(merged)(model, X)
    assert all(history[:2, 0].all() for history in histories(model))


@pytest.mark.parametrize("remat", [nnx.remat, lambda f: nnx.remat(f, graph_updates=False), None])
def test_a_copy_whose_state_is_returned_says_nothing(remat):
    def of(model, x):
        if remat is not None:
            return jnp.mean(remat(lambda model, x: model(x))(model, x) ** 2)
        graph, state = nnx.split(model)

        def run(state, x):
            copy = nnx.merge(graph, state)
            return copy(x), nnx.state(copy, qt.nnx.ScalingState)

        y, state = jax.checkpoint(run)(state, x)
        nnx.update(model, state)
        return jnp.mean(y**2)

    model, other = (qt.nnx.wrap(Net(), FORWARD) for _ in range(2))
    with warnings.catch_warnings(record=True) as found:  # one from a callback would not raise
        nnx.jit(nnx.value_and_grad(of))(model, X)
    assert not found
    nnx.jit(qt.nnx.value_and_grad(loss))(other, X)
    for mine, theirs in zip(histories(model), histories(other), strict=True):
        np.testing.assert_array_equal(mine[:2], theirs[:2])


@nnx.vmap(in_axes=0, out_axes=0)
def _stack(rngs):
    return nnx.Linear(16, 16, rngs=rngs)


class Merged(nnx.Module):
    """As in tunix under `remat_config`."""

    def __init__(self):
        self.net = Net()

    def __call__(self, x):
        graph, state = nnx.split(self.net)
        return jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x))(state, x)


class Scanned(nnx.Module):
    def __init__(self):
        self.layers = _stack(nnx.Rngs(0).split(3))

    def __call__(self, x):
        graph, state = nnx.split(self.layers)
        return jax.lax.scan(lambda x, s: (jnp.tanh(nnx.merge(graph, s)(x)), None), x, state)[0]


def recurrent():
    return nnx.RNN(nnx.GRUCell(16, 16, rngs=nnx.Rngs(0)), time_major=True, rngs=nnx.Rngs(1))


class Twice(nnx.Module):
    """A loop over time that carries the state of a layer, which runs twice in each iteration."""

    def __init__(self):
        self.layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        def step(layer, carry, x):
            return jnp.tanh(layer(layer(carry)) + x)

        carried = nnx.StateAxes({...: nnx.Carry})
        run = nnx.scan(step, in_axes=(carried, nnx.Carry, 0), out_axes=nnx.Carry)
        return run(self.layer, x[0], x)


class Headed(nnx.Module):
    """A matmul of its own after a copy of a layer that is dropped."""

    def __init__(self):
        self.net, self.head = Net(), nnx.Param(jnp.eye(8))

    def __call__(self, x):
        graph, state = nnx.split(self.net)
        return jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x))(state, x) @ self.head


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        *((make, None) for make in (Merged, Scanned, recurrent, Headed)),
        *((make, (X,)) for make in (Twice, Headed)),
    ],
)
def test_a_loop_in_a_module_moves_the_state_of_a_layer_once(make, inputs):
    """By the largest magnitude in it: of copies merged in `jax.checkpoint` and `jax.lax.scan`, and
    of state that a scan carries from one time step to the next. Oracle: `qt.nnx.value_and_grad`.
    """
    model, other = (qt.nnx.wrap(make(), FORWARD, inputs=inputs) for _ in range(2))
    step, expected = nnx.jit(nnx.value_and_grad(loss)), nnx.jit(qt.nnx.value_and_grad(loss))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)  # sums in another order
    for factor in (1, 3, jnp.inf, 2):
        (value, grads), (wanted, others) = step(model, factor * X), expected(other, factor * X)
        np.testing.assert_array_equal(value, wanted)
        jax.tree.map(close, grads, others)
    for mine, theirs in zip(histories(model), histories(other), strict=True):
        np.testing.assert_array_equal(mine[..., :2, :], theirs[..., :2, :])
        assert mine[..., :2, :3].all()


class Looping(nnx.Module):
    """Runs a matmul of its own and a layer in a function that closes over them."""

    def __init__(self, run):
        self.own, self.layer, self.run = nnx.Param(jnp.eye(16)), _linear(), nnx.static(run)

    def __call__(self, x):
        return self.run(lambda x: jnp.tanh(self.layer(jnp.tanh(x @ self.own))), x)


def _linear():
    return nnx.Linear(16, 16, rngs=nnx.Rngs(0))


LOOPS = {
    "scan": lambda f, x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=3)[0],
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: jax.lax.cond(x[0, 0] > -9, f, lambda x: x, x),
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "both": lambda f, x: jax.checkpoint(lambda x: LOOPS["scan"](f, x))(x),
}


@pytest.mark.sample(*(f"none-{name}" for name in LOOPS), "inputs-both")
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("inputs", [(X,), None], ids=["inputs", "none"])
def test_loops_of_a_module_move_the_state_that_they_close_over(name, inputs):
    """They stayed as they were. Oracle: `qt.nnx.value_and_grad`. Kernels need no `inputs`."""
    model, other = (qt.nnx.wrap(Looping(LOOPS[name]), FORWARD, inputs=inputs) for _ in range(2))
    step, expected = nnx.jit(nnx.value_and_grad(loss)), nnx.jit(qt.nnx.value_and_grad(loss))
    for factor in (1, 3):
        np.testing.assert_allclose(step(model, factor * X)[0], expected(other, factor * X)[0])
    assert len(histories(model)) == 2
    for mine, theirs in zip(histories(model), histories(other), strict=True):
        np.testing.assert_array_equal(mine[:2], theirs[:2])
        assert mine[:2, :2].all()


class InAndOut(nnx.Module):
    """Runs a layer in `jax.checkpoint` and outside of it."""

    def __init__(self, is_first):
        self.layer, self.is_first = _linear(), is_first

    def __call__(self, x):
        run = jax.checkpoint(lambda x: self.layer(x))
        return self.layer(3 * x) + run(x) if self.is_first else run(x) + self.layer(3 * x)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_layer_in_a_loop_and_outside_keeps_both_magnitudes(is_first):
    """The one outside was lost if the loop came first. Oracle: NumPy."""
    model = qt.nnx.wrap(InAndOut(is_first), FORWARD, inputs=(X,))
    nnx.jit(nnx.value_and_grad(loss))(model, X)
    newest = {float(history[0, 0]) for history in histories(model)}
    assert newest == {float(edge(factor * np.abs(X).max())) for factor in (1, 3)}


@pytest.mark.parametrize("is_first", [True, False])
def test_uses_that_no_state_knows_have_current_scales(is_first):
    """And one warning says so. Oracle: `Current` scaling."""
    model, current = (qt.nnx.wrap(InAndOut(is_first), recipe) for recipe in (FORWARD, CURRENT))
    for factor in (1, 20):
        with pytest.warns(RuntimeWarning, match=r"differentiated without state.*inputs=\(x,\)"):
            value, _ = nnx.value_and_grad(loss)(model, factor * X)
        np.testing.assert_allclose(value, nnx.value_and_grad(loss)(current, factor * X)[0])
    assert not any(history.any() for history in histories(model))


def told(step, *args):
    """What warnings say and to which lines of this file they point."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*args)
    lines = inspect.getsource(inspect.getmodule(told)).splitlines()
    assert {warning.filename for warning in caught} <= {__file__}
    return {(str(w.message), lines[w.lineno - 1].strip()) for w in caught}


def test_warnings_point_to_the_line_that_differentiates():
    """Not to those of the layers: Python shows a warning once for each line."""
    model = qt.nnx.wrap(Net(), BOTH)

    def closing(x):
        return jax.grad(lambda x: loss(model, x))(x)

    def passing(x):
        return nnx.value_and_grad(loss)(model, x)

    for step in (closing, passing, jax.jit(closing)):
        ((_, line),) = told(step, X)
        assert (
            line
            == inspect.getsource(closing if step is not passing else passing)
            .splitlines()[-1]
            .strip()
        )


def test_keys_advance_and_say_nothing():
    model = qt.nnx.wrap(Net(), qt.recipes.nvfp4)
    step = nnx.jit(nnx.value_and_grad(loss))
    _, first = step(model, X)
    _, second = step(model, X)
    assert not np.array_equal(first["a"]["kernel"], second["a"]["kernel"])
    keys = nnx.to_flat_state(nnx.state(model, qt.nnx.ScalingState))
    assert [int(key[...][1]) for _, key in keys] == [2, 2]


@pytest.mark.parametrize("remat", [False, True])
def test_each_layer_of_a_scan_has_its_own(remat):
    def body(x, layer):
        return jnp.tanh(layer(x))

    def of(model, x):
        inner = nnx.remat(body) if remat else body
        return jnp.mean(nnx.scan(inner, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model) ** 2)

    model, other = (qt.nnx.wrap(_stack(nnx.Rngs(0).split(3)), FORWARD) for _ in range(2))
    for _ in range(2):
        nnx.jit(nnx.value_and_grad(of))(model, X)
        nnx.jit(qt.nnx.value_and_grad(of))(other, X)
    (mine,), (theirs,) = histories(model), histories(other)
    np.testing.assert_array_equal(mine[:, :2], theirs[:, :2])


class Block(nnx.Module):
    """Attention beside a product of its own, whose method is therefore traced."""

    def __init__(self):
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
        self.gate = nnx.Param(jnp.eye(16))

    def __call__(self, x):
        return self.attention(x) @ self.gate


def test_layers_inside_of_a_traced_method_are_carried():
    x = X[None]
    model, other = (qt.nnx.wrap(Block(), FORWARD, inputs=(x,)) for _ in range(2))
    nnx.jit(nnx.value_and_grad(loss))(model, x)
    nnx.jit(qt.nnx.value_and_grad(loss))(other, x)
    assert len(histories(model)) == 7
    for mine, theirs in zip(histories(model), histories(other), strict=True):
        np.testing.assert_array_equal(mine[:2], theirs[:2])
    before = histories(model)
    jax.jit(lambda x: model(x))(100 * x)  # nnx forbids writing here
    for mine, was in zip(histories(model), before, strict=True):
        np.testing.assert_array_equal(mine, was)


def test_a_step_with_an_infinity_changes_no_history():
    model = qt.nnx.wrap(Net(), FORWARD)
    step = nnx.jit(nnx.value_and_grad(loss))
    step(model, X)
    before = histories(model)
    step(model, X.at[0, 0].set(jnp.inf))
    for mine, was in zip(histories(model), before, strict=True):
        np.testing.assert_array_equal(mine, was)
    bad = [x for x in jax.tree.leaves(nnx.state(model, qt.nnx.ScalingState)) if x.ndim == 0]
    assert [int(x) for x in bad] == [1, 1]


@pytest.mark.devices(4)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_have_one_history(check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    recipe = Recipe(*FORWARD.forward[:1], "e5m2", axis_names=() if check_vma else ("d",))
    model = qt.nnx.wrap(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), recipe)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, x):
        def of(params):
            merged = nnx.merge(graph, params, rest, copy=True)
            return loss(merged, x), nnx.state(merged, qt.nnx.ScalingState)

        grads, state = jax.grad(of, has_aux=True)(params)
        return grads, state

    out = (jax.P(), jax.P())
    run = jax.shard_map(
        step, mesh=mesh, in_specs=(jax.P(), jax.P(), jax.P("d")), out_specs=out, check_vma=check_vma
    )
    _, state = jax.jit(run)(params, rest, X)
    history = next(x for x in jax.tree.leaves(state) if x.ndim == 2)
    assert history[0, 0] == edge(np.abs(X).max())


class Gated(nnx.Module):
    """Products by `@`: of kernels, and of two activations."""

    def __init__(self, rngs):
        self.up, self.down = (
            nnx.Param(jax.random.normal(rngs.params(), (16, 16)) / 4) for _ in range(2)
        )

    def __call__(self, x):
        x = jnp.tanh(x @ self.up)
        return (x @ x.T) @ x @ self.down


@pytest.mark.quick
def test_products_of_own_modules_keep_state():
    """As those of layers do; of two activations if inputs are known. Oracle: NumPy."""
    model = qt.nnx.wrap(Gated(nnx.Rngs(0)), BOTH, inputs=(X,))
    assert len(histories(model)) == 4
    step = nnx.jit(qt.nnx.value_and_grad(loss))
    value, _ = step(model, X)
    np.testing.assert_allclose(value, loss(Gated(nnx.Rngs(0)), X), rtol=0.2)
    kept = history_of(model, name="up")
    assert kept[0, 0] == edge(np.abs(X).max())
    assert kept[1, 0] == edge(np.abs(model.up[...]).max())
    assert all(history[:, 0].all() for history in histories(model))
    report = qt.nnx.report(model, X)
    assert "current" not in str(report)
    strict = qt.nnx.wrap(Gated(nnx.Rngs(0)), BOTH, strict=lambda model: loss(model, X))
    assert nnx.graphdef(strict) == nnx.graphdef(qt.nnx.wrap(Gated(nnx.Rngs(0)), BOTH, inputs=(X,)))
    of_kernels = qt.nnx.wrap(Gated(nnx.Rngs(0)), BOTH)
    with pytest.warns(RuntimeWarning, match=r"differentiated without state"):
        step(of_kernels, X)
    assert len(histories(of_kernels)) == 2
    np.testing.assert_array_equal(history_of(of_kernels, name="up"), kept)


def test_learned_scales_of_own_modules():
    model = qt.nnx.wrap(Gated(nnx.Rngs(0)), qt.recipes.int4_lsq, inputs=(X,))
    qt.nnx.start_scales(model, X)
    scales = jax.tree.leaves(nnx.state(model, qt.nnx.LsqScale))
    assert len(scales) == 8
    _, grads = nnx.jit(nnx.value_and_grad(loss))(model, X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_a_stack_of_own_modules_has_a_history_for_each():
    make = nnx.vmap(lambda rngs: Gated(rngs), in_axes=0, out_axes=0)

    def run(model, x):
        body = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return body(x, model)

    given = make(nnx.Rngs(0).split(3))
    model = qt.nnx.wrap(given, BOTH, inputs=lambda model: run(model, X))
    nnx.jit(qt.nnx.value_and_grad(lambda model, x: jnp.mean(run(model, x) ** 2)))(model, X)
    kept = history_of(model, name="up")
    assert kept.shape == (3, 3, 4)
    for i in range(3):
        assert kept[i, 1, 0] == edge(np.abs(model.up[...][i]).max())


def plain_and_ours():
    return pytest.mark.parametrize(
        "value_and_grad", [nnx.value_and_grad, qt.nnx.value_and_grad], ids=["plain", "ours"]
    )


@pytest.mark.devices(2)
@plain_and_ours()
def test_devices_of_pmap_have_one_history(value_and_grad):
    """Oracle: NumPy. The second device has the larger magnitudes."""
    model = qt.nnx.wrap(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), FORWARD)
    graph, state = nnx.split(model)
    copies = nnx.merge(graph, jax.tree.map(lambda x: jnp.stack([x, x]), state))
    x = jnp.stack([X, 3 * X])
    nnx.pmap(lambda model, x: value_and_grad(loss)(model, x)[0], in_axes=0, axis_name="d")(
        copies, x
    )
    (history,) = histories(copies)
    assert history[:, 0, 0].tolist() == [edge(3 * np.abs(X).max())] * 2

    def step(state, x):
        model = nnx.merge(graph, state, copy=True)
        value_and_grad(loss)(model, x)
        return nnx.state(model, qt.nnx.ScalingState)

    shared = jax.pmap(step, axis_name="d", in_axes=(None, 0))(state, x)
    for history in (x for x in jax.tree.leaves(shared) if x.ndim == 3):
        assert history[:, 0, 0].tolist() == [edge(3 * np.abs(X).max())] * 2


@plain_and_ours()
def test_bad_counts_what_saturates_by_more_than_a_factor_of_two(value_and_grad):
    """Oracle: NumPy. Such a step enters the history, one with an infinity does not."""
    model = qt.nnx.wrap(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), FORWARD)
    expected, known, step = 0, 0.0, nnx.jit(value_and_grad(loss))
    for factor in (1, 1.5, 2.9, 3.0, 40, 40, 3, jnp.inf):
        amax = factor * np.abs(X).max()
        expected += int(amax >= 2 * known > 0)
        known = max(known, edge(amax)) if np.isfinite(amax) else known
        step(model, jnp.where(jnp.abs(X) == jnp.abs(X).max(), factor * X, X))
    assert expected == 2
    assert int(state_of(model)["kernel"]["bad"][...]) == expected
    assert history_of(model).max() == known


class Gradient(nnx.Module):
    """A model whose output is a derivative of another one, as in physics."""

    def __init__(self):
        self.energy = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jax.grad(lambda x: jnp.sum(jnp.tanh(self.energy(x))))(x)


@plain_and_ours()
def test_a_model_that_differentiates_itself(value_and_grad):
    """Its own matmul is quantized and moves its state, the derivative's stays. Oracle: by hand."""
    model = qt.nnx.wrap(Gradient(), FORWARD)
    kernel, step = model.energy.kernel[...], nnx.jit(value_and_grad(loss))
    for factor in (1, 20):
        slopes = 1 - jnp.tanh(model.energy(factor * X)) ** 2
        value, grads = step(model, factor * X)
        np.testing.assert_allclose(value, jnp.mean((slopes @ kernel.T) ** 2), rtol=1e-5)
        assert jnp.any(grads["energy"]["kernel"][...])
        assert history_of(model.energy)[0, 0] == edge(factor * np.abs(X).max())
    (left,) = (p for p in qt.nnx.report(model, X).left if p.reason.startswith("part of a deriv"))
    assert left.part == "backward"


def test_tree_mode_of_nnx():
    """`graph=False` differentiates by all of an argument: by parameters alone, if it is split."""
    graph, params, rest = nnx.split(qt.nnx.wrap(Net(), FORWARD), nnx.Param, ...)

    def of(params, rest, x):
        return loss(nnx.merge(graph, params, rest), x)

    value, _ = nnx.value_and_grad(of, graph=False)(params, rest, X)
    other = qt.nnx.wrap(Net(), FORWARD)
    with nnx.set_graph_mode(False):
        expected, _ = qt.nnx.value_and_grad(loss)(other, X)
    assert value == expected
    for mine, theirs in zip(
        histories(nnx.merge(graph, params, rest)), histories(other), strict=True
    ):
        np.testing.assert_array_equal(mine[:2], theirs[:2])
        assert mine[:2, 0].all()
