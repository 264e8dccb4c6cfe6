"""Static scales: what calibration finds, and what a frozen model promises.

Oracles: the observers of `qt.scaling` on operands that are captured by hand, and bits of outputs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from refused import refused
from state_of import by_kernel, keyed_by_kernel, state_of

import qtoolkit as qt
from qtoolkit import scaling

INT8 = qt.Recipe(qt.BlockFormat.tensor("int8"), gradient=None)
BATCHES = [jnp.float32(np.random.default_rng(i).normal(size=(6, 8))) * (1 + i) for i in range(3)]


class Own(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        return jnp.dot(x, self.kernel[...]) + x @ self.kernel[...]


class Net(nnx.Module):
    """A layer of Flax, one of one's own, and one that may be skipped."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(8, 8, rngs=rngs)
        self.own = Own(rngs)
        self.extra = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x, both=False):
        x = self.own(nnx.relu(self.a(x)))
        return self.extra(x) if both else x


CODING = ("encode", "decode")  # methods of a Coder


def amaxes(found, path):
    """Of a layer with one matmul."""
    return keyed_by_kernel(found.amaxes(path))["kernel"]


@pytest.fixture(scope="module")
def wrapped():
    return qt.nnx.wrap(Net(), qt.Rules({"extra": None}, default=INT8))


@pytest.fixture(scope="module")
def found(wrapped):
    return qt.nnx.calibrate(wrapped, BATCHES)


call = nnx.jit(lambda model, x: model(x))


@pytest.mark.sample("absmax-options0")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("absmax", {}),
        ("moving_average", {"decay": 0.5}),
        ("percentile", {"fraction": 0.9}),
        ("mse", {}),
    ],
)
def test_each_observer_sees_the_operands(name, options):
    layer = qt.nnx.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), INT8)
    found = qt.nnx.calibrate(layer, BATCHES, name, **options)
    kinds = {
        "absmax": scaling.AbsMax,
        "moving_average": scaling.MovingAverage,
        "percentile": scaling.Percentile,
        "mse": scaling.MSE,
    }
    for side, operands in enumerate((BATCHES, [layer.kernel[...]] * 3)):
        state = kinds[name].of(qt.BlockFormat.tensor("int8"), operands[0].shape, **options)
        for x in operands:
            state = state.observe(x)
        (amaxes,) = found.amaxes("").values()
        np.testing.assert_allclose(amaxes[side], state.amax().reshape(()), rtol=1e-6)


@pytest.mark.quick
def test_a_frozen_model_does_not_depend_on_the_batch(wrapped, found):
    frozen = qt.nnx.freeze(wrapped, found)
    x = BATCHES[0]
    others = x.at[1:].multiply(50)
    np.testing.assert_array_equal(call(frozen, x)[0], call(frozen, others)[0])
    assert np.any(np.asarray(call(wrapped, x)[0] != call(wrapped, others)[0]))
    # Saved with the model, not trained; parameters are shared.
    assert frozen.a.kernel is wrapped.a.kernel
    graph, params, state = nnx.split(frozen, nnx.Param, ...)
    assert len(jax.tree.leaves(state)) == 3
    np.testing.assert_array_equal(call(nnx.merge(graph, params, state), x), call(frozen, x))


def test_frozen_scales_are_those_of_the_calibration(wrapped, found):
    """The same numbers by hand, with static scales from the amaxes."""
    frozen = qt.nnx.freeze(wrapped, found)
    x = BATCHES[1]

    def dot(x, kernel, amaxes):
        x, kernel = (
            qt.fake_quantize(v, "int8", scale=jnp.full((1, 1), amax / 127))
            for v, amax in ((x, amaxes[0]), (kernel, amaxes[1]))
        )
        return x @ kernel

    of_a, of_own = (keyed_by_kernel(found.amaxes(path)) for path in ("a", "own"))
    hidden = nnx.relu(dot(x, wrapped.a.kernel[...], of_a["kernel"]) + wrapped.a.bias[...])
    kernel = wrapped.own.kernel[...]
    expected = dot(hidden, kernel, of_own["kernel"]) + dot(hidden, kernel, of_own["kernel#2"])
    np.testing.assert_allclose(call(frozen, x), expected, rtol=1e-5, atol=1e-5)


