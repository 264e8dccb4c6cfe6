"""Orbax checkpoints as sources. Oracle: the same tree as safetensors, written by `save`."""

import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state

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
    save(tmp_path / "unquantized", {k: np.asarray(v) for k, v in flat(TREE).items()})
    options = {"format": "e4m3fn", "scaling": "channel", "channel_axis": "last"}
    convert(tmp_path / "unquantized", tmp_path / "a.safetensors", **options)
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
        source.read_into("attn.value", 0, data)
    assert bytes(data) == np.asarray(attention["value"]).tobytes()


def refused(path, message):
    with pytest.raises(CheckpointError, match=message):
        open_source(path)


def test_what_is_not_read(folder, tmp_path):
    refused(folder / "steps", "no weights in the folder, but 12, as orbax names steps")
    refused(folder / "items/0", r"with items (params, more|more, params), expected one; give")
    with open_source(folder / "items/0/more") as source:
        assert list(source.tensors) == ["w"]
    quantized = qt.nnx.quantize(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "e4m3fn")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "codes", nnx.state(quantized))
    refused(tmp_path / "codes", r"codes of a QArray.*is quantized already")


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


# As targets. Oracle: the same conversion to safetensors, and orbax itself, which reads them.


def restored(path, like=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(scope="module")
def codes(folder, tmp_path_factory):
    """TREE by channel as orbax and as safetensors."""
    root = tmp_path_factory.mktemp("codes")
    options = {"scaling": "channel", "channel_axis": "last"}
    report = convert(folder / "tree", root / "orbax", to="orbax", **options)
    convert(folder / "tree", root / "file", **options)
    assert report.container == "orbax"
    return root


def test_orbax_restores_codes_in_the_tree_of_the_source(codes):
    tree, file = restored(codes / "orbax"), load(codes / "file")
    assert isinstance(tree["params"]["layers"], list)
    assert tree["params"]["dense"]["kernel"].dtype == "float8_e4m3fn"
    assert tree["params"]["dense"]["kernel_scale"].shape == (1, 32)
    found = flat(tree)
    assert found.keys() == file.keys()
    assert all(same(found[name], file[name]) for name in found)


def test_a_model_that_is_not_quantized_does_not_take_the_codes(codes):
    """Orbax would cast them to the dtype of the target: weights up to 448 without an error."""
    with pytest.raises(ValueError, match="kernel_scale"):
        restored(codes / "orbax", TREE)


def test_the_commands_read_it(codes, folder, capsys):
    checked = qt.checkpoints.verify(folder / "tree", codes / "orbax")
    assert not checked.problems
    assert checked.quantized == 3
    assert qt.checkpoints.compare(codes / "orbax", codes / "file").equal
    arrays = load(codes / "orbax")
    assert all(same(x, arrays[name]) for name, x in load(codes / "file").items())
    with open_source(codes / "orbax") as source:
        assert '"format": "e4m3fn"' in source.metadata["qtoolkit"]


def test_a_model_of_nnx_there_and_back(tmp_path):
    """Oracle: `qt.quantize` of its kernels, and for the way back `dequantize`."""
    model = nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "unquantized", nnx.state(model))
    convert(tmp_path / "unquantized", tmp_path / "fp8", scaling="channel", to="orbax")
    state = load(tmp_path / "fp8", like=nnx.state(model))
    expected = qt.quantize(
        model.layers[0].kernel[...], qt.BlockFormat.channel(qt.format("e4m3fn"), 1)
    )
    kernel = state["layers"][0]["kernel"][...]
    assert kernel.spec == expected.spec
    assert same(kernel.codes, expected.codes)
    assert same(kernel.scale, expected.scale)

    qt.checkpoints.dequantize_checkpoint(tmp_path / "fp8", tmp_path / "back", to="orbax")
    back = restored(tmp_path / "back", nnx.state(model))
    assert same(back["layers"][0]["kernel"][...], expected.dequantize())
    assert same(back["layers"][1]["bias"][...], model.layers[1].bias[...])


