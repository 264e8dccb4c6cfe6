"""Every public function that computes, as a function of one array of numbers: x, [rows, 64].

Tests go through all of them: `test_fusion.py` and `test_export.py`. A name begins with that of
the public function, without its package where the packages are layers, as in "encode" and
"onnx.cast"; then it says what is special. What a test knows of the functions stands here; the names
themselves come from the packages, so that a new one is missed.
"""

import functools
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import qtoolkit as qt
from qtoolkit import gradients, onnx, openvino, optim, pypto, scaling
from qtoolkit.casts.internal import exact_float32
from qtoolkit.pypto import CastMode

ROWS, COLUMNS = 32, 64
KEY = jax.random.key(7)
BIAS = np.float32(0.37)
F32, F16, BF16 = (np.dtype(d) for d in (jnp.float32, jnp.float16, jnp.bfloat16))
HALF, ANY = (BF16, F16), (BF16, F16, F32)
LAYERS = ("formats", "casts", "scaling", "gradients", "products", "post_training")


def wide(x):
    """As a neighbour in the same jit reads a result: widened, and added to."""
    return x.astype(jnp.float32) + BIAS


def with_spec(function, spec, **keywords):
    return lambda x: jax.tree.leaves(function(x, spec, **keywords))


def gradient(function):
    """The derivative by x of the sum of squares, so that cotangents are no constants."""
    return lambda x: jax.grad(lambda x: jnp.sum(jnp.square(function(x).astype(jnp.float32))))(x)


def observed(kind, spec, **options):
    return lambda x: kind.of(spec, (ROWS, COLUMNS), **options).observe(x).scale()


def counted(kind):
    return lambda x: kind.of("e4m3fn", (ROWS, COLUMNS)).observe(x).counts


MODES = ("nearest_even", "nearest_away", "toward_positive", "to_odd")
FOUR_OVER_SIX = qt.spec("nvfp4").with_(rule="four_over_six")
ZERO_POINT = qt.BlockFormat.tensor("uint8", zero_point=True)
RULES = ("clipped", "identity", "zero")
CASTS = {
    **{
        f"{f.__name__} {fmt} {mode}": functools.partial(f, fmt=fmt, rounding=mode)
        for f in (qt.encode, qt.cast, qt.fake_cast)
        for fmt, mode in zip(("e4m3fn", "e5m2", "int8", "e8m0fnu"), MODES, strict=True)
        if not (f is qt.fake_cast and fmt == "e8m0fnu")
    },
    "encode nf4": lambda x: qt.encode(x, "nf4"),
    "encode nf4 stochastic": lambda x: qt.encode(x, "nf4", rounding="stochastic", key=KEY),
    "encode posit16 stochastic": lambda x: qt.encode(x, "posit16", rounding="stochastic", key=KEY),
    "encode e4m3fn stochastic": lambda x: qt.encode(x, "e4m3fn", rounding="stochastic", key=KEY),
    "decode": lambda x: wide(qt.decode(qt.encode(x, "e4m3fn"), "e4m3fn", x.dtype)),
    "round_to_format e5m2": lambda x: wide(qt.round_to_format(x, "e5m2", saturation="none")),
    "cast bfloat16": lambda x: wide(qt.cast(x, "bfloat16")),
    "pack": lambda x: qt.pack(qt.encode(x, "e2m1fn"), "e2m1fn"),
    "pack six bits": lambda x: qt.pack(qt.encode(x, "e3m2fn"), "e3m2fn"),
    "unpack": lambda x: qt.unpack(qt.pack(qt.encode(x, "int4"), "int4"), "int4"),
}
SCALING = {
    "quantize e4m3fn": with_spec(qt.quantize, "e4m3fn"),
    "quantize int8 by channel": with_spec(qt.quantize, qt.BlockFormat.channel("int8")),
    "quantize mxfp8_e4m3": with_spec(qt.quantize, "mxfp8_e4m3"),
    "quantize mxfp4 packed": with_spec(qt.quantize, "mxfp4", packed=True),
    "quantize nvfp4": with_spec(qt.quantize, "nvfp4"),
    "quantize four over six": with_spec(qt.quantize, FOUR_OVER_SIX),
    "quantize zero point": with_spec(qt.quantize, ZERO_POINT),
    "quantize given scale": with_spec(qt.quantize, "e4m3fn", scale=1.1),
    "QArray dequantized": lambda x: wide(qt.QArray(
        qt.encode(x, "int8"), jnp.full((1, 1), 0.11), qt.BlockFormat.tensor("int8")
    ).dequantize()),
    "amax": scaling.amax,
    "hadamard_transform": lambda x: wide(scaling.hadamard_transform(x)),
    "hadamard_transform random": lambda x: wide(scaling.hadamard_transform(x, key=KEY)),
    "Hessian": lambda x: scaling.Hessian.of(COLUMNS).observe(x).largest,
    "AbsMax": observed(scaling.AbsMax, "e4m3fn"),
    "MovingAverage": observed(scaling.MovingAverage, "int8"),
    "MinMax": observed(scaling.MinMax, ZERO_POINT),
    "Percentile": observed(scaling.Percentile, "e4m3fn"),
    "Percentile counts": counted(scaling.Percentile),
    "MSE counts": counted(scaling.MSE),
}  # fmt: skip
GRADIENTS = {
    "fake_convert": lambda x: wide(qt.fake_convert(x, 1.1, 0.3, fmt="e4m3fn")),
    "fake_convert by rows": lambda x: wide(qt.fake_convert(
        x, jnp.full((x.shape[0], 1), 1.1, x.dtype), jnp.full((x.shape[0], 1), 0.3, x.dtype),
        fmt="e5m2",
    )),
    "fake_quantize e4m3fn": lambda x: wide(qt.fake_quantize(x, "e4m3fn")),
    "fake_quantize mxfp8": lambda x: wide(qt.fake_quantize(x, "mxfp8_e5m2")),
    "fake_quantize up": lambda x: wide(qt.fake_quantize(x, "e5m2", rounding="toward_positive")),
    "lsq": lambda x: wide(gradients.lsq(x, 0.13, "int8")),
    "lsq_plus": lambda x: wide(gradients.lsq_plus(x, 0.13, 0.21, "int8")),
    "fake_cast gradient": gradient(lambda x: qt.fake_cast(x, "e4m3fn")),
    "Ramp": gradient(lambda x: qt.fake_cast(x, "int8", gradient=gradients.Ramp(0.5))),
    "fake_convert gradient": gradient(lambda x: qt.fake_convert(x, 1.1, 0.3, fmt="e4m3fn")),
    "fake_quantize gradient": gradient(lambda x: qt.fake_quantize(x, "mxfp8_e4m3")),
    "lsq gradient": gradient(lambda x: gradients.lsq(x, 0.13, "int8")),
    "round_cotangent vmap gradient": gradient(
        jax.vmap(lambda x: qt.round_cotangent(x, "e5m2", scaling="tensor"))
    ),
    "linear_with_transpose gradient": gradient(
        lambda x: gradients.linear_with_transpose(_doubled, _rounded, (x,), x)
    ),
    **{
        f"fake_cast {rule}": gradient(functools.partial(qt.fake_cast, fmt="int8", gradient=rule))
        for rule in RULES
    },
}  # fmt: skip


