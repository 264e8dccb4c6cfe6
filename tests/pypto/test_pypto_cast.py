"""pypto.cast against the page's bit rules in integers: pypto_oracle.py.

Every 16-bit and 8-bit input, edges and random numbers of wider sources, every supported pair, every
mode. The extended pairs with small float results are those of the casts' own oracle.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pypto_oracle as oracle
import pytest
from casts_oracle import DTYPES as ML_NAMES
from casts_oracle import SPECS, assert_same_bits, bits_of, codes, integer_inputs
from each import each
from pypto_oracle import DTYPES, MODES
from refused import got, refused

import qtoolkit as qt
from qtoolkit import formats, pypto
from qtoolkit.pypto import CastMode, SaturationMode

# The page's list, typed in.
PAIRS = [
    *(("DT_FP16", to) for to in ("DT_FP32", "DT_INT32", "DT_INT16", "DT_INT8", "DT_UINT8")),
    *(("DT_BF16", to) for to in ("DT_FP32", "DT_INT32")),
    *(("DT_INT32", to) for to in ("DT_FP32", "DT_INT16", "DT_INT64")),
    *(("DT_FP32", to) for to in ("DT_BF16", "DT_FP16", "DT_INT16", "DT_INT32", "DT_INT64")),
    *(("DT_UINT8", "DT_FP16"), ("DT_INT8", "DT_FP16")),
    *(("DT_INT16", to) for to in ("DT_FP32", "DT_FP16")),
    *(("DT_INT64", to) for to in ("DT_FP32", "DT_INT32")),
]
WRAPPING = [
    *(("DT_FP16", to) for to in ("DT_UINT8", "DT_INT8", "DT_INT16")),
    *(("DT_FP32", "DT_INT16"), ("DT_INT64", "DT_INT32"), ("DT_INT32", "DT_INT16")),
]
PAGE_TYPES = sorted({source for source, _ in PAIRS})
OFF = SaturationMode.OFF


def dt(name):
    return getattr(pypto, name)


def inputs(name):
    dtype = DTYPES[name]
    if dtype.itemsize <= 2:
        every = np.arange(2 ** (8 * dtype.itemsize), dtype=f"uint{8 * dtype.itemsize}")
        return every.view(dtype)
    return integer_inputs(dtype) if dtype.kind in "iu" else float32_inputs()


def float32_inputs():
    """Ties of float16, bfloat16 and the integers with their neighbours; the extremes; random."""
    rng = np.random.default_rng(5)
    fp16 = np.r_[0:64, 0x03C0:0x0440, 0x7B80:0x7C00, rng.integers(0, 0x7C00, 1500)]
    fp16 = fp16.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    ties16 = fp16 + np.uint32(1 << 12)
    bf16 = np.r_[0:64, 0x7F00:0x7F80, rng.integers(0, 0x7F80, 1500)].astype(np.uint32) << 16
    powers = 2.0 ** np.array([0, 3, 7, 8, 15, 16, 17, 22, 23, 24, 30, 31, 32, 33, 62, 63, 64, 100])
    near = np.arange(-12, 13) / 4
    whole = np.concatenate([(powers[:, None] + near).ravel(), np.arange(0, 600) / 4])
    whole = np.abs(whole).astype(np.float32).view(np.uint32)
    overflow = np.array([65504, 65519.996, 65520, 65535.996, 65536], np.float32).view(np.uint32)
    sizes = np.concatenate([fp16, ties16, bf16, bf16 + np.uint32(1 << 15), whole, overflow])
    sizes = np.concatenate([sizes, sizes + np.uint32(1), sizes - (sizes > 0)])
    extreme = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    random = rng.integers(0, 2**31, 4000)
    sizes = np.concatenate([sizes, np.array(extreme), random]).astype(np.uint32)
    return np.unique(np.concatenate([sizes, sizes | np.uint32(2**31)])).view(np.float32)


def in_every_mode(x, to, modes=tuple(CastMode), **options):
    """One array for each mode, compiled at once."""
    with jax.enable_x64(x.dtype.itemsize == 8 or DTYPES.get(to, x.dtype).itemsize == 8):
        rows = jax.jit(lambda x: [pypto.cast(x, dt(to), mode, **options) for mode in modes])(x)
        return dict(zip(modes, map(np.asarray, rows), strict=True))


def default_mode(source, to):
    """Section 3 of the page, and its general form: only float to integer truncates."""
    kinds = DTYPES[source].kind in "iu", DTYPES[to].kind in "iu"
    return CastMode.CAST_TRUNC if kinds == (False, True) else CastMode.CAST_RINT


def check(source, to, saturates=True, **options):
    x = inputs(source)
    got = in_every_mode(x, to, **options)
    assert len(got) == 7
    for mode in MODES:
        expected = oracle.cast(x, to, mode, saturates)
        try:
            assert_same_bits(got[CastMode[f"CAST_{mode}"]], expected, x)
        except AssertionError as error:
            raise AssertionError(f"{source} to {to}, {mode}: {error}") from None
    assert_same_bits(got[CastMode.CAST_NONE], got[default_mode(source, to)], x)
    return got


# The page


@pytest.mark.quick
def test_the_first_printed_example():
    x = jnp.array([2.0, 3.0], jnp.float32)
    y = pypto.cast(x, pypto.DT_FP16)
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y, [2.0, 3.0])


@pytest.mark.quick
def test_the_second_printed_example():
    """Constraint 1: FP16 130.0 to INT8 is 127."""
    y = pypto.cast(jnp.array([130.0], jnp.float16), pypto.DT_INT8)
    assert y.dtype == jnp.int8
    np.testing.assert_array_equal(y, [127])


@pytest.mark.sample("DT_FP16-DT_FP32")
@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_every_pair_in_every_mode(source, to):
    check(source, to)


@pytest.mark.sample("DT_FP16-DT_UINT8")
@pytest.mark.parametrize(("source", "to"), WRAPPING)
def test_low_bits_without_saturation(source, to):
    check(source, to, saturates=False, satmode=OFF)


def test_there_are_21_pairs():
    assert len(set(PAIRS)) == len(PAIRS) == 21
    listed = pypto._cast.PAIRS
    assert {(dt(a), dt(b)) for a, b in PAIRS} == {(a, b) for a in listed for b in listed[a]}


# The examples of the documents around the page, number for number

HALF = 2.0**-11


INF = np.inf
DOCUMENTED = {  # a number, and its casts in the order of MODES
    ("DT_FP32", "DT_FP16"): [
        # 0.5 + 2**-12 lies between two float16 numbers, at their middle.
        (0.5 + HALF / 2, (0.5, 0.5 + HALF, 0.5, 0.5 + HALF, 0.5, 0.5 + HALF)),
        (65504.0, (65504,) * 6), (65519.0, (65504, 65504, 65504, INF, 65504, 65504)),
        (65520.0, (INF, INF, 65504, INF, 65504, 65504)), (INF, (INF,) * 6),
        (1e6, (INF, INF, 65504, INF, 65504, 65504)),
        (-1e6, (-INF, -INF, -INF, -65504, -65504, -65504)),
        (2.0**-25, (0, 2.0**-24, 0, 2.0**-24, 0, 2.0**-24)),
    ],
    ("DT_INT32", "DT_FP32"): [(2**25 + 3, tuple(2**25 + n for n in (4, 4, 0, 4, 0, 4)))],
    ("DT_INT16", "DT_FP16"): [(4098, (4096, 4100, 4096, 4100, 4096, 4100))],
    ("DT_FP16", "DT_INT16"): [
        (127.5, (128, 128, 127, 128, 127, 127)), (-1.5, (-2, -2, -2, -1, -1, -1)),
        (2.5, (2, 3, 2, 3, 2, 3)),
    ],
    ("DT_FP16", "DT_INT8"): [(127.5, (127,) * 6), (-128.4, (-128,) * 6)],
    ("DT_FP16", "DT_INT32"): [(0.25, (0, 0, 0, 1, 0, 1))],
    ("DT_FP16", "DT_UINT8"): [(-0.9, (0,) * 6), (-INF, (0,) * 6)],
    ("DT_FP32", "DT_INT32"): [(-0.25, (0, 0, -1, 0, 0, -1)), (INF, (2**31 - 1,) * 6)],
    ("DT_FP32", "DT_INT16"): [(np.nan, (0,) * 6)],
    ("DT_FP32", "DT_BF16"): [(-0.0, (-0.0,) * 6)],
}  # fmt: skip


@each("pair", DOCUMENTED)
def test_documented_values(pair):
    source, to = pair
    x = np.array([x for x, _ in DOCUMENTED[pair]], DTYPES[source])
    got = in_every_mode(x, to, modes=[CastMode[f"CAST_{mode}"] for mode in MODES])
    values = np.transpose([np.asarray(y).astype(np.float64) for y in got.values()])
    expected = np.array([codes for _, codes in DOCUMENTED[pair]], np.float64)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))


@pytest.mark.quick
def test_the_example_of_the_newer_page():
    x = jnp.array([300, -300, 50], jnp.float16)
    on = pypto.cast(x, pypto.DT_INT8, satmode=SaturationMode.ON)
    np.testing.assert_array_equal(on, [127, -128, 50])
    np.testing.assert_array_equal(pypto.cast(x, pypto.DT_INT8, satmode=OFF), [44, -44, 50])


def test_numbers_beyond_int32_keep_their_own_low_bits():
    """3e9 is 0xB2D05E00; hardware that saturates to int32 first would keep 0xFFFF."""
    x = jnp.array([3e9, np.inf, -np.inf, np.nan, 2.0**100], jnp.float32)
    y = pypto.cast(x, pypto.DT_INT16, satmode=OFF)
    np.testing.assert_array_equal(y, [0x5E00, 32767, -32768, 0, 0])


@pytest.mark.parametrize("name", PAGE_TYPES)
def test_a_type_to_itself_returns_the_input(name):
    with jax.enable_x64(True):
        x = jnp.asarray(inputs(name)[:100])
        for mode, satmode in itertools.product(CastMode, SaturationMode):
            assert pypto.cast(x, dt(name), mode, satmode) is x
    assert isinstance(pypto.cast(np.zeros(2, np.float32), "DT_FP32"), jax.Array)


@pytest.mark.sample("DT_FP32", "DT_BF16")
@pytest.mark.parametrize("to", ["DT_FP32", "DT_FP16", "DT_BF16"])
def test_satmode_leaves_float_results_alone(to):
    for source in (s for s, t in PAIRS if t == to and s != "DT_INT64"):
        x = inputs(source)
        on, off = (pypto.cast(x, dt(to), satmode=satmode) for satmode in SaturationMode)
        assert_same_bits(off, np.asarray(on), x)


# Names


@pytest.mark.quick
def test_the_numbers_of_pypto():
    names = ["NONE", "RINT", "ROUND", "FLOOR", "CEIL", "TRUNC", "ODD"]
    assert [(m.name, m.value) for m in CastMode] == [(f"CAST_{n}", i) for i, n in enumerate(names)]
    assert {mode.name: mode.value for mode in SaturationMode} == {"ON": 0, "OFF": 1}


@pytest.mark.quick
def test_the_types_are_formats():
    names = [name for name in pypto.__all__ if name.startswith("DT_")]
    assert len(names) == 20
    for name in names:
        assert dt(name) is formats.format(name)
        assert pypto._cast.NAMES[dt(name)] == name
    for name, dtype in DTYPES.items():
        assert dt(name).dtype == dtype


def test_spellings_of_dtype():
    x = jnp.array([1.5], jnp.float32)
    for dtype in (pypto.DT_BF16, "DT_BF16", "dt_bf16", "bfloat16", jnp.bfloat16):
        assert pypto.cast(x, dtype).dtype == jnp.bfloat16


# Transformations


@pytest.mark.exhaustive
def test_eager_jit_and_vmap_give_the_same_bits():
    x = jnp.asarray(float32_inputs()[:4096].reshape(8, 16, 32))
    for to, mode in itertools.product((pypto.DT_FP16, pypto.DT_INT16), CastMode):
        cast = functools.partial(pypto.cast, dtype=to, mode=mode)
        assert_same_bits(jax.jit(cast)(x), cast(x))
        assert_same_bits(jax.vmap(cast)(x), cast(x))
    arguments = (pypto.DT_INT16, CastMode.CAST_CEIL, OFF)
    jitted = jax.jit(pypto.cast, static_argnums=(1, 2, 3))
    assert_same_bits(jitted(x, *arguments), pypto.cast(x, *arguments))


def test_vmap_over_four_axes():
    x = jnp.ones((2, 1, 1, 1, 3), jnp.float32)
    assert jax.vmap(lambda v: pypto.cast(v, "DT_FP16"))(x).shape == x.shape


def test_derivative():
    x = jnp.array([1.1, 65504.0, 65519.0, 1e6, jnp.inf, jnp.nan], jnp.float32)
    gradient = jax.grad(lambda x: pypto.cast(x, "DT_FP16").astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(gradient, [1, 1, 0, 0, 0, 0])
    half = jnp.array([1.5, -2.25], jnp.float16)
    wide = jax.grad(lambda x: pypto.cast(x, "DT_FP32").sum())(half)
    np.testing.assert_array_equal(wide, jnp.ones(2, jnp.float16))
    same = jax.grad(lambda x: pypto.cast(x, "DT_FP32").sum())(x)
    np.testing.assert_array_equal(same, jnp.ones(6))


@pytest.mark.parametrize("to", ["DT_INT16", "DT_FP8E4M3", "DT_HF8"])
def test_no_derivative_of_integers_and_of_8_bits(to):
    x = jnp.array([1.1], jnp.float32)
    with refused(TypeError, r"^pypto\.cast: has no derivative to .*; differentiate fake_cast"):
        jax.jvp(lambda x: pypto.cast(x, to, extended=True), (x,), (x,))


# 64 bits


@pytest.mark.parametrize("to", ["DT_FP32", "DT_INT32"])
def test_int64_of_numpy_is_exact_without_64_bit_types(to):
    x = inputs("DT_INT64")
    assert not jax.config.jax_enable_x64
    for mode in ("RINT", "CEIL", "ODD"):
        got = pypto.cast(x, to, CastMode[f"CAST_{mode}"])
        assert_same_bits(got, oracle.cast(x, to, mode), x)


@pytest.mark.parametrize("source", ["DT_FP32", "DT_INT32", "DT_INT64"])
def test_results_of_64_bits_need_64_bit_types(source):
    with refused(TypeError, r"^pypto\.cast: .* int64 .*64-bit types.*'jax_enable_x64', True"):
        pypto.cast(np.ones(2, DTYPES[source]), "DT_INT64")


# Bad input


@pytest.mark.quick
def test_modes_are_no_numbers():
    x = jnp.ones(2, jnp.float32)
    for mode in (1, True, "CAST_RINT", None, SaturationMode.ON):
        refused(TypeError, r"^pypto\.cast: mode=.*CastMode: CAST_N", pypto.cast, x, "DT_FP16", mode)
    for satmode in (0, False, "ON", CastMode.CAST_RINT):
        with refused(TypeError, r"^pypto\.cast: satmode=.*a member of SaturationMode: ON, OFF"):
            pypto.cast(x, "DT_FP16", satmode=satmode)


def test_every_other_pair_raises_and_lists_what_is_supported():
    every = [name for name in pypto.__all__ if name.startswith("DT_")]
    sources = {a for a, _ in PAIRS}
    raised = 0
    for source, to in itertools.product(sorted(sources), every):
        if (source, to) in PAIRS or source == to:
            continue
        listed = ", ".join(t for s, t in PAIRS if s == source)
        wanted = rf"no cast from {source} to {to}; from {source}, expected one of {listed}(;|$)"
        refused(TypeError, wanted, pypto.cast, np.ones(2, DTYPES[source]), dt(to))
        raised += 1
    assert raised == 8 * 20 - 21 - 8


@each("x", [
    *(np.ones(2), np.ones(2, np.uint32), np.ones(2, bool), np.ones(2, complex), np.array(["1"])),
    *([1.0, 2.0], 1.0, None),
])  # fmt: skip
def test_inputs_of_other_types(x):
    wanted = rf"^pypto\.cast: input has {got(x)}, expected an array of DT_FP16, .*DT_INT64"
    refused(TypeError, wanted, pypto.cast, x, "DT_FP16")


@each("dtype", [None, 7, "DT_FP17", np.ones(2), complex, formats.MXFP4])
def test_what_is_no_dtype(dtype):
    is_text = isinstance(dtype, str)
    name = f"='{dtype}'" if is_text else f" has type {type(dtype).__name__}"
    wanted = rf"^pypto\.cast: dtype{name}, expected from DT_FP32 one of DT_BF16, .*INT64"
    x = jnp.ones(2, jnp.float32)
    refused(ValueError if is_text else TypeError, wanted, pypto.cast, x, dtype)


def test_formats_that_pypto_has_not():
    with refused(TypeError, "no cast from DT_FP32 to e4m3fnuz; from DT_FP32"):
        pypto.cast(jnp.ones(2, jnp.float32), "e4m3fnuz", extended=True)


def test_what_extended_would_take_is_said():
    with refused(TypeError, r"no cast .* to DT_INT8; .*; extended=True takes it$"):
        pypto.cast(jnp.ones(2, jnp.float32), "DT_INT8")


@each("shape", [(), (1, 1, 1, 1, 1), (2,) * 6])
def test_ranks(shape):
    with refused(ValueError, rf"pypto\.cast: input has {len(shape)} axes.*expected 1 to 4"):
        pypto.cast(jnp.ones(shape, jnp.float32), "DT_FP16")


@pytest.mark.sample("1", "2", "3")
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_every_rank_that_is_allowed(rank):
    x = jnp.arange(2**rank, dtype=jnp.float32).reshape((2,) * rank)
    y = pypto.cast(x, "DT_INT16")
    assert y.shape == x.shape
    np.testing.assert_array_equal(y.ravel(), np.arange(2**rank))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2**40)])
def test_empty_inputs(shape):
    empty = np.broadcast_to(np.float32(1), shape)
    refused(ValueError, r"pypto\.cast: input is empty, shape \(", pypto.cast, empty, "DT_FP16")


@pytest.mark.parametrize("shape", [(2**31,), (2**16, 2**15), (1, 2**31, 1)])
def test_sizes(shape):
    large = np.broadcast_to(np.float32(1), shape)  # one number in memory
    refused(ValueError, r"2147483648 elements", pypto.cast, large, "DT_FP16")
    with refused(ValueError, "2147483648 elements"):
        jax.eval_shape(lambda x: pypto.cast(x, "DT_FP16"), jax.ShapeDtypeStruct(shape, jnp.float32))
    allowed = jax.ShapeDtypeStruct((2**31 - 1,), jnp.float32)
    assert jax.eval_shape(lambda x: pypto.cast(x, "DT_FP16"), allowed).shape == (2**31 - 1,)


def test_satmode_off_elsewhere():
    others = [p for p in PAIRS if p not in WRAPPING and DTYPES[p[1]].kind in "iu"]
    assert len(others) == 5
    with jax.enable_x64(True):
        for source, to in others:
            wanted = f"OFF from {source} to {to}, expected SaturationMode.ON; OFF is documented for"
            refused(ValueError, wanted, pypto.cast, jnp.ones(2, DTYPES[source]), to, satmode=OFF)


# Extensions

TO_FLOAT = {
    "DT_FP8E4M3": "e4m3fn",
    "DT_FP8E5M2": "e5m2",
    "DT_HF8": "hifloat8",
    "DT_FP4_E2M1X2": "e2m1fn",
    "DT_FP4_E1M2X2": "e1m2fn",
}
ROUNDINGS = {
    CastMode.CAST_NONE: "nearest_even",
    CastMode.CAST_RINT: "nearest_even",
    CastMode.CAST_ROUND: "nearest_away",
    CastMode.CAST_FLOOR: "toward_negative",
    CastMode.CAST_CEIL: "toward_positive",
    CastMode.CAST_TRUNC: "toward_zero",
    CastMode.CAST_ODD: "to_odd",
}


@pytest.mark.sample("DT_FP32-DT_FP8E4M3-SaturationMode.ON", "DT_FP32-DT_HF8-SaturationMode.OFF")
@pytest.mark.parametrize("satmode", SaturationMode)
@pytest.mark.parametrize(
    ("source", "to"),
    [
        *(("DT_FP32", to) for to in ("DT_FP8E4M3", "DT_FP8E5M2", "DT_HF8")),
        *(("DT_FP16", "DT_HF8"), ("DT_BF16", "DT_FP4_E2M1X2"), ("DT_BF16", "DT_FP4_E1M2X2")),
    ],
)
def test_extended_small_floats(source, to, satmode):
    x = inputs(source)
    got = in_every_mode(x, to, satmode=satmode, extended=True)
    saturation = "finite" if satmode is SaturationMode.ON else "none"
    for mode, y in got.items():
        rounding = ROUNDINGS[mode]
        if to == "DT_HF8":
            rounding = "nearest_away"
        elif "FP4" in to:
            rounding = "nearest_even"
        expected = codes(x, SPECS[TO_FLOAT[to]], saturation, rounding)
        if "FP4" in to:
            expected[np.isnan(x.astype(np.float32))] = 0
        own = ML_NAMES.get(TO_FLOAT[to])
        assert y.dtype == (own if own else np.uint8)
        assert_same_bits(bits_of(y), expected, x)


@pytest.mark.sample("DT_FP32-DT_INT8")
@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("DT_FP32", "DT_INT8"),
        ("DT_BF16", "DT_FP16"),
        *(("DT_UINT8", "DT_UINT16"), ("DT_INT8", "DT_INT16"), ("DT_INT8", "DT_INT32")),
        *(("DT_INT16", to) for to in ("DT_INT32", "DT_UINT32", "DT_UINT8")),
        *(("DT_INT32", to) for to in ("DT_UINT16", "DT_UINT8")),
        *(("DT_UINT32", to) for to in ("DT_INT16", "DT_UINT16", "DT_UINT8")),
    ],
)
def test_extended_pairs_by_the_bit_rule(source, to):
    check(source, to, extended=True)
    check(source, to, saturates=to == "DT_FP16", satmode=OFF, extended=True)


@pytest.mark.sample("DT_FP16-DT_INT32")
@pytest.mark.parametrize(
    ("source", "to"),
    [
        *(("DT_FP16", "DT_INT32"), ("DT_BF16", "DT_INT32")),
        *(("DT_FP32", "DT_INT32"), ("DT_FP32", "DT_INT64")),
    ],
)
def test_extended_wraps_where_the_page_does_not(source, to):
    check(source, to, saturates=False, satmode=OFF, extended=True)


def test_extended_int32_to_float16_as_torch_in_all_modes():
    """Nearest even, infinity from 65520 on."""
    x = np.unique(np.r_[np.arange(-70000, 70001), inputs("DT_INT32")].astype(np.int32))
    expected = oracle.cast(x, "DT_FP16", "RINT")
    assert np.isinf(expected[x == 65520])
    for row in in_every_mode(x, "DT_FP16", extended=True).values():
        assert_same_bits(row, expected, x)


def test_extended_int4():
    x = inputs("DT_FP16")
    for mode, row in in_every_mode(x, "DT_INT4", extended=True).items():
        name = "TRUNC" if mode is CastMode.CAST_NONE else mode.name.removeprefix("CAST_")
        expected = np.clip(oracle.cast(x, "DT_INT8", name), -8, 7)
        assert row.dtype == "int4"
        np.testing.assert_array_equal(row.astype(np.int8), expected)
    codes_of_int4 = jnp.arange(-8, 8, dtype=jnp.int4)
    back = pypto.cast(codes_of_int4, "DT_FP16", extended=True)
    assert_same_bits(back, np.arange(-8, 8, dtype=np.float16))


@pytest.mark.parametrize(
    ("name", "to"), [("e4m3fn", "DT_FP32"), ("e5m2", "DT_FP32"), ("e2m1fn", "DT_BF16")]
)
def test_extended_small_floats_to_bfloat16_and_float32(name, to):
    spec = SPECS[name]
    fmt = formats.format(name)
    every = np.arange(2**spec.bits, dtype=np.uint8)
    x = jnp.asarray(every.view(fmt.dtype))
    y = np.asarray(pypto.cast(x, to, CastMode.CAST_FLOOR, extended=True))
    assert y.dtype == DTYPES[to]
    expected = np.array([float(spec.value(code)) for code in every.tolist()])
    np.testing.assert_array_equal(y.astype(np.float64), expected)
    assert np.array_equal(np.signbit(y), every >= spec.sign)


def test_extended_codes_without_a_dtype_are_read_by_decode():
    x = jnp.array([1.3, -5.0, 3e4], jnp.float32)
    y = pypto.cast(x, "DT_HF8", extended=True)
    np.testing.assert_array_equal(qt.decode(y, "DT_HF8"), [1.25, -5.0, 32768.0])
    quarters = jnp.array([0.3, -1.7, 9.0, jnp.nan], jnp.bfloat16)
    y = pypto.cast(quarters, "DT_FP4_E1M2X2", extended=True)
    np.testing.assert_array_equal(qt.decode(y, "DT_FP4_E1M2X2"), [0.25, -1.75, 1.75, 0.0])
    assert qt.pack(y, 4).shape == (2,)


def test_extended_int8_is_what_models_chain():
    """FP32 -RINT-> INT32 -> FP16 -TRUNC-> INT8, as models of the repository write it."""
    x = jnp.asarray(float32_inputs())
    whole = pypto.cast(x, "DT_INT32", CastMode.CAST_RINT)
    half = pypto.cast(whole, "DT_FP16", CastMode.CAST_ROUND, extended=True)
    chained = pypto.cast(half, "DT_INT8", CastMode.CAST_TRUNC)
    direct = pypto.cast(x, "DT_INT8", CastMode.CAST_RINT, extended=True)
    assert_same_bits(direct, chained, x)


def test_extended_float32_to_integral_float32():
    x = inputs("DT_FP32")
    got = in_every_mode(x, "DT_FP32", extended=True)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        wide = np.abs(x.astype(np.float64))
    down, up, negative = np.floor(wide), np.ceil(wide), np.signbit(x)
    is_odd = np.fmod(np.where(np.isfinite(wide), down, 0), 2) == 1
    sizes = {
        CastMode.CAST_ROUND: np.floor(wide + 0.5),
        CastMode.CAST_FLOOR: np.where(negative, up, down),
        CastMode.CAST_CEIL: np.where(negative, down, up),
        CastMode.CAST_TRUNC: down,
        CastMode.CAST_ODD: np.where(is_odd, down, up),
    }
    for mode, size in sizes.items():
        expected = np.copysign(size.astype(np.float32), x)
        assert_same_bits(got[mode], np.where(np.isnan(x), x, expected), x)
    for mode in (CastMode.CAST_NONE, CastMode.CAST_RINT):  # PyPTO returns the input
        assert_same_bits(got[mode], x, x)


def test_extended_integral_float32_passes_the_derivative():
    x = jnp.array([-0.25, 1.5, 2.0**23 + 1, 3e30, jnp.inf, jnp.nan], jnp.float32)
    y, dot = jax.jvp(
        lambda x: pypto.cast(x, "DT_FP32", CastMode.CAST_CEIL, extended=True), (x,), (jnp.ones(6),)
    )
    np.testing.assert_array_equal(y, [-0.0, 2, 2.0**23 + 1, x[3], np.inf, np.nan])
    np.testing.assert_array_equal(dot, np.ones(6))


def test_the_extended_pairs_are_those_of_the_documents():
    documents = {
        "DT_FP32": "DT_FP32 DT_FP8E4M3 DT_FP8E5M2 DT_HF8",
        "DT_FP16": "DT_HF8 DT_INT4",
        "DT_BF16": "DT_FP16 DT_FP4_E2M1X2 DT_FP4_E1M2X2",
        "DT_INT4": "DT_FP16",
        "DT_UINT8": "DT_UINT16",
        "DT_INT8": "DT_INT16 DT_INT32",
        "DT_INT16": "DT_UINT8 DT_UINT32 DT_INT32",
        "DT_INT32": "DT_UINT16 DT_UINT8 DT_FP16",
        "DT_UINT32": "DT_UINT8 DT_UINT16 DT_INT16",
        "DT_FP8E4M3": "DT_FP32",
        "DT_FP8E5M2": "DT_FP32",
        "DT_HF8": "DT_FP32",
        "DT_FP4_E2M1X2": "DT_BF16",
        "DT_FP4_E1M2X2": "DT_BF16",
    }
    expected = {(a, b) for a, listed in documents.items() for b in listed.split()}
    expected -= {("DT_HF8", "DT_FP32"), ("DT_FP4_E1M2X2", "DT_BF16")}  # JAX has no such arrays
    expected |= {("DT_FP32", "DT_INT8")} | set(PAIRS)  # what models chain of three casts
    names = pypto._cast.NAMES
    offered = {(names[a], names[b]) for a, to in pypto._cast.EXTENDED_PAIRS.items() for b in to}
    assert offered == expected
