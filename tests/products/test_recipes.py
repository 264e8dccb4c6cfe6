"""Recipes against an oracle that shares no code with qtoolkit: NumPy, ml_dtypes, float64.

Each of the six operands of a layer's three products is cut into blocks, scaled and rounded by
`rounded` below, and multiplied in float64. q * scale is rounded to float32 once for each operand,
and sums of K terms are float32: results are within K + 8 units of 2**-23 of the sum of magnitudes,
while one code rounded in another way is off by 2**-4 of a term. All data are integers of 6 bits
times powers of two, so that Hadamard transforms are exact and ties occur.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refused import refused
from rewritten import quantized

import qtoolkit as qt
from qtoolkit.casts import Projection
from qtoolkit.formats import BlockFormat
from qtoolkit.products import Delayed, Hadamard, Operand, Recipe, Static, recipes
from qtoolkit.scaling import hadamard_transform
from qtoolkit.scaling.internal import BUCKETS

ELEMENTS: dict[str, tuple[Any, float]] = {
    "e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 240.0),
    "e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, 57344.0),
    "e2m1fn": (ml_dtypes.float4_e2m1fn, 6.0),
    "int8": (None, 127.0),
    "int4": (None, 7.0),
}


@dataclasses.dataclass(frozen=True)
class How:
    """What the oracle does to one operand.

    Attributes:
      block: Lengths of a block; None for the whole axis; () for one scale for the tensor.
      at: Its axes where they do not follow from the product.
      others: Length along all other axes.
      rule: "amax", "rceil", "even" or "nvfp4".
      epsilon: The least amax.
      given: The scale, where it does not follow from the array.
      hadamard: The block of the transform.
    """

    element: str
    block: tuple[int | None, ...] = ()
    at: tuple[int, ...] | None = None
    others: int | None = 1
    rule: str = "amax"
    epsilon: float = 0.0
    given: float | None = None
    hadamard: int | None = None


@np.errstate(invalid="ignore")
def element_rounded(u: np.ndarray, element: str) -> np.ndarray:
    target, largest = ELEMENTS[element]
    u = np.clip(np.asarray(u, np.float32), -largest, largest)
    return (np.rint(u) if target is None else u.astype(target)).astype(np.float64)


def block_scale(amax: np.float32, how: How, second: np.float32) -> float:
    """The scale of a block, in float64, by IEEE float32 divisions or exact comparisons."""
    largest = ELEMENTS[how.element][1]
    amax = np.float32(max(amax, np.float32(how.epsilon)))
    if how.rule == "amax":
        return float(amax / np.float32(largest)) if amax else 1.0
    if how.rule == "nvfp4":
        scale = np.float32(np.float32(amax / np.float32(largest)) / second)
        stored = max(scale, np.float32(2.0**-9)).astype(ml_dtypes.float8_e4m3fn)
        return float(np.float32(stored) * second)
    if amax == 0:
        return 2.0**-127
    if how.rule == "rceil":  # the least power of two with which amax does not saturate
        e = -127
        while float(amax) > largest * 2.0**e:
            e += 1
        return 2.0**e
    assert (how.rule, how.element) == ("even", "e2m1fn")
    m, e = math.frexp(float(amax))  # m * 2 in [1, 2) is rounded to one mantissa bit, half up
    e += math.floor(m * 4 + 0.5) >= 4
    return 2.0 ** max(e - 1 - 2, -127)


@functools.cache
def hadamard_matrix(block: int) -> np.ndarray:
    """With signs, which come from the library; without its factor."""
    columns = hadamard_transform(jnp.eye(block), block=block, key=jax.random.key(0))
    signs = np.sign(np.asarray(columns, np.float64))
    np.testing.assert_array_equal(signs @ signs.T, block * np.eye(block))
    return signs


def transformed(x: np.ndarray, block: int, axis: int) -> np.ndarray:
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    y = (x.reshape(*x.shape[:-1], -1, block) @ hadamard_matrix(block)).reshape(x.shape)
    y = y.astype(np.float32) * np.float32(1 / math.sqrt(block))
    return np.moveaxis(y, -1, axis)


def rounded(x: Any, how: How | None, kept: int | None, contracted: int) -> np.ndarray:
    """q * scale of an operand with these axes, float64; transformed where `how` says so."""
    x = np.asarray(x, np.float32)
    if how is None:
        return x.astype(np.float64)
    if how.hadamard is not None:
        x = transformed(x, how.hadamard, contracted)
    at = how.at
    if at is None:
        at = (contracted,) if len(how.block) == 1 or kept is None else (kept, contracted)
    lengths = [n if how.block == () or how.others is None else 1 for n in x.shape]
    for axis, length in zip(at, how.block[-len(at) :], strict=False):
        lengths[axis] = x.shape[axis] if length is None else min(length, x.shape[axis])
    finite = np.abs(x[np.isfinite(x)])
    second = np.float32(finite.max(initial=0) / np.float32(6 * 448)) or np.float32(1)
    out = np.zeros(x.shape)
    for starts in itertools.product(*map(range, [0] * x.ndim, x.shape, lengths)):
        place = tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))
        part = x[place]
        amax = np.abs(part[np.isfinite(part)]).max(initial=np.float32(0))
        scale = how.given or block_scale(amax, how, second)
        u = part / np.float32(scale) if how.rule in ("amax", "nvfp4") else part / scale
        out[place] = element_rounded(u, how.element) * scale
    return out


def tensor(element, **fields):
    return How(element, **fields)


def along(element, length=None, **fields):
    return How(element, (length,), **fields)


MX8, MX4 = along("e4m3fn", 32, rule="rceil"), along("e2m1fn", 32, rule="even")
NV = along("e2m1fn", 16, rule="nvfp4")
NV_2D = How("e2m1fn", (16, 16), rule="nvfp4")
NV_H = dataclasses.replace(NV, hadamard=16)
TILE, SQUARE = (How("e4m3fn", block, epsilon=1e-4) for block in ((1, 128), (128, 128)))
TOKEN, CHANNEL = (How("e4m3fn", (None,), (-1,)), How("e4m3fn", (1,), (-1,), others=None))
E4M3, E5M2 = tensor("e4m3fn"), tensor("e5m2")
AMAXES = (40.0, 100.0, 3.0)  # what delayed recipes know of the steps before; some values saturate
DELAYED = tuple(
    tensor(fmt, given=float(np.float32(amax) / np.float32(ELEMENTS[fmt][1])))
    for fmt, amax in zip(("e4m3fn", "e4m3fn", "e5m2"), AMAXES, strict=True)
)
POWERS = tuple(tensor(fmt, rule="rceil") for fmt in ("e4m3fn", "e4m3fn", "e5m2"))
DELAYED_POWERS = tuple(
    dataclasses.replace(how, given=block_scale(np.float32(amax), how, np.float32(1)))
    for how, amax in zip(POWERS, AMAXES, strict=True)
)


def same(lhs, rhs, ct):
    """The six operands (forward, dgrad, wgrad) where both uses of an array are alike."""
    return lhs, rhs, ct, rhs, lhs, ct


def nearest(recipe):
    """The same recipe with nothing stochastic."""
    pairs = {
        name: tuple(
            operand and dataclasses.replace(operand, projection=Projection())
            for operand in getattr(recipe, name)
        )
        for name in ("forward", "dgrad", "wgrad")
    }
    return dataclasses.replace(recipe, **pairs)


PRESETS = {
    "te_current": same(E4M3, E4M3, E5M2),
    "te_delayed_hybrid": same(*DELAYED),
    "token_scaled": (TOKEN, along("e4m3fn"), TOKEN, *(along("e4m3fn"),) * 3),
    "mxfp8": (MX8,) * 6,
    "native_fp8": same(*DELAYED_POWERS),
    "native_fp8_current": same(*POWERS),
    "nvfp4": (NV, NV_2D, NV, NV_2D, NV_H, NV_H),
    "deepseek_v3": (TILE, SQUARE, TILE, SQUARE, TILE, TILE),
    "fp8_lm": same(*DELAYED),
    "fnuz_amd": same(tensor("e4m3fnuz"), tensor("e4m3fnuz"), tensor("e5m2fnuz")),
    "int8_qat": same(tensor("int8"), along("int8"), None),
    "w4a16": same(None, along("int4", 128), None),
    "weight_only_e4m3": same(None, along("e4m3fn"), None),
}
CASES: dict[str, tuple[Recipe, tuple[How | None, ...]]] = {
    **{name: (nearest(getattr(recipes, name)), slots) for name, slots in PRESETS.items()},
    "mxfp4 by name": (Recipe("mxfp4"), (MX4,) * 6),
    "channel": (Recipe(BlockFormat.channel("e4m3fn"), "e5m2"), same(CHANNEL, CHANNEL, E5M2)),
    "int4_group32, wide wgrad": (
        Recipe(("e4m3fn", "int4_group32"), "int4_group32", wgrad=None),
        (E4M3, along("int4", 32), along("int4", 32), along("int4", 32), None, None),
    ),
    "static": (
        Recipe(Operand("e4m3fn", scaling=Static(0.1)), Operand("e5m2", scaling=Static(1e-3))),
        same(*(tensor("e4m3fn", given=float(np.float32(0.1))),) * 2,
             tensor("e5m2", given=float(np.float32(1e-3)))),
    ),
    "pairs": (
        Recipe((None, "deepseek_128x128"), dgrad=("e5m2", None), wgrad=("mxfp4", "mxfp8")),
        (None, SQUARE, E5M2, None, MX4, MX8),
    ),
    "hadamard 32 forward": (
        Recipe(Operand("nvfp4", transform=Hadamard(32)), None, dgrad=None, wgrad=None),
        (*(dataclasses.replace(NV, hadamard=32),) * 2, None, None, None, None),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layer:
    """A product with its derivatives.

    Attributes:
      shapes: Of lhs and rhs.
      axes: (a kept axis, the contracted axis) of the six operands, in the order of `Recipe`.
      plain: The products of the three pairs in NumPy.
      ours: The library's product, of a recipe.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    axes: tuple[tuple[int, int], ...]
    plain: tuple[Callable[..., Any], ...]
    ours: Callable[..., Any]


