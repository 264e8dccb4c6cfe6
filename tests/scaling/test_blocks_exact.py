"""Codes, scales and values of block formats, bit for bit, against `blocks_oracle`."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from blocks_oracle import (
    F32,
    POWER_RULES,
    PRESETS,
    SOURCES,
    Blocks,
    assert_quantized,
    by_fractions,
    packed_by_hand,
    power_exponent,
    quantize,
    same_numbers,
    stress,
)
from casts_oracle import ROUNDINGS, SATURATIONS

import qtoolkit as qt
from qtoolkit.scaling.internal import operand_values, unscaled_values

MX = [name for name in PRESETS if name.startswith("mx")]
TILES = ("deepseek_128x128", "deepseek_128x128_e8m0")
RANGES = {"float32": (-149, 127), "float16": (-24, 15), "bfloat16": (-133, 127)}
RESULTS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def check(x, cases, results=tuple(RESULTS), **options):
    """One compiled call for all `cases`, (blocks, spec, further arguments), each by the oracle.

    `x` is one array for all of them, or one for each.
    """
    xs = x if isinstance(x, list) else [x] * len(cases)

    def every(xs, arguments):
        found = []
        for x, (_, spec, extra), given in zip(xs, cases, arguments, strict=True):
            static = {k: v for k, v in extra.items() if k not in given}
            q = qt.quantize(x, spec, **static, **given, **options)
            found.append((q, [q.dequantize(RESULTS[name]) for name in results]))
        return found

    traced = ("scale", "tensor_scale", "zero_point", "random_bits")
    arguments = [{k: v for k, v in extra.items() if k in traced} for _, _, extra in cases]
    for x, (blocks, spec, extra), (q, values) in zip(
        xs, cases, jax.jit(every)(xs, arguments), strict=True
    ):
        how = {**options, **extra}
        if "random_bits" in how:
            rounding = how.pop("rounding")
            how["random"] = (rounding.variant, rounding.bits, how.pop("random_bits"))
        expected = quantize(x, blocks, **how)
        where = f"{spec if isinstance(spec, str) else blocks} {extra or ''} {x.dtype}"
        assert_quantized(q, x, expected, where)
        for name, value in zip(results, values, strict=True):
            same_numbers(value, expected.dequantize(RESULTS[name]), f"{where} to {name}")


def numbers(shape, dtype="float32", seed=0, low=-8, high=8):
    """Of many magnitudes."""
    rng = np.random.default_rng(seed)
    size = rng.normal(size=shape) * np.exp2(rng.integers(low, high + 1, shape))
    return size.astype(SOURCES[dtype])


# The oracle itself.


@pytest.mark.parametrize("name", MX)
def test_the_oracle_agrees_with_rational_arithmetic(name):
    """Elements by `Fraction`s alone, and the rules by their definitions."""
    blocks = PRESETS[name]
    x = stress(blocks, "float32", -149, 127, every=23)
    rng = np.random.default_rng(0)
    for rounding, saturation in (("nearest_even", "finite"), ("toward_positive", "none")):
        expected = quantize(x, blocks, rounding, saturation)
        exponents = expected.scale.view(np.uint8).astype(int) - 127
        known = np.isfinite(x) & (x != 0) & ~expected.poisoned
        for row, column in rng.permutation(np.argwhere(known))[:500]:
            exponent = exponents[row, column // 32]
            code = by_fractions(x[row, column], blocks, exponent, rounding, saturation)
            assert code == expected.codes[row, column]


def test_the_rules_of_the_oracle_by_hand():
    e4m3, e2m1, int8 = (PRESETS[name] for name in ("mxfp8_e4m3", "mxfp4", "mxint8"))
    table = {  # (amax, floor, ceil, rceil, even, below); the largest are 448, 6 and 127/64
        e4m3: [
            (150, -1, 0, -1, -1, -1),  # pytorch/ao#2035
            (448, 0, 1, 0, 0, 1),
            (449, 0, 1, 1, 0, 1),
            (479.9, 0, 1, 1, 0, 1),
            (496, 0, 1, 1, 1, 1),
            (256, 0, 0, 0, 0, 0),
            (2.0**-149, -127, -127, -127, -127, -127),
        ],
        e2m1: [
            (6, 0, 1, 0, 0, 1),
            (6.5, 0, 1, 1, 0, 1),
            (7, 0, 1, 1, 1, 1),
            (4, 0, 0, 0, 0, 0),
            (0, -127, -127, -127, -127, -127),
        ],
        int8: [
            (127 / 64, 0, 1, 0, 0, 1),
            (2 - 2**-8, 0, 1, 1, 1, 1),
            (1, 0, 0, 0, 0, 0),
            (1.5, 0, 1, 0, 0, 0),
        ],
    }
    for blocks, rows in table.items():
        for amax, *exponents in rows:
            for rule, exponent in zip(POWER_RULES, exponents, strict=True):
                by_rule = dataclasses.replace(blocks, rule=rule)
                assert power_exponent(Fraction(float(F32(amax))), by_rule) == exponent, (amax, rule)


# Examples by hand.


@pytest.mark.quick
def test_amax_150_of_e4m3():
    """pytorch/ao#2035: RCEIL 126, CEIL 127."""
    x = np.zeros((1, 32), F32)
    x[0, 3] = -150
    rules = {"rceil": 126, "ceil": 127, "floor": 126, "even": 126}
    specs = [dataclasses.replace(qt.formats.MXFP8_E4M3, rule=rule) for rule in rules]
    scales = jax.jit(lambda x: [qt.quantize(x, spec).scale for spec in specs])(x)
    assert [np.asarray(scale).view(np.uint8).item() for scale in scales] == list(rules.values())
    assert scales[0].dtype == jnp.float8_e8m0fnu
    # 300 * 2**-1 lies between 288 and 320, steps of E4M3.
    assert np.asarray(qt.fake_quantize(x, "mxfp8_e4m3"))[0, 3] == -144


