"""Small tensors quantized together. Oracle: `qtoolkit.quantize` of each of them."""

import itertools
import threading

import ml_dtypes
import numpy as np
import pytest
from qtoolkit.checkpoints._batches import Task, all_quantized
from qtoolkit.checkpoints._workers import Workers
from test_engine import DTYPES, assert_equal_quantize, put_together, reader

import qtoolkit as qt
from qtoolkit.checkpoints import _batches, _programs, _tiles, convert, load, save
from qtoolkit.checkpoints._safetensors import SafetensorsFile
from qtoolkit.formats import BlockFormat, Rules, spec

LARGE = (200, 300)
MATRICES = [(1, 1), (16, 16), (1, 129), (129, 1), (40, 3), (128, 256), LARGE, (3, 300)]
CASES = {
    "a scale for the tensor": (BlockFormat.tensor("e4m3fn"), [(), (7,), (3, 5, 7), *MATRICES]),
    "for each output": (BlockFormat.channel("e4m3fn", 0), [(5,), (3, 5, 7), *MATRICES]),
    "for each input": (BlockFormat.channel("e5m2", -1), MATRICES),
    "integers for each output": (BlockFormat.channel("int8", 0), MATRICES),
    "of 128x128": (spec("deepseek_128x128"), [(128, 128), (130, 200), LARGE]),
    "of 1x128": (BlockFormat(element="e4m3fn", block=(128,)), [(1, 128), (5, 300), LARGE]),
    "of 3x3": (BlockFormat(element="e4m3fn", block=(3, 3)), [(3, 3), (7, 8), (2, 9, 5)]),
    "mxfp8": (spec("mxfp8_e4m3"), [(1, 32), (9, 130), (40, 64), LARGE]),
    "mxfp4": (spec("mxfp4"), [(32,), (9, 130), (40, 64), LARGE]),
    "nvfp4": (spec("nvfp4"), [(1, 16), (3, 10, 48), (40, 64), LARGE]),
    "without scales": (BlockFormat.tensor("e5m2", scale=None), [(), (7,), *MATRICES]),
    "a cast": (BlockFormat.tensor("float16", scale=None), [(), (7,), *MATRICES]),
}


def awkward(shape, dtype, seed):
    """Magnitudes from 1e-3 to 1e3, some zeros; in some a NaN, in some an infinity."""
    rng = np.random.default_rng(seed)
    rows = shape[:1] + (1,) * (len(shape) - 1)
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, rows)
    x = np.where(rng.random(shape) < 0.1, 0, x).astype(dtype)
    if seed % 3 == 1:
        x.flat[x.size // 3] = np.nan
    if seed % 4 == 1:
        x.flat[-1] = -np.inf
    return x


def task_of(x, fmt, amax=None):
    return Task(reader(x), x.shape, DTYPES[x.dtype.name], fmt, lambda: amax)


def results_of(arrays, fmts, workers=1):
    tasks = map(task_of, arrays, fmts)
    with Workers(workers) as threads:
        for x, fmt, result in zip(arrays, fmts, all_quantized(tasks, threads), strict=True):
            yield x, fmt, *put_together(x, fmt, result.pieces), result.tensor_scale, result.sums


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("fmt", "shapes"), CASES.values(), ids=CASES)
def test_the_bits_are_those_of_quantize(fmt, shapes, dtype):
    arrays = [awkward(shape, dtype, seed) for seed, shape in enumerate(shapes * 2)]
    for result in results_of(arrays, [fmt] * len(arrays)):
        assert_equal_quantize(*result)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tile", "ahead"), [(2**9, 700), (2**9, 1), (2**15, 2**17)])
