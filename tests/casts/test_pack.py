"""pack and unpack against NumPy's bits in a row, the lowest of each code first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refused import refused

import qtoolkit as qt

WIDTHS = (1, 2, 4, 6)
CODES_OF_A_GROUP = {1: 8, 2: 4, 4: 2, 6: 4}
BYTES_OF_A_GROUP = {1: 1, 2: 1, 4: 1, 6: 3}


def oracle(codes, bits, axis=-1):
    """The low bits of each code in a row, padded to whole groups, cut into bytes."""
    codes = np.moveaxis(codes, axis, -1)
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % CODES_OF_A_GROUP[bits])]
    each = np.unpackbits(np.pad(codes, padding)[..., None], axis=-1, bitorder="little")
    row = each[..., :bits].reshape(*codes.shape[:-1], -1)
    return np.moveaxis(np.packbits(row, axis=-1, bitorder="little"), -1, axis)


def draw(shape, bits, seed=0):
    return np.random.default_rng(seed).integers(0, 2**bits, shape, np.uint8)


def assert_equal(got, expected):
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(np.asarray(got), expected, strict=True)


@pytest.mark.sample("1")
@pytest.mark.quick
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_length_up_to_three_groups(bits):
    for size in range(3 * CODES_OF_A_GROUP[bits] + 1):
        codes = draw((size,), bits, size)
        packed = qt.pack(codes, bits)
        assert_equal(packed, oracle(codes, bits))
        groups = -(-size // CODES_OF_A_GROUP[bits])
        assert packed.shape == (groups * BYTES_OF_A_GROUP[bits],)
        assert_equal(qt.unpack(packed, bits, size), codes)
        whole = np.pad(codes, (0, groups * CODES_OF_A_GROUP[bits] - size))
        assert_equal(qt.unpack(packed, bits), whole)


@pytest.mark.quick
def test_the_first_code_is_in_the_low_bits():
    """The layouts written out by hand."""
    one = np.uint8
    assert_equal(qt.pack(one([1, 0, 0, 1, 0, 0, 0, 1]), 1), one([0b10001001]))
    assert_equal(qt.pack(one([1, 2, 3, 0]), 2), one([0b00111001]))
    assert_equal(qt.pack(one([0x3, 0xA]), 4), one([0xA3]))
    codes = [0b000001, 0b100010, 0b010111, 0b111000]
    word = sum(code << 6 * place for place, code in enumerate(codes))
    assert_equal(qt.pack(one(codes), 6), one([*word.to_bytes(3, "little")]))


@pytest.mark.sample("1", "4")
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_code_beside_every_other(bits):
    count = CODES_OF_A_GROUP[bits]
    values = np.arange(2**bits, dtype=np.uint8)
    first, second = np.meshgrid(values, values)
    pairs = np.stack([first.ravel(), second.ravel()], -1)
    codes = np.tile(pairs, (1, count // 2))
    assert_equal(qt.pack(codes, bits), oracle(codes, bits))
    assert_equal(qt.unpack(qt.pack(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_byte_is_unpacked(bits):
    """Oracle: `oracle`, which must give the bytes back."""
    width = BYTES_OF_A_GROUP[bits]
    packed = np.arange(256, dtype=np.uint8).repeat(width).reshape(256, width)
    packed[:, -1] = np.roll(packed[:, -1], 1)
    assert_equal(oracle(np.asarray(qt.unpack(packed, bits)), bits), packed)


@pytest.mark.sample("0-1", "1-2", "2-4", "-1-2", "-2-4")
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_axes(bits, axis):
    codes = draw((5, 9, 7), bits)
    packed = qt.pack(codes, bits, axis=axis)
    assert_equal(packed, oracle(codes, bits, axis))
    assert_equal(qt.unpack(packed, bits, codes.shape[axis], axis=axis), codes)


@pytest.mark.sample(
    *("0-(0,)-1", "0-(2, 0)-2", "0-(0, 5)-4", "0-(0, 8)-2", "0-(5, 0, 3)-4", "-1-(0,)-6"),
    *("-1-(2, 0)-4", "-1-(0, 5)-6", "-1-(0, 8)-4", "-1-(5, 0, 3)-6"),
)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 5), (0, 8), (5, 0, 3)], ids=str)
@pytest.mark.parametrize("axis", [0, -1])
def test_empty_arrays_keep_their_other_axes(bits, shape, axis):
    codes = np.zeros(shape, np.uint8)
    groups = -(-shape[axis] // CODES_OF_A_GROUP[bits])
    expected = list(shape)
    expected[axis] = groups * BYTES_OF_A_GROUP[bits]
    packed = qt.pack(codes, bits, axis=axis)
    assert_equal(packed, np.zeros(expected, np.uint8))
    assert_equal(qt.unpack(packed, bits, shape[axis], axis=axis), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_bits_above_the_width_are_dropped(bits):
    codes = np.arange(256, dtype=np.uint8)
    assert_equal(qt.pack(codes, bits), oracle(codes, bits))


@pytest.mark.parametrize(("bits", "dtype"), [(2, jnp.uint2), (4, jnp.uint4)])
def test_the_layout_is_that_of_xla(bits, dtype):
    """Oracle: XLA's bitcast of bytes to narrow integers."""
    packed = jnp.arange(256, dtype=jnp.uint8)
    narrow = jax.lax.bitcast_convert_type(packed, dtype).astype(jnp.uint8)
    assert_equal(qt.unpack(packed, bits), np.asarray(narrow).ravel())


