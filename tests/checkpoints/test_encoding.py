"""Codes of any number of bits in words."""

import numpy as np
import pytest
from test_foreign_layouts import rng, stream, whole_words

from qtoolkit.checkpoints.layouts._encoding import Packing, dense, pack_rows, unpack_rows


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("make", [stream, whole_words])
def test_words_of_codes_are_written_as_they_are_read(bits, make):
    """Oracle: the words above, bit by bit."""
    codes = rng().integers(0, 2**bits, (3, 160), np.uint8)
    packing = dense(bits) if make is stream else Packing(32)
    data = make(codes, bits).view(np.uint8)
    np.testing.assert_array_equal(pack_rows(codes, packing, bits)[:, : data.shape[1]], data)
    np.testing.assert_array_equal(unpack_rows(data, packing, bits, 160), codes)
