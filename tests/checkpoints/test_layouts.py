"""What each layout writes, byte for byte, against NumPy with ml_dtypes; and reading it back.

`tests/interop` compares the same bytes with the package compressed-tensors.
"""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from refused import refused
from stored import stored

from qtoolkit.checkpoints import CheckpointError, convert, dequantize_checkpoint, load, save, verify
from qtoolkit.checkpoints.internal import LAYOUTS, Headers, open_source
from qtoolkit.checkpoints.internal import in_data_order as place
from qtoolkit.scaling import QArray

Q, K, V = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
# Every case has three weights of one shape, so that few programs compile.
SHAPE = (128, 256)


def weights(dtype=np.float32):
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=SHAPE).astype(np.float32) for name in (Q, K, V)}
    made[K] *= 8  # its amax is that of q, k and v together
    made[Q][5] = 0
    made[V][:4, 3] = 448, -3.5, 1.75, 127  # where the powers of two of MX change
    return {name: x.astype(dtype) for name, x in made.items()}


def f32(x):
    return np.asarray(x, np.float32)


def fp8(x, scale):
    return np.clip(x / scale, -448, 448).astype(E4M3)


def by_blocks(x, rows, columns):
    """[blocks along rows, along columns, elements of a block]"""
    view = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return view.transpose(0, 2, 1, 3).reshape(*view.shape[::2], -1)


