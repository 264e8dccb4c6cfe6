"""Lines of the user's program: of an equation, for reports; of the stack, for warnings."""

import importlib.util
import inspect
import os
import sys
import traceback
import warnings
from typing import Any

import jax

# Folders of installed packages, not just names: a user's model may lie in a folder named "flax".
FOLDERS = {
    spec.name: os.path.join(os.path.dirname(spec.origin), "")
    for spec in map(importlib.util.find_spec, ("jax", "jaxlib", "flax", "qtoolkit", "optax"))
    if spec is not None and spec.origin is not None
}
LIBRARIES = tuple(FOLDERS.values())
# Our own lines, and what JAX calls every function by, say nothing about a matmul.
_NOT_SHOWN = (FOLDERS["qtoolkit"], os.path.join(FOLDERS["jax"], "_src", "traceback_util.py"))
_DERIVATIVES = inspect.getfile(inspect.unwrap(jax.value_and_grad))
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def users_line(eqn: Any) -> str:
    """The innermost line of the user's program that made an equation; "" if JAX has not kept it."""
    lines = (_shown(frame) for frame in _frames(eqn) if not frame.file_name.startswith(LIBRARIES))
    return next(lines, "")


def librarys_line(eqn: Any) -> str:
    """The innermost line of Flax that made an equation, else the outermost known line of JAX."""
    others = [frame for frame in _frames(eqn) if not frame.file_name.startswith(_NOT_SHOWN)]
    of_flax = [frame for frame in others if frame.file_name.startswith(FOLDERS["flax"])]
    frame = next(iter(of_flax), others[-1] if others else None)
    return "" if frame is None else _shown(frame)


def _frames(eqn: Any) -> list[Any]:
    frames = getattr(eqn.source_info.traceback, "frames", None) or ()
    return [frame for frame in frames if not frame.file_name.startswith("<")]


def _shown(frame: Any) -> str:
    return f"{os.path.basename(frame.file_name)}:{frame.line_num}"


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
    return not file.startswith(LIBRARIES) and os.path.dirname(file) != _STANDARD_LIBRARY
