"""PyPTO's cast on Ascend, its modes and its data types."""

from qtoolkit._names import hint_at_names
from qtoolkit.pypto._cast import NAMES as _NAMES
from qtoolkit.pypto._cast import CastMode, SaturationMode, cast
from qtoolkit.pypto._types import *  # noqa: F403  the DT_ names, which that file lists

__all__ = ["CastMode", "SaturationMode", "cast", *_NAMES.values()]

hint_at_names(__name__)
