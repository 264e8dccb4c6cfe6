"""Every spelling of every format, and what an unknown one answers."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import qtoolkit as qt
from qtoolkit import formats

pytestmark = pytest.mark.quick

# qtoolkit, numpy and JAX; ONNX TensorProto; OpenVINO element types; safetensors.
SPELLINGS = {
    formats.E4M3FN: ("e4m3fn", "float8_e4m3fn", "FLOAT8E4M3FN", "f8e4m3", "F8_E4M3"),
    formats.E5M2: ("e5m2", "float8_e5m2", "FLOAT8E5M2", "f8e5m2", "F8_E5M2"),
    formats.E4M3FNUZ: ("e4m3fnuz", "float8_e4m3fnuz", "FLOAT8E4M3FNUZ", "F8_E4M3FNUZ"),
    formats.E5M2FNUZ: ("e5m2fnuz", "float8_e5m2fnuz", "FLOAT8E5M2FNUZ", "F8_E5M2FNUZ"),
    formats.BFLOAT16: ("bfloat16", "BFLOAT16", "bf16", "BF16"),
    formats.FLOAT16: ("float16", "FLOAT16", "f16", "F16", "binary16"),
    formats.INT8: ("int8", "INT8", "i8", "I8"),
}
CASES = [(fmt, spelling) for fmt, spellings in SPELLINGS.items() for spelling in spellings]


@pytest.mark.parametrize(("fmt", "spelling"), CASES)
def test_strings_in_any_case(fmt, spelling):
    for text in (spelling, spelling.lower(), spelling.upper()):
        assert qt.format(text) is fmt


@pytest.mark.parametrize(
    ("fmt", "scalar", "from_jax"),
    [
        (formats.E4M3FN, ml_dtypes.float8_e4m3fn, jnp.float8_e4m3fn),
        (formats.E5M2, ml_dtypes.float8_e5m2, jnp.float8_e5m2),
        (formats.E4M3FNUZ, ml_dtypes.float8_e4m3fnuz, jnp.float8_e4m3fnuz),
        (formats.E5M2FNUZ, ml_dtypes.float8_e5m2fnuz, jnp.float8_e5m2fnuz),
        (formats.BFLOAT16, ml_dtypes.bfloat16, jnp.bfloat16),
        (formats.FLOAT16, np.float16, jnp.float16),
        (formats.INT8, np.int8, jnp.int8),
    ],
)
def test_dtypes_of_numpy_ml_dtypes_and_jax(fmt, scalar, from_jax):
    array = jnp.zeros(2, from_jax)
    struct = jax.ShapeDtypeStruct((2,), from_jax)
    for spec in (
        scalar,
        np.dtype(scalar),
        from_jax,
        jnp.dtype(from_jax),
        array.dtype,
        struct.dtype,
    ):
        assert qt.format(spec) is fmt
    assert qt.format(np.zeros(2, scalar).dtype) is fmt


def test_a_format_is_returned_as_it_is():
    mine = qt.IntFormat(name="mine", bits=5)
    assert qt.format(mine) is mine
    for fmt in formats.FORMATS:
        assert qt.format(fmt) is fmt


def test_no_spelling_names_two_formats():
    seen = {}
    for fmt in formats.FORMATS:
        for spelling in {s.lower() for s in (fmt.name, fmt.dtype_name, *fmt.spellings)}:
            assert seen.setdefault(spelling, fmt) is fmt


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("e4m3fm", "e4m3fn"),
        ("e4m3", "e4m3fn"),
        ("float8_e5m3", "e5m2"),
        ("FLOAT8E4M3FNU", "e4m3fnuz"),
        ("bfloat", "bfloat16"),
        ("fp16", "float16"),
        ("int9", "int8"),
        ("float64", "float16"),
    ],
)
def test_unknown_names_raise_with_the_closest(name, closest):
    with pytest.raises(
        ValueError, match=rf"^format: unknown format {name!r}; did you mean .*"
    ) as e:
        qt.format(name)
    hint = str(e.value).split("did you mean ")[1].split("?")[0]
    assert repr(closest) in hint.split(" or ")
    assert len(hint.split(" or ")) <= 3
    assert "known: e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, bfloat16, float16, int8" in str(e.value)


@pytest.mark.parametrize("name", ["", "?", "zzzzzzzzzz", " ", "e4m3fn "])
def test_names_without_a_close_one_still_list_what_is_known(name):
    with pytest.raises(
        ValueError, match=rf"^format: unknown format {re.escape(repr(name))}; .*known: e4m3fn, "
    ):
        qt.format(name)


@pytest.mark.parametrize("dtype", [np.float64, np.dtype(np.int64), jnp.float32, bool, float])
def test_dtypes_that_are_no_shipped_format(dtype):
    with pytest.raises(ValueError, match=rf"^format: unknown format '{np.dtype(dtype).name}'"):
        qt.format(dtype)


@pytest.mark.parametrize("spec", [None, 8, 8.0, object(), [1], {"name": "e4m3fn"}])
def test_what_is_neither_format_nor_name_nor_dtype(spec):
    with pytest.raises(TypeError, match=r"^format: got .* expected a format, its name"):
        qt.format(spec)
