"""The commands that judge checkpoints: compare, verify."""

import dataclasses
import json
import math
from typing import Annotated

import typer

from qtoolkit import checkpoints
from qtoolkit.checkpoints import CheckpointComparison, TensorComparison
from qtoolkit.checkpoints.internal import listed, shown
from qtoolkit.cli._errors import as_options, one_line_errors
from qtoolkit.cli._options import JSON
from qtoolkit.cli._summaries import count_text
from qtoolkit.cli._tables import progress, table

_HEADER = ("tensor", "format", "SQNR dB", "max error", "saturated", "underflowed", "NaN, Inf")


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A folder or file: the reference.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another version of it.")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Compare the numbers of two checkpoints.

    Quantized weights are dequantized first. For each tensor: the SQNR (signal-to-noise ratio), the
    largest |a - b|, the shares of elements that saturated and that underflowed to zero, and how
    many are NaN or infinite in A or B.
    """
    checkpoints.compare  # noqa: B018  (loads JAX before signals raise)
    with one_line_errors("nothing was written"):
        with progress("comparing") as callback:
            comparison = checkpoints.compare(a, b, progress=callback)
        if as_json:
            typer.echo(comparison.to_json())
        else:
            table(_HEADER, [_row(tensor) for tensor in comparison.tensors], right=_HEADER[2:])
            for line in _summary(comparison):
                typer.echo(line)


def verify(
    src: Annotated[str, typer.Argument(metavar="SRC", help="The source of the conversion.")],
    converted: Annotated[str, typer.Argument(metavar="CONVERTED", help="Its result.")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Convert SRC again, as CONVERTED says it was made, and compare all bytes.

    `convert` stores its arguments in CONVERTED, so no options are needed. Tensors and config.json
    are compared; nothing is written. If another program made CONVERTED, only codes and scales of
    its weights are compared, and the last line says so. Exits with 1 if something differs.
    """
    checkpoints.verify  # noqa: B018  (loads JAX before signals raise)
    with one_line_errors("nothing was written"):
        with progress("verifying") as callback:
            verification = checkpoints.verify(src, converted, progress=callback)
        problems = verification.problems
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(verification), indent=2))
        else:
            for problem in problems:
                typer.echo(as_options(problem))
            verdict = count_text(len(problems), "problem") if problems else "as expected"
            if verification.codes_only:
                verdict += "; of another program, so that its config is not compared"
            typer.echo(
                f"{shown(converted)}: {count_text(verification.tensors, 'tensor')}, "
                f"{verification.quantized or 'none'} of them quantized: {verdict}"
            )
        if problems:
            raise typer.Exit(1)


def _row(tensor: TensorComparison) -> list[str]:
    sqnr = "differs" if tensor.sqnr_db is None else f"{tensor.sqnr_db:.2f}"
    shares = (tensor.saturated, tensor.flushed)
    return [
        shown(tensor.name),
        shown(tensor.format),
        "equal" if tensor.equal else sqnr,
        "" if tensor.max_error is None else f"{tensor.max_error:.3g}",
        *("" if share is None else f"{100 * share:.3g} %" for share in shares),
        f"{tensor.nonfinite:,}" if tensor.nonfinite else "",
    ]


def _summary(comparison: CheckpointComparison) -> list[str]:
    equal = sum(tensor.equal for tensor in comparison.tensors)
    lines = [f"{count_text(len(comparison.tensors), 'tensor')} compared, {equal:,} equal"]
    if known := _lossy(comparison):
        lowest = min(known, key=known.__getitem__)
        lines.append(f"  mean SQNR  {sum(known.values()) / len(known):.2f} dB")
        lines.append(f"  min SQNR   {known[lowest]:.2f} dB, {shown(lowest)}")
    for path, names in ((comparison.a, comparison.only_a), (comparison.b, comparison.only_b)):
        if names:
            some = f"{count_text(len(names), 'tensor')}: {listed(map(shown, names), 3)}"
            lines.append(f"  only in {shown(path)}: {some}")
    return lines


def _lossy(comparison: CheckpointComparison) -> dict[str, float]:
    return {
        tensor.name: tensor.sqnr_db
        for tensor in comparison.tensors
        if tensor.sqnr_db is not None and math.isfinite(tensor.sqnr_db)
    }