def by_einsum(lhs, rhs, out):
    return tuple(
        functools.partial(np.einsum, f"{a},{b}->{c}")
        for a, b, c in ((lhs, rhs, out), (out, rhs, lhs), (lhs, out, rhs))
    )


STRIDE, DILATION, PADDING = 2, 2, (3, 1)


def convolution(a, b, *, side):
    """One of the three products of "NWC", "WIO": a loop over the taps of the kernel."""
    (length, taps), positions = (CONV[0][1], CONV[1][0]), CONV_POSITIONS
    padded = length + sum(PADDING)
    if side == "dgrad":
        full = np.zeros((a.shape[0], padded, b.shape[1]))
        for t in range(taps):
            at = slice(t * DILATION, t * DILATION + STRIDE * positions, STRIDE)
            full[:, at][:, :positions] += np.einsum("npo,io->npi", a, b[t])
        return full[:, PADDING[0] : PADDING[0] + length]
    full = np.pad(a, [(0, 0), PADDING, (0, 0)])
    parts = [
        full[:, t * DILATION : t * DILATION + STRIDE * positions : STRIDE] for t in range(taps)
    ]
    if side == "wgrad":
        return np.stack([np.einsum("npi,npo->io", part, b) for part in parts])
    return sum(np.einsum("npi,io->npo", part, b[t]) for t, part in enumerate(parts))


