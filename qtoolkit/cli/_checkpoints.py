"""The commands for checkpoints: convert, dequantize, finalize, inspect, layouts."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer

from qtoolkit import checkpoints
from qtoolkit.checkpoints import LAYOUTS, CheckpointError
from qtoolkit.checkpoints.internal import (
    SCALINGS,
    WRITTEN,
    AxisChoice,
    Checkpoint,
    ContainerName,
    Destination,
    byte_count,
    check_quantized,
    check_tree,
    compiled,
    dequantized,
    file_limit,
    files_of_shard,
    layout_in,
    read_json,
    resolve_target,
    scheme_named,
    shown,
    target_names,
    whole,
    worker_count,
)
from qtoolkit.cli._errors import failure, one_line_errors, printing
from qtoolkit.cli._summaries import (
    file_count,
    inspect_data,
    inspect_summary,
    inspect_table,
    layout_data,
    layout_page,
    layouts_table,
    loading_lines,
    plan_data,
    plan_summary,
    plan_table,
    report_markdown,
    report_summary,
    report_table,
    stats_table,
)
from qtoolkit.cli._tables import progress, table
from qtoolkit.formats import Rules

AXES = get_args(AxisChoice)
CONTAINERS = get_args(ContainerName)
WIDE = ("float32", "bfloat16", "float16")


def _one_of(option: str, choices: Sequence[str]) -> dict[str, Any]:
    """What an option with these choices has: its shell completion, and a callback that checks."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in choices:
            raise failure(f"{option}: {value!r}, expected one of {', '.join(choices)}", 2)
        return value

    return {"callback": check, "autocompletion": _complete(choices)}


def _known_target(name: str | None) -> str | None:
    """The name of the format that `name` spells, or `name` itself if it is that of a scheme."""
    if name is None or scheme_named(name) is not None:
        return name
    try:
        return resolve_target(name).name
    except ValueError as error:
        message = str(error).removeprefix("format: ")
        raise failure(
            f"--format: {message}; convert takes {', '.join(target_names())}", 2
        ) from error


