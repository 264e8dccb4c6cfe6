"""Fusion: public functions return the same bits whatever XLA fuses them with.

A producer makes the argument, and the function reads it, both in one jit. There XLA widens a
bfloat16 number without rounding it first, contracts products and sums, merges factors and divides
by uniform numbers through reciprocals. LLVM drops steps where it knows the sign or the range of a
value. Oracle: the same function called eagerly on the result of the producer, compiled alone.
"""

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from public_functions import (
    ADDED_BY_OPTAX,
    ANY,
    BF16,
    COLUMNS,
    DTYPES,
    EXACT,
    EXCLUDED,
    F32,
    FUNCTIONS,
    HALF,
    KEY,
    ROWS,
    SUMS,
    ZERO_POINT,
    public_callables,
    public_name,
    wide,
)

import qtoolkit as qt
from qtoolkit import gradients, onnx, openvino, pypto, scaling
from qtoolkit.casts.internal import exact_float32, quotient


def carried(a, b):
    """The carry of a scan: what its last step made."""
    return lax.scan(lambda c, v: (c * v + v, None), a, jnp.stack([b, a]))[0]


# Of two arrays of the half type.
HALF_PRODUCERS = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "gelu": lambda a, b: jax.nn.gelu(a),
    "exp": lambda a, b: jnp.exp(a),
    "division": lambda a, b: a / b,
    "narrowing": lambda a, b: (a.astype(jnp.float32) * np.float32(1.7)).astype(a.dtype),
    "carry": carried,
}
# Producers of float32 whose sign or value a compiler can know.
KNOWN_PRODUCERS = {
    "uint8": lambda u8, u16, x: u8.astype(jnp.float32),
    "uint16": lambda u8, u16, x: u16.astype(jnp.float32),
    "arange": lambda u8, u16, x: jnp.arange(ROWS * COLUMNS, dtype=jnp.float32).reshape(
        ROWS, COLUMNS
    ),
    "abs": lambda u8, u16, x: jnp.abs(x),
    "constant": lambda u8, u16, x: jnp.full((ROWS, COLUMNS), 1.1, jnp.float32),
    "sum": lambda u8, u16, x: x + x[:1],
    "product": lambda u8, u16, x: x * x[:1],
}


@pytest.mark.quick
def test_every_public_function_is_in_the_table_or_excluded():
    public, known = set(public_callables()), set(map(public_name, FUNCTIONS))
    assert public - known - EXCLUDED.keys() == set(), "new: put them into public_functions.py"
    assert (known | EXCLUDED.keys()) - public == set(), "no longer public"
    assert known & EXCLUDED.keys() == set()


def names_in(thing):
    """What an entry of the table names, with what it encloses and the helpers that it calls."""
    if isinstance(thing, functools.partial):
        return set().union(*map(names_in, (thing.func, *thing.args, *thing.keywords.values())))
    if not callable(thing) or isinstance(thing, type):
        return {getattr(thing, "__name__", type(thing).__name__)}
    function = inspect.unwrap(thing)
    names, codes = {function.__name__}, [function.__code__]
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += filter(inspect.iscode, code.co_consts)
    inner = [cell.cell_contents for cell in function.__closure__ or ()]
    if function.__module__ == "public_functions":
        known = vars(sys.modules["public_functions"])
        inner += [known[name] for name in names - {function.__name__} if name in known]
    return names.union(*map(names_in, filter(callable, inner)))


@pytest.mark.quick
def test_table_entries_call_the_function_of_their_name():
    called = {name: public_name(name).split(".")[-1] for name in FUNCTIONS}
    assert [name for name, f in FUNCTIONS.items() if called[name] not in names_in(f)] == []


def bits(x):
    x = np.asarray(x)
    return x if x.dtype == bool else x.view(np.dtype(f"uint{8 * x.dtype.itemsize}"))


