"""Checkpoint conversion against copying the file: time and peak memory.

Command: python experiments/benchmarks/conversion.py   (nothing else should run on the machine)
Targets, which a run judges: converting 1 GiB of bfloat16 by channel takes at most half as long as
fifteen lines of torch, both with fsync; memory peaks at no more than 400 MiB, whatever the size and
the number of shapes; 400 shapes by channel take at most 1.5 times as long as by tensor; 20,000
small tensors at most 3 times as long as copying them with the same program. Copying the file and
dequantizing are timed, too.

Each run is a new process, imports and compilation included, as a user starts it. The turns
alternate; one before them fills the system's file cache. The program in torch needs torch and
safetensors. Where llm-compressor is installed, its `model_free_ptq` is timed, too. (It is not in
the extra `bench`, since it asks for certain versions of torch and transformers: `pip install
llmcompressor`.) A source is a folder's only file: it is made anew, from a fixed seed, in a
temporary folder on the disk of the system's, see TMPDIR.
"""

import dataclasses
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
import typer
from _results import ROOT, Folder, Promise, Quick, Recorder, at_most

from qtoolkit.checkpoints.internal import in_data_order, write_safetensors

DD = "dd conv=fsync"
BY_TORCH = "torch, by channel"
BY_LLM_COMPRESSOR = "llm-compressor, by channel"
OTHERS = (DD, BY_TORCH, BY_LLM_COMPRESSOR)
MOST_MIB = 400
CONVERT = [sys.executable, "-m", "qtoolkit", "convert", "-q", "--overwrite"]
DEQUANTIZE = [sys.executable, "-m", "qtoolkit", "dequantize", "-q", "--overwrite"]
# The same codes and scales, by torch: a whole tensor at a time, all results kept until the end.
TORCH = """
import os, sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
done = {}
with safe_open(sys.argv[1], "pt") as file:
    for name in file.keys():
        x = file.get_tensor(name).float()
        scale = x.abs().amax(1, keepdim=True) / 448
        done[name] = (x / scale).to(torch.float8_e4m3fn)
        done[name + "_scale"] = scale
save_file(done, sys.argv[2])
with open(sys.argv[2], "rb") as file:
    os.fsync(file.fileno())
"""

# E4M3 by channel, with scales in bfloat16, of a folder, in which the file is a link to the source.
LLM_COMPRESSOR = """
import os, sys, tempfile
from llmcompressor import model_free_ptq
source, target = map(os.path.abspath, sys.argv[1:])
with tempfile.TemporaryDirectory(dir=os.path.dirname(source)) as folder:
    os.mkdir(f"{folder}/in")
    os.link(source, f"{folder}/in/model.safetensors")
    with open(f"{folder}/in/config.json", "w") as file:
        file.write('{"model_type": "llama"}')
    options = {"scheme": "FP8_DYNAMIC", "max_workers": os.cpu_count(), "device": "cpu"}
    model_free_ptq(f"{folder}/in", f"{folder}/out", **options)
    os.replace(f"{folder}/out/model.safetensors", target)
"""


