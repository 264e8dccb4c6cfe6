"""Tell the trace that quantizes matmuls which arrays are parameters, and which kernels are stored.

A stored kernel is a parameter that is a `QArray`: codes and scales instead of a float array.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import lift
from flax.linen.transforms import decorator_lift_transform

from qtoolkit.casts.internal import FLOATS
from qtoolkit.products.internal import MODEL, MatmulTrace
from qtoolkit.scaling import QArray

# The name of the function that replaces a method of a module with stored kernels. By this name the
# interceptor of `wrap` knows that it must run the function as it is.
STORED = "qtoolkit_stored"


def know_parameters(module: nn.Module, names: dict[int, str], trace: MatmulTrace) -> None:
    """Tell a trace the parameters of a module and its submodules, and add them to `names`."""
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
    """The path of each parameter of a module, without those of submodules; keys are array ids."""
    return {
        _identity(array): (*module.path, name)
        for name, value in module.variables.get("params", {}).items()
        if not isinstance(value, Mapping)
        for array in jax.tree.leaves(value, is_leaf=_is_stored)
    }


class MethodCall(NamedTuple):
    """A call of a module's method, which an interceptor of Flax runs.

    Attributes:
      module, name, method: The module, the name of its method, and the method as a function.
      run: Flax's own way to call the method: `run(*args, **kwargs)`.
      path: The path of the module, relative to the wrapped module: "blocks_0/Dense_0".
      kinds: The type of the module, and the types of the modules that contain it.
      seen: While the method runs, the trace adds the primitive's name of each matmul to this list.
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
    """Run a method under a trace that knows the parameters; stored kernels become float arrays.

    Only the kernels of the module itself are dequantized. Those of a submodule are dequantized when
    its own method is called. `paths` are those of the module's own parameters; the float arrays are
    added.
    """
    module, names = call.module, trace.names
    collections = {name: x for name, x in module.variables.items() if name != "params"}
    trace.know_inputs(collections)
    trace.know_arguments(jax.tree.leaves((call.args, call.kwargs)))
    own = dict(paths)
    is_stored = any(
        isinstance(x, QArray) and _identity(x) in own
        for x in jax.tree.leaves(module.variables.get("params", {}), is_leaf=_is_stored)
    )
    if not is_stored:
        know_parameters(module, names, trace)
        return call.run(*call.args, **call.kwargs)

    def with_float_kernels(params: Any) -> Any:
        def dequantize(path: Any, x: Any) -> Any:
            if not isinstance(x, QArray) or _identity(x) not in own:
                return x
            array = x.dequantize()
            names[id(array)] = _name(path[1:])  # without Flax's scope, the first key
            paths[id(array)] = own[_identity(x)]
            trace.know_parameter(array, x)
            return array

        return jax.tree_util.tree_map_with_path(dequantize, params, is_leaf=_is_stored)

    def run_method(dequantized_module: nn.Module, args: Any, kwargs: Any) -> Any:
        know_parameters(dequantized_module, names, trace)
        return call.method(dequantized_module, *args, **kwargs)

    # With `capture_intermediates` Flax stores the result of every method named "__call__". Another
    # name prevents a second entry for the same call.
    run_method.__name__ = run_method.__qualname__ = STORED
    if hasattr(call.method, "compact"):
        run_method.compact = True  # type: ignore[attr-defined]
    lifted = decorator_lift_transform(lift.map_variables, run_method, "params", with_float_kernels)
    return lifted(module, call.args, call.kwargs)


def check_kernels(module: nn.Module, path: str) -> None:
    """Checks the dtypes of a module's own parameters. Flax cannot multiply 8-bit ones."""
    for name, value in module.variables.get("params", {}).items():
        if not isinstance(value, Mapping):
            for leaf in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, QArray)):
                parameter = f"{type(module).__name__}.{name}"
                check_dtype(leaf, parameter, path, "create the layer with another param_dtype")


def check_dtype(x: Any, operand: str, path: str, what_to_do: str) -> None:
    dtype = x.dtype if isinstance(x, QArray) else jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.floating) and dtype not in FLOATS:
        raise TypeError(
            f"wrap: {path or MODEL}: {operand} has dtype {dtype}, expected float32, float16 or "
            f"bfloat16; {what_to_do}, or exclude the layer by a rule with None"
        )


def _name(path: Any) -> str:
    # Keys of other kinds are not names: they belong to boxes such as `nn.Partitioned`.
    kinds = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path if isinstance(key, kinds)]
    return ".".join(keys)


def _identity(x: Any) -> int:
    """An id that survives Flax's copies of variables, which copy the trees but not the arrays."""
    return id(x.codes if isinstance(x, QArray) else x)


def _is_stored(x: Any) -> bool:
    return isinstance(x, QArray)
