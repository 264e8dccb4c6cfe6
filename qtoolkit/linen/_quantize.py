"""`quantize`: linen variables whose kernels are stored as codes and scales, to be served."""

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList

from qtoolkit.formats import Rules, SpecLike
from qtoolkit.linen._post_training import plain_model, with_params
from qtoolkit.linen._run import Kernel, moves_state, noting_kernels
from qtoolkit.linen._state import COLLECTION, SCALES, at, check_variables, with_part
from qtoolkit.linen._wrap import wrap
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    Batch,
    of_kernel,
    serving_rules,
    settings,
    stored_kernel,
    tuned,
)
from qtoolkit.scaling import QArray

Model = TypeVar("Model", bound=nn.Module)


def quantize(
    module: Model,
    variables: Any,
    recipe: Recipe | Rules[Recipe] | SpecLike | None,
    inputs: Any,
    calibration: Any = None,
    *,
    algorithm: str = "nearest",
    sequential: bool = False,
    damping: float = 0.01,
    act_order: bool = False,
    kv_cache: SpecLike | None = None,
    method: Any = None,
) -> tuple[Model, Any]:
    """A module and its variables, to be served: kernels are 8-bit or narrower codes with scales.

        served, weights = qtoolkit.linen.quantize(
            model, variables, qtoolkit.recipes.weight_only_e4m3, batch)
        y = jax.jit(served.apply)(weights, batch)

    The results are those of `wrap(module, recipe).apply(variables, ...)`, bit for bit: kernels are
    rounded once, here, instead of in each call, and products use the codes as they are.

    Which parameters are kernels, and along which axes they are summed, is found by tracing the
    module with `inputs`; nothing is computed. A parameter is stored as codes if only products use
    it, and always along the same axes. Under `nn.scan` and `nn.vmap` each kernel of a stack along
    the first axis is stored by itself. Tables of embeddings that are looked up, biases, norms, and
    kernels that are reshaped or joined before they are multiplied stay as they are. Afterwards call
    only methods that were traced: one that looks up a stored table raises.

    Args:
      module: As for `wrap`; one from `wrap`, whose recipes are then kept where `recipe` is None.
      variables: As `init` returns them. `QArray`s in "params" are used as they are. Kernels are
        rounded with the state of `Delayed` and `Static` scaling and of stochastic rounding, and
        with learned scales (LSQ), if there are any.
      recipe: As for `wrap`. A format, "e4m3fn" or a `BlockFormat`, means kernels of that format
        with unquantized activations.
      inputs: What the module is called with, as a batch of `calibrate`.
      calibration, algorithm, sequential, damping, act_order: As `calibration`, `method` and so on
        of `qtoolkit.nnx.quantize`: "gptq", "awq" and others, for a module that is not wrapped.
      kv_cache, method: As for `wrap` and `apply`.

    Returns:
      The module from `wrap`, and the variables with `QArray`s in "params"; everything else in them
      is unchanged, but for parameters that took factors or rotations.

    Raises:
      TypeError: As `wrap`; `variables` is no dictionary with "params".
      ValueError: As `wrap`; no kernel is left to be stored; one holds an infinity or a NaN, has a
        learned scale that was not started, or a learned offset (LSQ+), which codes cannot hold
        since their zero points are integers; or `recipe` is None and `module` is not wrapped.

    Gradient: Stored kernels have none; `jax.grad` refuses integers.

    Examples:
      >>> module, x = nn.Dense(4), jnp.ones((1, 32))
      >>> variables = module.init(jax.random.key(0), x)
      >>> served, weights = qt.linen.quantize(module, variables, "int4_group32", x)
      >>> weights["params"]["kernel"]
      QArray(int4_group32@0, float32[32,4]: codes uint8[32,2], scale float32[1,4])
      >>> wrapped = qt.linen.wrap(module, qt.Recipe((None, "int4_group32"), gradient=None))
      >>> bool((served.apply(weights, x) == wrapped.apply(variables, x)).all())
      True
    """
    check_variables("quantize", variables, '; pass {"params": params}')
    how = settings(algorithm, calibration, sequential, damping, act_order)
    served = _served(module, recipe, kv_cache)
    apply = functools.partial(
        served.apply,
        rngs={"params": jax.random.key(0)},
        method=method,
        mutable=DenyList(["params", COLLECTION]),
    )
    batch = Batch.of(tuple(inputs) if isinstance(inputs, list) else inputs)
    with noting_kernels() as kernels:
        jax.eval_shape(lambda variables, batch: batch.given_to(apply, variables), variables, batch)
    alike = {
        path: uses[0]
        for path, uses in kernels.uses.items()
        if path not in kernels.other_uses and all(_are_alike(use, uses[0]) for use in uses)
    }
    made: Mapping[str, QArray] = {}
    if how.needs_inputs:
        plain = plain_model("quantize", module, variables, method)
        operands = {"/".join(p): use.operand for p, use in alike.items() if use.operand is not None}
        made, arrays = tuned(plain, operands, calibration, how)
        variables = {**variables, "params": with_params(variables, arrays)}
    params, count = _stored(variables, alike, made)
    if not count:
        raise ValueError(
            f"quantize: {type(module).__name__} has no kernel to store with these inputs: the "
            "recipe leaves them wide, or nothing is multiplied; expected a format for kernels, "
            "e.g. qtoolkit.recipes.weight_only_e4m3"
        )
    return served, {**variables, "params": params}


