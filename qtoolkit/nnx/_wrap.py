"""`wrap`: an nnx model whose matmuls are quantized, made by subclasses of the same name."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from flax import nnx

from qtoolkit.formats import Rules
from qtoolkit.nnx._cache import narrow_cache
from qtoolkit.nnx._call import Bound, bound_function, call_model
from qtoolkit.nnx._classes import become, set_attribute, set_site
from qtoolkit.nnx._function import PRODUCTS, Site, site_of, sites_in
from qtoolkit.nnx._modules import (
    LAYERS,
    FoundModule,
    check_excluded,
    check_parameters,
    is_of_flax,
    matmuls_of_layer,
    modules_of,
    stacked,
)
from qtoolkit.nnx._report import check_module, report
from qtoolkit.nnx._state import Products, ProductState, product_states
from qtoolkit.post_training.internal import not_wrapped
from qtoolkit.products import KVCache, Recipe
from qtoolkit.products.internal import (
    FirstLast,
    KVCacheLike,
    Module,
    Parameter,
    Quantizing,
    cache_format,
    check_all_quantized,
    check_rules,
    kernels_as_modules,
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
    kv_cache: KVCacheLike | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] | Callable[..., Any] | None = None,
) -> Model:
    """A model like `model` whose matmuls and convolutions are quantized by `recipe`.

    Modules get a subclass of the same name. A call of the model is traced to a program, as under
    `nnx.jit`, and the program is run with its matmuls computed by the recipe: those of Flax's
    layers (`nnx.Linear`, `LinearGeneral`, `Einsum`, `Conv`, `ConvTranspose`, `LoRA`,
    `Embed.attend`, the two matmuls of `MultiHeadAttention`) and of your own modules
    (`x @ self.kernel`, `jnp.einsum`), also in `jit`, `scan`, `while_loop`, `cond`, `remat` and
    `jax.shard_map`. Those in a `custom_vjp` or `custom_jvp`, and in derivatives that the model
    itself takes, stay as they are. `report` lists every matmul and whether it is quantized.

    A matmul belongs to the module that owns its kernel, whichever module computes it. Two
    activations, such as queries and keys, belong to the module that runs, and both are rounded as
    an input is. Look-ups of embeddings are rounded where a recipe has `lookups=True`.
    Normalization, softmax and everything else stays as it is.
    Under `nnx.vmap` inside of the model the examples share a scale, as in one matmul of them all.

    An eager call is compiled once for each shape, as by `nnx.jit`: what a function closes over
    is that of the first call. So `__call__` cannot branch on the numbers of arrays, and raises
    where it does; another method then runs step by step, and only the modules that it calls are
    quantized. A method must not return a generator or a function of its arrays.
    Under `jax.disable_jit()`, to debug, all of these run module by module.

    Kernels keep histories for delayed scales, keys for stochastic rounding, and learned scales.
    Which matmuls of two activations there are only a trace can tell, and which kernels are used
    several times, so that each use has scales of its own: these matmuls keep the same if `wrap` is
    given `inputs` or `strict`. If not, they use current scales, as a warning says when they are
    differentiated, equal numbers are rounded equally in every step, and a matmul with a learned
    scale raises when it is called. So it is where Python takes a path with other uses of a kernel.

    Args:
      model: Any `nnx.Module`. It is not changed, and nothing outside it is patched: both models
        work side by side, eager and under `nnx.jit`.
      recipe: What to round; `Recipe()` is E4M3 forward and E5M2 for gradients. Or a policy
        of `qtoolkit.policies`. Or `Rules` of recipes, over paths such as "blocks/0/mlp" and types;
        None excludes a layer, and so does a missing default. A type means layers of that type and
        layers inside of modules of that type. A layer that is shared has several paths; a rule has
        to match one of them. A rule may also name a parameter with two axes or more:
        `{"moe/router_weights": None, "moe": recipe}`.
      strict: Inputs of the model, to trace it with: `(x, y)`, or by their names `{"x": x, "y": y}`;
        or a function of the wrapped model, `lambda model: loss(model, batch)`. Raises if a matmul
        is not quantized though no rule says so.
      inputs: The same, but nothing raises: matmuls that only a trace finds then keep state, too.
      kv_cache: The format of `MultiHeadAttention`'s KV cache: "e4m3fn", with a scale for each token
        and head, or a format with blocks along the features; a pair of them, for keys and values;
        or a `qtoolkit.products.KVCache`, which can also rotate. Each token is rounded once, when it
        is written; steps compute with the dequantized cache. The wrapped model then has caches of
        its own.

    Returns:
      A model of subclasses of the same names. Parameters are shared, their paths
      unchanged: training one trains the other, and checkpoints of parameters fit both. A model that
      is wrapped already gets the new recipe, and a layer of it is plain again if a rule excludes
      it. It then keeps, as a copy: histories, if the number of steps is the same; calibrated
      scales, if the operand is the same; and the count of steps.
      Learned scales are shared if the operand is the same. All other state starts anew. A part that
      was wrapped by itself, with another recipe or before the whole, keeps its recipe, and so does
      `Fp8Linear`; rules do not reach it. To give it another one, wrap the part again.

    Raises:
      TypeError: `model` is no `nnx.Module`, or `recipe` neither a `Recipe` nor `Rules` of them; a
        kernel of a Flax layer of float64 or 8 bits, or a `QArray`; `strict` is neither inputs nor
        a mapping.
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
    given = strict if inputs is None else inputs
    if given is not None and not callable(given):
        strict_inputs(given, "strict" if inputs is None else "inputs")
    if isinstance(recipe, FirstLast):
        model = rewired("wrap", model, training_rules(recipe.recipe), None, keeps_parts=True)
        recipe = recipe.rules_for(given, functools.partial(_kernels_of, model))
    wrapped = rewired("wrap", model, training_rules(recipe), kv_cache, keeps_parts=True)
    if given is not None:
        keep_traced("wrap", wrapped, given)
    if strict is not None:
        if callable(strict):
            found = report(strict, wrapped)
        else:
            args, options = strict_inputs(strict)
            found = report(wrapped, *args, **options)
        check_all_quantized(type(wrapped).__name__, found)
    return wrapped


