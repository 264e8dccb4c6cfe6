"""An exact oracle for block formats that shares no code with the library.

The parameters of the formats are typed in from the published tables; `qtoolkit.formats` only builds
the objects that the calls take. Scales are rational numbers, block by block, or float32 operations
of numpy, which are IEEE's, where the arithmetic of the library is defined as such. Elements are
rounded by the oracle of the casts, from float64 where the scaled element is exact.
"""

import dataclasses
from fractions import Fraction

import ml_dtypes
import numpy as np
from casts_oracle import (
    DTYPES,
    SPECS,
    Float,
    Int,
    Table,
    bits_of,
    every_code,
    fraction_code,
    stochastic_codes,
    values32,
)

from qtoolkit.formats import BlockFormat

POWER_RULES = ("floor", "ceil", "rceil", "even", "below")
F32 = np.float32
_WIDE = Int(64, True)
LEAST_NORMAL = F32(2.0**-126)
SOURCES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A block format, typed by hand: names are those of the tables of `casts_oracle`.

    `block` are the lengths along the last axes, or along `axes`; None is the whole axis;
    `other_axes` is the length along all other ones.
    """

    element: str
    block: tuple[int | None, ...] = ()
    axes: tuple[int, ...] | None = None
    other_axes: int | None = 1
    scale: str | None = "float32"
    rule: str = "amax"
    tensor_scale: bool = False
    zero_point: bool = False
    element_exponent: int = 0
    narrow_range: bool = False
    amax_epsilon: float = 0.0
    tensor_scale_divides: bool = False

    @property
    def spec(self) -> Float | Int | Table:
        return SPECS[self.element]

    @property
    def scale_spec(self) -> Float:
        return SPECS[self.scale]

    @property
    def powers(self) -> bool:
        """Whether scales are exponents alone."""
        return self.scale is not None and self.scale_spec.mantissa == 0

    @property
    def has_nan(self) -> bool:
        return not isinstance(self.spec, Int) and self.spec.nan is not None

    @property
    def largest(self) -> Fraction:
        """M: what the largest element stands for."""
        spec = self.spec
        if isinstance(spec, Int):
            size = Fraction(spec.highest)
        elif isinstance(spec, Table):
            size = spec.value(spec.order[-1])
        else:
            size = spec.fraction(spec.max_code)
        return size * Fraction(2) ** self.element_exponent

    @property
    def mantissa(self) -> int:
        """Bits after the leading one, which "even" rounds amax to; tables have no such rule."""
        spec = self.spec
        if isinstance(spec, Table):
            return 3
        return spec.mantissa if isinstance(spec, Float) else max(spec.bits - spec.signed - 1, 0)

    @property
    def limits(self) -> tuple[int, int]:
        """Of integers."""
        return self.spec.lowest + self.narrow_range, self.spec.highest

    def lengths(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axes = self.axes if self.axes is not None else range(-len(self.block), 0)
        given = {axis % len(shape): length for axis, length in zip(axes, self.block, strict=True)}
        wanted = [given.get(axis, self.other_axes) for axis in range(len(shape))]
        return tuple(n if w is None else w for n, w in zip(shape, wanted, strict=True))

    def counts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-n // b) for n, b in zip(shape, self.lengths(shape), strict=True))

    def as_format(self) -> BlockFormat:
        """The same parameters as a block format of the library."""
        fields = dataclasses.asdict(self) | {"tensor_scale": "float32" * self.tensor_scale or None}
        return BlockFormat(**fields)


# OCP Microscaling Formats (MX) 1.0; the default rules are the library's decision.
_MX = {"block": (32,), "scale": "e8m0fnu"}
PRESETS = {
    "mxfp8_e4m3": Blocks("e4m3fn", rule="rceil", **_MX),
    "mxfp8_e5m2": Blocks("e5m2", rule="rceil", **_MX),
    "mxfp6_e2m3": Blocks("e2m3fn", rule="even", **_MX),
    "mxfp6_e3m2": Blocks("e3m2fn", rule="rceil", **_MX),
    "mxfp4": Blocks("e2m1fn", rule="even", **_MX),
    "mxint8": Blocks("int8", rule="floor", element_exponent=-6, narrow_range=True, **_MX),
    # arXiv:2509.25149; arXiv:2412.19437 and its kernels; arXiv:2305.14314.
    "nvfp4": Blocks("e2m1fn", block=(16,), scale="e4m3fn", tensor_scale=True),
    "deepseek_1x128": Blocks("e4m3fn", block=(1, 128), amax_epsilon=1e-4),
    "deepseek_128x128": Blocks("e4m3fn", block=(128, 128), amax_epsilon=1e-4),
    "deepseek_1x128_e8m0": Blocks(
        "e4m3fn", block=(1, 128), scale="e8m0fnu", rule="rceil", amax_epsilon=1e-4
    ),
    "deepseek_128x128_e8m0": Blocks(
        "e4m3fn", block=(128, 128), scale="e8m0fnu", rule="rceil", amax_epsilon=1e-4
    ),
    "int8_group128": Blocks("int8", block=(128,)),
    "int4_group32": Blocks("int4", block=(32,)),
    "int4_group128": Blocks("int4", block=(128,)),
    "nf4_block64": Blocks("nf4", block=(64,)),
}


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What `quantize` should give.

    `scale` has the dtype of the scale format, or its codes; `poisoned` marks the elements whose
    codes are not specified, in the shape of x, and `poisoned_blocks` the blocks, in that of scale.
    """

    blocks: Blocks
    codes: np.ndarray
    scale: np.ndarray | None
    tensor_scale: np.ndarray | None
    zero_point: np.ndarray | None
    poisoned: np.ndarray
    poisoned_blocks: np.ndarray
    factor: np.ndarray  # the effective scale of each element: float64 for E8M0, else float32

    @np.errstate(all="ignore")
    def dequantize(self, dtype=np.float32) -> np.ndarray:
        q = values32(self.codes, self.blocks.spec)
        if self.zero_point is not None:
            zero = spread(self.zero_point, self.blocks, q.shape)
            q = (q.astype(np.int64) - zero).astype(F32)
        if self.scale is None:
            wide = q
        elif self.blocks.powers:
            wide = (q.astype(np.float64) * self.factor).astype(F32)
        else:
            wide = q * self.factor
        assert wide.dtype == F32
        with np.errstate(over="ignore"):
            rounded = np.where(self.poisoned, F32(np.nan), wide).astype(dtype)
        largest = F32(ml_dtypes.finfo(dtype).max).astype(dtype)
        is_finite = np.isfinite(q) & np.isinf(rounded)  # saturates
        return np.where(is_finite, np.copysign(largest, rounded), rounded)


