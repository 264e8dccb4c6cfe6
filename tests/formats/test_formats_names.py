"""Every spelling of every format, and what an unknown one answers."""

import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from each import each
from refused import refused

import qtoolkit as qt
from qtoolkit import formats

pytestmark = pytest.mark.quick

# Every number type of onnx.TensorProto at opset 25, but for the complex ones.
ONNX = {
    "DOUBLE": "float64", "FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16",
    "FLOAT8E4M3FN": "e4m3fn", "FLOAT8E4M3FNUZ": "e4m3fnuz", "FLOAT8E5M2": "e5m2",
    "FLOAT8E5M2FNUZ": "e5m2fnuz", "FLOAT8E8M0": "e8m0fnu", "FLOAT4E2M1": "e2m1fn", "BOOL": "bool",
    **{f"INT{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"UINT{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)},
}  # fmt: skip
# ov.Type
OPENVINO = {
    "boolean": "bool", "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
    "f8e4m3": "e4m3fn", "f8e5m2": "e5m2", "f8e8m0": "e8m0fnu", "f4e2m1": "e2m1fn", "nf4": "nf4",
    **{f"i{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (1, 2, 3, 4, 6, 8, 16, 32, 64)},
}  # fmt: skip
SAFETENSORS = {
    "BOOL": "bool", "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "e4m3fn", "F8_E5M2": "e5m2", "F8_E4M3FNUZ": "e4m3fnuz", "F8_E5M2FNUZ": "e5m2fnuz",
    "F8_E8M0": "e8m0fnu", "F6_E2M3": "e2m3fn", "F6_E3M2": "e3m2fn", "F4": "e2m1fn",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip
# pypto.DataType; the newer kernel language spells some without the underscore.
PYPTO = {
    "DT_DOUBLE": "float64", "DT_FP32": "float32", "DT_FP16": "float16", "DT_BF16": "bfloat16",
    "DT_FP8E4M3": "e4m3fn", "DT_FP8E4M3FN": "e4m3fn", "DT_FP8E5M2": "e5m2",
    "DT_FP8E8M0": "e8m0fnu", "DT_HF8": "hifloat8", "DT_FP4_E2M1X2": "e2m1fn",
    "DT_FP4_E1M2X2": "e1m2fn", "DT_FP4E2M1": "e2m1fn", "DT_FP4E1M2": "e1m2fn", "DT_BOOL": "bool",
    **{f"DT_INT{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"DT_UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip
OTHERS = {
    "binary64": "float64", "binary32": "float32", "binary16": "float16", "TensorFloat32": "tf32",
    **{name: f"{name}fn" for name in ("e2m1", "e1m2", "e2m3", "e3m2")},
    **{f"float6_{name}fn": f"{name}fn" for name in ("e2m3", "e3m2")},
    "e8m0": "e8m0fnu", "ue8m0": "e8m0fnu", "hif8": "hifloat8",
    **{fmt.name: fmt.name for fmt in formats.FORMATS},
}  # fmt: skip
SPELLINGS = {**ONNX, **OPENVINO, **SAFETENSORS, **PYPTO, **OTHERS}


@each(("spelling", "name"), SPELLINGS.items())
def test_strings_in_any_case(spelling, name):
    for text in (spelling, spelling.lower(), spelling.upper()):
        assert qt.format(text).name == name
    if name in [fmt.name for fmt in formats.FORMATS]:
        assert qt.format(spelling) is getattr(formats, name.upper())


@each("fmt", formats.FORMATS)
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
    **{f"float8_{n}": n for n in ("e3m4", "e8m0fnu")},
    "float8_e4m3": "e4m3_ieee",
    "float4_e2m1fn": "e2m1fn",
    **{f"{u}int{bits}": f"{u}int{bits}" for u in ("", "u") for bits in (2, 4, 8, 16, 32, 64)},
}


@each(("attribute", "name"), JAX_DTYPES.items())
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


AMBIGUOUS = {
    "e4m3": ("e4m3fn", "e4m3_ieee"),
    **dict.fromkeys(("f8", "fp8", "float8"), ("e4m3fn", "e5m2")),
    **dict.fromkeys(("f6", "fp6", "float6"), ("e2m3fn", "e3m2fn")),
}


@each(("name", "choices"), AMBIGUOUS.items())
def test_names_of_several_formats_raise_with_each_of_them(name, choices):
    one, other = choices
    for text, function in itertools.product((name, name.upper()), (qt.format, qt.spec)):
        where = function.__name__
        refused(ValueError, rf"^{where}: '{text}' is ambiguous.*'{one}'.*'{other}'", function, text)


def test_both_formats_that_e4m3_may_mean():
    """The largest values are those of ml_dtypes."""
    for name, dtype in (("e4m3fn", ml_dtypes.float8_e4m3fn), ("e4m3_ieee", ml_dtypes.float8_e4m3)):
        assert qt.format(name) is qt.format(dtype) is qt.format(np.dtype(dtype).name)
        assert qt.format(name).max_finite == float(ml_dtypes.finfo(dtype).max)
    assert qt.format(jnp.float8_e4m3) is formats.E4M3_IEEE
    assert qt.format("f8e4m3") is qt.format("F8_E4M3") is formats.E4M3FN
    assert not hasattr(formats, "E4M3")


@pytest.mark.parametrize("fmt", formats.BLOCK_FORMATS, ids=lambda fmt: fmt.name)
def test_block_formats_are_none_of_a_cast(fmt):
    why = (
        rf"^format: '{fmt.name}' is a block format; use qtoolkit\.quantize or fake_quantize with "
        rf"it, or its element format '{fmt.element.name}' in a cast$"
    )
    for name in (fmt.name, fmt.name.upper()):
        refused(ValueError, why.replace(fmt.name, name, 1) + "|" + why, qt.format, name)
    refused(TypeError, why, qt.format, fmt)
    assert qt.format(fmt.element.name) is fmt.element


@pytest.mark.parametrize("cast", [qt.cast, qt.encode, qt.round_to_format, qt.fake_cast])
def test_casts_say_so_too(cast):
    x = np.ones(2, np.float32)
    refused(ValueError, r"^format: 'mxfp4' is a block format; use .* 'e2m1fn' in", cast, x, "mxfp4")
    refused(ValueError, r"^format: 'e4m3' is ambiguous", cast, x, "e4m3")


ALL = "`qtoolkit formats` lists all"


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2fnuz", "bfloat16", "half", "int8"])
def test_names_of_pytorch(name):
    """`str(torch.half)` is "torch.float16"; numpy knows half by that name, too."""
    assert qt.format(f"torch.{name}") is qt.format(name)
    assert qt.format("half") is qt.format("fp16") is qt.format(np.half)


CLOSEST = {
    "e4m3fm": "e4m3fn", "float8_e5m3": "e5m2", "FLOAT8E4M3FNU": "e4m3fnuz", "fp8_e4m3": "e4m3fn",
    "fp8_e5m2": "e5m2", "bfloat": "bfloat16", "int65": "int64", "int8_t": "int8", "int": "int8",
    "float128": "float32", "nf5": "nf4", "posits8": "posit8", "hifloat": "hifloat8",
    "Binary8p3sx": "binary8p3se",
}  # fmt: skip


@each("function", [qt.format, qt.spec])
@each(("name", "closest"), CLOSEST.items())
def test_unknown_names_raise_with_the_closest(function, name, closest):
    message = rf"^{function.__name__}: unknown format {name!r}; did you mean .*\? {ALL}$"
    with refused(ValueError, message) as error:
        function(name)
    nearest = re.findall("'(.*?)'", str(error.value).split("did you mean ")[1].split("?")[0])
    assert closest in nearest
    assert len(nearest) <= 3
    blocks = {fmt.name for fmt in formats.BLOCK_FORMATS}
    assert all(near in blocks or qt.format(near).name == near for near in nearest)


# Names that begin or resemble those of block formats, which casts do not take.
BLOCKS = {
    **dict.fromkeys(("mxfp8", "mx"), "'mxfp8_e4m3' or 'mxfp8_e5m2'"),
    "MXFP6": "'mxfp6_e2m3' or 'mxfp6_e3m2'",
    "int4_group": "'int4_group32' or 'int4_group128'",
    "nvfp8": "'nvfp4'",
}


@each(("name", "hint"), BLOCKS.items())
def test_names_that_begin_or_resemble_block_formats(name, hint):
    refused(ValueError, rf"^spec: .*'{name}'; did you mean {hint}.*\? {ALL}$", qt.spec, name)
    hint = f"the block format {hint}"
    refused(ValueError, rf"^format: .*'{name}'; did you mean {hint}.*\? {ALL}$", qt.format, name)


@each("name", ["fp4", "float4"])
def test_names_of_a_format_and_of_block_formats(name):
    for function, word in ((qt.format, "the block format "), (qt.spec, "")):
        hint = f"'e2m1fn' or {word}'mxfp4' or 'nvfp4'"
        refused(ValueError, rf"unknown format '{name}'; did you mean {hint}\? ", function, name)


@pytest.mark.parametrize("name", ["", "?", "zzzzzzzzzz", " ", "m", "a\nb", "x" * 10_000])
def test_names_without_a_close_one(name):
    with pytest.raises(
        ValueError, match=rf"^format: unknown format {re.escape(repr(name))}; {ALL}$"
    ) as e:
        qt.format(name)
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["e4m3fn ", "int0", "int05", "int100"])
def test_spellings_that_are_nearly_one(name):
    refused(ValueError, rf"^format: unknown format '{name}'; did you mean '", qt.format, name)


@pytest.mark.parametrize("dtype", [np.complex64, complex, str, np.dtype("datetime64[s]"), object])
def test_dtypes_that_are_no_format(dtype):
    with refused(ValueError, rf"^format: unknown format '{re.escape(np.dtype(dtype).name)}'"):
        qt.format(dtype)


@pytest.mark.parametrize(
    "spec",
    [None, 8, 8.0, object(), [1], [], (), {}, {"name": "e4m3fn"}, np.zeros((40, 40)), jnp.ones(50)],
    ids=lambda spec: type(spec).__name__,
)
def test_what_is_neither_format_nor_name_nor_dtype(spec):
    for function in (qt.format, qt.spec):
        where = function.__name__
        with pytest.raises(TypeError, match=rf"^{where}: got .* expected a format, its name") as e:
            function(spec)
        assert len(str(e.value).splitlines()) == 1
        assert len(str(e.value)) < 200


def test_every_format_that_is_exported_is_registered():
    """So that names find it, and the command, the reference and the explorer show it."""
    exported = [getattr(formats, name) for name in formats.__all__]
    for fmt in exported:
        if isinstance(fmt, formats.FloatFormat | formats.IntFormat | formats.TableFormat):
            assert fmt in formats.FORMATS
            assert qt.format(fmt.name) is fmt
        if isinstance(fmt, formats.BlockFormat):
            assert fmt in formats.BLOCK_FORMATS
