"""The commands: arguments in, one call, a table out."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from qtoolkit._version import __version__
from qtoolkit.cli._checkpoints import convert, dequantize, finalize
from qtoolkit.cli._compare import compare, verify
from qtoolkit.cli._errors import failure, one_line_errors, os_failure
from qtoolkit.cli._formats import FOOTNOTE, block_page, format_page, format_tables
from qtoolkit.cli._inspect import inspect, layouts
from qtoolkit.cli._options import completion, picture
from qtoolkit.cli._tables import page_width, table
from qtoolkit.formats import BLOCK_FORMATS, FORMATS, Format
from qtoolkit.formats import format as resolve

app = typer.Typer(
    name="qtoolkit",
    help="Low-precision numbers for JAX: checkpoint conversion and FP8-aware training.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: it survives pipes and narrow terminals
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command `qtoolkit`; exit with 0, with 1 after a failure, with 2 after misuse."""
    try:
        app()
    except OSError as error:  # printing the help failed; commands treat their own errors
        sys.exit(os_failure(error).exit_code)


def _parse_format(name: str) -> Format:
    try:
        return resolve(name)
    except ValueError as error:
        raise failure(str(error).removeprefix("format: "), 2) from error


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"qtoolkit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that is no UTF-8 could not be printed. stderr escapes it; make stdout do so.
        sys.stdout.reconfigure(errors="backslashreplace")


# Two for each command; the first is the usual one.
EXAMPLES = {
    "convert": (
        "qtoolkit convert model.safetensors model-fp8.safetensors --format e4m3fn",
        "qtoolkit convert SmolLM2 SmolLM2-int4 --format int4_group32 --dry-run",
    ),
    "dequantize": (
        "qtoolkit dequantize SmolLM2-fp8 SmolLM2-bf16 --dtype bfloat16",
        "qtoolkit dequantize model.gguf model.safetensors",
    ),
    "finalize": (
        "qtoolkit finalize SmolLM2-fp8",
        "qtoolkit finalize SmolLM2-fp8 --overwrite",
    ),
    "inspect": ("qtoolkit inspect SmolLM2-fp8", "qtoolkit inspect model.safetensors --json"),
    "layouts": ("qtoolkit layouts", "qtoolkit layouts compressed-tensors"),
    "compare": (
        "qtoolkit compare SmolLM2 SmolLM2-fp8",
        "qtoolkit compare model.safetensors model-fp8.safetensors --json",
    ),
    "verify": (
        "qtoolkit verify SmolLM2 SmolLM2-fp8",
        "qtoolkit verify model.safetensors model-fp8.safetensors --json",
    ),
    "formats": ("qtoolkit formats", "qtoolkit formats e4m3fn"),
    "report": ("qtoolkit report numerics.json", "qtoolkit report numerics.json --plot map.png"),
}


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Adds a command, with its examples below its options."""
    lines = EXAMPLES[function.__name__]
    epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
    return app.command(epilog=epilog)(function)


for _function in (convert, dequantize, finalize, inspect, layouts, compare, verify):
    _command(_function)


@_command
def formats(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=completion([fmt.name for fmt in (*FORMATS, *BLOCK_FORMATS)]),
            help="Show this format; any spelling.",
        ),
    ] = None,
) -> None:
    """List the number formats and block formats, or show one."""
    with one_line_errors("nothing was changed"):
        if name is None:
            for header, rows, right in format_tables():
                table(header, rows, right=right)
                typer.echo()
            typer.echo(FOOTNOTE)
            return
        block = next((fmt for fmt in BLOCK_FORMATS if fmt.name == name.lower()), None)
        width = page_width()
        for line in block_page(block, width) if block else format_page(_parse_format(name), width):
            typer.echo(line)


@_command
def report(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file with the text of `Numerics.to_json()`.")
    ],
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG", callback=picture, help="Write a picture as well; needs matplotlib."
        ),
    ] = None,
) -> None:
    """Print a saved report of the rounding errors of a model."""
    with one_line_errors("nothing was changed"):
        from qtoolkit.products import Numerics  # loads JAX
        from qtoolkit.products.internal import NUMERICS_HEADER

        try:
            numerics = Numerics.from_json(file.read_bytes())
        except ValueError as error:
            raise failure(f"{file}: {error}", 1) from error
        rows = [row.cells() for row in numerics.rows]
        table(NUMERICS_HEADER, rows, right=NUMERICS_HEADER[5:])
        for note in numerics.notes:
            typer.echo(note)
        if plot is not None:
            numerics.plot(plot)
