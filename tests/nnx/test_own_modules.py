"""Products in modules of one's own that inherit, yield, or are frozen."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refused import refused
from state_of import histories_of

import qtoolkit as qt

X = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))


class Base(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(0.3 * jnp.eye(16))

    def __call__(self, x):
        return x @ self.kernel[...]


class BySuper(Base):
    def __call__(self, x):
        return 2 * super().__call__(x)


class ByName(Base):
    def __call__(self, x):
        return 2 * Base.__call__(self, x)


class Twice(BySuper):
    def __call__(self, x):
        return super().__call__(x)


class Jitted(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(0.3 * jnp.eye(16))

    @nnx.jit
    def __call__(self, x):
        return x @ self.kernel[...]


class OfJitted(Jitted):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Table(nnx.Embed):
    def attend(self, query):
        return 2 * super().attend(query)


class Transposed(nnx.ConvTranspose):
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Adapter(nnx.LoRA):
    def __call__(self, x):
        return 2 * super().__call__(x)


def table(kind):
    return kind(8, 16, rngs=nnx.Rngs(0))


def transposed(kind):
    return kind(16, 8, (3,), rngs=nnx.Rngs(0))


def adapter(kind):
    ones = nnx.initializers.ones
    return kind(16, 2, 8, b_initializer=ones, rngs=nnx.Rngs(0))


INHERITING = {
    BySuper: (Base, lambda kind: kind()),
    ByName: (Base, lambda kind: kind()),
    Twice: (Base, lambda kind: kind()),
    OfJitted: (Jitted, lambda kind: kind()),
    Table: (nnx.Embed, table),
    Transposed: (nnx.ConvTranspose, transposed),
    Adapter: (nnx.LoRA, adapter),
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", INHERITING)
def test_a_product_in_a_method_that_is_called_by_super(kind):
    """Oracle: the class that has the method, wrapped. Its product was left, or wrap refused it."""
    base, make = INHERITING[kind]
    name, recipe = "attend" if kind is Table else "__call__", qt.recipes.te_delayed_hybrid
    wrapped = qt.nnx.wrap(make(kind), recipe, **({} if kind is Table else {"strict": (X,)}))
    expected = getattr(qt.nnx.wrap(make(base), recipe), name)(X)
    np.testing.assert_array_equal(getattr(wrapped, name)(X), 2 * expected)
    assert np.abs(expected - getattr(make(base), name)(X)).max() > 1e-3


def test_a_product_in_a_property():
    class Gram(Base):
        @property
        def gram(self):
            return self.kernel[...] @ self.kernel[...].T

        def __call__(self, x):
            return x + self.gram[:4]

    model = Gram()
    model.kernel[...] = jnp.float32(np.random.default_rng(1).normal(size=(16, 16)))
    wrapped = qt.nnx.wrap(model, strict=(X,))
    assert np.abs(wrapped(X) - model(X)).max() > 1e-3


def test_a_method_that_does_not_call_its_module_self():
    """Oracle: the method with `self`. The product was left, or `wrap` said that there is none."""

    class Usual(Base):
        def __init__(self):
            super().__init__()
            self.multiply = lambda a, b: a @ b

        def __call__(self, x):
            return self.multiply(x, self.kernel[...])

    class Other(Usual):
        def __call__(this, x):  # noqa: N805
            return (lambda kernel: this.multiply(x, kernel))(this.kernel[...])

    np.testing.assert_array_equal(
        qt.nnx.wrap(Other(), strict=(X,))(X), qt.nnx.wrap(Usual(), strict=(X,))(X)
    )


class Yielding(Base):
    def steps(self, x):
        for _ in range(2):
            x = yield x @ self.kernel[...]

    async def awaited(self, x):
        return x @ self.kernel[...]


class Iterating(nnx.Module):
    """Its own matmul and those of a generator in it; between two steps it computes one itself."""

    def __init__(self):
        self.inner, self.kernel = Yielding(), nnx.Param(0.7 * jnp.eye(16))

    def __call__(self, x):
        steps = self.inner.steps(x)
        between = next(steps) @ self.kernel[...]
        return between, steps.send(between)


@pytest.mark.quick
@pytest.mark.parametrize("jit", [False, True])
def test_matmuls_of_generators_are_quantized(jit):
    """Oracle: the same matmuls in ordinary methods. They were left in high precision.

    What runs between two steps runs by the recipe of the module that iterates.
    """
    own, other = qt.Recipe(("e4m3fn", "e4m3fn")), qt.Recipe(("e5m2", "e5m2"))
    method, between = qt.nnx.wrap(Base(), own), Base()
    between.kernel[...] = 0.7 * jnp.eye(16)
    second = qt.nnx.wrap(between, other)(method(X))
    expected = second, method(second)
    wrapped = qt.nnx.wrap(Iterating(), qt.Rules({"inner": own}, default=other))
    for got, one in zip((nnx.jit(wrapped) if jit else wrapped)(X), expected, strict=True):
        np.testing.assert_array_equal(got, one)
    assert np.abs(method(X) - Base()(X)).max() > 1e-3


@pytest.mark.parametrize("jit", [False, True])
def test_what_a_method_computes_later_is_refused(jit):
    """Its matmuls would run outside of the program, in high precision."""

    class Only(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(0.3 * jnp.eye(16))

        def steps(self, x):
            yield x @ self.kernel[...]

    wrapped = qt.nnx.wrap(Yielding())
    calls = {
        "generator": [wrapped.steps, qt.nnx.wrap(Only()).steps],
        "coroutine": [wrapped.awaited],
    }
    for kind, methods in calls.items():
        for method in methods:
            with refused(TypeError, f"returns a {kind}, whose code runs later"):
                (jax.jit(method) if jit else method)(X)


def test_a_rule_excludes_the_matmuls_of_a_generator():
    """Oracle: the plain module. The module around it computed them by its own recipe."""

    class Around(Iterating):
        def __call__(self, x):
            return next(self.inner.steps(x @ self.kernel[...]))

    wrapped = qt.nnx.wrap(Around(), qt.Rules({"inner": None}, default=qt.Recipe()))
    between = Base()
    between.kernel[...] = 0.7 * jnp.eye(16)
    np.testing.assert_array_equal(wrapped(X), Base()(qt.nnx.wrap(between)(X)))


@dataclasses.dataclass(frozen=True)
class Frozen(nnx.Module):
    linear: nnx.Linear
    kernel: nnx.Param

    def __call__(self, x):
        return self.linear(x) @ self.kernel[...]


@pytest.mark.parametrize("rules", [{"linear": qt.Recipe()}, {"": qt.Recipe()}])
def test_a_frozen_dataclass(rules):
    """Its class could not be set."""
    model = Frozen(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.Param(jnp.eye(8)))
    wrapped = qt.nnx.wrap(model, qt.Rules(rules), strict=(X,))
    report = qt.nnx.report(wrapped, X)
    assert sum(p.count for p in report.quantized) == (5 if "" in rules else 2)
    assert {p.reason for p in report.left} == (set() if "" in rules else {"excluded by a rule"})


class Lazy(nnx.Module):
    """Makes a layer in its first call."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((4, 4)))
        self.layers = nnx.List([])

    def __call__(self, x):
        if not self.layers:
            self.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
        return self.layers[0](x @ self.w)


