"""`linen.quantize` and attention's cache. Oracle: the wrapped module, which rounds in each call."""

import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from refused import refused
from state_of import shapes_of

import qtoolkit
import qtoolkit as qt
from qtoolkit.products import Delayed, Learned, Operand, Recipe
from qtoolkit.scaling import QArray

WEIGHTS = qt.recipes.weight_only_e4m3
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32)


class Own(nn.Module):
    """Kernels in a product of one's own, transposed, and used by something else."""

    @nn.compact
    def __call__(self, x):
        first, second, third = (
            self.param(name, nn.initializers.lecun_normal(), (16, 16)) for name in "abc"
        )
        x = jnp.einsum("bi,io->bo", nn.Dense(16)(x), first)
        return (x @ second.T) @ third + third[0]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(16, dtype=jnp.bfloat16, name="dense")(x).astype(jnp.float32), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = stack()(Own()(x), None)
        return nn.Dense(8, name="head")(x)


@pytest.fixture(scope="module")
def variables():
    return jax.jit(Model().init)(jax.random.key(0), X)


def kernels(params):
    """The paths of stored kernels."""
    found, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, QArray))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in found
        if isinstance(leaf, QArray)
    }


@pytest.mark.exhaustive
def test_it_computes_what_the_wrapped_module_does(variables):
    served, weights = qt.linen.quantize(Model(), variables, WEIGHTS, X)
    wrapped = qt.linen.wrap(Model(), WEIGHTS)
    got = jax.jit(served.apply)(weights, X)
    np.testing.assert_array_equal(got, jax.jit(wrapped.apply)(variables, X))
    found = kernels(weights["params"])
    stack = "ScanBlock_0/dense/kernel"
    assert set(found) == {"Own_0/Dense_0/kernel", "Own_0/a", "Own_0/b", stack, "head/kernel"}
    assert found[stack].scale.shape == (2, 1, 16)
    assert found["Own_0/b"].scale.shape == (16, 1)  # it is its transpose that is multiplied
    assert weights["params"]["Own_0"]["c"] is variables["params"]["Own_0"]["c"]
    assert isinstance(variables["params"]["head"]["kernel"], jax.Array)
    again, same = qt.linen.quantize(Model(), weights, WEIGHTS, X)
    np.testing.assert_array_equal(jax.jit(again.apply)(same, X), got)


def test_rules_report_export_and_gradients(variables):
    rules = qt.Rules({"head": Recipe("e4m3fn", arithmetic="native")})
    served, weights = qt.linen.quantize(Model(), variables, rules, X)
    assert set(kernels(weights["params"])) == {"head/kernel"}
    assert {p.path for p in qt.linen.report(served, weights, X).quantized} == {"head"}
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16"), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: served.apply(weights, x)))(shape)
    assert "tensor<16x8xf8E4M3FN>) -> tensor<?x8xf32>" in exported.mlir_module()
    expected = qt.linen.wrap(Model(), rules).apply(variables, X)
    again = jax.export.deserialize(exported.serialize()).call(X)
    # Two layers of bfloat16, whose sums another program may round otherwise, by 2**-9 of them.
    np.testing.assert_allclose(again, expected, rtol=0, atol=2.0**-6 * np.max(np.abs(expected)))
    with refused(TypeError, r"1 of the parameters are codes of .* first params/head/kernel"):
        qt.linen.value_and_grad(lambda v: jnp.sum(served.apply(v, X)))(weights)
    by_input = jax.grad(lambda x: jnp.sum(served.apply(weights, x)))(X)
    assert np.all(np.isfinite(by_input))


@pytest.mark.exhaustive
def test_the_decoding_cache_rewound_gives_the_same_bits():
    plain = nn.MultiHeadDotProductAttention(2, qkv_features=16, decode=True)
    wide = Recipe((None, None), gradient=None)
    module = qt.linen.wrap(plain, wide, kv_cache="e4m3fn")
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((3, 4, 16)))
    start = variables["cache"]
    assert start["cached_key"].codes.shape == (3, 4, 2, 8)
    assert start["cached_key"].scale.shape == (3, 4, 2, 1)
    step = jax.jit(lambda cache, x: module.apply({**variables, "cache": cache}, x, mutable="cache"))
    tokens = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3, 1, 16)), jnp.float32)
    cache, outs = start, []
    for x in tokens:
        y, written = step(cache, x)
        cache, outs = written["cache"], [*outs, y]
    full = cache
    cache = {**cache, "cache_index": jnp.array(1)}
    for x, expected in zip(tokens[1:], outs[1:], strict=True):
        y, written = step(cache, x)
        cache = written["cache"]
        np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(cache["cached_value"].codes, full["cached_value"].codes)
    # Rounded once: what quantize makes of the keys of the wide cache.
    wide_cache = plain.init(jax.random.key(0), jnp.zeros((3, 4, 16)))["cache"]
    for x in tokens:
        _, written = plain.apply({**variables, "cache": wide_cache}, x, mutable="cache")
        wide_cache = written["cache"]
    expected = qt.quantize(wide_cache["cached_key"], qt.BlockFormat.token("e4m3fn"))
    np.testing.assert_array_equal(full["cached_key"].codes, expected.codes)


