"""Small floating-point formats as frozen data."""

import dataclasses
import enum
import functools
import itertools
import math
import operator
from fractions import Fraction

import ml_dtypes

from qtoolkit.formats._element import ElementFormat, hashed_once, plain_number


class Specials(enum.Enum):
    """Which codes of a format are not finite numbers.

    Examples:
      >>> qt.format("e4m3fn").specials.name, qt.format("e5m2").specials.name
      ('FN', 'IEEE')
      >>> len(qt.format("e4m3fn").nan_codes), len(qt.format("e5m2").nan_codes)
      (2, 6)
    """

    IEEE = enum.auto()  # the top exponent field holds the infinities and the NaNs
    FN = enum.auto()  # no infinity; NaN only where every bit but the sign is one
    FNUZ = enum.auto()  # no infinity, one zero; the only NaN is the code of "-0"
    EXTENDED = enum.auto()  # IEEE P3109: infinities at the top, one zero, one NaN
    NONE = enum.auto()  # every code is a finite number


class Overflow(enum.Enum):
    """What a value beyond the largest finite one becomes where nothing clamps it.

    Examples:
      >>> x = jnp.float32(1e6)
      >>> for name in ("e5m2", "e4m3fn", "e2m1fn"):
      ...     print(qt.format(name).overflow.name, qt.round_to_format(x, name, saturation="none"))
      INF inf
      NAN nan
      MAX 6.0
    """

    INF = enum.auto()
    NAN = enum.auto()
    MAX = enum.auto()


