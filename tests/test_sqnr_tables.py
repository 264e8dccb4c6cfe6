"""The experiment `sqnr_tables`: its integrals, its optimum, some cells and its exit code."""

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from scipy import integrate, stats
from typer.testing import CliRunner

import qtoolkit as qt

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tables():
    path = ROOT / "experiments" / "sqnr_tables.py"
    module_spec = importlib.util.spec_from_file_location("sqnr_tables", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules["sqnr_tables"] = module  # dataclasses look their module up
    module_spec.loader.exec_module(module)
    yield module
    del sys.modules["sqnr_tables"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "scipy_has"),
    [("UNIFORM", stats.uniform(-1, 2)), ("NORMAL", stats.norm()), ("STUDENT", stats.t(8))],
)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_moments_are_the_integrals_that_scipy_finds(tables, name, scipy_has, order):
    distribution = getattr(tables, name)
    for share in (0.003, 0.02, 0.1, 1):
        x = share * distribution.end
        expected, error = integrate.quad(
            lambda t: t**order * scipy_has.pdf(t), 0, x, epsabs=1e-13, points=[min(x, 3)]
        )
        ours = distribution.moments(np.array(x))[order]
        assert abs(ours - expected) <= error + 1e-14


@pytest.mark.quick
@pytest.mark.parametrize("name", ["int4", "int6", "int8"])
def test_equal_steps_fit_a_uniform_variable_best(tables, name):
    # n cells of width 2 / n and of error 1 / (3 n**2), against the variance 1 / 3.
    cells = 2 * int(qt.format(name).max_finite) + 1
    ours = tables.best_sqnr(qt.format(name), tables.UNIFORM)
    assert ours == pytest.approx(20 * math.log10(cells), abs=1e-9)


@pytest.mark.quick
@pytest.mark.parametrize("largest", [7.0, 56.0, 448.0])
def test_error_of_a_scale_is_that_of_the_toolkits_rounding(tables, largest):
    # The midpoint rule on 2**20 cells. The integrand is continuous and its parts are smooth, so
    # that the rule's own error is of the order of the squared width, 1e-8.
    fmt = qt.format("e4m3fn")
    x = ((np.arange(2**20) + 0.5) * (100 / 2**20)).astype(np.float32)
    scale = np.float32(largest / 448)  # a power of two: the division is exact
    rounded = np.asarray(qt.round_to_format(x / scale, fmt)) * scale
    errors = (x.astype(np.float64) - rounded) ** 2
    expected = 2 * 100 * np.mean(errors * stats.t(8).pdf(x.astype(np.float64)))
    (ours,) = tables.mean_squared_error(tables.magnitudes(fmt), tables.STUDENT, np.array([largest]))
    assert ours == pytest.approx(expected, rel=1e-6)


@pytest.mark.quick
def test_magnitudes_exclude_lowest_integer_and_nonfinite(tables):
    assert tables.magnitudes(qt.format("int4")).tolist() == list(range(8))
    assert tables.magnitudes(qt.format("e2m1fn")).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert tables.magnitudes(qt.format("e5m2"))[-1] == 57344


def test_table_a_is_the_published_one(tables):
    cells = tables.table_a(tables.GRIDS)
    assert len(cells) == 39
    assert max(abs(cell.difference) for cell in cells) <= 0.01


@pytest.mark.sample("mxfp8_e4m3 floor")
@pytest.mark.parametrize("name", ["mxfp8_e4m3 floor", "nvfp4", "int8 by tensor"])
def test_rows_of_table_b_are_the_published_ones(tables, name):
    # With all 2**22 samples: with fewer, the clipping of "floor" alone would scatter by 0.06 dB.
    (scheme,) = (scheme for scheme in tables.SCHEMES if scheme.name == name)
    cells = tables.table_b(tables.SAMPLES, (scheme,))
    assert len(cells) == 3
    assert max(abs(cell.difference) for cell in cells) <= 0.02


def run(tables, *arguments):
    app = typer.Typer()
    app.command()(tables.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.quick
def test_the_exit_code_says_whether_a_figure_is_too_far_off(tables, monkeypatch):
    row = tables.GRIDS[-1]
    monkeypatch.setattr(tables, "GRIDS", (row,))
    done = run(tables, "--table", "a")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].endswith("allowed 0.01: holds")

    off = dataclasses.replace(row, published=(35.99, 29.71, 25.52))
    monkeypatch.setattr(tables, "GRIDS", (off,))
    done = run(tables, "--table", "a")
    assert done.exit_code == 1
    last = done.output.splitlines()[-1]
    assert "0.0516 dB (INT6, -31 to 31, t(8)), allowed 0.01: FALLS SHORT" in last


def test_other_numbers_of_samples_are_shown_and_not_judged(tables, monkeypatch):
    monkeypatch.setattr(tables, "SCHEMES", tables.SCHEMES[:1])
    done = run(tables, "--table", "b", "--samples", "128")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].endswith("allowed 0.02 for 4,194,304 samples: not judged")