CONV = (18, 9, 40), (3, 40, 20)
CONV_POSITIONS = (9 + sum(PADDING) - (3 - 1) * DILATION - 1) // STRIDE + 1
GROUPS = np.array([7, 0, 20, 9])


def ragged(a, b, *, side):
    rows = np.split(np.arange(GROUPS.sum()), np.cumsum(GROUPS)[:-1])
    match side:
        case "forward":
            return np.concatenate([a[r] @ b[g] for g, r in enumerate(rows)])
        case "dgrad":
            return np.concatenate([a[r] @ b[g].T for g, r in enumerate(rows)])
    return np.stack([a[r].T @ b[r] for r in rows])


def sides(function):
    return tuple(
        functools.partial(function, side=side) for side in ("forward", "dgrad", "wgrad")
    )  # fmt: skip


MATMUL = (((1,), (0,)), ((), ()))
LAYERS = {
    "dot_general": Layer(
        ((36, 150), (150, 136)),
        ((0, 1), (1, 0), (0, 1), (0, 1), (1, 0), (1, 0)),
        by_einsum("mk", "kn", "mn"),
        functools.partial(qt.dot_general, dimension_numbers=MATMUL),
    ),
    # The last of two contracted axes, as listed: j.
    "dot_general, batched": Layer(
        ((5, 2, 18, 40), (20, 40, 2, 5)),
        ((2, 3), (0, 1), (1, 2), (1, 0), (3, 2), (2, 1)),
        by_einsum("kbmj", "njbk", "bmn"),
        functools.partial(
            qt.dot_general, dimension_numbers=(((0, 3), (3, 1)), ((1,), (2,)))
        ),
    ),
    "einsum": Layer(
        ((2, 3, 40, 18), (40, 20)),
        ((3, 2), (1, 0), (3, 2), (0, 1), (2, 3), (2, 3)),
        by_einsum("abkd", "kn", "abnd"),
        functools.partial(qt.einsum, "...kd,kn->...nd"),
    ),
    # lhs sums i, then j; rhs holds them the other way round, and the result its kept ones.
    "einsum, turned": Layer(
        ((3, 18, 5, 40), (40, 20, 5)),
        ((1, 3), (1, 0), (1, 0), (0, 1), (3, 1), (0, 1)),
        by_einsum("abij", "jci", "cba"),
        functools.partial(qt.einsum, "abij,jci->cba"),
    ),
    "conv": Layer(
        CONV,
        ((0, 2), (2, 1), (0, 2), (1, 2), (2, 0), (2, 0)),
        sides(convolution),
        functools.partial(
            qt.conv_general_dilated,
            window_strides=(STRIDE,),
            padding=[PADDING],
            rhs_dilation=(DILATION,),
            dimension_numbers=("NWC", "WIO", "NWC"),
        ),
    ),
    "ragged_dot": Layer(
        ((36, 40), (4, 40, 20)),
        ((0, 1), (2, 1), (0, 1), (1, 2), (1, 0), (1, 0)),
        sides(ragged),
        functools.partial(qt.ragged_dot, group_sizes=jnp.asarray(GROUPS, jnp.int32)),
    ),
}  # fmt: skip