def check(function, producers, arguments, compare):
    made = {name: jax.jit(produce)(*arguments) for name, produce in producers.items()}
    fused = jax.jit(lambda *a: {n: function(produce(*a)) for n, produce in producers.items()})
    got = fused(*arguments)
    for name in producers:
        expected = jax.tree.leaves(function(made[name]))
        for mine, theirs in zip(jax.tree.leaves(got[name]), expected, strict=True):
            compare(mine, theirs, name)


def equal(got, expected, name):
    differ = bits(got) != bits(expected)
    assert not differ.any(), f"{name}: {differ.sum()} of {differ.size} differ"


def close(got, expected, name):
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    bound = ROWS * COLUMNS * 2.0**-24
    np.testing.assert_allclose(got, expected, rtol=bound, atol=bound, err_msg=name)


def halves(dtype):
    rng = np.random.default_rng(1)
    # Of one sign and away from zero in b, so that a / b stays small; all of it within float16.
    a, b = rng.normal(size=(ROWS, COLUMNS)), rng.uniform(0.5, 2, size=(ROWS, COLUMNS))
    return tuple(jnp.asarray(v, jnp.float32).astype(dtype) for v in (a, b))


def takes(names, dtypes):
    """Of the functions, those that take one of the dtypes, with it."""
    cases = [(n, d) for n in names for d in dtypes if d in DTYPES.get(n, ANY)]
    return pytest.mark.parametrize(("name", "dtype"), cases, ids=str)


@pytest.mark.sample(
    *("encode e4m3fn nearest_even-bfloat16", "cast int8 toward_positive-float16"),
    *("cast bfloat16-bfloat16", "hadamard_transform random-bfloat16", "MSE counts-float16"),
    *("fake_cast identity-float16", "optim.quantize_state-bfloat16"),
    *("openvino.convert f32, core-float16", "lsq_plus by parameters-bfloat16"),
)
@pytest.mark.quick
@takes(EXACT, HALF)
def test_fused_with_half_precision_producers(name, dtype):
    check(EXACT[name], HALF_PRODUCERS, halves(dtype), equal)


@pytest.mark.sample("sqnr_db-bfloat16")
@takes(SUMS, HALF)
def test_sums_fused_with_half_precision_producers(name, dtype):
    def within_an_ulp(got, expected, producer):
        got, expected = (np.asarray(a, np.float64) for a in (got, expected))
        bound = max(ROWS * COLUMNS * 2.0**-24, 2 * float(jnp.finfo(dtype).eps))
        np.testing.assert_allclose(got, expected, rtol=bound, atol=bound, err_msg=producer)

    check(SUMS[name], HALF_PRODUCERS, halves(dtype), within_an_ulp)


# Functions that have failed behind some producer. They run in full, those above as a sample.
FORMER_FAILURES = [
    *("fake_convert", "lsq", "lsq_plus", "hadamard_transform"),
    "openvino.fake_convert f8e4m3, exact",
    *("quantize e4m3fn", "fake_quantize e4m3fn", "QArray dequantized", "dot_general vmap"),
    "round_cotangent vmap gradient",
]


@takes(FORMER_FAILURES, (BF16,))
def test_former_failures_behind_half_precision(name, dtype):
    check(EXACT[name], HALF_PRODUCERS, halves(dtype), equal)


def known():
    rng = np.random.default_rng(2)
    return (
        jnp.asarray(rng.integers(0, 256, size=(ROWS, COLUMNS)), jnp.uint8),
        jnp.asarray(rng.integers(0, 2**16, size=(ROWS, COLUMNS)), jnp.uint16),
        jnp.asarray(rng.normal(size=(ROWS, COLUMNS)), jnp.float32),
    )


@pytest.mark.sample(
    *("encode e4m3fn nearest_even-float32", "encode posit16 stochastic-float32"),
    *("hadamard_transform random-float32", "dot_general mxfp8-float32"),
    *("optim.quantize_state-float32", "onnx.quantize_linear by parameters-float32"),
)
@pytest.mark.quick
@takes([name for name in EXACT if name not in ADDED_BY_OPTAX], (F32,))
def test_fused_with_known_float32_values(name, dtype):
    check(EXACT[name], KNOWN_PRODUCERS, known(), equal)


