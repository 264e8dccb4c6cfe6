"""OpenVINO's element types by name."""

from typing import Any

import numpy as np

from qtoolkit.casts.internal import hint_for_others, is_array
from qtoolkit.formats import Format, format

_NUMBERS = (
    *("boolean", "bf16", "f16", "f32", "f64", "f4e2m1", "f8e4m3", "f8e5m2", "f8e8m0", "nf4"),
    *("i4", "i8", "i16", "i32", "i64"),
    *("u1", "u2", "u3", "u4", "u6", "u8", "u16", "u32", "u64"),
)
# All 26 of OpenVINO 2026.4. "string" holds no numbers and "dynamic" is a type not yet known.
ELEMENT_TYPES: dict[str, Format | None] = {
    "dynamic": None,
    **{each: format(each) for each in _NUMBERS},
    "string": None,
}
_NAME_OF = {fmt: name for name, fmt in ELEMENT_TYPES.items() if fmt is not None}


def element_type(where: str, spec: Any) -> str:
    """The name of the element type that `spec` is: a name in any case, a dtype or a format."""
    if isinstance(spec, str):
        if spec.lower() in ELEMENT_TYPES:
            return spec.lower()
        raise ValueError(
            f"{where}: {spec!r} is not an element type of OpenVINO, expected one of "
            f"{', '.join(ELEMENT_TYPES)}"
        )
    name = _name_of(spec)
    if name is None:
        raise TypeError(
            f"{where}: got {spec!r}, expected a dtype that OpenVINO has, or one of "
            f"{', '.join(ELEMENT_TYPES)}"
        )
    return name


def element_type_of(where: str, argument: str, x: Any) -> str:
    """The name of the element type of the array `x`, or of a Python number, which has 64 bits."""
    if isinstance(x, bool | int | float):
        x = np.asarray(x)
        if x.dtype == object:
            raise TypeError(
                f"{where}: {argument} is an integer of more than 64 bits, expected fewer"
            )
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{where}: {argument} is a masked array, expected one without a mask")
    dtype = x.dtype if is_array(x) else None
    name = None if dtype is None else _name_of(dtype)
    if name is None:
        got = f"type {type(x).__name__}" if dtype is None else f"dtype {dtype}"
        raise TypeError(
            f"{where}: {argument} has {got}, expected an array of a float, integer or bool dtype "
            f"that OpenVINO has{hint_for_others(argument, x)}"
        )
    return name


def _name_of(spec: Any) -> str | None:
    try:
        return _NAME_OF.get(format(spec))
    except (TypeError, ValueError):
        return None


def check_arithmetic(where: str, arithmetic: Any) -> None:
    if not isinstance(arithmetic, str) or arithmetic not in ("exact", "openvino"):
        raise ValueError(f"{where}: arithmetic={arithmetic!r}, expected 'exact' or 'openvino'")
