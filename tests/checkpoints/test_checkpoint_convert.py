"""Conversion; the oracle is NumPy with ml_dtypes, written out in `oracle`."""

import itertools
import math
import os

import ml_dtypes
import numpy as np
import pytest
from refused import refused
from stored import stored
from test_slabs import cut_to_slabs

from qtoolkit import checkpoints
from qtoolkit.checkpoints import CheckpointError, convert, dequantize, load, save
from qtoolkit.formats import Rules

SRC, DST = "src.safetensors", "dst.safetensors"
TARGETS = {
    "e4m3fn": (ml_dtypes.float8_e4m3fn, 448),
    "e5m2": (ml_dtypes.float8_e5m2, 57344),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 240),
    "e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, 57344),
    "int8": (np.int8, 127),
}


def oracle(x, fmt, axes=None):
    """Codes and scale by NumPy and ml_dtypes: IEEE divisions, one rounding.

    A NaN makes the scale of its block NaN where codes have none, int8.
    """
    dtype, largest = TARGETS[fmt]
    x = np.asarray(x, np.float32)
    amax = np.max(np.abs(x), axis=axes, keepdims=True, initial=0, where=np.isfinite(x))
    scale = np.maximum(amax / np.float32(largest), np.float32(2.0**-126))
    scale = np.where(amax == 0, np.float32(1), scale)
    if fmt == "int8":
        scale = np.where(np.isnan(x).any(axis=axes, keepdims=True), np.float32(np.nan), scale)
    with np.errstate(over="ignore", invalid="ignore"):
        q = np.clip(x / scale, -128 if fmt == "int8" else -largest, largest)
        codes = np.where(np.isnan(q), 0, np.rint(q)) if fmt == "int8" else q
        return codes.astype(dtype), scale