@takes(FORMER_FAILURES, (F32,))
def test_former_failures_behind_known_float32_values(name, dtype):
    check(EXACT[name], KNOWN_PRODUCERS, known(), equal)


@pytest.mark.sample(
    *("encode e4m3fn nearest_even-float32", "decode-float32", "quantize e4m3fn-bfloat16"),
    *("onnx.quantize_linear by parameters-float32", "openvino.convert f32, core-float16"),
)
@pytest.mark.quick
@takes(EXACT, ANY)
def test_transposed_constant_of_an_inner_jit(name, dtype):
    """XLA evaluates a `bitcast_convert` of a constant when it compiles, and then copies the bytes
    in the order of the constant, not of its transpose, if a call stands between them.
    """
    function, x = EXACT[name], known()[2].astype(dtype)
    got = behind_a_constant(function, np.asarray(x.T))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(function(x)), strict=True):
        equal(mine, theirs, name)


def behind_a_constant(function, constant):
    """`function` of the transpose of a constant, which reaches it through inner jits."""
    inner = jax.jit(lambda c: jax.jit(function)(jax.tree.map(jnp.transpose, c)))
    return jax.jit(lambda: inner(constant))()


BY_ROWS = {
    **{name: FUNCTIONS[name] for name in ("onnx.bit_cast", "fake_cast gradient", "decode")},
    **{name: FUNCTIONS[name] for name in FUNCTIONS if name.startswith("openvino.convert ")},
    "MinMax": lambda x: scaling.MinMax.of(ZERO_POINT, x.shape).observe(x).scale(),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_of_a_transposed_constant_under_vmap(name):
    """The function is traced for one row, whose elements lie one after the other in any layout."""
    function, x = BY_ROWS[name], known()[2]
    got = behind_a_constant(jax.vmap(function), np.asarray(x.T))
    equal(got, jnp.stack([function(row) for row in x]), name)


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e8m0fnu", "bfloat16"])
def test_transposed_constant_of_the_dtype_of_a_format(fmt):
    """Oracle: ml_dtypes."""
    dtype = qt.format(fmt).dtype
    values = np.arange(1, 2**8).astype(qt.format(fmt).code_dtype).view(dtype).reshape(15, 17)
    got = behind_a_constant(functools.partial(qt.decode, fmt=fmt), values)
    np.testing.assert_array_equal(got, values.T.astype(np.float32))


@pytest.mark.parametrize("spec", ["e4m3fn", "nvfp4", "mxfp8_e4m3", "deepseek_128x128"])
def test_transposed_quantized_constant(spec):
    """Oracle: NumPy's transpose of what the array itself gives."""
    x = np.random.default_rng(6).normal(size=(128, 256)).astype(np.float32)
    q = qt.quantize(x * np.float32(2) ** (np.arange(128)[:, None] % 9), spec)
    for read in (qt.QArray.dequantize, lambda q: q.elements):
        inner = jax.jit(lambda q, read=read: jax.jit(read)(q.T))
        got, expected = jax.jit(lambda inner=inner: inner(q))(), read(q)
        np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (got, expected.T)))


@pytest.mark.sample("sqnr_db")
@pytest.mark.parametrize("name", SUMS)
def test_sums_fused_with_known_float32_values(name):
    check(SUMS[name], KNOWN_PRODUCERS, known(), close)


# Of a row of float32 and of a number: what repeats along an axis, as XLA sees.
REPEATING = {
    "row": lambda v, _: jnp.broadcast_to(v, (8, v.size)),
    "column": lambda v, _: jnp.broadcast_to(v[:, None], (v.size, 8)),
    "middle": lambda v, _: jnp.broadcast_to(v[:, None], (4, v.size, 8)),
    "tile": lambda v, _: jnp.tile(jnp.exp(v), (8, 1)),
    "half": lambda v, _: jnp.broadcast_to(v.astype(jnp.bfloat16), (8, v.size)),
    "iota": lambda v, _: lax.broadcasted_iota(jnp.float32, (8, v.size), 1),
    "mean": lambda v, _: jnp.broadcast_to(jnp.mean(jnp.stack([v, v]), 0, keepdims=True), (8, 512)),
    "constants": lambda v, _: jnp.asarray(np.linspace(-3, 3, 512, dtype=np.float32)),
    "number": lambda _, c: jnp.full((8, 512), c),
    "one": lambda *_: jnp.full((32, 64), 0.3, jnp.float32),
}