@pytest.mark.quick
def test_messages():
    dense = nn.Dense(8)
    variables = jax.jit(dense.init)(jax.random.key(0), X)
    refused(TypeError, "quantize: variables has type int", qt.linen.quantize, dense, 8, WEIGHTS, X)
    refused(TypeError, "quantize: recipe has type int", qt.linen.quantize, dense, variables, 8, X)
    with refused(ValueError, "Dense has no kernel to store with these inputs"):
        qt.linen.quantize(dense, variables, Recipe(("e4m3fn", None)), X)
    refused(ValueError, "kv_cache=nvfp4", qt.linen.wrap, dense, kv_cache="nvfp4")
    broken = {"params": {**variables["params"], "kernel": jnp.full((16, 8), jnp.inf)}}
    with refused(ValueError, "quantize: kernel holds 128 infinities and NaNs"):
        qt.linen.quantize(dense, broken, WEIGHTS, X)


class Tied(nn.Module):
    """A table that is looked up and multiplied, Flax's own and one's own; a layer between."""

    def setup(self):
        self.embed = nn.Embed(12, 16)
        self.table = self.param("table", nn.initializers.normal(), (12, 16))
        self.middle = nn.Dense(16)

    def looked_up(self, tokens):
        return self.table[tokens]

    def logits(self, x):
        return x @ self.table.T

    def __call__(self, tokens):
        x = self.middle(self.embed(tokens) + self.looked_up(tokens))
        return self.embed.attend(x) + self.logits(x)


@pytest.mark.quick
def test_a_tied_table_stays_wide():
    tokens = jnp.arange(6).reshape(2, 3)
    variables = jax.jit(Tied().init)(jax.random.key(0), tokens)
    served, weights = qt.linen.quantize(Tied(), variables, WEIGHTS, tokens)
    assert set(kernels(weights["params"])) == {"middle/kernel"}
    wrapped = qt.linen.wrap(Tied(), WEIGHTS)
    np.testing.assert_array_equal(
        jax.jit(served.apply)(weights, tokens), jax.jit(wrapped.apply)(variables, tokens)
    )
    x = jnp.ones((2, 16))  # by its product alone it is a kernel
    _, weights = qt.linen.quantize(Tied(), variables, WEIGHTS, x, method="logits")
    assert set(kernels(weights["params"])) == {"table"}


class Calling(nn.Module):
    """A method without a product that calls one with it."""

    def setup(self):
        self.kernel = self.param("kernel", nn.initializers.lecun_normal(), (16, 8))

    def project(self, x):
        return x @ self.kernel

    def __call__(self, x):
        return nn.relu(self.project(x))


@pytest.mark.quick
def test_a_kernel_of_a_method_that_another_one_calls():
    variables = jax.jit(Calling().init)(jax.random.key(0), X)
    served, weights = qt.linen.quantize(Calling(), variables, WEIGHTS, X)
    assert set(kernels(weights["params"])) == {"kernel"}
    wrapped = qt.linen.wrap(Calling(), WEIGHTS)
    np.testing.assert_array_equal(served.apply(weights, X), wrapped.apply(variables, X))


def test_the_example():
    lines = inspect.getdoc(qt.linen.quantize).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("    "))
    end = next(i for i in range(begin, len(lines)) if not lines[i].startswith("    "))
    model = nn.Dense(8)
    names = {"qtoolkit": qtoolkit, "jax": jax, "model": model, "batch": X}
    names["variables"] = model.init(jax.random.key(0), X)
    exec(textwrap.dedent("\n".join(lines[begin:end])), names)
    assert names["y"].shape == (4, 8)


@pytest.mark.quick
def test_freeze_keeps_the_cache():
    plain = nn.MultiHeadDotProductAttention(2, qkv_features=16, decode=True)
    module = qt.linen.wrap(plain, Recipe((None, None), gradient=None), kv_cache="e4m3fn")
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((3, 4, 16)))
    frozen, _ = qt.linen.freeze(module, variables, qt.products.Calibration((), ()))
    cache = jax.jit(frozen.init)(jax.random.key(0), jnp.zeros((3, 4, 16)))["cache"]
    assert isinstance(cache["cached_key"], QArray)


