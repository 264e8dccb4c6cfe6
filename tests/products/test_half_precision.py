"""Products of 16-bit models multiply 16-bit operands, forward and backward, and sum in float32."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qtoolkit as qt

# Their operands, q or q times a scale, are numbers of bfloat16. All other scales are float32.
NARROW = ("te_current", "mxfp8", "nvfp4", "fnuz_amd")
FUNCTIONS = {
    "dot_general": lambda x, w, recipe: qt.dot_general(
        x, w, (((1,), (0,)), ((), ())), recipe=recipe
    ),
    "einsum": lambda x, w, recipe: qt.einsum("bi,io->bo", x, w, recipe=recipe),
}


def arrays(dtype):
    rng = np.random.default_rng(0)
    shapes = ((32, 64), (64, 48), (32, 48))
    return [jnp.asarray(rng.normal(size=shape) * 2.0**-5, dtype) for shape in shapes]


def operand_dtypes(jaxpr):
    """The dtypes of the operands of every matmul in a jaxpr, and in the jaxprs inside of it."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive is jax.lax.dot_general_p:
            assert equation.outvars[0].aval.dtype == jnp.float32
            found |= {variable.aval.dtype.name for variable in equation.invars}
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            found |= operand_dtypes(inner) if hasattr(inner, "eqns") else set()
    return found


def test_matmuls_of_bfloat16_models_multiply_bfloat16(monkeypatch):
    """On GPUs and TPUs; this is traced as there, and not run. CPUs multiply float32."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    x, w, g = arrays(jnp.bfloat16)
    found = {}
    for name, (kind, function) in itertools.product(NARROW, FUNCTIONS.items()):
        product = functools.partial(function, recipe=getattr(qt.recipes, name))
        step = jax.make_jaxpr(lambda x, w, g, f=product: jax.vjp(f, x, w)[1](g))
        found[name, kind] = operand_dtypes(step(x, w, g))
    jax.clear_caches()
    assert {case: dtypes for case, dtypes in found.items() if dtypes != {"bfloat16"}} == {}


@pytest.mark.parametrize("name", ["te_current", "mxfp8"])
@pytest.mark.parametrize(
    ("subscripts", "lhs", "rhs"),
    [
        ("btd,df->btf", (2, 4, 32), (32, 64)),  # the transposed product of the kernel's gradient
        ("btd,fd->btf", (2, 4, 32), (64, 32)),
        ("bhqk,bnhk->bhqn", (2, 2, 4, 4), (2, 16, 2, 4)),
        ("bhqk,bkhd->bqhd", (2, 2, 4, 4), (2, 4, 2, 16)),
    ],
)
def test_products_of_bfloat16_in_any_order_of_axes_run(name, subscripts, lhs, rhs):
    """By NumPy in float64, for -1, 0 and 1, which every format with a scale holds.

    XLA for CPUs fails to run some of them with bfloat16 operands and float32 sums, where the CPU
    has AVX512-BF16.
    """
    rng = np.random.default_rng(0)
    a, b = inputs = [rng.integers(-1, 2, shape).astype(np.float64) for shape in (lhs, rhs)]
    labels, out = subscripts.split("->")
    first, second = labels.split(",")
    g = rng.integers(-1, 2, np.einsum(subscripts, a, b).shape).astype(np.float64)
    expected = (
        np.einsum(subscripts, a, b),
        np.einsum(f"{out},{second}->{first}", g, b),
        np.einsum(f"{first},{out}->{second}", a, g),
    )

    @jax.jit
    def step(a, b, g):
        recipe = getattr(qt.recipes, name)
        # Parameters are float32 and read transposed, as Flax and models with tied embeddings do.
        narrow = [x.T.astype(jnp.bfloat16).T for x in (a, b)]
        y, pull = jax.vjp(lambda a, b: qt.einsum(subscripts, a, b, recipe=recipe), *narrow)
        return y, *(x.astype(jnp.float32) for x in pull(g.astype(y.dtype)))

    found = step(*(jnp.asarray(x, jnp.float32) for x in (*inputs, g)))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float64(got), want, rtol=2**-8, atol=1e-6)


@pytest.mark.sample(
    *("te_current-dot_general-bfloat16", "mxfp8-einsum-float16", "nvfp4-dot_general-bfloat16"),
    *("fnuz_amd-einsum-float16", "deepseek_v3-einsum-bfloat16"),
    *("weight_only_e4m3-dot_general-float16",),
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", [*NARROW, "deepseek_v3", "weight_only_e4m3"])
def test_gradients_are_those_of_float32_operands(name, function, dtype):
    """By the same product of the same numbers in float32: sums in another order, one rounding."""
    recipe = getattr(qt.recipes, name)
    if name == "nvfp4":  # without its random bits, which depend on the numbers' dtype
        recipe = qt.Recipe(("nvfp4", "nvfp4"))

    def gradients(x, w, g):
        return jax.vjp(lambda x, w: FUNCTIONS[function](x, w, recipe), x, w)[1](g)

    narrow = arrays(dtype)
    wide = [x.astype(jnp.float32) for x in narrow]
    for got, expected in zip(jax.jit(gradients)(*narrow), jax.jit(gradients)(*wide), strict=True):
        assert got.dtype == dtype
        info = jnp.finfo(dtype)
        bound = float(info.eps) * np.abs(expected) + float(info.smallest_subnormal)
        bound += 1e-6 * np.abs(expected).max()
        assert (np.abs(np.float32(got) - np.asarray(expected)) <= bound).all()
