"""Cast on every input of 16 bits and less, against the tables of the page.

Oracle: onnx_oracle.py.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from onnx_oracle import DTYPES, FLOAT8, INTEGERS, codes, expected, wide
from refused import refused

import qtoolkit as qt
from qtoolkit.onnx import cast

SMALL_FLOATS = (*FLOAT8, "FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2")
NARROW = [name for name, dtype in DTYPES.items() if dtype.itemsize == 1]
ROUND_MODES = ("up", "down", "nearest")


def every_16_bits(name):
    return np.arange(2**16, dtype=np.uint16).view(DTYPES[name])


def every_code(name):
    """All numbers of a type of 8 bits and less."""
    if name in INTEGERS:
        lowest, bits = INTEGERS[name]
        return np.arange(lowest, lowest + 2**bits).astype(DTYPES[name])
    if name == "BOOL":
        return np.array([False, True])
    bits = {"FLOAT4E2M1": 4, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}.get(name, 8)
    return np.arange(2**bits, dtype=np.uint8).view(DTYPES[name])


def assert_codes(got, wanted, name, x):
    got = codes(got, name)
    wrong = got != wanted
    assert not wrong.any(), (
        f"{name}: {wrong.sum()} differ, first for {x[wrong][0]!r}: got {got[wrong][0]:#x}, "
        f"expected {wanted[wrong][0]:#x}"
    )


@pytest.mark.sample(
    *("FLOAT8E4M3FN-True-FLOAT16", "FLOAT8E4M3FNUZ-True-BFLOAT16", "FLOAT8E5M2-False-FLOAT16"),
    *("FLOAT8E5M2FNUZ-True-BFLOAT16", "FLOAT4E2M1-False-FLOAT16", "FLOAT6E3M2-False-FLOAT16"),
)
@pytest.mark.parametrize("source", ["FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("target", SMALL_FLOATS)
def test_every_16_bit_input_to_the_small_floats(source, target, saturate):
    x = every_16_bits(source)
    for opset in (28, 24, 23, 19):
        if opset < 28 and target not in FLOAT8:
            continue
        got = cast(x, target, saturate=saturate, opset=opset)
        wanted = expected(wide(x), target, saturate=saturate, opset=opset)
        assert_codes(got, wanted, target, x)


@pytest.mark.sample(
    "up-True-FLOAT16", "up-False-FLOAT16", "down-True-BFLOAT16", "nearest-False-FLOAT16"
)
@pytest.mark.parametrize("source", ["FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("round_mode", ROUND_MODES)
def test_every_16_bit_input_to_e8m0(source, saturate, round_mode):
    x = every_16_bits(source)
    got = cast(x, "FLOAT8E8M0", saturate=saturate, round_mode=round_mode)
    wanted = expected(wide(x), "FLOAT8E8M0", saturate=saturate, round_mode=round_mode)
    assert_codes(got, wanted, "FLOAT8E8M0", x)


@pytest.mark.sample("INT2-FLOAT16", "UINT2-BFLOAT16")
@pytest.mark.parametrize("source", ["FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("target", [*INTEGERS, "BOOL", "FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"])
def test_every_16_bit_input_to_the_other_types(source, target):
    x = every_16_bits(source)
    with jax.enable_x64(True):
        got = cast(x, target)
    assert_codes(got, expected(wide(x), target), target, x)


@pytest.mark.sample("UINT8")
@pytest.mark.parametrize("source", NARROW)
def test_every_code_of_the_narrow_types_to_every_type(source):
    x = every_code(source)
    numbers, integers = wide(x), source in INTEGERS or source == "BOOL"
    jax_types = [name for name in DTYPES if not name.startswith("FLOAT6")]

    def all_types(y):
        return [cast(y, name) for name in jax_types]

    with jax.enable_x64(True):
        # float6 has no array in JAX: as a constant of the compiled function.
        no_array = source.startswith("FLOAT6")
        results = all_types(x) if no_array else jax.jit(all_types)(jnp.asarray(x))
        for name, got in zip(jax_types, results, strict=True):
            assert_codes(got, expected(numbers, name, integers=integers), name, x)
        for name in ("FLOAT6E2M3", "FLOAT6E3M2"):
            got = cast(x, name)
            assert type(got) is np.ndarray
            assert_codes(got, expected(numbers, name, integers=integers), name, x)


@pytest.mark.sample("INT16")
@pytest.mark.parametrize("source", ["INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"])
def test_integers_keep_low_bits_and_floats_round_once(source):
    info = np.iinfo(DTYPES[source])
    rng = np.random.default_rng(5)
    edges = {p + d for k in range(info.bits + 1) for p in (2**k, -(2**k)) for d in (-1, 0, 1)}
    edges = [v for v in edges if info.min <= v <= info.max]
    drawn = rng.integers(info.min, info.max, 500, DTYPES[source], endpoint=True)
    x = np.concatenate([np.array(edges, DTYPES[source]), drawn])
    with jax.enable_x64(True):
        for target, (lowest, bits) in INTEGERS.items():
            wanted = [(int(v) - lowest) % 2**bits + lowest for v in x]
            got = np.asarray(cast(x, target))
            assert got.dtype == DTYPES[target]
            assert got.astype(object).tolist() == wanted
        np.testing.assert_array_equal(cast(x, "BOOL"), x != 0)
        np.testing.assert_array_equal(cast(x, "DOUBLE"), x.astype(np.float64))
        np.testing.assert_array_equal(cast(x, "FLOAT"), x.astype(np.float32))


def test_the_example_of_the_page():
    assert int(cast(np.int16(200), "INT8")) == -56


@pytest.mark.quick
@pytest.mark.parametrize(
    ("x", "to", "words", "exact", "reference"),
    [
        # Witnesses: the number just above a tie, which float32 does not hold.
        (np.uint64(0x3F50000000000001).view(np.float64), "FLOAT8E4M3FN", {}, 0x01, 0x00),
        (np.int32(1050673153), "BFLOAT16", {}, 0x4E7B, 0x4E7A),
        (np.int32(2147483647), "FLOAT8E8M0", {"round_mode": "down"}, 0x9D, 0x9E),
        (np.float64(2.5 + 2.0**-40), "FLOAT4E2M1", {}, 5, 4),
        (np.float64(1 + 2.0**-11 + 2.0**-40), "FLOAT16", {}, 0x3C01, 0x3C01),
    ],
)
def test_one_rounding_or_the_two_of_the_reference_evaluator(x, to, words, exact, reference):
    x = np.array([x])
    assert codes(cast(x, to, **words), to)[0] == exact
    assert codes(cast(x, to, arithmetic="reference", **words), to)[0] == reference


REFERENCE = ("BFLOAT16", "FLOAT16", "FLOAT", *FLOAT8, "FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2")


@pytest.mark.sample("float64-BFLOAT16", "int64-FLOAT8E4M3FN")
@pytest.mark.parametrize("target", REFERENCE)
@pytest.mark.parametrize("source", [np.float64, np.int64, np.uint32])
def test_reference_arithmetic_equals_the_evaluator(source, target):
    """Oracle: onnx's own cast_to, on ties of the target and float64 numbers beside them."""
    from onnx import TensorProto
    from onnx.reference.ops.op_cast import cast_to

    rng = np.random.default_rng(7)
    if source is np.float64:
        top = min(float(ml_dtypes.finfo(DTYPES[target]).max), 2.0**60)
        x = np.concatenate([rng.integers(0, 2**12, 2000) * 2.0**-9, rng.normal(0, top / 3, 999)])
        x = np.concatenate([x, np.nextafter(x, 0), np.nextafter(x, np.inf), [top, -top, 0.0]])
    else:
        info = np.iinfo(source)
        x = (rng.integers(0, info.max, 3000) >> rng.integers(0, info.bits - 1, 3000)).astype(source)
    for saturate in (True, False):
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = cast_to(x, TensorProto.DataType.Value(target), saturate)
        got = cast(x, target, saturate=saturate, arithmetic="reference")
        # ml_dtypes writes another NaN to E5M2's codes; there are none here.
        assert_codes(got, codes(wanted, target), target, x)


