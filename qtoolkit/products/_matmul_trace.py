"""Replace the matmuls that a method computes, while it runs.

A wrapped module runs its method in `replacing_matmuls`. This puts a `MatmulTrace` between the
method and JAX, where `jax.vmap` and `jax.jvp` put theirs, and JAX hands it every operation. Nothing
is patched, so it does not matter whether the method writes `x @ w` or `jnp.einsum`, or calls a
library.

1. An operation without matmuls runs unchanged in the trace underneath. What is known of its
   operands becomes what is known of its results (`_analyses`): whether they are a parameter, and
   along which axis features lie.
2. A matmul becomes a `Matmul`, which says what is known of its operands, and `multiply` computes
   it. That is `LayerRecipe.multiply` in `_layer`: it picks recipe and state, and calls the jitted
   function `qtoolkit_product`. The result of that passes through an identity primitive (`_place`)
   whose parameters are the matmul's path and recipe: from there reports read them.
3. `scan`, `cond`, `while_loop`, `remat` and `jit` hold their bodies as jaxprs. If one has a matmul,
   the body runs again, under a trace like this one (`_control_flow`). So does that of `shard_map`.
4. A module inside of another one decides first, because its trace lies on top. If it does so in the
   body of a loop, the outer trace sees that body later, and respects it: it looks into no call of
   `qtoolkit_product`, and replaces no matmul whose operand has the mark that a rule excludes it.
5. A function with a `custom_jvp` or `custom_vjp` runs unchanged, because the user has defined the
   derivative of exactly this function.

State enters in step 2: `ForwardState` (`_forward_state`) reads the layer's histories and keys, and
stores what they become. A trainer that knows nothing of us updates them, too: they pass through a
primitive that returns them unchanged, but its derivative rule, which only a training step calls,
returns them updated.
"""

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, set_current_trace, take_current_trace

from qtoolkit.products._analyses import (
    ACTIVATION,
    CONSTANT,
    LAST,
    Matmul,
    Source,
    Step,
    features_of,
    features_of_result,
    original_of,
    sources_of,
)
from qtoolkit.products._bilinear import (
    RAGGED,
    Bilinear,
    ConvGeneralDilated,
    DotGeneral,
    RaggedDot,
)
from qtoolkit.products._control_flow import (
    BODIES,
    INLINED,
    MATMULS,
    Body,
    PassingTrace,
    holds_any_matmuls,
    holds_matmuls,
)
from qtoolkit.products._instruments import instrument, set_variable
from qtoolkit.products._place import Mark, mark_in, with_mark
from qtoolkit.scaling import QArray

_OF_CONVOLUTION = (  # parameters of the primitive that describe the convolution
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("feature_group_count", "batch_group_count", "precision"),
)
_MOVING = ("transpose", *INLINED)  # may move features away from the last axis
# Returns the result of a matmul; or a mark, if a rule excludes it; or None, to leave it unchanged.
Multiply = Callable[[Matmul], "jax.Array | Mark | None"]


class Known(NamedTuple):
    """What is known of a value while a method runs.

    Attributes:
      source: Where it comes from.
      features: The axis along which features lie, from the end.
      original: What a matmul rounds in its place: see `original_of`.
      is_excluded: Whether it is an operand of a matmul that a rule excludes.
    """

    source: Source = ACTIVATION
    features: int = LAST
    original: Any = None
    is_excluded: bool = False

    def within(self) -> "Known":
        """The same of a value inside of a loop or a `shard_map`, where it is another array."""
        return self._replace(source=self.source._replace(order=None), original=None)


_ACTIVATION, _CONSTANT = Known(), Known(CONSTANT)


