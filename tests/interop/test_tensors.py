"""Tensors of PyTorch as arguments: the line that the message names makes arrays of them.

Oracle: the values in PyTorch, through Python's lists.
"""

import jax
import numpy as np
import pytest
import torch

import qtoolkit as qt

TENSORS = {
    "bfloat16": torch.tensor([0.3, 1000.0]).bfloat16(),
    "with a gradient": torch.tensor([0.3, 1000.0], requires_grad=True),
    "strided": torch.tensor([0.3, 7.0, 1000.0, 7.0])[::2],
}
CALLS = {
    "cast": lambda x: qt.cast(x, "e4m3fn"),
    "fake_quantize": lambda x: qt.fake_quantize(x, "int8"),
    "einsum": lambda x: qt.einsum("i,i->", x, x),
    "onnx.cast": lambda x: qt.onnx.cast(x, "FLOAT8E4M3FN"),
    "pypto.cast": lambda input: qt.pypto.cast(input, qt.pypto.DT_INT32),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("call", CALLS)
def test_the_advised_line_works(call, name):
    tensor = TENSORS[name]
    with pytest.raises(TypeError, match="expected") as error:
        CALLS[call](tensor)
    line = str(error.value).partition("e.g. ")[2]
    array = eval(line, {"jax": jax, "x": tensor, "input": tensor})
    assert isinstance(array, jax.Array)
    np.testing.assert_array_equal(np.float32(array), np.float32(tensor.tolist()))
    CALLS[call](array)