@pytest.mark.quick
@pytest.mark.parametrize("divisor", ["constant", "argument"])
def test_what_repeats_along_an_axis_is_divided(divisor):
    """XLA multiplied by reciprocals: every sixth quotient was off. Oracle: NumPy's division."""
    v = jnp.asarray(np.random.default_rng(4).normal(size=512), jnp.float32)
    c, scale = np.float32(0.3), np.float32(1.1)

    def quotients(v, c, s):
        s = scale if divisor == "constant" else s
        made = {name: produce(v, c) for name, produce in REPEATING.items()}
        return {n: quotient(exact_float32(x), jnp.full(x.shape, s)) for n, x in made.items()}

    got = jax.jit(quotients)(v, c, scale)
    for name, produce in REPEATING.items():
        made = np.asarray(jax.jit(produce)(v, c)).astype(np.float32)
        equal(got[name], made / scale, name)


SOFT = (gradients.Ramp(0.5),)
ROUNDINGS = {
    "fake_cast": lambda x, rule: qt.fake_cast(x, "int4", gradient=rule),
    "fake_convert": lambda x, rule: qt.fake_convert(x, 1.7, 0.3, fmt="int4", gradient=rule),
    "fake_quantize": lambda x, rule: qt.fake_quantize(x, "int4", gradient=rule),
}


@pytest.mark.sample("Ramp-bfloat16", "Ramp-float32")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("rule", SOFT, ids=lambda rule: type(rule).__name__)
def test_derivatives_by_soft_estimators_between_neighbours(rule, dtype):
    """They are products: unlike others they are rounded whatever makes or reads them."""
    a, b, x = (4 * jax.random.normal(key, (4096,), dtype) for key in jax.random.split(KEY, 3))
    made = {"sum": lambda a, b: a + b, "product": lambda a, b: a * b, "argument": lambda a, b: a}

    def neighbours(derivative, a, b, x):
        return {name: wide(derivative(x, make(a, b))) for name, make in made.items()}

    for name, function in ROUNDINGS.items():
        rounded = functools.partial(function, rule=rule)
        pulled = lambda x, g, f=rounded: jax.vjp(f, x)[1](g)[0]  # noqa: E731
        pushed = lambda x, g, f=rounded: jax.jvp(f, (x,), (g,))[1]  # noqa: E731
        for derivative in (pulled, pushed):
            got = jax.jit(functools.partial(neighbours, derivative))(a, b, x)
            expected = neighbours(jax.jit(derivative), a, b, x)
            for made_by in made:
                equal(got[made_by], expected[made_by], f"{name} {made_by}")


# Functions and a value for all elements of what they are differentiated by: parameters, or data
# that is not rounded.
def by_parameters(x):
    spec = qt.BlockFormat(element="int8", block=(1, 1), scale=x.dtype.name)
    codes = jnp.full(x.shape, 3, jnp.uint8)
    return {
        "QArray": (lambda s: scaling.QArray(codes, s, spec).dequantize(x.dtype), 0.11),
        "lsq": (lambda s: gradients.lsq(x, s, "int8", gradient_factor=1.0), 0.13),
        "lsq_plus": (lambda z: gradients.lsq_plus(x, 0.013, z, "int8"), 0.21),
        "fake_convert scale": (lambda s: qt.fake_convert(x, s, fmt="e4m3fn"), 1.1),
        "fake_convert shift": (lambda z: qt.fake_convert(x, 1.1, z, fmt="e4m3fn"), 0.3),
        "hadamard_transform": (lambda v: scaling.hadamard_transform(v, key=KEY, block=32), 1.3),
        "dequantize_linear": (lambda s: onnx.dequantize_linear(codes, s[0], axis=1), 0.11),
    }


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_cotangents_fused_with_half_precision_producers(dtype):
    """Cotangents of bfloat16 were widened from sums that had never been rounded: of 4,096 random
    gradients by the scale of `lsq` 1,014 had other bits, of those of `hadamard_transform` 1,809.
    """
    x, b = halves(dtype)
    for name, (function, value) in by_parameters(x).items():
        point = jnp.full(x.shape, value, dtype)
        pulled = lambda g, f=function, at=point: jax.vjp(f, at)[1](g)[0]  # noqa: E731
        pushed = lambda t, f=function, at=point: jax.jvp(f, (at,), (t,))[1]  # noqa: E731
        for derivative in (pulled, pushed):
            made = {n: HALF_PRODUCERS[n] for n in ("sum", "product", "narrowing")}
            check(jax.jit(derivative), made, (x, b), functools.partial(named_equal, name))


