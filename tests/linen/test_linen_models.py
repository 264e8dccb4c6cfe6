"""linen.wrap of models as people write them: transformed classes, own `__init__`, NumPy inputs.

Oracles: the unquantized model, layers' formulas in NumPy with operands rounded by ml_dtypes, and
for NumPy arrays the same call with JAX arrays.
"""

import dataclasses
import functools
import pickle
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from layer_formulas import q
from refused import refused
from state_of import histories_of

import qtoolkit as qt
from qtoolkit import Recipe, recipes
from qtoolkit.linen import wrap

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
NORMAL = nn.initializers.normal(1.0)
DELAYED = recipes.te_delayed_hybrid


class Inner(nn.Module):
    """Computes in `setup` and in a method: a layer of Flax, and a product of its own."""

    def setup(self):
        self.dense = nn.Dense(4)
        self.kernel = self.param("kernel", NORMAL, (4, 4))

    def __call__(self, x):
        return self.dense(x) @ self.kernel


class Mapped(nn.Module):
    """A transformed class in `setup`, alone and among others, beside a product of its own."""

    axes: tuple

    def setup(self):
        options = {"variable_axes": dict(self.axes), "split_rngs": {"params": True}}
        self.mapped = nn.vmap(Inner, in_axes=1, out_axes=1, **options)()
        self.others = {"list": [nn.remat(Inner)()]}
        self.kernel = self.param("kernel", NORMAL, (4, 4))

    def __call__(self, x):
        return self.others["list"][0](self.mapped(x)) @ self.kernel


def inner(params, x, equation="...i,io->...o"):
    """`Inner` in NumPy. Its operands have one scale, also those of a stack of layers."""
    bias = np.moveaxis(np.float64(params["dense"]["bias"]), 0, -1)
    hidden = np.einsum(equation, q(x), q(params["dense"]["kernel"])) + bias
    return np.einsum(equation, q(hidden), q(params["kernel"]))


MAPPED = {
    "parameters": ({"params": 1}, recipes.te_current),
    "state": ({"params": 1, "qtoolkit": 0, "qtoolkit_scales": 0}, DELAYED),
    "everything": ({True: 1}, DELAYED),
}


@pytest.mark.parametrize("how", MAPPED)
def test_a_transformed_class_in_setup_runs_where_flax_runs_it(how):
    axes, recipe = MAPPED[how]
    module = Mapped(tuple(axes.items()))
    wrapped = wrap(module, recipe)
    variables = jax.jit(wrapped.init)(KEY, X)
    params = jax.tree.map(np.asarray, variables["params"])
    expected = jax.jit(module.init)(KEY, X)["params"]
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    hidden = inner(params["mapped"], X, "bni,ino->bno")
    expected = q(inner(params["others_list_0"], hidden)) @ q(params["kernel"])

    def loss(variables):
        out = wrapped.apply(variables, X)
        return jnp.mean(out**2), out

    (_, out), _, state = jax.jit(qt.linen.value_and_grad(loss, has_aux=True))(variables)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    # Each product of a delayed recipe has a history, which the step fills.
    histories = histories_of(state)
    assert len(histories) == (5 if recipe is DELAYED else 0)
    assert all(np.all(history[:, 0] > 0) for history in histories)


class Named(nn.Module):
    @nn.compact
    def __call__(self, x, module=None, *, scopes=1.0):
        kernel = self.param("kernel", NORMAL, (4, 4))
        return x @ kernel * module * scopes


class Naming(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Named()(x, module=2.0)


def test_arguments_with_the_names_of_flaxs_own():
    wrapped = wrap(Named())
    variables = Named().init(KEY, X, module=2.0)
    expected = q(X) @ q(variables["params"]["kernel"]) * 6
    got = wrapped.apply(variables=variables, x=X, module=2.0, scopes=3.0)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert wrap(Named(), DELAYED).init(KEY, X, module=2.0).keys() == {"params", "qtoolkit"}
    # Flax itself cannot pass such an argument on where any interceptor is set.
    variables = {"params": {"Named_0": variables["params"]}}
    with refused(TypeError, r"write layer\(x, module\) in place of layer\(x, "):
        wrap(Naming()).apply(variables, X)


def registered(kind):
    """A decorator of configurations, as libraries of models have it."""
    original = kind.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        object.__setattr__(self, "config", {"features": self.features})

    kind.__init__ = init
    return kind


@registered
class Configured(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.config["features"], use_bias=False)(x)


class Doubling(Configured):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "config", {"features": 2 * self.features})


@pytest.mark.parametrize("kind", [Configured, Doubling])
def test_what_a_modules_own_init_sets_is_there(kind):
    wrapped = wrap(kind(5))
    variables = kind(5).init(KEY, X)
    expected = q(X) @ q(variables["params"]["Dense_0"]["kernel"])
    for module in (wrapped, wrapped.clone(), pickle.loads(pickle.dumps(wrapped)), wrap(wrapped)):
        assert module.config == kind(5).config
        np.testing.assert_allclose(module.apply(variables, X), expected, rtol=1e-5)
    assert jax.eval_shape(wrapped.init, KEY, X).keys() == {"params"}


