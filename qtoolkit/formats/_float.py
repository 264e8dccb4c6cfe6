"""Small floating-point formats as frozen data."""

import dataclasses
import enum
import functools
from fractions import Fraction
from typing import Any

import ml_dtypes  # noqa: F401  (registers the 8-bit float names with numpy)
import numpy as np


class Specials(enum.Enum):
    """Which codes of a format are not finite numbers."""

    IEEE = enum.auto()  # the top exponent field holds the infinities and the NaNs
    FN = enum.auto()  # no infinity; NaN only where every bit but the sign is one
    FNUZ = enum.auto()  # no infinity, one zero; the only NaN is the code of "-0"


class Overflow(enum.Enum):
    """What a value beyond the largest finite one becomes where nothing clamps it."""

    INF = enum.auto()
    NAN = enum.auto()
    MAX = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatFormat:
    """A binary floating-point format. Frozen, hence hashable: a static argument of `jax.jit`.

    A code is sign, exponent field, mantissa field, from the top bit down. Every property is derived
    from the fields and exact.

    Attributes:
      name: As users write it, on the command line and in checkpoints.
      exponent_bits, mantissa_bits: Field widths; the implicit leading bit is not counted.
      bias: Field e > 0 stands for 2**(e - bias); field 0, the subnormals, for 2**(1 - bias).
      specials: Which codes are not finite.
      overflow: What overflow and infinities become where they are not clamped.
      dtype_name: The numpy name of its own dtype; None where numpy and ml_dtypes have none.
      spellings: Other names of the same format (ONNX, OpenVINO, safetensors); no part of equality.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    overflow: Overflow
    dtype_name: str | None = None
    spellings: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for field, kind in _FIELD_TYPES.items():
            if not isinstance(getattr(self, field), kind):
                raise TypeError(
                    f"FloatFormat {self.name!r}: {field}={getattr(self, field)!r}, expected "
                    f"{kind.__name__}"
                )
        if self.exponent_bits < 1 or self.mantissa_bits < 1 or self.bits > 32:
            raise ValueError(
                f"FloatFormat {self.name!r}: exponent_bits={self.exponent_bits}, "
                f"mantissa_bits={self.mantissa_bits}; expected at least one bit of each and "
                "at most 32 bits with the sign"
            )
        if self.overflow is Overflow.INF and not self.has_inf:
            raise ValueError(
                f"FloatFormat {self.name!r}: overflow=INF, but specials={self.specials.name} has "
                "no infinity; use Overflow.NAN or Overflow.MAX"
            )
        check_dtype(self)

    @property
    def bits(self) -> int:
        """Width of a code: 8 for E4M3FN."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_code(self) -> int:
        """The sign bit alone."""
        return 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        """Code of the largest finite value: 0x7E for E4M3FN."""
        if self.specials is Specials.IEEE:
            return self.sign_code - (1 << self.mantissa_bits) - 1
        return self.sign_code - 1 - (self.specials is Specials.FN)

    @property
    def has_inf(self) -> bool:
        return self.specials is Specials.IEEE

    @property
    def has_negative_zero(self) -> bool:
        return self.specials is not Specials.FNUZ

    @property
    def inf_code(self) -> int | None:
        """Code of +infinity, None where the format has none."""
        return self.max_code + 1 if self.has_inf else None

    @property
    def nan_code(self) -> int:
        """The NaN that casts write: quiet and positive; 0x7F for E4M3FN, 0x7E for E5M2."""
        if self.specials is Specials.IEEE:
            return self.max_code + 1 + (1 << (self.mantissa_bits - 1))
        return self.max_code + 1  # FN: all ones; FNUZ: the sign bit alone

    @property
    def overflow_code(self) -> int:
        """What positive overflow becomes where it is not clamped, see `overflow`."""
        if self.overflow is Overflow.MAX:
            return self.max_code
        return self.nan_code if self.overflow is Overflow.NAN else self.max_code + 1

    @property
    def nan_codes(self) -> tuple[int, ...]:
        """Every code that is NaN, in rising order."""
        if self.specials is Specials.FNUZ:
            return (self.sign_code,)
        first = self.max_code + 1 + self.has_inf
        positive = range(first, self.sign_code)
        return (*positive, *(self.sign_code | code for code in positive))

    @property
    def finite_count(self) -> int:
        """Number of distinct finite values, the zeros counted once: 253 for E4M3FN."""
        return 2 * self.max_code + 1

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value's binade: 8 for E4M3FN."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value: -6 for E4M3FN."""
        return 1 - self.bias

    @functools.cached_property
    def max_finite(self) -> Fraction:
        """The largest finite value: 448 for E4M3FN."""
        return self.magnitude(self.max_code)

    @property
    def lowest(self) -> Fraction:
        """The most negative finite value."""
        return -self.max_finite

    @property
    def min_normal(self) -> Fraction:
        return _power_of_two(self.min_exponent)

    @property
    def min_subnormal(self) -> Fraction:
        """The smallest positive value: 2**-9 for E4M3FN."""
        return _power_of_two(self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> Fraction:
        """Distance from 1 to the next larger value: 1/8 for E4M3FN."""
        return _power_of_two(-self.mantissa_bits)

    def magnitude(self, code: int) -> Fraction:
        """The number that the exponent and mantissa fields of `code`, without its sign, spell.

        Codes above `max_code` stand for no finite value; for them it is the next in line.
        """
        field, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if field == 0:
            return mantissa * self.min_subnormal
        return ((1 << self.mantissa_bits) + mantissa) * _power_of_two(
            field - self.bias - self.mantissa_bits
        )

    @property
    def needs_scale(self) -> bool:
        """Whether values are scaled into its range before they are rounded to it.

        float16 and bfloat16 hold what float32 programs compute as it is; scaled up to their largest
        value, products of them would overflow float32.
        """
        return self.bits <= 8

    @property
    def dtype(self) -> np.dtype | None:
        """The format's own numpy dtype, None where numpy and ml_dtypes have none."""
        return None if self.dtype_name is None else np.dtype(self.dtype_name)

    @property
    def code_dtype(self) -> np.dtype:
        """The smallest unsigned integer dtype that holds a code."""
        return unsigned_dtype(self.bits)


_FIELD_TYPES = {
    "exponent_bits": int,
    "mantissa_bits": int,
    "bias": int,
    "specials": Specials,
    "overflow": Overflow,
}


def check_dtype(fmt: Any) -> None:
    """ValueError where a format's own dtype is not as wide as its codes are stored."""
    if fmt.dtype is not None and fmt.dtype.itemsize != fmt.code_dtype.itemsize:
        raise ValueError(
            f"{type(fmt).__name__} {fmt.name!r}: dtype_name={fmt.dtype_name!r} has "
            f"{fmt.dtype.itemsize} bytes, expected {fmt.code_dtype.itemsize}, as its codes"
        )


def unsigned_dtype(bits: int) -> np.dtype:
    """The smallest unsigned numpy integer dtype of at least `bits` bits."""
    return np.dtype(f"uint{max(8, 1 << (bits - 1).bit_length())}")


def _power_of_two(exponent: int) -> Fraction:
    return Fraction(2) ** exponent
