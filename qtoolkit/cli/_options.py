"""The options of the commands for checkpoints, each declared once, and the checks of their values.

A value that is wrong by itself ends the command with exit code 2.
"""

import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from qtoolkit.checkpoints import CheckpointError
from qtoolkit.checkpoints.internal import (
    LAYOUTS,
    OWN_TYPES,
    SCALINGS,
    WRITTEN,
    AxisChoice,
    byte_count,
    compile_pattern,
    format_names,
    scheme_named,
    shown,
    weight_format,
    worker_count,
)
from qtoolkit.cli._errors import failure

_IMAGES = (".png", ".svg", ".pdf")


def one_of(name: str, choices: Sequence[str]) -> dict[str, Any]:
    """What a parameter with these choices has: a callback that checks, and completion."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in choices:
            raise failure(f"{name}: {value!r}, expected one of {', '.join(choices)}", 2)
        return value

    return {"metavar": "NAME", "callback": check, "autocompletion": completion(choices)}


def picture(path: Path | None) -> Path | None:
    """A callback for options that name a picture file: refuses others before any work."""
    if path is not None and path.suffix.lower() not in _IMAGES:
        raise typer.BadParameter(
            f"{shown(path.name)}, expected a name that ends in {', '.join(_IMAGES)}"
        )
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is missing; pip install matplotlib")
    return path


def completion(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """What a shell offers for the beginning of a word."""
    return lambda incomplete: [name for name in choices if name.startswith(incomplete)]


def _target(name: str | None) -> str | None:
    """The name of the format that `name` spells, or `name` itself if it is that of a scheme."""
    if name is None or scheme_named(name) is not None or name.lower() in OWN_TYPES:
        return name
    try:
        return weight_format(name).name
    except ValueError as error:
        message = str(error).removeprefix("format: ")
        if name.lower() in LAYOUTS:
            kind = "a layout" if name.lower() in WRITTEN else "a layout that is read, not written"
            message = f"{name!r} is {kind}, expected a format of weights"
        takes = ", ".join(format_names())
        raise failure(f"--format: {message}; convert takes {takes}", 2) from error


def _size(option: str, check: Callable[[str], object]) -> Callable[[str], str]:
    """Parses a size that `check` accepts, whose errors name an argument of Python."""

    def parse(size: str) -> str:
        try:
            check(size)
        except ValueError as error:
            raise failure(f"{option}: {str(error).partition('=')[2]}", 2) from error
        return size

    return parse


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not match or not int(match[1]) < int(match[2]):
        raise failure(
            f"--shard: {text!r}, expected I/N with I from 0 to N - 1: 0/8, 1/8, ... 7/8", 2
        )
    return int(match[1]), int(match[2])


def _regexes(patterns: list[str] | None) -> list[str] | None:
    for pattern in patterns or ():
        try:
            compile_pattern(pattern)
        except CheckpointError as error:
            raise failure(str(error), 2) from error
    return patterns


SRC = typer.Argument(
    metavar="SRC",
    help="A folder of Hugging Face or orbax, or a file: safetensors or GGUF. Hugging Face folders "
    "and safetensors files may be URLs: s3://bucket/model.",
)
DST = typer.Argument(
    metavar="DST",
    help="The folder to write, or the safetensors file if SRC is a file or orbax's; may be a URL.",
)
FORMAT = typer.Option(
    metavar="NAME",
    callback=_target,
    autocompletion=completion(format_names()),
    show_default="e4m3fn",
    help=f"Number format: {', '.join(format_names())}; or a scheme of `qtoolkit layouts NAME`; "
    f"for a DST that ends with .gguf also {', '.join(OWN_TYPES)}.",
)
LAYOUT = typer.Option(
    **one_of("--layout", WRITTEN),
    show_default="compressed-tensors for a folder with config.json, or the only layout that has "
    "the format; else plain, which no loader of models opens",
    help=f"How codes and scales are stored: {', '.join(WRITTEN)}; `qtoolkit layouts` says more.",
)
RULES = typer.Option(
    metavar="FILE",
    help='Replaces --format and the default exclusions: {"rules": [[REGEX, NAME], ...], '
    '"default": NAME}. The first REGEX that matches the name of a tensor decides; null excludes '
    "the tensor.",
)
SCALING = typer.Option(
    **one_of("--scaling", SCALINGS),
    show_default="the first of `qtoolkit layouts NAME`",
    help="One scale per tensor, per output channel, or per block of 128x128: tensor, "
    "channel, block. Block formats have scales of their own, bfloat16 and float16 none.",
)
SKIP = typer.Option(
    metavar="REGEX",
    callback=_regexes,
    help="Do not quantize tensors in whose names this matches; may be given more than once. "
    "Embeddings, heads, norms, biases, routers, vision towers, vectors, masks of "
    "integers and complex numbers are excluded anyway; weights in float64 are refused.",
)
_DTYPES = ("float32", "bfloat16", "float16")
KEEP_DTYPE = typer.Option(
    **one_of("--keep-dtype", _DTYPES),
    help=f"Round the unquantized weights to this dtype: {', '.join(_DTYPES)}.",
)
DTYPE = typer.Option(
    **one_of("--dtype", _DTYPES),
    show_default="that of config.json, else float32; unquantized weights keep theirs",
    help="The dtype to write: float32, bfloat16 or float16.",
)
CHANNEL_AXIS = typer.Option(
    **one_of("--channel-axis", get_args(AxisChoice)),
    help="Which axis of weights holds the outputs: first (PyTorch), last (Flax, GPT-2), or "
    "auto, by architecture and names.",
)
INPUT_SCALES = typer.Option(
    metavar="FILE",
    help='Static activation scales from a calibration, {"MODULE": 0.02, ...}, which '
    "modelopt's FP8 and NVFP4 need.",
)
ALLOW_SPLIT = typer.Option(
    "--allow-split",
    help="Allow different formats for weights that engines join: q, k, v; gate, up; experts.",
)
KEEP_UNFITTING = typer.Option(
    "--keep-unfitting",
    help="Do not quantize matrices that the blocks of the format do not fit.",
)
ALLOW_NONFINITE = typer.Option(
    "--allow-nonfinite",
    help="Also quantize and cast weights with NaN or Inf. Copied weights may have them anyway.",
)
ALLOW_CODES = typer.Option(
    "--allow-codes",
    help="Copy 8-bit floats and integers that look like codes of an unknown layout. Without it "
    "they are an error.",
)
SHARD = typer.Option(
    metavar="I/N",
    parser=_shard,
    help="Write only shard I (from 0) of N: every N-th file of a folder. After all shards, run "
    "`qtoolkit finalize DST`.",
)
OVERWRITE = typer.Option("--overwrite", help="Replace DST.")
SHARD_SIZE = typer.Option(
    metavar="SIZE",
    parser=_size("--max-shard-size", byte_count),
    show_default="5GB",
    help="The largest size of each file in a folder: 5GB, 500MiB.",
)
WORKERS = typer.Option(
    min=1,
    max=64,
    show_default="one for each core, at most 4",
    help="Threads that read and quantize. Their number does not change the bytes.",
)
MAX_MEMORY = typer.Option(
    metavar="SIZE",
    parser=_size("--max-memory", lambda size: worker_count(None, size)),
    help="Memory that the process may take, at least 360MiB; limits the number of workers. An "
    "estimate, for CPU.",
)
DRY_RUN = typer.Option("--dry-run", help="Show what would become of every tensor; write nothing.")
JSON = typer.Option("--json", help="Print one JSON object instead of text.")
QUIET = typer.Option("--quiet", "-q", help="Print nothing but errors.")


@dataclasses.dataclass(kw_only=True)
class Printing:
    """The options of all commands that write checkpoints; they say what is printed."""

    as_json: Annotated[bool, JSON] = False
    quiet: Annotated[bool, QUIET] = False

    @property
    def style(self) -> str:
        """How to print a report: "json", "nothing" or "text"."""
        return "json" if self.as_json else "nothing" if self.quiet else "text"


@dataclasses.dataclass(kw_only=True)
class Writing(Printing):
    """The options of `convert` and `dequantize`: what they write, and with what resources."""

    max_shard_size: Annotated[str | None, SHARD_SIZE] = None
    allow_codes: Annotated[bool, ALLOW_CODES] = False
    overwrite: Annotated[bool, OVERWRITE] = False
    shard: Annotated[Any, SHARD] = None
    workers: Annotated[int | None, WORKERS] = None
    max_memory: Annotated[str | None, MAX_MEMORY] = None
    dry_run: Annotated[bool, DRY_RUN] = False


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as Typer takes it: each field of its last parameter becomes an option."""
    *own, shared = inspect.signature(command).parameters.values()
    fields = [*inspect.signature(shared.annotation).parameters.values()]
    # Typer reads the parameters, and their order in --help, from the signature.
    fields.sort(key=lambda field: field.name in Printing.__dataclass_fields__)

    def with_fields(**arguments: Any) -> None:
        values = {field.name: arguments.pop(field.name) for field in fields}
        command(**arguments, **{shared.name: shared.annotation(**values)})

    with_fields.__name__, with_fields.__doc__ = command.__name__, command.__doc__
    with_fields.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
    return with_fields
