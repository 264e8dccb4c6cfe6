"""What is exported runs elsewhere: no custom calls, on any platform; any batch size; the same bits.

Oracle: the function itself, called on the CPU without `jax.export`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from public_functions import (
    ANY,
    COLUMNS,
    DTYPES,
    EXCLUDED,
    F32,
    FUNCTIONS,
    public_callables,
    public_name,
)
from refused import refused

import qtoolkit as qt
from qtoolkit import gradients

MATMUL = (((1,), (0,)), ((), ()))
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
EXPORTED = {name: f for name, f in FUNCTIONS.items() if F32 in DTYPES.get(name, ANY)}
# What is not exported for a symbolic number of rows, or has other bits then.
ONE_BATCH = {
    "optim.quantize_state": "lays out its blocks by the shape",
    "lsq by scale": "computes its factor from the number of elements, in a test of its own below",
}


def example(rows):
    x = np.random.default_rng(rows).normal(size=(rows, COLUMNS)).astype(np.float32)
    x[0, :4] = (0, np.inf, 1e-41, 300)
    return jnp.asarray(x)


def assert_same_bits(got, expected):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.quick
def test_every_public_function_is_exported():
    """Or is none that computes, as the table says."""
    public = {name for name in public_callables() if name not in EXCLUDED}
    assert public - set(map(public_name, EXPORTED)) == set()


@pytest.mark.sample(
    *("encode e4m3fn nearest_even", "encode posit16 stochastic", "hadamard_transform random"),
    *("dot_general mxfp8", "optim.quantize_state", "openvino.fake_convert by parameters, core"),
)
@pytest.mark.parametrize("name", EXPORTED)
def test_exports_for_every_platform_without_custom_calls(name):
    function, x = FUNCTIONS[name], example(4)
    exported = export.export(jax.jit(function), platforms=PLATFORMS)(x)
    assert "stablehlo.custom_call" not in exported.mlir_module()
    reloaded = export.deserialize(exported.serialize())
    assert_same_bits(reloaded.call(x), function(x))


@pytest.mark.sample(
    *("encode e4m3fn nearest_even", "encode posit16 stochastic", "hadamard_transform random"),
    *("dot_general mxfp8", "optim.stochastic_round_updates", "onnx.quantize_linear by parameters"),
)
@pytest.mark.parametrize("name", [name for name in EXPORTED if name not in ONE_BATCH])
def test_a_symbolic_batch_gives_the_bits_of_every_batch(name):
    function = FUNCTIONS[name]
    (rows,) = export.symbolic_shape("b")
    argument = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    exported = export.export(jax.jit(function))(argument)
    for count in (4, 7):
        assert_same_bits(exported.call(example(count)), function(example(count)))


def test_gradient_of_a_learned_scale_with_a_symbolic_batch():
    """Its factor 1 / sqrt(N * Qp) has the number of elements N, which the program then computes.

    A product, a root and a quotient in float32, 3 * 2**-24, and sums in another order.
    """
    function = jax.grad(lambda scale, x: jnp.sum(gradients.lsq(x, scale, "int8") ** 2))
    (rows,) = export.symbolic_shape("b")
    shapes = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    exported = export.export(jax.jit(function))(*shapes)
    for count in (4, 7):
        x, scale = example(count).at[0, 1].set(0.0), jnp.float32(0.1)
        np.testing.assert_allclose(exported.call(scale, x), function(scale, x), rtol=1e-5)


def test_blocks_of_rows_refuse_a_short_symbolic_batch():
    def quantized(x):
        return qt.fake_quantize(x, "deepseek_128x128")

    def exported(rows):
        return export.export(jax.jit(quantized))(jax.ShapeDtypeStruct((rows, 256), np.float32))

    (rows,) = export.symbolic_shape("b")
    refused(ValueError, r"128 elements along axis -2.*has b", exported, rows)
    (rows,) = export.symbolic_shape("b", constraints=["b >= 128"])
    x = np.random.default_rng(0).normal(size=(300, 256)).astype(np.float32)
    np.testing.assert_array_equal(exported(rows).call(x), quantized(x))


@pytest.mark.sample("nvfp4-1", "deepseek_v3-128")
@pytest.mark.parametrize(("name", "least"), [("nvfp4", 1), ("mxfp8", 32), ("deepseek_v3", 128)])
def test_gradients_by_blocks_along_a_symbolic_batch(name, least):
    """wgrad sums over the batch and cuts blocks along it; only NVFP4's transform pads it itself."""

    def products(x, w, cotangent):
        recipe = getattr(qt.recipes, name)
        y, back = jax.vjp(lambda x, w: qt.dot_general(x, w, MATMUL, recipe=recipe), x, w)
        return y, *back(cotangent)

    def exported(*constraints):
        (rows,) = export.symbolic_shape("b", constraints=constraints)
        shapes = (rows, 64), (64, 48), (rows, 48)
        structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return export.export(jax.jit(products))(*structs)

    if least > 1:
        wanted = rf"{least} elements along axis 0.*has b, expected .* known to be {least} or more"
        refused(ValueError, wanted, exported)
    rng = np.random.default_rng(0)
    shapes = (least + 3, 64), (64, 48), (least + 3, 48)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    results = exported(f"b >= {least}").call(*arrays)
    for got, expected in zip(results, jax.jit(products)(*arrays), strict=True):
        # float32 sums in another order, of up to 131 terms.
        np.testing.assert_allclose(got, expected, atol=131 * 2.0**-24 * np.abs(expected).max())


