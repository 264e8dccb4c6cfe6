"""`wrap`: an nnx model whose matmuls are quantized, made by subclasses of the same name."""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from qtoolkit.formats import BlockFormat, Rules, SpecLike
from qtoolkit.nnx._cache import narrow_cache
from qtoolkit.nnx._modules import (
    FoundModule,
    check_excluded,
    check_parameters,
    modules_of,
    own_parameters,
)
from qtoolkit.nnx._report import check_module, report, site_of
from qtoolkit.nnx._rewriting import (
    LAYERS,
    PRODUCTS,
    adapters,
    become,
    carry,
    follow,
    is_left,
    layer_of,
    leave,
    made_of,
    methods_of,
    name_of,
    original_class,
    product_states,
)
from qtoolkit.nnx._state import Products, ProductState
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    Batch,
    FirstLast,
    LayerRecipe,
    Place,
    cache_format,
    check_all_quantized,
    check_rules,
    kernels_as_modules,
    kernels_in,
    not_wrapped,
    noted_kernels,
    recipes_of,
    strict_inputs,
    training_rules,
)

Model = TypeVar("Model", bound=nnx.Module)
_DEFAULT = Recipe()


def wrap(
    model: Model,
    recipe: Recipe | Rules[Recipe] | FirstLast = _DEFAULT,
    *,
    strict: Sequence[Any] | Mapping[str, Any] | Callable[..., Any] | None = None,
    kv_cache: SpecLike | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] | Callable[..., Any] | None = None,
) -> Model:
    """A model like `model` whose matmuls and convolutions are quantized by `recipe`.

    It quantizes Flax's layers (`nnx.Linear`, `LinearGeneral`, `Einsum`, `Conv`, `ConvTranspose`,
    `LoRA`, `Embed.attend`, the two matmuls of `MultiHeadAttention`) and modules that compute
    matmuls by themselves (`x @ self.kernel`, `jnp.einsum`). They get a subclass of the same name.
    While one of its methods runs, JAX hands every operation to a trace of ours, as it does under
    `jax.vmap`, which computes the matmuls by the recipe: also those in `scan`, `cond`, `remat` and
    `jax.shard_map`, but not those in a `custom_vjp` or `custom_jvp`. `report` lists every matmul
    of a model and whether it is quantized.

    Two activations, such as queries and keys, are both rounded as an input is. So is a parameter
    that a function outside of the model passes as an array: pass the Variable. Those of
    asynchronous generators are quantized only where a method with other matmuls runs them.
    Normalization, softmax, look-up of embeddings and everything else stays as it is. Under
    `nnx.vmap` each example has scales of its own, see `qtoolkit.dot_general`.

    Layers of Flax keep histories for delayed scales, keys for stochastic rounding, and learned
    scales. Which matmuls there are in your own modules only a trace can tell: they keep the same
    if `wrap` is given `inputs` or `strict`. If not, they use current scales, as a warning says
    when they are differentiated, equal numbers are rounded equally in every step, and a matmul with
    a learned scale raises when it is called.

    Args:
      model: Any `nnx.Module`. It is not changed, and nothing outside it is patched: both models
        work side by side, eager and under `nnx.jit`.
      recipe: What to round; `Recipe()` is E4M3 forward and E5M2 for gradients. Or a policy of
        `qtoolkit.policies`. Or `Rules` of recipes, over paths such as "blocks/0/mlp" and types;
        None excludes a layer, and so does a missing default. None for any other module
        excludes the matmuls that `wrap` does not see in what it calls, such as those of a linen
        module in `nnx.bridge.ToNNX`. A type means layers of that type and layers inside of modules
        of that type. A layer that is shared has several paths; a rule has to match one of them. A
        rule may also name a parameter with two axes or more:
        `{"moe/router_weights": None, "moe": recipe}`.
      strict: Inputs of the model, to trace it with: `(x, y)`, or by their names `{"x": x, "y": y}`;
        or a function of the wrapped model, `lambda model: loss(model, batch)`. Raises if a matmul
        is not quantized though no rule says so.
      inputs: The same, but nothing raises: matmuls in your own modules then keep state, too.
      kv_cache: The format of `MultiHeadAttention`'s KV cache: "e4m3fn", with a scale for each token
        and head, or a format with blocks along the features. Each token is rounded once, when it is
        written; steps compute with the dequantized cache. The wrapped model then has caches of its
        own.

    Returns:
      A model of the same class, or a subclass of the same name. Parameters are shared, their paths
      unchanged: training one trains the other, and checkpoints of parameters fit both. A layer that
      is wrapped already gets the new recipe, or is a plain layer again if a rule excludes it. It
      then keeps, as a copy: histories, if the number of steps is the same; calibrated scales, if
      the operand is the same (not in your own modules: freeze those last); and the count of steps.
      Learned scales are shared if the operand is the same. All other state starts anew.

    Raises:
      TypeError: `model` is no `nnx.Module`, or `recipe` neither a `Recipe` nor `Rules` of them; a
        kernel of float64, of 8 bits, or a `QArray`; `strict` is neither inputs nor a mapping.
      ValueError: `kv_cache` is given for a model without attention, has no negative numbers, or has
        scales that tokens share; no layer is quantized; a rule matches no layer (a rule with None:
        no module); or `strict` raises.

    Examples:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> model.kernel[...] = jnp.asarray([[448.0], [1.0]])
      >>> wrapped = qt.nnx.wrap(model, qt.recipes.te_current)
      >>> isinstance(wrapped, nnx.Linear), wrapped.kernel is model.kernel
      (True, True)
      >>> x = jnp.asarray([[0.3, 448.0]])
      >>> model(x), wrapped(x)  # 0.3 became 0.3125
      (Array([[582.4]], dtype=float32), Array([[588.]], dtype=float32))
    """
    if isinstance(recipe, FirstLast):
        plain = rewired("wrap", model, training_rules(recipe.recipe), None)
        given = strict if inputs is None else inputs
        recipe = recipe.rules_for(given, functools.partial(kernels_of, plain))
    wrapped = rewired("wrap", model, training_rules(recipe), kv_cache)
    given = strict if inputs is None else inputs
    if given is not None:
        if not callable(given):
            strict_inputs(given, "strict" if inputs is None else "inputs")
        _keep_all(wrapped, given)
    if strict is not None:
        if callable(strict):
            found = report(strict, wrapped)
        else:
            args, options = strict_inputs(strict)
            found = report(wrapped, *args, **options)
        check_all_quantized(type(wrapped).__name__, found)
    return wrapped


