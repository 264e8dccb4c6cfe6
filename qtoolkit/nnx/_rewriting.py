"""Quantizes modules by subclasses of the same name, whose methods run under a trace.

The trace replaces matmuls, those of Flax's layers and those of `x @ self.kernel` alike. Layers of
Flax have attributes for their matmuls, such as `dot_general`, but a method through them is no
faster, neither eager nor traced, and they see the kernel only after its cast to bfloat16.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend.core import set_current_trace

from qtoolkit.formats import BlockFormat
from qtoolkit.nnx._cache import caching
from qtoolkit.nnx._state import ProductState, homes
from qtoolkit.products.internal import (
    ForwardState,
    Kernels,
    LayerRecipe,
    LiftingTrace,
    Matmul,
    MatmulTrace,
    as_jax,
    computes_matmul,
    in_high_precision,
    is_watched,
    matmul_attributes,
    moves_forward,
    noted_kernels,
    overridden,
    quantizing_dot,
    replacing_matmuls,
    run_in,
    set_variable,
    state_after,
    with_numbers,
)
from qtoolkit.scaling import QArray

_FRAMEWORK = set(dir(nnx.Module))
_MISSING = (
    "differentiated without the state of delayed scales or a warm-up: wrap does not know the "
    "matmuls in your own modules, so their scales are current ones; let it trace the model, as in "
    "qtoolkit.nnx.wrap(model, recipe, inputs=(x,))"
)
_SITE, _MADE = "qtoolkit_site", "qtoolkit_made"
PRODUCTS = "qtoolkit_products"
_OWN = {"__call__.kernel": "0"}
_STATIC = (int, float, str, type, type(None), types.FunctionType)  # hold no variables
# Flax's layers that compute matmuls: the method that does, the names of its matmuls, and how
# those are called that a trace names otherwise.
LAYERS: dict[type[nnx.Module], tuple[str, tuple[str, ...], dict[str, str]]] = {
    nnx.Linear: ("__call__", ("0",), _OWN),
    nnx.LinearGeneral: ("__call__", ("0",), _OWN),
    nnx.Einsum: ("__call__", ("0",), _OWN),
    nnx.Conv: ("__call__", ("0",), _OWN),
    nnx.MultiHeadAttention: ("__call__", ("0", "1"), {f"__call__.{i}": str(i) for i in (0, 1)}),
    nnx.ConvTranspose: ("__call__", ("kernel",), {"__call__.kernel": "kernel"}),
    nnx.LoRA: (
        "__call__",
        ("lora_a", "lora_b"),
        {f"__call__.{name}": name for name in ("lora_a", "lora_b")},
    ),
    nnx.Embed: ("attend", ("embedding",), {"attend.embedding": "embedding"}),
}


def layer_of(kind: type) -> tuple[str, tuple[str, ...], dict[str, str]] | None:
    """The entry of `LAYERS` for a class."""
    return next((entry for layer, entry in LAYERS.items() if issubclass(kind, layer)), None)


def methods_of(module: Any) -> tuple[str, ...]:
    """The public methods of a module that compute matmuls by themselves.

    `wrap` has no inputs to trace them with, and has to know: it refuses a rule for a module that
    computes none, and gives those that do a class and state. So their code is read.
    """
    kind = original_class(type(module))
    entry = layer_of(kind)
    main = () if entry is None else (entry[0],)
    return tuple(dict.fromkeys((*main, *product_methods(kind, matmul_attributes(vars(module))))))


def adapters(module: Any) -> tuple[str, ...]:
    """The names of further kernels of a layer of Flax, as `qwix.apply_lora_to_model` adds them."""
    if layer_of(type(module)) is None:
        return ()
    known = ("kernel", "bias", "embedding", "lora_a", "lora_b")
    params = (name for name, value in vars(module).items() if isinstance(value, nnx.Param))
    return tuple(name for name in params if name not in known)


def has_products(module: Any) -> bool:
    """Whether a module computes matmuls."""
    return bool(methods_of(module))


def product_methods(kind: type, attributes: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The public methods of a class whose code computes a matmul or calls one of `attributes`.

    A static method or a class method is not among them: it has no module whose recipe it could use.
    The methods that call it are, and their traces reach its matmuls.
    """
    found = []
    for name, method in _public_methods(kind).items():
        function = inspect.unwrap(method)
        if not isinstance(function, types.FunctionType) or inspect.isasyncgenfunction(function):
            continue
        candidates = (function, *overridden(function, kind))
        if any(computes_matmul(one, kind, attributes) for one in candidates):
            found.append(name)
    return tuple(found)