def _size(option: str, check: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """A callback that runs `check` and reports its error, which names an argument, for `option`."""

    def callback(size: str | None) -> str | None:
        try:
            if size is not None:
                check(size)
        except ValueError as error:
            raise failure(f"{option}: {str(error).partition('=')[2]}", 2) from error
        return size

    return callback


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not found or not int(found[1]) < int(found[2]):
        raise failure(
            f"--shard: {text!r}, expected I/N with I from 0 to N - 1: 0/8, 1/8, ... 7/8", 2
        )
    return int(found[1]), int(found[2])


def _regexes(patterns: list[str] | None) -> list[str] | None:
    for pattern in patterns or ():
        try:
            compiled(pattern)
        except CheckpointError as error:
            raise failure(str(error), 2) from error
    return patterns


def _complete(choices: Sequence[str]) -> Any:
    return lambda incomplete: [name for name in choices if name.startswith(incomplete)]


_SRC = typer.Argument(
    metavar="SRC",
    help="A folder as Hugging Face's or orbax's, or a file: safetensors, npz, Flax's msgpack or "
    "GGUF. Folders of the first kind and safetensors may also be URLs: s3://bucket/model.",
)
_DST = typer.Argument(
    metavar="DST",
    help="The folder to write; of a file or of orbax, the safetensors file. Or its URL.",
)
_TO = typer.Option(
    "--to",
    metavar="NAME",
    **_one_of("--to", CONTAINERS),
    help="safetensors, or orbax: a checkpoint of orbax in layout plain, with the tree of SRC.",
)
_FORMAT = typer.Option(
    "--format",
    metavar="NAME",
    callback=_known_target,
    autocompletion=_complete(target_names()),
    show_default="e4m3fn",
    help=f"Number format: {', '.join(target_names())}; or a name of `qtoolkit layouts`, W4A16.",
)
_LAYOUT = typer.Option(
    metavar="NAME",
    **_one_of("--layout", WRITTEN),
    show_default="compressed-tensors of a folder with config.json, where that holds the "
    "format; else plain, which no loader of models opens",
    help=f"Who can load it: {', '.join(WRITTEN)}; `qtoolkit layouts` says more.",
)
_RULES = typer.Option(
    metavar="FILE",
    help='A format for each tensor instead: {"rules": [[REGEX, NAME], ...], "default": '
    "NAME}. The first REGEX that is found in its name decides; null keeps it, and nothing "
    "is left out by default.",
)
_SCALING = typer.Option(
    metavar="WORD",
    **_one_of("--scaling", SCALINGS),
    show_default="what the layout has first",
    help="One scale per tensor, per output channel, or per block of 128x128: tensor, "
    "channel, block. Block formats have scales of their own, bfloat16 and float16 none.",
)
_SKIP = typer.Option(
    metavar="REGEX",
    callback=_regexes,
    help="Leave out tensors in whose names this is found; may be given more than once. "
    "Embeddings, heads, norms, biases, routers, vision towers, vectors, integers "
    "and complex numbers are left out anyway; weights in float64 are refused.",
)
_KEEP_DTYPE = typer.Option(
    metavar="NAME",
    **_one_of("--keep-dtype", WIDE),
    help="Round what is left out to this: float32, bfloat16 or float16.",
)
_CHANNEL_AXIS = typer.Option(
    metavar="WORD",
    **_one_of("--channel-axis", AXES),
    help="Which axis of weights holds the outputs: first (PyTorch), last (Flax, GPT-2), or "
    "auto, by architecture and names.",
)
_INPUT_SCALES = typer.Option(
    metavar="FILE",
    help='Static activation scales from a calibration, {"MODULE": 0.02, ...}, which '
    "modelopt's FP8 and NVFP4 need.",
)
_ALLOW_SPLIT = typer.Option(
    "--allow-split",
    help="Let parts of what engines join (q, k, v; gate, up; experts) differ in format.",
)
_KEEP_UNFITTING = typer.Option(
    "--keep-unfitting",
    help="Leave matrices that the blocks of the format do not fit in high precision.",
)
_ALLOW_NONFINITE = typer.Option(
    "--allow-nonfinite",
    help="Quantize and cast weights with NaN or Inf, too; what is copied may have them.",
)
_ALLOW_CODES = typer.Option(
    "--allow-codes",
    help="Copy 8-bit floats and integers that may be codes, though no layout that is read says "
    "what they stand for.",
)
_SHARD = typer.Option(
    metavar="I/N",
    parser=_shard,
    help="Write part I of N of the files of a folder, I from 0 on, as a job of an array; then "
    "`qtoolkit finalize DST`.",
)
_OVERWRITE = typer.Option("--overwrite", help="Replace DST.")
_SHARD_SIZE = typer.Option(
    metavar="SIZE",
    callback=_size("--max-shard-size", byte_count),
    show_default="5GB",
    help="Bytes of a file of a folder: 5GB, 500MiB.",
)
_JSON = typer.Option("--json", help="Print one JSON object instead of text.")
_QUIET = typer.Option("--quiet", "-q", help="Print nothing but errors.")
_VERBOSE = typer.Option("--verbose", "-v", help="Print a line for every tensor.")
_REPORT = typer.Option(
    "--report",
    metavar="KIND",
    **_one_of("--report", ("json", "md")),
    help="json or md: print a report of every tensor, in place of the summary.",
)
_WORKERS = typer.Option(
    min=1,
    max=64,
    show_default="one for each core, at most 4",
    help="Threads that read and quantize; the bytes are the same whatever their number.",
)
_MAX_MEMORY = typer.Option(
    metavar="SIZE",
    callback=_size("--max-memory", lambda size: worker_count(None, size)),
    help="Memory that the process may take, 360MiB or more: fewer workers are started. An "
    "estimate, for CPU.",
)
_DRY_RUN = typer.Option("--dry-run", help="Show what would become of every tensor; write none.")


def convert(
    src: Annotated[str, _SRC],
    dst: Annotated[str, _DST],
    format: Annotated[str | None, _FORMAT] = None,
    layout: Annotated[str | None, _LAYOUT] = None,
    rules: Annotated[Path | None, _RULES] = None,
    scaling: Annotated[str | None, _SCALING] = None,
    skip: Annotated[list[str] | None, _SKIP] = None,
    keep_dtype: Annotated[str | None, _KEEP_DTYPE] = None,
    channel_axis: Annotated[str, _CHANNEL_AXIS] = "auto",
    input_scales: Annotated[Path | None, _INPUT_SCALES] = None,
    allow_split: Annotated[bool, _ALLOW_SPLIT] = False,
    keep_unfitting: Annotated[bool, _KEEP_UNFITTING] = False,
    to: Annotated[Any, _TO] = "safetensors",
    max_shard_size: Annotated[str | None, _SHARD_SIZE] = None,
    allow_nonfinite: Annotated[bool, _ALLOW_NONFINITE] = False,
    allow_codes: Annotated[bool, _ALLOW_CODES] = False,
    overwrite: Annotated[bool, _OVERWRITE] = False,
    shard: Annotated[Any, _SHARD] = None,
    workers: Annotated[int | None, _WORKERS] = None,
    max_memory: Annotated[str | None, _MAX_MEMORY] = None,
    dry_run: Annotated[bool, _DRY_RUN] = False,
    report: Annotated[str | None, _REPORT] = None,
    as_json: Annotated[bool, _JSON] = False,
    quiet: Annotated[bool, _QUIET] = False,
    verbose: Annotated[bool, _VERBOSE] = False,
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
    shown_as = _ShownAs.of(report, as_json, quiet, verbose)
    if not dry_run:
        checkpoints.convert  # noqa: B018  (loads JAX before signals raise)
    with one_line_errors(f"{dst} was not written"):
        options: dict[str, Any] = {
            "format": (format or "e4m3fn") if rules is None else _read_rules(rules),
            "scaling": scaling,
            "layout": layout,
            "skip": skip or (),
            "keep_dtype": keep_dtype,
            "channel_axis": channel_axis,
            "input_scales": None if input_scales is None else read_json(input_scales),
            "allow_split": allow_split,
            "keep_unfitting": keep_unfitting,
            "allow_codes": allow_codes,
        }
        destination = Destination(
            src=src, dst=dst, to=to, max_shard_size=max_shard_size, overwrite=overwrite, shard=shard
        )
        if dry_run:
            _dry_run(destination, options, shown_as)
            return
        with _progress("converting", quiet) as callback:
            done = checkpoints.convert(
                **options,
                **dataclasses.asdict(destination),
                allow_nonfinite=allow_nonfinite,
                workers=workers,
                max_memory=max_memory,
                progress=callback,
            )
        _print_report(done, shown_as)


def dequantize(
    src: Annotated[str, _SRC],
    dst: Annotated[str, _DST],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            **_one_of("--dtype", WIDE),
            show_default="for quantized weights that of config.json, else float32; else none",
            help="float32, bfloat16 or float16.",
        ),
    ] = None,
    to: Annotated[Any, _TO] = "safetensors",
    max_shard_size: Annotated[str | None, _SHARD_SIZE] = None,
    allow_codes: Annotated[bool, _ALLOW_CODES] = False,
    overwrite: Annotated[bool, _OVERWRITE] = False,
    shard: Annotated[Any, _SHARD] = None,
    workers: Annotated[int | None, _WORKERS] = None,
    max_memory: Annotated[str | None, _MAX_MEMORY] = None,
    dry_run: Annotated[bool, _DRY_RUN] = False,
    report: Annotated[str | None, _REPORT] = None,
    as_json: Annotated[bool, _JSON] = False,
    quiet: Annotated[bool, _QUIET] = False,
    verbose: Annotated[bool, _VERBOSE] = False,
) -> None:
    """Write the weights that a quantized checkpoint stands for.

    Any layout of `qtoolkit layouts`, and GGUF, is recognized; config.json loses what it says of
    the quantization.
    """
    shown_as = _ShownAs.of(report, as_json, quiet, verbose)
    if not dry_run:
        checkpoints.dequantize_checkpoint  # noqa: B018  (loads JAX before signals raise)
    with one_line_errors(f"{dst} was not written"):
        destination = Destination(
            src=src, dst=dst, to=to, max_shard_size=max_shard_size, overwrite=overwrite, shard=shard
        )
        if dry_run:
            options = {"format": None, "keep_dtype": dtype, "allow_codes": allow_codes}
            _dry_run(destination, options, shown_as)
            return
        with _progress("dequantizing", quiet) as callback:
            done = checkpoints.dequantize_checkpoint(
                dtype=dtype,
                allow_codes=allow_codes,
                **dataclasses.asdict(destination),
                workers=workers,
                max_memory=max_memory,
                progress=callback,
            )
        _print_report(done, shown_as)


