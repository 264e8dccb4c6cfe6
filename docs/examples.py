"""The examples of the documentation: found in its pages, run, and their outputs written.

Command: python docs/examples.py PAGE... [--write]
Claim: a page's Python runs from top to bottom in one namespace, in an empty folder; what stands
below a `>>>` or a `$` is what it prints. With --write the outputs are written anew into the pages.

Four kinds of fenced blocks are run: `python`, `pycon` (`>>>` and outputs), `console` (`$ qtoolkit`
and outputs) and `sh`, of which only the lines that call `qtoolkit`. Blocks of other names, such as
`shell`, are not run.
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
_BLOCK = re.compile(r"^```(python|pycon|console|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
      kind: "python", "pycon", "console" or "sh".
      text: Between the fences.
      line: Of the file, where the text begins.
    """

    kind: str
    text: str
    line: int


@dataclasses.dataclass(frozen=True)
class Example:
    """What a reader types, and the output below it.

    Attributes:
      source: Lines without their prompts.
      output: As it stands on the page.
      line: Of the file, where the source begins.
    """

    source: str
    output: str
    line: int

    @property
    def key(self) -> str:
        return f"{self.line}: {self.source}"


def blocks(text: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(text):
        yield Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1)


def examples_of(block: Block) -> Iterator[Example]:
    """The examples with outputs of a block: none in `python` and `sh`."""
    if block.kind == "pycon":
        for example in doctest.DocTestParser().get_examples(block.text):
            yield Example(example.source, example.want, block.line + example.lineno)
    elif block.kind == "console":
        for match in _COMMAND.finditer(block.text):
            line = block.line + block.text.count("\n", 0, match.start())
            yield Example(match[1], match[2], line)


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
    for example in examples_of(block):
        printed = io.StringIO()
        source = "\n" * (example.line - 1) + example.source
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(source, str(page), "single"), names)
            except Exception as error:
                # As a reader sees it, without the frames between.
                printed.write("Traceback (most recent call last):\n    ...\n")
                printed.write(f"{type(error).__name__}: {error}\n")
        outputs[example.key] = printed.getvalue()


def _run_console(page: Path, block: Block, _: dict[str, Any], outputs: dict[str, str]) -> None:
    for example in examples_of(block):
        outputs[example.key] = _printed_by(page, example.source)


def _run_sh(page: Path, block: Block, _: dict[str, Any], __: dict[str, str]) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        if shlex.split(line, comments=True)[:1] == ["qtoolkit"]:
            _printed_by(page, line)


def _printed_by(page: Path, line: str) -> str:
    """Standard output of a command; progress goes to standard error.

    Raises:
      RuntimeError: The command fails, or is another one than `qtoolkit`.
    """
    from typer.testing import CliRunner

    from qtoolkit.cli.internal import app

    program, *words = shlex.split(line, comments=True)
    if program != "qtoolkit":
        raise RuntimeError(f"{page}: {line}\nonly `qtoolkit` runs here; write such a line as shell")
    done = CliRunner().invoke(app, words)
    if done.exit_code:
        raise RuntimeError(f"{page}: {line}\nexit code {done.exit_code}\n{done.output}")
    return done.stdout


_RUNNERS = {"python": _run_python, "pycon": _run_pycon, "console": _run_console, "sh": _run_sh}


def expected(page: Path) -> dict[str, str]:
    """What the page says that its examples print, by the keys of `run`."""
    return {
        example.key: example.output
        for block in blocks(page.read_text(encoding="utf-8"))
        for example in examples_of(block)
    }


def written(page: Path, outputs: dict[str, str]) -> str:
    """The text of the page with these outputs in place of its own."""
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for block in reversed(list(blocks(text))):
        anew = ""
        for example in examples_of(block):
            first, *rest = example.source.splitlines(keepends=True)
            prompt = ">>>" if block.kind == "pycon" else "$"
            anew += f"{prompt} {first}" + "".join(f"... {line}" for line in rest)
            anew += outputs[example.key]
        if anew:
            lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = [anew]
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