def _public_methods(kind: type) -> dict[str, Any]:
    """The methods of a class that are not nnx's own, by name, and also those that are decorated."""
    found = {}
    for name in dir(kind):
        is_public = name == "__call__" or (not name.startswith("_") and name not in _FRAMEWORK)
        own = inspect.getattr_static(kind, name, None)
        is_bound = hasattr(own, "__get__") and not isinstance(own, staticmethod | classmethod)
        method = getattr(kind, name, None) if is_public and is_bound else None
        if callable(method):
            found[name] = method
    return found


class Made(NamedTuple):
    """What a subclass is made of.

    Attributes:
      kind: The class of the model.
      methods: Those that run by the module's site.
      left: The path of a module that a rule leaves in high precision; None for others. The class
        has it, not its object: `nnx.bridge.ToNNX` takes every attribute for a variable.
      cache: The format of attention's KV cache.
      carries: Whether its methods, if it is the outermost module, carry state out of loops.
    """

    kind: Any
    methods: tuple[str, ...] = ()
    left: str | None = None
    cache: BlockFormat | None = None
    carries: bool = False


def made_of(module: Any) -> Made:
    kind = type(module)
    return getattr(kind, _MADE, None) or Made(kind)


def original_class(kind: type) -> type:
    """The class from which `become` made this one; `kind` itself if it is not one of ours."""
    made: Made | None = getattr(kind, _MADE, None)
    return kind if made is None else made.kind


def become(module: Any, **parts: Any) -> None:
    """Gives a module, which may be a frozen dataclass, a class with other parts: see `Made`."""
    object.__setattr__(module, "__class__", _class_of(made_of(module)._replace(**parts)))


@functools.cache
def _class_of(made: Made) -> type:
    """The class itself, or a subclass of the same name whose methods run otherwise."""
    kind = made.kind
    if made == Made(kind):
        return kind
    body: dict[str, Any] = {name: _entered(getattr(kind, name), name) for name in made.methods}
    if made.left is not None:
        methods = _public_methods(kind).items()
        body = {name: _left(method, made.left) for name, method in methods}
    if made.carries:
        methods = _public_methods(kind).items()
        body |= {name: _carrying(body.get(name, method)) for name, method in methods}
    if made.cache is not None:
        body |= caching(kind, body.get("__call__", kind.__call__), made.cache)
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    body |= {"__doc__": kind.__doc__, _MADE: made, "__reduce_ex__": _reduced}
    is_pytree = getattr(kind, "_pytree__is_pytree", True)
    return type(kind)(kind.__name__, (kind,), body, pytree=is_pytree)


def _reduced(module: Any, protocol: Any) -> Any:
    """How to pickle an object of our subclass, by whose name `pickle` would find the original."""
    reduced: Any = object.__reduce_ex__(module, max(2, protocol))
    _, _, *rest = reduced
    return _remade, made_of(module), *rest


def _remade(*made: Any) -> Any:
    kind: Any = _class_of(Made(*made))
    return kind.__new__(kind)


