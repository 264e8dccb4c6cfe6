"""Reports of numerics: each number against `qt.metrics` and NumPy of operands captured by hand."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import run
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from refused import refused
from state_of import by_kernel

import qtoolkit as qt
from qtoolkit.products import Numerics

BLOCKS = qt.BlockFormat(element=qt.format("int8"), block=(16,))
INT8 = qt.Recipe(qt.BlockFormat.tensor("int8"), gradient=None)
X = jax.random.normal(jax.random.key(0), (8, 32)).at[3, :5].set(0)


class Net(nnx.Module):
    """A frozen trunk, three ways to round, and a head that a rule leaves."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.trunk = nnx.Linear(32, 32, rngs=rngs)
        self.a = nnx.Linear(32, 64, rngs=rngs)
        self.b = nnx.Linear(64, 32, rngs=rngs)
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.tail(jax.lax.stop_gradient(self.trunk(x))))

    def tail(self, x):
        return self.b(nnx.relu(self.a(x)))


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.fixture(scope="module")
def wrapped():
    rules = qt.Rules({"head": None, "^b$": qt.Recipe(BLOCKS)}, default=qt.Recipe())
    return qt.nnx.wrap(Net(), rules)


@pytest.fixture(scope="module")
def found(wrapped):
    return qt.nnx.numerics(wrapped, X, loss_fn)


def row_of(found, path, operand, part, product="kernel"):
    rows = [r for r in found.rows if (r.path, r.operand) == (path, operand) and part in r.parts]
    (row,) = (r for r in rows if by_kernel([r.product]) == [product])
    return row


def check(row, x, spec):
    """Against qt.metrics of the operand, and NumPy's amax and exponents."""
    expected, x = qt.metrics(x, spec), np.asarray(x)
    tally = row.tally
    np.testing.assert_allclose(tally.sqnr_db, expected.sqnr_db, rtol=0, atol=1e-4)
    np.testing.assert_allclose(tally.cosine, expected.cosine, rtol=0, atol=3e-7)
    np.testing.assert_allclose(tally.saturated_fraction, expected.saturated, rtol=1e-6)
    np.testing.assert_allclose(tally.flushed_fraction, expected.flushed, rtol=1e-6)
    assert float(tally.amax) == np.abs(x).max()
    scales = np.asarray(qt.quantize(x, spec).scale, np.float32)
    assert float(tally.least_scale) == scales.min()
    assert float(tally.largest_scale) == scales.max()
    exponents, counts = np.unique(np.frexp(np.abs(x[x != 0]))[1] - 1, return_counts=True)
    assert row.histogram == dict(zip(exponents.tolist(), counts.tolist(), strict=True))
    assert float(tally.exponents[0]) == np.count_nonzero(x == 0)
    assert float(tally.uses) == 1


@pytest.mark.quick
def test_each_number_is_that_of_metrics_of_the_captured_operand(wrapped, found):
    trunk = wrapped.trunk(X)
    hidden = nnx.relu(wrapped.a(trunk))
    out, back = jax.vjp(lambda y: jnp.mean(wrapped.head(y) ** 2), wrapped.b(hidden))
    (of_b,) = back(jnp.ones_like(out))
    _, back = jax.vjp(lambda y: wrapped.b(nnx.relu(y)), wrapped.a(trunk))
    (of_a,) = back(of_b)
    kernel = wrapped.b.kernel[...]
    check(row_of(found, "a", "lhs", "forward"), trunk, "e4m3fn")
    check(row_of(found, "a", "rhs", "dgrad"), wrapped.a.kernel[...], "e4m3fn")
    check(row_of(found, "a", "cotangent", "wgrad"), of_a, "e5m2")
    # Blocks lie along the axis that each of the three products sums.
    for operand, part, x, axis in (
        ("lhs", "forward", hidden, 1),
        ("rhs", "forward", kernel, 0),
        ("cotangent", "dgrad", of_b, 1),
        ("rhs", "dgrad", kernel, 1),
    ):
        check(row_of(found, "b", operand, part), x, dataclasses.replace(BLOCKS, axes=(axis,)))
    whole = dataclasses.replace(BLOCKS, block=(None,), axes=(0,))  # 8 examples are one block
    check(row_of(found, "b", "lhs", "wgrad"), hidden, whole)
    check(row_of(found, "b", "cotangent", "wgrad"), of_b, whole)