def draw(*shape, seed=0):
    """Integers of 6 bits times powers of two, zeros and rows of zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-63, 64, shape) * 2.0 ** rng.integers(-5, 4, shape)
    x[rng.random(shape) < 0.05] = 0
    x[(2 % shape[0],)] = 0
    return x.astype(np.float32)


def three(ours, recipe):
    """y, dx and dw of a product by `recipe`, compiled as one program."""
    if recipe.is_delayed:

        def run(x, w, ct):
            def product(x, w, probe):
                return quantized(recipe, jnp.matmul, jnp.array(AMAXES), probe, x, w)

            y, back = jax.vjp(product, x, w, jnp.zeros((3, BUCKETS)))
            return y, *back(ct)[:2]

        return jax.jit(run)

    def run(x, w, ct):
        y, back = jax.vjp(lambda x, w: ours(x, w, recipe=recipe), x, w)
        return y, *back(ct)

    return jax.jit(run)


def operands_of(layer):
    x, w = (draw(*shape, seed=i) for i, shape in enumerate(layer.shapes))
    ct = draw(*layer.plain[0](x.astype(np.float64), w.astype(np.float64)).shape, seed=2)
    return x, w, ct * np.float32(2.0**-10)


def axes_of(slot, slots):
    """With an unquantized cotangent, rhs in dgrad and lhs in wgrad are those of the forward
    product, cut along its axes. Source: arXiv:2103.13630, straight-through estimator.
    """
    if slot == 3 and slots[2] is None and slots[3] == slots[1]:
        return 1
    if slot == 4 and slots[5] is None and slots[4] == slots[0]:
        return 0
    return slot


def assert_three(got, layer, slots, x, w, ct):
    for i, (name, pair) in enumerate(
        {"forward": (x, w), "dgrad": (ct, w), "wgrad": (x, ct)}.items()
    ):
        sides = (2 * i, 2 * i + 1)
        first, second = (
            rounded(a, slots[s], *layer.axes[axes_of(s, slots)])
            for a, s in zip(pair, sides, strict=True)
        )
        expected = layer.plain[i](first, second)
        magnitudes = layer.plain[i](np.abs(first), np.abs(second))
        result = np.asarray(got[i], np.float64)
        assert result.shape == expected.shape == np.shape((got[0], x, w)[i])
        terms = max(*first.shape, *second.shape) + 8
        off = np.abs(result - expected) - terms * 2.0**-23 * magnitudes
        assert off.max() <= 0, f"{name}: off by {off.max()} more than the bound"
        assert np.abs(expected).max() > 0


def test_each_preset_has_an_oracle():
    learned = {"int4_lsq"}  # needs layers, which own its scales: tests/nnx/test_learned_scales.py
    assert set(PRESETS) | learned == set(recipes.__all__) - {"from_json", "to_json"}


@pytest.mark.sample("te_current")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.quick) if name == "mxfp8" else name
             for name in CASES],
)  # fmt: skip
def test_matmul_and_its_gradients_equal_the_oracle(name):
    recipe, slots = CASES[name]
    layer = LAYERS["dot_general"]
    operands = operands_of(layer)
    assert_three(three(layer.ours, recipe)(*operands), layer, slots, *operands)


@pytest.mark.sample("int8_qat", "weight_only_e4m3")
@pytest.mark.quick
@pytest.mark.parametrize("name", ["int8_qat", "w4a16", "weight_only_e4m3"])
def test_an_unquantized_cotangent_multiplies_what_was_computed(name):
    """Oracle: the product itself, of an identity, says what the kernel was rounded to."""
    recipe = getattr(recipes, name)
    x, w, ct = draw(24, 256), draw(256, 48, seed=1), draw(24, 48, seed=2)
    w *= np.exp2(np.arange(256) % 7)[:, None].astype(np.float32)

    def product(x, w):
        return qt.dot_general(x, w, MATMUL, recipe=recipe)

    weights = dataclasses.replace(recipe, forward=(None, recipe.forward[1]), wgrad=(None, None))
    rounded_w = np.asarray(qt.dot_general(jnp.eye(256), w, MATMUL, recipe=weights), np.float64)
    assert (rounded_w != w).any()
    dx, dw = jax.vjp(product, x, w)[1](ct)
    within = 2.0**-18 * (np.abs(ct) @ np.abs(rounded_w.T))  # sums of 48 terms
    assert (np.abs(dx - ct @ rounded_w.T) <= within).all()
    inputs = dataclasses.replace(recipe, forward=(recipe.forward[0], None), dgrad=(None, None))
    rounded_x = np.asarray(qt.dot_general(x, jnp.eye(256), MATMUL, recipe=inputs), np.float64)
    within = 2.0**-18 * (np.abs(rounded_x.T) @ np.abs(ct))
    assert (np.abs(dw - rounded_x.T @ ct) <= within).all()
    stored = qt.quantize(w, recipe.forward[1].spec.along(0))
    of_stored = jax.vjp(lambda x: product(x, stored), x)[1](ct)[0]
    np.testing.assert_array_equal(dx, of_stored)


OF_LAYERS = {
    "dot_general, batched": ("deepseek_v3",),
    "einsum": ("token_scaled", "pairs", "w4a16"),
    "einsum, turned": ("nvfp4",),
    "conv": ("deepseek_v3", "pairs", "w4a16"),
    "ragged_dot": ("nvfp4", "token_scaled"),
}


@pytest.mark.sample("dot_general, batched-deepseek_v3")
@pytest.mark.parametrize(
    ("product", "name"), [(product, name) for product, names in OF_LAYERS.items() for name in names]
)
def test_other_products_and_their_gradients_equal_the_oracle(product, name):
    recipe, slots = CASES[name]
    layer = LAYERS[product]
    if product == "ragged_dot" and name == "nvfp4":  # rows of different groups are not mixed
        slots = (*slots[:4], NV, NV)
    operands = operands_of(layer)
    assert_three(three(layer.ours, recipe)(*operands), layer, slots, *operands)


TRANSFORMED = Operand(BlockFormat(element="float32", scale=None), transform=Hadamard(16))
EXACT = Recipe(TRANSFORMED, TRANSFORMED)


@pytest.mark.sample("bij,jic->bc")
@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("bij,jic->bc", ((4, 3, 16), (16, 3, 5))),  # the last axes of both are not the same one
        ("abk,kn->ban", ((4, 5, 10), (10, 5))),  # nor are those of lhs and the cotangent
        ("k,kn->n", ((10,), (10, 5))),  # no axis is summed in wgrad
        ("i,j->ij", ((10,), (6,))),
        ("ikj,k->i", ((5, 10, 3), (10,))),  # lhs alone sums j
        ("ii,ij->j", ((10, 10), (10, 4))),
        ("ij,ij->", ((4, 10), (4, 10))),
    ],
    ids=["bij,jic->bc", "abk,kn->ban", "k,kn->n", "i,j->ij", "ikj,k->i", "ii,ij->j", "ij,ij->"],
)
def test_a_transform_of_both_operands_cancels(subscripts, shapes):
    """Nothing is rounded. Oracle: NumPy's einsum in float64."""
    x, w = (draw(*shape, seed=i).astype(np.float64) for i, shape in enumerate(shapes))
    ct = draw(*np.einsum(subscripts, x, w).shape or (1,), seed=2).reshape(
        np.einsum(subscripts, x, w).shape
    )
    got = three(functools.partial(qt.einsum, subscripts), EXACT)(
        *(np.float32(x), np.float32(w), ct)
    )
    plain = functools.partial(jnp.einsum, subscripts, precision="highest")
    _, back = jax.vjp(plain, jnp.float32(x), jnp.float32(w))
    expected = (np.einsum(subscripts, x, w), *back(jnp.asarray(ct)))
    for ours, exact in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.sample("feature_group_count")
