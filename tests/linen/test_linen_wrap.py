"""linen.wrap: what is quantized, counted in the program, and that nothing else changes."""

import collections
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.errors import ScopeCollectionNotFound
from flax.training.train_state import TrainState
from refused import refused
from state_of import state_of, states_of

import qtoolkit as qt
from qtoolkit import Recipe
from qtoolkit.formats import Rules
from qtoolkit.linen import report, wrap
from qtoolkit.products import recipes

KEY = jax.random.key(1)
WIDE = Recipe(forward=None, gradient=None)  # products of ours that round nothing
NATIVE = Recipe("mxfp8", arithmetic="native")
X = jnp.float32(np.random.default_rng(0).normal(size=(2, 6, 16)))
PRODUCTS = ("dot_general", "scaled_dot", "conv_general_dilated", "ragged_dot_general")


def count(function, *args):
    """Of the products of a program, how many stand in a jitted function of ours, and elsewhere."""
    found = collections.Counter()

    def walk(jaxpr, is_ours):
        for eqn in jaxpr.eqns:
            is_inside = is_ours or eqn.params.get("name") == "qtoolkit_product"
            found[is_inside] += eqn.primitive.name in PRODUCTS
            for inner in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    walk(inner, is_inside)

    walk(jax.make_jaxpr(function)(*args).jaxpr, False)
    return found[True], found[False]


def shapes(module, *args, **options):
    """Zeros of the shapes of a module's variables: traced, nothing is compiled."""
    rngs = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    found = jax.eval_shape(lambda *xs: module.init(rngs, *xs, **options), *args)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(16)(x)), None


class Stack(nn.Module):
    """Three blocks in a loop; the dense layer at its end runs twice."""

    remat: bool = False
    has_end: bool = True

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        axes = {"params": 0}
        looped = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)
        x, _ = looped(name="blocks")(x, None)
        if not self.has_end:
            return x
        tied = nn.Dense(16, name="tied")
        return tied(tied(x))


class Setup(nn.Module):
    def setup(self):
        self.first = nn.Dense(16)
        self.last = nn.Dense(16)

    def __call__(self, x):
        return self.last(self.encode(x))

    def encode(self, x):
        return self.first(x)

    def _hidden(self, x):
        return self.first(x)


class Raw(nn.Module):
    """Products of its own beside those of a layer, and in a helper."""

    @nn.compact
    def __call__(self, x, note="kept"):
        w = self.param("w", nn.initializers.lecun_normal(), (16, 16))
        x = helper(nn.Dense(16)(x) @ w, w) @ w
        return x, {"note": note, "nothing": None}


def helper(x, w):
    return jnp.einsum("btd,df->btf", x, w)


class Keeping(nn.Module):
    """The function that computes the products is an attribute."""

    attention_fn: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((4, 4))(x)
        return self.attention_fn(x, x, x)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(32, 16)
        return embed.attend(nn.LayerNorm()(embed(tokens)))


class Rnn(nn.Module):
    cell: type

    @nn.compact
    def __call__(self, x):
        return nn.RNN(self.cell(8))(x)


class Ensemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        kind = nn.vmap(nn.Einsum, variable_axes={"params": 0}, split_rngs={"params": True})
        return kind((16, 8), "...i,io->...o")(x)


