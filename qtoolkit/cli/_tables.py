"""Tables and progress: plain lines that survive a pipe; on a terminal, progress is a bar."""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence

import typer

from qtoolkit.cli._errors import note, printable


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table to stdout; the columns named in `right` are aligned to the right."""
    lines = [header, *([*map(printable, row)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        )
        typer.echo("  ".join(cells).rstrip())


def page_width() -> int:
    """Columns of the terminal, within 40 to 120; 80 where there is none."""
    return min(max(shutil.get_terminal_size().columns, 40), 120)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Give a callback (name, bytes done, bytes in all): a bar on a terminal, else ten lines."""
    if sys.stderr.isatty():
        with _bar(title) as update:
            yield update
        return
    from rich.filesize import pick_unit_and_suffix

    printed = 0

    def print_tenth(name: str, done: int, total: int) -> None:
        nonlocal printed
        tenths = 10 * done // max(total, 1)
        if tenths > printed:
            printed = tenths
            size, unit = pick_unit_and_suffix(total, ["bytes", "kB", "MB", "GB", "TB"], 1000)
            digits = int(size > 1)
            amount = f"{done / size:.{digits}f}/{total / size:.{digits}f} {unit}"
            note(f"{title}: {10 * tenths:3} %, {amount}  {name}")

    yield print_tenth


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    from rich import progress as rich
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column

    def column(width: int) -> Column:
        return Column(no_wrap=True, min_width=width)

    # On 80 columns all of these fit, and the name of the tensor is cut: lines that wrap would stay.
    columns = (
        rich.TextColumn(escape(title)),
        rich.BarColumn(bar_width=12),
        rich.DownloadColumn(table_column=column(len("999.9/999.9 GB"))),
        rich.TransferSpeedColumn(table_column=column(len("999.9 MB/s"))),
        rich.TimeRemainingColumn(table_column=column(len("0:00:00"))),
        rich.TextColumn(
            "{task.fields[tensor]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
    )
    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(title, total=None, tensor="")

        def callback(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, tensor=name)

        yield callback