def _keep_all(wrapped: Any, given: Any) -> None:
    """Gives the matmuls in modules of the user what they keep, if a call with `given` runs them.

    Stacks of layers, as `nnx.vmap` makes them, are known by their kernels: these have leading axes
    that the kernels in the matmuls do not have.
    """
    modules = [found.module for found in modules_of(wrapped)]
    layers: list[tuple[Any, LayerRecipe]] = [
        (module, vars(module)["qtoolkit_site"])
        for module in modules
        if "qtoolkit_site" in vars(module)
    ]
    layers = [(layer, site) for layer, site in layers if site.recipe.keeps_state]
    if not layers:
        return
    kernels = kernels_of(wrapped, given)
    for layer, site in layers:
        shapes = {place.name: shape for place, shape in kernels.items() if place.path == site.path}
        own = {name: _lead(layer, name, shape) for name, shape in shapes.items() if shape}
        leads = {name: lead for name, lead in own.items() if lead is not None}
        lead = next(iter(leads.values()), ())
        names = {
            name: (site.recipe, leads.get(name, lead))
            if shape
            else (site.recipe.of_activations(), lead)
            for name, shape in shapes.items()
        }
        found = FoundModule(layer, [site.path])
        attach(layer, site.recipe, found, names=names, kernels=site.kernels)


def kernels_of(wrapped: Any, given: Any) -> dict[Place, tuple[int, ...] | None]:
    """The matmuls that run when a model is called with `given`: see `kernels_in`."""
    args, options = ((), {}) if callable(given) else strict_inputs(given)
    batch, (graph, state) = Batch.of((args, options)), nnx.split(wrapped)

    def run(state: Any, *args: Any, **options: Any) -> Any:
        model: Any = nnx.merge(graph, state, copy=True)
        if noted := noted_kernels():
            noted.paths |= {id(x.get_value()): path for path, x in own_parameters(model)}
        return given(model) if callable(given) else model(*args, **options)

    return kernels_in(batch.bound(run), state, batch.arrays)


