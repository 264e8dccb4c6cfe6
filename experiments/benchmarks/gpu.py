"""On a GPU: the codes are the CPU's, and casts run at the speed of its memory.

Command: python experiments/benchmarks/gpu.py   (JAX with CUDA; nothing else should run on the GPU)
Claim: the codes of all float16 and bfloat16 numbers in every format of at most 8 bits, in the six
deterministic modes, stochastic with a key, and the three saturations, are those of the CPU bit for
bit, and so are codes and scales of quantized tensors; casts of float32, and `fake_cast`, move their
bytes at 85 % or more of the bandwidth of a device copy (the target of all; codes of bfloat16 fell
short on an H100).

Exit code 1: some codes differ. Without a GPU it says so, with exit code 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import typer
from _results import Folder, Quick, Recorder, at_most
from _timing import device_of, interleaved

import qtoolkit as qt
from qtoolkit.casts import DETERMINISTIC, SATURATIONS
from qtoolkit.formats import FORMATS, Format, TableFormat

CALLS = 20  # in a row for one timing, so that the host's part of a call does not count


@partial(jax.jit, static_argnames="fmt")
def all_variants(x: jax.Array, key: jax.Array, fmt: Format) -> jax.Array:
    """Codes of `x`, a row for each mode and saturation."""
    variants = [{"rounding": mode} for mode in DETERMINISTIC]
    if not isinstance(fmt, TableFormat):
        variants.append({"rounding": "stochastic", "key": key})
    codes = [
        qt.encode(x, fmt, saturation=saturation, **variant)
        for variant in variants
        for saturation in SATURATIONS
    ]
    return jnp.stack(codes)


def count_differences(recorder: Recorder, device: jax.Device) -> int:
    """Records a line per format and source, and returns the number of codes that differ."""
    key, total = jax.random.key(0), 0
    title = "codes of all 16-bit floats, against the CPU's"
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        x = np.arange(2**16, dtype=np.uint16).view(dtype)
        for fmt in FORMATS:
            if fmt.bits <= 8:
                row = f"{dtype.name} to {fmt.name}"
                codes = partial(all_variants, fmt=fmt)
                total += compare(recorder, title, row, device, codes, x, key)
    return total


def count_scale_differences(recorder: Recorder, device: jax.Device, size: int) -> int:
    """As `count_differences`, of tensors quantized with scales of their own."""
    total = 0
    title = "codes and scales of quantized tensors, against the CPU's"
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = np.random.default_rng(0).standard_normal((size // 1024, 1024)).astype(dtype)
        for spec in ("e4m3fn", "e5m2", "int8", "mxfp8_e4m3", "mxfp4", "nvfp4", "deepseek_1x128"):
            row = f"{x.dtype.name} to {spec}"
            quantized = jax.jit(partial(qt.quantize, spec=spec))
            total += compare(recorder, title, row, device, quantized, x)
    return total


def compare(
    recorder: Recorder,
    title: str,
    row: str,
    device: jax.Device,
    function: Callable[..., Any],
    *arguments: Any,
) -> int:
    """Records and returns how many numbers of a function's results differ from the CPU's."""
    here, there = (
        [np.asarray(x) for x in jax.tree.leaves(function(*jax.device_put(arguments, where)))]
        for where in (jax.devices("cpu")[0], device)
    )
    different = sum(int(np.count_nonzero(a != b)) for a, b in zip(here, there, strict=True))
    recorder.count(title, row, sum(a.size for a in here), different)
    return different


def time_bandwidths(recorder: Recorder, device: jax.Device, size: int) -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jax.device_put(jnp.ones(size, dtype), device)
        functions: dict[str, Callable[[jax.Array], jax.Array]] = {"copy": jnp.copy}
        for fmt in ("e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn"):
            functions[f"encode {fmt}"] = partial(qt.encode, fmt=fmt)
        for fmt in ("e4m3fn", "e5m2"):
            functions[f"fake_cast {fmt}"] = partial(qt.fake_cast, fmt=fmt)
        functions["encode e4m3fn to_odd"] = partial(qt.encode, fmt="e4m3fn", rounding="to_odd")
        functions["pack(encode e2m1fn)"] = lambda x: qt.pack(qt.encode(x, "e2m1fn"), "e2m1fn")
        jitted = {name: jax.jit(function) for name, function in functions.items()}
        seconds = interleaved({name: in_a_row(call, x) for name, call in jitted.items()})
        # For a gigabyte moved, so that rows with other amounts of it compare.
        for name, call in jitted.items():
            seconds[name] *= 1e9 / (CALLS * (x.nbytes + call(x).nbytes))
        title = f"time for a gigabyte, {jnp.dtype(dtype).name}, {size:,} elements"
        within = at_most(1 / 0.85, "copy")
        promises = {name: [within] for name in seconds if name != "copy"}
        recorder.table(title, seconds, "copy", promises)


def in_a_row(call: Callable[..., Any], *arguments: jax.Array) -> Callable[[], Any]:
    """`CALLS` calls, which the device carries out one after the other."""

    def calls() -> Any:
        for _ in range(CALLS - 1):
            call(*arguments)
        return call(*arguments)

    return calls


def main(
    platform: Annotated[str, typer.Option(help='"gpu"; "cpu" to try the script out.')] = "gpu",
    size: Annotated[int, typer.Option(help="Elements of the bandwidth's arrays.")] = 2**28,
    quick: Quick = False,
    results: Folder = None,
) -> None:
    if (device := device_of(platform)) is None:
        return
    size = 2**20 if quick else size
    with Recorder("gpu", results, quick) as recorder:
        recorder.origin["host"] += f", {device.device_kind}"
        different = count_differences(recorder, device)
        different += count_scale_differences(recorder, device, min(size, 2**24))
        time_bandwidths(recorder, device, size)
    if different:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
