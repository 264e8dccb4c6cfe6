"""Folders in, folders out; every way in which a source or target cannot be what was meant."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from refused import refused
from stored import stored

from qtoolkit.checkpoints import CheckpointError, convert, dequantize_checkpoint, save
from qtoolkit.checkpoints.internal import open_source

INDEX = "model.safetensors.index.json"
rng = np.random.default_rng(0)
WEIGHTS = {
    f"model.layers.{i}.mlp.{x}_proj.weight": rng.normal(size=(128, 128)).astype("bfloat16")
    for i in range(2)
    for x in ("gate", "up", "down")
} | {"model.norm.weight": np.ones(128, "bfloat16")}
CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 128}


def write_json(path, value):
    path.write_text(json.dumps(value))


def sharded(folder, tensors=WEIGHTS, files=2):
    """A folder as Hugging Face's, the tensors dealt out to several files."""
    folder.mkdir()
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    weight_map = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save(folder / file, part, {"format": "pt"})
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    write_json(folder / "config.json", CONFIG)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")
    (folder / ".gitattributes").write_text("")
    return folder


@pytest.fixture
def source(tmp_path):
    return sharded(tmp_path / "src")


def tensors_of(folder):
    with_index = json.loads((folder / INDEX).read_text())["weight_map"]
    for file in set(with_index.values()):
        with open_source(folder / file) as opened:
            assert {n for n, f in with_index.items() if f == file} == set(opened.tensors)
    return {n: stored(folder / file)[n] for n, file in with_index.items()}


def read(source):
    with source:
        return {name: source.read(name) for name in source.tensors}


def test_a_folder_gets_index_config_and_other_files(source, tmp_path):
    report = convert(source, tmp_path / "dst", layout="compressed-tensors", max_shard_size="40KB")
    written = sorted(os.listdir(tmp_path / "dst"))
    # Of 128 x 128 codes and 128 scales two fit into 40,000 bytes.
    shards = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert written == sorted(["config.json", INDEX, *shards, "tokenizer.json"])
    assert written == list(report.files)
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == CONFIG
    index = json.loads((tmp_path / "dst" / INDEX).read_text())
    found = tensors_of(tmp_path / "dst")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in found.values())
    one = tmp_path / "one.safetensors"
    save(tmp_path / "all.safetensors", WEIGHTS)
    convert(tmp_path / "all.safetensors", one, layout="compressed-tensors")
    expected = stored(one)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
    # And back: no trace of the quantization is left.
    dequantize_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG
    back = stored(tmp_path / "back" / "model.safetensors")
    assert {name: array.dtype.name for name, array in back.items()} == dict.fromkeys(
        WEIGHTS, "bfloat16"
    )
    assert sorted(os.listdir(tmp_path)) == [
        *("all.safetensors", "back", "dst", "one.safetensors", "src")
    ]


def test_keep_dtype_casts_unquantized_tensors(tmp_path):
    wide = {name: array.astype(np.float32) for name, array in WEIGHTS.items()}
    source = sharded(tmp_path / "src", wide)
    write_json(source / "config.json", CONFIG | {"torch_dtype": "float32"})
    report = convert(source, tmp_path / "dst", keep_dtype="bfloat16")
    found = stored(tmp_path / "dst" / "model.safetensors")
    assert found["model.norm.weight"].dtype.name == "bfloat16"
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert [t.action for t in report.tensors if t.name == "model.norm.weight"] == ["cast"]
    with refused(CheckpointError, "dtype e4m3fn for what is not quantized"):
        convert(source, tmp_path / "no", keep_dtype="e4m3fn")


def test_weights_with_nan_or_inf_are_refused_by_name(tmp_path):
    tensors = {name: array.copy() for name, array in WEIGHTS.items()}
    up, down = (f"model.layers.0.mlp.{x}_proj.weight" for x in ("up", "down"))
    tensors[up][3, 4] = np.nan
    tensors[down][:2, 0] = np.inf
    source = sharded(tmp_path / "src", tensors)
    message = rf"NaN or Inf in weights: .*{down} \(2\).*allow_nonfinite=True"
    with pytest.raises(CheckpointError, match=message) as error:
        convert(source, tmp_path / "dst")
    assert f"{up} (1)" in str(error.value)
    assert os.listdir(tmp_path) == ["src"]
    save(tmp_path / "one", tensors)
    refused(CheckpointError, "NaN or Inf in weights", convert, tmp_path / "one", tmp_path / "dst")
    assert sorted(os.listdir(tmp_path)) == ["one", "src"]
    report = convert(source, tmp_path / "dst", allow_nonfinite=True)
    assert report.nonfinite == 3
    convert(source, tmp_path / "skipped", skip=[up, down], allow_split=True)


