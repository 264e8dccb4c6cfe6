"""FP8-aware training of Flax nnx models, without editing them."""

from qtoolkit.nnx._serialization import register
from qtoolkit.nnx._wrap import wrap

register()

__all__ = ["wrap"]
