"""GPTQ, AWQ and SmoothQuant of models. Oracles: NumPy's sums over inputs that the plain model gives
layer by layer, `scaling.gptq` of these, and the plain model itself.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from refused import refused

import qtoolkit as qt
from qtoolkit.scaling import Hessian, gptq

WIDTH = 32


def batches(count=3, rows=(4, 16)):
    spread = np.exp(np.random.default_rng(0).normal(size=WIDTH)).astype(np.float32)
    return [
        jnp.asarray(np.random.default_rng(i).normal(size=(*rows, WIDTH)) * spread, jnp.float32)
        for i in range(count)
    ]


class Two(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(WIDTH, 48, rngs=rngs)
        self.second = nnx.Linear(48, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def hessian_of(x):
    return Hessian.of(x.shape[-1]).observe(x)


@pytest.mark.parametrize("sequential", [False, True])
def test_each_kernel_is_what_gptq_makes_of_its_inputs(sequential):
    model, seen = Two(), batches()
    served = qt.nnx.quantize(model, "int4_group32", seen, method="gptq", sequential=sequential)
    x = jnp.concatenate([batch.reshape(-1, WIDTH) for batch in seen])
    first = gptq(model.first.kernel[...], "int4_group32", hessian_of(x), packed=True)
    kernel = first.dequantize() if sequential else model.first.kernel[...]
    hidden = jnp.tanh(x @ kernel + model.first.bias[...])
    second = gptq(model.second.kernel[...], "int4_group32", hessian_of(hidden), packed=True)
    for layer, expected in ((served.first, first), (served.second, second)):
        got = layer.kernel.get_value()
        assert (got.spec, got.lengths, got.packed_size) == (
            expected.spec, expected.lengths, expected.packed_size,
        )  # fmt: skip
        # Sums over inputs in another order may round a weight near a tie otherwise.
        same = got.unpack().codes == expected.unpack().codes
        assert float(same.mean()) > 0.995
    y = model(seen[0])
    nearest = qt.nnx.quantize(model, "int4_group32")
    errors = [float(jnp.square(m(seen[0]) - y).mean()) for m in (served, nearest)]
    assert errors[0] < 0.8 * errors[1]
    wrapped = qt.nnx.wrap(model, qt.Recipe((None, "int4_group32"), gradient=None))
    assert jax.tree.structure(nnx.state(served)) == jax.tree.structure(nnx.state(nearest))
    assert wrapped.first.kernel is model.first.kernel  # the model is as it was


def test_statistics_are_collected_batch_by_batch_and_merged():
    model, seen = Two(), batches()
    parts = [qt.nnx.calibrate(model, [batch], "hessian") for batch in seen]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert [name for name, _ in merged.keys] == ["first/kernel", "second/kernel"]
    x = np.concatenate([np.asarray(batch).reshape(-1, WIDTH) for batch in seen]).astype(np.float64)
    hidden = np.tanh(x @ np.asarray(model.first.kernel[...], np.float64))
    for hessian, inputs in zip(merged.hessians, (x, hidden), strict=True):
        np.testing.assert_allclose(hessian.total, inputs.T @ inputs, rtol=1e-4, atol=1e-3)
    assert "first/kernel: Hessian(32 channels, float32: 192 rows, 0 bad batches)" in str(merged)
    served = [
        qt.nnx.quantize(model, "int4_group32", calibration, method="gptq")
        for calibration in (merged, seen)
    ]
    codes = [jax.tree.leaves(nnx.state(m)) for m in served]
    assert all(np.array_equal(a, b) for a, b in zip(*codes, strict=True))


class Stacked(nnx.Module):
    """Layers under `scan`, each behind `remat` and `jit`."""

    def __init__(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def made(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers = made(nnx.Rngs(0).split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return nnx.remat(nnx.jit(lambda layer, x: jnp.tanh(layer(x))))(layer, x)

        return run(x, self.layers)


def test_kernels_of_a_stack_have_inputs_of_their_own():
    model, seen = Stacked(), batches()
    served = qt.nnx.quantize(model, "int4_group32", seen, method="gptq")
    got = served.layers.kernel.get_value()
    x = jnp.concatenate([batch.reshape(-1, WIDTH) for batch in seen])
    for i in range(3):
        kernel, bias = model.layers.kernel[i], model.layers.bias[i]
        expected = gptq(kernel, "int4_group32", hessian_of(x), packed=True)
        assert float((got[i].unpack().codes == expected.unpack().codes).mean()) > 0.995
        x = jnp.tanh(x @ kernel + bias)
    run = nnx.jit(lambda model, x: model(x))
    y = model(seen[0])
    errors = [
        float(jnp.square(run(m, seen[0]) - y).mean())
        for m in (served, qt.nnx.quantize(model, "int4_group32"))
    ]
    assert errors[0] < errors[1]


class Parallel(nnx.Module):
    """Layers under `vmap`, which all read the same inputs, or each its own."""

    def __init__(self, is_shared):
        @nnx.vmap(in_axes=0, out_axes=0)
        def made(rngs):
            return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        self.layers, self.axis = made(nnx.Rngs(0).split(3)), None if is_shared else 0

    def __call__(self, x):
        run = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, self.axis), out_axes=0)
        return run(self.layers, x)


@pytest.mark.sample(
    *("int8-gptq-False", "nvfp4-gptq-True", "int4_group32-smoothquant-False"),
    *("int8-smoothquant-True", "nvfp4-hadamard+awq-False", "int4_group32-hadamard+awq-True"),
)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("method", ["gptq", "smoothquant", "hadamard+awq"])
@pytest.mark.parametrize("spec", ["int8", "nvfp4", "int4_group32"])
def test_kernels_that_are_mapped_over(spec, method, is_shared):
    """Scales and factors that all shared had no axis to map over: the served model raised."""
    model = Parallel(is_shared)
    seen = [x.reshape(-1, WIDTH) for x in batches()]
    seen = seen if is_shared else [jnp.stack([x, 2 * x, x + 1]) for x in seen]
    served = qt.nnx.quantize(model, spec, seen, method=method)
    kernels = np.asarray(served.layers.kernel.get_value().dequantize(), np.float64)
    y = np.asarray(seen[0], np.float64) @ kernels
    mine = nnx.jit(lambda model, x: model(x))(served, seen[0])
    np.testing.assert_allclose(mine, y, rtol=1e-3, atol=1e-4 * np.abs(y).max())
    wide = np.asarray(model(seen[0]))
    assert np.abs(y - wide).max() < {"int8": 0.03}.get(spec, 0.3) * np.abs(wide).max()


class ParallelStack(nnx.Module):
    """A stack under `scan` of layers under `vmap`."""

    def __init__(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        @nnx.vmap(in_axes=0, out_axes=0)
        def made(rngs):
            return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        self.layers = made(nnx.Rngs(0).split((2, 3)))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layers):
            return nnx.vmap(lambda layer, x: layer(x))(layers, x)

        return run(x, self.layers)


@pytest.mark.parametrize("method", ["gptq", "smoothquant"])
@pytest.mark.parametrize("spec", ["int8", "nvfp4"])
def test_a_stack_of_kernels_that_are_mapped_over(spec, method):
    model = ParallelStack()
    seen = [jnp.stack([x, 2 * x, x + 1]) for x in (x.reshape(-1, WIDTH) for x in batches())]
    served = qt.nnx.quantize(model, spec, seen, method=method)
    kernels = np.asarray(served.layers.kernel.get_value().dequantize(), np.float64)
    y = np.asarray(seen[0], np.float64) @ kernels[0] @ kernels[1]
    mine = nnx.jit(lambda model, x: model(x))(served, seen[0])
    np.testing.assert_allclose(mine, y, rtol=1e-3, atol=1e-4 * np.abs(y).max())


def test_what_a_layer_and_a_sum_share_takes_no_factors():
    class Shared(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

        def __call__(self, x):
            y = self.norm(x)
            return self.layer(y) + y

    model = Shared()
    served = qt.nnx.quantize(model, "int4_group32", batches(), method="smoothquant")
    np.testing.assert_array_equal(served.norm.scale[...], model.norm.scale[...])
    kernel = served.layer.kernel.get_value()
    assert kernel.factors.shape == (WIDTH, 1)
    np.testing.assert_allclose(kernel.dequantize(), model.layer.kernel[...], atol=0.2)


@pytest.mark.parametrize("left", [[], [("first", None)], [("second", None)]])
def test_a_shared_kernel_is_quantized_by_the_method(left):
    class Sharing(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
            self.second.kernel = self.first.kernel

        def __call__(self, x):
            return self.first(x) + self.second(2 * x)

    model, seen = Sharing(), batches()
    recipe = qt.Recipe((None, "int4_group32"), gradient=None)
    rules = qt.Rules(left, default=recipe)
    served = qt.nnx.quantize(model, rules, seen, method="gptq")
    x = jnp.concatenate([batch.reshape(-1, WIDTH) for batch in seen])
    expected = gptq(model.first.kernel[...], "int4_group32", hessian_of(x).observe(2 * x))
    stored = [served.first, served.second]
    stored = [layer.kernel for layer, name in zip(stored, ("first", "second"), strict=True)
              if (name, None) not in left]  # fmt: skip
    for kernel in stored:
        assert float((kernel.get_value().unpack().codes == expected.codes).mean()) > 0.995
    other = qt.Recipe((None, "e4m3fn"), gradient=None)
    with refused(ValueError, r"second: Linear\.kernel is shared .* layer, first"):
        qt.nnx.quantize(model, qt.Rules([("first", other)], default=recipe), seen, method="gptq")


def test_a_convolution_sums_over_its_patches():
    model = nnx.Conv(3, 8, (3, 2), strides=(2, 1), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (8, 9, 7, 3)) + 1
    spec = qt.BlockFormat.channel("int4", axis=3)
    served = qt.nnx.quantize(model, spec, [x], method="gptq")
    found = qt.nnx.calibrate(model, [x], "hessian")
    (hessian,), kernel = found.hessians, np.asarray(model.kernel[...])
    rounded = np.asarray(served.kernel.get_value().dequantize())
    # The squared error of the result, by the convolution itself, is what the sums say.
    difference = (kernel - rounded).reshape(-1, 8)
    told = np.einsum("kn,kl,ln->", difference, np.asarray(hessian.total, np.float64), difference)
    seen = np.square(np.asarray(served(x) - model(x), np.float64)).sum()
    np.testing.assert_allclose(told, seen, rtol=1e-3)
    nearest = qt.nnx.quantize(model, spec)
    assert seen < 0.8 * np.square(np.asarray(nearest(x) - model(x))).sum()


class Unused(Two):
    def __init__(self):
        super().__init__()
        self.third = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(3))


@pytest.mark.parametrize(
    ("model", "calibration", "options", "message"),
    [
        (Two, None, {"method": "gptq"}, "no calibration for method='gptq'"),
        (Two, [], {"method": "gptq"}, "not calibrated: there are no batches"),
        (Two, batches(), {}, "a calibration for method='nearest'"),
        (Two, batches(), {"method": "gtpq"}, "method='gtpq', expected one of nearest, gptq"),
        (Two, batches(), {"method": "awq+hadamard"}, r"expected one of .*, hadamard\+awq, "),
        (Two, batches(), {"method": "awq", "sequential": True}, "expected GPTQ"),
        (Two, batches(1, (8,)), {"method": "gptq"}, "first/kernel: 8 rows of inputs for 32"),
        (Unused, batches(), {"method": "gptq"}, "third/kernel: no batch reached a matmul of it"),
        (Unused, batches(), {"method": "awq"}, "third/kernel: no batch reached a matmul of it"),
        (Unused, batches(), {"method": "hadamard"}, "third/kernel: no batch reached a matmul"),
        (Two, [b * jnp.inf for b in batches()], {"method": "gptq"}, "first/kernel: not calibrated: "
         "all 3 batches held a NaN or an infinity"),
        (Two, [*batches(2), batches(1)[0][:2]], {"method": "gptq"}, "batches differ in shape"),
        (lambda: qt.nnx.wrap(Two(), qt.recipes.te_current), batches(), {"method": "gptq"},
         "is wrapped, and the method needs"),
    ],
)  # fmt: skip
def test_bad_calibration_is_one_clear_line(model, calibration, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        qt.nnx.quantize(model(), "int4_group32", calibration, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["gptq", "awq", "hadamard+smoothquant+gptq"])
def test_skipped_batches_are_named(method):
    model, seen = Two(), batches()
    bad = [*seen[:2], seen[2].at[0, 0, 0].set(jnp.nan)]
    with pytest.warns(UserWarning, match=r"skipped: first/kernel \(1\), second/kernel \(1\); exp"):
        served = qt.nnx.quantize(model, "int4_group32", bad, method=method)
    expected = qt.nnx.quantize(model, "int4_group32", seen[:2], method=method)
    leaves = [jax.tree.leaves(nnx.state(m)) for m in (served, expected)]
    assert all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))


def test_sequential_rounds_parameters_not_their_casts():
    """Layers that compute in bfloat16 have float32 parameters, which are rounded once."""
    model = Two()
    for name in ("first", "second"):
        getattr(model, name).dtype = jnp.bfloat16
    made = [
        qt.nnx.quantize(model, "int4_group32", batches(), method="gptq", sequential=sequential)
        for sequential in (True, False)
    ]
    kernels = [m.first.kernel.get_value() for m in made]  # both from the same inputs
    assert kernels[0].dtype == kernels[1].dtype == jnp.float32
    np.testing.assert_array_equal(kernels[0].codes, kernels[1].codes)
    np.testing.assert_array_equal(kernels[0].scale, kernels[1].scale)


def test_other_misuse():
    model, found = Two(), qt.nnx.calibrate(Two(), batches(), "hessian")
    with refused(TypeError, "calibration is one ArrayImpl"):
        qt.nnx.quantize(model, "int4", batches()[0], method="gptq")
    refused(TypeError, "calibration is one int", qt.nnx.quantize, model, "int4", 5, method="gptq")
    with jax.enable_x64(True):
        wide = [batch.astype(jnp.float64) for batch in batches()]
        with refused(TypeError, "first/kernel: its inputs have dtype float64"):
            qt.nnx.calibrate(model, wide, "hessian")
    with refused(TypeError, "sequential=True must run the model"):
        qt.nnx.quantize(model, "int4", found, method="gptq", sequential=True)
    with refused(ValueError, r"is wrapped|stored as codes already"):
        qt.nnx.quantize(qt.nnx.quantize(model, "int4"), "int4", batches(), method="gptq")
    static = qt.Operand("int4", scaling=qt.products.Static(0.1))
    with refused(ValueError, "expected current scales and rounding to nearest"):
        qt.nnx.quantize(model, qt.Recipe((None, static)), batches(), method="gptq")


def test_allocation_fits_and_no_other_choice_costs_less():
    model, x = Two(), batches()[0]
    target = model(x)

    def loss(model, x):
        return jnp.square(model(x) - target).mean()

    choices = ["int4_group32", "e4m3fn", None]
    rules = qt.nnx.allocate(model, x, loss, choices=choices, bytes=3000)
    served = qt.nnx.quantize(model, rules)
    stored = [layer.kernel.get_value() for layer in (served.first, served.second)]
    assert sum(array.nbytes for array in stored) == rules.size <= 3000
    assert rules.paths == ("first", "second")
    for i, choice in enumerate(choices[:2]):
        wrapped = qt.nnx.wrap(model, qt.Recipe((None, choice), gradient=None))
        found = dict(qt.nnx.sensitivity(wrapped, x, loss).ranking)
        assert [row[i] for row in rules.costs] == pytest.approx(list(found.values()))
    every = [
        sum(rules.costs[k][i] for k, i in enumerate(chosen))
        for chosen in itertools.product(range(3), repeat=2)
        if sum(rules.bytes[k][i] for k, i in enumerate(chosen)) <= 3000
    ]
    assert rules.cost <= min(every) + rules.gap
    assert "first   e4m3fn by tensor" in str(rules) or "first   int4_group32" in str(rules)
    with refused(ValueError, "allocate: bytes=10, and the smallest"):
        qt.nnx.allocate(model, x, loss, choices=choices, bytes=10)
    with refused(ValueError, "expected a list of formats"):
        qt.nnx.allocate(model, x, loss, choices="int4", bytes=3000)


def test_linen_gives_the_same_codes():
    class Module(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH, name="second")(jnp.tanh(nn.Dense(48, name="first")(x)))

    model, seen = Two(), batches()
    params = {
        name: {"kernel": getattr(model, name).kernel[...], "bias": getattr(model, name).bias[...]}
        for name in ("first", "second")
    }
    options = {"sequential": True}
    served = qt.nnx.quantize(model, "int4_group32", seen, method="gptq", **options)
    _, weights = qt.linen.quantize(
        Module(), {"params": params}, "int4_group32", seen[0], seen, algorithm="gptq", **options
    )
    for name in ("first", "second"):
        mine, theirs = (
            weights["params"][name]["kernel"], getattr(served, name).kernel.get_value()
        )  # fmt: skip
        np.testing.assert_array_equal(mine.codes, theirs.codes)
        np.testing.assert_array_equal(mine.scale, theirs.scale)
    found = qt.linen.calibrate(Module(), {"params": params}, seen, "hessian")
    assert {name for name, _ in found.keys} == {"first/kernel", "second/kernel"}
    x = seen[0]
    target = model(x)

    def loss(module, variables, x):
        return jnp.square(module.apply(variables, x) - target).mean()

    variables = {"params": params}
    rules = qt.linen.allocate(
        Module(), variables, x, loss, choices=["int4_group32", "e4m3fn", None], bytes=3000
    )
    _, weights = qt.linen.quantize(Module(), variables, rules, x)
    kernels = [weights["params"][name]["kernel"] for name in ("first", "second")]
    assert sum(kernel.nbytes for kernel in kernels) == rules.size <= 3000
