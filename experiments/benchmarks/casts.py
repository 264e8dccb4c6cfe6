"""Casts against a trivial kernel over the same bytes, XLA's own cast, ml_dtypes and PyTorch.

Command: python experiments/benchmarks/casts.py   (nothing else should run on the machine)
Claim: encode to E4M3 codes costs little more than moving the bytes; fake_cast little more than -x.
All functions of a table read the same input buffer; fake_cast and -x work in place (donated).
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from _timing import interleaved, print_table
from jax import lax

import qtoolkit as qt

SIZES = (2**20, 2**24)
FORMATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "int8")


def codes_table(size: int) -> None:
    x = jax.random.normal(jax.random.key(0), (size,)) * 10
    host = np.asarray(x)
    trivial = jax.jit(lambda x: lax.bitcast_convert_type(x, jnp.uint32).astype(jnp.uint8))
    clip_astype = jax.jit(lambda x: jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn))
    functions: dict[str, Callable[[], Any]] = {"trivial u32 -> u8": lambda: trivial(x)}
    for fmt in FORMATS:
        functions[f"qtoolkit encode {fmt}"] = lambda fmt=fmt: qt.encode(x, fmt)
    functions["XLA clip + astype e4m3fn"] = lambda: clip_astype(x)
    functions |= torch_rows(host)
    seconds = interleaved(functions)
    # On one core, so long that the other one falls asleep: not in turn with the rest.
    by_numpy = {"ml_dtypes clip + astype e4m3fn": lambda: numpy_cast(host)}
    seconds |= interleaved(by_numpy, runs=5, warm=1)
    print_table(f"float32 to codes, {size:,} elements", seconds, "trivial u32 -> u8")


def numpy_cast(host: np.ndarray) -> np.ndarray:
    return np.clip(host, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def torch_rows(host: np.ndarray) -> dict[str, Callable[[], Any]]:
    if importlib.util.find_spec("torch") is None:
        print("(no PyTorch row: torch is not installed; pip install 'qtoolkit[bench]')")
        return {}
    import torch

    tensor = torch.from_numpy(host.copy())
    return {
        "PyTorch clamp + to float8_e4m3fn": lambda: tensor.clamp(-448, 448).to(torch.float8_e4m3fn)
    }


def values_table(size: int) -> None:
    buffer = [jax.random.normal(jax.random.key(0), (size,)) * 10]

    def in_place(function: Callable[[jax.Array], jax.Array]) -> Callable[[], Any]:
        jitted = jax.jit(function, donate_argnums=0)

        def call() -> jax.Array:
            buffer[0] = jitted(buffer[0])
            return buffer[0]

        return call

    functions = {"-x": in_place(lambda x: -x)}
    for fmt in (*FORMATS, "bfloat16", "float16"):
        functions[f"fake_cast {fmt}"] = in_place(lambda x, fmt=fmt: qt.fake_cast(x, fmt))
    functions["fake_convert e4m3fn, scale and shift"] = in_place(
        lambda x: qt.fake_convert(x, 2.0, 0.5, fmt="e4m3fn")
    )
    print_table(f"float32 to values, in place, {size:,} elements", interleaved(functions), "-x")


def main() -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    for size in SIZES:
        codes_table(size)
        values_table(size)


if __name__ == "__main__":
    main()