@pytest.mark.sample("bool-1", "int2-2", "e3m2fn-6")
@pytest.mark.parametrize(
    ("fmt", "bits"),
    [
        ("bool", 1),
        ("uint1", 1),
        ("int2", 2),
        ("e2m1fn", 4),
        ("nf4", 4),
        ("e3m2fn", 6),
        (qt.p3109(6, 3), 6),
        (jnp.float4_e2m1fn, 4),
        (qt.format("int4"), 4),
    ],
)
def test_formats_stand_for_their_width(fmt, bits):
    x = np.random.default_rng(0).normal(0, 2, (3, 11)).astype(np.float32)
    codes = np.asarray(qt.encode(x, fmt))
    packed = qt.pack(codes, fmt)
    assert_equal(packed, oracle(codes, bits))
    assert_equal(qt.unpack(packed, fmt, 11), codes)


@pytest.mark.sample("1")
@pytest.mark.parametrize("bits", WIDTHS)
def test_jit_vmap_and_scan(bits):
    codes = draw((3, 4, 13), bits)
    expected = oracle(codes, bits)

    def pack(codes):
        return qt.pack(codes, bits)

    def unpack(packed):
        return qt.unpack(packed, bits, 13)

    assert_equal(jax.jit(pack)(codes), expected)
    assert_equal(jax.vmap(pack)(codes), expected)
    assert_equal(jax.lax.map(pack, jnp.asarray(codes)), expected)
    assert_equal(jax.vmap(pack, in_axes=1, out_axes=1)(codes), expected)
    assert_equal(jax.jit(jax.vmap(unpack))(jnp.asarray(expected)), codes)


@pytest.mark.parametrize("name", ["pack", "unpack"])
def test_bad_arguments(name):
    function = getattr(qt, name)
    bytes_ = np.zeros((2, 3), np.uint8)
    for wrong in (np.int8, np.uint16, np.float32, bool):
        got = rf"^{name}: got dtype {np.dtype(wrong)}, expected uint8"
        refused(TypeError, got, function, bytes_.astype(wrong), 4)
    for wrong, got in (([1, 2], "list"), (3, "int"), ("a", "str"), (None, "NoneType")):
        refused(TypeError, rf"^{name}: got type {got}", function, wrong, 4)
    for wrong in (0, 3, 5, 8, -4, "e4m3fn", "uint3", "bfloat16"):
        refused(ValueError, rf"^{name}: -?\d+ bits", function, bytes_, wrong)
    refused(ValueError, r"unknown format 'e2m1f'; did you mean 'e2m1fn'", function, bytes_, "e2m1f")
    refused(TypeError, r"format: got 4\.0 of type float", function, bytes_, 4.0)
    for axis in (2, -3):
        got = f"{name}: axis={axis} of an array with 2 axes"
        refused(ValueError, f"^{got}", function, bytes_, 4, axis=axis)
    refused(ValueError, f"^{name}: axis=-1 .* 0 axes", function, np.uint8(3), 4)


def test_numpy_integers_are_widths_too():
    codes = draw((8,), 4)
    assert_equal(qt.pack(codes, np.int64(4)), oracle(codes, 4))


@pytest.mark.parametrize("size", [-1, 0, 4, 7, 5.0, "5"])
def test_sizes_that_the_bytes_do_not_hold(size):
    refused(ValueError, r"unpack: size=.* with 3 bytes ", qt.unpack, np.zeros(3, np.uint8), 4, size)


def test_bytes_that_are_no_whole_groups():
    refused(ValueError, r"unpack: axis 1 has 4 bytes", qt.unpack, np.zeros((2, 4), np.uint8), 6)
    refused(ValueError, r"unpack: size=9 with 6 bytes ", qt.unpack, np.zeros(6, np.uint8), 6, 9)
