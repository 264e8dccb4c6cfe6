"""Native FP8 as XLA compiles it for an H100: which kernels multiply, and what all others move.

Yardsticks are programs that were compiled by hand before this existed, in bytes for each element of
an operand: cast to codes and transposed codes in one kernel (2 + 1 + 1), amax in a pass of its own
(2); or amax in the cast's kernel (2 + 1) and the codes transposed in another (1 + 1), the least.
Times need a GPU: `experiments/benchmarks/gpu_training.py`.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rewritten import quantized
from test_cuda_compile import H100, place

import qtoolkit as qt
from qtoolkit.products import native_calls
from qtoolkit.scaling.internal import BUCKETS

NUMBERS = (((1,), (0,)), ((), ()))
# Ways to compile. A GPU that is only described cannot choose between cuBLASLt and Triton by
# measuring, and would always take Triton: the second is what a user gets where cuBLASLt is faster.
WAYS = {
    "without Triton": {"xla_gpu_enable_triton_gemm": False},
    "cuBLASLt chosen": {
        "xla_gpu_experimental_autotune_backends": (
            "BLOCK_LEVEL_EMITTER,NATIVE_EMITTER,CUBLASLT_FISSION"
        )
    },
    "Triton chosen": {},
}
LEAST = 5  # bytes for an element, see above
RECIPES = {
    name: dataclasses.replace(getattr(qt.recipes, name), arithmetic="native")
    for name in ("te_current", "te_delayed_hybrid", "native_fp8", "native_fp8_current")
}
TOKEN = dataclasses.replace(qt.recipes.token_scaled, arithmetic="native")
MLP = {"square": (8192, 4096, 4096), "up": (8192, 4096, 14336), "down": (8192, 14336, 4096)}


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place(H100))


@functools.cache
def compiled(way, name, shape):
    """The text of y, dx and dw of a product [m, k] x [k, n] by a recipe."""
    recipe, (m, k, n) = TOKEN if name == "token_scaled" else RECIPES[name], shape

    def step(x, w, ct, amax):
        def product(x, w, probe):
            return quantized(recipe, jnp.matmul, amax, probe, x, w)

        y, pull = jax.vjp(product, x, w, jnp.zeros((3, BUCKETS)))
        return y, *pull(ct)[: 2 + recipe.is_delayed]

    arguments = struct(m, k), struct(k, n), struct(m, n), struct(3, dtype=jnp.float32)
    return text_of(step, way, *arguments)


def text_of(function, way, *arguments):
    with jax.default_device("gpu"):  # as on a host that has one
        lowered = jax.jit(function).lower(*arguments)
    return lowered.compile(compiler_options=WAYS[way]).as_text()


def assert_three_in_fp8(text, way):
    """By our reader, and by a plain look at the text."""
    found = native_calls(text)
    assert len(found.calls) == len(found.in_fp8) == 3
    assert {call.result.partition("[")[0] for call in found.calls} == {"bf16"}
    by = "Triton" if way == "Triton chosen" else "cuBLASLt"
    assert {call.by for call in found.calls} == {by}
    if by == "cuBLASLt":
        calls = re.findall(r"= \((\w+)\[[^=]*custom_call_target=\"([^\"]*matmul[^\"]*)\"", text)
        assert calls == [("bf16", "__cublas$lt$matmul$f8")] * 3
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", MLP)
@pytest.mark.parametrize("name", RECIPES)
def test_three_fp8_products_and_few_bytes(name, shape, way):
    m, k, n = MLP[shape]
    found = assert_three_in_fp8(compiled(way, name, MLP[shape]), way)
    elements = m * k + k * n + m * n
    assert found.other_bytes <= 1.3 * LEAST * elements
    if name == "native_fp8":  # amax in the cast's kernel: one read of each operand
        assert found.other_bytes <= 1.01 * LEAST * elements
        assert found.kernels <= 15


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", MLP)
def test_scales_of_tokens_and_channels_multiply_the_result(shape, way):
    """Each operand is scaled along two axes: two amaxes (2 + 2), casts from one read (2 + 1 + 1).
    Each result is read, scaled and written (2 + 2).
    """
    m, k, n = MLP[shape]
    found = assert_three_in_fp8(compiled(way, "token_scaled", MLP[shape]), way)
    assert found.other_bytes <= 1.3 * 12 * (m * k + k * n + m * n)


def test_grouped_products_multiply_in_fp8():
    """XLA multiplies all rows by all groups and masks them, in bfloat16 as well."""

    def step(x, w, ct, sizes):
        product = functools.partial(
            qt.ragged_dot, group_sizes=sizes, recipe=qt.recipes.native_fp8_current
        )
        y, pull = jax.vjp(product, x, w)
        return y, *pull(ct)

    shapes = (1024, 512), (4, 512, 2048), (1024, 2048)
    sizes = struct(4, dtype=jnp.int32)
    assert_three_in_fp8(text_of(step, "without Triton", *map(struct_of, shapes), sizes), "cuBLASLt")


def struct_of(shape):
    return struct(*shape)


def test_two_gpus_gather_no_operand():
    """Examples over two GPUs: both reduce amaxes and the weight's gradient, and send nothing else.
    XLA gathers an array whose layout is constrained.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="two", topology="1x1x2", target_config=H100
    )
    mesh = Mesh(np.array(topology.devices), ("examples",))
    rows, whole = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec("examples"), PartitionSpec())
    )

    def step(x, w, ct):
        product = functools.partial(
            qt.dot_general, dimension_numbers=NUMBERS, recipe=qt.recipes.native_fp8_current
        )
        y, pull = jax.vjp(product, x, w)
        return y, *pull(ct)

    shapes = (1024, 512), (512, 2048), (1024, 2048)
    arguments = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)
        for shape, where in zip(shapes, (rows, whole, rows), strict=True)
    )
    text = text_of(step, "without Triton", *arguments)
    assert len(native_calls(text).in_fp8) == 3
    assert "all-reduce" in text
    assert "all-gather" not in text


