"""What XLA's compiler for NVIDIA's GPUs makes of our programs; no GPU is needed, and none runs.

What runs on one is compared by `experiments/benchmarks/gpu.py` and `every_float32.py`. These tests
are about failures of the compiler, and about branches, at which a GPU waits for its host.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks._language_model import ByteTransformer, bits_per_byte
from flax import nnx
from jax.experimental import topologies

import qtoolkit as qt

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 1 patch: 0 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# Blackwell, whose tensor cores take MX blocks: what else is of an H100 decides about speed alone.
B200 = (
    H100.replace("major: 9", "major: 10")
    .replace("core_count: 132", "core_count: 148")
    .replace("H100 80GB HBM3", "B200")
)
NUMBERS = (((1,), (0,)), ((), ()))
TE = qt.recipes.te_current
RECIPES = {
    "te_current": TE,
    "native": dataclasses.replace(TE, arithmetic="native"),
    "token_scaled": qt.recipes.token_scaled,
    "mxfp8": qt.recipes.mxfp8,
    "native mxfp8": dataclasses.replace(qt.recipes.mxfp8, arithmetic="native"),
    "nvfp4": qt.recipes.nvfp4,
    "deepseek_v3": qt.recipes.deepseek_v3,
    "int8_qat": qt.recipes.int8_qat,
}


@functools.cache
def place(gpu):
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="described", topology="1x1x1", target_config=gpu
    )
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compiled(function, *arguments, gpu=H100, has_signs=False):
    """The text of the program, traced as on a host with a GPU, compiled for arrays like these.

    `has_signs`: it has a Hadamard transform, whose signs are computed while it is traced: here.
    """

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(gpu))

    with jax.default_device("cpu" if has_signs else "gpu"):
        return jax.jit(function).lower(*jax.tree.map(like, arguments)).compile().as_text()


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_large_products_and_their_gradients(name, dtype):
    """XLA 0.11 pulled what makes a scale into the kernel of the product, and failed there."""

    def step(x, w, ct):
        y, pull = jax.vjp(lambda x, w: qt.dot_general(x, w, NUMBERS, recipe=RECIPES[name]), x, w)
        return y, *pull(ct)

    shapes = (8192, 4096), (4096, 4096), (8192, 4096)
    arrays = (struct(*shape, dtype=dtype) for shape in shapes)
    text = compiled(step, *arrays, has_signs=name == "nvfp4")
    if name != "nvfp4":  # its amax of a tensor may hold NaN blocks, which is a branch
        assert "conditional(" not in text
    if name == "native":
        assert {"f8e4m3fn[", "f8e5m2["} <= set(re.findall(r"f8e\w+\[", text))


@pytest.mark.parametrize("gpu", [H100, B200], ids=["H100", "B200"])
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("mxfp8", {"scaled-dot": 3, "dot": 0}),
        ("mxfp4", {"scaled-dot": 3, "dot": 0}),  # in E4M3FN
        ("nvfp4", {"scaled-dot": 0, "dot": 3}),  # E4M3 scales: multiplied in bfloat16
    ],
)
def test_native_products_of_blocks(name, counts, gpu):
    """What XLA makes of `jax.lax.scaled_dot`: a scaled product of its own, or its parts."""
    base = qt.recipes.nvfp4 if name == "nvfp4" else qt.Recipe(name)
    recipe = dataclasses.replace(base, arithmetic="native")

    def step(x, w, ct):  # two axes for wgrad to sum
        numbers = (((2,), (0,)), ((), ()))
        y, pull = jax.vjp(lambda x, w: qt.dot_general(x, w, numbers, recipe=recipe), x, w)
        return y, *pull(ct)

    shapes = (4, 512, 1024), (1024, 2048), (4, 512, 2048)
    arrays = (struct(*shape, dtype=jnp.bfloat16) for shape in shapes)
    text = compiled(step, *arrays, gpu=gpu, has_signs=name == "nvfp4")
    found = re.findall(r" (scaled-dot|dot)\(", text)
    assert {kind: found.count(kind) for kind in counts} == counts


@pytest.mark.parametrize("batch", [1, 2])
def test_vmapped_products(batch):
    product = jax.vmap(lambda x, w: qt.dot_general(x, w, NUMBERS), (0, None))
    compiled(product, struct(batch, 16, 16), struct(16, 16))


@pytest.mark.parametrize("spec", ["e4m3fn", "int8", "mxfp8_e4m3", "nvfp4", "deepseek_1x128"])
def test_quantize_and_back(spec):
    def both(x):
        q = qt.quantize(x, spec)
        return q, q.dequantize(), qt.fake_quantize(x, spec)

    compiled(both, struct(256, 1024, dtype=jnp.bfloat16))


@pytest.mark.parametrize("name", ["te_current", "native", "mxfp8", "native mxfp8"])
def test_a_language_model_trains_without_waiting_for_the_host(name):
    model = qt.nnx.wrap(ByteTransformer(rngs=nnx.Rngs(0)), RECIPES[name])
    graph, state = nnx.split(model)

    def gradients(state, batch):
        def loss(state):
            return bits_per_byte(nnx.merge(graph, state), batch)

        return jax.value_and_grad(loss, allow_int=True)(state)

    assert "conditional(" not in compiled(gradients, state, struct(8, 129, dtype=jnp.uint8))


def test_transposed_constant_of_an_inner_jit():
    """XLA evaluates it when it compiles, and would put its bytes at wrong places. Oracle: ml_dtypes
    and NumPy.
    """
    constant = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    codes = jax.jit(lambda c: jax.jit(lambda x: qt.encode(x, "e5m2"))(c.T))
    text = compiled(lambda x: (codes(constant), x + 1), struct(3))
    expected = constant.T.astype(jnp.float8_e5m2).view(np.uint8).tolist()
    rows = ", ".join(f"{{ {first}, {second} }}" for first, second in expected)
    assert f"constant({{ {rows} }})" in text