def test_calibrations_merge(wrapped, found):
    parts = [qt.nnx.calibrate(wrapped, [batch]) for batch in BATCHES]
    merged = functools.reduce(lambda a, b: a.merge(b), parts)
    for path in found.paths:
        for name, amaxes in found.amaxes(path).items():
            np.testing.assert_array_equal(merged.amaxes(path)[name], amaxes)

    def across(i):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves)[i], *parts)
        return stacked.merge_across("devices").states[0].amax()

    amaxes = jax.vmap(across, axis_name="devices")(jnp.arange(3))
    np.testing.assert_array_equal(amaxes.reshape(-1), [found.states[0].amax()[0]] * 3)


@pytest.mark.exhaustive
def test_second_scales_are_frozen():
    """NVFP4's, which would follow from the whole batch."""
    recipe = qt.Recipe("nvfp4", gradient=None)
    layer = qt.nnx.wrap(nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(0)), recipe)
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))
    frozen = qt.nnx.freeze(layer, qt.nnx.calibrate(layer, [x], "mse"))
    np.testing.assert_array_equal(call(frozen, x), call(layer, x))
    others = x.at[1:].multiply(100)
    np.testing.assert_array_equal(call(frozen, x)[0], call(frozen, others)[0])


@pytest.mark.sample("e4m3fn", "nvfp4")
@pytest.mark.parametrize("fmt", ["e4m3fn", "int8", "nvfp4"])
def test_frozen_models_scale_cotangents_by_themselves(fmt):
    """Of the format that the operands have; but nobody has calibrated them."""
    layer = qt.nnx.wrap(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), qt.Recipe(fmt, fmt))
    x = jnp.float32(np.random.default_rng(0).normal(size=(16, 16)))
    frozen = qt.nnx.freeze(layer, qt.nnx.calibrate(layer, [x]))
    for size in (1e-4, 1.0, 1e4):
        grads = [nnx.grad(lambda m, k=size: (jnp.sin(m(x)) * k).sum())(m) for m in (layer, frozen)]
        for one, expected in zip(*map(jax.tree.leaves, grads), strict=True):
            np.testing.assert_array_equal(one, expected)


def test_layers_that_were_not_calibrated_are_named(wrapped, found):
    every = qt.nnx.wrap(Net(), INT8)
    found = qt.nnx.calibrate(every, BATCHES)
    refused(ValueError, "freeze: not calibrated: extra", qt.nnx.freeze, every, found)
    reaching = qt.nnx.calibrate(every, [(x, True) for x in BATCHES])  # what is no array is static
    assert set(qt.nnx.calibrate(every, [{"x": BATCHES[0], "both": True}]).paths) == {
        *found.paths,
        "extra",
    }
    np.testing.assert_array_equal(amaxes(reaching, "a"), amaxes(found, "a"))
    qt.nnx.freeze(every, reaching)
    refused(TypeError, "calibration has type dict", qt.nnx.freeze, every, {})
    static = qt.Recipe(
        qt.Operand(qt.BlockFormat.tensor("int8"), scaling=qt.products.Static()), gradient=None
    )
    with refused(ValueError, r"dot_general: not calibrated, .*from calibrate and freeze"):
        qt.dot_general(jnp.ones((2, 2)), jnp.ones((2, 2)), (((1,), (0,)), ((), ())), recipe=static)


def test_the_example_runs(wrapped, run_example):
    run_example(qt.nnx.calibrate, wrapped=wrapped, batches=BATCHES)


