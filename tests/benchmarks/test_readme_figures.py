"""The figures of README.md, whose oracle are the stored results and a made-up set of them."""

import re

import readme_figures
from readme_figures import QUOTED, figures


def made_up(seconds: float = 2.0):
    """Results in which every row named takes `seconds`, and its yardstick 1.6."""
    origin = {"host": "a computer", "date": "2026-01-02 03:04 UTC"}
    stored = {quoted.benchmark: [origin] for quoted in QUOTED}
    for quoted in QUOTED:
        yardsticks = [(other, 1600.0) for other in quoted.others]
        for row, median in ((quoted.row, 1e3 * seconds), *yardsticks):
            stored[quoted.benchmark].append(
                {"table": f"{quoted.table} and more", "row": row, "median_ms": median}
            )
    rows = [{"compared": 8, "differ": {"finite": 0, "none": 1}}] * 3
    on_gpu = [{"compared": 4, "differ": {"finite": 0}}]
    return stored | {"every_float32": [origin, *rows], "every_float32_gpu": [origin, *on_gpu]}


def test_figures_of_results_that_are_made_up():
    codes, step, conversion, gpu, *rest = figures(made_up()).splitlines()
    counts = "3 of 48 on a CPU (2026-01-02), 0 of 4 on a GPU (2026-01-02)."
    assert codes.endswith(f" Codes that differ: {counts}")
    assert step.startswith("* A training step of a transformer of width 512 in emulated FP8 takes")
    assert step.endswith(" and 1.25 times that of qwix in the same formats.")
    assert " takes 1.25 times as long as the same in [fifteen lines of torch]" in conversion
    assert " takes 1.25 times as long in native FP8 as in bfloat16." in gpu
    assert rest == ["", "Times are medians on a computer; 2026-01-02."]


def test_peaks_of_memory_are_compared_with_those_of_torch():
    stored = made_up()
    for row, peak in (("by channel", 289), ("torch, by channel", 4321)):
        line = {"table": "1024 MiB of bfloat16: peak of memory", "row": row, "peak_mib": peak}
        stored["conversion"].append(line)
    sentence = "* The conversion needs 289 MiB of memory, that in torch 4,321 MiB."
    assert sentence in figures(stored).splitlines()


def test_what_was_not_measured_is_not_shown():
    stored = made_up()
    stored["training"] = [row for row in stored["training"] if row.get("row") != "qwix"]
    del stored["every_float32"], stored["every_float32_gpu"]
    sentence, *_ = figures(stored).splitlines()
    assert sentence.startswith("* Converting ")
    assert figures({}) == ""


def test_the_readme_quotes_the_stored_results():
    text = readme_figures.README.read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- figures\b[^>]*-->\n(.*?)<!-- /figures -->", text, re.DOTALL)
    assert block.strip() == figures(readme_figures.stored_results())
