"""Weights quantized slab by slab.

Oracles: `qtoolkit.quantize` of the whole, `qtoolkit.metrics`, ml_dtypes.
"""

import itertools
import threading

import ml_dtypes
import numpy as np
import pytest
from stored import stored

import qtoolkit as qt
from qtoolkit.checkpoints import _quantize, _slabs, convert, save
from qtoolkit.checkpoints._checkpoint import Tensor
from qtoolkit.checkpoints._produce import Workers
from qtoolkit.checkpoints._quantize import (
    Weight,
    largest_magnitudes,
    quantize_slabs,
    tensor_scales_from,
    with_block_scales,
)
from qtoolkit.checkpoints._reader import slab_values
from qtoolkit.checkpoints._slabs import Grid
from qtoolkit.checkpoints._tensors import DTYPE_OF
from qtoolkit.formats import BlockFormat, Rules, spec
from qtoolkit.scaling.internal import WeightErrors

MXFP4, NVFP4 = spec("mxfp4"), spec("nvfp4")
UNITS = 2.0 ** (64 * np.arange(10) - 384)  # of the slots of `ErrorSums.moments`


def tensor_of(x):
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)

    def read_into(start, buffer):
        buffer[:] = raw[start : start + len(buffer)].data

    return Tensor("x", DTYPE_OF[x.dtype.name], x.shape, read_into)


def weight_of(x, fmt, second_amax=None):
    tensor = tensor_of(x)
    if fmt.scale is None:
        return Weight(tensor, fmt, Grid.whole(x.size))
    second = None
    if fmt.tensor_scale is not None:
        amax = largest_magnitudes(tensor) if second_amax is None else np.array([second_amax])
        second = np.asarray(tensor_scales_from(amax, fmt))
    return with_block_scales(
        Weight(tensor, fmt, Grid.of(x.shape, fmt.block_lengths(x.shape)), second)
    )


def quantized(x, fmt, workers=1, **options):
    """Codes, scales, tensor scale and errors, put together from the slabs."""
    weight = weight_of(x, fmt, **options)
    with Workers(workers) as threads:
        slabs = [
            *threads.map(lambda slab: quantize_slabs([(weight, slab)])[0], weight.grid.slabs())
        ]
    codes = np.concatenate([slab.codes.reshape(-1) for slab in slabs]).reshape(x.shape)
    errors, scales = WeightErrors(), None
    if weight.spec.scale is not None:
        scales = np.concatenate([slab.scale for slab in slabs])
    for slab in slabs:
        errors += slab.errors
    return codes, scales, weight.tensor_scale, errors


def bits(array):
    array = np.asarray(array)
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def assert_as_quantize(x, fmt, codes, scale, second, errors):
    is_cast = fmt.scale is None and fmt.element.bits == 16  # which keeps infinities
    whole = qt.quantize(x, fmt, saturation="propagate" if is_cast else "finite")
    np.testing.assert_array_equal(bits(codes), bits(whole.codes))
    if whole.scale is None:
        assert scale is None
    else:
        assert scale.dtype == whole.scale.dtype
        both = (np.asarray(s, np.float32).reshape(-1) for s in (scale, whole.scale))
        np.testing.assert_array_equal(*both)  # NaN is equal to NaN, of whatever pattern
    if whole.tensor_scale is not None:
        np.testing.assert_array_equal(bits(second), bits(whole.tensor_scale))
    over = np.abs(x.astype(np.float64)) > float(fmt.element.max_finite)
    assert errors.overflowed == (np.count_nonzero(over & np.isfinite(x)) if is_cast else 0)
    scales = np.asarray(0 if whole.scale is None else whole.scale, np.float32)
    largest = np.fmax.reduce(scales, axis=None, initial=0)
    factor = 1 if whole.tensor_scale is None else np.float32(whole.tensor_scale)
    assert errors.max_scale == largest * factor * np.float32(2) ** fmt.element_exponent
    y, wide = np.asarray(whole.dequantize("float32"), np.float64), x.astype(np.float64)
    known = np.isfinite(wide) & np.isfinite(y)
    assert errors.nonfinite == np.count_nonzero(~np.isfinite(wide))
    signal, noise = (wide[known] ** 2).sum(), ((wide[known] - y[known]) ** 2).sum()
    decibels = 10 * np.log10(signal / noise) if signal and noise else np.inf if signal else None
    # A tile is summed in float32: 2**20 squares of like size have been 1.2e-5 off.
    assert errors.moments[0] @ UNITS == pytest.approx(signal, rel=1e-4)
    assert errors.known_sqnr_db == pytest.approx(decibels, abs=2e-3)


