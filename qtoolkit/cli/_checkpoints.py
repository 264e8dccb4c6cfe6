"""The commands that write checkpoints: convert, dequantize, finalize."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from qtoolkit import checkpoints
from qtoolkit.checkpoints import CheckpointError
from qtoolkit.checkpoints.internal import (
    Checkpoint,
    Destination,
    check_quantized,
    check_tree,
    dequantized,
    file_limit,
    files_of_shard,
    layout_in,
    read_json,
    resolve_target,
    shown,
    whole,
)
from qtoolkit.cli import _options as options
from qtoolkit.cli._errors import failure, one_line_errors, printing
from qtoolkit.cli._summaries import (
    counted,
    loading_lines,
    plan_table,
    report_markdown,
    report_summary,
    report_table,
)
from qtoolkit.cli._tables import progress, table
from qtoolkit.formats import Rules

_Way = Literal["text", "table", "json", "md", "nothing"]  # how a command shows what it does


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
    to: Annotated[Any, options.TO] = "safetensors",
    max_shard_size: Annotated[str | None, options.SHARD_SIZE] = None,
    allow_nonfinite: Annotated[bool, options.ALLOW_NONFINITE] = False,
    allow_codes: Annotated[bool, options.ALLOW_CODES] = False,
    overwrite: Annotated[bool, options.OVERWRITE] = False,
    shard: Annotated[Any, options.SHARD] = None,
    workers: Annotated[int | None, options.WORKERS] = None,
    max_memory: Annotated[str | None, options.MAX_MEMORY] = None,
    dry_run: Annotated[bool, options.DRY_RUN] = False,
    report: Annotated[str | None, options.REPORT] = None,
    as_json: Annotated[bool, options.JSON] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    verbose: Annotated[bool, options.VERBOSE] = False,
) -> None:
    """Quantize the weights of a checkpoint.

    A folder becomes a folder for the loaders of the layout (tested: transformers): index,
    config.json and the other files in it are written with the weights. A file or a checkpoint of
    orbax becomes a safetensors file, or with --to orbax a checkpoint of orbax. What is quantized in
    SRC is dequantized first. In the layout "plain" a tensor keeps its name and its scale is
    NAME_scale: value = code * scale.
    """
    if format is not None and rules is not None:
        raise failure("--format and --rules exclude each other; give one of them", 2)
    way = _way(report, as_json, quiet, verbose)
    if not dry_run:
        checkpoints.convert  # noqa: B018  (loads JAX before signals raise)
    with one_line_errors(f"{dst} was not written"):
        plan = {
            "format": (format or "e4m3fn") if rules is None else _read_rules(rules),
            "scaling": scaling,
            "layout": layout,
            "skip": skip or (),
            "keep_dtype": keep_dtype,
            "channel_axis": channel_axis,
            "input_scales": None if input_scales is None else read_json(input_scales),
            "allow_codes": allow_codes,
            "allow_split": allow_split,
            "keep_unfitting": keep_unfitting,
        }
        destination = Destination(
            src=src, dst=dst, to=to, max_shard_size=max_shard_size, overwrite=overwrite, shard=shard
        )
        if dry_run:
            _dry_run(destination, plan, way)
            return
        given: Any = {**plan, "workers": workers, "max_memory": max_memory}
        given["allow_nonfinite"] = allow_nonfinite
        _run(checkpoints.convert, "converting", destination, quiet, way, **given)


def dequantize(
    src: Annotated[str, options.SRC],
    dst: Annotated[str, options.DST],
    dtype: Annotated[str | None, options.DTYPE] = None,
    to: Annotated[Any, options.TO] = "safetensors",
    max_shard_size: Annotated[str | None, options.SHARD_SIZE] = None,
    allow_codes: Annotated[bool, options.ALLOW_CODES] = False,
    overwrite: Annotated[bool, options.OVERWRITE] = False,
    shard: Annotated[Any, options.SHARD] = None,
    workers: Annotated[int | None, options.WORKERS] = None,
    max_memory: Annotated[str | None, options.MAX_MEMORY] = None,
    dry_run: Annotated[bool, options.DRY_RUN] = False,
    report: Annotated[str | None, options.REPORT] = None,
    as_json: Annotated[bool, options.JSON] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    verbose: Annotated[bool, options.VERBOSE] = False,
) -> None:
    """Write the weights that a quantized checkpoint stands for.

    Any layout of `qtoolkit layouts`, and GGUF, is recognized; config.json loses what it says of
    the quantization.
    """
    way = _way(report, as_json, quiet, verbose)
    if not dry_run:
        checkpoints.dequantize_checkpoint  # noqa: B018  (loads JAX before signals raise)
    with one_line_errors(f"{dst} was not written"):
        destination = Destination(
            src=src, dst=dst, to=to, max_shard_size=max_shard_size, overwrite=overwrite, shard=shard
        )
        if dry_run:
            plan = {"format": None, "keep_dtype": dtype, "allow_codes": allow_codes}
            _dry_run(destination, plan, way)
            return
        given: Any = {"dtype": dtype, "workers": workers, "max_memory": max_memory}
        function = checkpoints.dequantize_checkpoint
        _run(function, "dequantizing", destination, quiet, way, allow_codes=allow_codes, **given)


def finalize(
    dst: Annotated[str, typer.Argument(metavar="DST", help="What all shards were given.")],
    overwrite: Annotated[bool, options.OVERWRITE] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Remove what the shards have written instead.")
    ] = False,
    report: Annotated[str | None, options.REPORT] = None,
    as_json: Annotated[bool, options.JSON] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    verbose: Annotated[bool, options.VERBOSE] = False,
) -> None:
    """Make a checkpoint of what `convert --shard I/N` has written.

    All files must be there, made with the same options of the same source, as far as its headers
    and samples of its weights tell. The result is byte for byte what one process writes.
    """
    if discard and (overwrite or report or as_json or verbose):
        raise failure(
            "finalize --discard: nothing is written or printed; leave --overwrite, --report, "
            "--json and --verbose out",
            2,
        )
    way = _way(report, as_json, quiet, verbose)
    with one_line_errors(f"{dst} was not written"):
        if discard:
            checkpoints.discard(dst)
            return
        _print_report(checkpoints.finalize(dst, overwrite=overwrite), way)


def _way(report: str | None, as_json: bool, quiet: bool, verbose: bool) -> _Way:
    """What to print, by `--report`, `--json`, `--quiet` and `--verbose`."""
    if as_json and report == "md":
        raise failure("--json and --report md exclude each other; give one of them", 2)
    if quiet and verbose:
        raise failure("--quiet and --verbose exclude each other; give one of them", 2)
    if verbose and (as_json or report):
        raise failure("--verbose: --json and --report name every tensor already; leave it out", 2)
    if as_json or report:
        return "md" if report == "md" else "json"
    return "nothing" if quiet else "table" if verbose else "text"


def _run(
    function: Callable[..., checkpoints.Report],
    title: str,
    destination: Destination,
    quiet: bool,
    way: _Way,
    **given: Any,
) -> None:
    showing: AbstractContextManager[Any] = contextlib.nullcontext() if quiet else progress(title)
    with showing as callback:
        done = function(**dataclasses.asdict(destination), **given, progress=callback)
    _print_report(done, way)


def _print_report(done: checkpoints.Report, way: _Way) -> None:
    if way == "nothing":
        return
    with whole(f"shard {done.shard} of {done.target}" if done.shard else done.target):
        summary = [*report_summary(done), *loading_lines(done)]
        with printing():
            if way == "json":
                typer.echo(done.to_json())
            elif way == "md":
                typer.echo(report_markdown(done))
            else:
                if way == "table":
                    table(*report_table(done))
                for line in summary:
                    typer.echo(line)


def _dry_run(destination: Destination, arguments: dict[str, Any], way: _Way) -> None:
    """Prints the plan that `make_plan` makes with these arguments."""
    if way == "md":
        raise failure("--dry-run --report md: a plan has no such report; use --report json", 2)
    destination.check()
    to, dst = destination.to, str(destination.dst)
    arguments["layout"] = layout_in(to, arguments.get("layout"))
    with checkpoints.open_source(destination.src) as opened:
        source = dequantized(opened) if arguments["format"] else check_quantized(opened)
        plan = checkpoints.make_plan(source, **arguments)
        if to == "orbax":
            check_tree(dst, plan, opened)
        part = _part(destination, opened, plan)
    done = plan.report(destination.src, dst, to)
    if way == "json":
        data = json.loads(done.to_json())
        for tensor, about in zip(plan.tensors, data["tensors"], strict=True):
            about["entries"] = [entry._asdict() for entry in tensor.entries]
        typer.echo(json.dumps(data, indent=2))
    elif way != "nothing":
        table(*plan_table(plan.tensors))
        for line in (*report_summary(done, "; a dry run, nothing was written"), *part):
            typer.echo(line)


def _part(destination: Destination, opened: Checkpoint, plan: checkpoints.Plan) -> list[str]:
    shard = destination.shard
    if shard is None or opened.folder is None:
        return []
    names, count = files_of_shard(plan, opened, file_limit(destination.max_shard_size), shard)
    listed = f": {', '.join(map(shown, names))}" if names else ""
    of_all = f"{len(names)} of {counted(count, 'file')}"
    return [f"  shard      {shard[0]}/{shard[1]} writes {of_all}{listed}"]


def _read_rules(file: Path) -> Rules[Any]:
    """Rules as `Rules.from_json` reads them, with the names of block formats, too."""
    text = file.read_bytes()
    try:
        return Rules.from_json(text)
    except ValueError as error:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            data = json.loads(text)
            named = Rules([(key, value) for key, value in data["rules"]], data.get("default"))
            return named.map(resolve_target)
        raise CheckpointError(f"{file}: {error}") from error
