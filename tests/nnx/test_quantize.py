"""`nnx.quantize`. Oracle: the wrapped model, which rounds the same kernels in each call."""

import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refused import refused
from state_of import shapes_of, states_of

import qtoolkit
import qtoolkit as qt
from qtoolkit.products import Delayed, Learned, Operand, Recipe
from qtoolkit.scaling import QArray

WEIGHTS = qt.recipes.weight_only_e4m3


class Model(nnx.Module):
    """A layer of each kind."""

    def __init__(self, rngs):
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.einsum = nnx.Einsum("btd,dhk->bthk", (32, 2, 16), (2, 16), rngs=rngs)
        self.general = nnx.LinearGeneral((2, 16), (32,), axis=(-2, -1), rngs=rngs)
        self.conv = nnx.Conv(32, 32, (3,), rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(self.general(self.einsum(nnx.relu(self.first(x))))))


class Small(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 32)), jnp.float32)


def stored_bytes(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.fixture(scope="module")
def model():
    return Model(nnx.Rngs(0))


@pytest.mark.sample("te_current")
@pytest.mark.parametrize("name", ["te_current", "weight_only_e4m3", "w4a16"])
def test_it_computes_what_the_wrapped_model_does(model, name):
    recipe = getattr(qt.recipes, name)
    served, wrapped = qt.nnx.quantize(model, recipe), qt.nnx.wrap(model, recipe)
    run = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(run(served, X), run(wrapped, X))
    for layer in (served.first, served.einsum, served.general, served.conv):
        assert isinstance(layer.kernel.get_value(), QArray)
    assert isinstance(model.first.kernel.get_value(), jax.Array)  # not changed
    assert served.norm.scale is model.norm.scale


def test_axes_of_length_1_have_no_blocks():
    rngs, fmt = nnx.Rngs(0), "int4_group32"
    general = nnx.LinearGeneral((32, 1), (16, 1), axis=(-2, -1), rngs=rngs)
    einsum = nnx.Einsum("btdk,dko->bto", (32, 1, 16), rngs=rngs)
    for layer in (general, einsum):
        served, x = qt.nnx.quantize(layer, fmt), X[..., None]
        assert served.kernel.get_value().scale.size == 16
        wrapped = qt.nnx.wrap(layer, Recipe((None, fmt), gradient=None))
        np.testing.assert_array_equal(served(x), wrapped(x))


@pytest.mark.quick
def test_bytes_shrink():
    model = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
    for recipe, least in ((WEIGHTS, 3.9), (qt.recipes.w4a16, 7.4)):
        assert stored_bytes(model) > least * stored_bytes(qt.nnx.quantize(model, recipe))


@pytest.mark.quick
def test_split_merge_and_export():
    model = Small(nnx.Rngs(0))
    recipe = Recipe("e4m3fn", arithmetic="native")
    served = qt.nnx.quantize(model, recipe)
    graph, state = nnx.split(served)
    y = nnx.merge(graph, state)(X)
    np.testing.assert_array_equal(y, qt.nnx.wrap(model, recipe)(X))
    batch = jax.export.symbolic_shape("b, t, 32")
    call = jax.jit(lambda x: served(x))
    exported = jax.export.export(call)(jax.ShapeDtypeStruct(batch, jnp.float32))
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(X), jax.jit(lambda x: served(x))(X))
    assert again.call(X[:1, :3]).shape == (1, 3, 32)
    lines = [t for t in exported.mlir_module().splitlines() if "stablehlo.dot_general" in t]
    assert lines
    assert all("tensor<32x32xf8E4M3FN>) -> " in line for line in lines)


def test_orbax(tmp_path):
    import orbax.checkpoint as checkpoint  # an extra of the tests

    served = qt.nnx.quantize(Small(nnx.Rngs(0)), WEIGHTS)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(served))
    abstract = nnx.eval_shape(lambda: qt.nnx.quantize(Small(nnx.Rngs(1)), WEIGHTS))
    graph, shapes = nnx.split(abstract)
    with checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", shapes)
    np.testing.assert_array_equal(nnx.merge(graph, restored)(X), served(X))


def test_rules_leave_layers_and_formats_stand_for_kernels():
    model = Small(nnx.Rngs(0))
    served = qt.nnx.quantize(model, qt.Rules({"layers/0": None}, default=WEIGHTS))
    assert served.layers[0].kernel is model.layers[0].kernel
    assert served.layers[1].kernel.get_value().spec.element == qt.format("e4m3fn")
    packed = qt.nnx.quantize(model, "int4_group32").layers[0].kernel.get_value()
    assert (packed.packed_size, packed.codes.shape, packed.scale.shape) == (32, (32, 16), (1, 32))
    wide = Recipe((None, "int4_group32"), gradient=None)
    got = qt.nnx.quantize(model, "int4_group32")(X)
    np.testing.assert_array_equal(got, qt.nnx.wrap(model, wide)(X))


