"""Formats for trained models: GPTQ, AWQ, SmoothQuant, rotations, and a format for each layer.

`qtoolkit.nnx` and `qtoolkit.linen` have the functions, `quantize` and `allocate`.
"""

from qtoolkit.post_training._allocation import Allocation
from qtoolkit.post_training._methods import InputStatistics

__all__ = ["Allocation", "InputStatistics"]
