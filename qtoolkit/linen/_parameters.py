"""The parameters of a bound module, as the trace that replaces matmuls knows them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen.transforms import decorator_lift_transform

from qtoolkit.products.internal import MatmulTrace
from qtoolkit.scaling import QArray

STORED = "qtoolkit_stored"  # the name under which interceptors see a method with stored kernels


def know_parameters(module: nn.Module, names: dict[int, str], trace: MatmulTrace) -> None:
    """Tells a trace which arrays are parameters of a module and those in it, and their names.

    Does nothing if all are known.
    """
    params = module.variables.get("params", {})
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_stored)
    if all(id(array) in names for _, array in leaves if not isinstance(array, QArray)):
        return
    for path, array in leaves:
        # Of a dequantized kernel the trace knows the codes, by which its matmul is computed.
        if not isinstance(array, QArray) and trace.stored(array) is array:
            names[id(array)] = _name(path)
            trace.know_parameter(array)


def own_parameters(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """The paths of a module's own parameters, by the ids of their arrays."""
    return {
        _identity(array): (*module.path, name)
        for name, value in module.variables.get("params", {}).items()
        if not isinstance(value, Mapping)
        for array in jax.tree.leaves(value, is_leaf=_is_stored)
    }


class MethodCall(NamedTuple):
    """A call of a method of a module, as an interceptor of Flax gets it.

    Attributes:
      module, name, method: The module, the method's name, and its plain function.
      run: Calls it with `args` and `kwargs` as Flax would.
      path: The path of the module from the wrapped one: "blocks_0/Dense_0".
      kinds: The types of the module and of those around it.
      seen: Filled with the names of the primitives of the matmuls that it computes.
    """

    module: nn.Module
    name: str
    method: Any
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    path: str
    kinds: tuple[type, ...]
    seen: list[str]


def run_with_arrays(call: MethodCall, trace: MatmulTrace, paths: dict[int, Any]) -> Any:
    """Runs a method under a trace that knows the parameters; `paths` gets the module's own.

    The method gets the module's own stored kernels as ordinary arrays. Those of modules in it stay
    as they are, since their own calls treat them.
    """
    module, names = call.module, trace.names
    collections = {name: x for name, x in module.variables.items() if name != "params"}
    trace.know_inputs(collections)
    trace.know_arguments(jax.tree.leaves((call.args, call.kwargs)))
    own = own_parameters(module)
    paths.update(own)
    is_stored = any(
        isinstance(x, QArray) and _identity(x) in own
        for x in jax.tree.leaves(module.variables.get("params", {}), is_leaf=_is_stored)
    )
    if not is_stored:
        know_parameters(module, names, trace)
        return call.run(*call.args, **call.kwargs)

    def dequantized(params: Any) -> Any:
        def array_of(path: Any, x: Any) -> Any:
            if not isinstance(x, QArray) or _identity(x) not in own:
                return x
            array = x.dequantize()
            names[id(array)] = _name(path[1:])  # the first key is that of the scope
            paths[id(array)] = own[_identity(x)]
            trace.know_parameter(array, x)
            return array

        return jax.tree_util.tree_map_with_path(array_of, params, is_leaf=_is_stored)

    def inside(copy: nn.Module, args: Any, kwargs: Any) -> Any:
        know_parameters(copy, names, trace)
        return call.method(copy, *args, **kwargs)

    # With `capture_intermediates` Flax stores the result of every method named "__call__".
    inside.__name__ = inside.__qualname__ = STORED
    if hasattr(call.method, "compact"):
        inside.compact = True  # type: ignore[attr-defined]
    lifted = decorator_lift_transform(lift.map_variables, inside, "params", dequantized)
    return lifted(module, call.args, call.kwargs)


def _name(path: Any) -> str:
    # Other kinds of keys belong to boxes with metadata, such as `nn.Partitioned`.
    kinds = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path if isinstance(key, kinds)]
    return ".".join(keys)


def _identity(x: Any) -> int:
    """Identifies an array of the variables: Flax copies their trees, but not the leaves."""
    return id(x.codes if isinstance(x, QArray) else x)


def _is_stored(x: Any) -> bool:
    return isinstance(x, QArray)