@pytest.mark.exhaustive
def test_kernels_on_the_left_are_kernels():
    class Left(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(X[:4, :8])

        def __call__(self, x):
            return self.kernel[...] @ x.T

    layer, x = qt.nnx.wrap(Left(), qt.Recipe(("int8", "e4m3fn"), "e5m2")), X[:6, :8]
    found = qt.nnx.numerics(layer, x, loss_fn)
    cotangent = jax.grad(lambda y: jnp.mean(y**2))(layer(x))
    check(row_of(found, "", "lhs", "forward", "kernel"), x.T, "int8")
    check(row_of(found, "", "rhs", "forward", "kernel"), layer.kernel[...], "e4m3fn")
    check(row_of(found, "", "cotangent", "dgrad", "kernel"), cotangent, "e5m2")


def test_what_is_not_measured_is_said(found):
    assert by_kernel(found.unreached) == ["trunk:kernel"]
    (left,) = found.left
    assert (left.path, left.reason) == ("head", "excluded by a rule")
    text = str(found)
    assert "not measured, because the loss does not depend on them: trunk:kernel" in text
    assert "1 forward matmuls are not quantized, the first is float32[8, 32] x " in text


def test_reports_add_and_are_saved(found, wrapped):
    twice = found.merge(found)
    for row, one in zip(twice.rows, found.rows, strict=True):
        assert float(row.tally.uses) == 2 * float(one.tally.uses)
        assert float(row.tally.amax) == float(one.tally.amax)
        if float(one.tally.uses):
            np.testing.assert_allclose(row.tally.sqnr_db, one.tally.sqnr_db, rtol=1e-6)
    again = Numerics.from_json(found.to_json())
    assert str(again) == str(found)
    assert str(again + found) == str(twice)
    assert jax.tree.structure(found + found) == jax.tree.structure(found)


def test_a_layer_that_runs_several_times_has_one_row():
    """In a scan, under remat: the sums over all runs, by NumPy."""
    layer = qt.nnx.wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), INT8)

    def loss(layer, x):
        step = jax.checkpoint(lambda carry, scale: (layer(carry) * scale, None))
        return jnp.sum(jax.lax.scan(step, x, jnp.array([1.0, 0.5, 8.0]))[0] ** 2)

    x = X[:, :8]
    found = qt.nnx.numerics(layer, x, loss)
    (row,) = (r for r in found.rows if r.operand == "lhs")
    seen = [x]
    for scale in (1.0, 0.5):
        seen.append(layer(seen[-1]) * scale)
    wide = np.stack(seen).astype(np.float64)
    rounded = np.stack([qt.fake_quantize(one, "int8") for one in seen]).astype(np.float64)
    expected = 10 * np.log10(np.sum(wide**2) / np.sum((wide - rounded) ** 2))
    np.testing.assert_allclose(row.tally.sqnr_db, expected, atol=1e-4)
    assert float(row.tally.uses) == 3
    assert float(row.tally.elements) == wide.size
    assert np.abs(wide).max() <= float(row.tally.amax) <= 1.125 * np.abs(wide).max()
    (kernel,) = (r for r in found.rows if r.operand == "rhs")  # three times the same
    np.testing.assert_allclose(kernel.tally.amax, jnp.abs(layer.kernel[...]).max(), rtol=1e-4)


