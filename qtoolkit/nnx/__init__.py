"""FP8-aware training of Flax nnx models, without editing them."""

from qtoolkit.nnx._wrap import wrap

__all__ = ["wrap"]