def test_a_module_that_a_call_makes():
    """Oracle: the model whose layer was made before it was wrapped."""
    x, model = jnp.ones((2, 4)), Lazy()
    wrapped = qt.nnx.wrap(model)
    first = wrapped(x)
    assert len(wrapped.layers) == 1
    np.testing.assert_array_equal(wrapped(x), first)


class Scores(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(0.3 * jnp.eye(16))

    def __call__(self, batch, shape=None, mask=None):
        first, second = batch["inputs"]
        scores = (first @ self.kernel) @ second.T
        scores = scores if mask is None else scores[mask]
        return scores if shape is None else scores.reshape(tuple(int(side) for side in shape))


@pytest.mark.parametrize("jit", [False, True])
def test_numpy_arrays_are_inputs(jit):
    """Oracle: the same call with JAX arrays; the model itself takes the shape and the mask."""
    model = Scores()
    wrapped = qt.nnx.wrap(model)
    arrays = {"inputs": [np.float64(X) / 3, np.float32(X)]}
    given = {"inputs": [jnp.asarray(x) for x in arrays["inputs"]]}
    numbers = np.array([-1, 2]), np.array([True, False, True, True])

    def call(model, *args):  # NumPy arrays in it are constants of the compiled program
        return nnx.jit(lambda model: model(*args))(model) if jit else model(*args)

    expected = call(wrapped, given)
    got = call(wrapped, arrays)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, expected)
    got = call(wrapped, arrays, *numbers)
    np.testing.assert_array_equal(got, expected[numbers[1]].reshape(-1, 2))
    assert got.shape == call(model, arrays, *numbers).shape