def test_bad_batches(wrapped, found):
    refused(ValueError, "there are no batches", qt.nnx.calibrate, wrapped, [])
    bad = BATCHES[0].at[0, 0].set(jnp.nan)
    with refused(ValueError, "a:kernel: all 2 batches of its lhs have a NaN or an inf"):
        qt.nnx.calibrate(wrapped, [bad, bad])
    one_bad = qt.nnx.calibrate(wrapped, [*BATCHES, bad])
    assert int(one_bad.states[0].bad) == 1
    np.testing.assert_array_equal(amaxes(one_bad, "a"), amaxes(found, "a"))
    with refused(TypeError, r"expected an iterable of batches; .*\[batch\]"):
        qt.nnx.calibrate(wrapped, BATCHES[0])
    refused(ValueError, "MinMax finds zero points", qt.nnx.calibrate, wrapped, BATCHES, "minmax")
    refused(ValueError, "observer='largest'", qt.nnx.calibrate, wrapped, BATCHES, "largest")
    refused(ValueError, "Net is not wrapped", qt.nnx.calibrate, Net(), BATCHES)
    with refused(TypeError, "Percentile has no option 'fractoin'"):
        qt.nnx.calibrate(wrapped, BATCHES, "percentile", fractoin=0.9)


class Stateful(nnx.Module):
    """Modules that write their own state in a call: statistics, and the count of a key."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.linear(x)))


@pytest.mark.quick
def test_models_that_write_state_are_calibrated_and_measured():
    model, x = qt.nnx.wrap(Stateful(), INT8), BATCHES[0]
    found = qt.nnx.calibrate(model, [x])
    np.testing.assert_allclose(amaxes(found, "linear")[0], np.max(np.abs(x)), rtol=1e-6)

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    assert not qt.nnx.numerics(model, x, loss).unreached
    assert np.isfinite(qt.nnx.sensitivity(model, x, loss).wide)
    assert not np.any(model.norm.mean[...])  # the state stays as it is
    assert model.drop.rngs.count[...] == 0


@pytest.mark.exhaustive
def test_a_decoding_step_is_calibrated():
    attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    attention.init_cache((1, 3, 8))
    model = qt.nnx.wrap(attention, INT8)
    found = qt.nnx.calibrate(model, [BATCHES[0][:1, None]])
    assert "query" in found.paths
    assert model.cache_index[...] == 0


@pytest.mark.quick
def test_scales_that_are_not_known_are_no_zeros():
    x, layer = BATCHES[0], nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    unknown = qt.nnx.wrap(layer, INT8.frozen())
    refused(ValueError, r"not calibrated, .*Static\(\) .* write qtoolkit.nnx.fr", unknown, x)
    assert np.isnan(call(unknown, x)).all()
    both, one = qt.nnx.wrap(layer, INT8), qt.nnx.wrap(layer, qt.Recipe((INT8.forward[0], None)))
    with refused(ValueError, r"not calibrated: \(model\):kernel \(1 of its 2 operands\)"):
        qt.nnx.freeze(both, qt.nnx.calibrate(one, [x]))
    served = qt.nnx.quantize(layer, "e4m3fn")  # has nothing to calibrate
    frozen = qt.nnx.freeze(served, qt.nnx.calibrate(served, [x]))
    np.testing.assert_array_equal(call(frozen, x), call(served, x))


@pytest.mark.quick
def test_a_calibration_belongs_to_its_format():
    """What loses least in E2M1 clips far below what loses least in int8."""
    x = jnp.float32(np.random.default_rng(0).normal(size=(64, 16))).at[0, 0].set(40.0)
    plain = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    wrapped = qt.nnx.wrap(plain, qt.Recipe("e2m1fn", None))
    frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, [x], "mse"))
    static = qt.products.Operand("int8", scaling=qt.products.Static())
    refused(ValueError, "not calibrated", qt.nnx.wrap(frozen, qt.Recipe(static, None)), x)
    same = qt.products.Operand("e2m1fn", scaling=qt.products.Static())
    np.testing.assert_array_equal(qt.nnx.wrap(frozen, qt.Recipe(same, None))(x), frozen(x))


@pytest.mark.exhaustive
@pytest.mark.quick
def test_an_embedding_that_only_looks_up_needs_no_scale():
    model = nnx.Sequential(nnx.Embed(10, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
    tokens = jnp.arange(6).reshape(2, 3)
    wrapped = qt.nnx.wrap(model, INT8)
    frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, [tokens]))
    np.testing.assert_array_equal(call(frozen, tokens), call(wrapped, tokens))
    embedding, x = frozen.layers[0], jnp.ones((2, 8))
    refused(ValueError, r"not calibrated, .*Static\(\)", embedding.attend, x)
    assert np.isnan(nnx.jit(lambda embedding, x: embedding.attend(x))(embedding, x)).all()

    learned = qt.nnx.wrap(model, qt.recipes.int4_lsq)
    qt.nnx.start_scales(learned, (tokens,))
    assert np.isfinite(call(learned, tokens)).all()

    def loss(model, tokens):
        return jnp.mean(model(tokens) ** 2)

    ranked = qt.nnx.sensitivity(learned, tokens, loss)  # which needs no scale of `attend` either
    np.testing.assert_allclose(ranked.quantized, loss(learned, tokens), rtol=1e-5)
    unstarted = qt.nnx.wrap(model, qt.recipes.int4_lsq)
    with refused(ValueError, r"sensitivity: layers/1: the learned scale .*not been started"):
        qt.nnx.sensitivity(unstarted, tokens, loss)
    with refused(ValueError, r"layers/0:embedding: the learned scale .*not been started"):
        learned.layers[0].attend(x)


class Similar(nnx.Module):
    """A class of one's own with a product in a method that training does not call."""

    def __init__(self):
        self.a = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.a(x)

    def similarity(self, x, y):
        return self.a(x) @ self.a(y).T