def test_an_operand_that_calibration_never_saw_gives_nan():
    dense, x = nn.Dense(8), jnp.ones((2, 16))
    both, one = (qt.linen.wrap(dense, Recipe(pair, None)) for pair in ("e4m3fn", ("e4m3fn", None)))
    variables = jax.jit(dense.init)(jax.random.key(0), x)
    frozen, variables = qt.linen.freeze(both, variables, qt.linen.calibrate(one, variables, [x]))
    assert np.isnan(frozen.apply(variables, x)).all()


class Layers(nn.Module):
    """Two dense layers with biases, in one of Flax's transformations."""

    transform: str = ""

    @nn.compact
    def __call__(self, x):
        if self.transform == "scan":
            stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True})
            return stack()(x, jnp.zeros((2, 1)))[0]
        kind = nn.remat(Layer) if self.transform == "remat" else Layer
        for number in range(2):
            x, _ = kind(name=f"layer{number}")(x, None)
        return x


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        bias = self.param("shift", nn.initializers.normal(), (32,))
        return nn.Dense(32, bias_init=nn.initializers.normal())(x) + bias, None


@pytest.mark.parametrize("transform", ["", "remat", "scan"])
@pytest.mark.parametrize("method", ["gptq", "smoothquant", "hadamard"])
def test_codes_are_multiplied_as_they_are_stored(method, transform):
    """Rounding GPTQ's kernel or a rotated one anew gives another. Oracle: NumPy."""
    module, x = Layers(transform), jax.random.normal(jax.random.key(1), (64, 32))
    variables, fmt = module.init(jax.random.key(0), x), "int4_group32"
    served, weights = qt.linen.quantize(module, variables, fmt, x, [x], algorithm=method)
    params = weights["params"]
    if transform == "scan":
        (layers,) = params.values()
        parts, structure = jax.tree.flatten(layers, is_leaf=lambda leaf: isinstance(leaf, QArray))
        params = {i: structure.unflatten([part[i] for part in parts]) for i in range(2)}
    expected = np.asarray(x, np.float64)
    for layer in params.values():
        (dense,) = (part for name, part in layer.items() if name != "shift")
        kernel = dense["kernel"]
        assert isinstance(kernel, QArray)
        expected = expected @ np.asarray(kernel.dequantize(), np.float64)
        expected = expected + np.asarray(dense["bias"]) + np.asarray(layer["shift"])
    got = served.apply(weights, x)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


class Partitioned(nn.Module):
    is_boxed: bool

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        init = nn.with_partitioning(init, (None, "model")) if self.is_boxed else init
        up, down = self.param("up", init, (16, 8)), self.param("down", init, (8, 16))
        return (x @ up) @ down


@pytest.mark.parametrize("algorithm", ["nearest", "gptq"])
def test_kernels_in_boxes_of_flax(algorithm):
    """Rules name them, `quantize` stores them in their boxes. Oracle: the module without boxes."""
    key, x = jax.random.key(0), jax.random.normal(jax.random.key(1), (32, 16))
    results = []
    for is_boxed in (True, False):
        module = Partitioned(is_boxed)
        variables = module.init(key, x)
        rules = qt.Rules({"up": None}, qt.Recipe())
        wrapped = qt.linen.wrap(module, rules)
        calibration = None if algorithm == "nearest" else [x]
        served, weights = qt.linen.quantize(
            module, variables, "int8", x, calibration, algorithm=algorithm
        )
        results.append((wrapped.apply(variables, x), served.apply(weights, x)))
        specs = nn.get_partition_spec(weights["params"])
        expected = jax.P(None, "model") if is_boxed else jax.P()
        assert jax.tree.leaves(specs["up"])[0] == expected
    jax.tree.map(np.testing.assert_array_equal, *results)
    unwrapped = Partitioned(False).apply(variables, x)
    np.testing.assert_allclose(results[0][1], unwrapped, atol=0.05 * np.abs(unwrapped).max())


class Transposed(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (24, 32))
        return x @ kernel.T


@pytest.mark.parametrize("algorithm", ["gptq", "smoothquant", "hadamard"])
def test_a_transposed_kernel_keeps_what_a_method_made_of_it(algorithm):
    """Packed codes cannot be transposed: its numbers were rounded a second time, to nearest."""
    mixing = jax.random.normal(jax.random.key(1), (32, 32)) * 0.3 + jnp.eye(32)
    x = jax.random.normal(jax.random.key(0), (64, 32)) @ mixing
    variables = Transposed().init(jax.random.key(2), x)
    served, weights = qt.linen.quantize(
        Transposed(), variables, "int4_group32", x, [x], algorithm=algorithm
    )
    kernel = np.asarray(weights["params"]["kernel"].dequantize(), np.float64)
    np.testing.assert_allclose(
        served.apply(weights, x), np.asarray(x, np.float64) @ kernel.T, rtol=1e-4, atol=1e-5
    )


