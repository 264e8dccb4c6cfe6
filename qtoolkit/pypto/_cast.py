"""`pypto.cast`: PyPTO's pairs, modes and defaults, in the words of `qtoolkit.cast`."""

import enum
import math
from typing import Any

import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
    cast_for,
    check_source,
    check_value_source,
    encode_for,
    hint_for_others,
    is_array,
)
from qtoolkit.formats import (
    BFLOAT16,
    E1M2FN,
    E2M1FN,
    E4M3FN,
    E5M2,
    FLOAT16,
    FLOAT32,
    HIFLOAT8,
    INT4,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    FloatFormat,
    Format,
    FormatLike,
    IntFormat,
    Overflow,
    Specials,
    format,
)
from qtoolkit.gradients import fake_cast
from qtoolkit.pypto import _types


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


NAMES: dict[Format, str] = {
    fmt: name for name, fmt in vars(_types).items() if name.startswith("DT_")
}
# The page's constraint 2.
PAIRS: dict[Format, tuple[Format, ...]] = {
    FLOAT16: (FLOAT32, INT32, INT16, INT8, UINT8),
    BFLOAT16: (FLOAT32, INT32),
    INT32: (FLOAT32, INT16, INT64),
    FLOAT32: (BFLOAT16, FLOAT16, INT16, INT32, INT64),
    UINT8: (FLOAT16,),
    INT8: (FLOAT16,),
    INT16: (FLOAT32, FLOAT16),
    INT64: (FLOAT32, INT32),
}
# What later versions and the Ascend 950 add, and FP32 to INT8, which models chain of three casts.
_MORE_PAIRS: dict[Format, tuple[Format, ...]] = {
    FLOAT32: (FLOAT32, E4M3FN, E5M2, HIFLOAT8, INT8),
    FLOAT16: (HIFLOAT8, INT4),
    BFLOAT16: (FLOAT16, E2M1FN, E1M2FN),
    INT4: (FLOAT16,),
    INT8: (INT16, INT32),
    INT16: (INT32, UINT32, UINT8),
    INT32: (FLOAT16, UINT16, UINT8),
    UINT8: (UINT16,),
    UINT32: (INT16, UINT16, UINT8),
    E4M3FN: (FLOAT32,),
    E5M2: (FLOAT32,),
    E2M1FN: (BFLOAT16,),
}
EXTENDED_PAIRS = {
    source: (*PAIRS.get(source, ()), *_MORE_PAIRS.get(source, ())) for source in PAIRS | _MORE_PAIRS
}
# The pairs that have SaturationMode.OFF on Atlas A2 and A3.
WRAPPING_PAIRS = (
    *((FLOAT16, UINT8), (FLOAT16, INT8), (FLOAT16, INT16)),
    *((FLOAT32, INT16), (INT64, INT32), (INT32, INT16)),
)
# Pairs whose rounding is the hardware's; HiFloat8 has CAST_ROUND alone.
_EVEN_ONLY = ((BFLOAT16, E2M1FN), (BFLOAT16, E1M2FN), (INT32, FLOAT16))
_ROUNDINGS = {
    CastMode.CAST_RINT: "nearest_even",
    CastMode.CAST_ROUND: "nearest_away",
    CastMode.CAST_FLOOR: "toward_negative",
    CastMode.CAST_CEIL: "toward_positive",
    CastMode.CAST_TRUNC: "toward_zero",
    CastMode.CAST_ODD: "to_odd",
}
_WHERE = "pypto.cast"
_INT32_MAX = 2**31 - 1
# The integers below 2**24, with both zeros.
_INTEGRAL = FloatFormat(
    name="integral",
    exponent_bits=1,
    mantissa_bits=23,
    bias=-22,
    specials=Specials.NONE,
    overflow=Overflow.MAX,
)


