"""`compare` and `verify`. Oracles: NumPy on what `load` and `dequantize` give; damaged bytes."""

import json
import math
import time

import ml_dtypes
import numpy as np
import pytest
from command import run
from refused import refused
from stored import stored

from qtoolkit.checkpoints import CheckpointError, compare, convert, dequantize, load, save, verify
from qtoolkit.checkpoints.internal import open_source

LAYOUTS = [
    ("plain", "e4m3fn", "tensor"),
    ("plain", "int8", "channel"),
    ("plain", "float16", None),
    ("compressed-tensors", "e4m3fn", "channel"),
    ("compressed-tensors", "nvfp4", None),
    ("compressed-tensors", "int4_group128", None),
    ("finegrained-fp8", "e4m3fn", None),
]


def model(folder):
    """A folder as Hugging Face's, with weights that share scales in NVFP4."""
    rng = np.random.default_rng(0)
    shapes = {"q": (128, 128), "k": (128, 128), "v": (128, 128)}
    tensors = {
        f"model.layers.0.self_attn.{name}_proj.weight": rng.normal(size=shape) * (1 + len(name))
        for name, shape in shapes.items()
    }
    tensors["model.norm.weight"] = rng.normal(size=128)
    folder.mkdir()
    arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    save(folder / "model.safetensors", arrays, {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.sample(
    *("plain-e4m3fn-tensor", "plain-float16-None", "compressed-tensors-nvfp4-None"),
    "compressed-tensors-int4_group128-None",
)
@pytest.mark.parametrize(("layout", "fmt", "scaling"), LAYOUTS)
def test_a_changed_byte_does_not_verify(tmp_path, layout, fmt, scaling):
    src, dst = model(tmp_path / "src"), tmp_path / "dst"
    convert(src, dst, layout=layout, format=fmt, scaling=scaling)
    found = verify(src, dst)
    assert found.problems == ()
    assert (found.tensors, found.quantized) == (4, 0 if fmt == "float16" else 3)
    file = dst / "model.safetensors"
    with open_source(file) as opened:
        names = list(opened.tensors)
        sizes = [tensor.nbytes for tensor in opened.tensors.values()]
        ends = file.stat().st_size - sum(sizes) + np.cumsum(sizes)
        places = dict(zip(names, (ends - sizes).tolist(), strict=True))
    whole = file.read_bytes()
    for name in names:
        damaged = bytearray(whole)
        damaged[places[name]] ^= 1
        file.write_bytes(damaged)
        problems = verify(src, dst).problems
        assert len(problems) >= 1
        assert "byte" in problems[0]
    file.write_bytes(whole)


@pytest.mark.quick
def test_verify_names_what_is_missing_reshaped_or_new(tmp_path):
    x = np.ones((2, 3), np.float32)
    save(tmp_path / "a", {"same": x, "gone": x, "turned": x, "typed": x})
    save(tmp_path / "b", {"same": x, "new": x, "turned": x.T, "typed": x.astype(np.int32)})
    assert verify(tmp_path / "a", tmp_path / "b").problems == (
        "gone: is missing, expected shape [2, 3]",
        "turned: shape [3, 2], expected shape [2, 3]",
        "typed: dtype I32, expected F32",
        f"new: is not in {tmp_path / 'a'}",
    )


@pytest.mark.parametrize("layout", ["plain", "compressed-tensors", "finegrained-fp8"])
def test_scales_of_an_attention_cache_that_the_source_has(tmp_path, layout):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(128, 128)).astype(np.float32)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    tensors = {"attn.k_proj.weight": weight, "attn.k_proj.k_scale": np.ones(1, np.float32)}
    save(tmp_path / "a" / "model.safetensors", tensors)
    convert(tmp_path / "a", tmp_path / "b", layout=layout)
    assert verify(tmp_path / "a", tmp_path / "b").problems == ()
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.only_a, found.only_b) == ((), ())
    assert [tensor.equal for tensor in found.tensors] == [True, False]  # the wider one first
    tensors["attn.k_proj.k_scale"] *= 2
    save(tmp_path / "a" / "model.safetensors", tensors, overwrite=True)
    assert len(verify(tmp_path / "a", tmp_path / "b").problems) == 1