def make(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of normal bfloat16 weights."""
    normal = np.random.default_rng(0).normal(size=2**22).astype(ml_dtypes.bfloat16)
    tensors = in_data_order((name, "BF16", shape) for name, shape in shapes.items())

    def chunks():  # type: ignore[no-untyped-def]
        for tensor in tensors:
            size = math.prod(tensor.shape)
            for start in range(0, size, len(normal)):
                yield tensor.name, normal[: min(len(normal), size - start)]

    write_safetensors(path, tensors, chunks())


def run(command: list[str]) -> tuple[float, float]:
    """Seconds, and the peak of memory in MiB, of a process that must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{command}: status {status}")
    return seconds, usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def interleaved(
    commands: Mapping[str, list[str]], runs: int
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Seconds of each run of each command, and the peak of each in MiB."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peaks = dict.fromkeys(commands, 0.0)
    order = np.random.default_rng(0)
    for turn in range(1 + runs):
        for name in order.permutation(list(commands)):
            taken, peak = run(commands[name])
            peaks[name] = max(peaks[name], peak)
            if turn:
                seconds[name].append(taken)
    return {name: np.asarray(values) for name, values in seconds.items()}, peaks


@dataclasses.dataclass(frozen=True)
class Bench:
    """Rows of one results file; sources and targets lie in `folder`."""

    recorder: Recorder
    folder: Path
    runs: int

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def dd(self, source: str) -> list[str]:
        copy = self.path("copy")
        return ["dd", f"if={self.path(source)}", f"of={copy}", "bs=4M", "conv=fsync"]

    def ours(self, verb: list[str], source: str, *options: str) -> list[str]:
        return [*verb, self.path(source), self.path("out"), *options]

    def table(
        self,
        title: str,
        commands: Mapping[str, list[str]],
        yardstick: str,
        promised: Mapping[str, Promise] = MappingProxyType({}),
    ) -> None:
        """Times, and peaks of memory, of which only our own are promised."""
        seconds, peaks = interleaved(commands, self.runs)
        promises = {name: [promise] for name, promise in promised.items()}
        self.recorder.table(title, seconds, yardstick, promises)
        peaks.pop(DD, None)
        self.recorder.peaks(f"{title}: peak of memory", peaks, MOST_MIB, exempt=OTHERS)


def main(quick: Quick = False, results: Folder = None) -> None:
    scale, runs = (16, 1) if quick else (1, 5)
    rng = np.random.default_rng(1)
    sources = {
        "large": {f"{i}.weight": (2**23 // scale // 1024, 4096) for i in range(16)},
        "larger": {f"{i}.weight": (2**23 // scale // 1024, 4096) for i in range(64)},
        "experts": {"experts.down_proj": (64, 2048 // scale, 4096)},
        "shapes": {
            f"{i}.weight": (int(rows), int(columns))
            for i, (rows, columns) in enumerate(rng.integers(100, 1200, (400 // scale, 2)))
        },
        "small": {f"{i}.weight": (16, 16) for i in range(20_000 // scale)},
    }
    with Recorder("conversion", results, quick) as recorder, tempfile.TemporaryDirectory() as name:
        bench = Bench(recorder, Path(name), runs)
        for source, shapes in sources.items():
            make(bench.folder / source, shapes)
        mib = sum(2 * rows * columns for rows, columns in sources["large"].values()) // 2**20
        in_columns = ["--channel-axis", "last"]

        def by(word: str, source: str) -> list[str]:
            return bench.ours(CONVERT, source, "--scaling", word)

        commands = {DD: bench.dd("large")}
        commands |= {f"by {word}": by(word, "large") for word in ("channel", "tensor")}
        # As kernels of Flax, whose outputs are columns; amaxes take a reading of their own.
        commands["by column"] = [*by("channel", "large"), *in_columns]
        if all(map(importlib.util.find_spec, ("torch", "safetensors"))):
            commands[BY_TORCH] = bench.ours([sys.executable, "-c", TORCH], "large")
        if importlib.util.find_spec("llmcompressor"):
            commands[BY_LLM_COMPRESSOR] = bench.ours(
                [sys.executable, "-c", LLM_COMPRESSOR], "large"
            )
        promised = {"by channel": at_most(0.5, BY_TORCH)}
        bench.table(f"{mib} MiB of bfloat16", commands, DD, promised)

        # What a process takes to start, to import and to compile is a smaller part of this one.
        commands = {DD: bench.dd("larger"), "by channel": by("channel", "larger")}
        bench.table(f"{4 * mib} MiB of bfloat16", commands, DD)
        (bench.folder / "larger").unlink()

        commands = {DD: bench.dd("experts"), "by column": [*by("channel", "experts"), *in_columns]}
        bench.table(f"a stack of 64 experts of bfloat16, {mib:,} MiB", commands, DD)
        (bench.folder / "experts").unlink()

        run([*CONVERT, bench.path("large"), bench.path("codes"), "--scaling", "channel"])
        commands = {DD: bench.dd("codes")} | {
            f"to {dtype}": bench.ours(DEQUANTIZE, "codes", "--dtype", dtype)
            for dtype in ("bfloat16", "float32")
        }
        bench.table(f"dequantizing {mib // 2} MiB of E4M3FN by channel", commands, DD)

        commands = {f"by {word}": by(word, "shapes") for word in ("tensor", "channel")}
        title = f"{len(sources['shapes'])} tensors, each of another shape"
        bench.table(title, commands, "by tensor", {"by channel": at_most(1.5, "by tensor")})

        copied = bench.ours(CONVERT, "small", "--format", "bfloat16")
        commands = {"copied": copied, "by tensor": by("tensor", "small")}
        title = f"{len(sources['small']):,} tensors of 16x16"
        bench.table(title, commands, "copied", {"by tensor": at_most(3, "copied")})


if __name__ == "__main__":
    typer.run(main)
