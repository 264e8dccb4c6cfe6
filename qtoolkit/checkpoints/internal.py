"""What the packages above `checkpoints` use of it beside its public names. No JAX here."""

from qtoolkit.checkpoints._header import shown
from qtoolkit.checkpoints._safetensors import check_target

__all__ = ["check_target", "shown"]
