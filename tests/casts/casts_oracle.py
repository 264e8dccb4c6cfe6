"""An exact oracle for casts that shares no code with the library.

The parameters are typed in from the published tables, not read from `qtoolkit.formats`. The values
of all codes, and the midpoints between neighbours, are float64 numbers without error (at most 25
significant bits), so finding the nearest by comparison is exact for every float32, float16 and
bfloat16 input. `fraction_code` does the same once more with rational numbers, one input at a time.
"""

import dataclasses
import functools
from fractions import Fraction

import ml_dtypes
import numpy as np

from qtoolkit.formats import FloatFormat, IntFormat, Overflow, Specials

SATURATIONS = ("finite", "propagate", "none")
SOURCES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Float:
    """Fields of a float format: `kind` is ieee, fn or fnuz, `overflow` is inf, nan or max."""

    exponent: int
    mantissa: int
    bias: int
    kind: str
    overflow: str

    @property
    def sign(self) -> int:
        return 2 ** (self.exponent + self.mantissa)

    @property
    def max_code(self) -> int:
        non_finite = {"ieee": 2**self.mantissa, "fn": 1, "fnuz": 0}[self.kind]
        return self.sign - 1 - non_finite

    @property
    def inf(self) -> int:
        assert self.kind == "ieee"
        return (2**self.exponent - 1) * 2**self.mantissa

    @property
    def nan(self) -> int:
        """Quiet and positive."""
        if self.kind == "ieee":
            return self.inf + 2 ** (self.mantissa - 1)
        return self.sign - 1 if self.kind == "fn" else self.sign

    @property
    def overflowed(self) -> int:
        if self.overflow == "inf":
            return self.inf
        return self.nan if self.overflow == "nan" else self.max_code

    @property
    def unsigned(self) -> np.dtype:
        bits = 1 + self.exponent + self.mantissa
        return np.dtype(np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32)

    def fraction(self, code: int) -> Fraction:
        """The magnitude that exponent and mantissa field spell."""
        field, mantissa = divmod(code, 2**self.mantissa)
        leading, field = (0, 1) if field == 0 else (2**self.mantissa, field)
        return (leading + mantissa) * Fraction(2) ** (field - self.bias - self.mantissa)

    def as_format(self, name: str) -> FloatFormat:
        """The same fields as a format of the library."""
        return FloatFormat(
            name=name,
            exponent_bits=self.exponent,
            mantissa_bits=self.mantissa,
            bias=self.bias,
            specials=Specials[self.kind.upper()],
            overflow=Overflow[self.overflow.upper()],
        )


@dataclasses.dataclass(frozen=True)
class Int:
    bits: int
    signed: bool

    @property
    def unsigned(self) -> np.dtype:
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32)

    def as_format(self, name: str) -> IntFormat:
        return IntFormat(name=name, bits=self.bits, signed=self.signed)


# arXiv:2209.05433, arXiv:2206.02915, IEEE 754-2019; bfloat16 is float32's upper half.
SHIPPED = {
    "e4m3fn": Float(4, 3, 7, "fn", "nan"),
    "e5m2": Float(5, 2, 15, "ieee", "inf"),
    "e4m3fnuz": Float(4, 3, 8, "fnuz", "nan"),
    "e5m2fnuz": Float(5, 2, 16, "fnuz", "nan"),
    "bfloat16": Float(8, 7, 127, "ieee", "inf"),
    "float16": Float(5, 10, 15, "ieee", "inf"),
    "int8": Int(8, True),
}


@functools.cache
def magnitudes(spec: Float) -> np.ndarray:
    """The finite magnitudes in order of their codes, and the next in line: float64, exact."""
    code = np.arange(spec.max_code + 2, dtype=np.int64)
    field, mantissa = code >> spec.mantissa, code & (2**spec.mantissa - 1)
    integer = np.where(field == 0, mantissa, mantissa + 2**spec.mantissa)
    exponent = np.maximum(field, 1) - spec.bias - spec.mantissa
    values = np.ldexp(integer.astype(np.float64), exponent)
    assert np.all(np.diff(values) > 0)
    return values


def codes(x: np.ndarray, spec: Float | Int, saturation: str) -> np.ndarray:
    """The codes of `x` (float32, float16 or bfloat16), rounded to nearest, ties to even."""
    assert saturation in SATURATIONS
    if isinstance(spec, Int):
        return _int_codes(x, spec, saturation)
    negative = np.signbit(x)
    exact = _float64(x)
    is_nan, is_inf, size = np.isnan(exact), np.isinf(exact), np.abs(exact)
    table = magnitudes(spec)
    lower = np.searchsorted(table, np.where(is_nan, 0, size), side="right") - 1
    lower = np.minimum(lower, spec.max_code)
    middle = (table[lower] + table[lower + 1]) / 2
    up = (size > middle) | ((size == middle) & (lower % 2 == 1))
    code = lower + up
    clamps = {
        "finite": np.ones(x.shape, bool),
        "propagate": ~is_inf,
        "none": np.zeros(x.shape, bool),
    }[saturation]
    beyond = code > spec.max_code
    code = np.where(beyond, np.where(clamps, spec.max_code, spec.overflowed), code)
    code = np.where(is_nan, spec.nan, code)
    if spec.kind == "fnuz":  # one zero, one NaN: neither takes a sign
        negative = negative & (code != 0) & (code != spec.nan)
    return (code + negative * spec.sign).astype(spec.unsigned)


