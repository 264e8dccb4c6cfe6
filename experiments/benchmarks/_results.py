"""What benchmarks and experiments found: printed, and stored as JSON lines with host, date, commit.

The first line of a file says how its figures came about, every other one is a row of a table.
`results.py` makes `experiments/RESULTS.md` and `results/tables.md` from the files.
"""

import dataclasses
import datetime as dt
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

Quick = Annotated[bool, typer.Option(help="Few runs, small arrays: does it work at all?")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--results", file_okay=False, help="Where to store the results; nowhere if left out."
    ),
]
Seed = Annotated[int, typer.Option(help="Of all random numbers.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", file_okay=False, help="Folder for the result; nowhere if left out."),
]
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("jax", "jaxlib", "numpy", "ml_dtypes", "flax", "torch", "onnxruntime", "openvino"),
    *("transformers", "compressed-tensors"),
)


@dataclasses.dataclass(frozen=True)
class Promise:
    """The median of a row is at most `factor` times that of the fastest row in `of`.

    With `faster`, the fastest row in `of` takes at least `factor` times as long as the row.
    """

    factor: float
    of: tuple[str, ...]
    faster: bool = False

    def judged(self, median: float, medians: Mapping[str, float]) -> dict[str, Any] | None:
        """The verdict as data; None if no row of `of` was measured."""
        measured = [name for name in self.of if name in medians]
        if not measured:
            return None
        fastest = min(measured, key=medians.__getitem__)
        ratio = medians[fastest] / median if self.faster else median / medians[fastest]
        return {
            "promise": f"{'>=' if self.faster else '<='} {self.factor:g}",
            "of": fastest,
            "ratio": round(ratio, 3),
            "holds": bool(ratio >= self.factor if self.faster else ratio <= self.factor),
        }


def at_most(factor: float, *of: str) -> Promise:
    return Promise(factor, of)


def faster_by(factor: float, *of: str) -> Promise:
    return Promise(factor, of, faster=True)


def medians_of(rows: Sequence[Mapping[str, Any]], title: str) -> dict[str, float]:
    """Milliseconds of the timed rows of the tables whose titles begin with `title`."""
    return {
        row["row"]: row["median_ms"]
        for row in rows
        if row["table"].startswith(title) and "median_ms" in row
    }


