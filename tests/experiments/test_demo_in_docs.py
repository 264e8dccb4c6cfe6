"""The demo's table in the docs: written by a command, with the rows that the demo prints today."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from demo import Results

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/pages/howto/real-model.md"
RESULTS = Results(
    wide=2.0,
    quantized=2.01,
    naive=2.2,
    wide_final=1.5,
    converted=1.53,
    step_seconds=(0.05, 0.06),
    sizes=(4000, 1200),
    sqnr_db=31.46,
    format="e4m3fn",
    gradient="e5m2",
)
BEFORE, BLOCK, AFTER = "# Title\n\n<!-- demo: how -->\n", "\n| old |\n\n", "<!-- /demo -->\n\nend\n"


def update(page, *arguments):
    command = [sys.executable, ROOT / "experiments" / "update_page.py", *arguments]
    return subprocess.run([*command, "--page", page], capture_output=True, text=True, check=False)


def test_the_page_has_the_rows_of_the_demo():
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- demo\b[^>]*-->\n(.*?)<!-- /demo -->", text, re.DOTALL)
    rows = re.findall(r"^\| (.*?) \| .*? \|$", block, re.MULTILINE)
    assert rows == ["measured", "---", *(name for name, _ in RESULTS.rows())]


def test_figures_as_they_are_printed():
    assert dict(RESULTS.rows()) == {
        "float32, last five evaluations": "2.0000 bits/byte",
        "e4m3fn / e5m2, last five evaluations": "2.0100 bits/byte (+0.50%)",
        "e4m3fn by astype, last five evaluations": "2.2000 bits/byte (+10.00%)",
        "float32, final weights": "1.5000 bits/byte",
        "final weights, converted to e4m3fn": "1.5300 bits/byte (+2.00%)",
        "time of a step, float32 and quantized": "50.0 and 60.0 ms (ratio 1.20)",
        "size of the checkpoint, float32 and e4m3fn": "4,000 and 1,200 bytes (ratio 0.30)",
        "mean SQNR of the converted weights": "31.5 dB",
    }


def test_the_conclusion_says_what_the_figures_say():
    assert RESULTS.conclusion() == (
        "Training in e4m3fn (gradients in e5m2) ended 0.50% above float32. With `astype` alone, "
        "without scales, it ended 10.00% above it. The e4m3fn file has 30% of the bytes of the "
        "float32 file, and its loss is 2.00% above the original's."
    )
    diverged = dataclasses.replace(RESULTS, naive=float("nan")).conclusion()
    assert "it ended in NaN, incomparable with it" in diverged


def test_the_command_replaces_the_block_and_nothing_else(tmp_path):
    page, table = tmp_path / "page.md", tmp_path / "table.md"
    page.write_text(f"{BEFORE}{BLOCK}{AFTER}")
    table.write_text(RESULTS.markdown(r"400 steps, \1 & <b>"))
    for _ in range(2):  # a second time changes nothing more
        done = update(page, "demo", table)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert page.read_text() == f"{BEFORE}\n{table.read_text()}\n{AFTER}"
