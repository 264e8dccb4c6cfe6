"""Tables and progress: rich on a terminal, plain lines that survive a pipe elsewhere."""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence

import typer

from qtoolkit.cli._errors import note


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Prints a table to stdout; the columns named in `right` are aligned to the right.

    Drawn on a terminal that is wide enough; plain lines elsewhere, never folded or cut.
    """
    lines = list(_plain_table(header, rows, right))
    drawn_width = max(map(len, lines)) + len(header)
    if sys.stdout.isatty() and drawn_width <= shutil.get_terminal_size().columns:
        _rich_table(header, rows, right)
    else:
        for line in lines:
            typer.echo(line)


def page_width() -> int:
    """Columns of the terminal, within 40 to 120; 80 where there is none."""
    return min(max(shutil.get_terminal_size().columns, 40), 120)


def prints_unicode() -> bool:
    """Whether stdout can encode more than ASCII."""
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def _plain_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> Iterator[str]:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _rich_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in header:
        drawn.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(Text, row))  # not markup: names may hold square brackets
    Console().print(drawn)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Gives a callback (name, done, total): a bar on a terminal, else a line every tenth."""
    if sys.stderr.isatty():
        with _rich_progress(title) as callback:
            yield callback
    else:
        yield _plain_progress(title)


def _plain_progress(title: str) -> Callable[[str, int, int], None]:
    printed = 0

    def callback(name: str, done: int, total: int) -> None:
        nonlocal printed
        tenths = 10 * done // max(total, 1)
        if tenths > printed:
            printed = tenths
            note(f"{title}: {10 * tenths:3} %  {name}")

    return callback


@contextlib.contextmanager
def _rich_progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(escape(title)),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        TextColumn("{task.fields[tensor]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, tensor="")

        def callback(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, tensor=name)

        yield callback