@dataclasses.dataclass
class Config:
    """Compares, and has no hash."""

    sizes: list[int]
    scale: float = 2.0


class OfConfig(nnx.Module):
    def __init__(self, config):
        self.config = config
        self.layers = nnx.List([nnx.Linear(16, n, rngs=nnx.Rngs(n)) for n in config.sizes])

    def __call__(self, x):
        for layer in self.layers:
            x = self.config.scale * layer(x)
        return x


def scaled_loss(model, x):
    scaled_loss.traces += 1
    return jnp.mean(model(x) ** 2)


def test_a_model_with_an_unhashable_config():
    """Oracle: the same model with a frozen config, which hashes."""
    frozen_config = dataclasses.make_dataclass(
        "F", [("sizes", tuple), ("scale", float)], frozen=True
    )
    configs = frozen_config((16, 16), 2.0), Config([16, 16])
    hashed, unhashed = (qt.nnx.wrap(OfConfig(config)) for config in configs)

    def same(function):
        jax.tree.map(np.testing.assert_array_equal, *map(leaves(function), (hashed, unhashed)))

    def leaves(function):
        return lambda model: jax.tree.leaves(function(model))

    same(lambda model: qt.nnx.numerics(model, X, scaled_loss))
    same(lambda model: qt.nnx.sensitivity(model, X, scaled_loss))
    same(lambda model: qt.nnx.calibrate(model, [X, X]))
    same(lambda model: qt.nnx.freeze(model, qt.nnx.calibrate(model, [X]))(X))
    # Compiled once for models that hash; the config of another one may have changed meanwhile.
    scaled_loss.traces = 0
    qt.nnx.numerics(qt.nnx.wrap(OfConfig(configs[0])), X, scaled_loss)
    assert scaled_loss.traces == 0
    unhashed.config.scale = 3.0
    fresh = qt.nnx.wrap(OfConfig(dataclasses.replace(configs[0], scale=3.0)))
    for one, other in zip(
        jax.tree.leaves(qt.nnx.numerics(unhashed, X, scaled_loss)),
        jax.tree.leaves(qt.nnx.numerics(fresh, X, scaled_loss)),
        strict=True,
    ):
        # Operation by operation: XLA fuses, and rounds, otherwise.
        np.testing.assert_allclose(one, other, rtol=1e-6)
    learned = qt.nnx.wrap(OfConfig(Config([16])), qt.recipes.int4_lsq)
    qt.nnx.start_scales(learned, X)
    assert np.isfinite(learned(X)).all()


scaled_loss.traces = 0


class Passing(nnx.Module):
    """Passes its parameter to the method or the module that multiplies it."""

    def __init__(self, how):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(3), (16, 16)))
        self.inner, self.how = Receiving(), how

    def multiplied(self, x, kernel):
        return x @ kernel

    def __call__(self, x):
        x = x @ jnp.eye(16)
        match self.how:
            case "method":
                return self.multiplied(x, self.kernel[...])
            case "variable":
                return self.inner(x, self.kernel)
            case "transposed":
                return self.inner(x, kernel=self.kernel[...].T)
        return self.inner(x, self.kernel[...])


class Receiving(nnx.Module):
    def __init__(self):
        self.own = nnx.Param(jnp.eye(16))

    def __call__(self, x, kernel):
        return x @ self.own @ kernel


