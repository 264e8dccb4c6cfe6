"""An exact oracle for casts that shares no code with the library.

The parameters of the formats are typed in from the published tables; `qtoolkit.formats` only builds
the objects that the casts take. The same rule is written down three times:

* `codes` works on integers: a source is `mantissa * 2**exponent`, both exact for every source up to
  64 bits, the quotient by the format's step is a shift, and the remainder decides.
* `codes_by_comparison` looks inputs up among all values of the format, in float64.
* `fraction_code` takes one rational number and searches its two neighbours.

`test_casts_exact.py` checks them against one another. Table formats are looked up by comparison.
"""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import ml_dtypes
import numpy as np

from qtoolkit.formats import FloatFormat, IntFormat, Overflow, Specials, TableFormat

SATURATIONS = ("finite", "propagate", "none")
ROUNDINGS = (
    "nearest_even",
    "nearest_away",
    "toward_zero",
    "toward_positive",
    "toward_negative",
    "to_odd",
)
VARIANTS = [(rounding, saturation) for rounding in ROUNDINGS for saturation in SATURATIONS]
SOURCES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Float:
    """Fields of a float format.

    `kind` is ieee, fn, fnuz, extended (P3109: one zero, one NaN, infinities) or none (all codes are
    finite); `overflow` is inf, nan or max; without a `zero`, field 0 is a normal binade.
    """

    exponent: int
    mantissa: int
    bias: int
    kind: str
    overflow: str
    signed: bool = True
    zero: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.mantissa

    @property
    def magnitudes(self) -> int:
        """How many codes there are without the sign bit."""
        return 2 ** (self.exponent + self.mantissa)

    @property
    def sign(self) -> int:
        return self.magnitudes if self.signed else 0

    @property
    def max_code(self) -> int:
        extended = 1 if self.signed else 2
        taken = {"ieee": 2**self.mantissa, "fn": 1, "fnuz": 0, "none": 0, "extended": extended}
        return self.magnitudes - 1 - taken[self.kind]

    @property
    def inf(self) -> int:
        assert self.kind in ("ieee", "extended")
        return self.max_code + 1

    @property
    def nan(self) -> int | None:
        """Quiet and positive."""
        if self.kind == "ieee":
            return (2**self.exponent - 1) * 2**self.mantissa + 2 ** (self.mantissa - 1)
        if self.kind == "none":
            return None
        one_nan_at_minus_zero = self.signed and self.kind in ("fnuz", "extended")
        return self.sign if one_nan_at_minus_zero else self.magnitudes - 1

    @property
    def nan_codes(self) -> list[int]:
        return [code for code in range(2**self.bits) if self.value(code) != self.value(code)]

    @property
    def overflowed(self) -> int:
        return {"inf": self.max_code + 1, "nan": self.nan, "max": self.max_code}[self.overflow]

    @property
    def signed_zero_and_nan(self) -> bool:
        return self.signed and self.kind in ("ieee", "fn", "none")

    @property
    def unsigned(self) -> np.dtype:
        return _unsigned(self.bits)

    @property
    def min_step(self) -> int:
        """Exponent of the step in the lowest binade."""
        return self.zero - self.bias - self.mantissa

    def fraction(self, code: int) -> Fraction:
        """The magnitude that exponent and mantissa field spell; -1 is the zero that E8M0 lacks."""
        if code < 0:
            return Fraction(0)
        field, mantissa = divmod(code, 2**self.mantissa)
        subnormal = field == 0 and self.zero
        leading, field = (0, 1) if subnormal else (2**self.mantissa, field)
        return (leading + mantissa) * Fraction(2) ** (field - self.bias - self.mantissa)

    def value(self, code: int) -> Fraction | float:
        """What any code stands for: a Fraction, an infinity or NaN."""
        negative = self.signed and code >= self.sign
        size = code - self.sign if negative else code
        if size > self.max_code or (code == self.nan and self.signed):
            infinite = self.kind in ("ieee", "extended") and size == self.max_code + 1
            return math.copysign(math.inf, -negative) if infinite else math.nan
        return -self.fraction(size) if negative else self.fraction(size)

    def as_format(self, name: str) -> FloatFormat:
        """The same fields as a format of the library."""
        return FloatFormat(
            name=name,
            exponent_bits=self.exponent,
            mantissa_bits=self.mantissa,
            bias=self.bias,
            specials=Specials[self.kind.upper()],
            overflow=Overflow[self.overflow.upper()],
            signed=self.signed,
            has_zero=self.zero,
        )


@dataclasses.dataclass(frozen=True)
class Int:
    """Two's complement, or unsigned; `bool` is one unsigned bit that says whether x is zero."""

    bits: int
    signed: bool
    bool: bool = False

    @property
    def lowest(self) -> int:
        return -(2 ** (self.bits - 1)) if self.signed else 0

    @property
    def highest(self) -> int:
        return 2 ** (self.bits - self.signed) - 1

    @property
    def unsigned(self) -> np.dtype:
        return _unsigned(self.bits)

    def value(self, code: int) -> Fraction:
        return Fraction(code - 2**self.bits if code > self.highest else code)

    def as_format(self, name: str) -> IntFormat:
        return IntFormat(name=name, bits=self.bits, signed=self.signed)


