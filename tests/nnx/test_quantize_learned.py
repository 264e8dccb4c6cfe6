"""From QAT to serving: kernels stored with the scales that they have learned.

Oracles: the trained model itself, whose forward product rounds by `lsq` in each call, bit for bit;
and codes that NumPy makes of a kernel and its scale.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refused import refused
from state_of import replace, state_of

import qtoolkit as qt
from qtoolkit.products import Learned, Operand, Recipe
from qtoolkit.scaling import QArray

LSQ = qt.recipes.int4_lsq
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32)

run = nnx.jit(lambda model, x: model(x))


class Small(nnx.Module):
    def __init__(self, seed=0, **options):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(32, 31, rngs=rngs, **options)  # of odd length, where codes pair up
        self.second = nnx.Linear(31, 16, rngs=rngs, **options)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def trained(model, recipe=LSQ, steps=3):
    """The model from wrap after some steps of QAT."""
    wrapped = qt.nnx.wrap(model, recipe)
    qt.nnx.start_scales(wrapped, X)
    optimizer = nnx.Optimizer(wrapped, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(X) - 1) ** 2))(model))

    for _ in range(steps):
        step(wrapped, optimizer)
    return wrapped


@pytest.fixture(scope="module")
def wrapped():
    return trained(Small())


def scales_of(layer):
    state = state_of(layer)["kernel"]
    return [state.get(f"{side}_scale") for side in ("lhs", "rhs")]


@pytest.mark.quick
def test_the_logits_are_those_of_the_trained_model(wrapped):
    served = qt.nnx.quantize(wrapped)
    np.testing.assert_array_equal(run(served, X), run(wrapped, X))
    np.testing.assert_array_equal(served(X), wrapped(X))
    again = qt.nnx.quantize(served, LSQ)
    np.testing.assert_array_equal(run(again, X), run(wrapped, X))
    assert scales_of(served.first)[0] is scales_of(wrapped.first)[0]  # of activations: shared
    assert scales_of(served.first)[1] is None  # of the kernel: beside its codes
    assert scales_of(wrapped.first)[1] is not None


@pytest.mark.quick
def test_codes_are_those_of_the_learned_scale(wrapped):
    """Oracle: the kernel divided and rounded by NumPy, two's complement, low nibble first."""
    array = qt.nnx.quantize(wrapped).first.kernel.get_value()
    scale = np.float32(scales_of(wrapped.first)[1][...])
    current = np.abs(wrapped.first.kernel[...]).max() / np.float32(7)
    assert abs(scale - current) > 0.1 * current  # the learned one is another
    q = np.clip(np.rint(np.asarray(wrapped.first.kernel[...]) / scale), -8, 7).astype(np.int64)
    nibbles = np.pad(q % 16, ((0, 0), (0, 1)))
    expected = (nibbles[:, ::2] + 16 * nibbles[:, 1::2]).astype(np.uint8)
    np.testing.assert_array_equal(array.codes, expected)
    assert array.codes.shape == (32, 16)
    np.testing.assert_array_equal(array.scale, [[scale]])
    np.testing.assert_array_equal(array.dequantize(), np.float32(q) * scale)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"param_dtype": jnp.bfloat16}, {"dtype": jnp.bfloat16}])
def test_half_precision(options):
    """LSQ rounds its numbers to the kernel's dtype, and so do the codes."""
    model = trained(Small(**options), steps=1)
    x = X.astype(jnp.bfloat16)
    np.testing.assert_array_equal(run(qt.nnx.quantize(model), x), run(model, x))


PLUS = Operand("uint8", scaling=Learned(offset=True))
OTHERS = [
    Recipe(("int8", Operand("e4m3fn", scaling=Learned())), gradient=None),
    Recipe((None, Operand("e4m3fn", scaling=Learned())), gradient=None),
    Recipe((PLUS, Operand("int2", scaling=Learned())), gradient=None),
    qt.Rules({"first": qt.recipes.weight_only_e4m3}, default=LSQ),
]


@pytest.mark.quick
@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", OTHERS, ids=range(len(OTHERS)))
def test_formats_activations_and_rules(recipe):
    model = trained(Small(), recipe, steps=1)
    served = qt.nnx.quantize(model)
    assert isinstance(served.second.kernel.get_value(), QArray)
    np.testing.assert_array_equal(run(served, X), run(model, X))


