"""Products of MX and NVFP4 blocks by `jax.lax.scaled_dot`: what XLA is given, and its results.

`test_recipes.py` compares their values with NumPy in float64. Here the emulated product is the
oracle: both multiply the same numbers exactly, elements times E8M0 scales, and sum in float32. Sums
of K terms may differ by 2 * K units of 2**-24 of the sum of magnitudes, whatever their order.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from refused import refused

import qtoolkit as qt
from qtoolkit.formats import BlockFormat
from qtoolkit.products import Recipe, recipes

MATMUL = (((1,), (0,)), ((), ()))
COMPOSITE = re.compile(r'stablehlo.composite "xla.scaled_dot".*: \((.*)\) -> (\S+)')
MXFP8 = recipes.mxfp8
E2M1, E8M0, E4M3 = "f4E2M1FN", "f8E8M0FNU", "f8E4M3FN"


def native(recipe):
    return dataclasses.replace(recipe, arithmetic="native")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


OPERANDS = normal(48, 96), normal(96, 80, seed=1), normal(48, 80, seed=2)


def three(recipe, product=None):
    """y, dx and dw."""
    product = product or functools.partial(qt.dot_general, dimension_numbers=MATMUL)

    def run(x, w, ct):
        y, back = jax.vjp(lambda x, w: product(x, w, recipe=recipe), x, w)
        return y, *back(ct)

    return run


def composites(text):
    """The element types of the operands of each: elements of both, scales of both."""
    found = COMPOSITE.findall(text)
    assert all(out.endswith("xf32>") for _, out in found)
    return [re.findall(r"x(f\w+)>", operands) for operands, _ in found]


FORMATS = {
    "mxfp8": (MXFP8, [[E4M3, E4M3, E8M0, E8M0]] * 3),
    "e5m2": (
        Recipe("mxfp8", "mxfp8_e5m2"),
        [[E4M3, E4M3, E8M0, E8M0], *[["f8E5M2", E4M3, E8M0, E8M0]] * 2],
    ),
    "mxfp4": (Recipe("mxfp4"), [[E4M3] * 2 + [E8M0] * 2] * 3),  # held in E4M3FN
    "mxfp6": (Recipe("mxfp6_e3m2", "mxfp6_e2m3"), [[E4M3] * 2 + [E8M0] * 2] * 3),
    "nvfp4": (recipes.nvfp4, [[E2M1] * 2 + [E4M3] * 2] * 3),
    "e8m0": (  # 128 x 128 along other axes; the transposed 1 x 128 are cut anew
        Recipe(("deepseek_1x128_e8m0", "deepseek_128x128_e8m0"), gradient=None),
        [[E4M3, E4M3, E8M0, E8M0]],
    ),
}


@pytest.mark.sample("mxfp8-cpu", "nvfp4-cuda", "e5m2-tpu")
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("name", FORMATS)
def test_elements_and_scales_have_their_own_formats(name, platform):
    recipe, expected = FORMATS[name]
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in OPERANDS]
    run = jax.jit(three(native(recipe)))
    text = export.export(run, platforms=[platform])(*structs).mlir_module()
    # In either order: the transposed product has the cotangent first.
    assert sorted(map(sorted, composites(text))) == sorted(map(sorted, expected))


@pytest.mark.exhaustive
def test_what_was_exported_gives_the_same_bits():
    run = jax.jit(three(native(MXFP8)))
    exported = export.export(run)(*OPERANDS)
    got = export.deserialize(exported.serialize()).call(*OPERANDS)
    for mine, theirs in zip(got, run(*OPERANDS), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.exhaustive
def test_for_several_platforms_at_once_jax_exports_from_0_12_on():
    run = jax.jit(three(native(MXFP8)))
    if jax.__version_info__ < (0, 11):
        with refused(ValueError, r"has 4 operand.*, but decomposition has 5"):
            export.export(run, platforms=["cpu", "cuda"])(*OPERANDS)
        return
    exported = export.export(run, platforms=["cpu", "cuda"])(*OPERANDS)
    for mine, theirs in zip(exported.call(*OPERANDS), run(*OPERANDS), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_symbolic_batch_is_emulated():
    (rows,) = export.symbolic_shape("b")
    x, w, _ = OPERANDS
    forward = jax.jit(
        functools.partial(qt.dot_general, dimension_numbers=MATMUL, recipe=native(MXFP8))
    )
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, x.shape[1]), w.shape)]
    exported = export.export(forward)(*structs)
    assert not composites(exported.mlir_module())
    np.testing.assert_allclose(exported.call(x, w), forward(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.sample("mxfp8")
@pytest.mark.parametrize("name", ["mxfp8", "e5m2", "mxfp4", "mxfp6"])
def test_equal_to_the_emulated_product_up_to_the_order_of_sums(name):
    recipe, _ = FORMATS[name]
    x, w, ct = OPERANDS
    emulated, got = (jax.jit(three(r))(x, w, ct) for r in (recipe, native(recipe)))
    magnitudes = jax.jit(three(recipe))(jnp.abs(x), jnp.abs(w), jnp.abs(ct))
    for mine, theirs, size, terms in zip(got, emulated, magnitudes, (96, 80, 48), strict=True):
        assert np.all(np.abs(mine - theirs) <= 2 * terms * 2.0**-24 * size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_operands(dtype):
    """Numbers of few bits, whose sums are exact: equality."""
    draw = np.random.default_rng(0)
    x, w, ct = (
        jnp.asarray(draw.integers(-7, 8, shape), dtype) for shape in ((5, 70), (70, 6), (5, 6))
    )
    for mine, theirs in zip(three(native(MXFP8))(x, w, ct), three(MXFP8)(x, w, ct), strict=True):
        assert mine.dtype == dtype
        np.testing.assert_array_equal(mine, theirs)


STORED = {
    "mxfp8_e4m3": (1.0, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu),
    "mxfp8_e5m2": (1.0, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
    "mxfp4": (1.0, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu),
    "nvfp4": (2688.0, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn),  # 6 * 448: exact
}


@pytest.mark.quick
@pytest.mark.parametrize("name", STORED)
def test_every_element_times_every_scale_is_exact(name):
    """Oracle: ml_dtypes, float64. A diagonal of ones, or of 2688, picks each product; those below
    2**-126 are smaller than the least normal number, those above float32 infinite.
    """
    unit, element, scale = STORED[name]
    spec = qt.spec(name)
    codes = np.arange(2**spec.element.bits, dtype=np.uint8)
    codes = codes[np.isfinite(codes.view(element).astype(np.float64))]
    codes = np.pad(codes, (0, -len(codes) % 32))
    scales = np.arange(256, dtype=np.uint8).view(scale)
    scales = scales[np.isfinite(scales.astype(np.float64)) & (scales.astype(np.float64) > 0)]
    blocks = len(codes) // spec.block[0]
    w = qt.QArray(
        jnp.tile(jnp.asarray(codes)[:, None], (1, len(scales))),
        jnp.asarray(np.tile(scales, (blocks, 1))),
        spec.along(0),
        jnp.ones((), jnp.float32) if spec.tensor_scale else None,
    )
    recipe = Recipe((spec, spec), arithmetic="native")
    x = unit * jnp.eye(len(codes))
    with np.errstate(over="ignore"):
        got = qt.dot_general(x, w, MATMUL, recipe=recipe)
        expected = (
            unit * codes.view(element).astype(np.float64)[:, None] * scales.astype(np.float64)
        )
        expected[np.abs(expected) < 2.0**-126] = 0
        wide = expected.astype(np.float32)
    columns = np.isfinite(wide).all(0)  # an infinity times the zeros of the diagonal is a NaN
    assert columns.sum() > len(scales) - 20
    is_normal = columns & (np.abs(wide) >= 2.0**-126)
    np.testing.assert_array_equal(np.asarray(got)[is_normal], wide[is_normal])
    is_tiny = np.abs(wide) < 2.0**-126
    assert np.all(np.abs(np.asarray(got)[is_tiny & columns]) <= 2.0**-126)
    assert not np.isfinite(np.asarray(got)[:, ~columns]).all(0).any()


@pytest.mark.sample("mxfp8_e4m3", "mxfp4")
@pytest.mark.quick
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"])
def test_no_scale_leaves_the_range_where_the_result_does_not(name):
    """Blocks of 2**-126, whose scales may be 2**-127, and blocks of 2**126."""
    x = jnp.full((2, 40), 2.0**-126, jnp.float32).at[1].set(-3 * 2.0**-125)
    w = jnp.full((40, 3), 2.0**126, jnp.float32)
    scale = np.asarray(qt.quantize(x, name).scale).astype(np.float64)
    assert scale.min() == 2.0**-127 or name == "mxfp4"
    got = qt.dot_general(x, w, MATMUL, recipe=Recipe(name, arithmetic="native"))
    np.testing.assert_array_equal(got, np.array([[40.0] * 3, [-240.0] * 3]))


OTHERS = {
    "float32 scales": Recipe(BlockFormat(element="e4m3fn", block=(32,))),
    "float32 scales of tokens and blocks": Recipe(
        (BlockFormat.token("e4m3fn"), BlockFormat(element="e4m3fn", block=(32,))), gradient=None
    ),
    "integers": Recipe("mxint8"),
    "blocks along other axes": Recipe(
        tuple(qt.spec("mxfp8_e4m3").along(axis) for axis in (0, 1)), gradient=None
    ),
    "a second scale and E8M0": Recipe(("mxfp8", "nvfp4"), gradient=None),
    "one scale and blocks": Recipe(("mxfp8", "e4m3fn"), gradient=None),
    "unquantized and blocks": Recipe(("mxfp8", None), gradient=None),
    "more digits than bfloat16 has": Recipe(
        BlockFormat(element="float8_e3m4", block=(16,), scale="float8_e3m4"), gradient=None
    ),
}


@pytest.mark.sample("float32 scales", "one scale and blocks")
@pytest.mark.parametrize("name", OTHERS)
def test_others_are_emulated_bit_for_bit(name):
    recipe = OTHERS[name]
    run = jax.jit(three(native(recipe)))
    assert not composites(run.lower(*OPERANDS).as_text())
    for mine, theirs in zip(run(*OPERANDS), jax.jit(three(recipe))(*OPERANDS), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.sample("nothing")
@pytest.mark.parametrize(
    ("numbers", "shapes"),
    [
        ((((), ()), ((), ())), ((32,), (32,))),
        ((((1,), (1,)), ((), ())), ((32, 1), (32, 1))),
        ((((0, 1), (0, 1)), ((), ())), ((1, 1, 8), (1, 1, 8))),
    ],
    ids=["nothing", "one term", "one term along two axes"],
)
def test_sums_without_blocks_are_emulated(numbers, shapes):
    x, w = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
    run = jax.jit(
        lambda x, w, recipe: qt.dot_general(x, w, numbers, recipe=recipe), static_argnums=2
    )
    assert not composites(run.lower(x, w, native(MXFP8)).as_text())
    np.testing.assert_array_equal(run(x, w, native(MXFP8)), run(x, w, MXFP8))


def test_other_functions_are_emulated():
    product = functools.partial(qt.einsum, "ij,jk->ik")
    run = jax.jit(three(native(MXFP8), product))
    assert not composites(run.lower(*OPERANDS).as_text())
    for mine, theirs in zip(run(*OPERANDS), jax.jit(three(MXFP8, product))(*OPERANDS), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.sample("mxfp8_e4m3")
@pytest.mark.parametrize("spec", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_a_stored_kernel_gives_the_bits_of_the_kernel(spec):
    x, w, ct = OPERANDS
    recipe = Recipe(spec, arithmetic="native")
    stored = qt.quantize(w, qt.spec(spec).along(0), packed=spec != "mxfp8_e4m3")
    product = jax.jit(functools.partial(qt.dot_general, dimension_numbers=MATMUL, recipe=recipe))
    assert len(composites(product.lower(x, stored).as_text())) == 1
    np.testing.assert_array_equal(product(x, stored), product(x, w))
    # In dgrad its blocks lie along an axis that is not summed.
    dx = jax.vjp(lambda x: product(x, stored), x)[1](ct)[0]
    emulated = functools.partial(qt.dot_general, recipe=Recipe(spec), dimension_numbers=MATMUL)
    np.testing.assert_array_equal(dx, jax.vjp(lambda x: emulated(x, stored), x)[1](ct)[0])


def test_a_stored_kernel_in_2d_blocks_is_native_in_dgrad_too():
    x, w, ct = OPERANDS
    operand = recipes.nvfp4.forward[1]
    recipe = Recipe(("nvfp4", operand), dgrad=("nvfp4", operand), wgrad=None, arithmetic="native")
    stored = qt.quantize(w, operand.spec)

    def dx(w):
        return jax.vjp(lambda x: qt.dot_general(x, w, MATMUL, recipe=recipe), x)[1](ct)[0]

    assert len(composites(jax.jit(dx).lower(stored).as_text())) == 1  # y is not needed
    np.testing.assert_array_equal(jax.jit(dx)(stored), jax.jit(dx)(w))


def test_vmap_is_one_product_of_a_batch():
    x, w = normal(3, 4, 40), normal(3, 40, 5, seed=1)
    product = functools.partial(qt.dot_general, dimension_numbers=MATMUL, recipe=native(MXFP8))
    for axes in ((0, 0), (0, None), (None, 0)):
        arguments = [a if axis == 0 else a[0] for a, axis in zip((x, w), axes, strict=True)]
        mapped = jax.jit(jax.vmap(product, axes))
        assert len(composites(mapped.lower(*arguments).as_text())) == 1
        expected = [
            product(x[i] if axes[0] == 0 else x[0], w[i] if axes[1] == 0 else w[0])
            for i in range(3)
        ]
        np.testing.assert_allclose(mapped(*arguments), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [Recipe(), MXFP8], ids=["one scale", "mxfp8"])
def test_second_derivatives_are_those_of_the_emulated_product(recipe):
    """Codes have no derivatives: until scaled products came, native ones lost these terms."""
    x, w = normal(3, 32), normal(32, 2, seed=1)

    def mixed(recipe):
        def loss(x, w):
            return jnp.sum(qt.dot_general(x, w, MATMUL, recipe=recipe) ** 2)

        return jax.jit(jax.jacobian(jax.grad(loss), 1))(x, w)

    expected = mixed(recipe)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(mixed(native(recipe)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_loops_and_rematerialization():
    x, w = normal(8, 64), normal(64, 64, seed=1)

    def loss(recipe, w):
        def step(x, _):
            return jnp.tanh(qt.dot_general(x, w, MATMUL, recipe=recipe)), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, None, length=3)[0])

    got, expected = (
        jax.jit(jax.grad(functools.partial(loss, recipe)))(w) for recipe in (native(MXFP8), MXFP8)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.devices(4)
def test_in_shard_map_results_vary_as_their_operands_do():
    """`scaled_dot` forgets it: a gradient by what all shards share would be that of one shard.

    Oracle: the sum of the gradients of the shards alone.
    """
    x, w, _ = OPERANDS

    def gradient(x, w):
        def loss(w):
            return jnp.sum(jnp.sin(qt.dot_general(x, w, MATMUL, recipe=native(MXFP8))))

        return jax.grad(loss)(w)

    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())
    expected = sum(gradient(shard, w) for shard in jnp.split(x, 4))
    np.testing.assert_allclose(jax.jit(sharded)(x, w), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.devices(2)
@pytest.mark.sample("AxisType.Auto")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    """On Explicit ones they are emulated: `scaled_dot` says nothing of where its result lies."""
    x, w, ct = normal(64, 96), OPERANDS[1], normal(64, 80, seed=2)
    run = jax.jit(three(native(MXFP8)))
    expected = run(x, w, ct)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("d", None))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, rows), w, jax.device_put(ct, rows)
        if kind is AxisType.Explicit:
            sharded = sharded[0], jax.device_put(w, NamedSharding(mesh, P())), sharded[2]
        count = len(composites(run.lower(*sharded).as_text()))
        got = run(*sharded)
    assert count == (3 if kind is AxisType.Auto else 0)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