@pytest.mark.quick
def test_blocks_by_hand():
    """OCP MX 1.0's FP4 and INT8; NVFP4 with a tensor scale of 1; unsigned integers from 0."""
    fp4 = np.zeros(32, F32)
    fp4[:16] = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    q = qt.quantize(fp4 * 8, "mxfp4")
    assert np.asarray(q.codes).tolist() == [*range(16), *[0] * 16]
    assert np.asarray(q.scale).view(np.uint8).tolist() == [127 + 3]
    same_numbers(q.dequantize(), fp4 * 8)

    int8 = np.zeros(32, F32)
    int8[:5] = [1, -1, 127 / 64, -127 / 64, 1 / 64]
    q = qt.quantize(int8, "mxint8")
    assert np.asarray(q.codes)[:6].tolist() == [64, 192, 127, 129, 1, 0]
    assert np.asarray(q.scale).view(np.uint8).tolist() == [127]
    q = qt.quantize(np.where(int8 == 1, F32(-1.999), int8), "mxint8")
    assert np.asarray(q.codes)[0] == 129  # never -128

    nv = np.zeros((2, 16), F32)
    nv[0, :2], nv[1, :3] = [6 * 448, 448], [-6, 0.75, 0.25]
    q = qt.quantize(nv, "nvfp4")
    assert np.asarray(q.tensor_scale) == 1
    assert np.asarray(q.scale).view(np.uint8).tolist() == [[0x7E], [0x38]]
    assert np.asarray(q.codes)[0, :2].tolist() == [7, 2]
    assert np.asarray(q.codes)[1, :4].tolist() == [15, 2, 0, 0]  # both are ties

    steps = np.arange(256, dtype=F32)
    for element, low, zero in (("uint8", 0, 0), ("uint8", -128, 128), ("int8", 0, -128)):
        q = qt.quantize(steps + F32(low), qt.BlockFormat.tensor(element, zero_point=True))
        assert np.asarray(q.scale).item() == 1
        assert np.asarray(q.zero_point).item() == zero
        first = 128 if element == "int8" else 0
        assert np.asarray(q.codes).tolist() == [(i + first) % 256 for i in range(256)]

    zeros = qt.quantize(np.zeros((1, 128), F32), "deepseek_1x128")
    assert np.asarray(zeros.scale).item() == F32(1e-4) / F32(448)
    ones = qt.quantize(np.zeros((1, 32), F32), "int4_group32")
    assert np.asarray(ones.scale).item() == 1


# Presets.


@pytest.mark.sample("mxfp8_e4m3-float32")
@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("name", MX)
def test_mx(name, dtype):
    """Every rule; data, scales and results down to the lowest subnormal, up to the largest."""
    every = [dataclasses.replace(PRESETS[name], rule=rule) for rule in POWER_RULES]
    x = stress(every[0], dtype, *RANGES[dtype])
    if dtype != "float32":  # what differs is how x is read
        results, whole = (), [PRESETS[name]]
    else:
        results = tuple(RESULTS) if name in ("mxfp8_e4m3", "mxint8") else ("float32",)
        whole = [PRESETS[name], every[name == "mxint8"]][: 2 if len(results) > 1 else 1]
    check(x, [(blocks, blocks.as_format(), {}) for blocks in whole], results)
    # Of the other rules the scales alone, which compile in a fraction of the time.
    others = [blocks for blocks in every if blocks not in whole]
    if dtype != "float32" and name not in ("mxfp8_e4m3", "mxfp4", "mxint8"):
        others = others[:1]
    specs = [blocks.as_format() for blocks in others]
    scales = jax.jit(lambda x: [qt.quantize(x, spec).scale for spec in specs])(x)
    for blocks, scale in zip(others, scales, strict=True):
        same_numbers(scale, quantize(x, blocks).scale, f"{name} {blocks.rule} {dtype}")


