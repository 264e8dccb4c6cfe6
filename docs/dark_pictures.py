"""Pictures for dark mode: the same ink on a transparent ground, with its lightness reversed."""

import io

import matplotlib.pyplot as plt
import numpy as np


def dark(png: bytes) -> bytes:
    """A PNG on a white ground as one on a transparent ground, for dark pages.

    White becomes transparent, all else as opaque as it has to be to look the same over white. Then
    dark colours become light ones of the same hue: black text white, dark blue lines light blue.
    """
    rgb = plt.imread(io.BytesIO(png), format="png")[..., :3]
    alpha = 1 - rgb.min(axis=-1, keepdims=True)
    ink = (rgb - (1 - alpha)) / np.where(alpha > 0, alpha, 1)
    ink += 1 - ink.max(axis=-1, keepdims=True)  # the least is 0: lightness 1 - L in HSL
    out = io.BytesIO()
    plt.imsave(out, np.concatenate([ink, alpha], axis=-1).clip(0, 1), metadata={"Software": None})
    return out.getvalue()
