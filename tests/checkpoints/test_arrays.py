"""msgpack and npz: values, memory, and files that are not what they say.

Oracles: flax.serialization and numpy.load, which read whole files and whole arrays.
"""

import io
import os
import random
import subprocess
import sys
import tracemalloc

import flax.serialization
import flax.traverse_util
import ml_dtypes
import msgpack
import numpy as np
import pytest

from qtoolkit.checkpoints import CheckpointError, convert, load, open_source

rng = np.random.default_rng(0)
MIB = 2**20


def normal(shape, dtype):
    return rng.normal(size=shape).astype(dtype)


TREE = {
    "params": {
        "Dense_0": {"kernel": normal((24, 8), "float32"), "bias": None},
        "Dense_1": {"kernel": normal((3, 5, 7), ml_dtypes.bfloat16), "empty": {}},
        "codes": normal((300,), ml_dtypes.float8_e4m3fn),
        "none": np.zeros((0, 3), "float16"),
        "0-d": np.asarray(2.5),
        "mask": np.array([[True, False]]),
        # Views: Flax writes them in C order.
        "transposed": np.arange(12, dtype="int16").reshape(3, 4).T,
    },
    "step": np.uint32(7),
    "epoch": 3,
    "rate": 1e-3,
    "done": False,
}


def expected_of(data):
    """What Flax reads, by the names that we give."""
    flat = flax.traverse_util.flatten_dict(flax.serialization.msgpack_restore(data))
    leaves = {".".join(map(str, keys)): leaf for keys, leaf in flat.items()}
    return {name: np.asarray(leaf) for name, leaf in leaves.items() if leaf is not None}


