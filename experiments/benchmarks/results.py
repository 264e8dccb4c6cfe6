"""Writes two pages from what benchmarks and experiments stored in experiments/results.

RESULTS.md has what matters most, the targets that are missed, and the claims of experiments;
results/tables.md has every figure.

Command: python experiments/benchmarks/results.py   (both `make bench` and `make exhaustive` end so)
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from _gaps import text_of_gaps
from _results import ROOT, load, medians_of
from c_casts import NUMPY_HAS, ROUNDINGS

FOLDER = ROOT / "experiments" / "results"
ORDER = (
    *("casts", "scales", "training", "optim", "conversion", "import_time", "operators"),
    *("gpu", "gpu_training"),
)
EXPERIMENTS = (
    *(
        "rounding_modes",
        "accumulation",
        "random_bits",
        "double_rounding",
        "fp8_gradients",
        "kv_cache",
    ),
    *("qat", "ptq_methods"),
)
FETCHING = ("ptq_real_models",)  # experiments on models that are downloaded
INTRODUCTION = """# Results

What matters most, with its date; hosts are below. [All tables](results/tables.md) has every figure.

`python experiments/benchmarks/results.py` writes both pages from `experiments/results/*.jsonl`,
which the commands below store. Do not edit them by hand. `make bench` runs all benchmarks, `make
exhaustive MODES=all` compares every float32 number, `python experiments/NAME.py --out
experiments/results` runs one experiment.

Times are medians of one run; a ratio compares two medians of one table. Targets concern time,
memory and losses; the bits have no targets, because they must be right.
"""
TABLES = """# All tables