def cast(
    input: ArrayLike,
    dtype: FormatLike,
    mode: CastMode = CastMode.CAST_NONE,
    satmode: SaturationMode = SaturationMode.ON,
    *,
    extended: bool = False,
) -> jax.Array:
    """PyPTO's cast: round once by `mode`; integers saturate, floats overflow as in IEEE 754.

    The pairs, with the names of `dtype`:

    * DT_FP16 to DT_FP32, DT_INT32, DT_INT16, DT_INT8, DT_UINT8
    * DT_BF16 to DT_FP32, DT_INT32
    * DT_INT32 to DT_FP32, DT_INT16, DT_INT64
    * DT_FP32 to DT_BF16, DT_FP16, DT_INT16, DT_INT32, DT_INT64
    * DT_UINT8 and DT_INT8 to DT_FP16
    * DT_INT16 to DT_FP32, DT_FP16
    * DT_INT64 to DT_FP32, DT_INT32

    A type to itself returns the input, whatever the modes.

    Integer results: NaN becomes 0, infinities the limits, numbers beyond them the limits, too.
    Float results: NaN and infinities stay (the Inf/NaN mode, the default of Atlas A2 and A3), zeros
    keep their sign, subnormals count. Beyond the largest number, CAST_RINT and CAST_ROUND give
    infinity, CAST_TRUNC and CAST_ODD that number, CAST_FLOOR and CAST_CEIL one or the other by the
    sign.

    Args:
      input: An array of 1 to 4 axes, not empty, of at most 2**31 - 1 elements.
      dtype: A format such as `DT_FP16`, or any spelling of one.
      mode: A `CastMode`, no number. CAST_NONE is CAST_TRUNC from float to integer, else CAST_RINT.
        Every mode follows the page's rule for bits in every pair that rounds; what widens, or goes
        from integer to integer, is exact and ignores it.
      satmode: A `SaturationMode`, no number. ON is the default, as the page of 2026-02 has it;
        PyPTO's own is OFF since 2026-03: pass it to port later code. OFF keeps the low bits of the
        exact rounded integer (infinities still become the limits) from DT_FP16 to DT_UINT8,
        DT_INT8, DT_INT16, from DT_FP32 to DT_INT16, DT_INT64 to DT_INT32 and DT_INT32 to DT_INT16.
        Results of DT_FP32, DT_FP16 and DT_BF16 ignore it.
      extended: Whether to take also

        * DT_FP32 to DT_INT8: with CAST_RINT, what models write as casts to DT_INT32, DT_FP16 and
          DT_INT8
        * DT_FP32 to DT_FP8E4M3, DT_FP8E5M2; both to DT_FP32
        * DT_FP32 and DT_FP16 to DT_HF8, always as CAST_ROUND
        * DT_BF16 to DT_FP4_E2M1X2 and DT_FP4_E1M2X2, always as CAST_RINT, NaN to 0; DT_FP4_E2M1X2
          to DT_BF16
        * DT_BF16 to DT_FP16; DT_FP16 to DT_INT4 and back; DT_INT32 to DT_FP16, always as CAST_RINT
        * DT_UINT8 to DT_UINT16; DT_INT8 to DT_INT16, DT_INT32; DT_INT16 to DT_INT32, DT_UINT32,
          DT_UINT8; DT_INT32 to DT_UINT16, DT_UINT8; DT_UINT32 to DT_INT16, DT_UINT16, DT_UINT8
        * DT_FP32 to itself with a mode other than CAST_NONE and CAST_RINT: rounds to integers

        Then OFF is also for every other integer result. Beyond the range of FP8 and HiFloat8, ON
        gives the largest number, OFF infinity or, in DT_FP8E4M3, NaN; NaN stays.

    Returns:
      Shape of `input`; the format's own dtype. DT_HF8 and DT_FP4_E1M2X2 have none: their codes,
      uint8, as `qtoolkit.encode` gives them; `qtoolkit.decode` reads them. FP4 is not packed, see
      `qtoolkit.pack`.

    Raises:
      TypeError: `input` is no array; the pair is not supported; `mode` or `satmode` is no member of
        its enum; DT_INT64 results where JAX has 64-bit types off; or a derivative is asked for that
        does not exist, to or from types narrower than 16 bits: use `fake_cast`.
      ValueError: `dtype` is a string that names no format; `input` has another rank or size, or is
        empty; OFF where no page has it.

    Gradient: as `qtoolkit.cast`: for float results of 16 bits and more, 1 in their range, else 0;
    from a type to itself 1 everywhere.

    Source: pypto.cast of hicann/pypto, 072864e27 (2026-02-10); satmode and the extended pairs:
    883e7dfb0 (2026-08-22).

    Examples:
      >>> x = jnp.asarray([0.5, 1.5, -2.7, 40000.0])
      >>> qt.pypto.cast(x, qt.pypto.DT_INT16)  # toward zero, saturating
      Array([    0,     1,    -2, 32767], dtype=int16)
      >>> qt.pypto.cast(x, qt.pypto.DT_INT16, qt.pypto.CastMode.CAST_RINT)  # ties to even
      Array([    0,     2,    -3, 32767], dtype=int16)
    """
    _check_member("mode", mode, CastMode)
    _check_member("satmode", satmode, SaturationMode)
    if not isinstance(extended, bool | np.bool_):
        raise TypeError(f"{_WHERE}: extended={extended!r}, expected True or False")
    source, target = _formats(input, dtype, EXTENDED_PAIRS if extended else PAIRS)
    _check_shape(np.shape(input))
    input = check_source(_WHERE, input, "input")
    rounding = _rounding(source, target, mode)
    projection = Projection(rounding, _saturation(source, target, satmode, extended))
    if source == target:
        x = check_value_source(_WHERE, input, "input")
        if not extended or source != FLOAT32 or rounding == "nearest_even":
            return x
        has_fraction = jnp.abs(x) < np.float32(2**23)  # or may have
        return jnp.where(has_fraction, fake_cast(x, _INTEGRAL, rounding=rounding), x)
    if target in (E2M1FN, E1M2FN):
        x = jnp.asarray(input)
        input = jnp.where(jnp.isnan(x), jnp.zeros_like(x), x)
    convert = encode_for if target.dtype is None else cast_for
    return convert(_WHERE, input, target, projection)


