"""Stacks of matrices that are read transposed."""

import ml_dtypes
import numpy as np

from qtoolkit.checkpoints._checkpoint import Tensor, Transposer


def test_stacks_are_turned_matrix_by_matrix():
    """Oracle: NumPy's transpose of the whole; two stacks take turns in one buffer."""
    transposer, sizes, stacks = Transposer(), [], []
    for seed, shape in ((0, (3, 50, 70)), (1, (2, 70, 30))):
        x = np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)
        raw = x.reshape(-1).view(np.uint8)

        def read_into(start, buffer, raw=raw):
            sizes.append(len(buffer))
            buffer[:] = raw[start : start + len(buffer)].data

        turned = transposer.transposed(Tensor("x", "BF16", shape, read_into))
        assert turned.shape == (shape[0], shape[2], shape[1])
        stacks.append((turned, x.swapaxes(1, 2).reshape(-1)))
    for start, stop in ((0, 1), (3000, 4199), (3490, 3510), (100, 4000)):
        for turned, expected in stacks:
            np.testing.assert_array_equal(turned.read(start, stop), expected[start:stop])
    assert max(sizes) == 2 * 50 * 70