Every figure behind [Results](../RESULTS.md). Times are medians; the next column has the range of
the middle half of the runs. Ratios compare medians of one table.
"""


class Headline(NamedTuple):
    """A ratio that RESULTS.md begins with: the medians of two rows of one table."""

    what: str
    benchmark: str
    table: str  # what the title begins with
    row: str
    other: str


CODES = "float32 to codes, 16,777,216 elements"
VALUES = "float32 to values, in place, 16,777,216 elements"
STOCHASTIC = "float32 to codes, and fake_cast in place, stochastic, 16,777,216 elements"
SCALES = "bfloat16 to codes and scales, 4,096 x 4,096"
LARGE = "2 blocks, d = 512, 1,024 tokens"
WRAPPED, PLAIN = "wrapped, E4M3 / E5M2", "plain float32"
PYTORCH = "PyTorch as torchao compiled, "
HEADLINES = (
    Headline("`encode` to E4M3FN", "casts", CODES, "encode e4m3fn", "C e4m3fn"),
    Headline("`encode` to E4M3FN", "casts", CODES, "encode e4m3fn", "XLA clip, astype e4m3fn"),
    Headline("`encode` to E4M3FN", "casts", CODES, "encode e4m3fn", "PyTorch clamp, to e4m3fn"),
    Headline("`fake_cast` to E4M3FN", "casts", VALUES, "fake_cast e4m3fn", "-x"),
    Headline("`fake_convert`", "casts", VALUES, "fake_convert e4m3fn, scale, shift", "-x"),
    Headline(
        *("stochastic rounding", "casts", STOCHASTIC),
        *("encode e4m3fn stochastic", "encode e4m3fn nearest_even"),
    ),
    *(
        Headline(f"`quantize`, {n}", "scales", SCALES, f"quantize {n}", PYTORCH + n)
        for n in ("e4m3fn_channel", "e4m3fn_tensor", "nvfp4", "deepseek_128x128")
    ),
    Headline("a step in FP8, nnx", "training", f"training step, nnx, {LARGE}", WRAPPED, PLAIN),
    Headline("a step in FP8, nnx", "training", f"training step, nnx, {LARGE}", WRAPPED, "qwix"),
    Headline(
        *("a step in FP8, linen", "training", f"training step, linen, {LARGE}"),
        *(WRAPPED, "flax fp8_ops"),
    ),
    Headline("tracing it", "training", f"tracing it, nnx, {LARGE}", WRAPPED, PLAIN),
    Headline("compiling it", "training", f"compiling it, nnx, {LARGE}", WRAPPED, PLAIN),
    Headline("converting to FP8", "conversion", "1024 MiB", "by channel", "torch, by channel"),
    Headline(
        *("a matmul in native FP8, with gradients", "gpu", "a product of bfloat16"),
        *("te_current, native", "plain bfloat16"),
    ),
    Headline(
        *("importing", "import_time", "importing"),
        *("import qtoolkit; qtoolkit.cast", "import jax"),
    ),
)

Row = dict[str, Any]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def provenance(origin: Row) -> str:
    lines = [f"* `{origin['command']}`", f"* {origin['date']}, commit {origin['commit']}"]
    lines += [f"* {origin['host']}", f"* {origin['versions']}"]
    lines += [f"* {origin['compiler']}"] if "compiler" in origin else []
    lines += [f"* {origin['note']}"] if "note" in origin else []
    if origin.get("quick"):
        lines.append("* **A quick run, on small arrays: no figures to quote.**")
    return "\n".join(lines) + "\n"


def verdicts(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    return [(row, verdict) for row in rows for verdict in row.get("promises", ())]


def judged(verdict: Row) -> str:
    return f"{verdict['promise']} x {verdict['of']}: {verdict['ratio']:.2f}"


def headlines(benchmarks: dict[str, tuple[Row, list[Row]]]) -> str:
    lines = []
    for line in HEADLINES:
        origin, rows = benchmarks.get(line.benchmark, ({}, []))
        medians = medians_of(rows, line.table)
        if {line.row, line.other} <= medians.keys():
            ratio = f"{medians[line.row] / medians[line.other]:.2f}"
            lines.append([line.what, line.table, ratio, line.other, origin["date"][:10]])
    heads = ("what", "table", "time", "relative to", "date")
    return "## What matters most\n\n" + table(heads, lines)


def summary(benchmarks: dict[str, tuple[Row, list[Row]]]) -> str:
    lines = []
    for name, (origin, rows) in benchmarks.items():
        kept = [verdict["holds"] for _, verdict in verdicts(rows)]
        counts = str(len(kept)), str(kept.count(False))
        lines.append([name, origin["date"], origin["commit"], origin["host"], *counts])
    heads = ("benchmark", "date", "commit", "host", "targets", "missed")
    return "## Performance targets\n\n" + table(heads, lines)


def missing(stored: Iterable[str]) -> str:
    names = [f"`{name}`" for name in ORDER if name not in stored]
    return f"Without results: {', '.join(names)}.\n" if names else ""


def shortfalls(benchmarks: dict[str, tuple[Row, list[Row]]]) -> str:
    """A line for each table and limit, with all rows that miss it."""
    missed: dict[tuple[str, str], list[str]] = {}
    for name, (_, rows) in benchmarks.items():
        for row, verdict in verdicts(rows):
            if not verdict["holds"]:
                place = f"{name}: {row['table']}", verdict["promise"]
                text = f"{row['row']} {verdict['ratio']:.2f} of {verdict['of']}"
                missed.setdefault(place, []).append(text)
    lines = [[place, limit, "; ".join(texts)] for (place, limit), texts in missed.items()]
    heads = ("table", "target", "row, its ratio, of what")
    return "### Targets that are missed\n\n" + (table(heads, lines) if lines else "Nothing.\n")


def timed_line(row: Row) -> list[str]:
    low, high = row["quartiles_ms"]
    times = [f"{row['median_ms']:g}", f"{low:g} - {high:g}", str(row["runs"])]
    return [row["row"], *times, f"{row['ratio']:.2f}", *verdict_cells(row)]


def verdict_cells(row: Row) -> list[str]:
    promises = row.get("promises", ())
    words = ["met" if promise["holds"] else "**missed**" for promise in promises]
    return ["; ".join(map(judged, promises)), "; ".join(words)]


def tables_of(rows: Sequence[Row]) -> str:
    parts = []
    for title in dict.fromkeys(row["table"] for row in rows):
        inside = [row for row in rows if row["table"] == title]
        if "differ" in inside[0]:
            lines = [[r["row"], f"{r['compared']:,}", f"{r['differ']:,}"] for r in inside]
            parts.append(f"### {title}\n\n" + table(("what", "compared", "differ"), lines))
            continue
        if "figures" in inside[0]:
            lines = [[r["row"], *r["figures"].values()] for r in inside]
            parts.append(f"### {title}\n\n" + table(("", *inside[0]["figures"]), lines))
            continue
        if "peak_mib" in inside[0]:
            lines = [[r["row"], f"{r['peak_mib']:,}", *verdict_cells(r)] for r in inside]
            parts.append(f"### {title}\n\n" + table(("row", "MiB", "target", ""), lines))
            continue
        yardstick = f"ratio to {inside[0]['yardstick']}"
        if "bytes" in inside[0]:
            lines = [[r["row"], f"{r['bytes']:,}", f"{r['ratio']:.2f}"] for r in inside]
            parts.append(f"### {title}\n\n" + table(("row", "bytes", yardstick), lines))
            continue
        heads = ("row", "median, ms", "middle half, ms", "runs")
        heads += (yardstick, "target", "")
        parts.append(f"### {title}\n\n" + table(heads, map(timed_line, inside)))
    return "\n".join(parts)


def claims(experiments: dict[str, tuple[Row, list[Row]]]) -> str:
    lines = [
        [name, row["row"], row["seen"], "holds" if row["holds"] else "**does not hold**"]
        for name, (_, rows) in experiments.items()
        for row in rows
        if "holds" in row
    ]
    return "## Experiments\n\n" + table(("experiment", "claim", "seen", ""), lines)


def sections(found: dict[str, tuple[Row, list[Row]]]) -> list[str]:
    return [
        f"## {name}\n\n{provenance(origin)}\n{tables_of([r for r in rows if 'holds' not in r])}"
        for name, (origin, rows) in found.items()
    ]


def every_float32(origin: Row, rows: Sequence[Row]) -> str:
    by_place = {(row["format"], row["rounding"]): row for row in rows}

    def cell(name: str, rounding: str) -> str:
        row = by_place.get((name, rounding))
        return ", ".join(f"{n:,}" for n in row["differ"].values()) if row else "not compared"

    differ = sum(sum(row["differ"].values()) for row in rows)
    codes = sum(row["compared"] * len(row["differ"]) for row in rows)
    minutes = sum(row["seconds"] for row in rows) / 60
    text = (
        f"`qt.encode` against the oracle in C, {3 * len(rows)} of {18 * len(NUMPY_HAS)} "
        f"comparisons, {codes:,} codes in {minutes:.0f} minutes: **{differ:,} differ**. Each cell: "
        "how many of 4,294,967,296 differ in the saturations finite, propagate and none.\n"
    )
    lines = [[name, *(cell(name, rounding) for rounding in ROUNDINGS)] for name in NUMPY_HAS]
    examples = [
        f"* {row['format']} {row['rounding']} {saturation}: {', '.join(patterns)}\n"
        for row in rows
        for saturation, patterns in row["examples"].items()
        if patterns
    ]
    where = " on a GPU" if "--platform gpu" in origin["command"] else ""
    parts = [f"## Every float32 input{where}\n\n", provenance(origin), "\n", text, "\n"]
    return "".join([*parts, table(("format", *ROUNDINGS), lines), *examples])


def fp8_training(origin: Row, rows: Sequence[Row]) -> str:
    parts = ["## Training in few bits\n\n", provenance(origin), "\n", text_of_gaps(rows)]
    return "".join(parts)


def public_models(origin: Row, rows: Sequence[Row]) -> str:
    heads = ("model", "", "matmuls", "quantized", "loss", "after a step", "cosine of gradients")
    names = ("model", "kind", "products", "quantized")
    losses = ("loss", "after a step", "cosine")
    lines = [[str(row[n]) for n in names] + [f"{row[n]:.4f}" for n in losses] for row in rows]
    excluded = "".join(
        f"* {row['model']}: not quantized: {matmul}\n" for row in rows for matmul in row["left"]
    )
    text = (
        "Models that nobody here wrote, small and random, unedited: wrapped by `te_current`, and "
        "one step of Adam. Matmuls are those of the forward and the backward pass; cosines are "
        "between the gradients of the wrapped and the plain model.\n\n"
    )
    parts = [
        "## Public models\n\n",
        provenance(origin),
        "\n",
        text,
        table(heads, lines),
        "\n",
        excluded,
    ]
    return "".join(parts)


SECTIONS = {
    "every_float32": every_float32,
    "every_float32_gpu": every_float32,
    "fp8_training": fp8_training,
    "public_models": public_models,
}


def main(
    results: Annotated[
        Path, typer.Option(help="Where they are, and the tables go; the page goes beside it.")
    ] = FOLDER,
) -> None:
    stored = {path.stem: load(path) for path in sorted(results.glob("*.jsonl"))}
    benchmarks, experiments = (
        {name: (stored[name][0], stored[name][1:]) for name in names if name in stored}
        for names in (ORDER, EXPERIMENTS + FETCHING)
    )
    page, tables = [INTRODUCTION], [TABLES]
    if benchmarks:
        page += [headlines(benchmarks), summary(benchmarks), missing(stored)]
        page.append(shortfalls(benchmarks))
    page += [claims(experiments)] if experiments else []
    for name, section in SECTIONS.items():
        if name in stored:
            origin, *rows = stored[name]
            tables.append(section(origin, rows))
    tables += sections(benchmarks) + sections(experiments)
    for path, parts in ((results.parent / "RESULTS.md", page), (results / "tables.md", tables)):
        path.write_text("\n".join(filter(None, parts)), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