def test_layers_that_share_a_kernel_still_do():
    model = Small(nnx.Rngs(0))
    model.layers[1].kernel = model.layers[0].kernel
    served = qt.nnx.quantize(model, WEIGHTS)
    assert served.layers[0].kernel is served.layers[1].kernel


@pytest.mark.exhaustive
def test_a_stack_of_layers():
    make = nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs))
    model = make(nnx.Rngs(0).split(3))
    run = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
    served = qt.nnx.quantize(model, qt.recipes.te_current)
    assert served.kernel.get_value().scale.shape == (3, 1, 1)
    np.testing.assert_array_equal(run(served, X), run(qt.nnx.wrap(model, qt.recipes.te_current), X))


@pytest.mark.exhaustive
def test_a_trained_model_keeps_its_delayed_scales():
    operand = Operand("e4m3fn", scaling=Delayed(history=4))
    wrapped = qt.nnx.wrap(nnx.Linear(32, 8, rngs=nnx.Rngs(0)), Recipe(operand, "e5m2"))
    step = qt.nnx.value_and_grad(lambda model: jnp.sum(model(3 * X)))
    step(wrapped)
    wrapped.kernel[...] = 0.9 * wrapped.kernel[...]  # its amax is another one than the history's
    served = qt.nnx.quantize(wrapped)
    np.testing.assert_array_equal(served(X), wrapped(X))
    current = qt.nnx.quantize(nnx.clone(wrapped), qt.recipes.te_current)
    assert served.kernel.get_value().scale != current.kernel.get_value().scale


KERNELS = {  # recipes of kernels alone: nobody reads their state once these are stored
    "history": Operand("e4m3fn", scaling=Delayed()),
    "key": Operand("e4m3fn", qt.casts.Projection("stochastic")),
    "scale": Operand("int4", scaling=Learned()),
}


@pytest.mark.sample("history")
@pytest.mark.parametrize("name", KERNELS)
def test_state_of_kernels_goes_when_they_are_stored(name):
    """Oracle: the wrapped model, with all of its state."""
    operand = KERNELS[name]
    wrapped = qt.nnx.wrap(Small(nnx.Rngs(0)), Recipe((None, operand), gradient=None))
    if operand.is_learned:
        qt.nnx.start_scales(wrapped, X)
    qt.nnx.value_and_grad(lambda model: jnp.sum(model(X)))(wrapped)
    served = qt.nnx.quantize(wrapped)
    np.testing.assert_array_equal(served(X), wrapped(X))
    assert (len(states_of(wrapped)), len(states_of(served))) == (2, 0)
    again = qt.nnx.quantize(served, Recipe((None, operand), gradient=None))
    assert not states_of(again)
    both = qt.nnx.wrap(Small(nnx.Rngs(0)), Recipe((Operand("int8", scaling=Learned()), operand)))
    qt.nnx.start_scales(both, X)
    kept = shapes_of(qt.nnx.quantize(both))
    assert kept == {f"layers/{i}": {"kernel": {"lhs_scale"}} for i in range(2)}


@pytest.mark.quick
def test_no_derivative_by_a_stored_kernel():
    served = qt.nnx.quantize(Small(nnx.Rngs(0)), WEIGHTS)

    def loss(model):
        return jnp.sum(model(X))

    with refused(TypeError, r"2 of the parameters are codes .* first layers/0/kernel"):
        qt.nnx.value_and_grad(loss)(served)
    with pytest.raises(TypeError, match="uint8"):  # JAX's own message
        nnx.grad(loss)(served)
    biases = nnx.All(nnx.Param, lambda path, _: path[-1] == "bias")
    _, grads = qt.nnx.value_and_grad(loss, wrt=biases)(served)
    assert len(jax.tree.leaves(grads)) == 2


def test_the_report_shows_stored_kernels():
    found = qt.nnx.report(qt.nnx.quantize(Small(nnx.Rngs(0)), WEIGHTS), X)
    forward = [product.path for product in found.quantized if product.part == "forward"]
    assert sorted(forward) == ["layers/0", "layers/1"]
    stored = (
        f"{qt.nnx.quantize(Small(nnx.Rngs(0)), WEIGHTS).layers[0].kernel[...].spec.name}, stored"
    )
    assert {p.operands.split(" x ")[1] for p in found.quantized if p.part != "wgrad"} == {stored}


def test_numerics_names_stored_kernels():
    """A convolution's and an attention's too; what beside them is rounded is measured."""
    model = qt.nnx.quantize(Small(nnx.Rngs(0)), qt.recipes.te_current)
    found = qt.nnx.numerics(model, X, lambda m, x: jnp.sum(m(x) ** 2))
    stored = [row for row in found.rows if row.operand == "rhs"]
    assert [row.path for row in stored] == ["layers/0", "layers/1"]
    for row in stored:
        assert row.fmt.endswith(", stored")
        assert row.limits is None
        assert row.cells()[5:] == ("-",) * 6
    assert all(float(row.tally.uses) for row in found.rows if row.operand == "lhs")
    assert "stored" in str(qt.products.Numerics.from_json(found.to_json()))