def test_compare_sees_input_scales(tmp_path):
    weight = np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32)
    save(tmp_path / "src", {"a.weight": weight})
    for name, scale in (("a", 0.5), ("b", 0.25)):
        dst = tmp_path / name
        convert(tmp_path / "src", dst, layout="modelopt", scaling="tensor", input_scales=scale)
    found = compare(tmp_path / "a", tmp_path / "b")
    equal = {tensor.name: tensor.equal for tensor in found.tensors}
    assert equal == {"a.weight": True, "a.input_scale": False}
    assert not found.equal


def test_numbers_whose_squares_float64_does_not_have(tmp_path):
    save(tmp_path / "a", {"x": np.full(4, 1e200)})
    save(tmp_path / "b", {"x": np.full(4, 2e200)})
    (found,) = compare(tmp_path / "a", tmp_path / "b").tensors
    assert (found.equal, found.sqnr_db, found.max_error) == (False, None, 1e200)


@pytest.mark.parametrize("fmt", ["e4m3fn", "int8"])
def test_compare_equals_numpy_on_what_dequantize_gives(tmp_path, fmt):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 40)).astype(np.float32)
    x[3, 4], x[5, 6] = np.inf, 0
    x[7] *= 1e-6
    save(tmp_path / "a", {"w.weight": x, "ids": np.arange(4), "norm": x[0]})
    convert(tmp_path / "a", tmp_path / "b", format=fmt, allow_nonfinite=True)
    found = compare(tmp_path / "a", tmp_path / "b")
    tensors = {tensor.name: tensor for tensor in found.tensors}
    assert tensors["ids"].equal
    assert tensors["norm"].equal
    assert tensors["norm"].sqnr_db == math.inf
    assert not found.equal
    w = tensors["w.weight"]
    y = np.asarray(dequantize(load(tmp_path / "b"))["w.weight"], np.float64)
    known = np.isfinite(x)
    a, b = x.astype(np.float64)[known], y[known]
    assert w.sqnr_db == pytest.approx(10 * np.log10((a**2).sum() / ((a - b) ** 2).sum()))
    assert w.max_error == np.abs(a - b).max()
    assert w.flushed == np.count_nonzero((a != 0) & (b == 0)) / np.count_nonzero(a)
    assert w.saturated == 1 / x.size  # the infinity
    assert w.nonfinite == 1


def test_clamped_elements_are_counted(tmp_path):
    """Codes by hand: scale 1, so that beyond 448 + 16 an element was clamped."""
    x = np.array([[1, 448, 463, 465, -1000, 0.0001]], np.float32)
    save(tmp_path / "a", {"w": x})
    codes = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    save(tmp_path / "b", {"w": codes, "w_scale": np.ones(1, np.float32)})
    (tensor,) = compare(tmp_path / "a", tmp_path / "b").tensors
    assert tensor.saturated == 2 / 6
    assert tensor.flushed == 1 / 6
    assert tensor.max_error == 552


def test_elements_clamped_at_either_end_of_int8_are_counted(tmp_path):
    """A symmetric scale maps amax to 127, so that -127 is an end of the range as -128 is."""
    x = np.array([[127.4, 127.6, -127.4, -127.6, -128.4, -200, 200, 0]], np.float32)
    for low, clamped in ((-127, 5), (-128, 3)):  # of -128: -127.6 and -128.4 are rounded to it
        save(tmp_path / "a", {"w": x}, overwrite=True)
        codes = np.clip(np.rint(x), low, 127).astype(np.int8)
        save(tmp_path / "b", {"w": codes, "w_scale": np.ones(1, np.float32)}, overwrite=True)
        (tensor,) = compare(tmp_path / "a", tmp_path / "b").tensors
        assert tensor.saturated == clamped / x.size


