"""`wrap`: an nnx model whose products are quantized, made by attributes and by subclasses."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx.nn import dtypes
from jax import lax

from qtoolkit.formats import Rules
from qtoolkit.nnx._products import (
    Attention,
    ConvGeneralDilated,
    DotGeneral,
    Einsum,
    StatefulProducts,
    keep_kernel_dtype,
)
from qtoolkit.nnx._report import check_strict
from qtoolkit.nnx._rewriting import leave, original_class, product_methods, rewriting_class
from qtoolkit.nnx._state import ProductState
from qtoolkit.products import Recipe
from qtoolkit.products.internal import Site, check_recipe
from qtoolkit.scaling import QArray

Model = TypeVar("Model", bound=nnx.Module)

_ANYTHING: Any = object()
# For each layer with a hook: its attribute, Flax's own value of it, ours, the products it computes.
_HOOKS: dict[type[nnx.Module], tuple[str, Any, Any, int]] = {
    nnx.Linear: ("dot_general", lax.dot_general, DotGeneral, 1),
    nnx.LinearGeneral: ("dot_general", None, DotGeneral, 1),
    nnx.Einsum: ("einsum_op", jnp.einsum, Einsum, 1),
    nnx.Conv: ("conv_general_dilated", lax.conv_general_dilated, ConvGeneralDilated, 1),
    nnx.MultiHeadAttention: ("attention_fn", _ANYTHING, Attention, 2),
}
# Flax's own layers without a hook, and how many products they compute.
_REWRITTEN: dict[type[nnx.Module], int] = {nnx.Embed: 1, nnx.ConvTranspose: 1, nnx.LoRA: 2}


def wrap(
    model: Model,
    recipe: Recipe | Rules[Recipe] | None = None,
    *,
    strict: Sequence[Any] | None = None,
) -> Model:
    """A model like `model` whose matrix products and convolutions are quantized by `recipe`.

    Reached are `nnx.Linear`, `LinearGeneral`, `Einsum` and `Conv` by their attributes for products;
    the two products of `MultiHeadAttention`; and the modules that compute products by themselves,
    Flax's (`Embed.attend`, `ConvTranspose`, `LoRA`) and those of one's own (`x @ self.kernel`,
    `jnp.einsum`): these get a subclass of the same name, whose methods are traced and run with
    quantized products; each eager call traces them anew, so call them under `nnx.jit`. `report`
    lists every product of a model and what became of it.

    Two activations, such as queries and keys, are both rounded as an input is. Normalization,
    softmax, look-up of embeddings and everything else stays as it is. Under `nnx.vmap` each example
    has scales of its own: `qtoolkit.dot_general`. Delayed scales are kept by the layers of Flax;
    products of one's own modules scale by their own magnitudes.

    Args:
      model: Any `nnx.Module`. It is not changed, and nothing outside it is patched: both models
        work side by side, eager and under `nnx.jit`.
      recipe: What to round; None for `Recipe()`, E4M3 forward and E5M2 for gradients. Or `Rules`
        of recipes, over paths such as "blocks/0/mlp" and types; None leaves a layer as it is, and
        so does a missing default. A type stands for layers of that type and for those inside
        modules of that type. A layer that is shared has several paths; a rule matches it where it
        matches one of them.
      strict: Inputs of the model: it is traced with them, and it is an error where a product is
        left that no rule leaves.

    Returns:
      A model of the same class, or a subclass of the same name. Parameters are shared, their paths
      unchanged: training one trains the other, and checkpoints of parameters fit both.

    Raises:
      TypeError: `model` is no `nnx.Module`, or `recipe` neither a `Recipe` nor `Rules` of them; a
        kernel of float64, of 8 bits, or a `QArray`.
      ValueError: No layer is quantized; a rule matches no layer (one with None: no module); a layer
        has a product of the user's own in the place where ours would go, and the message names its
        path; or, with `strict`, a product is left.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"wrap: model has type {type(model).__name__}, expected an nnx.Module{_hint(model)}"
        )
    rules = _as_rules(recipe)
    modules = _modules(model)
    layers = [found for found in modules if found.has_products]
    if not layers:
        kinds = ", ".join(f"nnx.{kind.__name__}" for kind in (*_HOOKS, *_REWRITTEN))
        raise ValueError(
            f"wrap: {type(model).__name__} has no layer to quantize, expected {kinds} or a module "
            "whose methods compute a product"
        )
    _check_rules(rules, layers, modules)
    changes: dict[str, tuple[_Found, Recipe]] = {}
    left: set[str] = set()
    for found in layers:
        chosen = rules.lookup(found.paths, found.kinds)
        if chosen is not None:
            _check_kernels(found)
            changes.update(dict.fromkeys(found.paths, (found, chosen)))
        else:
            left.update(found.paths)
    if not changes:
        raise ValueError(
            f"wrap: the rules leave every layer of {type(model).__name__} as it is, expected a "
            f"recipe for one or more, e.g. for {layers[0].shown}"
        )

    def inject(path: tuple[Any, ...], node: Any) -> Any:
        shown = "/".join(map(str, path))
        change = changes.get(shown)
        if change is not None and isinstance(node, nnx.Module):
            attach(node, change[1], change[0])
        elif shown in left:  # so that a module around it leaves its products, too
            leave(node, shown)
        return node

    wrapped = nnx.recursive_map(inject, model, graph=True)  # a copy that shares the variables
    if strict is not None:
        check_strict(wrapped, rules, strict)
    return wrapped