@pytest.mark.exhaustive
def test_it_is_pure_and_runs_under_jit():
    layer = qt.nnx.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), qt.recipes.fp8_lm)
    x = X[:, :8]
    before = jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(layer)))
    found = qt.nnx.numerics(layer, x, loss_fn)
    inside = nnx.jit(lambda model, x: qt.nnx.numerics(model, x, loss_fn))(layer, x)
    assert str(inside) == str(found)
    for a, b in zip(before, jax.tree.leaves(nnx.state(layer)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_example_runs(wrapped, found, run_example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_example(qt.nnx.numerics, wrapped=wrapped, batch=X, loss_fn=loss_fn)
    assert (tmp_path / "numerics.png").exists()
    assert capsys.readouterr().out == f"{found}\n"


def test_picture_and_command(found, tmp_path):
    picture, saved = (tmp_path / name for name in ("n.png", "n.json"))
    found.plot(picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    saved.write_text(found.to_json(), encoding="utf-8")
    again = tmp_path / "again.png"
    done = run("report", str(saved), "--plot", str(again))
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in str(found).splitlines()][1].split()[0] in done.output
    assert "depend on them: trunk:kernel" in done.output
    assert again.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for content, message in (("{", "invalid JSON"), ("{}", "no report of numerics")):
        saved.write_text(content)
        done = run("report", str(saved))
        assert done.exit_code == 1
        assert message in done.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(version=2), "version 2, expected 1"),
        (lambda data: data["rows"][0].pop("limits"), "damaged text: KeyError: 'limits'"),
        (lambda data: data["rows"][0].update(tally={}), "damaged text: KeyError"),
        (lambda data: data["rows"][1].update(limits=[]), "damaged text: IndexError"),
        (lambda data: data["rows"][0]["tally"]["exponents"].pop(), r"exponents of shape \(277,\)"),
    ],
)
def test_damaged_reports(found, change, message):
    data = json.loads(found.to_json())
    change(data)
    with pytest.raises(ValueError, match=message):
        Numerics.from_json(json.dumps(data))


def test_bad_input(wrapped):
    refused(ValueError, r"Net is not wrapped", qt.nnx.numerics, Net(), X, loss_fn)
    refused(TypeError, "model has type int", qt.nnx.sensitivity, 3, X, loss_fn)
    with refused(TypeError, r"loss_fn gave float32\[8, 4\]"):
        qt.nnx.numerics(wrapped, X, lambda model, x: model(x))
    plain = Net()
    with refused(ValueError, "no quantized matmul ran"):
        qt.nnx.numerics(wrapped, X, lambda model, x: loss_fn(plain, x))


# Sensitivity.


class Planted(nnx.Module):
    """The input of `bad` has a feature that is 1,000 times as large as the others.

    Its weights are as much smaller: without rounding that changes nothing.
    """

    def __init__(self):
        rngs = nnx.Rngs(1)
        self.good, self.bad, self.fine = (nnx.Linear(16, 16, rngs=rngs) for _ in range(3))
        self.bad.kernel[...] = self.bad.kernel[...].at[0].divide(1000)

    def __call__(self, x):
        hidden = nnx.tanh(self.good(x))
        return self.fine(nnx.tanh(self.bad(hidden.at[:, 0].mul(1000))))


@pytest.mark.quick
def test_a_planted_outlier_ranks_first(run_example):
    model, x = Planted(), X[:, :16]
    target = model(x)

    def loss(model, x):
        return jnp.mean((model(x) - target) ** 2)

    wrapped = qt.nnx.wrap(model, INT8)
    found = qt.nnx.sensitivity(wrapped, x, loss)
    (first, cost), *others = found.ranking
    assert first == "bad"
    assert cost > 10 * max(cost for _, cost in others) > 0
    assert found.wide < 1e-10
    np.testing.assert_allclose(found.quantized, loss(wrapped, x), rtol=1e-5)
    rules = found.rules(1)
    assert rules == qt.Rules({"^bad$": None, "^good$": INT8, "^fine$": INT8})
    assert loss(qt.nnx.wrap(model, rules), x) < 0.2 * found.quantized
    assert "qtoolkit.Rules({'^bad$': None}, default=recipe)" in str(found)
    # By hand: that layer alone is wrapped.
    alone = qt.nnx.wrap(model, qt.Rules({"^fine$": INT8}))
    np.testing.assert_allclose(dict(found.ranking)["fine"], loss(alone, x), rtol=1e-3)
    run_example(qt.nnx.sensitivity, model=model, wrapped=wrapped, batch=x, loss_fn=loss)
    refused(ValueError, "keep=4", found.rules, 4)