def finalize(
    dst: Annotated[str, typer.Argument(metavar="DST", help="What all shards were given.")],
    overwrite: Annotated[bool, _OVERWRITE] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Remove what the shards have written instead.")
    ] = False,
    report: Annotated[str | None, _REPORT] = None,
    as_json: Annotated[bool, _JSON] = False,
    quiet: Annotated[bool, _QUIET] = False,
    verbose: Annotated[bool, _VERBOSE] = False,
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
    shown_as = _ShownAs.of(report, as_json, quiet, verbose)
    with one_line_errors(f"{dst} was not written"):
        if discard:
            checkpoints.discard(dst)
            return
        _print_report(checkpoints.finalize(dst, overwrite=overwrite), shown_as)


def inspect(
    src: Annotated[str, _SRC],
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the weights: range, deviation, zeros, NaN, Inf.")
    ] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """List the tensors of a checkpoint, quantized ones with their scales."""
    with one_line_errors("nothing was changed"), checkpoints.open_source(src) as source:
        if as_json:
            typer.echo(json.dumps(inspect_data(source, stats), indent=2))
            return
        table(*inspect_table(source))
        for line in inspect_summary(source):
            typer.echo(line)
        if stats:
            typer.echo()
            table(*stats_table(source))


def layouts(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show this one.",
            **_one_of("NAME", tuple(LAYOUTS)),
        ),
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """List the layouts that `convert` writes and reads, or show one of them."""
    with one_line_errors("nothing was changed"):
        if as_json:
            chosen = LAYOUTS.values() if name is None else [LAYOUTS[name]]
            typer.echo(json.dumps({one.name: layout_data(one) for one in chosen}, indent=2))
            return
        if name is None:
            table(*layouts_table())
            return
        for line in layout_page(LAYOUTS[name]):
            typer.echo(line)


