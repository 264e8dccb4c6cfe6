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

# Every number type of onnx.TensorProto at opset 25, but for the complex ones.
ONNX = {
    "DOUBLE": "float64",
    "FLOAT": "float32",
    "FLOAT16": "float16",
    "BFLOAT16": "bfloat16",
    "FLOAT8E4M3FN": "e4m3fn",
    "FLOAT8E4M3FNUZ": "e4m3fnuz",
    "FLOAT8E5M2": "e5m2",
    "FLOAT8E5M2FNUZ": "e5m2fnuz",
    "FLOAT8E8M0": "e8m0fnu",
    "FLOAT4E2M1": "e2m1fn",
    "BOOL": "bool",
    **{
        f"{u}INT{bits}": f"{u}int{bits}".lower()
        for u in ("", "U")
        for bits in (2, 4, 8, 16, 32, 64)
    },
}
# ov.Type
OPENVINO = {
    "boolean": "bool",
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "e4m3fn",
    "f8e5m2": "e5m2",
    "f8e8m0": "e8m0fnu",
    "f4e2m1": "e2m1fn",
    "nf4": "nf4",
    **{f"i{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (1, 2, 3, 4, 6, 8, 16, 32, 64)},
}
SAFETENSORS = {
    "BOOL": "bool",
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "e4m3fn",
    "F8_E5M2": "e5m2",
    "F8_E4M3FNUZ": "e4m3fnuz",
    "F8_E5M2FNUZ": "e5m2fnuz",
    "F8_E8M0": "e8m0fnu",
    "F6_E2M3": "e2m3fn",
    "F6_E3M2": "e3m2fn",
    "F4": "e2m1fn",
    **{
        f"{letter}{bits}": name + str(bits)
        for letter, name in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
}
# pypto.DataType; the newer kernel language spells some without the underscore.
PYPTO = {
    "DT_DOUBLE": "float64",
    "DT_FP32": "float32",
    "DT_FP16": "float16",
    "DT_BF16": "bfloat16",
    "DT_FP8E4M3": "e4m3fn",
    "DT_FP8E4M3FN": "e4m3fn",
    "DT_FP8E5M2": "e5m2",
    "DT_FP8E8M0": "e8m0fnu",
    "DT_HF8": "hifloat8",
    "DT_FP4_E2M1X2": "e2m1fn",
    "DT_FP4_E1M2X2": "e1m2fn",
    "DT_FP4E2M1": "e2m1fn",
    "DT_FP4E1M2": "e1m2fn",
    "DT_BOOL": "bool",
    **{f"DT_INT{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"DT_UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
OTHERS = {
    "binary64": "float64",
    "binary32": "float32",
    "binary16": "float16",
    "TensorFloat32": "tf32",
    "e2m1": "e2m1fn",
    "e1m2": "e1m2fn",
    "e2m3": "e2m3fn",
    "e3m2": "e3m2fn",
    "e8m0": "e8m0fnu",
    "ue8m0": "e8m0fnu",
    "hif8": "hifloat8",
    "float6_e2m3fn": "e2m3fn",
    "float6_e3m2fn": "e3m2fn",
    **{fmt.name: fmt.name for fmt in formats.FORMATS},
}
CASES = [
    pytest.param(spelling, name, id=f"{family}-{spelling}")
    for family, spellings in (
        *(("onnx", ONNX), ("openvino", OPENVINO), ("safetensors", SAFETENSORS)),
        *(("pypto", PYPTO), ("others", OTHERS)),
    )
    for spelling, name in spellings.items()
]


@pytest.mark.parametrize(("spelling", "name"), CASES)
def test_strings_in_any_case(spelling, name):
    for text in (spelling, spelling.lower(), spelling.upper()):
        assert qt.format(text).name == name
    if name in [fmt.name for fmt in formats.FORMATS]:
        assert qt.format(spelling) is getattr(formats, name.upper())


@pytest.mark.parametrize("fmt", formats.FORMATS, ids=lambda fmt: fmt.name)
def test_every_spelling_and_the_dtype(fmt):
    for spelling in (fmt.name, *fmt.spellings):
        assert qt.format(spelling) is fmt
    if fmt.dtype is not None:
        assert qt.format(fmt.dtype) is fmt
        assert qt.format(fmt.dtype.name) is fmt
        assert qt.format(fmt.dtype.type) is fmt
        assert qt.format(np.zeros(2, fmt.dtype).dtype) is fmt


@pytest.mark.parametrize("name", ["int5", "uint13", "i3", "u63", "INT1"])
def test_spellings_of_integers_of_any_width_lead_back(name):
    fmt = qt.format(name)
    assert all(qt.format(spelling) == fmt for spelling in (fmt.name, *fmt.spellings))


JAX_DTYPES = {
    **{name: name for name in ("float64", "float32", "float16", "bfloat16", "bool_")},
    **{f"float8_{n}": n for n in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz")},
    **{f"float8_{n}": n for n in ("e4m3", "e3m4", "e8m0fnu")},
    "float4_e2m1fn": "e2m1fn",
    **{f"{u}int{bits}": f"{u}int{bits}" for u in ("", "u") for bits in (2, 4, 8, 16, 32, 64)},
}


@pytest.mark.parametrize(("attribute", "name"), JAX_DTYPES.items())
def test_dtypes_of_jax(attribute, name):
    scalar, fmt = getattr(jnp, attribute), getattr(formats, name.strip("_").upper())
    assert qt.format(scalar) is fmt
    assert qt.format(jnp.dtype(scalar)) is fmt
    if fmt.bits < 64:
        assert qt.format(jnp.zeros(2, scalar).dtype) is fmt
        assert qt.format(jax.ShapeDtypeStruct((2,), scalar).dtype) is fmt


def test_dtypes_of_numpy_and_python():
    assert qt.format(np.float32) is formats.FLOAT32
    assert qt.format(np.dtype(">f2")) is formats.FLOAT16
    assert qt.format(ml_dtypes.float8_e4m3b11fnuz) is formats.E4M3B11FNUZ
    assert qt.format(float) is formats.FLOAT64
    assert qt.format(int) is formats.INT64
    assert qt.format(bool) is formats.BOOL


def test_a_format_is_returned_as_it_is():
    mine = qt.IntFormat(name="mine", bits=5)
    assert qt.format(mine) is mine
    for fmt in formats.FORMATS:
        assert qt.format(fmt) is fmt


def test_no_spelling_names_two_formats():
    seen = {}
    for fmt in formats.FORMATS:
        for spelling in (fmt.name, *([fmt.dtype.name] if fmt.dtype else []), *fmt.spellings):
            assert seen.setdefault(spelling.lower(), fmt) is fmt


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("e4m3fm", "e4m3fn"),
        ("float8_e5m3", "e5m2"),
        ("FLOAT8E4M3FNU", "e4m3fnuz"),
        ("bfloat", "bfloat16"),
        ("fp16", "float16"),
        ("int65", "int6"),
        ("int8_t", "int8"),
        ("float128", "float32"),
        ("nf5", "nf4"),
        ("posit16", "posit8"),
        ("hifloat", "hifloat8"),
        ("Binary8p3sx", "binary8p3se"),
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
    for near in hint.split(" or "):
        assert qt.format(near.strip("'")).name == near.strip("'")
    assert f"known: {', '.join(fmt.name for fmt in formats.FORMATS)}, int1 to int64" in str(e.value)


@pytest.mark.parametrize("name", ["", "?", "zzzzzzzzzz", " ", "e4m3fn ", "int0", "int05", "int100"])
def test_names_without_a_close_one_still_list_what_is_known(name):
    with pytest.raises(
        ValueError, match=rf"^format: unknown format {re.escape(repr(name))}; .*known: float64, "
    ):
        qt.format(name)


@pytest.mark.parametrize("dtype", [np.complex64, complex, str, np.dtype("datetime64[s]"), object])
def test_dtypes_that_are_no_format(dtype):
    with pytest.raises(
        ValueError, match=rf"^format: unknown format '{re.escape(np.dtype(dtype).name)}'"
    ):
        qt.format(dtype)


@pytest.mark.parametrize("spec", [None, 8, 8.0, object(), [1], {"name": "e4m3fn"}])
def test_what_is_neither_format_nor_name_nor_dtype(spec):
    with pytest.raises(TypeError, match=r"^format: got .* expected a format, its name"):
        qt.format(spec)