def _doubled(residuals, x):
    return 2 * x


def _rounded(residuals, cotangent):
    return qt.round_to_format(cotangent, "e4m3fn")


# Products. Sums in another order have other bits, so the sums here are exact in any order: each has
# one term, or its terms are products of integers below 2**7, which are fewer than 2**10.
MATMUL = (((1,), (0,)), ((), ()))
INT8 = qt.Recipe(qt.BlockFormat.tensor("int8"), qt.BlockFormat.tensor("int8"))


def eye(x):
    return jnp.eye(COLUMNS, dtype=x.dtype)


def weights(x):
    w = np.random.default_rng(3).normal(size=(COLUMNS, 16)).astype(np.float32)
    return jnp.asarray(w).astype(x.dtype)


def both_gradients(function, w):
    """By x and by the weights, of a cotangent that is the result."""

    def gradients_of(x):
        y, pull = jax.vjp(function, x, w(x))
        return pull(y)

    return gradients_of


def convolved(x, w, **options):
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = x[None, :, :, None]
    return qt.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dimensions, **options)


def middle(x):
    """A kernel that picks one element."""
    return jnp.zeros((3, 3, 1, 2), x.dtype).at[1, 1].set(1)


def halves(x):
    """The sizes of two groups of rows."""
    return jnp.asarray([5, x.shape[0] - 5], jnp.int32)


def grouped(x, w, **options):
    return qt.ragged_dot(x, jnp.stack([w, w]), halves(x), **options)


def cached(x, **options):
    """Keys and values of one head that were stored and read."""
    cache = qt.products.KVCache("int8", "int4", **options)
    keys = x[None, :, None]
    stored = cache.store(cache.empty(keys.shape, x.dtype), (keys, keys), 0)
    return jax.tree.leaves(cache.read(stored))


