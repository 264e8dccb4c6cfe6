"""The texts that the commands print about conversions, plans, files and layouts. No JAX here."""

import dataclasses
import json
import math
import operator
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints import (
    LAYOUTS,
    CheckpointError,
    Layout,
    Plan,
    Report,
    TensorPlan,
)
from qtoolkit.checkpoints.internal import (
    FLOATS,
    Checkpoint,
    Encoding,
    Statistics,
    check_explained,
    dequantized,
    join,
    listed,
    read_json,
    shown,
    statistics,
)
from qtoolkit.cli._errors import printable

# Header, rows and right-aligned columns: the arguments of `table`.
Table = tuple[Sequence[str], list[list[str]], Sequence[str]]

_STATS_HEADER = ("tensor", "min", "max", "mean", "deviation", "zeros", "NaN", "Inf")
# Models whose code asks layers for `weight`, which packed layers have not: transformers 5.24 fails
# as it loads them (tests/interop/test_transformers.py). There are more than were tried.
_ASK_FOR_WEIGHTS = {
    *("falcon", "gpt_bigcode", "mamba", "mamba2", "modernbert"),
    *("rwkv", "siglip", "t5", "umt5", "wav2vec2"),
}


def plan_table(plan: Plan) -> Table:
    """A row for every tensor of the source, with the bytes that would be written for it."""
    header = ("tensor", "dtype", "becomes", "scale", "bytes", "kept because")
    rows = [
        [
            shown(tensor.name),
            tensor.source.stored_dtype,
            tensor.dtype,
            _scale_shape(tensor),
            f"{tensor.nbytes:,}",
            tensor.reason,
        ]
        for tensor in plan.tensors
    ]
    return header, rows, ("bytes",)


