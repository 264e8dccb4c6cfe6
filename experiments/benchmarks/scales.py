"""Quantization with its scales against a trivial kernel over the same bytes and other libraries.

Command: python experiments/benchmarks/scales.py   (nothing else should run on the machine)
         python experiments/benchmarks/scales.py --section quantize --scheme nvfp4 --size 1048576
Claim: finding the scales, dividing by them and rounding takes at most as long as in a PyTorch
program that does the same and was compiled; every row with a target says whether it is met, and the
end lists those that are missed.

Each section is a table for each source and size. All functions of a table read one input and write
into the same buffers. Other libraries are timed one at a time, after the rest: their threads may
wait spinning. `fake_quantize` and `dequantize` have no target.
"""

import enum
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import block_peers
import jax
import jax.numpy as jnp
import numpy as np
import peers
import typer
from _results import Folder, Promise, Quick, Recorder, at_most
from _timing import interleaved
from jax import lax

import qtoolkit as qt
from qtoolkit.formats import BlockFormat, spec

SOURCES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
SCHEMES = {
    "e4m3fn_tensor": spec("e4m3fn"),
    "e4m3fn_channel": BlockFormat.channel("e4m3fn"),
    "e4m3fn_token": BlockFormat.token("e4m3fn"),
    "int8_tensor": spec("int8"),
    "int8_channel": BlockFormat.channel("int8"),
    **{
        name: spec(name)
        for name in ("mxfp8_e4m3", "mxfp4", "nvfp4", "deepseek_1x128", "deepseek_128x128")
    },
}
Call = Callable[[], Any]
Function = Callable[..., Any]  # of arrays; returns a tree of arrays


def into_buffers(*arguments: Any) -> Callable[[Function], Call]:
    """Makes calls that overwrite the last results of their shapes: no page faults are timed."""
    buffers: dict[Any, jax.Array] = {}

    def prepare(function: Function) -> Call:
        leaves = jax.tree.leaves(jax.eval_shape(function, *arguments))
        # The place among the results is part of the key: no buffer may be given twice in a call.
        kinds = [(i, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
        for i, shape, dtype in kinds:
            buffers.setdefault((i, shape, dtype), jnp.zeros(shape, dtype))
        # Arguments that are donated and not used: XLA writes the results where they were.
        jitted = jax.jit(
            lambda arguments, _: jax.tree.leaves(function(*arguments)),
            donate_argnums=1,
            keep_unused=True,
        )

        def call() -> list[jax.Array]:
            results = jitted(arguments, [buffers[kind] for kind in kinds])
            buffers.update(zip(kinds, results, strict=True))
            return results

        return call

    return prepare


def matrix(size: int, source: str) -> jax.Array:
    """Rows of 4096 elements, shorter ones where there would be fewer than 128."""
    columns = min(4096, size // 128)
    if columns < 128 or size % (128 * columns) or columns % 128:
        raise typer.BadParameter(f"--size {size}, expected a power of two from 2**14 up")
    x = jax.random.normal(jax.random.key(0), (size // columns, columns)) * 10
    return x.astype(SOURCES[source])


def trivial(x: jax.Array) -> jax.Array:
    """A byte for each element: unsigned integers made narrower."""
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint8)


def trivial_packed(x: jax.Array) -> jax.Array:
    """A byte for two elements, of both halves of a row: all is read, in order."""
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    half = x.shape[-1] // 2
    return (bits[:, :half] ^ bits[:, half:]).astype(jnp.uint8)


def is_packed(name: str) -> bool:
    return SCHEMES[name].element.bits == 4


def quantized(name: str) -> Function:
    return lambda x: qt.quantize(x, SCHEMES[name], packed=is_packed(name))


# The sections.


def quantize(recorder: Recorder, size: int, runs: int, names: list[str]) -> None:
    for source in SOURCES:
        x = matrix(size, source)
        make = into_buffers(x)
        calls = {
            "trivial kernel": make(trivial),
            "trivial kernel, packed": make(trivial_packed),
            "encode e4m3fn, no scale": make(lambda x: qt.encode(x, "e4m3fn")),
        }
        calls |= {f"quantize {name}": make(quantized(name)) for name in names}
        seconds = interleaved(calls, runs=runs)
        host = np.asarray(x)
        compiled: dict[str, list[str]] = {name: [] for name in names}
        for peer in peers.usable(tuple(block_peers.SCHEMES_OF), size):
            for name in block_peers.SCHEMES_OF[peer]:
                if name in names:
                    row = f"{peer.name}, {name}"
                    compiled[name] += [row] if peer.promised else []
                    other = {row: peer.make(host, name)}
                    seconds |= interleaved(other, runs=min(runs, 5) if peer.slow else runs)
        title = f"{source} to codes and scales, {x.shape[0]:,} x {x.shape[1]:,}"
        promises: dict[str, list[Promise]] = {
            f"quantize {name}": [at_most(1, *rows)] for name, rows in compiled.items()
        }
        recorder.table(title, seconds, "trivial kernel", promises)


def fake_quantize(recorder: Recorder, size: int, runs: int, names: list[str]) -> None:
    for source in SOURCES:
        x = matrix(size, source)
        make = into_buffers(x)
        calls = {"-x": make(lambda x: -x)}
        for name in names:
            calls[f"fake_quantize {name}"] = make(
                lambda x, name=name: qt.fake_quantize(x, SCHEMES[name])
            )
        title = f"{source} to values, {x.shape[0]:,} x {x.shape[1]:,}"
        recorder.table(title, interleaved(calls, runs=runs), "-x")


def dequantize(recorder: Recorder, size: int, runs: int, names: list[str]) -> None:
    for source in SOURCES:
        x = matrix(size, source)
        make = into_buffers(trivial(x))
        calls = {"codes as numbers": make(partial(jnp.asarray, dtype=x.dtype))}
        for name in names:
            qarray = jax.jit(quantized(name))(x)
            calls[f"dequantize {name}"] = into_buffers(qarray)(lambda qarray: qarray.dequantize())
        title = f"codes and scales to {source}, {x.shape[0]:,} x {x.shape[1]:,}"
        recorder.table(title, interleaved(calls, runs=runs), "codes as numbers")


SECTIONS = {function.__name__: function for function in (quantize, fake_quantize, dequantize)}
Section = enum.StrEnum("Section", list(SECTIONS))
Scheme = enum.StrEnum("Scheme", list(SCHEMES))


def main(
    section: Annotated[list[Section] | None, typer.Option()] = None,
    scheme: Annotated[list[Scheme] | None, typer.Option()] = None,
    size: Annotated[list[int] | None, typer.Option(help="Elements.")] = None,
    runs: Annotated[int, typer.Option(help="Runs of each row; slow ones take at most 5.")] = 25,
    quick: Quick = False,
    results: Folder = None,
) -> None:
    sizes, runs = ((2**16,), 3) if quick else (size or (2**20, 2**24), runs)
    with Recorder("scales", results, quick) as recorder:
        for elements in sizes:
            for name in section or SECTIONS:
                SECTIONS[name](recorder, elements, runs, list(scheme or SCHEMES))


if __name__ == "__main__":
    typer.run(main)
