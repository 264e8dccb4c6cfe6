"""FP8-aware training of a byte-level transformer on any number of processes and devices.

    python experiments/distributed_train.py --quick                  one process, one device
    python experiments/distributed_train.py --quick --devices 8      eight virtual devices of a CPU
    python experiments/distributed_train.py --coordinator host:1234 --processes 2 --process-id 0
    srun python experiments/distributed_train.py --cluster           Slurm, MPI, Kubernetes, TPU

Claim: over three steps, on 2 processes and on 8 devices, the losses are those of one device within
1e-5 bits per byte. The batch is split over
the mesh axis "data", the products of attention and MLP over "model". It is plain `jit` on arrays
that are placed where they belong: scales of whole tensors, which all devices share, need nothing.
The optimizer keeps its moments in E4M3 and is sharded as the parameters are.
"""

import functools
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from benchmarks._language_model import CONTEXT, ByteTransformer, bits_per_byte, load_corpus
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import qtoolkit as qt

# Where the kernels of a block are cut: up and out of a product, then into the next one.
PLACES = qt.Rules(
    {
        "(query|key|value)/kernel": P(None, "model"),
        "(query|key|value)/bias|up/bias": P("model"),
        "out/kernel|down/kernel": P("model"),
        "up/kernel": P(None, "model"),
    },
    default=P(),
)


def connect(coordinator: str | None, processes: int, process_id: int, cluster: bool) -> None:
    """Before anything is computed. A cluster that JAX knows tells it all it needs."""
    if cluster:
        jax.distributed.initialize()
    elif coordinator is not None:
        jax.distributed.initialize(coordinator, processes, process_id, initialization_timeout=60)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Where each array goes: by `PLACES`, or to all devices where its axes do not divide."""

    def place(path: Any, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = PLACES.lookup(name)
        parts = [1 if axis is None else mesh.shape[axis] for axis in spec]
        fits = len(parts) <= len(x.shape) and not any(
            n % part for n, part in zip(x.shape, parts, strict=False)
        )
        return NamedSharding(mesh, spec if fits else P())

    return jax.tree.map_with_path(place, tree)


def distributed(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has; each keeps its own shards."""
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def train(mesh: Mesh, steps: int, width: int, layers: int, batch: int) -> list[float]:
    model = ByteTransformer(width=width, layers=layers, heads=4, rngs=nnx.Rngs(0))
    model = qt.nnx.wrap(model, qt.recipes.te_delayed_hybrid)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tx = qt.optim.quantize_state(optax.adamw(3e-3), "e4m3fn")
    places = shardings((params, rest, jax.eval_shape(tx.init, params)), mesh)
    params, rest = jax.tree.map(distributed, (params, rest), places[:2])
    state = jax.jit(tx.init, out_shardings=places[2])(params)
    everywhere = NamedSharding(mesh, P())

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2), out_shardings=(*places, everywhere))
    def step(params: Any, rest: Any, state: Any, windows: jax.Array) -> Any:
        model = nnx.merge(graph, params, rest)
        loss, grads = qt.nnx.value_and_grad(bits_per_byte)(model, windows)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), rest, state, loss

    text = load_corpus().training
    rows = NamedSharding(mesh, P("data"))
    losses = []
    for i in range(steps):
        starts = np.random.default_rng(i).integers(0, text.size - CONTEXT, batch)
        windows = text[starts[:, None] + np.arange(CONTEXT + 1)]  # a real loader reads its rows
        params, rest, state, loss = step(params, rest, state, distributed(windows, rows))
        losses.append(float(loss))
        if jax.process_index() == 0:
            print(f"step {i}: {losses[-1]:.6f} bits per byte", flush=True)
    return losses


Positive = Annotated[int, typer.Option(min=1)]


def main(
    steps: Positive = 400,
    width: Positive = 128,
    layers: Positive = 2,
    batch: Annotated[int, typer.Option(min=1, help="Of all devices together.")] = 32,
    model_devices: Annotated[int, typer.Option(min=1, help="Devices that share a product.")] = 2,
    devices: Annotated[int, typer.Option(min=1, help="Virtual devices of a process on a CPU.")] = 1,
    coordinator: Annotated[str | None, typer.Option(help="host:port of process 0.")] = None,
    processes: Positive = 1,
    process_id: Annotated[int, typer.Option(min=0)] = 0,
    cluster: bool = False,
    quick: bool = False,
) -> None:
    if process_id >= processes:
        raise typer.BadParameter(
            f"process_id={process_id}, expected 0 to {processes - 1}: processes={processes}"
        )
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    connect(coordinator, processes, process_id, cluster)
    if quick:
        steps, width, layers, batch = 3, 32, 1, 8
    count = jax.device_count()
    parts = model_devices if count % model_devices == 0 else 1
    if batch % (count // parts):
        raise typer.BadParameter(
            f"batch={batch}, expected a multiple of {count // parts}, the devices along 'data'"
        )
    mesh = jax.make_mesh((count // parts, parts), ("data", "model"), (AxisType.Auto,) * 2)
    if jax.process_index() == 0:
        print(f"{jax.process_count()} processes, {count} devices, mesh {dict(mesh.shape)}")
    train(mesh, steps, width, layers, batch)


if __name__ == "__main__":
    typer.run(main)
