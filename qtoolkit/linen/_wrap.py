"""`wrap`: a linen module whose matmuls are quantized, made by a subclass of the same name."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from flax import linen as nn
from flax.core.scope import in_filter

from qtoolkit.formats import Rules
from qtoolkit.linen._apply import Applied, applied, first_states, is_alone, static_filter
from qtoolkit.linen._call import entered, keeps_state, made
from qtoolkit.linen._function import Bound, found_modules
from qtoolkit.linen._report import check_strict, kernels_of
from qtoolkit.products import KVCache, Recipe
from qtoolkit.products.internal import (
    FirstLast,
    FoundModule,
    KVCacheLike,
    cache_format,
    check_rules,
    is_in_program,
    traced_with_axes,
    training_rules,
)

Model = TypeVar("Model", bound=nn.Module)
_DEFAULT = Recipe()

_FRAMEWORK = set(dir(nn.Module)) - {"__call__"}
_CHECKED = "qtoolkit_checked"  # an attribute: whether each rule has matched something


def wrap(
    module: Model,
    recipe: Recipe | Rules[Recipe] | FirstLast = _DEFAULT,
    *,
    strict: Sequence[Any] | Mapping[str, Any] | None = None,
    kv_cache: KVCacheLike | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
) -> Model:
    """A module like `module` whose matmuls and convolutions are quantized by `recipe`.

        wrapped = qtoolkit.linen.wrap(model)
        variables = wrapped.init(key, x)  # those of the model itself
        y = wrapped.apply(variables, x)

    It quantizes Flax's layers (`Dense`, `DenseGeneral`, `Einsum`, `Conv`, `ConvTranspose`,
    `Embed.attend`, attention with the matmuls of queries and keys and of scores and values, and
    recurrent cells), and modules whose methods compute matmuls by themselves (`x @ kernel`,
    `jnp.einsum`). A call of the module is traced once, as under `jax.jit`, and its matmuls are
    computed by the recipe: also those in `scan`, `cond`, `remat` and `jax.shard_map`, but not those
    in a `custom_vjp` or `custom_jvp`. An eager `apply` is compiled, too, for each shape of its
    inputs. What needs the numbers of an array in Python raises, as under `jax.jit`, and so does a
    method that returns a generator or a function of its arrays; under `jax.disable_jit()` both run,
    layer by layer. Lists and dictionaries that a method fills are filled. NumPy arrays
    that the module is called with become JAX arrays; those of integers and booleans do not where
    Python needs the numbers in them, for a shape or a mask. `report` lists every matmul and whether
    it is quantized.

    Two activations, such as queries and keys, are both rounded as an input is. A parameter that one
    module passes to another is a kernel there, too: rules and state name it by its path where it is
    made. Look-ups of embeddings are rounded where a recipe has `lookups=True`. Normalization,
    softmax and everything else stays as it is. Recipes with `Delayed` scaling or stochastic
    rounding keep state in the collection "qtoolkit", which `init` makes and `value_and_grad`
    updates. `Learned` scales are in the collection "qtoolkit_scales"; their first values come from
    `start_scales`. Each layer of an `nn.scan` has
    its own, along whatever axis its parameters are stacked. Random keys come from the rng
    collection "qtoolkit" if `apply` is given one, else from the state; without both they follow
    from the values that are rounded. Layers under `nn.jit`, `nn.vjp`, `nn.jvp` and
    `nn.value_and_grad` keep state as others do; the derivatives that the model takes itself are not
    quantized. Under `jax.vmap` and `nn.vmap` inside of the module the examples share one scale, as
    in the einsum that they stand for; under `jax.vmap` around it each example has its own.

    Args:
      module: Any `nn.Module` that is not bound. It is not changed, and nothing outside it is
        patched. Inside of `@nn.compact` make it with `parent=None`:
        `wrap(nn.Dense(8, parent=None))`.
      recipe: What to round; `Recipe()` is E4M3 forward and E5M2 for gradients. Or a policy
        of `qtoolkit.policies`. Or `Rules`
        of recipes, over paths such as "blocks_0/Dense_0", parameters with two axes or more such as
        "moe/router_weights", and types; None excludes a layer,
        and so does a missing default. A type means layers of that type and layers inside of modules
        of that type. Which layers there are is known only when the module runs: `init` and the
        first `apply` raise for a rule that matches nothing, unless they are given a `method`, and
        `report` names such rules.
      strict: Inputs of the module, to trace it with: `(x, y)`, or by their names
        `{"x": x, "y": y}`. Raises if a matmul is not quantized though no rule says so, if no
        matmul is quantized, or if a rule matches nothing.
      inputs: The same, for policies of `qtoolkit.policies` that need the order of the layers.
      kv_cache: The format of attention's KV cache, in the collection "cache": "e4m3fn", with a
        scale for each token and head, or a format with blocks along the features; a pair of them,
        for keys and values; or a `qtoolkit.products.KVCache`, which can also rotate. Each token is
        rounded once, when it is written; steps compute with the dequantized cache. `init` makes
        such a cache.

    Returns:
      A module of a subclass of the same name. Its variables are those of `module`, bit for bit, and
      either module accepts them; only the collections "qtoolkit" and "qtoolkit_scales" may be
      added. Equal modules wrapped by equal recipes are equal. A module that is wrapped already gets
      the new recipe; it accepts its old collection "qtoolkit" if the histories have the same number
      of steps, and raises if not. A module inside that was wrapped by itself, or is a `Fp8Dense`,
      keeps its recipe, and rules do not reach it. Quantized are the module's methods and all that
      they call. A submodule that is called from outside, `wrapped.bind(variables).layer(x)`, is
      not.

    Raises:
      TypeError: `module` is no `nn.Module`, or `recipe` neither a `Recipe` nor `Rules` of them; a
        rule for a class that is no module; `strict` is neither inputs nor a mapping. When the
        module runs: a parameter of float64 or of 8 bits.
      ValueError: `module` is bound; `kv_cache` has no negative numbers, or scales that tokens
        share; `strict` raises. In `init` and the first `apply`: a rule matches no layer (a rule
        with None: no module).

    Examples:
      >>> module = qt.linen.wrap(nn.Dense(1), qt.recipes.te_current)
      >>> variables = {"params": {"kernel": jnp.asarray([[448.0], [1.0]]), "bias": jnp.zeros(1)}}
      >>> x = jnp.asarray([[0.3, 448.0]])
      >>> nn.Dense(1).apply(variables, x), module.apply(variables, x)  # 0.3 became 0.3125
      (Array([[582.4]], dtype=float32), Array([[588.]], dtype=float32))
    """
    given: Any = module
    if not isinstance(given, nn.Module):
        name = given.__name__ if isinstance(given, type) else "MLP"
        hint = f"; write qtoolkit.linen.wrap({name}(...), recipe)"
        hint = "; use qtoolkit.nnx.wrap" if _is_nnx(given) else hint
        raise TypeError(
            f"wrap: module has type {type(given).__name__}, expected an instance of "
            f"flax.linen.Module{hint}"
        )
    if module.scope is not None:
        if not isinstance(module.parent, nn.Module):
            raise ValueError(
                f"wrap: {type(module).__name__} is bound to variables, expected one that is not; "
                "write module, variables = bound.unbind(), and wrap the module"
            )
        raise ValueError(
            f"wrap: {type(module).__name__} {module.name!r} is bound to the module around it, "
            f"expected one made with parent=None; write {type(module).__name__}(..., parent=None)"
        )
    if isinstance(recipe, FirstLast):
        plain = wrap(module, recipe.recipe)
        given_inputs = strict if inputs is None else inputs
        recipe = recipe.rules_for(given_inputs, functools.partial(kernels_of, plain))
    rules = _as_rules(recipe)
    kind: Any = type(module)
    cache = None if kv_cache is None else cache_format("wrap", kv_cache)
    kind = _wrapped_class(getattr(kind, "qtoolkit_original", kind), rules, cache)
    fields = {
        field.name: getattr(module, field.name)
        for field in dataclasses.fields(module)
        if field.init and field.name != "parent"
    }
    wrapped = kind(**fields)
    if strict is not None:
        check_strict(wrapped, strict)
    return wrapped


@functools.cache
def _wrapped_class(kind: Any, rules: Rules[Recipe], cache: KVCache | None) -> Any:
    """The subclass whose public methods run by `rules`."""
    body: dict[str, Any] = {name: entered(method) for name, method in _public_methods(kind).items()}
    body |= {
        "apply": _apply(kind),
        "init_with_output": _init(kind),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "qtoolkit_original": kind,
        "qtoolkit_rules": property(nn.nowrap(lambda _: rules)),
        "qtoolkit_cache": cache,
        _CHECKED: False,
        "__reduce_ex__": _reduced,
    }
    # Flax makes a dataclass of every subclass, and would replace the class's own methods by
    # generated ones: what its `__init__` sets would be gone.
    body |= {"__init__": kind.__init__, "__hash__": kind.__hash__, "__eq__": _equal_to(kind)}
    return type(kind.__name__, (kind,), body)


def _equal_to(kind: Any) -> Callable[..., bool]:
    """`__eq__` of the subclass: modules wrapped by other recipes, or not at all, are not equal."""
    return lambda self, other: type(other) is type(self) and kind.__eq__(self, other)


@nn.nowrap
def _reduced(module: Any, protocol: Any) -> Any:
    """How to pickle a wrapped module: as the original class, and the rules to wrap it again.

    The subclass has the name of the original, and `pickle` would find the original by that name.
    """
    reduced: Any = object.__reduce_ex__(module, max(2, protocol))
    _, _, *rest = reduced
    made_of = module.qtoolkit_original, module.qtoolkit_rules, module.qtoolkit_cache
    return _remade, made_of, *rest


def _remade(original: Any, rules: Rules[Recipe], cache: KVCache | None) -> Any:
    kind = _wrapped_class(original, rules, cache)
    return kind.__new__(kind)


def _public_methods(kind: Any) -> dict[str, Callable[..., Any]]:
    fields = {field.name for field in dataclasses.fields(kind)}
    found = {}
    for name in dir(kind):
        own = inspect.getattr_static(kind, name)
        is_public = name == "__call__" or not name.startswith("_")
        is_method = inspect.isfunction(own) and not hasattr(own, "nowrap")
        if is_public and is_method and name not in _FRAMEWORK | fields:
            found[name] = own
    return found


def _apply(kind: Any) -> Callable[..., Any]:
    """`apply` of the subclass: compiled if nothing else is, and with any `method` quantized."""

    @functools.wraps(kind.apply)
    def apply(
        self: Any,
        variables: Any,
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: Any = False,
        capture_intermediates: Any = False,
        **kwargs: Any,
    ) -> Any:
        run = _method(kind, self, method)
        call = Applied(kind.apply, self, run, static_filter(mutable), capture_intermediates)
        if is_in_program():
            return call(run, variables, rngs, args, kwargs)
        if method is None and self.qtoolkit_rules.rules and not getattr(self, _CHECKED):

            def plain(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                return call(run, variables, rngs, args, kwargs)

            _check_rules(self, plain, variables, (rngs, *args), kwargs)
        is_stable = isinstance(method, str | None) or run is getattr(kind, run.__name__, None)
        return applied(call, variables, rngs, args, kwargs, is_stable=is_stable)

    return nn.nowrap(apply)


_OPTIONS_OF_FLAX = ("mutable", "capture_intermediates")


def _init(kind: Any) -> Callable[..., Any]:
    """`init_with_output` of the subclass, which `init` calls."""

    @functools.wraps(kind.init_with_output)
    def init_with_output(
        self: Any, rngs: Any, *args: Any, method: Any = None, **options: Any
    ) -> Any:
        run = _method(kind, self, method)
        kwargs = {name: x for name, x in options.items() if name not in _OPTIONS_OF_FLAX}
        if options.get("capture_intermediates") or not is_alone((rngs, args, kwargs)):
            out = kind.init_with_output(self, rngs, *args, method=entered(run), **options)
        else:
            first = functools.partial(made, run)
            out = kind.init_with_output(self, rngs, *args, method=first, **options)
            if keeps_state(self.qtoolkit_rules):
                states = first_states(self, run, out[1], rngs, args, kwargs)
                kept = {
                    n: x for n, x in states.items() if in_filter(options.get("mutable", True), n)
                }
                out = out[0], type(out[1])({**out[1], **kept})
        is_checked = getattr(self, _CHECKED) or is_in_program()
        if method is None and self.qtoolkit_rules.rules and not is_checked:

            def plain(_: Any, *args: Any, **options: Any) -> Any:
                return kind.init_with_output(self, rngs, *args, method=run, **options)[0]

            _check_rules(self, plain, out[1], args, options)
        return out

    return nn.nowrap(init_with_output)


def _method(kind: Any, module: Any, method: Any) -> Callable[..., Any]:
    """What `apply` calls, as a function of the module.

    That may be `Model.encode` of the original class, a lambda, or the name of a private method or
    of a submodule; none of these is a method that the subclass has replaced.
    """
    if method is None or (isinstance(method, str) and method in _public_methods(kind)):
        method = getattr(kind, method or "__call__")
    if isinstance(method, str):
        getattr(module, method)
        return _named(method)
    unbound = method.__func__ if inspect.ismethod(method) else method
    return inspect.unwrap(unbound) if getattr(unbound, "__name__", "") == "entering" else unbound


def _check_rules(module: Any, call: Any, variables: Any, args: Any, kwargs: Any) -> None:
    """Raises if a rule matches nothing, until a call has passed.

    Which layers there are is known only now. With another `method` some of them may not run.
    """
    rules = module.qtoolkit_rules
    bound = Bound.of(call, variables, args, kwargs)
    matmuls = traced_with_axes(bound.traced, bound.leaves).matmuls
    ran = found_modules(bound.layers, rules, matmuls, variables)
    idle = _idle(variables, ran)
    if idle:  # their types are not known
        rules = Rules([(key, value) for key, value in rules.rules if isinstance(key, str)])
    check_rules("wrap", rules, [*ran, *idle])
    object.__setattr__(module, _CHECKED, True)


def _idle(variables: Any, ran: Sequence[FoundModule]) -> list[FoundModule]:
    """The modules with parameters that did not run, as an auxiliary head."""
    paths = {path for module in ran for path in module.paths}

    def found(node: Any, path: str) -> Iterator[FoundModule]:
        if isinstance(node, Mapping):
            if path not in paths:
                yield FoundModule([path], (), "", True)
            for name, child in node.items():
                yield from found(child, f"{path}/{name}".strip("/"))

    return list(found(variables.get("params"), "")) if isinstance(variables, Mapping) else []


@functools.lru_cache(maxsize=256)
def _named(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method


def _as_rules(recipe: Any) -> Rules[Recipe]:
    for key, _ in recipe.rules if isinstance(recipe, Rules) else ():
        if isinstance(key, type) and not issubclass(key, nn.Module):
            raise TypeError(
                f"wrap: rule {key.__name__} is a class of {key.__module__}, expected a subclass "
                "of flax.linen.Module: nothing else has matmuls"
            )
    return training_rules(recipe)


def _is_nnx(module: Any) -> bool:
    kinds = type(module).__mro__
    return any(kind.__module__.startswith("flax.nnx") for kind in kinds)