def spread(per_block: np.ndarray, blocks: Blocks, shape: tuple[int, ...]) -> np.ndarray:
    """One value for each element, from one for each block."""
    for axis, (n, length) in enumerate(zip(shape, blocks.lengths(shape), strict=True)):
        index = np.arange(n) // length
        per_block = np.take(per_block, index, axis)
    return per_block


def floor_log2(x: Fraction) -> int:
    assert x > 0
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def power_limits(scale: Float) -> tuple[int, int]:
    """The exponents of the powers of two that a scale may be."""
    lowest = -scale.bias if not scale.zero else scale.min_step
    if scale.mantissa:
        lowest = max(lowest, -126)  # no subnormal float32
    return lowest, floor_log2(scale.fraction(scale.max_code))


def power_exponent(amax: Fraction, blocks: Blocks) -> int:
    """The exponent of the scale, by the rule; OCP MX 1.0, section 6.3, is "floor"."""
    least, most = power_limits(blocks.scale_spec)
    if amax == 0:
        return least
    whole, target = floor_log2(amax), floor_log2(blocks.largest)
    match blocks.rule:
        case "floor":
            exponent = whole - target
        case "ceil":
            exponent = whole - target + (amax != Fraction(2) ** whole)
        case "rceil":  # the least that does not clip
            exponent = whole - target - 1
            while amax > blocks.largest * Fraction(2) ** exponent:
                exponent += 1
        case "below":  # the least with which amax is below the largest
            exponent = whole - target - 1
            while amax >= blocks.largest * Fraction(2) ** exponent:
                exponent += 1
        case "even":  # of amax rounded to the element's mantissa, half to even
            rounded = round(amax / Fraction(2) ** (whole - blocks.mantissa))
            exponent = floor_log2(rounded * Fraction(2) ** (whole - blocks.mantissa)) - target
        case _:
            raise AssertionError(blocks.rule)
    return min(max(exponent, least), most)