def test_arrays_that_are_attributes_are_inputs():
    """Oracle: the same array as an `nnx.Variable`. The call raised."""

    class Shifting(nnx.Module):
        def __init__(self, shift):
            self.kernel, self.shift = nnx.Param(0.3 * jnp.eye(16)), nnx.data(shift)

        def __call__(self, x):
            return (x + self.shift[...]) @ self.kernel[...] @ self.shift[...]

    shift = jnp.linspace(-1, 1, 16)
    array, variable = (qt.nnx.wrap(Shifting(x)) for x in (shift, nnx.Variable(shift)))
    for call in (lambda model: model(X), nnx.jit(lambda model: model(X))):
        np.testing.assert_array_equal(call(array), call(variable))


class Tied(nnx.Module):
    """Computes no matmul, but passes a parameter of one module to another, as an array."""

    def __init__(self, how):
        self.embed, self.head, self.how = nnx.Embed(8, 16, rngs=nnx.Rngs(0)), Head(), how

    def __call__(self, tokens):
        kernel, x = self.embed.embedding[...], self.embed(tokens)
        match self.how:
            case "cast":
                kernel = kernel.astype(jnp.bfloat16)
            case "vmap":
                return jax.vmap(lambda x: self.head(x, kernel))(x[None])[0]
        return self.head(x, kernel)


class Head(nnx.Module):
    def __call__(self, x, kernel):
        return x @ kernel.T


@pytest.mark.parametrize("how", ["array", "cast", "vmap"])
def test_a_parameter_passed_by_a_module_is_a_kernel(how):
    """Oracle: the plain matmul with the kernel rounded by `quantize`. It was no kernel."""
    model, tokens, spec = Tied(how), jnp.arange(4), qt.spec("e4m3fn")
    wrapped = qt.nnx.wrap(model, qt.Recipe((None, spec), gradient=None))
    kernel = model.embed.embedding[...]
    expected = model.embed(tokens) @ qt.quantize(kernel, spec).dequantize().T
    for call in (wrapped, nnx.jit(wrapped)):
        np.testing.assert_allclose(call(tokens), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(model(tokens), np.float32) - expected).max() > 1e-3
    assert isinstance(wrapped, Tied)
    for other in (nnx.clone(wrapped), pickle.loads(pickle.dumps(wrapped))):
        np.testing.assert_array_equal(other(tokens), wrapped(tokens))


@pytest.mark.parametrize("how", ["array", "variable", "transposed", "method"])
def test_a_passed_parameter_is_rounded_as_a_kernel(how):
    """Oracle: the plain product with the kernel rounded by `quantize` alone."""
    model, x = Passing(how), jax.random.normal(jax.random.key(0), (4, 16))
    spec = qt.spec("e4m3fn")
    wrapped = qt.nnx.wrap(model, qt.Recipe((None, spec), gradient=None))
    kernel = model.kernel[...].T if how == "transposed" else model.kernel[...]
    expected = x @ qt.quantize(kernel, spec).dequantize()
    for call in (wrapped, nnx.jit(wrapped)):
        np.testing.assert_allclose(call(x), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(x @ kernel - expected)).max() > 1e-3
    np.testing.assert_array_equal(wrapped.inner(x, x.T), x @ x.T)  # two activations

    delayed = qt.nnx.wrap(model, qt.recipes.te_delayed_hybrid, inputs=(x,))
    qt.nnx.value_and_grad(lambda model: model(x).sum())(delayed)
    histories = histories_of(delayed)  # by the identity, by `own`, by what is passed
    assert len(histories) == 3
    moved = [bool(history[..., 0].all()) for history in histories]
    assert moved.count(True) == (2 if how == "method" else 3)  # `own` does not run
    assert all(history[..., 0].all() or not history.any() for history in histories)


def test_inputs_that_are_none_are_refused_whatever_the_recipe():
    with refused(TypeError, r"wrap: inputs has type int.*write inputs=\(x,\)"):
        qt.nnx.wrap(Passing("array"), qt.recipes.te_current, inputs=3)


class Collecting(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.eye(16))

    def __call__(self, x, outs, *, named):
        outs.append(x @ self.kernel)
        named["last"] = outs[-1]
        return outs[-1]


