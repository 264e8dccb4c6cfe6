"""convert, dequantize, inspect and layouts as a user meets them."""

import json
import os

import numpy as np
import pytest
from command import fails, run
from flax import nnx
from stored import stored

import qtoolkit
from qtoolkit.checkpoints import save

WEIGHT = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def source(tmp_path):
    """A folder as Hugging Face's."""
    folder = tmp_path / "src"
    folder.mkdir()
    x = np.random.default_rng(0).normal(size=(128, 128)).astype("bfloat16")
    tensors = {WEIGHT: x, "model.norm.weight": np.ones(128, "bfloat16")}
    save(folder / "model.safetensors", tensors, {"format": "pt"})
    config = {"model_type": "llama", "dtype": "bfloat16", "hidden_size": 128}
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CT = ("--layout", "compressed-tensors")


def test_a_folder_and_the_line_that_loads_it(source, tmp_path):
    result = run("convert", source, tmp_path / "dst", *CT)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{tmp_path}/dst: e4m3fn, a scale per channel, layout compressed-tensors"
    assert lines[-1] == (
        f'load it: transformers.AutoModelForCausalLM.from_pretrained("{tmp_path}/dst")'
    )
    assert sorted(os.listdir(tmp_path / "dst")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("model_type", "fmt", "dequantizes"),
    [
        ("t5", "int4_group32", True),
        ("mamba", "mxfp4", True),
        ("t5", "int8", False),
        ("llama", "nvfp4", False),
    ],
)
def test_the_line_that_loads_dequantizes_for_some_models(
    source, tmp_path, model_type, fmt, dequantizes
):
    """Oracle: tests/interop/test_transformers.py, where transformers fails without the option."""
    config = json.loads((source / "config.json").read_text()) | {"model_type": model_type}
    (source / "config.json").write_text(json.dumps(config))
    result = run("convert", source, tmp_path / "dst", "--format", fmt)
    end = ", quantization_config=transformers.CompressedTensorsConfig(dequantize=True))"
    line = result.stdout.splitlines()[-1]
    assert line.startswith("load it: transformers.AutoModelForCausalLM.from_pretrained(")
    assert line.endswith(end) == dequantizes


@pytest.mark.parametrize("size", ["5GB", "1KB"])
def test_weights_of_a_name_that_transformers_does_not_find(source, tmp_path, size):
    """Mistral's: "no file named model.safetensors", says transformers 5.24."""
    (source / "model.safetensors").rename(source / "consolidated.safetensors")
    result = run("convert", source, tmp_path / "dst", "--max-shard-size", size)
    assert result.stdout.splitlines()[-1] == (
        "transformers finds weights by the name model.safetensors; give those of the source that "
        "name, and convert it again"
    )


def test_a_file_and_the_config_that_its_loaders_need(source, tmp_path):
    file = source / "model.safetensors"
    result = run("convert", file, tmp_path / "dst", *CT)
    assert "need this in the config.json next to it" in result.stdout
    config = result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1]
    assert json.loads(config)["quantization_config"]["format"] == "float-quantized"
    plain = run("convert", file, tmp_path / "plain")
    assert plain.stdout.splitlines()[-1] == (
        f'load it: qtoolkit.checkpoints.load("{tmp_path}/plain", like=params, dtype="float32")'
    )


