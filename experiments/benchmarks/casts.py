"""Casts against the same arithmetic in C, -x, XLA's own cast and other libraries.

Command: python experiments/benchmarks/casts.py   (nothing else should run on the machine)
         python experiments/benchmarks/casts.py --section packed --size 1048576 --runs 50
Claim: a cast to a format of at most 8 bits costs at most 1.25 times what C takes, in directed modes
1.5 times, and other libraries take at least 1.5 times as long; every row with a target says
whether it is met, and the end lists those that are missed.

All functions of a table read one input and write into one output buffer; fake_cast and -x work in
place. The rows in C (`fast_cast.c`, gcc -O3 -march=native, as many threads) appear where there is a
compiler, after their codes were found equal to ours. Other libraries are timed one at a time, after
the rest: their threads may wait spinning.
"""

import enum
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import c_casts
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import peers
import typer
from _results import Folder, Promise, Quick, Recorder, at_most, faster_by
from _timing import interleaved
from jax import lax

import qtoolkit as qt
from qtoolkit.casts import DETERMINISTIC

SOURCES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
FLOATS = (
    *("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e4m3_ieee", "e3m4", "ue4m3"),
    *("e8m0fnu", "e2m3fn", "e3m2fn", "e2m1fn", "e1m2fn"),
)
COMPARED = ("e4m3fn", "e5m2")  # the formats that the other libraries have
TABLES = ("nf4", "hifloat8", "posit8")
TABLES_HELD = {"float32": TABLES, "bfloat16": TABLES[1:], "float16": TABLES[1:2]}  # exactly
NEAREST, *DIRECTED = DETERMINISTIC

Call = Callable[[], Any]


class Table:
    """Rows of one table; `run` times, prints and records them."""

    def __init__(self, title: str, yardstick: str, call: Call) -> None:
        self.title, self.yardstick = title, yardstick
        self.calls: dict[str, Call] = {yardstick: call}
        self.promises: dict[str, list[Promise]] = {}
        self.others: dict[str, tuple[Call, bool]] = {}

    def add(self, name: str, call: Call, *promises: Promise) -> None:
        self.calls[name] = call
        self.promises[name] = list(promises)

    def add_peers(
        self, candidates: tuple[peers.Peer, ...], host: np.ndarray, formats: tuple[str, ...]
    ) -> dict[str, list[str]]:
        """Rows of other libraries; returns the names of those that a target is about."""
        promised: dict[str, list[str]] = {fmt: [] for fmt in formats}
        for peer in peers.usable(candidates, host.size):
            for fmt in formats:
                name = f"{peer.name} {fmt}"
                self.others[name] = peer.make(host, fmt), peer.slow
                if peer.promised:
                    promised[fmt].append(name)
        return promised

    def run(self, recorder: Recorder, runs: int) -> None:
        seconds = interleaved(self.calls, runs=runs)
        for name, (call, slow) in self.others.items():
            seconds |= interleaved({name: call}, runs=min(runs, 5) if slow else runs)
        recorder.table(self.title, seconds, self.yardstick, self.promises)


def into_one_buffer(*arguments: jax.Array) -> Callable[[Callable[..., jax.Array]], Call]:
    """Makes calls that overwrite the last result of their dtype: no page faults are timed."""
    buffers: dict[Any, jax.Array] = {}

    def prepare(function: Callable[..., jax.Array]) -> Call:
        out = jax.eval_shape(function, *arguments)
        kind = (out.shape, out.dtype)
        buffers.setdefault(kind, jnp.zeros(*kind))
        # An argument that is donated and not used: XLA writes the result where it was.
        jitted = jax.jit(
            lambda arguments, _: function(*arguments), donate_argnums=1, keep_unused=True
        )

        def call() -> jax.Array:
            buffers[kind] = jitted(arguments, buffers[kind])
            return buffers[kind]

        return call

    return prepare


