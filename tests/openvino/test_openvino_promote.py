"""ConvertPromoteTypes-14: every pair of types and every flag against OpenVINO's core."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import openvino_oracle as core
import pytest
from refused import refused

import qtoolkit as qt
from qtoolkit.openvino import convert, convert_promote_types, promoted_type

NAMES = tuple({  # of all types of the wheel, without their other names
    value.get_type_name(): None
    for name in dir(core.openvino.Type)
    if isinstance(value := getattr(core.openvino.Type, name, None), core.openvino.Type)
})  # fmt: skip
# Targets of u64 with signed integers; of all other pairs the first alone.
TARGETS = ("f32", "i64", "boolean", "nf4", "dynamic")
RANKS = [(1, 1), (0, 0), (0, 2), (2, 0), (None, 0), (3, None), (None, None)]

# The core's reasons, and ours.
REASONS = {
    "is_type_supported": "the operator does not support",
    "Integer input cannot be safely promoted": "integer input cannot be safely promoted",
    "Scalar input cannot be PyTorch-like": "PyTorch-like promoted",
    "Unsigned integer input cannot be safely": "unsigned integer input cannot be safely promoted",
    "Unsupported input element types": "unsupported input element types with given attributes",
}


def test_the_element_types_are_those_of_the_wheel():
    with pytest.raises(ValueError, match="is not an element type") as error:
        promoted_type("f99", "f32")
    listed = str(error.value).rpartition("expected one of ")[2].split(", ")
    assert len(listed) == 26
    assert sorted(listed) == sorted(NAMES)


def reason_of_the_core(error):
    (reason,) = (ours for theirs, ours in REASONS.items() if theirs in str(error))
    return reason


def cells():
    """Pairs of types, ranks, and the target of u64."""
    for types, ranks in itertools.product(itertools.product(NAMES, NAMES), RANKS):
        for target in TARGETS if "u64" in types else TARGETS[:1]:
            yield types, ranks, target


@pytest.mark.sample("False-False")
@pytest.mark.parametrize("pytorch_scalar_promotion", [False, True])
@pytest.mark.parametrize("promote_unsafe", [False, True])
def test_every_pair_of_types_at_every_setting(promote_unsafe, pytorch_scalar_promotion):
    refusals = 0
    flags = {"promote_unsafe": promote_unsafe, "pytorch_scalar_promotion": pytorch_scalar_promotion}
    for types, ranks, target in cells():
        attributes = flags | {"u64_integer_promotion_target": target}
        arguments = dict(zip(("rank0", "rank1"), ranks, strict=True)) | attributes
        try:
            expected = core.promoted_type(types, ranks, **attributes)
        except RuntimeError as error:
            refusals += 1
            with pytest.raises(TypeError, match=reason_of_the_core(error)) as ours:
                promoted_type(*types, **arguments)
            assert str(ours.value).startswith(f"openvino.promoted_type: {types[0]} and {types[1]}:")
            continue
        assert promoted_type(*types, **arguments) == expected, (types, arguments)
    assert refusals >= 7 * (26 + 19) * len(RANKS)  # the types that are not supported, at the least


@pytest.mark.quick
@pytest.mark.parametrize(
    ("types", "arguments", "expected"),
    [
        # The page's own examples.
        (("i8", "f32"), {}, "f32"),
        (("i32", "u8"), {}, "i32"),
        (("f16", "i64"), {"promote_unsafe": True}, "f16"),
        (("f64", "u64"), {"promote_unsafe": True}, "f64"),
        (("i8", "u8"), {"promote_unsafe": True}, "i16"),
        (("f16", "bf16"), {"promote_unsafe": True}, "f32"),
        (("f8e4m3", "f8e5m2"), {"promote_unsafe": True}, "f16"),
        (("u64", "i8"), {"promote_unsafe": True}, "f32"),
        (("i16", "u32"), {"promote_unsafe": True}, "i64"),
        (
            ("i64", "u8"),
            {"rank0": 0, "pytorch_scalar_promotion": True, "promote_unsafe": True},
            "u8",
        ),
        (("f16", "i8"), {"rank0": 0, "pytorch_scalar_promotion": True}, "f16"),
    ],
)
def test_the_examples_of_the_page(types, arguments, expected):
    assert promoted_type(*types, **arguments) == expected
    swapped = {{"rank0": "rank1"}.get(name, name): value for name, value in arguments.items()}
    assert promoted_type(*reversed(types), **swapped) == expected
    if arguments.get("promote_unsafe"):  # all of these raise where promotion is to be safe
        with refused(TypeError, r"(set|or) promote_unsafe"):
            promoted_type(*types, **(arguments | {"promote_unsafe": False}))


@pytest.mark.quick
def test_names_and_dtypes():
    assert promoted_type("I8", np.float32) == "f32"
    assert promoted_type(jnp.bfloat16, "U8") == "bf16"
    assert promoted_type(ml_dtypes.int4, bool) == "i4"
    assert (
        promoted_type("u64", "i8", promote_unsafe=True, u64_integer_promotion_target=np.float64)
        == "f64"
    )


# Arrays.


@pytest.mark.quick
def test_values_follow_convert():
    a = jnp.array([[-128, 7, 127]], jnp.int8)
    b = jnp.array([0, 200, 255], jnp.uint8)
    x, y = convert_promote_types(a, b, promote_unsafe=True)
    assert x.dtype == y.dtype == jnp.int16
    np.testing.assert_array_equal(x, [[-128, 7, 127]])
    np.testing.assert_array_equal(y, [0, 200, 255])
    # Unsafe: 70001 has no float16, and 300 no uint8.
    big = jnp.array([70001, 2049], jnp.int32)
    x, y = convert_promote_types(big, jnp.float16(1), promote_unsafe=True)
    np.testing.assert_array_equal(x, [np.inf, 2048])
    assert y.dtype == jnp.float16
    x, y = convert_promote_types(
        jnp.int32(300), b, promote_unsafe=True, pytorch_scalar_promotion=True
    )
    assert x.shape == ()
    assert x == 44
    np.testing.assert_array_equal(y, b)


@pytest.mark.exhaustive
@pytest.mark.parametrize("promote_unsafe", [False, True])
def test_pairs_of_dtypes(promote_unsafe):
    names = ["boolean", "u4", "u8", "i8", "i32", "u64", "f8e4m3", "f8e5m2", "bf16", "f16", "f64"]
    with jax.enable_x64(True):
        for one, other in itertools.combinations_with_replacement(names, 2):
            a, b = (np.array([0, 1, 3, 5], qt.format(name).dtype) for name in (one, other))
            try:
                common = promoted_type(one, other, promote_unsafe=promote_unsafe)
            except TypeError as error:
                reason = str(error).partition(": ")[2]
                with pytest.raises(TypeError, match=r"openvino\.convert_promote_types: ") as ours:
                    convert_promote_types(a, b, promote_unsafe=promote_unsafe)
                assert str(ours.value).endswith(reason)
                continue
            got = convert_promote_types(a, b, promote_unsafe=promote_unsafe)
            for x, y in zip(got, (a, b), strict=True):
                assert x.dtype == qt.format(common).dtype
                np.testing.assert_array_equal(x, np.asarray(convert(y, common)))


@pytest.mark.quick
def test_under_jit_and_differentiated():
    def f(a, b):
        return convert_promote_types(a, b, promote_unsafe=True)

    a, b = jnp.array([1.5, 1e5]), jnp.array([2.5], jnp.bfloat16)
    x, y = jax.jit(f)(a, b)
    assert x.dtype == y.dtype == jnp.float32
    slope = jax.grad(lambda b: f(a, b)[1].sum())(b)
    assert slope.dtype == jnp.bfloat16
    np.testing.assert_array_equal(slope, [1])
    # A scalar's gradient in the type of the array: float16 ends at 65504.
    half = jnp.ones(2, jnp.float16)
    for value, slope in ((1e3, 1), (1e5, 0)):
        g = jax.grad(
            lambda a: convert_promote_types(
                a, half, promote_unsafe=True, pytorch_scalar_promotion=True
            )[0].astype(jnp.float32)
        )(value)
        assert g == slope
    with jax.enable_x64(True):
        narrow = jnp.ones(2, jnp.float8_e4m3fn)
        flags = {"promote_unsafe": True, "pytorch_scalar_promotion": True}
        with refused(TypeError, r"^openvino\.convert_promote_types: .*fake_cast"):
            jax.grad(lambda a: convert_promote_types(a, narrow, **flags)[0].astype(jnp.float32))(
                1.0
            )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("types", "arguments", "error", "message"),
    [
        (("fp8", "i8"), {}, ValueError, "type0: 'fp8' is not an element type of OpenVINO"),
        (("i8", "float32"), {}, ValueError, "type1: 'float32' is not an element type of OpenVINO"),
        (("i8", np.complex64), {}, TypeError, "type1: got .*complex64.*, expected a dtype"),
        (("i8", "u8"), {"rank0": -1}, ValueError, "rank0=-1, expected 0 or more"),
        (("i8", "u8"), {"rank1": 1.0}, TypeError, "rank1=1.0, expected an integer, or None"),
        (("i8", "i8"), {"promote_unsafe": 1}, TypeError, "promote_unsafe=1, expected True or Fal"),
        (("i8", "i8"), {"pytorch_scalar_promotion": None}, TypeError, "=None, expected True or"),
        (
            ("i8", "i8"),
            {"u64_integer_promotion_target": "f128"},
            ValueError,
            "u64_integer_promotion_target: 'f128' is not an element type",
        ),
    ],
)
def test_errors(types, arguments, error, message):
    refused(error, rf"^openvino\.promoted_type: .*{message}", promoted_type, *types, **arguments)


@pytest.mark.quick
def test_errors_of_arrays():
    where = "openvino.convert_promote_types: "
    x = jnp.ones(2)
    refused(TypeError, f"{where}x0 has type list", convert_promote_types, [1.0], x)
    refused(TypeError, f"{where}x1 has dtype complex64", convert_promote_types, x, np.complex64(1))
    with refused(TypeError, f"{where}f8e8m0 and f32: the operator does not support"):
        convert_promote_types(x.astype(jnp.float8_e8m0fnu), x)
    with refused(TypeError, f"{where}i32 and f32: integer input cannot be safely"):
        convert_promote_types(jnp.arange(2), x)
    refused(
        TypeError, f"{where}format float64 needs 64-bit types", convert_promote_types, 1.0, x
    )  # Python's numbers have 64 bits
    with refused(TypeError, f"{where}nothing converts to 'string' here"):
        convert_promote_types(
            np.uint64([1]), np.int8([1]), promote_unsafe=True, u64_integer_promotion_target="string"
        )
