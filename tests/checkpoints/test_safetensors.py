"""The reader and the writer; the oracle is the `safetensors` package where it can do the same."""

import errno
import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from stored import stored

from qtoolkit.checkpoints import CheckpointError, save
from qtoolkit.checkpoints._safetensors import open_safetensors
from qtoolkit.checkpoints.internal import in_data_order, write_safetensors

DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
TARGET = "model.safetensors"


def random_bits(dtype, shape, seed=0):
    """An array of random patterns: every NaN payload and subnormal may occur."""
    rng = np.random.default_rng(seed)
    if dtype is np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)


def as_bytes(array):
    return np.asarray(array, order="C").tobytes()


def every_dtype():
    shapes = [(3, 5), (7,), (), (0, 4), (2, 1, 3)]
    return {
        f"layer.{dtype}.{rank}": random_bits(kind, shape, seed=rank)
        for dtype, kind in DTYPES.items()
        for rank, shape in enumerate(shapes)
    }


def raw_file(header, data=b"", length=None):
    """A file as its parts say, lies included."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_metadata_that_is_null_is_none(tmp_path):
    """As MLX's save_safetensors writes it; the package safetensors accepts it, too."""
    (tmp_path / "f").write_bytes(raw_file({"__metadata__": None, "a": entry()}, b"1234"))
    np.testing.assert_array_equal(stored(tmp_path / "f")["a"], np.frombuffer(b"1234", np.uint8))


@pytest.mark.quick
def test_every_dtype_and_rank_survives_a_round_trip_bit_for_bit(tmp_path):
    tensors = every_dtype()
    save(tmp_path / TARGET, tensors, {"format": "pt", "é": "ü\n"})
    found = stored(tmp_path / TARGET)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert as_bytes(found[name]) == as_bytes(array), name
    with open_safetensors(tmp_path / TARGET) as file:
        assert file.metadata == {"format": "pt", "é": "ü\n"}


def test_the_bytes_are_those_that_safetensors_writes(tmp_path):
    tensors = every_dtype()
    save(tmp_path / "ours", tensors, {"format": "np"})
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", {"format": "np"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_safetensors_opens_our_file_and_reads_what_numpy_has(tmp_path):
    tensors = every_dtype()
    save(tmp_path / TARGET, tensors)
    with safetensors.safe_open(tmp_path / TARGET, "np") as file:
        assert sorted(file.keys()) == sorted(tensors)
        for name, array in tensors.items():
            assert file.get_slice(name).get_dtype() == name.split(".")[1]
            if array.dtype.isbuiltin == 1:
                assert as_bytes(file.get_tensor(name)) == as_bytes(array), name