class Compared(nn.Module):
    """Has a configuration that does not hash, and says itself how it hashes and compares."""

    config: dict

    def __hash__(self):
        return len(self.config)

    def __eq__(self, other):
        return isinstance(other, Compared) and self.config == other.config

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.config["features"])(x)


def test_modules_compare_as_their_class_says_and_by_recipe():
    wrapped = wrap(Compared({"features": 2}))
    assert hash(wrapped) == 1
    assert wrapped == wrap(Compared({"features": 2}))
    assert wrapped != wrap(Compared({"features": 3}))
    assert wrapped != wrap(Compared({"features": 2}), Recipe("mxfp8"))
    assert wrapped != Compared({"features": 2})
    assert Compared({"features": 2}) != wrapped


class Scores(nn.Module):
    """Products of activations alone, of tokens, and what needs numbers in Python."""

    @nn.compact
    def __call__(self, batch, shape=None, note="", scale=1.0):
        x, tokens = batch["inputs"][0], batch["tokens"]
        table = self.param("table", NORMAL, (11, 4))
        kernel = self.param("kernel", NORMAL, (4, 4))
        scores = jnp.einsum("td,sd->ts", x, batch["inputs"][1])
        found = kernel @ table[tokens[:, :-1]].swapaxes(-1, -2)
        if "mask" in batch:
            found = found[batch["mask"]]
        out = scale * jnp.concatenate([scores.ravel(), found.ravel()])
        return out if shape is None else out.reshape(tuple(int(side) for side in shape))


RNG = np.random.default_rng(1)
ARRAYS = [RNG.normal(size=(6, 4)), RNG.normal(size=(5, 4)).astype(np.float32)]  # float64, float32
BATCH = {"inputs": ARRAYS, "tokens": RNG.integers(0, 11, (2, 5))}


@pytest.mark.quick
@pytest.mark.parametrize("recipe", [DELAYED, recipes.weight_only_e4m3], ids=["delayed", "weights"])
def test_numpy_arrays_are_inputs_and_no_constants(recipe):
    module = wrap(Scores(), recipe)
    given = jax.tree.map(jnp.asarray, BATCH)
    variables = module.init(KEY, given)
    got = module.init(KEY, BATCH)
    assert jax.tree.structure(got) == jax.tree.structure(variables)
    expected = module.apply(variables, given)
    for call in (
        lambda: module.apply(variables, BATCH, note="a", scale=1.0),
        lambda: module.apply(variables, batch=BATCH),
        lambda: module.bind(variables)(BATCH),
        lambda: jax.jit(lambda v: module.apply(v, BATCH))(variables),
    ):
        out = call()
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_numpy_integers_stay_where_python_needs_their_numbers():
    """The plain model takes a shape and a mask in NumPy arrays."""
    module = wrap(Scores(), DELAYED)
    mask = np.array([True, False])
    batch = {**BATCH, "mask": mask}
    variables = module.init(KEY, batch, np.array([2, -1]))
    for shape in (np.array([2, -1]), (2, -1)):
        expected = Scores().apply(variables, batch, shape)
        got = module.apply(variables, batch, shape)
        assert got.shape == expected.shape == (2, 23)
        assert 0 < np.max(np.abs(got - expected)) < 0.1 * np.max(np.abs(expected))
    with refused(TypeError, r"^wrap: Scores.__call__ needs the numbers of an array"):
        module.apply(variables, {**batch, "mask": jnp.asarray(mask)}, shape)


def test_what_is_not_converted_is_the_object_that_was_given():
    class Noting(nn.Module):
        def __call__(self, x, notes, names):
            notes["seen"] = names
            return x

    notes, names = {}, np.array(["a"])
    wrap(Noting()).apply({}, X, notes, names)
    assert notes["seen"] is names


class Scaled(nn.Module):
    """Keeps what does not hash: a list, or an array."""

    features: Sequence[int]
    factor: object = 1.0

    @nn.compact
    def __call__(self, x):
        for count in self.features:
            x = self.factor * nn.Dense(count)(x)
        return x


UNHASHED = {
    "list": Scaled([4, 4]),
    "array": Scaled((4, 4), np.ones(4, np.float32)),
    "JAX array": Scaled((4, 4), jnp.ones(4)),
}


@dataclasses.dataclass
class Loss:
    """A loss that does not hash, either."""

    module: nn.Module

    def __call__(self, variables, x):
        return jnp.mean(self.module.apply(variables, x) ** 2)


@pytest.mark.parametrize("what", UNHASHED)
def test_a_module_that_does_not_hash(what):
    """Oracle: the same module with a tuple or a number."""
    modules = Scaled((4, 4)), UNHASHED[what]
    variables = jax.jit(modules[0].init)(KEY, X)

    def same(function):
        # Operation by operation: XLA fuses, and rounds, otherwise.
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
        jax.tree.map(close, *map(jax.tree.leaves, map(function, modules)))

    def frozen(module):
        module = wrap(module)
        found = qt.linen.calibrate(module, variables, [X, X])
        return qt.linen.freeze(module, variables, found)[1]

    def started(module):
        return qt.linen.start_scales(wrap(module, recipes.int4_lsq), variables, X)

    same(frozen)
    same(started)
    if what == "list":
        for measure in (qt.linen.numerics, qt.linen.sensitivity):
            same(lambda module, of=measure: of(wrap(module), variables, X, Loss(wrap(module))))
