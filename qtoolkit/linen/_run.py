"""One call of a wrapped module: Flax's interceptor quantizes the matmuls of each layer in it."""

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from flax import linen as nn
from jax.extend.core import set_current_trace

from qtoolkit.formats import BlockFormat, Rules
from qtoolkit.linen._arguments import arguments_of, explain_reserved_name
from qtoolkit.linen._cache import narrow_cache
from qtoolkit.linen._jitted import warn_of_shared_traces
from qtoolkit.linen._parameters import (
    STORED,
    MethodCall,
    check_dtype,
    check_kernels,
    know_parameters,
    own_parameters,
    run_with_arrays,
)
from qtoolkit.linen._state import (
    COLLECTION,
    KEPT_NOWHERE,
    MISSING,
    SCALES,
    Kept,
    key_of,
    unboxed,
)
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
    needs_state,
    noted_kernels,
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
_ATTENTION = nn.MultiHeadDotProductAttention


class Recorded(dict[Rules[Recipe], dict[str, Module]]):
    """The modules that ran inside of wrapped ones: {rules of the wrapped one: {path: module}}."""

    def add(self, rules: Rules[Recipe], module: Module) -> None:
        (path,) = module.paths
        known = self.setdefault(rules, {}).get(path, module)
        kinds = tuple(dict.fromkeys((*known.kinds, *module.kinds)))
        has_products = known.has_products or module.has_products
        self[rules][path] = module._replace(kinds=kinds, has_products=has_products)

    def modules(self, rules: Rules[Recipe]) -> list[Module]:
        return list(self.get(rules, {}).values())


# jax.jit caches traces. This value is part of the cache key, so that `nn.jit` does not reuse the
# trace of a call with other rules.
_trace_key = jax.make_user_context(None)
_record: contextvars.ContextVar[Recorded | None] = contextvars.ContextVar("record", default=None)
_active: contextvars.ContextVar["_Run | None"] = contextvars.ContextVar("run", default=None)


def recording_modules() -> AbstractContextManager[Recorded]:
    """In this context the modules that run inside of wrapped ones are recorded."""
    return set_variable(_record, Recorded())


def is_recording_modules() -> bool:
    return _record.get() is not None


def run(
    module: nn.Module,
    rules: Rules[Recipe],
    method: Callable[..., Any],
    args: Any,
    kwargs: Any,
    cache: BlockFormat | None = None,
) -> Any:
    """`method(module, *args, **kwargs)`, with the matmuls of its layers quantized by `rules`.

    The keys and values that attention caches are stored in the format `cache`. While the module is
    initialized no matmul is quantized; the first state of its matmuls is put into the collections
    "qtoolkit" and "qtoolkit_scales", if these can be written.
    """
    active = _active.get()
    if module.scope is None or (active is not None and active.is_of(module, rules)):
        # The module is not bound, so Flax raises; or one of its methods calls another.
        return method(module, *args, **kwargs)
    initializing, record = module.is_initializing(), _record.get()
    has_state = cache is not None or any(map(needs_state, _recipes(rules)))
    args, kwargs = arguments_of(method, module, args, kwargs)
    if initializing and not has_state and record is None:
        return method(module, *args, **kwargs)
    states, scales = (
        {} if initializing else module.variables.get(name, {}) for name in (COLLECTION, SCALES)
    )
    rng = None
    is_stochastic = any(recipe.is_stochastic for recipe in _recipes(rules))
    if not initializing and is_stochastic and module.has_rng(COLLECTION):
        rng = jax.random.key_data(module.make_rng(COLLECTION)).reshape(-1)[:2]  # of 2 or 4 words
    call = _Run(rules, cache, type(module), module.path, initializing, states, scales, rng)
    call.is_mutable = not initializing and module.is_mutable_collection(COLLECTION)
    intercepting = nn.intercept_methods(call.intercept)
    # Modules and kernels are recorded while Python runs. With a cached trace it would not run, so a
    # recording needs a key that no trace has.
    unique = None if record is None and noted_kernels() is None else object()
    # A matmul in `lax.scan`, `cond` or `remat` cannot write a collection. `moves` gets its change.
    moves: dict[Any, Any] = {}
    lifts = call.is_mutable and has_state
    lifting = set_current_trace(LiftingTrace(moves)) if lifts else nullcontext()
    key = rules, cache, initializing, unique
    with set_variable(_active, call), intercepting, _trace_key(key), lifting:
        try:
            out = method(module, *args, **kwargs)
        except TypeError as error:
            explain_reserved_name(error)
            raise
    if call.jitted:
        ran = {path: call.kinds_of(path) for path in [*call.kinds]}
        warn_of_shared_traces(rules, ran, call.jitted, module.variables.get("params", {}))
    for (path, product), move in moves.items():
        old, new = states[key_of(path)][product], call.changes[path, product]
        call.changes[path, product] = state_after({**old, **new}, move, is_moved=bool(new))
    for (path, product), change in call.changes.items():
        if change:
            of_layer = module.variables[COLLECTION][key_of(path)]
            new = {**of_layer, product: {**of_layer[product], **change}}
            module.put_variable(COLLECTION, key_of(path), new)
    # Create new state here, outside of all inner traces: arrays of an inner trace would leak.
    for (path, recipe), products in call.new_states.items():
        first = {name: started(recipe, f"{path}:{name}") for name in products}
        _put(module, COLLECTION, path, first)
        _put(module, SCALES, path, {name: unstarted(own) for name, own in products.items()})
    return out