@pytest.mark.parametrize("workers", [3, 1])
def test_any_neighbours_in_any_tiles(monkeypatch, tile, ahead, workers):
    """Formats, dtypes and sizes mixed; with tiles of four units, tensors lie across their ends."""
    monkeypatch.setattr(_batches, "_TILE", tile)
    monkeypatch.setattr(_batches, "_AHEAD", ahead)
    fmts = [BlockFormat.tensor("e4m3fn"), BlockFormat.channel("int8", 0), spec("nvfp4")]
    shapes, dtypes = [(16, 16), (5, 200), (9, 48), (1, 17)], (np.float32, ml_dtypes.bfloat16)
    mixed = [*itertools.product(shapes, dtypes, fmts)] * 2 + [(LARGE, np.float32, fmts[0])]
    mixed = [mixed[i] for i in np.random.default_rng(0).permutation(len(mixed))]
    arrays = [awkward(shape, dtype, i) for i, (shape, dtype, _) in enumerate(mixed)]
    for result in results_of(arrays, [fmt for *_, fmt in mixed], workers):
        assert_equal_quantize(*result)


def test_what_becomes_of_a_tensor_does_not_depend_on_others():
    arrays = [awkward(shape, np.float32, seed) for seed, shape in enumerate(MATRICES * 3)]
    fmts = [BlockFormat.channel("int8", 0)] * len(arrays)
    together = [sums for *_, sums in results_of(arrays, fmts)]
    alone = [sums for x in arrays for *_, sums in results_of([x], fmts[:1])]
    np.testing.assert_equal(together, alone)
    assert {sums.nonfinite for sums in alone} >= {0, 1}


def test_only_what_is_not_finite_counts_so():
    """A NaN makes its row's scale NaN, so that the other row says by what sums are multiplied."""
    x = np.array([[np.nan, 1e20] * 50, [1e-20, 2e-20] * 50], np.float32)
    ((*_, sums),) = results_of([x], [BlockFormat.channel("int8", 0)])
    assert sums.nonfinite == 50


def test_what_a_cast_cannot_hold_is_counted():
    x = np.array([[70_000, -1e9, 65_504, np.inf, np.nan, 1]], np.float32)
    arrays = [x, np.ones((9, 9), np.float32), np.repeat(x, 40, axis=0)]
    for result in results_of(arrays, [BlockFormat.tensor("float16", scale=None)] * 3):
        assert_equal_quantize(*result)


def test_a_tensor_scale_is_that_of_the_amax_given():
    x, y = awkward((9, 48), np.float32, 0), awkward((9, 48), np.float32, 3)
    amax = float(np.abs([x, 3 * y]).max())
    tasks = [task_of(x, spec("nvfp4"), amax), task_of(y, spec("nvfp4"))]
    of_x, of_y = all_quantized(tasks)
    both, alone = (qt.quantize(array, spec("nvfp4")) for array in (np.stack([x, 3 * y]), y))
    (piece,) = of_x.pieces
    np.testing.assert_array_equal(piece.codes, both.codes[0])
    assert of_x.tensor_scale == both.tensor_scale
    assert of_y.tensor_scale == alone.tensor_scale


def test_empty_tensors_between_others_have_scales_of_one():
    arrays = [np.ones(shape, np.float32) for shape in ((0, 5), (4, 16), (5, 0))]
    tasks = [task_of(x, BlockFormat.channel("e4m3fn", 0)) for x in arrays]
    first, second, third = all_quantized(tasks)
    pieces = [piece for result in (first, second, third) for piece in result.pieces]
    assert [piece.codes.shape for piece in pieces] == [(0, 5), (4, 16), (5, 0)]
    empty, scale, ones = (piece.scale for piece in pieces)
    assert empty.shape == (0,)
    np.testing.assert_array_equal(scale, np.full(4, np.float32(1) / np.float32(448)))
    np.testing.assert_array_equal(ones, np.ones(5, np.float32))


def test_zero_points_are_refused():
    fmt = BlockFormat.tensor("uint8", zero_point=True)
    with pytest.raises(ValueError, match="no checkpoint layout has zero points"):
        list(all_quantized([task_of(np.ones(3, np.float32), fmt)]))


def test_few_programs_whatever_the_shapes():
    fmt = BlockFormat.channel("float8_e4m3b11fnuz", 0)
    shapes = [*itertools.product((1, 9, 63), (1, 14, 20, 100, 129, 200))]
    before = _programs.encoded._cache_size()
    list(results_of([awkward(shape, np.float16, 0) for shape in shapes], [fmt] * len(shapes)))
    assert _programs.encoded._cache_size() - before == len(_tiles.WIDTHS)


