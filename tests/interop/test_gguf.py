"""GGUF files, written by the package gguf and read as a source."""

import json

import gguf
import jax
import numpy as np
import pytest
from command import run as run_command

from qtoolkit.checkpoints import CheckpointError, convert, dequantize_checkpoint, load, save
from qtoolkit.checkpoints.internal import open_source

NAMES = {"Q8_0": gguf.GGMLQuantizationType.Q8_0, "Q4_0": gguf.GGMLQuantizationType.Q4_0}


@pytest.fixture
def source(tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for name, kind in NAMES.items():
        blocks = gguf.quants.quantize(x, kind)
        writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=kind)
    bf16 = gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16)
    writer.add_tensor("blk.0.BF16.weight", bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.add_tensor("output_norm.weight", x[0])
    writer.add_tensor("half.weight", x.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return x


def test_blocks_dequantize_as_the_gguf_package_does(tmp_path, source):
    dequantize_checkpoint(tmp_path / "model.gguf", tmp_path / "wide")
    found = load(tmp_path / "wide")
    for name, kind in NAMES.items():
        expected = gguf.quants.dequantize(gguf.quants.quantize(source, kind), kind)
        np.testing.assert_array_equal(found[f"blk.0.{name}.weight"], expected)
    np.testing.assert_array_equal(found["output_norm.weight"], source[0])
    np.testing.assert_array_equal(found["half.weight"], source.astype(np.float16))
    # No blocks: kept as it is, and so is what is not quantized.
    assert found["blk.0.BF16.weight"].dtype == "bfloat16"
    np.testing.assert_array_equal(found["blk.0.BF16.weight"], source.astype("bfloat16"))


def test_converting_gguf_is_converting_those_numbers(tmp_path, source):
    convert(tmp_path / "model.gguf", tmp_path / "direct")
    dequantize_checkpoint(tmp_path / "model.gguf", tmp_path / "wide")
    convert(tmp_path / "wide", tmp_path / "two_steps")
    direct, two_steps = load(tmp_path / "direct"), load(tmp_path / "two_steps")
    assert direct.keys() == two_steps.keys()
    for one, other in zip(*map(jax.tree.leaves, (direct, two_steps)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_layouts_that_cannot_hold_gguf_names_are_refused(tmp_path, source):
    """It was written, with a line that could not load it: transformers has no "blk.0.Q8_0"."""
    dequantize_checkpoint(tmp_path / "model.gguf", tmp_path / "wide")
    for path in (tmp_path / "model.gguf", tmp_path / "wide"):
        for layout in ("compressed-tensors", "modelopt"):
            with pytest.raises(CheckpointError, match=r"blk.0.*named as in GGUF.*gguf_file="):
                convert(path, tmp_path / "out", layout=layout, scaling="channel")
    assert not (tmp_path / "out").exists()


def test_sizes_are_those_of_the_file(tmp_path, source):
    """Not of the float32 that blocks are read as. Oracle: 34 and 18 bytes for 32 numbers."""
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    expected = {
        "blk.0.Q8_0.weight": ("Q8_0", 64 * 96 // 32 * 34),
        "blk.0.Q4_0.weight": ("Q4_0", 64 * 96 // 32 * 18),
        "blk.0.BF16.weight": ("BF16", 64 * 96 * 2),
        "output_norm.weight": ("F32", 96 * 4),
        "half.weight": ("F16", 64 * 96 * 2),
    }
    total = sum(size for _, size in expected.values())

    def run(*arguments):
        done = run_command(*arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    tensors = json.loads(run("inspect", path, "--json"))["tensors"]
    assert {t["name"]: (t["dtype"], t["bytes"]) for t in tensors} == expected
    listed = run("inspect", path)
    assert f"{total:,} bytes\nlayout GGUF: 2 tensors quantized; " in listed
    for command, title in (
        ("convert", f"{out}: e4m3fn, a scale per tensor"),
        ("dequantize", f"{out}: 5 tensors, dequantized from layout GGUF"),
    ):
        planned = run(command, path, out, "--dry-run", "--overwrite")
        assert f"\n{title}; a dry run, nothing was written\n" in planned
        done = run(command, path, out, "--overwrite")
        assert done.startswith(f"{title}\n")
        for text in (planned, done):
            assert f"\n  bytes      {total:,} -> " in text
    plan = json.loads(run("convert", path, out, "--overwrite", "--dry-run", "--json"))
    assert {t["name"]: t["bytes_before"] for t in plan["tensors"]} == {
        name: size for name, (_, size) in expected.items()
    }
    assert (plan["bytes_before"], plan["dequantized"]) == (total, "GGUF")


def test_a_damaged_file_is_named(tmp_path, source):
    path = tmp_path / "model.gguf"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="a damaged GGUF file"):
        convert(path, tmp_path / "out")
    save(tmp_path / "wide", {"a": source})


def test_a_type_of_a_fork_is_no_damage(tmp_path, source):
    """137 is IQ2_K of ik_llama.cpp, which the package gguf does not know."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    place = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight")
    place += 4 + 8 * source.ndim  # the number of dimensions, and each
    path.write_bytes(data[:place] + (137).to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(CheckpointError, match=r"GGML's type 137, .* a fork .* upgrade gguf"):
        convert(path, tmp_path / "out")


def test_a_part_of_a_split_file_is_refused(tmp_path, source):
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("blk.0.ffn_up.weight", source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"one of 2 files .* gguf-split --merge"):
        convert(tmp_path / "m-00001-of-00002.gguf", tmp_path / "out")


def big_endian(path, array, kind):
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_uint32("x", 1)
    writer.add_tensor("blk.0.ffn_up.weight", array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["Q8_0", "F32"])
def test_a_big_endian_file_is_refused(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quants.quantize(np.ones((2, 32), np.float32), kind)
    big_endian(tmp_path / "big.gguf", blocks, kind)
    with pytest.raises(CheckpointError, match=r"a big-endian file.*gguf-convert-endian"):
        open_source(tmp_path / "big.gguf")


def written(path, tensors):
    """A file of {name: (array, type or None)}; blocks are those of the package gguf."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (array, kind) in tensors.items():
        blocks = array if kind is None else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS = [*NAMES.values(), gguf.GGMLQuantizationType.TQ2_0, gguf.GGMLQuantizationType.BF16, None]


@pytest.mark.parametrize("kind", KINDS)
def test_factors_beside_weights_multiply_them(tmp_path, kind):
    """llama.cpp keeps a factor "NAME.scale" of NVFP4 and ternary weights. Oracle: NumPy."""
    rng = np.random.default_rng(0)
    x, experts = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 512), (3, 8, 512)))
    factor, factors = np.float32([0.00321]), np.float32([0.5, 3, 0.25])
    plain = {"blk.0.attn_q.weight": (x, kind), "blk.0.ffn_up_exps.weight": (experts, kind)}
    scales = {
        "blk.0.attn_q.scale": (factor, None),
        "blk.0.attn_q.input_scale": (factor, None),
        "blk.0.ffn_up_exps.scale": (factors, None),
        "norm.scale": (factors, None),  # of no weight
    }
    written(tmp_path / "plain.gguf", plain)
    written(tmp_path / "scaled.gguf", plain | scales)
    with open_source(tmp_path / "plain.gguf") as opened:
        wide = {name: opened.read(name).astype(np.float32) for name in plain}
    with open_source(tmp_path / "scaled.gguf") as opened:
        assert set(opened.tensors) == {*plain, "norm.scale"}
        assert list(opened.auxiliary) == ["blk.0.attn_q.input_scale"]
        found = {name: opened.read(name) for name in plain}
        sizes = sum(tensor.stored_nbytes for tensor in opened.tensors.values())
    np.testing.assert_array_equal(
        found["blk.0.attn_q.weight"], wide["blk.0.attn_q.weight"] * factor
    )
    name = "blk.0.ffn_up_exps.weight"
    np.testing.assert_array_equal(found[name], wide[name] * factors[:, None, None])
    assert sizes == sum(t.n_bytes for t in gguf.GGUFReader(tmp_path / "scaled.gguf").tensors) - 4


@pytest.mark.parametrize("factors", [np.ones(2, np.float32), np.ones(1, np.int32)])
def test_a_factor_of_another_kind_is_refused(tmp_path, factors):
    x = np.ones((8, 32), np.float32)
    written(tmp_path / "f.gguf", {"a.weight": (x, NAMES["Q8_0"]), "a.scale": (factors, None)})
    with pytest.raises(CheckpointError, match=r"tensor a\.scale: .* expected a factor"):
        open_source(tmp_path / "f.gguf")
