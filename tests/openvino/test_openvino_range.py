"""Range-4 against OpenVINO's core."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import openvino_oracle as core
import pytest
from each import each
from refused import refused

from qtoolkit.openvino import range as ov_range

FLOATS = ("bf16", "f16", "f32", "f64")
INTEGERS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
SOURCES = ("f32", "f64", "i32", "i64", "f16", "bf16", "i8", "u8", "u32")


def draws(seed, count):
    """Arguments as arrays of rank 0, of dtypes that may differ; few lengths, each compiles."""
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        kinds = rng.choice(SOURCES, 3)
        scale = 10.0 ** rng.integers(-2, 5)
        step = rng.uniform(0.1, 3) * scale * rng.choice([1, -1])
        start = rng.uniform(-2, 2) * scale * 10
        stop = start + step * rng.choice([0.5, 3.0, 3.5, 12.5, 13.0, -2.0])
        numbers = (start, stop, step)
        if any(kind[0] == "u" and number < 0 for kind, number in zip(kinds, numbers, strict=True)):
            continue
        limits = {"i8": 127, "u8": 255, "f16": 6e4}
        if any(abs(n) > limits.get(k, 1e9) for k, n in zip(kinds, numbers, strict=True)):
            continue
        arguments = tuple(
            np.array(number).astype(core.TYPES[kind])
            for kind, number in zip(kinds, numbers, strict=True)
        )
        if float(arguments[2]) != 0:
            found.append(arguments)
    return found


def expected_of(arguments, name):
    """The core's range; bf16 from its own float32, rounded to nearest even as the core does not."""
    if name != "bf16":
        return core.range(*arguments, name)
    wide = core.range(*arguments, "f32")
    rounded = core.range(*arguments, "bf16")
    core.assert_same_numbers(rounded, core.bfloat16_of_the_core(wide))
    return wide.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("names", "first", "last"),
    [
        (FLOATS, 0, 30),
        *(
            pytest.param(names, first, 100, marks=pytest.mark.exhaustive)
            for names, first in ((FLOATS, 30), (INTEGERS[:4], 0), (INTEGERS[4:], 0))
        ),
    ],
)
def test_1000_ranges(names, first, last):
    compared, drawn = 0, draws(len(names) + len(names[0]), last)[first:]
    with jax.enable_x64(True), np.errstate(over="ignore"):
        for name, arguments in itertools.product(names, drawn):
            fractions = [float(x) for x in arguments]
            if name in INTEGERS and abs(fractions[2]) < 1:
                # The page has no result; the core's is empty, by way of what x86 makes of Inf.
                with refused(ValueError, r"openvino.range: step=.*zero as an integer"):
                    ov_range(*arguments, output_type=name)
                assert core.range(*arguments, name).size == 0
                continue
            core.assert_same_numbers(
                ov_range(*arguments, output_type=name), expected_of(arguments, name)
            )
            compared += 1
    assert compared >= 2.5 * len(drawn)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "name", "numbers"),
    [
        # The page's three.
        ((2, 23, 3), "i32", [2, 5, 8, 11, 14, 17, 20]),
        ((23, 2, -3), "i32", [23, 20, 17, 14, 11, 8, 5]),
        ((1.0, 2.5, 0.5), "f32", [1, 1.5, 2]),
        # Truncation before counting, wrap-around, the wrong direction.
        ((np.float32(1.2), np.float32(11.3), np.float32(1.6)), "i32", list(range(1, 11))),
        ((-1.7, 3.9, 1.1), "i32", [-1, 0, 1, 2]),
        ((250, 260, 1), "u8", [250, 251, 252, 253, 254, 255, 0, 1, 2, 3]),
        ((0, 200, 50), "i8", [0, 50, 100, -106]),
        ((-5, -2, 1), "u8", [251, 252, 253]),
        ((3, 0, 1), "f32", []),
        ((0, 3, -1), "i16", []),
        ((2, 2, 1), "f16", []),
        (
            (np.float32(6e4), np.float32(7e4), np.float32(2e3)),
            "f16",
            [6e4, 62e3, 64e3] + 2 * [np.inf],
        ),
    ],
)
def test_examples(arguments, name, numbers):
    got = ov_range(*arguments, output_type=name)
    dtype = core.TYPES[name]
    with np.errstate(over="ignore"):
        core.assert_same_numbers(got, np.array(numbers).astype(dtype))
    arrays = [np.asarray(x) for x in arguments]
    core.assert_same_numbers(got, core.range(*arrays, name))


