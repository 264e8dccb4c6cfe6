"""FakeConvert-13 against OpenVINO's core, and its exact form against numpy with ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import openvino_oracle as core
import pytest
from refused import refused

import qtoolkit
from qtoolkit.openvino import fake_convert

TARGETS = {
    "f8e4m3": (ml_dtypes.float8_e4m3fn, 448.0, "e4m3fn"),
    "f8e5m2": (ml_dtypes.float8_e5m2, 57344.0, "e5m2"),
}
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


def every_16_bits(dtype):
    return np.arange(2**16, dtype=np.uint16).view(dtype).reshape(16, 64, 64)


@np.errstate(over="ignore")
def random_data(dtype, shape, seed=0):
    """Numbers around the destinations' ranges: float32's own subnormals stay out of results."""
    rng = np.random.default_rng(seed)
    spread = 2.0 ** rng.uniform(-30, 17, shape)
    x = (rng.normal(size=shape) * spread).astype(np.float32)
    just_below = 2.0 ** rng.integers(-26, 9, shape) * (1 - rng.uniform(0, 2**-11, shape))
    near = rng.random(shape) < 0.1
    return np.where(near, just_below, x).astype(np.float32).astype(dtype)


def parameters(dtype, shape, seed=1):
    """Scales with hard significands, and shifts of the size of the scaled data's lower part."""
    rng = np.random.default_rng(seed)
    scale = (rng.uniform(0.3, 3, shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(dtype)
    shift = (rng.normal(size=shape) * 2.0 ** rng.integers(-10, 8, shape)).astype(dtype)
    return scale, shift


SHAPES = [(), (1, 64, 1), (64, 1), (16, 64, 64)]  # of scale; data is (16, 64, 64)


@np.errstate(all="ignore")  # overflow to infinity is meant
def exact(x, scale, shift, destination):
    """numpy and ml_dtypes: every line rounds once to the dtype of x; the cast saturates."""
    target, largest, _ = TARGETS[destination]
    u = x * scale
    u = u if shift is None else u - shift
    q = np.clip(u.astype(np.float32), -largest, largest).astype(target).astype(x.dtype)
    q = q if shift is None else q + shift
    return q / scale


@pytest.mark.sample("float16-f8e4m3")
@pytest.mark.quick
@pytest.mark.parametrize("destination", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_openvino_arithmetic_has_the_bits_of_the_core(dtype, destination):
    jitted = jax.jit(
        lambda x, scale, shift: fake_convert(
            x, scale, shift, destination_type=destination, arithmetic="openvino"
        )
    )
    blocks = [random_data(dtype, (16, 64, 64), seed) for seed in (2, 3)]
    blocks += [every_16_bits(dtype)] if dtype == np.float16 else []
    if dtype == ml_dtypes.bfloat16:
        # bfloat16's lowest binades lead to float32's subnormals.
        every = every_16_bits(dtype)
        blocks.append(np.where(np.abs(every) < 2.0**-120, np.copysign(dtype(0), every), every))
    for x in blocks:
        for shape in SHAPES:
            scale, shift = parameters(dtype, shape)
            for z in (None, shift):
                expected = core.fake_convert(x, scale, z, destination)
                core.assert_same_numbers(jitted(x, scale, z), expected)
        one = np.ones((), dtype)
        core.assert_same_numbers(jitted(x, one, None), core.fake_convert(x, one, None, destination))


@pytest.mark.sample("f8e4m3-float16", "f8e5m2-float32")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("destination", TARGETS)
def test_openvino_arithmetic_at_special_numbers(dtype, destination):
    tiny = 2.0**-24
    x = np.array(
        [
            *(0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 448, 463.9, 464.1, 480, 57344, 61439),
            *(65519, 65520, 1e5, 2**-9, 0.999 * 2**-9, 2**-10, 1.375 * 2**-8, 1 + 2**-4 + 2**-20),
            *(1.125 + 2**-20, 511.996 * tiny, 1023.99 * tiny, 0.4999 * tiny, 0.9999 * tiny),
        ],
        np.float32,
    )
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    scales = np.array([1, -1, 0, np.inf, np.nan, 3, 0.1, 2**-10], np.float32).astype(dtype)
    shifts = np.array([0, -0.0, 1, -0.3, np.inf, np.nan], np.float32).astype(dtype)
    # A NaN in two operands is the first on some machines only; here data is never both.
    rows = [(s, z) for s in scales for z in shifts if not (np.isnan(s) and np.isnan(z))]
    data = np.broadcast_to(x, (len(rows), x.size)).copy()
    scale, shift = (np.array(column, dtype)[:, None] for column in zip(*rows, strict=True))
    both = np.isnan(data) & (np.isnan(scale) | np.isnan(shift))
    data[both] = 1
    for z in (None, shift):
        got = fake_convert(data, scale, z, destination_type=destination, arithmetic="openvino")
        core.assert_same_numbers(got, core.fake_convert(data, scale, z, destination))


@pytest.mark.quick
def test_openvino_arithmetic_has_the_known_defects():
    def value(x, dtype, destination):
        return float(
            fake_convert(
                jnp.asarray(x, dtype), 1.0, destination_type=destination, arithmetic="openvino"
            )
        )

    assert value(1.375 * 2**-8, jnp.float32, "f8e4m3") == 2**-8  # nearest: 3 * 2**-9
    assert value(1.9 * 2**-10, jnp.float32, "f8e4m3") == 0  # nearest: 2**-9
    assert value(1.0625 + 2**-20, jnp.float32, "f8e4m3") == 1  # nearest: 1.125
    assert value(-np.nan, jnp.float32, "f8e4m3") == -448
    assert np.isnan(value(np.nan, jnp.float32, "f8e5m2"))
    assert value(511.996 * 2.0**-24, jnp.float32, "f8e5m2") == 2.0**-14  # nearest: 2**-15
    assert np.signbit(value(-0.0, jnp.float32, "f8e5m2")) == np.signbit(0.0)


@pytest.mark.sample("float16-f8e4m3")
@pytest.mark.quick
@pytest.mark.parametrize("destination", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_arithmetic_rounds_every_written_operation_once(dtype, destination):
    jitted = jax.jit(
        lambda x, scale, shift: fake_convert(x, scale, shift, destination_type=destination)
    )
    blocks = [random_data(dtype, (16, 64, 64), seed) for seed in (4, 5)]
    blocks += [every_16_bits(dtype)] if dtype == np.float16 else []
    for x in blocks:
        for shape in SHAPES:
            scale, shift = parameters(dtype, shape, 6)
            for z in (None, shift):
                expected = exact(x, scale, z, destination)
                core.assert_same_numbers(jitted(x, scale, z), expected)
                _, _, fmt = TARGETS[destination]
                same = qtoolkit.fake_convert(x, scale, z, fmt=fmt)
                core.assert_same_numbers(same, expected)


@pytest.mark.quick
def test_exact_arithmetic_keeps_nan_and_the_sign_of_zero():
    x = jnp.array([-0.0, np.nan, np.inf], jnp.float32)
    np.testing.assert_array_equal(
        np.signbit(fake_convert(x, 1.0)), np.signbit(np.array([-0.0, np.nan, 1]))
    )
    np.testing.assert_array_equal(fake_convert(x, 1.0, 0.0), [0, np.nan, 448])
    assert not np.signbit(fake_convert(x, 1.0, 0.0)[0])  # -0 + 0
    assert fake_convert(x, 1.0, destination_type="F8E5M2")[2] == 57344


@pytest.mark.sample("exact")
@pytest.mark.parametrize("arithmetic", ["exact", "openvino"])
def test_inside_a_larger_fusion_and_under_vmap(arithmetic):
    x = random_data(np.float32, (16, 64, 64), 7)
    x = x[np.newaxis].repeat(2, 0) * np.float32([[[[1]]], [[[2]]]])
    scale, shift = parameters(np.float32, (2, 64, 1), 8)

    def f(x, scale, shift):
        return fake_convert(x, scale, shift, arithmetic=arithmetic)

    whole = f(x, scale[:, None], shift[:, None])
    core.assert_same_numbers(jax.vmap(f)(x, scale, shift), np.asarray(whole))
    fused = jax.jit(lambda x, scale, shift: f(x * 2, scale, shift) * 2)
    core.assert_same_numbers(
        fused(x / 2, scale[:, None], shift[:, None]), np.asarray(whole) * np.float32(2)
    )


def test_empty_data():
    for shape in ((0,), (2, 0)):
        for arithmetic in ("exact", "openvino"):
            y = fake_convert(jnp.zeros(shape), 1.0, arithmetic=arithmetic)
            assert y.shape == shape
            assert core.fake_convert(
                np.zeros(shape, np.float32), np.ones((), np.float32), None, "f8e4m3"
            ).shape == (shape)


# Derivatives.


@pytest.mark.sample("False-float32")
@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shifted", [False, True])
def test_both_arithmetics_have_the_gradient_of_fake_convert(dtype, shifted):
    x = jnp.array([0.3, -17.0, 298.0, 299.0, -1e4], dtype)
    scale, shift = jnp.array([1.5], dtype), jnp.array([0.25], dtype)
    arguments = (x, scale, shift) if shifted else (x, scale)
    places = tuple(range(len(arguments)))

    def gradient_of(f, which):
        return jax.grad(lambda *a: f(*a).sum(), which)(*arguments)

    expected = gradient_of(lambda *a: qtoolkit.fake_convert(*a, fmt="e4m3fn"), places)
    for arithmetic in ("exact", "openvino"):

        def f(*a, arithmetic=arithmetic):
            return fake_convert(*a, arithmetic=arithmetic)

        got = gradient_of(f, places)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        (alone,) = gradient_of(jax.jit(f), (0,))
        np.testing.assert_array_equal(alone, expected[0])
        np.testing.assert_array_equal(alone.astype(jnp.float32), [1, 1, 1, 0, 0])
        beyond = jnp.array([np.inf, np.nan], dtype)
        slopes = jax.vmap(jax.grad(lambda x, f=f: f(x, *(a[0] for a in arguments[1:]))))(beyond)
        np.testing.assert_array_equal(slopes.astype(jnp.float32), [0, 0])


@pytest.mark.exhaustive
def test_openvino_arithmetic_has_higher_derivatives():
    def f(x, scale):
        return fake_convert(x, scale, arithmetic="openvino")

    x, scale = jnp.array([0.3, 500.0]), jnp.array(2.0)
    y, y_dot = jax.jvp(f, (x, scale), (jnp.ones(2), jnp.array(0.0)))
    np.testing.assert_array_equal(
        y, core.fake_convert(*map(np.asarray, (x, scale)), None, "f8e4m3")
    )
    np.testing.assert_array_equal(y_dot, [1, 0])
    hessian = jax.hessian(lambda x: (f(x, scale) ** 2).sum())(x)
    np.testing.assert_array_equal(hessian, [[2, 0], [0, 0]])
    with jax.numpy_dtype_promotion("strict"):
        mapped = jax.vmap(jax.grad(f), (0, None))(x, scale)
    np.testing.assert_array_equal(mapped, [1, 0])


# Errors, in the order of the operator's own checks; the core refuses the same.


def refused_by_the_core(data, scale, shift, destination):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
        core.fake_convert(data, scale, shift, destination)
    return str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("destination", "ours", "theirs"),
    [
        *(
            (name, f"bad format for f8 conversion: destination_type='{name}'", "Bad format for f8")
            for name in ("f8e8m0", "nf4", "f4e2m1", "f16", "i8", "dynamic")
        ),
        ("f8e4m3fn", "'f8e4m3fn' is not an element type of OpenVINO", "is not a member of enum"),
        ("", "'' is not an element type of OpenVINO", "is not a member of enum"),
    ],
)
def test_destination_types_that_are_refused(destination, ours, theirs):
    x, one = np.ones(3, np.float32), np.ones((), np.float32)
    with refused(ValueError, f"openvino.fake_convert: .*{ours}"):
        fake_convert(x, one, destination_type=destination)
    assert theirs in refused_by_the_core(x, one, None, destination)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("types", "ours", "theirs"),
    [
        (("f32", "f16", "f32"), "mixed input types.*scale is f16", "Mixed input types"),
        (("f32", "f32", "bf16"), "mixed input types.*shift is bf16", "Mixed input types"),
        (("f64", "f64", "f64"), "inputs is f64, expected bf16, f16 or f32", "must be a bf16"),
        (("i32", "i32", "i32"), "inputs is i32, expected bf16", "must be a bf16"),
        (("f8e4m3", "f8e4m3", "f8e4m3"), "inputs is f8e4m3, expected", "must be a bf16"),
    ],
)
def test_types_that_are_refused(types, ours, theirs):
    arguments = [np.ones(1, core.TYPES[name]) for name in types]
    refused(TypeError, f"openvino.fake_convert: .*{ours}", fake_convert, *arguments)
    assert theirs in refused_by_the_core(*arguments, "f8e4m3")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("data", "scale", "shift", "ours"),
    [
        ((3,), (), (1,), r"scale has shape \(\) and shift \(1,\)"),
        ((3,), (3,), (1,), r"scale has shape \(3,\) and shift \(1,\)"),
        ((), (1,), None, r"only unidirectional broadcasting: scale has shape \(1,\).*data, \(\)"),
        ((3,), (1, 1), None, r"only unidirectional broadcasting: scale has shape \(1, 1\)"),
        ((3,), (2,), None, r"only unidirectional broadcasting: scale has shape \(2,\)"),
        ((1, 3), (2, 1), (2, 1), r"only unidirectional broadcasting: scale has shape \(2, 1\)"),
        ((4, 3), (4,), None, r"only unidirectional broadcasting: scale has shape \(4,\)"),
    ],
)
def test_shapes_that_are_refused(data, scale, shift, ours):
    arrays = [None if s is None else np.ones(s, np.float32) for s in (data, scale, shift)]
    refused(ValueError, f"openvino.fake_convert: {ours}", fake_convert, *arrays)
    theirs = refused_by_the_core(*arrays, "f8e4m3")
    assert (
        "not compatible with shift" in theirs if shift == (1,) else "not compatible" not in theirs
    )


@pytest.mark.quick
def test_other_errors():
    x = jnp.ones(3)
    with refused(TypeError, r"destination_type has type dtype.*expected a string"):
        fake_convert(x, 1.0, destination_type=np.dtype(ml_dtypes.float8_e5m2))
    with refused(ValueError, r"openvino.fake_convert: arithmetic='fast'"):
        fake_convert(x, 1.0, arithmetic="fast")
    for arithmetic in ("exact", "openvino"):
        for numbers, message in (
            ((0,), r"scale=0 is 0\.0 in float32, expected a finite number other than zero"),
            ((1e-39,), r"scale=1e-39 is .* in float32, expected a finite number other than zero"),
            ((1e300,), r"scale=1e\+300 is inf in float32, expected a finite number other"),
            ((np.nan,), "scale=nan is nan in float32, expected a finite number other than zero"),
            (
                (1.0, 10**400),
                r"shift, an integer of \d+ bits, is inf in float32, expected a finite number$",
            ),
        ):
            refused(ValueError, message, fake_convert, x, *numbers, arithmetic=arithmetic)
    refused(TypeError, "data has type list", fake_convert, [1.0], 1.0)
    refused(TypeError, "scale has type NoneType", fake_convert, x, None)
    refused(TypeError, "data has dtype complex64", fake_convert, x.astype(jnp.complex64), 1.0)
    with refused(ValueError, "'e5m2' is not an element type"):
        fake_convert([1.0], 1.0, destination_type="e5m2")  # the first check, before the types'
