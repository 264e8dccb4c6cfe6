"""Experiments: each has its say in seconds, and what it claims holds in that small setting too."""

import importlib
import inspect

import numpy as np
import pytest
import results
from _results import Recorder, load

import qtoolkit as qt

NAMES = results.EXPERIMENTS
TRAINING = {
    "rounding_modes",
    "fp8_gradients",
    "qat",
    "ptq_methods",
}  # each compiles for ten seconds and more


@pytest.mark.sample("accumulation")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive if n in TRAINING else ()) for n in NAMES]
)
def test_its_quick_setting_bears_the_claims_out(name, tmp_path, capsys):
    experiment = importlib.import_module(name)
    more = {"seeds": 1} if "seeds" in inspect.signature(experiment.main).parameters else {}
    experiment.main(seed=0, out=tmp_path, quick=True, **more)
    origin, *rows = load(tmp_path / f"{name}.jsonl")
    assert origin["quick"]
    claims = [row for row in rows if "holds" in row]
    assert claims
    assert all(claim["holds"] for claim in claims), capsys.readouterr().out
    assert any("figures" in row for row in rows)


@pytest.mark.sample("rounding_modes", "random_bits", "qat", "ptq_real_models")
@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES + results.FETCHING)
def test_it_says_its_command_and_its_claim(name):
    text = " ".join(inspect.getdoc(importlib.import_module(name)).split("\n    "))
    of_all = "[--models build/models]" if name in results.FETCHING else "[--seed 0]"
    assert f"Command: python experiments/{name}.py {of_all}" in text
    assert "[--out experiments/results] [--quick]" in " ".join(text.split())
    assert "\nClaim: " in text


@pytest.mark.quick
def test_a_claim_that_fails_is_said_and_stands_on_the_page(tmp_path, capsys):
    with Recorder("accumulation", tmp_path / "results", quick=False) as recorder:
        recorder.figures("sums", {"bfloat16": {"mean": "0.25", "error": "0.1"}})
        recorder.claim("sums are exact", "0.25 of 4", holds=np.bool_(False))
    assert "DOES NOT HOLD: sums are exact: 0.25 of 4" in capsys.readouterr().out
    results.main(tmp_path / "results")
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| accumulation | sums are exact | 0.25 of 4 | **does not hold** |" in page
    page = (tmp_path / "results" / "tables.md").read_text()
    assert "### sums\n\n|  | mean | error |" in page
    assert "| bfloat16 | 0.25 | 0.1 |" in page
    assert "Performance targets" not in page


@pytest.mark.quick
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_the_yardstick_of_double_rounding(name):
    """Ties, and the numbers beside them, by hand: E4M3 and E5M2 have steps 1/8 and 1/4 at 1."""
    from double_rounding import nearest

    step = {"e4m3fn": 1 / 8, "e5m2": 1 / 4}[name]
    x = np.float64([1 + step / 2, 1 + 1.5 * step, 1 + step / 2 + 2**-20, -1 - step / 2, 0.0])
    expected = [1, 1 + 2 * step, 1 + step, -1, 0]
    np.testing.assert_array_equal(nearest(x, name), expected)
    least = float(qt.format(name).min_positive)
    np.testing.assert_array_equal(nearest(np.float64([least / 2, 0.6 * least]), name), [0, least])
