"""The texts that the commands print about conversions and plans. No JAX here."""

import json
import math
import operator
import shlex
from collections.abc import Sequence

from qtoolkit.checkpoints import Report, TensorPlan
from qtoolkit.checkpoints.internal import (
    ASK_FOR_WEIGHTS,
    LAYOUTS,
    PACKED_OPTION,
    join,
    listed,
    read_json,
    shown,
)
from qtoolkit.cli._errors import as_options

# Header, rows and right-aligned columns: the arguments of `table`.
Table = tuple[Sequence[str], list[list[str]], Sequence[str]]


def plan_table(tensors: Sequence[TensorPlan]) -> Table:
    """A row for every tensor of the source, with the bytes that would be written for it."""
    header = ("tensor", "dtype", "becomes", "scale", "bytes", "not quantized because")
    rows = []
    for tensor in tensors:
        scale = tensor.encoding.scale if tensor.encoding is not None else None
        row = [shown(tensor.name), tensor.source.stored_dtype, tensor.dtype]
        row += ["" if scale is None else str([*scale.shape]), f"{tensor.nbytes:,}"]
        row.append(as_options(tensor.reason))
        rows.append(row)
    return header, rows, ("bytes",)


def report_summary(report: Report, after_title: str = "") -> list[str]:
    where = f"{shown(report.target)}:"
    if report.shard and not report.files:
        return [
            f"{where} shard {report.shard}: has no file to write, there are more shards than "
            "files; a smaller --max-shard-size makes more of these"
        ]
    if report.shard:
        where += f" shard {report.shard}, {count_text(len(report.files), 'file')}:"
    title, *lines = _outcome(report)
    lines = [f"{where} {title}{after_title}", *lines, *_errors(report), *_notes(report)]
    if report.resumed:
        lines.append(f"  resumed    {count_text(len(report.resumed), 'file')} of an earlier run")
    if report.left and not report.shard:
        lines.append(f"  not copied {listed(map(shown, report.left))}")
    return lines


def _outcome(report: Report) -> list[str]:
    """A title, and the lines that count tensors and bytes."""
    before, after = report.bytes_before, report.bytes_after
    size = f"  bytes      {before:,} -> {after:,} ({100 * after / max(before, 1):.1f} %)"
    excluded = count_text(len(report.kept), "tensor")
    if report.format == "nothing" and report.dequantized:
        return [f"{excluded}, dequantized from layout {report.dequantized}", size]
    words = [word for word in report.scaling.split(", ") if word != "none"]
    own = ", or the format's own" if words and "none" in report.scaling else ""
    scales = f", a scale per {' or '.join(words)}{own}" if words else ""
    source = f"  source     quantized (layout {report.dequantized}), dequantized first"
    reasons = [as_options(tensor.reason) for tensor in report.kept]
    why = ", ".join(f"{reason}: {reasons.count(reason)}" for reason in dict.fromkeys(reasons))
    return [
        report.format + scales + ("" if report.layout == "plain" else f", layout {report.layout}"),
        *([source] if report.dequantized else []),
        f"  quantized  {count_text(len(report.quantized), 'tensor')}",
        f"  excluded   {excluded}"
        + (f" ({why}), {100 * report.kept_share:.1f} % of the bytes" if why else ""),
        size,
    ]


def _errors(report: Report) -> list[str]:
    """The mean SQNR, and the lowest with the name of its tensor; none where none was measured."""
    measured = [(t.sqnr_db, t.name) for t in report.quantized if t.sqnr_db is not None]
    if report.mean_sqnr_db is None or not measured:
        return []
    lowest, name = min(measured, key=operator.itemgetter(0))
    return [
        f"  mean SQNR  {_decibels(report.mean_sqnr_db)}",
        f"  min SQNR   {_decibels(lowest)}, {shown(name)}",
    ]


