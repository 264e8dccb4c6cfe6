"""AWQ, SmoothQuant and rotations that are folded or kept by kernels; groups, experts and loops.

Oracles: float64 NumPy written from the papers (arXiv:2306.00978 eq. 4 and 5, arXiv:2211.10438
eq. 4, Sylvester's matrices), `scaling.gptq` of each matmul's own inputs, and the plain model.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import qtoolkit as qt
from qtoolkit.scaling import Hessian, gptq

WIDTH = 32
IDENTITY = np.eye(WIDTH)
SPEC = qt.spec("int4_group32")
RECIPE = qt.Recipe((None, "int4_group32"), gradient=None)


def batches(count=2, rows=(8, 16), width=WIDTH):
    spread = np.exp(np.random.default_rng(0).normal(size=width))
    return [
        jnp.asarray(np.random.default_rng(i).normal(size=(*rows, width)) * spread, jnp.float32)
        for i in range(count)
    ]


class Tanh(nnx.Module):
    """No parameter can divide what `second` reads, because tanh lies between."""

    def __init__(self):
        self.second = nnx.Linear(WIDTH, 24, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jnp.tanh(x) * jnp.linspace(0.2, 5, WIDTH))


def inputs_of(model, seen):
    x = np.concatenate([np.asarray(batch, np.float64).reshape(-1, WIDTH) for batch in seen])
    return np.tanh(x) * np.linspace(0.2, 5, WIDTH)


def int4(w):
    """Codes and scales by groups of 32 along the first axis."""
    groups = w.reshape(-1, 32, w.shape[1])
    scale = np.abs(groups).max(1, keepdims=True) / 7
    return np.clip(np.rint(groups / scale), -8, 7), scale


def dequantized(w):
    codes, scale = int4(w)
    return (codes * scale).reshape(w.shape)


def awq(w, x, turn=IDENTITY):
    """The factors whose rounded kernel, turned after them, has the least error."""
    hessian, mean = x.T @ x, np.abs(x).mean(0)
    losses, candidates = [], []
    for power in np.linspace(0, 1, 20):
        factors = mean**power
        factors /= np.sqrt(factors.max() * factors.min())
        error = turn.T @ dequantized(turn @ (w * factors[:, None])) / factors[:, None] - w
        losses.append(np.einsum("kn,kl,ln->", error, hessian, error))
        candidates.append(factors)
    return candidates[int(np.argmin(losses))]


def smoothquant(w, x):
    return np.sqrt(np.abs(x).max(0) / np.abs(w).max(1))


@pytest.mark.parametrize("oracle", [awq, smoothquant])
def test_a_kernel_keeps_factors_that_nothing_before_takes(oracle):
    model, seen = Tanh(), batches()
    served = qt.nnx.quantize(model, SPEC, seen, method=oracle.__name__)
    kernel, w = served.second.kernel.get_value(), np.asarray(model.second.kernel[...], np.float64)
    x = inputs_of(model, seen)
    factors = oracle(w, x)
    np.testing.assert_allclose(kernel.factors[:, 0], factors, rtol=1e-4)
    codes, scale = int4(w * factors[:, None])
    same = qt.decode(kernel.unpack().codes, "int4") == codes.reshape(w.shape)
    assert float(same.mean()) > 0.995  # float32 may take another way at a tie
    np.testing.assert_allclose(kernel.scale, scale[:, 0], rtol=1e-4)
    mine = nnx.jit(lambda model, x: model(x))(served, seen[0])
    x = x[: 8 * 16].reshape(8, 16, WIDTH)
    expected = (x / factors) @ (codes * scale).reshape(w.shape)
    np.testing.assert_allclose(mine, expected, rtol=0.05, atol=0.05)
    if oracle is awq:
        errors = [
            float(jnp.square(m(seen[0]) - model(seen[0])).sum())
            for m in (served, qt.nnx.quantize(model, SPEC))
        ]
        assert errors[0] < errors[1]


def test_factors_before_gptq_are_in_the_sums_that_it_sees():
    model, seen = Tanh(), batches()
    served = qt.nnx.quantize(model, SPEC, seen, method="awq+gptq")
    w, x = np.asarray(model.second.kernel[...], np.float64), inputs_of(model, seen)
    factors = awq(w, x)
    hessian = Hessian.of(WIDTH).observe(jnp.asarray(x / factors, jnp.float32))
    expected = gptq(jnp.asarray(w * factors[:, None], jnp.float32), SPEC, hessian)
    kernel = served.second.kernel.get_value()
    assert float((kernel.unpack().codes == expected.codes).mean()) > 0.99
    np.testing.assert_allclose(kernel.factors[:, 0], factors, rtol=1e-4)


def test_half_precision_keeps_powers_of_two():
    model, options = Tanh(), {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model.second = nnx.Linear(WIDTH, 24, rngs=nnx.Rngs(1), **options)
    seen = [batch.astype(jnp.bfloat16) for batch in batches()]
    served = qt.nnx.quantize(model, SPEC, seen, method="smoothquant")
    kernel = served.second.kernel.get_value()
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.log2(kernel.factors), np.rint(np.log2(kernel.factors)))


def signs(block):
    return np.asarray(jax.random.rademacher(jax.random.key(0), (block,), jnp.float32), np.float64)


def turned(block):
    """The random Hadamard transform as a matrix."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * signs(block) / np.sqrt(block)


