"""Range against rational arithmetic; BitCast against numpy's views."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from each import each
from onnx_oracle import DTYPES, codes, nearest
from refused import refused

from qtoolkit.onnx import bit_cast
from qtoolkit.onnx import range as onnx_range


def exact_range(start, limit, delta):
    """The formula of the page in rational numbers."""
    start, limit, delta = (Fraction(v.item()) for v in (start, limit, delta))
    count = max(math.ceil((limit - start) / delta), 0)
    return [start + i * delta for i in range(count)]


GRID = [
    *((0, 10, 3), (10, 4, -2), (3, 9, 3), (5, 5, 1), (5, 4, 1), (1, 2, 0.1), (0, 0.3, 0.1)),
    *((-1, 1, 0.3), (1, -1, -0.007), (1e4, 1.2e4, 7.7), (1e-4, 2e-4, 1e-6), (0, 1e-30, 1e-31)),
    *((1, 1.001, 1e-4), (-2, 3, 1 / 3), (100, 0, -0.1), (1e4, 1e4 + 1, 0.0013)),
]


@pytest.mark.sample("FLOAT-FLOAT")
@pytest.mark.parametrize(
    ("name", "stash"),
    [
        *(("FLOAT", "FLOAT"), ("DOUBLE", "FLOAT"), ("FLOAT16", "FLOAT"), ("BFLOAT16", "FLOAT")),
        *(("FLOAT16", "DOUBLE"), ("BFLOAT16", "DOUBLE")),
    ],
)
def test_every_number_is_rounded_once(name, stash):
    dtype = DTYPES[name]
    for grid in GRID:
        with np.errstate(under="ignore"):
            arguments = [np.array(v, np.float32).astype(dtype) for v in grid]
            if name == "DOUBLE":
                arguments = [np.array(v, dtype) for v in grid]
        if arguments[2] == 0:
            continue
        numbers = exact_range(*arguments)
        if name in ("FLOAT16", "BFLOAT16"):
            numbers = [Fraction(nearest(x, stash)) for x in numbers]
        wanted = np.array([float(nearest(x, name)) for x in numbers])
        with jax.enable_x64(True):
            got = onnx_range(*arguments, stash_type=stash)
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got).astype(np.float64), wanted, err_msg=str(grid))


@pytest.mark.parametrize("name", ["INT16", "INT32", "INT64"])
def test_integers(name):
    info = np.iinfo(DTYPES[name])
    step = info.max // 3 + 1
    cases = [(0, 10, 3), (10, 4, -3), (0, 0, 1), (3, 1, 1), (-5, 5, 2), (info.min, info.max, step)]
    cases += [(info.max, info.min, -step), (info.min, info.max, info.max), (0, 3, info.max)]
    for case in cases:
        arguments = [np.array(v, DTYPES[name]) for v in case]
        with jax.enable_x64(True):
            got = onnx_range(*arguments)
        assert got.dtype == DTYPES[name]
        assert np.asarray(got).tolist() == list(range(*case))


@pytest.mark.quick
def test_examples_of_the_page():
    np.testing.assert_array_equal(onnx_range(*np.float32([3, 9, 3])), [3, 6])
    np.testing.assert_array_equal(onnx_range(*np.int32([10, 4, -2])), [10, 8, 6])


def test_numbers_of_python_have_64_bits():
    with refused(TypeError, r"onnx.range: INT64 is needed, and 64-bit types are off"):
        onnx_range(0, 3, 1)
    with jax.enable_x64(True):
        assert onnx_range(0, 3, 1).tolist() == [0, 1, 2]
        assert onnx_range(0.0, 1.0, 0.5).tolist() == [0, 0.5]


def test_range_under_jit_takes_static_arguments():
    arguments = np.float32([0, 1, 0.25])
    compiled = jax.jit(lambda x: x + onnx_range(*arguments))
    np.testing.assert_array_equal(compiled(jnp.zeros(4)), [0, 0.25, 0.5, 0.75])
    for position, name in enumerate(("start", "limit", "delta")):

        def traced(v, position=position):
            return onnx_range(*[v if i == position else a for i, a in enumerate(arguments)])

        with refused(TypeError, f"onnx.range: {name} is traced, but the arguments decide"):
            jax.jit(traced)(np.float32(1))


@each(("error", "name", "numbers", "attributes"), [
    (ValueError, "delta", np.float32([0, 1, 0]), {}),
    (ValueError, "limit", np.float32([0, np.inf, 1]), {}),
    (ValueError, "start", np.float32([np.nan, 1, 1]), {}),
    (ValueError, "start", (np.float32([0]), np.float32(1), np.float32(1)), {}),
    (TypeError, "limit INT32", (np.float32(0), np.int32(1), np.float32(1)), {}),
    (TypeError, "start is UINT8", np.uint8([0, 3, 1]), {}),
    (TypeError, "FLOAT16, which came with", np.float16([0, 3, 1]), {"opset": 26}),
    (ValueError, "stash_type", np.float32([0, 3, 1]), {"stash_type": "FLOAT16"}),
    (ValueError, "opset=26", np.float32([0, 3, 1]), {"stash_type": 11, "opset": 26}),
    (TypeError, "start is STRING", ("0", "3", "1"), {}),
])  # fmt: skip
def test_bad_ranges(error, name, numbers, attributes):
    refused(error, rf"^onnx\.range: (.*\W)?{name}\W", onnx_range, *numbers, **attributes)


WIDTHS = {
    2: ("INT2", "UINT2"),
    4: ("INT4", "UINT4", "FLOAT4E2M1"),
    8: (
        *("INT8", "UINT8", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
        "FLOAT8E8M0",
    ),
    16: ("INT16", "UINT16", "FLOAT16", "BFLOAT16"),
    32: ("INT32", "UINT32", "FLOAT"),
    64: ("INT64", "UINT64", "DOUBLE"),
}


@pytest.mark.sample("2")
@pytest.mark.parametrize("width", WIDTHS)
def test_bits_stay_as_they_are(width):
    storage = np.dtype(f"uint{max(width, 8)}")
    rng = np.random.default_rng(3)
    patterns = np.arange(2**width) if width <= 16 else rng.integers(0, 2**63, 4096) * 2 + 1
    patterns = patterns.astype(storage).reshape(2, -1)
    mask = storage.type(2**width - 1)

    def bits(x):
        return np.asarray(x).view(storage) & mask

    with jax.enable_x64(True):
        for source in WIDTHS[width]:
            x = patterns.view(DTYPES[source])
            if source.startswith("INT") and width < 8:  # numpy's are sign-extended
                x = ((patterns ^ 2 ** (width - 1)).astype(np.int8) - 2 ** (width - 1)).astype(
                    x.dtype
                )
            for target in WIDTHS[width]:
                got = bit_cast(x, target)
                assert got.dtype == DTYPES[target]
                np.testing.assert_array_equal(bits(got), patterns)


def test_bit_cast_of_bool_and_complex():
    got = bit_cast(np.array([True, False]), "UINT8")
    np.testing.assert_array_equal(got, np.uint8([1, 0]))
    np.testing.assert_array_equal(bit_cast(np.uint8([0, 1, 2]), "BOOL"), [False, True, True])
    z = np.array([1 + 2j, -0.5 - 3j], np.complex64)
    np.testing.assert_array_equal(bit_cast(z, "COMPLEX64"), z)
    refused(TypeError, r"onnx.bit_cast: UINT64 is needed, and 64-bit types", bit_cast, z, "UINT64")
    with jax.enable_x64(True):
        words = bit_cast(z, "UINT64")
        np.testing.assert_array_equal(words, z.view(np.uint64))
        np.testing.assert_array_equal(bit_cast(words, "COMPLEX64"), z)
        np.testing.assert_array_equal(bit_cast(z.view(np.float64), "COMPLEX64"), z)


def test_bit_cast_under_jit_and_vmap():
    x = np.float32([[1, -2], [3, 4]])
    for call in (jax.jit(lambda v: bit_cast(v, "INT32")), jax.vmap(lambda v: bit_cast(v, "INT32"))):
        np.testing.assert_array_equal(call(x), x.view(np.int32))


@each(("error", "message", "x", "to"), [
    (ValueError, "x is FLOAT of 32 bits, to=INT16 has 16", np.float32(1), "INT16"),
    # Stored in a byte of numpy, but of four bits.
    (ValueError, "INT4 of 4 bits, to=INT8", np.zeros(1, ml_dtypes.int4), "INT8"),
    (TypeError, "to is STRING", np.float32(1), "STRING"),
    (TypeError, "x is STRING", "a", "INT8"),
    (TypeError, "x is FLOAT6E2M3", np.zeros(1, ml_dtypes.float6_e2m3fn), "FLOAT6E3M2"),
    (TypeError, "INT64 is needed.*jax_enable_x64", np.float64(1), "INT64"),
])  # fmt: skip
def test_bad_bit_casts(error, message, x, to):
    refused(error, rf"^onnx\.bit_cast: (.*\W)?{message}", bit_cast, x, to)


def test_no_derivative_of_a_bit_cast():
    with refused(TypeError, "onnx.bit_cast: has no derivative; differentiate .* fake_cast"):
        jax.grad(lambda v: bit_cast(v, "FLOAT"))(np.float32(1))


def test_codes_of_a_bit_cast_are_those_of_the_type():
    x = jnp.asarray([1.0, -448.0], jnp.float8_e4m3fn)
    assert codes(bit_cast(x, "UINT8"), "UINT8").tolist() == [0x38, 0xFE]


@pytest.mark.parametrize("x", [np.array([1.5, 2.25]), np.array([1, 2]), 1.0])
def test_bit_cast_of_64_bits_needs_them(x):
    with refused(TypeError, r"^onnx.bit_cast: .* is needed, and 64-bit types are off"):
        bit_cast(x, "COMPLEX64")
