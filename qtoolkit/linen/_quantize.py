"""`quantize`: linen variables whose kernels are stored as codes and scales, to be served."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList, unfreeze
from flax.traverse_util import flatten_dict

from qtoolkit.formats import Rules, SpecLike
from qtoolkit.linen._function import Bound, parameters_of
from qtoolkit.linen._post_training import plain_model, with_params
from qtoolkit.linen._state import (
    COLLECTION,
    at,
    boxed_as,
    check_variables,
    unboxed,
    with_part,
    with_read_state,
)
from qtoolkit.linen._wrap import wrap
from qtoolkit.post_training.internal import (
    PlainModel,
    Storable,
    kept_or_serving_rules,
    not_wrapped,
    quantize_kernels,
    settings,
)
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    Batch,
    KernelUse,
    KernelUses,
    Key,
    KVCacheLike,
    of_kernel,
    read_by,
)
from qtoolkit.scaling import QArray

Model = TypeVar("Model", bound=nn.Module)


def quantize(
    module: Model,
    variables: Any,
    recipe: Recipe | Rules[Recipe] | SpecLike,
    inputs: Any,
    calibration: Any = None,
    *,
    algorithm: str = "nearest",
    sequential: bool = False,
    damping: float = 0.01,
    act_order: bool = False,
    kv_cache: KVCacheLike | None = None,
    method: Any = None,
) -> tuple[Model, Any]:
    """A module and its variables, to be served: kernels are 8-bit or narrower codes with scales.

        served, weights = qtoolkit.linen.quantize(
            model, variables, qtoolkit.recipes.weight_only_e4m3, batch)
        y = jax.jit(served.apply)(weights, batch)

    The results are those of `wrap(module, recipe).apply(variables, ...)`, bit for bit: kernels are
    rounded once, here, instead of in each call, and matmuls use the codes as they are.

    Which parameters are kernels, and along which axes they are summed, is found by tracing the
    module with `inputs`; nothing is computed. A parameter is stored as codes if only matmuls use
    it, and always along the same axes. Under `nn.scan` and `nn.vmap` each kernel of a stack along
    the first axis is stored by itself. Biases, norms, and kernels that are reshaped or joined
    before they are multiplied stay as they are; so do those of equal layers under `nn.jit`, but for
    the first, since these share one trace. Tables of embeddings that are looked up are stored where
    the recipe says `lookups=True`, see `qtoolkit.nnx.quantize`. Afterwards call only methods that
    were traced.

    Args:
      module: As for `wrap`.
      variables: As `init` returns them. `QArray`s in "params" are used as they are. Kernels are
        rounded with the state of `Delayed` and `Static` scaling and of stochastic rounding, and
        with learned scales (LSQ), if there are any.
      recipe: As for `wrap`. A format, "e4m3fn" or a `BlockFormat`, means kernels of that format
        with unquantized activations. "wrapped" keeps the recipes of a module from `wrap`.
      inputs: What the module is called with, as a batch of `calibrate`.
      calibration, algorithm, sequential, damping, act_order: As `calibration`, `method` and so on
        of `qtoolkit.nnx.quantize`: "gptq", "awq" and others, for a module that is not wrapped.
      kv_cache, method: As for `wrap` and `apply`.

    Returns:
      The module from `wrap`, and the variables with `QArray`s in "params"; everything else in them
      is unchanged, but for parameters that took factors or rotations, and for state in the
      collections "qtoolkit" and "qtoolkit_scales" that no traced matmul reads any more, such as
      the histories of another recipe or the learned scales of stored kernels. Kernels in boxes such
      as `nn.Partitioned` stay in them.

    Raises:
      TypeError: As `wrap`; `variables` is no dictionary with "params".
      ValueError: As `wrap`; there is no kernel to store; one holds an infinity or a NaN, has a
        learned scale that was not started, or a learned offset (LSQ+) in a format without a zero
        point; or `recipe` is "wrapped" and `module` is not.

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
    served = _Served(module, variables, recipe, kv_cache, inputs, method)
    if not quantize_kernels(served, calibration, how):
        raise ValueError(
            f"quantize: {type(module).__name__} has no kernel to store with these inputs: the "
            "recipe leaves them unquantized, or nothing is multiplied; expected a format for "
            "kernels, e.g. qtoolkit.recipes.weight_only_e4m3"
        )
    return served.module, served.finished()