def assert_same_codes(got, expected, name=""):
    """Bit for bit; of NaN only that it is one."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
    unsigned = f"u{got.itemsize}"
    a, b = (np.array(codes).reshape(-1).view(unsigned) for codes in (got, expected))
    nan = np.isnan(got.astype(np.float32)).reshape(-1)
    np.testing.assert_array_equal(nan, np.isnan(expected.astype(np.float32)).reshape(-1), name)
    np.testing.assert_array_equal(np.where(nan, 0, a), np.where(nan, 0, b), name)


def normal(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def converted(tmp_path, tensors, **options):
    save(tmp_path / SRC, tensors, overwrite=True)
    report = convert(tmp_path / SRC, tmp_path / DST, overwrite=True, **options)
    return stored(tmp_path / DST), report


SHAPES = [(1, 1), (1, 65), (65, 1), (5, 7, 3), (2, 200), (129, 2)]
# Each shape compiles programs of its own, in each format.
SOME_SHAPES = [(5, 7, 3), (2, 200)]
CASES = [
    *(("e4m3fn", dtype, 64, SHAPES) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)),
    ("e4m3fn", np.float32, 2**20, SHAPES),
    *((fmt, np.float32, 2**20, SOME_SHAPES) for fmt in TARGETS if fmt != "e4m3fn"),
    *(
        pytest.param(fmt, np.float32, 2**20, SHAPES, marks=pytest.mark.exhaustive)
        for fmt in TARGETS
        if fmt != "e4m3fn"
    ),
]


@pytest.mark.sample("e4m3fn-float32-64-shapes0")
@pytest.mark.parametrize(("fmt", "dtype", "chunk", "shapes"), CASES)
def test_codes_and_scales_equal_numpy_with_ml_dtypes(
    tmp_path, monkeypatch, fmt, dtype, chunk, shapes
):
    cut_to_slabs(monkeypatch, chunk)
    tensors = {
        f"{i}{ending}": normal(shape, dtype, seed=i)
        for i, shape in enumerate(shapes)
        for ending in (".weight", "/kernel")
    }
    for scaling in ("tensor", "channel"):
        found, report = converted(tmp_path, tensors, format=fmt, scaling=scaling)
        for name, x in tensors.items():
            axis = x.ndim - 1 if name.endswith("kernel") else 0
            axes = None if scaling == "tensor" else tuple(i for i in range(x.ndim) if i != axis)
            codes, scale = oracle(x, fmt, axes)
            assert_same_codes(found[name], codes, name)
            shape = (1,) if scaling == "tensor" else scale.shape
            np.testing.assert_array_equal(found[name + "_scale"], scale.reshape(shape), name)
        assert len(report.quantized) == len(tensors)


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_16_bit_targets_equal_numpys_astype_after_a_clip(tmp_path, fmt, dtype):
    with np.errstate(over="ignore"):
        extremes = np.array([3e38, -1e5, 1e-6, 0], np.float32).astype(dtype)
    x = np.concatenate([normal(500, dtype), extremes])
    x = np.where(np.isfinite(x), x, np.ones_like(x)).reshape(8, 63)
    found, report = converted(tmp_path, {"w": x}, format=fmt)
    if report.kept:
        assert np.dtype(dtype).name == fmt
    largest = float(ml_dtypes.finfo(fmt).max)
    expected = np.clip(x.astype(np.float32), -largest, largest).astype(fmt)
    assert_same_codes(found["w"], expected)
    assert list(found) == ["w"]


@pytest.mark.parametrize("fmt", TARGETS)
@pytest.mark.parametrize("scaling", ["tensor", "channel"])
def test_nan_reaches_the_scale_only_where_codes_have_none(tmp_path, fmt, scaling):
    x = normal((6, 50))
    x[0, 0], x[1, 1], x[2, 2], x[3] = np.nan, np.inf, -np.inf, np.nan
    found, report = converted(
        tmp_path, {"w.weight": x}, format=fmt, scaling=scaling, allow_nonfinite=True
    )
    codes, scale = oracle(x, fmt, None if scaling == "tensor" else (1,))
    assert_same_codes(found["w.weight"], codes)
    np.testing.assert_array_equal(found["w.weight_scale"].reshape(-1), scale.reshape(-1))
    assert report.nonfinite == 53
    if (fmt, scaling) == ("int8", "tensor"):
        assert report.mean_sqnr_db is None
    else:
        assert math.isfinite(report.mean_sqnr_db)


def test_zeros_empty_tensors_and_scalars(tmp_path):
    tensors = {
        "zeros": np.zeros((3, 5), np.float32),
        "no_rows": np.zeros((0, 5), np.float32),
        "no_columns": np.zeros((5, 0), np.float32),
        "scalar": np.float32(2.5),
    }
    tiny = {"tiny": np.full((2, 2), 1e-44, np.float32)}
    for scaling in ("tensor", "channel"):
        found, report = converted(tmp_path, tensors, scaling=scaling, channel_axis="first")
        for name in ("zeros", "no_rows", "no_columns"):
            assert found[name].shape == tensors[name].shape
            assert not found[name].view(np.uint8).any()
            assert (found[name + "_scale"] == 1).all()
        assert found["scalar"] == 2.5
        assert report.mean_sqnr_db is None
        found, _ = converted(tmp_path, tiny, scaling=scaling, channel_axis="first")
        assert np.isfinite(dequantize(load(tmp_path / DST))["tiny"]).all()


def test_tensors_are_copied_byte_for_byte(tmp_path, monkeypatch):
    cut_to_slabs(monkeypatch, 16)
    tensors = {
        "ids": np.arange(1000, dtype=np.int64).reshape(10, 100),
        "bias": normal(77),
        "flags": np.array([[True, False]]),
        "codes": normal((9, 9)).astype("float8_e5m2"),
    }
    found, report = converted(tmp_path, tensors, allow_codes=True)
    for name, array in tensors.items():
        assert found[name].tobytes() == array.tobytes(), name
    assert report.bytes_before == report.bytes_after
    assert report.mean_sqnr_db is None


@pytest.mark.parametrize(
    ("fmt", "scaling"),
    [*itertools.product(("e4m3fn", "int8"), ("tensor", "channel")), ("bfloat16", None)],
)
def test_the_report_agrees_with_float64_arithmetic(tmp_path, fmt, scaling):
    tensors = {
        "a.weight": normal((300, 70)),
        "b/kernel": 1e-3 * normal((64, 32)),
        "bias": normal(3),
    }
    found, report = converted(tmp_path, tensors, format=fmt, scaling=scaling)
    values = dequantize(load(tmp_path / DST))
    assert values.keys() == tensors.keys()
    for tensor in report.quantized:
        x = tensors[tensor.name].astype(np.float64)
        error = x - np.asarray(values[tensor.name], np.float64)
        # float32 sums over at most 2**10 or 300 elements: a relative error below 1e-4, 0.0004 dB
        assert tensor.sqnr_db == pytest.approx(
            10 * np.log10((x**2).sum() / (error**2).sum()), abs=1e-3
        )
        if fmt != "bfloat16":
            assert values[tensor.name].dtype == np.float32
            assert tensor.max_scale == found[tensor.name + "_scale"].max()
    assert report.bytes_before == sum(x.nbytes for x in tensors.values())
    assert report.bytes_after == sum(x.nbytes for x in found.values())
    assert report.mean_sqnr_db == pytest.approx(np.mean([t.sqnr_db for t in report.quantized]))


def test_the_bytes_depend_on_neither_slab_size_nor_run(tmp_path, monkeypatch):
    tensors = {"a.weight": normal((40, 70)), "b/kernel": normal((64, 32)), "bias": normal(3)}
    files = []
    for chunk in (16, 100, 2**20, 2**20):
        cut_to_slabs(monkeypatch, chunk)
        converted(tmp_path, tensors, scaling="channel")
        files.append((tmp_path / DST).read_bytes())
    assert len(set(files)) == 1


def test_progress_ends_at_the_total(tmp_path, monkeypatch):
    cut_to_slabs(monkeypatch, 64)
    calls = []
    tensors = {"w": normal((40, 7)), "bias": normal(100)}
    converted(tmp_path, tensors, progress=lambda *call: calls.append(call))
    assert {name for name, _, _ in calls} == {"w", "bias"}
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    # What is written: 280 codes, a scale, and 100 numbers that are copied.
    assert calls[-1][1] == calls[-1][2] == 280 + 4 + 400


def test_converting_the_result_again_gives_the_same_codes(tmp_path):
    """Of the values it stands for; 448 * scale / 448 may be an ulp from the scale."""
    found, _ = converted(tmp_path, {"w.weight": normal((20, 30))}, scaling="channel")
    again = convert(tmp_path / DST, tmp_path / "again", scaling="channel")
    assert again.dequantized == "plain"
    assert len(again.quantized) == 1
    twice = stored(tmp_path / "again")
    assert twice["w.weight"].tobytes() == found["w.weight"].tobytes()
    np.testing.assert_allclose(twice["w.weight_scale"], found["w.weight_scale"], rtol=2**-23)


@pytest.mark.parametrize("magnitude", [1e-18, 1.0, 1e30])
def test_sqnr_of_unscaled_formats_at_any_magnitude(tmp_path, magnitude):
    """Oracle: float64 sums of what ml_dtypes rounds."""
    x = (np.random.default_rng(0).uniform(0, 1, (64, 64)) * magnitude).astype(np.float32)
    wide = x.astype(np.float64)
    noise = np.sum((wide - x.astype(ml_dtypes.bfloat16).astype(np.float64)) ** 2)
    expected = 10 * np.log10(np.sum(wide**2) / noise)
    _, report = converted(tmp_path, {"kernel": x}, format="bfloat16")
    assert abs(report.tensors[0].sqnr_db - expected) < 0.01


RULES = Rules({"^a": "e5m2", "kernel$": "int8", "keep": None, "^d": "bfloat16"}, default="e4m3fn")


@pytest.mark.parametrize("scaling", ["tensor", "channel"])
def test_by_rules_every_tensor_is_as_if_it_were_alone(tmp_path, scaling):
    """Oracle: files of one tensor and one format, and NumPy for the shapes that those skip."""
    tensors = {
        "a.weight": normal((9, 5)),
        "b/kernel": normal((7, 3), np.float16),
        "keep": normal((3, 3)),
        "d": normal((4, 4)),
        "e.weight": normal((6, 2), ml_dtypes.bfloat16),
        "norm": normal(33),
        "one": np.float32(-2.5),
    }
    found, report = converted(tmp_path, tensors, format=RULES, scaling=scaling)
    values = dequantize(load(tmp_path / DST))
    assert sorted(report.format.split(", ")) == ["bfloat16", "e4m3fn", "e5m2", "int8"]
    assert report.scaling == scaling
    formats = {tensor.name: tensor.format for tensor in report.tensors}
    assert formats == {
        "a.weight": "e5m2",
        "b/kernel": "int8",
        "keep": "",
        "d": "bfloat16",
        "e.weight": "e4m3fn",
        "norm": "e4m3fn",
        "one": "e4m3fn",
    }
    for name in ("a.weight", "b/kernel", "d", "e.weight"):
        one = {"format": formats[name], "scaling": None if name == "d" else scaling}
        alone, _ = converted(tmp_path, {name: tensors[name]}, **one)
        assert found.keys() >= alone.keys()
        for key, array in alone.items():
            assert found[key].tobytes() == array.tobytes(), key
    for name in ("norm", "one"):
        codes, scale = oracle(tensors[name], "e4m3fn")
        assert_same_codes(found[name], codes, name)
        np.testing.assert_array_equal(found[name + "_scale"], scale.reshape(1))
    assert found["keep"].tobytes() == tensors["keep"].tobytes()
    assert {name: x.shape for name, x in values.items()} == {n: x.shape for n, x in tensors.items()}
    assert values["one"] == -2.5
    assert report.bytes_after == sum(x.nbytes for x in found.values())


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
def test_casts_keep_inf_and_count_what_they_clamp(tmp_path, fmt):
    """Oracle: `astype` of NumPy with ml_dtypes, its overflows clamped."""
    largest = np.float32(ml_dtypes.finfo(fmt).max)
    x = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1], np.float32)
    expected = np.where(np.isinf(x), x, np.clip(x, -largest, largest)).astype(fmt)
    tensors = {"bias": x, "a.weight": normal((8, 8))}
    found, report = converted(tmp_path, tensors, keep_dtype=fmt, allow_nonfinite=True)
    assert_same_codes(found["bias"], expected)
    assert (report.nonfinite, report.overflowed) == (3, 2)
    save(tmp_path / SRC, {"w": x.reshape(2, 3)}, overwrite=True)
    report = convert(
        tmp_path / SRC, tmp_path / DST, format=fmt, allow_nonfinite=True, overwrite=True
    )
    assert_same_codes(stored(tmp_path / DST)["w"], expected.reshape(2, 3))
    assert (report.nonfinite, report.overflowed) == (3, 2)
    assert not checkpoints.verify(tmp_path / SRC, tmp_path / DST).problems


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_copied_is_looked_at(tmp_path, dtype):
    """Each edge of the finite numbers alone among finite ones; NumPy says which are finite."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    edges = np.array([np.inf, -np.inf, np.nan, -np.nan], dtype).view(bits)
    edges = np.concatenate([edges - 1, edges, edges + 1, ~(0 * edges)]).view(dtype)
    tensors = {f"{i}.mask": np.array([-1, edge, 1], dtype) for i, edge in enumerate(edges)}
    written, report = converted(tmp_path, tensors)
    with np.errstate(invalid="ignore"):  # of signaling NaNs
        expected = [np.count_nonzero(~np.isfinite(tensors[t.name])) for t in report.kept]
    assert [tensor.nonfinite for tensor in report.kept] == expected
    assert 0 < sum(expected) < len(edges) == len(expected)
    assert written["1.mask"].tobytes() == tensors["1.mask"].tobytes()