def in_place(buffer: list[jax.Array], function: Callable[..., jax.Array], *more: Any) -> Call:
    jitted = jax.jit(function, donate_argnums=0)

    def call() -> jax.Array:
        buffer[0] = jitted(buffer[0], *more)
        return buffer[0]

    return call


def numbers(size: int, source: str) -> jax.Array:
    return (jax.random.normal(jax.random.key(0), (size,)) * 10).astype(SOURCES[source])


def narrowed(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """The trivial kernel over the bytes of a cast to codes: unsigned integers made narrower."""
    return lambda x: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(dtype)


def c_cast(x: np.ndarray, fmt: str, rounding: str = NEAREST) -> Call:
    """The same codes from C, which writes them into one array, too."""
    fields = c_casts.FORMATS[fmt]
    codes = np.empty(x.shape, fields.code_dtype)
    cast = c_casts.fast_cast(fields, rounding, x.dtype.name)
    cast(x, codes)
    ours = np.asarray(qt.encode(x, fmt, rounding=rounding))
    if not np.array_equal(codes, ours):
        raise AssertionError(
            f"fast_cast.c: {np.count_nonzero(codes != ours)} of {x.size} codes of {fmt}, "
            f"{rounding}, from {x.dtype} differ from qt.encode's, expected none"
        )
    return lambda: cast(x, codes)


def beside_c(size: int, factor: float, row: str) -> list[Promise]:
    """Of small arrays the call itself is a third of the time, so they have no promise."""
    return [at_most(factor, row)] if size >= 2**24 else []


def astype_float32(codes: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(codes, dtype).astype(jnp.float32)


def clip_astype(fmt: str) -> Callable[[jax.Array], jax.Array]:
    dtype = qt.format(fmt).dtype
    limit = float(ml_dtypes.finfo(dtype).max)
    return lambda x: jnp.clip(x, -limit, limit).astype(dtype)


# The sections. `in_modes`: the formats whose six modes are timed, not only nearest_even.


def encode(recorder: Recorder, size: int, runs: int, in_modes: tuple[str, ...]) -> None:
    for source in SOURCES:
        x = numbers(size, source)
        host, make = np.asarray(x), into_one_buffer(x)
        title = f"{source} to codes, {size:,} elements"
        table = Table(title, "trivial kernel", make(narrowed(jnp.uint8)))
        slower = table.add_peers(peers.CODES, host, COMPARED)
        for fmt in COMPARED:
            slower[fmt].append(f"XLA clip, astype {fmt}")
            table.add(slower[fmt][-1], make(clip_astype(fmt)))
        for fmt in FLOATS:
            for mode in DETERMINISTIC if fmt in in_modes else (NEAREST,):
                name = fmt if mode == NEAREST else f"{fmt} {mode}"
                if c_casts.compiler():
                    table.add(f"C {name}", c_cast(host, fmt, mode))
                table.add(
                    f"encode {name}",
                    make(partial(qt.encode, fmt=fmt, rounding=mode)),
                    *beside_c(size, 1.25 if mode == NEAREST else 1.5, f"C {name}"),
                    faster_by(1.5 if mode == NEAREST else 1, *slower.get(fmt, ())),
                )
        cast = make(partial(qt.cast, fmt="e4m3fn"))
        table.add("cast e4m3fn", cast, *beside_c(size, 1.25, "C e4m3fn"))
        table.add("encode e4m3fn, not in jit", partial(qt.encode, x, "e4m3fn"))
        table.add("encode int8", make(partial(qt.encode, fmt="int8")))
        table.run(recorder, runs)


def bfloat16(recorder: Recorder, size: int, runs: int, in_modes: tuple[str, ...]) -> None:
    x = numbers(size, "float32")
    host, make = np.asarray(x), into_one_buffer(x)
    title = f"float32 to bfloat16, {size:,} elements"
    table = Table(title, "trivial kernel", make(narrowed(jnp.uint16)))
    for mode in DETERMINISTIC:
        if c_casts.compiler():
            table.add(f"C {mode}", c_cast(host, "bfloat16", mode))
        table.add(f"cast {mode}", make(partial(qt.cast, fmt="bfloat16", rounding=mode)))
    table.add("XLA astype", make(lambda x: x.astype(jnp.bfloat16)))
    table.run(recorder, runs)


def fake_cast(recorder: Recorder, size: int, runs: int, in_modes: tuple[str, ...]) -> None:
    for source in SOURCES:
        x = numbers(size, source)
        host = np.array(x)
        # Unsigned formats leave no negative number behind, hence a buffer of their own.
        unsigned, signed = [jnp.abs(x)], [x]
        title = f"{source} to values, in place, {size:,} elements"
        table = Table(title, "-x", in_place(signed, lambda x: -x))
        for fmt in FLOATS:
            if (fmt, source) == ("e8m0fnu", "float16"):
                continue  # float16 does not hold its powers of two
            buffer = signed if qt.format(fmt).signed else unsigned
            for mode in DETERMINISTIC if fmt in in_modes else (NEAREST,):
                call = in_place(buffer, partial(qt.fake_cast, fmt=fmt, rounding=mode))
                name = f"fake_cast {fmt}" if mode == NEAREST else f"fake_cast {fmt} {mode}"
                table.add(name, call, at_most(1.25, "-x"))
        for fmt in ("int8", *(("bfloat16", "float16") if source == "float32" else ())):
            call = in_place(signed, partial(qt.fake_cast, fmt=fmt))
            table.add(f"fake_cast {fmt}", call, at_most(1.25, "-x"))
        for fmt in COMPARED:
            call = in_place(signed, partial(qt.fake_convert, scale=2.0, shift=0.5, fmt=fmt))
            table.add(f"fake_convert {fmt}, scale, shift", call, at_most(2, "-x"))
        table.add_peers(peers.VALUES, host, COMPARED)
        table.run(recorder, runs)


def stochastic(recorder: Recorder, size: int, runs: int, in_modes: tuple[str, ...]) -> None:
    key = jax.random.key(1)

    def drawn(function: Callable[..., jax.Array], fmt: str, rounding: Any) -> Any:
        return lambda x, key: function(x, fmt, rounding=rounding, key=key)

    for source in SOURCES:
        x = numbers(size, source)
        to_nearest, make, buffer = into_one_buffer(x), into_one_buffer(x, key), [x.copy()]
        title = f"{source} to codes, and fake_cast in place, stochastic, {size:,} elements"
        table = Table(title, "trivial kernel", to_nearest(narrowed(jnp.uint8)))
        for fmt in (*COMPARED, "e2m1fn", "int8"):
            nearest = f"encode {fmt} nearest_even"
            table.add(nearest, to_nearest(partial(qt.encode, fmt=fmt)))
            call = make(drawn(qt.encode, fmt, "stochastic"))
            table.add(f"encode {fmt} stochastic", call, at_most(3, nearest))
        for variant in "ABC":
            call = make(drawn(qt.encode, "e4m3fn", qt.Stochastic(variant, bits=8)))
            limit = at_most(3, "encode e4m3fn nearest_even")
            table.add(f"encode e4m3fn {variant}, 8 bits", call, limit)
        for fmt in COMPARED:
            nearest = f"fake_cast {fmt} nearest_even"
            table.add(nearest, in_place(buffer, partial(qt.fake_cast, fmt=fmt)))
            call = in_place(buffer, drawn(qt.fake_cast, fmt, "stochastic"), key)
            table.add(f"fake_cast {fmt} stochastic", call, at_most(3, nearest))
        table.run(recorder, runs)


def decode(recorder: Recorder, size: int, runs: int, in_modes: tuple[str, ...]) -> None:
    make = into_one_buffer(jax.random.bits(jax.random.key(0), (size,), jnp.uint8))
    title = f"8-bit codes to float32, {size:,} elements"
    table = Table(title, "trivial kernel", make(lambda codes: codes.astype(jnp.float32)))
    for fmt in (*FLOATS, *TABLES):
        if qt.format(fmt).bits == 8:
            table.add(f"decode {fmt}", make(partial(qt.decode, fmt=fmt)))
    for fmt in COMPARED:
        table.add(f"XLA astype {fmt}", make(partial(astype_float32, dtype=qt.format(fmt).dtype)))
    table.run(recorder, runs)


def packed(recorder: Recorder, size: int, runs: int, in_modes: tuple[str, ...]) -> None:
    formats = {"e2m1fn": 4, "e1m2fn": 4, "e2m3fn": 6, "e3m2fn": 6}
    for source in SOURCES:
        make = into_one_buffer(numbers(size, source))
        title = f"{source} to packed codes, {size:,} elements"
        table = Table(title, "trivial kernel", make(narrowed(jnp.uint8)))
        for fmt, bits in formats.items():
            call = make(lambda x, fmt=fmt, bits=bits: qt.pack(qt.encode(x, fmt), bits))
            promised = [faster_by(12, "XLA astype float4_e2m1fn")] if fmt == "e2m1fn" else []
            table.add(f"pack(encode {fmt})", call, *promised)
        xla = make(lambda x: x.astype(jnp.float4_e2m1fn))  # one to a byte
        table.add("XLA astype float4_e2m1fn", xla)
        table.run(recorder, runs)
    make = into_one_buffer(jax.random.bits(jax.random.key(0), (size * 3 // 4,), jnp.uint8))
    title = f"packed codes to float32, {size * 3 // 4:,} bytes"
    table = Table(title, "u8 -> f32", make(lambda codes: codes.astype(jnp.float32)))
    for fmt, bits in formats.items():
        call = make(lambda codes, fmt=fmt, bits=bits: qt.decode(qt.unpack(codes, bits), fmt))
        table.add(f"decode(unpack) {fmt}", call)
    table.run(recorder, runs)


def tables(recorder: Recorder, size: int, runs: int, in_modes: tuple[str, ...]) -> None:
    for source in SOURCES:
        x = numbers(size, source) / 10  # NF4 ends at 1
        make, buffer = into_one_buffer(x), [x.copy()]
        title = f"{source} to table formats, {size:,} elements"
        table = Table(title, "trivial kernel", make(narrowed(jnp.uint8)))
        for fmt in TABLES:
            table.add(f"encode {fmt}", make(partial(qt.encode, fmt=fmt)))
        for fmt in TABLES_HELD[source]:
            table.add(
                f"fake_cast {fmt}, in place", in_place(buffer, partial(qt.fake_cast, fmt=fmt))
            )
        table.add_peers(peers.NF4, np.asarray(x), ("nf4",))
        table.run(recorder, runs)


SECTIONS = {
    function.__name__: function
    for function in (encode, bfloat16, fake_cast, stochastic, decode, packed, tables)
}
Section = enum.StrEnum("Section", list(SECTIONS))


def main(
    section: Annotated[list[Section] | None, typer.Option()] = None,
    size: Annotated[list[int] | None, typer.Option(help="Elements.")] = None,
    runs: Annotated[int, typer.Option(help="Runs of each row; slow ones take at most 5.")] = 25,
    every_mode: Annotated[bool, typer.Option(help="All formats in all six modes.")] = False,
    quick: Quick = False,
    results: Folder = None,
) -> None:
    sizes, runs = ((2**16,), 3) if quick else (size or (2**20, 2**24), runs)
    with Recorder("casts", results, quick) as recorder:
        if c_casts.compiler():
            print(f"rows in C: {c_casts.compiler_version()}")
        else:
            print("no rows in C: no compiler, expected gcc on PATH or another in $CC")
        for elements in sizes:
            for name in section or SECTIONS:
                SECTIONS[name](recorder, elements, runs, FLOATS if every_mode else COMPARED)


if __name__ == "__main__":
    typer.run(main)
