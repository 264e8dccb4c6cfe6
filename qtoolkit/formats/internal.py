"""What other packages of qtoolkit need of formats, and users do not."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.formats._block import POWER_RULES, RULES
from qtoolkit.formats._element import binade, hashed_once, plain_number, unsigned_dtype
from qtoolkit.formats._json import add_json_kinds, from_data, to_data
from qtoolkit.formats._packing import packed_words
from qtoolkit.formats._rules import values_of_rules
from qtoolkit.formats._spec import scaled_by
