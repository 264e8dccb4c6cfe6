"""The commands: arguments in, one call, a table out."""

import enum
import math
from pathlib import Path
from typing import Annotated

import typer

from qtoolkit import checkpoints
from qtoolkit._version import __version__
from qtoolkit.checkpoints import CheckpointError, Report, SafetensorsFile
from qtoolkit.checkpoints.internal import shown
from qtoolkit.cli._errors import one_line_errors
from qtoolkit.cli._formats import FOOTNOTE, block_page, format_page, format_tables
from qtoolkit.cli._tables import page_width, prints_unicode, progress, table
from qtoolkit.formats import Format, Rules

app = typer.Typer(
    name="qtoolkit",
    help="Low-precision numbers for JAX: checkpoint conversion and FP8-aware training.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: it survives pipes and narrow terminals
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Scaling(enum.StrEnum):
    """How many scales a quantized tensor has."""

    TENSOR = "tensor"
    CHANNEL = "channel"


def main() -> None:
    """Runs the command `qtoolkit`; exits with 0, with 1 after a failure, with 2 after misuse."""
    app()


def _known_format(name: str | None) -> str | None:
    """The format's own name, whatever the spelling."""
    from qtoolkit.formats import format

    try:
        if name is None:
            return None
        return format(name).name
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("format: ")) from error


_FORMAT = typer.Option(
    "--format",
    metavar="NAME",
    callback=_known_format,
    show_default="e4m3fn",
    help="Number format, in any spelling; `qtoolkit formats` lists them.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    pass


@app.command()
def convert(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="The safetensors file to read.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The safetensors file to write.")],
    format: Annotated[str | None, _FORMAT] = None,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='A format for each tensor instead: {"rules": [[REGEX, NAME], ...], "default": '
            "NAME}. The first REGEX that is found in its name decides; null keeps it, and nothing "
            "is left out by default.",
        ),
    ] = None,
    scaling: Annotated[
        Scaling,
        typer.Option(
            help="One scale per tensor, or one per output channel. bfloat16 and float16 need none "
            "and ignore this."
        ),
    ] = Scaling.TENSOR,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX",
            help="Leave out tensors in whose names this is found; may be given more than once. "
            "Embeddings, norms, biases, routers, lm_head, vectors and anything that is not "
            "float32, float16 or bfloat16 are left out anyway.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.")] = False,
) -> None:
    """Quantize the weights of a safetensors file.

    A quantized tensor keeps its name; its scale is written next to it as NAME_scale, so that
    value = code * scale. All other tensors are copied unchanged.
    """
    if format is not None and rules is not None:
        raise typer.BadParameter("--format and --rules exclude each other; give one of them")
    with one_line_errors(f"{dst} was not written"):
        with progress("converting") as callback:
            report = checkpoints.convert(
                src,
                dst,
                format=(format or "e4m3fn") if rules is None else _read_rules(rules),
                scaling=scaling.value,
                skip=skip or (),
                overwrite=overwrite,
                progress=callback,
            )
        for line in _summary(report):
            typer.echo(line)


def _read_rules(file: Path) -> Rules[Format]:
    try:
        return Rules.from_json(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _summary(report: Report) -> list[str]:
    reasons = [tensor.reason for tensor in report.kept]
    counts = ", ".join(f"{reason}: {reasons.count(reason)}" for reason in dict.fromkeys(reasons))
    share = 100 * report.bytes_after / max(report.bytes_before, 1)
    scales = "" if report.scaling == "none" else f", a scale per {report.scaling}"
    lines = [
        f"{report.target}: {report.format}{scales}",
        f"  quantized  {_tensors(len(report.quantized))}",
        f"  kept       {_tensors(len(report.kept))}" + (f" ({counts})" if counts else ""),
        f"  bytes      {report.bytes_before:,} -> {report.bytes_after:,} ({share:.1f} %)",
    ]
    if report.mean_sqnr_db is not None:
        worst = min(
            (tensor for tensor in report.quantized if tensor.sqnr_db is not None),
            key=lambda tensor: tensor.sqnr_db or 0.0,
        )
        lines.append(f"  mean SQNR  {_decibels(report.mean_sqnr_db)}")
        lines.append(f"  lowest     {_decibels(worst.sqnr_db or 0.0)}, {shown(worst.name)}")
    if report.nonfinite:
        lines.append(f"  note       {report.nonfinite:,} elements were NaN or infinite")
    return lines


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'' if count == 1 else 's'}"


def _decibels(value: float) -> str:
    return f"{value:.2f} dB" if math.isfinite(value) else "exact"


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors file.")],
) -> None:
    """List the tensors of a safetensors file."""
    with one_line_errors("nothing was changed"), SafetensorsFile(file) as source:
        tensors = source.tensors.values()
        rows = [[shown(t.name), t.dtype, _shape(t.shape), f"{t.nbytes:,}"] for t in tensors]
        size = sum(t.size for t in tensors)
        nbytes = sum(t.nbytes for t in tensors)
        table(("tensor", "dtype", "shape", "bytes"), rows, right=("bytes",))
        typer.echo(f"{_tensors(len(rows))}, {size:,} elements, {nbytes:,} bytes")
        for key, value in source.metadata.items():
            typer.echo(f"metadata {shown(key)}: {shown(value)}")


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


@app.command()
def formats(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Show this one, in any spelling, value by value."),
    ] = None,
) -> None:
    """List the number formats and block formats, with their properties, or show one of them."""
    with one_line_errors("nothing was changed"):
        if name is None:
            for header, rows, right in format_tables():
                table(header, rows, right=right)
                typer.echo()
            typer.echo(FOOTNOTE)
            return
        from qtoolkit.formats import BLOCK_FORMATS, format

        ascii_only = not prints_unicode()
        blocks = next((fmt for fmt in BLOCK_FORMATS if fmt.name == name.lower()), None)
        try:
            if blocks is not None:
                page = block_page(blocks, page_width(), ascii_only=ascii_only)
            else:
                page = format_page(format(name), page_width(), ascii_only=ascii_only)
        except ValueError as error:
            typer.echo(f"qtoolkit: {str(error).removeprefix('format: ')}", err=True)
            raise typer.Exit(2) from None
        for line in page:
            typer.echo(line)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 400,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and plots.")] = Path(
        "qtoolkit-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the initialisation and the batches.")] = 0,
    format: Annotated[str, _FORMAT] = "e4m3fn",
) -> None:
    """Train a small model in float32 and in FP8, and compare.

    The float32 model is then converted, as `qtoolkit convert` does it, and evaluated too.
    """
    with one_line_errors(f"{out} may be incomplete"):
        from qtoolkit.demo import run  # loads JAX, Flax and optax

        run(steps=steps, out=out, seed=seed, format=format)