PRODUCTS = {
    "KVCache": cached,
    "KVCache rotated": lambda x: cached(x, rotate=True),
    "dot_general": lambda x: wide(qt.dot_general(x, eye(x), MATMUL)),
    "dot_general mxfp8": lambda x: wide(qt.dot_general(x, eye(x), MATMUL, recipe=qt.recipes.mxfp8)),
    "dot_general int8": lambda x: wide(qt.dot_general(x, weights(x), MATMUL, recipe=INT8)),
    "dot_general vmap": jax.vmap(lambda row: qt.dot_general(row[None], eye(row), MATMUL)),
    "dot_general gradients": both_gradients(
        functools.partial(qt.dot_general, dimension_numbers=MATMUL, recipe=INT8), weights
    ),
    "einsum": lambda x: wide(qt.einsum("ij,jk->ik", x, eye(x))),
    "einsum int8": lambda x: wide(qt.einsum("ij,jk->ki", x, weights(x), recipe=INT8)),
    "conv_general_dilated": lambda x: wide(convolved(x, middle(x))),
    "conv_general_dilated gradients": both_gradients(
        functools.partial(convolved, recipe=INT8), middle
    ),
    "ragged_dot": lambda x: wide(grouped(x, eye(x))),
    "ragged_dot gradients": both_gradients(functools.partial(grouped, recipe=INT8), weights),
}  # fmt: skip


# Layers of Flax, with the identity as kernel.
def identity(key, shape, dtype):
    return jnp.eye(COLUMNS, dtype=dtype).reshape(shape)


def of_nnx(kind, *arguments, **options):
    def layer(x):
        return kind(
            *arguments, **options, kernel_init=identity, dtype=x.dtype, param_dtype=x.dtype,
            rngs=nnx.Rngs(0),
        )  # fmt: skip

    return layer


def of_linen(kind, *arguments, **options):
    def layer(x):
        types = {"dtype": x.dtype, "param_dtype": x.dtype}
        return kind(*arguments, **options, **types, kernel_init=identity, use_bias=False)

    return layer


def scale_of_1_1(key, shape, dtype):
    return jnp.full(shape, 1.1, dtype)


def applied(layer, x):
    """`init_with_output` would not do: linen layers round nothing while they are initialized."""
    variables = layer.init(jax.random.key(0), x)
    return wide(layer.apply(variables, x))


LINEAR = of_nnx(nnx.Linear, COLUMNS, COLUMNS)
FLAX = {
    "nnx.FakeConvert": lambda x: wide(qt.nnx.FakeConvert("e4m3fn", jnp.asarray(1.1, x.dtype))(x)),
    "nnx.Fp8Linear": lambda x: wide(of_nnx(qt.nnx.Fp8Linear, COLUMNS, COLUMNS)(x)(x)),
    "nnx.Fp8Conv": lambda x: wide(of_nnx(qt.nnx.Fp8Conv, COLUMNS, COLUMNS, (1,))(x)(x[None])),
    "nnx.Fp8Einsum": lambda x: wide(
        of_nnx(qt.nnx.Fp8Einsum, "bi,io->bo", (COLUMNS, COLUMNS))(x)(x)
    ),
    "nnx.wrap": lambda x: wide(qt.nnx.wrap(LINEAR(x), qt.recipes.mxfp8)(x)),
    "linen.FakeConvert": lambda x: applied(
        qt.linen.FakeConvert("e4m3fn", scale_init=scale_of_1_1, param_dtype=x.dtype), x
    ),
    "linen.Fp8Dense": lambda x: applied(of_linen(qt.linen.Fp8Dense, COLUMNS)(x), x),
    "linen.Fp8Conv": lambda x: applied(of_linen(qt.linen.Fp8Conv, COLUMNS, (1,))(x), x[None]),
    "linen.Fp8Einsum": lambda x: applied(
        of_linen(qt.linen.Fp8Einsum, (COLUMNS, COLUMNS), "bi,io->bo")(x), x
    ),
    "linen.wrap": lambda x: applied(
        qt.linen.wrap(of_linen(nn.Dense, COLUMNS)(x), qt.recipes.mxfp8), x
    ),
}  # fmt: skip


def updated(tx, x, dtype):
    """The leaves of an update by x, and of the state that it leaves, of weights of 0.5."""
    params = jnp.full(x.shape, 0.5, dtype)
    return jax.tree.leaves(tx.update(x, tx.init(params), params))


