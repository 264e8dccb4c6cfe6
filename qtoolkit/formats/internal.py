"""What other packages of qtoolkit need of formats, and users do not."""

from qtoolkit.formats._float import unsigned_dtype

__all__ = ["unsigned_dtype"]