@dataclasses.dataclass(frozen=True)
class Table:
    """Values in code order; the tie of each gap in rising order (None: the midpoints); `beyond`."""

    values: tuple[float, ...]
    overflow: str
    ties: tuple[float, ...] | None = None
    beyond: float | None = None

    @property
    def bits(self) -> int:
        return (len(self.values) - 1).bit_length()

    @property
    def unsigned(self) -> np.dtype:
        return _unsigned(self.bits)

    @property
    def order(self) -> list[int]:
        """The codes of the finite values, in rising order of these."""
        finite = [code for code, value in enumerate(self.values) if math.isfinite(value)]
        return sorted(finite, key=lambda code: self.values[code])

    @property
    def nan(self) -> int | None:
        return next((c for c, value in enumerate(self.values) if math.isnan(value)), None)

    def value(self, code: int) -> Fraction | float:
        value = self.values[code]
        return Fraction(value) if math.isfinite(value) else value

    def as_format(self, name: str) -> TableFormat:
        return TableFormat(
            name=name,
            values_by_code=self.values,
            overflow=Overflow[self.overflow.upper()],
            ties=self.ties,
            beyond=self.beyond,
        )


Spec = Float | Int | Table


def _unsigned(bits: int) -> np.dtype:
    return np.dtype(next(f"uint{width}" for width in (8, 16, 32, 64) if bits <= width))


def p3109(bits: int, precision: int, signed: bool, extended: bool) -> Float:
    """Binary{K}p{P}{s|u}{e|f}, IEEE P3109 Interim Report v4.0: the bias is half the exponents."""
    exponent = bits - precision + (not signed)
    kind = "extended" if extended else "fnuz" if signed else "fn"
    overflow = "inf" if extended else "max"
    return Float(exponent, precision - 1, 2 ** (exponent - 1), kind, overflow, signed)


def p3109_name(bits: int, precision: int, signed: bool, extended: bool) -> str:
    return f"binary{bits}p{precision}{'s' if signed else 'u'}{'e' if extended else 'f'}"


def every_p3109(bits: int) -> dict[str, Float]:
    """All formats of this width for which the working group has tables."""
    return {
        p3109_name(bits, precision, signed, extended): p3109(bits, precision, signed, extended)
        for signed in (True, False)
        for precision in range(1, bits + (not signed))
        for extended in (True, False)
    }


def _hifloat8_value(code: int) -> float:
    """arXiv:2409.16626, table 2, as strings of bits: sign, dot, exponent, mantissa."""
    bits = f"{code:08b}"
    sign, rest = -1.0 if bits[0] == "1" else 1.0, bits[1:]
    if rest == "0000000":
        return 0.0 if sign > 0 else math.nan
    if rest == "1101111":  # E = 15, M = 1
        return sign * math.inf
    if rest.startswith("0000"):
        return sign * 2.0 ** (int(rest[4:], 2) - 23)
    dots = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0}
    dot = next(prefix for prefix in dots if rest.startswith(prefix))
    width = dots[dot]
    exponent, mantissa = rest[len(dot) :][:width], rest[len(dot) :][width:]
    size = int("1" + exponent[1:], 2) if width else 0
    if exponent.startswith("1"):
        size = -size
    return sign * (1 + int(mantissa, 2) / 2 ** len(mantissa)) * 2.0**size


def _posit_value(code: int, bits: int) -> float:
    """Standard for Posit Arithmetic (2022), es = 2, by its closed formula.

    Section 4.2: ((1 - 3s) + f) * 2**((1 - 2s) * (4r + e + s)), fields of the code as it is.
    """
    if code in (0, 2 ** (bits - 1)):
        return math.nan if code else 0.0
    s = code >> (bits - 1)
    tail = [(code >> place) & 1 for place in reversed(range(bits - 1))]
    k = next((i for i, bit in enumerate(tail) if bit != tail[0]), len(tail))
    r = -k if tail[0] == 0 else k - 1
    rest = [*tail[k + 1 :], 0, 0]
    e = 2 * rest[0] + rest[1]
    f = sum(bit * 2.0 ** -(i + 1) for i, bit in enumerate(rest[2:]))
    return ((1 - 3 * s) + f) * 2.0 ** ((1 - 2 * s) * (4 * r + e + s))


# The tie between two posits of 8 bits is the posit of 9 between them. Nothing but zero rounds to
# zero: beside it the tie is zero itself.
_POSIT8 = Table(
    tuple(_posit_value(code, 8) for code in range(256)),
    "nan",
    ties=tuple(
        0.0 if low in (-1, 0) else _posit_value((2 * low + 1) % 512, 9) for low in range(-127, 127)
    ),
)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)