def test_what_cannot_be_compared(tmp_path):
    save(tmp_path / "a", {"x": np.ones((2, 3), np.float32)})
    save(tmp_path / "b", {"y": np.ones((2, 3), np.float32)})
    save(tmp_path / "c", {"x": np.ones((3, 2), np.float32)})
    with refused(CheckpointError, r"b: no tensor has a name that .*a has"):
        compare(tmp_path / "a", tmp_path / "b")
    with refused(CheckpointError, r"c: tensor x: shape \[3, 2\], and \[2, 3\] in .*a"):
        compare(tmp_path / "a", tmp_path / "c")


def test_the_commands(tmp_path):
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    save(tmp_path / "a", {"w.weight": x})
    convert(tmp_path / "a", tmp_path / "b")
    done = run("compare", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 0
    assert "e4m3fn" in done.stdout
    done = run("compare", tmp_path / "a", tmp_path / "a", "--json")
    data = json.loads(done.stdout)
    assert data["equal"] is True
    assert data["tensors"][0]["sqnr_db"] is None
    done = run("verify", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 0
    assert "1 tensor, 1 of them quantized: as expected" in done.stdout
    save(tmp_path / "b", {"w.weight": x + 1}, overwrite=True)
    done = run("verify", tmp_path / "a", tmp_path / "b", "--json")
    assert done.exit_code == 1
    assert len(json.loads(done.stdout)["problems"]) == 1


@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e-42, 1e37])
@pytest.mark.parametrize("scaling", ["tensor", "channel", "block"])
def test_what_convert_and_compare_say_is_what_float64_says(tmp_path, scaling, scale):
    """Near 1e-38 the values are subnormal: 31.2 dB was printed for 5.3."""
    x = (np.random.default_rng(0).normal(size=(150, 200)) * scale).astype(np.float32)
    save(tmp_path / "a", {"w.weight": x})
    (report,) = convert(tmp_path / "a", tmp_path / "b", scaling=scaling).tensors
    (compared,) = compare(tmp_path / "a", tmp_path / "b").tensors
    found = stored(tmp_path / "b")
    scales = np.asarray(found["w.weight_scale"], np.float64)
    if scaling == "block":
        scales = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:150, :200]
    y = (found["w.weight"].astype(np.float64) * scales).astype(np.float32)
    error = (x.astype(np.float64) - y) ** 2
    expected = 10 * np.log10((x.astype(np.float64) ** 2).sum() / error.sum())
    assert compared.sqnr_db == pytest.approx(expected, abs=1e-3)
    assert report.sqnr_db == pytest.approx(expected, abs=1e-3)


@pytest.mark.sample("options1")
@pytest.mark.parametrize("options", [{}, {"format": "nvfp4"}, {"layout": "finegrained-fp8"}])
def test_many_small_tensors_take_no_longer_than_converting_them(tmp_path, options):
    """The exact values of a format's 256 codes were computed for each tensor: 8 times as long."""
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(ml_dtypes.bfloat16)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    names = (
        f"layers.0.mlp.experts.{e}.{p}_proj.weight" for e in range(200) for p in ("up", "gate")
    )
    save(tmp_path / "a" / "model.safetensors", dict.fromkeys(names, weight))
    acts = {
        "convert": lambda: convert(tmp_path / "a", tmp_path / "b", overwrite=True, **options),
        "verify": lambda: verify(tmp_path / "a", tmp_path / "b"),
        "compare": lambda: compare(tmp_path / "a", tmp_path / "b"),
    }
    seconds = dict.fromkeys(acts, math.inf)
    for _ in range(3):  # the first compiles
        for name, act in acts.items():
            start = time.process_time()
            act()
            seconds[name] = min(seconds[name], time.process_time() - start)
    assert max(seconds.values()) < 3 * seconds["convert"], seconds
