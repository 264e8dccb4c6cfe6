"""Metrics against numpy in float64, of the codes and numbers that `quantize` gives."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from refused import refused

from qtoolkit.formats import BlockFormat
from qtoolkit.scaling import hadamard_transform, metrics, quantize, sqnr_db
from qtoolkit.scaling.internal import Scales, tally_of, tally_vector

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ASYMMETRIC = BlockFormat.channel("uint8", axis=0, zero_point=True)
SPECS = ("e4m3fn", "mxfp4", "mxint8", "nvfp4", "nf4", "bfloat16", ASYMMETRIC)


def data(shape=(24, 130), seed=0):
    """The same shape in most tests: each format is compiled once."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp2(rng.integers(-9, 3, shape))).astype(np.float32)


def numpy_sqnr_db(x, y):
    """The oracle: float64, over what is finite in both."""
    x, y = np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)
    kept = np.isfinite(x) & np.isfinite(y)
    x, y = x[kept], y[kept]
    with np.errstate(divide="ignore"):
        return 10 * np.log10(np.sum(x * x) / np.sum((x - y) ** 2))


def numpy_metrics(x, q):
    """The oracle for all but `saturated`, from a QArray."""
    wide, y = np.asarray(x).astype(np.float64), np.asarray(q.dequantize(jnp.float32), np.float64)
    kept = np.isfinite(wide) & np.isfinite(y)
    a, b = wide[kept], y[kept]
    one, other = (v / (np.max(np.abs(v)) or 1) for v in (a, b))
    nonzero = np.isfinite(wide) & (wide != 0)
    return {
        "sqnr_db": numpy_sqnr_db(wide, y),
        "max_error": np.max(np.abs(a - b)),
        "cosine": np.sum(one * other) / (np.sqrt(np.sum(one**2) * np.sum(other**2)) or 1),
        "flushed": np.mean(y[nonzero] == 0),
        "nonfinite": np.sum(~np.isfinite(wide)),
    }


def check(got, x, q):
    expected = numpy_metrics(x, q)
    np.testing.assert_allclose(got.sqnr_db, expected["sqnr_db"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(got.max_error, expected["max_error"], rtol=1e-6)
    np.testing.assert_allclose(got.cosine, expected["cosine"], rtol=0, atol=2e-7)
    np.testing.assert_allclose(got.flushed, expected["flushed"], rtol=1e-6)
    assert int(got.nonfinite) == expected["nonfinite"]
    element = q.spec.element
    if element.bits > 8:
        assert got.histogram is None
        return
    counts = np.bincount(np.asarray(q.codes).reshape(-1), minlength=2**element.bits)
    assert got.histogram.dtype == jnp.uint32
    np.testing.assert_array_equal(got.histogram, counts)


@pytest.mark.sample("e4m3fn-float32")
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(spec, "float32") for spec in SPECS] + [("nvfp4", "bfloat16"), ("e4m3fn", "float16")],
    ids=str,
)
def test_metrics_equal_numpy(spec, dtype):
    x = data().astype(DTYPES[dtype])
    x[3] = 0
    got = metrics(x, spec)
    check(got, x, quantize(x, spec))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {"float32", "uint32"}


@pytest.mark.sample("e5m2-none")
@pytest.mark.parametrize(
    ("spec", "saturation"),
    [("e5m2", "none"), ("e4m3fn", "finite"), ("mxfp4", "finite"), ("bfloat16", "finite")],
)
def test_metrics_beside_numbers_that_are_not_finite(spec, saturation):
    x = data()
    x[2, ::5], x[5, 1], x[7, 60:90:2] = np.nan, -np.inf, np.inf
    how = {"saturation": saturation}
    got = metrics(x, spec, **how)
    check(got, x, quantize(x, spec, **how))
    assert got.nonfinite == 26 + 1 + 15
    infinite = np.mean(np.isinf(x))
    np.testing.assert_allclose(got.saturated, infinite, rtol=1e-6)  # by amax, nothing else is