def test_a_kernel_with_a_rotation_is_the_one_numpy_rotates():
    model, seen = Tanh(), batches()
    kernel = qt.nnx.quantize(model, SPEC, seen, method="hadamard").second.kernel.get_value()
    w = np.asarray(model.second.kernel[...], np.float64)
    codes, scale = int4(turned(WIDTH) @ w)
    same = qt.decode(kernel.unpack().codes, "int4") == codes.reshape(w.shape)
    assert float(same.mean()) > 0.995
    assert (kernel.rotation, kernel.factors) == ((WIDTH, 0, -2), None)
    np.testing.assert_allclose(kernel.scale, scale[:, 0], rtol=1e-4)


def test_factors_before_a_rotation_are_searched_with_it():
    model, seen = Tanh(), batches()
    made = {
        method: qt.nnx.quantize(model, SPEC, seen, method=method)
        for method in ("hadamard", "hadamard+awq", "hadamard+awq+gptq")
    }
    kernel = made["hadamard+awq"].second.kernel.get_value()
    w, x = np.asarray(model.second.kernel[...], np.float64), inputs_of(model, seen)
    factors = awq(w, x, turned(WIDTH))
    np.testing.assert_allclose(kernel.factors[:, 0], factors, rtol=1e-4)
    assert kernel.rotation == (WIDTH, 0, -2)
    codes, _ = int4(turned(WIDTH) @ (w * factors[:, None]))
    same = qt.decode(kernel.unpack().codes, "int4") == codes.reshape(w.shape)
    assert float(same.mean()) > 0.995
    inputs = jnp.asarray((x / factors) @ turned(WIDTH).T, jnp.float32)
    rotated = jnp.asarray(turned(WIDTH) @ (w * factors[:, None]), jnp.float32)
    expected = gptq(rotated, SPEC, Hessian.of(WIDTH).observe(inputs))
    kernel = made["hadamard+awq+gptq"].second.kernel.get_value()
    assert float((kernel.unpack().codes == expected.codes).mean()) > 0.99
    errors = [
        np.square(x @ (np.asarray(m.second.kernel.get_value().dequantize()) - w)).sum()
        for m in made.values()
    ]
    assert errors == sorted(errors, reverse=True)


class Residual(nnx.Module):
    """A language model whose residual stream can be rotated, or not, as `between` says."""

    def __init__(self, between="nothing"):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(40, WIDTH, rngs=rngs)
        self.position = nnx.Param(jax.random.normal(jax.random.key(9), (8, WIDTH)))
        norm = nnx.LayerNorm if between == "LayerNorm" else nnx.RMSNorm
        self.norm, self.last_norm = norm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm.scale[...] = jnp.linspace(0.5, 2, WIDTH)
        self.up = nnx.Linear(WIDTH, 64, rngs=rngs)
        self.down = nnx.Linear(64, WIDTH, rngs=rngs)
        self.down.bias[...] = jnp.linspace(-1, 1, WIDTH)
        self.head = nnx.Linear(WIDTH, 40, rngs=rngs)
        self.between = between

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position[...]
        y = self.norm(x)
        if self.between == "a gate":
            y = y * nnx.sigmoid(y)
        if self.between == "an integer":
            y = (64 * y).astype(jnp.int32).astype(jnp.float32) / 64
        if self.between == "1 + gain":
            y = y * (1 + self.position[0])
        branch = self.down(nnx.relu(self.up(y)))
        x = x + (branch * self.weight if self.between == "a weight" else branch)
        if self.between == "the stream is returned":
            return self.head(self.last_norm(x)), x
        if self.between == "a tied table":
            return self.embed.attend(self.last_norm(x))
        if self.between == "relu":
            x = nnx.relu(x)
        return self.head(self.last_norm(x))


