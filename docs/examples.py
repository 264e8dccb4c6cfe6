"""The examples of the documentation: found in its pages, run, and their outputs written.

Command: python docs/examples.py PAGE... [--write]
Claim: a page's Python runs from top to bottom in one namespace, in an empty folder; what stands
below a `>>>` is what it prints. With --write the outputs are written anew into the pages.

Three kinds of fenced blocks are run: `python`, `pycon` (with outputs) and `sh`, of which those
lines that call `qtoolkit`. A block that is not to be run is called otherwise: `shell`.
"""

import argparse
import contextlib
import dataclasses
import doctest
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent / "pages"
# What the examples of docstrings use without importing it.
DOCSTRING_IMPORTS = """\
import jax, jax.numpy as jnp, numpy as np, optax
import qtoolkit as qt
from flax import linen as nn, nnx
"""
_BLOCK = re.compile(r"^```(python|pycon|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
      kind: "python", "pycon" or "sh".
      text: Between the fences.
      line: Of the file, where the text begins.
    """

    kind: str
    text: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(text):
        yield Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1)


def run(page: Path, names: dict[str, Any] | None = None) -> dict[str, str]:
    """Runs a page in a folder of its own, and returns each example's source with what it prints.

    Raises:
      Exception: Whatever a block raises, with the page's name and line in its traceback.
    """
    names = {"__name__": "__main__"} if names is None else names
    outputs: dict[str, str] = {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block in blocks(page.read_text(encoding="utf-8")):
                _RUNNERS[block.kind](page, block, names, outputs)
        finally:
            os.chdir(before)
    return outputs


def _run_python(page: Path, block: Block, names: dict[str, Any], _: dict[str, str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)


def _run_pycon(page: Path, block: Block, names: dict[str, Any], outputs: dict[str, str]) -> None:
    for example in doctest.DocTestParser().get_examples(block.text):
        printed = io.StringIO()
        source = "\n" * (block.line + example.lineno - 1) + example.source
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(source, str(page), "single"), names)
            except Exception as error:
                # As a reader sees it, without the frames between.
                printed.write("Traceback (most recent call last):\n    ...\n")
                printed.write(f"{type(error).__name__}: {error}\n")
        outputs[f"{block.line + example.lineno}: {example.source}"] = printed.getvalue()


def _run_sh(page: Path, block: Block, _: dict[str, Any], __: dict[str, str]) -> None:
    from typer.testing import CliRunner

    from qtoolkit.cli._app import app

    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["qtoolkit"]:
            done = CliRunner().invoke(app, words[1:])
            if done.exit_code:
                raise RuntimeError(f"{page}: {line}\nexit code {done.exit_code}\n{done.output}")


_RUNNERS = {"python": _run_python, "pycon": _run_pycon, "sh": _run_sh}


def expected(page: Path) -> dict[str, str]:
    """What the page says that its examples print, by the keys of `run`."""
    found = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.kind == "pycon":
            for example in doctest.DocTestParser().get_examples(block.text):
                key = f"{block.line + example.lineno}: {example.source}"
                found[key] = example.want
    return found


def written(page: Path, outputs: dict[str, str]) -> str:
    """The text of the page with these outputs in place of its own."""
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for block in reversed(list(blocks(page.read_text(encoding="utf-8")))):
        if block.kind != "pycon":
            continue
        text = ""
        for example in doctest.DocTestParser().get_examples(block.text):
            first, *rest = example.source.splitlines(keepends=True)
            text += f">>> {first}" + "".join(f"... {line}" for line in rest)
            text += outputs[f"{block.line + example.lineno}: {example.source}"]
        lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = [text]
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, default=sorted(PAGES.rglob("*.md")))
    parser.add_argument("--write", action="store_true", help="the outputs into the pages")
    arguments = parser.parse_args()
    for page in arguments.pages:
        outputs = run(page.resolve())
        wrong = {key: text for key, text in outputs.items() if expected(page)[key] != text}
        if arguments.write:
            page.write_text(written(page, outputs), encoding="utf-8")
        for key, text in wrong.items():
            print(f"{page}:{key}{text}")


if __name__ == "__main__":
    main()
