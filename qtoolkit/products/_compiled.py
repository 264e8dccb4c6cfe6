"""What a compiled program multiplies in FP8: read from XLA's text of it."""

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from qtoolkit.products._report import text_table

_BITS = {"pred": 8, "token": 0, "bf16": 16}
_TYPE = re.compile(r"\b(pred|token|bf16|[a-z]+\d\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:to_apply|body|condition|calls|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# They run no kernel of their own, or others of the program do what they name.
_LOOPS = ("while", "conditional", "call")
_FREE = (
    *_LOOPS,
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"),
    *("opt-barrier", "partition-id", "replica-id"),
)
_TRANSFERS = (
    *("all-gather", "all-to-all", "ragged-all-to-all", "all-reduce", "reduce-scatter"),
    *("collective-permute", "collective-broadcast"),
)
_DOTS = ("dot", "scaled-dot", "ragged-dot", "convolution")


class Instruction(NamedTuple):
    name: str
    type: str
    op: str
    rest: str

    @property
    def operands(self) -> list[str]:
        depth = 1
        for end, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if not depth:
                return re.findall(r"%([\w.\-]+)", self.rest[:end])
        return []

    @property
    def called(self) -> list[str]:
        lists = _CALLED.findall(self.rest)
        return [name for names in lists for name in re.findall(r"%([\w.\-]+)", names)]


@dataclasses.dataclass(frozen=True)
class NativeCall:
    """One matmul or convolution of a compiled program.

    Attributes:
      where: The line of the program that it comes from, "model.py:17"; empty if XLA kept none.
      name: JAX's name of the operation, with the names of the scopes around it.
      part: "forward" or "backward".
      operands: Their types, as XLA multiplies them: "f8e4m3fn[8192,4096]".
      result: The type of the result.
      by: "cuBLASLt", "Triton", "cuDNN", another library's name, or "XLA".
      times: How often it runs, by the trip counts of loops that XLA knows.
      bytes: The sizes of operands and result, in one run.
    """

    where: str
    name: str
    part: str
    operands: tuple[str, str]
    result: str
    by: str
    times: int
    bytes: int

    @property
    def is_fp8(self) -> bool:
        """Whether both operands are 8-bit floats where they are multiplied."""
        return all(operand.startswith("f8") for operand in self.operands)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What a compiled program moves between devices by one kind of operation, in one dtype.

    Attributes:
      op: "all-gather", "all-to-all", "all-reduce", ..., as XLA names it.
      dtype: "u8" or "f8e4m3fn" where codes are moved, else "bf16", "f32", ...
      runs: How many such operations run.
      bytes: The size of all their results on one device.
    """

    op: str
    dtype: str
    runs: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.op} of {self.dtype}: {self.runs}, {self.bytes:,} bytes"


@dataclasses.dataclass(frozen=True)
class NativeCalls:
    """The matmuls and convolutions of a compiled program, and the bytes of everything else.

    Attributes:
      calls: The matmuls and convolutions.
      transfers: What moves between devices.
      kernels: How many other kernels run, each with the number of its runs.
      other_bytes: What these read and write together.

    Examples:
      >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((8, 4)), jnp.ones((4, 2))).compile()
      >>> (call,) = qt.products.native_calls(compiled).calls
      >>> call.operands, call.is_fp8
      (('f32[8,4]', 'f32[4,2]'), False)
    """

    calls: tuple[NativeCall, ...]
    kernels: int
    other_bytes: int
    transfers: tuple[Transfer, ...] = ()

    @property
    def in_fp8(self) -> tuple[NativeCall, ...]:
        """The calls that multiply 8-bit floats."""
        return tuple(call for call in self.calls if call.is_fp8)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("where", "part", "operands", "result", "by", "runs", "MB", "in FP8")
        ]
        rows += [
            (
                *(c.where or "-", c.part, " x ".join(c.operands), c.result, c.by, str(c.times)),
                *(f"{c.bytes / 1e6:.1f}", "yes" if c.is_fp8 else "NO"),
            )
            for c in self.calls
        ]
        text = (
            f"{len(self.in_fp8)} of {len(self.calls)} matmuls multiply in FP8; {self.kernels} "
            f"other kernels read and write {self.other_bytes / 1e6:,.0f} MB"
        )
        return "\n".join([*text_table(rows), text, *map(str, self.transfers)])


def native_calls(compiled: Any) -> NativeCalls:
    """Says of each matmul of a compiled program whether it runs in FP8.

        print(qtoolkit.products.native_calls(step.lower(model, batch).compile()))

    A recipe with `arithmetic="native"` gives XLA operands of 8 bits. What becomes of them, only
    the compiled program says: a call of cuBLASLt with FP8 operands, a Triton kernel that multiplies
    them, or, on hardware without FP8 and for shapes and layouts that no kernel takes, copies in
    bfloat16 or float32. Of a Triton kernel the program says which types it multiplies, not by
    which instructions: on Hopper Triton may convert E5M2 with E4M3 to float16. XLA takes it only
    where it measured cuBLASLt to be slower.

    Args:
      compiled: What `jax.jit(step).lower(...).compile()` returns, or its text.

    Returns:
      `NativeCalls`, whose text is a table.

    Raises:
      TypeError: `compiled` is something else.
      ValueError: The text is no program of XLA's.

    Examples:
      >>> dims = (((1,), (0,)), ((), ()))
      >>> recipe = qt.recipes.native_fp8_current
      >>> step = jax.jit(lambda x, w: qt.dot_general(x, w, dims, recipe=recipe))
      >>> x, w = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 16), jnp.bfloat16)
      >>> ran = qt.products.native_calls(step.lower(x, w).compile())
      >>> len(ran.calls), len(ran.in_fp8)  # this is a CPU, which has no FP8
      (1, 0)
    """
    if not isinstance(compiled, str) and not hasattr(compiled, "runtime_executable"):
        raise TypeError(
            f"native_calls: got {type(compiled).__name__}, expected a compiled program; write "
            "jax.jit(step).lower(model, batch).compile()"
        )
    program = Program(compiled if isinstance(compiled, str) else str(compiled.as_text()))
    calls, kernels, other, sent = [], 0, 0, dict[tuple[str, str], tuple[int, int]]()
    for instruction, types, times in program.executed():
        names = instruction.operands
        size = sum(_size(types.get(name, "")) for name in names) + _size(_result(instruction))
        matmul = program.multiplied(instruction, types)
        op = instruction.op.removesuffix("-start")
        if op in _TRANSFERS:
            *_, (dtype, dims) = _TYPE.findall(instruction.type)
            runs, moved = sent.get((op, dtype), (0, 0))
            sent[op, dtype] = runs + times, moved + times * _size(f"{dtype}[{dims}]")
        if matmul is None:
            kernels, other = kernels + times, other + size * times
            continue
        operands, by = matmul
        metadata = re.search(r'op_name="([^"]*)"', instruction.rest)
        name = metadata[1] if metadata else ""
        part = "backward" if "transpose(" in name else "forward"
        result = _without_layout(_result(instruction))
        where = program.line_of(instruction)
        calls.append(NativeCall(where, name, part, operands, result, by, times, size))
    transfers = (Transfer(*kind, *counts) for kind, counts in sent.items())
    return NativeCalls(tuple(calls), kernels, other, tuple(transfers))


class Program:
    """The text of a compiled program, cut into computations and instructions.

    Attributes:
      computations: By name, the instructions of each.
      entry: The name of the first one.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._text = text
        current: list[Instruction] = []
        for line in text.splitlines():
            if (begin := _COMPUTATION.match(line)) is not None:
                current = self.computations.setdefault(begin[2], [])
                self.entry = begin[2] if begin[1] else self.entry
            elif (instruction := _INSTRUCTION.match(line)) is not None:
                current.append(Instruction(*instruction.groups()))
        if not self.entry:
            raise ValueError(
                "native_calls: the text has no ENTRY computation, expected that of a compiled "
                "program: compiled.as_text()"
            )
        self._places = _user_lines(text)

    def executed(
        self, name: str | None = None, times: int = 1
    ) -> Iterator[tuple[Instruction, dict[str, str], int]]:
        """Every instruction that runs, the types of its computation, and how often it runs."""
        instructions = self.computations.get(name or self.entry, [])
        types = {one.name: one.type for one in instructions}
        for one in instructions:
            if one.op not in _FREE:
                yield one, types, times
            elif one.op in _LOOPS:
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest)
                for called in one.called:
                    yield from self.executed(called, times * (int(trips[1]) if trips else 1))

    def multiplied(
        self, one: Instruction, types: dict[str, str]
    ) -> tuple[tuple[str, str], str] | None:
        """The types that an instruction multiplies and what does it; None if it is no matmul."""
        target = _TARGET.search(one.rest)
        if target is not None:
            by = next((name for part, name in _LIBRARIES.items() if part in target[1]), None)
            return None if by is None else (self._two(one, types), by)
        if one.op in _DOTS:
            return self._two(one, types), "XLA"
        for called in one.called if one.op == "fusion" else ():
            inner = self.computations.get(called, [])
            types = {each.name: each.type for each in inner}
            for each in inner:
                matmul = self.multiplied(each, types)
                if matmul is not None:
                    return matmul[0], "Triton" if "__triton" in one.rest else matmul[1]
        return None

    def _two(self, one: Instruction, types: dict[str, str]) -> tuple[str, str]:
        first, second = (_without_layout(types.get(name, "?")) for name in one.operands[:2])
        return first, second

    def line_of(self, one: Instruction) -> str:
        frame = re.search(r"stack_frame_id=(\d+)", one.rest)
        if frame is not None:
            return self._places.get(int(frame[1]), "")
        source = re.search(r'source_file="([^"]*)" source_line=(\d+)', one.rest)
        return f"{os.path.basename(source[1])}:{source[2]}" if source else ""