@pytest.mark.parametrize("name", ["mxfp8_e5m2"])
def test_mx_by_the_scales_of_every_rule(name):
    """The codes that follow from each, by giving the scales to one compiled call."""
    blocks = PRESETS[name]
    x = stress(blocks, "float32", *RANGES["float32"], every=2)
    x = np.where(np.isnan(x), F32(0), x)
    run = jax.jit(lambda x, scale: qt.quantize(x, name, scale=scale))
    for rule in POWER_RULES:
        expected = quantize(x, dataclasses.replace(blocks, rule=rule))
        assert_quantized(run(x, jnp.asarray(expected.scale)), x, expected, rule)


@pytest.mark.sample("mxfp8_e4m3", "mxfp6_e2m3", "mxint8")
@pytest.mark.parametrize("name", MX)
def test_operands_of_products_are_the_same_elements(name):
    """Products compute by a shorter program: its elements and their products with the scales.

    Subnormal numbers of float32 may be zero there, as in XLA's own matmuls on CPUs.
    """
    blocks = PRESETS[name]
    spec = blocks.as_format()
    x = stress(blocks, "float32", *RANGES["float32"], every=3)
    x = x[np.isfinite(x).all(axis=1)]
    expected = quantize(x, blocks)

    @jax.jit
    def run(x):
        q, scales = operand_values(x, spec)
        values = unscaled_values(q, spec, scales, is_own=True)
        return qt.encode(q, spec.element), scales.scale, values

    codes, scale, values = map(np.asarray, run(x))
    same_numbers(scale, expected.scale, name)
    is_normal = np.abs(x) >= 2.0**-126
    same_numbers(codes[is_normal], expected.codes[is_normal], name)
    dequantized = expected.dequantize(np.float32)
    assert (np.abs(values[~is_normal]) <= np.abs(dequantized[~is_normal])).all()
    is_normal &= np.abs(dequantized) >= 2.0**-126
    same_numbers(values[is_normal], dequantized[is_normal], name)


@pytest.mark.sample("float32")
@pytest.mark.parametrize("dtype", SOURCES)
def test_other_presets(dtype):
    cases, xs = [], []
    for name in sorted(set(PRESETS) - set(MX) - set(TILES)):
        blocks = PRESETS[name]
        if dtype == "float16" and blocks.block[-1] == 128:
            continue  # little more than float32's
        low, high = RANGES[dtype]
        if not blocks.powers:
            low = max(low, -100)  # neither data nor results are subnormal
        cases.append((blocks, name, {}))
        xs.append(stress(blocks, dtype, low, high, every=3))
    for name in TILES[: 2 if dtype == "float32" else 1]:
        x = numbers((130, 300), dtype, low=-4, high=4)
        x[:, 128:256] *= SOURCES[dtype].type(0.001)
        x[128:, :128] = 0
        x[3, 5], x[129, 299] = np.nan, -np.inf
        cases.append((PRESETS[name], name, {}))
        xs.append(x)
    check(xs, cases, (dtype,))


def test_nvfp4_at_many_magnitudes():
    """Blocks far below the tensor's amax take the least scale, 2**-9; tensors may be tiny."""
    blocks = PRESETS["nvfp4"]
    rng = np.random.default_rng(0)
    size = np.exp2(rng.uniform(-24, 0, (300, 3))).astype(F32)
    x = rng.normal(size=(300, 40)).astype(F32) * np.repeat(size, 16, axis=1)[:, :40]
    x = x / np.abs(x).max()
    x[:4] = 0
    x[5, ::3] = -0.0
    x[6, 3], x[7, 39], x[8, 20] = np.inf, -np.inf, np.nan
    x[9, 0] = 1  # the amax of the tensor itself
    run = jax.jit(lambda x: (q := qt.quantize(x, "nvfp4"), q.dequantize()))
    largest = np.finfo(F32).max
    for by in (1, 2.0**-60, 2688, 6 * 447.9, 2.0**100, largest, 2.0**-90, 1e-30, 0):
        with np.errstate(under="ignore", invalid="ignore", over="ignore"):
            scaled = x * F32(by)
        q, values = run(scaled)
        expected = quantize(scaled, blocks)
        assert_quantized(q, scaled, expected, str(by))
        same_numbers(values, expected.dequantize(), str(by))