def test_casts_are_conversions_by_hardware(tmp_path):
    """PTX: the conversion to each format, no division, no way around by float16."""

    def step(x, w, ct):
        product = functools.partial(
            qt.dot_general, dimension_numbers=NUMBERS, recipe=qt.recipes.native_fp8_current
        )
        y, pull = jax.vjp(product, x, w)
        return y, *pull(ct)

    with jax.default_device("gpu"):
        lowered = jax.jit(step).lower(*[struct(1024, 1024)] * 3)
    # Kernels of Triton, which multiply as well, would convert for themselves.
    options = {**WAYS["without Triton"], "xla_dump_to": str(tmp_path)}
    lowered.compile(compiler_options=options)
    text = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    found = set(re.findall(r"\b(cvt\.\w+\.satfinite[\w.]*|cvt\.[\w.]*f16[\w.]*|div\.[\w.]*)", text))
    assert found == {"cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"}


# An attention block, by our products and by hand.


def attention(x, w, multiply):
    """[b, t, d] by weights [4, d, d]: four projections, scores and values of heads of 128."""
    batch, length, width = x.shape
    q, k, v = (
        multiply(f"p{i}", "btd,df->btf", x, w[i]).reshape(batch, length, -1, 128) for i in range(3)
    )
    scores = multiply("s", "bqhd,bkhd->bhqk", q, k) * jnp.bfloat16(128**-0.5)
    weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(jnp.bfloat16)
    mixed = multiply("v", "bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)
    return multiply("o", "btd,df->btf", mixed, w[3])


def by_hand(subscripts, is_current):
    """The form of the yardsticks: codes, one scalar, and the amaxes of all operands.

    `is_current`: scaled by these amaxes, which have to be known before the cast then.
    """
    (lhs, rhs), out = subscripts.split("->")[0].split(","), subscripts.split("->")[1]

    def cast(x, dtype):
        most = float(jnp.finfo(dtype).max)
        amax = jnp.max(jnp.max(jnp.abs(x), axis=-1)).astype(jnp.float32)
        scale = most / amax if is_current else 1.0
        return jnp.clip(x.astype(jnp.float32) * scale, -most, most).astype(dtype), amax

    def product(subscripts, a, b, scale):
        y = jnp.einsum(subscripts, a, b, preferred_element_type=jnp.bfloat16)
        return y * scale.astype(jnp.bfloat16) if is_current else y

    @jax.custom_vjp
    def run(x, w, probe):
        return forward(x, w, probe)[0]

    def forward(x, w, probe):
        (a, of_x), (b, of_w) = (cast(z, jnp.float8_e4m3fn) for z in (x, w))
        return product(subscripts, a, b, of_x * of_w), (a, b, of_x, of_w)

    def backward(kept, ct):
        a, b, of_x, of_w = kept
        g, of_g = cast(ct, jnp.float8_e5m2)
        dx = product(f"{out},{rhs}->{lhs}", g, b, of_g * of_w)
        dw = product(f"{lhs},{out}->{rhs}", a, g, of_x * of_g)
        return dx, dw, jnp.stack([of_x, of_w, of_g])

    run.defvjp(forward, backward)
    return run


@functools.cache
def block_text(way, name):
    """`name`: a recipe, "by hand, current" or "by hand, delayed"."""
    recipe = RECIPES.get(name)

    def step(x, w, ct, amaxes):
        def block(x, w, probes):
            def multiply(place, subscripts, a, b):
                if recipe is None:
                    return by_hand(subscripts, name.endswith("current"))(a, b, probes[place])
                product = functools.partial(jnp.einsum, subscripts)
                return quantized(recipe, product, amaxes[place], probes[place], a, b)

            return attention(x, w, multiply)

        shape = (3,) if recipe is None else (3, BUCKETS)
        y, pull = jax.vjp(block, x, w, {place: jnp.zeros(shape) for place in amaxes})
        return y, *pull(ct)

    amaxes = {name: struct(3, dtype=jnp.float32) for name in ("p0", "p1", "p2", "s", "v", "o")}
    x = struct(4, 2048, 4096)
    return text_of(step, way, x, struct(4, 4096, 4096), x, amaxes)


@pytest.mark.parametrize("way", ["without Triton", "cuBLASLt chosen"])
@pytest.mark.parametrize("name", RECIPES)
def test_an_attention_block_multiplies_in_fp8(name, way):
    """All recipes but `native_fp8` may need an operand's own amax before the cast."""
    kind = "delayed" if name == "native_fp8" else "current"
    yardstick = native_calls(block_text(way, f"by hand, {kind}"))
    assert len(yardstick.in_fp8) == 18
    found = native_calls(block_text(way, name))
    assert len(found.calls) == len(found.in_fp8) == 18
    assert {call.result.partition("[")[0] for call in found.calls} == {"bf16"}
    assert found.other_bytes <= 1.3 * yardstick.other_bytes
