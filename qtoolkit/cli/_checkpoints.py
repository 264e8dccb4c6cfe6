"""The commands that write checkpoints: convert, dequantize, finalize."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from qtoolkit import checkpoints
from qtoolkit.checkpoints import CheckpointError
from qtoolkit.checkpoints.internal import (
    Destination,
    PlanOptions,
    check_container,
    decode_quantized,
    decode_weights,
    file_limit,
    files_of_shard,
    noting_complete,
    open_source,
    plan_for,
    read_json,
    shown,
    weight_format,
)
from qtoolkit.cli import _options as options
from qtoolkit.cli._errors import failure, one_line_errors, printing
from qtoolkit.cli._summaries import (
    count_text,
    loading_lines,
    plan_table,
    report_summary,
)
from qtoolkit.cli._tables import progress, table
from qtoolkit.formats import Rules


@options.with_options
def convert(
    src: Annotated[str, options.SRC],
    dst: Annotated[str, options.DST],
    format: Annotated[str | None, options.FORMAT] = None,
    layout: Annotated[str | None, options.LAYOUT] = None,
    rules: Annotated[Path | None, options.RULES] = None,
    scaling: Annotated[str | None, options.SCALING] = None,
    skip: Annotated[list[str] | None, options.SKIP] = None,
    keep_dtype: Annotated[str | None, options.KEEP_DTYPE] = None,
    channel_axis: Annotated[str, options.CHANNEL_AXIS] = "auto",
    input_scales: Annotated[Path | None, options.INPUT_SCALES] = None,
    allow_split: Annotated[bool, options.ALLOW_SPLIT] = False,
    keep_unfitting: Annotated[bool, options.KEEP_UNFITTING] = False,
    allow_nonfinite: Annotated[bool, options.ALLOW_NONFINITE] = False,
    *,
    writing: options.Writing,
) -> None:
    """Quantize the weights of a checkpoint.

    A folder becomes a folder that the loaders of the layout open (tested: transformers): index,
    config.json and the other files in it are written with the weights. A file or a checkpoint of
    orbax becomes a safetensors file. Quantized weights of SRC are dequantized first. In the layout
    "plain" a tensor keeps its name, and its scale is NAME_scale: value = code * scale.
    """
    if format is not None and rules is not None:
        raise failure("--format and --rules exclude each other; give one of them", 2)
    function = None if writing.dry_run else checkpoints.convert  # loads JAX before signals raise
    with one_line_errors(f"{dst} was not written"):
        plan: dict[str, Any] = {
            "format": (format or "e4m3fn") if rules is None else _read_rules(rules),
            "scaling": scaling,
            "layout": layout,
            "skip": skip or (),
            "keep_dtype": keep_dtype,
            "channel_axis": channel_axis,
            "input_scales": None if input_scales is None else read_json(input_scales),
            "allow_codes": writing.allow_codes,
            "allow_split": allow_split,
            "keep_unfitting": keep_unfitting,
        }
        destination = _destination(src, dst, writing)
        if function is None:
            _dry_run(destination, PlanOptions(**plan), writing.style)
        else:
            run = functools.partial(function, **plan, allow_nonfinite=allow_nonfinite)
            _write(run, "converting", destination, writing)


@options.with_options
def dequantize(
    src: Annotated[str, options.SRC],
    dst: Annotated[str, options.DST],
    dtype: Annotated[str | None, options.DTYPE] = None,
    *,
    writing: options.Writing,
) -> None:
    """Write the weights of a quantized checkpoint as floats.

    All layouts of `qtoolkit layouts` and GGUF are recognized. The new config.json says nothing of
    quantization.
    """
    # Loads JAX before signals raise.
    function = None if writing.dry_run else checkpoints.dequantize_checkpoint
    with one_line_errors(f"{dst} was not written"):
        destination, allow_codes = _destination(src, dst, writing), writing.allow_codes
        if function is None:
            plan = PlanOptions(format=None, keep_dtype=dtype, allow_codes=allow_codes)
            _dry_run(destination, plan, writing.style)
        else:
            run = functools.partial(function, dtype=dtype, allow_codes=allow_codes)
            _write(run, "dequantizing", destination, writing)


@options.with_options
def finalize(
    dst: Annotated[str, typer.Argument(metavar="DST", help="The DST of all shards.")],
    overwrite: Annotated[bool, options.OVERWRITE] = False,
    *,
    output: options.Printing,
) -> None:
    """Make one checkpoint of the files of all shards.

    `convert --shard I/N` writes these files. All must exist, made with the same options from the
    same source, as far as its headers tell. The result is byte for byte what one process writes.
    """
    with one_line_errors(f"{dst} was not written"):
        _print_report(checkpoints.finalize(dst, overwrite=overwrite), output.style)


def _destination(src: str, dst: str, writing: options.Writing) -> Destination:
    names = ("max_shard_size", "overwrite", "shard")
    return Destination(src=src, dst=dst, **{name: getattr(writing, name) for name in names})


def _write(
    run: Callable[..., checkpoints.Report],
    title: str,
    destination: Destination,
    writing: options.Writing,
) -> None:
    with contextlib.nullcontext() if writing.quiet else progress(title) as callback:
        report = run(
            **dataclasses.asdict(destination),
            workers=writing.workers,
            max_memory=writing.max_memory,
            progress=callback,
        )
    _print_report(report, writing.style)


def _print_report(report: checkpoints.Report, style: str) -> None:
    if style == "nothing":
        return
    with noting_complete(
        f"shard {report.shard} of {report.target}" if report.shard else report.target
    ):
        summary = [*report_summary(report), *loading_lines(report)]
        with printing():
            if style == "json":
                typer.echo(report.to_json())
            else:
                for line in summary:
                    typer.echo(line)


def _dry_run(destination: Destination, arguments: PlanOptions, style: str) -> None:
    """Print the plan of a conversion."""
    check_container(arguments.format, destination.dst)
    destination.check()
    dst, shard = str(destination.dst), destination.shard
    files = []
    with open_source(destination.src) as opened:
        source = decode_weights(opened) if arguments.format else decode_quantized(opened)
        plan = plan_for(destination.dst, source, arguments)
        if shard is not None and opened.folder is not None:
            limit = file_limit(destination.max_shard_size)
            names, count = files_of_shard(plan, opened, limit, shard)
            listed = f": {', '.join(map(shown, names))}" if names else ""
            of_all = f"{len(names)} of {count_text(count, 'file')}"
            files = [f"  shard      {shard[0]}/{shard[1]} writes {of_all}{listed}"]
    report = plan.report(destination.src, dst)
    if style == "json":
        data = json.loads(report.to_json())
        for tensor, entry in zip(plan.tensors, data["tensors"], strict=True):
            entry["entries"] = [part._asdict() for part in tensor.entries]
        typer.echo(json.dumps(data, indent=2))
    elif style != "nothing":
        table(*plan_table(plan.tensors))
        for line in (*report_summary(report, "; a dry run, nothing was written"), *files):
            typer.echo(line)


def _read_rules(file: Path) -> Rules[Any]:
    """Rules as `Rules.from_json` reads them, with the names of block formats, too."""
    text = file.read_bytes()
    try:
        return Rules.from_json(text)
    except ValueError as error:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            data = json.loads(text)
            named = Rules([(key, value) for key, value in data["rules"]], data.get("default"))
            return named.map(weight_format)
        raise CheckpointError(f"{file}: {error}") from error
