"""Two's-complement and unsigned integer formats as frozen data."""

import dataclasses
from fractions import Fraction
from typing import Any, ClassVar

import ml_dtypes  # noqa: F401  (registers the sub-byte integer names with numpy)
import numpy as np

from qtoolkit.formats._derived import derived
from qtoolkit.formats._float import (
    check_dtype,
    check_name,
    checked_code,
    float64_values,
    plain_number,
    unsigned_dtype,
)
from qtoolkit.formats._hashing import hashed_once


@hashed_once
@dataclasses.dataclass(frozen=True, kw_only=True)
class IntFormat:
    """An integer format. Frozen, hence hashable: a static argument of `jax.jit`.

    Attributes:
      name: As users write it, on the command line and in checkpoints.
      bits: Width of a code, 1 to 64.
      signed: Two's complement if true.
      is_bool: Whether the format is the truth value: one unsigned bit, which a cast sets to 1 for
        whatever is not zero, so 0.25 becomes 1, where uint1 makes it 0.
      dtype_name: The numpy name of the format's own dtype; None where there is none.
      spellings: Other names of the same format (ONNX, OpenVINO, safetensors); no part of equality.

    Examples:
      >>> int3 = qt.IntFormat(name="int3", bits=3)
      >>> int(int3.lowest), int(int3.max_finite)
      (-4, 3)
      >>> qt.round_to_format(jnp.asarray([0.5, 1.5, 9.0]), int3)  # ties to even, then clamped
      Array([0., 2., 3.], dtype=float32)
    """

    name: str
    bits: int
    signed: bool = True
    is_bool: bool = False
    dtype_name: str | None = None
    spellings: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    min_normal: ClassVar[Fraction] = Fraction(1)
    has_inf: ClassVar[bool] = False
    has_nan: ClassVar[bool] = False
    nan_codes: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        check_name(self)
        for field in ("signed", "is_bool"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(
                    f"IntFormat {self.name!r}: {field}={getattr(self, field)!r}, expected bool"
                )
        object.__setattr__(self, "bits", plain_number(self.bits))
        if type(self.bits) is not int or not 1 <= self.bits <= 64:
            raise ValueError(f"IntFormat {self.name!r}: bits={self.bits!r}, expected 1 to 64")
        if self.is_bool and (self.bits != 1 or self.signed):
            raise ValueError(
                f"IntFormat {self.name!r}: is_bool=True with bits={self.bits}, "
                f"signed={self.signed}; expected bits=1, signed=False"
            )
        if self.dtype_name == "bool" and not self.is_bool:
            raise ValueError(
                f"IntFormat {self.name!r}: dtype_name='bool' with is_bool={self.is_bool!r}, "
                "expected is_bool=True"
            )
        check_dtype(self)

    def with_(self, **fields: Any) -> "IntFormat":
        """The same format with other values of some fields, and without a dtype of its own.

        Its name is made of this one's, "int8(bits=5)", if you give none.

        Raises:
          TypeError: No such field.
          ValueError: As `IntFormat`; or the name is that of another format.

        Examples:
          >>> qt.format("int8").with_(bits=5, name="int5").max_finite
          Fraction(15, 1)
        """
        return derived(self, fields)

    @property
    def max_finite(self) -> Fraction:
        """The largest value: 127 for int8."""
        return Fraction(2 ** (self.bits - self.signed) - 1)

    @property
    def lowest(self) -> Fraction:
        """The smallest value: -128 for int8."""
        return Fraction(-(2 ** (self.bits - 1)) if self.signed else 0)

    @property
    def min_positive(self) -> Fraction:
        """The smallest positive value."""
        return Fraction(1)

    @property
    def mantissa_bits(self) -> int:
        """Significand bits after the leading one that a float needs to hold every value."""
        return max(self.bits - self.signed - 1, 0)

    @property
    def finite_count(self) -> int:
        return 2**self.bits

    @property
    def epsilon(self) -> Fraction:
        """Distance from 1 to the next larger value."""
        return Fraction(1)

    @property
    def max_code(self) -> int:
        """Code of the largest value."""
        return int(self.max_finite)

    @property
    def inf_code(self) -> None:
        """None: integers have no infinity."""
        return None

    @property
    def nan_code(self) -> None:
        """None: integers have no NaN; casts write it as 0."""
        return None

    def value(self, code: int) -> Fraction:
        """The integer that `code` stands for.

        Raises:
          TypeError: `code` is no integer.
          ValueError: It is negative, or 2**bits or more.
        """
        code = checked_code(self, code)
        return Fraction(code - (2**self.bits if code > self.max_finite else 0))

    def values(self) -> np.ndarray:
        """float64 array of what each code stands for, in the order of the codes.

        Raises:
          ValueError: More than 2**16 codes; see `value`.
        """
        return float64_values(self)

    @property
    def needs_scale(self) -> bool:
        """Whether values are scaled into its range before they are rounded to it: always."""
        return True

    @property
    def dtype(self) -> np.dtype | None:
        """The format's own numpy dtype, None where numpy and ml_dtypes have none."""
        return None if self.dtype_name is None else np.dtype(self.dtype_name)

    @property
    def code_dtype(self) -> np.dtype:
        """The smallest unsigned integer dtype that holds a code."""
        return unsigned_dtype(self.bits)
