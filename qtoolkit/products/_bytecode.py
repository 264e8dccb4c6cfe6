"""Tell from a function's bytecode whether it computes a matmul: `x @ w`, `jnp.einsum`.

`nnx.wrap` has no inputs with which to trace a module, and must know which modules compute matmuls:
it gives these a recipe and state, and refuses a rule that names none of them. A guess that is wrong
changes no number silently: a matmul that this file misses is listed by `report`, with its line.
"""

import dis
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

_MATMULS = frozenset(
    {
        *("dot", "matmul", "einsum", "tensordot", "vdot", "inner", "dot_general", "ragged_dot"),
        *("conv_general_dilated", "conv_transpose", "conv", "conv_with_general_padding"),
        *("dot_product_attention", "batch_matmul", "convolve", "correlate", "outer"),
        *("vecdot", "matvec", "vecmat", "multi_dot"),
    }
)
_METHODS = frozenset({"dot"})  # methods of arrays that are matmuls: x.dot(w)
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "optax", "qtoolkit", "builtins")
_DEPTH = 4  # how many levels of calls are followed


@functools.cache
def computes_matmul(
    function: Any, kind: type, attributes: frozenset[str] = frozenset(), depth: int = _DEPTH
) -> bool:
    """Whether a function, or one that it calls, computes a matmul, as far as its code shows.

    Args:
      function: A plain function of Python, such as a method of `kind`.
      kind: The class in which names after `self.` are looked up.
      attributes: Further names after `self.` that are matmuls: see `matmul_attributes`.
    """
    codes = list(_codes(function.__code__))
    # A method may name its module otherwise; the first argument of a function may be an array.
    first = function.__code__.co_varnames[:1]
    known = {**dict.fromkeys(first, attributes | _METHODS), "self": attributes}
    if any(_names_a_matmul(code, known, function.__globals__) for code in codes):
        return True
    if not depth:
        return False
    names = {name for code in codes for name in code.co_names}
    called = map(_undecorated, _called(function, kind, names))
    others = (x for x in called if isinstance(x, types.FunctionType) and x is not function)
    return any(
        other.__name__ in _MATMULS  # `from jax.numpy import dot as multiply`
        if _is_of_library(other.__module__)
        else computes_matmul(other, kind, attributes, depth - 1)
        for other in others
    )


def overridden(function: Any, kind: type) -> Iterator[Any]:
    """Methods of the classes that `kind` inherits from, if `function`, a method, may call them.

    It does so by `super().encode(x)` or `Base.encode(self, x)`.
    """
    names = function.__code__.co_names
    bases = kind.__mro__[1:]
    if "super" in names or any(base.__name__ in names for base in bases):
        for name in names:
            methods = (_undecorated(vars(base).get(name)) for base in bases)
            yield from (method for method in methods if isinstance(method, types.FunctionType))


def matmul_attributes(values: Mapping[str, Any]) -> frozenset[str]:
    """The names of a module's attributes that hold functions which compute matmuls.

    For example `self.attention_fn = nnx.dot_product_attention`, which the module calls.
    """
    functions = ((name, _undecorated(value)) for name, value in values.items())
    return frozenset(
        name
        for name, function in functions
        if isinstance(function, types.FunctionType)
        and (function.__name__ in _MATMULS or computes_matmul(function, object))
    )


def _undecorated(x: Any) -> Any:
    """What `jax.jit`, `nnx.jit`, `functools.partial` and the like have made a callable of.

    It looks into `__dict__`: `hasattr(x, "__wrapped__")`, as `inspect.unwrap` asks, would run the
    `setup` of a bound linen module, in the wrong place if the module is under `nn.vmap`.
    """
    seen: list[Any] = []
    while callable(x) and all(x is not known for known in seen):
        seen.append(x)
        if isinstance(x, functools.partial):
            x = x.func
        else:
            holder = x.__func__ if isinstance(x, types.MethodType) else x
            x = getattr(holder, "__dict__", {}).get("__wrapped__", x)
    return x


def _called(function: Any, kind: type, names: set[str]) -> Iterator[Any]:
    """The objects that the names in a function's code may stand for."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a cell of the closure that is not bound yet
            continue
    for name in names:
        known = function.__globals__.get(name)
        yield known
        # Public methods are wrapped themselves; these are not, so their callers have to be.
        own = inspect.getattr_static(kind, name, None)
        own = getattr(own, "wrapped", own)  # linen puts a property into a descriptor of its own
        if isinstance(own, staticmethod | classmethod):
            yield own.__func__
        elif isinstance(own, property):
            yield own.fget
        elif name.startswith("_"):
            yield getattr(kind, name, None)
        if isinstance(known, types.ModuleType) and not _is_of_library(known.__name__):
            yield from (vars(known).get(other) for other in names)


def _names_a_matmul(
    code: types.CodeType, modules: Mapping[str, frozenset[str]], names: Mapping[str, Any]
) -> bool:
    """Whether code holds `x @ w`, `dot(x, w)`, `jnp.dot(x, w)`, `x.dot(w)` or imports `dot`.

    An attribute counts if it is looked up in a module such as `jnp`, or if arrays have it: `dot`.
    Others do not, and after `self.` only those that `modules` has for that name: `self.dot` or
    `block.conv` may be a layer.
    """
    # For each local variable, which of its attributes are matmuls.
    locals_ = dict(modules)
    known = _METHODS  # which attributes of the value that was loaded last are matmuls
    last = ""
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        if operation == "BINARY_OP" and instruction.argrepr in ("@", "@="):
            return True
        # From Python 3.13 on one instruction stores or loads two locals.
        stored, name = (name[0], name[-1]) if isinstance(name, tuple) and name else (name, name)
        if operation == "IMPORT_FROM" and name in _MATMULS:
            return True
        if operation.startswith("STORE_FAST") and last.startswith("IMPORT_"):
            locals_[stored] = _MATMULS
        if operation.startswith("LOAD_GLOBAL"):
            if name in _MATMULS:
                return True
            known = _MATMULS if isinstance(names.get(name), types.ModuleType) else _METHODS
        elif operation.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            if name in known:
                return True
            known = _MATMULS if known is _MATMULS else _METHODS
        elif operation.startswith(("LOAD_DEREF", "LOAD_CLASSDEREF")):
            known = locals_.get(name, _MATMULS)  # may be a module imported by an outer function
        elif "LOAD_FAST" in operation:
            known = locals_.get(name, _METHODS)
        else:
            known = _METHODS
        last = operation
    return False


def _is_of_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in _LIBRARIES


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)