def test_save_takes_jax_strided_and_big_endian_arrays(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = {
        "jax": jnp.asarray(x, jnp.float8_e4m3fn),
        "transposed": x.T,
        "strided": x[:, ::2],
        "big_endian": x.astype(">f4"),
    }
    save(tmp_path / "a", tensors)
    save(tmp_path / "b", dict(reversed(tensors.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found = stored(tmp_path / "a")
    np.testing.assert_array_equal(found["jax"].astype(np.float32), x)
    np.testing.assert_array_equal(found["transposed"], x.T)
    np.testing.assert_array_equal(found["strided"], x[:, ::2])
    np.testing.assert_array_equal(found["big_endian"], x)


def test_any_range_is_read(tmp_path):
    x = random_bits(np.float32, (6, 7))
    save(tmp_path / TARGET, {"x": x, "y": np.ones(3, np.int8)})
    with open_safetensors(tmp_path / TARGET) as file:
        for start, stop in [(0, 42), (5, 5), (11, 30), (41, 42)]:
            assert as_bytes(file.tensors["x"].read(start, stop)) == as_bytes(
                x.reshape(-1)[start:stop]
            )
        with pytest.raises(IndexError, match="bytes 0:172 of 168"):
            file.tensors["x"].read(0, 43)
        with pytest.raises(KeyError):
            file.read("z")


def test_tensors_of_4_bits_are_read_and_those_of_6_listed(tmp_path):
    header = {"a": entry("F4", (2, 4), (0, 4)), "b": entry("F6_E2M3", (4,), (4, 7))}
    (tmp_path / TARGET).write_bytes(raw_file(header, b"1234567"))
    with open_safetensors(tmp_path / TARGET) as file:
        assert file.tensors["a"].shape == (2, 4)
        data = bytearray(3)
        file.tensors["b"].read_into(0, memoryview(data))
        assert data == b"567"
        # "1234" is 31 32 33 34: 1, 3, 2, 3, 3, 3, 4, 3 are 0.5, 1.5, 1, 1.5 and so on.
        numbers = np.array([[0.5, 1.5, 1, 1.5], [1.5, 1.5, 2, 1.5]])
        np.testing.assert_array_equal(file.read("a").astype(float), numbers)
        flat = [file.tensors["a"].read(i, j).astype(float) for i, j in ((1, 4), (2, 3), (3, 3))]
        for found, (i, j) in zip(flat, ((1, 4), (2, 3), (3, 3)), strict=True):
            np.testing.assert_array_equal(found, numbers.reshape(-1)[i:j])
        with pytest.raises(CheckpointError, match="tensor b: dtype F6_E2M3 is narrower than a by"):
            file.read("b")


GOOD = raw_file({"a": entry(), "b": entry(offsets=(4, 8))}, b"12345678")


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_a_file_truncated_anywhere_is_refused(tmp_path, length):
    (tmp_path / TARGET).write_bytes(GOOD[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*(damaged)"):
        open_safetensors(tmp_path / TARGET)


DEEP = b'{"a":' + b"[" * 10**5
MALFORMED = {
    "left_over": (GOOD + b"9", "9 bytes of data, expected 8"),
    "huge_length": (raw_file({}, length=2**63), "header length 9223372036854775808 of"),
    "long_length": (raw_file({}, length=10**6), "header length 1000000 of 10 bytes"),
    "no_object": (raw_file(b"[]"), r"starts with b'\['"),
    "leading_space": (raw_file(b" {}"), "starts with b' '"),
    "empty_header": (raw_file(b""), "starts with b''"),
    "bad_json": (raw_file(b'{"a":'), "header: Expecting value"),
    "not_utf8": (raw_file(b'{"\xff": 1}'), "header: 'utf-8' codec"),
    "deep": (raw_file(DEEP), "header: "),
    "long_integer": (raw_file(b'{"a":' + b"9" * 5000 + b"}"), "header: "),
    "lone_surrogate": (raw_file(b'{"\\ud800": 1}'), "no valid text"),
    "duplicate_tensor": (raw_file(b'{"a": 1, "a": 1}'), "'a' is given twice"),
    "duplicate_field": (
        raw_file(b'{"a": {"dtype": "U8", "dtype": "U8"}}'),
        "'dtype' is given twice",
    ),
    "metadata_list": (raw_file({"__metadata__": []}), "__metadata__ is not an object of strings"),
    "metadata_number": (raw_file({"__metadata__": {"a": 1}}), "__metadata__ is not an object"),
    "entry_number": (raw_file({"a": 1}), "tensor a: dtype None"),
    "unknown_dtype": (raw_file({"a": entry("F7")}, b"1234"), "tensor a: dtype 'F7', expected one"),
    "no_dtype": (raw_file({"a": {"shape": []}}), "tensor a: dtype None"),
    "shape_number": (raw_file({"a": {**entry(), "shape": 4}}, b"1234"), "tensor a: shape 4"),
    "shape_negative": (raw_file({"a": entry(shape=(-4,))}, b"1234"), r"tensor a: shape \[-4\]"),
    "shape_boolean": (raw_file({"a": entry(shape=(True, 4))}, b"1234"), "shape .True, 4"),
    "shape_float": (raw_file({"a": entry(shape=(4.0,))}, b"1234"), r"shape \[4.0\]"),
    "shape_beyond_64_bits": (raw_file({"a": entry(shape=(2**64,))}, b"1234"), "tensor a: shape"),
    "offsets_three": (raw_file({"a": entry(offsets=(0, 4, 8))}, b"1234"), "data_offsets"),
    "offsets_backwards": (
        raw_file({"a": entry(offsets=(4, 0))}, b"1234"),
        r"data_offsets \[4, 0\]",
    ),
    "offsets_negative": (raw_file({"a": entry(offsets=(-4, 0))}, b"1234"), "data_offsets"),
    "wrong_product": (raw_file({"a": entry(shape=(5,))}, b"1234"), "4 bytes of data, expected 5.0"),
    "half_byte": (raw_file({"a": entry("F4", (9,))}, b"1234"), "4 bytes of data, expected 4.5"),
    "overflow": (
        raw_file({"a": entry(shape=(2**63,) * 9)}, b"1234"),
        "tensor a: shape .* at most 32 integers >= 0 whose product is below",
    ),
    "overflow_to_zero": (
        raw_file({"a": entry(shape=(2**63, 16, 0), offsets=(0, 0))}),
        "tensor a: shape .* without lengths of 0",
    ),
    "overlap": (
        raw_file({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"),
        r"tensor b: data starts at 2, expected 4.*\(overlap\)",
    ),
    "hole": (
        raw_file({"a": entry(), "b": entry(offsets=(5, 9))}, b"123456789"),
        r"tensor b: data starts at 5, expected 4.*\(hole\)",
    ),
    "hole_at_start": (raw_file({"a": entry(offsets=(1, 5))}, b"12345"), r"\(hole\)"),
    "beyond_the_end": (raw_file({"a": entry(shape=(9,), offsets=(0, 9))}, b"1234"), "truncated"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_header_is_refused_in_one_line(tmp_path, name):
    content, message = MALFORMED[name]
    (tmp_path / TARGET).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_safetensors(tmp_path / TARGET)
    assert str(caught.value).startswith(str(tmp_path / TARGET))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


# The package takes the last of two tensors of one name, and lets blanks lead against its own text.
STRICTER = ("duplicate_tensor", "leading_space")


@pytest.mark.parametrize("name", [name for name in MALFORMED if name not in STRICTER])
def test_safetensors_refuses_what_we_refuse(tmp_path, name):
    (tmp_path / TARGET).write_bytes(MALFORMED[name][0])
    with pytest.raises((safetensors.SafetensorError, OSError)):
        safetensors.safe_open(tmp_path / TARGET, "np")


def test_control_characters_in_names_do_not_reach_messages(tmp_path):
    (tmp_path / TARGET).write_bytes(raw_file({"a\n\x1b[2J": 1}))
    with pytest.raises(CheckpointError, match=r"tensor 'a\\n\\x1b\[2J'"):
        open_safetensors(tmp_path / TARGET)


def test_missing_files_folders_and_pipes(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        stored(tmp_path / "missing")
    assert caught.value.filename == str(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="no safetensors files in the folder"):
        stored(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: is not a regular file"):
        stored(tmp_path / "pipe")


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    save(tmp_path / TARGET, {"x": np.ones(9, np.float32)})
    with open_safetensors(tmp_path / TARGET) as file:
        os.truncate(tmp_path / TARGET, os.path.getsize(tmp_path / TARGET) - 1)
        with pytest.raises(CheckpointError, match=r"tensor x: the file ended .* bytes early"):
            file.read("x")


def test_the_data_is_on_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, f=real: (order.append(n), f(*a))[1])
    save(tmp_path / "a.safetensors", {"x": np.ones(3, np.float32)})
    assert order[:2] == ["fsync", "replace"]


def test_an_empty_tensor_of_a_rank_that_numpy_lacks_is_refused(tmp_path):
    """The reference accepts it: it makes no array of it."""
    path = tmp_path / "rank.safetensors"
    path.write_bytes(raw_file({"a": entry(shape=(0,) * 33, offsets=(0, 0))}))
    with pytest.raises(CheckpointError, match=r"tensor a: shape .* at most 32 integers"):
        stored(path)


# Writing that fails: the folder stays as it was, whatever the cause.


def test_an_existing_target_stays_unless_told_otherwise(tmp_path):
    save(tmp_path / TARGET, {"x": np.ones(2, np.float32)})
    before = (tmp_path / TARGET).read_bytes()
    with pytest.raises(CheckpointError, match="exists already; pass overwrite=True"):
        save(tmp_path / TARGET, {})
    assert (tmp_path / TARGET).read_bytes() == before
    save(tmp_path / TARGET, {}, overwrite=True)
    assert stored(tmp_path / TARGET) == {}
    assert os.listdir(tmp_path) == [TARGET]


def test_layouts_of_what_safetensors_cannot_hold():
    with pytest.raises(CheckpointError, match=r"'a': F4 of shape \(3,\) ends within a byte.*pad"):
        in_data_order([("a", "F4", (3,))])


def test_targets_that_cannot_be(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        save(tmp_path, {}, overwrite=True)
    with pytest.raises(FileNotFoundError, match="its folder does not exist") as caught:
        save(tmp_path / "no" / TARGET, {})
    assert caught.value.filename == str(tmp_path / "no" / TARGET)
    with pytest.raises(CheckpointError, match="/dev/null: is not a regular file"):
        save("/dev/null", {}, overwrite=True)


@pytest.mark.parametrize("size", [1000, 10**6])  # written at once, and by the thread
def test_a_full_disk_leaves_nothing_and_names_the_target(tmp_path, monkeypatch, size):
    save(tmp_path / TARGET, {"old": np.ones(1, np.int8)})
    before = (tmp_path / TARGET).read_bytes()
    pwrite, room = os.pwrite, 100

    def full(descriptor, data, position):
        if position >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data[: room - position], position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save(tmp_path / TARGET, {"x": np.ones(size, np.float32)}, overwrite=True)
    assert caught.value.filename == str(tmp_path / TARGET)
    assert os.listdir(tmp_path) == [TARGET]
    assert (tmp_path / TARGET).read_bytes() == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_any_failure_leaves_the_folder_as_it_was(tmp_path, failure):
    save(tmp_path / TARGET, {"old": np.ones(1, np.int8)})
    before = (tmp_path / TARGET).read_bytes()

    def chunks():
        yield "x", b"12"
        assert len(os.listdir(tmp_path)) == 2  # the temporary file is in the target's folder
        raise failure

    with pytest.raises(failure):
        write_safetensors(
            tmp_path / TARGET, in_data_order([("x", "U8", (4,))]), chunks(), overwrite=True
        )
    assert os.listdir(tmp_path) == [TARGET]
    assert (tmp_path / TARGET).read_bytes() == before


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([("x", b"123")], "tensor x: 1 bytes fewer produced"),
        ([("x", b"123"), ("x", b"45")], "tensor x: 2 more bytes produced, expected 1"),
        ([("y", b"1")], "tensor y: 1 more bytes produced, expected no such tensor"),
    ],
)
def test_chunks_that_break_the_plan_write_nothing(tmp_path, chunks, message):
    with pytest.raises(CheckpointError, match=message):
        write_safetensors(tmp_path / TARGET, in_data_order([("x", "U8", (4,))]), chunks)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"x": np.zeros(2, np.complex128)}, None, "tensor x: dtype complex128, expected one of"),
        ({"x": np.zeros(2, ml_dtypes.int4)}, None, "tensor x: dtype int4"),
        ({"x": np.array(["text"])}, None, "tensor x: dtype <U4"),
        ({"__metadata__": np.zeros(2)}, None, "expected a name that is text"),
        ({"\ud800": np.zeros(2)}, None, "expected a name that is text"),
        ({}, {"a": 1}, "metadata: got {'a': 1}, expected strings"),
    ],
)
def test_what_safetensors_has_no_place_for(tmp_path, tensors, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / TARGET, tensors, metadata)
    assert os.listdir(tmp_path) == []
