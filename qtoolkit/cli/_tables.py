"""Tables and progress: rich on a terminal, plain lines that survive a pipe elsewhere."""

import contextlib
import datetime as dt
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import typer

from qtoolkit.cli._errors import note, printable


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Prints a table to stdout; the columns named in `right` are aligned to the right.

    Drawn on a terminal that is wide enough; plain lines elsewhere, never folded or cut.
    """
    rows = [[*map(printable, row)] for row in rows]
    lines = list(_plain_table(header, rows, right))
    drawn_width = max(map(len, lines)) + len(header)
    if sys.stdout.isatty() and drawn_width <= shutil.get_terminal_size().columns:
        _rich_table(header, rows, right)
    else:
        typer.echo("\n".join(lines))


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
    """Gives a callback (name, bytes done, bytes in all): a bar on a terminal, else lines.

    Both show the bytes, and once they are known, how many a second and the time that is left.
    """
    if sys.stderr.isatty():
        with _rich_progress(title) as callback:
            yield callback
    else:
        yield _plain_progress(title)


_SETTLED = 1.0  # seconds after which a rate says something about the rest


def _plain_progress(title: str, clock: Callable[[], float] = time.monotonic) -> Callable[..., None]:
    """Prints a line at every tenth; without a rate as long as that is of less than a second."""
    printed = 0
    # Of the first call: what comes before it, such as loading JAX, says nothing about the rest.
    first: tuple[float, int] | None = None

    def callback(name: str, done: int, total: int) -> None:
        nonlocal printed, first
        now = clock()
        first = first or (now, done)
        tenths = 10 * done // max(total, 1)
        if tenths > printed:
            printed = tenths
            seconds, count = now - first[0], done - first[1]
            rate = count / seconds if count and seconds >= _SETTLED else None
            note(f"{title}: {10 * tenths:3} %, {_amount(done, total, rate)}  {name}")

    return callback


def _amount(done: int, total: int, rate: float | None) -> str:
    """Bytes, and if the rate is known bytes a second and the time that is left."""
    from rich.filesize import pick_unit_and_suffix

    size, unit = pick_unit_and_suffix(total, _UNITS, 1000)
    digits = int(size > 1)
    text = f"{done / size:.{digits}f}/{total / size:.{digits}f} {unit}"
    if rate is None:
        return text
    size, unit = pick_unit_and_suffix(int(rate), _UNITS, 1000)
    left = dt.timedelta(seconds=round((total - done) / rate))
    return f"{text}, {rate / size:.1f} {unit}/s, {left} left"


_UNITS = ["bytes", "kB", "MB", "GB", "TB"]


@contextlib.contextmanager
def _rich_progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column

    # On 80 columns all of these fit, and the name of the tensor is cut: lines that wrap would stay.
    columns = (
        TextColumn(escape(title)),
        BarColumn(bar_width=12),
        DownloadColumn(table_column=Column(no_wrap=True, min_width=len("999.9/999.9 GB"))),
        TransferSpeedColumn(table_column=Column(no_wrap=True, min_width=len("999.9 MB/s"))),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00"))),
        TextColumn(
            "{task.fields[tensor]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(title, total=None, tensor="")

        def callback(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, tensor=name)

        yield callback
