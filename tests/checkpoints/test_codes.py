"""Tensors that may be codes, and no layout that is read says of what: refused, by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from refused import refused
from stored import stored

from qtoolkit.checkpoints import (
    CheckpointError,
    compare,
    convert,
    dequantize_checkpoint,
    load,
    save,
    verify,
)

E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
WIDE = {"b.weight": np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)}
SCALE = np.ones(64, np.float32)


def codes(dtype, shape=(64, 64)):
    return np.arange(np.prod(shape)).reshape(shape).astype(np.uint8).view(dtype)


# What programs wrote whose layouts are not read here, and whom the message names.
UNREAD = {
    "EETQ": {"a.weight": codes(np.int8), "a.weight_scales": SCALE},
    "bitsandbytes": {"a.weight": codes(np.uint8, (2048, 1)), "a.weight.absmax": SCALE},
    "AQLM": {"a.codes": codes(np.int8, (4, 4, 2)), "a.codebooks": SCALE[:4]},
    "HQQ": {"a.W_q": codes(np.uint8), "a.scale": SCALE},
    "optimum-quanto": {"a.weight._data": codes(np.int8), "a.weight._scale": SCALE},
    "QuIP#": {"a.Qidxs": np.ones((8, 8), np.int64), "a.SU": SCALE},
    "ExLlamaV3": {"a.trellis": np.ones((8, 8, 48), np.int16), "a.suh": SCALE},
    "": {"a.weight": codes(E4M3), "a.scale": SCALE},
    "one scale": {"a.weight": codes(E4M3), "a.scale": SCALE[:1].reshape(1, 1)},
    "indices": {"a.indices": np.ones((8, 8), np.int16), "a.centroids": SCALE[:4]},
    "without": {"a.weight": codes(E5M2)},
    "blocks": {"a.blocks": codes(np.uint8, (8, 4, 16)), "a.exponents": codes(np.uint8, (8, 4))},
    "wide words": {"a.packed": np.ones((8, 8), np.int32), "a.absmax": SCALE},
    "one row": {"a.weight": codes(np.uint8, (512, 1)), "a.weight.absmax": SCALE},
    "one axis": {"a.weight": codes(np.uint8, (2048,)), "a.weight_scale": SCALE},
    "signed, one axis": {"a.weight": codes(np.int8, (2048,)), "a.scale": SCALE},
    "words, one axis": {"a.packed": np.ones(512, np.int32)},
    "table": {"a.weight.index": codes(np.uint8), "a.weight.codebook": SCALE[:16]},
    "table of 16 bits": {"a.weight.index": np.ones((64, 64), np.int16), "a.weight.lut": SCALE},
    "codebook": {"a.idx": np.ones((64, 64), np.int32), "a.codebooks": SCALE[:16]},
    "index of bytes": {"a.index": codes(np.uint8), "a.values": SCALE[:16]},
    "one bit": {"a.weight": np.eye(64, dtype=bool), "a.alpha": SCALE},
    "bias": {"a.bias": codes(np.int8, (2048,)), "a.scales": SCALE},
}


@pytest.mark.parametrize("program", UNREAD)
def test_convert_refuses_codes_of_layouts_that_are_not_read(tmp_path, program):
    tensors = UNREAD[program]
    save(tmp_path / "f", {**tensors, **WIDE})
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "f", tmp_path / "out")
    message = str(caught.value)
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    assert f"tensor {name}" in message
    assert "skip= or allow_codes=True" in message
    assert "fetch" not in message  # all bytes are there
    if program[:1].isupper():
        assert f"by the names of its entries it is of {program}, which is not read" in message
        assert f"dequantize it with {program}" in message
    with refused(CheckpointError, "may be codes"):
        dequantize_checkpoint(tmp_path / "f", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"skip": [r"^a\."]}, {"allow_codes": True}])
@pytest.mark.parametrize("program", UNREAD)
def test_codes_are_copied_if_told_to(tmp_path, program, options):
    save(tmp_path / "f", {**UNREAD[program], **WIDE})
    convert(tmp_path / "f", tmp_path / "out", layout="plain", **options)
    found = stored(tmp_path / "out")
    for name, array in UNREAD[program].items():
        np.testing.assert_array_equal(found[name].view(np.uint8), array.view(np.uint8))


TABLES = {
    "embeddings.position_ids": np.ones((1, 512), np.int64),
    "stages.0.attention_bias_idxs": np.ones((49, 49), np.int64),
    "rel_pos_indices": np.ones((49, 49), np.int64),
    "h.0.attn.bias": np.ones((1, 1, 64, 64), np.uint8),
    "layers.0.attn.relative_position_index": np.ones((49, 49), np.int64),
    "layers.0.ffn.gate.tid2eid": np.ones((64, 6), np.int64),
    "rngs.dropout.key": np.ones((4, 2), np.uint32),
    "rngs.params.key.value": np.ones(2, np.uint32),
    "opt_state.0.count": np.int32(3),
    "cu_seq_lengths": np.ones(65, np.int32),
    "attention_mask": np.ones((64, 64), np.int32),
    "step": np.int32(3),
    "lengths": np.ones(64, np.int32),
}


@pytest.mark.parametrize(
    "name",
    [f"a.weight_{part}" for part in ("scale", "scale_inv", "zero_point", "scales", "absmax")],
)
def test_a_scale_of_a_weight_in_high_precision_is_refused(tmp_path, name):
    """What is not read as codes has no scale; a loader may multiply by it, so it was copied."""
    save(tmp_path / "f", {"a.weight": WIDE["b.weight"], name: SCALE, **WIDE})
    message = rf"tensor {name}: F32 \[64\]: a scale by its name, of a weight in high precision"
    refused(CheckpointError, message, convert, tmp_path / "f", tmp_path / "out")
    convert(tmp_path / "f", tmp_path / "out", skip=[r"^a\."])
    np.testing.assert_array_equal(stored(tmp_path / "out")[name], SCALE)


FP8 = {"a.weight": np.ones((64, 64), E4M3), "a.weight_scale_inv": np.ones((1, 1), np.float32)}


@pytest.mark.parametrize(
    "name",
    [
        *("svdquant_lora_a", "lora_down", "codebook", "smooth_factor", "scale_2", "quant_bias"),
        *("weight_outliers", "zeros", "low_rank_b", "proj_down"),
        *("biases", "min", "perm", "had_K", "g_idx", "input_channel_scale"),
    ],
)
def test_entries_that_may_change_a_quantized_weight_are_refused(tmp_path, name):
    save(tmp_path / "f", {**FP8, f"a.{name}": np.ones((8, 8), np.float32), **WIDE})
    message = rf"tensor a\.{name}: .* of a quantized weight, expected no such entry"
    for act in (convert, dequantize_checkpoint):
        refused(CheckpointError, message, act, tmp_path / "f", tmp_path / "out")


@pytest.mark.parametrize("name", ["down_proj_zeros", "down_proj_scale_2", "down_proj.absmax"])
def test_entries_of_a_weight_whose_name_is_no_module_are_refused(tmp_path, name):
    experts = {
        "experts.down_proj": np.ones((2, 64, 64), E4M3),
        "experts.down_proj_scale": SCALE[:2],
    }
    save(tmp_path / "f", {**experts, "experts.down_proj_bias": SCALE, **WIDE})
    convert(tmp_path / "f", tmp_path / "out")
    save(tmp_path / "g", {**experts, f"experts.{name}": SCALE, **WIDE})
    with refused(CheckpointError, rf"tensor experts\.{name}: "):
        convert(tmp_path / "g", tmp_path / "out2")


def test_other_entries_of_a_quantized_weight_are_named(tmp_path):
    others = {f"a.{name}": SCALE for name in ("bias", "e_score_correction_bias", "gamma")}
    others |= {"b.zeros": SCALE, "a.lora_A.weight": WIDE["b.weight"], "norm.scales": SCALE}
    save(tmp_path / "f", {**FP8, **others, **WIDE})
    for act in (convert, dequantize_checkpoint):
        report = act(tmp_path / "f", tmp_path / act.__name__)
        named = "tensor a.gamma, a.lora_A.weight, b.zeros of the source: in the module of a weight"
        assert named in report.caution
        assert "bias" not in report.caution


def test_masks_positions_and_other_tables_are_no_codes(tmp_path):
    save(tmp_path / "f", {**TABLES, **WIDE})
    report = convert(tmp_path / "f", tmp_path / "out")
    assert [t.name for t in report.tensors if t.action == "quantize"] == ["b.weight"]


def folder(path, tensors, **config):
    path.mkdir()
    save(path / "model.safetensors", tensors)
    about = {"model_type": "llama"} | ({"quantization_config": config} if config else {})
    (path / "config.json").write_text(json.dumps(about))
    return path


BY_BLOCK = {"a.weight": codes(E4M3), "a.weight_scale_inv": np.ones((1, 1), np.float32)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"c.weight": codes(E4M3)},
            r"tensor c\.weight: F8_E4M3 .64, 64., without the scales that layout finegrained-fp8 "
            r"has, as config\.json says; fetch the checkpoint again",
        ),
        (
            {"c.weight": codes(E4M3), "c.weight_scales": SCALE},
            r"tensor c\.weight: F8_E4M3 .64, 64., .* of EETQ, which is not read; dequantize it",
        ),
        (
            {"c.weight": codes(E4M3), "c.amax": SCALE},
            r"tensor c\.weight: .*with it: c\.amax F32 .64.\); dequantize the checkpoint with",
        ),
        (
            {"c.weight_scale_inv": np.ones((1, 1), np.float32)},
            r"tensor c\.weight_scale_inv: F32 .1, 1.: of a weight that is not there.*fetch",
        ),
    ],
)
@pytest.mark.parametrize("act", ["convert", "dequantize", "compare", "load"])
def test_a_weight_or_a_scale_alone_is_named(tmp_path, changes, message, act):
    source = folder(tmp_path / "src", {**BY_BLOCK, **changes}, quant_method="fp8")
    do = {
        "convert": lambda: convert(source, tmp_path / "out"),
        "dequantize": lambda: dequantize_checkpoint(source, tmp_path / "out"),
        "compare": lambda: compare(source, source),
        "load": lambda: load(source),
    }
    refused(CheckpointError, message, do[act])


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("a.weight_scale", SCALE),
        ("a.weight_scale", np.ones((8, 8), E8M0)),
        ("a.weight_zero_point", np.ones((8, 8), np.int32)),
        ("a.qzeros", np.ones((8, 8), np.int32)),
        ("experts.up_proj_weight_scale_2", SCALE),
    ],
)
def test_a_scale_alone_is_named_without_a_config_too(tmp_path, name, array):
    save(tmp_path / "f", {name: array, **WIDE})
    with refused(CheckpointError, rf"tensor {name}: .*: of a weight that is not there"):
        convert(tmp_path / "f", tmp_path / "out")
    convert(tmp_path / "f", tmp_path / "out", layout="plain", allow_codes=True)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, np.int8])
def test_what_convert_keeps_the_others_accept(tmp_path, dtype):
    kept = codes(dtype)
    kept.view(np.uint8)[kept.view(np.uint8) & 124 == 124] = 0
    source = folder(
        tmp_path / "src", {"model.a.weight": kept, **{f"model.{n}": x for n, x in WIDE.items()}}
    )
    convert(source, tmp_path / "out", allow_codes=True)
    assert not verify(source, tmp_path / "out").problems
    assert [t.equal for t in compare(source, tmp_path / "out").tensors].count(False) == 1
    np.testing.assert_array_equal(stored(tmp_path / "out")["model.a.weight"], kept)
    dequantize_checkpoint(tmp_path / "out", tmp_path / "unquantized")
    np.testing.assert_array_equal(stored(tmp_path / "unquantized")["model.a.weight"], kept)


@pytest.mark.parametrize(
    ("dtype", "bytes_", "count"),
    [
        (E4M3, [0x7F, 0xFF, 0x7E, 0x80], 2),
        (E5M2, [0x7C, 0xFC, 0x7D, 0xFF, 0x7B], 4),
        (ml_dtypes.float8_e4m3fnuz, [0x80, 0x7F, 0xFF], 1),
        (ml_dtypes.float8_e5m2fnuz, [0x80, 0x7F, 0xFF], 1),
        (E8M0, [0xFF, 0xFE, 0x7F], 1),
    ],
)
def test_nan_in_floats_of_8_bits_is_counted(tmp_path, dtype, bytes_, count):
    kept = np.zeros((8, 8), np.uint8)
    kept[3, : len(bytes_)] = bytes_
    oracle = int((~np.isfinite(kept.view(dtype).astype(np.float32))).sum())
    assert oracle == count
    save(tmp_path / "f", {"a": kept.view(dtype), **WIDE})
    report = convert(tmp_path / "f", tmp_path / "out", allow_codes=True)
    assert {t.name: t.nonfinite for t in report.tensors} == {"a": count, "b.weight": 0}


def test_gptq_without_its_config_is_refused(tmp_path):
    words = {"a.qweight": np.ones((8, 64), np.int32), "a.qzeros": np.ones((1, 8), np.int32)}
    save(tmp_path / "f", {**words, "a.scales": np.ones((1, 64), np.float16), **WIDE})
    with refused(CheckpointError, r"a\.qweight: of .* GPTQ.*give the folder with it"):
        convert(tmp_path / "f", tmp_path / "out")