def rounded_scales(values: np.ndarray, scale: Float) -> np.ndarray:
    """To nearest even, saturating: positive float32."""
    if scale == SPECS["float32"]:
        return values
    codes = every_code(values, scale, (("nearest_even", "finite"),))[0]
    return values32(codes, scale)


@np.errstate(all="ignore")
def quantize(
    x: np.ndarray,
    blocks: Blocks,
    rounding: str = "nearest_even",
    saturation: str = "finite",
    *,
    scale=None,
    tensor_scale=None,
    zero_point=None,
    random: tuple[str, int, np.ndarray] | None = None,
) -> Quantized:
    """The library's `quantize` of float32, float16 or bfloat16; `random` is (variant, bits, R)."""
    x = np.asarray(x)
    assert x.dtype in SOURCES.values()
    wide = x.astype(F32)
    shape, counts = x.shape, blocks.counts(x.shape)
    how = (rounding, saturation, random)
    if blocks.scale is None:
        nothing = np.zeros(shape, bool)
        codes = _codes(wide, blocks, *how)
        return Quantized(blocks, codes, None, None, None, nothing, nothing, np.ones(shape, F32))
    total = F32(1)
    if blocks.tensor_scale:
        total = _tensor_scale(wide, blocks) if tensor_scale is None else F32(tensor_scale)
    amax, low, high, poisoned = _of_blocks(wide, blocks)
    if scale is None:
        decoded = _scales(amax, low, high, blocks, total)
    else:
        given = np.broadcast_to(np.asarray(scale, F32), counts)
        decoded = rounded_scales(given, blocks.scale_spec)
    zero = None
    if blocks.zero_point:
        zero = _zero_points(low, decoded, blocks) if zero_point is None else zero_point
        zero = np.broadcast_to(np.asarray(zero, np.int32), counts)
    poisoned_elements = spread(poisoned, blocks, shape)
    if blocks.powers:
        factor = spread(decoded, blocks, shape).astype(np.float64)
        factor = factor * 2.0**blocks.element_exponent
        u = wide.astype(np.float64) / factor  # powers of two, far inside of float64
    else:
        both = decoded / total if blocks.tensor_scale_divides else decoded * total
        factor = spread(both, blocks, shape) * F32(2.0**blocks.element_exponent)
        assert factor.dtype == F32
        u = wide / factor
        assert u.dtype == F32
    each_zero = None if zero is None else spread(zero, blocks, shape)
    return Quantized(
        blocks=blocks,
        codes=_codes(u, blocks, *how, each_zero),
        scale=_stored(np.where(poisoned, F32(np.nan), decoded), blocks.scale),
        tensor_scale=np.asarray(total) if blocks.tensor_scale else None,
        zero_point=zero,
        poisoned=poisoned_elements,
        poisoned_blocks=poisoned,
        factor=factor,
    )


def _of_blocks(wide, blocks: Blocks) -> tuple[np.ndarray, ...]:
    """Of each block: the largest magnitude, the least and largest with zero, whether poisoned."""
    counts, lengths = blocks.counts(wide.shape), blocks.lengths(wide.shape)
    amax, low, high = (np.zeros(counts, F32) for _ in range(3))
    poisoned = np.zeros(counts, bool)
    finite = np.where(np.isfinite(wide), wide, F32(0))
    nan = np.isnan(wide) & (not blocks.has_nan)
    for at in np.ndindex(counts):
        block = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, lengths, strict=True))
        low[at], high[at] = min(finite[block].min(), 0), max(finite[block].max(), 0)
        amax[at] = max(-low[at], high[at], F32(blocks.amax_epsilon))
        poisoned[at] = nan[block].any()
    return amax, low, high, poisoned


def _tensor_scale(wide, blocks: Blocks) -> np.float32:
    size = np.abs(wide[np.isfinite(wide)]).max(initial=0)
    if size == 0:
        return F32(1)
    most = blocks.scale_spec.fraction(blocks.scale_spec.max_code)
    if blocks.tensor_scale_divides:  # a number over a tensor is the reciprocal times it, in PyTorch
        return F32(1) / size * F32(float(blocks.largest * most))
    least = F32(float(Fraction(2) ** -126 / blocks.scale_spec.fraction(1)))
    return max(size / F32(float(blocks.largest * most)), least)