class _Served:
    """A linen module and variables that get stored kernels, see `Served` of post_training."""

    def __init__(
        self, module: Any, variables: Any, recipe: Any, kv_cache: Any, inputs: Any, method: Any
    ) -> None:
        self.module = _served(module, recipe, kv_cache)
        self.original, self.given, self.method = module, variables, method
        self.variables = variables
        apply = functools.partial(
            self.module.apply,
            rngs={"params": jax.random.key(0)},
            method=method,
            mutable=DenyList(["params", COLLECTION]),
        )
        batch = Batch.of(tuple(inputs) if isinstance(inputs, list) else inputs)
        call = Bound.of(apply, variables, *batch.arguments)
        program, multiply = call.traced.program(call.leaves), call.traced.quantizing()
        self.uses, self.states = KernelUses.of(program, multiply), call.states
        self.uses_of_states = multiply.uses_of_states(program, self.states)

    def plain(self) -> PlainModel:
        return plain_model("quantize", self.original, self.given, self.method)

    def take(self, params: Mapping[str, Any]) -> None:
        self.variables = {**self.given, "params": with_params(self.given, params)}

    def kernels(self) -> Iterator[tuple[tuple[Any, ...], Storable]]:
        known = {matmul.key: self.states[key] for matmul, _, key in self.uses_of_states}
        for place, use, x, lead in stored_kernels(self.variables["params"], self.uses):
            name = "/".join(map(str, place))
            where = f"quantize: {name}"
            if isinstance(x, QArray):
                yield place, Storable(name, where, x, use.operand, use.axes, 0)
                continue
            if use.operand is None:
                continue
            kept = known.get(use.key, {})
            kept = {part: kept[part] for part in read_by(use.recipe, kept)}
            state = tuple(
                None if part is None else jnp.broadcast_to(part, (*x.shape[:lead], *own))
                for part, own in zip(of_kernel(kept), ((), (2,), (), ()), strict=True)
            )
            x, is_table = jnp.asarray(x), name in self.uses.tables
            yield place, Storable(name, where, x, use.operand, use.axes, lead, state, is_table)

    def store(self, place: tuple[str, ...], array: QArray) -> None:
        params = self.variables["params"]
        params = with_part(params, place, boxed_as(at(params, place), array))
        self.variables = {**self.variables, "params": params}

    def finished(self) -> dict[str, Any]:
        """The variables, without state that no matmul reads.

        That is of a training by another recipe, which `apply` would refuse, or of stored kernels.
        """
        stored = {name for name, x in parameters_of(self.variables) if isinstance(x, QArray)}
        reads: dict[Key, set[str]] = {}
        for matmul, recipe, key in self.uses_of_states:
            recipe = recipe.with_stored(1) if matmul.parameter in stored else recipe
            reads[key] = reads.get(key, set()) | read_by(recipe, self.states[key])
        return with_read_state(self.variables, reads)


def stored_kernels(
    params: Any, kernels: KernelUses
) -> Iterator[tuple[tuple[Any, ...], KernelUse, Any, int]]:
    """The place of each kernel that can be stored, its use, its array and its axes of a stack."""
    flat = flatten_dict(unfreeze(params))
    places = {"/".join(map(str, path)): path for path in flat}
    for name in kernels.uses:
        use, place = kernels.storable(name), places.get(name)
        if use is None or place is None:  # in a list
            continue
        x = unboxed(flat[place])
        lead = x.ndim - len(use.shape)
        if isinstance(x, QArray) or tuple(x.shape[lead:]) == use.shape:
            yield place, use, x, lead


def _served(module: Any, recipe: Any, kv_cache: Any) -> Any:
    rules = kept_or_serving_rules(recipe)
    if rules is not None:
        return wrap(module, rules, kv_cache=kv_cache)
    rules = getattr(module, "qtoolkit_rules", None)
    if rules is None:
        raise not_wrapped(type(module).__name__)
    return wrap(module, rules, kv_cache=kv_cache or module.qtoolkit_cache)
