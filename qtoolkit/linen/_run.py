"""One call of a wrapped module: an interceptor quantizes the matmuls of each layer in it."""

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.core import set_current_trace

from qtoolkit.casts.internal import FLOATS
from qtoolkit.formats import BlockFormat, Rules
from qtoolkit.linen._arguments import arguments_of, explain_reserved_name
from qtoolkit.linen._cache import narrow_cache
from qtoolkit.linen._kernels import noted_kernels
from qtoolkit.linen._parameters import (
    STORED,
    MethodCall,
    know_parameters,
    own_parameters,
    run_with_arrays,
)
from qtoolkit.linen._state import COLLECTION, SCALES, Kept
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    MODEL,
    ForwardState,
    LayerRecipe,
    LiftingTrace,
    Mark,
    Matmul,
    MatmulNames,
    MatmulTrace,
    Module,
    Multiply,
    Place,
    in_high_precision,
    kernels_as_modules,
    present_trace,
    quantizing_dot,
    recipes_of,
    replacing_matmuls,
    run_in,
    set_variable,
    started,
    state_after,
    unstarted,
    without_measuring,
)
from qtoolkit.scaling import QArray

# Flax's own layers that compute matmuls, and the methods that compute them. Attention computes two
# matmuls itself, besides those of its Dense layers. Other layers of Flax consist of these.
_LAYERS: dict[type[nn.Module], str] = {
    nn.Dense: "__call__",
    nn.DenseGeneral: "__call__",
    nn.Einsum: "__call__",
    nn.Conv: "__call__",
    nn.ConvTranspose: "__call__",
    nn.Embed: "attend",
    nn.MultiHeadDotProductAttention: "__call__",
    nn.OptimizedLSTMCell: "__call__",
}
_CACHING = nn.MultiHeadDotProductAttention
_ROOT = "self"  # the wrapped module


class Visited(dict[Rules[Recipe], dict[str, Module]]):
    """The modules that ran, for each of the rules by which they ran, by path."""

    def add(self, rules: Rules[Recipe], this: Module) -> None:
        (path,) = this.paths
        known = self.setdefault(rules, {}).get(path, this)
        kinds = tuple(dict.fromkeys((*known.kinds, *this.kinds)))
        has_products = known.has_products or this.has_products
        self[rules][path] = this._replace(kinds=kinds, has_products=has_products)

    def modules(self, rules: Rules[Recipe]) -> list[Module]:
        return list(self.get(rules, {}).values())


# jax.jit caches traces. This value is part of the cache key, so that `nn.jit` does not reuse the
# trace of a call with other rules.
_traced_for = jax.make_user_context(None)
_visited: contextvars.ContextVar[Visited | None] = contextvars.ContextVar("visited", default=None)
_active: contextvars.ContextVar["_Run | None"] = contextvars.ContextVar("run", default=None)


def visiting() -> AbstractContextManager[Visited]:
    """In this context the modules that run inside of wrapped ones are recorded."""
    return set_variable(_visited, Visited())


def is_visited() -> bool:
    return _visited.get() is not None


def run(
    module: nn.Module,
    rules: Rules[Recipe],
    method: Callable[..., Any],
    args: Any,
    kwargs: Any,
    cache: BlockFormat | None = None,
) -> Any:
    """`method(module, *args, **kwargs)` with the matmuls that `rules` give to its layers.

    Attention's cache is kept in the format `cache`. While the module is initialized no matmul is
    quantized; its state is put into the collection "qtoolkit", if that can be written.
    """
    active = _active.get()
    if module.scope is None or (active is not None and active.is_of(module, rules)):
        # Not bound, then Flax raises; or called by another method of this module.
        return method(module, *args, **kwargs)
    starting, visited = module.is_initializing(), _visited.get()
    keeps = cache is not None or any(map(moves_state, _recipes(rules)))
    args, kwargs = arguments_of(method, module, args, kwargs)
    if starting and not keeps and visited is None:
        return method(module, *args, **kwargs)
    kept, scales = (
        {} if starting else module.variables.get(name, {}) for name in (COLLECTION, SCALES)
    )
    rng = None
    is_stochastic = any(recipe.is_stochastic for recipe in _recipes(rules))
    if not starting and is_stochastic and module.has_rng(COLLECTION):
        rng = jax.random.key_data(module.make_rng(COLLECTION)).reshape(-1)[:2]
    this = _Run(rules, cache, type(module), module.path, starting, kept, scales, rng)
    this.is_mutable = not starting and module.is_mutable_collection(COLLECTION)
    intercepting = nn.intercept_methods(this.intercept)
    # Whoever records what runs needs a trace of his own: in one that exists nothing runs again.
    observed = None if visited is None and noted_kernels() is None else object()
    moves: dict[Any, Any] = {}
    lifting = set_current_trace(LiftingTrace(moves)) if this.is_mutable and keeps else nullcontext()
    key = rules, cache, starting, observed
    with set_variable(_active, this), intercepting, _traced_for(key), lifting:
        try:
            out = method(module, *args, **kwargs)
        except TypeError as error:
            explain_reserved_name(error)
            raise
    for (path, product), move in moves.items():
        before = {**kept[key_of(path)][product], **this.moved[path, product]}
        this.moved[path, product] = state_after(before, move)
    for (path, product), moved in this.moved.items():
        if moved:
            of_layer = module.variables[COLLECTION][key_of(path)]
            new = {**of_layer, product: {**of_layer[product], **moved}}
            module.put_variable(COLLECTION, key_of(path), new)
    # Only now, after the call: state made inside of a nested trace would leak out of it.
    for (path, recipe), products in this.counts.items():
        states = {name: started(recipe, f"{path}:{name}") for name in products}
        _put(module, COLLECTION, path, states)
        _put(module, SCALES, path, {name: unstarted(own) for name, own in products.items()})
    return out