def _scales(amax, low, high, blocks: Blocks, total) -> np.ndarray:
    """The scale of each block, as float32."""
    scale = blocks.scale_spec
    if blocks.rule in POWER_RULES:
        exponents = [power_exponent(Fraction(float(a)), blocks) for a in amax.ravel()]
        return np.ldexp(1.0, exponents).astype(F32).reshape(amax.shape)
    least = F32(float(scale.fraction(1)))
    divisor = F32(float(blocks.largest))
    if blocks.rule == "range" and isinstance(blocks.spec, Int):
        divisor = F32((blocks.spec.highest - blocks.spec.lowest) / 2)
    if blocks.tensor_scale:
        quotients = amax / F32(float(blocks.largest))
        quotients = quotients * total if blocks.tensor_scale_divides else quotients / total
        return np.maximum(rounded_scales(quotients, scale), least)
    if blocks.zero_point:
        lowest, highest = blocks.limits
        reach = high - low
        quotients = np.where(reach == 0, F32(1), reach / F32(highest - lowest))
    else:
        quotients = np.where(amax == 0, F32(1), amax / divisor)
    assert quotients.dtype == F32
    return np.maximum(rounded_scales(quotients, scale), max(least, LEAST_NORMAL))


def _zero_points(low, scales, blocks: Blocks) -> np.ndarray:
    least, most = blocks.limits
    steps = low / scales
    assert steps.dtype == F32
    return np.clip(least - np.rint(steps.astype(np.float64)), least, most).astype(np.int32)


def _codes(u, blocks: Blocks, rounding, saturation, random, zero=None) -> np.ndarray:
    spec = blocks.spec
    rounded_to = _WIDE if zero is not None else spec
    if random is not None:
        codes = stochastic_codes(u, rounded_to, *random, saturation)
    else:
        codes = every_code(u, rounded_to, ((rounding, saturation),))[0]
    if not isinstance(spec, Int):
        return codes
    least, most = blocks.limits
    if zero is not None:
        integers = codes.astype(np.int64)
        limit = 2**40  # far beyond any code, and the sum stays within 64 bits
        integers = np.clip(np.clip(integers, -limit, limit) + zero, least, most)
        return (integers % 2**spec.bits).astype(spec.unsigned)
    if blocks.narrow_range:
        lowest = spec.lowest % 2**spec.bits
        codes = np.where(codes == lowest, spec.unsigned.type(lowest + 1), codes)
    return codes


def _stored(scale, name: str) -> np.ndarray:
    """Scales in their format's own dtype, or as codes where it has none."""
    if name == "float32":
        return scale
    code = every_code(scale, SPECS[name], (("nearest_even", "finite"),))[0]
    return code.view(DTYPES[name]) if name in DTYPES else code


def by_fractions(x: float, blocks: Blocks, exponent: int, rounding: str, saturation: str) -> int:
    """The code of a finite element under the scale 2**exponent, by rational arithmetic alone."""
    u = Fraction(float(x)) / Fraction(2) ** int(exponent + blocks.element_exponent)
    code = fraction_code(u, blocks.spec, saturation, rounding)
    if isinstance(blocks.spec, Int) and blocks.narrow_range:
        lowest = blocks.spec.lowest % 2**blocks.spec.bits
        return lowest + 1 if code == lowest else code
    return code


