"""What other packages of qtoolkit need of formats, and users do not."""

from qtoolkit.formats._float import unsigned_dtype
from qtoolkit.formats._granularity import scaled_by

__all__ = ["scaled_by", "unsigned_dtype"]
