"""What other packages of qtoolkit need of formats, and users do not."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.formats._block import POWER_RULES, RULES
from qtoolkit.formats._float import binade, plain_number, unsigned_dtype
from qtoolkit.formats._hashing import hashed_once
from qtoolkit.formats._spec import scaled_by