def _put(module: nn.Module, collection: str, path: str, states: dict[str, Any]) -> None:
    """Adds the states of a layer's matmuls to a collection, if it can be written."""
    states = {name: state for name, state in states.items() if state}
    if states and module.is_mutable_collection(collection):
        before = module.variables.get(collection, {}).get(key_of(path), {})
        module.put_variable(collection, key_of(path), {**states, **before})


def _recipes(rules: Rules[Recipe]) -> list[Recipe]:
    values = [*(value for _, value in rules.rules), rules.default]
    return [value for value in values if value is not None]


def _is_without_state(module: nn.Module, recipe: Recipe) -> bool:
    """Whether the state of a module's matmuls cannot reach them, because of a transformation.

    The state comes from the wrapped module, so a method would close over it. Under `nn.jit` it must
    not, because the trace is cached and outlives the call. If Flax differentiates inside of the
    model, no gradient reaches the probes of delayed scales, and histories would stay empty.
    `nn.custom_vjp` cannot differentiate by arrays that a method closes over, as learned scales are.
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
      rules: The rules of the wrapped module.
      cache: The format of attention's cache; None: unchanged.
      kind, root: The type and the path of the wrapped module.
      initializing: Whether it is being initialized.
      states, scales: Its part of the collections "qtoolkit" and "qtoolkit_scales".
      rng: uint32[2], words of a random key for this call.
      kinds: The types of the modules that ran at each path.
      new_states: Filled while initializing: {(path of the layer, recipe): {matmul: its recipe}} for
        matmuls with state. The recipe of a matmul without a kernel differs from the layer's.
      is_mutable, trace: Whether the collection "qtoolkit" may be written, and in which trace.
      changes: The state that matmuls have changed: {(path of the layer, matmul): {name: array}}.
      jitted: The paths of the modules that were traced under `nn.jit`.
      parameters: The paths of the parameters of all modules that ran, by the ids of their arrays.
    """

    rules: Rules[Recipe]
    cache: BlockFormat | None
    kind: type
    root: tuple[str, ...]
    initializing: bool
    states: Kept
    scales: Kept
    rng: jax.Array | None
    kinds: dict[str, list[type]] = dataclasses.field(default_factory=dict)
    new_states: dict[tuple[str, Recipe], dict[str, Recipe]] = dataclasses.field(
        default_factory=dict
    )
    is_mutable: bool = False
    trace: Any = dataclasses.field(default_factory=present_trace)
    changes: dict[tuple[str, str], dict[str, Any]] = dataclasses.field(default_factory=dict)
    jitted: set[str] = dataclasses.field(default_factory=set)
    parameters: dict[Any, str] = dataclasses.field(default_factory=dict)

    def is_of(self, module: nn.Module, rules: Rules[Recipe]) -> bool:
        same = self.root == module.path and self.kind is type(module)
        return same and self.rules == rules

    def intercept(
        self, unchanged: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        """For `nn.intercept_methods`: called for each method that runs in the wrapped module.

        `unchanged` is the method as Flax would run it.
        """
        module, name = context.module, context.method_name
        # Flax passes `functools.partial(method, module)`; `method` has the code to look at.
        method = getattr(context.orig_method, "func", None)
        is_foreign = _active.get() is not self or module.scope is None
        if is_foreign or name in ("setup", STORED) or _is_in(method, _MODULE):
            return unchanged(*args, **kwargs)
        path = "/".join(module.path[len(self.root) :])
        kinds = self.kinds_of(path, type(module))
        if not self.initializing and _is_under(module, ["jit("]):
            self.jitted.add(path)
        call = MethodCall(module, name, method, unchanged, args, kwargs, path, kinds, [])
        cache = self.cache if name == "__call__" and isinstance(module, _ATTENTION) else None
        self._add_to_record(call, ())  # first, so that a module precedes those inside of it
        try:
            with nullcontext() if cache is None else narrow_cache(module, cache):
                return self._run_by_rules(call)
        finally:  # now its kernels exist, and `call.seen` has its matmuls
            self._add_to_record(call, kernels_of(module))

    def _add_to_record(self, call: MethodCall, kernels: Sequence[str]) -> None:
        record = _record.get()
        if record is not None:
            name = type(call.module).__name__
            layer = Module([call.path], call.kinds, name, bool(call.seen))
            for module in (layer, *kernels_as_modules(layer, kernels)):
                record.add(self.rules, module)

    def _run_by_rules(self, call: MethodCall) -> Any:
        names = kernels_of(call.module)
        recipe, kernels = recipes_of(self.rules, [call.path], call.kinds, names)
        if recipe is None:
            excluded = functools.partial(in_high_precision, self.full_path(call.path), call.seen)
            return run_in(excluded, call.run, *call.args, **call.kwargs)
        if _is_in(call.method, _FLAX) and not _is_layer(type(call.module), call.name):
            if noted := noted_kernels():  # an `Embed` that looks up, for instance
                noted.other_uses.update(own_parameters(call.module).values())
            if not isinstance(call.module, nn.SpectralNorm):
                return call.run(*call.args, **call.kwargs)
            # It multiplies by the kernel to estimate a norm, and needs high precision for that. The
            # trace of the module around it would quantize these matmuls; this one changes nothing.
            mark = LayerRecipe(recipe, self.full_path(call.path)).mark
            passing = functools.partial(MatmulTrace, None, {}, mark=mark)
            return run_in(lambda: replacing_matmuls(passing()), call.run, *call.args, **call.kwargs)
        if self.initializing:
            return self._run_initializing(call, recipe)
        return self._run_quantized(call, LayerRecipe(recipe, self.full_path(call.path), kernels))

    def _run_initializing(self, call: MethodCall, recipe: Recipe) -> Any:
        """Runs a method unquantized, and lists its matmuls that need state in `new_states`."""
        names: dict[Any, str] = {}  # of parameters, by the ids of their arrays
        matmul_name = MatmulNames()
        has_state = needs_state(recipe) and not _is_without_state(call.module, recipe)

        def add(matmul: Matmul) -> None:
            product, kernel = f"{call.name}.{matmul_name(matmul)}", matmul.kernel_name
            kernel_names = [kernel] if kernel else []
            _, kernels = recipes_of(self.rules, [call.path], call.kinds, kernel_names)
            own = dict(kernels).get(kernel, recipe)
            if has_state and own is not None and needs_state(own):
                products = self.new_states.setdefault((call.path, own), {})
                products[product] = own if kernel else own.of_activations()

        look = functools.partial(know_parameters, call.module, names)  # at parameters just created
        mark = Mark(Place(self.full_path(call.path), ""), is_excluded=True)
        trace = MatmulTrace(add, names, mark=mark, look=look, seen=call.seen)
        trace.know_arguments(jax.tree.leaves((call.args, call.kwargs)))
        return run_in(lambda: replacing_matmuls(trace.again()), call.run, *call.args, **call.kwargs)

    def _run_quantized(self, call: MethodCall, layer: LayerRecipe) -> Any:
        """Runs a method with its matmuls computed by a recipe."""
        check_kernels(call.module, call.path)
        kernels = noted_kernels()
        # Of the module's own parameters, by the ids of their arrays.
        paths: dict[int, Any] = own_parameters(call.module)
        other_uses = None if kernels is None else set[Any]()
        trace = MatmulTrace(None, {}, mark=layer.mark, other_uses=other_uses, seen=call.seen)
        passed = self._recipes_of_arguments(call, layer.recipe, trace)
        layer = dataclasses.replace(layer, kernels=(*layer.kernels, *passed))
        trace.multiply = self._multiply(call, layer, paths)
        self.parameters |= {x: "/".join(path[len(self.root) :]) for x, path in paths.items()}
        is_measured = not _is_under(call.module, ["custom_vjp("])
        for_dot = dataclasses.replace(layer, recipe=layer.recipe.without_state())  # `qtoolkit.dot`

        @contextmanager
        def quantizing() -> Iterator[None]:
            measured = nullcontext() if is_measured else without_measuring()
            with quantizing_dot(for_dot), measured, replacing_matmuls(trace.again()):
                yield

        out = run_in(quantizing, run_with_arrays, call, trace, paths)
        if kernels is not None:
            kernels.note_others(trace, out, paths, paths)
        return out

    def _recipes_of_arguments(
        self, call: MethodCall, recipe: Recipe, trace: MatmulTrace
    ) -> list[tuple[str, Recipe | None]]:
        """The recipes of parameters that the module around passes, where rules name these."""
        found = []
        for i, x in enumerate(jax.tree.leaves((call.args, call.kwargs))):
            path = self.parameters.get(trace.known_of(x).source.parameter)
            own = recipe if path is None else self.rules.lookup([call.path, path], call.kinds)
            found += [(f"argument{i}", own)] if own != recipe else []
        return found

    def _multiply(self, call: MethodCall, layer: LayerRecipe, paths: Mapping[int, Any]) -> Multiply:
        """The function that computes a matmul of the method in place of JAX.

        It passes each matmul its state, checks dtypes, and records the kernel in `noting_kernels`.
        """
        recipe, path = layer.recipe, call.path
        is_without_state = _is_without_state(call.module, recipe)
        if is_without_state and any(recipe.learned):
            raise ValueError(
                f"wrap: {path or MODEL}: the layer is under nn.jit or nn.custom_vjp, so that "
                "learned scales do not reach it, expected one that is not; compile the whole step "
                "by jax.jit in place of nn.jit, or exclude the layer by a rule with None"
            )
        rng, states, scales = None, {}, {}
        if not is_without_state:
            rng = self.rng
            states, scales = (part.get(key_of(path), {}) for part in (self.states, self.scales))
        kernels = noted_kernels()

        def note(matmul: Matmul, product: str) -> None:
            own = layer.recipe_of(matmul.kernel_name)
            if kernels is not None and own is not None:
                kernels.note(matmul, paths, own, (*self.root, key_of(path)), product)
            for side, x in (("lhs", matmul.lhs), ("rhs", matmul.rhs)):
                operand = f"{side} of a {matmul.name} in {type(call.module).__name__}.{call.name}"
                check_dtype(x, operand, path, "convert it first")

        def state_of(product: str) -> ForwardState | None:
            state = {**states.get(product, {}), **scales.get(product, {})}
            if not state and rng is None:
                return None
            kernel = product.split(".", 1)[1].split("#")[0]  # of "__call__.kernel#2"
            own = layer.recipe_of(kernel) or recipe
            change = self.changes.setdefault((path, product), {})
            # In an inner trace, write nothing: there `LiftingTrace` gets the change, by `home`.
            may_write = self.is_mutable and self.trace == present_trace()
            write = change.update if may_write else None
            home = (path, product) if self.is_mutable else None
            return ForwardState(own, f"{path}:{product}", {**state, **change}, write, rng, home)

        missing = KEPT_NOWHERE if is_without_state else MISSING
        return layer.multiply(state_of, lambda product: f"{call.name}.{product}", note, missing)

    def full_path(self, path: str) -> str:
        """A path in the wrapped module, as a path in the model that contains the wrapped module."""
        return "/".join(filter(None, (*self.root, path)))

    def kinds_of(self, path: str, kind: type | None = None) -> tuple[type, ...]:
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
    return [name for name, x in params if len(getattr(unboxed(x), "shape", ())) > 1]


def _is_layer(kind: Any, name: str) -> bool:
    """Whether a method is one of Flax's that compute matmuls."""
    return any(issubclass(kind, layer) and name == where for layer, where in _LAYERS.items())


def _is_in(function: Any, place: str) -> bool:
    """Whether the code of a function lies in a file or folder."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(place)


# Flax's own methods of all modules. It calls one of them on copies of modules, which have no path.
_MODULE = inspect.getfile(nn.module)
_FLAX = inspect.getfile(nn).removesuffix("__init__.py")
