"""The commands that judge checkpoints: compare, verify."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Annotated

import typer

from qtoolkit import checkpoints
from qtoolkit.checkpoints import Comparison, TensorComparison
from qtoolkit.checkpoints.internal import check_target, shown
from qtoolkit.cli._errors import note, one_line_errors
from qtoolkit.cli._summaries import tensor_count
from qtoolkit.cli._tables import progress, table

_JSON = typer.Option("--json", help="Print JSON and nothing else.")
_HEADER = ("tensor", "format", "SQNR dB", "max error", "saturated", "flushed", "NaN, Inf")
_IMAGES = (".png", ".svg", ".pdf")


def picture(path: Path | None) -> Path | None:
    """A callback for options that name a picture file: refuses others before any work."""
    if path is not None and path.suffix.lower() not in _IMAGES:
        raise typer.BadParameter(
            f"{shown(path.name)}, expected a name that ends in {', '.join(_IMAGES)}"
        )
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is missing; pip install matplotlib")
    return path


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A folder or file: the reference.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another version of it.")],
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=picture,
            help="Draw the SQNR of each tensor, too; needs matplotlib.",
        ),
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Compare the numbers of two checkpoints, quantized weights with their scales.

    For each tensor: signal to noise, the largest |a - b|, the shares of elements that were clamped
    and that became zero, and how many are NaN or infinite in A or B.
    """
    checkpoints.compare  # noqa: B018  (loads JAX before signals raise)
    with one_line_errors("nothing was written"):
        if plot is not None:
            check_target(plot, overwrite=True)
        with progress("comparing") as callback:
            found = checkpoints.compare(a, b, progress=callback)
        if as_json:
            typer.echo(json.dumps(_data(found), indent=2))
        else:
            table(_HEADER, [_row(tensor) for tensor in found.tensors], right=_HEADER[2:])
            for line in _summary(found):
                typer.echo(line)
        if plot is not None:
            _draw(found, plot)


def verify(
    src: Annotated[str, typer.Argument(metavar="SRC", help="What was converted.")],
    converted: Annotated[str, typer.Argument(metavar="CONVERTED", help="What came of it.")],
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Quantize SRC again and compare its codes and scales with CONVERTED; write nothing.

    Static input scales must be such as a calibration gives, finite and above 0; what config.json
    says of quantization, and hf_quant_config.json, must be what `convert` writes of these weights.
    Formats and layout are read from CONVERTED, so that no options are needed; any program may have
    made it: of its config less is known then. Exits with 1 where something differs.
    """
    checkpoints.verify  # noqa: B018  (loads JAX before signals raise)
    with one_line_errors("nothing was written"):
        with progress("verifying") as callback:
            found = checkpoints.verify(src, converted, progress=callback)
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        else:
            for problem in found.problems:
                typer.echo(problem)
            typer.echo(
                f"{shown(converted)}: {tensor_count(found.tensors)}, "
                f"{found.quantized or 'none'} of them quantized: {_verdict(len(found.problems))}"
            )
        if found.problems:
            raise typer.Exit(1)


def _verdict(problems: int) -> str:
    return f"{problems:,} problem{'s'[: problems > 1]}" if problems else "as expected"


def _row(tensor: TensorComparison) -> list[str]:
    return [
        shown(tensor.name),
        shown(tensor.format),
        _decibels(tensor),
        "" if tensor.max_error is None else f"{tensor.max_error:.3g}",
        _share(tensor.saturated),
        _share(tensor.flushed),
        f"{tensor.nonfinite:,}" if tensor.nonfinite else "",
    ]


def _decibels(tensor: TensorComparison) -> str:
    if tensor.equal:
        return "equal"
    if tensor.sqnr_db is None:
        return "differs"
    return f"{tensor.sqnr_db:.2f}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3g} %"


def _summary(found: Comparison) -> list[str]:
    known = _lossy(found)
    equal = sum(tensor.equal for tensor in found.tensors)
    lines = [f"{tensor_count(len(found.tensors))} compared, {equal:,} equal"]
    if known:
        name, lowest = min(known, key=lambda pair: pair[1])
        mean = sum(value for _, value in known) / len(known)
        lines.append(f"  mean SQNR  {mean:.2f} dB")
        lines.append(f"  lowest     {lowest:.2f} dB, {shown(name)}")
    for path, names in ((found.a, found.only_a), (found.b, found.only_b)):
        if names:
            more = ", ..." if len(names) > 3 else ""
            listed = ", ".join(map(shown, names[:3])) + more
            lines.append(f"  only in {shown(path)}: {tensor_count(len(names))}: {listed}")
    return lines


def _lossy(found: Comparison) -> list[tuple[str, float]]:
    return [
        (tensor.name, tensor.sqnr_db)
        for tensor in found.tensors
        if tensor.sqnr_db is not None and math.isfinite(tensor.sqnr_db)
    ]


def _data(found: Comparison) -> dict[str, object]:
    """JSON has no infinity: the SQNR of equal tensors is null, as `equal` says."""
    data = dataclasses.asdict(found)
    for tensor in data["tensors"]:
        if tensor["sqnr_db"] is not None and not math.isfinite(tensor["sqnr_db"]):
            tensor["sqnr_db"] = None
    return {**data, "equal": found.equal}


def _draw(found: Comparison, path: Path) -> None:
    known = _lossy(found)
    if not known:
        note(f"{path} not written: no tensor differs, so there is no SQNR to draw")
        return
    from qtoolkit.plots import sqnr_by_tensor  # loads matplotlib

    axes = sqnr_by_tensor(dict(known))
    axes.figure.savefig(path)
    note(f"{path} written")