class Normed(nn.Module):
    """Collections that are written, and random numbers, in and around a product of its own."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        attention = nn.MultiHeadDotProductAttention(4, dropout_rate=0.3, deterministic=not train)
        x = attention(x, sow_weights=True)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return x @ self.param("w", nn.initializers.lecun_normal(), (16, 16))


TOKENS = jnp.arange(12).reshape(2, 6)
# What a user may build, its input, and its products.
MODELS = {
    "Dense": (nn.Dense(8), X, 1),
    "DenseGeneral": (nn.DenseGeneral((4, 4)), X, 1),
    "Conv": (nn.Conv(8, (3,), padding="CIRCULAR", feature_group_count=2), X, 1),
    "ConvTranspose": (nn.ConvTranspose(8, (3,)), X, 1),
    "Einsum": (nn.Einsum((16, 8), "...i,io->...o"), X, 1),
    "Embed.attend": (Tied(), TOKENS, 1),
    "attention": (nn.MultiHeadAttention(4), X, 6),
    "attention, own function": (
        nn.MultiHeadDotProductAttention(4, attention_fn=lambda q, k, v, **_: q @ k.mT @ v),
        X,
        6,
    ),
    "a function of Flax as attribute": (Keeping(), X, 3),
    "LSTM": (Rnn(nn.LSTMCell), X, 8),
    "OptimizedLSTM": (Rnn(nn.OptimizedLSTMCell), X, 2),
    "GRU": (Rnn(nn.GRUCell), X, 6),
    "Sequential": (nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)]), X, 2),
    "setup": (Setup(), X, 2),
    "scan, reuse": (Stack(), X, 3),
    "scan of remat, reuse": (Stack(remat=True), X, 3),
    "own products": (Raw(), X, 4),
    "vmap": (Ensemble(), X, 1),
    "norm, dropout, own product": (Normed(), X, 8),
}


@pytest.mark.sample("Dense", "Embed.attend", "setup")
@pytest.mark.parametrize("name", MODELS)
def test_every_matmul_is_quantized_and_every_parameter_there(name):
    module, x, products = MODELS[name]
    wrapped = wrap(module)
    assert type(wrapped).__name__ == type(module).__name__
    variables = shapes(module, x)
    same = jax.tree.map(jnp.shape, shapes(wrapped, x))
    assert same == jax.tree.map(jnp.shape, variables)
    rngs = {"dropout": KEY}
    options = {"rngs": rngs, "mutable": ["batch_stats"]} if name.startswith("norm") else {}

    def leaves(module):
        outs = lambda v, x: jax.tree.leaves(module.apply(v, x, **options))  # noqa: E731
        return lambda v, x: [out for out in outs(v, x) if isinstance(out, jax.Array)]

    assert count(leaves(module), variables, x) == (0, products)
    assert count(leaves(wrapped), variables, x) == (products, 0)
    found = report(wrapped, variables, x)
    assert sum(p.count for p in found.quantized if p.part == "forward") == products
    assert (found.left, found.unreached) == ((), ())
    # The gradient of an input that no parameter touches is not computed.
    parts = {"forward", "wgrad"} | ({"dgrad"} if products > 1 else set())
    assert parts <= {p.part for p in found.quantized}


@pytest.mark.quick
def test_init_is_bit_equal_and_the_original_is_untouched():
    module = Stack()
    wrapped = wrap(module, recipes.te_delayed_hybrid)
    ours, plain = jax.jit(wrapped.init)(KEY, X), jax.jit(module.init)(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, ours["params"], plain["params"])
    assert jax.tree.structure(ours["params"]) == jax.tree.structure(plain["params"])
    assert set(ours) == {"params", "qtoolkit"}
    assert count(module.apply, plain, X) == (0, 3)


def test_equal_wraps_are_equal_and_share_a_trace():
    first, second = wrap(Setup()), wrap(Setup(), Recipe())
    assert first == second
    assert hash(first) == hash(second)
    assert type(first) is type(second)
    assert first != wrap(Setup(), Recipe("mxfp8"))
    assert wrap(wrap(Setup(), Recipe("mxfp8"))) == first  # the last recipe counts
    traces = []

    def apply(module, variables, x):
        traces.append(1)
        return module.apply(variables, x)

    jitted = jax.jit(apply, static_argnums=0)
    variables = shapes(Setup(), X)
    jitted(first, variables, X)
    jitted(second, variables, X)
    assert len(traces) == 1


METHODS = {
    "name": {"method": "encode"},
    "private name": {"method": "_hidden"},
    "of the class": {"method": Setup.encode},
    "of an object": {"method": Setup().encode},
    "lambda": {"method": lambda module, x: module.first(x)},
}


@pytest.mark.parametrize("how", METHODS)
def test_methods(how):
    wrapped = wrap(Setup(), recipes.te_delayed_hybrid)
    variables = shapes(wrapped, X, **METHODS[how])
    assert list(states_of(variables)) == ["first"]
    assert count(lambda v: wrapped.apply(v, X, **METHODS[how]), variables) == (1, 0)


def test_bind_and_functions_of_a_bound_module():
    wrapped = wrap(Setup())
    variables = shapes(wrapped, X)
    assert count(lambda v: wrapped.bind(v).encode(X), variables) == (1, 0)
    assert count(nn.apply(lambda module, x: module(x), wrapped), variables, X) == (2, 0)


@pytest.mark.quick
def test_names_collections_and_random_numbers_stay_as_they_are():
    module, wide = Normed(), wrap(Normed(), WIDE)
    variables = jax.jit(module.init)({"params": KEY, "dropout": KEY}, X)

    def run(module):
        written = ["batch_stats", "intermediates"]
        rngs = {"dropout": KEY}
        return module.apply(variables, X, rngs=rngs, mutable=written, capture_intermediates=True)

    expected, got = jax.jit(lambda: (run(module), run(wide)))()
    assert jax.tree.structure(expected) == jax.tree.structure(got)
    # The same numbers; XLA may fuse the two programs in other ways.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), expected, got)


def test_what_is_no_array_comes_back_as_it_is():
    wrapped = wrap(Raw())
    variables = shapes(Raw(), X)
    _, rest = wrapped.apply(variables, X, note=["a", "b"])
    assert rest == {"note": ["a", "b"], "nothing": None}


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        inner = Setup(parent=None)
        return wrap(inner, recipes.te_delayed_hybrid)(x) + nn.Dense(16)(x)


class OuterSetup(nn.Module):
    def setup(self):
        self.inner = wrap(Setup(), recipes.te_delayed_hybrid)

    def __call__(self, x):
        return self.inner(x)


def test_a_wrapped_module_inside_of_another():
    variables = shapes(Outer(), X)
    assert set(variables["params"]) == {"Setup_0", "Dense_0"}
    assert set(states_of(variables)) == {"Setup_0/first", "Setup_0/last"}
    assert count(Outer().apply, variables, X) == (2, 1)
    # Its own recipe stays where the model around it is wrapped by another.
    found = report(wrap(Outer(), Recipe("mxfp8")), variables, X)
    operands = {p.path: p.operands for p in found.quantized if p.part == "forward"}
    assert {path: "mxfp8" in label for path, label in operands.items()} == {
        "Dense_0": True,
        "Setup_0/first": False,
        "Setup_0/last": False,
    }
    assert set(states_of(shapes(OuterSetup(), X))) == {"inner/first", "inner/last"}


def test_inside_a_loop_of_the_users_with_an_axis_for_the_state():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return wrap(nn.Dense(16, parent=None), recipes.te_delayed_hybrid)(x), None

    class Loop(nn.Module):
        axes: tuple[str, ...]

        @nn.compact
        def __call__(self, x):
            axes = dict.fromkeys(self.axes, 0)
            looped = nn.scan(Body, variable_axes=axes, split_rngs={"params": True}, length=3)
            return looped(name="loop")(x, None)[0]

    kept = state_of(shapes(Loop(("params", "qtoolkit")), X), "loop/Dense_0")["kernel"]
    assert kept["history"].shape[:2] == (3, 3)
    assert "qtoolkit" not in shapes(Loop(("params",)), X)


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return JittedDense(16)(x)


JittedDense = nn.jit(nn.Dense)  # its traces outlive a call


def test_a_trace_of_nn_jit_is_not_used_for_another_recipe():
    module = Jitted()
    variables = jax.tree.map(jnp.ones_like, shapes(module, X))
    plain = module.apply(variables, X)
    for recipe in (Recipe(), recipes.te_delayed_hybrid):
        wrapped = wrap(module, recipe)
        assert np.abs(wrapped.apply(variables, X) - plain).max() > 1e-3
        np.testing.assert_array_equal(module.apply(variables, X), plain)


def test_a_bound_module_is_refused_with_what_to_write():
    """Oracle: the module that `unbind` gives, as the message says."""
    bound = nn.Dense(4).bind({"params": {}})
    refused(ValueError, r"^wrap: Dense is bound to variables.*bound\.unbind\(\)", wrap, bound)
    module, _ = bound.unbind()
    assert module == nn.Dense(4)
    assert wrap(module).features == 4


def test_decoding_with_a_cache():
    module = nn.MultiHeadAttention(4, decode=True)
    wrapped = wrap(module)
    variables = shapes(module, X)
    step = lambda v, x: wrapped.apply(v, x, mutable=["cache"])  # noqa: E731
    assert count(step, variables, X[:, :1]) == (6, 0)
    _, written = jax.eval_shape(step, variables, X[:, :1])
    assert jax.tree.map(jnp.shape, written["cache"]) == jax.tree.map(jnp.shape, variables["cache"])


def e4m3(x):
    """Rounded by one scale for the array: the oracle, by ml_dtypes."""
    scale = np.abs(x).max() / np.float32(448)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def test_weights_are_rounded_from_their_own_dtype():
    """Not from their bfloat16 copy, which would round them twice."""
    wrapped = wrap(nn.Dense(8, dtype=jnp.bfloat16, use_bias=False))
    kernel = jax.random.normal(KEY, (16, 8))
    got = wrapped.apply({"params": {"kernel": kernel}}, jnp.eye(16, dtype=jnp.bfloat16))
    expected = e4m3(np.asarray(kernel)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected.astype(np.float32))


A, B = Recipe(), Recipe("mxfp8")


@pytest.mark.sample("rules0-expected0")
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules({"^tied$": None}, A), {"blocks/Dense_0": "e4m3fn"}),
        (Rules({"Dense_0": B, nn.Dense: A}), {"blocks/Dense_0": "mxfp8", "tied": "e4m3fn"}),
        (Rules({Block: B}), {"blocks/Dense_0": "mxfp8"}),
        (Rules({nn.Module: None, "tied": A}), {}),
    ],
)
def test_rules(rules, expected):
    module = Stack(remat=True)
    variables = shapes(module, X)
    found = report(wrap(module, rules), variables, X)
    got = {p.path: p.operands for p in found.quantized if p.part == "forward"}
    assert got.keys() == expected.keys()
    assert all(label in got[path] for path, label in expected.items())
    assert all(product.reason.startswith("excluded by a rule") for product in found.left)
    assert {product.path for product in found.left} == {"blocks/Dense_0", "tied"} - set(expected)


class Hidden(nn.Module):
    """A product that no code of the module names: in a custom derivative."""

    @nn.compact
    def __call__(self, x):
        return own(nn.Dense(16)(x))


@jax.custom_jvp
def own(x):
    return x @ x.mT


own.defjvp(lambda primals, tangents: (own(*primals), own(*primals)))


def test_what_is_not_reached_is_reported():
    found = report(wrap(Hidden()), shapes(Hidden(), X), X)
    assert {(p.part, p.reason) for p in found.left} >= {
        ("forward", "inside of custom_jvp: call qtoolkit.dot_general there, with a recipe")
    }
    assert found.left[0].where.startswith("test_linen_wrap.py:")
    plain = report(Setup(), shapes(Setup(), X), X)
    assert (len(plain.quantized), len(plain.unexplained)) == (0, len(plain.left))


def test_strict():
    assert wrap(Stack(), strict=(X,)) == wrap(Stack())
    with refused(ValueError, r"^wrap: 3 matmuls of Hidden are not .*, first float32"):
        wrap(Hidden(), strict=(X,))
    with refused(ValueError, r"^wrap: no matmul of LayerNorm is quantized"):
        wrap(nn.LayerNorm(), strict=(X,))
    with refused(ValueError, r"^wrap: no matmul of Stack is quantized"):
        wrap(Stack(), Rules({"blocks": None, "tied": None}, A), strict=(X,))
    with refused(ValueError, r"^wrap: rule 'tide' matches nothing, .* is tied, blocks/"):
        wrap(Stack(), Rules({"tide": B}, A), strict=(X,))
    inner = wrap(nn.Dense(4), Rules({"haed": B}, A))
    with refused(ValueError, r"^wrap: rule haed matches no layer .* of Sequential"):
        wrap(nn.Sequential([inner]), A, strict=(X,))
    assert report(wrap(Stack(), Rules({"tide": B}, A)), shapes(Stack(), X), X).unreached == (
        "rule tide",
    )


class Optional(nn.Module):
    """Its second layer runs in a method of its own."""

    def setup(self):
        self.first, self.second, self.norm = nn.Dense(8), nn.Dense(8), nn.LayerNorm()

    def __call__(self, x):
        return self.norm(self.first(x))

    def both(self, x):
        return self.second(self(x))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"fisrt": B}, r"^wrap: rule 'fisrt' matches nothing, expected .* there is first"),
        ({"fisrt": None}, r"^wrap: rule 'fisrt' matches nothing, .* there is first, ''"),
        ({nn.Conv: B}, r"^wrap: rule Conv matches nothing"),
        ({nn.LayerNorm: B}, r"^wrap: rule LayerNorm matches norm, and LayerNorm has no matmul"),
        ({"^norm": B}, r"^wrap: rule '\^norm' matches norm, and LayerNorm has no matmul"),
        ({"second": B}, r"^wrap: rule 'second' matches nothing"),
    ],
)
@pytest.mark.parametrize("recipe", [A, qt.recipes.te_delayed_hybrid], ids=["current", "delayed"])
def test_init_and_apply_refuse_rules_that_match_nothing(rules, message, recipe):
    module = wrap(Optional(), Rules({key: r and recipe for key, r in rules.items()}, recipe))
    for init in (module.init, module.init_with_output):
        refused(ValueError, message, jax.eval_shape, init, KEY, X)
    variables = shapes(Optional(), X)
    for _ in range(2):
        refused(ValueError, message, jax.eval_shape, module.apply, variables, X)
    # Another method may not run every layer.
    jax.eval_shape(lambda key: module.init(key, X, method="both"), KEY)
    jax.eval_shape(lambda v: module.apply(v, X, method=lambda m, x: m.first(x)), variables)


def test_apply_takes_rules_for_layers_that_it_does_not_run():
    """They have parameters; their types are not known. A misspelt path is refused none the less."""
    variables = shapes(Optional(), X, method="both")
    for key in ("second", nn.Conv):
        jax.eval_shape(wrap(Optional(), Rules({key: B}, A)).apply, variables, X)
    with refused(ValueError, "rule 'secnod' matches nothing"):
        jax.eval_shape(wrap(Optional(), Rules({"secnod": B, nn.Conv: B}, A)).apply, variables, X)
    # Once every rule has matched, a call may run fewer layers.
    module = wrap(Optional(), Rules({"second": B}, A))
    jax.eval_shape(module.apply, variables, X)
    jax.eval_shape(module.apply, shapes(Optional(), X), X)


class Block8(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


JittedBlock = nn.jit(Block8)


class Compiled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return JittedBlock(name="block")(x)


def test_who_records_what_runs_sees_layers_under_jit_every_time():
    """Flax keeps the trace of such a class: in the second call its layers do not run again."""
    module = wrap(Compiled(), Rules({"block/Dense_0": A}, None))
    for _ in range(2):
        variables = jax.jit(module.init)(KEY, X)
        assert not report(module, variables, X).unreached
        wrap(Compiled(), Rules({"block/Dense_0": A}, None)).apply(variables, X)
        served, weights = qt.linen.quantize(Compiled(), variables, "int8", X)
        assert served.apply(weights, X).shape == (*X.shape[:-1], 8)


class Reader(nn.Module):
    @nn.compact
    def __call__(self, x, table):
        return (x @ table.T) @ self.param("own", nn.initializers.ones, (16, 8))


class Passing(nn.Module):
    """Its parameter is multiplied by another module."""

    @nn.compact
    def __call__(self, x):
        table = self.param("table", nn.initializers.normal(), (16, x.shape[-1]))
        return Reader(name="reader")(x, table.astype(jnp.bfloat16))


@pytest.mark.parametrize("rules", [{"table": None}, {"table": None, "reader": A}])
def test_a_rule_for_a_parameter_that_another_module_multiplies(rules):
    """Oracle: the report, and the module with the first matmul in high precision."""
    module = wrap(Passing(), Rules(rules, A))
    variables = module.init(KEY, X)
    by_kernel = [product.reason for product in report(module, variables, X).left]
    assert len(by_kernel) == 2  # forward, and by the table
    table, own = (variables["params"][k] for k in ("table", "reader"))
    hidden = X @ table.astype(jnp.bfloat16).T
    np.testing.assert_allclose(
        module.apply(variables, X),
        qt.einsum("bti,io->bto", hidden, own["own"], recipe=A),
        rtol=1e-6,
    )


class Repeated(nn.Module):
    kind: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        for name in ("first", "second"):
            x = self.kind(name=name)(x)
        return x


def test_equal_layers_under_jit_have_recipes_of_their_own():
    """They share the trace of the first one. Oracle: the same without `nn.jit`."""
    x = X[..., :8]
    variables = Repeated(Block8).init(KEY, x)
    rules = Rules({"second": None}, A)
    module = wrap(Repeated(nn.jit(Block8)), rules)
    module.init(KEY, x)  # takes a rule for a layer that it did not run
    np.testing.assert_array_equal(
        module.apply(variables, x), wrap(Repeated(Block8), rules).apply(variables, x)
    )
    all_ = wrap(Repeated(Block8), A).apply(variables, x)
    for rules in (Rules({".*": A}), Rules({"second": A}, A), Rules({nn.Dense: A})):
        for _ in range(2):
            got = wrap(Repeated(nn.jit(Block8)), rules).apply(variables, x)
            np.testing.assert_array_equal(got, all_)


@pytest.mark.sample("rules0")
@pytest.mark.parametrize("rules", [{"norm": None, nn.Dense: A}, {"": A}, {Optional: A}])
def test_init_takes_rules_that_match(rules):
    variables = wrap(Optional(), Rules(rules)).init(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, variables, Optional().init(KEY, X))


class Keywords(nn.Module):
    @nn.compact
    def __call__(self, *, batch, flag):
        y = nn.Dense(8)(batch["x"])
        return Hidden()(y) if flag else y


class Mapped(nn.Module):
    """A layer with the signs of its parameters. Flax runs it where "params" may be written or
    nothing, but not where only other collections may.
    """

    @nn.compact
    def __call__(self, x):
        def signs(variables):
            return jax.tree.map(jnp.sign, variables)

        return nn.map_variables(nn.Dense, "params", signs, init=True)(4)(x)


def test_map_variables_that_makes_its_parameters_is_reported():
    """Oracle: by hand, one matmul forward, and none backward: signs have no derivative."""
    module = wrap(Mapped(), Recipe(), strict=(X,))
    found = report(module, shapes(module, X), X)
    assert [(p.path, p.part) for p in found.quantized] == [("Map_variablesDense_0", "forward")]
    assert not found.left
    with pytest.raises(ScopeCollectionNotFound):  # Flax's own, if the caller asked for it
        report(module, shapes(module, X), X, mutable=["batch_stats"])


def test_strict_by_keywords():
    """A mapping names the inputs; one that is itself an input stands in a tuple."""
    wrap(Keywords(), strict={"batch": {"x": X}, "flag": False})
    with refused(ValueError, r"matmuls of Keywords are not quantized, and no rule excludes them"):
        wrap(Keywords(), strict={"batch": {"x": X}, "flag": True})

    class Batch(nn.Dense):
        def __call__(self, batch):
            return super().__call__(batch["x"])

    wrap(Batch(8), strict=({"x": X},))
    wrap(nn.Dense(8), strict=X)


class Unprepared(nn.Module):
    @nn.compact
    def __call__(self, x):
        return wrap(nn.Dense(16))(x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nnx.Linear(2, 2, rngs=nnx.Rngs(0)),), TypeError, r"type Linear.*use qtoolkit.nnx.wrap"),
        (({},), TypeError, r"wrap: module has type dict, expected an instance of flax.linen.Mod"),
        ((nn.Dense,), TypeError, r"wrap: module has type type, expected an instance"),
        ((Stack(), "e4m3fn"), TypeError, r"type str, .* write qtoolkit.Recipe\('e4m3fn'\)"),
        ((Stack(), qt.spec("mxfp8_e4m3")), TypeError, r"write qtoolkit.Recipe\('mxfp8_e4m3'\)"),
        (
            (Stack(), Rules({"tied": "mxfp8"})),
            TypeError,
            r"rule 'tied': wrap: .*write qtoolkit\.recipes\.mxfp8",
        ),
        ((Stack(), Rules({nnx.Linear: A})), TypeError, "rule Linear is a class of flax.nnx"),
    ],
)
def test_errors(arguments, error, message):
    refused(error, message, wrap, *arguments)


def test_errors_when_the_module_runs():
    with refused(ValueError, r"Dense 'Dense_0' is bound .* Dense\(..., parent=None\)"):
        shapes(Unprepared(), X)
    wrapped, variables = wrap(Setup()), shapes(Setup(), X)
    narrow = jax.tree.map(lambda x: x, variables)
    kernel = narrow["params"]["last"]["kernel"]
    narrow["params"]["last"]["kernel"] = kernel.astype(jnp.float8_e4m3fn)
    refused(TypeError, r"^wrap: last: kernel has dtype float8_e4m3fn", wrapped.apply, narrow, X)
    refused(TypeError, "report: module has type dict", report, {}, variables, X)
    jax.config.update("jax_enable_x64", True)
    try:
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), variables)
        refused(TypeError, r"^wrap: first: (bias|kernel) has dtype float64", wrapped.apply, wide, X)
        with refused(TypeError, r"^dot_general of first: .* has dtype float64"):
            wrapped.apply(variables, X.astype(jnp.float64))
    finally:
        jax.config.update("jax_enable_x64", False)


SURVIVAL = {
    "current": recipes.te_current,
    "delayed": recipes.te_delayed_hybrid,
    "token": recipes.token_scaled,
    "mxfp8": recipes.mxfp8,
    "nvfp4": recipes.nvfp4,
}


@pytest.mark.sample("current")
@pytest.mark.parametrize("name", SURVIVAL)
def test_gradients_under_jit_grad_scan_remat_and_vmap(name):
    """Near those of the plain module, whatever transforms it; blocks are traced alone."""
    module = Stack(remat=True, has_end=False)
    wrapped = wrap(module, SURVIVAL[name])
    params = jax.tree.map(lambda x: x + 0.2, shapes(module, X)["params"])

    def graded(module):
        def loss(params, x):
            return jnp.mean(module.apply({"params": params}, x) ** 2)

        return jax.vmap(jax.grad(loss), in_axes=(None, 0))

    if name not in ("current", "delayed"):
        # Ours of the backward pass are not yet jaxprs.
        assert count(graded(wrapped), params, X)[1] == 0 < count(graded(module), params, X)[1]
        return

    def gradients(module):
        return jax.tree.leaves(jax.jit(graded(module))(params, X))

    with warnings.catch_warnings():  # without the collection "qtoolkit" all scales are current
        warnings.simplefilter("ignore", RuntimeWarning)
        found = gradients(wrapped)
    for ours, plain in zip(found, gradients(module), strict=True):
        error = np.linalg.norm(ours - plain) / np.linalg.norm(plain)
        assert 1e-4 < error < 0.2


@pytest.mark.sample("emulated")
@pytest.mark.parametrize("recipe", [Recipe(), NATIVE], ids=["emulated", "native blocks"])
def test_a_train_state(recipe):
    wrapped = wrap(Setup(), recipe)
    variables = jax.jit(wrapped.init)(KEY, X)
    state = TrainState.create(apply_fn=wrapped.apply, params=variables["params"], tx=optax.sgd(0.1))

    @jax.jit
    def step(state):
        loss = lambda params: jnp.mean(state.apply_fn({"params": params}, X) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    state, _ = step(state)  # its count of steps was a Python number
    losses = []
    for _ in range(4):
        state, value = step(state)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    assert step._cache_size() == 2
    found = report(wrapped, variables, X)
    assert (found.left, sum(p.count for p in found.quantized)) == ((), 5)
    is_native = 'stablehlo.composite "xla.scaled_dot"' in step.lower(state).as_text()
    assert is_native == (recipe is NATIVE)


def test_spectral_norm_estimates_in_high_precision():
    """Its statistics are those of the module that is not wrapped; XLA may fuse them otherwise."""

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.SpectralNorm(nn.Dense(6))(x, update_stats=True)
            return x @ self.param("kernel", nn.initializers.normal(), (6, 5))

    x = jax.random.normal(jax.random.key(1), (3, 8))
    variables = Normed().init(jax.random.key(0), x)
    wrapped = qt.linen.wrap(Normed(), qt.Recipe("int4"))
    y, updates = wrapped.apply(variables, x, mutable="batch_stats")  # compiled
    plain, expected = jax.jit(lambda: Normed().apply(variables, x, mutable="batch_stats"))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
    assert not np.allclose(y, plain)
    report = qt.linen.report(wrapped, variables, x, mutable="batch_stats")
    assert {p.path for p in report.left} == {"SpectralNorm_0", "Dense_0"}  # the owner
    assert {p.path for p in report.quantized} == {"Dense_0", "(model)"}


class Parts(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = qt.linen.Fp8Dense(16, recipe=recipes.mxfp8, name="always")(x)
        x = nn.Dense(16, name="first")(x)
        return nn.Dense(16, name="last")(wrap(nn.Dense(16, parent=None), recipes.mxfp8)(x))


def test_parts_that_were_wrapped_by_themselves_keep_their_recipes():
    """Policies do not count them."""
    x = jnp.ones((4, 16))
    policy = qt.policies.first_last_high_precision(recipes.te_current, last=0)
    for recipe, kept in ((recipes.te_current, set()), (policy, {"first"})):
        module = wrap(wrap(Parts(), recipes.nvfp4), recipe, inputs=(x,))
        found = report(module, module.init(jax.random.key(0), x), x)
        forward = {p.path: p.operands for p in found.quantized if p.part == "forward"}
        by_part = {path for path, text in forward.items() if "mxfp8" in text}
        assert by_part == {"always", "Dense_0"}
        assert set(forward) - by_part == {"first", "last"} - kept
        assert {p.path for p in found.left} == kept