def test_nvfp4_scales_are_two_quotients():
    """(amax / 6) / T; where it lies beside a tie of E4M3, amax / (6 * T) gives another scale."""
    tensor_amax, amax = F32(1.21875), F32(0.0071411133)
    total = tensor_amax / F32(2688)
    assert amax / F32(6) / total == 2.625  # between 2.5, which is even, and 2.75
    assert amax / (F32(6) * total) > 2.625
    x = np.zeros((2, 16), F32)
    x[:, 0] = tensor_amax, amax
    for q in (qt.quantize(x, "nvfp4"), jax.jit(lambda x: qt.quantize(x, "nvfp4"))(x)):
        assert np.asarray(q.scale).astype(F32).tolist() == [[448.0], [2.5]]
    # bfloat16 has many such places.
    rng = np.random.default_rng(0)
    run = jax.jit(lambda x: qt.quantize(x, "nvfp4").scale)
    for most in rng.uniform(1, 2, 8):
        x = rng.uniform(-1, 1, (4000, 16)) * np.exp2(rng.integers(-7, 0, (4000, 1)))
        x[0, 0] = most
        x = x.astype(ml_dtypes.bfloat16)
        same_numbers(run(x), quantize(x, PRESETS["nvfp4"]).scale)


# All the other ways to say what shares a scale and how.

OTHERS = {
    "tensor": Blocks("e4m3fn", other_axes=None),
    "channel": Blocks("int8", block=(1,), axes=(-1,), other_axes=None),
    "channel of axis 0": Blocks("e5m2", block=(1,), axes=(0,), other_axes=None),
    "token": Blocks("e4m3fn", block=(None,), axes=(-1,)),
    "int2": Blocks("int2", block=(16,)),
    "int16": Blocks("int16", block=(None,)),
    "uint8": Blocks("uint8", block=(16,)),
    "narrow": Blocks("int8", block=(16,), narrow_range=True),
    "fnuz": Blocks("e4m3fnuz", block=(16,)),
    "fp6": Blocks("e2m3fn", block=(16,)),
    "e1m2": Blocks("e1m2fn", block=(16,)),
    "posits": Blocks("posit8", block=(16,)),
    "hifloat8": Blocks("hifloat8", block=(16,)),
    "float32 powers": Blocks("e4m3fn", block=(16,), rule="rceil"),
    "bfloat16 scales": Blocks("int8", block=(16,), scale="bfloat16"),
    "bfloat16 powers": Blocks("e5m2", block=(16,), scale="bfloat16", rule="even"),
    "float16 scales": Blocks("int4", block=(16,), scale="float16"),
    "e4m3 scales": Blocks("e2m1fn", block=(16,), scale="e4m3fn"),
    "e4m3 powers": Blocks("e2m1fn", block=(16,), scale="e4m3fn", rule="ceil"),
    "e5m2 scales": Blocks("nf4", block=(16,), scale="e5m2"),
    "codes of ue4m3": Blocks("e2m1fn", block=(16,), scale="ue4m3", tensor_scale=True),
    "e8m0 scales of nf4": Blocks("nf4", block=(16,), scale="e8m0fnu", rule="floor"),
    "e8m0 scales of hifloat8": Blocks("hifloat8", block=(16,), scale="e8m0fnu", rule="rceil"),
    "tensor scale of int8": Blocks("int8", block=(16,), scale="e4m3fn", tensor_scale=True),
    "elements of 2**5": Blocks(
        "e2m1fn", block=(16,), element_exponent=5, scale="e8m0fnu", rule="ceil"
    ),
    "elements of 2**3": Blocks(
        "e4m3fn", block=(16,), element_exponent=3, scale="e8m0fnu", rule="even"
    ),
    "least amax": Blocks("e4m3fn", block=(16,), amax_epsilon=0.5),
    "least amax of powers": Blocks(
        "int8", block=(16,), amax_epsilon=0.3, scale="e8m0fnu", rule="ceil"
    ),
    "half of the range": Blocks("int8", block=(16,), rule="range"),
    "a second scale that divides": Blocks(
        "e2m1fn", block=(16,), scale="e4m3fn", tensor_scale=True, tensor_scale_divides=True
    ),
    "powers above": Blocks("e4m3fn", block=(16,), scale="e8m0fnu", rule="below"),
    "unscaled": Blocks("bfloat16", other_axes=None, scale=None),
    "unscaled e4m3": Blocks("e4m3fn", other_axes=None, scale=None),
}
ASYMMETRIC = {
    f"{element} by {name}": Blocks(element, zero_point=True, **fields)
    for element in ("uint8", "int8", "int4", "uint4")
    for name, fields in {
        "tensor": {"other_axes": None},
        "token": {"block": (None,)},
        "blocks": {"block": (16,)},
    }.items()
}
ASYMMETRIC["bfloat16 scales"] = Blocks("uint4", block=(16,), zero_point=True, scale="bfloat16")