class Recorder:
    """Prints the tables of a benchmark or experiment; at the end says what fell short, stores all.

    Args:
      benchmark: Name of the file.
      folder: Where it goes; None for nowhere.
      quick: Whether the figures are those of a trial.
    """

    def __init__(self, benchmark: str, folder: Path | None, quick: bool = False) -> None:
        self.benchmark, self.folder = benchmark, folder
        self.origin = {"benchmark": benchmark, "quick": quick, **origin()}
        self.rows: list[dict[str, Any]] = []
        print(f"{benchmark}: {self.origin['versions']}, {self.origin['host']}")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        for row in self.rows:
            if "holds" in row:
                print(f"\n{claimed(row)}")
        verdicts = [(row, verdict) for row in self.rows for verdict in row.get("promises", ())]
        short = [(row, verdict) for row, verdict in verdicts if not verdict["holds"]]
        if verdicts:
            print(f"\n{len(verdicts)} targets, {len(short)} missed")
        for row, verdict in short:
            print(f"  {row['table']}: {row['row']}: {shown(verdict)}")
        if self.folder is not None:
            store(self.folder / f"{self.benchmark}.jsonl", [self.origin, *self.rows])

    def table(
        self,
        title: str,
        seconds: Mapping[str, np.ndarray],
        yardstick: str,
        promises: Mapping[str, Sequence[Promise]] | None = None,
    ) -> None:
        """Median, middle half, ratio of medians to the yardstick's and promises, a line each."""
        print(f"\n{title}")
        medians = {name: float(np.median(values)) for name, values in seconds.items()}
        width = max(map(len, seconds))
        for name, values in seconds.items():
            row = {
                "table": title,
                "row": name,
                "runs": len(values),
                "median_ms": rounded(medians[name] * 1e3),
                "quartiles_ms": [rounded(q) for q in np.quantile(values, [0.25, 0.75]) * 1e3],
                "yardstick": yardstick,
                "ratio": round(medians[name] / medians[yardstick], 3),
            }
            judged = [p.judged(medians[name], medians) for p in (promises or {}).get(name, ())]
            if verdicts := [verdict for verdict in judged if verdict is not None]:
                row["promises"] = verdicts
            self.rows.append(row)
            print(line_of(row, width))

    def peaks(
        self, title: str, peaks: Mapping[str, float], most: float, exempt: Sequence[str] = ()
    ) -> None:
        """Peaks of memory in MiB, promised to be at most `most`, but for the `exempt` ones."""
        print(f"\n{title}")
        for name, peak in peaks.items():
            row: dict[str, Any] = {"table": title, "row": name, "peak_mib": round(peak)}
            verdicts = []
            if name not in exempt:
                ratio = round(peak / most, 3)
                of = f"{most:g} MiB"
                verdicts = [{"promise": "<= 1", "of": of, "ratio": ratio, "holds": ratio <= 1}]
                row["promises"] = verdicts
            print(f"  {name}: {peak:.0f} MiB  {' '.join(map(shown, verdicts))}".rstrip())
            self.rows.append(row)

    def count(self, title: str, name: str, compared: int, differ: int) -> None:
        """A row of a table that counts codes."""
        if not self.rows or self.rows[-1]["table"] != title:
            print(f"\n{title}")
        print(f"  {name}: {compared:,} compared, {differ:,} differ")
        self.rows.append({"table": title, "row": name, "compared": compared, "differ": differ})

    def figures(self, title: str, rows: Mapping[str, Mapping[str, str]]) -> None:
        """A table of figures of any kind, as texts under their headings; all rows have the same."""
        print(f"\n{title}")
        heads = list(next(iter(rows.values())))
        first = max(map(len, rows))
        widths = [max(len(head), *(len(row[head]) for row in rows.values())) for head in heads]
        for name, cells in [("", heads), *((n, list(row.values())) for n, row in rows.items())]:
            aligned = (f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
            print("  ".join([f"  {name:<{first}}", *aligned]))
        self.rows += [{"table": title, "row": n, "figures": dict(row)} for n, row in rows.items()]

    def claim(self, text: str, seen: str, holds: bool) -> None:
        """What an experiment claims, what it saw, and whether that bears the claim out."""
        self.rows.append({"table": "claims", "row": text, "seen": seen, "holds": bool(holds)})

    def memory(self, title: str, peaks: Mapping[str, int], yardstick: str) -> None:
        """A table of bytes, with the ratio to the yardstick's."""
        print(f"\n{title}")
        for name, peak in peaks.items():
            ratio = round(peak / peaks[yardstick], 3)
            print(f"  {name}: {peak:,} bytes  ratio {ratio:.2f}")
            self.rows.append(
                {"table": title, "row": name, "bytes": peak, "yardstick": yardstick, "ratio": ratio}
            )


class Rows:
    """Rows that are stored one by one, so that a run that was interrupted goes on where it was.

    Each row says at which commit it was found. Delete the file to begin anew.

    Args:
      benchmark: Name of the file.
      folder: Where it is; None: nothing is stored.
    """

    def __init__(self, benchmark: str, folder: Path | None) -> None:
        self.benchmark = benchmark
        self.path = None if folder is None else folder / f"{benchmark}.jsonl"
        is_there = self.path is not None and self.path.exists()
        self.rows = load(self.path)[1:] if self.path is not None and is_there else []

    def get(self, **key: Any) -> dict[str, Any] | None:
        """The row with these values, None where there is none."""
        found = (row for row in self.rows if key.items() <= row.items())
        return next(found, None)

    def add(self, key: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """Stores a row, and returns it."""
        begin = {"benchmark": self.benchmark, **origin()}
        self.rows.append({**key, **found, "commit": begin["commit"]})
        begin["commit"] = ", ".join(dict.fromkeys(row["commit"] for row in self.rows))
        if self.path is not None:
            store(self.path, [begin, *self.rows])
        return self.rows[-1]


def line_of(row: Mapping[str, Any], width: int) -> str:
    low, high = row["quartiles_ms"]
    line = (
        f"  {row['row']:<{width}}  {row['median_ms']:10.3f} ms  [{low:9.3f}, {high:9.3f}]"
        f"  ratio {row['ratio']:6.2f}"
    )
    return "  ".join([line, *map(shown, row.get("promises", ()))])


def shown(verdict: Mapping[str, Any]) -> str:
    word = "met" if verdict["holds"] else "MISSED"
    return f"target {verdict['promise']} x {verdict['of']}: {verdict['ratio']:.2f}, {word}"


def claimed(row: Mapping[str, Any]) -> str:
    return f"{'holds' if row['holds'] else 'DOES NOT HOLD'}: {row['row']}: {row['seen']}"


def rounded(milliseconds: float) -> float:
    return float(f"{milliseconds:.4g}")


def origin() -> dict[str, Any]:
    """What has to be known of a run to judge its figures."""
    return {
        "command": shlex.join(["python", *map(_relative, sys.argv)]),
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "host": f"{_processor()}, {os.cpu_count()} threads, {platform.system()}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *filter(None, map(_version, PACKAGES))]
        ),
    }


def _relative(argument: str) -> str:
    """A path from the root of the repository; of one that lies outside of it, the last part."""
    path = Path(argument).absolute()
    if path.exists() and path.is_relative_to(ROOT):
        return path.relative_to(ROOT).as_posix()
    return path.name if Path(argument).is_absolute() else argument


def _commit() -> str:
    """The short hash, and whether files differ from it, but for the results of earlier runs."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        results = (":!experiments/results", ":!experiments/RESULTS.md")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *results)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}, with changes" if changed else commit


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    """The model, where Linux tells; else what Python knows, such as "arm"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def store(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Written whole, then renamed: a run that is interrupted leaves the last one's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
