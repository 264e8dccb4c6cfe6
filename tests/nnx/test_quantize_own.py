"""Parameters of modules that compute matmuls by themselves, stored by `quantize`.

Oracles: the wrapped model, whose bits the served one must give; NumPy's int4 of groups; and
`scaling.gptq` of the rows that reach each kernel.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from refused import refused

import qtoolkit as qt
from qtoolkit.scaling import Hessian, gptq

WIDTH = 32
RECIPE = qt.Recipe((None, "int4_group32"), gradient=None)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X = normal(0, 200, WIDTH)


def stored(model):
    """The stored parameters, by path."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    values = {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat}
    return {name: value for name, value in values.items() if isinstance(value, qt.QArray)}


class Experts(nnx.Module):
    """A ragged matmul, an einsum over experts, and a table that is transposed."""

    def __init__(self):
        self.up = nnx.Param(normal(1, 4, WIDTH, WIDTH))
        self.down = nnx.Param(normal(2, 4, WIDTH, WIDTH))
        self.out = nnx.Param(normal(3, 24, WIDTH))
        self.last = nnx.Linear(24, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x, sizes):
        y = nnx.relu(lax.ragged_dot(x, self.up[...], sizes))
        y = jnp.einsum("ebd,edf->ebf", y.reshape(4, -1, WIDTH), self.down[...])
        return self.last(y.reshape(x.shape) @ self.out[...].T)


SIZES = jnp.asarray([60, 40, 55, 45])


def call(model, *inputs):
    return nnx.jit(lambda model, *inputs: model(*inputs))(model, *inputs)