SAMPLE = ("float32 powers", "bfloat16 scales", "e5m2 scales", "posits", "unscaled e4m3")


def moderate(dtype, shape=(60, 41), special=True):
    """Rows of many magnitudes within what any float16 scale reaches, and special ones."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-6, 7, (shape[0], 1)))
    x[20:30] = np.round(x[20:30])
    x[30:33], x[33:36] = np.abs(x[30:33]), -np.abs(x[33:36])
    x[0], x[1] = 0, -0.0
    if special:
        x[2, 3], x[3, 17], x[4, 40], x[5, ::2] = np.inf, -np.inf, np.nan, np.inf
    return x.astype(SOURCES[dtype])


@pytest.mark.sample("0")
@pytest.mark.parametrize("part", range(4))
def test_other_block_formats(part):
    chosen = list(OTHERS.values())[part::4]
    check(moderate("float32"), [(b, b.as_format(), {}) for b in chosen], ("float32",))


@pytest.mark.sample("float16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_block_formats_of_16_bits(dtype):
    chosen = [OTHERS[name] for name in SAMPLE] + [ASYMMETRIC["uint8 by blocks"]]
    check(moderate(dtype), [(b, b.as_format(), {}) for b in chosen], (dtype,))


def test_asymmetric_integers():
    x = moderate("float32")
    x[40:50] = x[40:50] + np.round(x[40:50, :1] * 8)  # away from zero, which is within anyway
    check(x, [(b, b.as_format(), {}) for b in ASYMMETRIC.values()], ("float32",))


def test_large_scales_of_small_elements():
    """Scales beyond 2**126, whose reciprocals are subnormal, and tiny ones: NF4, int2, FP4."""
    rng = np.random.default_rng(3)
    x = rng.uniform(-1, 1, (24, 48)).astype(F32)
    x[:, ::5] = 0
    x[:8] *= np.finfo(F32).max
    x[8:16] *= F32(2.0**126.5)
    x[16:] = np.where(np.abs(x[16:]) < 0.25, 0, x[16:] * F32(2.0**-123.5))
    x[20:] = np.sign(x[20:]) * F32(2.0**-126)
    cases = [Blocks(e, block=(16,)) for e in ("nf4", "int2", "e1m2fn")]
    xs = [x] * len(cases)
    check(xs, [(b, b.as_format(), {}) for b in cases], ("float32",))


# Shapes.

SHAPES = [
    ((77,), (32,), None, 1),
    ((64,), (64,), None, 1),
    ((5,), (None,), None, 1),
    ((1,), (1,), None, 1),
    ((70, 9), (32,), (0,), 1),
    ((96, 8), (32,), (0,), 1),
    ((6, 70), (4, 32), None, 1),
    ((9, 64), (3, 16), None, 1),
    ((33, 20), (16, 5), (1, 0), 1),
    ((4, 50, 6), (16,), (1,), 1),
    ((4, 50, 6), (16,), (-2,), None),
    ((7, 5, 40), (3, 2, 16), None, 1),
    ((7, 5, 40), (16, 3), (2, 0), None),
    ((2, 3, 34, 5), (16,), (2,), 1),
    ((2, 3, 34, 5), (2, 5), (1, -1), 1),
    ((2, 3, 34, 5), (1, None), (0, 2), None),
    ((2, 3, 4, 33), (), None, None),
    ((1, 33, 1), (32,), (1,), 1),
]


BASES = (
    PRESETS["mxint8"],
    Blocks("int8"),
    PRESETS["nvfp4"],
    Blocks("int4"),
    Blocks("uint4", zero_point=True),
)


@pytest.mark.sample("0")
@pytest.mark.parametrize("first", range(2))
def test_shapes_and_axes(first):
    """Each shape with one kind of scales in turn."""
    cases, xs = [], []
    for seed, (shape, block, axes, rest) in list(enumerate(SHAPES))[first::2]:
        base = BASES[seed % len(BASES)]
        blocks = dataclasses.replace(base, block=block, axes=axes, other_axes=rest)
        cases.append((blocks, blocks.as_format(), {}))
        xs.append(numbers(shape, seed=seed, low=-4, high=4))
    check(xs, cases, ("float32",))


@pytest.mark.quick
def test_along_moves_the_blocks():
    x = numbers((64, 33))
    moved = qt.quantize(x, qt.formats.MXFP4.along(0))
    same = qt.quantize(x.T, "mxfp4")
    np.testing.assert_array_equal(moved.codes, np.asarray(same.codes).T)
    np.testing.assert_array_equal(moved.scale.view(np.uint8), same.scale.view(np.uint8).T)


# Roundings and saturations.

ROUNDED = {
    "e4m3fn": Blocks("e4m3fn", block=(32,), scale="e8m0fnu", rule="floor"),
    "e5m2": Blocks("e5m2", block=(32,), rule="floor"),
    "e3m2fn": Blocks("e3m2fn", block=(32,), rule="even"),
    "e2m3fn": Blocks("e2m3fn", block=(32,)),
    "e2m1fn": Blocks("e2m1fn", block=(32,), rule="floor"),
    "int8": Blocks("int8", block=(32,), rule="floor", narrow_range=True),
    "int4": Blocks("int4", block=(32,)),
    "nf4": Blocks("nf4", block=(32,)),
    "uint8": Blocks("uint8", block=(32,), zero_point=True),
}


@pytest.mark.sample("e4m3fn")
@pytest.mark.parametrize("name", ROUNDED)
def test_every_rounding_and_saturation(name):
    """All pairs in turn: each element has every rounding, and every saturation twice."""
    blocks, turn = ROUNDED[name], list(ROUNDED).index(name)
    x = moderate("float32", (60, 73))
    x[10:20] = np.round(x[10:20] * 4) / 4
    if blocks.powers:
        x[50:] *= F32(2.0**-130)
    how = [(r, SATURATIONS[(i + turn) % 3]) for i, r in enumerate(ROUNDINGS)]
    if blocks.zero_point:  # they always clamp
        how = [(r, "finite" if s == "none" else s) for r, s in how]
    cases = [(blocks, blocks.as_format(), {"rounding": r, "saturation": s}) for r, s in how]
    check(x, cases, ("float32",))


@pytest.mark.sample("toward_positive")
@pytest.mark.parametrize("rounding", ["toward_positive", "toward_negative", "to_odd"])
def test_what_is_far_below_the_scale_is_not_zero(rounding):
    """Scaled exactly, hence rounded up from below the least normal float32; each block alone."""
    x = np.zeros((6, 32), F32)
    x[0, :4] = [1, 2.0**-140, -(2.0**-140), 2.0**-126]
    x[1, :4] = [2.0**90, 2.0**-100, -(2.0**-100), 1]
    x[2, :4] = [2.0**100, 2.0**-60, -(2.0**-60), 2.0**-149]
    x[3, :4] = [2.0**60, 2.0**-66, -(2.0**-67), 2.0**-126]
    x[4, :4] = [1e38, 1e-38, -1e-38, 0]
    x[5, :4] = [2.0**-90, 2.0**-149, -(2.0**-149), 2.0**-130]
    run = jax.jit(lambda x: qt.quantize(x, "mxfp8_e4m3", rounding=rounding))
    for rows in (x, *(np.tile(row, (6, 1)) for row in x)):
        assert_quantized(run(rows), rows, quantize(rows, PRESETS["mxfp8_e4m3"], rounding))


def test_elements_of_a_wide_range_beside_powers_of_two():
    """Binary8p1se reaches from 2**-62 to 2**62: all of these are powers of two that it holds."""
    x = np.zeros((2, 16), F32)
    x[0, :4] = [2.0**-30, 2.0**-140, -(2.0**-127), 2.0**-60]
    x[1, :4] = [2.0**-20, 2.0**-126, 2.0**-82, -(2.0**-30)]
    spec = qt.BlockFormat(element="binary8p1se", block=(16,), scale="e8m0", rule="rceil")
    same_numbers(qt.quantize(x, spec).dequantize(), x)
    same_numbers(qt.fake_quantize(x, spec), x)


# Stochastic rounding.

KEY = jax.random.key(11)


@pytest.mark.sample("mxfp8_e4m3")
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4"])
def test_stochastic_rounding_of_given_bits(name):
    """P3109's formulas on the scaled element."""
    x = moderate("float32", (60, 73))
    rng = np.random.default_rng(2)
    cases = []
    for variant, bits in (("A", 5), ("B", 16), ("C", 24)):
        random = rng.integers(0, 2**bits, x.shape, dtype=np.uint32)
        rounding = qt.Stochastic(variant, bits=bits)
        extra = {"rounding": rounding, "random_bits": random}
        cases.append((PRESETS[name], name, extra))
    check(x, cases, ("float32",))