def _progress(title: str, quiet: bool) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if quiet else progress(title)


class _ShownAs(NamedTuple):
    """How a command shows what it does: text, one JSON object, Markdown, or nothing."""

    as_json: bool
    is_markdown: bool
    quiet: bool
    verbose: bool

    @classmethod
    def of(cls, report: str | None, as_json: bool, quiet: bool, verbose: bool) -> "_ShownAs":
        """From `--report`, `--json`, `--quiet` and `--verbose`; exits if one excludes another."""
        message = ""
        if as_json and report == "md":
            message = "--json and --report md exclude each other; give one of them"
        elif quiet and verbose:
            message = "--quiet and --verbose exclude each other; give one of them"
        elif verbose and (as_json or report):
            message = "--verbose: --json and --report name every tensor already; leave it out"
        if message:
            raise failure(message, 2)
        return cls(as_json or report == "json", report == "md", quiet, verbose)


def _print_report(done: checkpoints.Report, shown_as: _ShownAs) -> None:
    if shown_as.quiet and not (shown_as.as_json or shown_as.is_markdown):
        return
    what = f"shard {done.shard} of {done.target}" if done.shard else done.target
    with whole(what):
        summary = [*report_summary(done), *loading_lines(done)]
        with printing():
            if shown_as.as_json:
                typer.echo(done.to_json())
            elif shown_as.is_markdown:
                typer.echo(report_markdown(done))
            else:
                if shown_as.verbose:
                    table(*report_table(done))
                for line in summary:
                    typer.echo(line)


def _dry_run(destination: Destination, options: dict[str, Any], shown_as: _ShownAs) -> None:
    """Prints the plan that `make_plan` makes with these options."""
    if shown_as.is_markdown:
        raise failure("--dry-run --report md: a plan has no such report; use --report json", 2)
    destination.check()
    to, dst = destination.to, str(destination.dst)
    options["layout"] = layout_in(to, options.get("layout"))
    with checkpoints.open_source(destination.src) as opened:
        source = dequantized(opened) if options["format"] else check_quantized(opened)
        plan = checkpoints.make_plan(source, **options)
        if to == "orbax":
            check_tree(dst, plan, opened)
        part = _part(destination, opened, plan)
    if shown_as.quiet:
        return
    if shown_as.as_json:
        typer.echo(json.dumps({"container": to, **plan_data(plan)}, indent=2))
        return
    table(*plan_table(plan))
    for line in plan_summary(plan, dst, part):
        typer.echo(line)


def _part(destination: Destination, opened: Checkpoint, plan: checkpoints.Plan) -> str:
    """The words for what a shard would write, for the summary of a plan; "" without a shard."""
    shard = destination.shard
    if shard is None or opened.folder is None:
        return ""
    names, count = files_of_shard(plan, opened, file_limit(destination.max_shard_size), shard)
    listed = f": {', '.join(map(shown, names))}" if names else ""
    return f"{shard[0]}/{shard[1]} writes {len(names)} of {file_count(count)}{listed}"


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


__all__ = ["convert", "dequantize", "finalize", "inspect", "layouts"]