def read_whole(path):
    with open_source(path) as source:
        return {name: source.read(name) for name in source.tensors}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def write(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("most", [2**30, 64, 100, 1], ids="chunks of {} bytes".format)
def test_msgpack_is_what_flax_reads(tmp_path, monkeypatch, most):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", most)
    data = flax.serialization.msgpack_serialize(TREE)
    assert (b"__msgpack_chunked_array__" in data) == (most < 2**30)
    path = write(tmp_path / "a", data)
    expected = expected_of(data)
    assert len(expected) == 11
    assert_same(read_whole(path), expected)


def archive(path, how, **arrays):
    with open(path, "wb") as file:
        how(file, **arrays)
    return path


@pytest.mark.parametrize("how", [np.savez, np.savez_compressed])
def test_npz_is_what_numpy_reads(tmp_path, how):
    x = normal((24, 40), "float32")
    arrays = {
        "c": x,
        "fortran": np.asfortranarray(x),
        "big_endian": x.astype(">f4"),
        "0-d": np.asarray(np.float16(2.5)),
        "empty": np.zeros((0, 3), "float64"),
        "layer/bytes": np.arange(256, dtype="uint8"),
        "ints": np.arange(-4, 4),
    }
    path = archive(tmp_path / "a.npz", how, **arrays)
    expected = {name: a.astype(a.dtype.newbyteorder("=")) for name, a in arrays.items()}
    assert_same(read_whole(path), expected)


def zeros_npz(path, mib):
    # NumPy writes piece by piece what is not contiguous.
    archive(path, np.savez, w=np.broadcast_to(np.float32(0), (mib * MIB // 4096, 1024)))


PEAK = """
def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024
"""


@pytest.mark.exhaustive
@pytest.mark.cpu  # the libraries for a GPU alone take more
@pytest.mark.parametrize("axis", ["first", "last"])
def test_converting_one_large_array_takes_400_mib_and_itself(tmp_path, axis):
    zeros_npz(tmp_path / "a", 128)
    program = f"""if True:
        import pathlib, re, sys
        from qtoolkit.checkpoints import convert
        convert(*sys.argv[1:], scaling="channel", channel_axis="{axis}", max_memory="400MiB")
        print(peak())
    """
    command = [sys.executable, "-c", PEAK + program, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400 + 128


LIES = [
    (b"\x81\xa1a\xc9\xff\xff\xff\xff\x01\x93", "Flax's msgpack"),
    ({"a": msgpack.ExtType(1, msgpack.packb(((3,), "float16", bytes(4))))}, "Flax's msgpack"),
    ({"a": msgpack.ExtType(1, msgpack.packb(((1,), "float33", bytes(4))))}, "Flax's msgpack"),
    ({"a": msgpack.Timestamp(1)}, "a: dtype object, expected one of"),
    ({"a": {"b": [1, 2]}}, "a.b: a list, expected an array"),
    ({"a": {"b": b"x"}}, "a.b: a bytes, expected an array"),
    (b"\x81\xa1a\x01\x00", "Flax's msgpack"),
    (b"\x81\xa1a" * 10**5, "Flax's msgpack"),
]


@pytest.mark.parametrize(("content", "message"), LIES)
def test_msgpack_that_lies(tmp_path, content, message):
    path = write(tmp_path / "a", content if isinstance(content, bytes) else msgpack.packb(content))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_source(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def oracle_of_npz(data):
    with np.load(io.BytesIO(data)) as file:
        return {name: np.asarray(file[name]) for name in file.files}


SMALL = {"a": {"kernel": normal((3, 4), "float16"), "b": np.float32(1), "n": 5}}
KINDS = {
    "msgpack": (flax.serialization.msgpack_serialize(SMALL), expected_of),
    "npz": (None, oracle_of_npz),
    "compressed npz": (None, oracle_of_npz),
}


def small(kind):
    data, oracle = KINDS[kind]
    if data is None:
        file = io.BytesIO()
        save = np.savez_compressed if "compressed" in kind else np.savez
        save(file, x=SMALL["a"]["kernel"], y=np.asfortranarray(SMALL["a"]["kernel"]))
        data = file.getvalue()
    return data, oracle


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_anywhere_it_is_refused(tmp_path, kind):
    data, _ = small(kind)
    for size in range(9, len(data)):  # shorter ones may look like another kind
        path = write(tmp_path / "a", data[:size])
        with pytest.raises(CheckpointError, match=f"^{path}: "):
            read_whole(path)


@pytest.mark.parametrize("kind", KINDS)
def test_500_files_with_random_changes(tmp_path, kind):
    """Refused in one line, or read as the oracle reads them, which may raise anything."""
    data, oracle = small(kind)
    draw = random.Random(0)
    errors = []
    tracemalloc.start()
    for _ in range(500):
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 4))):
            place = draw.randrange(4 if "npz" in kind else 1, len(changed))
            if draw.random() < 0.7:
                changed[place] = draw.randrange(256)
            else:
                changed[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        path = write(tmp_path / "a", bytes(changed))
        try:
            found = read_whole(path)
        except CheckpointError as error:
            errors.append(str(error))
        else:
            assert_same(found, oracle(bytes(changed)))
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()
    assert [error for error in errors if str(path) not in error or "\n" in error] == []
    assert 150 < len(errors) < 500


def test_a_changed_byte_of_an_npz_is_found(tmp_path):
    path = archive(tmp_path / "a.npz", np.savez, w=np.ones(1000, np.float32))
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    write(path, data)
    with open_source(path) as source:
        for _ in range(2):  # also when asked again
            with pytest.raises(CheckpointError, match=r"tensor w: Bad CRC-32.*the file is damaged"):
                source.read_into("w", 3996, bytearray(4))
    with pytest.raises(CheckpointError, match="tensor w: Bad CRC-32"):
        convert(path, tmp_path / "b")
    assert os.listdir(tmp_path) == ["a.npz"]


def as_msgpack(path, array):
    return write(path, flax.serialization.msgpack_serialize({"w": array}))


def as_npz(path, array):
    return archive(path, np.savez, w=array)


@pytest.mark.parametrize("workers", [1, 4])
def test_converting_pieces_is_converting_the_arrays(tmp_path, monkeypatch, workers):
    """Several chunks of the engine, chunks of Flax that end within them, both axes."""
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1_000_000)
    x = normal((1100, 1000), "float32")
    as_msgpack(tmp_path / "msgpack", x)
    as_npz(tmp_path / "npz", x)
    for axis in ("first", "last"):
        found = []
        for kind in ("msgpack", "npz"):
            options = {"scaling": "channel", "channel_axis": axis, "workers": workers}
            convert(tmp_path / kind, tmp_path / f"{kind} {axis}", **options)
            found.append(load(tmp_path / f"{kind} {axis}"))
        assert_same(*found)
        scale = np.abs(x).max(1 if axis == "first" else 0) / np.float32(448)
        np.testing.assert_allclose(found[0]["w_scale"].reshape(-1), scale, rtol=1e-6)