def weights(shape, dtype=np.float32, seed=0):
    """Rows of magnitudes from 1e-3 to 1e3, with a NaN, an Inf and a block of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, shape[:1] + (1,) * (len(shape) - 1))
    x.flat[5 : x.size : 10**6], x.flat[900 : x.size : 10**6] = np.nan, -np.inf
    x.flat[300:600] = 0
    return x.astype(dtype)


CASES = {
    "a scale for the tensor": (BlockFormat.tensor("e4m3fn"), (33, 100)),
    "for each output": (BlockFormat.channel("int8", 0), (33, 100)),
    "for each input": (BlockFormat.channel("e4m3fn", -1), (40, 70)),
    "for each output of experts": (BlockFormat(element="e5m2", block=(None,)), (3, 20, 50)),
    "for each input of experts": (BlockFormat(element="e5m2", block=(None, 1)), (3, 20, 50)),
    "for each expert": (BlockFormat(element="e4m3fn", block=(None, None)), (3, 20, 50)),
    "of a convolution": (BlockFormat.channel("e4m3fn", 0), (30, 5, 3, 3)),
    "groups": (MXFP4, (9, 128)),
    "groups with a tail": (MXFP4, (9, 130)),
    "groups along the rows": (MXFP4.along(-2), (100, 18)),
    "groups with a tensor scale": (NVFP4, (3, 10, 48)),
    "groups of 128": (spec("int4_group128"), (10, 200)),
    "blocks": (spec("deepseek_128x128"), (140, 257)),
    "blocks of experts": (BlockFormat(element="e4m3fn", block=(16, 16)), (3, 24, 40)),
    "no scale": (BlockFormat.tensor("bfloat16", scale=None), (33, 100)),
}


@pytest.mark.sample(
    *("a scale for the tensor-float32-1024", "for each output-bfloat16-1024"),
    *("for each input of experts-float16-1024", "of a convolution-float32-1024"),
    *("groups with a tail-bfloat16-1024", "groups with a tensor scale-float16-1024"),
    *("groups of 128-float16-1024", "blocks of experts-float32-1024"),
)
@pytest.mark.parametrize("chunk", [2**10, pytest.param(2**20, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("fmt", "shape"), CASES.values(), ids=CASES)
def test_the_bits_are_those_of_quantize(monkeypatch, fmt, shape, dtype, chunk):
    monkeypatch.setattr(_slabs, "SLAB", chunk)
    x = weights(shape, dtype)
    assert_as_quantize(x, fmt, *quantized(x, fmt, workers=2))


@pytest.mark.parametrize("name", ["a scale for the tensor", "for each input", "blocks", "no scale"])
def test_weights_that_are_alike_share_a_call(name):
    fmt, shape = CASES[name]
    arrays = [
        weights(shape, ml_dtypes.bfloat16, seed) * ml_dtypes.bfloat16(2.0**-power)
        for seed, power in enumerate((0, 10, 120))  # the last one has subnormal values
    ]
    made = [weight_of(x, fmt) for x in arrays]
    (slab,) = made[0].grid.slabs()
    for x, weight, each in zip(
        arrays, made, quantize_slabs([(w, slab) for w in made]), strict=True
    ):
        codes = each.codes.reshape(x.shape)
        assert_as_quantize(x, fmt, codes, each.scale, weight.tensor_scale, each.errors)


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_no_slab_tears_blocks_of_any_shape(monkeypatch, count):
    rng = np.random.default_rng(count)
    for _ in range(count):
        shape = tuple(rng.choice([1, 2, 3, 8, 17, 40, 64, 300, 1500], rng.integers(1, 5)).tolist())
        block = tuple(min(n, rng.choice([1, 2, 3, 7, 24, n // 2 + 1, n])) for n in shape)
        if not 1000 < np.prod(shape) < 20000:
            continue
        monkeypatch.setattr(_slabs, "SLAB", int(rng.choice([2**6, 2**8, 2**10, 2**12])))
        block = tuple(map(int, block[rng.integers(len(shape)) :]))
        fmt = BlockFormat(element="e4m3fn", block=block, other_axes=rng.choice([1, None]))
        try:
            Grid.of(shape, fmt.block_lengths(shape))
        except ValueError:
            continue
        x = weights(shape)
        assert_as_quantize(x, fmt, *quantized(x, fmt))


@pytest.mark.parametrize("chunk", [2**6, 2**12])
@pytest.mark.parametrize(("fmt", "shape"), [*CASES.values()][:-1], ids=[*CASES][:-1])
def test_any_range_is_decoded_to_what_dequantize_gives(monkeypatch, fmt, shape, chunk):
    monkeypatch.setattr(_slabs, "SLAB", chunk)
    whole = qt.quantize(np.nan_to_num(weights(shape), posinf=9, neginf=9), fmt)
    grid = Grid.of(shape, whole.lengths)
    codes, scale = np.asarray(whole.codes).reshape(-1), np.asarray(whole.scale).reshape(-1)
    second = None if whole.tensor_scale is None else np.asarray(whole.tensor_scale).reshape(1)
    expected = np.asarray(whole.dequantize("float32")).reshape(-1)
    for start, stop in (
        (0, 1),
        (33, 100),
        (255, 257),
        (0, codes.size),
        (codes.size - 5, codes.size),
    ):
        parts = []
        for slab, some in grid.slabs_between(start, stop):
            first = grid.start(slab)
            part = codes[first : first + slab.size].reshape(slab.rows, slab.columns)
            values = slab_values(part, grid, slab, fmt, scale, second)
            parts.append(values.reshape(-1)[some])
        np.testing.assert_array_equal(np.concatenate(parts), expected[start:stop])


@pytest.mark.parametrize("shape", [(1, 2**19), (5, 2**17), (600, 2752), (256, 4096), (1, 3)])
def test_padding_is_not_most_of_what_is_computed(monkeypatch, shape):
    sizes, encoded = [], _quantize._encoded
    monkeypatch.setattr(_quantize, "_encoded", lambda *a: sizes.append(a[0].size) or encoded(*a))
    x, fmt = weights(shape, ml_dtypes.bfloat16), BlockFormat.channel("e4m3fn", -1)
    assert_as_quantize(x, fmt, *quantized(x, fmt))
    assert sum(sizes) <= max(4 * x.size, 2**10)
    assert len(sizes) <= 1 + x.size // 2**18


@pytest.mark.parametrize("count", [50, 500])
def test_only_what_is_not_finite_counts_so(count):
    """A NaN makes its row's scale NaN, so that the other row says by what sums are multiplied."""
    x = np.array([[np.nan, 1e20] * count, [1e-20, 2e-20] * count], np.float32)
    assert quantized(x, BlockFormat.channel("int8", 0))[-1].nonfinite == count


def test_threads_give_results_in_order_and_their_errors():
    def fail(i):
        if i == 7:
            raise OSError("disk")
        return i

    with Workers(3) as workers:
        assert list(workers.map(lambda i: i * i, range(100))) == [i * i for i in range(100)]
        results = workers.map(fail, range(100))
        assert list(itertools.islice(results, 7)) == list(range(7))
        with pytest.raises(OSError, match="disk"):
            next(results)
        assert list(workers.map(str, range(3))) == ["0", "1", "2"]  # they go on


def test_threads_are_started_once_for_all_tensors(monkeypatch, tmp_path):
    """Each leaves a heap behind: with threads for every matrix a stack of 64 took 440 MiB."""
    monkeypatch.setattr(_slabs, "SLAB", 2**12)
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
