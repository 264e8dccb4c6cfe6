"""`quantize`: linen variables whose kernels are stored as codes and scales, to be served."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList

from qtoolkit.formats import Rules, SpecLike
from qtoolkit.linen._run import Kernel, noting_kernels
from qtoolkit.linen._state import COLLECTION, state_of
from qtoolkit.linen._wrap import wrap
from qtoolkit.products import Recipe
from qtoolkit.products.internal import serving_rules, stored_kernel
from qtoolkit.scaling import QArray

Model = TypeVar("Model", bound=nn.Module)


def quantize(
    module: Model,
    variables: Any,
    recipe: Recipe | Rules[Recipe] | SpecLike,
    inputs: Any,
    *,
    kv_cache: SpecLike | None = None,
    method: Any = None,
) -> tuple[Model, Any]:
    """A module and its variables, to be served: kernels are 8-bit or narrower codes with scales.

        served, weights = qtoolkit.linen.quantize(
            model, variables, qtoolkit.recipes.weight_only_e4m3, batch)
        y = jax.jit(served.apply)(weights, batch)

    They compute what `wrap(module, recipe).apply(variables, ...)` computes, bit for bit: kernels
    are rounded once, here, instead of in each call, and products take the codes as they are.

    Which parameters are kernels, and along which axes they are summed, is known when the module
    runs: it is traced with `inputs`; nothing is computed. Stored is what products use and nothing
    else in this trace does, always along the same axes; under `nn.scan` and `nn.vmap` each kernel
    of a stack along the first axis by itself. Tables of embeddings that are looked up, biases,
    norms, and kernels that are reshaped or joined before they are multiplied stay as they are. The
    module then runs such methods as were traced: one that looks up a stored table raises.

    Args:
      module: As for `wrap`.
      variables: As `init` returns them. "params" may hold `QArray`s already, which are used as they
        are; state of `Delayed` scaling and stochastic rounding counts for kernels.
      recipe: As for `wrap`. A format, "e4m3fn" or a `BlockFormat`, stands for kernels of that
        format beside wide activations.
      inputs: What the module is called with: one array, or a tuple of them.
      kv_cache, method: As for `wrap` and `apply`.

    Returns:
      The module from `wrap`, and the variables with `QArray`s in "params"; everything else in them
      is what was given.

    Raises:
      TypeError: As `wrap`; `variables` is no dictionary with "params".
      ValueError: As `wrap`; no kernel is left to be stored; one holds an infinity or a NaN.

    Gradient: None by stored kernels, whose integers `jax.grad` refuses.
    """
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise TypeError(
            f"quantize: variables has type {type(variables).__name__}, expected a dictionary of "
            'collections with "params", as init returns it; pass {"params": params}'
        )
    served = wrap(module, serving_rules("quantize", recipe), kv_cache=kv_cache)
    arguments = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    with noting_kernels() as kernels:
        jax.eval_shape(
            lambda variables, arguments: served.apply(
                variables,
                *arguments,
                rngs={"params": jax.random.key(0)},
                method=method,
                mutable=DenyList(["params", COLLECTION]),
            ),
            variables,
            arguments,
        )
    params, count = variables["params"], 0
    for path, uses in kernels.uses.items():
        value = _at(params, path)
        if path in kernels.other_uses or any(not _are_alike(use, uses[0]) for use in uses):
            continue
        array = value if isinstance(value, QArray) else _stored(path, value, uses[0], variables)
        if array is not None:
            params, count = _with(params, path, array), count + 1
    if not count:
        raise ValueError(
            f"quantize: {type(module).__name__} has no kernel to store with these inputs: the "
            "recipe leaves them wide, or nothing is multiplied; expected a format for kernels, "
            "e.g. qtoolkit.recipes.weight_only_e4m3"
        )
    return served, {**variables, "params": params}


def _are_alike(use: Kernel, other: Kernel) -> bool:
    """Whether both round the parameter in the same way."""
    keeps_state = any(one.recipe.is_delayed or one.recipe.is_stochastic for one in (use, other))
    return use == other or (use[:3] == other[:3] and not keeps_state)


def _stored(path: tuple[str, ...], x: Any, use: Kernel, variables: Any) -> QArray | None:
    lead = x.ndim - len(use.shape)
    if use.operand is None or tuple(x.shape[lead:]) != use.shape:
        return None
    kept = variables.get(COLLECTION, {}).get(use.layer, {}).get(use.product)
    state = state_of(use.recipe, f"{use.layer}:{use.product}", kept, None)
    amax = key = None
    if state is not None:
        stack = tuple(x.shape[:lead])
        amax = None if state.amax is None else jnp.broadcast_to(state.amax[1], stack)
        key = None if state.key is None else jnp.broadcast_to(state.key, (*stack, 2))
    where = f"quantize: {'/'.join(path)}"
    return stored_kernel(where, jnp.asarray(x), use.operand, use.axes, lead, amax, key)


def _at(params: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        params = params[name]
    return params


def _with(params: Any, path: tuple[str, ...], array: QArray) -> Any:
    """A copy of the tree with another leaf."""
    if not path:
        return array
    first, *rest = path
    return {**params, first: _with(params[first], tuple(rest), array)}
