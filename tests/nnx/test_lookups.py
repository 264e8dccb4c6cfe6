"""Tables of embeddings in few bits: rows that are looked up, by a formula of NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qtoolkit as qt

INT4 = qt.Recipe((None, "int4_group32"), gradient=None, lookups=True)
BY_ROW = qt.BlockFormat(element="int8", block=(None,))
INT8 = qt.Recipe((None, BY_ROW), gradient=None, lookups=True)
TOKENS = jnp.asarray([[3, 0, 10], [10, 7, 3]])


class Tied(nnx.Module):
    def __init__(self, rows=11, width=64, dtype=None):
        self.embed = nnx.Embed(rows, width, dtype=dtype, rngs=nnx.Rngs(0))
        self.mlp = nnx.Linear(width, width, dtype=dtype, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        return self.embed.attend(self.mlp(self.embed(tokens)))


class Own(nnx.Module):
    def __init__(self, rows=11, width=64):
        self.table = nnx.Param(jax.random.normal(jax.random.key(0), (rows, width)))
        self.head = nnx.Linear(width, 5, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        return self.head(self.table[tokens])


def by_numpy(table, largest, length):
    """The table in symmetric integers with a scale for each `length` numbers of a row."""
    x = np.asarray(table, np.float32).reshape(len(table), -1, length)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(largest)
    q = np.clip(np.rint(x / scale), -largest, largest)
    return (q * scale).reshape(np.shape(table))


ORACLES = {"int4": (INT4, 7, 32), "int8": (INT8, 127, 64)}


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("make", [Tied, Own])
def test_rows_are_those_of_the_rounded_table(name, make):
    recipe, largest, length = ORACLES[name]
    model = make()
    rules = qt.Rules({"embed|^table$": recipe}, default=qt.Recipe((None, None), None))
    served = qt.nnx.quantize(model, rules, inputs=(TOKENS,))
    wrapped = qt.nnx.wrap(model, rules)
    parameter = model.embed.embedding if make is Tied else model.table
    own = by_numpy(parameter[...], largest, length)
    plain = nnx.clone(model)
    (plain.embed.embedding if make is Tied else plain.table)[...] = own
    for tested in (served, wrapped):
        y = nnx.jit(lambda model, x: model(x))(tested, TOKENS)
        np.testing.assert_allclose(y, plain(TOKENS), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(served(TOKENS), wrapped(TOKENS))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_embedding_alone_looks_up_codes(dtype):
    layer = nnx.Embed(11, 64, dtype=dtype, rngs=nnx.Rngs(0))
    served, wrapped = qt.nnx.quantize(layer, INT4), qt.nnx.wrap(layer, INT4)
    assert served.embedding.get_value().nbytes < layer.embedding[...].nbytes / 6
    rows = by_numpy(layer.embedding[...], 7, 32)[np.asarray(TOKENS)]
    for tested in (served, wrapped):
        y = tested(TOKENS)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, jnp.asarray(rows).astype(dtype))


def test_a_token_that_is_no_row_is_nan_as_in_flax():
    layer = nnx.Embed(11, 64, rngs=nnx.Rngs(0))
    tokens = jnp.asarray([-1, 11, 4])
    served = qt.nnx.quantize(layer, INT8)(tokens)
    np.testing.assert_array_equal(np.isnan(served), np.isnan(layer(tokens)))
    np.testing.assert_allclose(served[0], layer(tokens)[0], atol=0.02)


def test_without_lookups_rows_stay_as_they_are():
    model = Tied()
    recipe = qt.Recipe((None, "int4_group32"), gradient=None)
    np.testing.assert_array_equal(qt.nnx.wrap(model, recipe).embed(TOKENS), model.embed(TOKENS))
    served = qt.nnx.quantize(model, recipe)
    np.testing.assert_array_equal(served.embed.embedding[...], model.embed.embedding[...])


FORMATS = [qt.BlockFormat.tensor("e4m3fn"), "nvfp4", "mxfp8", "int8"]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_served_rows_equal_wrapped_ones_whatever_the_blocks(fmt):
    recipe = qt.Recipe((None, fmt), gradient=None, lookups=True)
    model = Tied()
    served, wrapped = qt.nnx.quantize(model, recipe), qt.nnx.wrap(model, recipe)
    np.testing.assert_array_equal(served.embed(TOKENS), wrapped.embed(TOKENS))
    np.testing.assert_array_equal(served(TOKENS), wrapped(TOKENS))


@pytest.mark.parametrize("fmt", ["int4_group32", qt.BlockFormat.tensor("e4m3fn")], ids=str)
def test_the_gradient_passes_straight_through(fmt):
    recipe = qt.Recipe((None, fmt), gradient=None, lookups=True)
    layer = nnx.Embed(11, 64, rngs=nnx.Rngs(0))
    wrapped = qt.nnx.wrap(layer, recipe)
    weights = jax.random.normal(jax.random.key(1), (2, 3, 64))
    grads = nnx.grad(lambda layer: jnp.sum(layer(TOKENS) * weights))(wrapped)
    expected = np.zeros((11, 64), np.float32)
    np.add.at(expected, np.asarray(TOKENS), np.asarray(weights))
    np.testing.assert_allclose(grads["embedding"].get_value(), expected, rtol=1e-6)


class Rows(nnx.Module):
    """As JAX asks for it on meshes with Explicit axes."""

    def __init__(self, rows, width):
        self.embedding = nnx.Param(jax.random.normal(jax.random.key(0), (rows, width)))

    def __call__(self, tokens):
        mesh = jax.sharding.get_abstract_mesh()
        is_explicit = not mesh.empty and AxisType.Explicit in mesh.axis_types
        rows = self.embedding[...].at[tokens]
        return rows.get(out_sharding=P()) if is_explicit else rows.get()


@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", [*ORACLES, "one scale"])
def test_tables_that_are_sharded(name, axis, kind):
    """By rows, or by columns, so that a block lies on several devices. Oracle: one device."""
    one_scale = qt.Recipe((None, "e4m3fn"), None, lookups=True)
    recipe, makers = ORACLES.get(name, (one_scale,))[0], (qt.nnx.wrap, qt.nnx.quantize)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    layer, inputs = Rows(16, 64), {"inputs": (TOKENS,)}
    run = nnx.jit(lambda model, x: model(x))
    expected = [make(layer, recipe, **inputs)(TOKENS) for make in makers]
    assert np.abs(np.asarray(expected[0] - layer(TOKENS))).max() > 0.001
    with jax.set_mesh(mesh):
        spec = P(*("d" if i == axis else None for i in range(2)))
        cut = nnx.clone(layer)
        cut.embedding.set_value(jax.device_put(layer.embedding[...], NamedSharding(mesh, spec)))
        if (name, axis, kind) == ("int4", 1, AxisType.Explicit):  # 8 columns on each device
            with pytest.raises(ValueError, match="expected whole blocks of 32 in each"):
                qt.nnx.quantize(cut, recipe, **inputs)
            return
        models = [make(cut, recipe, **inputs) for make in makers]
        for model, rows in zip(models, expected, strict=True):
            np.testing.assert_array_equal(model(TOKENS), rows)
            np.testing.assert_array_equal(run(model, TOKENS), rows)
        grads = nnx.grad(lambda model: jnp.sum(model(TOKENS)))(models[0])
        counts = np.bincount(np.asarray(TOKENS).ravel(), minlength=16).astype(np.float32)
        np.testing.assert_array_equal(grads["embedding"][...], np.tile(counts[:, None], 64))


def test_a_look_up_reads_rows_and_not_the_table():
    rows, width = 248_000, 64
    layer = nnx.Embed(rows, width, embedding_init=jax.nn.initializers.ones, rngs=nnx.Rngs(0))
    for tested in (qt.nnx.quantize(layer, INT4), qt.nnx.wrap(layer, INT4)):
        graph, state = nnx.split(tested)
        run = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x))
        hlo = run.lower(state, TOKENS).compile().as_text()
        of_table = re.findall(rf"= (\w+)\[{rows},\d+\]\S* (\w+)", hlo)
        assert of_table  # the parameters
        assert {operation for _, operation in of_table} <= {"parameter"}


def test_lookups_in_loops_and_in_a_stack_of_layers():
    class Step(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jax.random.normal(jax.random.key(0), (3, 11, 64)))
            self.kernel = nnx.Param(jax.random.normal(jax.random.key(1), (64, 64)))

        def __call__(self, tokens):
            def step(x, table):
                return x @ self.kernel[...] + table[tokens], None

            return jax.lax.scan(step, jnp.zeros((2, 3, 64)), self.table[...])[0]

    model = Step()
    rules = qt.Rules({"table": INT4}, default=qt.Recipe((None, None), None))
    wrapped, plain = qt.nnx.wrap(model, rules), nnx.clone(model)
    plain.table[...] = np.stack([by_numpy(x, 7, 32) for x in model.table[...]])
    expected = plain(TOKENS)
    np.testing.assert_allclose(wrapped(TOKENS), expected, rtol=1e-5, atol=1e-4)
    served = qt.nnx.quantize(model, rules, inputs=(TOKENS,))
    assert isinstance(served.table.get_value(), qt.QArray)
    np.testing.assert_allclose(served(TOKENS), expected, rtol=1e-5, atol=1e-4)


def test_a_method_rounds_tables_to_nearest():
    model = Tied(width=32)
    rules = qt.Rules({"embed": INT4}, default=qt.Recipe((None, "int4_group32"), gradient=None))
    served = qt.nnx.quantize(model, rules, [(TOKENS,)] * 8, method="awq")
    table = by_numpy(model.embed.embedding[...], 7, 32)
    np.testing.assert_array_equal(served.embed.embedding.get_value().dequantize(), table)


def test_the_report_lists_lookups():
    wrapped = qt.nnx.wrap(Tied(), INT4)
    assert "looked up: embed/embedding: int4_group32" in str(qt.nnx.report(wrapped, TOKENS))


def test_a_recipe_with_lookups_has_no_state_of_its_kernel():
    operand = qt.Operand("e4m3fn", scaling=qt.products.Delayed())
    with pytest.raises(ValueError, match="look-ups keep no state"):
        qt.Recipe((None, operand), gradient=None, lookups=True)
    with pytest.raises(ValueError, match=r"axes are named.*with_\(axes=None\)"):
        qt.Recipe((None, qt.BlockFormat.token("int8")), gradient=None, lookups=True)
    with pytest.raises(TypeError, match="lookups='yes'"):
        qt.Recipe(lookups="yes")
    assert qt.recipes.from_json(qt.recipes.to_json(INT4)) == INT4