def break_shard(folder):
    os.unlink(folder / "model-00002-of-00002.safetensors")


def break_index(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["absent.weight"] = "model-00001-of-00002.safetensors"
    write_json(folder / INDEX, index)


def leave_folder(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["absent.weight"] = "../secret.safetensors"
    write_json(folder / INDEX, index)


def no_map(folder):
    write_json(folder / INDEX, {"weight_map": [1]})


def no_index(folder):
    os.rename(folder / "model-00002-of-00002.safetensors", folder / "b.safetensors")
    os.unlink(folder / INDEX)


def one_of_two(folder):
    os.unlink(folder / "model-00002-of-00002.safetensors")
    os.unlink(folder / INDEX)


def twice(folder):
    os.unlink(folder / INDEX)
    name = "model.norm.weight"
    for number in (1, 2):
        path = folder / f"model-0000{number}-of-00002.safetensors"
        save(path, {**stored(path), name: np.full(128, number, "bfloat16")}, overwrite=True)


def twice_with_index(folder):
    index = (folder / INDEX).read_text()
    twice(folder)
    (folder / INDEX).write_text(index)


def another_file(folder):
    save(folder / "model.safetensors", WEIGHTS)


def another_file_without_index(folder):
    another_file(folder)
    os.unlink(folder / INDEX)


def other_shards(folder):
    shutil.copy(
        folder / "model-00001-of-00002.safetensors", folder / "model-00003-of-00003.safetensors"
    )


def no_json(folder):
    (folder / "config.json").write_text("{")


def quip(folder):
    write_json(folder / "config.json", CONFIG | {"quantization_config": {"quant_method": "quip"}})


def codes_without_scales(folder):
    only_pickles(folder)
    save(folder / "model.safetensors", {"a.weight": np.ones((2, 2), "float8_e4m3fn")})
    write_json(folder / "config.json", CONFIG | {"quantization_config": {"quant_method": "fp8"}})


def only_pickles(folder):
    for name in os.listdir(folder):
        if "safetensors" in name:
            os.unlink(folder / name)


def only_config(folder):
    only_pickles(folder)
    os.unlink(folder / "pytorch_model.bin")


def part(folder):
    only_config(folder)
    (folder / "unet").mkdir()
    save(folder / "unet" / "diffusion_pytorch_model.safetensors", {"a.weight": np.ones(2)})


def snapshot(folder):
    """As huggingface_hub lays out its cache."""
    only_config(folder)
    (folder / "snapshots" / "abc").mkdir(parents=True)
    save(folder / "snapshots" / "abc" / "model.safetensors", {"a.weight": np.ones(2)})


def orbax(folder):
    only_config(folder)
    (folder / "_METADATA").touch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_shard, r"index\.json: file model-00002-of-00002\.safetensors is missing in .*fetch"),
        (break_index, r"index\.json: not in model-00001.*: tensor absent\.weight; fetch both"),
        (leave_folder, r"file \.\./secret\.safetensors is missing in"),
        (no_map, r"index\.json: no weight_map of names and files"),
        (no_index, r"2 safetensors files and no model\.safetensors\.index\.json.*give one file"),
        (one_of_two, r"model-00001-of-00002\.safetensors is one of 2 files"),
        (twice, r"norm\.weight: other values in model-00001\S* than in model-00002.*in one file"),
        (twice_with_index, r"norm\.weight: other values in model-00001\S* than in model-00002"),
        (
            another_file,
            r"two sets of weights, model-00001\S* by model\S*json and model\.safetensors",
        ),
        (another_file_without_index, r"two sets of weights, model\.safetensors and model-00001"),
        (other_shards, r"two sets of weights, model-00001\S* by .*json and model-00003-of-00003"),
        (no_json, r"config\.json: .*expected a JSON object"),
        (quip, "quant_method quip in its config, expected one of compressed-tensors, .*, gptq"),
        (codes_without_scales, r"a\.weight: F8_E4M3 .2, 2., without the scales that layout fineg"),
        (only_pickles, r"no safetensors in the folder, but pytorch_model\.bin; a pickle.*refused"),
        (only_config, "no safetensors files in the folder, expected at least one"),
        (part, "in the folder itself, but in .*/src/unet; give that one"),
        (snapshot, "in the folder itself, but in .*/src/snapshots/abc; give that one"),
        (orbax, "src: .*expected what orbax reads; write it again"),
    ],
)
def test_folders_that_are_not_what_they_say(source, tmp_path, change, message):
    change(source)
    refused(CheckpointError, message, convert, source, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize("with_index", [True, False])
def test_a_tensor_that_two_files_have_alike_is_read(source, tmp_path, with_index):
    path = source / "model-00002-of-00002.safetensors"
    first = stored(source / "model-00001-of-00002.safetensors")
    save(path, {**stored(path), **first}, overwrite=True)
    if not with_index:
        os.unlink(source / INDEX)
    with open_source(source) as opened:
        for name, array in WEIGHTS.items():
            np.testing.assert_array_equal(opened.read(name), array)


def as_pickle(path):
    path.write_bytes(pickle.dumps({"a": 1}))


def as_torch_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"")