@pytest.mark.parametrize("x", [X, np.asarray(X)], ids=["jax", "numpy"])
def test_a_method_may_write_to_what_it_is_given(x):
    """It wrote to a copy. Oracle: the plain model."""
    for model in (Collecting(), qt.nnx.wrap(Collecting())):
        outs, named = [], {}
        out = model(x, outs, named=named)
        assert outs == [out]
        assert named == {"last": out}


class EmbedFirst(nnx.Module):
    """Multiplies rows of an embedding, kernel first, as einsums do."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 4)))

    def __call__(self, tokens):
        return jax.lax.dot_general(self.kernel[...], self.embed(tokens), (((0,), (1,)), ((), ())))


def test_rows_that_known_tokens_select_are_no_kernel():
    """A loss that closes over its batch gives the same matmuls as one that is given it."""
    tokens = jnp.arange(6)
    names = []
    for inputs in ((tokens,), lambda model: model(tokens).sum()):
        wrapped = qt.nnx.wrap(EmbedFirst(nnx.Rngs(0)), qt.recipes.te_delayed_hybrid, inputs=inputs)
        nnx.jit(qt.nnx.value_and_grad(lambda model, t: model(t).sum()))(wrapped, tokens)
        states = nnx.to_flat_state(nnx.state(wrapped, qt.nnx.ScalingState))
        moved = [path for path, x in states if path[-1] == "history" and x.get_value().any()]
        names.append([path for path in moved if "embed" not in path])
    assert names[0] == names[1]
    assert [path[-2] for path in names[0]] == ["kernel"]


class Branch(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        h = self.a(x)
        return self.b(h if h.sum() > 0 else -h)


def test_without_jit_a_branch_on_numbers_runs_module_by_module():
    plain, x = Branch(nnx.Rngs(0)), jnp.arange(8.0).reshape(2, 4) / 3
    wrapped = qt.nnx.wrap(plain, qt.recipes.te_current)
    refused(TypeError, "disable_jit", wrapped, x)
    with jax.disable_jit():
        found = wrapped(x)
    first, second = (qt.nnx.wrap(layer, qt.recipes.te_current) for layer in (plain.a, plain.b))
    h = first(x)
    np.testing.assert_allclose(found, second(h if h.sum() > 0 else -h), rtol=1e-6)


class Odd(nnx.Variable):
    """Doubles what is written, and adds one to what is read."""

    def get_value(self, **options):
        return super().get_value(**options) + 1

    def set_value(self, value, **options):
        super().set_value(2 * value, **options)


class Counting(Base):
    def __init__(self, *, is_tagged):
        super().__init__()
        self.count, self.is_tagged = Odd(jnp.ones(()), tag=0), is_tagged

    def __call__(self, x):
        self.count[...] = self.count[...] + 1
        if self.is_tagged:
            self.count.set_metadata(tag=self.count.get_metadata("tag") + 1)
        return super().__call__(x) * self.count[...]


@pytest.mark.parametrize("is_tagged", [False, True])
def test_variables_that_change_what_is_written_do_it_once(is_tagged):
    plain, unwrapped = Counting(is_tagged=is_tagged), Counting(is_tagged=is_tagged)
    wrapped = qt.nnx.wrap(unwrapped, qt.Recipe(None, None))
    for step in range(1, 4):
        np.testing.assert_allclose(wrapped(X), plain(X), rtol=1e-6)
        assert wrapped.count.get_raw_value() == plain.count.get_raw_value()
        assert wrapped.count.get_metadata("tag") == step * is_tagged


class Arrays(Base):
    """Counts in arrays that are no Variables."""

    def __init__(self):
        super().__init__()
        self.count, self.sums = jnp.zeros(()), nnx.data({"x": jnp.zeros(16)})

    def __call__(self, x):
        self.count = self.count + 1
        self.sums["x"] = self.sums["x"] + x.sum(0)
        return super().__call__(x) + self.count


def test_arrays_that_are_attributes_change():
    plain, wrapped = Arrays(), qt.nnx.wrap(Arrays(), qt.Recipe(None, None))
    for _ in range(3):
        np.testing.assert_allclose(wrapped(X), plain(X), rtol=1e-6)
    assert float(wrapped.count) == 3
    np.testing.assert_allclose(wrapped.sums["x"], plain.sums["x"], rtol=1e-6)