@pytest.mark.parametrize(
    "options", [{"feature_group_count": 2}, {"batch_group_count": 2}], ids=lambda o: next(iter(o))
)
def test_convolutions_with_groups_are_not_transformed(options):
    x, w = draw(4, 7, 8), draw(3, 8 // options.get("feature_group_count", 1), 6, seed=1)
    options |= {"dimension_numbers": ("NWC", "WIO", "NWC")}

    def ours(x, w, recipe):
        return qt.conv_general_dilated(x, w, (1,), "SAME", recipe=recipe, **options)

    y, back = jax.vjp(
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "SAME", **options), x, w
    )
    ct = draw(*y.shape, seed=2)
    for got, expected in zip(three(ours, EXACT)(x, w, ct), (y, *back(ct)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.quick
def test_each_operand_alone_changes_the_product_that_it_is_for():
    """Oracle: the plain products, bit for bit, where nothing is rounded."""
    layer = dataclasses.replace(LAYERS["dot_general"], shapes=((6, 20), (20, 5)))
    operands = operands_of(layer)
    plain = three(lambda x, w, recipe: jax.lax.dot_general(x, w, MATMUL), Recipe())(*operands)
    for slot in range(6):
        flags = [Operand("e4m3fn") if i == slot else None for i in range(6)]
        recipe = Recipe(tuple(flags[:2]), dgrad=tuple(flags[2:4]), wgrad=tuple(flags[4:]))
        got = three(layer.ours, recipe)(*operands)
        slots = tuple(E4M3 if i == slot else None for i in range(6))
        assert_three(got, layer, slots, *operands)
        for i, (ours, exact) in enumerate(zip(got, plain, strict=True)):
            assert np.array_equal(ours, exact) == (i != slot // 2), (slot, i)


# Stochastic rounding of cotangents. The kernel is the identity, so that dx is what they became.

STOCHASTIC = {
    "nvfp4": (NV, np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])),
    "e5m2": (E5M2, np.arange(0x7C, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)),
}


def rounded_cotangents(spec):
    operand = Operand(spec, Projection("stochastic"))
    recipe = Recipe(None, None, dgrad=(operand, None), wgrad=None)

    def run(ct, key):
        eye = jnp.eye(ct.shape[1])
        _, back = jax.vjp(lambda x: qt.dot_general(x, eye, MATMUL, recipe=recipe, key=key), ct)
        return back(ct)[0]

    return run


@pytest.mark.sample("nvfp4")
@pytest.mark.parametrize("spec", STOCHASTIC)
def test_stochastic_cotangents_are_neighbours_and_unbiased(spec):
    """Oracle: the grid of the format by hand; means over 1,000 keys within 4 standard errors."""
    how, grid = STOCHASTIC[spec]
    ct = np.random.default_rng(7).normal(size=(3, 40)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), 1000)
    run = rounded_cotangents(spec)
    drawn = np.asarray(jax.jit(jax.vmap(run, (None, 0)))(ct, keys), np.float64)
    lengths = 16 if how.block else 40
    scale = np.ones((3, 40))
    second = np.abs(ct).max() / np.float32(6 * 448)
    for start in range(0, 40, lengths):
        for row in range(3):
            part = np.abs(ct[row, start : start + lengths]).max() if how.block else np.abs(ct).max()
            scale[row, start : start + lengths] = block_scale(part, how, second)
    u = np.minimum(np.abs(ct / np.float32(scale)).astype(np.float64), grid[-1])
    above = np.minimum(np.searchsorted(grid, u, side="right"), len(grid) - 1)
    below = np.maximum(np.searchsorted(grid, u, side="right") - 1, 0)
    low, high = (np.sign(ct) * grid[i] * scale for i in (below, above))
    assert (np.isclose(drawn, low, rtol=1e-6) | np.isclose(drawn, high, rtol=1e-6)).all()
    gap = grid[above] - grid[below]
    chance = np.where(gap > 0, (u - grid[below]) / np.where(gap > 0, gap, 1), 0)
    error = np.sqrt(chance * (1 - chance) / len(keys)) * gap * scale
    wanted = np.sign(ct) * u * scale
    assert (np.abs(drawn.mean(0) - wanted) <= 4 * error + 1e-6 * np.abs(wanted)).all()
    assert (drawn.std(0) > 0).mean() > 0.8