def _notes(report: Report) -> list[str]:
    """Warnings: what loaders misread, NaNs and infinities, overflow."""
    notes = [as_options(report.caution)] if report.caution else []
    copied = [t for t in report.tensors if t.nonfinite and t.action == "keep"]
    if changed := report.nonfinite - sum(tensor.nonfinite for tensor in copied):
        notes.append(f"{changed:,} elements were NaN or infinite")
    if copied:
        some = listed(f"{shown(tensor.name)} ({tensor.nonfinite:,})" for tensor in copied)
        notes.append(f"NaN or infinite, copied as they are: {some}")
    if report.overflowed:
        notes.append(
            f"{report.overflowed:,} finite elements exceed the largest number of their new dtype "
            "and became it"
        )
    return [f"  note       {text}" for text in notes]


def loading_lines(report: Report) -> list[str]:
    """How to load what was written, and what else loaders need for a single file."""
    if report.shard:
        # $'...' is how shells spell control characters.
        target = report.target
        quoted = shlex.quote(target) if target.isprintable() else f"${target!a}"
        return [f"when all shards are done: qtoolkit finalize {quoted}"]
    if report.loads_nowhere:
        return [_loading_plain(report)]
    if not report.quantization_config:
        return []
    loaders, literal = LAYOUTS[report.layout].loaders, _literal(report.target)
    by_transformers = "transformers" in loaders and not report.caution
    if not report.files:
        return [
            f"loaders ({loaders}) need this in the config.json next to it, or they read codes as "
            "weights without an error:",
            json.dumps({"quantization_config": report.quantization_config}, indent=2),
            "load the folder with the class that its config.json names, such as "
            "transformers.AutoModelForCausalLM.from_pretrained(FOLDER), the file named "
            "model.safetensors"
            if by_transformers
            else "load the folder: vllm.LLM(FOLDER); give `convert` the folder itself, and it "
            "writes the further files that loaders ask for",
        ]
    if not by_transformers:
        return [f"load it (by its documentation, untested here): vllm.LLM({literal})"]
    if not {"model.safetensors", "model.safetensors.index.json"} & {*report.files}:
        return [
            "transformers finds weights by the name model.safetensors; give those of the source "
            "that name, and convert it again"
        ]
    return [f"load it: transformers.{_call(report, literal)}"]


def _loading_plain(report: Report) -> str:
    literal = _literal(report.target)
    if "qtoolkit_config.json" in report.files:
        return (
            "no loader of models reads layout plain: config.json is now called "
            "qtoolkit_config.json; `qtoolkit dequantize` undoes both"
        )
    if report.files:
        return (
            "no loader of models reads layout plain, which is the default where the source has no "
            "config.json, as here: `qtoolkit dequantize` undoes it"
        )
    like, rest = "params", ""
    outer = {tensor.name.partition(".")[0] for tensor in report.tensors}
    if "params" in outer:  # variables of linen, or a TrainState
        own = [name for name in ("params", "batch_stats") if name in outer]
        like = "{" + ", ".join(f'"{name}": {name}' for name in own) + "}"
        rest = f', skip=["^(?!{"|".join(own)})"]' if outer - {*own} else ""
    return f'load it: qtoolkit.checkpoints.load({literal}, like={like}, dtype="float32"{rest})'


def _literal(text: str) -> str:
    """A string of Python, in one line whatever is in it."""
    return f'"{text}"' if text.isprintable() and not set('"\\') & set(text) else ascii(text)


def _call(report: Report, literal: str) -> str:
    """What loads a written folder: the class that its config.json names, and options."""
    has_config = "config.json" in report.files
    config = read_json(join(report.target, "config.json")) if has_config else {}
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    if not isinstance(first, str) or not first.isidentifier():
        first = "AutoModel"
    name = "AutoModelForCausalLM" if first.endswith("ForCausalLM") else first
    packed = "pack-quantized" in json.dumps(report.quantization_config)
    if packed and str(config.get("model_type")) in ASK_FOR_WEIGHTS:
        return f"{name}.from_pretrained({literal}, {PACKED_OPTION})"
    return f"{name}.from_pretrained({literal})"


def count_text(count: int, noun: str) -> str:
    """1 tensor, 2,000 tensors."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _decibels(value: float) -> str:
    return f"{value:.2f} dB" if math.isfinite(value) else "exact"
