"""GGUF files that `convert` writes.

Oracles: the package gguf, which has llama.cpp's reference quantizers and dequantizers;
transformers, which loads GGUF by code of its own; and the formats' formulas.
"""

import json
import shutil
import struct

import gguf
import numpy as np
import pytest
import torch
import transformers
from command import run

from qtoolkit import quantize
from qtoolkit.checkpoints import CheckpointError, convert, dequantize_checkpoint, save, verify
from qtoolkit.checkpoints.internal import open_source

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama3": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA_ROPE),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=64),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "qwen2moe": transformers.Qwen2MoeConfig(
        **SIZES, **MOE, shared_expert_intermediate_size=192, norm_topk_prob=False
    ),
    "qwen3moe": transformers.Qwen3MoeConfig(**SIZES, **MOE, head_dim=64, norm_topk_prob=True),
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=32),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=32),
}


def byte_pairs(folder, regex):
    """tokenizer.json of byte-level BPE."""
    vocabulary = {chr(index + 256): index for index in range(256)} | {"ab": 256, "abc": 257}
    added = [("<|end|>", True), ("<tool>", False)]
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
    steps = [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]
    data = {
        "added_tokens": [
            {"id": 258 + place, "content": text, "special": special}
            for place, (text, special) in enumerate(added)
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"], ["ab", "c"]]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def pieces(folder):
    """tokenizer.model of SentencePiece: a protocol buffer, pieces in field 1."""

    def length(n):
        return bytes([n]) if n < 128 else bytes([n & 127 | 128, n >> 7])

    def piece(text, score, kind):
        data = text.encode()
        fields = b"\x0a" + length(len(data)) + data + b"\x15" + struct.pack("<f", score)
        fields += b"\x18" + length(kind)
        return b"\x0a" + length(len(fields)) + fields

    data = piece("<pad>", 0, 3) + piece("<eos>", 0, 3) + piece("<bos>", 0, 3) + piece("<unk>", 0, 2)
    data += b"".join(piece(f"\u2581w{index}", -index, 1) for index in range(200))
    data += b"".join(piece(f"<0x{index:02X}>", 0, 6) for index in range(60))
    (folder / "tokenizer.model").write_bytes(data + b"\x12\x02\x18\x02")
    added = {"4": {"content": "\u2581w0", "special": False}}
    added["270"] = {"content": "<unused0>", "special": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function that gives the folder of a small random model."""
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
            for parameter in model.parameters():
                parameter.data = torch.randn_like(parameter) * 0.1
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
            if name.startswith("gemma") or name == "llama":
                pieces(made[name])
            else:
                byte_pairs(made[name], LLAMA if name == "llama3" else QWEN)
        return made[name]

    return make


def contents(path):
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in ("llama3", "mixtral", "qwen2moe")])
def test_transformers_computes_the_logits_of_the_model(tmp_path, folders, name):
    """Not of Llama 3: transformers reads no rope_freqs of GGUF. Nor of Mixtral, which it does not
    know, and of Qwen2-MoE, whose gate of the shared expert it reads in the shape of older files."""
    source = folders(name)
    convert(source, tmp_path / "m.gguf", format="float16")
    config = transformers.AutoConfig.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=config, dtype=torch.float32
    )
    original = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.inference_mode():
        found, expected = model(tokens).logits, original(tokens).logits
    # float16 weights of a model in float32.
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "qwen3moe"])
@pytest.mark.parametrize("kind", ["float16", "q8_0", "nvfp4"])
def test_experts_are_stacked(tmp_path, folders, name, kind):
    """Names, shapes and metadata are those of llama.cpp's conversion/llama.py and qwen.py."""
    convert(folders(name), tmp_path / "m.gguf", format=kind)
    fields, tensors = contents(tmp_path / "m.gguf")
    arch = "llama" if name == "mixtral" else name
    assert fields["general.architecture"] == arch
    assert (fields[f"{arch}.expert_count"], fields[f"{arch}.expert_used_count"]) == (4, 2)
    sizes = [fields.get(f"{arch}.expert{x}_feed_forward_length") for x in ("", "_shared")]
    assert sizes == {"mixtral": [None] * 2, "qwen2moe": [64, 192]}.get(name, [64, None])
    folder = folders(name) / "model.safetensors"
    with open_source(folder) as source:
        stored = {n: tensor.read_all() for n, tensor in source.tensors.items()}
    moe = "model.layers.1." + ("block_sparse_moe" if name == "mixtral" else "mlp")
    parts = {"gate": "w1", "up": "w3", "down": "w2"}
    for part, old in parts.items():
        last = old if name == "mixtral" else f"{part}_proj"
        expected = np.stack([stored[f"{moe}.experts.{e}.{last}.weight"] for e in range(4)])
        tensor = tensors[f"blk.1.ffn_{part}_exps.weight"]
        assert list(tensor.shape) == list(expected.shape[::-1])  # ggml's order
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if kind == "nvfp4":
            scale = tensors[f"blk.1.ffn_{part}_exps.scale"].data
            largest = np.abs(expected).max((1, 2))  # each expert has a scale
            np.testing.assert_allclose(scale, largest / np.float32(6 * 448), rtol=1e-6)
            found = found * scale[:, None, None]
        bound = {"float16": 2**-11, "q8_0": 1 / 254 + 2**-11, "nvfp4": 0.2}[kind]
        assert np.abs(found - expected).max() <= bound * np.abs(expected).max()
    router = tensors["blk.1.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32
    np.testing.assert_array_equal(router.data, stored[f"{moe}.gate.weight"])
    assert ("blk.0.ffn_gate_shexp.weight" in tensors) == (name == "qwen2moe")


def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path, folders):
    (tmp_path / "m").mkdir()
    for file in folders("qwen3moe").iterdir():
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    with pytest.raises(
        CheckpointError, match=r"norm_topk_prob False .* QWEN3MOE computes with True"
    ):
        convert(tmp_path / "m", tmp_path / "m.gguf", format="q8_0")


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "mxfp4", "bfloat16", "float16"])
def test_blocks_are_those_of_the_reference_quantizers(tmp_path, folders, kind):
    source = folders("qwen3")
    report = convert(source, tmp_path / "m.gguf", format=kind)
    _, tensors = contents(tmp_path / "m.gguf")
    stored = {"float16": "F16", "bfloat16": "BF16"}.get(kind, kind.upper())
    with open_source(source) as opened:
        for name, original in (("ffn_up", "mlp.up_proj"), ("attn_q", "self_attn.q_proj")):
            x = opened.read(f"model.layers.1.{original}.weight").astype(np.float32)
            tensor = tensors[f"blk.1.{name}.weight"]
            assert tensor.tensor_type.name == stored
            expected = gguf.quants.quantize(x, tensor.tensor_type)
            np.testing.assert_array_equal(tensor.data.view(np.uint8), expected.view(np.uint8))
    embeddings = tensors["token_embd.weight"].tensor_type.name
    assert embeddings == (stored if kind in ("q8_0", "float16", "bfloat16") else "Q8_0")
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert report.layout == "GGUF"
    assert report.format.split(", ")[-1] == kind  # "q8_0, q4_0" with its embeddings
    assert min(t.sqnr_db for t in report.tensors if t.dtype == stored) > 15


def test_nvfp4_has_our_codes_and_a_scale_of_the_tensor(tmp_path, folders):
    source = folders("llama")
    convert(source, tmp_path / "m.gguf", format="nvfp4")
    _, tensors = contents(tmp_path / "m.gguf")
    with open_source(source) as opened:
        x = opened.read("model.layers.0.mlp.up_proj.weight")
    tensor, factor = tensors["blk.0.ffn_up.weight"], tensors["blk.0.ffn_up.scale"].data
    found = gguf.quants.dequantize(tensor.data, tensor.tensor_type) * factor
    np.testing.assert_allclose(found, quantize(x, "nvfp4").dequantize(), 2e-7)
    with open_source(tmp_path / "m.gguf") as opened:  # our reader multiplies, as llama.cpp does
        np.testing.assert_array_equal(opened.read("blk.0.ffn_up.weight"), found)


def test_rows_of_q_and_k_are_reordered_for_llama_alone(tmp_path, folders):
    """Head of 32 rows: transformers pairs row i with i + 16, llama.cpp 2 i with 2 i + 1."""
    order = np.arange(128).reshape(4, 2, 16).swapaxes(1, 2).reshape(-1)
    for name, places in (("llama", order), ("qwen2", np.arange(128))):
        convert(folders(name), tmp_path / f"{name}.gguf", format="float16")
        _, tensors = contents(tmp_path / f"{name}.gguf")
        with open_source(folders(name)) as opened:
            x = opened.read("model.layers.0.self_attn.q_proj.weight")
        found = tensors["blk.0.attn_q.weight"].data
        np.testing.assert_array_equal(found, x[places].astype(np.float16))


def test_norms_of_gemma_have_their_one_and_metadata_the_sizes(tmp_path, folders):
    convert(folders("gemma3"), tmp_path / "m.gguf", format="q8_0")
    fields, tensors = contents(tmp_path / "m.gguf")
    with open_source(folders("gemma3")) as opened:
        norm = opened.read("model.layers.0.input_layernorm.weight")
    np.testing.assert_array_equal(tensors["blk.0.attn_norm.weight"].data, norm + 1)
    assert "output.weight" not in tensors
    expected = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 2,
        "gemma3.embedding_length": 128,
        "gemma3.attention.head_count_kv": 2,
        "gemma3.attention.key_length": 32,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.freq_base_swa": 1e4,
        "gemma3.attention.sliding_window": 4096,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": 2,
    }
    assert {key: fields.get(key) for key in expected} == expected
    types, tokens = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.tokens"]
    assert (types[0], types[3], types[4], types[204], types[270]) == (3, 2, 4, 6, 3)
    assert (tokens[4], tokens[5], tokens[299], types[299]) == (" w0", "\u2581w1", "[PAD299]", 5)


