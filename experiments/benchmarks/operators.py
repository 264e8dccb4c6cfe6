"""The published operators against the casts beneath them, ONNX Runtime and OpenVINO.

Command: python experiments/benchmarks/operators.py   (nothing else should run on the machine)
Claim: `qt.onnx.cast` and `qt.openvino.fake_convert` cost what `qt.cast` and `qt.fake_convert` cost,
within 5 %, and less than ONNX Runtime's Cast and OpenVINO's FakeConvert on the same arrays.

Inside `jit` results go into one buffer; "called eagerly" is what one call from Python takes, checks
of the arguments and a new result included. Other libraries are timed one at a time, after the rest.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import peers
import typer
from _results import Folder, Quick, Recorder, at_most, faster_by
from casts import Table, in_place, into_one_buffer, numbers

import qtoolkit as qt

COMPARED = ("e4m3fn", "e5m2")
ONNX = {"e4m3fn": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2"}
OPENVINO = {"e4m3fn": "f8e4m3", "e5m2": "f8e5m2"}
SOURCES = ("float32", "float16")
WITHIN = 1.05

Function = Callable[[jax.Array], jax.Array]


def cast_functions(fmt: str) -> tuple[Function, Function]:
    return partial(qt.cast, fmt=fmt), partial(qt.onnx.cast, to=ONNX[fmt])


def fake_convert_functions(fmt: str) -> tuple[Function, Function]:
    return (
        partial(qt.fake_convert, scale=2.0, shift=0.5, fmt=fmt),
        partial(qt.openvino.fake_convert, scale=2.0, shift=0.5, destination_type=OPENVINO[fmt]),
    )


def eager(function: Function, x: jax.Array) -> Callable[[], Any]:
    return lambda: function(x)


def compared(
    title: str,
    names: tuple[str, str],
    functions: Callable[[str], tuple[Function, Function]],
    jitted: Callable[[Function], Callable[[], Any]],
    x: jax.Array,
    others: tuple[peers.Peer, ...],
) -> Table:
    plain_name, operator = names
    table = Table(title, f"{plain_name} {COMPARED[0]}, in jit", jitted(functions(COMPARED[0])[0]))
    slower = table.add_peers(others, np.asarray(x), COMPARED)
    for fmt in COMPARED:
        plain, published = functions(fmt)
        for how, make in (("in jit", jitted), ("called eagerly", lambda f: eager(f, x))):
            table.add(f"{plain_name} {fmt}, {how}", make(plain))
            # The peer is compared with the call from Python.
            peer = [faster_by(1, *slower[fmt])] if how == "called eagerly" else []
            same = at_most(WITHIN, f"{plain_name} {fmt}, {how}")
            table.add(f"{operator} {fmt}, {how}", make(published), same, *peer)
    return table


def only(group: tuple[peers.Peer, ...], name: str) -> tuple[peers.Peer, ...]:
    return tuple(
        peers.Peer(p.name, p.make, p.packages, p.slow, promised=True)
        for p in group
        if p.name.startswith(name)
    )


def main(
    size: Annotated[list[int] | None, typer.Option(help="Elements.")] = None,
    runs: Annotated[int, typer.Option(help="Runs of each row.")] = 25,
    quick: Quick = False,
    results: Folder = None,
) -> None:
    sizes, runs = ((2**16,), 3) if quick else (size or (2**20, 2**24), runs)
    with Recorder("operators", results, quick) as recorder:
        for elements, source in itertools.product(sizes, SOURCES):
            x = numbers(elements, source)
            casts = compared(
                f"{source} to 8-bit floats, {elements:,} elements",
                ("cast", "onnx.cast"),
                cast_functions,
                into_one_buffer(x),
                x,
                only(peers.CODES, "ONNX Runtime"),
            )
            casts.run(recorder, runs)
            converts = compared(
                f"{source}, scale and shift, {elements:,} elements",
                ("fake_convert", "openvino.fake_convert"),
                fake_convert_functions,
                partial(in_place, [x.copy()]),
                x,
                only(peers.VALUES, "OpenVINO"),
            )
            converts.run(recorder, runs)


if __name__ == "__main__":
    typer.run(main)