@pytest.mark.parametrize("spec", ["int4_group32", "nvfp4", "e4m3fn"])
def test_it_computes_what_the_wrapped_model_does(spec):
    model, recipe = Experts(), qt.Recipe((None, spec), gradient=None)
    served = qt.nnx.quantize(model, recipe, inputs=(X, SIZES))
    assert set(stored(served)) == {"up", "down", "out", "last/kernel"}
    wrapped = qt.nnx.wrap(model, recipe)
    np.testing.assert_array_equal(call(served, X, SIZES), call(wrapped, X, SIZES))
    named = qt.nnx.quantize(model, recipe, inputs=lambda model: model(X, SIZES))
    for ours, theirs in zip(*(jax.tree.leaves(stored(m)) for m in (served, named)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not isinstance(model.up.get_value(), qt.QArray)
    assert set(stored(qt.nnx.quantize(model, recipe))) == {"last/kernel"}  # nobody said how it runs


def test_codes_lie_along_the_axis_that_is_summed():
    kernel = stored(qt.nnx.quantize(Experts(), RECIPE, inputs=(X, SIZES)))["out"]
    groups = np.asarray(Experts().out[...]).reshape(24, 1, WIDTH)  # x @ out.T sums over the last
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(7)
    codes = np.clip(np.rint(groups / scale), -8, 7).reshape(24, WIDTH)
    np.testing.assert_array_equal(qt.decode(kernel.unpack().codes, "int4"), codes)


@pytest.mark.parametrize("method", ["gptq", "hadamard", "smoothquant", "hadamard+awq+gptq"])
def test_methods_change_own_parameters_too(method):
    model = Experts()
    served = qt.nnx.quantize(model, "int8", [(X, SIZES)], method=method)
    kernels = stored(served)
    assert set(kernels) == {"up", "down", "out", "last/kernel"}
    y = model(X, SIZES)
    np.testing.assert_allclose(call(served, X, SIZES), y, atol=0.03 * float(jnp.abs(y).max()))
    if "hadamard" in method:
        assert kernels["up"].rotation == (WIDTH, 0, -2)
        assert kernels["out"].rotation == (WIDTH, 0, -1)


def test_each_expert_is_what_gptq_makes_of_its_rows():
    model = Experts()
    kernels = stored(qt.nnx.quantize(model, RECIPE, [(X, SIZES)], method="gptq"))
    ends = np.cumsum(SIZES)
    hidden = nnx.relu(lax.ragged_dot(X, model.up[...], SIZES)).reshape(4, -1, WIDTH)
    for i in range(4):
        for name, rows in (("up", X[ends[i] - SIZES[i] : ends[i]]), ("down", hidden[i])):
            kernel = getattr(model, name)[i]
            expected = gptq(kernel, "int4_group32", Hessian.of(WIDTH).observe(rows))
            got = kernels[name].unpack().codes[i]
            assert float((got == expected.codes).mean()) > 0.99


@pytest.mark.parametrize("method", ["gptq", "hadamard"])
def test_a_transposed_kernel_keeps_its_codes(method):
    """It was rounded a second time in each call: transposed codes would have had to be unpacked."""
    model, x = Experts(), X @ (normal(5, WIDTH, WIDTH) * 0.3 + jnp.eye(WIDTH))
    served = qt.nnx.quantize(model, RECIPE, [(x, SIZES)], method=method)
    kernels = {name: np.asarray(a.dequantize(), np.float64) for name, a in stored(served).items()}
    ends = np.cumsum(SIZES)
    y = np.concatenate(
        [x[ends[i] - SIZES[i] : ends[i]] @ kernels["up"][i] for i in range(4)]
    ).reshape(4, -1, WIDTH)
    y = np.einsum("ebd,edf->ebf", np.maximum(y, 0), kernels["down"]).reshape(x.shape)
    y = y @ kernels["out"].T @ kernels["last/kernel"]
    np.testing.assert_allclose(call(served, x, SIZES), y, rtol=1e-3, atol=1e-5 * np.abs(y).max())


class Block(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 6)

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel)


class Stack(nnx.Module):
    def __init__(self):
        made = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.blocks = made(nnx.Rngs(0).split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return run(x, self.blocks)


def test_a_stack_is_stored_kernel_by_kernel():
    model = Stack()
    served = qt.nnx.quantize(model, "nvfp4", inputs=(X,))
    kernel = stored(served)["blocks/kernel"]
    assert kernel.tensor_scale.shape == (3,)
    recipe = qt.Recipe((None, "nvfp4"), gradient=None)
    np.testing.assert_array_equal(call(served, X), call(qt.nnx.wrap(model, recipe), X))
    tuned = stored(qt.nnx.quantize(model, RECIPE, [X], method="gptq"))["blocks/kernel"]
    x = X
    for i in range(3):
        expected = gptq(model.blocks.kernel[i], "int4_group32", Hessian.of(WIDTH).observe(x))
        assert float((tuned.unpack().codes[i] == expected.codes).mean()) > 0.99
        x = jnp.tanh(x @ model.blocks.kernel[i])


class Sharing(nnx.Module):
    """`way` says what else uses the kernel of `first`."""

    def __init__(self, way):
        self.first, self.second = Block(nnx.Rngs(0)), Block(nnx.Rngs(1))
        self.way = way
        if way == "shared":
            self.second.kernel = self.first.kernel

    def __call__(self, x):
        y = self.second(self.first(x))
        match self.way:
            case "sum":
                y = y + self.first.kernel[...].sum()
            case "around":
                y = y @ self.first.kernel[...]
            case "argument":
                y = multiplied(y, self.first.kernel)
            case "part":
                y = y @ self.first.kernel[:, :WIDTH]
        return y


def multiplied(x, kernel):
    return x @ kernel[...]


@pytest.mark.parametrize("way", ["shared", "sum", "around", "argument", "part"])
def test_only_what_matmuls_alone_use_is_stored(way):
    """Whoever computes them."""
    model = Sharing(way)
    served = qt.nnx.quantize(model, RECIPE, inputs=(X,))
    names = {"first/kernel", "second/kernel"}
    names -= {"shared": {"second/kernel"}, "sum": {"first/kernel"}}.get(way, set())
    assert set(stored(served)) == names
    if way == "shared":
        assert served.first.kernel is served.second.kernel
    np.testing.assert_array_equal(call(served, X), call(qt.nnx.wrap(model, RECIPE), X))


class Mixed(nnx.Module):
    """Kernels that are scaled, returned, cast, and multiplied by each other."""

    def __init__(self):
        names = ("cast", "scaled", "returned", "left", "right", "twice")
        for i, name in enumerate(names):
            setattr(self, name, nnx.Param(normal(i, WIDTH, WIDTH)))

    def table(self):
        return self.returned[...]

    def __call__(self, x):
        y = x.astype(jnp.bfloat16) @ self.cast[...].astype(jnp.bfloat16)
        y = y.astype(jnp.float32) @ (2 * self.scaled[...]) @ self.returned
        y = y @ self.twice @ self.twice
        return y @ (self.left[...] @ self.right[...]) + self.table()[0]


def test_kernels_that_are_more_than_kernels_stay():
    model = Mixed()
    served = qt.nnx.quantize(model, RECIPE, inputs={"x": X})
    assert set(stored(served)) == {"cast", "twice"}
    np.testing.assert_array_equal(call(served, X), call(qt.nnx.wrap(model, RECIPE), X))


class Steps(Block):
    """A generator runs when its caller asks for its items, so its uses are not known."""

    def __init__(self):
        super().__init__(nnx.Rngs(0))
        self.last = Block(nnx.Rngs(1))

    def steps(self, x):
        for i in range(2):
            yield x @ self.kernel * self.kernel[i]

    def __call__(self, x):
        first, second = self.steps(x)
        return self.last(first + second)


def test_parameters_of_generators_stay():
    model = Steps()
    served = qt.nnx.quantize(model, RECIPE, inputs=(X,))
    assert set(stored(served)) == {"last/kernel"}
    np.testing.assert_array_equal(call(served, X), call(qt.nnx.wrap(model, RECIPE), X))


def test_rules_for_parameters_are_kept():
    model = Experts()
    rules = qt.Rules({"up": None, "last/kernel": None}, default=RECIPE)
    served = qt.nnx.quantize(model, rules, inputs=(X, SIZES))
    assert set(stored(served)) == {"down", "out"}
    np.testing.assert_array_equal(call(served, X, SIZES), call(qt.nnx.wrap(model, rules), X, SIZES))


def test_it_is_saved_and_loaded(tmp_path):
    model = Experts()
    served = qt.nnx.quantize(model, RECIPE, [(X, SIZES)], method="smoothquant")
    qt.checkpoints.save(tmp_path / "served.safetensors", nnx.state(served))
    other = qt.nnx.quantize(Experts(), RECIPE, [(X, SIZES)], method="smoothquant")
    state = qt.checkpoints.load(tmp_path / "served.safetensors", like=nnx.state(other))
    nnx.update(other, state)
    np.testing.assert_array_equal(call(other, X, SIZES), call(served, X, SIZES))


def test_a_wrapped_model_keeps_its_learned_scales():
    model = qt.nnx.wrap(Block(nnx.Rngs(0)), qt.recipes.int4_lsq, inputs=(X,))
    qt.nnx.start_scales(model, X)
    served = qt.nnx.quantize(model, inputs=(X,))
    assert set(stored(served)) == {"kernel"}
    np.testing.assert_array_equal(call(served, X), call(model, X))


def test_sizes_of_an_allocation_count_own_parameters():
    model, target = Experts(), Experts()(X, SIZES)

    def loss(model, batch):
        return jnp.square(model(*batch) - target).mean()

    choices = ["int4_group32", "e4m3fn", None]
    rules = qt.nnx.allocate(model, (X, SIZES), loss, choices=choices, bytes=9000)
    served = qt.nnx.quantize(model, rules, inputs=(X, SIZES))
    kernels = served.up, served.down, served.out, served.last.kernel
    assert sum(kernel.get_value().nbytes for kernel in kernels) == rules.size <= 9000
    assert rules.paths == ("", "last")
    assert set(stored(served)) == {"up", "down", "out"}  # the last layer is worth 3,072 bytes


def test_messages():
    with refused(ValueError, r"Block has no kernel to store.* add inputs=\(x,\)"):
        qt.nnx.quantize(Block(nnx.Rngs(0)), RECIPE)
    refused(TypeError, "inputs has type int", qt.nnx.quantize, Block(nnx.Rngs(0)), RECIPE, inputs=3)


class Transposed(nnx.Module):
    def __init__(self):
        size = jnp.arange(1, 7)[:, None] * jnp.arange(1, 9)
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(0), (6, 8)) * size)

    def __call__(self, x):
        return x @ self.kernel[...].T