@pytest.mark.quick
def test_counts_in_float64():
    tenth = [np.float32(x) for x in (0.1, 1.1, 0.1)]
    assert ov_range(*tenth, output_type="f32").shape == (11,)
    assert ov_range(0.1, 1.1, 0.1, output_type="f32").shape == (10,)
    for arguments in (tenth, [np.float64(x) for x in (0.1, 1.1, 0.1)]):
        arrays = [np.asarray(x) for x in arguments]
        for name in ("f16", "f32"):
            core.assert_same_numbers(
                ov_range(*arguments, output_type=name), core.range(*arrays, name)
            )
    # Integers beyond 2**53 are not what they were.
    for start, stop in ((2**53 + 1, 2**53 + 5), (2**62, 2**62 + 5), (-(2**63), 2**53 - 2**63)):
        step = 1 if stop - start < 10 else 2**51
        with jax.enable_x64(True):
            got = ov_range(start, stop, step, output_type="i64")
        arrays = [np.array(x, np.int64) for x in (start, stop, step)]
        core.assert_same_numbers(got, core.range(*arrays, "i64"))


def test_many_elements():
    # More than float32 counts exactly: its index is rounded, as in the core.
    arguments = [np.array(x, np.float32) for x in (0.1, 2**24 * 0.3 + 0.6, 0.3)]
    core.assert_same_numbers(ov_range(*arguments, output_type="f32"), core.range(*arguments, "f32"))


@pytest.mark.sample("f32", "bf16", "f16", "u8")
@pytest.mark.quick
@pytest.mark.parametrize("name", ["f32", "bf16", "f16", "i32", "u8"])
def test_under_jit(name):
    arguments = (0.7, 90.0, 1.3)
    eager = np.asarray(ov_range(*arguments, output_type=name))
    static = jax.jit(lambda: ov_range(*arguments, output_type=name))()
    core.assert_same_numbers(static, eager)
    static = jax.jit(ov_range, static_argnums=(0, 1, 2), static_argnames="output_type")
    core.assert_same_numbers(static(*arguments, output_type=name), eager)
    # Traced ones are float32 here, and their products feed an addition in one fusion.
    traced = jax.jit(functools.partial(ov_range, output_type=name, length=eager.size))
    exact = [np.float32(x) for x in arguments]
    again = np.asarray(ov_range(*exact, output_type=name))
    assert again.size == eager.size
    core.assert_same_numbers(traced(*exact), again)
    doubled = jax.jit(lambda *a: traced(*a) + traced(*a))(*exact)
    core.assert_same_numbers(doubled, again + again)


@pytest.mark.exhaustive
def test_traced_arguments_of_every_dtype():
    with jax.enable_x64(True):
        for name, source in itertools.product((*FLOATS, *INTEGERS), ("f32", "i64", "f16", "u8")):
            start, step = (np.array(x).astype(core.TYPES[source]) for x in (3.75, 2.5))
            stop = np.array(36.0, np.float64)
            expected = expected_of((start, stop, step), name)
            f = functools.partial(ov_range, output_type=name, length=expected.size)
            core.assert_same_numbers(jax.jit(f)(start, stop, step), expected)
        start = np.array(2**53 + 1)
        f = jax.jit(lambda start: ov_range(start, 0, 1, output_type="i64", length=2))
        np.testing.assert_array_equal(f(start), [2**53, 2**53 + 1])


@pytest.mark.quick
def test_vmap_and_length():
    starts = jnp.array([0.0, 10.0])
    got = jax.vmap(lambda start: ov_range(start, 0, 0.5, output_type="f32", length=3))(starts)
    np.testing.assert_array_equal(got, [[0, 0.5, 1], [10, 10.5, 11]])
    assert ov_range(0, 3, 1, output_type="f32", length=3).shape == (3,)
    assert ov_range(0, 3, 1, output_type="F32", length=np.int64(3)).shape == (3,)
    assert ov_range(0, 3, 1, output_type=jnp.float16).dtype == jnp.float16