def test_methods_that_batches_never_call_need_no_scale():
    wrapped = qt.nnx.wrap(Similar(), INT8)
    frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, BATCHES))
    only = qt.nnx.freeze(
        qt.nnx.wrap(Similar(), qt.Rules({"^a$": INT8})), qt.nnx.calibrate(wrapped, BATCHES)
    )
    np.testing.assert_array_equal(frozen(BATCHES[0]), only(BATCHES[0]))
    with refused(ValueError, r"not calibrated, .* from calibrate and freeze"):
        frozen.similarity(BATCHES[0], BATCHES[0])


class Convolved(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Holding()])

    def __call__(self, x):
        for block in self.blocks:
            x = block.conv(x)
        return x


class Holding(nnx.Module):
    def __init__(self):
        self.conv = nnx.Conv(1, 1, (3,), rngs=nnx.Rngs(0))


def test_a_layer_named_as_a_product_is_none():
    """`block.conv(x)` calls a layer: the model has no product of its own that could be missing."""
    x = jnp.ones((1, 8, 1))
    report = qt.nnx.report(qt.nnx.wrap(Convolved()), x)
    assert "not reached" not in str(report)
    assert {product.path for product in report.quantized} == {"blocks/0/conv"}


@pytest.mark.devices(2)
@pytest.mark.sample("absmax-AxisType.Auto")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["absmax", "percentile", "mse"])
def test_sharded_batches_are_calibrated_as_whole_ones(name, kind, wrapped):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    expected = qt.nnx.calibrate(wrapped, BATCHES, name)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in BATCHES]
        got = qt.nnx.calibrate(wrapped, placed, name)
    assert got.keys == expected.keys
    # The last layer's inputs are sums over shards of another shape, in another order.
    first = [i for i, (path, *_) in enumerate(got.keys) if path == "a"]
    for i in first:
        np.testing.assert_array_equal(got.states[i].amax(), expected.states[i].amax())