def spread(scale, x):
    return np.kron(scale, np.ones([n // m for n, m in zip(x.shape, scale.shape, strict=True)]))


def amax_scale(amax, largest):
    """Zeros have the scale 1, as good as any other."""
    return np.where(amax == 0, f32(1), f32(amax) / f32(largest))


def nibbles(values):
    codes = values.astype(E2M1).view(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def e8m0(exponents):
    return (exponents + 127).astype(np.uint8)


def fp8_oracle(x, rows, columns):
    scale = amax_scale(np.abs(by_blocks(x, rows, columns)).max(-1), 448)
    return fp8(x, f32(spread(scale, x))), scale


def compressed_fp8(x, rows, columns):
    codes, scale = fp8_oracle(f32(x), rows, columns)
    return {"weight": codes, "weight_scale": scale.reshape(-1) if scale.size == 1 else scale}


def integers(x, columns, bits):
    """amax becomes half of the range, 127.5 or 7.5; -128 and -8 are used."""
    half, x = 2 ** (bits - 1), f32(x)
    scale = amax_scale(np.abs(by_blocks(x, 1, columns)).max(-1), half - 0.5)
    codes = np.clip(np.rint(x / f32(spread(scale, x))), -half, half - 1)
    return codes.astype(np.int8), scale


def compressed_int8(x):
    return dict(zip(("weight", "weight_scale"), integers(x, x.shape[1], 8), strict=True))


def compressed_mxfp8(x):
    """2**-8 times the least power of two above amax / 1.75."""
    amax = np.abs(by_blocks(f32(x), 1, 32)).max(-1)
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(np.float64(amax) / 448)) + 1
    exponents = np.where(amax == 0, -127, exponents).astype(int)
    codes = fp8(f32(x), f32(spread(f32(2.0) ** exponents, x)))
    return {"weight": codes, "weight_scale": e8m0(exponents)}


def compressed_mxfp4(x):
    """Amax rounded to the two significant bits of E2M1, then floor(log2) - 2."""
    amax = np.abs(by_blocks(f32(x), 1, 32)).max(-1)
    rounded = (amax.view(np.uint32) + np.uint32(1 << 21)) & np.uint32(0x7F800000)
    exponents = np.where(amax == 0, -127, (rounded >> 23).astype(int) - 127 - 2)
    q = np.clip(f32(x) / f32(spread(f32(2.0) ** exponents, x)), -6, 6)
    return {"weight_packed": nibbles(q), "weight_scale": e8m0(exponents)}


def nvfp4(x):
    """Codes and both scales, the second one that of q, k and v together."""
    amax = max(np.abs(w).max() for w in weights().values())
    second = f32(amax) / f32(6 * 448)
    block = np.abs(by_blocks(x, 1, 16)).max(-1)
    # Never 0, which loaders would divide by: the scale of zeros is the least that E4M3 has.
    scale = np.maximum(f32(f32(block / f32(6)) / second), f32(2.0**-9)).astype(E4M3)
    q = x / f32(spread(f32(scale) * second, x))
    return nibbles(np.clip(q, -6, 6)), scale, second


def compressed_nvfp4(x):
    """The second scale divides: 6 * 448 times the reciprocal of the amax of q, k and v."""
    amax = max(np.abs(f32(w)).max() for w in weights(x.dtype).values())
    second = f32(1) / amax * f32(6 * 448)
    block = np.abs(by_blocks(f32(x), 1, 16)).max(-1) / f32(6)
    scale = np.maximum(block * second, f32(2.0**-9)).astype(E4M3)
    q = f32(x) / f32(spread(f32(scale) / second, x))
    return {
        "weight_packed": nibbles(np.clip(q, -6, 6)),
        "weight_scale": scale,
        "weight_global_scale": second.reshape(1),
    }


def pack_rows(x, columns, bits):
    codes, scale = integers(x, columns, bits)
    codes = (codes.astype(int) + 2 ** (bits - 1)).astype(np.uint32)
    count = 32 // bits
    words = sum(codes[:, i::count] << np.uint32(bits * i) for i in range(count))
    return {
        "weight_packed": words.view(np.int32),
        "weight_scale": scale,
        "weight_shape": np.array(x.shape, np.int64),
    }


def packed_asymmetric(x):
    """int4 in groups of 128 with zero points; a group of zeros has the scale 1, and codes of -8."""
    groups = f32(x).reshape(len(x), -1, 128)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scale = (high - low) / np.float32(15)
    scale = np.where(scale > 0, scale, np.float32(1))
    zero = np.clip(-8 - np.rint(low / scale), -8, 7)
    q = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], -8, 7)

    def words(codes):
        codes = (codes + 8).astype(np.uint32)
        return sum(codes[:, i::8] << np.uint32(4 * i) for i in range(8)).view(np.int32)

    return {
        "weight_packed": words(q.reshape(x.shape)),
        "weight_scale": scale,
        "weight_shape": np.array(x.shape, np.int64),
        "weight_zero_point": np.ascontiguousarray(words(zero.T).T),
    }


def finegrained(x):
    codes, scale = fp8_oracle(x, 128, 128)
    return {"weight": codes, "weight_scale_inv": scale}


def modelopt_fp8(x, rows, shape):
    codes, scale = fp8_oracle(x, rows, x.shape[1])
    entries = {"weight": codes, "weight_scale": scale.reshape(shape)}
    return entries | ({"input_scale": f32(0.25)} if shape == () else {})


def modelopt_nvfp4(x):
    codes, scale, second = nvfp4(x)
    return {
        "weight": codes,
        "weight_scale": scale,
        "weight_scale_2": second.reshape(()),
        "input_scale": f32(0.25),
    }


COMPRESSED = "compressed-tensors"
CASES = {
    (COMPRESSED, "e4m3fn", "tensor"): lambda x: compressed_fp8(x, *SHAPE),
    (COMPRESSED, "e4m3fn", "channel"): lambda x: compressed_fp8(x, 1, SHAPE[1]),
    (COMPRESSED, "e4m3fn", "block"): lambda x: compressed_fp8(x, 128, 128),
    (COMPRESSED, "int8", None): compressed_int8,
    (COMPRESSED, "mxfp8_e4m3", None): compressed_mxfp8,
    (COMPRESSED, "mxfp4", None): compressed_mxfp4,
    (COMPRESSED, "nvfp4", None): compressed_nvfp4,
    (COMPRESSED, "W8A8_ASYM", None): compressed_int8,
    (COMPRESSED, "W4A16_ASYM", None): packed_asymmetric,
    (COMPRESSED, "int4_group128", None): lambda x: pack_rows(x, 128, 4),
    (COMPRESSED, "int4_group32", None): lambda x: pack_rows(x, 32, 4),
    (COMPRESSED, "int8_group128", None): lambda x: pack_rows(x, 128, 8),
    ("finegrained-fp8", "e4m3fn", None): finegrained,
    ("modelopt", "e4m3fn", "channel"): lambda x: modelopt_fp8(x, 1, (SHAPE[0],)),
    ("modelopt", "e4m3fn", "tensor"): lambda x: modelopt_fp8(x, SHAPE[0], ()),
    ("modelopt", "nvfp4", None): modelopt_nvfp4,
    ("plain", "e4m3fn", "block"): lambda x: dict(
        zip(("weight", "weight_scale"), fp8_oracle(x, 128, 128), strict=True)
    ),
}


OF_16_BITS = [
    (*case, dtype)
    for case in CASES
    for dtype in (ml_dtypes.bfloat16, np.float16)
    if case[0] == COMPRESSED and case[1] in ("e4m3fn", "int8", "nvfp4")
]


@pytest.mark.parametrize(
    ("layout", "fmt", "scaling", "dtype"), [*((*case, np.float32) for case in CASES), *OF_16_BITS]
)
def test_bytes_equal_numpy_and_values_come_back(tmp_path, layout, fmt, scaling, dtype):
    source = weights(dtype)
    save(tmp_path / "src", source, {"format": "pt"})
    scales = 0.25 if layout == "modelopt" and (fmt, scaling) != ("e4m3fn", "channel") else None
    report = convert(
        tmp_path / "src",
        tmp_path / "dst",
        layout=layout,
        format=fmt,
        scaling=scaling,
        input_scales=scales,
    )
    with open_source(tmp_path / "dst") as file:
        found = {name: file.read(name) for name in file.tensors}
        assert file.metadata["format"] == "pt"
    expected = {
        f"{name.removesuffix('weight')}{entry}": array
        for name, x in source.items()
        for entry, array in CASES[layout, fmt, scaling](x).items()
    }
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        array = np.asarray(array)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        got, wanted = (a.reshape(-1).view(np.uint8) for a in (found[name], array))
        np.testing.assert_array_equal(got, wanted, name)
    # What `dequantize` reads has the error that the report says.
    back = dequantize_checkpoint(tmp_path / "dst", tmp_path / "back")
    values = stored(tmp_path / "back")
    assert {name: v.shape for name, v in values.items()} == dict.fromkeys(source, SHAPE)
    for tensor in report.tensors:
        x, y = (np.float64(arrays[tensor.name]) for arrays in (source, values))
        sqnr = 10 * np.log10(np.sum(x**2) / np.sum((x - y) ** 2))
        assert sqnr == pytest.approx(tensor.sqnr_db, abs=1e-3)
    assert back.dequantized
    assert not back.quantized


@pytest.mark.parametrize(
    ("layout", "fmt", "scaling"),
    [
        (COMPRESSED, "e4m3fn", "block"),
        (COMPRESSED, "int8", None),
        (COMPRESSED, "mxfp8_e4m3", None),
        (COMPRESSED, "mxfp4", None),
        (COMPRESSED, "nvfp4", None),
        (COMPRESSED, "int4_group32", None),
        (COMPRESSED, "W4A16_ASYM", None),
        ("modelopt", "nvfp4", None),
        ("finegrained-fp8", "e4m3fn", None),
        ("plain", "e4m3fn", "channel"),
    ],
)
def test_a_folder_is_loaded_as_quantized_arrays(tmp_path, layout, fmt, scaling):
    """Oracle: `dequantize_checkpoint`, whose values are NumPy's."""
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    src.mkdir()
    source = weights() | {"model.conv.weight": np.ones((8, 4, 3, 3), np.float32)}
    save(src / "model.safetensors", source | {"model.norm.weight": f32(range(8))})
    (src / "config.json").write_text("{}")
    scales = 0.5 if layout == "modelopt" else None
    convert(src, dst, layout=layout, format=fmt, scaling=scaling, input_scales=scales)
    dequantize_checkpoint(dst, back)
    found, wide = load(dst), load(back)
    further = (
        {f"{name.removesuffix('weight')}input_scale" for name in weights()} if scales else set()
    )
    assert found.keys() == wide.keys() | further == load(src).keys() | further
    quantized = {name for name, array in found.items() if isinstance(array, QArray)}
    assert quantized == {*weights(), *({"model.conv.weight"} if layout == "plain" else ())}
    for name, expected in wide.items():
        got = found[name].dequantize() if name in quantized else found[name]
        np.testing.assert_array_equal(got, expected)
    state = load(dst, like=wide)
    assert state.keys() == wide.keys()
    assert isinstance(state[Q], QArray)


@pytest.mark.quick
def test_every_scheme_has_a_case():
    cases = {(layout, fmt, scaling) for layout, fmt, scaling in CASES}
    for layout in LAYOUTS.values():
        if layout.name in ("plain", "gpt-oss"):
            continue  # `test_checkpoint_convert`, `test_experts`
        for text in [scheme.spelling for scheme in layout.schemes]:
            fmt, _, word = text.partition(" (scaling='")
            wanted = {(layout.name, fmt, word.removesuffix("')") or None), (layout.name, fmt, None)}
            # `test_zero_points_written` has the other one.
            elsewhere = ("deepseek_128x128", "W8A8_ASYM", "W4A16_ASYM")
            assert wanted & cases or fmt in elsewhere, (layout.name, text)


def config_of(tmp_path, layout, fmt, scaling=None, **options):
    save(tmp_path / "src", weights(), overwrite=True)
    report = convert(
        tmp_path / "src",
        tmp_path / "dst",
        layout=layout,
        format=fmt,
        scaling=scaling,
        skip=["v_proj"],
        allow_split=True,
        overwrite=True,
        **options,
    )
    return json.loads(json.dumps(report.quantization_config))


KEPT = ["model.layers.0.self_attn.v_proj", "lm_head"]


def test_the_config_of_compressed_tensors(tmp_path):
    config = config_of(tmp_path, COMPRESSED, "e4m3fn")
    group = config["config_groups"]["group_0"]
    assert (config["quant_method"], config["format"]) == (COMPRESSED, "float-quantized")
    assert config["quantization_status"] == "compressed"
    *kept, heads = config["ignore"]
    assert kept == [*KEPT, r"re:(.*\.)?layers\.\d+\.self_attn\.v_proj$"]
    assert heads.startswith(r"re:(.*\.)?(lm_head|decoder|")
    assert group["targets"] == ["Linear"]
    assert group["weights"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel",
    }
    assert group["input_activations"]["strategy"] == "token"
    assert group["input_activations"]["dynamic"] is True
    nv = config_of(tmp_path, COMPRESSED, "nvfp4")
    weights = nv["config_groups"]["group_0"]["weights"]
    assert (nv["format"], weights["strategy"]) == ("nvfp4-pack-quantized", "tensor_group")
    assert (weights["group_size"], weights["num_bits"]) == (16, 4)
    assert nv["config_groups"]["group_0"]["input_activations"] is None


def test_the_other_configs(tmp_path):
    assert config_of(tmp_path, "finegrained-fp8", "e4m3fn") == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": KEPT,
    }
    config = config_of(tmp_path, "modelopt", "nvfp4", input_scales=1.0)
    assert (config["quant_method"], config["quant_algo"], config["ignore"]) == (
        "modelopt",
        "NVFP4",
        KEPT,
    )
    assert config["group_size"] == 16