@pytest.mark.quick
def test_a_key_rounds_the_scaled_elements_as_encode_does():
    """Under equal scales, the elements are those of `encode`; the same bits jitted, by chunks."""
    spec = qt.BlockFormat(element="e4m3fn", block=(32,))
    x = numbers((12, 64), seed=4, low=-3, high=0)
    x[:, ::32] = 448  # the scale of each block is 1
    q = qt.quantize(x, spec, rounding="stochastic", key=KEY)
    codes = np.asarray(q.codes)
    assert np.all(np.asarray(q.scale) == 1)
    np.testing.assert_array_equal(codes, qt.encode(x, "e4m3fn", rounding="stochastic", key=KEY))
    assert not np.array_equal(codes, qt.encode(x, "e4m3fn"))
    jitted = jax.jit(lambda x, k: qt.quantize(x, spec, rounding="stochastic", key=k))
    np.testing.assert_array_equal(jitted(x, KEY).codes, codes)
    again = qt.quantize(x, spec, rounding="stochastic", key=KEY)
    np.testing.assert_array_equal(again.codes, codes)
    for start in (0, 5, 8):
        chunk = qt.quantize(
            x[start : start + 4], spec, rounding="stochastic", key=KEY, index_offset=start * 64
        )
        np.testing.assert_array_equal(chunk.codes, codes[start : start + 4])
    other = qt.quantize(x, spec, rounding="stochastic", key=jax.random.key(12))
    assert not np.array_equal(other.codes, codes)
    # Ragged blocks along another axis: the index is still that of the element in x.
    ragged = numbers((70, 9), seed=5)
    spec = qt.BlockFormat(element="int4", block=(32,), axes=(0,))
    key_codes = qt.quantize(ragged, spec, rounding="stochastic", key=KEY)
    low = qt.quantize(ragged, spec, rounding="toward_negative")
    high = qt.quantize(ragged, spec, rounding="toward_positive")
    values, low, high = (np.asarray(q.dequantize()) for q in (key_codes, low, high))
    assert np.all((values == low) | (values == high))
    assert 0.2 < np.mean(values[low != high] == high[low != high]) < 0.8


