"""Weights read and written slab by slab.

Oracles: `qtoolkit.quantize` of the whole, `qtoolkit.metrics`, ml_dtypes; for where slabs lie, the
index of each element's block.
"""

import dataclasses
import math
import threading

import ml_dtypes
import numpy as np
import pytest
from stored import stored

import qtoolkit as qt
from qtoolkit.checkpoints import _slabs, convert, dequantize_checkpoint, load, save
from qtoolkit.checkpoints._slabs import Grid
from qtoolkit.formats import BlockFormat, Rules, spec

NAME = "a.weight"
NVFP4, INT4 = spec("nvfp4"), spec("int4_group128")
OF_LAYOUT = {  # where compressed-tensors has a rule of its own
    NVFP4: dataclasses.replace(NVFP4, tensor_scale_divides=True),
    INT4: dataclasses.replace(INT4, rule="range"),
}


def cut_to_slabs(monkeypatch, size):
    """Weights are read and quantized in slabs of this many elements."""
    monkeypatch.setattr(_slabs, "SLAB", size)


def converted(tmp_path, x, fmt, **options):
    """The weight as it was stored, and what the report says of it."""
    save(tmp_path / "in", {NAME: x}, overwrite=True)
    paths = tmp_path / "in", tmp_path / "out"
    options |= {"format": fmt, "skip": (), "overwrite": True, "allow_nonfinite": True}
    (report,) = convert(*paths, **options).tensors
    return load(tmp_path / "out")[NAME], report


def bits(array):
    array = np.asarray(array)
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def quantized(x, fmt):
    return qt.quantize(x, OF_LAYOUT.get(fmt, fmt))


def assert_as_quantize(x, fmt, weight, report):
    whole = quantized(x, fmt)
    np.testing.assert_array_equal(bits(weight.unpack().codes), bits(whole.codes))
    both = (np.asarray(w.scale, np.float32).reshape(-1) for w in (weight, whole))
    np.testing.assert_array_equal(*both)  # NaN is equal to NaN, of whatever pattern
    if whole.tensor_scale is not None:
        np.testing.assert_array_equal(bits(weight.tensor_scale), bits(whole.tensor_scale))
    largest = np.fmax.reduce(np.asarray(whole.scale, np.float32), axis=None, initial=0)
    divisor = 1 if whole.tensor_scale is None else np.float32(whole.tensor_scale)
    assert report.max_scale == largest / divisor
    y, wide = np.asarray(whole.dequantize("float32"), np.float64), x.astype(np.float64)
    known = np.isfinite(wide) & np.isfinite(y)
    assert report.nonfinite == np.count_nonzero(~np.isfinite(wide))
    signal, noise = (wide[known] ** 2).sum(), ((wide[known] - y[known]) ** 2).sum()
    # A tile is summed in float32: 2**20 squares of like size have been 1.2e-5 off.
    assert report.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=2e-3)