@pytest.mark.exhaustive
def test_a_conversion_is_the_same_whatever_is_quantized_together(tmp_path, monkeypatch):
    shapes = {"a.weight": (16, 16), "b.weight": (300, 200), "c.weight": (12, 3, 3), "d": (7,)}
    tensors = {
        f"{i}.{name}": awkward(shape, dtype, 12 * i)
        for i, dtype in enumerate((np.float32, ml_dtypes.bfloat16, np.float16) * 4)
        for name, shape in shapes.items()
    }
    tensors["0.a.weight"][:] = 0
    save(tmp_path / "src", tensors)
    rules = Rules([(r"a\.weight", "int8"), (r"c\.weight", "bfloat16"), ("d", None)], default="e5m2")
    made = []
    for ahead, workers in ((1, 1), (300, 3), (2**17, 2)):
        monkeypatch.setattr(_batches, "_AHEAD", ahead)
        report = convert(
            tmp_path / "src",
            tmp_path / "dst",
            format=rules,
            scaling="channel",
            overwrite=True,
            channel_axis="first",
            workers=workers,
        )
        with SafetensorsFile(tmp_path / "src") as file:
            assert [tensor.name for tensor in report.tensors] == [*file.tensors]
        made.append((report, (tmp_path / "dst").read_bytes()))
    assert made[0] == made[1] == made[2]
    found = load(tmp_path / "dst")
    whole = qt.quantize(tensors["4.a.weight"], BlockFormat.channel("int8", 0))
    np.testing.assert_array_equal(found["4.a.weight"].view(np.uint8), whole.codes)
    np.testing.assert_array_equal(found["4.a.weight_scale"], whole.scale)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(24, 64), (600, 512)])  # with others, and alone
@pytest.mark.parametrize("scaling", ["tensor", "channel"])
def test_what_a_report_says_is_what_metrics_says(shape, scaling, tmp_path):
    """Oracle: `qt.metrics` of the tensor with the same blocks."""
    x = np.random.default_rng(0).standard_cauchy(size=shape).astype(np.float32)
    x[0, 0] = 1e-9  # is flushed
    qt.checkpoints.save(tmp_path / "in.safetensors", {"layer.weight": x})
    report = qt.checkpoints.convert(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", scaling=scaling
    )
    (tensor,) = (t for t in report.tensors if t.sqnr_db is not None)
    spec = qt.BlockFormat.tensor("e4m3fn")
    if scaling == "channel":
        spec = qt.BlockFormat.channel("e4m3fn", axis=0)
    expected = qt.metrics(x, spec)
    np.testing.assert_allclose(tensor.sqnr_db, float(expected.sqnr_db), atol=1e-3)
    assert tensor.max_scale == float(np.max(qt.quantize(x, spec).scale))
    (compared,) = qt.checkpoints.compare(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    ).tensors
    np.testing.assert_allclose(compared.sqnr_db, float(expected.sqnr_db), atol=1e-3)
    assert compared.flushed == pytest.approx(float(expected.flushed), rel=1e-6)
    assert compared.flushed > 0
    assert compared.saturated == float(expected.saturated)
    assert compared.max_error == pytest.approx(float(expected.max_error), rel=1e-6)
    assert compared.nonfinite == int(expected.nonfinite) == tensor.nonfinite


def test_threads_are_started_once_for_all_tensors(monkeypatch, tmp_path):
    """Each leaves a heap behind: with threads for every matrix a stack of 64 took 440 MiB."""
    monkeypatch.setattr(_tiles, "CHUNK", 2**12)
    stack = np.random.default_rng(0).normal(size=(24, 64, 256)).astype(np.float32)
    save(tmp_path / "src", {"experts.down_proj": stack})
    started, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: started.append(start(self)))
    convert(tmp_path / "src", tmp_path / "dst", scaling="channel", channel_axis="last", workers=2)
    assert 2 <= len(started) <= 4