def as_npz(path):
    with open(path, "wb") as file:
        np.savez(file, a=np.ones(3))


KINDS = [
    (as_pickle, "a pickle, which may run any code when it is read, is refused"),
    (as_torch_zip, "a pickle, which may run any code when it is read, is refused"),
    (as_npz, r"a zip archive, such as npz, which is not read; .*qtoolkit\.checkpoints\.save"),
    (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer.*git lfs pull"),
    (b'{"weight_map": {}}', "JSON, which holds no weights; give the folder instead"),
    (b"<!DOCTYPE html>", "a web page or XML, expected weights; the download failed"),
    (b"\x81\xa1a\x01", r"Flax's msgpack starts so, which is not read; .*qtoolkit\.checkpoints"),
    (b"GGUF\x03\x00\x00\x00", "GGUF file"),
    (b"", "header length 0 of 0 bytes"),
]


@pytest.mark.parametrize(("content", "message"), KINDS)
def test_files_of_other_kinds_are_called_by_their_name(tmp_path, monkeypatch, content, message):
    path = tmp_path / "model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    monkeypatch.setitem(sys.modules, "gguf", None)  # the package is missing
    refused(CheckpointError, message, convert, path, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["model.bin"]


def test_targets_that_would_lose_something(source, tmp_path):
    with refused(CheckpointError, "is the source itself; choose another name"):
        convert(source, source, overwrite=True)
    (tmp_path / "link").symlink_to(source)
    with refused(CheckpointError, "is the source itself"):
        convert(source, tmp_path / "link", overwrite=True)
    with refused(CheckpointError, "the source and the target lie inside one another"):
        convert(source, source / "dst")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "thesis.tex").touch()
    refused(
        CheckpointError, "exists already; pass overwrite=True", convert, source, tmp_path / "dst"
    )
    with refused(CheckpointError, r"no safetensors files .*; overwrite=True replaces weights"):
        convert(source, tmp_path / "dst", overwrite=True)
    (tmp_path / "dst" / "model.safetensors").touch()
    (tmp_path / "dst" / "thesis").mkdir()
    with refused(CheckpointError, r"would delete thesis, thesis\.tex; overwrite=True replaces"):
        convert(source, tmp_path / "dst", overwrite=True)
    (tmp_path / "file").touch()
    refused(CheckpointError, "is a file", convert, source, tmp_path / "file", overwrite=True)
    with refused(FileNotFoundError, "its folder does not exist; create it"):
        convert(source, tmp_path / "no" / "dst")
    with refused(ValueError, r"max_shard_size='9{400}GB'"):
        convert(source, tmp_path / "target", max_shard_size=f"{'9' * 400}GB")
    with refused(ValueError, "max_shard_size='big'"):
        convert(source, tmp_path / "new", max_shard_size="big")
    assert os.listdir(tmp_path / "dst" / "thesis") == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["lora_a", "lora_b"], r"dst: 2 safetensors files .*; overwrite=True replaces"),
        (["lora_a"], r"dst: overwrite=True would delete thesis\.txt; overwrite=True replaces"),
        (
            ["model", "lora"],
            r"dst: overwrite=True would delete lora\.safetensors, thesis\.txt; over",
        ),
    ],
)
def test_overwrite_deletes_nothing_but_a_checkpoint(source, tmp_path, names, message):
    for name in names:
        (tmp_path / "dst").mkdir(exist_ok=True)
        save(tmp_path / "dst" / f"{name}.safetensors", {"w": np.ones(3)})
    (tmp_path / "dst" / "thesis.txt").write_text("precious")
    before = sorted(os.listdir(tmp_path / "dst"))
    refused(CheckpointError, message, convert, source, tmp_path / "dst", overwrite=True)
    assert sorted(os.listdir(tmp_path / "dst")) == before


