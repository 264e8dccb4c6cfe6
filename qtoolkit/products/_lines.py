"""Lines of the user's program: of an equation, for reports; of the stack, for warnings."""

import importlib.util
import inspect
import itertools
import os
import sys
import traceback
import warnings
from typing import Any, NamedTuple

import jax

# Folders of installed packages, not just names: a user's model may lie in a folder named "flax".
_FOLDERS = {
    spec.name: os.path.join(os.path.dirname(spec.origin), "")
    for spec in map(importlib.util.find_spec, ("jax", "jaxlib", "flax", "qtoolkit", "optax"))
    if spec is not None and spec.origin is not None
}
_LIBRARIES = tuple(_FOLDERS.values())
# Our own lines, and what JAX calls every function by, say nothing about a matmul.
_NOT_SHOWN = (_FOLDERS["qtoolkit"], os.path.join(_FOLDERS["jax"], "_src", "traceback_util.py"))
_DERIVATIVES = inspect.getfile(inspect.unwrap(jax.value_and_grad))
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def users_line(eqn: Any) -> str:
    """The innermost line of the user's program that made an equation; "" if JAX has not kept it."""
    lines = (_shown(frame) for frame in _frames(eqn) if not frame.file_name.startswith(_LIBRARIES))
    return next(lines, "")


def librarys_line(eqn: Any) -> str:
    """The innermost line of Flax that made an equation, else the outermost known line of JAX."""
    others = [frame for frame in _frames(eqn) if not frame.file_name.startswith(_NOT_SHOWN)]
    of_flax = [frame for frame in others if frame.file_name.startswith(_FOLDERS["flax"])]
    frame = next(iter(of_flax), others[-1] if others else None)
    return "" if frame is None else _shown(frame)


def _frames(eqn: Any) -> list[Any]:
    frames = getattr(eqn.source_info.traceback, "frames", None) or ()
    return [frame for frame in frames if not frame.file_name.startswith("<")]


def _shown(frame: Any) -> str:
    return f"{os.path.basename(frame.file_name)}:{frame.line_num}"


# Our functions that call a method of a module: any, and that of the outermost one in a program. JAX
# cuts a traceback where a program begins, so `entering` of the outermost one is not in it.
_METHODS = ("entering", "run_method")


class Places(NamedTuple):
    """Where an equation was made, as "__call__@3:12.attend@5:8".

    Functions of the user, each with a line, counted from its first one, and a column. They name a
    matmul. No count of other matmuls is in them, so they are the same when Python takes another
    path, or when the file changes elsewhere. "" in layers of Flax.

    Attributes:
      in_module: From the method of the module that runs, or from the body of the loop in it.
      in_call: From the outermost method, or from the body of the loop.
      is_whole: Whether the method of the module that runs began in this body.
    """

    in_module: str
    in_call: str
    is_whole: bool

    def within(self, outer: "Places") -> "Places":
        """The places of what stands in the body of an equation, which has the places `outer`."""
        in_module = self.in_module if self.is_whole else _joined(outer.in_module, self.in_module)
        is_whole = self.is_whole or outer.is_whole
        return Places(in_module, _joined(outer.in_call, self.in_call), is_whole)


def _joined(*places: str) -> str:
    return ".".join(filter(None, places))


def places_of(eqn: Any, body: str | None = None) -> Places:
    """The places of an equation.

    Args:
      body: None outside of loops. JAX cuts tracebacks where it traces a body, and traces a jitted
        function once for all of its callers: of this one it is the name, else "".
    """
    places: list[str] = []
    ends: list[int] = []  # how many places lie within the modules that run, the innermost first
    traceback = eqn.source_info.traceback
    for code, last in zip(*traceback.raw_frames(), strict=True) if traceback else ():
        file = code.co_filename
        if file.startswith(_FOLDERS["qtoolkit"]):
            if code.co_name in _METHODS:
                ends.append(len(places))
            continue
        if file.startswith(_LIBRARIES) or file.startswith("<"):
            continue
        positions = itertools.islice(code.co_positions(), last // 2, None)
        line, _, column, _ = next(positions, (None,) * 4)
        from_first = (line or code.co_firstlineno) - code.co_firstlineno
        places.append(f"{code.co_name}@{from_first}:{column}")
        if body and code.co_name == body:
            break
    inner = ends[0] if ends else len(places)
    outer = ends[-1] if ends and body is None else len(places)
    in_module, in_call = (".".join(places[:end][::-1]) for end in (inner, outer))
    return Places(in_module, in_call, bool(ends))


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the line of the user that differentiates; at the innermost one, if none does.

    Not at the line of the layer: Python shows a warning once for each line, and a model has many.
    """
    stack = list(traceback.walk_stack(sys._getframe(1)))
    calls = (i for i, (frame, _) in enumerate(stack) if _differentiates(frame.f_code))
    users = (pair for pair in stack[next(calls, 0) :] if _is_users(pair[0].f_code.co_filename))
    frame, line = next(users, stack[-1])
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        line,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _differentiates(code: Any) -> bool:
    names = ("grad", "vjp", "jvp", "linearize", "jacfun")
    return code.co_filename == _DERIVATIVES and any(name in code.co_name for name in names)


def _is_users(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and os.path.dirname(file) != _STANDARD_LIBRARY