# Given scales.


def test_given_scales_are_rounded_and_used():
    x = moderate("float32", (60, 48), special=False)
    x[2, 3], x[3, 17] = np.inf, -np.inf
    rng = np.random.default_rng(5)

    def scales(*shape):
        return np.exp2(rng.uniform(-6, 6, shape)).astype(F32)

    cases = [
        (PRESETS["int4_group32"], {"scale": scales(60, 2)}),
        (PRESETS["mxfp4"], {"scale": scales(60, 2)}),
        (PRESETS["mxint8"], {"scale": np.array([[3.0], [1.5]] * 30, F32).repeat(2, 1)}),
        (PRESETS["nvfp4"], {"scale": scales(60, 3), "tensor_scale": F32(0.37)}),
        (PRESETS["nvfp4"], {"tensor_scale": F32(0.0037)}),
        (OTHERS["tensor"], {"scale": np.full((1, 1), 0.3, F32)}),
        (OTHERS["channel"], {"scale": scales(1, 48)}),
        (OTHERS["codes of ue4m3"], {"scale": scales(60, 3), "tensor_scale": F32(1.5)}),
        (
            ASYMMETRIC["uint8 by token"],
            {"scale": scales(60, 1), "zero_point": np.full((60, 1), 77, np.int32)},
        ),
        (
            ASYMMETRIC["int4 by blocks"],
            {"scale": scales(60, 3), "zero_point": rng.integers(-8, 8, (60, 3)).astype(np.int32)},
        ),
        (
            ASYMMETRIC["uint8 by tensor"],
            {"scale": np.full((1, 1), 0.3, F32), "zero_point": np.full((1, 1), 255, np.int32)},
        ),
    ]
    check(x, [(blocks, blocks.as_format(), extra) for blocks, extra in cases], ("float32",))


TENSOR_INT8 = Blocks("int8", other_axes=None)


