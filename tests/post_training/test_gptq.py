"""GPTQ and AWQ: the oracles are float64 NumPy, written from the papers; scales by ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refused import refused

import qtoolkit as qt
from qtoolkit.scaling import Hessian, gptq
from qtoolkit.scaling.internal import awq_factors

# --- the oracle: algorithm 1 of arXiv:2210.17323, with a scale found when a group is reached.


def by_amax(largest):
    """amax / largest in float32; 1 for a group of zeros."""

    def find(group, tensor):
        scale = (np.abs(group).max(0).astype(np.float32) / np.float32(largest)).astype(np.float64)
        return np.where(scale == 0, 1, scale)

    return find


def mx_ceil_scale(group, tensor):
    """The power of two from which no element of E4M3 overflows."""
    return 2.0 ** np.ceil(np.log2(np.abs(group).max(0) / 448))


def mx_scale(group, tensor):
    """OCP MX for E2M1: the binade of an amax that was rounded to E2M1's mantissa, over 4."""
    amax = np.abs(group).max(0)
    exponent = np.floor(np.log2(amax))
    exponent += amax / 2.0**exponent >= 1.75
    return 2.0 ** (exponent - 2)


def nv_scale(group, tensor):
    scale = (np.abs(group).max(0).astype(np.float32) / np.float32(6)) / np.float32(tensor)
    return scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * tensor


def to_int4(u):
    return np.clip(np.rint(u), -8, 7)


def to_int3(u):
    return np.clip(np.rint(u), -4, 3)


def to_int8(u):
    return np.clip(np.rint(u), -128, 127)


def to_e4m3(u):
    return np.clip(u, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float)


