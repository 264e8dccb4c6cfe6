"""The page "Convert a real model": its table has the columns that the command writes today."""

import re
from pathlib import Path

from convert_model import FORMATS, HEADS, Measured

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "howto" / "real-model.md"


def test_the_page_has_the_rows_of_the_command():
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- real-model\b[^>]*-->\n(.*?)<!-- /real-model -->", text, re.DOTALL)
    heads, _, *rows = re.findall(r"^\| (.*) \|$", block, re.MULTILINE)
    assert heads == " | ".join(HEADS)
    assert [row.split(" | ")[0] for row in rows] == ["before", *FORMATS]


def test_cells_compare_with_the_model_before():
    before = Measured(200.0, None, 18.0, " a list\nof | lists")
    assert before.cells(before) == ("200.0 MiB (100%)", "", "18.00", r"a list of \| lists")
    fp8 = Measured(110.0, 31.62, 18.9, "a list")
    assert fp8.cells(before) == ("110.0 MiB (55%)", "31.6 dB", "18.90 (+5.0%)", "a list")