def test_draws_differ_for_other_values_and_keys():
    run = jax.jit(rounded_cotangents("e5m2"))
    ct = np.random.default_rng(7).normal(size=(8, 40)).astype(np.float32)
    key = jax.random.key(0)
    first = np.asarray(run(ct, key))
    np.testing.assert_array_equal(run(ct, key), first)
    np.testing.assert_array_equal(run(ct, jax.random.key_data(key)), first)
    other = ct.copy()
    other[3, 5] = np.nextafter(other[3, 5], np.float32(9))  # one last bit of one value
    assert np.abs(ct).max() == np.abs(other).max()
    assert np.mean(np.asarray(run(other, key)) != first) > 0.2
    assert np.mean(np.asarray(run(ct, jax.random.key(1))) != first) > 0.2


# What is not finite.

POISONED = {
    "mxfp8": recipes.mxfp8,
    "nvfp4": recipes.nvfp4,
    "token": recipes.token_scaled,
    "deepseek": recipes.deepseek_v3,
    "int8": Recipe(("int8", BlockFormat(element="int8", block=(None,))), "int8"),
    "delayed": recipes.fp8_lm,
    **{
        f"native {spec}": Recipe(spec, arithmetic="native")
        for spec in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4")
    },
    **{
        f"native {name}": dataclasses.replace(getattr(recipes, name), arithmetic="native")
        for name in ("nvfp4", "te_current", "token_scaled")
    },
    "native_fp8": recipes.native_fp8,
    "native_fp8_current": recipes.native_fp8_current,
}


@pytest.mark.sample("mxfp8", "native_fp8_current")
@pytest.mark.parametrize("name", POISONED)
def test_results_are_finite_where_the_plain_ones_are(name):
    """Oracle: the plain product, of one bad value in each operand, also in a block of zeros."""
    rng = np.random.default_rng(0)
    shapes = {"x": (20, 40), "w": (40, 24), "ct": (20, 24)}
    good = {key: rng.uniform(1, 2, shape).astype(np.float32) for key, shape in shapes.items()}
    run = three(LAYERS["dot_general"].ours, POISONED[name])
    plain = three(lambda x, w, recipe: jax.lax.dot_general(x, w, MATMUL), Recipe())
    for key in shapes:
        for bad, zeros in itertools.product((np.inf, -np.inf, np.nan), (False, True)):
            operands = {k: value.copy() for k, value in good.items()}
            if zeros:
                operands[key][16:] = 0
                operands[key][:, 16:] = 0
            operands[key][17, 18] = bad
            expected = [np.isfinite(out) for out in plain(**operands)]
            assert sum(finite.all() for finite in expected) == 1
            for got, finite in zip(run(**operands), expected, strict=True):
                np.testing.assert_array_equal(np.isfinite(got), finite, f"{key} {bad} {zeros}")


# Arithmetic "native".

NATIVE = Recipe(arithmetic="native")
F8 = r"tensor<[0-9x]+xf8E\w+>"


@pytest.mark.sample("dot_general")
@pytest.mark.parametrize("product", ["dot_general", "einsum", "conv", "ragged_dot"])
def test_native_equals_emulated(product):
    """Products of 8-bit floats are exact in float32: only the order of sums may differ."""
    layer = LAYERS[product]
    operands = operands_of(layer)
    got = three(layer.ours, Recipe(("e4m3fn", "e5m2"), arithmetic="native"))(*operands)
    assert_three(got, layer, same(E4M3, E5M2, E5M2), *operands)


IN_BLOCKS = {
    "mxfp8": CASES["mxfp8"],
    "mxfp8_e5m2 for cotangents": (
        Recipe("mxfp8_e4m3", "mxfp8_e5m2"),
        same(MX8, MX8, along("e5m2", 32, rule="rceil")),
    ),
    "mxfp4": CASES["mxfp4 by name"],
    "nvfp4": CASES["nvfp4"],  # with 2-D blocks of weights, a Hadamard transform in wgrad
}


@pytest.mark.sample("mxfp8-dot_general", "mxfp4-dot_general, batched")
@pytest.mark.parametrize("product", ["dot_general", "dot_general, batched"])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_native_products_of_blocks_equal_the_oracle(name, product):
    """Of lengths that are no multiples of a block; batched: sums over two axes."""
    recipe, slots = IN_BLOCKS[name]
    layer = LAYERS[product]
    operands = operands_of(layer)
    run = three(layer.ours, dataclasses.replace(recipe, arithmetic="native"))
    assert run.lower(*operands).as_text().count('stablehlo.composite "xla.scaled_dot"') == 3
    assert_three(run(*operands), layer, slots, *operands)


