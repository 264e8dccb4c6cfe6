"""Formats that are lists of numbers, and those that ship."""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from qtoolkit.formats._element import ElementFormat, hashed_once
from qtoolkit.formats._float import Overflow


@hashed_once
@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFormat(ElementFormat):
    """A format given by the value of each code. Frozen, hence hashable.

    Attributes:
      name: As users write it, on the command line and in checkpoints.
      values_by_code: What each code stands for: 2**bits floats in the order of the codes; NaN and
        each infinity at most once, finite values in any order and each once.
      overflow: What overflow and infinities become where they are not clamped.
      ties: For each pair of neighbouring finite values, in rising order, the number between them at
        which rounding to nearest changes from one to the other; None for the midpoints. Posits have
        other ones: 2**22 between the two largest of POSIT8, 2**20 and 2**24. A tie that is one of
        its neighbours rounds all numbers between them to the other: no positive number to zero.
      beyond: The value that would follow the largest one. What rounds to it overflows: HIFLOAT8
        ends at 32,768 and has `beyond` 49,152, so 40,960, their midpoint, overflows. None: no
        finite number overflows, all beyond the largest value are rounded to that.
      spellings: Other names of the same format; no part of equality.

    Examples:
      >>> four = qt.TableFormat(name="four_values", values_by_code=(0.0, 1.0, 4.0, -1.0))
      >>> qt.round_to_format(jnp.asarray([-7.0, 0.4, 2.4, 2.6]), four)
      Array([-1.,  0.,  1.,  4.], dtype=float32)
      >>> qt.encode(jnp.asarray([-7.0, 0.4, 2.4, 2.6]), four)
      Array([3, 0, 1, 2], dtype=uint8)
      >>> qt.format("posit8").with_(ties=None).name  # midpoints
      'posit8(ties=None)'
    """

    name: str
    values_by_code: tuple[float, ...]
    overflow: Overflow = Overflow.MAX
    ties: tuple[float, ...] | None = None
    beyond: float | None = None
    spellings: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    dtype_name: ClassVar[None] = None  # neither numpy nor ml_dtypes has tables

    def __post_init__(self) -> None:
        self._check_name()
        where = f"TableFormat {self.name!r}"
        self._check_numbers(where)
        count = len(self.values_by_code)
        if count < 2 or count > 2**16 or count & (count - 1):
            raise ValueError(
                f"{where}: {count} values, expected one for each code of 1 to 16 bits: 2, 4, 8 ..."
            )
        finite = self.finite
        if len(finite) < 2 or len(set(finite)) < len(finite):
            raise ValueError(f"{where}: expected two finite values or more, each only once")
        if self.max_finite <= 0:
            raise ValueError(f"{where}: no positive finite value, expected at least one")
        specials = [v for v in self.values_by_code if not math.isfinite(v)]
        if len({str(v) for v in specials}) != len(specials):
            raise ValueError(f"{where}: NaN and each infinity must come at most once")
        if not isinstance(self.overflow, Overflow):
            raise TypeError(f"{where}: overflow={self.overflow!r}, expected an Overflow")
        special = {Overflow.INF: math.inf, Overflow.NAN: math.nan}.get(self.overflow)
        if special is not None and str(special) not in map(str, specials):
            raise ValueError(f"{where}: overflow={self.overflow.name}, but no code is {special}")
        if self.ties is not None and (
            len(self.ties) != len(finite) - 1
            or any(
                not a <= tie <= b for a, tie, b in zip(finite, self.ties, finite[1:], strict=False)
            )
        ):
            raise ValueError(
                f"{where}: expected {len(finite) - 1} ties, each between its neighbouring values"
            )
        largest = max(abs(value) for value in finite)
        if self.beyond is not None and not largest < self.beyond < math.inf:
            raise ValueError(
                f"{where}: beyond={self.beyond}, expected more than the largest magnitude, "
                f"{largest}"
            )

    def _check_numbers(self, where: str) -> None:
        for field, may_be_none in (("values_by_code", False), ("ties", True), ("beyond", True)):
            value = getattr(self, field)
            if may_be_none and value is None:
                continue
            try:
                numbers = tuple(map(_one_nan, (value,) if field == "beyond" else value))
            except (TypeError, ValueError, OverflowError):
                expected = "a number" if field == "beyond" else "a sequence of numbers"
                raise TypeError(f"{where}: {field}={value!r}, expected {expected}") from None
            object.__setattr__(self, field, numbers[0] if field == "beyond" else numbers)

    # Pickled by its fields, so that `__post_init__` makes NaNs the one object of `_one_nan` again:
    # otherwise a format with a NaN would not equal its copy from another process.
    def __reduce__(self) -> tuple[Any, ...]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(type(self), **fields), ()

    @functools.cached_property
    def finite(self) -> tuple[float, ...]:
        """The finite values in rising order."""
        return tuple(sorted(v for v in self.values_by_code if math.isfinite(v)))

    @functools.cached_property
    def codes(self) -> tuple[int, ...]:
        """The codes of `finite`, in the same order."""
        codes = (c for c, value in enumerate(self.values_by_code) if math.isfinite(value))
        return tuple(sorted(codes, key=self.values_by_code.__getitem__))

    @property
    def bits(self) -> int:
        """Width of a code: 4 for NF4."""
        return (len(self.values_by_code) - 1).bit_length()

    @property
    def signed(self) -> bool:
        return self.finite[0] < 0

    @property
    def has_inf(self) -> bool:
        return math.inf in self.values_by_code

    @property
    def has_nan(self) -> bool:
        return bool(self.nan_codes)

    @property
    def inf_code(self) -> int | None:
        """Code of +infinity, None where the format has none."""
        return self.values_by_code.index(math.inf) if self.has_inf else None

    @property
    def nan_code(self) -> int | None:
        """Code of the NaN, None where the format has none."""
        return self.nan_codes[0] if self.nan_codes else None

    @property
    def nan_codes(self) -> tuple[int, ...]:
        return tuple(c for c, value in enumerate(self.values_by_code) if math.isnan(value))

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        return self.codes[-1]

    @property
    def max_finite(self) -> Fraction:
        """The largest finite value: 1 for NF4."""
        return Fraction(self.finite[-1])

    @property
    def lowest(self) -> Fraction:
        """The most negative finite value."""
        return Fraction(self.finite[0])

    @property
    def min_positive(self) -> Fraction:
        """The smallest positive value."""
        return Fraction(next(value for value in self.finite if value > 0))

    @functools.cached_property
    def mantissa_bits(self) -> int:
        """Significand bits after the leading one that a float needs to hold every value."""
        # Of 6.5 = 13 / 2 and of 52 = 13 * 4 the 13 needs bits. n & -n is the power of two in n, and
        # denominators are powers of two.
        numerators = (abs(Fraction(value).numerator) for value in self.finite)
        return max((n >> ((n & -n).bit_length() - 1)).bit_length() for n in numerators if n) - 1

    @property
    def finite_count(self) -> int:
        return len(self.finite)

    def value(self, code: int) -> Fraction | float:
        """What `code` stands for: a Fraction, or an infinity or NaN as a float.

        Raises:
          TypeError: `code` is no integer.
          ValueError: It is negative, or 2**bits or more.
        """
        code = self._checked_code(code)
        value = self.values_by_code[code]
        return Fraction(value) if math.isfinite(value) else value


