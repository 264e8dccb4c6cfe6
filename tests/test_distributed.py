"""Two real processes under `jax.distributed` on loopback: they train as one device does.

Oracle: the same steps on one device. The scales that are kept are compared bit for bit.
"""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

# Two devices in each process: "data" runs over the processes, "model" within them.
WORKER = """
import json, sys
import jax, numpy as np, optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

processes, index, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if processes > 1:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, processes, index, initialization_timeout=60)
import qtoolkit as qt
from qtoolkit.products import Delayed, Operand, Recipe

n = jax.device_count()
mesh = jax.make_mesh((processes, n // processes), ("data", "model"), (AxisType.Auto,) * 2)

def place(x, spec):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])

forward, gradient = (Operand(f, scaling=Delayed(4)) for f in ("e4m3fn", "e5m2"))
model = qt.nnx.wrap(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), Recipe(forward, gradient))
graph, params, rest = nnx.split(model, nnx.Param, ...)
params = jax.tree.map(lambda p: place(p, P(*(None,) * (p.ndim - 1), "model")), params)
rest = jax.tree.map(lambda p: place(p, P()), rest)
tx = qt.optim.quantize_state(optax.adam(1e-2), "e4m3fn", min_size=1)
state = jax.jit(tx.init, out_shardings=NamedSharding(mesh, P()))(params)

def step(params, rest, state, x):
    model = nnx.merge(graph, params, rest)
    loss, grads = qt.nnx.value_and_grad(lambda m: ((m(x) - 1) ** 2).mean())(model)
    _, params, rest = nnx.split(model, nnx.Param, ...)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), rest, state, loss

everywhere = jax.tree.map(lambda _: NamedSharding(mesh, P()), (rest, state, 0))
places = (jax.tree.map(lambda p: p.sharding, params), *everywhere)
step = jax.jit(step, out_shardings=places)
losses = []
for batch in np.random.default_rng(0).normal(size=(3, 16, 64)).astype(np.float32):
    params, rest, state, loss = step(params, rest, state, place(batch, P("data")))
    losses.append(float(loss))
kept = [np.asarray(x).tolist() for x in jax.tree.leaves(rest) if x.ndim == 2 and x.shape[1] == 4]
print(json.dumps([jax.process_count(), n, losses, kept]))
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def output(process):
    stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stderr[-3000:]
    return stdout


def result(process):
    return json.loads(output(process).splitlines()[-1])  # Gloo writes lines before it


def assert_close(got, wanted):
    assert len(got) == 3
    assert all(abs(a / b - 1) < 1e-5 for a, b in zip(got, wanted, strict=True)), (got, wanted)


def test_two_processes_do_what_one_does(start):
    address = f"127.0.0.1:{free_port()}"
    both = [
        start([sys.executable, "-c", WORKER, "2", str(i), address], cwd=ROOT, **PIPES)
        for i in range(2)
    ]
    (processes, devices, losses, kept), other = map(result, both)
    assert (processes, devices) == (2, 4)
    assert [losses, kept] == other[2:]
    alone = start([sys.executable, "-c", WORKER, "1", "0", ""], cwd=ROOT, **PIPES)
    _, devices, wanted, wanted_kept = result(alone)
    assert devices == 1
    assert_close(losses, wanted)
    assert kept
    assert max(kept[0][0]) > 0
    assert kept == wanted_kept


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [2, 8])
def test_the_script_that_is_copied_to_a_cluster(start, devices):
    command = [sys.executable, str(ROOT / "experiments" / "distributed_train.py"), "--quick"]
    address = f"127.0.0.1:{free_port()}"
    count = 2 if devices == 2 else 1
    options = ["--devices", str(devices), "--processes", str(count)]
    options += ["--coordinator", address] if count > 1 else []
    started = [start([*command, *options, "--process-id", str(i)], **PIPES) for i in range(count)]
    first, *_ = [output(process) for process in started]
    assert f"{count} processes, {count * devices} devices" in first
    got, wanted = (
        [float(loss) for loss in re.findall(r"step \d+: (\S+)", text)]
        for text in (first, output(start(command, **PIPES)))
    )
    assert_close(got, wanted)