@pytest.mark.quick
def test_a_scale_that_training_made_negative():
    """LSQ counts it as the least one, and so do codes."""
    model = trained(nnx.Linear(32, 8, rngs=nnx.Rngs(0)), steps=0)
    scales_of(model)[1][...] = jnp.float32(-0.5)
    served = qt.nnx.quantize(model)
    assert served.kernel.get_value().scale == np.float32(2.0**-126)
    np.testing.assert_array_equal(run(served, X), run(model, X))


def test_a_stack_has_a_scale_for_each_layer():
    stack = nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs))(nnx.Rngs(0).split(3))
    wrapped = qt.nnx.wrap(stack, LSQ)
    for scale, start in zip(scales_of(wrapped), (0.3, 0.05), strict=True):
        scale[...] = start * jnp.arange(1.0, 4.0)
    call = nnx.jit(nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None)))
    served = qt.nnx.quantize(wrapped)
    np.testing.assert_array_equal(call(served, X), call(wrapped, X))
    expected = np.float32(0.05) * np.arange(1, 4, dtype=np.float32)
    np.testing.assert_array_equal(served.kernel.get_value().scale.reshape(-1), expected)


@pytest.mark.quick
def test_layers_share_codes_if_they_share_kernel_and_scale():
    model = Small()
    model.second = nnx.Linear(32, 31, rngs=nnx.Rngs(1))
    model.second.kernel = model.first.kernel
    wrapped = qt.nnx.wrap(model, LSQ)
    for layer, scale in ((wrapped.first, 0.05), (wrapped.second, 0.1)):
        scales_of(layer)[0][...], scales_of(layer)[1][...] = jnp.float32(0.5), jnp.float32(scale)
    served = qt.nnx.quantize(wrapped)
    for layer in ("first", "second"):
        got = run(getattr(served, layer), X)
        np.testing.assert_array_equal(got, run(getattr(wrapped, layer), X))
    replace(wrapped, scales_of(wrapped.second)[1], scales_of(wrapped.first)[1])
    served = qt.nnx.quantize(wrapped)
    assert served.first.kernel is served.second.kernel


def test_saved_and_loaded_into_a_model_that_was_never_trained(wrapped, tmp_path):
    served = qt.nnx.quantize(wrapped)
    qt.checkpoints.save(tmp_path / "served.safetensors", nnx.state(served))
    abstract = nnx.eval_shape(lambda: qt.nnx.quantize(qt.nnx.wrap(Small(seed=1), LSQ)))
    graph, shapes = nnx.split(abstract)
    state = qt.checkpoints.load(tmp_path / "served.safetensors", like=shapes)
    np.testing.assert_array_equal(run(nnx.merge(graph, state), X), run(wrapped, X))
    batch = jax.export.symbolic_shape("b, 32")
    exported = jax.export.export(jax.jit(lambda x: served(x)))(
        jax.ShapeDtypeStruct(batch, jnp.float32)
    )
    np.testing.assert_array_equal(exported.call(X), run(wrapped, X))


@pytest.mark.quick
def test_gradients_by_what_is_left(wrapped):
    """By inputs and scales of activations, those of the trained model."""

    def loss(model, x):
        return jnp.sum(jnp.sin(model(x)))

    served = qt.nnx.quantize(wrapped)
    by_input = [jax.jit(jax.grad(lambda x, m=m: loss(m, x)))(X) for m in (served, wrapped)]
    np.testing.assert_array_equal(*by_input)
    found = [
        nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, qt.nnx.LsqScale)))(m, X)
        for m in (served, wrapped)
    ]
    got, expected = (state_of(one, "first")["kernel"]["lhs_scale"] for one in found)
    np.testing.assert_allclose(got[...], expected[...], rtol=1e-6)


@pytest.mark.quick
def test_what_cannot_be_stored():
    fresh = qt.nnx.wrap(Small(), LSQ)
    with refused(ValueError, r"first: Linear.kernel has a learned scale that has not"):
        qt.nnx.quantize(fresh)
    with refused(ValueError, r"has not been started.* write start_scales, train"):
        qt.nnx.quantize(Small(), LSQ)
    learned = Operand("int4", scaling=Learned(offset=True))
    plus = trained(Small(), Recipe((None, learned), gradient=None), steps=0)
    with refused(ValueError, r"learned offset \(LSQ\+\).* zero points of stored codes"):
        qt.nnx.quantize(plus)