def test_overwrite_replaces_a_checkpoint(source, tmp_path):
    former = sharded(tmp_path / "dst")
    for name in ("pytorch_model.bin", ".gitattributes"):
        (former / name).unlink()
    (former / "notes.json").write_text("{}")
    with refused(CheckpointError, r"would delete notes\.json; overwrite=True"):
        convert(source, former, overwrite=True)
    (source / "notes.json").write_text("{}")
    (former / "merges.txt").touch()
    with refused(CheckpointError, r"would delete merges\.txt; .*remove the folder"):
        convert(source, former, overwrite=True)
    (source / "merges.txt").touch()
    convert(source, former, overwrite=True)
    assert sorted(os.listdir(former)) == [
        *("config.json", "merges.txt", "model.safetensors", "notes.json", "tokenizer.json")
    ]


@pytest.mark.parametrize("name", ["", ".", "..", "{here}"])
def test_the_folder_that_one_is_in_is_no_target(source, tmp_path, monkeypatch, name):
    """It gets its name by a rename, and whoever was in it would be in a removed folder."""
    here = tmp_path / "work" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    with refused(CheckpointError, "is a mount point, or a folder that this process is"):
        convert(source, name.format(here=here))
    convert(source, "new")
    assert os.listdir() == ["new"]


def test_what_is_replaced_keeps_its_permissions(source, tmp_path):
    folder, file = tmp_path / "out", tmp_path / "out.safetensors"
    folder.mkdir()
    folder.chmod(0o2750)
    file.touch()
    file.chmod(0o600)
    convert(source, folder)
    convert(next(source.glob("*.safetensors")), file, overwrite=True)
    convert(source, tmp_path / "new")
    modes = [os.stat(path).st_mode & 0o7777 for path in (folder, file, tmp_path / "new")]
    assert modes == [0o2750, 0o600, 0o777 & ~umask()]


def umask():
    old = os.umask(0)
    os.umask(old)
    return old


def test_skip_that_matches_nothing_is_an_error(source, tmp_path):
    with refused(CheckpointError, r"skip='haed' matches nothing, .*there is model"):
        convert(source, tmp_path / "dst", skip=["down", "haed"])


