"""Block formats as data: parameters against tables typed by hand, shapes, what is refused."""

import ast
import copy
import dataclasses
import inspect
import pickle
import re
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from each import each
from refused import refused

from qtoolkit import formats
from qtoolkit.formats import (
    BLOCK_FORMATS,
    E2M1FN,
    E4M3FN,
    E8M0FNU,
    FLOAT32,
    INT4,
    INT8,
    MXFP4,
    NF4,
    NF4_BLOCK64,
    NVFP4,
    UE4M3,
    BlockFormat,
    spec,
)
from qtoolkit.formats._block import QUOTIENT_RULES, RULES
from qtoolkit.scaling import quantize

pytestmark = pytest.mark.quick

# OCP Microscaling Formats (MX) 1.0, table 1 and section 5.3; arXiv:2509.25149 (NVFP4);
# arXiv:2412.19437, section 3.3.2, its kernels' least amax 1e-4; arXiv:2305.14314 (QLoRA).
# The default rules of MX are this library's decision.
FIELDS = ("element", "block", "scale", "rule", "tensor_scale", "largest")
ROWS = {
    "mxfp8_e4m3": ("e4m3fn", (32,), "e8m0fnu", "rceil", None, 448),
    "mxfp8_e5m2": ("e5m2", (32,), "e8m0fnu", "rceil", None, 57344),
    "mxfp6_e2m3": ("e2m3fn", (32,), "e8m0fnu", "even", None, Fraction(15, 2)),
    "mxfp6_e3m2": ("e3m2fn", (32,), "e8m0fnu", "rceil", None, 28),
    "mxfp4": ("e2m1fn", (32,), "e8m0fnu", "even", None, 6),
    "mxint8": ("int8", (32,), "e8m0fnu", "floor", None, Fraction(127, 64)),
    "nvfp4": ("e2m1fn", (16,), "e4m3fn", "amax", "float32", 6),
    "deepseek_1x128": ("e4m3fn", (1, 128), "float32", "amax", None, 448),
    "deepseek_128x128": ("e4m3fn", (128, 128), "float32", "amax", None, 448),
    "deepseek_1x128_e8m0": ("e4m3fn", (1, 128), "e8m0fnu", "rceil", None, 448),
    "deepseek_128x128_e8m0": ("e4m3fn", (128, 128), "e8m0fnu", "rceil", None, 448),
    "int8_group128": ("int8", (128,), "float32", "amax", None, 127),
    "int4_group32": ("int4", (32,), "float32", "amax", None, 7),
    "int4_group128": ("int4", (128,), "float32", "amax", None, 7),
    "nf4_block64": ("nf4", (64,), "float32", "amax", None, 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_published_formats(name):
    fmt = spec(name)
    row = [getattr(fmt, field) for field in FIELDS]
    names = [getattr(value, "name", value) for value in row]
    assert names == list(ROWS[name])
    assert fmt.name == str(fmt) == name
    assert fmt.axes is None
    assert fmt.other_axes == 1
    assert not fmt.zero_point
    assert fmt.element_exponent == (-6 if name == "mxint8" else 0)
    assert fmt.narrow_range == (name == "mxint8")
    assert fmt.amax_epsilon == (1e-4 if name.startswith("deepseek") else 0)
    assert fmt.has_powers == (fmt.scale == E8M0FNU)
    assert fmt is getattr(formats, name.upper())
    assert spec(name.upper()) is fmt
    assert spec(fmt) is fmt


def test_all_published_formats_are_in_the_table():
    assert [fmt.name for fmt in BLOCK_FORMATS] == list(ROWS)


def test_defaults():
    fmt = BlockFormat(element="int8", other_axes=None)
    fields = {f.name: getattr(fmt, f.name) for f in dataclasses.fields(fmt)}
    assert fields == {
        "element": INT8,
        "block": (),
        "axes": None,
        "other_axes": None,
        "scale": FLOAT32,
        "rule": "amax",
        "tensor_scale": None,
        "tensor_scale_divides": False,
        "zero_point": False,
        "element_exponent": 0,
        "narrow_range": False,
        "amax_epsilon": 0.0,
    }


def test_the_signature_for_type_checkers_is_that_of_the_class():
    """mypy reads an `__init__` that does not exist: of the same keywords with the same defaults."""
    tree = ast.parse(inspect.getsource(BlockFormat))
    (written,) = (
        node.args
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    defaults = {
        argument.arg: inspect.Parameter.empty
        if default is None
        else eval(ast.unparse(default), vars(formats))
        for argument, default in zip(written.kwonlyargs, written.kw_defaults, strict=True)
    }
    of_class = inspect.signature(BlockFormat).parameters.values()
    assert defaults == {parameter.name: parameter.default for parameter in of_class}
    assert {parameter.kind for parameter in of_class} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "four_over_six"])
def test_the_scales_in_the_docstring(rule):
    """Oracle: `quantize`, whose scales tests/scaling compares with the rules written out."""
    (line,) = re.findall(rf'^ *"{rule}"  .*$', BlockFormat.__doc__, re.MULTILINE)
    written = [float(number) for number in re.split(r"  +", line)[-1].split(", ")]
    fmt = BlockFormat(
        element="e4m3fn",
        block=(4,),
        scale="float32" if rule in QUOTIENT_RULES else "e8m0",
        rule=rule,
    )
    x = np.full((3, 4), 1, np.float32)
    x[:, 0] = 300, 460, 500
    scales = np.asarray(quantize(x, fmt).scale, np.float64).ravel()
    if rule in QUOTIENT_RULES:  # four digits are written
        scales = [float(f"{scale:.4g}") for scale in scales]
    assert list(scales) == written


@each(("element", "scale", "rule"), [
    *((name, "e8m0", "rceil") for name in ("e4m3fn", "e5m2", "e3m2fn", "nf4", "hifloat8")),
    *((name, "e8m0", "even") for name in ("e2m3fn", "e2m1fn", "e1m2fn")),
    *((name, "e8m0", "floor") for name in ("int8", "int4", "uint8")),
    *(("int8", "float32", "amax"), ("e2m1fn", "e4m3fn", "amax"), ("e4m3fn", "bfloat16", "amax")),
])  # fmt: skip
def test_the_default_rule_follows_from_scale_and_element(element, scale, rule):
    assert BlockFormat.tensor(element, scale=scale).rule == rule


def test_any_spelling_is_resolved():
    fmt = BlockFormat(
        element="F8_E4M3", scale=jnp.float8_e4m3fn, tensor_scale=np.float32, block=[16]
    )
    assert (fmt.element, fmt.scale, fmt.tensor_scale) == (E4M3FN, E4M3FN, FLOAT32)
    assert fmt.block == (16,)
    assert BlockFormat(element="int4", scale=None).scale is None


def test_tensor_channel_and_token():
    assert BlockFormat.tensor("int8") == BlockFormat(element=INT8, other_axes=None)
    channel = BlockFormat.channel("int8", axis=0)
    assert channel == BlockFormat(element=INT8, block=(1,), axes=(0,), other_axes=None)
    token = BlockFormat.token("e4m3fn", scale="e8m0")
    assert token == BlockFormat(element=E4M3FN, block=(None,), axes=(-1,), scale=E8M0FNU)
    shape = (4, 6, 10)
    assert BlockFormat.tensor("int8").scale_shape(shape) == (1, 1, 1)
    assert BlockFormat.channel("int8").scale_shape(shape) == (1, 1, 10)
    assert channel.scale_shape(shape) == (4, 1, 1)
    assert token.scale_shape(shape) == (4, 6, 1)
    assert BlockFormat.token("int8", axis=1).scale_shape(shape) == (4, 1, 10)
    assert BlockFormat.tensor("int8").scale_shape(()) == ()


@pytest.mark.parametrize(
    ("block", "axes", "rest", "shape", "lengths", "scales"),
    [
        ((32,), None, 1, (64,), (32,), (2,)),
        ((32,), None, 1, (2, 65), (1, 32), (2, 3)),
        ((32,), None, None, (2, 65), (2, 32), (1, 3)),
        ((32,), (0,), 1, (65, 2), (32, 1), (3, 2)),
        ((32,), (-2,), 1, (3, 65, 2), (1, 32, 1), (3, 3, 2)),
        ((4, 16), None, 1, (2, 8, 33), (1, 4, 16), (2, 2, 3)),
        ((4, 16), (2, 0), 1, (33, 2, 8), (16, 1, 4), (3, 2, 2)),
        ((None, 16), None, 1, (5, 33), (5, 16), (1, 3)),
        ((), None, None, (2, 3), (2, 3), (1, 1)),
        ((3,), None, 1, (3,), (3,), (1,)),
        ((), None, None, (), (), ()),
    ],
)
def test_block_lengths_and_scale_shapes(block, axes, rest, shape, lengths, scales):
    fmt = BlockFormat(element="int8", block=block, axes=axes, other_axes=rest)
    assert fmt.block_lengths(shape) == lengths
    assert fmt.scale_shape(shape) == scales


@pytest.mark.parametrize(
    ("fields", "shape", "message"),
    [
        ({"block": (32,)}, (4, 0), r"shape \(4, 0\) is empty, expected at least one element"),
        ({"block": (32,)}, (), r"got a scalar, expected 1 or more axes"),
        ({"block": (2,), "axes": (2,)}, (4, 4), r"axes \(2,\).*expected .*from -2 to 1; .*along"),
        ({"block": (2,), "axes": (-3,)}, (4, 4), r"axes \(-3,\) of an array of shape \(4, 4\)"),
        ({"block": (2, 2), "axes": (1, -1)}, (4, 4), r"axes \(1, -1\).*different axes"),
        ({"block": (2, 2)}, (4,), r"got shape \(4,\), expected 2 or more axes"),
        ({"block": (32,)}, (4, 31), r"a block has 32 elements along axis -1.*only 31; use a short"),
        ({"block": (8,), "axes": (0,)}, (4, 31), r"a block has 8 elements along axis 0.* only 4"),
    ],
)
def test_shapes_that_a_block_does_not_fit(fields, shape, message):
    fmt = BlockFormat(element="int8", **fields)
    for function in (fmt.block_lengths, fmt.scale_shape):
        refused(ValueError, f"^int8 by blocks of .*: .*{message}", function, shape)


def test_along():
    moved = MXFP4.along(0)
    assert moved == dataclasses.replace(MXFP4, axes=(0,))
    assert moved.name == "mxfp4@0"
    assert moved.along(-2).name == "mxfp4@-2"
    assert moved != MXFP4
    tiles = formats.DEEPSEEK_128X128.along(-1, 0)
    assert tiles.axes == (-1, 0)
    assert tiles.name == "deepseek_128x128@-1,0"
    assert tiles.block_lengths((256, 3, 512)) == (128, 1, 128)
    refused(ValueError, r"2 axes, \(0, 1\), for a block with 1 lengths, \(32,\)", MXFP4.along, 0, 1)
    refused(ValueError, "0 axes", MXFP4.along)


# Fields that are wrong in a tensor of int8, the last of which the error names.
REFUSED = [
    *({"block": block} for block in ((0,), (-1, 2), (1.5,), (True,))),
    *({"block": (2,), "axes": (1.0,)}, {"block": (2, 2), "axes": (1, 1)}),
    *({"other_axes": value} for value in (2, 0, "all")),
    *({"scale": name} for name in ("int8", "e2m1fn", "nf4", "hifloat8", "float64")),
    *({"tensor_scale": name} for name in ("int32", "float64", "float32")),  # which need none
    *({"scale": None, "tensor_scale": "float32"}, {"scale": "e8m0", "tensor_scale": "float32"}),
    {"rule": "floor", "tensor_scale": "float32"},
    *({"rule": "round"}, {"scale": "e8m0", "rule": "amax"}, {"scale": "e8m0", "rule": "range"}),
    *({"element": "uint8", "rule": "range"}, {"element": "nf4", "rule": "even"}),
    *({"amax_epsilon": value} for value in (-1.0, float("inf"), float("nan"), "1")),
    *({"element": name} for name in ("float32", "bfloat16", "e8m0fnu", "int32", "bool", "int1")),
    *({"element_exponent": value} for value in (25, 0.5, 1)),  # which needs powers of two
    {"tensor_scale_divides": True},
    *({"element": name, "narrow_range": True} for name in ("e4m3fn", "uint8")),
    *({"element": name, "zero_point": True} for name in ("e4m3fn", "nf4", "uint24")),
    *({"scale": scale, "zero_point": True} for scale in (None, "e8m0")),
    {"scale": "e4m3fn", "tensor_scale": "float32", "zero_point": True},
    *({"amax_epsilon": 1.0, "zero_point": True}, {"narrow_range": True, "zero_point": True}),
]


@each("fields", REFUSED)
def test_what_is_refused(fields):
    *_, name = fields
    with refused(ValueError, rf"^BlockFormat of .*: {name}(=| needs | with )"):
        BlockFormat(**({"element": "int8", "other_axes": None} | fields))


@each(("fields", "message"), [
    ({"block": (2,), "axes": (0, 1)}, "2 axes, .* for a block with 1 lengths"),
    ({"block": (2,), "axes": ()}, "0 axes"),
    ({"other_axes": 1}, "make a scale for each element; expected a block, or BlockFormat.tensor"),
])  # fmt: skip
def test_axes_that_are_refused(fields, message):
    with refused(ValueError, f"^BlockFormat of .*: .*{message}"):
        BlockFormat(**({"element": "int8", "other_axes": None} | fields))


@pytest.mark.parametrize("fields", [{"block": 32}, {"block": (32,), "axes": 0}, {"block": None}])
def test_lengths_and_axes_are_tuples(fields):
    refused(TypeError, r"^BlockFormat of int8: \w+=\w+", BlockFormat, element="int8", **fields)


def test_unknown_elements():
    with refused(ValueError, "unknown format 'e4m3fm'; did you mean 'e4m3fn'"):
        BlockFormat(element="e4m3fm")
    with refused(ValueError, r"^format: 'mxfp4' is a block format; .*'e2m1fn' in a cast"):
        BlockFormat(element="mxfp4")
    refused(TypeError, "got None of type NoneType", BlockFormat, element=None)
    with pytest.raises(TypeError, match="positional"):
        BlockFormat("int8")


# What an element format or its name stands for.


def test_spec_of_an_element():
    for name in ("e4m3fn", "e5m2", "int8", "uint4", "e2m1fn", "hifloat8", "int16"):
        assert spec(name) == BlockFormat.tensor(name)
    assert spec(jnp.int8) == BlockFormat.tensor(INT8)
    assert spec(E2M1FN) == BlockFormat.tensor(E2M1FN)
    assert spec("nf4") is NF4_BLOCK64
    assert spec(NF4) is NF4_BLOCK64
    for name in ("float16", "bfloat16", "float32", "e8m0", "tf32"):
        assert spec(name) == BlockFormat.tensor(name, scale=None), name
    for name in ("int32", "uint64", "bool"):  # neither fit for scales nor meant without
        refused(ValueError, f"element={name} cannot be scaled: .*or scale=None", spec, name)


def test_unknown_specs():
    refused(ValueError, r"^spec: unknown format 'mxfp5'; did you mean 'mxfp4' or", spec, "mxfp5")
    refused(ValueError, r"^spec: unknown format 'e4m3fm'; did you mean 'e4m3fn'", spec, "e4m3fm")
    refused(ValueError, r"^p3109: bits=8, precision=9", spec, "binary8p9se")
    refused(TypeError, r"^spec: got 7 of type int", spec, 7)
    refused(TypeError, "got None of type NoneType", spec, None)


# Frozen data.


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_equality_hash_copies_and_pickles(fmt):
    fields = {f.name: getattr(fmt, f.name) for f in dataclasses.fields(fmt)}
    same = BlockFormat(**fields)
    for other in (same, copy.copy(fmt), copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt))):
        assert other == fmt
        assert hash(other) == hash(fmt)
        assert other.name == fmt.name
    assert [other for other in BLOCK_FORMATS if other == fmt] == [fmt]


