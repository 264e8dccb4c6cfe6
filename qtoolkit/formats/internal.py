"""What other packages of qtoolkit need of formats, and users do not."""

from qtoolkit.formats._block import POWER_RULES
from qtoolkit.formats._float import binade, plain_number, unsigned_dtype
from qtoolkit.formats._granularity import scaled_by
from qtoolkit.formats._hashing import hashed_once

__all__ = [
    "POWER_RULES",
    "binade",
    "hashed_once",
    "plain_number",
    "scaled_by",
    "unsigned_dtype",
]
