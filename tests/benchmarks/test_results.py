"""What benchmarks store, and the page that is made of it."""

import numpy as np
import pytest
import results
from _results import Recorder, at_most, faster_by, load, store
from c_casts import NUMPY_HAS, ROUNDINGS, SATURATIONS

MEDIANS = {"ours": 1.0, "C": 0.8, "slow peer": 4.0, "fast peer": 1.4}


@pytest.mark.parametrize(
    ("promise", "ratio", "holds", "of"),
    [
        (at_most(1.25, "C"), 1.25, True, "C"),
        (at_most(1.2, "C"), 1.25, False, "C"),
        (at_most(1, "slow peer", "fast peer"), 0.714, True, "fast peer"),
        (faster_by(1.4, "slow peer", "fast peer"), 1.4, True, "fast peer"),
        (faster_by(1.5, "slow peer", "fast peer", "not installed"), 1.4, False, "fast peer"),
    ],
)
def test_a_promise_is_judged_by_the_fastest_row_it_names(promise, ratio, holds, of):
    verdict = promise.judged(MEDIANS["ours"], MEDIANS)
    assert (verdict["ratio"], verdict["holds"], verdict["of"]) == (ratio, holds, of)


def test_a_promise_without_measurements_has_no_verdict():
    assert faster_by(1.5, "not installed").judged(1.0, MEDIANS) is None
    assert at_most(1.25).judged(1.0, MEDIANS) is None


def record(folder) -> None:
    seconds = {"C": np.array([1e-3, 2e-3, 3e-3]), "ours": np.array([2e-3, 3e-3, 7e-3])}
    with Recorder("casts", folder, quick=True) as recorder:
        recorder.table("a table", seconds, "C", {"ours": [at_most(1.25, "C"), at_most(2, "C")]})
        recorder.count("a count", "float16 to e5m2", 65536, 3)
        recorder.memory("bytes", {"plain": 1000, "ours": 1500}, "plain")
        recorder.peaks("a peak", {"ours": 500.0}, 400)


def test_the_recorder_stores_medians_ratios_and_verdicts(tmp_path, capsys):
    record(tmp_path)
    origin, yardstick, ours, count, *bytes_of, peak = load(tmp_path / "casts.jsonl")
    assert origin["quick"] is True
    assert {"command", "date", "commit", "host", "versions"} <= set(origin)
    assert (yardstick["median_ms"], yardstick["ratio"]) == (2.0, 1.0)
    assert (ours["median_ms"], ours["ratio"], ours["quartiles_ms"]) == (3.0, 1.5, [2.5, 5.0])
    assert [verdict["holds"] for verdict in ours["promises"]] == [False, True]
    assert (count["compared"], count["differ"]) == (65536, 3)
    assert [(row["bytes"], row["ratio"]) for row in bytes_of] == [(1000, 1.0), (1500, 1.5)]
    assert (peak["peak_mib"], peak["promises"][0]["ratio"]) == (500, 1.25)
    assert "3 targets, 2 missed" in capsys.readouterr().out


def test_a_run_that_fails_keeps_what_was_stored_before(tmp_path):
    record(tmp_path)
    before = (tmp_path / "casts.jsonl").read_text()
    with pytest.raises(ValueError, match="broken"), Recorder("casts", tmp_path):
        raise ValueError("broken")
    assert (tmp_path / "casts.jsonl").read_text() == before


def test_the_pages_hold_every_row_and_say_what_fell_short(tmp_path):
    folder = tmp_path / "results"
    record(folder)
    every = {"differ": dict.fromkeys(SATURATIONS, 0), "examples": {key: [] for key in SATURATIONS}}
    wrong = {
        "differ": {"finite": 0, "propagate": 0, "none": 17},
        "examples": {"finite": [], "propagate": [], "none": ["0x43e80001"]},
    }
    rows = [
        {"format": name, "rounding": mode, "compared": 2**32, "seconds": 30.0, **every}
        for name in NUMPY_HAS
        for mode in ROUNDINGS
    ]
    origin = load(folder / "casts.jsonl")[0] | {"compiler": "gcc 12"}
    store(folder / "every_float32.jsonl", [origin, rows[0] | wrong, *rows[1:-1]])
    results.main(folder)
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| casts: a table | <= 1.25 | ours 1.50 of C |" in page
    page = (folder / "tables.md").read_text()
    assert "<= 1.25 x C: 1.50; <= 2 x C: 1.50 | **missed**; met |" in page
    assert "A quick run" in page
    assert "| float16 to e5m2 | 65,536 | 3 |" in page
    assert "231 of 234 comparisons, 992,137,445,376 codes in 38 minutes: **17 differ**" in page
    assert "| float16 | 0, 0, 17 | 0, 0, 0 |" in page
    assert "not compared" in page
    assert "* float16 nearest_even none: 0x43e80001" in page