def test_byte_pairs_and_frequencies_of_llama_3(tmp_path, folders):
    convert(folders("llama3"), tmp_path / "m.gguf", format="q8_0")
    fields, tensors = contents(tmp_path / "m.gguf")
    assert fields["tokenizer.ggml.pre"] == "llama-bpe"
    assert fields["tokenizer.ggml.merges"] == ["a b", "ab c"]
    assert fields["tokenizer.ggml.tokens"][256:261] == [
        "ab",
        "abc",
        "<|end|>",
        "<tool>",
        "[PAD260]",
    ]
    assert fields["tokenizer.ggml.token_type"][256:261] == [1, 1, 3, 4, 5]
    # The factors by which transformers divides its frequencies.
    plain = 1 / 500000.0 ** (np.arange(0, 32, 2) / 32)
    rotary = transformers.AutoModelForCausalLM.from_pretrained(folders("llama3")).model.rotary_emb
    expected = plain / rotary.inv_freq.numpy()
    np.testing.assert_allclose(tensors["rope_freqs.weight"].data, expected, 1e-5)


@pytest.mark.parametrize("kind", ["q4_0", "nvfp4", "bfloat16"])
def test_nan_and_inf_are_refused_all_at_once(tmp_path, folders, kind):
    source = shutil.copytree(folders("qwen3"), tmp_path / "m") / "model.safetensors"
    with open_source(source) as opened:
        tensors = {name: tensor.read_all() for name, tensor in opened.tensors.items()}
    for layer, number in enumerate((np.nan, np.inf)):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][3, 5] = number
    save(source, tensors, overwrite=True)
    with pytest.raises(CheckpointError, match=r"layers\.0.* \(1\), .*layers\.1.* \(1\);"):
        convert(tmp_path / "m", tmp_path / "m.gguf", format=kind)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    report = convert(tmp_path / "m", tmp_path / "m.gguf", format=kind, allow_nonfinite=True)
    assert report.nonfinite == 2