def test_each_field_counts():
    base = BlockFormat(element="int8", block=(16,), scale="e4m3fn")
    changes = [
        {"element": INT4},
        {"block": (32,)},
        {"axes": (0,)},
        {"other_axes": None},
        {"scale": UE4M3},
        {"rule": "floor"},
        {"tensor_scale": FLOAT32},
        {"zero_point": True},
        {"narrow_range": True},
        {"amax_epsilon": 1.0},
        {"scale": E8M0FNU, "rule": "floor"},
        {"scale": E8M0FNU, "rule": "floor", "element_exponent": -6},
    ]
    others = [dataclasses.replace(base, **change) for change in changes]
    assert len({base, *others}) == len(changes) + 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.other_axes = None


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"other_axes": None}, "int8 by tensor"),
        ({"block": (1,), "other_axes": None}, "int8 by channel"),
        ({"block": (None,)}, "int8 by token"),
        ({"block": (16, None)}, "int8 by blocks of 16xall"),
        ({"block": (16,), "scale": "e8m0"}, "int8 by blocks of 16, scale=e8m0fnu"),
        ({"scale": None}, "int8, unscaled"),
        ({"block": (2,), "other_axes": None}, "int8 by blocks of 2 across all other axes"),
        (
            {"block": (2,), "axes": (0,), "zero_point": True},
            "int8 by blocks of 2@0, zero_point=True",
        ),
        ({"block": (32,), "scale": "e8m0", "element_exponent": -6, "narrow_range": True}, "mxint8"),
        ({"block": (16,), "rule": max}, "int8 by blocks of 16, rule=max"),
        ({"block": (32,), "rule": max}, "int4_group32, rule=max"),
    ],
)
def test_formats_without_a_name_describe_themselves(fields, name):
    element = "int4" if name.startswith("int4") else "int8"
    assert str(BlockFormat(element=element, **fields)) == name


def test_largest_and_powers():
    assert NVFP4.largest == 6
    assert BlockFormat.tensor("int8", scale="e8m0", element_exponent=3).largest == 127 * 8
    assert BlockFormat.tensor("hifloat8").largest == 2**15
    assert not BlockFormat.tensor("int8", rule="floor").has_powers  # float32 scales
    assert not BlockFormat(element="int8", scale=None).has_powers