def test_what_is_cast_is_refused_as_what_is_quantized(tmp_path):
    save(tmp_path / SRC, {"bias": np.array([1, np.nan], np.float32)})
    message = r"weights: bias \(1\); .* with skip= and without keep_dtype=, or pass allow_nonf"
    with refused(CheckpointError, message):
        convert(tmp_path / SRC, tmp_path / DST, keep_dtype="bfloat16")
    assert os.listdir(tmp_path) == [SRC]
    options = {"keep_dtype": "bfloat16", "allow_nonfinite": True}
    assert convert(tmp_path / SRC, tmp_path / DST, **options).nonfinite == 1


def test_blocks_of_convolutions_are_their_outputs(tmp_path):
    """Blocks of the last two axes would be 1x1 here: a float32 scale for each code."""
    rng = np.random.default_rng(0)
    shapes = {"conv.weight": (64, 40, 1, 1), "conv.kernel": (3, 3, 40, 150), "l.weight": (130, 200)}
    arrays = {name: rng.normal(size=n).astype(np.float32) for name, n in shapes.items()}
    src, dst = tmp_path / "src.safetensors", tmp_path / "dst.safetensors"
    save(src, arrays)
    report = convert(src, dst, scaling="block")
    found = stored(dst)
    assert {*report.scaling.split(", ")} == {"block", "channel"}
    assert found["conv.weight_scale"].shape == (64, 1, 1, 1)
    assert found["conv.kernel_scale"].shape == (3, 3, 1, 2)
    assert found["l.weight_scale"].shape == (2, 2)
    assert checkpoints.verify(src, dst).problems == ()
    values = dequantize(load(dst))
    for name, array in arrays.items():
        np.testing.assert_allclose(values[name], array, rtol=2**-4, atol=0.02)


def test_no_format_at_all_is_refused(tmp_path):
    """A copy, with "dequantized" as the reason of each tensor, would look converted."""
    save(tmp_path / SRC, {"w.weight": np.ones((4, 4), np.float32)})
    refused(TypeError, r"format=None", convert, tmp_path / SRC, tmp_path / DST, format=None)
    assert os.listdir(tmp_path) == [SRC]