def test_a_quantized_source_is_dequantized_first(tmp_path, folders):
    convert(folders("qwen3"), tmp_path / "fp8")
    dequantize_checkpoint(tmp_path / "fp8", tmp_path / "values", dtype="float32")
    for path in ("fp8", "values"):
        convert(tmp_path / path, tmp_path / f"{path}.gguf", format="q4_0")
    (_, found), (_, expected) = (contents(tmp_path / f"{p}.gguf") for p in ("fp8", "values"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].data, tensor.data, err_msg=name)


@pytest.mark.parametrize(("name", "kind"), [("llama", "q4_1"), ("qwen3moe", "nvfp4")])
def test_verify_plans_a_file_again_by_the_arguments_in_its_metadata(tmp_path, folders, name, kind):
    convert(folders(name), tmp_path / "m.gguf", format=kind, skip=["o_proj"])
    fields, tensors = contents(tmp_path / "m.gguf")
    arguments = json.loads(fields["qtoolkit.conversion"])["arguments"]
    assert arguments == {"format": kind, "skip": ["o_proj"]}
    verification = verify(folders(name), tmp_path / "m.gguf")
    assert (verification.problems, verification.codes_only) == ((), False)
    assert verification.tensors == sum(not name.endswith(".scale") for name in tensors)
    place = tensors["blk.1.attn_q.weight"].data_offset + 5
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[place] ^= 1
    (tmp_path / "m.gguf").write_bytes(data)
    (problem,) = verify(folders(name), tmp_path / "m.gguf").problems
    assert problem.startswith("model.layers.1.self_attn.q_proj.weight: blk.1.attn_q.weight: byte 5")