def test_what_calibrate_cannot_do_is_said(wrapped, found):
    frozen = qt.nnx.freeze(wrapped, found)
    with refused(ValueError, r"the recipe has Static\(\) scaling, as freeze makes it"):
        qt.nnx.calibrate(frozen, BATCHES)
    with refused(TypeError, r"called inside jit.*a\.merge\(b\)"):
        nnx.jit(lambda model, x: qt.nnx.calibrate(model, [x]).amaxes("a"))(wrapped, BATCHES[0])


@pytest.mark.parametrize("kind", [nnx.Conv, nnx.ConvTranspose])
def test_a_layer_of_flax_that_batches_never_call_is_named(kind):
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    model.spare = kind(8, 8, (3,), rngs=nnx.Rngs(1))
    wrapped = qt.nnx.wrap(model, INT8)
    with refused(ValueError, "freeze: not calibrated: spare;"):
        qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, BATCHES))


class Coder(nnx.Module):
    """Products in three methods, whose kernels differ by 10,000."""

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.small, self.large = (
            nnx.Param(jax.random.normal(key, (8, 8)) * size)
            for key, size in zip(keys, (1.0, 1e4), strict=True)
        )

    def encode(self, x):
        return x @ self.small

    def decode(self, x):
        return (x * 1e4) @ self.large

    def __call__(self, x):
        return self.encode(x), self.decode(x), x @ self.small


class Widened(nnx.Linear):
    """A layer with a hook, and a product of one's own beside it."""

    def __init__(self):
        super().__init__(8, 8, rngs=nnx.Rngs(0))
        self.small, self.large = Coder().small, Coder().large

    def __call__(self, x):
        return super().__call__(x), (x * 1e4) @ self.large


class Table(nnx.Embed):
    def __init__(self):
        super().__init__(8, 8, rngs=nnx.Rngs(0))
        self.large = Coder().large

    def __call__(self, x):
        return self.attend(x), (x * 1e4) @ self.large


@pytest.mark.sample("Coder-names0", "Widened-names1")
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Coder, ["small", "large", "small#2"]),
        (Widened, ["kernel", "large"]),
        (Table, ["embedding", "large"]),
    ],
)
def test_each_product_of_a_module_has_a_scale_of_its_own(kind, names):
    """By the largest magnitudes of one batch a frozen model is the wrapped one, which takes them of
    each operand by itself.
    """
    wrapped = qt.nnx.wrap(kind(), INT8)
    found = qt.nnx.calibrate(wrapped, BATCHES[:1])
    measured = list(dict.fromkeys(name for _, name, _ in found.keys))
    assert by_kernel(measured, CODING) == names
    frozen = qt.nnx.freeze(wrapped, found)
    for got, expected in zip(frozen(BATCHES[0]), wrapped(BATCHES[0]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    rows = qt.nnx.numerics(wrapped, BATCHES[0], lambda m, x: sum(map(jnp.sum, m(x)))).rows
    assert {row.product for row in rows} == set(measured)
    assert all(row.tally.uses == 1 for row in rows)


class Memory(nnx.Module):
    """Kernels with the names that a mapping's methods have."""

    def __init__(self):
        self.keys, self.values = Coder().small, Coder().large

    def __call__(self, x):
        return nnx.softmax(x @ self.keys.get_value()) @ self.values.get_value()


def test_kernels_may_have_any_name():
    wrapped = qt.nnx.wrap(Memory(), INT8)
    frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, BATCHES[:1]))
    got, expected = frozen(BATCHES[0]), wrapped(BATCHES[0])
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert "keys" in repr(frozen)


class Branching(nnx.Module):
    def __init__(self):
        self.small, self.large = Coder().small, Coder().large

    def __call__(self, x, is_scaled=True):
        if is_scaled:
            x = (x * 1e4) @ self.large
        return x @ self.small


