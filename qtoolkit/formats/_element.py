"""What float, integer and table formats share: changed copies, dtypes, checks, a hash made once."""

import dataclasses
import difflib
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Self, TypeVar

import numpy as np

Class = TypeVar("Class", bound=type)

# The formats that ship by their spellings in lower case. `_names` adds them: they are objects of
# classes that inherit from the one below.
BY_SPELLING: dict[str, Any] = {}


def hashed_once(cls: Class) -> Class:
    """A frozen dataclass whose objects compute their hash only once.

    Formats and recipes are static arguments of `jax.jit`, which hashes them at every call, and a
    recipe holds six operands with formats of their own.
    """
    computed: Any = cls.__hash__

    def hash_once(self: Any) -> int:
        cached: int | None = self.__dict__.get("_hash")
        if cached is None:
            cached = self.__dict__["_hash"] = computed(self)
        return cached

    # For pickles: hashes of strings differ by process.
    def without_hash(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    for name, method in (("__hash__", hash_once), ("__getstate__", without_hash)):
        setattr(cls, name, method)
    return cls


class ElementFormat:
    """The base of `FloatFormat`, `IntFormat` and `TableFormat`, which are frozen dataclasses."""

    def with_(self, **fields: Any) -> Self:
        """The same format with other values of some fields, and without a dtype of its own.

        Without a `name` it is called after this format and the changes: "e4m3fn(bias=5)".

        Raises:
          TypeError: No such field.
          ValueError: As the class itself; or the name is that of another format.
        """
        fmt: Any = self
        check_fields(fmt, fields)
        changes = {name: value for name, value in fields.items() if value != getattr(fmt, name)}
        if not changes:
            return self
        text = ", ".join(f"{name}={_value_text(value)}" for name, value in changes.items())
        new_fields = {"name": f"{fmt.name}({text})", "spellings": ()} | changes
        changes_values = not changes.keys() <= {"name", "overflow", "spellings"}
        if changes_values and fmt.dtype_name is not None:
            new_fields.setdefault("dtype_name", None)
        new = dataclasses.replace(fmt, **new_fields)
        if BY_SPELLING.get(new.name.lower(), new) != new:
            raise ValueError(
                f"{type(new).__name__}: name={new.name!r} is that of another format, expected one "
                "of its own, or none"
            )
        return new

    def values(self: Any) -> np.ndarray:
        """float64 array of what each code stands for, in the order of the codes.

        Raises:
          ValueError: More than 2**16 codes, or float64 does not hold them; see `value`.
        """
        if self.bits > 16:
            raise ValueError(
                f"{self.name}: 2**{self.bits} codes are too many to list, expected at most 2**16; "
                "use value(code) for one of them"
            )
        if self.max_finite >= 2**1024 or self.min_positive < Fraction(2) ** -1074:
            raise ValueError(
                f"{self.name}: float64 does not hold every value; use value(code), which is exact"
            )
        return np.array([float(self.value(code)) for code in range(1 << self.bits)])

    @property
    def needs_scale(self: Any) -> bool:
        """Whether values are scaled into its range before they are rounded to it.

        float16 and bfloat16 need no scale to hold what float32 programs compute. If they were
        scaled up to their largest value, sums of their products would overflow float32.
        """
        return self.bits <= 8

    @property
    def dtype(self: Any) -> np.dtype | None:
        """The format's own numpy dtype, None where numpy and ml_dtypes have none."""
        return None if self.dtype_name is None else np.dtype(self.dtype_name)

    @property
    def code_dtype(self: Any) -> np.dtype:
        """The smallest unsigned integer dtype that holds a code."""
        return unsigned_dtype(self.bits)

    def _checked_code(self: Any, code: Any) -> int:
        """`code` as an integer of Python, because those of NumPy may overflow."""
        try:
            code = operator.index(code)
        except TypeError:
            raise TypeError(
                f"{self.name}: code has type {type(code).__name__}, expected an integer"
            ) from None
        if not 0 <= code < 1 << self.bits:
            raise ValueError(
                f"{self.name}: code {code}, expected 0 to {(1 << self.bits) - 1} ({self.bits} bits)"
            )
        return code

    def _check_name(self: Any) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"{type(self).__name__}: name={self.name!r}, expected a string")

    def _check_dtype(self: Any, kind: str, info_of: Callable[[Any], Any]) -> None:
        """ValueError if `dtype_name` is not a dtype of the same size and range as the format."""
        if self.dtype_name is None:
            return
        where = f"{type(self).__name__} {self.name!r}: dtype_name={self.dtype_name!r}"
        try:
            dtype = np.dtype(self.dtype_name)
        except TypeError:
            raise ValueError(
                f"{where}, expected the name of a dtype of numpy or ml_dtypes"
            ) from None
        if dtype.itemsize != self.code_dtype.itemsize:
            raise ValueError(
                f"{where} has {dtype.itemsize} bytes, expected {self.code_dtype.itemsize}, as its "
                "codes"
            )
        if dtype.kind == "b" and kind == "integers" and self.is_bool:
            return
        try:
            info = info_of(dtype)
        except (TypeError, ValueError, KeyError):
            raise ValueError(f"{where} has no {kind}, expected a dtype of {kind}") from None
        ends = (float(info.min), float(info.max), float(getattr(info, "smallest_subnormal", 1)))
        if ends != (float(self.lowest), float(self.max_finite), float(self.min_positive)):
            raise ValueError(
                f"{where} has values from {ends[0]} to {ends[1]}, the smallest {ends[2]}; expected "
                f"{float(self.lowest)} to {float(self.max_finite)}, the smallest "
                f"{float(self.min_positive)}; write dtype_name=None"
            )


def check_fields(fmt: Any, changes: dict[str, Any]) -> None:
    """TypeError where `fmt`, also a block format, has no field of such a name."""
    names = [field.name for field in dataclasses.fields(fmt)]
    for name in changes:
        if name in names:
            continue
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? It" if close else "it"
        raise TypeError(
            f"{fmt.name}: with_({name}=...), but {type(fmt).__name__} has no field {name!r}; "
            f"{hint} has {', '.join(names)}"
        )


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return str(getattr(value, "name", value))


def plain_number(value: Any) -> Any:
    """Convert a number of NumPy to Python's, whose powers do not overflow."""
    return value.item() if isinstance(value, np.integer | np.floating) else value


def unsigned_dtype(bits: int) -> np.dtype:
    """The smallest unsigned numpy integer dtype of at least `bits` bits."""
    return np.dtype(f"uint{max(8, 1 << (bits - 1).bit_length())}")


def binade(value: Fraction) -> int:
    """The exponent e of 2**e <= value < 2**(e + 1); `value` is positive."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value >= Fraction(2) ** exponent else exponent - 1