def tokens():
    return [jax.random.randint(jax.random.key(i), (16, 8), 0, 40) for i in range(2)]


def test_a_residual_stream_is_rotated_in_the_parameters():
    model, seen = Residual(), tokens()
    fine = qt.BlockFormat.channel("int8", axis=1)  # so fine that only the rotation shows
    served = qt.nnx.quantize(model, fine, seen, method="hadamard")
    assert [getattr(served, name).kernel.get_value().rotation for name in ("up", "down", "head")] \
        == [None, (64, 0, -2), None]  # fmt: skip
    table = np.asarray(served.embed.embedding[...])
    np.testing.assert_allclose(
        table @ table.T,  # a rotation leaves all products of rows as they are
        np.asarray(model.embed.embedding[...]) @ np.asarray(model.embed.embedding[...]).T,
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    assert not np.allclose(table, model.embed.embedding[...])
    np.testing.assert_array_equal(served.norm.scale[...], np.ones(WIDTH))
    y = np.asarray(model(seen[0]))
    np.testing.assert_allclose(served(seen[0]), y, atol=0.03 * np.abs(y).max())
    assert (model.norm.scale[...] != 1).any()  # the model is as it was


@pytest.mark.parametrize(
    "between",
    [
        *("LayerNorm", "a gate", "1 + gain", "the stream is returned", "a tied table", "relu"),
        "an integer",
    ],
)
def test_rotations_are_folded_only_where_results_stay(between):
    model, seen = Residual(between), tokens()
    if between == "a tied table":
        del model.head  # no batch reaches it
    fine = qt.BlockFormat.channel("int8", axis=1)
    served = qt.nnx.quantize(model, fine, seen, method="hadamard")
    np.testing.assert_array_equal(served.embed.embedding[...], model.embed.embedding[...])
    np.testing.assert_array_equal(served.norm.scale[...], model.norm.scale[...])
    assert served.up.kernel.get_value().rotation == (WIDTH, 0, -2)
    mine, y = (np.asarray(jax.tree.leaves(m(seen[0]))[0]) for m in (served, model))
    np.testing.assert_allclose(mine, y, atol=0.03 * np.abs(y).max())


@pytest.mark.parametrize("shape", [(), (1,), (WIDTH,)], ids=str)
def test_a_learned_weight_of_a_branch(shape):
    """One number passes a rotation. One of shape (1,) was taken for the gains of a norm."""
    model, seen = Residual("a weight"), tokens()
    model.weight = nnx.Param(jnp.linspace(0.4, 0.6, WIDTH) if shape == (WIDTH,) else
                             jnp.full(shape, 0.5))  # fmt: skip
    fine = qt.BlockFormat.channel("int8", axis=1)
    served = qt.nnx.quantize(model, fine, seen, method="hadamard")
    is_folded = shape != (WIDTH,)
    assert (served.up.kernel.get_value().rotation is None) == is_folded
    np.testing.assert_array_equal(served.weight[...], model.weight[...])
    y = np.asarray(model(seen[0]))
    np.testing.assert_allclose(served(seen[0]), y, atol=0.03 * np.abs(y).max())


def test_norms_of_a_rotated_stream_take_factors():
    model, seen = Residual(), tokens()
    fine = qt.BlockFormat.channel("int8", axis=1)
    served = qt.nnx.quantize(model, fine, seen, method="hadamard+smoothquant")
    kernels = {name: getattr(served, name).kernel.get_value() for name in ("up", "down", "head")}
    assert [k.rotation for k in kernels.values()] == [None, (64, 0, -2), None]
    assert all(kernel.factors is None for kernel in kernels.values())
    x = np.asarray(qt.nnx.quantize(model, fine, seen, method="hadamard").embed.embedding[...])
    np.testing.assert_array_equal(served.embed.embedding[...], x)
    assert float(jnp.abs(served.norm.scale[...] - 1).max()) > 0.1
    y = np.asarray(model(seen[0]))
    np.testing.assert_allclose(served(seen[0]), y, atol=0.03 * np.abs(y).max())


def test_a_rotation_is_folded_with_the_bias_between_layers():
    class Linear(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.first.bias[...] = jnp.linspace(-2, 2, WIDTH)
            self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    model, seen = Linear(), batches()
    rules = qt.Rules([("second", RECIPE)], default=None)  # `first` stays high precision
    served = qt.nnx.quantize(model, rules, seen, method="hadamard")
    assert served.second.kernel.get_value().rotation is None
    kernel, bias = (np.asarray(a[...], np.float64) for a in (model.first.kernel, model.first.bias))
    got = (np.asarray(a[...], np.float64) for a in (served.first.kernel, served.first.bias))
    for mine, before in zip(got, (kernel, bias), strict=True):
        np.testing.assert_allclose(mine, before @ turned(WIDTH).T, rtol=1e-4, atol=1e-5)


def test_an_odd_number_of_channels_is_not_rotated():
    layer, x = nnx.Linear(15, 4, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (64, 15))
    with pytest.warns(UserWarning, match="these kernels are not rotated, because they have an odd"):
        served = qt.nnx.quantize(layer, "int8", [x], method="hadamard")
    assert served.kernel.get_value().rotation is None


def test_a_kernel_used_twice_has_factors_for_all_its_inputs():
    class Twice(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.layer(x) + self.layer(jnp.flip(x, -1))

    model, seen = Twice(), batches()
    kernel = qt.nnx.quantize(model, SPEC, seen, method="awq").layer.kernel.get_value()
    x = np.concatenate([np.asarray(batch, np.float64).reshape(-1, WIDTH) for batch in seen])
    factors = awq(np.asarray(model.layer.kernel[...], np.float64), np.concatenate([x, x[:, ::-1]]))
    found = np.ones(WIDTH) if kernel.factors is None else kernel.factors[:, 0]
    np.testing.assert_allclose(found, factors, rtol=1e-3)


def patches(x, size):
    """[images, places, size, size, channels] of zero-padded images: what a convolution sums."""
    padded = np.pad(x, [(0, 0), (size // 2, size // 2), (size // 2, size // 2), (0, 0)])
    rows = range(x.shape[1])
    columns = range(x.shape[2])
    return np.stack([padded[:, i : i + size, j : j + size] for i in rows for j in columns], 1)


@pytest.mark.sample("2")
@pytest.mark.parametrize("groups", [2, 8])
def test_each_group_of_a_convolution_has_inputs_of_its_own(groups):
    model = nnx.Conv(16, 24, (3, 3), feature_group_count=groups, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (8, 6, 5, 16)) + 1
    spec = qt.BlockFormat.channel("int4", axis=3)
    kernel = qt.nnx.quantize(model, spec, [x], method="gptq").kernel.get_value()
    (hessian,) = qt.nnx.calibrate(model, [x], "hessian").hessians
    taken, outputs = 16 // groups, 24 // groups
    for group in range(groups):
        rows = patches(np.asarray(x)[..., group * taken : (group + 1) * taken], 3)
        rows = rows.reshape(-1, 9 * taken)
        np.testing.assert_allclose(hessian.total[group], rows.T @ rows, rtol=1e-4, atol=1e-2)
        own = slice(group * outputs, (group + 1) * outputs)
        expected = gptq(
            model.kernel[..., own].reshape(-1, outputs),
            qt.BlockFormat.channel("int4", axis=1),
            Hessian.of(9 * taken).observe(jnp.asarray(rows)),
        )
        codes = kernel.unpack().codes[..., own].reshape(-1, outputs)
        assert float((codes == expected.codes).mean()) > 0.99
    nearest = qt.nnx.quantize(model, spec)
    assert kernel.spec == nearest.kernel.get_value().spec


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x, sizes):
        shape = 4, WIDTH, WIDTH
        up = self.param("up", nn.initializers.lecun_normal(batch_axis=0), shape)
        down = self.param("down", nn.initializers.lecun_normal(batch_axis=0), shape)
        return lax.ragged_dot(nn.relu(lax.ragged_dot(x, up, sizes)), down, sizes)


@pytest.mark.parametrize("spec", ["int4_group32", "nvfp4"])
def test_each_expert_has_the_rows_that_reach_it(spec):
    module, sizes = Experts(), jnp.asarray([60, 0, 100, 40])
    (x,) = batches(1, (200,))
    variables = module.init(jax.random.key(1), x, sizes)
    up = variables["params"]["up"]
    with pytest.warns(UserWarning, match=r"experts or .* rounded to nearest: up\[1\], down\[1\];"):
        served, weights = qt.linen.quantize(
            module, variables, spec, (x, sizes), [(x, sizes)], algorithm="gptq"
        )
    _, nearest = qt.linen.quantize(module, variables, spec, (x, sizes))
    got, near = (w["params"]["up"].unpack() for w in (weights, nearest))
    np.testing.assert_array_equal(got.codes[1], near.codes[1])
    assert got.spec == near.spec
    ends = np.cumsum(sizes)
    if spec == "int4_group32":
        for i in (0, 2, 3):
            rows = x[ends[i] - sizes[i] : ends[i]]
            expected = gptq(up[i], SPEC, Hessian.of(WIDTH).observe(rows))
            assert float((got.codes[i] == expected.codes).mean()) > 0.99
    y = module.apply(variables, x, sizes)
    errors = [float(jnp.square(served.apply(w, x, sizes) - y).sum()) for w in (weights, nearest)]
    assert errors[0] < 0.8 * errors[1]


def test_experts_share_explicit_factors_and_a_rotation():
    module, sizes = Experts(), jnp.asarray([60, 40, 60, 40])
    (x,) = batches(1, (200,))
    variables = module.init(jax.random.key(1), x, sizes)
    y = module.apply(variables, x, sizes)
    for algorithm in ("smoothquant", "hadamard"):
        served, weights = qt.linen.quantize(
            module, variables, "int8", (x, sizes), [(x, sizes)], algorithm=algorithm
        )
        kernel = weights["params"]["up"]
        if algorithm == "smoothquant":
            largest = np.abs(variables["params"]["up"]).max((0, 2))
            expected = np.sqrt(np.abs(x).max(0) / largest)
            np.testing.assert_allclose(kernel.factors[0, :, 0], expected, rtol=1e-5)
        else:
            assert kernel.rotation == (WIDTH, 0, -2)
        mine = jax.jit(served.apply)(weights, x, sizes)
        np.testing.assert_allclose(mine, y, atol=0.05 * float(jnp.abs(y).max()))


class Loop(nnx.Module):
    """A layer in a `while_loop`, as often as each batch says, and one in a branch of a `cond`."""

    def __init__(self):
        self.layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.branch = nnx.Linear(16, 16, rngs=nnx.Rngs(1))

    def __call__(self, x, count):
        graph, state = nnx.split(self)

        def body(carry):
            i, x = carry
            return i + 1, jnp.tanh(nnx.merge(graph, state).layer(x))

        x = lax.while_loop(lambda carry: carry[0] < count, body, (0, x))[1]
        return lax.cond(count > 2, lambda x: nnx.merge(graph, state).branch(x), lambda x: x, x)


def test_matmuls_in_loops_see_the_batches_that_reach_them():
    model = Loop()
    counts = (1, 2, 3, 4)
    seen = [(x, jnp.asarray(n)) for x, n in zip(batches(4, (64,), 16), counts, strict=True)]
    found = qt.nnx.calibrate(model, seen, "hessian")
    sums = {"layer/kernel": [], "branch/kernel": []}
    for x, count in seen:
        for _ in range(int(count)):
            sums["layer/kernel"].append(np.asarray(x))
            x = jnp.tanh(model.layer(x))
        sums["branch/kernel"] += [np.asarray(x)] if count > 2 else []
    together = qt.BlockFormat(element="int4", block=(16,))
    served = qt.nnx.quantize(model, together, seen, method="gptq")
    for (name, _), hessian in zip(found.keys, found.hessians, strict=True):
        rows = np.concatenate(sums[name]).astype(np.float64)
        assert int(hessian.rows) == len(rows)
        np.testing.assert_allclose(hessian.total, rows.T @ rows, rtol=1e-4, atol=1e-3)
        layer = name.split("/")[0]
        expected = gptq(
            getattr(model, layer).kernel[...],
            together,
            Hessian.of(16).observe(jnp.asarray(rows, jnp.float32)),
        )
        kernel = getattr(served, layer).kernel.get_value()
        assert float((kernel.unpack().codes == expected.codes).mean()) > 0.99