def test_cotangents_fused_with_float32_producers():
    """XLA merged constants of a producer with factors and scales: of 4,096 gradients by the offset
    of `lsq_plus` 160 had other bits behind `a * 1.7`. A bias is added to what they read.
    """
    x, b = halves(jnp.float32)
    made = {n: HALF_PRODUCERS[n] for n in ("sum", "product", "narrowing")}
    for name, (function, value) in by_parameters(x).items():
        point = jnp.full(x.shape, value, jnp.float32)
        pulled = lambda g, f=function, at=point: jax.vjp(f, at)[1](g)[0]  # noqa: E731
        pushed = lambda t, f=function, at=point: jax.jvp(f, (at,), (t,))[1]  # noqa: E731
        for derivative in (pulled, pushed):
            read = lambda x, d=derivative: wide(jax.jit(d)(x))  # noqa: E731
            check(read, made, (x, b), functools.partial(named_equal, name))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_cotangents_of_casts_to_half_precision_when_fused(dtype):
    """Of 4,096 gradients by what was cast to bfloat16, 3,977 had other bits behind a product."""
    x, b = halves(dtype)
    point = jnp.ones((ROWS, COLUMNS), jnp.float32)
    made = {n: HALF_PRODUCERS[n] for n in ("sum", "product", "narrowing")}
    casts = {
        "cast": lambda v: qt.cast(v, dtype),
        "onnx.cast": lambda v: onnx.cast(v, dtype),
        "openvino.convert": lambda v: openvino.convert(v, dtype),
        "pypto.cast": lambda v: pypto.cast(v, dtype),
    }
    for name, function in casts.items():
        pulled = lambda g, f=function: jax.vjp(f, point)[1](g)[0]  # noqa: E731
        check(jax.jit(pulled), made, (x, b), functools.partial(named_equal, name))


def named_equal(function, got, expected, name):
    equal(got, expected, f"{function} {name}")


def test_fake_convert_of_one_number_repeated():
    """Step by step: 0.3 * 1.1 - 0.3 is rounded to 0.029296875. Oracle: NumPy, ml_dtypes."""
    x, scale, shift = np.float32(0.3), np.float32(1.1), np.float32(0.3)
    q = (x * scale - shift).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = jax.jit(lambda: qt.fake_convert(jnp.full((8, 64), x), 1.1, 0.3, fmt="e4m3fn"))()
    np.testing.assert_array_equal(got, np.full((8, 64), (q + shift) / scale))


@pytest.mark.parametrize("scale", [0.11, 1e-3, 3.0])
def test_dequantize_by_a_constant_scale_is_not_contracted(scale):
    """All codes of uint8 and a bias: each product is rounded before the bias is added."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, -1)
    spec = qt.BlockFormat.tensor("uint8")
    bias = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)

    def dequantized(codes):
        scales = jnp.full((1, 1), scale, jnp.float32)
        return qt.scaling.QArray(codes, scales, spec).dequantize()

    got = jax.jit(lambda codes, bias: dequantized(codes) + bias)(codes, bias)
    expected = (codes.astype(np.float32) * np.float32(scale)) + bias  # NumPy rounds twice
    np.testing.assert_array_equal(got, expected)
