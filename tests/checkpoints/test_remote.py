"""Checkpoints behind URLs: a real S3 server in this process, moto's, and fsspec's memory.

Oracle: the same conversion between folders of this machine.
"""

import json
import shutil
import sys

import boto3
import fsspec
import numpy as np
import pytest
import s3fs
from command import run as run_command
from moto.server import ThreadedMotoServer

from qtoolkit.checkpoints import (
    CheckpointError,
    compare,
    convert,
    dequantize_checkpoint,
    finalize,
    load,
    save,
    verify,
)
from qtoolkit.checkpoints.internal import open_source

SIZE = "40KB"  # two matrices of codes to a file
UNDER_WAY = ".qtoolkit-partial/"


@pytest.fixture(scope="module")
def server():
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def bucket(server, monkeypatch):
    """The client of a server with an empty bucket "bkt", which s3:// URLs lead to."""
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bkt")
    yield client
    for key in keys(client):
        client.delete_object(Bucket="bkt", Key=key)
    s3fs.S3FileSystem.clear_instance_cache()
    client.close()


def keys(client, prefix=""):
    found = client.list_objects_v2(Bucket="bkt", Prefix=prefix).get("Contents", [])
    return [item["Key"] for item in found]


def objects(client, prefix):
    return {
        key.removeprefix(prefix): client.get_object(Bucket="bkt", Key=key)["Body"].read()
        for key in keys(client, prefix)
    }


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.exhaustive)])
def store(request):
    """The URL of an empty bucket."""
    if request.param == "s3":
        request.getfixturevalue("bucket")
        yield "s3://bkt"
        return
    yield "memory://bkt"
    memory = fsspec.filesystem("memory")
    memory.rm("/", recursive=True)


def found(url):
    """Every object below a URL and its bytes."""
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return {name.removeprefix(root).lstrip("/"): files.cat_file(name) for name in files.find(root)}


def put(url, data):
    files, path = fsspec.core.url_to_fs(url)
    files.pipe_file(path, data)


def delete(url):
    files, path = fsspec.core.url_to_fs(url)
    files.rm_file(path)


