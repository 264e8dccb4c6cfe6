"""`save` and `load` of states and quantized arrays. Oracles: what was saved; the library
`safetensors`, which reads the same file; the wrapped model for the path from `convert` to a served
one.
"""

import collections
import dataclasses
import json
import struct

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refused import refused
from stored import stored

import qtoolkit as qt
from qtoolkit.checkpoints import (
    CheckpointError,
    compare,
    convert,
    dequantize,
    dequantize_checkpoint,
    load,
    save,
    verify,
)
from qtoolkit.checkpoints.internal import in_data_order, open_source, write_safetensors
from qtoolkit.scaling import QArray

X = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
OWN = qt.TableFormat(name="own", values_by_code=(0.0, 1.0, np.nan, -3.0))
WEIGHTS = qt.recipes.weight_only_e4m3


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.norm(x)


def are_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def header(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


@pytest.mark.sample("e4m3fn", "mxfp4", "bfloat16", "uint8 by channel@-1, zero_point=True")
@pytest.mark.quick
@pytest.mark.parametrize(
    "spec",
    [
        *("e4m3fn", "int8", "mxfp4", "nvfp4", "int4_group32", "bfloat16", "mxint8"),
        qt.BlockFormat.channel("uint8", zero_point=True),
        qt.BlockFormat(element="e5m2", block=(None,), axes=(0,), amax_epsilon=1e-4),
        qt.BlockFormat.tensor(qt.p3109(6, 2)),
        qt.BlockFormat.tensor(OWN),
    ],
    ids=str,
)
def test_quantized_arrays_come_back(tmp_path, spec):
    array = qt.quantize(X, spec)
    packed = array.pack() if array.spec.element.bits < 8 else array
    tree = {"a": {"w": array, "b": jnp.arange(3)}, "c": [packed, (np.float16(2), None)]}
    save(tmp_path / "x.safetensors", tree)
    found = load(tmp_path / "x.safetensors")
    assert set(found) == {"a.w", "a.b", "c.0", "c.1.0"}
    are_equal(found["a.w"], array)
    are_equal(load(tmp_path / "x.safetensors", like=tree)["c"][0], packed)
    np.testing.assert_array_equal(found["c.0"].dequantize(), array.dequantize())


@pytest.mark.parametrize(
    "tree",
    [
        lambda: nnx.state(Model(nnx.Rngs(0)), nnx.Param),  # of a list of layers, and a norm
        lambda: {"a": nnx.state(Model(nnx.Rngs(0)), nnx.Param)},
        lambda: collections.defaultdict(list, {"b": jnp.ones(3), "a": {"c": jnp.zeros(2)}}),
        lambda: collections.OrderedDict(b=jnp.ones(3), a=jnp.zeros(2)),
        lambda: flax.core.freeze({"params": {"b": jnp.ones(3), "a": jnp.zeros(2)}}),
    ],
    ids=["nnx", "nnx in a dict", "defaultdict", "OrderedDict", "FrozenDict"],
)
def test_a_tree_comes_back_with_the_structure_that_jax_sees(tmp_path, tree):
    """Else jax.tree.map(f, state, loaded) fails, and jit compiles anew. Oracle: JAX's treedef."""
    save(tmp_path / "x.safetensors", tree())
    are_equal(load(tmp_path / "x.safetensors", like=tree()), tree())


def test_the_file_is_one_that_others_read(tmp_path):
    """Codes in their own dtype under the name, scales beside them: `load` knows them, too."""
    path = tmp_path / "x.safetensors"
    save(path, {"layer": {"kernel": qt.quantize(X, qt.BlockFormat.channel("e4m3fn"))}})
    entries = header(path)
    assert entries["layer.kernel"]["dtype"] == "F8_E4M3"
    assert entries["layer.kernel_scale"] == {
        "dtype": "F32",
        "shape": [1, 64],
        "data_offsets": entries["layer.kernel_scale"]["data_offsets"],
    }
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == {"layer.kernel", "layer.kernel_scale"}
        scale = file.get_tensor("layer.kernel_scale")
    with open_source(path) as file:
        raw = {name: file.read(name) for name in file.tensors}
    np.testing.assert_array_equal(scale, raw["layer.kernel_scale"])
    expected = load(path)["layer.kernel"].dequantize()
    save(tmp_path / "raw.safetensors", raw)  # without metadata
    values = dequantize(load(tmp_path / "raw.safetensors"))
    np.testing.assert_array_equal(values["layer.kernel"], expected)


def test_from_a_converted_checkpoint_to_a_served_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained, x = Model(nnx.Rngs(0)), X[:, :16]
    save("unquantized.safetensors", nnx.state(trained, nnx.Param))
    convert("unquantized.safetensors", "e4m3.safetensors", scaling="channel")
    # Five lines:
    model = Model(nnx.Rngs(1))
    weights = qt.checkpoints.load("e4m3.safetensors", like=nnx.state(model, nnx.Param))
    nnx.update(model, weights)
    served = qt.nnx.quantize(model, qt.recipes.weight_only_e4m3)
    y = served(x)
    np.testing.assert_array_equal(y, qt.nnx.wrap(trained, WEIGHTS)(x))
    save("served.safetensors", nnx.state(served))
    again = qt.nnx.quantize(Model(nnx.Rngs(2)), WEIGHTS)
    nnx.update(again, load("served.safetensors", like=nnx.state(again)))
    np.testing.assert_array_equal(again(x), y)


def test_bad_states(tmp_path):
    path = tmp_path / "x.safetensors"
    own = qt.BlockFormat.tensor("int8").with_(rule=lambda amax, largest: amax / largest)
    key = jax.random.key(0)
    for tree, message in (
        ({"a": {"b": object()}}, r"tensor a\.b has type object, expected an array, a QArray"),
        ({"a": "text"}, "tensor a has type str"),
        ({"a": key}, "tensor a is a key of jax.random, expected an array; store jax.random.key_d"),
        ({"a.b": X, "a": {"b": X}}, r"tensor a\.b: two arrays of the state have this name"),
        ({"a": qt.quantize(X, "int8"), "a_scale": X}, "tensor a_scale: two arrays"),
        ({(1, 2): X}, r"the state: key \(1, 2\), expected text"),
        ({"a": np.ones(2, "complex128")}, "tensor a: dtype complex128, expected one of"),
        ({"a": qt.quantize(X, own)}, "has a function as its rule"),
    ):
        refused(CheckpointError, message, save, path, tree)
        assert not path.exists()


def test_a_model_or_an_array_in_place_of_a_state(tmp_path):
    path, model = tmp_path / "x.safetensors", nnx.Linear(64, 4, rngs=nnx.Rngs(0))
    for what in (X, model):
        with refused(
            CheckpointError, r"expected arrays by name; .*nnx\.state\(model, nnx\.Param\)"
        ):
            save(path, what)
    save(path, nnx.state(model))
    with refused(
        CheckpointError, r"`like` has type Linear, .* like=nnx\.state\(model, nnx\.Param\)"
    ):
        load(path, like=model)


def test_dequantize_takes_what_load_gives(tmp_path):
    path = tmp_path / "x.safetensors"
    quantized = qt.quantize(X, "mxfp8_e4m3")
    save(path, {"w": quantized, "bias": X[0]})
    values = qt.checkpoints.dequantize(load(path))
    np.testing.assert_array_equal(values["w"], quantized.dequantize())
    np.testing.assert_array_equal(values["bias"], X[0])


@pytest.mark.parametrize("ending", [".npz", ".msgpack", ".gguf", ".BIN", ".pt"])
def test_names_of_other_containers_are_refused(tmp_path, ending):
    with refused(CheckpointError, r"a safetensors file, .*; name it .*x\.safetensors"):
        save(tmp_path / f"x{ending}", {"a": X})
    assert not list(tmp_path.iterdir())


def test_bad_files(tmp_path):
    path = tmp_path / "x.safetensors"
    save(path, {"a": X, "b": qt.quantize(X, "int8"), "n": np.arange(3)})
    for like, message in (
        ({"a": X}, "tensors n, b, which `like` has not; add them to it, or name them in skip="),
        ({"a": X, "b": X, "n": np.arange(3), "z": X}, ": tensor z, which the file has not"),
        ({"a": X[0], "b": X, "n": np.arange(3)}, r"tensor a: shape \(4, 64\), expected \(64,\)"),
        ({"a": X, "b": X, "n": np.ones(3)}, "tensor n: dtype int64, expected float64"),
    ):
        refused(CheckpointError, message, load, path, like=like)
    found = load(path, like={"a": X, "b": X, "n": np.arange(3)})
    assert isinstance(found["b"], QArray)
    nested = tmp_path / "nested.safetensors"
    save(nested, {"params": {"a": X}, "step": np.ones(1)})
    for like, message in (
        ({"a": X}, r'write like=\{"params": ...\} around yours; the file also has step'),
        ({"params": {"params": {"a": X}}}, r"give what is in like\['params'\]"),
    ):
        refused(CheckpointError, message, load, nested, like=like)
    load(nested, like={"params": {"a": X}}, skip=["^(?!params[.])"])
    for text in ("nonsense", '{"b": {}}', '{"b": 3}', '{"c": {"spec": "int8", "packed_size": 1}}'):
        arrays = {"b": np.zeros((4, 64), np.int8)}
        written(path, arrays, text)
        refused(CheckpointError, "'qtoolkit_arrays' does not describe", load, path)


def written(path, arrays, text):
    infos = in_data_order((name, "I8", a.shape) for name, a in arrays.items())
    metadata = {"qtoolkit_arrays": text}
    chunks = arrays.items()
    write_safetensors(path, infos, chunks, metadata, overwrite=True)


@pytest.mark.parametrize("step", ["convert", "dequantize"])
def test_a_requantized_qarray_is_no_longer_described(tmp_path, step):
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    kept = qt.quantize(x, qt.BlockFormat.tensor("int4")).pack()
    first = qt.quantize(x, qt.BlockFormat.channel("e4m3fn", 0))
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save(a, {"w": first, "packed": kept})
    value = np.asarray(first.dequantize())
    if step == "convert":
        convert(a, b, format="int8", scaling="channel", channel_axis="first")
        assert stored(b)["packed"].dtype == np.int8
        scale = np.abs(value).max(1, keepdims=True) / np.float32(127)
        assert stored(b)["w"].dtype == np.int8
        np.testing.assert_array_equal(stored(b)["w"], np.rint(value / scale))
        np.testing.assert_array_equal(stored(b)["w_scale"], scale)
    else:
        dequantize_checkpoint(a, b)
        np.testing.assert_array_equal(load(b)["w"], value)
        np.testing.assert_array_equal(load(b)["packed"], kept.dequantize())
    with open_source(b) as source:
        assert "qtoolkit_arrays" not in source.metadata


PACKED = {
    "int4 by channel": (qt.BlockFormat.channel("int4", 0), (6, 64)),
    "int4 by tensor": (qt.BlockFormat.tensor("int4"), (6, 64)),
    "int4 by groups of rows": (qt.spec("int4_group32").along(0), (64, 6)),
    "odd rows": (qt.BlockFormat.channel("int4", 0), (7, 33)),
    "odd rows, columns": (qt.BlockFormat.channel("int4", 1), (7, 33)),
    "axes that can be merged": (qt.BlockFormat.tensor("int4"), (3, 5, 7)),
    "a stack": (qt.BlockFormat.channel("int4", -1), (3, 5, 7)),
    "one axis": (qt.BlockFormat.tensor("int4"), (9,)),
    "two scales": ("nvfp4", (8, 64)),
    "powers of two": ("mxfp4", (8, 64)),
    "a table": ("nf4", (8, 64)),
    "two bits": (qt.BlockFormat.channel("int2", 0), (5, 39)),
    "six bits": ("mxfp6_e2m3", (5, 96)),
    "six bits, not whole groups": (qt.BlockFormat.channel("e2m3fn", 0), (5, 39)),
}


@pytest.mark.parametrize("kind", PACKED)
def test_packed_arrays_are_read(tmp_path, kind):
    """Oracle: `QArray.dequantize`, and `quantize` for what `verify` expects."""
    spec, shape = PACKED[kind]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    array = qt.quantize(x, spec)
    a, b, wide = (tmp_path / name for name in ("a", "b", "unquantized"))
    save(wide, {"w": x})
    save(a, {"w": array.pack()})
    dequantize_checkpoint(a, b)
    np.testing.assert_array_equal(load(b)["w"], array.dequantize())
    assert verify(wide, a).problems == ()
    (found,) = compare(b, a).tensors
    assert (found.equal, found.size) == (True, x.size)
    save(a, {"w": array}, overwrite=True)
    assert found.format == compare(b, a).tensors[0].format
    damaged = dataclasses.replace(array.pack(), codes=array.pack().codes.at[-1].add(1))
    save(a, {"w": damaged}, overwrite=True)
    assert len(verify(wide, a).problems) == 1


def test_packed_arrays_that_vmap_has_stacked(tmp_path):
    """`lengths` are those of the last axes alone."""
    x = np.random.default_rng(0).normal(size=(3, 8, 64)).astype(np.float32)
    array = jax.vmap(lambda x: qt.quantize(x, "nvfp4"))(x)
    for one in (array, array.pack()):
        save(tmp_path / "a", {"w": one}, overwrite=True)
        dequantize_checkpoint(tmp_path / "a", tmp_path / "b", overwrite=True)
        np.testing.assert_array_equal(load(tmp_path / "b")["w"], array.dequantize())


COPIED = {
    "packed, zero points": qt.BlockFormat.tensor("uint4", zero_point=True),
    "int16": qt.BlockFormat.channel("int16", 0),
    "float16": qt.BlockFormat.tensor("float16"),
    "scales without a dtype": qt.BlockFormat(
        element="e4m3fn", block=(32,), axes=(-1,), scale="ue4m3"
    ),
}


@pytest.mark.parametrize("kind", COPIED)
def test_arrays_that_commands_do_not_read_keep_their_numbers(tmp_path, kind):
    """Oracle: `QArray.dequantize`. Scales cast to float16 left codes that nothing described."""
    x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    array = qt.quantize(x, COPIED[kind])
    array = array.pack() if kind.startswith("packed") else array
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save(a, {"w": array, "unquantized": x, "read": qt.quantize(x, "mxfp8_e4m3")})
    for options in (
        {},
        {"keep_dtype": "float16"},
        {"keep_dtype": "float16", "skip": "unquantized"},
    ):
        convert(a, b, format="e4m3fn", overwrite=True, **options)
        np.testing.assert_array_equal(load(b)["w"].dequantize(), array.dequantize())
    dequantize_checkpoint(a, b, dtype="bfloat16", overwrite=True)
    assert load(b)["read"].dtype == "bfloat16"
    np.testing.assert_array_equal(load(b)["w"].dequantize(), array.dequantize())
    with refused(CheckpointError, "of a quantized array, which rules cannot"):
        convert(a, b, format=qt.Rules({"scale": "e4m3fn"}), overwrite=True)
    save(a, {"w": array}, overwrite=True)
    with refused(CheckpointError, r"do not read: .*load\(FILE\)\[NAME\]"):
        dequantize_checkpoint(a, b, overwrite=True)


@pytest.mark.sample(
    *("(200, 200)-int8_group128", "(200, 200)-mxfp6_e2m3", "(200, 200)-nvfp4"),
    *("(200, 200)-binary6p2se by tensor", "(136, 1000)-mxfp8_e4m3", "(136, 1000)-mxfp4"),
    *("(136, 1000)-deepseek_128x128", "(136, 1000)-e5m2 by token@0", "(3, 160, 130)-mxfp6_e2m3"),
    *("(3, 160, 130)-mxint8", "(3, 160, 130)-int8 by blocks of 100x100"),
    "(3, 160, 130)-binary6p2se by tensor",
)
@pytest.mark.parametrize(
    "spec",
    [
        *(
            "int8_group128",
            "mxfp8_e4m3",
            "mxfp6_e2m3",
            "mxfp4",
            "mxint8",
            "nvfp4",
            "deepseek_128x128",
        ),
        qt.BlockFormat(element="int8", block=(100, 100)),
        qt.BlockFormat(element="e4m3fn", block=(50,), axes=(-2,), scale="bfloat16"),
        qt.BlockFormat.channel("int4", 0),
        qt.BlockFormat.tensor(qt.p3109(6, 2)),
        qt.BlockFormat(element="e5m2", block=(None,), axes=(0,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(200, 200), (136, 1000), (3, 160, 130)], ids=str)
def test_commands_read_the_blocks_of_saved_qarrays(tmp_path, spec, shape):
    """200 columns with 2 scales: blocks of 100, which the metadata says, and not of 128."""
    rng = np.random.default_rng(0)
    array = qt.quantize(
        (rng.normal(size=shape) * np.exp(rng.normal(size=shape))).astype("f4"), spec
    )
    path, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save(path, {"w": array, "norm": np.ones(3, np.float32)})
    dequantize_checkpoint(path, out, dtype="float32")
    found = load(out)
    assert set(found) == {"w", "norm"}
    np.testing.assert_array_equal(found["w"], array.dequantize())


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("a.weight", (200, 300), {"scaling": "block"}),
        ("a.weight", (100, 300), {"scaling": "block"}),
        ("a.weight", (300, 100), {"scaling": "block"}),
        ("a.weight", (8, 12), {"scaling": "tensor"}),
        ("a.attention.query.kernel", (8, 2, 6), {"scaling": "channel", "channel_axis": "last"}),
        ("model.layers.0.experts.gate_up_proj", (3, 8, 12), {"scaling": "block"}),
    ],
)
def test_what_convert_quantized_is_loaded_like_the_model(tmp_path, name, shape, options):
    """Oracle: `dequantize`."""
    path, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    save(path, {name: x})
    convert(path, out, layout="plain", **options)
    found = load(out, like={name: jax.ShapeDtypeStruct(shape, np.float32)})[name]
    assert isinstance(found, QArray)
    np.testing.assert_array_equal(found.dequantize(), dequantize(load(out))[name])


def test_what_training_keeps_is_copied_not_quantized(tmp_path):
    model = qt.nnx.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
    save(tmp_path / "state.safetensors", nnx.state(model))
    report = convert(tmp_path / "state.safetensors", tmp_path / "fp8.safetensors")
    assert [tensor.name for tensor in report.quantized] == ["kernel"]
    kept = load(tmp_path / "fp8.safetensors")
    for name, array in load(tmp_path / "state.safetensors").items():
        if name != "kernel":
            np.testing.assert_array_equal(kept[name], array, err_msg=name)