@pytest.mark.quick
def test_a_single_scale_may_be_a_number():
    x = moderate("float32", special=False)
    spec = qt.BlockFormat.tensor("int8")
    for scale in (0.3, F32(0.3), np.float64(0.3), np.full((1, 1), 0.3, F32), jnp.float32(0.3)):
        q = qt.quantize(x, spec, scale=scale)
        assert_quantized(q, x, quantize(x, TENSOR_INT8, scale=F32(0.3)))
    q = qt.quantize(x, spec, scale=2)
    assert np.asarray(q.scale).item() == 2
    nv = qt.quantize(x, "nvfp4", tensor_scale=0.25)
    assert_quantized(nv, x, quantize(x, PRESETS["nvfp4"], tensor_scale=F32(0.25)))


# Packed codes.


def test_packed_codes():
    """The first code in the lowest bits, along the last axis, whatever the axis of the blocks."""
    x = moderate("float32", (60, 73), special=False)
    cases = {
        "nvfp4": PRESETS["nvfp4"],
        "mxfp6_e2m3": PRESETS["mxfp6_e2m3"],
        "nf4_block64": PRESETS["nf4_block64"],
        "int2": OTHERS["int2"],
        "uint4": ASYMMETRIC["uint4 by blocks"],
        "axis 0": Blocks("int4", block=(32,), axes=(0,)),
    }
    specs = {name: blocks.as_format() for name, blocks in cases.items()}
    packed = jax.jit(lambda x: {n: qt.quantize(x, s, packed=True) for n, s in specs.items()})(x)
    values = jax.jit(lambda qs: {n: q.dequantize() for n, q in qs.items()})(packed)
    for name, blocks in cases.items():
        expected = quantize(x, blocks)
        wanted = packed_by_hand(expected.codes, blocks.spec.bits)
        np.testing.assert_array_equal(packed[name].codes, wanted, name)
        assert packed[name].codes.dtype == np.uint8
        assert packed[name].shape == x.shape
        same_numbers(values[name], expected.dequantize(), name)


# The array itself.


@pytest.mark.quick
def test_what_a_quantized_array_says():
    x = moderate("bfloat16", (60, 48))
    q = qt.quantize(x, "nvfp4")
    assert q.shape == (60, 48)
    assert q.ndim == 2
    assert q.size == 60 * 48
    assert q.dtype == jnp.bfloat16
    assert q.spec == qt.formats.NVFP4
    assert q.codes.dtype == np.uint8
    assert q.scale.dtype == jnp.float8_e4m3fn
    assert q.scale.shape == (60, 3)
    assert q.tensor_scale.dtype == np.float32
    assert q.tensor_scale.shape == ()
    assert q.zero_point is None
    assert q.nbytes == 60 * 48 + 60 * 3 + 4
    assert qt.quantize(x, "nvfp4", packed=True).nbytes == 60 * 24 + 60 * 3 + 4
    assert q.dequantize().dtype == jnp.bfloat16
    assert q.dequantize(jnp.float16).dtype == jnp.float16
    leaves = jax.tree.leaves(q)
    assert [leaf.shape for leaf in leaves] == [(60, 48), (60, 3), ()]
    back = jax.tree.unflatten(jax.tree.structure(q), leaves)
    same_numbers(back.dequantize(), q.dequantize())


def test_the_derivative_by_a_second_scale_that_divides():
    """y = q * scale / second, so dy/dsecond = -y / second."""
    spec = dataclasses.replace(qt.formats.NVFP4, tensor_scale_divides=True)
    q = qt.quantize(numbers((4, 64)), spec)

    def total(second):
        return jnp.sum(jnp.abs(dataclasses.replace(q, tensor_scale=second).dequantize()))

    expected = -total(q.tensor_scale) / q.tensor_scale
    np.testing.assert_allclose(jax.grad(total)(q.tensor_scale), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "error"), [(1e-32, 2**-4), (2.0**-100, 1e-6), (1.0, 1e-6), (1e37, 1e-6), (3e38, 1e-6)]
)
def test_a_second_scale_that_divides_spans_the_range_of_float32(size, error):
    """The reciprocal of 3e38 is subnormal: taken for 0, it made every element NaN. For 1e-32 the
    least scale of a block over the second one was subnormal, and zeros became 6.
    """
    spec = dataclasses.replace(qt.formats.NVFP4, tensor_scale_divides=True)
    x = np.float32(size) * np.array([[1, -0.5] * 16, [0] * 32], np.float32)
    q = qt.quantize(x, spec)
    np.testing.assert_allclose(q.dequantize(), x, rtol=error)
    again = qt.quantize(x, spec, tensor_scale=q.tensor_scale)
    np.testing.assert_array_equal(again.codes, q.codes)