def test_reports(source, tmp_path):
    arguments = ["convert", source, tmp_path / "dst", *CT, "--overwrite"]
    report = json.loads(run(*arguments, "--json").stdout)
    (weight,) = (tensor for tensor in report["tensors"] if tensor["name"] == WEIGHT)
    assert (weight["action"], weight["dtype"], weight["nonfinite"]) == ("quantize", "F8_E4M3", 0)
    assert report["bytes_after"] == 128 * 128 + 4 * 128 + 256
    assert report["quantization_config"]["quant_method"] == "compressed-tensors"
    quiet = run(*arguments, "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert json.loads(run(*arguments, "-q", "--json").output) == report  # what was asked for


def test_nan_in_what_is_copied_is_named(source, tmp_path):
    tensors = stored(source / "model.safetensors")
    tensors["model.norm.weight"][3:5] = np.nan, -np.inf
    save(source / "model.safetensors", tensors, overwrite=True)
    lines = run("convert", source, tmp_path / "dst", *CT).stdout.splitlines()
    assert "  note       NaN or infinite, copied as they are: model.norm.weight (2)" in lines
    assert not any("elements were NaN" in line for line in lines)


def test_a_dry_run_of_a_folder(source, tmp_path):
    result = run("convert", source, tmp_path / "dst", *CT, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].split() == [
        *(WEIGHT, "BF16", "F8_E4M3", "[128,", "1]", "16,896")
    ]
    assert os.listdir(tmp_path) == ["src"]
    plan = json.loads(run("convert", source, tmp_path / "dst", *CT, "--dry-run", "--json").stdout)
    assert [entry["name"] for entry in plan["tensors"][0]["entries"]] == [WEIGHT, f"{WEIGHT}_scale"]
    assert fails("convert", source, source, "--overwrite", "--dry-run").startswith(
        f"{source}: is the source itself"
    )


def test_dequantize_and_quantize_anew(source, tmp_path):
    run("convert", source, tmp_path / "dst", *CT, "--format", "nvfp4")
    result = run("dequantize", tmp_path / "dst", tmp_path / "back")
    assert result.exit_code == 0, result.output
    assert ": 2 tensors, dequantized from layout compressed-tensors" in result.stdout
    assert stored(tmp_path / "back" / "model.safetensors")[WEIGHT].dtype.name == "bfloat16"
    wide = run("dequantize", tmp_path / "dst", tmp_path / "wide", "--dtype", "float32")
    assert wide.exit_code == 0
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    wanted = {"model_type": "llama", "dtype": "float32", "hidden_size": 128}
    assert config == wanted | {"architectures": ["LlamaForCausalLM"]}
    again = run("convert", tmp_path / "dst", tmp_path / "again", *CT)
    assert "dequantized first" in again.stdout
    assert fails("dequantize", source, tmp_path / "no").startswith(
        f"{source}: nothing in it is quantized in a known layout"
    )


def test_a_dry_run_of_a_dequantization(source, tmp_path):
    run("convert", source, tmp_path / "dst", *CT)
    line = ["dequantize", tmp_path / "dst", tmp_path / "back", "--max-memory", "360MiB"]
    assert fails("dequantize", source, tmp_path / "no", "--dry-run").startswith(
        f"{source}: nothing in it is quantized in a known layout"
    )
    planned = run(*line, "--dry-run")
    assert planned.exit_code == 0, planned.output
    rows = [line.split()[:3] for line in planned.stdout.splitlines()[1:3]]
    assert rows == [["model.norm.weight", "BF16", "BF16"], [WEIGHT, "F8_E4M3", "BF16"]]
    title, size = planned.stdout.splitlines()[3:]
    assert title.endswith(
        "dequantized from layout compressed-tensors; a dry run, nothing was written"
    )
    plan = json.loads(run(*line, "--dry-run", "--json").stdout)
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]
    done = json.loads(run(*line, "--workers", "1", "--json").stdout)
    assert size in run(*line, "--overwrite").stdout.splitlines()
    codes_and_scales = 128 * 128 + 128 * 4
    for data in (plan, done):
        assert (data["bytes_before"], data["bytes_after"]) == (
            256 + codes_and_scales,
            256 + 128 * 128 * 2,
        )


def test_a_dry_run_of_a_quantized_source_counts_what_is_stored(source, tmp_path):
    """Not the float32 that its weights are read as, four times as many bytes."""
    run("convert", source, tmp_path / "dst", *CT, "--format", "nvfp4")
    options = ("--format", "e5m2", "--layout", "plain")
    line = ["convert", tmp_path / "dst", tmp_path / "again", *options]
    planned = run(*line, "--dry-run").stdout.splitlines()
    assert planned[2].split()[:3] == [WEIGHT, "U8", "F8_E5M2"]
    done = run(*line).stdout.splitlines()
    assert planned[-4:] == done[1:5]
    stored = 128 * 64 + 128 * 8 + 4 + 256  # codes, scales of 16, their scale, the norm
    assert planned[-1].startswith(f"  bytes      {stored:,} -> ")