# arXiv:2209.05433, arXiv:2206.02915, OCP MX 1.0, IEEE 754-2019; bfloat16 is float32's upper half.
FLOATS = {
    "float64": Float(11, 52, 1023, "ieee", "inf"),
    "float32": Float(8, 23, 127, "ieee", "inf"),
    "tf32": Float(8, 10, 127, "ieee", "inf"),
    "float16": Float(5, 10, 15, "ieee", "inf"),
    "bfloat16": Float(8, 7, 127, "ieee", "inf"),
    "e5m2": Float(5, 2, 15, "ieee", "inf"),
    "e4m3fn": Float(4, 3, 7, "fn", "nan"),
    "e4m3fnuz": Float(4, 3, 8, "fnuz", "nan"),
    "e5m2fnuz": Float(5, 2, 16, "fnuz", "nan"),
    "e4m3b11fnuz": Float(4, 3, 11, "fnuz", "nan"),
    "e4m3_ieee": Float(4, 3, 7, "ieee", "inf"),
    "e3m4": Float(3, 4, 3, "ieee", "inf"),
    "ue4m3": Float(4, 3, 7, "fn", "nan", signed=False),
    "e8m0fnu": Float(8, 0, 127, "fn", "nan", signed=False, zero=False),
    "e2m3fn": Float(2, 3, 1, "none", "max"),
    "e3m2fn": Float(3, 2, 3, "none", "max"),
    "e2m1fn": Float(2, 1, 1, "none", "max"),
    "e1m2fn": Float(1, 2, 1, "none", "max"),
}
# arXiv:2305.14314; arXiv:2409.16626; Standard for Posit Arithmetic (2022).
TABLES = {
    "nf4": Table(_NF4, "max"),
    "hifloat8": Table(
        tuple(_hifloat8_value(code) for code in range(256)), "inf", beyond=1.5 * 2.0**15
    ),
    "posit8": _POSIT8,
}
INTEGERS = {
    "bool": Int(1, False, bool=True),
    **{f"int{bits}": Int(bits, True) for bits in (2, 4, 8, 16, 32, 64)},
    **{f"uint{bits}": Int(bits, False) for bits in (2, 4, 8, 16, 32, 64)},
}
SPECS: dict[str, Spec] = {**FLOATS, **TABLES, **INTEGERS}
SMALL = {name: spec for name, spec in SPECS.items() if spec.bits <= 8}
SHIPPED = {
    name: SPECS[name]
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "bfloat16", "float16", "int8")
}
# numpy's name of each format's own dtype.
DTYPES = {
    "e5m2": "float8_e5m2",
    "e4m3fn": "float8_e4m3fn",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2fnuz": "float8_e5m2fnuz",
    "e4m3b11fnuz": "float8_e4m3b11fnuz",
    "e4m3_ieee": "float8_e4m3",
    "e3m4": "float8_e3m4",
    "e8m0fnu": "float8_e8m0fnu",
    "e2m1fn": "float4_e2m1fn",
    **{name: name for name in ("float64", "float32", "float16", "bfloat16", *INTEGERS)},
}
ML_DTYPES = {
    **{name: np.dtype(dtype) for name, dtype in DTYPES.items() if name in FLOATS},
    "e2m3fn": np.dtype("float6_e2m3fn"),
    "e3m2fn": np.dtype("float6_e3m2fn"),
}


@dataclasses.dataclass(frozen=True)
class Exact:
    """Numbers `mantissa * 2**exponent` with their signs, or infinities, or NaNs: arrays."""

    negative: np.ndarray
    mantissa: np.ndarray  # uint64
    exponent: np.ndarray  # int64
    is_inf: np.ndarray
    is_nan: np.ndarray


def exact(x) -> Exact:
    """Every source of up to 64 bits, without error."""
    x = np.asarray(x)
    name = {DTYPES.get(name): name for name in FLOATS}.get(x.dtype.name)
    if name is None:
        wide = x if x.dtype == np.uint64 else x.astype(np.int64)
        negative = wide < 0
        pattern = wide.astype(np.uint64)  # modulo 2**64
        mantissa = np.where(negative, ~pattern + np.uint64(1), pattern)
        nothing = np.zeros(x.shape, bool)
        return Exact(negative, mantissa, np.zeros(x.shape, np.int64), nothing, nothing)
    if name in ("float64", "float32", "float16", "bfloat16"):
        return _exact_float(_float64(x), np.signbit(x))
    spec = FLOATS[name]
    every = [float(spec.value(code)) for code in range(2**spec.bits)]
    code = bits_of(x).astype(np.int64) & (2**spec.bits - 1)
    negative = (code >= spec.sign) & spec.signed
    wide = np.array(every)[code]
    return _exact_float(wide, negative & (spec.signed_zero_and_nan | ~np.isnan(wide)))


def _exact_float(x: np.ndarray, negative: np.ndarray) -> Exact:
    is_nan, is_inf = np.isnan(x), np.isinf(x)
    fraction, exponent = np.frexp(np.abs(np.where(is_nan | is_inf, 0, x)))
    mantissa = np.ldexp(fraction, 53).astype(np.uint64)
    return Exact(negative, mantissa, exponent.astype(np.int64) - 53, is_inf, is_nan)