def attach(layer: Any, recipe: Recipe, found: "_Found | None" = None) -> None:
    """Gives one layer its quantized products."""
    found = _Found(layer, [""]) if found is None else found
    site = Site(recipe, found.paths[0])
    for kind, (attribute, original, made, count) in _HOOKS.items():
        if not isinstance(layer, kind):
            continue
        arguments = [site]
        if original is _ANYTHING:
            arguments.append(_original_attention(getattr(layer, attribute)))
        else:
            _check_attribute(found, attribute, (original, None), (made, StatefulProducts))
        setattr(layer, attribute, _stateful(made(*arguments), layer, recipe, count, site))
    if isinstance(layer, _KERNEL_HOOKS):
        _check_attribute(found, "promote_dtype", (dtypes.promote_dtype, keep_kernel_dtype))
        layer.promote_dtype = keep_kernel_dtype
    if isinstance(layer, nnx.LinearGeneral):
        _check_attribute(found, "dot_general_cls", (None,))
    methods = product_methods(original_class(type(layer)))
    if methods:
        layer.__class__ = rewriting_class(original_class(type(layer)), methods)
        layer.qtoolkit_site = site
        count = next((n for kind, n in _REWRITTEN.items() if isinstance(layer, kind)), 0)
        if count and (recipe.is_delayed or recipe.is_stochastic):
            layer.qtoolkit_products = nnx.List(_states(layer, recipe, count, site))


_KERNEL_HOOKS: Any = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)


def _stateful(call: Any, layer: Any, recipe: Recipe, count: int, site: Site) -> Any:
    if not (recipe.is_delayed or recipe.is_stochastic):
        return call
    return nnx.data(StatefulProducts(call, _states(layer, recipe, count, site)))


def _states(layer: Any, recipe: Recipe, count: int, site: Site) -> list[ProductState]:
    lead = _stacked(layer)
    return [ProductState(recipe, lead, f"{site.path}:{i}") for i in range(count)]


def _stacked(layer: Any) -> tuple[int, ...]:
    """The leading axes of a layer's kernel that `nnx.vmap` added."""
    if isinstance(layer, nnx.MultiHeadAttention):
        return _stacked(layer.query)
    if isinstance(layer, nnx.Embed):
        return tuple(layer.embedding.shape[:-2])
    if isinstance(layer, nnx.LoRA):
        return tuple(layer.lora_a.shape[:-2])
    shape = tuple(layer.kernel.shape)
    if isinstance(layer, nnx.Conv | nnx.ConvTranspose | nnx.Einsum):
        rank = len(layer.kernel_shape)
    elif isinstance(layer, nnx.LinearGeneral):
        batch = len(layer.batch_axis)
        rank = batch + len(_tuple(layer.in_features)) + len(_tuple(layer.out_features))
    else:
        rank = 2
    return shape[: len(shape) - rank]


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,)


def _original_attention(function: Any) -> Any:
    """The attention function under one of ours, if it is one."""
    if isinstance(function, StatefulProducts):
        function = function.call
    return function.original if isinstance(function, Attention) else function


def _as_rules(recipe: Any) -> Rules[Recipe]:
    if isinstance(recipe, Rules):
        return recipe.map(functools.partial(check_recipe, "wrap"))
    return Rules((), default=Recipe() if recipe is None else check_recipe("wrap", recipe))


def _hint(model: Any) -> str:
    if isinstance(model, linen.Module):
        return "; use qtoolkit.linen.wrap"
    name = model.__name__ if isinstance(model, type) else "MLP"
    return f"; write qtoolkit.nnx.wrap({name}(..., rngs=nnx.Rngs(0)), recipe)"


@dataclasses.dataclass
class _Found:
    """A module of a model, and all ways that lead to it."""

    module: nnx.Module
    paths: list[str] = dataclasses.field(default_factory=list)
    kinds: list[type] = dataclasses.field(default_factory=list)  # its own, of those around it

    @property
    def has_products(self) -> bool:
        is_layer = isinstance(self.module, tuple(_HOOKS))
        return is_layer or bool(product_methods(original_class(type(self.module))))

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
        if isinstance(node, StatefulProducts | ProductState):
            return  # of a model that was wrapped before
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
    others = [found for found in modules if not found.has_products]
    for part, among in ((wanted, layers), (rules, layers + others)):
        part.check_used("wrap", [f.paths for f in among], [f.kinds for f in among])


def _check_kernels(found: _Found) -> None:
    """The dtypes of a layer's own parameters."""
    for name, value in vars(found.module).items():
        if not isinstance(value, nnx.Param):
            continue
        raw = value.get_value() if hasattr(value, "get_value") else value.value
        where = f"wrap: {found.shown}: {type(found.module).__name__}.{name}"
        if isinstance(raw, QArray):
            raise TypeError(
                f"{where} is a QArray, expected an array; parameters stay wide in training: wrap "
                "the model first, or dequantize() them"
            )
        dtype = getattr(raw, "dtype", None)
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        if is_float and jnp.finfo(dtype).bits not in (16, 32):
            raise TypeError(
                f"{where} has dtype {dtype}, expected float32, float16 or bfloat16; create the "
                "layer with another param_dtype, or leave it alone by a rule"
            )


def _check_attribute(
    found: _Found, attribute: str, replaceable: tuple[Any, ...], ours: Any = ()
) -> None:
    value = getattr(found.module, attribute)
    if not (any(value is known for known in replaceable) or isinstance(value, ours)):
        raise ValueError(
            f"wrap: {found.shown}: {type(found.module).__name__}.{attribute} is {value!r}, "
            "expected Flax's own; wrapping would discard it. Set it back first, e.g. with "
            "nnx.with_attributes, or leave the layer alone by a rule"
        )
