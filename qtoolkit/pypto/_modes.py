"""PyPTO's rounding modes and saturation modes."""

import enum


class CastMode(enum.Enum):
    """How `cast` rounds. The numbers are PyPTO's; Ascend C has others for three of the modes.

    Examples:
      >>> x = jnp.asarray([0.5, 1.5, -2.7])
      >>> for mode in (qt.pypto.CastMode.CAST_ROUND, qt.pypto.CastMode.CAST_FLOOR):
      ...     print(mode.value, mode.name, qt.pypto.cast(x, qt.pypto.DT_INT32, mode))
      2 CAST_ROUND [ 1  2 -3]
      3 CAST_FLOOR [ 0  1 -3]
    """

    CAST_NONE = 0  # the default of the pair: float to integer CAST_TRUNC, all others CAST_RINT
    CAST_RINT = 1  # to nearest, ties to even
    CAST_ROUND = 2  # to nearest, ties away from zero
    CAST_FLOOR = 3  # toward -inf
    CAST_CEIL = 4  # toward +inf
    CAST_TRUNC = 5  # toward zero
    CAST_ODD = 6  # Von Neumann: what is inexact gets an odd last bit


class SaturationMode(enum.Enum):
    """What `cast` does beyond the range of an integer type. ON is 0 in PyPTO.

    Examples:
      >>> x = jnp.asarray([40000.0])
      >>> for satmode in qt.pypto.SaturationMode:
      ...     print(satmode.name, qt.pypto.cast(x, qt.pypto.DT_INT16, satmode=satmode))
      ON [32767]
      OFF [-25536]
    """

    ON = 0  # clamps
    OFF = 1  # keeps the low bits