def test_reference_arithmetic_to_e8m0():
    """Oracle: onnx's own to_float8e8m0 on normal float32 numbers within the range."""
    from onnx.numpy_helper import to_float8e8m0

    rng = np.random.default_rng(8)
    x = np.ldexp(1 + rng.integers(0, 8, 4000) / 8, rng.integers(-120, 120, 4000))
    x = np.concatenate([x, np.nextafter(x, 0), np.nextafter(x, np.inf)])
    for round_mode in ROUND_MODES:
        wanted = to_float8e8m0(x, True, round_mode).view(np.uint8)
        got = cast(x, "FLOAT8E8M0", round_mode=round_mode, arithmetic="reference")
        assert_codes(got, wanted, "FLOAT8E8M0", x)


@pytest.mark.sample("FLOAT8E4M3FN")
@pytest.mark.parametrize("to", ["FLOAT8E4M3FN", "INT4", "BFLOAT16", "FLOAT8E8M0"])
def test_eager_jit_vmap_agree(to):
    x = jnp.asarray(np.random.default_rng(3).normal(0, 9, (4, 6)).astype(np.float32))
    for saturate in (True, False):
        eager = cast(x, to, saturate=saturate)
        assert eager.dtype == DTYPES[to]
        jitted = jax.jit(lambda v, s=saturate: cast(v, to, saturate=s))(x)
        mapped = jax.vmap(lambda v, s=saturate: cast(v, to, saturate=s))(x)
        for other in (jitted, mapped):
            np.testing.assert_array_equal(codes(other, to), codes(eager, to))


