"""Where in the user's code a matmul is: what names its state, where no kernel does.

A site is told by the text of the code, "attend@einsum(bqhd,bkhd->bhqk,q,k)": the same when Python
takes another path, when lines move, and when other matmuls come or go.
"""

import ast
import functools
import hashlib
import linecache
import re
from types import CodeType
from typing import Any, NamedTuple

from qtoolkit.products._lines import FOLDERS, LIBRARIES

# Our functions that call a method of a module: any, and that of the outermost one in a program. JAX
# cuts a traceback where a program begins, so `entering` of the outermost one is not in it.
_METHODS = ("entering", "run_method")
_LONGEST = 40  # characters of an expression in a name

Position = tuple[int | None, int | None, int | None, int | None]


class Site(NamedTuple):
    """Where an equation was made, as "__call__@attend(x,mask).attend@matmul(q,k_T)".

    Functions of the user, the outermost one first, each with what it computes there. Empty in
    layers of Flax.

    Attributes:
      in_module: From the method of the module that runs, or from the body of the loop in it.
      in_call: From the outermost method, or from the body of the loop.
      is_whole: Whether the method of the module that runs began in this body.
    """

    in_module: str
    in_call: str
    is_whole: bool

    def within(self, outer: "Site") -> "Site":
        """The site of what stands in the body of an equation, which is at the site `outer`."""
        in_module = self.in_module if self.is_whole else _joined(outer.in_module, self.in_module)
        is_whole = self.is_whole or outer.is_whole
        return Site(in_module, _joined(outer.in_call, self.in_call), is_whole)


def _joined(*sites: str) -> str:
    return ".".join(filter(None, sites))


def site_of(eqn: Any, body: str | None = None) -> Site:
    """The site of an equation.

    Args:
      body: None outside of loops. JAX cuts tracebacks where it traces a body, and traces a jitted
        function once for all of its callers: of this one it is the name, else "".
    """
    frames: list[str] = []
    ends: list[int] = []  # how many frames lie within the modules that run, the innermost first
    traceback = eqn.source_info.traceback
    for code, last in zip(*traceback.raw_frames(), strict=True) if traceback else ():
        file = code.co_filename
        if file.startswith(FOLDERS["qtoolkit"]):
            if code.co_name in _METHODS:
                ends.append(len(frames))
            continue
        if file.startswith((*LIBRARIES, "<")):
            continue
        frames.append(f"{code.co_name}@{_expression(code, last // 2)}")
        if body and code.co_name == body:
            break
    inner = ends[0] if ends else len(frames)
    outer = ends[-1] if ends and body is None else len(frames)
    in_module, in_call = (".".join(frames[:end][::-1]) for end in (inner, outer))
    return Site(in_module, in_call, bool(ends))


@functools.lru_cache(maxsize=2**16)
def _expression(code: CodeType, instruction: int) -> str:
    """What a function computes in an instruction; the second of two alike is "matmul(x,w)[2]".

    Where there is no source, line and column from the function's first line have to do, "3:12".
    """
    position, sources = _sources(code)
    line, _, column, _ = position[instruction]
    source = sources[position[instruction]]
    name = _in_words(source) if source else None
    if name is None:
        return f"{(line or code.co_firstlineno) - code.co_firstlineno}:{column}"
    alike = [x for x, other in sources.items() if "".join(other.split()) == "".join(source.split())]
    count = alike.index(position[instruction])
    return f"{name}[{count + 1}]" if count else name


@functools.lru_cache(maxsize=1024)
def _sources(code: CodeType) -> tuple[list[Position], dict[Position, str]]:
    """The position of each instruction of a function, and the text of each position, in order."""
    lines = linecache.getlines(code.co_filename)
    positions = list(code.co_positions())
    in_order = sorted(set(positions), key=lambda position: [x or 0 for x in position])
    return positions, {position: _source(lines, position) for position in in_order}


def _source(lines: list[str], position: Position) -> str:
    first, last, start, end = position
    # Line 0 is no line of the file: the first instruction of a module has it.
    if None in position or not 0 < first <= last <= len(lines):  # type: ignore[operator]
        return ""
    text = [line.encode() for line in lines[first - 1 : last]]  # type: ignore[operator]
    text[-1] = text[-1][:end]  # columns are those of bytes
    text[0] = text[0][start:]
    return b"".join(text).decode(errors="replace")


def _in_words(source: str) -> str | None:
    try:
        expression = ast.parse(f"({source}\n)", mode="eval").body
    except (SyntaxError, ValueError):  # a statement, or a file that has changed since
        return None
    match expression:
        case ast.Call(func=function, args=args, keywords=keywords):
            called = getattr(function, "attr", None) or ast.unparse(function)
            words = f"{called}({','.join(map(ast.unparse, [*args, *(k.value for k in keywords)]))})"
        case ast.BinOp(op=ast.MatMult(), left=left, right=right):
            words = f"matmul({ast.unparse(left)},{ast.unparse(right)})"
        case _:
            words = ast.unparse(expression)
    # Names of files, too: some checkpoints have a folder for each array.
    plain = re.sub(r"[^\w,()+=-]", "", words.replace("[...]", "").replace(".", "_"))
    if len(plain) <= _LONGEST:
        return plain
    return f"{plain[: _LONGEST - 5]}~{hashlib.sha256(words.encode()).hexdigest()[:4]}"
