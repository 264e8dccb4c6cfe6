"""One tensor scale for q, k and v. Oracle: NVFP4 in NumPy, after compressed-tensors' formulas."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx

import qtoolkit as qt

WEIGHTS = qt.spec("nvfp4").with_(tensor_scale_divides=True)
RECIPE = qt.policies.join(qt.Recipe((None, WEIGHTS), gradient=None), ["q", "k", "v"])
NAMES = {f"{x}.kernel": (f"attn.{x}_proj.weight", (1, 0)) for x in "qkv"} | {
    "out.kernel": ("attn.o_proj.weight", (1, 0))
}
# The amax of each kernel: the one of k is that of all three.
SCALES = {"q": 0.3, "k": 7.0, "v": 0.01, "out": 2.0}


class Attention(nnx.Module):
    def __init__(self, rngs):
        for name in SCALES:
            setattr(self, name, nnx.Linear(32, 16, use_bias=False, rngs=rngs))
        for name, largest in SCALES.items():
            kernel = getattr(self, name).kernel
            kernel[...] = kernel[...] * largest / jnp.abs(kernel[...]).max()

    def __call__(self, x):
        return [layer(x) for layer in (self.q, self.k, self.v, self.out)]


class LinenAttention(linen.Module):
    @linen.compact
    def __call__(self, x):
        return [linen.Dense(16, use_bias=False, name=name)(x) for name in SCALES]


def nvfp4(kernel, amax):
    """(codes, scales, tensor scale, numbers) of a kernel [inputs, outputs], transposed."""
    second = np.float32(6 * 448) * (np.float32(1) / np.float32(amax))
    w = np.asarray(kernel).T.reshape(16, 2, 16)
    scale = np.abs(w).max(-1, keepdims=True) / np.float32(6) * second
    scale = np.minimum(scale, 448).astype(ml_dtypes.float8_e4m3fn)
    q = (w / (scale.astype(np.float32) / second)).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    numbers = q.astype(np.float32) * (scale.astype(np.float32) / second)
    return q.view(np.uint8).reshape(16, 32), scale[..., 0], second, numbers.reshape(16, 32)


def expected(kernels):
    largest = {name: np.abs(np.asarray(kernel)).max() for name, kernel in kernels.items()}
    joined = max(largest[name] for name in "qkv")
    pairs = {name: joined if name in "qkv" else largest[name] for name in kernels}
    return {name: nvfp4(kernels[name], amax) for name, amax in pairs.items()}


def kernels_of(model):
    return {name: getattr(model, name).kernel[...] for name in SCALES}


def assert_numbers(outs, oracle):
    for name, y in zip(SCALES, outs, strict=True):
        np.testing.assert_allclose(np.asarray(y).T, oracle[name][3], rtol=2e-7, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_writes_what_training_multiplies(dtype):
    model = Attention(nnx.Rngs(0))
    for name in SCALES:
        kernel = getattr(model, name).kernel
        kernel.set_value(kernel[...].astype(dtype).astype("float32"))
    wrapped = qt.nnx.wrap(model, RECIPE)
    oracle = expected(kernels_of(wrapped))
    for call in (wrapped, lambda x: nnx.jit(lambda model, x: model(x))(wrapped, x)):
        assert_numbers(call(jnp.eye(32)), oracle)  # the kernels as they are multiplied
    served = qt.nnx.quantize(wrapped)
    assert_numbers(served(jnp.eye(32)), oracle)
    for tree in (nnx.state(wrapped, nnx.Param), nnx.state(served, nnx.Param)):
        options = {"format": "nvfp4", "names": NAMES, "layout": "compressed-tensors"}
        sent = dict(qt.checkpoints.export(tree, **options))
        for name, (target, _) in NAMES.items():
            codes, scales, second, _ = oracle[name.removesuffix(".kernel")]
            packed = codes[:, ::2] | codes[:, 1::2] << 4
            np.testing.assert_array_equal(sent[f"{target}_packed"], packed)
            np.testing.assert_array_equal(
                np.asarray(sent[f"{target}_scale"]).view(np.uint8), scales.view(np.uint8)
            )
            assert sent[f"{target}_global_scale"] == second


def test_a_step_of_training_and_its_gradients():
    """Straight through: dx = ct w^T with the rounded kernel, dw = x^T ct."""
    wrapped = qt.nnx.wrap(Attention(nnx.Rngs(0)), RECIPE)
    oracle = expected(kernels_of(wrapped))
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 32)))

    def loss(model, x):
        return sum(jnp.sum(y) for y in model(x))

    of_model, of_x = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(wrapped, x)
    total = sum(numbers.sum(0) for *_, numbers in oracle.values())
    np.testing.assert_allclose(of_x, np.tile(total, (4, 1)), rtol=1e-5)
    np.testing.assert_allclose(of_model.q.kernel[...], np.tile(x.sum(0)[:, None], 16), rtol=1e-5)


def test_linen_and_a_stack_of_layers():
    module = qt.linen.wrap(LinenAttention(), RECIPE)
    x = jnp.eye(32)
    model = Attention(nnx.Rngs(0))
    params = {name: {"kernel": kernel} for name, kernel in kernels_of(model).items()}
    variables = {"params": params}
    assert_numbers(module.apply(variables, x), expected(kernels_of(model)))
    served, stored = qt.linen.quantize(LinenAttention(), variables, RECIPE, inputs=(x,))
    assert_numbers(served.apply(stored, x), expected(kernels_of(model)))

    class Stack(nnx.Module):
        def __init__(self):
            make = nnx.vmap(Attention, in_axes=0)
            self.layers = make(nnx.Rngs(0).split(3))
            for name in SCALES:  # each layer has its own
                kernel = getattr(self.layers, name).kernel
                kernel[...] = kernel[...] * jnp.asarray([1.0, 3.0, 0.2])[:, None, None]

        def __call__(self, x):
            run = nnx.scan(lambda x, layer: (x, layer(x)), in_axes=(nnx.Carry, 0))
            return run(x, self.layers)[1]

    stack = Stack()
    for call in (qt.nnx.wrap(stack, RECIPE), qt.nnx.quantize(stack, RECIPE)):
        outs = call(x)
        for i in range(3):
            kernels = {name: kernel[i] for name, kernel in kernels_of(stack.layers).items()}
            assert_numbers([y[i] for y in outs], expected(kernels))


def test_what_cannot_be_joined():
    wrapped = qt.nnx.wrap(Attention(nnx.Rngs(0)), RECIPE)
    with pytest.raises(ValueError, match=r"q/kernel: .* joined with that of k/kernel, which this"):
        wrapped.q(jnp.eye(32))
    np.testing.assert_array_equal(wrapped.out(jnp.eye(32)), wrapped(jnp.eye(32))[3])
    with pytest.raises(ValueError, match=r"joined=.* expected a format with a tensor scale"):
        qt.Operand("e4m3fn", joined=(("q", "k"),))
    with pytest.raises(TypeError, match=r"join: group 'qk', expected names"):
        qt.policies.join(RECIPE, "qk")
    with pytest.raises(ValueError, match=r"join: group .*expected single names"):
        qt.policies.join(RECIPE, ["attn.q", "attn.k"])
    batches = [(jnp.eye(32),)]
    with pytest.raises(ValueError, match="a kernel that is not joined"):
        qt.nnx.quantize(Attention(nnx.Rngs(0)), RECIPE, batches, method="gptq")
    assert qt.recipes.from_json(qt.recipes.to_json(RECIPE)) == RECIPE
    assert "one scale for q, k, v" in str(qt.nnx.report(wrapped, jnp.eye(32)))


@pytest.mark.parametrize("package", [qt.nnx, qt.linen], ids=["nnx", "linen"])
def test_the_report_names_rules_and_joins_that_decide_nothing(package):
    """Neither raises: a rule may stand behind another one, a model may have one of two groups."""
    joined = qt.policies.join(RECIPE, ["q", "k", "v"], ["gate", "up"])
    kind = nnx.Linear if package is qt.nnx else linen.Dense
    rules = qt.Rules({"^q$": joined, "q|^k": None, "out": None, "out/kernel": joined, kind: joined})
    x = jnp.ones((1, 32))
    if package is qt.nnx:
        found = qt.nnx.report(qt.nnx.wrap(Attention(nnx.Rngs(0)), rules, strict=(x,)), x)
    else:
        module = qt.linen.wrap(LinenAttention(), rules, strict=(x,))
        found = qt.linen.report(module, LinenAttention().init(jax.random.key(0), x), x)
    assert {p.path for p in found.left if p.part == "forward"} == {"k", "out"}
    assert found.idle == ("rule out/kernel", "join of gate, up")
    assert str(found).splitlines()[-2] == "decided nothing: rule out/kernel, join of gate, up"
    assert found.unreached == ()