def _int_codes(x: np.ndarray, spec: Int, saturation: str) -> np.ndarray:
    exact = _float64(x)
    modulus = 2.0**spec.bits
    lowest = -modulus / 2 if spec.signed else 0.0
    highest = modulus / 2 - 1 if spec.signed else modulus - 1
    integer = np.rint(np.where(np.isfinite(exact), exact, 0))
    # fmod is exact: the low bits of integers of any size.
    wanted = np.fmod(integer, modulus) if saturation == "none" else integer.clip(lowest, highest)
    wanted = np.where(exact == np.inf, highest, np.where(exact == -np.inf, lowest, wanted))
    wanted = np.where(np.isnan(exact), 0, wanted)
    return (wanted.astype(np.int64) % 2**spec.bits).astype(spec.unsigned)


def fraction_code(x: Fraction, spec: Float) -> int:
    """The code of a finite x under saturation "none", by rational arithmetic alone."""
    size = abs(x)
    near = min(
        range(spec.max_code + 2),
        key=lambda code: (abs(spec.fraction(code) - size), code % 2),
    )
    code = spec.overflowed if near > spec.max_code else near
    signed = x < 0 and (spec.kind != "fnuz" or code not in (0, spec.nan))
    return code + signed * spec.sign


def values32(code: np.ndarray, spec: Float | Int) -> np.ndarray:
    """What `code` decodes to: float32, every NaN quiet with its sign, FNUZ's positive."""
    if isinstance(spec, Int):
        wide = code.astype(np.int64)
        negative = spec.signed & (wide >= 2 ** (spec.bits - 1))
        return (wide - negative * 2**spec.bits).astype(np.float32)
    magnitude = (code & (spec.sign - 1)).astype(np.int64)
    negative = code >= spec.sign
    table = magnitudes(spec)
    value = table[np.minimum(magnitude, spec.max_code)]
    is_nan = magnitude > spec.max_code
    if spec.kind == "ieee":
        value = np.where(magnitude == spec.inf, np.inf, value)
        is_nan = magnitude > spec.inf
    if spec.kind == "fnuz":
        is_nan = code == spec.nan
    bits = value.astype(np.float32).view(np.uint32)
    bits = np.where(is_nan, np.uint32(0x7FC00000), bits)
    if spec.kind == "fnuz":
        negative = negative & ~is_nan
    return (bits | (negative.astype(np.uint32) << np.uint32(31))).view(np.float32)


def every_16_bit_input(source: str) -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(SOURCES[source])


def float32_inputs(spec: Float | Int, random: int = 2**20) -> np.ndarray:
    """Every value and tie of `spec`, their neighbours, the extremes, and random patterns."""
    rng = np.random.default_rng(20240917)
    if isinstance(spec, Int):
        halves = np.arange(min(2**17, 2 ** (spec.bits + 2)), dtype=np.float64) / 2
        powers = 2.0 ** np.arange(17, 36)
        near = np.arange(-8, 9) / 2
        points = np.concatenate([halves, (powers[:, None] + near).ravel()])
        points = np.concatenate([points, 2.0**spec.bits + near, 2.0 ** (spec.bits - 1) + near])
        size = np.ldexp(rng.random(2**16), rng.integers(-2, 40, 2**16))
    else:
        table = magnitudes(spec)
        points = np.concatenate([table, (table[:-1] + table[1:]) / 2])
        if points.size > 2**18:
            ends = np.r_[
                0:64, spec.max_code - 64 : spec.max_code + 66, points.size - 64 : points.size
            ]
            points = points[np.r_[ends, rng.integers(0, points.size, 2**17)]]
        # Random magnitudes with as many in each binade of the format, and a little beyond.
        low, high = np.log2(table[1]) - 3, np.log2(table[-1]) + 2
        exponents = rng.integers(int(low), int(high) + 1, 2**17)
        size = np.ldexp(1 + rng.random(2**17), exponents)
    points = np.abs(points)
    with np.errstate(over="ignore"):
        exact = points[points.astype(np.float32) == points].astype(np.float32)
        size = size.astype(np.float32)
    pattern = exact.view(np.uint32)
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


def inputs(source: str, spec: Float | Int, random: int = 2**20) -> np.ndarray:
    return float32_inputs(spec, random) if source == "float32" else every_16_bit_input(source)


def bits_of(x) -> np.ndarray:
    """The array's bits as unsigned integers, so that NaNs and zeros compare by their patterns."""
    x = np.asarray(x)
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


def _float64(x: np.ndarray) -> np.ndarray:
    """Exact, and without the warning that numpy gives for signaling NaNs."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32).astype(np.float64)