def test_what_becomes_float32_is_cast_and_what_the_folder_lacks_has_no_bytes(tmp_path, folders):
    source = shutil.copytree(folders("llama3"), tmp_path / "m") / "model.safetensors"
    with open_source(source) as opened:
        tensors = {name: tensor.read_all() for name, tensor in opened.tensors.items()}
    norm = "model.norm.weight"
    tensors[norm] = np.float64(1) / np.arange(1, 1 + tensors[norm].size)
    save(source, tensors, overwrite=True)
    report = convert(tmp_path / "m", tmp_path / "m.gguf", format="q8_0")
    by_name = {tensor.name: tensor for tensor in report.tensors}
    assert (by_name[norm].action, by_name[norm].dtype) == ("cast", "F32")
    assert (by_name[norm].bytes_before, by_name[norm].bytes_after) == (128 * 8, 128 * 4)
    assert by_name["model.layers.0.input_layernorm.weight"].action == "keep"  # float32 before
    assert report.bytes_before == sum(array.nbytes for array in tensors.values())
    _, written = contents(tmp_path / "m.gguf")
    np.testing.assert_array_equal(
        written["output_norm.weight"].data, tensors[norm].astype(np.float32)
    )


def test_rows_that_blocks_do_not_fit_are_float16(tmp_path, folders):
    """192 inputs are three blocks of 64, and 128 two; a row of 40 is no multiple of 32."""
    config = transformers.LlamaConfig(**SIZES | {"intermediate_size": 40})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    pieces(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "m.gguf", format="q4_0")
    _, tensors = contents(tmp_path / "m.gguf")
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "F16"
    (one, _) = (t for t in report.tensors if t.name.endswith("down_proj.weight"))
    assert (one.reason, one.dtype) == ("rows are no multiple of 32", "F16")


