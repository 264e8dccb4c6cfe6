"""PyPTO's rounding modes and saturation modes."""

import enum


class CastMode(enum.Enum):
    """How `cast` rounds. The numbers are PyPTO's; Ascend C has others for three of the modes."""

    CAST_NONE = 0  # the default of the pair: float to integer CAST_TRUNC, all others CAST_RINT
    CAST_RINT = 1  # to nearest, ties to even
    CAST_ROUND = 2  # to nearest, ties away from zero
    CAST_FLOOR = 3  # toward -inf
    CAST_CEIL = 4  # toward +inf
    CAST_TRUNC = 5  # toward zero
    CAST_ODD = 6  # Von Neumann: what is inexact gets an odd last bit


class SaturationMode(enum.Enum):
    """What `cast` does beyond the range of an integer type. ON is 0 in PyPTO."""

    ON = 0  # clamps
    OFF = 1  # keeps the low bits