def test_reading_any_source_does_not_load_jax(source, tmp_path):
    save(tmp_path / "file", {"a": np.ones((2, 2), np.float32)})
    code = (
        "import sys\nfrom qtoolkit.checkpoints import internal as c\n"
        "for path in sys.argv[1:]:\n"
        "    c.make_plan(c.open_source(path), c.PlanOptions())\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, source, tmp_path / "file"], check=True)


def test_a_folder_that_no_loader_reads_has_no_config(source, tmp_path):
    """transformers reads codes as weights, without an error, where config.json is silent."""
    plain = convert(source, tmp_path / "plain", layout="plain")
    assert plain.loads_nowhere
    assert {*plain.files} == {"model.safetensors", "qtoolkit_config.json", "tokenizer.json"}
    dequantize_checkpoint(tmp_path / "plain", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG
    assert "qtoolkit_config.json" not in os.listdir(tmp_path / "back")
    # What is only rounded loads.
    half = convert(source, tmp_path / "half", format="float16", keep_dtype="float16")
    assert (half.layout, half.loads_nowhere, "config.json" in half.files) == ("plain", False, True)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    # Unless told otherwise, a model becomes one that loads.
    assert convert(source, tmp_path / "default").layout == "compressed-tensors"
    assert convert(source, tmp_path / "e5m2", format="e5m2").layout == "plain"


def test_a_tensor_that_the_index_has_not_is_an_error(source, tmp_path):
    index = json.loads((source / INDEX).read_text())
    gone = next(iter(index["weight_map"]))
    del index["weight_map"][gone]
    write_json(source / INDEX, index)
    refused(CheckpointError, f"{gone} of .* is not in it", open_source, source)


def test_the_old_checkpoint_stays_if_the_rename_fails(source, tmp_path, monkeypatch):
    target = tmp_path / "dst"
    convert(source, target)
    before = (target / "model.safetensors").read_bytes()
    rename = os.rename

    def failing(a, b):
        if str(b) == str(target) and not str(a).endswith("/old"):
            raise OSError("rename failed")
        rename(a, b)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="rename failed"):
        convert(source, target, format="int8", overwrite=True)
    assert (target / "model.safetensors").read_bytes() == before
    monkeypatch.undo()
    # As a run leaves it that is killed between the two renames.
    os.rename(target, tmp_path / ".dst.qtoolkit-partial" / "old")
    refused(CheckpointError, "exists already", convert, source, target, format="int8")
    assert (target / "model.safetensors").read_bytes() == before
    assert convert(source, target, format="int8", overwrite=True).resumed == ("model.safetensors",)
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]


def test_what_is_not_copied_is_named(source, tmp_path):
    for name in (
        "1_Pooling/config.json",
        "onnx/model.onnx",
        ".cache/a",
        "a/b/merges.txt",
        "a/c.bin",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "loop").symlink_to(source)
    os.mkfifo(source / "pipe")
    report = convert(source, tmp_path / "dst")
    assert report.left == (
        *(".cache", ".gitattributes", "a/c.bin", "loop", "onnx", "pipe", "pytorch_model.bin"),
    )
    for name in ("1_Pooling/config.json", "a/b/merges.txt"):
        assert name in report.files
        assert (tmp_path / "dst" / name).read_text() == name
    assert sorted(os.listdir(tmp_path / "dst")) == [
        *("1_Pooling", "a", "config.json", "model.safetensors", "tokenizer.json")
    ]
    # What a conversion has written can be replaced, with the folders in it.
    convert(source, tmp_path / "dst", overwrite=True)
    (tmp_path / "dst" / "thesis").mkdir()
    with refused(CheckpointError, r"would delete thesis; overwrite=True"):
        convert(source, tmp_path / "dst", overwrite=True)


@pytest.mark.parametrize("layout", ["compressed-tensors", "finegrained-fp8", "modelopt"])
def test_a_folder_without_config_json_is_refused(source, tmp_path, layout):
    os.unlink(source / "config.json")
    message = rf"(src|dst): no config\.json, and loaders of layout {layout} .* fetch it, use la"
    refused(CheckpointError, message, convert, source, tmp_path / "dst", layout=layout)
    assert os.listdir(tmp_path) == ["src"]
    assert convert(source, tmp_path / "dst").loads_nowhere
    refused(
        CheckpointError, message, convert, tmp_path / "dst", tmp_path / "again", layout=layout
    )  # dequantized first
    # The file itself is converted: the summary prints the config.
    file = tmp_path / "dst" / "model.safetensors"
    assert convert(file, tmp_path / "file", layout=layout).quantization_config