def _one_nan(value: float) -> float:
    """`value` as a float, any NaN as `math.nan`.

    Tuples compare their elements by identity first: with one NaN object equal formats are equal.
    """
    value = float(value)
    return math.nan if math.isnan(value) else value


# arXiv:2305.14314 (QLoRA), appendix E: quantiles of N(0, 1), each the float32 that its
# implementation, bitsandbytes, holds.
NF4 = TableFormat(
    name="nf4",
    values_by_code=tuple(
        float(np.float32(value))
        for value in (
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        )
    ),
)


def _hifloat8(code: int) -> float:
    """arXiv:2409.16626: sign, a prefix that says how many exponent bits follow, mantissa."""
    sign, rest = -1.0 if code & 0x80 else 1.0, code & 0x7F
    if code == 0x80:
        return math.nan
    if rest == 0x6F:
        return sign * math.inf
    if rest < 8:  # denormal: no exponent at all
        return sign * math.ldexp(1.0, rest - 23) if rest else 0.0
    # The least code with each prefix, the bits of the prefix, and the number of exponent bits: the
    # prefixes are 11, 10, 01, 001 and 0001.
    prefixes = ((0x60, 2, 4), (0x40, 2, 3), (0x20, 2, 2), (0x10, 3, 1), (0x08, 4, 0))
    prefix_bits, exponent_bits = next(bits for least, *bits in prefixes if rest >= least)
    mantissa_bits = 7 - prefix_bits - exponent_bits
    mantissa = rest & ((1 << mantissa_bits) - 1)
    exponent = 0
    if exponent_bits:  # the sign of the exponent, and its magnitude below a leading one
        field = (rest >> mantissa_bits) & ((1 << exponent_bits) - 1)
        low_bits = exponent_bits - 1
        magnitude = (1 << low_bits) | (field & ((1 << low_bits) - 1))
        exponent = -magnitude if field >> low_bits else magnitude
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - mantissa_bits)


HIFLOAT8 = TableFormat(
    name="hifloat8",
    values_by_code=tuple(map(_hifloat8, range(256))),
    overflow=Overflow.INF,
    beyond=1.5 * 2.0**15,  # what 0x6F would stand for, were it not the code of infinity
    spellings=("HIF8", "DT_HIFLOAT8", "DT_HF8"),
)