def test_a_cast_is_one_cast_of_qtoolkit():
    x = np.random.default_rng(3).normal(0, 99, 999).astype(np.float32)
    for to, fmt in (("FLOAT8E5M2", "e5m2"), ("FLOAT4E2M1", "e2m1fn")):
        np.testing.assert_array_equal(
            codes(cast(x, to), to), codes(qt.cast(x, fmt, saturation="finite"), to)
        )


def test_shapes_and_empty_arrays():
    for shape in ((), (0,), (2, 0, 3), (1, 2, 3)):
        assert cast(np.zeros(shape, np.float32), "FLOAT8E5M2").shape == shape
        assert cast(np.zeros(shape, np.float32), "FLOAT6E3M2").shape == shape


def test_float6_inside_jit_from_a_constant():
    x = np.array([1.0, -2.5], np.float32)

    @jax.jit
    def compiled(y):
        return y + jnp.asarray(cast(x, "FLOAT6E3M2").astype(np.float32))

    np.testing.assert_array_equal(compiled(jnp.zeros(2)), x)


EDGES = np.array([65504, 65504.01, -65504, 1e9, np.inf, -np.inf, np.nan, 0, 1e-30], np.float32)


@pytest.mark.sample("FLOAT16")
@pytest.mark.parametrize("to", ["FLOAT16", "BFLOAT16", "FLOAT"])
def test_derivatives_are_those_of_qtoolkit_cast(to):
    """1 within the range of the result, else 0; in forward and reverse mode, and under jit."""
    x = jnp.asarray(EDGES)
    limit = float(ml_dtypes.finfo(DTYPES[to]).max)
    inside = (np.abs(EDGES) <= limit).astype(np.float32)

    _, pullback = jax.vjp(lambda v: cast(v, to), x)
    (gradient,) = pullback(jnp.ones(x.shape, DTYPES[to]))
    np.testing.assert_array_equal(gradient, inside)
    tangent = jax.jvp(lambda v: cast(v, to), (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_array_equal(tangent.astype(jnp.float32), inside)
    gradient = jax.jit(jax.vmap(jax.grad(lambda v: cast(v, to).astype(jnp.float32))))(x)
    np.testing.assert_array_equal(gradient, inside)


@pytest.mark.parametrize("to", ["FLOAT8E4M3FN", "FLOAT8E8M0", "INT8", "FLOAT4E2M1", "BOOL"])
@pytest.mark.parametrize("saturate", [True, False])
def test_derivatives_of_narrow_results_raise(to, saturate):
    with refused(TypeError, "fake_cast"):
        jax.jvp(lambda v: cast(v, to, saturate=saturate), (jnp.ones(3),), (jnp.ones(3),))
