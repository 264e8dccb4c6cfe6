"""The README's examples run, and print what stands there; it stays short."""

import re
from pathlib import Path

import examples
import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.docs
def test_the_examples_run():
    names: dict = {"__name__": "__main__"}
    assert examples.run(README, names) == examples.expected(README)
    assert isinstance(names["fp8"], type(names["model"]))
    assert all(losses[-1] < losses[0] for losses in names["losses"].values())
    kinds = [block.kind for block in examples.blocks(README.read_text(encoding="utf-8"))]
    assert kinds == ["sh", "python", "pycon", "python", "console", "python", "pycon"]


def test_it_is_two_screens_long():
    words = re.sub(r"<[^>]*>", "", README.read_text(encoding="utf-8")).split()
    assert len(words) <= 1050