def test_rules_make_groups_of_compressed_tensors(tmp_path):
    from qtoolkit.formats import Rules

    save(tmp_path / "src", weights())
    rules = Rules({"q_proj": "e4m3fn", "k_proj": "int8"})
    options = {"scaling": "channel", "allow_split": True}
    report = convert(tmp_path / "src", tmp_path / "dst", layout=COMPRESSED, format=rules, **options)
    groups = report.quantization_config["config_groups"].values()
    assert sorted((g["targets"], g["format"]) for g in groups) == [
        ([r"re:(.*\.)?layers\.\d+\.self_attn\.k_proj$"], "int-quantized"),
        ([r"re:(.*\.)?layers\.\d+\.self_attn\.q_proj$"], "float-quantized"),
    ]


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("plain", {"format": "mxfp4"}, "plain: cannot hold mxfp4; use layout='compressed-tensors'"),
        (COMPRESSED, {"format": "e5m2"}, "cannot hold e5m2; use layout='plain', or one of e4m3fn"),
        (COMPRESSED, {"format": "mxfp4", "scaling": "channel"}, "mxfp4 is a block format, whose"),
        ("finegrained-fp8", {"scaling": "tensor"}, "cannot hold e4m3fn with scaling='tensor'"),
        ("modelopt", {"format": "nvfp4"}, r"NVFP4 .* static activation scales.*input_scales="),
        ("modelopt", {"format": "nvfp4", "input_scales": -1.0}, "input scale -1.0, expected"),
        ("modelopt", {"format": "nf4"}, "cannot hold nf4"),
    ],
)
def test_what_a_layout_cannot_hold(tmp_path, layout, options, message):
    save(tmp_path / "src", weights())
    with refused(CheckpointError, message):
        convert(tmp_path / "src", tmp_path / "dst", layout=layout, **options)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("name", "shape", "layout", "fmt", "message"),
    [
        ("a.weight", (4, 100), COMPRESSED, "mxfp4", "axis -1 has 100 elements, expected a multi"),
        ("a/kernel", (128, 128), COMPRESSED, "e4m3fn", "expected a matrix named NAME.weight"),
        # "b.weight_packed" was written, from which "b.weight" came back.
        ("b.c/d/weight", (128, 128), COMPRESSED, "mxfp4", "NAME.weight, .* use layout=.plain"),
        ("blk.0.attn_q.weight", (128, 128), COMPRESSED, "e4m3fn", "named as in GGUF, .* no loader"),
        ("a/weight", (128, 128), COMPRESSED, "e4m3fn", "NAME.weight, .* exclude it with skip="),
        (
            "a.weight",
            (8, 8, 8),
            COMPRESSED,
            "e4m3fn",
            r"nothing to quantize for layout compressed-tensors \(3 dimensions, .*: 1\)",
        ),
    ],
)
def test_what_a_layout_cannot_hold_of_a_tensor(tmp_path, name, shape, layout, fmt, message):
    save(tmp_path / "src", {name: np.ones(shape, np.float32)})
    with refused(CheckpointError, message):
        convert(tmp_path / "src", tmp_path / "dst", layout=layout, format=fmt)