def _lead(layer: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The leading axes of a parameter, "up" or "encode.up#2", of which matmuls take slices.

    None for what is no parameter of the layer but an argument.
    """
    parts = name.split("#")[0].split(".")
    for first in range(len(parts)):
        path = tuple(int(part) if part.isdigit() else part for part in parts[first:])
        for known, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
            if tuple(known) == path:
                whole = jnp.shape(variable.get_value())
                return tuple(whole[: len(whole) - len(shape)])
    return None


def rewired(where: str, model: Any, rules: Rules[Recipe] | None, kv_cache: SpecLike | None) -> Any:
    """A copy of a model that shares its variables and computes by `rules`; None: by its own.

    Args:
      where: The caller: "wrap", which refuses stored kernels, or "quantize".
    """
    check_module(where, model)
    cache = None if kv_cache is None else cache_format(where, kv_cache)
    modules = modules_of(model)
    layers = _checked_layers(where, model, modules, rules, cache)
    recipes = {} if rules is None else _recipes(where, model, rules, layers, modules)
    # Layers of Flax take no parameters as arguments, but a module of the user may get one from a
    # module around it, which must then be followed.
    of_user = [path for path, (f, recipe) in recipes.items() if recipe and not is_of_flax(f.module)]
    stateful = [path for path, (_, recipe) in recipes.items() if recipe and recipe.keeps_state]

    def inject(path: tuple[Any, ...], node: Any) -> Any:
        shown = "/".join(map(str, path))
        if not isinstance(node, nnx.Module):
            return node
        if rules is not None:  # what an earlier wrap has made of it
            become(node, methods=(), left=None, carries=False)
        if shown in recipes:
            found, recipe = recipes[shown]
            if recipe is not None:
                attach(node, recipe, found, kernels=found.recipes)
            else:  # the trace of a module around it then passes by its matmuls, too
                forget(node)
                leave(node, shown)
        if isinstance(node, nnx.SpectralNorm):
            # It estimates by matmuls with the kernel, in high precision: the trace of a module
            # around it would replace them. The layer in it has a trace of its own.
            leave(node, shown)
        start = f"{shown}/".lstrip("/")  # "" for the model itself, which is around all modules
        if not is_left(node) and any(f"{one}/".startswith(start) for one in of_user):
            follow(node)
        if not is_left(node) and any(f"{one}/".startswith(start) for one in stateful):
            carry(node)
        return node

    copied = nnx.recursive_map(inject, model, graph=True)
    if cache is not None:
        for found in modules_of(copied):
            if isinstance(found.module, nnx.MultiHeadAttention):
                become(found.module, cache=cache)
                narrow_cache(found.module, cache)
    return copied


def _checked_layers(
    where: str,
    model: nnx.Module,
    modules: "list[FoundModule]",
    rules: Rules[Recipe] | None,
    cache: BlockFormat | None,
) -> "list[FoundModule]":
    """The modules that compute matmuls; raises if nothing matches what the user asked for."""
    name = type(model).__name__
    if cache and not any(isinstance(found.module, nnx.MultiHeadAttention) for found in modules):
        raise ValueError(
            f"{where}: kv_cache={cache.name} for {name}, which has no nnx.MultiHeadAttention, "
            "expected one; omit kv_cache"
        )
    layers = [found for found in modules if found.has_products]
    if not layers:
        kinds = ", ".join(f"nnx.{kind.__name__}" for kind in LAYERS)
        raise ValueError(
            f"{where}: {name} has no layer to quantize, expected {kinds} or a module whose methods "
            "compute a matmul"
        )
    if rules is None and all(site_of(found.module) is None for found in layers):
        raise not_wrapped(name)
    return layers


def _recipes(
    where: str,
    model: nnx.Module,
    rules: Rules[Recipe],
    layers: "list[FoundModule]",
    modules: "list[FoundModule]",
) -> "dict[str, tuple[FoundModule, Recipe | None]]":
    """Maps each path to its module and its recipe by the rules; None: exclude it.

    Of modules that are no layers only those are there that the rules exclude. What they call may
    compute matmuls that `wrap` does not see: a linen module in `bridge.ToNNX`, for example. Lists
    and dicts compute nothing, and a rule for the path of one says nothing about what is in it.
    """
    others = [
        found
        for found in modules
        if not (found.has_products or isinstance(found.module, nnx.List | nnx.Dict))
    ]
    matched = [found.as_matched() for found in (*layers, *others)]
    for found in layers:
        matched += kernels_as_modules(found.as_matched(), found.kernels)
    check_rules(where, rules, matched)
    recipes: dict[str, tuple[FoundModule, Recipe | None]] = {}
    for found in layers:
        recipe, found.recipes = recipes_of(rules, found.paths, found.kinds, found.kernels)
        if recipe is not None:
            check_parameters(where, found)
        else:
            check_excluded(where, found)
        recipes.update(dict.fromkeys(found.paths, (found, recipe)))
    if all(recipe is None for _, recipe in recipes.values()):
        raise ValueError(
            f"{where}: the rules exclude every layer of {type(model).__name__}, expected a "
            f"recipe for one or more, e.g. for {layers[0].shown}"
        )
    for found in others:
        if rules.lookup(found.paths, found.kinds) is None:
            recipes.update(dict.fromkeys(found.paths, (found, None)))
    return recipes


def attach(
    layer: Any,
    recipe: Recipe,
    found: "FoundModule | None" = None,
    *,
    names: Mapping[str, Any] = types.MappingProxyType({}),
    kernels: Sequence[tuple[str, Recipe | None]] = (),
) -> None:
    """Gives one layer its quantized matmuls.

    Args:
      found: Its paths, for messages and reports; None: it is a model by itself.
      names: The names of matmuls in its methods that keep state, "up" and "encode.kernel", each
        with its recipe and the leading axes of a stack; None for those of the layer.
      kernels: Those of its parameters that have a recipe of their own.
    """
    found = FoundModule(layer, [""]) if found is None else found
    site, states = LayerRecipe(recipe, found.paths[0], tuple(kernels)), product_states(layer)
    forget(layer)
    methods = dict.fromkeys((*made_of(layer).methods, *methods_of(layer)))
    become(layer, methods=tuple(methods))
    layer.qtoolkit_site = site
    if any(one is not None and one.keeps_state for one in (recipe, *dict(kernels).values())):
        _keep(layer, recipe, site, names)
    for name, kept in product_states(layer).items():
        if name in states:
            kept.take_over(states[name])


def _keep(layer: Any, recipe: Recipe, site: LayerRecipe, names: Mapping[str, Any]) -> None:
    """Gives a layer the states of its matmuls."""
    kind = original_class(type(layer))
    entry = layer_of(kind)
    own = () if entry is None else entry[1]
    own += tuple(name_of(kind, "__call__", name) for name in adapters(layer))
    found = dict.fromkeys([*own, *(name for name in names if name != "dot")])
    if found:
        is_attention = isinstance(layer, nnx.MultiHeadAttention)  # of two matmuls of activations
        of_own = recipe.of_activations() if is_attention else recipe
        kinds = {
            name: (None if name in own else names.get(name)) or (of_own, stacked(layer))
            for name in found
        }
        for kernel, other in site.kernels:
            name = name_of(kind, "__call__", kernel)
            if other is not None and name in kinds:
                kinds[name] = other, kinds[name][1]
        states = {
            name: ProductState(recipe_of_matmul, lead, f"{site.path}:{name}")
            for name, (recipe_of_matmul, lead) in kinds.items()
        }
        setattr(layer, PRODUCTS, Products(states))


def forget(layer: Any) -> None:
    """Removes what an earlier wrap has given to a layer."""
    for name in ("qtoolkit_site", PRODUCTS, "qtoolkit_dot"):
        if name in vars(layer):
            delattr(layer, name)


def needs_no_scale(layer: Any) -> bool:
    """Whether a layer may be used without ever running a matmul: an `Embed` that only looks up.

    Its only matmul is `attend`. Any other layer that no batch reaches is an error.
    """
    return isinstance(layer, nnx.Embed)


def is_of_flax(layer: Any) -> bool:
    """Whether a layer is Flax's, which computes its matmuls whenever it is called."""
    return layer_of(type(layer)) is not None


def stacked(layer: Any) -> tuple[int, ...]:
    """The leading axes of a layer's kernel that `nnx.vmap` added."""
    kernel: Any
    match layer:
        case nnx.MultiHeadAttention():
            return stacked(layer.query)
        case nnx.Embed():
            kernel, rank = layer.embedding, 2
        case nnx.LoRA():
            kernel, rank = layer.lora_a, 2
        case nnx.Linear():
            kernel, rank = layer.kernel, 2
        case nnx.LinearGeneral():
            kernel, axes = layer.kernel, (layer.batch_axis, layer.in_features, layer.out_features)
            rank = sum(map(len, axes))
        case nnx.Einsum() | nnx.Conv() | nnx.ConvTranspose():
            kernel, rank = layer.kernel, len(layer.kernel_shape)
        case _:  # a user's module
            return ()
    return tuple(kernel.shape[: len(kernel.shape) - rank])