def test_an_adapter_is_refused_with_what_to_do(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    name = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save(folder / "adapter_model.safetensors", {name: np.ones((8, 64), np.float32)})
    write_json(folder / "adapter_config.json", {"peft_type": "LORA"})
    message = r"adapter: the weights of an adapter .*merge_and_unload.*adapter_model\.safetensors"
    refused(CheckpointError, message, convert, folder, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["adapter"]
    # What is only rounded loads, under its own name.
    report = convert(folder, tmp_path / "half", format="bfloat16")
    assert report.files == ("adapter_config.json", "adapter_model.safetensors")


def test_modules_of_sentence_transformers_keep_their_weights(source, tmp_path):
    (source / "2_Dense").mkdir()
    save(source / "2_Dense" / "model.safetensors", {"linear.weight": np.ones((4, 4))})
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}]
    (source / "modules.json").write_text(json.dumps(modules))
    assert "2_Dense/model.safetensors" in convert(source, tmp_path / "dst").files
    assert stored(tmp_path / "dst" / "2_Dense" / "model.safetensors")["linear.weight"].sum() == 16


def test_a_single_file_of_weights_keeps_its_name(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    name = "diffusion_pytorch_model"
    x = np.ones((64, 64), np.float32)
    save(folder / f"{name}.safetensors", {"a.weight": x, "b.weight": x})
    assert convert(folder, tmp_path / "one").files == (f"{name}.safetensors",)
    assert convert(folder, tmp_path / "two", max_shard_size=5000).files == (
        f"{name}-00001-of-00002.safetensors",
        f"{name}-00002-of-00002.safetensors",
        f"{name}.safetensors.index.json",
    )


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_says_the_dtype_of_what_is_dequantized(tmp_path, key):
    """Also where nothing is cast: codes are read as float32, and the rest is float32 already."""
    src = tmp_path / "src"
    src.mkdir()
    tensors = {name: x.astype(np.float32) for name, x in WEIGHTS.items()}
    save(src / "model.safetensors", tensors)
    write_json(src / "config.json", {"model_type": "llama", key: "bfloat16"})
    convert(src, tmp_path / "fp8")
    for dtype in ("float32", "float16"):
        dequantize_checkpoint(tmp_path / "fp8", tmp_path / dtype, dtype=dtype)
        config = json.loads((tmp_path / dtype / "config.json").read_text())
        assert config[key] == dtype
    # bfloat16 weights beside float32 ones, as in the source, are a model in bfloat16.
    dequantize_checkpoint(tmp_path / "fp8", tmp_path / "as_named")
    assert json.loads((tmp_path / "as_named" / "config.json").read_text())[key] == "bfloat16"


def test_a_model_of_diffusers_keeps_its_names(tmp_path):
    base = "diffusion_pytorch_model"
    src = sharded(tmp_path / "src")
    index = json.loads((src / INDEX).read_text())
    for name in sorted(set(index["weight_map"].values())):
        (src / name).rename(src / name.replace("model", base))
    files = {k: v.replace("model", base) for k, v in index["weight_map"].items()}
    (src / INDEX).unlink()
    write_json(src / f"{base}.safetensors.index.json", {"weight_map": files})
    write_json(src / "config.json", {"_class_name": "FluxTransformer2DModel"})
    words = [sys.executable, "-m", "qtoolkit", "convert", src, tmp_path / "dst"]
    limit = ["--max-shard-size", "60KB"]
    printed = subprocess.run([*words, *limit], capture_output=True, check=True, text=True).stdout
    assert "no loader of models reads layout plain" in printed
    assert "transformers" not in printed
    dequantize_checkpoint(tmp_path / "dst", tmp_path / "unquantized", dtype="bfloat16")
    convert(src, tmp_path / "halves", format="bfloat16")
    for folder, count in (("dst", 2), ("unquantized", 1), ("halves", 1)):
        found = sorted(name for name in os.listdir(tmp_path / folder) if base in name)
        expected = [f"{base}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        expected += [f"{base}.safetensors.index.json"]
        assert found == (expected if count > 1 else [f"{base}.safetensors"])
    assert set(stored(tmp_path / "unquantized" / f"{base}.safetensors")) == set(WEIGHTS)
    with refused(CheckpointError, "a model of diffusers, by _class_name"):
        convert(src, tmp_path / "other", layout="compressed-tensors")
    write_json(src / f"{base}.safetensors.index.json", {"weight_map": files | {"z": "x"}})
    with refused(CheckpointError, rf"{base}.safetensors.index.json: file x is missing"):
        convert(src, tmp_path / "other")