_LIBRARIES = {"cublas$lt": "cuBLASLt", "cublas": "cuBLAS", "cudnn": "cuDNN", "matmul": "library"}


def _user_lines(text: str) -> dict[int, str]:
    """For each stack frame that the text lists, the innermost line that is no library's."""
    files = dict(re.findall(r'^(\d+) "(.*)"$', _table(text, "FileNames"), re.M))
    lines = re.findall(
        r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)", _table(text, "FileLocations"), re.M
    )
    places = {place: (files.get(file, ""), line) for place, file, line in lines}
    frames = {
        frame: (place, parent)
        for frame, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
            _table(text, "StackFrames"),
            re.M,
        )
    }
    own = os.path.dirname(os.path.dirname(__file__))
    lines_of = {}
    for frame in frames:
        at, seen = frame, 0
        while at in frames and seen < len(frames):
            place, parent = frames[at]
            file, line = places.get(place, ("", ""))
            if file and "site-packages" not in file and not file.startswith(own):
                lines_of[int(frame)] = f"{os.path.basename(file)}:{line}"
                break
            at, seen = str(int(parent or 1) - 1), seen + 1  # written as one more
    return lines_of


def _table(text: str, name: str) -> str:
    rows = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
    return rows[1] if rows else ""


def _result(one: Instruction) -> str:
    """The type of the result, of a library's call without its workspace."""
    if "custom_call_target" not in one.rest or not one.type.startswith("("):
        return one.type
    first = _TYPE.search(one.type)
    return first[0] if first else ""


def _without_layout(type_: str) -> str:
    return re.sub(r"\{[^}]*\}", "", type_)


def _size(type_: str) -> int:
    """The bytes of all arrays in a type."""
    total = 0
    for dtype, dims in _TYPE.findall(type_):
        digits = re.match(r"[a-z]+(\d+)", dtype)
        bits = _BITS.get(dtype, int(digits[1]) if digits else 0)
        total += -(-bits * math.prod(int(n) for n in dims.split(",") if n) // 8)
    return total
