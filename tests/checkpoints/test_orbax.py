"""Orbax checkpoints as sources. Oracle: the same tree as safetensors, written by `save`."""

import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import qtoolkit as qt
from qtoolkit.checkpoints import CheckpointError, convert, load, open_source, save

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
            source.read_into(name, 0, data)
            assert bytes(data) == np.asarray(expected).tobytes()


def test_converted_it_is_what_the_same_numbers_give(folder, tmp_path):
    save(tmp_path / "wide", {k: np.asarray(v) for k, v in flat(TREE).items()})
    options = {"format": "e4m3fn", "scaling": "channel", "channel_axis": "last"}
    convert(tmp_path / "wide", tmp_path / "a.safetensors", **options)
    report = convert(folder / "steps/12", tmp_path / "b.safetensors", **options)
    assert {t.name for t in report.tensors if t.action == "quantize"} == {
        "params.dense.kernel", "params.layers.0.kernel", "params.layers.1.kernel"
    }  # fmt: skip
    a, b = (load(tmp_path / f"{name}.safetensors") for name in "ab")
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
        checkpointer.save(tmp_path / "wide", nnx.state(model))
    with open_source(tmp_path / "wide") as source:
        assert set(source.tensors) == {
            f"layers.{i}.{name}" for i in range(2) for name in ("kernel", "bias")
        }
    convert(tmp_path / "wide", tmp_path / "narrow", scaling="channel")
    state = load(tmp_path / "narrow", like=nnx.state(model))
    nnx.update(model, state)
    assert isinstance(model.layers[0].kernel[...], qt.QArray)


def refused(path, message):
    with pytest.raises(CheckpointError, match=message):
        open_source(path)


# Of orbax, whose other reads are still under way when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_not_read(folder, tmp_path):
    refused(folder / "steps", "no weights in the folder, but 12, as orbax names steps")
    refused(folder / "items/0", r"with items (params, more|more, params), expected one; give")
    with open_source(folder / "items/0/more") as source:
        assert list(source.tensors) == ["w"]
    shutil.copytree(folder / "tree", tmp_path / "damaged")
    (tmp_path / "damaged/_METADATA").write_text("{")
    refused(tmp_path / "damaged", r"damaged: .*expected what orbax reads; write it again")
    shutil.copytree(folder / "tree", tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost/ocdbt.process_0")
    (tmp_path / "lost/manifest.ocdbt").unlink()
    refused(tmp_path / "lost", "lost: .*expected what orbax reads; write it again")
    quantized = qt.nnx.quantize(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "e4m3fn")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "codes", nnx.state(quantized))
    refused(tmp_path / "codes", r"codes of a QArray.*is quantized already")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_array_that_is_damaged_is_named(folder, tmp_path):
    shutil.copytree(folder / "tree", tmp_path / "src")
    for data in (path for path in (tmp_path / "src").rglob("*") if path.parent.name == "d"):
        data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(CheckpointError, match=r"expected what orbax reads; write it again"):
        convert(tmp_path / "src", tmp_path / "dst", channel_axis="last")
    assert not (tmp_path / "dst").exists()