DELAYED, LSQ = qt.recipes.te_delayed_hybrid, qt.recipes.int4_lsq
STOCHASTIC = Operand("e4m3fn", qt.casts.Projection("stochastic"))
KERNELS = {  # recipes of kernels alone: nobody reads their state once these are stored
    "history": Operand("e4m3fn", scaling=Delayed()),
    "key": STOCHASTIC,
    "scale": Operand("int4", scaling=Learned()),
}


class Three(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in "abc":
            x = nn.tanh(nn.Dense(16, name=name)(x))
        return x


def trained(recipe):
    """A wrapped module, and its variables after a step."""
    module = qt.linen.wrap(Three(), recipe)
    variables = jax.jit(module.init)(jax.random.key(0), X)
    if "qtoolkit_scales" in variables:
        variables = qt.linen.start_scales(module, variables, X)
    step = qt.linen.value_and_grad(lambda v: jnp.sum(module.apply(v, X)))
    return module, {**variables, "qtoolkit": step(variables)[2]}


def shapes(variables):
    return {path: kernels["kernel"] for path, kernels in shapes_of(variables).items()}


@pytest.mark.parametrize("name", KERNELS)
def test_state_of_kernels_goes_when_they_are_stored(name):
    """Oracle: the wrapped module with all of its state."""
    module, variables = trained(Recipe((None, KERNELS[name]), gradient=None))
    assert len(shapes(variables)) == 3
    served, weights = qt.linen.quantize(module, variables, "wrapped", X)
    assert set(weights) == {"params"}
    np.testing.assert_array_equal(served.apply(weights, X), module.apply(variables, X))


def test_each_layer_keeps_what_its_recipe_reads():
    """It kept all histories or none, and then refused those of layers with another recipe.

    Oracle: the module wrapped by the same rules, with the state of layer "a" alone.
    """
    _, variables = trained(DELAYED)
    longer = Recipe(Operand("e4m3fn", scaling=Delayed(history=4)), gradient=None)
    for other in (WEIGHTS, None, longer):
        rules = qt.Rules({"a": DELAYED, "b": other}, default=WEIGHTS)
        served, weights = qt.linen.quantize(Three(), variables, rules, X)
        assert shapes(weights) == {"a": {"history", "bad"}}
        state = {"self.a": variables["qtoolkit"]["self.a"]}
        wrapped = qt.linen.wrap(Three(), rules)
        expected = wrapped.apply({"params": variables["params"], "qtoolkit": state}, X)
        np.testing.assert_array_equal(served.apply(weights, X), expected)


def test_learned_scales_of_inputs_stay_and_those_of_other_recipes_go():
    module, variables = trained(LSQ)
    served, weights = qt.linen.quantize(module, variables, "wrapped", X)
    assert shapes(weights) == {name: {"lhs_scale"} for name in "abc"}
    np.testing.assert_array_equal(served.apply(weights, X), module.apply(variables, X))
    rules = qt.Rules({"a": LSQ}, default=WEIGHTS)
    assert shapes(qt.linen.quantize(Three(), variables, rules, X)[1]) == {"a": {"lhs_scale"}}
    assert set(qt.linen.quantize(Three(), variables, WEIGHTS, X)[1]) == {"params"}


def test_histories_of_another_recipe_go_with_it():
    x = jnp.ones((4, 32))
    wrapped = qt.linen.wrap(Transposed(), qt.recipes.te_delayed_hybrid)
    variables = wrapped.init(jax.random.key(0), x)
    served, weights = qt.linen.quantize(wrapped, variables, qt.recipes.weight_only_e4m3, x)
    assert set(weights) == {"params"}
    assert served.apply(weights, x).shape == (4, 24)
    kept = qt.linen.quantize(wrapped, variables, "wrapped", x)[1]
    assert set(kept) == {"params", "qtoolkit"}


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.jit(nn.Dense)(16)(nn.remat(nn.Dense)(16)(x))
        self.sow("intermediates", "x", x)
        return x


def test_a_call_that_may_change_parameters_keeps_their_codes():
    variables = Sowing().init(jax.random.key(0), X)
    served, weights = qt.linen.quantize(Sowing(), variables, WEIGHTS, X)
    y, new = served.apply(weights, X, mutable=True)
    again, _ = served.apply({"params": new["params"]}, X, mutable=True)
    np.testing.assert_array_equal(again, y)
    assert len(kernels(new["params"])) == 2
    jax.tree.map(np.testing.assert_array_equal, new["params"], weights["params"])