@pytest.mark.quick
def test_the_histogram_of_a_scaled_tensor_is_that_of_ml_dtypes():
    x = data()
    scale = np.float32(np.max(np.abs(x)) / np.float32(448))
    codes = (x / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    expected = np.bincount(codes.reshape(-1), minlength=256)
    np.testing.assert_array_equal(metrics(x, "e4m3fn").histogram, expected)
    np.testing.assert_array_equal(metrics(x, "e4m3fn", scale=scale).histogram, expected)


def test_sums_are_accurate_over_four_million_elements():
    """Sorted, all of one sign, and most of it in the tail: a running float32 sum is off by far."""
    x = np.sort(np.random.default_rng(1).pareto(2.5, 2**22).astype(np.float32) + 1)[::-1].copy()
    assert x[0] < 57344
    y = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    running = np.cumsum(x * x, dtype=np.float32)[-1]  # one after the other, in float32
    assert abs(running / np.sum(x.astype(np.float64) ** 2) - 1) > 1e-4
    np.testing.assert_allclose(sqnr_db(x, y), numpy_sqnr_db(x, y), rtol=0, atol=1e-4)
    y = x.astype(ml_dtypes.float8_e5m2).astype(np.float32)
    got = metrics(x, BlockFormat.tensor("e5m2", scale=None))
    np.testing.assert_allclose(got.sqnr_db, numpy_sqnr_db(x, y), rtol=0, atol=1e-4)


@pytest.mark.sample("-135", "-120", "-100", "0", "60", "124")
@pytest.mark.parametrize("exponent", [-135, -120, -100, -60, 0, 60, 100, 124])
def test_sqnr_does_not_depend_on_the_unit(exponent):
    """Squares of these overflow or underflow; the smallest are subnormal in part or wholly."""
    whole = np.random.default_rng(2).integers(-(2**10), 2**10, (24, 130)).astype(np.float64)
    x = np.ldexp(whole, exponent - 10).astype(np.float32)
    y = np.ldexp(np.round(whole / 64) * 64, exponent - 10).astype(np.float32)
    assert np.all(np.isfinite(x) & (np.ldexp(x.astype(np.float64), 10 - exponent) == whole))
    np.testing.assert_allclose(sqnr_db(x, y), numpy_sqnr_db(x, y), rtol=0, atol=1e-4)
    check(metrics(x, "mxfp4"), x, quantize(x, "mxfp4"))


def test_sqnr_beside_an_outlier_that_hides_all_squares():
    x = data().reshape(-1)
    x[7] = 2.0**100
    y = x.astype(ml_dtypes.float8_e5m2).astype(np.float32)
    y[7] = x[7]
    expected = numpy_sqnr_db(x, y)
    assert expected > 500
    np.testing.assert_allclose(sqnr_db(x, y), expected, rtol=1e-6)


def test_errors_that_are_subnormal_count_beside_larger_numbers():
    """Everything but the ones becomes zero: XLA takes their differences for zero, too."""
    x = np.where(np.arange(24 * 130) % 64 == 0, 1, 1e-40).astype(np.float32).reshape(24, 130)
    got = metrics(x, "e4m3fn")
    check(got, x, quantize(x, "e4m3fn"))
    assert got.max_error == np.float32(1e-40)
    assert 750 < got.sqnr_db < 800


def test_what_is_exact_zero_or_nowhere_finite():
    shape = (24, 130)
    exact = metrics(np.resize(np.array([1, -0.5, 0, 2.0**-8], np.float32), shape), "e4m3fn")
    assert exact.sqnr_db == np.inf
    assert exact.max_error == 0
    assert exact.cosine == 1
    zeros = metrics(np.zeros(shape, np.float32), "nvfp4")
    assert zeros.sqnr_db == np.inf
    assert zeros.cosine == 1
    assert zeros.flushed == 0  # of no elements that could have been
    assert int(zeros.histogram[0]) == 24 * 130
    nothing = metrics(np.full(shape, np.nan, np.float32), "e4m3fn")
    assert np.isnan(nothing.sqnr_db)
    assert int(nothing.nonfinite) == 24 * 130
    assert nothing.max_error == 0
    poisoned = np.ones(shape, np.float32)
    poisoned[:, ::32] = np.nan  # and all of its block with it
    assert np.isnan(metrics(poisoned, "mxfp4").sqnr_db)
    gone = metrics(np.resize(np.array([1, -2], np.float32), shape), "e4m3fn", scale=2.0**12)
    assert gone.sqnr_db == 0
    assert gone.cosine == 0
    assert gone.flushed == 1
    assert gone.max_error == 2
    assert sqnr_db(np.zeros(3, np.float32), np.ones(3, np.float32)) == -np.inf
    gone = metrics(np.array([1.0, -2.0], np.float32), "int8", scale=64.0)
    assert gone.sqnr_db == 0
    assert gone.cosine == 0
    assert gone.flushed == 1
    assert gone.max_error == 2


@pytest.mark.sample("e4m3fn--464-464")
@pytest.mark.parametrize(
    ("element", "lowest", "highest"),
    [
        # The finite range and half of its last step, by hand.
        ("e4m3fn", -464, 464),
        ("e5m2", -61440, 61440),
        ("e2m1fn", -7, 7),
        ("int8", -128.5, 127.5),
        ("int4", -8.5, 7.5),
        ("uint8", -0.5, 255.5),
        ("ue4m3", -(2.0**-10), 464),
        ("hifloat8", -1.25 * 2**15, 1.25 * 2**15),
        ("posit8", -(2.0**24 + 15 * 2.0**19), 2.0**24 + 15 * 2.0**19),  # 2**20 comes before 2**24
    ],
)
def test_saturated_counts_more_than_half_a_step_beyond(element, lowest, highest):
    ends = np.array([lowest, highest], np.float32)
    beyond = np.nextafter(ends, ends * np.float32(2))
    rest = np.array([0, 0, 0, 1, np.inf, -np.inf], np.float32)
    x = np.concatenate([ends, beyond, rest])
    spec = BlockFormat.tensor(element, scale=None)
    assert metrics(x, spec).saturated == np.float32(0.4)
    assert metrics(np.resize(ends, x.shape), spec).saturated == 0
    if element == "e4m3fn":
        assert metrics(x, spec, rounding="toward_zero").saturated == np.float32(0.4)
        assert metrics(x * np.float32(8), element, scale=8.0).saturated == np.float32(0.4)


@pytest.mark.exhaustive
def test_saturated_by_blocks_equals_numpy():
    """MXINT8 counts in units of 2**-6 and has no -128."""
    x = data()
    scale = np.exp2(np.random.default_rng(3).integers(-6, -1, (24, 5))).astype(np.float32)
    u = x.astype(np.float64) / np.repeat(scale, 32, axis=1)[:, :130]
    got = metrics(x, "mxint8", scale=scale)
    assert 0.01 < got.saturated < 0.5
    np.testing.assert_allclose(got.saturated, np.mean(np.abs(u * 64) > 127.5), rtol=1e-6)


def test_saturated_with_zero_points_equals_numpy():
    x = data((4, 50))
    scale = np.full((4, 1), 0.01, np.float32)
    zero_point = np.array([[0], [20], [128], [255]], np.int32)
    got = metrics(x, ASYMMETRIC, scale=scale, zero_point=zero_point)
    moved = x / scale + zero_point
    expected = np.mean((moved < -0.5) | (moved > 255.5))
    assert expected > 0.1
    np.testing.assert_allclose(got.saturated, expected, rtol=1e-6)


def test_a_scale_from_amax_saturates_nothing():
    """448 * (amax / 448), rounded twice, may exceed amax or fall short of it."""
    for spec in ("e4m3fn", "nvfp4", "nf4"):
        for seed in range(20):
            assert metrics(data(seed=seed), spec).saturated == 0


def test_subnormals_are_flushed_only_where_they_become_zero():
    x = np.resize(np.array([2.0**-149, -(2.0**-130), 0.0, -0.0], np.float32), (24, 130))
    assert metrics(x, "float32").flushed == 0
    assert metrics(x, "bfloat16").flushed == 0.5  # which has 2**-130
    check(metrics(x, "mxfp4"), x, quantize(x, "mxfp4"))


def test_draw_and_scales_are_those_of_quantize():
    x = data()
    given = quantize(data(seed=9), "nvfp4")
    how = {"rounding": "stochastic", "key": jax.random.key(3), "index_offset": 5}
    how |= {"scale": given.scale, "tensor_scale": given.tensor_scale}
    got = metrics(x, "nvfp4", **how)
    check(got, x, quantize(x, "nvfp4", **how))
    assert np.any(np.asarray(got.histogram) != np.asarray(metrics(x, "nvfp4").histogram))


def same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.exhaustive
def test_under_jit_and_vmap():
    x = jnp.asarray(data())
    function = functools.partial(metrics, spec="nvfp4")
    expected = function(x)
    compiled = jax.jit(function)(x)
    same(compiled.histogram, expected.histogram)
    for name in ("sqnr_db", "max_error", "cosine", "saturated", "flushed", "nonfinite"):
        np.testing.assert_allclose(
            getattr(compiled, name), getattr(expected, name), rtol=2e-7, err_msg=name
        )
    xs = jnp.stack([x, jnp.zeros_like(x)])
    each = jax.vmap(function)(xs)
    assert each.histogram.shape == (2, 16)
    for i in range(2):
        alone = function(xs[i])
        same(each.histogram[i], alone.histogram)
        np.testing.assert_allclose(each.sqnr_db[i], alone.sqnr_db, rtol=1e-6)
        np.testing.assert_array_equal(each.flushed[i], alone.flushed)


def test_metrics_in_a_loss_have_no_gradient():
    x = jnp.asarray(data())
    grad = jax.grad(lambda x: jnp.sum(x) + metrics(x, "e4m3fn").sqnr_db + sqnr_db(x, x * 2))(x)
    np.testing.assert_array_equal(grad, np.ones(x.shape, np.float32))


def test_repr_can_be_read():
    x = np.array([1000.0, 1.0, 2.0**-20, np.nan], np.float32)
    text = repr(metrics(x, "e4m3fn", scale=1.0))
    assert text == (
        "Metrics(SQNR 5.16 dB, max error 552, cosine 0.999999, saturated 25 %, underflowed 33.3 %, "
        "1 not finite, 4 of 256 codes used)"
    )
    assert repr(metrics(x, "float16")).endswith("underflowed 0 %, 1 not finite)")
    batched = repr(jax.tree.map(lambda leaf: np.stack([leaf] * 2), metrics(x, "float16")))
    assert batched.startswith("Metrics(sqnr_db=array([")
    traced = []
    jax.jit(lambda x: traced.append(repr(metrics(x, "float16"))) or x).lower(x)
    assert "Tracer" in traced[0]


def test_errors():
    x = np.ones(4, np.float32)
    refused(TypeError, r"^metrics: x has dtype int32", metrics, np.ones(4, np.int32), "e4m3fn")
    with refused(ValueError, r"^metrics: scale has shape \(2,\)"):
        metrics(x, "e4m3fn", scale=np.ones(2, np.float32))
    refused(TypeError, r"^sqnr_db: x has dtype float64", sqnr_db, np.ones(3), x)
    refused(ValueError, r"^sqnr_db: x has shape \(4,\), y \(3,\)", sqnr_db, x, x[:3])
    refused(ValueError, r"^sqnr_db: x has shape \(0,\), y \(0,\)", sqnr_db, x[:0], x[:0])


@pytest.mark.devices(8)
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_auto_and_explicit_meshes(kind):
    """Of eight devices; one device is the oracle."""
    x = np.random.default_rng(0).normal(size=(16, 256)).astype(np.float32)
    key = jax.random.key(1)
    together = jax.jit(
        lambda x: {"nvfp4": metrics(x, "nvfp4"), "hadamard": hadamard_transform(x, key=key)}
    )
    expected = together(x)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    where = NamedSharding(mesh, P("a", "b"))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, where)
        compiled = together.lower(sharded).compile()
        got = compiled(sharded)
    for line in compiled.as_text().splitlines():
        # Partial sums and counts may be gathered, the array itself not.
        for collective in (" all-gather(", " all-to-all(", " collective-permute("):
            if collective in line:
                assert "[16," not in line.split(collective)[0], line
    assert got["hadamard"].sharding.is_equivalent_to(where, 2)
    leaves = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, a), b in leaves:
        exact = a.dtype == np.uint32 or "hadamard" in str(path) or "flushed" in str(path)
        np.testing.assert_allclose(a, b, rtol=0 if exact else 1e-6, err_msg=str(path))


def test_tally_counts_binades_of_subnormals_and_infinities():
    """Oracle: NumPy's frexp in float64. Zeros have the first bin; infinities and NaNs have none."""
    x = np.float32([0, -0.0, 1e-45, -3e-45, 1e-40, 1.1754942e-38, 2.0**-126, -1.5, 3.4e38])
    bins = np.where(x == 0, 0, np.frexp(x.astype(np.float64))[1] - 1 + 150)
    given = jnp.asarray([*x, np.inf, -np.inf, np.nan], jnp.float32)
    tally = tally_of(jax.jit(lambda x: tally_vector(x, x, None, Scales()))(given))
    np.testing.assert_array_equal(tally.exponents, np.bincount(bins, minlength=278))