def to_e2m1(u):
    return np.clip(u, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDDLES = {
    to_int4: np.arange(-8, 7) + 0.5,
    to_e2m1: np.concatenate([-(E2M1[1:] + E2M1[:-1]) / 2, (E2M1[1:] + E2M1[:-1]) / 2]),
}
FORMATS = {
    "int4_group32": (by_amax(7), to_int4, 32),
    "int4 by channel": (by_amax(7), to_int4, 64),
    "mxfp4": (mx_scale, to_e2m1, 32),
    "nvfp4": (nv_scale, to_e2m1, 16),
}
SPECS = {
    "int4 by channel": qt.BlockFormat.channel("int4", axis=1),
    "int3 in groups of 16": qt.BlockFormat(element="int3", block=(16,)),
    "int8 by channel": qt.BlockFormat.channel("int8", axis=1),
    "e4m3fn by channel": qt.BlockFormat.channel("e4m3fn", axis=1),
}
# Compared with sums in float64 alone, where ties are rare.
EXACT = FORMATS | {
    "int3 in groups of 16": (by_amax(3), to_int3, 16),
    "int8 by channel": (by_amax(127), to_int8, 64),
    "e4m3fn by channel": (by_amax(448), to_e4m3, 64),
    "mxfp8_e4m3": (mx_ceil_scale, to_e4m3, 32),
}


def oracle(w, hessian, name, order=None):
    """Codes' values, the result, and how far each rounding was from a tie."""
    find, project, group = EXACT[name]
    channels = len(w)
    order = np.arange(channels) if order is None else order
    back = np.argsort(order)
    tensor = float(np.float32(np.abs(w).max()) / np.float32(6 * 448)) if name == "nvfp4" else 1.0
    mean = np.diag(hessian).mean()
    damped = hessian + mean * np.diag(np.where(np.diag(hessian) == 0, 1, 0.01))
    inverse = np.linalg.inv(damped[order][:, order])
    upper = np.linalg.cholesky(inverse).T
    fixed = np.concatenate([[find(w[i : i + group], tensor)] for i in range(0, channels, group)])
    w, q, y = w[order].copy(), np.zeros_like(w), np.zeros_like(w)
    margin = np.zeros_like(w)
    is_static = group == channels or not np.array_equal(order, np.arange(channels))
    for i in range(channels):
        if i % group == 0 and not is_static:
            scale = find(w[i : i + group], tensor)
        if is_static:
            scale = fixed[order[i] // group]
        u = w[i] / scale
        q[i] = project(u)
        y[i] = q[i] * scale
        if project in MIDDLES:
            margin[i] = np.abs(u[:, None] - MIDDLES[project]).min(1)
        w[i + 1 :] -= np.outer(upper[i, i + 1 :], (w[i] - y[i]) / upper[i, i])
    return q[back], y[back], margin


def problem(seed, channels=64, columns=24, rows=512):
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(channels, channels)) * 0.3 + np.eye(channels)
    x = (random.normal(size=(rows, channels)) @ mixing).astype(np.float32)
    w = random.normal(size=(channels, columns)).astype(np.float32)
    return x, w, x.astype(np.float64).T @ x


@pytest.mark.sample("int4_group32-True", "int4 by channel-False", "mxfp4-False", "nvfp4-True")
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_paper_where_no_tie_is_near(name, act_order):
    x, w, exact = problem(0)
    order = np.argsort(-np.diag(exact), kind="stable") if act_order else np.arange(len(w))
    q, y, margin = oracle(w.astype(np.float64), exact, name, order)
    hessian = Hessian.of(len(w)).observe(x)
    found = gptq(w, SPECS.get(name, name), hessian, act_order=act_order)
    codes = np.asarray(qt.decode(found.codes, found.spec.element))
    # After a near tie, float32 may go another way in this column; before it, it must not.
    clear = np.cumprod(margin > 1e-3, axis=0).astype(bool)
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(codes[order][clear], q[order][clear])
    errors = [np.square(x @ (w - a)).sum() for a in (np.asarray(found.dequantize()), y)]
    ways = np.flatnonzero(~(codes == q).all(0))  # columns in which a tie was taken otherwise
    kept = [np.delete(x @ (w - a), ways, 1) for a in (np.asarray(found.dequantize()), y)]
    assert kept[0].shape[1] > 12
    np.testing.assert_allclose(*(np.square(a).sum() for a in kept), rtol=1e-4)
    np.testing.assert_allclose(*errors, rtol=2e-2)


@pytest.mark.parametrize(
    "spec",
    [
        "int4_group32",
        "mxfp4",
        "nvfp4",
        "nf4",
        "e4m3fn",
        qt.BlockFormat.channel("int4", axis=1),
        qt.BlockFormat(element="int3", block=(24,)),  # the last group is shorter
        qt.BlockFormat(element="int4", block=(16, 16)),
        qt.BlockFormat(element="uint4", block=(32,), zero_point=True),
        qt.BlockFormat.tensor("e4m3fn", scale=None),
    ],
    ids=str,
)
def test_every_format_loses_less_than_by_nearest(spec):
    x, w, _ = problem(1)
    spec = qt.spec(spec)
    found = gptq(w, spec, Hessian.of(len(w)).observe(x))
    nearest = qt.quantize(w, found.spec)
    assert (found.spec, found.lengths) == (nearest.spec, nearest.lengths)
    for mine, theirs in zip(*map(jax.tree.leaves, (found, nearest)), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    losses = [np.square(x @ (w - np.asarray(a.dequantize()))).sum() for a in (found, nearest)]
    assert losses[0] < 0.6 * losses[1]


def test_uncorrelated_inputs_leave_rounding_to_nearest():
    w = problem(2)[1]
    hessian = Hessian.of(64).observe(np.concatenate([np.eye(64), -np.eye(64)]).astype(np.float32))
    found, nearest = gptq(w, "mxfp4", hessian), qt.quantize(w, qt.spec("mxfp4").along(0))
    np.testing.assert_array_equal(found.codes, nearest.codes)
    dead = Hessian.of(64).observe(np.zeros((64, 64), np.float32))
    np.testing.assert_array_equal(gptq(w, "mxfp4", dead).codes, nearest.codes)


def test_several_axes_and_16_bits():
    """A kernel [heads, width, out] sums over two axes; blocks lie along the last of them."""
    x, w, _ = problem(3)
    hessian = Hessian.of(64).observe(x)
    flat = gptq(w, "int4_group32", hessian)
    cube = gptq(w.reshape(2, 32, -1), "int4_group32", hessian, axis=(0, 1))
    np.testing.assert_array_equal(cube.codes.reshape(flat.codes.shape), flat.codes)
    turned = gptq(w.T, "int4_group32", hessian, axis=1, packed=True)
    np.testing.assert_array_equal(turned.unpack().codes.T, flat.codes)
    narrow = gptq(jnp.asarray(w, jnp.bfloat16), "int4_group32", hessian)
    assert narrow.dtype == jnp.bfloat16
    spec = qt.BlockFormat(element="int4", block=(12,))
    refused(ValueError, "tear blocks", gptq, w.reshape(4, 16, -1), spec, hessian, axis=(0, 1))


@pytest.mark.sample(
    *("int4_group32-correlated-True", "int4 by channel-some dead-True", "mxfp4-rank 20-False"),
    *("nvfp4-correlated-True", "int3 in groups of 16-some dead-False", "nvfp4-some dead-False"),
    *("int8 by channel-rank 20-True", "e4m3fn by channel-correlated-False"),
    *("mxfp8_e4m3-some dead-True", "mxfp4-correlated-False", "int4_group32-rank 20-True"),
)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("inputs", ["correlated", "some dead", "rank 20"])
@pytest.mark.parametrize("name", EXACT)
def test_float64_sums_decide_as_the_oracle_in_every_column(name, inputs, act_order):
    x, w, _ = problem(4)
    if inputs == "some dead":
        x[:, ::9] = 0
    if inputs == "rank 20":
        x = (x[:, :20] @ problem(5)[0][:20]).astype(np.float32)
    exact = x.astype(np.float64).T @ x
    with jax.enable_x64(True):
        hessian = Hessian.of(64, dtype="float64").observe(x)
        found = gptq(w, SPECS.get(name, name), hessian, act_order=act_order)
        codes = np.asarray(qt.decode(found.codes, found.spec.element))
    order = np.argsort(-np.diag(exact), kind="stable") if act_order else np.arange(len(w))
    q, _, margin = oracle(w.astype(np.float64), exact, name, order)
    clear = np.cumprod(margin > 1e-6, axis=0).astype(bool)
    if EXACT[name][1] not in MIDDLES:  # ties in 24 columns: none
        clear[:] = True
    np.testing.assert_array_equal(codes[order][clear], q[order][clear])
    assert clear.mean() > 0.95


def test_sums_are_those_of_all_batches_and_devices():
    x = problem(5)[0]
    hessian = Hessian.of(64)
    halves = [hessian.observe(part) for part in (x[:200], x[200:].reshape(2, -1, 64))]
    merged = halves[0].merge(halves[1])
    np.testing.assert_allclose(merged.total, x.astype(np.float64).T @ x, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(merged.magnitude, np.abs(x).sum(0), rtol=1e-5)
    np.testing.assert_array_equal(merged.largest, np.abs(x).max(0))
    assert int(merged.rows) == len(x)
    across = jax.vmap(lambda x: hessian.observe(x).merge_across("i"), axis_name="i")
    both = across(x.reshape(2, -1, 64))
    np.testing.assert_allclose(both.total[0], merged.total, rtol=1e-4, atol=1e-2)
    assert int(both.rows[1]) == len(x)
    bad = merged.observe(np.full((3, 64), np.nan, np.float32))
    np.testing.assert_array_equal(bad.total, merged.total)
    assert (int(bad.rows), int(bad.bad)) == (len(x), 1)


def test_experts_have_inputs_of_their_own():
    x = np.stack([problem(seed)[0] for seed in (6, 7)])
    hessian = Hessian.of(2, 64).observe(x)
    for i in range(2):
        np.testing.assert_allclose(hessian.total[i], x[i].T @ x[i], rtol=1e-4, atol=1e-2)


def test_awq_takes_the_power_that_numpy_finds_best():
    x, w, exact = problem(8)
    x = x * np.where(np.arange(64) % 9 == 4, np.float32(25), np.float32(1))
    exact = x.astype(np.float64).T @ x
    mean = np.abs(x).mean(0, dtype=np.float64)
    losses, candidates = [], []
    for power in np.linspace(0, 1, 20):
        factors = mean**power
        factors /= np.sqrt(factors.max() * factors.min())
        scaled = (w * factors[:, None]).reshape(2, 32, -1)
        scale = np.abs(scaled).max(1, keepdims=True) / 7
        rounded = (np.clip(np.rint(scaled / scale), -8, 7) * scale).reshape(w.shape)
        error = rounded / factors[:, None] - w
        losses.append(np.einsum("kn,kl,ln->", error, exact, error))
        candidates.append(factors)
    found = awq_factors([(w, "int4_group32", 0)], Hessian.of(64).observe(x))
    np.testing.assert_allclose(found, candidates[int(np.argmin(losses))], rtol=1e-4)
    assert min(losses) < 0.7 * losses[0]
    both = awq_factors([(w, "int4_group32", 0)] * 2, Hessian.of(64).observe(x))
    np.testing.assert_array_equal(both, found)
    powers = awq_factors([(w, "int4_group32", 0)], Hessian.of(64).observe(x), power_of_two=True)
    np.testing.assert_array_equal(np.log2(powers), np.rint(np.log2(found)))


def awq(w, spec, hessian):
    return awq_factors([(w, spec, 0)], hessian)


@pytest.mark.parametrize("function", [gptq, awq])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "not calibrated: there was no batch"),
        ({"rows": 10}, "10 rows of inputs for 64 channels, expected at least as many"),
        ({"value": np.nan}, "not calibrated: all 1 batches held a NaN or an infinity"),
        ({"value": 1e30}, "sums of squares overflow"),
        ({"channels": 32}, "Hessian has shape .*expected the same"),
        ({"weight": np.inf}, "w holds 1 infinities and NaNs"),
    ],
    ids=str,
)
def test_bad_calibration_is_one_clear_line(function, change, message):
    x, w, _ = problem(9)
    x, w = x[: change.get("rows", 512)].copy(), w.copy()
    if "value" in change:
        x[0, 0] = change["value"]
    if "weight" in change:
        w[0, 0] = change["weight"]
    x = x[:, : change.get("channels", 64)]
    hessian = Hessian.of(x.shape[1])
    hessian = hessian.observe(x) if len(x) else hessian
    with pytest.raises(ValueError, match=message) as caught:
        function(w, "int4_group32", hessian)
    assert "\n" not in str(caught.value)


def test_other_bad_arguments():
    x, w, _ = problem(10)
    hessian = Hessian.of(64).observe(x)
    refused(ValueError, "damping=-1", gptq, w, "int4", hessian, damping=-1)
    refused(ValueError, "axis=2", gptq, w, "int4", hessian, axis=2)
    refused(ValueError, "64-bit types are off", Hessian.of, 4, dtype="float64")
    refused(ValueError, "x has shape", hessian.observe, x[:, :3])
    same = Hessian.of(2).observe(np.ones((5, 2), np.float32))
    with refused(ValueError, r"not positive definite.*raise damping"):
        gptq(w[:2], "int4", same, damping=0)