@pytest.mark.exhaustive
@pytest.mark.quick
def test_excluded_layers_and_refused_models():
    model, x = Planted(), X[:, :16]

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    wrapped = qt.nnx.wrap(model, qt.Rules({"good": None}, default=INT8))
    rules = qt.nnx.sensitivity(wrapped, x, loss).rules(1)
    assert rules.lookup(["good"], []) is None
    assert sorted(map(str, (key for key, _ in rules.rules))) == ["^bad$", "^fine$"]
    frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, [x]))
    with refused(ValueError, r"rules: the model was frozen, .* write sensitivity"):
        qt.nnx.sensitivity(frozen, x, loss).rules(1)
    with refused(TypeError, "stored kernels, from quantize, and no others to compare"):
        qt.nnx.sensitivity(qt.nnx.quantize(wrapped), x, loss)
    with pytest.raises(ValueError, match=r"sensitivity: .*has not been started; .*start_scales"):
        qt.nnx.sensitivity(qt.nnx.wrap(model, qt.recipes.int4_lsq), x, loss)
    assert qt.nnx.numerics(qt.nnx.quantize(model, INT8), x, loss).unreached == ()


def test_what_is_not_finite_is_said(wrapped):
    found = qt.nnx.numerics(wrapped, X.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf), loss_fn)
    row = row_of(found, "a", "lhs", "forward")
    assert float(row.tally.nonfinite) > 0
    assert "are NaN or infinite" in str(found)
    assert "are NaN or infinite" not in str(qt.nnx.numerics(wrapped, X, loss_fn))


@pytest.mark.sample("spec0")
@pytest.mark.parametrize("spec", [qt.BlockFormat.tensor("e4m3fn"), "mxfp8_e4m3"])
def test_zeros_have_no_scale_that_says_anything(spec):
    """Oracle: the scales of what is not zero, and none where all is."""
    recipe = qt.Recipe(spec, gradient=None)
    model = qt.nnx.wrap(nnx.Linear(32, 4, rngs=nnx.Rngs(0)), recipe)

    def scales_of(x):
        row = row_of(qt.nnx.numerics(model, x, loss_fn), "", "lhs", "forward")
        return float(row.tally.least_scale), float(row.tally.largest_scale)

    assert scales_of(jnp.zeros((2, 32))) == (np.inf, 0)
    assert scales_of(X.at[2:].set(0)) == scales_of(X[:2])


def test_sums_and_other_operands(found):
    total = sum([found, found])
    assert row_of(total, "a", "lhs", "forward").tally.uses == 2
    with pytest.raises(TypeError):
        found + 3


class Routed(nnx.Module):
    def __init__(self):
        self.router, self.up = (
            nnx.Param(jax.random.normal(jax.random.key(i), (16, 16))) for i in (0, 1)
        )

    def __call__(self, x):
        return (x @ x.T) @ x @ self.router @ self.up


