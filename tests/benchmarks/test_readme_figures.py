"""The figures of README.md, whose oracle are the stored results and a made-up set of them."""

import re

import readme_figures
from readme_figures import RATIOS, figures


def made_up(seconds: float = 2.0):
    """Results in which every row named takes `seconds`, and its yardstick 1.6."""
    origin = {"host": "a computer", "date": "2026-01-02 03:04 UTC"}
    stored = {ratio.benchmark: [origin] for ratio in RATIOS}
    for ratio in RATIOS:
        for row, median in ((ratio.row, 1e3 * seconds), (ratio.of, 1600.0)):
            stored[ratio.benchmark].append(
                {"table": f"{ratio.table} and more", "row": row, "median_ms": median}
            )
    rows = [{"compared": 8, "differ": {"finite": 0, "none": 1}}] * 3
    on_gpu = [{"compared": 4, "differ": {"finite": 0}}]
    return stored | {"every_float32": [origin, *rows], "every_float32_gpu": [origin, *on_gpu]}


def test_figures_of_results_that_are_made_up():
    lines = figures(made_up()).splitlines()
    assert lines[:2] == ["| measured | figure |", "| --- | --- |"]
    assert lines[2].endswith("| 3 of 48 |")
    assert lines[3].endswith(", made by a GPU | 0 of 4 |")
    assert [line.split(" | ")[-1] for line in lines[4:10]] == ["1.25 times as long |"] * 6
    assert lines[10:] == ["", "Medians; a computer; 2026-01-02"]


def test_what_was_not_measured_is_left_out():
    stored = made_up()
    stored["casts"] = [row for row in stored["casts"] if row.get("row") != "C e4m3fn"]
    del stored["conversion"], stored["every_float32"], stored["every_float32_gpu"]
    assert len(figures(stored).splitlines()) == 2 + len(RATIOS) - 2 + 2
    assert figures({}).splitlines() == ["| measured | figure |", "| --- | --- |"]


def test_the_readme_quotes_the_stored_results():
    text = readme_figures.README.read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- figures\b[^>]*-->\n(.*?)<!-- /figures -->", text, re.DOTALL)
    assert block.strip() == figures(readme_figures.stored_results())


def test_the_titles_and_rows_are_those_that_the_benchmarks_write():
    stored = readme_figures.stored_results()
    block = figures(stored)
    sought = [ratio.words for ratio in RATIOS if ratio.benchmark in stored]
    assert [words for words in sought if words not in block] == []
