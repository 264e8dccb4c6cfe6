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
    lines = figures(made_up()).splitlines()
    assert lines[:2] == ["| measured | figure |", "| --- | --- |"]
    assert lines[2].endswith("| 3 of 48 by a CPU, 0 of 4 by a GPU |")
    one, two = "1.25 times as long |", "1.25 and 1.25 times as long |"
    assert [line.split(" | ")[-1] for line in lines[3:8]] == [one, one, two, one, one]
    assert lines[8:] == ["", "Medians; a computer; 2026-01-02"]


def test_what_was_not_measured_is_left_out():
    stored = made_up()
    stored["casts"] = [row for row in stored["casts"] if row.get("row") != "C e4m3fn"]
    del stored["conversion"], stored["every_float32"], stored["every_float32_gpu"]
    assert len(figures(stored).splitlines()) == 2 + len(QUOTED) - 2 + 2
    assert figures({}).splitlines() == ["| measured | figure |", "| --- | --- |"]


def test_the_readme_quotes_the_stored_results():
    text = readme_figures.README.read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- figures\b[^>]*-->\n(.*?)<!-- /figures -->", text, re.DOTALL)
    assert block.strip() == figures(readme_figures.stored_results())


def test_the_titles_and_rows_are_those_that_the_benchmarks_write():
    stored = readme_figures.stored_results()
    block = figures(stored)
    sought = [quoted.words for quoted in QUOTED if quoted.benchmark in stored]
    assert [words for words in sought if words not in block] == []