@pytest.mark.quick
def test_a_layer_without_a_format_was_reached_if_it_ran():
    """A recipe for weights alone leaves both products of attention wide."""
    attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0))
    found = qt.nnx.report(qt.nnx.wrap(attention, WEIGHTS), X)
    assert {p.path for p in found.left if p.part == "forward"} == {"(model)"}
    assert found.unreached == ()


@pytest.mark.quick
def test_the_report_shows_learned_operands_in_every_product():
    model = qt.nnx.wrap(nnx.Linear(32, 8, rngs=nnx.Rngs(0)), qt.recipes.int4_lsq)
    qt.nnx.start_scales(model, X)
    learned = "int4 by tensor, learned"
    scaled = lambda model, x: model(x * model.bias[...].sum())  # noqa: E731  (so dgrad is computed)
    shown = {p.part: p.operands for p in qt.nnx.report(scaled, model, X).quantized}
    assert shown == {
        "forward": f"{learned} x {learned}",
        "dgrad": f"unquantized x {learned}",
        "wgrad": f"{learned} x unquantized",
    }


class Own(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones((32, 32)))

    def __call__(self, x):
        return x @ self.kernel[...]


class Around(nnx.Module):
    """Computes a product by itself, and calls a layer whose kernel is stored."""

    def __init__(self, rngs):
        self.inside = nnx.Linear(32, 32, rngs=rngs)
        self.kernel = nnx.Param(jnp.eye(32))

    def __call__(self, x):
        return self.inside(x) @ self.kernel[...]


def test_a_layer_inside_of_a_module_with_products_of_its_own():
    model = Around(nnx.Rngs(0))
    served = qt.nnx.quantize(model, WEIGHTS)
    assert isinstance(served.inside.kernel.get_value(), QArray)
    np.testing.assert_array_equal(served(X), qt.nnx.wrap(model, WEIGHTS)(X))


@pytest.mark.quick
def test_messages():
    model = Small(nnx.Rngs(0))
    served = qt.nnx.quantize(model, WEIGHTS)
    with refused(TypeError, r"is a QArray.*write qtoolkit\.nnx\.quantize\(model, rec"):
        qt.nnx.wrap(served, WEIGHTS)
    with refused(ValueError, r"layers/0: Linear.kernel is a QArray, and a rule excl"):
        qt.nnx.quantize(served, qt.Rules({"layers/0": None}, default=WEIGHTS))
    with refused(ValueError, "quantize: recipe is 'wrapped' for Small, which is no"):
        qt.nnx.quantize(model)
    refused(TypeError, "quantize: recipe has type int", qt.nnx.quantize, model, 8)
    refused(TypeError, r"quantize: model has type int", qt.nnx.quantize, 8, WEIGHTS)
    with refused(ValueError, "Small has no kernel to store: the recipe leaves them"):
        qt.nnx.quantize(model, Recipe(("e4m3fn", None)))
    with refused(ValueError, r"Own has no kernel to store.*\(\(the model itself\)\)"):
        qt.nnx.quantize(Own(nnx.Rngs(0)), WEIGHTS)
    model.layers[1].bias[...] = jnp.nan  # a bias is not stored
    qt.nnx.quantize(model, WEIGHTS)
    model.layers[1].kernel[...] = jnp.full((32, 32), jnp.nan)
    with refused(ValueError, r"quantize: layers/1: Linear.kernel holds 1024 infinities"):
        qt.nnx.quantize(model, WEIGHTS)


def example(function):
    """The first block of code in a docstring."""
    lines = inspect.getdoc(function).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("    "))
    end = next(i for i in range(begin, len(lines)) if not lines[i].startswith("    "))
    assert end - begin <= 8
    return textwrap.dedent("\n".join(lines[begin:end]))


def test_the_example():
    names = {"qtoolkit": qtoolkit, "nnx": nnx, "model": Small(nnx.Rngs(0)), "x": X}
    exec(example(qt.nnx.quantize), names)
    np.testing.assert_array_equal(names["y"].shape, X.shape)


@pytest.mark.quick
def test_a_frozen_model_is_served_with_its_scales():
    wrapped = qt.nnx.wrap(Small(nnx.Rngs(0)), Recipe(qt.BlockFormat.tensor("int8"), gradient=None))
    frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, [2 * X]))
    served = qt.nnx.quantize(frozen)
    call = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(call(served, X), call(frozen, X))


def test_a_kernel_that_is_stored_in_another_format_is_refused():
    """It stayed as it was, and the recipe of the layer said another format."""
    model = nnx.Linear(32, 4, rngs=nnx.Rngs(0))
    served = qt.nnx.quantize(model, "e4m3fn")
    with refused(ValueError, r"kernel is stored in e4m3fn already, .* one in int8, as"):
        qt.nnx.quantize(served, "int8")
    again = qt.nnx.quantize(served, qt.recipes.weight_only_e4m3)
    np.testing.assert_array_equal(again.kernel.get_value().codes, served.kernel.get_value().codes)