def _bit_length(x: np.ndarray) -> np.ndarray:
    high, low = (x >> np.uint64(32)).astype(np.float64), (x & np.uint64(2**32 - 1))
    low_length = np.frexp(low.astype(np.float64))[1]
    return np.where(high > 0, 32 + np.frexp(high)[1], low_length).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where numbers lie: above the magnitude `lower`, at `rest / 2**shift` of the step."""

    lower: np.ndarray  # int64: a code without its sign; of integers uint64, modulo 2**64
    rest: np.ndarray  # uint64
    shift: np.ndarray  # int64, at least 1
    huge: np.ndarray  # integers only: 2**64 or more


def place(x: Exact, spec: Float | Int) -> Place:
    one = np.uint64(1)
    if isinstance(spec, Int):
        step = np.zeros_like(x.exponent)
    else:
        lowest = spec.min_step
        binade = _bit_length(x.mantissa) - 1 + x.exponent
        step = np.where(x.mantissa > 0, np.maximum(binade - spec.mantissa, lowest), lowest)
    down = np.clip(step - x.exponent, 0, 63)
    assert np.all((x.mantissa < 2**53) | (step - x.exponent <= 63))  # so clipping changes nothing
    # Upwards the result fits, but in integers, whose low bits are all that counts.
    up = np.clip(x.exponent - step, 0, 63)
    pushed = np.where(x.exponent - step > 63, np.uint64(0), x.mantissa << up.astype(np.uint64))
    shift = down.astype(np.uint64)
    quotient = np.where(down > 0, x.mantissa >> shift, pushed)
    rest = x.mantissa & ((one << shift) - one)
    shift = np.maximum(step - x.exponent, 1)
    huge = (_bit_length(x.mantissa) + x.exponent > 64) & (x.mantissa > 0)
    if isinstance(spec, Int):
        return Place(quotient, rest, shift, huge)
    lower = (step - lowest) * 2**spec.mantissa + quotient.astype(np.int64)
    lower -= 0 if spec.zero else 2**spec.mantissa
    return Place(np.minimum(lower, spec.max_code + 1), rest, shift, huge)


def goes_up(at: Place, negative: np.ndarray, rounding: str) -> np.ndarray:
    """Whether the magnitude rounds to the upper of its two neighbours."""
    odd = at.lower % 2 == 1
    half = np.uint64(1) << (np.minimum(at.shift, 63) - 1).astype(np.uint64)
    match rounding:
        case "nearest_even":
            return (at.rest > half) | ((at.rest == half) & odd)
        case "nearest_away":
            return at.rest >= half
        case "toward_zero":
            return np.zeros(odd.shape, bool)
        case "toward_positive":
            return (at.rest > 0) & ~negative
        case "toward_negative":
            return (at.rest > 0) & negative
        case "to_odd":
            return (at.rest > 0) & ~odd
    raise AssertionError(rounding)


def goes_up_stochastically(at: Place, variant: str, bits: int, random) -> np.ndarray:
    """IEEE P3109 Interim Report v4.0, StochasticA, B and C."""
    random = np.asarray(random).astype(np.int64)
    assert np.all((random >= 0) & (random < 2**bits))

    def floor_of_scaled(power: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of v * 2**power: the floor, what remains, and half of what one is there."""
        down = np.clip(at.shift - power, 0, 63).astype(np.uint64)
        up = np.clip(power - at.shift, 0, 63).astype(np.uint64)
        whole = np.where(down > 0, at.rest >> down, at.rest << up)
        remains = at.rest & ((np.uint64(1) << down) - np.uint64(1))
        half = np.where(down > 0, np.uint64(1) << np.maximum(down, 1) - np.uint64(1), 0)
        return whole.astype(np.int64), remains, half

    if variant == "A":
        return floor_of_scaled(bits)[0] + random >= 2**bits
    if variant == "B":
        return floor_of_scaled(bits + 1)[0] + 2 * random + 1 >= 2 ** (bits + 1)
    assert variant == "C"
    whole, remains, half = floor_of_scaled(bits)
    nearest = whole + ((remains > half) | ((remains == half) & (remains > 0) & (whole % 2 == 1)))
    return nearest + random >= 2**bits


def codes(x, spec: Spec, saturation: str = "finite", rounding: str = "nearest_even") -> np.ndarray:
    """The codes of `x`, which is any array of 64 bits or less."""
    return every_code(x, spec, [(rounding, saturation)])[0]


def every_code(x, spec: Spec, variants=tuple(VARIANTS)) -> np.ndarray:
    """One row for each (rounding, saturation) of `variants`."""
    x = np.asarray(x)
    if x.ndim == 0:  # numpy's scalars warn where its arrays wrap
        return every_code(x.reshape(1), spec, variants)[:, 0]
    assert all(r in ROUNDINGS and s in SATURATIONS for r, s in variants)
    result = np.empty((len(variants), *x.shape), spec.unsigned)
    if isinstance(spec, Int) and spec.bool:
        source = exact(x)
        result[:] = (source.mantissa > 0) | source.is_inf | source.is_nan
        return result
    if isinstance(spec, Table):
        rows = {r: _table_indices(x, spec, r) for r, _ in dict(variants).items()}
        for row, (rounding, saturation) in enumerate(variants):
            result[row] = _finish_table(x, spec, rows[rounding], rounding, saturation)
        return result
    source = exact(x)
    at = place(source, spec)
    rows = {}
    for row, (rounding, saturation) in enumerate(variants):
        if rounding not in rows:
            rows[rounding] = goes_up(at, source.negative, rounding)
        result[row] = _finish(source, at, rows[rounding], spec, rounding, saturation)
    return result


