"""Two real processes under `jax.distributed`: the losses of one process, to the printed digit.

Oracle: the same script in one process on one device.
"""

import re
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "experiments" / "distributed_train.py"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def losses(process):
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr[-2000:]
    return stdout, [float(loss) for loss in re.findall(r"step \d+: (\S+)", stdout)]


def test_two_processes_train_as_one_does(start):
    command = [sys.executable, str(SCRIPT), "--quick"]
    address = f"127.0.0.1:{free_port()}"
    both = [
        start(
            [*command, "--devices", "2", "--coordinator", address, "--processes", "2",
             "--process-id", str(i)],
            **PIPES,
        )
        for i in range(2)
    ]  # fmt: skip
    stdout, got = losses(both[0])
    losses(both[1])
    assert "2 processes, 4 devices, mesh {'data': 2, 'model': 2}" in stdout
    _, wanted = losses(start(command, **PIPES))
    assert len(got) == 3
    assert all(abs(a / b - 1) < 1e-5 for a, b in zip(got, wanted, strict=True)), (got, wanted)