@pytest.mark.quick
@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_derivatives(name):
    def f(start, step):
        return ov_range(start, 0.0, step, output_type=name, length=4)

    y, y_dot = jax.jvp(f, (1.0, 0.25), (1.0, 0.0))
    np.testing.assert_array_equal(y, [1, 1.25, 1.5, 1.75])
    np.testing.assert_array_equal(y_dot, [1, 1, 1, 1])
    weights = jnp.array([1.0, 2.0, 4.0, 8.0], core.TYPES[name])
    slopes = jax.jit(jax.grad(lambda *a: (f(*a) * weights).sum(), (0, 1)))(1.0, 0.25)
    np.testing.assert_array_equal(slopes, [15, 34])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "ours", "theirs"),
    [
        ((np.nan, 1, 1), "start=nan, which cannot be nan or inf", "'start' cannot be nan or infin"),
        ((np.inf, 1, 1), "start=inf, which cannot be nan or inf", "'start' cannot be nan or infin"),
        ((0, -np.inf, 1), "stop=-inf, which cannot be nan or", "'stop' cannot be nan or infinite"),
        ((0, 1, np.nan), "step=nan, which cannot be zero, nan", "'step' cannot be zero, nan, or"),
        ((0, 1, np.inf), "step=inf, which cannot be zero, nan", "'step' cannot be zero, nan, or"),
        ((0, 1, 0), "step=0.0, which cannot be zero, nan", "'step' cannot be zero, nan, or"),
        ((0, 0, -0.0), "step=-0.0, which cannot be zero, nan", "'step' cannot be zero, nan, or"),
        (([0], 1, 1), r"start is not a scalar, it has shape \(1,\)", "'start' input is not a scal"),
        ((0, [[1]], 1), r"stop is not a scalar, it has shape \(1, 1\)", "'stop' input is not a sc"),
        ((0, 1, [1]), r"step is not a scalar, it has shape \(1,\)", "'step' input is not a scalar"),
    ],
)
@pytest.mark.parametrize("name", ["f32", "i32"])
def test_values_and_shapes_that_are_refused(arguments, ours, theirs, name):
    arrays = [np.array(x, np.float32) for x in arguments]
    refused(ValueError, f"openvino.range: {ours}", ov_range, *arrays, output_type=name)
    refused(RuntimeError, theirs, core.range, *arrays, name)


@pytest.mark.quick
@each("name", ["boolean", "i4", "f8e4m3", "string", "int32", None, "i64", "f64"])
def test_output_types_that_are_refused(name):
    wide = {"i64": "format int64 needs 64-bit", "f64": "format float64 needs 64-bit"}
    start = f"^openvino.range: {wide.get(name, 'output_type')}"
    refused((TypeError, ValueError), start, ov_range, 0, 1, 1, output_type=name)


@pytest.mark.quick
@each(("error", "got", "arguments", "name"), [
    (TypeError, "start should be of a numeric type, got boolean", (True, 1, 1), "i32"),
    (TypeError, "stop should be of a numeric type, got boolean", (0, np.bool_(True), 1), "i32"),
    (TypeError, "step has type str", (0, 1, "1"), "i32"),
    (TypeError, "stop has dtype complex64", (0, np.complex64(1), 1), "i32"),
    (ValueError, "start is beyond the range of float64", (10**400, 1, 1), "i32"),
    (ValueError, "step=0.5 is zero as an integer", (0, 1, 0.5), "u8"),
    (ValueError, r"1e\+300 elements", (0, 1e300, 1), "f32"),
    (ValueError, "inf elements", (-1e308, 1e308, 1), "f32"),
])  # fmt: skip
def test_other_errors(error, got, arguments, name):
    refused(error, f"^openvino.range: {got}", ov_range, *arguments, output_type=name)


@pytest.mark.quick
def test_errors_of_traced_arguments_and_length():
    f = functools.partial(ov_range, output_type="f32")
    with refused(ValueError, r"range: start, stop, step are traced, so .*length="):
        jax.jit(f)(0.0, 3.0, 1.0)
    with refused(ValueError, r"openvino.range: stop is traced, so .*length="):
        jax.jit(lambda stop: f(0.0, stop, 1.0))(3.0)
    refused(TypeError, r"openvino.range: length=3.0", f, 0, 3, 1, length=3.0)
    with refused(TypeError, r"openvino.range: length=.*Tracer.*not traced"):
        jax.jit(lambda n: f(0, 3, 1, length=n))(3)
    refused(ValueError, r"openvino.range: length=-1", f, 0, 3, 1, length=-1)
    refused(ValueError, r"length=4, but the arguments give 3 elements", f, 0, 3, 1, length=4)