def test_a_training_state_keeps_its_tree(tmp_path):
    """Empty states of optax are None there. Moments are not quantized: Adam divides by them, and
    rounding would make them 0.
    """
    params = {"dense": {"kernel": jnp.full((64, 32), 0.3), "bias": jnp.ones(32)}}
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "unquantized", state, custom_metadata={"run": 7})
    report = convert(tmp_path / "unquantized", tmp_path / "fp8", to="orbax", scaling="channel")
    assert [tensor.name for tensor in report.quantized] == ["params.dense.kernel"]
    qt.checkpoints.dequantize_checkpoint(tmp_path / "fp8", tmp_path / "back", to="orbax")
    back = restored(tmp_path / "back", state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert same(back.params["dense"]["bias"], params["dense"]["bias"])


def test_lists_and_what_is_empty_come_back(tmp_path):
    w = jnp.full((32, 32), 0.25)
    tree = {"list": [w, jnp.ones(3)], "none": None, "empty": {}, "pair": (jnp.ones(2), None, w)}
    metadata = {"note": "hi", "step": 1000}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeSave(tree, custom_metadata=metadata)
        checkpointer.save(tmp_path / "unquantized", args=arguments)
    options = {"scaling": "tensor", "channel_axis": "last"}
    convert(tmp_path / "unquantized", tmp_path / "fp8", to="orbax", **options)
    found = restored(tmp_path / "fp8")
    assert found["list"].keys() == {"0", "0_scale", "1"}  # a list has no place for a scale
    assert found["none"] is None
    qt.checkpoints.dequantize_checkpoint(tmp_path / "fp8", tmp_path / "back", to="orbax")
    back = restored(tmp_path / "back", jax.tree.map(jnp.zeros_like, tree))
    assert jax.tree.all(jax.tree.map(same, back, tree))
    with open_source(tmp_path / "back") as source:
        kept = {name: source.tree.custom_metadata[name] for name in metadata}
        assert kept == metadata
        assert "qtoolkit" not in source.metadata  # it is not quantized any more


def test_a_plain_tree_with_a_lone_value(tmp_path):
    """A variable of nnx looks the same in a checkpoint; `like` says what it is."""
    tree = {"only": {"value": jnp.full((32, 32), 0.5)}, "b": jnp.ones(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "unquantized", tree)
    convert(tmp_path / "unquantized", tmp_path / "fp8", to="orbax", scaling="tensor")
    assert same(load(tmp_path / "fp8", like=tree)["only"]["value"].dequantize(), np.float32(
        tree["only"]["value"]
    ))  # fmt: skip
    tree["only_scale"] = {"x": jnp.ones(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "more", tree)
    with pytest.raises(CheckpointError, match=r"only_scale: it would be read as only_scale.value"):
        convert(tmp_path / "more", tmp_path / "dst", to="orbax", scaling="tensor")


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
    refused(tmp_path / "text", "name: a string, expected an array")


def test_names_of_files_become_trees(tmp_path):
    tensors = {
        "model.layers.0.q.weight": jnp.ones((64, 32)),
        "attn.value": jnp.ones((4, 4)),  # alone with that name, not a variable of nnx
        "a..b": jnp.ones((2, 2)),
        "x/y": jnp.ones(3),
        "step": np.int64(7),
    }
    save(tmp_path / "src", tensors)
    convert(tmp_path / "src", tmp_path / "dst", to="orbax", scaling="tensor")
    tree = restored(tmp_path / "dst")
    assert tree["model"]["layers"]["0"]["q"]["weight"].dtype == "float8_e4m3fn"
    with open_source(tmp_path / "dst") as source:
        assert tensors.keys() <= source.tensors.keys()
    assert not qt.checkpoints.verify(tmp_path / "src", tmp_path / "dst").problems


def test_a_folder_of_hugging_face(tmp_path):
    (tmp_path / "src").mkdir()
    save(tmp_path / "src/model.safetensors", {"a.weight": jnp.ones((64, 32)), "b": jnp.ones(3)})
    (tmp_path / "src/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "src/tokenizer.json").write_text("{}")
    report = convert(tmp_path / "src", tmp_path / "dst", to="orbax")
    assert report.layout == "plain"
    assert set(report.left) == {"config.json", "tokenizer.json"}
    assert restored(tmp_path / "dst")["a"]["weight_scale"].dtype == "float32"


def test_memory_is_one_array(tmp_path):
    """32 arrays of 4 MiB in, of 1 MiB out: orbax alone would hold them all."""
    code = """if True:
        import resource, sys
        from qtoolkit.checkpoints import convert
        convert("one", "dst1", to="orbax", workers=1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        convert("all", "dst2", to="orbax", workers=1)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    weight = np.ones((1024, 4096), np.float32)
    save(tmp_path / "one", {"a.weight": weight})
    save(tmp_path / "all", {f"a{i}.weight": weight for i in range(32)})
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64  # the arrays that are written have 128


def refused_target(error, message, src, dst, **options):
    before = sorted(path.name for path in dst.parent.iterdir())
    with pytest.raises(error, match=message):
        convert(src, dst, **{"to": "orbax", "channel_axis": "last"} | options)
    assert sorted(path.name for path in dst.parent.iterdir()) == before


def test_what_is_not_written(folder, tmp_path):
    src = folder / "tree"
    refused_target(
        ValueError, "to='zip', expected one of safetensors, orbax", src, tmp_path / "a", to="zip"
    )
    refused_target(
        CheckpointError,
        "layout 'modelopt', expected 'plain'",
        src,
        tmp_path / "a",
        layout="modelopt",
    )
    refused_target(CheckpointError, "omit --shard", src, tmp_path / "a", shard=(0, 2))
    save(tmp_path / "empty", {"w": jnp.ones((4, 4)), "none": jnp.ones((0, 3))})
    refused_target(
        CheckpointError, "none has shape .* no empty arrays", tmp_path / "empty", tmp_path / "a"
    )
    save(tmp_path / "both", {"w": jnp.ones((4, 4)), "w.x": jnp.ones(3)})
    refused_target(
        CheckpointError, "w is an array and has others below", tmp_path / "both", tmp_path / "a"
    )
    save(tmp_path / "nan", {"w": jnp.full((4, 4), jnp.nan)})
    refused_target(CheckpointError, "NaN or Inf in weights: w", tmp_path / "nan", tmp_path / "a")
    refused_target(
        CheckpointError, "is a file, expected the name of a folder", src, tmp_path / "nan"
    )
    with pytest.raises(CheckpointError, match="folders of this machine"):
        convert(src, "s3://bucket/a", to="orbax")


def test_overwriting(folder, tmp_path):
    src, dst = folder / "tree", tmp_path / "dst"
    options = {"to": "orbax", "channel_axis": "last"}
    convert(src, dst, scaling="tensor", **options)
    with pytest.raises(CheckpointError, match="exists already"):
        convert(src, dst, **options)
    convert(src, dst, scaling="channel", overwrite=True, **options)
    assert restored(dst)["params"]["dense"]["kernel_scale"].shape == (1, 32)
    (dst / "notes.txt").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"would delete notes.txt, expected a checkpoint of o"
    ):
        convert(src, dst, overwrite=True, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]
    (dst / "notes.txt").unlink()
    (tmp_path / "model").mkdir()
    save(tmp_path / "model" / "model.safetensors", {"w": np.ones((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match=r"dst: no weights in the folder|no safetensors"):
        convert(tmp_path / "model", dst, overwrite=True)


def test_interrupted_it_leaves_nothing(tmp_path, monkeypatch):
    """The interrupt comes while orbax stores the first of the arrays, in a thread of its own."""
    arrays = {f"w{i}": jnp.ones((4, 4)) for i in range(4)}
    save(tmp_path / "src", arrays)
    read, names = qt.checkpoints.SafetensorsFile.read, []

    def interrupting(self, name):
        names.append(name)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.5)
        return read(self, name)

    monkeypatch.setattr(qt.checkpoints.SafetensorsFile, "read", interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background: ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "src", tmp_path / "dst", to="orbax", scaling="tensor")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(names) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