def _put(module: nn.Module, collection: str, path: str, states: dict[str, Any]) -> None:
    """Adds the states of a layer's matmuls to a collection, if it can be written."""
    states = {name: state for name, state in states.items() if state}
    if states and module.is_mutable_collection(collection):
        before = module.variables.get(collection, {}).get(key_of(path), {})
        module.put_variable(collection, key_of(path), {**states, **before})


def key_of(path: str) -> str:
    """The key of a layer in the collections: "self.mlp.Dense_0", or "self" for the wrapped module.

    It is no name of a submodule. Under the key "Dense_0" the state would be in the scope of that
    layer, and a `nn.vmap` around it that maps the collection would cut it into slices.
    """
    return f"{_ROOT}/{path}".strip("/").replace("/", ".")


def path_of(key: str) -> str:
    """The path of a layer, with dots, from its key."""
    return key.removeprefix(_ROOT).removeprefix(".")


def _recipes(rules: Rules[Recipe]) -> list[Recipe]:
    values = [*(value for _, value in rules.rules), rules.default]
    return [value for value in values if value is not None]


def moves_state(recipe: Recipe) -> bool:
    """Whether matmuls keep something for it that training moves."""
    is_moved = recipe.is_delayed or recipe.is_stochastic or recipe.warm_up > 0
    return is_moved or any(recipe.learned)


def _is_apart(module: nn.Module, recipe: Recipe) -> bool:
    """Whether a module runs in a trace that must not close over the state of its matmuls.

    That of `nn.jit` is cached and outlives the call. Where Flax differentiates inside of the model,
    no gradient reaches the probes of delayed scales, so histories would stay empty. `nn.custom_vjp`
    cannot differentiate by what it closes over, learned scales for instance.
    """
    transforms = ["jit("]
    if recipe.is_delayed:
        transforms += ["vjp(", "jvp(", "value_and_grad("]
    if any(recipe.learned):
        transforms.append("custom_vjp(")
    return _is_under(module, transforms)


def _is_under(module: nn.Module, transforms: Sequence[str]) -> bool:
    """Whether a bound module runs inside of one of Flax's transformations."""
    assert module.scope is not None
    return any(name in part for part in module.scope.debug_path for name in transforms)