def test_rules_of_a_sensitivity_keep_those_for_parameters():
    """The first matmul, of two activations, says nothing about the layer. Oracle: the old rules."""
    model = nnx.Dict(moe=Routed(), last=nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
    rules = qt.Rules({"moe/router": None}, default=qt.recipes.weight_only_e4m3)
    inputs = jax.random.normal(jax.random.key(2), (8, 16))
    wrapped = qt.nnx.wrap(model, rules)
    run = lambda model, x: jnp.mean(model.last(model.moe(x)) ** 2)  # noqa: E731
    found = qt.nnx.sensitivity(wrapped, inputs, run).rules(keep=0)
    again = qt.nnx.wrap(model, found)
    assert str(qt.nnx.report(run, again, inputs)) == str(qt.nnx.report(run, wrapped, inputs))


def test_advice_of_a_sensitivity_is_for_that_model():
    model = qt.nnx.wrap(Net(), qt.Rules({"^a$": INT8, "^b$": qt.Recipe(BLOCKS)}, default=None))
    target = X[:, :4]
    found = qt.nnx.sensitivity(model, X, lambda m, x: jnp.mean((m(x) - target) ** 2))
    assert "default=recipe" not in str(found)  # which would quantize the head, too
    assert (found.ranking[0][1] > 0) == (".rules(keep=1)" in str(found))
    broken = qt.nnx.sensitivity(model, X.at[0, 0].set(jnp.nan), loss_fn)
    assert "the loss is NaN with no layer quantized" in str(broken)


class Scored(nnx.Module):
    """With a product of parameters alone, which are the same on every device."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.float32(np.random.default_rng(1).normal(size=(32, 4))))
        self.other = nnx.Param(jnp.float32(np.random.default_rng(2).normal(size=(4, 8))))

    def __call__(self, x):
        return x @ (self.kernel[...] @ self.other[...])


def assert_same_sums(a, b, rtol=0):
    """Counts alike; extremes within `rtol`; sums but for the order of summation."""
    for mine, other in zip(a.rows, b.rows, strict=True):
        assert mine.key == other.key
        for name in ("elements", "saturated", "flushed"):
            assert getattr(mine.tally, name) == getattr(other.tally, name), (mine.key, name)
        for name in ("amax", "least_scale", "largest_scale"):
            got, expected = (getattr(found.tally, name) for found in (mine, other))
            np.testing.assert_allclose(got, expected, rtol=rtol, err_msg=f"{mine.key} {name}")
        np.testing.assert_allclose(mine.tally.sqnr_db, other.tally.sqnr_db, rtol=1e-5)


@pytest.mark.devices(2)
@pytest.mark.quick
@pytest.mark.sample("AxisType.Auto")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_it_is_that_of_one_device(kind, found, wrapped):
    """XLA sums products of 4 rows, which a device has, in another order than those of 8: with jax
    0.12 results of `head`, which nothing rounds, differ in 20 of 32 elements. Cotangents, hence
    their scales, are such sums of up to 64 terms, forward and back.
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        assert_same_sums(qt.nnx.numerics(wrapped, placed, loss_fn), found, rtol=2 * 64 * 2.0**-24)


@pytest.mark.devices(2)
def test_shards_merge_to_the_sum_of_their_reports():
    """Oracle: each shard's report by itself, added."""
    model = qt.nnx.wrap(Scored(), INT8)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    graph, state = nnx.split(model)

    def of_shard(state, x):
        report = qt.nnx.numerics(nnx.merge(graph, state), x, loss_fn)
        return report.merge_across("data")

    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    merged = jax.jit(jax.shard_map(of_shard, mesh=mesh, **specs))(state, X)
    parts = [qt.nnx.numerics(model, x, loss_fn) for x in (X[:4], X[4:])]
    # The cotangent of what is the same on every device is the sum over them, there.
    alike = [r.key for r in merged.rows if (r.product, r.operand) != ("other", "cotangent")]
    assert len(alike) == len(merged.rows) - 1
    chosen = (
        Numerics(rows=tuple(r for r in report.rows if r.key in alike))
        for report in (merged, parts[0] + parts[1])
    )
    assert_same_sums(*chosen)


def test_scalars_are_the_numbers_of_the_table_by_unique_names(found):
    scalars = found.scalars()
    assert all(type(number) is float for number in scalars.values())
    per_row = [row.scalars() for row in found.rows]
    assert len(scalars) == sum(map(len, per_row))  # no name hides another
    rows = [r for r in found.rows if (r.path, r.operand) == ("b", "cotangent")]
    assert len(rows) == 2  # dgrad and wgrad round it along other axes
    for row in rows:
        name = f"b:{row.product}/cotangent ({row.parts})/"
        assert scalars[name + "sqnr_db"] == row.tally.sqnr_db
        assert scalars[name + "amax"] == float(row.tally.amax)
    not_measured = [r for r in found.rows if not float(r.tally.uses)]
    assert not any(name.startswith(f"{r.path}:") for r in not_measured for name in scalars)
