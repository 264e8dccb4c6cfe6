"""How long it takes to import qtoolkit and its casts, against JAX alone.

Command: python experiments/benchmarks/import_time.py   (nothing else should run on the machine)
Claim: `import qtoolkit; qtoolkit.cast` takes at most 1.15 times as long as `import jax`.

Each run is a new process, which times the statement itself: starting Python is not counted. The
turns alternate; one before them fills the system's file cache.
"""

import subprocess
import sys
from typing import Annotated

import numpy as np
import typer
from _results import ROOT, Folder, Quick, Recorder, at_most

YARDSTICK = "import jax"
PROMISES = {"import qtoolkit; qtoolkit.cast": [at_most(1.15, YARDSTICK)]}
STATEMENTS = (YARDSTICK, *PROMISES, "import qtoolkit", "import jax.numpy")
PROGRAM = """
import time
start = time.perf_counter()
{statement}
print(time.perf_counter() - start)
"""


def seconds_of(statement: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(statement=statement)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(
    runs: Annotated[int, typer.Option(help="Processes for each statement.")] = 20,
    quick: Quick = False,
    results: Folder = None,
) -> None:
    with Recorder("import_time", results, quick) as recorder:
        turns = range(1 + (2 if quick else runs))
        seconds = [[seconds_of(statement) for statement in STATEMENTS] for _ in turns]
        by_statement = dict(zip(STATEMENTS, np.transpose(seconds[1:]), strict=True))
        recorder.table("importing, in a new process", by_statement, YARDSTICK, PROMISES)


if __name__ == "__main__":
    typer.run(main)
