"""The commands that show what there is: inspect, layouts. No JAX here."""

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from qtoolkit.checkpoints import CheckpointError
from qtoolkit.checkpoints.internal import (
    LAYOUTS,
    Checkpoint,
    Encoding,
    Layout,
    check_explained,
    decode_weights,
    open_source,
    shown,
)
from qtoolkit.cli._errors import as_options, one_line_errors, printable
from qtoolkit.cli._options import JSON, SRC, one_of
from qtoolkit.cli._summaries import Table, count_text
from qtoolkit.cli._tables import table


def inspect(
    src: Annotated[str, SRC],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """List the tensors of a checkpoint, and their scales."""
    with one_line_errors("nothing was changed"), open_source(src) as source:
        if as_json:
            typer.echo(json.dumps(_data(source), indent=2))
            return
        table(*_tensors_table(source))
        for line in _summary(source):
            typer.echo(line)


def layouts(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this one.", **one_of("NAME", [*LAYOUTS])),
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """List the layouts of quantized checkpoints, or show one."""
    with one_line_errors("nothing was changed"):
        if as_json:
            keys = ("format", "scaling", "name", "note", "needs_input_scale")
            data = {
                layout.name: {
                    "title": layout.title,
                    "loaders": layout.loaders,
                    "note": layout.note,
                    "schemes": [{key: getattr(s, key) for key in keys} for s in layout.schemes],
                }
                for layout in (LAYOUTS.values() if name is None else [LAYOUTS[name]])
            }
            typer.echo(json.dumps(data, indent=2))
        elif name is None:
            formats = (dict.fromkeys(s.format for s in one.schemes) for one in LAYOUTS.values())
            rows = [
                [one.name, ", ".join(names) or "only read", one.loaders]
                for one, names in zip(LAYOUTS.values(), formats, strict=True)
            ]
            table(("layout", "formats", "loaded by"), rows)
        else:
            for line in _layout_page(LAYOUTS[name]):
                typer.echo(line)


def _tensors_table(source: Checkpoint) -> Table:
    encodings = _encodings(source)
    by_codes = {encoding.codes.name: encoding for encoding in encodings.values()}
    others = {e.name for encoding in by_codes.values() for e in encoding.entries} - by_codes.keys()
    rows = []
    for tensor in source.tensors.values():
        if tensor.name not in others:
            row = [shown(tensor.name), tensor.stored_dtype, str([*tensor.shape])]
            rows.append([*row, f"{tensor.stored_nbytes:,}", _scales(by_codes.get(tensor.name))])
    header = ("tensor", "dtype", "shape", "bytes", "scales")
    count = len(header) - (not encodings)  # no column of scales where there are none
    return header[:count], [row[:count] for row in rows], ("bytes",)


def _encodings(source: Checkpoint) -> Mapping[str, Encoding]:
    """How quantized weights are stored, by name; empty if in a layout that is not read."""
    try:
        return decode_weights(source).encodings
    except CheckpointError:
        return {}


def _scales(encoding: Encoding | None) -> str:
    """The format of a weight, its shape if its codes have another one, and its scales."""
    if encoding is None:
        return ""
    parts = [
        f"{shown(entry.name.rpartition('.')[2])} {entry}"
        for entry in encoding.entries
        if entry != encoding.codes
    ]
    # Codes that are packed have another shape than the weight.
    is_same = encoding.shape == encoding.codes.shape
    shape = "" if is_same else f" {[*encoding.shape]}"
    return f"{encoding.format_name}{shape}: {', '.join(parts)}"


def _summary(source: Checkpoint) -> list[str]:
    tensors = source.tensors.values()
    lines = [
        f"{count_text(len(tensors), 'tensor')}, {sum(t.size for t in tensors):,} elements, "
        f"{sum(t.stored_nbytes for t in tensors):,} bytes"
    ]
    try:
        opened = decode_weights(source)
        check_explained(opened, lambda name: False)
    except CheckpointError as error:
        lines.append(f"not readable as quantized: {printable(as_options(str(error)))}")
    else:
        if count := sum(tensor.is_dequantized for tensor in opened.tensors.values()):
            lines.append(
                f"layout {opened.layout}: {count_text(count, 'tensor')} quantized; "
                "`qtoolkit dequantize` writes unquantized weights"
            )
    return lines + [f"metadata {shown(k)}: {shown(v)}" for k, v in source.metadata.items()]


def _data(source: Checkpoint) -> dict[str, Any]:
    """What the tables show, as data for JSON."""
    return {
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
                "format": encoding.format_name,
                "shape": list(encoding.shape),
                "entries": [entry.name for entry in encoding.entries],
            }
            for name, encoding in _encodings(source).items()
        },
    }


def _layout_page(layout: Layout) -> list[str]:
    texts = [re.sub("[()]", "", as_options(one.spelling)) for one in layout.schemes]
    width = max(map(len, texts), default=0)
    lines = [f"{layout.name}: {layout.title}", f"loaders: {layout.loaders}"]
    lines += [*textwrap.wrap(layout.note, 100), ""]
    for scheme, text in zip(layout.schemes, texts, strict=True):
        needs = "needs --input-scales" if scheme.needs_input_scale else ""
        remarks = "; ".join(filter(None, (scheme.name, scheme.note, needs)))
        lines.append(f"  --format {text:<{width}}  {remarks}")
    if not layout.schemes:
        return [*lines, "is only read: convert and dequantize take it as SRC"]
    return [*lines, "", f"qtoolkit convert SRC DST --layout {layout.name}"]
