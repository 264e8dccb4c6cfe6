"""`wrap`: an nnx model whose products are quantized, made by attribute injection."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from qtoolkit.products import Recipe, conv_general_dilated, dot_general, einsum

Model = TypeVar("Model", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """Stands in for `jax.lax.dot_general`. Equal recipes make equal objects: no second trace."""

    recipe: Recipe

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return dot_general(lhs, rhs, *args, recipe=self.recipe, **kwargs)


@dataclasses.dataclass(frozen=True)
class Einsum:
    """Stands in for `jax.numpy.einsum` of an input and a kernel."""

    recipe: Recipe

    def __call__(self, subscripts: str, lhs: jax.Array, rhs: jax.Array, **kwargs: Any) -> jax.Array:
        return einsum(subscripts, lhs, rhs, recipe=self.recipe, **kwargs)


@dataclasses.dataclass(frozen=True)
class ConvGeneralDilated:
    """Stands in for `jax.lax.conv_general_dilated`."""

    recipe: Recipe

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return conv_general_dilated(lhs, rhs, *args, recipe=self.recipe, **kwargs)


def keep_kernel_dtype(args: tuple[Any, ...], /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Flax's `promote_dtype` for (inputs, kernel, bias), but for the kernel.

    The kernel is rounded from its own dtype; a bfloat16 copy of it would be rounded twice.
    """
    inputs, kernel, *biases = args
    dtype = dtypes.canonicalize_dtype(*args, dtype=dtype, inexact=inexact)
    biases = [None if bias is None else jnp.asarray(bias, dtype) for bias in biases]
    return jnp.asarray(inputs, dtype), jnp.asarray(kernel), *biases


# For each layer with a hook: its attribute, Flax's own value of it, ours.
_HOOKS: dict[type[nnx.Module], tuple[str, Any, Any]] = {
    nnx.Linear: ("dot_general", lax.dot_general, DotGeneral),
    nnx.LinearGeneral: ("dot_general", None, DotGeneral),
    nnx.Einsum: ("einsum_op", jnp.einsum, Einsum),
    nnx.Conv: ("conv_general_dilated", lax.conv_general_dilated, ConvGeneralDilated),
}


def wrap(model: Model, recipe: Recipe | None = None) -> Model:
    """A model like `model` whose matrix products and convolutions are quantized by `recipe`.

    Every `nnx.Linear`, `nnx.LinearGeneral` (attention's projections are four of them),
    `nnx.Einsum` and `nnx.Conv`, and any subclass that uses their hook, gets a quantized product by
    attribute. Everything else stays as it is: embeddings, normalisation, softmax, and attention's
    own two products.

    Args:
      model: Any `nnx.Module`. It is not changed, and nothing outside it is patched: both models
        work side by side, eager and under `nnx.jit`.
      recipe: Formats and scaling; None for `Recipe()`, E4M3 forward and E5M2 for gradients.

    Returns:
      A model of the same class. Parameters are shared, their paths unchanged: training one trains
      the other, and checkpoints fit both.

    Raises:
      TypeError: `model` is no `nnx.Module`, or `recipe` no `Recipe`.
      ValueError: No layer can be quantized, or a layer has a product of the user's own in the place
        where ours would go; the message names its path.
    """
    recipe = Recipe() if recipe is None else recipe
    if not isinstance(model, nnx.Module):
        raise TypeError(f"wrap: model has type {type(model).__name__}, expected an nnx.Module")
    if not isinstance(recipe, Recipe):
        raise TypeError(f"wrap: recipe has type {type(recipe).__name__}, expected a Recipe")
    _check_hooks(model)
    wrapped = model
    for layer, (attribute, _, quantized) in _HOOKS.items():
        attributes = {attribute: quantized(recipe), "promote_dtype": keep_kernel_dtype}
        wrapped = nnx.with_attributes(wrapped, only=layer, raise_if_not_found=False, **attributes)
    return wrapped


def _check_hooks(model: nnx.Module) -> None:
    found = False
    for path, layer in nnx.iter_modules(model):
        for kind, (attribute, original, quantized) in _HOOKS.items():
            if not isinstance(layer, kind):
                continue
            found = True
            _check_attribute(path, layer, attribute, (original, None), quantized)
            _check_attribute(
                path, layer, "promote_dtype", (dtypes.promote_dtype, keep_kernel_dtype)
            )
            if isinstance(layer, nnx.LinearGeneral):
                _check_attribute(path, layer, "dot_general_cls", (None,))
    if not found:
        kinds = ", ".join(f"nnx.{kind.__name__}" for kind in _HOOKS)
        raise ValueError(f"wrap: {type(model).__name__} has no layer to quantize, expected {kinds}")


def _check_attribute(
    path: tuple[Any, ...],
    layer: nnx.Module,
    attribute: str,
    replaceable: tuple[Any, ...],
    ours: type | tuple[()] = (),
) -> None:
    value = getattr(layer, attribute)
    if not (any(value is known for known in replaceable) or isinstance(value, ours)):
        where = "/".join(map(str, path)) or "(the model itself)"
        raise ValueError(
            f"wrap: {where}: {type(layer).__name__}.{attribute} is {value!r}, expected Flax's own; "
            "wrapping would discard it. Set it back first, e.g. with nnx.with_attributes"
        )