def weights(shape, dtype=np.float32, seed=0):
    """Rows of magnitudes from 1e-3 to 1e3, with a NaN, an Inf and a block of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, shape[:1] + (1,) * (len(shape) - 1))
    x.flat[5 : x.size : 10**6], x.flat[900 : x.size : 10**6] = np.nan, -np.inf
    x.flat[300:600] = 0
    return x.astype(dtype)


CASES = {
    "a scale for the tensor": (BlockFormat.tensor("e4m3fn"), (33, 100), "plain"),
    "for each output": (BlockFormat.channel("int8", 0), (33, 100), "plain"),
    "of a convolution": (BlockFormat.channel("e4m3fn", 0), (30, 5, 3, 3), "plain"),
    "groups": (spec("mxfp4"), (9, 128), "compressed-tensors"),
    "groups with a tensor scale": (NVFP4, (30, 48), "compressed-tensors"),
    "groups of 128": (INT4, (10, 256), "compressed-tensors"),
    "blocks": (spec("deepseek_128x128"), (140, 257), "finegrained-fp8"),
    "a long row": (BlockFormat.channel("e4m3fn", 0), (2, 3000), "plain"),
}
cases = pytest.mark.parametrize(("fmt", "shape", "layout"), CASES.values(), ids=CASES)


@pytest.mark.sample(
    *("a scale for the tensor-float32-1024", "for each output-bfloat16-1024"),
    *("of a convolution-float32-1024", "groups-bfloat16-1024", "blocks-float32-1024"),
    *("groups with a tensor scale-float16-1024", "groups of 128-float16-1024"),
    "a long row-bfloat16-1024",
)
@pytest.mark.parametrize("chunk", [2**10, pytest.param(2**20, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@cases
def test_the_bits_are_those_of_quantize(tmp_path, monkeypatch, fmt, shape, layout, dtype, chunk):
    cut_to_slabs(monkeypatch, chunk)
    x = weights(shape, dtype)
    assert_as_quantize(x, fmt, *converted(tmp_path, x, fmt, layout=layout, workers=2))


@pytest.mark.parametrize("chunk", [2**6, 2**12])
@cases
def test_any_slabs_are_decoded_to_what_dequantize_gives(
    tmp_path, monkeypatch, fmt, shape, layout, chunk
):
    x = np.nan_to_num(weights(shape), posinf=9, neginf=9)
    converted(tmp_path, x, fmt, layout=layout)
    cut_to_slabs(monkeypatch, chunk)
    dequantize_checkpoint(tmp_path / "out", tmp_path / "values", dtype="float32")
    expected = np.asarray(quantized(x, fmt).dequantize("float32"))
    np.testing.assert_array_equal(stored(tmp_path / "values")[NAME], expected)


@pytest.mark.parametrize("name", ["a scale for the tensor", "groups", "blocks"])
def test_weights_that_are_alike_share_a_call(tmp_path, name):
    fmt, shape, layout = CASES[name]
    arrays = {
        f"{power}.weight": weights(shape, ml_dtypes.bfloat16, seed)
        * ml_dtypes.bfloat16(2.0**-power)
        for seed, power in enumerate((0, 10, 120))  # the last one has subnormal values
    }
    save(tmp_path / "in", arrays)
    options = {"format": fmt, "skip": (), "layout": layout, "allow_nonfinite": True}
    report = convert(tmp_path / "in", tmp_path / "out", **options)
    loaded = load(tmp_path / "out")
    for tensor in report.tensors:
        assert_as_quantize(arrays[tensor.name], fmt, loaded[tensor.name], tensor)


def blocks_of(shape, lengths):
    """For each element the index of its block."""
    index = np.zeros(shape, int)
    for axis, length in enumerate(lengths):
        at = (np.arange(shape[axis]) // length).reshape(-1, *[1] * (len(shape) - axis - 1))
        index = index * -(-shape[axis] // length) + at
    return index.reshape(-1)


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.exhaustive)])
def test_no_slab_tears_blocks_of_any_shape(monkeypatch, count):
    """Slabs hold all elements in order; their blocks are whole, or all in one row of blocks."""
    rng, grids = np.random.default_rng(count), 0
    for _ in range(count):
        shape = tuple(rng.choice([1, 2, 3, 8, 17, 40, 64, 300, 1500], rng.integers(1, 5)).tolist())
        block = tuple(int(min(n, rng.choice([1, 2, 3, 7, 24, n // 2 + 1, n]))) for n in shape)
        cut_to_slabs(monkeypatch, int(rng.choice([2**6, 2**8, 2**10, 2**12])))
        if math.prod(shape) > 20000:
            continue
        try:
            grid = Grid.of(shape, block)
        except ValueError:
            continue
        grids += 1
        blocks, end = blocks_of(shape, block), 0
        sizes = np.bincount(blocks)
        for slab in grid.slabs():
            assert grid.start(slab) == end, (shape, block)
            inside, end = blocks[end:][: slab.size], end + slab.size
            down, across = grid.blocks(slab)
            rows, columns = np.ogrid[down, across]
            assert set(inside) == set((rows * grid.across + columns).flat), (shape, block)
            is_whole = np.array_equal(
                np.bincount(inside, minlength=sizes.size)[inside], sizes[inside]
            )
            assert is_whole or down.stop - down.start == 1, (shape, block)
        assert end == math.prod(shape)
    assert grids > count / 4


@pytest.mark.parametrize("shape", [(1, 2**19), (5, 2**17), (600, 2752), (256, 4096), (1, 3)])
@pytest.mark.parametrize("lengths", [(1, None), (None, 1), (None, None), (1, 32)])
def test_padding_is_not_most_of_what_is_computed(shape, lengths):
    grid = Grid.of(
        shape, [n if length is None else length for n, length in zip(shape, lengths, strict=True)]
    )
    computed = sum(math.prod(grid.program_shape(slab)) for slab in grid.slabs())
    assert math.prod(shape) <= computed <= max(4 * math.prod(shape), 2**10)


@pytest.mark.parametrize("count", [50, 500])
def test_only_what_is_not_finite_counts_so(tmp_path, count):
    """A NaN makes its row's scale NaN, so that the other row says by what sums are multiplied."""
    x = np.array([[np.nan, 1e20] * count, [1e-20, 2e-20] * count], np.float32)
    _, report = converted(tmp_path, x, BlockFormat.channel("int8", 0), layout="plain")
    assert report.nonfinite == count