def test_inspect_pairs_weights_with_their_scales(source, tmp_path):
    run("convert", source, tmp_path / "dst", *CT, "--format", "nvfp4")
    lines = run("inspect", tmp_path / "dst").stdout.splitlines()
    assert lines[0].split() == ["tensor", "dtype", "shape", "bytes", "scales"]
    assert any(
        "weight_packed" in line
        and "nvfp4 [128, 128]: weight_scale F8_E4M3 [128, 8], weight_global_scale" in line
        for line in lines
    )
    assert not any(line.startswith(f"{WEIGHT}_scale ") for line in lines)
    (found,) = (line for line in lines if line.startswith("layout "))
    assert found.startswith("layout compressed-tensors: 1 tensor quantized; `qtoolkit dequantize`")
    data = json.loads(run("inspect", tmp_path / "dst", "--json").stdout)
    assert data["quantized"][WEIGHT]["shape"] == [128, 128]


def test_packed_kernels_of_a_served_model(tmp_path):
    """What `inspect`, `verify` and `compare` say of a model of `nnx.quantize`."""
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    for name, one in (("wide", model), ("served", qtoolkit.nnx.quantize(model, "int4_group32"))):
        save(tmp_path / name, nnx.state(one))
    lines = run("inspect", tmp_path / "served").stdout.splitlines()
    kernel = "U8     [64, 16]  1,024  int4_group32@0 [64, 32]: kernel_scale F32 [2, 32]"
    assert kernel in lines[2]
    data = json.loads(run("inspect", tmp_path / "served", "--json").stdout)
    assert data["quantized"]["kernel"]["format"] == "int4_group32@0"
    assert data["quantized"]["kernel"]["shape"] == [64, 32]
    verified = run("verify", tmp_path / "wide", tmp_path / "served")
    assert "2 tensors, 1 of them quantized: as expected" in verified.stdout
    compared = run("compare", tmp_path / "wide", tmp_path / "served").stdout.splitlines()
    assert compared[2].startswith("kernel  int4_group32@0  ")


def test_compare_takes_tables(tmp_path):
    """nf4 is neither a float nor an integer format, whose last step counts as clamped."""
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    save(tmp_path / "wide", {"w": x})
    save(tmp_path / "nf4", {"w": qtoolkit.quantize(x, "nf4")})
    assert "nf4" in run("compare", tmp_path / "wide", tmp_path / "nf4").stdout


def test_layouts():
    listed = run("layouts").stdout
    for name in ("plain", "compressed-tensors", "finegrained-fp8", "modelopt"):
        assert name in listed
        page = run("layouts", name).stdout
        assert page.startswith(f"{name}: ")
        assert "by by" not in page
        assert f"qtoolkit convert SRC DST --layout {name}" in page
    assert "--format nvfp4" in run("layouts", "modelopt").stdout
    assert "needs --input-scales" in run("layouts", "modelopt").stdout
    assert fails("layouts", "vllm", code=2).startswith("NAME: 'vllm', expected one of plain")


def test_input_scales_from_a_file(source, tmp_path):
    nvfp4 = ("convert", source, tmp_path / "dst", "--layout", "modelopt", "--format", "nvfp4")
    assert "give --input-scales of a calibration" in fails(*nvfp4)
    (tmp_path / "scales.json").write_text(json.dumps({WEIGHT.removesuffix(".weight"): 0.5}))
    result = run(*nvfp4, "--input-scales", tmp_path / "scales.json")
    assert result.exit_code == 0, result.output
    found = stored(tmp_path / "dst" / "model.safetensors")
    assert found[WEIGHT.replace("weight", "input_scale")] == 0.5
    (tmp_path / "scales.json").write_text("[]")
    message = fails(*nvfp4, "--input-scales", tmp_path / "scales.json")
    assert "a JSON list, expected an object" in message


def test_rules_may_name_block_formats(source, tmp_path):
    rules = tmp_path / "rules.json"
    rules.write_text('{"rules": [["down_proj", "mxfp4"], ["norm", null]]}')
    result = run("convert", source, tmp_path / "dst", *CT, "--rules", rules)
    assert result.exit_code == 0, result.output
    assert "dst: mxfp4, layout compressed-tensors" in result.stdout


def test_names_from_files_never_reach_the_terminal_raw(tmp_path):
    odd = "a\x1b[2J.weight"
    save(tmp_path / "src", {odd: np.ones((2, 2), np.float32)}, {"k\x1b": "v\x1b[31m"})
    outputs = [
        run(*arguments)
        for arguments in (
            ("inspect", tmp_path / "src"),
            ("convert", tmp_path / "src", tmp_path / "dst", "--dry-run"),
            ("convert", tmp_path / "src", tmp_path / "x", *CT, "--scaling", "block"),
            ("convert", tmp_path / "src", tmp_path / "x", "--skip", "none"),
        )
    ]
    for result in outputs:
        assert "\x1b" not in result.output
        assert "a\\x1b[2J.weight" in result.output


