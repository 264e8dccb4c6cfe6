"""Factors of a model that is given as a function: folded where results stay, else kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qtoolkit as qt
from qtoolkit.post_training._methods import PlainModel, Settings, tuned
from qtoolkit.products.internal import Batch

WIDTH = 32


def batches():
    spread = np.exp(np.random.default_rng(0).normal(size=WIDTH)).astype(np.float32)
    return [
        jnp.asarray(np.random.default_rng(i).normal(size=(4, 16, WIDTH)) * spread, jnp.float32)
        for i in range(3)
    ]


class Block(nnx.Module):
    def __init__(self, gate):
        rngs = nnx.Rngs(1)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.second_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 64, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 64, rngs=rngs)
        self.down = nnx.Linear(64, WIDTH, rngs=rngs)
        self.gating = gate

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        y = self.second_norm(x)
        return x + self.down(self.gating(self.up(y), self.gate(y)))


def plain(model):
    graph, params = nnx.split(model)
    flat = nnx.to_flat_state(params)
    names = ["/".join(map(str, path)) for path, _ in flat]

    def call(arrays, batch):
        leaves = [(p, v.replace(arrays[n])) for (p, v), n in zip(flat, names, strict=True)]
        return batch.given_to(nnx.merge(graph, nnx.from_flat_state(leaves)))

    return PlainModel(call, dict(zip(names, (v.get_value() for _, v in flat), strict=True)))


GATES = {
    "gated": (lambda up, gate: up * nnx.silu(gate), True),
    "relu": (lambda up, gate: nnx.relu(up) + 0 * gate[..., :1], False),
    "relu alone": (lambda up, gate: nnx.relu(up), True),
    "gelu": (lambda up, gate: nnx.gelu(up), False),
    "with itself": (lambda up, gate: up * nnx.sigmoid(up), False),
    "an integer": (lambda up, gate: (8 * up).astype(jnp.int32).astype(jnp.float32), False),
}


@pytest.mark.sample(*(f"{gate}-smoothquant" for gate in GATES), "gated-awq")
@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.parametrize("gate", GATES)
def test_factors_are_folded_only_where_results_stay(method, gate):
    function, is_folded = GATES[gate]
    model, seen = Block(function), batches()
    model.norm.scale[...] = jnp.linspace(0.5, 2, WIDTH)
    model.norm.bias[...] = jnp.linspace(-1, 1, WIDTH)
    given = plain(model)
    kernels = [name for name in given.params if name.endswith("kernel")]
    if gate != "gated":  # what stays high precision takes the factors of its inputs as well
        kernels = [name for name in kernels if not name.startswith("gate")]
    operand = qt.Operand("int4_group32")
    made = tuned(given, dict.fromkeys(kernels, operand), seen, Settings(method))
    explicit = {"attention/out/kernel"} | (set() if is_folded else {"down/kernel"})
    assert made.kernels.keys() == explicit
    for name, kernel in made.kernels.items():  # it keeps the factors, and is what it was
        assert kernel.factors.shape == (*given.params[name].shape[:-1], 1)
        np.testing.assert_allclose(kernel.dequantize(), given.params[name], atol=0.3)
    changed = {n for n in given.params if not np.array_equal(given.params[n], made.params[n])}
    assert {"norm/scale", "norm/bias", "second_norm/scale", "up/kernel", "gate/kernel"} <= changed
    assert {f"attention/{name}/kernel" for name in ("query", "key", "value")} <= changed
    assert ("down/kernel" in changed) == is_folded
    assert not {"gate/bias", "attention/out/bias"} & changed
    batch = Batch.of(seen[0])
    before, after = (np.asarray(given.call(p, batch)) for p in (given.params, made.params))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4 * np.abs(before).max())


def test_a_tied_table_keeps_its_factors():
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(40, WIDTH, rngs=nnx.Rngs(0))
            self.norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, tokens):
            return self.embed.attend(self.norm(self.embed(tokens)))

    model, tokens = Tied(), jax.random.randint(jax.random.key(0), (4, 32), 0, 40)
    given, kernels = plain(model), {"embed/embedding": qt.Operand("int4_group32")}
    made = tuned(given, kernels, [tokens], Settings("smoothquant"))
    assert all(made.params[name] is given.params[name] for name in given.params)
    assert made.kernels["embed/embedding"].factors.shape == (1, WIDTH)


class Mixing(nnx.Module):
    """A norm, and a layer that does not sum over the norm's features alone."""

    def __init__(self, layer):
        self.norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
        self.norm.scale[...] = jnp.linspace(0.25, 4, WIDTH)
        self.layer = layer

    def __call__(self, x):
        return self.layer(self.norm(x))


@pytest.mark.sample("tokens-awq", *(f"{n}-smoothquant" for n in ("few tokens", "two axes", "conv")))
@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.parametrize(
    ("layer", "tokens", "along"),
    [
        (lambda: nnx.Einsum("bsd,st->btd", (WIDTH, WIDTH), rngs=nnx.Rngs(1)), WIDTH, (0,)),
        (lambda: nnx.Einsum("bsd,st->btd", (8, 8), rngs=nnx.Rngs(1)), 8, (0,)),
        (lambda: nnx.LinearGeneral((8, WIDTH), 5, axis=(-2, -1), rngs=nnx.Rngs(1)), 8, (0, 1)),
        (lambda: nnx.Conv(WIDTH, 5, (3,), rngs=nnx.Rngs(1)), 8, (1,)),
    ],
    ids=["tokens", "few tokens", "two axes", "conv"],
)
def test_the_norm_takes_factors_only_for_sums_over_features(method, layer, tokens, along):
    model, x = Mixing(layer()), jax.random.normal(jax.random.key(2), (256, tokens, WIDTH))
    x = x * jnp.linspace(0.2, 5, tokens)[:, None]
    given = plain(model)
    kernels = {"layer/kernel": qt.Operand("e4m3fn")}
    made = tuned(given, kernels, [x], Settings(method))
    assert all(made.params[name] is given.params[name] for name in given.params)
    for kernel in made.kernels.values():  # AWQ may find that factors of 1 are best
        sizes = [n if axis in along else 1 for axis, n in enumerate(kernel.shape)]
        assert kernel.factors.shape == tuple(sizes)
        served = qt.nnx.quantize(model, "e4m3fn", [x], method=method)
        y = model(x)
        np.testing.assert_allclose(served(x), y, atol=0.06 * float(jnp.abs(y).max()))
    assert made.kernels or method == "awq"


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": (3, 2), "strides": (2, 1)},
        {"kernel_size": (3, 3), "padding": "VALID", "kernel_dilation": (2, 1)},
        {"kernel_size": (2, 3), "padding": ((1, 1), (1, 1)), "input_dilation": (2, 1)},
        {"kernel_size": (4, 4), "padding": ((1, 2), (0, 3))},
    ],
    ids=str,
)
def test_patches_times_the_kernel_are_the_convolution(options):
    model = nnx.Conv(3, 5, rngs=nnx.Rngs(0), use_bias=False, **options)
    x = jax.random.normal(jax.random.key(0), (2, 7, 9, 3))
    products = []

    def visit(use):
        products.append(use.rows(0) @ use.how.matrices(use.kernel)[0])

    plain(model).tracked([Batch.of(x)], visit)
    expected = model(x)
    np.testing.assert_allclose(products[0].reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
