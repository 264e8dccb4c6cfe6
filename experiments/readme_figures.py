"""Puts the few figures that README.md quotes in their place there, from the stored results.

Command: python experiments/readme_figures.py   (`make bench` ends so)
Claim: nobody types them; a test compares README.md with experiments/results.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks._results import ROOT, load, medians_of
from update_page import with_block

README = ROOT / "README.md"
RESULTS = ROOT / "experiments" / "results"
Row = dict[str, Any]
Stored = Mapping[str, Sequence[Row]]  # of each benchmark: its origin, and its rows


class Ratios(NamedTuple):
    """How the median of one row compares with those of other rows of its table.

    Attributes:
      sentence: What README.md says, with `{}` for each ratio.
      benchmark: Whose results have it.
      table: What the title of the table begins with.
      row: The row.
      others: What it is divided by.
    """

    sentence: str
    benchmark: str
    table: str
    row: str
    others: tuple[str, ...]


PLAIN, WRAPPED = "plain float32", "wrapped, E4M3 / E5M2"
OURS, TORCH = "by channel", "torch, by channel"
STEP = "training step, nnx, 2 blocks, d = 512"
QUOTED = (
    Ratios(
        "A training step of a transformer of width 512 in emulated FP8 takes {} times the time of"
        " float32, and {} times that of qwix in the same formats.",
        *("training", STEP, WRAPPED, (PLAIN, "qwix")),
    ),
    Ratios(
        "Converting 1 GiB of bfloat16 weights to FP8 takes {} times as long as the same in"
        " [fifteen lines of torch](experiments/benchmarks/conversion.py).",
        *("conversion", "1024 MiB", OURS, (TORCH,)),
    ),
    Ratios(
        "On a GPU a large matmul with both gradients takes {} times as long in native FP8 as in"
        " bfloat16.",
        "gpu_training",
        *("matmul with both gradients, [8,192, 4,096] x [4,096, 14,336]", "native_fp8"),
        ("bfloat16",),
    ),
)


def figures(stored: Stored) -> str:
    """A sentence for each of them; what was not measured has none."""
    ratios = {quoted: found for quoted in QUOTED if (found := _ratios(stored, quoted))}
    sentences = [quoted.sentence.format(*found) for quoted, found in ratios.items()]
    if codes := _codes(stored):
        sentences.insert(0, codes)
    if peaks := _peaks(stored):
        sentences.append(peaks)
    lines = [f"* {sentence}" for sentence in sentences]
    origins = [stored[quoted.benchmark][0] for quoted in ratios]
    if origins:
        hosts = dict.fromkeys(origin["host"] for origin in origins)
        days = sorted(origin["date"][:10] for origin in origins)
        dates = " to ".join(dict.fromkeys((days[0], days[-1])))
        lines += ["", f"Times are medians on {'; '.join(hosts)}; {dates}."]
    return "\n".join(lines)


def _codes(stored: Stored) -> str:
    devices = [("on a CPU", "every_float32"), ("on a GPU", "every_float32_gpu")]
    counts = [
        f"{_differing(rows)} {on} ({rows[0]['date'][:10]})"
        for on, name in devices
        if (rows := stored.get(name))
    ]
    if not counts:
        return ""
    return (
        "`encode` was compared with a C program on every float32 number, in 13 formats, 6"
        f" deterministic modes and 3 saturation rules. Codes that differ: {', '.join(counts)}."
    )


def _peaks(stored: Stored) -> str:
    peaks = {
        row["row"]: row["peak_mib"]
        for row in stored.get("conversion", ())[1:]
        if row["table"].startswith("1024 MiB") and "peak_mib" in row
    }
    if not {OURS, TORCH} <= peaks.keys():
        return ""
    return (
        f"The conversion needs {peaks[OURS]:,} MiB of memory, that in torch {peaks[TORCH]:,} MiB."
    )


def _differing(rows: Sequence[Row]) -> str:
    codes = sum(row["compared"] * len(row["differ"]) for row in rows[1:])
    differ = sum(sum(row["differ"].values()) for row in rows[1:])
    return f"{differ:,} of {codes:,}"


def _ratios(stored: Stored, quoted: Ratios) -> list[str]:
    """Empty where one of its rows was not measured."""
    medians = medians_of(stored.get(quoted.benchmark, ())[1:], quoted.table)
    if not {quoted.row, *quoted.others} <= medians.keys():
        return []
    return [f"{medians[quoted.row] / medians[other]:.2f}" for other in quoted.others]


def stored_results() -> Stored:
    return {path.stem: load(path) for path in sorted(RESULTS.glob("*.jsonl"))}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # there are none
    text = with_block(README.read_text(encoding="utf-8"), "figures", figures(stored_results()))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