def _scale_shape(tensor: TensorPlan) -> str:
    scale = tensor.encoding.scale if tensor.encoding is not None else None
    return "" if scale is None else dimensions(scale.shape)


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan as data for JSON."""
    return {
        "layout": plan.layout,
        "format": plan.format_names,
        "scaling": plan.scaling,
        "dequantized": plan.dequantizes,
        "bytes_before": sum(tensor.source.stored_nbytes for tensor in plan.tensors),
        "bytes_after": sum(tensor.nbytes for tensor in plan.tensors),
        "kept_share": plan.kept_share,
        "quantization_config": plan.quantization_config,
        "caution": plan.caution,
        "tensors": [
            {
                "name": tensor.name,
                "action": tensor.action,
                "reason": tensor.reason,
                "dtype": tensor.dtype,
                "bytes_before": tensor.source.stored_nbytes,
                "bytes_after": tensor.nbytes,
                "entries": [entry._asdict() for entry in tensor.entries],
            }
            for tensor in plan.tensors
        ],
    }


def plan_summary(plan: Plan, dst: str, part: str = "") -> list[str]:
    """The lines under the table of a plan; `part` says what a shard writes, "" without one."""
    title, *lines = _outcome(
        plan.format_names,
        plan.scaling,
        plan.layout,
        plan.dequantizes,
        [tensor.reason for tensor in plan.tensors if tensor.action != "quantize"],
        sum(tensor.action == "quantize" for tensor in plan.tensors),
        plan.kept_share,
        sum(tensor.source.stored_nbytes for tensor in plan.tensors),
        sum(tensor.nbytes for tensor in plan.tensors),
    )
    return [
        f"{shown(dst)}: {title}; a dry run, nothing was written",
        *lines,
        *([f"  note       {plan.caution}"] if plan.caution else []),
        *([f"  shard      {part}"] if part else []),
    ]


def report_summary(report: Report) -> list[str]:
    """The lines that end a conversion."""
    if report.shard and not report.files:
        return [
            f"{shown(report.target)}: shard {report.shard}: no file is left for it, there are more "
            "shards than files; a smaller --max-shard-size makes more of these"
        ]
    part = f" shard {report.shard}, {file_count(len(report.files))}:" if report.shard else ""
    title, *lines = _outcome(
        report.format,
        report.scaling,
        report.layout,
        report.dequantized,
        [tensor.reason for tensor in report.kept],
        len(report.quantized),
        report.kept_share,
        report.bytes_before,
        report.bytes_after,
    )
    lines = [f"{shown(report.target)}:{part} {title}", *lines, *_errors(report), *_notes(report)]
    if report.resumed:
        lines.append(f"  resumed    {file_count(len(report.resumed))} of an earlier run kept")
    if report.left and not report.shard:
        lines.append(f"  not copied {listed(map(shown, report.left))}")
    return lines


def _errors(report: Report) -> list[str]:
    """The mean SQNR, and the lowest with the name of its tensor; none where none was measured."""
    if report.mean_sqnr_db is None:
        return []
    measured = [(t.sqnr_db, t.name) for t in report.quantized if t.sqnr_db is not None]
    lowest, name = min(measured, key=operator.itemgetter(0))
    return [
        f"  mean SQNR  {_decibels(report.mean_sqnr_db)}",
        f"  lowest     {_decibels(lowest)}, {shown(name)}",
    ]


def _notes(report: Report) -> list[str]:
    """Warnings: what loaders misread, NaNs and infinities, overflow."""
    lines = [f"  note       {report.caution}"] if report.caution else []
    copied = [t for t in report.tensors if t.nonfinite and t.action == "keep"]
    if changed := report.nonfinite - sum(tensor.nonfinite for tensor in copied):
        lines.append(f"  note       {changed:,} elements were NaN or infinite")
    if copied:
        some = listed(f"{shown(tensor.name)} ({tensor.nonfinite:,})" for tensor in copied)
        lines.append(f"  note       NaN or infinite, copied as they are: {some}")
    if report.overflowed:
        lines.append(
            f"  note       {report.overflowed:,} finite elements exceed the largest number of "
            "their new dtype and became it"
        )
    return lines


def report_table(report: Report) -> Table:
    """A row for every tensor."""
    header = ("tensor", "became", "bytes", "SQNR", "largest scale", "kept because")
    rows = [
        [
            shown(tensor.name),
            tensor.dtype,
            f"{tensor.bytes_after:,}",
            "" if tensor.sqnr_db is None else _decibels(tensor.sqnr_db),
            "" if tensor.max_scale is None else f"{tensor.max_scale:.3g}",
            tensor.reason,
        ]
        for tensor in report.tensors
    ]
    return header, rows, ("bytes", "SQNR", "largest scale")


def report_markdown(report: Report) -> str:
    """A table of every tensor, and the summary, in Markdown."""
    header, rows, right = report_table(report)
    lines = [
        f"# {_escaped(shown(report.target))}",
        "",
        *(f"* {_escaped(line.strip())}" for line in report_summary(report)),
        "",
        "| " + " | ".join(header) + " |",
        "| " + " | ".join("---:" if name in right else "---" for name in header) + " |",
        *("| " + " | ".join(map(_escaped, row)) + " |" for row in rows),
    ]
    return "\n".join(lines)


def loading_lines(report: Report) -> list[str]:
    """How to load what was written, and what loaders need beside a single file."""
    literal = _literal(report.target)
    if report.shard:
        # $'...' is how shells spell control characters.
        target = report.target
        quoted = shlex.quote(target) if target.isprintable() else f"${target!a}"
        return [f"when all shards are done: qtoolkit finalize {quoted}"]
    if report.loads_nowhere:
        if report.files:
            parked = "qtoolkit_config.json" in report.files
            return [
                "no loader of models reads layout plain: "
                + ("config.json is now called qtoolkit_config.json; " if parked else "")
                + f"`qtoolkit dequantize` undoes {'both' if parked else 'it'}"
            ]
        if report.container == "orbax":
            return [
                f"load it: qtoolkit.checkpoints.load({literal}), with like=nnx.state(model) or "
                "linen variables for a model; orbax restores it with scales beside the codes"
            ]
        return [f"load it: qtoolkit.checkpoints.dequantize(qtoolkit.checkpoints.load({literal}))"]
    if not report.quantization_config:
        return []
    loaders = LAYOUTS[report.layout].loaders
    by_transformers = "transformers" in loaders and not report.caution
    if report.files:
        if not by_transformers:
            return [f"load it (by its documentation, untested here): vllm.LLM({literal})"]
        if not {"model.safetensors", "model.safetensors.index.json"} & {*report.files}:
            return [
                "transformers finds weights by the name model.safetensors; give those of the "
                "source that name, and convert it again"
            ]
        return [f"load it: transformers.{_call(report, literal)}"]
    if not by_transformers:
        loading = (
            "load the folder: vllm.LLM(FOLDER); give `convert` the folder itself, and it writes "
            "the further files that loaders ask for"
        )
    else:
        loading = (
            "load the folder with the class that its config.json names, such as "
            "transformers.AutoModelForCausalLM.from_pretrained(FOLDER), the file named "
            "model.safetensors"
        )
    return [
        f"loaders ({loaders}) need this in the config.json beside it, or they read codes as "
        "weights without an error:",
        json.dumps({"quantization_config": report.quantization_config}, indent=2),
        loading,
    ]


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
    if packed and str(config.get("model_type")) in _ASK_FOR_WEIGHTS:
        wide = "transformers.CompressedTensorsConfig(dequantize=True)"
        return f"{name}.from_pretrained({literal}, quantization_config={wide})"
    return f"{name}.from_pretrained({literal})"


def inspect_table(source: Checkpoint) -> Table:
    """A row for every tensor, with its scales."""
    encodings = _encodings(source)
    by_codes = {encoding.codes.name: encoding for encoding in encodings.values()}
    others = {e.name for encoding in by_codes.values() for e in encoding.entries} - by_codes.keys()
    rows = []
    for tensor in source.tensors.values():
        if tensor.name in others:
            continue
        encoding = by_codes.get(tensor.name)
        rows.append(
            [
                shown(tensor.name),
                tensor.stored_dtype,
                dimensions(tensor.shape),
                f"{tensor.stored_nbytes:,}",
                "" if encoding is None else _scales(encoding),
            ]
        )
    header = ("tensor", "dtype", "shape", "bytes", "scales")
    count = len(header) - (not encodings)  # no column of scales where there are none
    return header[:count], [row[:count] for row in rows], ("bytes",)


def _encodings(source: Checkpoint) -> Mapping[str, Encoding]:
    """How quantized weights are stored, by name; empty if in a layout that is not read."""
    try:
        return dequantized(source).encodings
    except CheckpointError:
        return {}


def _scales(encoding: Encoding) -> str:
    parts = [
        f"{shown(entry.name.rpartition('.')[2])} {entry.dtype} {dimensions(entry.shape)}"
        for entry in encoding.entries
        if entry != encoding.codes
    ]
    # Codes that are packed have another shape than the weight.
    is_same = encoding.shape == encoding.codes.shape
    shape = "" if is_same else f" {dimensions(encoding.shape)}"
    return f"{encoding.spec.name}{shape}: {', '.join(parts)}"


def inspect_summary(source: Checkpoint) -> list[str]:
    """The lines under the table of `inspect_table`."""
    tensors = source.tensors.values()
    lines = [
        f"{tensor_count(len(tensors))}, {sum(t.size for t in tensors):,} elements, "
        f"{sum(t.stored_nbytes for t in tensors):,} bytes"
    ]
    try:
        opened = dequantized(source)
        check_explained(opened, lambda name: False)
    except CheckpointError as error:
        lines.append(f"not readable as quantized: {printable(str(error))}")
    else:
        if count := sum(tensor.is_dequantized for tensor in opened.tensors.values()):
            lines.append(
                f"layout {opened.layout}: {tensor_count(count)} quantized; "
                "`qtoolkit dequantize` writes what they stand for"
            )
    lines += [f"metadata {shown(key)}: {shown(value)}" for key, value in source.metadata.items()]
    return lines


def inspect_data(source: Checkpoint, stats: bool) -> dict[str, Any]:
    """What `inspect_table` shows, and with `stats` the numbers of `stats_table`, as data for JSON.

    Numbers are not rounded or formatted. One is null if a tensor has no finite element.
    """
    data: dict[str, Any] = {
        "path": str(source.path),
        "metadata": source.metadata,
        "tensors": [
            {
                "name": t.name,
                "dtype": t.stored_dtype,
                "shape": list(t.shape),
                "bytes": t.stored_nbytes,
            }
            for t in source.tensors.values()
        ],
        "quantized": {
            name: {
                "format": encoding.spec.name,
                "shape": list(encoding.shape),
                "entries": [entry.name for entry in encoding.entries],
            }
            for name, encoding in _encodings(source).items()
        },
    }
    if stats:
        data["stats"] = [
            dict(zip(_STATS_HEADER, (name, *map(_number, dataclasses.astuple(one))), strict=True))
            for name, one in _stats(source)
        ]
    return data


def stats_table(source: Checkpoint) -> Table:
    """A row for every tensor of floats; quantized ones are dequantized."""
    rows = []
    for name, stats in _stats(source):
        *numbers, zeros, nans, infinities = dataclasses.astuple(stats)
        counts = (f"{count:,}" for count in (zeros, nans, infinities))
        rows.append([shown(name), *(f"{number:.4g}" for number in numbers), *counts])
    return _STATS_HEADER, rows, _STATS_HEADER[1:]


def _stats(source: Checkpoint) -> Iterator[tuple[str, Statistics]]:
    """The statistics of every tensor of floats that has elements."""
    for tensor in dequantized(source).tensors.values():
        if (tensor.dtype in FLOATS or tensor.dtype.startswith("F8_")) and tensor.size:
            yield tensor.name, statistics(tensor)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def layouts_table() -> Table:
    """A row for every layout."""
    rows = [
        [
            layout.name,
            ", ".join(dict.fromkeys(s.format for s in layout.schemes)) or "only read",
            layout.loaders,
        ]
        for layout in LAYOUTS.values()
    ]
    return ("layout", "formats", "loaded by"), rows, ()


def layout_data(layout: Layout) -> dict[str, Any]:
    """A layout as data for JSON; format and scaling are arguments of `convert`."""
    return {
        "title": layout.title,
        "loaders": layout.loaders,
        "note": layout.note,
        "schemes": [
            {
                "format": scheme.format,
                "scaling": scheme.scaling,
                "name": scheme.name,
                "about": scheme.about,
                "needs_input_scale": scheme.needs_input_scale,
            }
            for scheme in layout.schemes
        ],
    }


def layout_page(layout: Layout) -> list[str]:
    """The lines that describe a layout."""
    texts = [text.replace("(", "").replace(")", "") for text in layout.spellings()]
    width = max(map(len, texts), default=0)
    lines = [f"{layout.name}: {layout.title}", f"loaders: {layout.loaders}"]
    lines += [*textwrap.wrap(layout.note, 100), ""]
    for scheme, text in zip(layout.schemes, texts, strict=True):
        needs = "needs --input-scales" if scheme.needs_input_scale else ""
        about = "; ".join(filter(None, (scheme.name, scheme.about, needs)))
        lines.append(f"  --format {text:<{width}}  {about}")
    if not layout.schemes:
        return [*lines, "is only read: convert and dequantize take it as SRC"]
    return [*lines, "", f"qtoolkit convert SRC DST --layout {layout.name}"]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "\\`")


def _outcome(
    formats: str,
    scaling: str,
    layout: str,
    dequantized: str,
    reasons: Sequence[str],
    quantized: int,
    share: float,
    before: int,
    after: int,
) -> list[str]:
    """A title and the lines that count tensors and bytes.

    Args:
      formats, scaling, layout, dequantized: As `Report` has them.
      reasons: One for each tensor that is kept.
      quantized: How many tensors are not.
      share: That of the kept ones, by bytes.
      before, after: Bytes of all.
    """
    size = f"  bytes      {before:,} -> {after:,} ({100 * after / max(before, 1):.1f} %)"
    if formats == "nothing" and dequantized:
        return [f"{tensor_count(len(reasons))}, those in layout {dequantized} dequantized", size]
    words = [word for word in scaling.split(", ") if word != "none"]
    own = ", or the format's own" if words and "none" in scaling else ""
    scales = f", a scale per {' or '.join(words)}{own}" if words else ""
    source = f"  source     quantized (layout {dequantized}), dequantized first"
    counted = ", ".join(f"{reason}: {reasons.count(reason)}" for reason in dict.fromkeys(reasons))
    return [
        formats + scales + ("" if layout == "plain" else f", layout {layout}"),
        *([source] if dequantized else []),
        f"  quantized  {tensor_count(quantized)}",
        f"  kept       {tensor_count(len(reasons))}"
        + (f" ({counted}), {100 * share:.1f} % of the bytes" if counted else ""),
        size,
    ]


def tensor_count(count: int) -> str:
    """1 tensor, 2,000 tensors."""
    return f"{count:,} tensor{'' if count == 1 else 's'}"


def file_count(count: int) -> str:
    """1 file, 20 files."""
    return f"{count:,} file{'' if count == 1 else 's'}"


def dimensions(shape: tuple[int, ...]) -> str:
    """A shape as it is printed: [32, 16], [] for a scalar."""
    return f"[{', '.join(map(str, shape))}]"


def _decibels(value: float) -> str:
    return f"{value:.2f} dB" if math.isfinite(value) else "exact"