@hashed_once
@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatFormat(ElementFormat):
    """A binary floating-point format. Frozen, hence hashable: a static argument of `jax.jit`.

    A code is sign, exponent field, mantissa field, from the top bit down. Every property is derived
    from the fields and exact.

    Attributes:
      name: As users write it, on the command line and in checkpoints.
      exponent_bits, mantissa_bits: Field widths; the implicit leading bit is not counted.
      bias: Field e > 0 stands for 2**(e - bias); field 0, the subnormals, for 2**(1 - bias).
      specials: Which codes are not finite.
      overflow: What overflow and infinities become where they are not clamped.
      signed: Whether codes begin with a sign bit.
      has_zero: Whether field 0 holds zero and the subnormals. If not, it is one more binade,
        2**-bias, as in E8M0.
      dtype_name: The numpy name of its own dtype; None where numpy and ml_dtypes have none.
      spellings: Other names of the same format (ONNX, OpenVINO, safetensors); no part of equality.

    Examples:
      >>> fmt = qt.FloatFormat(
      ...     name="e3m3", exponent_bits=3, mantissa_bits=3, bias=3,
      ...     specials=qt.formats.Specials.FN, overflow=qt.formats.Overflow.NAN,
      ... )
      >>> fmt.bits, float(fmt.max_finite), float(fmt.min_positive)
      (7, 28.0, 0.03125)
      >>> qt.fake_cast(jnp.asarray([0.3, 100.0]), fmt)
      Array([ 0.3125, 28.    ], dtype=float32)
      >>> other = qt.format("e4m3fn").with_(bias=5)
      >>> other.name, float(other.max_finite)
      ('e4m3fn(bias=5)', 1792.0)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    overflow: Overflow
    signed: bool = True
    has_zero: bool = True
    dtype_name: str | None = None
    spellings: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check_name()
        for field, kind in _FIELD_TYPES.items():
            value = plain_number(getattr(self, field))
            object.__setattr__(self, field, value)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TypeError(
                    f"FloatFormat {self.name!r}: {field}={value!r}, expected {kind.__name__}"
                )
        if not 1 <= self.exponent_bits <= 16 or self.mantissa_bits < 0 or self.bits > 64:
            raise self._error(
                f"exponent_bits={self.exponent_bits}, mantissa_bits={self.mantissa_bits}; expected "
                "1 to 16 exponent bits, no negative number of mantissa bits, and at most 64 bits "
                "with the sign"
            )
        if abs(self.bias) > 2**16:
            raise self._error(f"bias={self.bias}, expected -2**16 to 2**16")
        self._check_codes()
        self._check_dtype("floats", ml_dtypes.finfo)

    def _check_codes(self) -> None:
        """Raises if the fields leave too few codes for NaN, infinity or any number."""
        if self.specials is Specials.IEEE and self.mantissa_bits == 0:
            raise self._error(
                "mantissa_bits=0 with specials=IEEE leaves no code for NaN, expected at least one "
                "mantissa bit or other specials"
            )
        if self.specials is Specials.FNUZ and not self.signed:
            raise self._error(
                "specials=FNUZ puts NaN at -0, but the format is unsigned; use Specials.FN"
            )
        if self.signed and not self.has_zero:
            raise self._error("has_zero=False with signed=True, expected signed=False")
        if self.max_code < 1:
            raise self._error(
                f"specials={self.specials.name} leaves no code for a positive finite value, "
                "expected more bits"
            )
        if self.overflow is Overflow.INF and not self.has_inf:
            raise self._error(
                f"overflow=INF, but specials={self.specials.name} has no infinity; use "
                "Overflow.NAN or Overflow.MAX"
            )
        if self.overflow is Overflow.NAN and not self.has_nan:
            raise self._error(
                f"overflow=NAN, but specials={self.specials.name} has no NaN; use Overflow.MAX"
            )

    def _error(self, message: str) -> ValueError:
        return ValueError(f"FloatFormat {self.name!r}: {message}")

    @property
    def bits(self) -> int:
        """Width of a code: 8 for E4M3FN."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def magnitude_count(self) -> int:
        """Number of codes without a sign: 128 for E4M3FN, 256 for E8M0."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def sign_code(self) -> int:
        """The sign bit alone; 0 where there is none."""
        return self.magnitude_count if self.signed else 0

    @property
    def max_code(self) -> int:
        """Code of the largest finite value: 0x7E for E4M3FN."""
        match self.specials:
            case Specials.IEEE:  # a whole binade, 2**mantissa_bits codes, is not finite
                return self.magnitude_count - (1 << self.mantissa_bits) - 1
            case Specials.FN:  # only the last code is NaN
                return self.magnitude_count - 2
            case Specials.EXTENDED:  # the last one is infinity; without "-0" NaN stands after it
                return self.magnitude_count - 2 - (not self.signed)
            case _:
                return self.magnitude_count - 1

    @property
    def has_inf(self) -> bool:
        return self.specials in (Specials.IEEE, Specials.EXTENDED)

    @property
    def has_nan(self) -> bool:
        return self.specials is not Specials.NONE

    @property
    def has_negative_zero(self) -> bool:
        return self.signed and self.specials not in (Specials.FNUZ, Specials.EXTENDED)

    @property
    def inf_code(self) -> int | None:
        """Code of +infinity, None where the format has none."""
        return self.max_code + 1 if self.has_inf else None

    @property
    def nan_code(self) -> int | None:
        """The NaN that casts write: quiet and positive; 0x7F for E4M3FN, 0x7E for E5M2."""
        if not self.has_nan:
            return None
        if self.specials is Specials.IEEE:  # quiet: the first mantissa bit is set
            return self.max_code + 1 + (1 << (self.mantissa_bits - 1))
        return self.max_code + 1 + self.has_inf  # FN: all ones; one NaN: the sign bit alone

    @property
    def overflow_code(self) -> int:
        """The value that positive overflow becomes if it is not clamped, see `overflow`."""
        return {
            Overflow.MAX: self.max_code,
            Overflow.NAN: self.nan_code,
            Overflow.INF: self.inf_code,
        }[self.overflow]  # type: ignore[return-value]  # checked at construction

    @property
    def nan_ranges(self) -> tuple[range, ...]:
        """The codes that are NaN, as runs in rising order: two for float32, one for E4M3FNUZ."""
        if not self.has_nan:
            return ()
        if self.signed and not self.has_negative_zero:
            return (range(self.sign_code, self.sign_code + 1),)
        first = self.max_code + 1 + self.has_inf
        positive = range(first, self.magnitude_count)
        if not self.signed:
            return (positive,)
        return (positive, range(self.sign_code + first, 2 * self.sign_code))

    @property
    def nan_codes(self) -> tuple[int, ...]:
        """Every code that is NaN, in rising order; see `nan_ranges` for formats of many bits."""
        count = sum(map(len, self.nan_ranges))
        if count > 2**16:
            raise ValueError(
                f"{self.name}: {count} codes of NaN are too many to list, see nan_ranges"
            )
        return tuple(itertools.chain(*self.nan_ranges))

    @property
    def finite_count(self) -> int:
        """Number of distinct finite values, the zeros counted once: 253 for E4M3FN."""
        return (1 + self.signed) * (self.max_code + 1) - (self.signed and self.has_zero)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value's binade: 8 for E4M3FN."""
        if self.has_zero and self.max_code < (1 << self.mantissa_bits):  # all are subnormal
            return self.min_exponent - self.mantissa_bits + self.max_code.bit_length() - 1
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value: -6 for E4M3FN."""
        return self.has_zero - self.bias

    @functools.cached_property
    def max_finite(self) -> Fraction:
        """The largest finite value: 448 for E4M3FN."""
        return self.magnitude(self.max_code)

    @property
    def lowest(self) -> Fraction:
        """The most negative finite value; of unsigned formats the smallest."""
        return -self.max_finite if self.signed else self.magnitude(0)

    @property
    def min_normal(self) -> Fraction:
        return _power_of_two(self.min_exponent)

    @property
    def min_positive(self) -> Fraction:
        """The smallest positive value: 2**-9 for E4M3FN, 2**-127 for E8M0."""
        return self.magnitude(int(self.has_zero))

    @property
    def min_subnormal(self) -> Fraction:
        """`min_positive`, as IEEE 754 names it; the smallest normal where nothing is subnormal."""
        return self.min_positive

    @property
    def epsilon(self) -> Fraction:
        """Distance from 1 to the next larger value: 1/8 for E4M3FN."""
        # Where 1 is subnormal, the step is that of the subnormals.
        return _power_of_two(max(self.min_exponent, 0) - self.mantissa_bits)

    def magnitude(self, code: int) -> Fraction:
        """The number in the exponent and mantissa fields of `code`, which has no sign bit.

        Above `max_code` these fields mean infinity or NaN; the number is the one they would stand
        for otherwise: 480 for the NaN of E4M3FN, 0x7F, one step above its largest value, 448.
        """
        code = operator.index(code)  # an integer of NumPy would overflow
        field, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if self.has_zero:
            hidden, field = int(field > 0), max(field, 1)
        else:
            hidden = 1
        return ((hidden << self.mantissa_bits) + mantissa) * _power_of_two(
            field - self.bias - self.mantissa_bits
        )

    def value(self, code: int) -> Fraction | float:
        """What `code` stands for: a Fraction, or a float that is infinite, NaN or -0.

        Raises:
          TypeError: `code` is no integer.
          ValueError: It is negative, or 2**bits or more.
        """
        code = self._checked_code(code)
        if any(code in codes for codes in self.nan_ranges):
            return math.nan
        magnitude = code & (self.magnitude_count - 1)
        negative = code != magnitude
        if magnitude == self.inf_code:
            return -math.inf if negative else math.inf
        if negative and magnitude == 0:
            return -0.0
        return -self.magnitude(magnitude) if negative else self.magnitude(magnitude)


_FIELD_TYPES = {
    "exponent_bits": int,
    "mantissa_bits": int,
    "bias": int,
    "specials": Specials,
    "overflow": Overflow,
    "signed": bool,
    "has_zero": bool,
}


def _power_of_two(exponent: int) -> Fraction:
    return Fraction(2) ** exponent
