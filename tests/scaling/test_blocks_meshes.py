"""Block formats on Auto and Explicit meshes of eight devices: the bits of one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from refused import refused

import qtoolkit as qt

pytestmark = pytest.mark.devices(8)

KEY = jax.random.key(0)
UINT4 = qt.BlockFormat(element="uint4", block=(32,), zero_point=True)
TILES = qt.BlockFormat(element="e4m3fn", block=(2, 32))
TOKENS = qt.BlockFormat.token("int8")
# Rows, the blocked axis, both, and one axis over the whole mesh.
ROWS, BLOCKS, BOTH, WHOLE = P("a", None), P(None, "b"), P("a", "b"), P(None, ("a", "b"))
PLACES = {
    "mxfp8_e4m3": [BOTH],
    "nvfp4": [WHOLE],
    "int4_group32": [ROWS, BLOCKS, BOTH],
    UINT4: [BLOCKS],
    TILES: [ROWS, BOTH],
    TOKENS: [ROWS, BOTH],  # blocks that are a whole axis, sharded or not
    "int8": [BOTH],
}

every_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def _mesh(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)


@functools.cache
def _host():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 256)) * np.exp2(rng.integers(-9, 9, (16, 8)).repeat(32, 1))
    x = x.astype(np.float32)
    x[0, :4] = [np.inf, -0.0, 0.0, -np.inf]
    x[1, 100], x[2, 200] = np.nan, np.nan
    x[3, :64] = 0
    x[4, 64:96] *= np.float32(2.0**-140)
    return x


@functools.partial(jax.jit, static_argnums=1)
def _run(x, spec):
    q = qt.quantize(x, spec)
    return q, q.dequantize(), qt.fake_quantize(x, spec)


@functools.cache
def _expected(spec):
    return _run(jnp.asarray(_host()), spec)


def _assert_same_bits(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(*(x.view(f"uint{8 * x.itemsize}") for x in (a, b)))


@pytest.mark.sample("mxfp8_e4m3-P('a', 'b')-AxisType.Auto")
@every_kind
@pytest.mark.parametrize(
    ("spec", "place"),
    [(spec, place) for spec, places in PLACES.items() for place in places],
    ids=str,
)
def test_eight_devices_give_what_one_gives(spec, place, kind):
    mesh = _mesh(kind)
    where = NamedSharding(mesh, place)
    with jax.set_mesh(mesh):
        got = _run(jax.device_put(_host(), where), spec)
    _assert_same_bits(got, _expected(spec))
    q, y, fake = got
    for leaf in (q.codes, y, fake):
        assert leaf.sharding.is_equivalent_to(where, 2), leaf.sharding


@pytest.mark.sample("AxisType.Auto")
@every_kind
def test_eager_calls_packed_codes_random_bits_and_derivatives(kind):
    """Codes are packed where shards hold whole bytes."""
    mesh, host = _mesh(kind), _host()
    where = NamedSharding(mesh, BOTH)

    def slope(x):
        return jax.grad(lambda x: jnp.sum(qt.fake_quantize(x, TILES)))(x)

    with jax.set_mesh(mesh):
        x = jax.device_put(host, where)
        q = qt.quantize(x, "int4_group32")
        assert q.codes.sharding.is_equivalent_to(where, 2)
        _, dequantized, fake = _expected("int4_group32")
        _assert_same_bits(q.dequantize(), dequantized)
        _assert_same_bits(qt.fake_quantize(x, "int4_group32"), fake)
        packed = qt.quantize(x, "int4_group32", packed=True)
        random = qt.quantize(x, "int4_group32", rounding="stochastic", key=KEY)
        slopes = jax.jit(slope)(x)
        assert slopes.sharding.is_equivalent_to(where, 2)
    one = qt.quantize(host, "int4_group32", packed=True)
    _assert_same_bits(packed.codes, one.codes)
    one = qt.quantize(host, "int4_group32", rounding="stochastic", key=KEY)
    _assert_same_bits(random.codes, one.codes)
    _assert_same_bits(slopes, slope(jnp.asarray(host)))


CROSSING = [((16, 264), BOTH, "int4_group32"), ((16, 64), WHOLE, "nvfp4")]


def _crossing(mesh, shape, place):
    """Where blocks cross shards: the array here, and on the mesh."""
    host = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    return host, jax.device_put(host, NamedSharding(mesh, place))


@pytest.mark.sample("shape0-place0-int4_group32")
@pytest.mark.parametrize(("shape", "place", "spec"), CROSSING)
def test_blocks_that_cross_shards_are_moved_on_auto_meshes(shape, place, spec):
    mesh = _mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        host, x = _crossing(mesh, shape, place)
        got = qt.quantize(x, spec).dequantize(), qt.fake_quantize(x, spec)
    expected = qt.fake_quantize(host, spec)
    _assert_same_bits(got, (expected, expected))


@pytest.mark.parametrize(("shape", "place", "spec"), CROSSING)
@pytest.mark.parametrize("function", [qt.quantize, qt.fake_quantize])
def test_blocks_that_cross_shards_raise_on_explicit_meshes(function, shape, place, spec):
    mesh = _mesh(AxisType.Explicit)
    message = rf"axis 1 has {shape[1]} elements in.*expected whole blocks of.*keep the axis whole"
    with jax.set_mesh(mesh):
        _, x = _crossing(mesh, shape, place)
        for call in (function, jax.jit(function, static_argnums=1)):
            refused(ValueError, message, call, x, spec)


ADVICE = re.compile(r"to axis (\d): .*\.reshard\(x, (P\(.*\))\); or make the axis (\d+) long")


@pytest.mark.parametrize(
    ("shape", "place", "spec", "to"),
    [
        ((256, 592), P(None, ("a", "b")), "mxfp8_e4m3", P(("a", "b"), None)),
        ((256, 560), P("b", "a"), "mxfp4", P(("b", "a"), None)),
        ((8, 64, 592), P(None, None, "b"), "mxfp8_e4m3", P(None, "b", None)),
    ],
)
def test_the_advice_for_blocks_that_cross_shards_works(shape, place, spec, to):
    """The line that the error gives, carried out; oracle: one device."""
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        host, x = _crossing(mesh, shape, place)
        with pytest.raises(ValueError, match=ADVICE) as caught:
            qt.fake_quantize(x, spec)
        axis, line, longer = ADVICE.search(str(caught.value)).groups()
        assert eval(line, {"P": P}) == to
        assert to[int(axis)] is not None
        got = qt.fake_quantize(jax.sharding.reshard(x, to), spec)
    _assert_same_bits(got, qt.fake_quantize(host, spec))
    padded = np.pad(host, [(0, 0)] * (host.ndim - 1) + [(0, int(longer) - shape[-1])])
    with jax.set_mesh(mesh):
        wide = qt.fake_quantize(jax.device_put(padded, NamedSharding(mesh, place)), spec)
    _assert_same_bits(np.asarray(wide)[..., : shape[-1]], qt.fake_quantize(host, spec))


@every_kind
def test_a_vocabulary_whose_shards_hold_no_whole_blocks(kind):
    """592 columns in eight shards of 74, as 151,936 in shards of 18,992: blocks of 32 are torn."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 256), (256, 592)))

    def gradients(x, w):
        def loss(x, w):
            y = qt.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=qt.recipes.mxfp8)
            return (y * y).mean()

        return jax.grad(loss, (0, 1))(x, w)

    expected = gradients(jnp.asarray(x), jnp.asarray(w))
    mesh = _mesh(kind)
    with jax.set_mesh(mesh):
        kernel = jax.device_put(w, NamedSharding(mesh, P(None, ("a", "b"))))
        if kind is AxisType.Explicit:
            with refused(ValueError, r"^dot_general: .* move 'a' and 'b' to axis 0: x"):
                jax.jit(gradients)(x, kernel)
            kernel = jax.sharding.reshard(kernel, P(("a", "b"), None))
        got = jax.jit(gradients)(x, kernel)
    for one, other in zip(got, expected, strict=True):  # sums in another order
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.quick
def test_hadamard_across_shards_raises_on_explicit_meshes():
    """It was JAX's error of a reshape. NVFP4 transforms both operands of wgrad along the rows."""
    mesh, numbers = _mesh(AxisType.Explicit), (((1,), (0,)), ((), ()))
    message = r"hadamard_transform: axis \d has 16 elements in 4 shards.*whole blocks of 16 in each"
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((8, 64), np.float32), NamedSharding(mesh, P("a", None)))

        def loss(w, recipe):
            return qt.dot_general(x, w, numbers, recipe=recipe, key=KEY).sum()

        for gradient in (jax.grad(loss), jax.jit(jax.grad(loss), static_argnums=1)):
            refused(ValueError, message, gradient, jnp.ones((64, 32)), qt.recipes.nvfp4)
        rows = jax.device_put(np.ones((16, 64), np.float32), NamedSharding(mesh, P("a", None)))
        refused(ValueError, message, qt.scaling.hadamard_transform, rows, axis=0)
        whole = jax.device_put(_host()[:, :64].T, NamedSharding(mesh, P("a", None)))
        got = qt.scaling.hadamard_transform(whole, axis=0)
    expected = qt.scaling.hadamard_transform(jnp.asarray(_host()[:, :64].T), axis=0)
    _assert_same_bits(got, expected)


@every_kind
@pytest.mark.parametrize("spec", [qt.spec("int8"), TOKENS, qt.BlockFormat.channel("int8")], ids=str)
def test_derivatives_by_scales_are_those_of_one_device(kind, spec):
    """All sums are of integers, and exact in whatever order."""
    host = np.arange(128, dtype=np.float32).reshape(8, 16) - 64

    def derivatives(x):
        q = qt.quantize(x, spec)
        ones = jnp.ones_like(q.scale)
        dequantized = lambda scale: dataclasses.replace(q, scale=scale).dequantize()  # noqa: E731
        by_scale = jax.grad(lambda scale: dequantized(scale).sum())(q.scale)
        return by_scale, jax.jvp(dequantized, (q.scale,), (ones,))[1]

    _assert_alike(derivatives, kind, host)


def _assert_alike(function, kind, host):
    expected = jax.tree.map(np.asarray, function(jnp.asarray(host)))
    mesh = _mesh(kind)
    with jax.set_mesh(mesh):
        got = function(jax.device_put(host, NamedSharding(mesh, BOTH)))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