def _rounding(source: Format, target: Format, mode: CastMode) -> str:
    if target == HIFLOAT8:
        return "nearest_away"
    if (source, target) in _EVEN_ONLY:
        return "nearest_even"
    if mode is CastMode.CAST_NONE:
        truncates = isinstance(target, IntFormat) and not isinstance(source, IntFormat)
        return "toward_zero" if truncates else "nearest_even"
    return _ROUNDINGS[mode]


def _saturation(source: Format, target: Format, satmode: SaturationMode, extended: bool) -> str:
    if source == target or target in (FLOAT32, FLOAT16, BFLOAT16):
        return "none"
    if satmode is SaturationMode.ON:
        return "finite"
    if not extended and (source, target) not in WRAPPING_PAIRS:
        pairs = ", ".join(f"{NAMES[a]} to {NAMES[b]}" for a, b in WRAPPING_PAIRS)
        raise ValueError(
            f"{_WHERE}: satmode=SaturationMode.OFF from {NAMES[source]} to {NAMES[target]}, "
            f"expected SaturationMode.ON; OFF is documented for {pairs}; with extended=True, as on "
            "the Ascend 950, for every pair"
        )
    return "none"


def _check_member(name: str, value: Any, kind: type[enum.Enum]) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"{_WHERE}: {name}={value!r} of type {type(value).__name__}, expected a member of "
            f"{kind.__name__}: {', '.join(member.name for member in kind)}; numbers are not taken, "
            "since PyPTO and Ascend C number them differently"
        )


def _formats(
    input: Any, dtype: Any, pairs: dict[Format, tuple[Format, ...]]
) -> tuple[Format, Format]:
    """The formats of input and result; TypeError where they are no supported pair."""
    got = input.dtype if is_array(input) else None
    source = None if got is None else _format_of(got)
    if source not in pairs:
        what = f"dtype {got}" if got is not None else f"type {type(input).__name__}"
        remedy = hint_for_others("input", input)
        remedy = "; extended=True takes it" if source in EXTENDED_PAIRS else remedy
        raise TypeError(
            f"{_WHERE}: input has {what}, expected an array of {_listed(pairs)}{remedy}"
        )
    target = _format_of(dtype)
    if target is None:
        is_text = isinstance(dtype, str)
        got_dtype = f"dtype={dtype!r}" if is_text else f"dtype has type {type(dtype).__name__}"
        raise (ValueError if is_text else TypeError)(
            f"{_WHERE}: {got_dtype}, expected from {NAMES[source]} one of "
            f"{_listed(pairs[source])}, or another spelling of one of them"
        )
    if target == source or target in pairs[source]:
        return source, target
    remedy = "; extended=True takes it" if target in EXTENDED_PAIRS[source] else ""
    raise TypeError(
        f"{_WHERE}: no cast from {NAMES[source]} to {NAMES.get(target, target.name)}; from "
        f"{NAMES[source]}, expected one of {_listed(pairs[source])}{remedy}"
    )


def _listed(formats: Any) -> str:
    return ", ".join(NAMES[fmt] for fmt in formats)


def _format_of(spec: Any) -> Format | None:
    try:
        return format(spec)
    except (TypeError, ValueError):
        return None


def _check_shape(shape: tuple[int, ...]) -> None:
    if not 1 <= len(shape) <= 4:
        raise ValueError(
            f"{_WHERE}: input has {len(shape)} axes, shape {shape}, expected 1 to 4; reshape it"
        )
    if 0 in shape:
        raise ValueError(f"{_WHERE}: input is empty, shape {shape}, expected elements")
    is_known = not any(map(jax.export.is_symbolic_dim, shape))
    if is_known and math.prod(shape) > _INT32_MAX:
        raise ValueError(
            f"{_WHERE}: input has shape {shape}, {math.prod(shape)} elements, expected at most "
            f"2**31 - 1 = {_INT32_MAX}; cast it in parts"
        )