def stress(blocks: Blocks, dtype: str, low: int, high: int, every: int = 1) -> np.ndarray:
    """Blocks whose amax lies at and beside powers of two and where the rules change, and special
    ones: [rows, two whole blocks and a ragged one]. Exponents from `low` to `high`.
    """
    kind, rng = SOURCES[dtype], np.random.default_rng(20261121)
    length = blocks.block[-1] or 32
    ragged = length // 4 + 1
    info = ml_dtypes.finfo(kind)
    largest = float(blocks.largest)
    turns = [1.0, largest, 2 - 2.0 ** -(blocks.mantissa + 1)]
    powers = np.arange(low, high + 1, every)
    with np.errstate(over="ignore", under="ignore"):
        points = np.concatenate([turns[0] * 2.0**powers, *(t * 2.0 ** powers[::3] for t in turns)])
        points = points.astype(kind)
    unsigned = np.dtype(f"uint{info.bits}")
    points = points[np.isfinite(points) & (points > 0)].view(unsigned)
    points = np.concatenate([points, points + unsigned.type(1), points - unsigned.type(1)])
    ends = np.array([2.0**low, float(info.max)], kind)
    amax = points.view(kind)
    amax = np.concatenate([amax[np.isfinite(amax) & (amax >= ends[0])], ends])
    # The rest of a block: of one magnitude, of all, or on the grid of halves of its amax.
    size = amax.size
    share = rng.uniform(-1, 1, (size, length))
    share[::3] *= np.exp2(rng.integers(-20, 1, (size, length)))[::3]
    share[1::3] = np.round(share[1::3] * 64) / 64
    smallest = 0.0 if low < -126 else 2.0**-126
    body = amax.astype(np.float64)[:, None] * share
    body = np.where(np.abs(body) < smallest, 0 * body, body)
    with np.errstate(under="ignore"):
        body = body.astype(kind)
    body[np.arange(size), rng.integers(0, ragged, size)] = amax * rng.choice([-1, 1], size).astype(
        kind
    )
    special = np.zeros((18, length), kind)
    special[9:] = body[size // 2]
    special[1] = -special[0]
    for row in (2, 9):
        special[row, 1] = np.inf
    for row in (3, 10):
        special[row, ragged - 1] = -np.inf
    for row in (4, 11):
        special[row, 2] = np.nan
    special[5], special[6], special[7] = np.inf, np.nan, info.max
    special[12, :3] = np.nan, np.inf, -np.inf
    special[13, ::2], special[13, 1::2] = 0, -special[0, 0]
    special[14], special[15] = np.abs(special[14]), -np.abs(special[15])
    special[16, : ragged - 1] = 0
    every_block = np.concatenate([special, body])
    order = rng.permutation(len(every_block) // 3 * 3)
    first, second, third = every_block[order].reshape(3, -1, length)
    return np.concatenate([first, second, third[:, :ragged]], axis=1)


def packed_by_hand(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis as one long integer in little endian, the first code lowest."""
    group, width = (4, 3) if bits == 6 else (8 // bits, 1)
    rows = codes.reshape(-1, codes.shape[-1])
    count = -(-codes.shape[-1] // group) * width
    packed = [
        sum(int(code) << (bits * i) for i, code in enumerate(row)).to_bytes(count, "little")
        for row in rows
    ]
    return np.frombuffer(b"".join(packed), np.uint8).reshape(*codes.shape[:-1], count)


def same_numbers(got, expected, where="") -> None:
    """Equal dtypes, shapes and bits; of NaNs only that they are."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype, (where, got.dtype, expected.dtype)
    assert got.shape == expected.shape, (where, got.shape, expected.shape)
    with np.errstate(invalid="ignore"):
        nans = [x.astype(F32) != x.astype(F32) for x in (got, expected)]
    wrong = (bits_of(got) != bits_of(expected)) & ~(nans[0] & nans[1])
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{where}: {wrong.sum()} of {wrong.size} differ; first at {at}: got {got[at]!r} "
            f"({bits_of(got)[at]:#x}), expected {expected[at]!r} ({bits_of(expected)[at]:#x})"
        )


def assert_quantized(got, x, expected: Quantized, where: str = "") -> None:
    """The codes, the scales, the tensor scale and the zero points of a QArray."""
    x, spec = np.asarray(x), expected.blocks.spec
    codes = np.asarray(got.codes)
    assert codes.dtype == expected.codes.dtype, (where, codes.dtype)
    assert codes.shape == x.shape, (where, codes.shape)
    nan = [np.isnan(values32(c, spec)) for c in (codes, expected.codes)]
    wrong = (codes != expected.codes) & ~(nan[0] & nan[1]) & ~expected.poisoned
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        block = tuple(i // n for i, n in zip(at, expected.blocks.lengths(x.shape), strict=True))
        scale = None if expected.scale is None else expected.scale[block]
        raise AssertionError(
            f"{where}: {wrong.sum()} of {wrong.size} codes differ; first at {at}: got "
            f"{codes[at]:#x}, expected {expected.codes[at]:#x} for x={x[at]!r}, scale={scale!r}"
        )
    if expected.scale is None:
        assert got.scale is None
    else:
        same_numbers(got.scale, expected.scale, f"{where}: scale")
    for name in ("tensor_scale", "zero_point"):
        wanted, value = getattr(expected, name), getattr(got, name)
        if wanted is None:
            assert value is None
        elif name == "zero_point":
            assert np.asarray(value).dtype == np.int32
            keep = ~expected.poisoned_blocks
            assert np.shape(value) == wanted.shape
            np.testing.assert_array_equal(np.asarray(value)[keep], wanted[keep], where)
        else:
            same_numbers(value, wanted, f"{where}: {name}")