def lowered(recipe, platform):
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, 48), (48, 16), (32, 16))]
    run = three(LAYERS["dot_general"].ours, recipe)
    return jax.export.export(run, platforms=[platform])(*structs).mlir_module()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_native_products_are_given_arrays_of_8_bit_floats(platform):
    text = lowered(NATIVE, platform)
    products = re.findall(r"stablehlo.dot_general %\d+, %\d+.*: \((\S+), (\S+)\) ->", text)
    assert len(products) == 3
    found = [sorted(re.search(r"f8E\w+", kind)[0] for kind in kinds) for kinds in products]
    assert sorted(found) == [["f8E4M3FN"] * 2, *[["f8E4M3FN", "f8E5M2"]] * 2]


@pytest.mark.sample("int8")
@pytest.mark.parametrize("spec", ["int8", "mxint8", "e2m1fn", "bfloat16"])
def test_what_cannot_be_native_is_emulated(spec):
    native = Recipe(spec, spec, arithmetic="native")
    text = lowered(native, "cpu")
    assert not re.search(rf"stablehlo.dot_general.*{F8}", text)
    assert "scaled_dot" not in text
    x, w, _ = operands_of(LAYERS["dot_general"])
    native, emulated = (
        qt.dot_general(x, w, MATMUL, recipe=recipe) for recipe in (native, Recipe(spec, spec))
    )
    np.testing.assert_array_equal(native, emulated)


# Messages.


def test_errors_say_what_to_write():
    x = jnp.ones((4, 4))
    product = functools.partial(qt.dot_general, x, x, MATMUL)
    for wrong in ("e4m3fn", qt.format("e4m3fn"), np.dtype(ml_dtypes.float8_e4m3fn)):
        hint = (
            re.escape("expected a Recipe; write qtoolkit.Recipe('e4m3fn')")
            if not isinstance(wrong, np.dtype)
            else "write qtoolkit.Recipe"
        )
        refused(TypeError, hint, product, recipe=wrong)
    with refused(TypeError, re.escape("write qtoolkit.Recipe('mxfp8_e4m3')")):
        product(recipe=qt.spec("mxfp8_e4m3"))
    refused(TypeError, r"recipe is None, which means not quantized", product, recipe=None)
    refused(ValueError, r"Delayed scaling, .*qtoolkit\.nnx\.wrap", product, recipe=recipes.fp8_lm)
    hadamard = Operand("nvfp4", transform=Hadamard())
    with refused(ValueError, r"wgrad transforms its operands by .*the same for both"):
        Recipe("nvfp4", wgrad=(hadamard, "nvfp4"))
    refused(ValueError, "forward transforms its operands", Recipe, (hadamard, None))
    refused(ValueError, "forward has 3 operands", Recipe, ("e4m3fn",) * 3)
    refused(ValueError, "dgrad has 1 operands", Recipe, dgrad=("e4m3fn",))
    refused(ValueError, r"Recipe: forward: .*'fp9'", Recipe, "fp9")
    refused(ValueError, "arithmetic='int'", Recipe, arithmetic="int")
    refused(TypeError, r"axis_names='data'", Recipe, axis_names="data")


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, 5000, None])
def test_delayed_scaling_refuses(wrong):
    with refused(ValueError, re.escape(f"Delayed: history={wrong!r}, expected an int")):
        Delayed(history=wrong)


@pytest.mark.parametrize("wrong", [-1, 65, 1.0, False])
def test_margins_refuse(wrong):
    """2.0**1024 is no float; 2**65 times an amax above 2**63 is none that float32 holds."""
    with refused(ValueError, re.escape(f"Delayed: margin={wrong!r}, expected an int")):
        Delayed(margin=wrong)


@pytest.mark.parametrize("wrong", [0, 0.0, -1.0, math.inf, math.nan, 1e-40, True, "1"])
def test_static_scaling_refuses(wrong):
    refused(ValueError, re.escape(f"Static: scale={wrong!r}, expected a number"), Static, wrong)


@pytest.mark.parametrize("wrong", [0, 1, 12, -16, 16.0, True])
def test_hadamard_refuses(wrong):
    refused(ValueError, re.escape(f"Hadamard: block={wrong!r}, expected a power"), Hadamard, wrong)


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4", "int4_group32", "bfloat16", "nf4"])
@pytest.mark.parametrize("scaling", [Static(1.0), Delayed()])
def test_delayed_and_static_scaling_need_one_scale(spec, scaling):
    with pytest.raises(ValueError, match="has no single scale of float32 for the tensor") as caught:
        Operand(spec, scaling=scaling)
    _, example, _ = str(caught.value).rsplit("'", 2)
    Operand(example, scaling=scaling)  # what the message says to write is taken


def test_operands_refuse_arguments_of_other_kinds():
    for name, value in (("projection", "stochastic"), ("scaling", "delayed"), ("transform", 16)):
        refused(TypeError, f"Operand: {name} has type", Operand, "e4m3fn", **{name: value})