@dataclasses.dataclass
class _Run:
    """A call of a wrapped module.

    Attributes:
      rules, cache, kind, root: Of the wrapped module: its rules, the format of attention's cache,
        its type and path.
      starting: Whether it is being initialized.
      kept, scales: Its part of the collections "qtoolkit" and "qtoolkit_scales".
      rng: uint32[2], words of a key of this call.
      kinds: The types that were seen at each path.
      counts: While starting, the matmuls of each layer whose recipe keeps state, and the recipe
        of each, which is another one for two activations.
      is_mutable, trace: Whether the collection "qtoolkit" may be written, and in which trace.
      moved: What matmuls have changed of their state, by path and name.
    """

    rules: Rules[Recipe]
    cache: BlockFormat | None
    kind: type
    root: tuple[str, ...]
    starting: bool
    kept: Kept
    scales: Kept
    rng: jax.Array | None
    kinds: dict[str, list[type]] = dataclasses.field(default_factory=dict)
    counts: dict[tuple[str, Recipe], dict[str, Recipe]] = dataclasses.field(default_factory=dict)
    is_mutable: bool = False
    trace: Any = dataclasses.field(default_factory=present_trace)
    moved: dict[tuple[str, str], dict[str, Any]] = dataclasses.field(default_factory=dict)

    def is_of(self, module: nn.Module, rules: Rules[Recipe]) -> bool:
        same = self.root == module.path and self.kind is type(module)
        return same and self.rules == rules

    def intercept(
        self, run: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        """For `nn.intercept_methods`: a call of any method while the wrapped module runs."""
        module, name = context.module, context.method_name
        # Flax passes `functools.partial(method, module)`; `method` has the code to look at.
        method = getattr(context.orig_method, "func", None)
        is_foreign = _active.get() is not self or module.scope is None
        if is_foreign or name in ("setup", STORED) or _is_in(method, _MODULE):
            return run(*args, **kwargs)
        path = "/".join(module.path[len(self.root) :])
        kinds = self._kinds(path, type(module))
        call = MethodCall(module, name, method, run, args, kwargs, path, kinds, [])
        cache = self.cache if name == "__call__" and isinstance(module, _CACHING) else None
        # Twice: first, so that a module is recorded before those in it; and after its run, because
        # only then are its matmuls known and, in `init`, its parameters.
        self._visit(call, ())
        try:
            with nullcontext() if cache is None else narrow_cache(module, cache):
                return self._called(call)
        finally:
            self._visit(call, kernels_of(module))

    def _visit(self, call: MethodCall, kernels: Sequence[str]) -> None:
        visited = _visited.get()
        if visited is not None:
            name = type(call.module).__name__
            this = Module([call.path], call.kinds, name, bool(call.seen))
            for module in (this, *kernels_as_modules(this, kernels)):
                visited.add(self.rules, module)

    def _called(self, call: MethodCall) -> Any:
        """The call as the rules have it for this module."""
        names = kernels_of(call.module)
        recipe, kernels = recipes_of(self.rules, [call.path], call.kinds, names)
        if recipe is None:
            excluded = functools.partial(in_high_precision, self.shown(call.path), call.seen)
            return run_in(excluded, call.run, *call.args, **call.kwargs)
        if _is_in(call.method, _FLAX) and not _is_layer(type(call.module), call.name):
            if noted := noted_kernels():  # an `Embed` that looks up, for instance
                noted.other_uses.update(own_parameters(call.module).values())
            if not isinstance(call.module, nn.SpectralNorm):
                return call.run(*call.args, **call.kwargs)
            # It estimates by matmuls with the kernel, in high precision: the trace of the module
            # around it would replace them.
            mark = LayerRecipe(recipe, self.shown(call.path)).mark
            unchanged = functools.partial(MatmulTrace, None, {}, mark=mark)
            return run_in(
                lambda: replacing_matmuls(unchanged()), call.run, *call.args, **call.kwargs
            )
        if self.starting:
            return self._counted(call, recipe)
        return self._quantized(call, LayerRecipe(recipe, self.shown(call.path), kernels))

    def _counted(self, call: MethodCall, recipe: Recipe) -> Any:
        """A call while the wrapped module is initialized: no matmul is replaced.

        Those that keep state are counted, each with its recipe.
        """
        names: dict[Any, str] = {}
        numbered = MatmulNames()
        is_kept = moves_state(recipe) and not _is_apart(call.module, recipe)

        def count(found: Matmul) -> None:
            product, kernel = f"{call.name}.{numbered(found)}", found.kernel_name
            given = [kernel] if kernel else []
            _, kernels = recipes_of(self.rules, [call.path], call.kinds, given)
            own = dict(kernels).get(kernel, recipe)
            if is_kept and own is not None and moves_state(own):
                products = self.counts.setdefault((call.path, own), {})
                products[product] = own if kernel else own.of_activations()

        look = functools.partial(know_parameters, call.module, names)
        mark = Mark(Place(self.shown(call.path), ""), is_excluded=True)
        trace = MatmulTrace(count, names, mark=mark, look=look, seen=call.seen)
        trace.know_arguments(jax.tree.leaves((call.args, call.kwargs)))
        return run_in(lambda: replacing_matmuls(trace.again()), call.run, *call.args, **call.kwargs)

    def _quantized(self, call: MethodCall, layer: LayerRecipe) -> Any:
        """A call with its matmuls computed by a recipe."""
        _check_kernels(call.module, call.path)
        kernels = noted_kernels()
        paths: dict[int, Any] = {}
        other_uses: set[Any] | None = None if kernels is None else set()
        multiply = self._multiply(call, layer, paths)
        trace = MatmulTrace(multiply, {}, mark=layer.mark, other_uses=other_uses, seen=call.seen)
        is_measured = not _is_under(call.module, ["custom_vjp("])
        dots = LayerRecipe(layer.recipe.without_state(), layer.path)

        @contextmanager
        def quantizing() -> Iterator[None]:
            measured = nullcontext() if is_measured else without_measuring()
            with quantizing_dot(dots), measured, replacing_matmuls(trace.again()):
                yield

        out = run_in(quantizing, run_with_arrays, call, trace, paths)
        if kernels is not None and other_uses is not None:
            returned = (trace.known_of(x).source for x in jax.tree.leaves(out))
            uses = {*other_uses, *(x.parameter for x in returned if x.order is not None)}
            kernels.other_uses |= {paths[key] for key in uses if key in paths}
        return out

    def _multiply(self, call: MethodCall, layer: LayerRecipe, paths: Mapping[int, Any]) -> Multiply:
        """A `multiply` for the matmuls of a method.

        It passes each matmul its state, checks dtypes, and records the kernel if somebody asked.
        """
        recipe, path = layer.recipe, call.path
        is_apart = _is_apart(call.module, recipe)
        if is_apart and any(recipe.learned):
            raise ValueError(
                f"wrap: {path or MODEL}: the layer is under nn.jit or nn.custom_vjp, so that "
                "learned scales do not reach it, expected one that is not; compile the whole step "
                "by jax.jit in place of nn.jit, or exclude the layer by a rule with None"
            )
        rng = None if is_apart else self.rng
        kept, scales = (
            {} if is_apart else part.get(key_of(path), {}) for part in (self.kept, self.scales)
        )
        kernels = noted_kernels()

        def note(found: Matmul, product: str) -> None:
            own = layer.recipe_of(found.kernel_name)
            if kernels is not None and own is not None:
                kernels.note(found, paths, own, (*self.root, key_of(path)), product)
            for side, x in (("lhs", found.lhs), ("rhs", found.rhs)):
                operand = f"{side} of a {found.name} in {type(call.module).__name__}.{call.name}"
                _check_dtype(x, operand, path, "convert it first")

        def state_of(product: str) -> ForwardState | None:
            state = {**kept.get(product, {}), **scales.get(product, {})}
            if not state and rng is None:
                return None
            kernel = product.split(".", 1)[1].split("#")[0]  # "kernel" of "__call__.kernel#2"
            own = layer.recipe_of(kernel) or recipe
            moved = self.moved.setdefault((path, product), {})
            # What moves in an inner trace reaches the collection through a `LiftingTrace`.
            is_carried = self.is_mutable and self.trace == present_trace()
            write = moved.update if is_carried else None
            home = (path, product) if self.is_mutable else None
            return ForwardState(own, f"{path}:{product}", {**state, **moved}, write, rng, home)

        return layer.multiply(state_of, lambda product: f"{call.name}.{product}", note)

    def shown(self, path: str) -> str:
        """The path from the model around it, where the wrapped module is a part of one."""
        return "/".join(filter(None, (*self.root, path)))

    def _kinds(self, path: str, kind: type | None = None) -> tuple[type, ...]:
        """The types of a module and of those around it."""
        seen = self.kinds.setdefault(path, [])
        if kind is not None and kind not in seen:
            seen.append(kind)
        parts = path.split("/") if path else []
        around = ["/".join(parts[:end]) for end in range(len(parts) + 1)]
        return tuple(kind for outer in around for kind in self.kinds.get(outer, ()))


def kernels_of(module: nn.Module) -> list[str]:
    """The names of a module's own parameters that may be kernels: those with two axes or more."""
    params = module.variables.get("params", {}).items()
    return [name for name, x in params if len(getattr(x, "shape", ())) > 1]


def _check_kernels(module: nn.Module, path: str) -> None:
    """Checks the dtypes of a module's own parameters: Flax cannot multiply 8-bit ones, either."""
    for name, value in module.variables.get("params", {}).items():
        if not isinstance(value, Mapping):
            for leaf in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, QArray)):
                parameter = f"{type(module).__name__}.{name}"
                _check_dtype(leaf, parameter, path, "create the layer with another param_dtype")


def _check_dtype(x: Any, operand: str, path: str, what_to_do: str) -> None:
    dtype = x.dtype if isinstance(x, QArray) else jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.floating) and dtype not in FLOATS:
        raise TypeError(
            f"wrap: {path or MODEL}: {operand} has dtype {dtype}, expected float32, float16 or "
            f"bfloat16; {what_to_do}, or exclude the layer by a rule with None"
        )


def _is_layer(kind: Any, name: str) -> bool:
    """Whether a method is one of Flax's that compute matmuls."""
    return any(issubclass(kind, layer) and name == where for layer, where in _LAYERS.items())


def _is_in(function: Any, place: str) -> bool:
    """Whether the code of a function lies in a file or folder."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(place)


_MODULE = inspect.getfile(nn.module)  # calls a function of its own on copies without a path
_FLAX = inspect.getfile(nn).removesuffix("__init__.py")