def _kernels_of(wrapped: Any, given: Any) -> list[str]:
    call = traced_call("wrap", wrapped, given)
    paths, quantizing = call.traced.program(call.leaves).paths_of_kernels, call.traced.quantizing()
    return [path for path in paths if quantizing.module_at(path).rules is None]


def rewired(
    where: str,
    model: Any,
    rules: Rules[Recipe] | None,
    kv_cache: KVCacheLike | None,
    *,
    keeps_parts: bool = False,
) -> Any:
    """A copy of a model that shares its variables and computes by `rules`; None: by its own.

    Args:
      where: The caller: "wrap", which refuses stored kernels, or "quantize".
      keeps_parts: Whether parts that were wrapped by themselves stay as they are.
    """
    check_module(where, model)
    cache = None if kv_cache is None else cache_format(where, kv_cache)
    modules = modules_of(model)
    if keeps_parts:
        modules = _without_parts(where, model, modules, rules)
    _check_layers(where, model, modules, rules, cache)
    found = {path: one for one in modules for path in one.paths}

    def inject(path: tuple[Any, ...], node: Any) -> Any:
        one = found.get("/".join(map(str, path)))
        if one is not None and isinstance(node, nnx.Module) and rules is not None:
            before = product_states(node)
            become(node)
            paths, kinds = tuple(one.paths), tuple(dict.fromkeys(one.kinds))
            set_site(node, Site(paths, kinds, rules))
            keep(node, {}, before)
        return node

    copied = nnx.recursive_map(inject, model, graph=True)
    if cache is not None:
        for one in modules_of(copied):
            if isinstance(one.module, nnx.MultiHeadAttention):
                become(one.module, cache)
                narrow_cache(one.module, cache)
    return copied


def _without_parts(
    where: str, model: nnx.Module, modules: "list[FoundModule]", rules: Rules[Recipe] | None
) -> "list[FoundModule]":
    """The modules, without the parts that were wrapped by themselves and not with the model."""
    whole = site_of(model)
    known = (rules, None if whole is None else whole.rules)
    sites = [(one, site_of(one.module)) for one in modules]
    own = [one for one, site in sites if site is None or site.rules in known]
    if len(own) < len(modules) and not any(one.has_products for one in own):
        raise ValueError(
            f"{where}: all layers of {type(model).__name__} are in parts that were wrapped by "
            "themselves, which keep their recipes, expected a layer outside of them; wrap these "
            "parts by the new recipe"
        )
    return own


def _check_layers(
    where: str,
    model: nnx.Module,
    modules: "list[FoundModule]",
    rules: Rules[Recipe] | None,
    cache: KVCache | None,
) -> None:
    """Raises if nothing matches what the user asked for, or a layer cannot be quantized."""
    name = type(model).__name__
    if cache and not any(isinstance(one.module, nnx.MultiHeadAttention) for one in modules):
        raise ValueError(
            f"{where}: kv_cache is given for {name}, which has no nnx.MultiHeadAttention, "
            "expected one; omit kv_cache"
        )
    layers = [one for one in modules if one.has_products]
    if not layers:
        kinds = ", ".join(f"nnx.{kind.__name__}" for kind in LAYERS)
        raise ValueError(
            f"{where}: {name} has no layer to quantize, expected {kinds} or a module of your own "
            "that computes a matmul"
        )
    if rules is None:
        if all(site_of(one.module) is None for one in layers):
            raise not_wrapped(name)
        return
    named = [one for one in modules if not isinstance(one.module, nnx.List | nnx.Dict)]
    matched = [one.as_matched() for one in named]
    for one in named:
        matched += kernels_as_modules(one.as_matched(), one.kernels)
    check_rules(where, rules, matched)
    quantized = False
    for one in layers:
        quantizing = Quantizing(rules, {"": Module(tuple(one.paths), tuple(one.kinds))})
        parameters = (Parameter("", name) for name in one.kernels)
        recipes = [quantizing.of_module(""), *(quantizing.by_rules("", x) for x in parameters)]
        if any(recipe is not None for recipe in recipes):
            check_parameters(where, one)
            quantized = True
        else:
            check_excluded(where, one)
    if not quantized:
        raise ValueError(
            f"{where}: the rules exclude every layer of {name}, expected a recipe for one or more, "
            f"e.g. for {layers[0].shown}"
        )