def contents(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "src"
    (folder / "1_Pooling").mkdir(parents=True)
    rng = np.random.default_rng(0)
    tensors = {
        f"model.layers.{i}.mlp.{x}_proj.weight": rng.normal(size=(128, 128)).astype("float32")
        for i in range(2)
        for x in ("up", "gate", "down")
    }
    save(folder / "model.safetensors", tensors)
    config = {"model_type": "llama", "hidden_size": 128, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def expected(source, tmp_path):
    convert(source, tmp_path / "one", max_shard_size=SIZE)
    return contents(tmp_path / "one")


def upload(client, folder, prefix):
    for name, data in contents(folder).items():
        client.put_object(Bucket="bkt", Key=prefix + name, Body=data)


def test_a_folder_from_and_to_a_bucket(bucket, source, expected, tmp_path):
    upload(bucket, source, "src/")
    report = convert("s3://bkt/src", "s3://bkt/models/dst/", max_shard_size=SIZE)
    assert set(report.files) == expected.keys()
    assert objects(bucket, "models/dst/") == expected
    convert("s3://bkt/src", tmp_path / "down", max_shard_size=SIZE)
    assert contents(tmp_path / "down") == expected
    # The other commands read URLs, too.
    assert verify("s3://bkt/src", "s3://bkt/models/dst").problems == ()
    assert compare(source, "s3://bkt/models/dst").only_a == ()
    dequantize_checkpoint("s3://bkt/models/dst", tmp_path / "unquantized")
    dequantize_checkpoint(tmp_path / "down", tmp_path / "wide2")
    assert contents(tmp_path / "unquantized") == contents(tmp_path / "wide2")


def test_shards_through_a_bucket(store, source, expected):
    for index in (1, 0):
        convert(source, f"{store}/dst", max_shard_size=SIZE, shard=(index, 2))
    # Whole files are there, but nothing that makes a loader open them.
    visible = found(f"{store}/dst").keys()
    assert not {"config.json", "model.safetensors.index.json"} & visible
    message = "dst: a conversion is not finished, .*: qtoolkit finalize .*://bkt/dst$"
    with pytest.raises(CheckpointError, match=message):
        compare(source, f"{store}/dst")
    with pytest.raises(CheckpointError, match="files of another conversion are there: scaling ch"):
        convert(source, f"{store}/dst", max_shard_size=SIZE, shard=(0, 2), scaling="tensor")
    report = convert(source, f"{store}/dst", max_shard_size=SIZE, shard=(0, 2))
    assert len(report.resumed) == 2
    delete(f"{store}/dst/model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"1 of 3 files is missing: .*shard=\(1, 2\)"):
        finalize(f"{store}/dst")
    convert(source, f"{store}/dst", max_shard_size=SIZE, shard=(1, 2))
    finalize(f"{store}/dst")
    assert found(f"{store}/dst") == expected
    with pytest.raises(CheckpointError, match=r"no parts of a conversion, .* finalized already"):
        finalize(f"{store}/dst")
    message = "exists already, and shards cannot replace what lies behind a URL"
    with pytest.raises(CheckpointError, match=message):
        convert(source, f"{store}/dst", shard=(0, 2), overwrite=True)
    assert found(f"{store}/dst") == expected


def test_files_appear_whole_and_config_last(store, source, expected, monkeypatch):
    seen = []
    pipe_file = fsspec.AbstractFileSystem.pipe_file
    files = type(fsspec.core.url_to_fs(store)[0])
    pipe_file = files.pipe_file

    def recorded(self, *arguments, **options):
        before = found(f"{store}/dst")
        pipe_file(self, *arguments, **options)
        seen.append(before)

    monkeypatch.setattr(files, "pipe_file", recorded)
    convert(source, f"{store}/dst", max_shard_size=SIZE)
    assert len(seen) >= len(expected)
    for before in seen:
        assert "config.json" not in before
        for name, data in before.items():
            assert name.startswith(UNDER_WAY) or data == expected[name]
    assert found(f"{store}/dst") == expected


def test_large_files_go_up_in_parts_and_a_failure_leaves_none(bucket, tmp_path, monkeypatch):
    x = np.random.default_rng(0).integers(0, 256, 11 * 2**20, np.uint8)
    save("s3://bkt/big.safetensors", {"x": x})
    head = bucket.head_object(Bucket="bkt", Key="big.safetensors")
    assert head["ETag"].strip('"').endswith("-2")  # S3's mark of two parts
    np.testing.assert_array_equal(load("s3://bkt/big.safetensors")["x"], x)
    with open_source("s3://bkt/big.safetensors") as file:
        data = bytearray(5)
        file.tensors["x"].read_into(9 * 2**20, memoryview(data))
        assert data == x[9 * 2**20 :][:5].tobytes()
    with pytest.raises(CheckpointError, match=r"s3://bkt/big.safetensors: exists already"):
        save("s3://bkt/big.safetensors", {"x": x})
    with pytest.raises(IsADirectoryError, match="expected a file name"):
        save("s3://bkt", {"x": x})
    copyfileobj = shutil.copyfileobj

    def failing(source, target, length):
        copyfileobj(source, target, length)
        raise OSError(5, "broken pipe")

    monkeypatch.setattr(shutil, "copyfileobj", failing)
    with pytest.raises(OSError, match="broken pipe") as caught:
        save("s3://bkt/none.safetensors", {"x": x})
    assert caught.value.filename == "s3://bkt/none.safetensors"
    assert keys(bucket, "none") == []
    assert "Uploads" not in bucket.list_multipart_uploads(Bucket="bkt")


def test_failures_of_one_process_keep_what_is_whole(store, source, expected, monkeypatch):
    files = type(fsspec.core.url_to_fs(store)[0])
    pipe_file = files.pipe_file

    def failing(self, path, *arguments, **options):
        if path.endswith(f"0000{fails}-of-00003.safetensors"):
            raise OSError(28, "no space", path)
        pipe_file(self, path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(files, "pipe_file", failing)
        for fails in (1, 2):  # noqa: B007  (`failing` reads it)
            assert found(store) == {}  # where no file was whole
            with pytest.raises(OSError, match="no space") as caught:
                convert(source, f"{store}/dst", max_shard_size=SIZE)
    (note,) = caught.value.__notes__
    assert note.startswith("1 of 3 files is whole, and a rerun")
    assert "dst/model-00001-of-00003.safetensors" in found(store)
    report = convert(source, f"{store}/dst", max_shard_size=SIZE)
    assert report.resumed == ("model-00001-of-00003.safetensors",)
    assert found(f"{store}/dst") == expected


def test_an_existing_checkpoint_and_overwrite(store, source, expected):
    convert(source, f"{store}/dst")
    before = found(f"{store}/dst")
    with pytest.raises(CheckpointError, match="://bkt/dst: exists already; pass overwrite=True"):
        convert(source, f"{store}/dst", max_shard_size=SIZE)
    assert found(f"{store}/dst") == before
    convert(source, f"{store}/dst", max_shard_size=SIZE, overwrite=True)
    assert found(f"{store}/dst") == expected
    put(f"{store}/papers/thesis.tex", b"x")
    with pytest.raises(
        CheckpointError, match=r"no safetensors files in the folder.*overwrite=True replaces"
    ):
        convert(source, f"{store}/papers", overwrite=True)
    assert found(f"{store}/papers") == {"thesis.tex": b"x"}


def test_the_commands(bucket, source):
    def run(*arguments):
        result = run_command(*arguments)
        return result.exit_code, result.stdout, result.stderr

    upload(bucket, source, "src/")
    target = "s3://bkt/dst"
    assert run("convert", "s3://bkt/src", target, "--dry-run")[0] == 0
    assert keys(bucket, "dst") == []
    assert run("convert", "s3://bkt/src", target, "--shard", "0/1", "-q") == (0, "", "")
    code, output, _ = run("finalize", target)
    assert (code, output.splitlines()[-1]) == (
        0,
        'load it: transformers.AutoModelForCausalLM.from_pretrained("s3://bkt/dst")',
    )
    assert run("inspect", target)[0] == 0
    code, _, error = run("convert", "s3://bkt/none", "s3://bkt/x")
    assert (code, error) == (1, "qtoolkit: s3://bkt/none: No such file or directory\n")
    code, _, error = run("convert", source, "s3://nobucket/x")
    assert code == 1
    assert error.startswith("qtoolkit: s3://nobucket/x")
    assert error.count("\n") == 1
    code, _, error = run("convert", source, "nowhere://b/x")
    assert (code, error) == (
        1,
        "qtoolkit: nowhere://b/x: Protocol not known: nowhere, expected such as s3://BUCKET/NAME\n",
    )
    code, _, error = run("convert", target, target, "--overwrite")
    assert (code, error.partition(";")[0]) == (1, f"qtoolkit: {target}: is the source itself")
    code, _, error = run("convert", target, f"{target}/inner")
    assert error.startswith(f"qtoolkit: {target}/inner: the source and the target lie inside")


def test_what_is_not_read_from_urls():
    put("memory://a.gguf", b"GGUF")
    try:
        with pytest.raises(CheckpointError, match=r"memory://a.gguf: gguf, which is not read from"):
            convert("memory://a.gguf", "memory://b")
    finally:
        delete("memory://a.gguf")


def test_what_is_missing_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"s3://bkt/x: .*pip install s3fs"):
        load("s3://bkt/x")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("memory:///bkt/src", "is the source itself"),
        ("memory://bkt//src/", "is the source itself"),
        ("memory:///bkt/src/inner", "the source and the target lie inside one another"),
        ("memory:///bkt", "the source and the target lie inside one another"),
    ],
)
def test_a_source_is_known_by_every_name(source, other, message):
    for name, data in contents(source).items():
        put(f"memory://bkt/src/{name}", data)
    try:
        with pytest.raises(CheckpointError, match=message):
            convert("memory://bkt/src", other, overwrite=True)
        assert found("memory://bkt/src") == contents(source)
    finally:
        fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_urls_of_this_machine_are_refused(source, scheme):
    before = contents(source)
    for paths in ((source, f"{scheme}://{source}"), (f"{scheme}://{source}", source)):
        with pytest.raises(CheckpointError, match=rf"{scheme}:///.*: .*give the path itself"):
            convert(*paths, overwrite=True)
    assert contents(source) == before


@pytest.mark.parametrize("name", ["run[1]", "run?", "run*"])
def test_only_the_folder_itself_is_removed(store, source, expected, name):
    others = {"run1/model.safetensors": b"x", "runs/y": b"y", "run": b"z", f"{name}2/y": b"y"}
    for other, data in others.items():
        put(f"{store}/{other}", data)
    convert(source, f"{store}/{name}")
    convert(source, f"{store}/{name}", max_shard_size=SIZE, overwrite=True)
    assert found(store) == others | {f"{name}/{file}": data for file, data in expected.items()}


@pytest.mark.parametrize("url", ["https://host/model", "HTTP://host/model", "zip://model"])
def test_a_read_only_target_is_refused_at_once(tmp_path, monkeypatch, url):
    save(tmp_path / "src", {"w": np.ones((4, 4), np.float32)})

    def asked(*_):
        raise AssertionError("a server was asked")

    monkeypatch.setattr(fsspec.core, "url_to_fs", asked)
    message = rf"^{url}: \w+:// is only read, expected .* s3://, gs:// or az://; give one of these$"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "src", url)
    with pytest.raises(CheckpointError, match=message):
        save(url, {"w": np.ones((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match=message):
        finalize(url)