def stochastic_codes(
    x, spec: Float | Int, variant: str, bits: int, random, saturation: str = "finite"
) -> np.ndarray:
    """The codes of `x` under StochasticA, B or C with `bits` random bits, `random` for each x."""
    x, random = np.broadcast_arrays(np.atleast_1d(x), np.asarray(random))
    source = exact(x)
    at = place(source, spec)
    up = goes_up_stochastically(at, variant, bits, random)
    return _finish(source, at, up, spec, "stochastic", saturation).astype(spec.unsigned)


def _finish(x: Exact, at: Place, up, spec: Float | Int, rounding, saturation) -> np.ndarray:
    if isinstance(spec, Int):
        return _finish_int(x, at, up, spec, saturation)
    return finish_float(at.lower + up, x.negative, x.is_inf, x.is_nan, spec, rounding, saturation)


def finish_float(
    size, negative, is_inf, is_nan, spec: Float, rounding: str, saturation: str
) -> np.ndarray:
    """Saturation, the sign and NaN, after the rounding to the magnitude `size`."""
    stays_finite = {
        "toward_zero": True,
        "toward_positive": negative,
        "toward_negative": ~negative,
        "to_odd": spec.max_code % 2 == 1,
    }.get(rounding, False)
    overflowed = {
        "finite": spec.max_code,
        "propagate": np.where(is_inf, spec.overflowed, spec.max_code),
        "none": np.where(~is_inf & stays_finite, spec.max_code, spec.overflowed),
    }[saturation]
    code = np.where((size > spec.max_code) | is_inf, overflowed, size)
    if not spec.signed:
        below = negative & ((size >= (1 if spec.zero else 0)) | is_inf)
        below |= (size < 0) & ~is_inf  # E8M0 has no zero
        bottom = spec.nan if saturation == "none" and spec.nan is not None else 0
        code = np.where(below, bottom, code)
    code = np.where(is_nan, spec.max_code if spec.nan is None else spec.nan, code)
    signed = negative & spec.signed
    if spec.kind in ("fnuz", "extended"):
        signed = signed & (code != 0) & (code != spec.nan)
    if spec.nan is None:
        signed = signed & ~is_nan
    return code.astype(np.uint64) + signed * np.uint64(spec.sign)


def _finish_int(x: Exact, at: Place, up, spec: Int, saturation: str) -> np.ndarray:
    size = at.lower + up.astype(np.uint64)
    wrapped = np.where(x.negative, ~size + np.uint64(1), size)
    limits = np.array([spec.highest, -spec.lowest], np.uint64)
    limit = np.where(x.negative, limits[1], limits[0])
    ends = np.array([spec.highest, spec.lowest % 2**64], np.uint64)
    end = np.where(x.negative, ends[1], ends[0])
    clamps = np.zeros(size.shape, bool) if saturation == "none" else at.huge | (size > limit)
    code = np.where(clamps | x.is_inf, end, wrapped)
    return np.where(x.is_nan, np.uint64(0), code) & np.uint64(2**spec.bits - 1)