def _stored(
    variables: Any, kernels: Mapping[tuple[str, ...], Kernel], made: Mapping[str, QArray]
) -> tuple[Any, int]:
    """The parameters with kernels that are stored, those of `made` as they are; and how many."""
    params, count = variables["params"], 0
    for path, use in kernels.items():
        value = at(params, path)
        is_stored = isinstance(value, QArray)
        array = value if is_stored else made.get("/".join(path))
        array = _stored_kernel(path, value, use, variables) if array is None else array
        if array is not None:
            params, count = with_part(params, path, array), count + 1
    return params, count


def _served(module: Any, recipe: Any, kv_cache: Any) -> Any:
    if recipe is not None:
        return wrap(module, serving_rules(recipe), kv_cache=kv_cache)
    rules = getattr(module, "qtoolkit_rules", None)
    if rules is None:
        raise ValueError(
            f"quantize: recipe is None for {type(module).__name__}, which is not wrapped, expected "
            "a recipe, e.g. qtoolkit.recipes.weight_only_e4m3"
        )
    return wrap(module, rules, kv_cache=kv_cache or module.qtoolkit_cache)


def _are_alike(use: Kernel, other: Kernel) -> bool:
    """Whether two uses of a parameter round it in the same way."""
    has_state = any(moves_state(one.recipe) for one in (use, other))
    return use == other or (use[:3] == other[:3] and not has_state)


def _stored_kernel(path: tuple[str, ...], x: Any, use: Kernel, variables: Any) -> QArray | None:
    """A parameter, rounded as the product that uses it would; None if that leaves it wide."""
    lead = x.ndim - len(use.shape)
    if use.operand is None or tuple(x.shape[lead:]) != use.shape:
        return None
    kept = _kept(variables, COLLECTION, use) | _kept(variables, SCALES, use)
    stack = tuple(x.shape[:lead])
    amax, key, scale = (
        None if part is None else jnp.broadcast_to(part, (*stack, *part.shape[-1:][:last]))
        for part, last in zip(of_kernel(kept), (0, 1, 0), strict=True)
    )
    where = f"quantize: {'/'.join(path)}"
    return stored_kernel(where, jnp.asarray(x), use.operand, use.axes, lead, amax, key, scale)


def _kept(variables: Any, collection: str, use: Kernel) -> dict[str, Any]:
    """The state that a collection holds for a product."""
    found = variables.get(collection, {})
    for name in (*use.layer, use.product):
        found = found.get(name, {})
    return dict(found)