def keep(
    module: Any,
    traced: Mapping[str, tuple[Recipe, tuple[int, ...]]],
    before: Mapping[str, ProductState],
    *,
    is_traced: bool = False,
) -> None:
    """Gives a module the states of its matmuls: those of its kernels, and those that were traced.

    Args:
      traced: Matmuls of a program, with their recipes and the leading axes of a stack.
      before: The states that it had, from which the new ones take over what is still valid.
      is_traced: Whether `traced` has all.
    """
    site = site_of(module)
    assert site is not None
    known = {} if is_traced else dict(_known_matmuls(module, site))
    placed = {name.split("@")[0] for name in traced if "@" in name}  # kernels used several times
    wanted = {name: pair for name, pair in known.items() if name not in placed} | dict(traced)
    wanted = {name: pair for name, pair in wanted.items() if pair[0].keeps_state}
    states = {
        name: ProductState(recipe, lead, f"{site.path}:{name}")
        for name, (recipe, lead) in wanted.items()
    }
    for name, state in states.items():
        if name in before:
            state.take_over(before[name])
    if PRODUCTS in vars(module):
        delattr(module, PRODUCTS)
    # `nnx.bridge.ToNNX` takes every attribute for a variable of linen.
    if states and not isinstance(module, nnx.bridge.ToNNX):
        set_attribute(module, PRODUCTS, Products(states))


def _known_matmuls(module: Any, site: Site) -> Iterator[tuple[str, tuple[Recipe, Any]]]:
    """The matmuls of a module that are known without a trace: its kernels, attention's two."""
    of_flax = names = matmuls_of_layer(module)
    if not names and not is_of_flax(module):
        names = tuple(FoundModule(module).kernels)
    quantizing = quantizing_of(site)
    for name in names:
        parameter = None if name.isdigit() else Parameter(site.path, name)
        recipe = quantizing.by_rules(site.path, parameter)
        if recipe is not None:
            yield name, (recipe, stacked(module) if names is of_flax else _stack_of(module, name))


def _stack_of(module: Any, name: str) -> tuple[int, ...]:
    """The leading axis of a stack of a user's modules, as `nnx.vmap` makes it; () if it is none.

    Nobody knows without a trace. If all parameters of the module begin with the same axis, and the
    kernel has two more, it is taken for one. A matmul with a whole stack of states uses the
    largest, so nothing is wrong if it is none.
    """
    params = (x.get_value() for x in vars(module).values() if isinstance(x, nnx.Param))
    shapes = [getattr(x, "shape", ()) for x in params]
    kernel = getattr(module, name).get_value().shape
    is_stack = len(kernel) > 2 and all(shape[:1] == kernel[:1] for shape in shapes)
    return tuple(kernel[:1]) if is_stack else ()


def quantizing_of(site: Site) -> Quantizing:
    """By what the matmuls of a module are computed."""
    return Quantizing(site.rules, {site.path: Module(site.paths, site.kinds)})


def keep_traced(where: str, wrapped: Any, given: Any) -> None:
    """Gives matmuls in modules of the user what they keep, if a call with `given` runs them."""
    call = traced_call(where, wrapped, given)
    multiply, found = call.traced.quantizing(), dict[str, dict[str, Any]]()
    matmuls = call.traced.program(call.leaves).matmuls
    stacks = {matmul.path: matmul.stack for matmul in matmuls if matmul.stack}
    for matmul in matmuls:
        recipe = multiply.recipe_of(matmul)
        if recipe is not None:
            # Two activations in a stack of modules are told apart as its kernels are.
            inner = (lead for path, lead in stacks.items() if _is_in(path, matmul.path))
            stack = next(inner, ()) if matmul.parameter is None else matmul.stack
            found.setdefault(matmul.path, {})[matmul.name] = recipe, stack
    for site, module in sites_in(wrapped):
        if site.path in found:
            keep(module, found[site.path], product_states(module))


def _is_in(path: str, module: str) -> bool:
    return not module or f"{path}/".startswith(f"{module}/")


def traced_call(where: str, wrapped: Any, given: Any) -> Bound:
    """A call of a model with what `wrap(inputs=)` was given."""
    if callable(given):
        return bound_function(given, wrapped, (), {})
    args, options = strict_inputs(given, "inputs", where)
    method = options.pop("method", "__call__")  # as `report` takes it
    return bound_function(functools.partial(call_model, method=method), wrapped, args, options)


def quantize_alone(layer: Any, recipe: Recipe) -> None:
    """Lets a layer that is being made compute by a recipe, whatever model it will be part of."""
    become(layer)
    set_site(layer, Site(("",), (type(layer),), Rules([], default=recipe)))
    keep(layer, {}, {})
