"""Orbax checkpoints as sources. Oracle: the same tree as safetensors, written by `save`."""

import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from refused import refused
from stored import stored

import qtoolkit as qt
from qtoolkit.checkpoints import CheckpointError, convert, load, save
from qtoolkit.checkpoints.internal import open_source

TREE = {
    "params": {
        "dense": {"kernel": jnp.linspace(-1, 1, 64 * 32).reshape(64, 32).astype(jnp.bfloat16)},
        "layers": [{"kernel": jnp.full((4, 6), i + 0.3)} for i in range(2)],
        "norm": {"scale": jnp.ones(7)},
    },
    "step": 3,
}
NAMES = {
    "params.dense.kernel": ("BF16", (64, 32)),
    "params.layers.0.kernel": ("F32", (4, 6)),
    "params.layers.1.kernel": ("F32", (4, 6)),
    "params.norm.scale": ("F32", (7,)),
    "step": ("I64", ()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "tree", TREE)
    with ocp.CheckpointManager(root / "steps") as manager:
        manager.save(12, args=ocp.args.StandardSave(TREE))
    with ocp.CheckpointManager(root / "items", item_names=("params", "more")) as manager:
        pair = {name: ocp.args.StandardSave({"w": jnp.ones((2, 2))}) for name in ("params", "more")}
        manager.save(0, args=ocp.args.Composite(**pair))
    return root


@pytest.mark.parametrize("where", ["tree", "steps/12", "steps/12/default"])
def test_a_tree_is_read_by_its_paths(folder, where):
    with open_source(folder / where) as source:
        found = {name: (info.dtype, info.shape) for name, info in source.tensors.items()}
        assert found == NAMES
        for name, expected in {
            "params.dense.kernel": TREE["params"]["dense"]["kernel"],
            "params.layers.1.kernel": TREE["params"]["layers"][1]["kernel"],
            "step": np.int64(3),
        }.items():
            data = bytearray(source.tensors[name].nbytes)
            source.tensors[name].read_into(0, memoryview(data))
            assert bytes(data) == np.asarray(expected).tobytes()


def test_converted_it_is_what_the_same_numbers_give(folder, tmp_path):
    save(tmp_path / "unquantized", {k: np.asarray(v) for k, v in flat(TREE).items()})
    options = {"format": "e4m3fn", "scaling": "channel", "channel_axis": "last"}
    convert(tmp_path / "unquantized", tmp_path / "a.safetensors", **options)
    report = convert(folder / "steps/12", tmp_path / "b.safetensors", **options)
    assert {t.name for t in report.tensors if t.action == "quantize"} == {
        "params.dense.kernel", "params.layers.0.kernel", "params.layers.1.kernel"
    }  # fmt: skip
    a, b = (stored(tmp_path / f"{name}.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    for name in a:
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes()


def flat(tree, prefix=""):
    if not isinstance(tree, dict | list):
        return {prefix[:-1]: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, value in pairs for k, v in flat(value, f"{prefix}{key}.").items()}


def test_a_model_of_nnx(tmp_path):
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "unquantized", nnx.state(model))
    with open_source(tmp_path / "unquantized") as source:
        assert set(source.tensors) == {
            f"layers.{i}.{name}" for i in range(2) for name in ("kernel", "bias")
        }
    convert(tmp_path / "unquantized", tmp_path / "narrow", scaling="channel")
    state = load(tmp_path / "narrow", like=nnx.state(model))
    nnx.update(model, state)
    assert isinstance(model.layers[0].kernel[...], qt.QArray)


def test_a_leaf_called_value_among_others_has_its_name(tmp_path):
    """Attention's value became "attn": a name of no tensor, which no rule and no loader finds."""
    attention = {name: jnp.full((4, 4), i) for i, name in enumerate(("query", "key", "value"))}
    tree = {"attn": attention, "value": jnp.ones(3), "deep": {"value": 2, "a": {"b": 1}}}
    tree["dots"] = {"a.value": 3}
    # A variable is one also beside what is none, and where it is itself called "value".
    tree["model"] = {"value": {"value": jnp.ones(5)}, "kernel": {"value": jnp.ones(6)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", tree)
    with open_source(tmp_path / "tree") as source:
        assert set(source.tensors) == {
            *(
                "attn.query",
                "attn.key",
                "attn.value",
                "value",
                "deep.value",
                "deep.a.b",
                "dots.a.value",
            ),
            *("model.value", "model.kernel"),
        }
        data = bytearray(64)
        source.tensors["attn.value"].read_into(0, memoryview(data))
    assert bytes(data) == np.asarray(attention["value"]).tobytes()


def not_opened(path, message):
    refused(CheckpointError, message, open_source, path)


def test_what_is_not_read(folder, tmp_path):
    not_opened(folder / "steps", "no weights in the folder, but 12, as orbax names steps")
    not_opened(folder / "items/0", r"with items (params, more|more, params), expected one; give")
    with open_source(folder / "items/0/more") as source:
        assert list(source.tensors) == ["w"]
    quantized = qt.nnx.quantize(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "e4m3fn")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "codes", nnx.state(quantized))
    not_opened(tmp_path / "codes", r"codes of a QArray.*is quantized already")


def no_json(folder):
    (folder / "_METADATA").write_text("{")


def no_arrays(folder):
    shutil.rmtree(folder / "ocdbt.process_0")
    (folder / "manifest.ocdbt").unlink()


def zeros_for_data(folder):
    for data in (path for path in folder.rglob("*") if path.parent.name == "d"):
        data.write_bytes(bytes(data.stat().st_size))


@pytest.mark.sample("no_json")
@pytest.mark.parametrize("damage", [no_json, no_arrays, zeros_for_data])
def test_damaged_checkpoints(folder, tmp_path, damage):
    """In a process of its own: orbax leaves reads under way when one of them fails."""
    shutil.copytree(folder / "tree", tmp_path / "src")
    damage(tmp_path / "src")
    command = [sys.executable, "-m", "qtoolkit", "convert", "src", "dst", "--channel-axis", "last"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("qtoolkit: src"))
    assert line.endswith("expected what orbax reads; write it again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


def test_many_small_arrays_are_read_together(tmp_path, monkeypatch):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            tmp_path / "unquantized", {f"w{i}": jnp.full((8, 8), i) for i in range(50)}
        )
    restore, calls = ocp.PyTreeCheckpointer.restore, []
    monkeypatch.setattr(
        ocp.PyTreeCheckpointer,
        "restore",
        lambda self, *a, **k: calls.append(1) or restore(self, *a, **k),
    )
    arrays = load(tmp_path / "unquantized")
    assert all((arrays[f"w{i}"] == i).all() for i in range(50))
    assert len(calls) == 1


def test_leaves_that_are_no_arrays(tmp_path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "text", {"w": jnp.ones(3), "name": "hello"})
    not_opened(tmp_path / "text", "name: a string, expected an array")