def test_a_branch_left_out_gives_its_scale_to_no_other_product():
    """Oracle: the wrapped model, whose scales are those of the one batch it is given."""
    wrapped = qt.nnx.wrap(Branching(), INT8)
    short = (BATCHES[0], False)
    both = qt.nnx.calibrate(wrapped, [short, BATCHES[0]])
    assert {name for _, name, _ in both.keys} == {"large", "small"}
    alone = qt.nnx.calibrate(wrapped, [short])
    keyed = dict(zip(both.keys, both.states, strict=True))
    large = [keyed["", "large", side].amax().item() for side in (0, 1)]
    small = [keyed["", "small", side].amax().item() for side in (0, 1)]
    assert large[1] > 1e3 > small[1]
    frozen = qt.nnx.freeze(wrapped, alone)
    np.testing.assert_allclose(
        frozen(*short), wrapped(*short), rtol=1e-6, atol=1e-6 * np.abs(wrapped(*short)).max()
    )
    refused(ValueError, "not calibrated", frozen, BATCHES[0])


def test_frozen_methods_are_saved_and_wrapped_again():
    wrapped = qt.nnx.wrap(Coder(), INT8)
    frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, BATCHES[:1]))
    graph, state = nnx.split(frozen)
    kept = state_of(state, methods=CODING)
    assert {"amax"} == set(kept["small"]) == set(kept["small#2"])
    again = call(nnx.merge(graph, state), BATCHES[0])
    for got, expected in zip(again, call(frozen, BATCHES[0]), strict=True):
        np.testing.assert_array_equal(got, expected)
    plain = qt.nnx.wrap(frozen, INT8)
    assert not state_of(plain)
    encoding = _Encoding(Coder())
    wrapped = qt.nnx.wrap(encoding, INT8)
    frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, BATCHES[:1]))
    with refused(ValueError, "not calibrated, though the recipe has Static"):
        frozen.model.decode(BATCHES[0])


class _Encoding(nnx.Module):
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model.encode(x)


def test_a_while_loop_is_reported_forward_and_calibrated():
    """Oracle: the same steps in Python, each measured by hand."""

    class Looping(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            def step(carry):
                return jnp.tanh(self.layer(carry[0])), carry[1] + 1

            return jax.lax.while_loop(lambda carry: carry[1] < 3, step, (x, 0))[0]

    wrapped = qt.nnx.wrap(Looping(), INT8, strict=(BATCHES[0],))
    report = qt.nnx.report(wrapped, BATCHES[0])
    assert report.is_forward_only
    assert [product.part for product in report.quantized] == ["forward"]
    assert "forward only: JAX has no derivative of lax.while_loop" in str(report)
    found = qt.nnx.calibrate(wrapped, BATCHES)
    largest = 0.0
    for x in BATCHES:
        for _ in range(3):
            largest = max(largest, float(np.abs(x).max()))
            x = jnp.tanh(wrapped.layer(x))
    kernel = np.abs(wrapped.layer.kernel[...]).max()
    np.testing.assert_allclose(amaxes(found, "layer")[:2], [largest, kernel], rtol=1e-6)
    frozen = qt.nnx.freeze(wrapped, found)
    np.testing.assert_allclose(frozen(BATCHES[2]), wrapped(BATCHES[2]), atol=0.05)


@pytest.mark.quick
@pytest.mark.parametrize(
    "recipe", [qt.recipes.te_current, qt.recipes.int4_lsq], ids=["static", "learned"]
)
def test_debug_nans_finds_none_in_a_correct_run(recipe):
    """What is not started is NaN, which no user has to look for."""
    x = jnp.ones((2, 4))
    with jax.debug_nans(True):
        model = qt.nnx.wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), recipe)
        if any(recipe.learned):
            qt.nnx.start_scales(model, x)
        else:
            model = qt.nnx.freeze(model, qt.nnx.calibrate(model, [x]))
        step = nnx.jit(qt.nnx.value_and_grad(lambda model: (model(x) ** 2).mean()))
        assert step(model)[0] > 0
        again = qt.nnx.wrap(model, recipe if any(recipe.learned) else recipe.frozen())
        assert step(again)[0] > 0
        found = qt.nnx.numerics(model, x, lambda model, x: model(x).sum())
        assert not found.unreached
