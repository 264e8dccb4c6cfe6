"""Puts the few figures that README.md quotes in their place there, from the stored results.

Command: python experiments/readme_figures.py   (`make bench` ends so)
Claim: nobody types them; a test compares README.md with experiments/results.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks._results import ROOT, load
from update_readme import README, with_block

RESULTS = ROOT / "experiments" / "results"
Row = dict[str, Any]
Stored = Mapping[str, Sequence[Row]]  # of each benchmark: its origin, and its rows


class Ratios(NamedTuple):
    """The median of a row, beside those of other rows of its table.

    Attributes:
      words: What README.md calls it.
      benchmark: Whose results have it.
      table: What the title of the table begins with.
      row: The row.
      others: What it is divided by.
    """

    words: str
    benchmark: str
    table: str
    row: str
    others: tuple[str, ...]


PLAIN, WRAPPED = "plain float32", "wrapped, E4M3 / E5M2"
STEP = "training step, nnx, 2 blocks, d = 512"
QUOTED = (
    Ratios(
        "`encode` of 2^24 float32 numbers to E4M3FN, beside C with the same arithmetic",
        *("casts", "float32 to codes, 16,777,216", "encode e4m3fn", ("C e4m3fn",)),
    ),
    Ratios(
        "quantizing them to MXFP8, scales found and stored, beside a kernel that narrows bytes",
        "scales",
        *("float32 to codes and scales, 4,096", "quantize mxfp8_e4m3", ("trivial kernel",)),
    ),
    Ratios(
        "a training step in emulated FP8, d = 512, beside float32's, and beside qwix's",
        *("training", STEP, WRAPPED, (PLAIN, "qwix")),
    ),
    Ratios(
        "a large matmul and its gradients in native FP8 on a GPU, beside bfloat16's",
        "gpu_training",
        *("matmul with both gradients, [8,192, 4,096] x [4,096, 14,336]", "native_fp8"),
        ("bfloat16",),
    ),
    Ratios(
        "converting 1 GiB of bfloat16 to FP8 by channel, beside `dd conv=fsync`",
        *("conversion", "1024 MiB", "by channel", ("dd conv=fsync",)),
    ),
)


def figures(stored: Stored) -> str:
    """A table of them; what was not measured is left out."""
    lines = ["| measured | figure |", "| --- | --- |"]
    words = "codes of every float32 in 13 formats, 6 roundings, 3 saturations, that differ from C's"
    made = [("by a CPU", "every_float32"), ("by a GPU", "every_float32_gpu")]
    counts = [f"{_differing(rows)} {by}" for by, name in made if (rows := stored.get(name, ())[1:])]
    if counts:
        lines.append(f"| {words} | {', '.join(counts)} |")
    found = {quoted: value for quoted in QUOTED if (value := _found(stored, quoted)) is not None}
    lines += [f"| {quoted.words} | {value} times as long |" for quoted, value in found.items()]
    origins = [stored[quoted.benchmark][0] for quoted in found]
    if origins:
        hosts = dict.fromkeys(origin["host"] for origin in origins)
        days = sorted(origin["date"][:10] for origin in origins)
        dates = " to ".join(dict.fromkeys((days[0], days[-1])))
        lines += ["", f"Medians; {'; '.join(hosts)}; {dates}"]
    return "\n".join(lines)


def _differing(rows: Sequence[Row]) -> str:
    codes = sum(row["compared"] * len(row["differ"]) for row in rows)
    differ = sum(sum(row["differ"].values()) for row in rows)
    return f"{differ:,} of {codes:,}"


def _found(stored: Stored, quoted: Ratios) -> str | None:
    """None where one of them was not measured."""
    rows = stored.get(quoted.benchmark, ())[1:]
    medians = {
        row["row"]: row["median_ms"]
        for row in rows
        if row["table"].startswith(quoted.table) and "median_ms" in row
    }
    if not {quoted.row, *quoted.others} <= medians.keys():
        return None
    return " and ".join(f"{medians[quoted.row] / medians[other]:.2f}" for other in quoted.others)


def stored_results() -> Stored:
    return {path.stem: load(path) for path in sorted(RESULTS.glob("*.jsonl"))}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # there are none
    text = with_block(README.read_text(encoding="utf-8"), "figures", figures(stored_results()))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
