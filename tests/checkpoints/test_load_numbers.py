"""`load` of numbers in a dtype into a sharded tree. Oracle: `dequantize_checkpoint` and NumPy."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from refused import refused
from stored import stored

from qtoolkit.checkpoints import CheckpointError, convert, dequantize_checkpoint, load, save

SHAPES = {f"model.layers.{i}.{x}_proj.weight": (256, 128) for i in range(2) for x in ("up", "gate")}
SHAPES |= {f"model.layers.{i}.down_proj.weight": (128, 256) for i in range(2)}
SHAPES |= {"model.norm.weight": (128,), "lm_head.weight": (64, 128)}
BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "src"
    path.mkdir()
    rng = np.random.default_rng(0)
    save(
        path / "model.safetensors",
        {name: rng.normal(size=shape).astype(BF16) for name, shape in SHAPES.items()},
    )
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return path


def flax_name(name):
    """Kernels are [inputs, outputs]."""
    if not name.endswith("kernel"):
        return name.replace("scale", "weight")
    return name.replace("kernel", "weight"), (1, 0)


def structs(sharding=None):
    tree = {}
    for name, shape in SHAPES.items():
        last = "scale" if len(shape) == 1 else "kernel"
        struct = jax.ShapeDtypeStruct(shape[::-1], jnp.bfloat16, sharding=sharding)
        tree[name.removesuffix("weight") + last] = struct
    return tree


@pytest.mark.parametrize(
    ("layout", "fmt", "scaling"),
    [
        ("compressed-tensors", "nvfp4", None),
        ("compressed-tensors", "int4_group32", None),
        ("finegrained-fp8", "e4m3fn", None),
        ("plain", "e4m3fn", "tensor"),
    ],
)
def test_any_folder_becomes_bfloat16_where_the_tree_says(tmp_path, source, layout, fmt, scaling):
    mesh = jax.make_mesh((4,), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    convert(source, tmp_path / "dst", layout=layout, format=fmt, scaling=scaling)
    dequantize_checkpoint(tmp_path / "dst", tmp_path / "wide", dtype="bfloat16")
    expected = stored(tmp_path / "wide")
    found = load(tmp_path / "dst", structs(rows), dtype=jnp.bfloat16, names=flax_name)
    for name, array in found.items():
        place = flax_name(name)
        wide = expected[place] if isinstance(place, str) else expected[place[0]].T
        assert (array.dtype, array.sharding) == (BF16, rows)
        np.testing.assert_array_equal(array, wide)
    for name, array in load(tmp_path / "dst", dtype="float16").items():
        assert array.dtype == np.float16, name


def test_a_table_of_names_a_state_of_nnx_and_another_shape(tmp_path):
    heads = nnx.MultiHeadAttention(
        num_heads=4, in_features=32, use_bias=False, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16
    )
    rng = np.random.default_rng(0)
    weights = {f"attn.{x}_proj.weight": rng.normal(size=(32, 32)).astype("f4") for x in "qkvo"}
    save(tmp_path / "model.safetensors", weights | {"rotary.inv_freq": np.ones(4, np.float32)})
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    table = {f"{key}.kernel": (f"attn.{x}_proj.weight", (1, 0)) for key, x in names.items()}
    like = nnx.state(heads, nnx.Param)
    options = {"dtype": "bfloat16", "names": table}
    with refused(CheckpointError, r"tensor rotary\.inv_freq, which `like` has not"):
        load(tmp_path / "model.safetensors", like, **options)
    state = load(tmp_path / "model.safetensors", like, skip=["inv_freq"], **options)
    assert isinstance(state, nnx.State)
    for key, x in names.items():
        kernel = np.asarray(state[key]["kernel"][...], np.float32)
        wide = weights[f"attn.{x}_proj.weight"].astype(BF16).astype(np.float32).T
        np.testing.assert_array_equal(kernel, wide.reshape(kernel.shape))
    nnx.update(heads, state)


def test_what_names_and_skip_need(source):
    for options in ({"names": {}}, {"skip": ["a"]}):
        refused(TypeError, r"load: names or skip without like", load, source, **options)
    refused(TypeError, r"load: names without dtype", load, source, structs(), names=flax_name)
    refused(CheckpointError, r"dtype int8", load, source, dtype="int8")
    with refused(CheckpointError, r"kernel, which the file has not"):
        load(source, structs(), dtype="bfloat16", names={})
    # As many numbers, but another matrix: its axes have to be swapped, or it is another layer's.
    for shape in ((128, 256), (64, 512)):
        wrong = {"a": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
        with refused(CheckpointError, r"shape \(256, 128\)"):
            load(source, wrong, dtype="bfloat16", names={"a": "model.layers.0.up_proj.weight"})
    head = {"a": jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)}
    with refused(CheckpointError, r"model\.layers"):  # a string is one pattern, not seven
        load(source, head, dtype="bfloat16", names={"a": "lm_head.weight"}, skip="lm_head")
    like = {"a": jax.ShapeDtypeStruct((1, 3), jnp.bfloat16)}
    table = {"a": "model.layers.0.up_proj.weight"}
    with refused(CheckpointError, r"shape \(256, 128\)"):
        load(source, like, dtype="bfloat16", names=table)


SCRIPT = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np
from qtoolkit.checkpoints import load
first = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
load(sys.argv[1], {"w0.weight": first}, dtype="float32", skip=["."])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tree = {f"w{i}.weight": first for i in range(48)}
state = load(sys.argv[1], tree, dtype="float32")
jax.block_until_ready(state)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_the_host_holds_one_weight_besides_the_result(tmp_path):
    """48 weights of 4 MiB: the result, and not twice that."""
    x = np.ones((1024, 1024), BF16)
    save(tmp_path / "src", {f"w{i}.weight": x for i in range(48)})
    convert(tmp_path / "src", tmp_path / "dst", scaling="channel")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "dst")]
    grown = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert grown < (48 + 12) * 4 * 1024