OPTIM = {
    "optim.quantize_state": lambda x: updated(
        optim.quantize_state(optax.trace(decay=0.9), "e4m3fn", min_size=0), x, x.dtype
    ),
    "optim.stochastic_round_updates": lambda x: updated(
        optim.stochastic_round_updates(), x, jnp.bfloat16
    ),
    "optim.master_weights": lambda x: updated(
        optim.master_weights(optax.identity()), x, jnp.bfloat16
    ),
}


def promoted(x):
    other = np.ones(3, F16 if x.dtype == BF16 else BF16)
    return openvino.convert_promote_types(x, other, promote_unsafe=True)[0]


@functools.partial(jax.jit, static_argnums=2)  # concrete arguments would say how many elements
def ranged(start, step, to):
    return openvino.range(start, 0, step, output_type=to, length=999)


OPERATORS = {
    "onnx.cast": lambda x: onnx.cast(x, "FLOAT8E4M3FN"),
    "onnx.cast float": lambda x: wide(onnx.cast(x, "FLOAT")),
    "onnx.cast e8m0": lambda x: onnx.cast(x, "FLOAT8E8M0", saturate=False),
    "onnx.cast_like": lambda x: onnx.cast_like(x, np.int32(0)),
    "onnx.quantize_linear": lambda x: onnx.quantize_linear(x, x.dtype.type(0.03)),
    "onnx.quantize_linear precision": lambda x: onnx.quantize_linear(
        x, np.float32(0.03), np.int8(3), precision="FLOAT16"
    ),
    "onnx.quantize_linear e5m2": lambda x: onnx.quantize_linear(
        x, x.dtype.type(1.1), np.array(2, jnp.float8_e5m2)
    ),
    "onnx.dequantize_linear": lambda x: wide(
        onnx.dequantize_linear(onnx.cast(x, "UINT8"), x.dtype.type(1.1), np.uint8(3))
    ),
    "onnx.dynamic_quantize_linear": lambda x: onnx.dynamic_quantize_linear(x),
    "onnx.bit_cast": lambda x: onnx.bit_cast(x, f"UINT{8 * x.dtype.itemsize}"),
    "openvino.convert": lambda x: openvino.convert(x, "f8e4m3"),
    **{
        f"openvino.convert {to}, core": (
            lambda x, to=to: openvino.convert(x, to, arithmetic="openvino")
        )
        for to in ("f8e4m3", "f8e5m2", "bf16", "f32")
    },
    **{
        f"openvino.fake_convert {to}, {arithmetic}": (
            lambda x, to=to, arithmetic=arithmetic: wide(
                openvino.fake_convert(x, 1.1, 0.3, destination_type=to, arithmetic=arithmetic)
            )
        )
        for to, arithmetic in (("f8e4m3", "exact"), ("f8e4m3", "openvino"), ("f8e5m2", "openvino"))
    },
    "openvino.convert_promote_types": promoted,
    "openvino.range": lambda x: wide(ranged(x[0, 0], x[0, 1], "bf16")),
    "pypto.cast": lambda x: pypto.cast(x, "DT_FP32"),
    "pypto.cast int32": lambda x: pypto.cast(x, "DT_INT32", CastMode.CAST_CEIL),
    "pypto.cast int16": lambda x: pypto.cast(x, "DT_INT16", CastMode.CAST_FLOOR),
    "pypto.cast fp4": lambda x: pypto.cast(x, "DT_FP4_E2M1X2", extended=True),
    "pypto.cast integral": lambda x: wide(
        pypto.cast(x, "DT_FP32", CastMode.CAST_FLOOR, extended=True)
    ),
}


def data(x):
    """Numbers that are known where x gives the parameters by which they are rounded."""
    return jnp.asarray(np.random.default_rng(5).normal(size=(8, COLUMNS)), x.dtype)


def bounded(x):
    """The first row of x, finite: infinite parameters are refused."""
    return jnp.clip(x[:1], x.dtype.type(-8), x.dtype.type(8))


def positive(x):
    """Scales that are made of x in the same jit."""
    return jnp.abs(bounded(x)) + x.dtype.type(0.125)


