"""What an `Encoding` can describe becomes the numbers that it stands for.

Oracles: the formula of each kind of storage, in NumPy, one code at a time.
"""

import numpy as np
import pytest

from qtoolkit.checkpoints._tensors import Entry
from qtoolkit.checkpoints._values import qarray_of, values_of
from qtoolkit.checkpoints.layouts import Encoding, Packing
from qtoolkit.checkpoints.layouts._encoding import NIBBLES, WORDS, packed, unpacked
from qtoolkit.formats import BlockFormat

rng = np.random.default_rng(0)
DTYPES = {"int32": "I32", "uint8": "U8", "float16": "F16", "float32": "F32", "int64": "I64"}


def stored(**arrays):
    """Entries by field, and what reads them."""
    entries = {n: Entry(n, DTYPES[a.dtype.name], a.shape) for n, a in arrays.items()}

    def read(entry):
        return np.ascontiguousarray(arrays[entry.name]).reshape(-1).view(np.uint8)

    return entries, read


def in_words(codes, bits, order=None):
    """int32 words of a row of codes, low bits first."""
    count = 32 // bits
    order = order or range(count)
    words = np.zeros(len(codes) // count, np.uint32)
    for i, code in enumerate(codes):
        words[i // count] |= np.uint32(code) << np.uint32(bits * order[i % count])
    return words.view(np.int32)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_words_of_codes_of_any_width(bits, biased):
    count = 32 // bits
    codes = rng.integers(0, 2**bits, (3, 5 * count)).astype(np.uint8)
    offset = 1 << (bits - 1) if biased else 0
    words = np.stack([in_words(row ^ offset, bits) for row in codes])
    packing = Packing(32, biased=biased)
    np.testing.assert_array_equal(unpacked(words.view(np.uint8), packing, bits, 5 * count), codes)
    np.testing.assert_array_equal(packed(codes, packing, bits).view(np.int32), words)
    ragged = packed(codes[:, :-1], packing, bits)
    np.testing.assert_array_equal(unpacked(ragged, packing, bits, 5 * count - 1), codes[:, :-1])


def test_two_and_four_codes_to_bytes():
    codes = rng.integers(0, 16, (3, 8)).astype(np.uint8)
    both = packed(codes, NIBBLES, 4)
    np.testing.assert_array_equal(both, codes[:, ::2] | codes[:, 1::2] << 4)
    assert both.shape == (3, 4)
    assert packed(codes, WORDS, 4).shape == (3, 4)


AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of its word, for columns 0, 1, 2 ...


@pytest.mark.parametrize("group", [8, 16])
def test_transposed_words_in_another_order_with_zero_points(group):
    """AWQ: qweight [K, N / 8], qzeros [K / group, N / 8], scales [K / group, N]."""
    k, n = 32, 24
    codes = rng.integers(0, 16, (k, n)).astype(np.uint8)
    zeros = rng.integers(0, 16, (k // group, n)).astype(np.uint8)
    scales = rng.random((k // group, n)).astype(np.float16)
    entries, read = stored(
        codes=np.stack([in_words(row, 4, AWQ) for row in codes]),
        scale=scales,
        zero_point=np.stack([in_words(row, 4, AWQ) for row in zeros]),
    )
    encoding = Encoding(
        name="w",
        shape=(n, k),
        spec=BlockFormat(element="uint4", block=(group, 1), scale="float16", zero_point=True),
        lengths=(group, 1),
        packing=Packing(32, AWQ),
        zero_packing=Packing(32, AWQ),
        transposed=True,
        **entries,
    )
    expected = np.empty((n, k), np.float32)
    for i in range(k):
        for j in range(n):
            difference = np.float32(codes[i, j]) - np.float32(zeros[i // group, j])
            expected[j, i] = difference * np.float32(scales[i // group, j])
    np.testing.assert_array_equal(values_of(encoding, read), expected)
    np.testing.assert_array_equal(qarray_of(encoding, read).dequantize(), expected)


@pytest.mark.parametrize("ordered", [True, False])
def test_words_along_the_rows_whose_groups_an_index_names(ordered):
    """GPTQ: qweight [K / 8, N], qzeros [K / group, N / 8] less 1, g_idx [K]."""
    k, n, group = 32, 16, 8
    codes = rng.integers(0, 16, (k, n)).astype(np.uint8)
    zeros = rng.integers(0, 16, (k // group, n)).astype(np.uint8)
    scales = rng.random((k // group, n)).astype(np.float16)
    index = np.arange(k, dtype=np.int32) // group
    index = index if ordered else rng.permutation(index)
    entries, read = stored(
        codes=np.stack([in_words(column, 4) for column in codes.T]).T.copy(),
        scale=scales,
        zero_point=np.stack([in_words(row, 4) for row in zeros]),
        group_index=index,
    )
    encoding = Encoding(
        name="w",
        shape=(n, k),
        spec=BlockFormat(element="uint4", block=(group, 1), scale="float16", zero_point=True),
        lengths=(group, 1),
        packing=Packing(32, axis=-2),
        zero_packing=Packing(32),
        zero_offset=1,
        transposed=True,
        **entries,
    )
    expected = np.empty((n, k), np.float32)
    for i in range(k):
        for j in range(n):
            difference = np.float32(codes[i, j]) - np.float32((zeros[index[i], j] + 1) % 16)
            expected[j, i] = difference * np.float32(scales[index[i], j])
    np.testing.assert_array_equal(values_of(encoding, read), expected)


def test_tiles_with_ragged_edges_of_experts():
    codes = rng.integers(0, 16, (2, 5, 24)).astype(np.uint8)
    scales = rng.random((2, 3, 2)).astype(np.float32)
    entries, read = stored(
        codes=codes[..., ::2] | codes[..., 1::2] << 4, scale=scales.astype(np.float32)
    )
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    encoding = Encoding(
        name="w",
        shape=(2, 5, 24),
        spec=BlockFormat(element="e2m1fn", block=(2, 16)),
        lengths=(1, 2, 16),
        packing=NIBBLES,
        **entries,
    )
    expected = np.empty((2, 5, 24), np.float32)
    for place in np.ndindex(expected.shape):
        e, i, j = place
        expected[place] = table[codes[place]] * scales[e, i // 2, j // 16]
    np.testing.assert_array_equal(values_of(encoding, read), expected)
