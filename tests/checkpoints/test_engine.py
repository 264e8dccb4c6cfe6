"""Tensors quantized in pieces. Oracles: `qtoolkit.quantize` of the whole, and ml_dtypes."""

import itertools
import time

import ml_dtypes
import numpy as np
import pytest
from qtoolkit.checkpoints._chunks import Cut
from qtoolkit.checkpoints._engine import Sums, amax_of, quantized
from qtoolkit.checkpoints._programs import exceeds
from qtoolkit.checkpoints._workers import Workers

import qtoolkit as qt
from qtoolkit.checkpoints import _engine, _programs, _tiles
from qtoolkit.checkpoints._report import decibels
from qtoolkit.formats import BlockFormat

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def reader(x):
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)

    def read(start, buffer):
        buffer[:] = raw[start : start + len(buffer)].data

    return read


def in_pieces(x, spec, workers=1, **options):
    """Codes, scales, tensor scale and sums, put together from the pieces."""
    sums = Sums()
    with Workers(workers) as threads:
        tensor_scale, pieces = quantized(
            reader(x), x.shape, DTYPES[x.dtype.name], spec, sums=sums, workers=threads, **options
        )
        return *put_together(x, spec, pieces), tensor_scale, sums


def put_together(x, spec, pieces):
    columns = x.shape[-1] if x.ndim else 1
    codes = np.full((x.size // columns, columns), 77, spec.element.code_dtype)
    parts = []
    for piece in pieces:
        codes[piece.rows, piece.columns] = piece.codes
        parts += [] if piece.scale is None else [piece.scale.reshape(-1)]
    return codes.reshape(x.shape), np.concatenate(parts) if parts else None


def bits(array):
    array = np.asarray(array)
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def assert_as_quantize(x, spec, **options):
    assert_equal_quantize(x, spec, *in_pieces(x, spec, **options))


def assert_equal_quantize(x, spec, codes, scale, tensor_scale, sums):
    is_cast = spec.scale is None and spec.element.bits == 16  # which keeps infinities
    whole = qt.quantize(x, spec, saturation="propagate" if is_cast else "finite")
    np.testing.assert_array_equal(bits(codes), bits(whole.codes))
    if whole.scale is None:
        assert scale is None
    else:
        assert scale.dtype == whole.scale.dtype
        both = (np.asarray(s, np.float32).reshape(-1) for s in (scale, whole.scale))
        np.testing.assert_array_equal(*both)  # NaN is equal to NaN, of whatever pattern
    if whole.tensor_scale is not None:
        np.testing.assert_array_equal(bits(tensor_scale), bits(whole.tensor_scale))
    over = np.abs(x.astype(np.float64)) > float(spec.element.max_finite)
    assert sums.overflowed == (np.count_nonzero(over & np.isfinite(x)) if is_cast else 0)
    scales = np.asarray(0 if whole.scale is None else whole.scale, np.float32)
    largest = np.fmax.reduce(scales, axis=None, initial=0)
    second = 1 if whole.tensor_scale is None else np.float32(whole.tensor_scale)
    assert sums.max_scale == largest * second * np.float32(2) ** spec.element_exponent
    y, wide = np.asarray(whole.dequantize("float32"), np.float64), x.astype(np.float64)
    known = np.isfinite(wide) & np.isfinite(y)
    assert sums.nonfinite == np.count_nonzero(~np.isfinite(wide))
    signal, noise = (wide[known] ** 2).sum(), ((wide[known] - y[known]) ** 2).sum()
    # A tile is summed in float32: 2**20 squares of like size have been 1.2e-5 off.
    assert sums.signal == pytest.approx(signal, rel=1e-4)
    assert sums.sqnr_db == pytest.approx(decibels(signal, noise), abs=2e-3)


def weights(shape, dtype=np.float32):
    """Rows of magnitudes from 1e-3 to 1e3, with a NaN, an Inf and a block of zeros."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, (shape[0],) + (1,) * (len(shape) - 1))
    x.flat[5], x.flat[900] = np.nan, -np.inf
    x.flat[300:600] = 0
    return x.astype(dtype)


MXFP4, NVFP4 = qt.formats.spec("mxfp4"), qt.formats.spec("nvfp4")
CASES = {
    "a scale for the tensor": (BlockFormat.tensor("e4m3fn"), (33, 100)),
    "for each output": (BlockFormat.channel("int8", 0), (33, 100)),
    "for each input": (BlockFormat.channel("e4m3fn", -1), (40, 70)),
    "for each output of experts": (BlockFormat(element="e5m2", block=(None,)), (3, 20, 50)),
    "for each expert": (BlockFormat(element="e4m3fn", block=(None, None)), (3, 20, 50)),
    "of a convolution": (BlockFormat.channel("e4m3fn", 0), (30, 5, 3, 3)),
    "for the middle axis": (BlockFormat.channel("e4m3fn", 1), (4, 5, 90)),
    "groups": (MXFP4, (9, 128)),
    "groups with a tail": (MXFP4, (9, 130)),
    "groups along the rows": (MXFP4.along(-2), (100, 18)),
    "groups with a second scale": (NVFP4, (3, 10, 48)),
    "groups of 128": (qt.formats.spec("int4_group128"), (10, 200)),
    "tiles": (qt.formats.spec("deepseek_128x128"), (140, 257)),
    "tiles of experts": (BlockFormat(element="e4m3fn", block=(16, 16)), (3, 24, 40)),
    "no scale": (BlockFormat.tensor("bfloat16", scale=None), (33, 100)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("chunk", [2**10, pytest.param(2**20, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("spec", "shape"), CASES.values(), ids=CASES)
def test_the_bits_are_those_of_quantize(monkeypatch, spec, shape, chunk):
    monkeypatch.setattr(_tiles, "CHUNK", chunk)
    assert_as_quantize(weights(shape), spec, workers=2)


@pytest.mark.sample(6)
@pytest.mark.parametrize("chunk", [2**6, 2**8, 2**12])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((50, 512), (30, 512)),  # one axis of 25600 in blocks of 15360, which chunks are less than
        ((50, 512), (3, 512)),
        ((7, 6000), (4, 5000)),
        ((7, 6000), (4, 24)),  # 4096 is no multiple of 24
        ((40, 300), (7, None)),
        ((3, 50, 8), (None, 30, 8)),
        ((17, 30, 100), (3, 7, 100)),
        ((2, 5, 600), (2, 1, 200)),
        ((2, 5, 600), (2, 5, 1)),
        ((300, 20, 1), (170, 20, 1)),
    ],
)
def test_no_chunk_tears_blocks(monkeypatch, shape, block, chunk):
    monkeypatch.setattr(_tiles, "CHUNK", chunk)
    assert_as_quantize(weights(shape), BlockFormat(element="e4m3fn", block=block), workers=2)


@pytest.mark.parametrize("shape", [(1, 2**19), (5, 2**17), (600, 2752), (256, 4096)])
def test_a_scale_for_each_of_many_columns_by_few_calls(monkeypatch, shape):
    """Tiles of [4, 1024] for few rows took a call for every thousand elements. Those of [64, 1024]
    for kernels of Flax took 3.8 ms for 2**20 elements, and one of [128, 8192] takes 0.9.
    """
    calls, encoded = [], _engine.encoded
    monkeypatch.setattr(_engine, "encoded", lambda *a: calls.append(a[0].size) or encoded(*a))
    x = weights(shape, ml_dtypes.bfloat16)
    assert_as_quantize(x, BlockFormat.channel("e4m3fn", -1), workers=2)
    assert len(calls) <= 2 + x.size // 2**15
    assert sum(calls) < 2 * x.size


def test_scales_come_with_the_pieces_that_their_blocks_start_in(monkeypatch):
    """So that what is held of them all is their amaxes, and no further copy."""
    monkeypatch.setattr(_tiles, "CHUNK", 2**8)
    x = weights((3, 1000))
    spec = BlockFormat.channel("e4m3fn", -1)
    _, pieces = quantized(reader(x), x.shape, "F32", spec, sums=Sums())
    counts = [0 if piece.scale is None else piece.scale.size for piece in pieces]
    assert counts == [256, 256, 256, 232] + [0] * 8


@pytest.mark.exhaustive
def test_no_chunk_tears_blocks_of_any_shape(monkeypatch):
    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(rng.choice([1, 2, 3, 8, 17, 40, 64, 300, 1500], rng.integers(1, 5)).tolist())
        block = tuple(min(n, rng.choice([1, 2, 3, 7, 24, n // 2 + 1, n])) for n in shape)
        if not 1000 < np.prod(shape) < 20000:
            continue
        monkeypatch.setattr(_tiles, "CHUNK", int(rng.choice([2**6, 2**8, 2**10, 2**12])))
        block = tuple(map(int, block[rng.integers(len(shape)) :]))
        spec = BlockFormat(element="e4m3fn", block=block, other_axes=rng.choice([1, None]))
        assert_as_quantize(weights(shape), spec)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_of_16_bit_sources_too(monkeypatch, dtype):
    monkeypatch.setattr(_tiles, "CHUNK", 2**10)
    assert_as_quantize(weights((33, 100), dtype), BlockFormat.channel("e4m3fn", 0))


@pytest.mark.quick
def test_tiles_equal_ml_dtypes():
    x = np.random.default_rng(1).normal(size=(40, 50)).astype(np.float32)
    codes, scale, _, _ = in_pieces(x, BlockFormat(element="e4m3fn", block=(16, 16)))
    for i, j in itertools.product(range(3), range(4)):
        block = x[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
        expected = np.abs(block).max() / np.float32(448)
        assert scale.reshape(3, 4)[i, j] == expected
        wanted = (block / expected).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(
            codes[16 * i : 16 * i + 16, 16 * j : 16 * j + 16], wanted.view(np.uint8)
        )


def test_only_what_is_not_finite_counts_so():
    """A NaN makes its row's scale NaN, so that the other row says by what sums are multiplied."""
    x = np.array([[np.nan, 1e20] * 500, [1e-20, 2e-20] * 500], np.float32)
    *_, sums = in_pieces(x, BlockFormat.channel("int8", 0))
    assert sums.nonfinite == 500


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (40, 100), (300, 200)])
def test_the_largest_finite_magnitude(shape, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    assert amax_of(reader(x), shape, DTYPES[x.dtype.name]) == np.abs(x.astype(np.float32)).max()
    x = np.full(shape, np.nan, dtype)
    x.flat[1:2] = np.inf
    assert amax_of(reader(x), shape, DTYPES[x.dtype.name]) == 0
    x.flat[-1] = -ml_dtypes.finfo(dtype).smallest_subnormal
    found = amax_of(reader(x), shape, DTYPES[x.dtype.name])
    assert found == float(ml_dtypes.finfo(dtype).smallest_subnormal)


def test_a_tensor_scale_for_several_tensors():
    x, y = (np.random.default_rng(i).normal(size=(4, 32)).astype(np.float32) for i in (0, 1))
    amax = max(amax_of(reader(part), part.shape, "F32") for part in (x, 3 * y))
    assert amax == np.abs(3 * y).max()
    codes, scale, tensor_scale, _ = in_pieces(x, NVFP4, tensor_amax=amax)
    both = qt.quantize(np.concatenate([x, 3 * y]), NVFP4)
    np.testing.assert_array_equal(codes, both.codes[:4])
    np.testing.assert_array_equal(bits(scale), bits(both.scale[:4]))
    assert tensor_scale == both.tensor_scale


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_nothing_to_quantize(shape):
    read = reader(np.zeros(shape, np.float32))
    _, pieces = quantized(read, shape, "F32", BlockFormat.channel("e4m3fn", 0), sums=Sums())
    (piece,) = pieces
    assert piece.codes.shape == shape
    np.testing.assert_array_equal(piece.scale, np.ones(shape[0], np.float32))


def test_zero_points_are_refused():
    spec = BlockFormat.tensor("uint8", zero_point=True)
    with pytest.raises(ValueError, match="no checkpoint layout has zero points"):
        quantized(reader(np.zeros(3, np.float32)), (3,), "F32", spec, sums=Sums())


@pytest.mark.quick
@pytest.mark.parametrize("limit", [64, 1000, 2**20])
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((7, 300), (1, 32)),
        ((7, 320), (1, 32)),
        ((40, 70), (16, 16)),
        ((3, 40, 64), (1, 16, 16)),
        ((40, 70), (40, 1)),
        ((4, 5, 6), (4, 1, 6)),
        ((5, 3000), (5, 3000)),
        ((1,), (1,)),
        ((), ()),
    ],
)
def test_chunks_cover_a_tensor_in_full_rows_or_pieces_of_one(shape, lengths, limit):
    cut = Cut(shape, lengths)
    chunks = list(cut.chunks(limit))
    assert [chunk.start for chunk in chunks[1:]] == [chunk.stop for chunk in chunks[:-1]]
    assert (chunks[0].start, chunks[-1].stop) == (0, cut.size)
    row = shape[-1] if shape else 1
    for chunk in chunks:
        assert chunk.rows * chunk.columns == chunk.stop - chunk.start <= max(limit, 1)
        in_one_row = chunk.start // row == (chunk.stop - 1) // row
        assert in_one_row or (chunk.start % row == 0 and chunk.stop % row == 0)


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


