"""Native FP8 products: results in the model's dtype, scales as one scalar, codes for GPUs.

Oracle: the emulated product, which `test_recipes.py` compares with NumPy. Where operands are small
integers, products and sums are exact in float32, and the only rounding is that of the result.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refused import refused
from rewritten import quantized

import qtoolkit as qt
from qtoolkit.formats import BlockFormat
from qtoolkit.products import Current, Delayed, Operand, Recipe, Static, recipes
from qtoolkit.scaling.internal import BUCKETS

MATMUL = (((1,), (0,)), ((), ()))
AMAXES = jnp.array([40.0, 1.5, 0.25])


def emulated(recipe):
    return dataclasses.replace(recipe, arithmetic="emulate")


def native(recipe):
    return dataclasses.replace(recipe, arithmetic="native")


def three(recipe, numbers=MATMUL, amaxes=AMAXES):
    """y, dx and dw, and the histograms of a recipe that has a history."""

    def run(x, w, ct):
        def product(x, w, probe):
            multiply = lambda x, w: jax.lax.dot_general(x, w, numbers)  # noqa: E731
            return quantized(recipe, multiply, amaxes, probe, x, w)

        y, back = jax.vjp(product, x, w, jnp.zeros((3, BUCKETS)))
        dx, dw, counts = back(ct)
        return (y, dx, dw, counts) if recipe.is_delayed else (y, dx, dw)

    return run


def integers(*shape, seed=0, dtype=jnp.bfloat16, most=8):
    draw = np.random.default_rng(seed)
    return jnp.asarray(draw.integers(-most, most + 1, shape), dtype)


def operands(dtype, shapes=((40, 64), (64, 48), (40, 48))):
    draw = np.random.default_rng(0)
    scales = 1.0, 2.0**-5, 2.0**-12
    return [
        jnp.asarray(draw.standard_normal(shape) * scale, dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("recipe", [recipes.native_fp8, recipes.native_fp8_current])
def test_with_powers_of_two_the_bits_are_the_emulated_ones(recipe, dtype):
    """Of small integers: sums are exact, so rounding before or after the scale is the same."""
    x, w, ct = (integers(*s, seed=i, dtype=dtype) for i, s in enumerate(((8, 16), (16, 4), (8, 4))))
    ones = jnp.array([8.0, 8.0, 8.0])
    got, expected = (jax.jit(three(r, amaxes=ones))(x, w, ct) for r in (recipe, emulated(recipe)))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.sample("bfloat16-te_current", "float16-token_scaled", "bfloat16-token_scaled")
@pytest.mark.parametrize("name", ["te_current", "te_delayed_hybrid", "token_scaled"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_other_scales_cost_a_rounding_more(name, dtype):
    """The product, the scalar and the result are rounded: three units of the last place."""
    recipe = getattr(recipes, name)
    arrays = operands(dtype)
    got, expected = (jax.jit(three(r))(*arrays) for r in (native(recipe), recipe))
    sizes = jax.jit(three(recipe))(*(jnp.abs(a) for a in arrays))
    unit = float(jnp.finfo(dtype).eps) / 2
    for mine, theirs, size in zip(got[:3], expected[:3], sizes[:3], strict=True):
        assert mine.dtype == theirs.dtype == dtype
        mine, theirs, size = (np.asarray(a, np.float64) for a in (mine, theirs, size))
        tiny = float(jnp.finfo(dtype).smallest_subnormal)
        bound = 4 * unit * np.abs(theirs) + 2.0**-17 * size + tiny
        assert np.all(np.abs(mine - theirs) <= bound)


def test_float16_results_do_not_overflow_before_they_are_scaled():
    x, w = jnp.full((4, 64), 1.0, jnp.float16), jnp.full((64, 4), 1.0, jnp.float16)
    got = qt.dot_general(x, w, MATMUL, recipe=recipes.native_fp8_current)  # 256**2 * 64 in codes
    np.testing.assert_array_equal(got, np.full((4, 4), 64.0))


@pytest.mark.parametrize("recipe", [recipes.native_fp8_current, native(recipes.te_current)])
def test_scales_whose_product_overflows_give_no_wrong_number(recipe):
    """1e30 * 1e30 is no float32, and so is no element of the result; nor is any made up."""
    x, tiny = (jnp.full((2, 8), value, jnp.bfloat16) for value in (1e30, 1e-30))
    assert not np.isfinite(qt.dot_general(x, x.T, MATMUL, recipe=recipe)).any()
    zeros = qt.dot_general(tiny, tiny.T, MATMUL, recipe=recipe)
    np.testing.assert_array_equal(zeros, np.zeros((2, 2)))
    mixed = qt.dot_general(x, tiny.T, MATMUL, recipe=recipe)
    np.testing.assert_allclose(np.asarray(mixed, np.float32), 8.0, rtol=0.2)


# Scales that are powers of two.


@pytest.mark.sample(
    "1.0-emulate", "448.5-native", "3e+38-native", "448.0-emulate", "7.888609052210118e-31-emulate"
)
@pytest.mark.parametrize("arithmetic", ["emulate", "native"])
@pytest.mark.parametrize("amax", [1.0, 448.0, 448.5, 449.0, 57344.0, 2.0**-100, 3e38, 2.0**-130])
def test_a_scale_is_the_least_power_of_two_that_holds_amax(amax, arithmetic):
    """Oracle: a loop over powers. The quotient amax / 448 is rounded, but never to a wrong side."""
    operand = Operand("e4m3fn", scaling=Current(power_of_two=True))
    recipe = Recipe((operand, None), gradient=None, arithmetic=arithmetic)
    x = jnp.asarray([amax, amax / 3], jnp.float32)
    got = np.asarray(qt.einsum("i,ij->j", x, jnp.eye(2), recipe=recipe), np.float64)
    scale = 2.0**-126
    while scale * 448 < float(np.float32(amax)):
        scale *= 2
    q = np.asarray(qt.round_to_format(np.float32(x / np.float32(scale)), "e4m3fn"), np.float64)
    expected = q * scale
    np.testing.assert_array_equal(got, np.where(expected < 2.0**-126, 0, expected))


def test_one_scale_that_is_stored_as_a_power_of_two_is_a_scalar():
    """It was spread over blocks of 32 for `lax.scaled_dot`."""
    spec = dataclasses.replace(
        BlockFormat.tensor("e4m3fn"), scale=qt.format("e8m0fnu"), rule="ceil"
    )
    x, w, ct = (integers(*s, seed=i) for i, s in enumerate(((8, 64), (64, 4), (8, 4))))
    run = jax.jit(three(Recipe(spec, spec, arithmetic="native")))
    assert "scaled_dot" not in run.lower(x, w, ct).as_text()
    for mine, theirs in zip(run(x, w, ct), three(Recipe(spec, spec))(x, w, ct), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    zeros = run(x, jnp.zeros_like(w), ct)
    assert not np.asarray(zeros[0]).any()
    assert np.isfinite(np.asarray(zeros[2], np.float32)).all()


def test_powers_of_two_are_for_one_scale_for_a_tensor():
    scaling = Current(power_of_two=True)
    for spec in ("mxfp8", BlockFormat.token("e4m3fn"), "nvfp4"):
        refused(ValueError, "has no single scale of float32", Operand, spec, scaling=scaling)
    refused(ValueError, r"scale=0\.3 with power_of_two=True", Static, 0.3, power_of_two=True)
    refused(TypeError, "Current: power_of_two=1", Current, power_of_two=1)
    refused(ValueError, r"Delayed: initial=0\.0", Delayed, initial=0.0)
    delayed = Operand("e4m3fn", scaling=Delayed(power_of_two=True))
    assert str(delayed) == "e4m3fn by tensor, delayed, powers of two"
    recipe = Recipe((delayed, delayed), Operand("e5m2", scaling=Delayed()))
    assert recipe.without_state().forward[0].scaling == Current(power_of_two=True)
    frozen = recipe.frozen()
    assert frozen.forward[0].scaling == Static(power_of_two=True)
    assert frozen.is_calibrated
    assert frozen.dgrad[0].scaling == Current()


@pytest.mark.parametrize("arithmetic", ["emulate", "native"])
def test_before_there_is_a_history_the_initial_magnitude_counts(arithmetic):
    """Oracle: static scales. With a history, `initial` does not matter."""
    x, w, ct = operands(jnp.float32)
    recipe = dataclasses.replace(recipes.native_fp8, arithmetic=arithmetic)
    scales = 2.0**-4, 2.0**-8, 2.0**-15  # the powers of two above 16 / 448, 1 / 448, 1 / 57344
    lhs, rhs, cotangent = (
        Operand(spec, scaling=Static(scale))
        for spec, scale in zip(("e4m3fn", "e4m3fn", "e5m2"), scales, strict=True)
    )
    static = Recipe((lhs, rhs), cotangent, arithmetic=arithmetic)
    got = three(recipe, amaxes=jnp.zeros(3))(x, w, ct)[:3]
    for mine, theirs in zip(got, three(static)(x, w, ct), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    scaling = Delayed(power_of_two=True)
    plain = Recipe(*(Operand(spec, scaling=scaling) for spec in ("e4m3fn", "e5m2")))
    plain = dataclasses.replace(plain, arithmetic=arithmetic)
    for mine, theirs in zip(three(recipe)(x, w, ct), three(plain)(x, w, ct), strict=True):
        np.testing.assert_array_equal(mine, theirs)


# Traced for a GPU: codes in two orders of axes. The traced programs run here.


def traced_for_gpu(function, *arguments):
    with jax.default_device("gpu"):
        closed = jax.make_jaxpr(function)(*arguments)
    assert "row_major" in str(closed)
    return jax.jit(jax.extend.core.jaxpr_as_fun(closed))


CONTRACTIONS = {
    "matmul": (MATMUL, ((40, 64), (64, 48), (40, 48))),
    "both last": ((((1,), (1,)), ((), ())), ((40, 64), (48, 64), (40, 48))),
    "three axes": ((((2,), (0,)), ((), ())), ((2, 20, 64), (64, 48), (2, 20, 48))),
    "heads": ((((2,), (0,)), ((), ())), ((2, 20, 64), (64, 4, 12), (2, 20, 4, 12))),
    "heads joined": ((((2, 3), (0, 1)), ((), ())), ((2, 20, 4, 12), (4, 12, 64), (2, 20, 64))),
    "batch": ((((2,), (2,)), ((0,), (0,))), ((3, 20, 16), (3, 24, 16), (3, 20, 24))),
    "attention": ((((3,), (3,)), ((0, 2), (0, 2))), ((2, 9, 3, 16), (2, 7, 3, 16), (2, 3, 9, 7))),
}


@pytest.mark.sample(
    "te_current-matmul", "native_fp8-attention", "te_current-batch", "token_scaled-heads joined"
)
@pytest.mark.parametrize("name", CONTRACTIONS)
@pytest.mark.parametrize(
    "recipe",
    [native(recipes.te_current), recipes.native_fp8, native(recipes.token_scaled)],
    ids=["te_current", "native_fp8", "token_scaled"],
)
def test_a_program_for_gpus_gives_the_same_numbers(recipe, name):
    numbers, shapes = CONTRACTIONS[name]
    arrays = operands(jnp.bfloat16, shapes)
    run = three(recipe, numbers)
    if name == "attention":  # summed over axes that lie apart: XLA transposes
        with jax.default_device("gpu"):
            jaxpr = jax.make_jaxpr(run)(*arrays)
        got = jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(*arrays)
    else:
        got = traced_for_gpu(run, *arrays)(*arrays)
    for mine, theirs in zip(got, jax.jit(run)(*arrays), strict=True):
        mine, theirs = (np.asarray(a, np.float32) for a in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=2.0**-7, atol=2.0**-8 * np.abs(theirs).max())


@pytest.mark.sample("bij,jk->bik")
@pytest.mark.parametrize("subscripts", ["bij,jk->bik", "bij,bkj->bik", "bihj,bkhj->bhik"])
def test_einsum_on_a_gpu(subscripts):
    letters, _ = subscripts.split("->")
    lengths = {"b": 2, "i": 6, "j": 16, "k": 4, "h": 3}
    x, w = (
        integers(*(lengths[letter] for letter in part), seed=i)
        for i, part in enumerate(letters.split(","))
    )

    def run(x, w):
        product = functools.partial(qt.einsum, subscripts, recipe=recipes.native_fp8_current)
        y, back = jax.vjp(product, x, w)
        return y, *back(y)

    with jax.default_device("gpu"):
        closed = jax.make_jaxpr(run)(x, w)
    got = jax.jit(jax.extend.core.jaxpr_as_fun(closed))(x, w)
    assert ("row_major" in str(closed)) == (subscripts != "bihj,bkhj->bhik")
    for mine, theirs in zip(got, jax.jit(run)(x, w), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_in_loops_and_under_vmap_and_remat():
    x, w, _ = operands(jnp.bfloat16, ((3, 40, 64), (64, 64), ()))
    product = functools.partial(
        qt.dot_general, dimension_numbers=MATMUL, recipe=recipes.native_fp8_current
    )

    def loss(w):
        def step(carry, x):
            y = jax.checkpoint(lambda x: product(jnp.tanh(product(x, w)), w))(x)
            return carry + jnp.sum(y.astype(jnp.float32) ** 2), None

        in_loop = jax.lax.scan(step, jnp.float32(0), x)[0]
        return in_loop + jnp.sum(jax.vmap(product, (0, None))(x, w).astype(jnp.float32) ** 2)

    got = traced_for_gpu(jax.value_and_grad(loss), w)(w)
    for mine, theirs in zip(got, jax.jit(jax.value_and_grad(loss))(w), strict=True):
        mine, theirs = (np.asarray(a, np.float32) for a in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=2.0**-6, atol=2.0**-7 * np.abs(theirs).max())


def test_derivatives_keep_one_array_of_codes_of_each_operand():
    x, w, _ = operands(jnp.bfloat16)

    def residuals(x, w):
        return jax.vjp(
            lambda x, w: qt.dot_general(x, w, MATMUL, recipe=recipes.native_fp8_current), x, w
        )[1]

    with jax.default_device("gpu"):
        out = jax.eval_shape(residuals, x, w)
    arrays = [leaf for leaf in jax.tree.leaves(out) if leaf.size > 1]
    assert sorted((a.shape, a.dtype.name) for a in arrays if a.dtype == jnp.uint8) == [
        ((64, 40), "uint8"),  # for wgrad
        ((64, 48), "uint8"),
    ]