def test_paths_never_reach_the_terminal_raw(source, tmp_path, monkeypatch):
    """A bell beside the escape: `typer.echo` removes escape sequences where it prints to a pipe."""
    monkeypatch.chdir(tmp_path)
    odd, other = "o\x07\x1b[2J", "p\x07\x1b[2J"
    save(odd, {"w": np.ones((2, 2), np.float32), "more": np.ones((2, 2), np.float32)})
    save(
        "q" + odd, {"a.weight_scales": np.ones(2, np.float32), "a.weight": np.ones((2, 2), np.int8)}
    )
    save("wide", {"w": np.full((2, 2), 3, np.float32)})
    for code, *arguments in (
        (0, "convert", odd, other, "--dry-run"),
        (0, "convert", odd, other),
        (1, "convert", odd, other),
        (0, "convert", source, "f" + odd, "--shard", "0/1"),
        (0, "finalize", "f" + odd),
        (0, "dequantize", other, "d" + odd),
        (0, "compare", odd, "wide"),
        (1, "verify", "wide", odd),
        (1, "verify", "wide", other),
        (0, "inspect", "q" + odd),
        (1, "inspect", "none" + odd),
        (2, "layouts", odd),
    ):
        result = run(*arguments)
        assert result.exit_code == code, result.output
        assert all(map(str.isprintable, result.output.splitlines())), result.output
        assert "\\x07\\x1b[2J" in result.output, arguments
        assert "\\\\x07" not in result.output, arguments  # escaped once
    line = run("convert", source, "g" + odd, "--shard", "0/1").stdout.splitlines()[-1]
    assert line == r"when all shards are done: qtoolkit finalize $'go\x07\x1b[2J'"


def test_block_formats_take_no_scaling_and_remedies_work(source, tmp_path):
    target = tmp_path / "dst"
    options = ("convert", source, target, "--format", "nvfp4")
    assert "nvfp4 is a block format" in fails(*options, "--scaling", "channel", code=2)
    message = fails(*options, "--layout", "modelopt")
    assert "or use --layout compressed-tensors, which needs none" in message


RULES = {"wide": '{"rules": [], "default": "bfloat16"}', "none": '{"rules": [["norm", null]]}'}


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--format", "float16", "--scaling", "channel"),
            "--scaling channel: float16 has no scales, expected no --scaling; omit it",
        ),
        (("--rules", "wide", "--scaling", "tensor"), "--scaling tensor: bfloat16 has no scales"),
        (("--rules", "none", "--scaling", "tensor"), "what no rule quantizes has no scales"),
        (("--max-shard-size", "1KB"), "which becomes one file, and --max-shard-size is"),
        (("--shard", "0/2"), "src/model.safetensors: is a file, which becomes one file"),
        (("--input-scales", "scales"), "--input-scales: nothing in layout plain"),
    ],
)
def test_options_without_effect_are_misuse(source, tmp_path, monkeypatch, arguments, message, dry):
    monkeypatch.chdir(tmp_path)
    for name, text in {**RULES, "scales": "{}"}.items():
        (tmp_path / name).write_text(text)
    file = source / "model.safetensors"
    assert message in fails("convert", file, "dst", *arguments, *dry, code=2)
    assert not (tmp_path / "dst").exists()


def test_a_dry_run_heeds_quiet(source, tmp_path):
    assert run("convert", source, tmp_path / "dst", "--dry-run", "-q").stdout == ""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["BertForSequenceClassification"], "BertForSequenceClassification"),
        (["LlamaForCausalLM"], "AutoModelForCausalLM"),
        (None, "AutoModel"),
    ],
)
def test_the_line_that_loads_a_folder_names_its_class(tmp_path, names, expected):
    folder = tmp_path / "src"
    folder.mkdir()
    save(folder / "model.safetensors", {"a.weight": np.ones((128, 128), np.float32)})
    (folder / "config.json").write_text(json.dumps({"architectures": names, "x": 1}))
    out = run("convert", folder, tmp_path / "dst").stdout
    assert f"load it: transformers.{expected}.from_pretrained" in out
    out = run("dequantize", tmp_path / "dst", tmp_path / "wide").stdout
    assert "1 tensor, dequantized from layout compressed-tensors" in out