def test_threads_do_nothing_for_results_that_nobody_takes():
    """The source is closed then: what still read it would find a closed file."""
    started, finished = [], []

    def slow(i):
        started.append(i)
        time.sleep(0.05)
        finished.append(i)

    with Workers(2) as workers:
        results = workers.map(slow, range(100))
        next(results)
        results.close()
        assert sorted(started) == sorted(finished)
        assert len(started) <= 4


def test_an_error_elsewhere_ends_the_threads():
    """The traceback keeps the results alive, which waited forever for what nobody would run."""

    def convert_to_a_full_disk():
        with Workers(2) as workers:
            results = workers.map(time.sleep, [0.05] * 10)
            next(results)
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        convert_to_a_full_disk()


def test_few_programs_for_any_shapes():
    spec = BlockFormat.channel("e4m3fn", 0)
    before = _programs.encoded._cache_size()
    for rows, columns in itertools.product((1, 9, 63), (129, 200, 333, 1000)):
        in_pieces(np.ones((rows, columns), ml_dtypes.bfloat16), spec)
    assert _programs.encoded._cache_size() - before <= 3


def test_overflow_of_casts_is_counted_in_float32(monkeypatch):
    """A limit that is a `Fraction` is compared with each element in Python: minutes for 2^24."""
    spec = qt.BlockFormat.tensor("float16", scale=None)
    x = np.array([65504, 65520, -1e38, np.inf, np.nan, 1], np.float32)
    monkeypatch.setattr("fractions.Fraction._richcmp", None)
    np.testing.assert_array_equal(exceeds(x, spec), [False, True, True, False, False, False])
