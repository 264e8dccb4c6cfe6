"""Post-training methods for nnx models: what they need of a model, and a format for each layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from qtoolkit.nnx._numerics import sensitivity
from qtoolkit.nnx._report import check_module, site_of
from qtoolkit.nnx._wrap import FoundModule, modules_of, wrap
from qtoolkit.products import Allocation
from qtoolkit.products.internal import (
    Batch,
    PlainModel,
    allocated,
    input_statistics,
    serving_rules,
)
from qtoolkit.scaling import QArray


def plain_model(where: str, model: Any) -> PlainModel:
    """A model that is not wrapped, as the methods run it."""
    check_module(where, model)
    if any(site_of(module) is not None for _, module in nnx.iter_modules(model)):
        raise ValueError(
            f"{where}: {type(model).__name__} is wrapped, and the method needs the inputs of its "
            "high-precision matmuls, expected the model before wrap; pass that and a recipe"
        )
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    flat = nnx.to_flat_state(params)
    arrays = {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat}

    def call(arrays: Mapping[str, Any], batch: Batch) -> Any:
        leaves = [
            (path, leaf.replace(array))
            for (path, leaf), array in zip(flat, arrays.values(), strict=True)
        ]
        made: Any = nnx.merge(graph, nnx.from_flat_state(leaves), *rest, copy=True)
        return batch.given_to(made)

    return PlainModel(call, arrays)


def with_params(model: nnx.Module, params: Mapping[str, Any]) -> Any:
    """A copy of a model with other values of its parameters, by name."""
    graph, old, *rest = nnx.split(model, nnx.Param, ...)
    flat = nnx.to_flat_state(old)
    leaves = [(path, leaf.replace(params["/".join(map(str, path))])) for path, leaf in flat]
    return nnx.merge(graph, nnx.from_flat_state(leaves), *rest, copy=True)


def kernel_name(found: FoundModule, known: Mapping[str, Any]) -> str | None:
    """The name of a layer's kernel among the parameters; a shared layer has several paths."""
    names = ("/".join(filter(None, (path, "kernel"))) for path in found.paths)
    return next((name for name in names if name in known), None)


def observed_inputs(model: nnx.Module, batches: Iterable[Any], dtype: Any = jnp.float32) -> Any:
    """`calibrate` with observer="hessian"."""
    return input_statistics(plain_model("calibrate", model), batches, dtype)


def allocate(
    model: nnx.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    choices: Sequence[Any],
    bytes: int,
) -> Allocation:
    """Choose a format for each layer, so that all kernels fit a size at the least loss.

        rules = qtoolkit.nnx.allocate(
            model, batch, loss_fn, choices=["int4_group32", "e4m3fn", None], bytes=30_000_000)
        print(rules)
        served = qtoolkit.nnx.quantize(model, rules)

    `sensitivity` measures for each choice by how much the loss grows if one layer alone takes it;
    the sum of these is minimized (exactly, up to rounding of sizes to 1/4096 of the limit: see
    `gap`). The loss of all layers together may differ from the sum.

    Args:
      model: A model that is not wrapped.
      batch, loss_fn: As for `sensitivity`.
      choices: Formats or recipes, as for `quantize`; None is the layer as it is.
      bytes: The limit for the kernels that `quantize` stores, with their scales.

    Returns:
      `Allocation`: `Rules` for `quantize` and `wrap`, printed as a table with what each layer
      costs. Layers without a kernel that `quantize` stores are excluded.

    Raises:
      TypeError: `model` is no `nnx.Module`, or a choice no format.
      ValueError: The model is wrapped; no choices; or `bytes` is less than the smallest choices
        take.

    Source: arXiv:1911.03852 (sensitivities and a size, HAWQ-V2).

    Examples:
      >>> layers = [nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(2)]
      >>> model, x = nnx.Sequential(*layers), jax.random.normal(jax.random.key(0), (32, 64))
      >>> target = model(x)
      >>> def loss(model, x):
      ...     return jnp.square(model(x) - target).mean()
      >>> rules = qt.nnx.allocate(model, x, loss, choices=["int4_group32", "int8"], bytes=8000)
      >>> [recipe.forward[1].spec.name for _, recipe in rules.rules]
      ['int4_group32', 'int8 by tensor']
    """
    plain_model("allocate", model)

    def measured(recipe: Any) -> tuple[Any, dict[str, int]]:
        wrapped = wrap(model, serving_rules(recipe))
        return sensitivity(wrapped, batch, loss_fn), _kernel_bytes(model, recipe)

    return allocated(choices, bytes, measured, _kernel_bytes(model, None))


def _kernel_bytes(model: nnx.Module, recipe: Any) -> dict[str, int]:
    """The bytes of the kernels that `quantize` stores, by path; wide if there is no recipe."""
    from qtoolkit.nnx._quantize import kernel_axes, quantize

    found = model if recipe is None else quantize(model, recipe)
    sizes = {}
    for layer in modules_of(found):
        module: Any = layer.module
        if kernel_axes(module) is not None:
            value = module.kernel.get_value()
            if recipe is None or isinstance(value, QArray):
                sizes[layer.paths[0]] = int(value.nbytes)
    return sizes