def _left(method: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def left(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = functools.partial(in_high_precision, path)
        return run_in(context, method, self, *args, **kwargs)

    return left


def is_left(module: Any) -> bool:
    """Whether a rule leaves this module as it is."""
    return made_of(module).left is not None


def leave(module: Any, path: str) -> None:
    """Marks the matmuls that a module computes, and those in all that it calls, as left."""
    if not is_left(module):
        become(module, methods=(), left=path)


def follow(module: Any) -> None:
    """Gives a module that computes no matmul a trace, which follows the parameters that it passes.

    Without it, a parameter that it passes to another module as an array is an activation there.
    Flax's modules, such as `nnx.Sequential`, pass none.
    """
    kind = original_class(type(module))
    if kind.__module__.split(".")[0] != "flax":
        methods = (*made_of(module).methods, *_public_methods(kind))
        become(module, methods=tuple(dict.fromkeys(methods)))


def carry(module: Any) -> None:
    """Lets a module update the states of layers that it runs in loops of JAX.

    Such as `jax.checkpoint(self.mlp)(x)`, and `jax.checkpoint(lambda state, x: nnx.merge(graph,
    state)(x))`, whose copy is dropped: see `LiftingTrace`. Of Flax's modules only `nnx.RNN` has a
    loop.
    """
    kind = original_class(type(module))
    if kind.__module__.split(".")[0] != "flax" or issubclass(kind, nnx.RNN):
        become(module, carries=True)


def _carrying(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def carrying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if homes.get() or not moves_forward():
            return method(self, *args, **kwargs)
        return run_in(functools.partial(_carried, self), method, self, *args, **kwargs)

    return carrying


@contextlib.contextmanager
def _carried(module: Any) -> Iterator[None]:
    """In this context loops of the module, and copies of its layers, move the states of the layers.

    A copy is known by its arrays: they are operands of the loop in which it is made.
    """
    states = [x for _, x in nnx.iter_modules(module) if isinstance(x, ProductState)]
    firsts = [(x.first_moving(), i) for i, x in enumerate(states)]
    firsts = [(x, i) for x, i in firsts if x is not None]
    moves: dict[Any, Any] = {}
    trace = LiftingTrace(moves, firsts)
    is_needless = trace.is_eager or not trace.homes
    lifting = contextlib.nullcontext() if is_needless else set_current_trace(trace)
    with set_variable(homes, {id(states[i]): i for _, i in firsts}), lifting:
        yield
    for home, move in moves.items():
        state = states[home]
        is_moved = all(state.first_moving() is not x for x, _ in firsts)
        state.write(state_after(state.arrays, move, is_moved=is_moved))


def name_of(kind: type, method: str, name: str) -> str:
    """The name of a matmul in a method of a module: "encode.kernel", or "kernel" in `__call__`.

    In layers of Flax that override `__call__`, the layer's own matmul keeps its name.
    """
    entry = layer_of(kind)
    if entry is None:
        return name if method == "__call__" else f"{method}.{name}"
    full = f"{method}.{name}"
    return entry[2].get(full, full)


def product_states(layer: Any) -> dict[str, ProductState]:
    """The states of a layer's matmuls, by name."""
    kept = getattr(layer, PRODUCTS, None)
    states = {} if kept is None else vars(kept)
    return {name: state for name, state in states.items() if isinstance(state, ProductState)}


def _entered(method: Callable[..., Any], method_name: str) -> Callable[..., Any]:
    """A method whose matmuls are computed by the module's recipe.

    A module without a recipe computes none. Its trace only follows the parameters that it passes to
    the modules in it.
    """

    @functools.wraps(method)
    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: LayerRecipe | None = getattr(self, _SITE, None)
        if site is None and is_watched():  # the trace around it knows its parameters
            return method(self, *args, **kwargs)
        kept, states = getattr(self, "qtoolkit_dot", None), product_states(self)
        named = functools.partial(name_of, original_class(type(self)), method_name)

        def state_of(name: str) -> ForwardState | None:
            return states[name].track() if name in states else None

        noted = noted_kernels()
        dots = site and dataclasses.replace(site, recipe=site.recipe.without_state())

        # `with_numbers` runs it a second time if the method needs numbers of NumPy's integers.
        def run(integers: bool) -> Any:
            # Each by itself: a method may write to what it is given, such as a list of outputs.
            given = [as_jax(x, integers, _is_node) for x in args]
            named_given = {name: as_jax(x, integers, _is_node) for name, x in kwargs.items()}
            leaves = jax.tree.leaves((given, named_given), is_leaf=_is_node)
            parameters: dict[Any, str] = {}
            notes = None if noted is None else _Notes(noted, site, {}, set())
            note = {} if notes is None else {"note": notes.note}
            multiply = None
            if site is not None:
                multiply = site.multiply(state_of, named, missing=_MISSING, **note)
            mark = None if site is None else site.mark
            other_uses = None if noted is None else set[Any]()
            trace = MatmulTrace(multiply, parameters, mark=mark, other_uses=other_uses)
            trace.know_arguments([None if _is_node(leaf) else leaf for leaf in leaves])
            for i, node in enumerate(leaves):
                _know(trace, parameters, node, f"argument{i}")
            _know(trace, parameters, self)  # the last: an argument may be a parameter of its own
            module = _with_arrays(self, trace, parameters)
            unmoved = None if kept is None else kept.track().unmoved

            # A generator runs each of its steps in a new context. Hence `again`, which puts a trace
            # that knows the same parameters on top of whichever trace runs then.
            @contextlib.contextmanager
            def context() -> Iterator[None]:
                dotted = quantizing_dot(dots, unmoved)
                with _written_to(self, module), dotted, replacing_matmuls(trace.again()):
                    yield

            if notes is not None:
                notes.know(module, parameters)
            out = run_in(context, method, module, *given, **named_given)
            if notes is not None:
                notes.kernels.note_others(trace, out, notes.paths, notes.own)
            return out

        return with_numbers(run, (args, kwargs))

    return entering


class _Notes(NamedTuple):
    """What one run of a method notes of the parameters that it uses.

    Attributes:
      paths: Their paths, by the ids of arrays.
      own: Those that are attributes of its module. A module computes by stored ones of these alone.
    """

    kernels: Kernels
    site: LayerRecipe | None
    paths: dict[Any, str]
    own: set[Any]

    def know(self, module: Any, names: Mapping[Any, str]) -> None:
        self.own.update(
            id(x.get_value()) for x in vars(module).values() if isinstance(x, nnx.Param)
        )
        # In a scan of nnx the arrays are other ones, which only the module itself can name.
        if self.site is not None:
            start = f"{self.site.path}/".lstrip("/")
            self.paths.update({x: start + name.replace(".", "/") for x, name in names.items()})
        self.paths.update(self.kernels.paths)

    def note(self, matmul: Matmul, name: str) -> None:
        assert self.site is not None
        recipe = self.site.recipe_of(matmul.kernel_name)
        if recipe is not None:
            self.kernels.note(matmul, self.paths, recipe, self.site.path, name)
            foreign = {source.parameter for source in matmul.sources} - self.own
            self.kernels.other_uses |= {self.paths[x] for x in foreign if x in self.paths}


def _with_arrays(module: Any, trace: MatmulTrace, parameters: dict[Any, str]) -> Any:
    """The module; if it has stored kernels, a copy with ordinary arrays in their place."""
    stored = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, nnx.Param) and isinstance(value.get_value(), QArray)
    }
    if not stored:
        return module
    copied = object.__new__(type(module))
    vars(copied).update(vars(module))
    for name, value in stored.items():
        array = value.get_value().dequantize()
        parameters[id(array)] = name
        trace.know_parameter(array, value.get_value())
        vars(copied)[name] = type(value).from_metadata(array, value.get_metadata())
    return copied


@contextlib.contextmanager
def _written_to(module: Any, copied: Any) -> Iterator[None]:
    """What is set in the copy in this context is then set in the module."""
    before = {} if copied is module else dict(vars(copied))
    yield
    for name, value in () if copied is module else vars(copied).items():
        if value is not before.get(name):
            setattr(module, name, value)


def _know(trace: MatmulTrace, names: dict[Any, str], node: Any, argument: str = "") -> None:
    """Tells a trace which arrays of a module or an argument are parameters, and their names."""
    if not _is_node(node):
        return
    variables: Any = [((argument,), node)]
    if isinstance(node, nnx.Module):
        own = {name: x for name, x in vars(node).items() if isinstance(x, nnx.Variable)}
        variables = [((name,), x) for name, x in own.items()]
        others = {name: x for name, x in vars(node).items() if name not in (*own, _SITE, PRODUCTS)}
        is_simple = (
            isinstance(x, _STATIC) or name.startswith("_pytree__") for name, x in others.items()
        )
        if not all(is_simple):  # else 0.2 ms for each layer
            # Not `nnx.state`: it makes a cycle of references, which holds the arrays of the model
            # until Python looks for such, and then no lost state is noticed either.
            variables = [
                (path, x)
                for path, x in nnx.iter_graph(node, graph=True)
                if isinstance(x, nnx.Variable | jax.Array) and PRODUCTS not in path
            ]
    for path, variable in variables:
        is_variable = isinstance(variable, nnx.Variable)  # else an array that is an attribute
        arrays = jax.tree.leaves(variable.get_value() if is_variable else variable)
        if isinstance(variable, nnx.Param):
            for array in arrays:
                names[id(array)] = ".".join(map(str, path))
                trace.know_parameter(array)
        else:
            trace.know_inputs(arrays)


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Module | nnx.Variable)