class MatmulTrace(PassingTrace):
    """The trace that replaces matmuls, on top of the one in which the method is called.

    Attributes:
      parent_trace: The trace underneath, in which everything is computed.
      multiply: Computes a matmul. None: all stay unchanged, and the trace only follows parameters.
      names: The names of parameters, by what `Source.parameter` says.
      mark: What reports read of matmuls that stay unchanged; None for nothing.
      other_uses: Filled with the parameters that anything but a matmul uses, and whether that is a
        loop or a call with matmuls in it; None: nobody asks.
      look: Called before each operation, to know parameters that the method has made.
      seen: Filled with the names of the primitives of the matmuls that have run.
    """

    def __init__(
        self,
        multiply: Multiply | None,
        names: dict[Any, str],
        *,
        mark: Mark | None = None,
        other_uses: set[tuple[Any, bool]] | None = None,
        look: Callable[["MatmulTrace"], None] | None = None,
        seen: list[str] | None = None,
    ) -> None:
        with take_current_trace() as parent:
            pass
        # A `MatmulTrace` right below has nothing to do: this one decides.
        super().__init__(parent.parent_trace if isinstance(parent, MatmulTrace) else parent)
        # The module around this one is known by a variable, as a `vmap` or a loop may lie between.
        around = running()
        self._known: dict[int, tuple[Any, Known]] = {} if around is None else around._known
        self._parameters: list[jax.Array] = []
        self.multiply, self.names, self.mark = multiply, names, mark
        self.other_uses, self.look = other_uses, look
        self.seen: list[str] = [] if seen is None else seen

    def again(self) -> "MatmulTrace":
        """The same on top of the present trace: for the body of a loop, or a generator's step."""
        same = MatmulTrace(self.multiply, self.names, mark=self.mark, seen=self.seen)
        same.other_uses, same.look, same._known = self.other_uses, self.look, self._known
        return same

    # What is known of values.

    def know(self, x: Any, known: Known) -> None:
        with contextlib.suppress(TypeError):  # a number of Python or NumPy, which is a constant
            self._known[id(x)] = weakref.ref(x), known

    def know_inputs(self, tree: Any) -> None:
        """Notes that the arrays in a pytree are no parameters, and no constants."""
        for x in jax.tree.leaves(tree):
            if isinstance(x, jax.Array):
                self.know(x, _ACTIVATION)

    def know_arguments(self, arguments: Sequence[Any]) -> None:
        """Notes the arrays that a method was called with.

        They are activations, or parameters that the module around this one has. These are named
        like the argument, because their path there may be that of a parameter here.
        """
        around = _running.get()
        if around is not None and around.look is not None:
            around.look(around)  # it may just have made the parameter
        for i, argument in enumerate(arguments):
            for x in jax.tree.leaves(argument):
                parameter = self.known_of(x).source.parameter
                if parameter is None:
                    self.know_inputs(x)
                else:
                    self.names.setdefault(parameter, f"argument{i}")

    def know_parameter(self, x: jax.Array, original: Any = None) -> None:
        """Notes that an array is a parameter, whose key in `names` is its id."""
        self._parameters.append(x)  # so that no other array gets its id
        self.know(x, Known(Source(id(x), order=()), original=original))

    def known_of(self, x: Any) -> Known:
        reference, known = self._known.get(id(x), (None, _ACTIVATION))
        if reference is not None and reference() is x:
            return known
        return _ACTIVATION if isinstance(x, jax.core.Tracer) else _CONSTANT

    def parameter(self, x: Any) -> str:
        """The name of the parameter from which an array comes; "" for an activation."""
        return self.names.get(self.known_of(x).source.parameter, "")

    def stored(self, x: Any) -> Any:
        """The codes and scales of the stored parameter that an array is, if it is one; else `x`."""
        original = self.known_of(x).original
        return original if isinstance(original, QArray) else x

    # What JAX calls.

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self.parent_trace):
            if _running.get() is not self:
                # It comes from a module inside of this one, through a `vmap` between them.
                return primitive.bind(*args, **params)
            if self.look is not None:
                self.look(self)
            known = [self.known_of(x) for x in args]
            mark = mark_in(primitive, params)
            if mark is not None and mark.is_excluded:
                out = primitive.bind(*args, **params)
                self.know(out, known[0]._replace(is_excluded=True))
                return out
            is_matmul = primitive.name in MATMULS
            if not is_matmul and not holds_matmuls(primitive, params):
                return self._unchanged(primitive, args, params, known)
            mark = self.mark
            if self.multiply is not None and not any(one.is_excluded for one in known):
                if primitive.name in BODIES:
                    return self._with_bodies(primitive, args, params, known)
                matmul = self._matmul(primitive.name, args, params, known) if is_matmul else None
                if matmul is not None:
                    self.seen.append(primitive.name)
                    with _watched(None):  # equal matmuls share one trace of JAX, eager or not
                        out = self.multiply(matmul)
                    if isinstance(out, Mark):
                        mark = out
                    elif out is not None:
                        self.know(out, Known(features=features_of_result(matmul, out.ndim)))
                        return out
            return self._excluded(primitive, args, params, known, mark)

    def process_custom_jvp_call(self, *call: Any, **params: Any) -> Any:
        return self._custom_call(self.parent_trace.process_custom_jvp_call, *call, **params)

    def process_custom_vjp_call(self, *call: Any, **params: Any) -> Any:
        outs = self._custom_call(self.parent_trace.process_custom_vjp_call, *call, **params)
        with set_current_trace(self.parent_trace):
            return [self._marked(out, self.mark) for out in outs]

    def _custom_call(self, process: Any, primitive: Any, *call: Any, **params: Any) -> Any:
        *functions, args = call  # the function and its jvp; or the function, fwd and bwd
        known = [self.known_of(x) for x in args]
        functions[0] = self._followed(functions[0], known)
        # A jvp gets all primals first; fwd gets each argument together with a flag.
        functions[1] = self._followed(functions[1], known, len(functions) - 1)
        outs = process(primitive, *functions, args, **params)
        self._note(Step(primitive.name, {}, *_types(args, outs)), known, outs)
        return outs

    def _followed(self, function: Any, known: Sequence[Known], step: int = 1) -> Any:
        """A function in which `qtoolkit.dot` knows its layer, also if JAX calls it much later."""
        context = contextvars.copy_context()

        def following(function: Any, *args: Any) -> Any:
            with replacing_matmuls(MatmulTrace(None, self.names)) as trace:
                for x, one in zip(args[::step], known, strict=False):
                    trace.know(x, one.within())
                return function(*args)

        run = lambda *args: context.run(following, *args)  # noqa: E731
        return linear_util.transformation2(run)(function)

    def process_shard_map(
        self, primitive: Any, function: Callable[..., Any], args: Any, **params: Any
    ) -> Any:
        if self.look is not None:
            self.look(self)
        known = [self.known_of(x) for x in args]

        def inside(*shards: Any) -> Any:
            inner = self.again()
            with replacing_matmuls(inner):
                for x, one in zip(shards, known, strict=True):
                    inner.know(x, one.within())
                return function(*shards)

        outs = self.parent_trace.process_shard_map(primitive, inside, args, **params)
        self._note_uses(known, [], is_loop=True)
        self.know_inputs(list(outs))
        return outs

    # The ways of an operation.

    def _unchanged(self, primitive: Any, args: Any, params: Any, known: Sequence[Known]) -> Any:
        """Runs an operation as it is, and notes what is known of its results."""
        if self.is_eager and primitive.name == "jit":
            params = {**params, "jaxpr": _copied(params["jaxpr"])}
        outs = primitive.bind(*args, **params)
        listed = outs if primitive.multiple_results else [outs]
        if (
            known and primitive.name not in _MOVING and all(one is _ACTIVATION for one in known)
        ):  # the most frequent case: a third of the tracing time of this class
            self.know_inputs([x for x in listed if not isinstance(x, jax.core.Tracer)])
            return outs
        step = Step(primitive.name, params, *_types(args, listed))

        def originals(source: Source) -> Any:
            if source.parameter is None:
                return None
            bind = lambda x: primitive.bind(x, *args[1:], **params)  # noqa: E731
            return original_of(step, bind, args[0], known[0].original)

        is_loop = self.other_uses is not None and holds_any_matmuls(params)
        self._note(step, known, listed, originals, is_loop)
        return outs

    def _excluded(
        self, primitive: Any, args: Any, params: Any, known: list[Known], mark: Mark | None
    ) -> Any:
        """Runs an operation with matmuls that are not replaced.

        The mark after it is for reports. The one before it tells a trace around this one, which may
        see it only later, in the body of a loop, that a rule excludes it.
        """
        if self.multiply is None:
            self.seen.append(primitive.name)
        is_number = [jnp.issubdtype(jnp.result_type(x), jnp.number) for x in args]
        if mark is not None and mark.is_excluded and any(is_number):
            args = list(args)
            at = is_number.index(True)
            args[at] = with_mark(args[at], mark)
        outs = self._unchanged(primitive, args, params, known)
        if primitive.multiple_results:
            return [self._marked(out, mark) for out in outs]
        return self._marked(outs, mark)

    def _marked(self, x: Any, mark: Mark | None) -> Any:
        """A result with a mark for reports, which trace the model under an instrument."""
        # The mark of an excluded matmul also tells a trace around this one that the two matmuls of
        # its derivative, which may run outside of this trace, are excluded.
        if mark is None or (instrument() is None and not mark.is_excluded):
            return x
        out = with_mark(x, mark)
        if out is not x:
            self.know(out, self.known_of(x))
        return out

    def _with_bodies(self, primitive: Any, args: Any, params: Any, known: list[Known]) -> Any:
        outs = BODIES[primitive.name](self, args, params)
        if primitive.name not in INLINED:
            self._note_uses(known, [], is_loop=True)
            for out in outs:
                self.know(out, _ACTIVATION)
        return outs

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Runs a jaxpr with its matmuls replaced."""
        with set_current_trace(self):
            return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))

    def body(self, closed: ClosedJaxpr, args: Sequence[Any], carried: range = range(0)) -> Body:
        """A jaxpr as a function of arrays and stored parameters, with its matmuls replaced.

        What is known of its arguments is what is known of `args`. Those that a loop carries may
        change from one iteration to the next, so their features are taken to lie along the last
        axis.
        """
        known = [self.known_of(x).within() for x in args]
        for i in carried:
            known[i] = known[i]._replace(features=LAST)

        def function(*arrays: Any) -> tuple[list[Any], Any]:
            inner = self.again()
            with replacing_matmuls(inner):
                values = []
                for x, one in zip(arrays, known, strict=True):
                    is_stored = isinstance(x, QArray)
                    values.append(x.dequantize() if is_stored else x)
                    inner.know(values[-1], one._replace(original=x) if is_stored else one)
                return inner.run(closed, values), ()

        return function

    def _matmul(self, name: str, args: Any, params: Any, known: list[Known]) -> Matmul | None:
        """The matmul that an operation computes.

        None for integers, and for ragged matmuls other than `lax.ragged_dot`.
        """
        if not all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in args[:2]):
            return None
        function: Bilinear
        match name:
            case "dot_general":
                names = ("dimension_numbers", "precision", "out_sharding")
                function = DotGeneral(**{name: params[name] for name in names})
            case "ragged_dot_general":
                numbers = params["ragged_dot_dimension_numbers"]
                if numbers != RAGGED or params["group_offset"] is not None:
                    return None
                function = RaggedDot(params["precision"])
            case _:
                function = ConvGeneralDilated(**{name: params[name] for name in _OF_CONVOLUTION})
        lhs, rhs = known[:2]
        dtype = params["preferred_element_type"]
        return Matmul(
            name,
            function,
            args[0] if lhs.original is None else lhs.original,
            args[1] if rhs.original is None else rhs.original,
            tuple(args[2:]),
            (self.parameter(args[0]), self.parameter(args[1])),
            args[0].dtype if dtype is None else dtype,
            (lhs.source, rhs.source),
            (lhs.features, rhs.features),
        )

    def _note(
        self,
        step: Step,
        known: Sequence[Known],
        outs: Any,
        originals: Callable[[Source], Any] = lambda source: None,
        is_loop: bool = False,
    ) -> None:
        """Notes what is known of the results of an operation."""
        sources = sources_of(step, [one.source for one in known])
        self._note_uses(known, sources, is_loop)
        places = features_of(step, [one.features for one in known]) if known else [LAST] * len(outs)
        for out, source, place in zip(outs, sources, places, strict=True):
            this = Known(source, place, originals(source))
            if this != _ACTIVATION or not isinstance(out, jax.core.Tracer):
                self.know(out, this)

    def _note_uses(
        self, known: Sequence[Known], sources: Sequence[Source], is_loop: bool = False
    ) -> None:
        """Notes the parameters that an operation uses, unless it only transposes or casts one."""
        if self.other_uses is not None and (not sources or sources[0].order is None):
            self.other_uses.update(
                (one.source.parameter, is_loop) for one in known if one.source.order is not None
            )


def _types(args: Any, outs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(map(jax.typeof, args)), tuple(map(jax.typeof, outs))


_running: contextvars.ContextVar[MatmulTrace | None] = contextvars.ContextVar("run", default=None)
running = _running.get  # the trace of a method, also if a `vmap` or a loop lies between
# Part of the key by which `jax.jit` finds compiled functions: without it, an eager call of
# `jnp.matmul` would run one that was compiled before, and no trace would see its matmul.
_watched = jax.make_user_context(None)


@functools.lru_cache(maxsize=4096)
def _copied(closed: ClosedJaxpr) -> ClosedJaxpr:
    """An equal jaxpr.

    `jax.jit` remembers what it ran for the jaxpr of a function and runs it again, without asking
    the trace, when the function is called a second time. It cannot if it ran another jaxpr.
    """
    return ClosedJaxpr(closed.jaxpr, closed.consts)


@contextlib.contextmanager
def replacing_matmuls(trace: MatmulTrace) -> Iterator[MatmulTrace]:
    """In this context matmuls are computed by `trace.multiply`."""
    watched = _watched(True) if trace.is_eager else contextlib.nullcontext()
    with set_current_trace(trace), set_variable(_running, trace), watched:
        yield trace


def is_watched() -> bool:
    """Whether a matmul that is computed now is seen, and may be replaced."""
    with take_current_trace() as trace:
        return isinstance(trace, MatmulTrace)
