"""The published operators against the casts beneath them, ONNX Runtime and OpenVINO.

Command: python experiments/benchmarks/operators.py   (nothing else should run on the machine)
Claim: `qt.onnx.cast` and `qt.openvino.fake_convert` cost what `qt.cast` and `qt.fake_convert` cost,
within 5 %, and less than ONNX Runtime's Cast and OpenVINO's FakeConvert on the same arrays.

Inside `jit` results go into one buffer; "called eagerly" is what one call from Python takes, checks
of the arguments and a new result included. Other libraries are timed one at a time, after the rest.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import peers
import typer
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
    runs: int,
) -> list[str]:
    ours, operator = names
    table = None
    for fmt in COMPARED:
        plain, published = functions(fmt)
        for how, make in (("in jit", jitted), ("called eagerly", lambda f: eager(f, x))):
            row = f"{ours} {fmt}, {how}"
            if table is None:
                table = Table(title, row, make(plain))
            else:
                table.add(row, make(plain))
            table.add(f"{operator} {fmt}, {how}", make(published), WITHIN, row)
    assert table is not None
    table.add_peers(others, np.asarray(x), COMPARED, operator)
    for name in list(table.promises):  # the peer is compared with the call from Python
        promise = table.promises[name]
        if promise.at_least:
            table.promises[name] = type(promise)(
                promise.factor, f"{promise.of}, called eagerly", at_least=True
            )
    return table.run(runs)


def only(group: tuple[peers.Peer, ...], name: str) -> tuple[peers.Peer, ...]:
    return tuple(
        peers.Peer(p.name, p.make, p.packages, p.slow, promised=True)
        for p in group
        if p.name.startswith(name)
    )


def main(
    size: Annotated[list[int] | None, typer.Option(help="Elements.")] = None,
    runs: Annotated[int, typer.Option(help="Runs of each row.")] = 25,
) -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} threads")
    short = []
    for elements in size or (2**20, 2**24):
        for source in SOURCES:
            x = numbers(elements, source)
            buffer = [x.copy()]
            short += compared(
                f"{source} to 8-bit floats, {elements:,} elements",
                ("cast", "onnx.cast"),
                cast_functions,
                into_one_buffer(x),
                x,
                only(peers.CODES, "ONNX Runtime"),
                runs,
            )
            short += compared(
                f"{source}, scale and shift, {elements:,} elements",
                ("fake_convert", "openvino.fake_convert"),
                fake_convert_functions,
                partial(in_place, buffer),
                x,
                only(peers.VALUES, "OpenVINO"),
                runs,
            )
    print(f"\npromises that fall short: {len(short)}")
    print("\n".join(short))


if __name__ == "__main__":
    typer.run(main)
