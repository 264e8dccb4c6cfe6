"""The arrays of a checkpoint as its files hold them: codes and scales, not quantized arrays."""

from typing import Any

import numpy as np

from qtoolkit.checkpoints.internal import open_source


def stored(path: Any) -> dict[str, np.ndarray]:
    with open_source(path) as opened:
        return {name: opened.read(name) for name in opened.tensors}
