"""The pictures are PNGs with something in them, and leave pyplot's state alone."""

import sys

import matplotlib.image
import numpy as np

from qtoolkit.plots import loss_curves, weight_errors


def test_loss_curves(tmp_path):
    path = tmp_path / "loss.png"
    loss_curves(path, [1, 2, 3], {"float32": [3.0, 2.0, 1.5], "FP8": [3.1, 2.1, 1.6]})
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 400
    assert np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0).shape[0] > 10
    assert "matplotlib.pyplot" not in sys.modules


def test_weight_errors_grow_with_the_number_of_tensors(tmp_path):
    heights = []
    for count in (2, 20):
        path = tmp_path / f"{count}.png"
        weight_errors(path, {f"layer.{i}.kernel": 20.0 + i for i in range(count)}, "title")
        heights.append(matplotlib.image.imread(path).shape[0])
    assert heights[1] > 2 * heights[0]
