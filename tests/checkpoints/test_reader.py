"""Stored weights as they are read. Oracle: the formulas in test_foreign_layouts.py."""

import dataclasses

import numpy as np
import pytest
from test_foreign_layouts import CASES, folder

from qtoolkit.checkpoints._reader import WeightReader
from qtoolkit.checkpoints.internal import decode_weights, open_source


@pytest.mark.parametrize("case", ["gpt_oss", "modelopt_fused_llama4"])
def test_experts_in_one_tensor_are_read_one_by_one(tmp_path, case):
    config, entries, expected = CASES[case]()
    ((name, values),) = expected.items()
    sizes = []

    def recorded(tensor):
        def read_into(start, buffer):
            sizes.append(len(buffer))
            tensor.read_into(start, buffer)

        return dataclasses.replace(tensor, read_into=read_into)

    with open_source(folder(tmp_path / "source", config, entries)) as source:
        encoding = decode_weights(source).encodings[name]
        weight = WeightReader(
            encoding, {n: recorded(tensor) for n, tensor in source.tensors.items()}
        )
        found = np.empty(values.shape, np.float32)
        bytes_ = found.reshape(-1).view(np.uint8).data
        for start in range(0, found.nbytes, 4096):
            weight.read_into(start, bytes_[start : start + 4096])
    np.testing.assert_array_equal(found, values)
    assert max(sizes) == values.size // 2 // len(values)
    assert sum(sizes) < values.size  # each byte once