@pytest.mark.sample("two axes summed")
@pytest.mark.parametrize(
    "numbers",
    [
        (((1, 3), (2, 0)), ((), ())),
        (((3,), (2,)), ((0, 2), (3, 1))),
        (((3, 0), (0, 1)), ((2,), (3,))),
    ],
    ids=["two axes summed", "two batch axes", "both"],
)
def test_native_derivatives_of_any_dimension_numbers(numbers):
    """Oracle: the emulated ones, by `jax.linear_transpose`; sums differ by their order."""
    sizes = {(1, 3): ((2, 3, 4, 5), (5, 6, 3)), (3,): ((2, 3, 4, 5), (6, 4, 5, 2))}
    shapes = sizes.get(numbers[0][0], ((2, 3, 4, 5), (5, 2, 7, 4)))
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]

    def gradients(recipe):
        return jax.grad(
            lambda x, w: jnp.sum(jnp.sin(qt.dot_general(x, w, numbers, recipe=recipe))), (0, 1)
        )(*operands)

    for native, emulated in zip(gradients(NATIVE), gradients(Recipe()), strict=True):
        np.testing.assert_allclose(native, emulated, rtol=1e-4, atol=1e-4)


@pytest.mark.sample("mxfp8-einsum")
@pytest.mark.parametrize("product", ["einsum", "dot_general"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "deepseek_v3"])
def test_blocks_do_not_lie_along_an_axis_of_length_1(name, product):
    """Flax's attention has one, of heads that share a key. Oracle: the product without it.

    Along it each element was a block by itself, and the matmul could not be native.
    """
    recipe = getattr(recipes, name)
    q, k, ct = draw(2, 20, 3, 40), draw(2, 24, 3, 40, seed=1), draw(2, 3, 20, 24, seed=2)

    def run(labels):
        kept = labels.replace("b", "").replace("h", "").replace("d", "")  # q, or q and g
        if product == "einsum":
            function = functools.partial(qt.einsum, f"{labels},bkhd->bh{kept}k")
        else:
            b, h, d = map(labels.index, "bhd")
            numbers = (((d,), (3,)), ((b, h), (0, 2)))
            function = functools.partial(qt.dot_general, dimension_numbers=numbers)
        shape, of_result = q.shape, ct.shape
        if "g" in labels:
            shape = np.expand_dims(q, labels.index("g")).shape
            of_result = np.expand_dims(ct, 2 + kept.index("g")).shape
        y, back = jax.vjp(lambda q, k: function(q, k, recipe=recipe), q.reshape(shape), k)
        return [x.reshape(-1) for x in (y, *back(ct.reshape(of_result)))]

    expected = run("bqhd")
    for labels in ("bgqhd", "bqghd", "bqhgd", "bqhdg"):
        for mine, wanted in zip(run(labels), expected, strict=True):
            atol = 1e-5 * np.abs(wanted).max()  # XLA may sum in another order
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=atol)


def test_the_format_of_gradients_that_are_not_given():
    e5m2 = Operand(BlockFormat.tensor("e5m2"))
    for forward in ("e4m3fn", (None, "int4_group128"), ("mxfp8", "e4m3fn")):
        assert Recipe(forward).dgrad[0] == Recipe(forward).wgrad[1] == e5m2
    assert Recipe("mxfp8").dgrad[0] == Operand("mxfp8_e4m3")


def test_histories_of_one_length():
    """Layers keep one history for lhs, whichever product takes it."""
    with refused(ValueError, "histories of 1 and 8 steps"):
        Recipe(Operand("e4m3fn", scaling=Delayed(1)), Operand("e5m2", scaling=Delayed(8)))


@pytest.mark.quick
def test_keys_of_products():
    """Any key of jax.random, of which two words are enough; anything else is refused by name."""
    down = qt.casts.Projection("stochastic")
    recipe = qt.Recipe(qt.Operand("e4m3fn", down), None)
    x, eye = jnp.linspace(0.1, 1, 400).reshape(20, 20), jnp.eye(20)

    def product(key):
        return np.asarray(qt.einsum("ij,jk->ik", x, eye, recipe=recipe, key=key))

    for make in (jax.random.key, lambda seed: jax.random.key(seed, impl="rbg"), jax.random.PRNGKey):
        np.testing.assert_array_equal(product(make(0)), product(make(0)))
        assert (product(make(0)) != product(make(1))).any()
    refused(TypeError, r"key has type int", product, 5)
    with refused(ValueError, r"einsum: key holds 2 keys of shape \(2,\)"):
        product(jax.random.split(jax.random.key(0)))


@pytest.mark.quick
@pytest.mark.parametrize("given", ["uint8", "uint4", "e8m0fnu"])
def test_one_format_without_negative_numbers_is_refused(given):
    """A kernel's negative numbers would all become 0. In a pair somebody has thought of them."""
    refused(ValueError, rf"forward is {given} .*no negative numbers.*'int8'", Recipe, given)
    pair = Recipe(("uint8", "int8"), gradient=None)
    x = jnp.asarray([[0.0, 3.0]])
    w = jnp.asarray([[1.0], [-1.0]])
    assert qt.einsum("ij,jk->ik", x, w, recipe=pair).item() == -3