@functools.cache
def _line(spec: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values in rising order, their codes, and the ties; with `beyond` at both ends if there is."""
    order = spec.order
    values = np.array([spec.values[code] for code in order])
    ties = (values[1:] + values[:-1]) / 2 if spec.ties is None else np.array(spec.ties)
    if spec.beyond is None:
        return values, np.array(order), ties
    out = float(spec.beyond)
    ends = [(values[0] - out) / 2], [(values[-1] + out) / 2]
    values = np.r_[-out, values, out]
    return values, np.r_[order[0] + 1, order, order[-1] + 1], np.r_[ends[0], ties, ends[1]]


def _table_indices(x: np.ndarray, spec: Table, rounding: str) -> np.ndarray:
    """Where in `_line` finite numbers go."""
    values, order, ties = _line(spec)
    wide = _float64(x)
    wide = np.clip(np.where(np.isfinite(wide), wide, 0), values[0], values[-1])
    low = np.searchsorted(values, wide, side="right") - 1
    high = np.minimum(low + 1, values.size - 1)
    tie = ties[np.minimum(low, ties.size - 1)]
    low_odd, high_odd = order[low] % 2 == 1, order[high] % 2 == 1
    upper_is_larger = np.abs(values[high]) > np.abs(values[low])
    up = {
        "nearest_even": (wide > tie) | ((wide == tie) & low_odd & ~high_odd),
        "nearest_away": (wide > tie) | ((wide == tie) & upper_is_larger),
        "toward_zero": wide < 0,
        "toward_positive": True,
        "toward_negative": False,
        "to_odd": high_odd & ~low_odd,
    }[rounding]
    return np.where((wide != values[low]) & up, high, low)


def _finish_table(x, spec: Table, index, rounding: str, saturation: str) -> np.ndarray:
    values, order, _ = _line(spec)
    wide = _float64(x)
    negative, is_inf = wide < 0, np.isinf(wide)
    largest, lowest = spec.order[-1], spec.order[0]
    limit = np.where(negative, lowest, largest)
    if spec.overflow == "inf":
        positive, minus = spec.values.index(math.inf), spec.values.index(-math.inf)
        overflowed = np.where(negative, minus, positive)
    else:
        overflowed = limit if spec.overflow == "max" else np.full(wide.shape, spec.nan)
    stays_finite = {
        "toward_zero": True,
        "toward_positive": negative,
        "toward_negative": ~negative,
        "to_odd": limit % 2 == 1,
    }.get(rounding, False)
    ended = (index == 0) | (index == values.size - 1) if spec.beyond is not None else False
    beyond = {
        "finite": limit,
        "propagate": np.where(is_inf, overflowed, limit),
        "none": np.where(~is_inf & stays_finite, limit, overflowed),
    }[saturation]
    code = np.where(ended | is_inf, beyond, order[index])
    return np.where(np.isnan(wide), largest if spec.nan is None else spec.nan, code)


@functools.cache
def magnitudes(spec: Float) -> np.ndarray:
    """The finite magnitudes in order of their codes, and the next in line: float64, exact."""
    code = np.arange(spec.max_code + 2, dtype=np.int64)
    field, mantissa = code >> spec.mantissa, code & (2**spec.mantissa - 1)
    subnormal = (field == 0) & spec.zero
    integer = np.where(subnormal, mantissa, mantissa + 2**spec.mantissa)
    exponent = np.maximum(field, 1 if spec.zero else 0) - spec.bias - spec.mantissa
    values = np.ldexp(integer.astype(np.float64), exponent)
    assert np.all(np.diff(values) > 0)
    assert np.all(np.isfinite(values))
    return values


def codes_by_comparison(x, spec: Float, saturation: str, rounding: str) -> np.ndarray:
    """The codes of float32, float16 or bfloat16 inputs, looked up among all values."""
    x = np.asarray(x)
    negative = np.signbit(x)
    wide = _float64(x)
    is_nan, is_inf = np.isnan(wide), np.isinf(wide)
    size = np.abs(np.where(is_nan | is_inf, 0, wide))
    table = magnitudes(spec) if spec.zero else np.r_[0.0, magnitudes(spec)]
    first = 0 if spec.zero else -1
    low = np.minimum(np.searchsorted(table, size, side="right") - 1, table.size - 1)
    high = np.minimum(low + 1, table.size - 1)
    middle = (table[low] + table[high]) / 2
    inexact, odd = (size != table[low]) & (low < table.size - 1), (low + first) % 2 == 1
    up = {
        "nearest_even": (size > middle) | ((size == middle) & odd),
        "nearest_away": size >= middle,
        "toward_zero": False,
        "toward_positive": ~negative,
        "toward_negative": negative,
        "to_odd": ~odd,
    }[rounding]
    rounded = low + (inexact & up) + first
    got = finish_float(rounded, negative, is_inf, is_nan, spec, rounding, saturation)
    return got.astype(spec.unsigned)


def fraction_code(
    x: Fraction,
    spec: Spec,
    saturation: str = "none",
    rounding: str = "nearest_even",
    random: tuple[str, int, int] | None = None,
) -> int:
    """The code of a finite x by rational arithmetic alone; `random` is (variant, N, R)."""
    if isinstance(spec, Int):
        size, rest = divmod(abs(x), 1)
        size += _fraction_goes_up(rest, size % 2 == 1, x < 0, rounding, random)
        value = -size if x < 0 else size
        if saturation != "none":
            value = min(max(value, spec.lowest), spec.highest)
        return value % 2**spec.bits
    first = 0 if spec.zero else -1
    low, above_all = first - 1, spec.max_code + 2  # `bisect` takes no range beyond 2**63
    while above_all - low > 1:
        middle = (low + above_all) // 2
        low, above_all = (low, middle) if spec.fraction(middle) > abs(x) else (middle, above_all)
    if low > spec.max_code:
        size = low
    else:
        below, above = spec.fraction(low), spec.fraction(low + 1)
        rest = (abs(x) - below) / (above - below)
        size = low + _fraction_goes_up(rest, low % 2 == 1, x < 0, rounding, random)
    negative = x < 0
    if not spec.signed and ((negative and (size > 0 or not spec.zero)) or size < 0):
        return spec.nan if saturation == "none" and spec.nan is not None else 0
    if size > spec.max_code:
        toward = {"toward_positive": negative, "toward_negative": not negative}
        stays = {**toward, "toward_zero": True, "to_odd": spec.max_code % 2 == 1}
        clamps = saturation != "none" or stays.get(rounding, False)
        size = spec.max_code if clamps else spec.overflowed
    if spec.signed and negative:
        one_of_a_kind = spec.kind in ("fnuz", "extended") and size in (0, spec.nan)
        size += 0 if one_of_a_kind else spec.sign
    return size


def _fraction_goes_up(rest: Fraction, odd: bool, negative: bool, rounding, random) -> bool:
    if random is not None:
        variant, bits, r = random
        if variant == "A":
            return math.floor(rest * 2**bits) + r >= 2**bits
        if variant == "B":
            return math.floor(rest * 2 ** (bits + 1)) + 2 * r + 1 >= 2 ** (bits + 1)
        return round(rest * 2**bits) + r >= 2**bits  # Fractions round half to even
    half = Fraction(1, 2)
    return {
        "nearest_even": rest > half or (rest == half and odd),
        "nearest_away": rest >= half,
        "toward_zero": False,
        "toward_positive": rest > 0 and not negative,
        "toward_negative": rest > 0 and negative,
        "to_odd": rest > 0 and not odd,
    }[rounding]


def values64(spec: Spec) -> np.ndarray:
    """What each code decodes to, float64."""
    return np.array([float(spec.value(code)) for code in range(2**spec.bits)])


def values32(code: np.ndarray, spec: Spec) -> np.ndarray:
    """What `code` decodes to: float32, every NaN quiet; its sign stays where codes have one."""
    code = np.asarray(code)
    if isinstance(spec, Int):
        wide = code.astype(np.int64)
        negative = spec.signed & (wide > spec.highest)
        return (wide - negative * 2**spec.bits).astype(np.float32)
    if isinstance(spec, Table):
        return np.array(spec.values, np.float32)[code]
    unsigned = (code.astype(np.int64) & (spec.magnitudes - 1)).astype(np.int64)
    negative = (code >= spec.sign) & spec.signed
    value = magnitudes(spec)[np.minimum(unsigned, spec.max_code)]
    is_nan = unsigned > spec.max_code
    if spec.kind in ("ieee", "extended"):
        value = np.where(unsigned == spec.inf, np.inf, value)
        is_nan = unsigned > spec.inf
    if spec.kind in ("fnuz", "extended"):
        is_nan = code == spec.nan
        negative = negative & ~is_nan
    with np.errstate(over="raise", under="ignore"):
        narrow = value.astype(np.float32)
    assert np.array_equal(narrow, value)
    bits = np.where(is_nan, np.uint32(0x7FC00000), narrow.view(np.uint32))
    return (bits | (negative.astype(np.uint32) << np.uint32(31))).view(np.float32)


def every_16_bit_input(source: str) -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(SOURCES[source])


def marks(spec: Spec, most: int = 2**18) -> np.ndarray:
    """Magnitudes at which a rounding may change: values, ties, and a little beyond. float64."""
    rng = np.random.default_rng(20240917)
    if isinstance(spec, Int):
        halves = np.arange(min(2**17, 2 ** (min(spec.bits, 16) + 2)), dtype=np.float64) / 2
        powers = 2.0 ** np.arange(17, max(36, spec.bits + 3))
        near = np.arange(-8, 9) / 2
        points = np.concatenate([halves, (powers[:, None] + near).ravel()])
        return np.concatenate([points, 2.0**spec.bits + near, 2.0 ** (spec.bits - 1) + near])
    if isinstance(spec, Table):
        values, _, ties = _line(spec)
        return np.abs(np.concatenate([values, ties, [values[-1] * 1.25, values[-1] * 2]]))
    table = magnitudes(spec)
    points = np.concatenate([table, (table[:-1] + table[1:]) / 2])
    if points.size > most:
        ends = np.r_[0:64, spec.max_code - 64 : spec.max_code + 66, -64:0]
        points = points[np.r_[ends, rng.integers(0, points.size, most // 2)]]
    return np.concatenate([points, [table[1] / 4, table[-1] * 1.25, table[-1] * 2]])


def float32_inputs(spec: Spec, random: int = 2**20) -> np.ndarray:
    """Every value and tie of `spec`, their neighbours, the extremes, and random patterns."""
    rng = np.random.default_rng(20240917)
    points = marks(spec)
    if isinstance(spec, Int):
        size = np.ldexp(rng.random(2**16), rng.integers(-2, 40, 2**16))
    else:
        # Random magnitudes with as many in each binade of the format, and a little beyond.
        nonzero = points[points > 0]
        low, high = max(np.log2(nonzero.min()) - 3, -150), np.log2(nonzero.max()) + 2
        exponents = rng.integers(int(low), int(high) + 1, min(2**17, 8 * random))
        size = np.ldexp(1 + rng.random(exponents.size), exponents)
    with np.errstate(over="ignore", under="ignore"):
        exact_points = points[points.astype(np.float32) == points].astype(np.float32)
        size = size.astype(np.float32)
    pattern = exact_points.view(np.uint32)
    pattern = np.concatenate([pattern, pattern + np.uint32(1), pattern - (pattern > 0)])
    subnormal = np.concatenate(
        [
            np.arange(0x400),
            2 ** np.arange(23),
            0x7FFFFF - np.arange(0x400),
            rng.integers(0, 2**23, 2**12),
        ]
    )
    extreme = np.array([0, 0x00800000, 0x7F7FFFFF, 0x7F800000], np.uint32)
    nans = np.array(
        [
            *(0x7F800001, 0x7F800002, 0x7F801000, 0x7FA55AA5, 0x7FBFFFFF, 0x7FC00000),
            *(0x7FC00001, 0x7FFFFFFF, 0x7FDEADBE),
            *range(0x7F800001, 0x7FFFFFFF, 0x3FFF1),
        ]
    )
    pattern = np.concatenate(
        [p.astype(np.uint32) for p in (pattern, size.view(np.uint32), subnormal, extreme, nans)]
    )
    pattern = np.concatenate([pattern, pattern | np.uint32(0x80000000)])
    patterns = rng.integers(0, 2**32, random, dtype=np.uint32)
    return np.concatenate([pattern, patterns]).view(np.float32)


def float64_inputs(spec: Spec, most: int = 2**14) -> np.ndarray:
    """Values and ties +-1 ulp of float64 and +-1 ulp of float32, the extremes, random numbers."""
    rng = np.random.default_rng(20240918)
    points = marks(spec)
    if points.size > most:
        points = points[rng.integers(0, points.size, most)]
    pattern = points.view(np.uint64)
    below = pattern - (pattern > 0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = points.astype(np.float32)
        beside = [np.nextafter(narrow, np.float32(end)) for end in (0, np.inf)]
    beside = [b.astype(np.float64).view(np.uint64) for b in beside]
    random = rng.integers(0, 2**64, 2**12, dtype=np.uint64)
    extreme = [0, 1, 2**52 - 1, 2**52, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000]
    extreme += [0x7FF8000000000000, 0x7FF0000000000001, 0x380FFFFFFFFFFFFF, 0x36A0000000000000]
    extreme += [0x36A0000000000001, 0x47EFFFFFE0000000, 0x47EFFFFFF0000000, 0x47EFFFFFF0000001]
    extreme = np.array(extreme, np.uint64)
    size = np.concatenate([pattern, pattern + np.uint64(1), below, *beside, extreme, random])
    return np.concatenate([size, size | np.uint64(2**63)]).view(np.float64)


def integer_inputs(dtype) -> np.ndarray:
    """Every power of two of the dtype and its neighbours; what few bits say; random numbers."""
    info = np.iinfo(dtype)
    rng = np.random.default_rng(20240919)
    powers = [2**power for power in range(info.bits + 1)]
    near = [power + step for power in powers for step in (-3, -2, -1, 0, 1, 2, 3)]
    pairs = [a + b + c for a in powers for b in powers if b < a for c in (-1, 0, 1)]
    points = {*near, *pairs, *(-p for p in near), *(-p for p in pairs), *range(-300, 301)}
    random = [
        int(r) >> int(s)
        for r, s in zip(rng.integers(0, 2**63, 2048), rng.integers(0, info.bits, 2048), strict=True)
    ]
    points = {*points, *random, *(-r for r in random), info.min, info.max}
    return np.array(sorted(p for p in points if info.min <= p <= info.max), dtype)


def inputs(source: str, spec: Spec, random: int = 2**20) -> np.ndarray:
    return float32_inputs(spec, random) if source == "float32" else every_16_bit_input(source)


def bits_of(x) -> np.ndarray:
    """The array's bits as unsigned integers, so that NaNs and zeros compare by their patterns."""
    x = np.ascontiguousarray(np.asarray(x)).reshape(np.shape(x))
    return np.atleast_1d(x).view(f"uint{8 * x.dtype.itemsize}").reshape(x.shape)


def assert_same_bits(got, expected, x=None) -> None:
    """Equal dtype, shape and bits; names the first input where not."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    wrong = bits_of(got) != bits_of(expected)
    if wrong.any():
        first = np.argmax(wrong.ravel())
        source = ""
        if x is not None:
            value = np.asarray(x).ravel()[first : first + 1]
            source = f" for {value[0]!r} = {bits_of(value)[0]:#x}"
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} differ; first: got {bits_of(got).ravel()[first]:#x}, "
            f"expected {bits_of(expected).ravel()[first]:#x}{source}"
        )


def assert_same_variants(got, expected, x, variants=tuple(VARIANTS)) -> None:
    """Rows as `every_code` gives them; names the first variant and input that differ."""
    got = np.asarray(got)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if not np.array_equal(got, expected):
        for variant, row, wanted in zip(variants, got, expected, strict=True):
            try:
                assert_same_bits(row, wanted, x)
            except AssertionError as error:
                raise AssertionError(f"{variant}: {error}") from None


def _float64(x: np.ndarray) -> np.ndarray:
    """Exact, and without the warning that numpy gives for signaling NaNs."""
    with np.errstate(invalid="ignore"):
        if x.dtype.kind in "iub":
            return x.astype(np.float64)
        return (x if x.dtype == np.float64 else x.astype(np.float32)).astype(np.float64)


def in_one_jit(encode, fmt, variants=tuple(VARIANTS)):
    """`encode` in all variants compiled at once: x to rows as `every_code` gives them."""

    @jax.jit
    def compiled(x):
        return [encode(x, fmt, rounding=r, saturation=s) for r, s in variants]

    return lambda x: np.stack([np.asarray(codes) for codes in compiled(x)])


def op_by_op(encode, fmt, variants=tuple(VARIANTS)):
    """As `in_one_jit`, but every primitive by itself: compiled once for all formats together.

    A cast with all its variants takes a second to compile, and formats that round by the same path
    differ in nothing but constants. Inputs are cut and padded, so that there are two shapes.
    """

    def run(x):
        size = 2**16 if x.size <= 2**16 else 5 * 2**16
        parts = np.resize(x, (-(-x.size // size), size))
        with jax.disable_jit():
            rows = [
                [np.asarray(encode(part, fmt, rounding=r, saturation=s)) for part in parts]
                for r, s in variants
            ]
        return np.array(rows).reshape(len(variants), -1)[:, : x.size]

    return run