def test_a_quantized_file_is_quantized_anew_from_its_values(tmp_path):
    save(tmp_path / "src", weights())
    convert(tmp_path / "src", tmp_path / "int8", layout=COMPRESSED, format="int8")
    dequantize_checkpoint(tmp_path / "int8", tmp_path / "unquantized")
    report = convert(tmp_path / "int8", tmp_path / "again", format="e4m3fn")
    convert(tmp_path / "unquantized", tmp_path / "expected", format="e4m3fn")
    assert report.dequantized == COMPRESSED
    again, expected = stored(tmp_path / "again"), stored(tmp_path / "expected")
    assert again.keys() == expected.keys()
    for name, array in expected.items():
        assert again[name].tobytes() == array.tobytes()


def test_packed_integers_of_other_widths_are_told_apart(tmp_path):
    """64 words and 4 scales a row: 4 bits in groups of 128, or 8 bits in groups of 64."""
    codes = np.arange(2 * 256, dtype=np.uint8).reshape(2, 256)
    tensors = {
        "a.weight_packed": codes.view(np.int32),
        "a.weight_scale": np.ones((2, 4), np.float32),
        "a.weight_shape": np.array([2, 256]),
    }
    save(tmp_path / "file", tensors)
    with refused(CheckpointError, r"weight is \[2, 256\], .* int4_group128, .*config"):
        dequantize_checkpoint(tmp_path / "file", tmp_path / "out")
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "file").rename(folder / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "group_size": 64}
    quantization = {"quant_method": COMPRESSED, "config_groups": {"g": {"weights": weights}}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    dequantize_checkpoint(folder, tmp_path / "unquantized")
    found = stored(tmp_path / "unquantized" / "model.safetensors")["a.weight"]
    np.testing.assert_array_equal(found, codes.astype(np.float32) - 128)


def test_only_scales_of_quantized_weights_are_dropped(tmp_path):
    """A cache's scales stand in the attention; others are parameters of the model."""
    src, out = tmp_path / "src", tmp_path / "out"
    src.mkdir()
    x = np.ones((128, 128), np.float32)
    others = {"model.layers.0.self_attn.k_scale": f32([2]), "model.head.output_scale": f32([3])}
    save(src / "model.safetensors", {K: x, **others})
    (src / "config.json").write_text("{}")
    convert(src, out, layout="compressed-tensors", format="e4m3fn")
    left = dequantize_checkpoint(out, tmp_path / "unquantized").left
    assert left == ("model.layers.0.self_attn.k_scale",)  # the summary names it
    found = stored(tmp_path / "unquantized" / "model.safetensors")
    assert set(found) == {K, "model.head.output_scale"}
    convert(src, tmp_path / "plain", layout="plain")
    dequantize_checkpoint(tmp_path / "plain", tmp_path / "wide2")
    assert set(stored(tmp_path / "wide2" / "model.safetensors")) == {K, *others}


def test_static_input_scales_are_in_the_config(tmp_path):
    """Oracle: the preset FP8 of compressed-tensors, quantization/quant_scheme.py."""
    config = config_of(
        tmp_path, "compressed-tensors", "e4m3fn", scaling="tensor", input_scales=0.25
    )
    assert config["config_groups"]["group_0"]["input_activations"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor",
    }


@pytest.mark.parametrize(
    ("scaling", "scales", "message"),
    [
        ("tensor", {"model.layers.0.self_attn.q_prj": 1.0}, "q_prj is no module .* such as model"),
        ("tensor", {"model.layers.0.self_attn.q_proj": 1.0}, "FP8 .* expected one for .*k_proj"),
        ("channel", 1.0, "nothing in layout compressed-tensors .* takes static"),
    ],
)
def test_input_scales_that_do_not_fit_are_refused(tmp_path, scaling, scales, message):
    if "no module" in message:
        scales |= {name.removesuffix(".weight"): 1.0 for name in (Q, K, V)}
    save(tmp_path / "src", weights())
    options = {"layout": "compressed-tensors", "scaling": scaling, "input_scales": scales}
    refused(CheckpointError, message, convert, tmp_path / "src", tmp_path / "dst", **options)


def test_what_modelopt_writes_and_is_not_read_is_refused(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()

    def not_read(message, algorithm, tensors):
        save(folder / "model.safetensors", tensors, overwrite=True)
        config = {"quant_method": "modelopt", "quant_algo": algorithm}
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
        refused(CheckpointError, message, dequantize_checkpoint, folder, tmp_path / "out")

    packed = {"a.weight": np.zeros((8, 8), np.uint8), "a.weight_scale": f32([1])}
    not_read("quant_algo W4A16_AWQ in its config, expected FP8, ", "W4A16_AWQ", packed)
    not_read(r"a.weight: U8 .8, 8., without the scales", "NVFP4", packed)
    experts = {"experts.up_proj": U8.reshape(4, 16, 32), "experts.up_proj_weight_scale": f32([1])}
    not_read(r"experts.up_proj: U8 .4, 16, 32., without the scales", "NVFP4", experts)
    scaled = {"a.weight": np.zeros((8, 8), E4M3), "a.weight_scale": f32([1])}
    not_read(
        "multiplied .AWQ., expected one for each input",
        "FP8",
        scaled | {"a.pre_quant_scale": f32([1])},
    )


PRODUCER = {"producer": {"name": "modelopt", "version": "0.15.0"}}


@pytest.mark.parametrize(
    ("quantization", "entries"),
    [
        ({"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, lambda x: modelopt_fp8(x, 128, ())),
        ({"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}, modelopt_nvfp4),
    ],
)
def test_modelopt_whose_config_is_only_in_its_own_file(tmp_path, quantization, entries):
    """As NVIDIA publishes them: nvidia/Llama-3.1-8B-Instruct-FP8 of 2024. Oracle: NumPy."""
    wide = {
        "lm_head.weight": np.ones(SHAPE, "bfloat16"),
        "model.norm.weight": np.ones(8, "bfloat16"),
    }
    codes = {"model.layers.0.self_attn.k_proj.k_scale": f32(0.5)}
    for name, x in weights().items():
        codes |= {f"{name.removesuffix('weight')}{key}": a for key, a in entries(x).items()}
    folder = tmp_path / "nvidia"
    folder.mkdir()
    save(folder / "model.safetensors", codes | wide)
    (folder / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    about = PRODUCER | {"quantization": quantization | {"kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(about))
    save(tmp_path / "src", weights() | wide)
    assert verify(tmp_path / "src", folder).problems == ()
    dequantize_checkpoint(folder, tmp_path / "unquantized")
    found = stored(tmp_path / "unquantized" / "model.safetensors")
    assert found.keys() == weights().keys() | wide.keys()
    assert os.listdir(tmp_path / "unquantized").count("hf_quant_config.json") == 0
    report = convert(folder, tmp_path / "dst", layout="finegrained-fp8")
    assert report.dequantized == "modelopt"
    assert stored(tmp_path / "dst" / "model.safetensors").keys() == found.keys() | {
        f"{name}_scale_inv" for name in weights()
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(PRODUCER))
    with refused(CheckpointError, r"hf_quant_config.json: None under 'quantization'"):
        dequantize_checkpoint(folder, tmp_path / "other")
    about = {"quantization": {"kv_cache_quant_algo": "FP8"}}  # of unquantized weights
    (tmp_path / "unquantized" / "hf_quant_config.json").write_text(json.dumps(about))
    assert convert(tmp_path / "unquantized", tmp_path / "again", layout="plain").dequantized == ""


def test_blocks_of_modelopt_are_read(tmp_path):
    """FP8_PB_WO has scales [o / 128, 1, i / 128, 1]. Oracle: NumPy."""
    x = np.random.default_rng(1).normal(size=(256, 384)).astype(np.float32)
    scale = (np.abs(x.reshape(2, 128, 3, 128)).max((1, 3), keepdims=True) / 448).astype(np.float32)
    codes = (x.reshape(2, 128, 3, 128) / scale).astype(E4M3)
    expected = (codes.astype(np.float32) * scale).reshape(x.shape)
    # A convolution with a scale for each output has four axes, too.
    conv = {"c.weight": np.ones((6, 4, 3, 3), E4M3), "c.weight_scale": f32(range(1, 7))}
    conv["c.weight_scale"] = conv["c.weight_scale"].reshape(6, 1, 1, 1)
    tensors = {"a.weight": codes.reshape(x.shape), "a.weight_scale": scale, **conv}
    algorithm = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    dequantize_checkpoint(folder_of(tmp_path / "src", tensors, algorithm), tmp_path / "dst")
    found = stored(tmp_path / "dst" / "model.safetensors")
    np.testing.assert_array_equal(found["a.weight"], expected)
    np.testing.assert_array_equal(found["c.weight"][:, 0, 0, 0], range(1, 7))


def folder_of(path, tensors, quantization):
    """A folder with these tensors and that quantization_config."""
    path.mkdir(exist_ok=True)
    save(path / "model.safetensors", tensors, overwrite=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return path


@pytest.mark.parametrize("transforms", [{"config_groups": {"R1": {"type": "hadamard"}}}, ["R1"]])
def test_rotated_weights_are_refused(tmp_path, transforms):
    save(tmp_path / "one", weights())
    convert(tmp_path / "one", tmp_path / "codes", layout=COMPRESSED)
    quantization = {"quant_method": COMPRESSED, "transform_config": transforms}
    src = folder_of(tmp_path / "src", stored(tmp_path / "codes"), quantization)
    for command in (dequantize_checkpoint, convert):
        with refused(CheckpointError, r"transform_config .*R1.* are rotated"):
            command(src, tmp_path / "dst")
    refused(CheckpointError, "transform_config", verify, tmp_path / "one", src)
    folder_of(src, stored(tmp_path / "codes"), quantization | {"transform_config": {}})
    dequantize_checkpoint(src, tmp_path / "dst")


def test_sparse_weights_are_refused_by_name(tmp_path):
    """Half of them are stored, in entries of other names: it is no missing tensor."""
    entries = {"a.weight_packed": np.zeros((64, 16), np.int32), "a.meta": np.zeros((64, 8), "i2")}
    entries["a.scale_packed"] = np.ones((64, 2), np.float16)
    quantization = {"quant_method": COMPRESSED, "format": "marlin-24"}
    quantization |= {"sparsity_config": {"format": "sparse-24-bitmask"}}
    for config, name in (
        (quantization, "marlin-24"),
        (quantization | {"format": "pack-quantized"}, "sparse-24-bitmask"),
    ):
        src = folder_of(tmp_path / "src", entries, config)
        refused(CheckpointError, f"format {name} in config.json", convert, src, tmp_path / "dst")


U8, I8, ONES = np.zeros((64, 32), np.uint8), np.zeros((64, 32), np.int8), np.ones
NV4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def packed_integers(**weights):
    return {"quant_method": COMPRESSED, "config_groups": {"g": {"weights": weights}}}


@pytest.mark.parametrize(
    ("tensors", "quantization", "message"),
    [
        (
            {"weight": U8, "weight_scale": ONES((64, 4), E4M3), "weight_scale_2": f32([1, 2])},
            NV4,
            r"a\.weight_scale_2: \[2\], expected one tensor scale of a\.weight, \[64, 32\]",
        ),
        (
            {"weight_packed": U8, "weight_scale": ONES((64, 4), E4M3)}
            | {"weight_global_scale": ONES(64, np.float32)},
            {"quant_method": COMPRESSED},
            r"a\.weight_global_scale: \[64\], expected one tensor scale of a\.weight_packed",
        ),
        (
            {"weight": U8.reshape(4, 16, 32), "weight_scale": ONES((4, 16, 4), E4M3)}
            | {"weight_scale_2": f32([1, 2])},
            NV4,
            r"weight_scale_2: \[2\], expected one tensor scale, or one for each of 4, of a\.weight",
        ),
        (
            {"weight": U8[0], "weight_scale": ONES(4, E4M3), "weight_scale_2": f32(1)},
            NV4,
            r"a\.weight_scale: \[4\], expected a scale for every 16 of a row of a\.weight, \[32\]",
        ),
        (
            {"weight": U8, "weight_scale": ONES((64, 2), E4M3), "weight_scale_2": f32(1)},
            NV4,
            r"a\.weight_scale: \[64, 2\], expected a scale for every 16 of a row .*\[64, 32\]",
        ),
        (
            {"weight": I8[0, 0], "weight_scale": ONES((2, 1), np.float32)},
            None,
            r"a\.weight: \[\] with scales \[2, 1\], expected one in all",
        ),
        (
            {"weight": np.zeros((64, 2), E4M3), "weight_scale": ONES((64, 1), np.uint8)},
            None,
            r"a\.weight_scale: \[64, 1\], expected a scale for every 32 of .*a\.weight, \[64, 2\]",
        ),
        (
            {"weight_packed": np.zeros((2, 4), np.int32), "weight_scale": ONES((2, 1))},
            packed_integers(num_bits=8, type="int", group_size=0),
            "group_size 0 in config.json, expected a length from 1 up",
        ),
        (
            {"weight": I8, "weight_scale": ONES((64, 2), np.float32)},
            packed_integers(block_structure=["a", 3]),
            r"block_structure \['a', 3\] in config.json, expected two lengths",
        ),
        (
            {"weight_packed": np.zeros((2, 16), np.int32)}
            | {"weight_scale": ONES((2, 1), np.float32), "weight_shape": ONES((2, 0), bool)},
            None,
            r"a\.weight_shape: dtype BOOL, expected I64 or I32",
        ),
        (
            {"weight_packed": np.zeros((2, 16), np.int32)}
            | {"weight_scale": ONES((2, 1), np.float32), "weight_shape": ONES(0, np.int64)},
            None,
            r"a\.weight_shape: \[0\], expected two numbers, rows and columns",
        ),
    ],
)
def test_entries_that_do_not_fit_each_other_are_named(tmp_path, tensors, quantization, message):
    tensors = {f"a.{name}": x for name, x in tensors.items()}
    src = folder_of(tmp_path / "src", tensors, quantization)
    refused(CheckpointError, message, dequantize_checkpoint, src, tmp_path / "dst")


@pytest.mark.parametrize("amax", [0, 1e-6, 1])
def test_verify_knows_the_least_amax_of_deepseek(tmp_path, amax):
    """Below 1e-4 the scale of a block is 1e-4 / 448, of zeros, too; no file says so."""
    source = {"a.weight": np.full((256, 128), amax, np.float32)}
    source["a.weight"][:128] = 1
    save(tmp_path / "src", source)
    options = {"layout": "finegrained-fp8", "format": "deepseek_128x128"}
    convert(tmp_path / "src", tmp_path / "dst", **options)
    assert not verify(tmp_path / "src", tmp_path / "dst").problems
    convert(tmp_path / "src", tmp_path / "other", layout="finegrained-fp8")
    assert not verify(tmp_path / "src", tmp_path / "other").problems


@pytest.mark.parametrize(
    ("weights", "shape", "scale", "block"),
    [
        ({"strategy": "group", "group_size": 128}, (16, 1000), (16, 8), (1, 128)),
        ({"strategy": "group", "group_size": 100}, (128, 1000), (128, 10), (1, 100)),
        ({"strategy": "block", "block_structure": [100, 100]}, (200, 200), (2, 2), (100, 100)),
        ({"strategy": "group"}, (16, 960), (16, 8), (1, 128)),
    ],
)
def test_the_config_says_what_scales_belong_to(weights, shape, scale, block):
    """8 scales of 1000 columns: groups of 128, the last one shorter; not of 125."""
    placed = place([("a.weight", "I8", shape), ("a.weight_scale", "F32", scale)])
    headers = Headers({entry.name: entry for entry in placed}, "here", {}, None)
    config = {"config_groups": {"group_0": {"weights": weights}}}
    (found,) = LAYOUTS["compressed-tensors"].decode(config, headers).values()
    assert found.lengths == block
