"""All 2**32 float32 inputs to every format of at most 16 bits, against the oracle in C.

Command: nice python experiments/benchmarks/every_float32.py   (or: make exhaustive MODES=all)
         python experiments/benchmarks/every_float32.py --format e4m3fn --rounding to_odd
         python experiments/benchmarks/every_float32.py --platform gpu
Claim: in six rounding modes and three saturations `qt.encode` gives the code that the standards
define, for each of the 4,294,967,296 patterns, NaNs included: 13 x 6 x 3 = 234 comparisons.

`reference_cast.c` is the oracle; it shares no code with qtoolkit and its formats are typed in from
their standards. It runs on the CPU; what a GPU gives is compared with it, too, and stored in a file
of its own. Results are stored after every format and mode. Started again, the command goes on where
it was interrupted; what was compared with other sources is compared again.
Exit code 1: some codes differ.
"""

import concurrent.futures
import enum
import functools
import hashlib
import os
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from _results import ROOT, load, origin, store
from _timing import device_of
from c_casts import (
    FORMATS,
    NUMPY_HAS,
    ROUNDINGS,
    SATURATIONS,
    compiler,
    compiler_version,
    difference_counter,
)
from jax import lax

import qtoolkit as qt

# Inputs and codes stay in a CPU's caches; a GPU is asked for more at a time.
CHUNKS = {"cpu": 2**19, "gpu": 2**23}
CHUNK = CHUNKS["cpu"]
RESULTS = ROOT / "experiments" / "results"

Format = enum.StrEnum("Format", list(NUMPY_HAS))
Rounding = enum.StrEnum("Rounding", list(ROUNDINGS))
Platform = enum.StrEnum("Platform", list(CHUNKS))


@functools.partial(jax.jit, static_argnames="count")
def numbers_from(first: np.uint32, count: int) -> jax.Array:
    """The float32 numbers whose patterns are `first`, first + 1 and so on."""
    patterns = lax.iota(np.uint32, count) + first
    return lax.bitcast_convert_type(patterns, np.float32)


def differences(
    name: str, rounding: str, firsts: range, chunk: int = CHUNK, threads: int | None = None
) -> dict[str, Any]:
    """Counts codes that differ in the chunks that begin at `firsts`; a few of their patterns."""
    count = difference_counter(FORMATS[name], rounding)

    def one_chunk(first: int) -> tuple[list[int], list[list[int]]]:
        x = numbers_from(np.uint32(first), chunk)
        codes = [qt.encode(x, name, rounding=rounding, saturation=s) for s in SATURATIONS]
        return count(first, np.stack(codes))

    with concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        chunks = list(pool.map(one_chunk, firsts))
    return {
        "compared": len(chunks) * chunk,
        "differ": {s: sum(numbers[i] for numbers, _ in chunks) for i, s in enumerate(SATURATIONS)},
        "examples": {
            s: [f"{pattern:#010x}" for _, found in chunks for pattern in found[i]][:5]
            for i, s in enumerate(SATURATIONS)
        },
    }


def sources() -> str:
    """A hash of what decides the result: the casts, the formats, the oracle, and JAX's version."""
    here = Path(__file__).parent
    package = Path(qt.__file__).parent
    files = [here / "reference_cast.c", here / "float_format.h", here / "c_casts.py"]
    files += sorted(package.glob("casts/*.py")) + sorted(package.glob("formats/*.py"))
    digest = hashlib.sha256(jax.__version__.encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def compared_before(path: Path, digest: str) -> list[dict[str, Any]]:
    """The stored comparisons of the same sources; none where the last run was of others."""
    if not path.exists():
        return []
    last_origin, *rows = load(path)
    return rows if last_origin["sources"] == digest else []


def main(
    format: Annotated[list[Format] | None, typer.Option(help="Only these.")] = None,
    rounding: Annotated[list[Rounding] | None, typer.Option(help="Only these.")] = None,
    results: Annotated[Path, typer.Option(help="Where results are stored.")] = RESULTS,
    again: Annotated[bool, typer.Option(help="Compare again what was compared before.")] = False,
    platform: Annotated[Platform, typer.Option(help="Where casts run.")] = Platform.cpu,
) -> None:
    if compiler() is None:
        print("no C compiler found: expected gcc on PATH, or another in $CC")
        raise typer.Exit(2)
    if (device := device_of(platform)) is None:
        raise typer.Exit(2)
    jax.config.update("jax_default_device", device)
    chunk, suffix = CHUNKS[platform], "" if platform == "cpu" else f"_{platform}"
    path, digest = results / f"every_float32{suffix}.jsonl", sources()
    rows = [] if again else compared_before(path, digest)
    done = {(row["format"], row["rounding"]) for row in rows}
    begin = {"benchmark": "every_float32", "sources": digest, "compiler": compiler_version()}
    for name in format or NUMPY_HAS:
        for mode in rounding or ROUNDINGS:
            if (str(name), str(mode)) in done:
                continue
            start = time.perf_counter()
            found = differences(str(name), str(mode), range(0, 2**32, chunk), chunk)
            seconds = round(time.perf_counter() - start, 1)
            rows.append({"format": str(name), "rounding": str(mode), **found, "seconds": seconds})
            for saturation, number in found["differ"].items():
                print(f"{name} {mode} {saturation}: {number:,} of {found['compared']:,} differ")
            print(f"  {seconds} s", flush=True)
            made = origin()
            if platform != "cpu":
                made["host"] += f", {device.device_kind}"
            store(path, [{**begin, **made}, *rows])
    total = sum(sum(row["differ"].values()) for row in rows)
    comparisons = len(rows) * len(SATURATIONS)
    print(f"{comparisons} of {len(NUMPY_HAS) * 18} comparisons, {total:,} codes differ")
    if total:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