BY_CHANNEL = qt.BlockFormat.channel("int8")
PARAMETERS = {
    "fake_convert by parameters": lambda x: wide(
        qt.fake_convert(data(x), positive(x), bounded(x), fmt="e5m2")
    ),
    "lsq by parameters": lambda x: wide(gradients.lsq(data(x), positive(x), "int8")),
    "lsq_plus by parameters": lambda x: wide(
        gradients.lsq_plus(data(x), positive(x), bounded(x), "int4")
    ),
    "quantize by parameters": lambda x: jax.tree.leaves(
        qt.quantize(data(x), BY_CHANNEL, scale=exact_float32(positive(x)))
    ),
    "openvino.fake_convert by parameters": lambda x: wide(
        openvino.fake_convert(data(x), positive(x), bounded(x))
    ),
    "openvino.fake_convert by parameters, core": lambda x: wide(
        openvino.fake_convert(data(x), positive(x), bounded(x), arithmetic="openvino")
    ),
    "onnx.quantize_linear by parameters": lambda x: onnx.quantize_linear(
        data(x), positive(x)[0], axis=1
    ),
    "onnx.dequantize_linear by parameters": lambda x: wide(
        onnx.dequantize_linear(onnx.cast(data(x), "INT8"), positive(x)[0], axis=1)
    ),
    "dot_general by parameters": lambda x: wide(qt.dot_general(
        jnp.eye(x.shape[0], dtype=x.dtype), x, MATMUL
    )),
}  # fmt: skip
EXACT = {
    **CASTS, **SCALING, **GRADIENTS, **PRODUCTS, **FLAX, **OPTIM, **OPERATORS, **PARAMETERS
}  # fmt: skip
# What sums many terms of which none is exact: a program may add them in another order.
SUMS = {
    "sqnr_db": lambda x: scaling.sqnr_db(x, qt.fake_quantize(x, "e4m3fn")),
    "metrics": lambda x: (
        lambda m: [m.sqnr_db, m.max_error, m.cosine, m.saturated, m.flushed, m.nonfinite]
    )(qt.metrics(x, "e4m3fn")),
    "MSE": observed(scaling.MSE, "int8"),
    "lsq_scale": lambda x: gradients.lsq_scale(x, "int8"),
    "lsq by scale": lambda x: jax.grad(
        lambda s: jnp.sum(jnp.square(gradients.lsq(x, s, "int8").astype(jnp.float32)))
    )(jnp.float32(0.13)),
    "fake_convert by scale": lambda x: jax.grad(
        lambda s: jnp.sum(jnp.square(qt.fake_convert(x, s, fmt="e4m3fn").astype(jnp.float32)))
    )(jnp.asarray(1.1, x.dtype)),
    "dot_general sums": lambda x: qt.dot_general(x, weights(x), MATMUL),
    "dot_general gradient": gradient(lambda x: qt.dot_general(x, weights(x), MATMUL)),
}
FUNCTIONS = {**EXACT, **SUMS}
# What takes only some dtypes of x.
DTYPES = {
    **dict.fromkeys(("onnx.cast e8m0", "pypto.cast fp4"), (BF16,)),
    **dict.fromkeys(("onnx.quantize_linear precision", "onnx.quantize_linear e5m2"), (BF16, F32)),
    **dict.fromkeys(("onnx.dynamic_quantize_linear", "pypto.cast integral"), (F32,)),
    **dict.fromkeys(("pypto.cast",), HALF),
    **dict.fromkeys(("pypto.cast int16",), (F16, F32)),
}
# optax adds float32 numbers: XLA contracts such a sum with a product that was made in the same jit.
ADDED_BY_OPTAX = ("optim.master_weights",)

# Public functions that are not in the table.
EXCLUDED = {
    **dict.fromkeys(("expected_gain", "native_calls"), "of a model, outside of jit"),
    "all_to_all": "of a mesh; quantizes as `quantize` does, which is here",
    "gptq": "run once, over a trained kernel; sums decide",
    "onnx.range": "its length follows from the values of its arguments, which no jit has",
    "openvino.promoted_type": "gives the name of a type",
}
WITHOUT_ARRAYS = ("formats", "checkpoints", "plots")
METHODS = ("observe", "slope", "dequantize", "store", "__call__")  # of classes that compute


def public_callables():
    """By name: what the packages list in their `__all__`, as far as it computes with arrays."""
    return {
        name if package in LAYERS else f"{package}.{name}": value
        for package in qt._NAMES_BY_PACKAGE
        if package not in WITHOUT_ARRAYS
        for module in [importlib.import_module(f"qtoolkit.{package}")]
        for name in module.__all__
        if callable(value := getattr(module, name)) and computes(package, name, value)
    }


def computes(package, name, value):
    """Not classes of data, nor what takes a model and runs its products, which are here."""
    if not inspect.isclass(value):
        return package not in ("nnx", "linen") or name == "wrap"
    if value is gradients.Estimator or issubclass(value, nnx.Variable):
        return False
    return any(method in dir(value) for method in METHODS)


def public_name(name):
    return name.split()[0]