def test_threads_are_started_once_for_all_tensors(monkeypatch, tmp_path):
    """Each leaves a heap behind: with threads for every matrix a stack of 64 took 440 MiB."""
    cut_to_slabs(monkeypatch, 2**12)
    stack = np.random.default_rng(0).normal(size=(24, 64, 256)).astype(np.float32)
    save(tmp_path / "src", {"experts.down_proj": stack})
    started, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: started.append(start(self)))
    convert(tmp_path / "src", tmp_path / "dst", scaling="channel", channel_axis="last", workers=2)
    assert 2 <= len(started) <= 4


def test_a_conversion_does_not_depend_on_the_number_of_threads(tmp_path):
    shapes = {"a.weight": (16, 16), "b.weight": (300, 200), "c.weight": (12, 3, 3), "d": (7,)}
    tensors = {
        f"{i}.{name}": np.random.default_rng(i).normal(size=shape).astype(dtype)
        for i, dtype in enumerate((np.float32, ml_dtypes.bfloat16, np.float16) * 4)
        for name, shape in shapes.items()
    }
    save(tmp_path / "src", tensors)
    rules = Rules([(r"a\.weight", "int8"), (r"c\.weight", "bfloat16"), ("d", None)], default="e5m2")
    options = {"format": rules, "scaling": "channel", "channel_axis": "first", "overwrite": True}
    made = []
    for workers in (1, 3, 2):
        convert(tmp_path / "src", tmp_path / "dst", workers=workers, **options)
        made.append((tmp_path / "dst").read_bytes())
    assert made[0] == made[1] == made[2]
    found = stored(tmp_path / "dst")
    whole = qt.quantize(tensors["4.a.weight"], BlockFormat.channel("int8", 0))
    np.testing.assert_array_equal(found["4.a.weight"].view(np.uint8), whole.codes)
    np.testing.assert_array_equal(found["4.a.weight_scale"], whole.scale)


@pytest.mark.parametrize("shape", [(24, 64), (600, 512)])  # with others, and alone
@pytest.mark.parametrize("scaling", ["tensor", "channel"])
def test_what_a_report_says_is_what_metrics_says(shape, scaling, tmp_path):
    """Oracle: `qt.metrics` of the tensor with the same blocks."""
    x = np.random.default_rng(0).standard_cauchy(size=shape).astype(np.float32)
    x[0, 0] = 1e-9  # is flushed
    save(tmp_path / "in.safetensors", {"layer.weight": x})
    paths = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    (tensor,) = (t for t in convert(*paths, scaling=scaling).tensors if t.sqnr_db is not None)
    is_channel = scaling == "channel"
    fmt = BlockFormat.channel("e4m3fn", axis=0) if is_channel else BlockFormat.tensor("e4m3fn")
    expected = qt.metrics(x, fmt)
    np.testing.assert_allclose(tensor.sqnr_db, float(expected.sqnr_db), atol=1e-3)
    assert tensor.max_scale == float(np.max(qt.quantize(x, fmt).scale))
    (compared,) = qt.checkpoints.compare(*paths).tensors
    np.testing.assert_allclose(compared.sqnr_db, float(expected.sqnr_db), atol=1e-3)
    assert compared.flushed == pytest.approx(float(expected.flushed), rel=1e-6)
    assert compared.flushed > 0
    assert compared.saturated == float(expected.saturated)
    assert compared.max_error == pytest.approx(float(expected.max_error), rel=1e-6)
    assert compared.nonfinite == int(expected.nonfinite) == tensor.nonfinite