@pytest.mark.parametrize("name", ['a "quoted" \\ name', os.fsdecode(b"no utf-8 \xff")])
def test_the_line_that_loads_is_python(tmp_path, name):
    """Not such as stored("'no utf-8 \\udcff'"), a name in two pairs of quotes."""
    save(tmp_path / "src", {"w": np.ones((2, 2), np.float32)})
    out = run("convert", tmp_path / "src", tmp_path / name).stdout
    (line,) = [line for line in out.splitlines() if line.startswith("load it: ")]
    names = {"qtoolkit": qtoolkit, "params": {"w": np.zeros((2, 2))}}
    loaded = eval(line.removeprefix("load it: "), names)
    np.testing.assert_array_equal(loaded["w"], np.ones((2, 2)))


def test_the_line_that_loads_avoids_what_misreads_experts(source, tmp_path):
    """NVFP4 experts: it computes with wrong weights, without an error."""
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    (source / "config.json").write_text('{"model_type": "qwen3_moe"}')
    save(source / "model.safetensors", {name: stored(source / "model.safetensors")[WEIGHT]},
         {"format": "pt"}, overwrite=True)  # fmt: skip
    options = ("--format", "nvfp4")
    dry = run("convert", source, tmp_path / "out", *options, "--dry-run")
    done = run("convert", source, tmp_path / "out", *options)
    for result in (dry, done):
        assert "note       transformers (5.24) loads experts in nvfp4 with wrong" in result.stdout
    assert "transformers.Auto" not in done.stdout
    assert f'vllm.LLM("{tmp_path / "out"}")' in done.stdout


@pytest.mark.parametrize("layout", ["compressed-tensors", "plain"])
def test_verify_finds_a_config_without_its_quantization(source, tmp_path, layout):
    """As transformers does with SmolLM2-135M: a perplexity of 17 million, without an error."""
    run("convert", source, tmp_path / "dst", "--layout", layout)
    assert run("verify", source, tmp_path / "dst").exit_code == 0
    (tmp_path / "dst" / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "dst" / "qtoolkit_config.json").unlink(missing_ok=True)
    found = run("verify", source, tmp_path / "dst")
    assert found.exit_code == 1
    assert found.stdout.startswith(
        "config.json: quantization_config is missing"
        if layout == "compressed-tensors"
        else "config.json: is there, expected none: loaders take codes for weights"
    )


def test_layouts_in_json_say_what_convert_takes(source, tmp_path):
    """Oracle: `convert`, which takes format and scaling as they stand there."""
    data = json.loads(run("layouts", "--json").stdout)
    written = ["plain", "compressed-tensors", "finegrained-fp8", "modelopt", "gpt-oss"]
    read = ["gptq", "awq", "auto-round", "mlx", "bitsandbytes", "hqq", "torchao", "comfyui"]
    assert list(data) == [*written, *read]
    assert [name for name, about in data.items() if about["schemes"]] == written
    assert "is only read" in run("layouts", "gptq").stdout
    assert json.loads(run("layouts", "modelopt", "--json").stdout) == {"modelopt": data["modelopt"]}
    (tmp_path / "scales.json").write_text('{"model.layers.0.mlp.down_proj": 0.5}')
    for layout, about in data.items():
        if layout == "gpt-oss":
            continue  # takes models of its own: test_experts.py
        for scheme in about["schemes"]:
            options = ["--layout", layout, "--format", scheme["format"]]
            options += ["--scaling", scheme["scaling"]] if scheme["scaling"] else []
            if scheme["needs_input_scale"]:
                options += ["--input-scales", tmp_path / "scales.json"]
            planned = run("convert", source, tmp_path / "dst", *options, "--dry-run", "--json")
            assert planned.exit_code == 0, planned.output


def test_inspect_names_the_axes_of_the_tensor(tmp_path):
    """Not those of the matrix as which a kernel of a convolution is cut."""
    save(tmp_path / "src.safetensors", {"conv.kernel": np.ones((3, 3, 8, 16), np.float32)})
    run(
        "convert",
        tmp_path / "src.safetensors",
        tmp_path / "dst.safetensors",
        "--scaling",
        "channel",
    )
    assert "e4m3fn by channel@3" in run("inspect", tmp_path / "dst.safetensors").stdout