def changed(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        (
            "llama",
            {"architectures": ["DeepseekV3ForCausalLM"]},
            {},
            "DeepseekV3.* expected one of Llama",
        ),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, {}, "rope_type longrope"),
        ("llama", {"num_hidden_layers": 3}, {}, "layer 2 of 3 has no attn_k.weight"),
        ("llama", {"num_attention_heads": 5}, {}, "128 rows, expected those of the 5 heads"),
        ("llama", {"num_key_value_heads": 4}, {}, "rows, expected those of the 4 heads of"),
        ("llama", {}, {"format": "q4_k"}, "q4_k for GGUF, expected one of q8_0"),
        ("llama", {}, {"format": "q8_0", "layout": "plain"}, "layout= has no effect"),
        (
            "qwen2",
            {"architectures": ["Gemma2ForCausalLM"]},
            {},
            "no such tensor|no tokenizer.model",
        ),
    ],
)
def test_what_is_not_written_is_refused_by_name(tmp_path, folders, name, changes, options, message):
    shutil.copytree(folders(name), tmp_path / "m")
    changed(tmp_path / "m", **changes)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "m", tmp_path / "m.gguf", **({"format": "q8_0"} | options))
    assert {path.name for path in tmp_path.iterdir()} == {"m"}


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused(tmp_path, folders):
    shutil.copytree(folders("qwen2"), tmp_path / "m")
    byte_pairs(tmp_path / "m", r"\w+")
    with pytest.raises(CheckpointError, match=r"expected one of the regular .*llama-bpe, qwen2"):
        convert(tmp_path / "m", tmp_path / "m.gguf", format="q8_0")
    (tmp_path / "m" / "README.md").write_text("---\nlicense: [mit\n---\n")
    with pytest.raises(CheckpointError, match=r"README.md .*ParserError: .*mend the head of"):
        convert(tmp_path / "m", tmp_path / "m.gguf", format="q8_0")
    (tmp_path / "m" / "README.md").unlink()
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="its tokenizer: JSONDecodeError"):
        convert(tmp_path / "m", tmp_path / "m.gguf", format="q8_0")


def test_the_command_writes_and_refuses(tmp_path, folders):
    source, target = str(folders("qwen3")), str(tmp_path / "m.gguf")
    done = run("convert", source, target, "--format", "q8_0")
    assert done.exit_code == 0, done.output
    assert "q8_0, layout GGUF" in done.output
    exact = [source, str(tmp_path / "exact.gguf"), "--format", "bfloat16"]
    assert run("convert", *exact).exit_code == 0
    again = run("convert", source, target, "--format", "q8_0")
    assert again.exit_code == 1
    assert "exists already" in again.output
    for code, arguments, message in (
        (1, [str(tmp_path / "out"), "--format", "q8_0"], "that ends with .gguf"),
        (2, [target, "--format", "q8_0", "--shard", "0/2"], "omit --shard"),
    ):
        refused = run("convert", source, *arguments)
        assert refused.exit_code == code, refused.output
        assert message in refused.output


def test_a_dry_run_says_what_is_written(tmp_path, folders):
    source, target = str(folders("qwen3")), tmp_path / "m.gguf"
    arguments = [*("convert", source, str(target), "--format", "nvfp4", "--skip", "o_proj")]
    dry = run(*arguments, "--dry-run", "--json")
    assert dry.exit_code == 0, dry.output
    assert not target.exists()
    written = run(*arguments, "--json")
    planned, done = json.loads(dry.stdout), json.loads(written.stdout)
    _, there = contents(target)
    sizes = {tensor.name: tensor.n_bytes for tensor in there.values()}
    for tensor, report in zip(planned["tensors"], done["tensors"], strict=True):
        assert tensor["bytes_after"] == sum(sizes.pop(e["name"]) for e in tensor["entries"])
        for key in ("name", "action", "reason", "dtype", "format", "bytes_before", "bytes_after"):
            assert tensor[key] == report[key]
        is_skipped = "o_proj" in tensor["name"]
        assert (tensor["dtype"], tensor["reason"]) == ("F32", "skip=") or not is_skipped
    assert not sizes