@pytest.mark.parametrize("axis", [-1, 0])
def test_named_axes_are_those_of_the_operand_that_is_multiplied(axis):
    """Not of the parameter. Oracle: NumPy, with scales of the transposed kernel."""
    recipe = qt.Recipe((None, qt.BlockFormat.token("int8", axis)), gradient=None)
    x = jnp.ones((3, 8))
    kernel = np.asarray(Transposed().kernel[...]).T
    scale = np.abs(kernel).max(axis, keepdims=True) / np.float32(127)
    expected = np.asarray(x) @ (np.round(kernel / scale) * scale)
    served = qt.nnx.quantize(Transposed(), recipe, inputs=(x,))
    assert served.kernel.get_value().scale.shape == scale.T.shape
    for model in (served, qt.nnx.wrap(Transposed(), recipe)):
        np.testing.assert_allclose(model(x), expected, rtol=1e-5)


class OwnKernel(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(rngs.params.normal((WIDTH, WIDTH)) / WIDTH)

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel[...])


def scanned(block, x):
    step = nnx.remat(lambda block, x: block(x))
    return nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(block, x)


class Writing(nnx.Module):
    """`way` writes to variables of the model, or to all that it is given, also to kernels."""

    def __init__(self, way):
        self.way = way
        made = OwnKernel if way is not scanned else nnx.vmap(OwnKernel)
        self.block = made(nnx.Rngs(0) if way is not scanned else nnx.Rngs(0).split(3))
        self.copy = nnx.BatchStat(jnp.zeros((WIDTH, WIDTH)))

    def __call__(self, x):
        match self.way:
            case "new":
                self.seen = nnx.Intermediate(x)
            case "copy":
                self.copy[...] = self.block.kernel[...]
            case way if callable(way):
                return way(self.block, x)
        return self.block(x)


WAYS = {
    "new": "new",
    "copy": "copy",
    "jit": lambda block, x: nnx.jit(lambda block, x: block(x))(block, x),
    "remat": lambda block, x: nnx.remat(lambda block, x: block(x))(block, x),
    "scan": scanned,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_call_keeps_the_codes(way):
    model = Writing(WAYS[way])
    served = qt.nnx.quantize(model, RECIPE, inputs=(X,))
    before = served.block.kernel.get_value()
    expected = call(qt.nnx.wrap(model, RECIPE), X)
    for run in (call, lambda model, x: model(x), call):
        np.testing.assert_array_equal(run(served, X), expected)
        after = served.block.kernel.get_value()
        assert isinstance(after, qt.QArray)
        jax.tree.map(np.testing.assert_array_equal, after, before)
    if way == "copy":
        np.testing.assert_array_equal(served.copy[...], before.dequantize())