def test_stochastic_bits_with_symbolic_axes_in_the_middle():
    """The index of an element needs products of sizes that are not known."""
    b, c = export.symbolic_shape("b, c")
    argument = jax.ShapeDtypeStruct((3, b, c, 5), jnp.float32)
    function = FUNCTIONS["encode e4m3fn stochastic"]
    exported = export.export(jax.jit(function))(argument)
    for shape in ((3, 2, 7, 5), (3, 11, 1, 5)):
        x = jnp.asarray(np.random.default_rng(0).normal(size=shape).astype(np.float32))
        assert_same_bits(exported.call(x), function(x))


def test_pack_where_ranks_are_not_promoted():
    """`jax_numpy_rank_promotion="raise"` refuses arrays of different ranks in one operation."""
    codes = jnp.arange(24, dtype=jnp.uint8).reshape(2, 3, 4) % 16
    expected = {bits: qt.pack(codes, bits) for bits in (1, 2, 4, 6)}
    with jax.numpy_rank_promotion("raise"):
        for bits, packed in expected.items():
            assert_same_bits(qt.pack(codes[..., :], bits), packed)
            assert_same_bits(qt.unpack(packed, bits, 4), codes & np.uint8((1 << bits) - 1))


# Of data and two vectors, each with a number for every column.
LEARNED = {
    "lsq_plus": lambda x, s, z: gradients.lsq_plus(x, s, z, "int4"),
    "lsq": lambda x, s, z: gradients.lsq(x, s, "int4"),
    "fake_convert": lambda x, s, z: qt.fake_convert(x, s, z, fmt="int4"),
}


@pytest.mark.sample("lsq_plus", "fake_convert")
@pytest.mark.parametrize("name", LEARNED)
def test_vectors_of_parameters_where_ranks_are_not_promoted(name):
    """Oracle: the gradients without the flag, by parameters that have the axes of the data."""

    def gradient(function, *parameters):
        return jax.grad(lambda *a: jnp.sum(function(*a) ** 2), (0, 1, 2))(x, *parameters)

    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 64)), jnp.float32)
    vectors = jnp.linspace(0.1, 0.5, 64), jnp.linspace(-0.2, 0.2, 64)
    expected = gradient(
        lambda x, *rows: LEARNED[name](x, *(r[0] for r in rows)), *(v[None] for v in vectors)
    )
    with jax.numpy_rank_promotion("raise"):
        got = gradient(LEARNED[name], *vectors)
    assert_same_bits(got, [expected[0], expected[1][0], expected[2][0]])


def test_learned_scales_without_rank_promotion():
    """Oracle: the same without the flag."""

    def observed():
        model = qt.nnx.wrap(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), qt.recipes.int4_lsq)
        qt.nnx.start_scales(model, x)
        numbers = qt.nnx.numerics(model, x, lambda model, x: jnp.mean(model(x) ** 2))
        return jax.tree.leaves(nnx.state(model)), numbers.to_json()

    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 16)), jnp.float32)
    expected, numbers = observed()
    with jax.numpy_rank_promotion("raise"):
        got, raised = observed()
    assert_same_bits(got, expected)
    assert raised == numbers
