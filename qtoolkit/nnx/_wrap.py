"""`wrap`: an nnx model whose products are quantized, made by attribute injection."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from qtoolkit.formats import Rules
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


def wrap(model: Model, recipe: Recipe | Rules[Recipe] | None = None) -> Model:
    """A model like `model` whose matrix products and convolutions are quantized by `recipe`.

    Every `nnx.Linear`, `nnx.LinearGeneral` (attention's projections are four of them),
    `nnx.Einsum` and `nnx.Conv`, and any subclass that uses their hook, gets a quantized product by
    attribute. Everything else stays as it is: embeddings, normalisation, softmax, and attention's
    own two products. Under `nnx.vmap` each example has scales of its own: `qtoolkit.dot_general`.

    Args:
      model: Any `nnx.Module`. It is not changed, and nothing outside it is patched: both models
        work side by side, eager and under `nnx.jit`.
      recipe: Formats and scaling; None for `Recipe()`, E4M3 forward and E5M2 for gradients. Or
        `Rules` of recipes, over paths such as "blocks/0/mlp" and types; None leaves a layer as it
        is, and so does a missing default. A type stands for layers of that type and for those
        inside modules of that type. A layer that is shared has several paths; a rule matches it
        where it matches one of them.

    Returns:
      A model of the same class. Parameters are shared, their paths unchanged: training one trains
      the other, and checkpoints fit both.

    Raises:
      TypeError: `model` is no `nnx.Module`, or `recipe` neither a `Recipe` nor `Rules` of them.
      ValueError: No layer is quantized; a rule matches no layer (one with None: no module); or a
        layer has a product of the user's own in the place where ours would go, and the message
        names its path.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"wrap: model has type {type(model).__name__}, expected an nnx.Module")
    rules = _as_rules(recipe)
    modules = _modules(model)
    layers = [found for found in modules if found.has_hook]
    if not layers:
        kinds = ", ".join(f"nnx.{kind.__name__}" for kind in _HOOKS)
        raise ValueError(f"wrap: {type(model).__name__} has no layer to quantize, expected {kinds}")
    _check_rules(rules, layers, modules)
    changes: dict[str, dict[str, Any]] = {}
    for found in layers:
        chosen = rules.lookup(found.paths, found.kinds)
        if chosen is not None:
            attributes = _attributes(found, chosen)
            changes.update(dict.fromkeys(found.paths, attributes))
    if not changes:
        raise ValueError(
            f"wrap: the rules leave every layer of {type(model).__name__} as it is, expected a "
            f"recipe for one or more, e.g. for {layers[0].shown}"
        )

    def inject(path: tuple[Any, ...], node: Any) -> Any:
        for attribute, value in changes.get("/".join(map(str, path)), {}).items():
            setattr(node, attribute, value)
        return node

    return nnx.recursive_map(inject, model, graph=True)  # a copy that shares the variables


def _as_rules(recipe: Any) -> Rules[Recipe]:
    def checked(value: Any) -> Recipe:
        if not isinstance(value, Recipe):
            raise TypeError(f"wrap: recipe has type {type(value).__name__}, expected a Recipe")
        return value

    if isinstance(recipe, Rules):
        return recipe.map(checked)
    return Rules((), default=Recipe() if recipe is None else checked(recipe))


@dataclasses.dataclass
class _Found:
    """A module of a model, and all ways that lead to it."""

    module: nnx.Module
    paths: list[str] = dataclasses.field(default_factory=list)
    kinds: list[type] = dataclasses.field(default_factory=list)  # its own, of those around it

    @property
    def has_hook(self) -> bool:
        return isinstance(self.module, tuple(_HOOKS))

    @property
    def shown(self) -> str:
        return self.paths[0] or "(the model itself)"


def _modules(model: nnx.Module) -> list[_Found]:
    """Every module once. `nnx.iter_modules` would give of a shared one only the first path."""
    found: dict[int, _Found] = {}

    def visit(node: Any, path: tuple[str, ...], around: tuple[Any, ...]) -> None:
        if any(node is outer for outer in around):
            return  # a cycle; Flax says what is wrong with it
        around = (*around, node)
        if isinstance(node, nnx.Module):
            this = found.setdefault(id(node), _Found(node))
            this.paths.append("/".join(path))
            this.kinds += [type(outer) for outer in around if isinstance(outer, nnx.Module)]
        for key, child in _children(node):
            visit(child, (*path, key), around)

    visit(model, (), ())
    return list(found.values())


def _children(node: Any) -> list[tuple[str, Any]]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if all(child is not node for _, child in pairs):
        return [(jax.tree_util.keystr(key, simple=True), child) for key, child in pairs]
    # No JAX container: an array, a constant, or a module that was declared with pytree=False.
    return list(vars(node).items()) if isinstance(node, nnx.Module) else []


def _check_rules(rules: Rules[Recipe], layers: list[_Found], modules: list[_Found]) -> None:
    """A recipe must reach a layer; None may stand for what would not be quantized anyway."""
    wanted = Rules([(key, value) for key, value in rules.rules if value is not None])
    others = [found for found in modules if not found.has_hook]
    for part, among in ((wanted, layers), (rules, layers + others)):
        part.check_used("wrap", [f.paths for f in among], [f.kinds for f in among])


def _attributes(found: _Found, recipe: Recipe) -> dict[str, Any]:
    """What is to be set on a layer; ValueError where that would discard something."""
    attributes: dict[str, Any] = {"promote_dtype": keep_kernel_dtype}
    for kind, (attribute, original, quantized) in _HOOKS.items():
        if isinstance(found.module, kind):
            _check_attribute(found, attribute, (original, None), quantized)
            attributes[attribute] = quantized(recipe)
    _check_attribute(found, "promote_dtype", (dtypes.promote_dtype, keep_kernel_dtype))
    if isinstance(found.module, nnx.LinearGeneral):
        _check_attribute(found, "dot_general_cls", (None,))
    return attributes


def _check_attribute(
    found: _Found, attribute: str, replaceable: tuple[Any, ...], ours: type | tuple[()] = ()
) -> None:
    value = getattr(found.module, attribute)
    if not (any(value is known for known in replaceable) or isinstance(value, ours)):
        raise ValueError(
            f"wrap: {found.shown}: {type(found.module).__name__}.{attribute} is {value!r}, "
            "expected Flax's own; wrapping would discard it. Set it back first, e.g. with "
            "nnx.with_attributes, or leave the layer alone by a rule"
        )
