"""Replaces the products that a function computes by itself, such as `x @ w` or `jnp.einsum`.

While the function runs, a `jax.core.Trace` stands between it and JAX, as those of `jax.vmap` and
`jax.jvp` do: it gets every operation, computes it as it is, and a product by `multiply`. Nothing is
patched, so this works for whatever the function calls. The bodies of `jit`, `scan`, `cond`,
`while_loop`, `remat` and `shard_map` arrive as jaxprs, and run in the same way. Products inside of
custom derivatives are left as they are.
"""

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, set_current_trace, take_current_trace

from qtoolkit.products._analyses import (
    ACTIVATION,
    CONSTANT,
    LAST,
    Matmul,
    Source,
    Step,
    moved,
    of_result,
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
from qtoolkit.products._instruments import set_variable
from qtoolkit.products._place import Mark, Place, mark_in, with_mark
from qtoolkit.scaling import QArray

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
SCALED = "scaled_dot"  # never replaced: its operands are rounded already
QUANTIZED_MATMUL = "qtoolkit_product"  # the jitted function around each quantized product
_OF_CONVOLUTION = (  # parameters of the primitive that describe the product
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("feature_group_count", "batch_group_count", "precision"),
)

_MOVING = ("transpose", "jit", "pjit")  # may move features away from the last axis
# The result of a product; a mark, if a rule leaves it in high precision; None, if it just stays.
Multiply = Callable[[Matmul], "jax.Array | Mark | None"]


class Known(NamedTuple):
    """What is known of a value while a function runs.

    Attributes:
      source: Where it comes from.
      features: The axis along which features lie, from the end.
      original: What a product rounds in its place: see `original_of`.
      is_left: Whether it is an operand of a product that a rule leaves in high precision.
    """

    source: Source = ACTIVATION
    features: int = LAST
    original: Any = None
    is_left: bool = False

    def within(self) -> "Known":
        """The same of a value inside of a loop or a `shard_map`, where it is another array."""
        return self._replace(source=self.source._replace(order=None), original=None)


_ACTIVATION = Known()
_NOWHERE = Mark(Place("", ""))


class MatmulTrace(jax.core.Trace):
    """The trace that replaces products, on top of the one in which the function runs.

    Attributes:
      parent_trace: The trace underneath, in which everything is computed.
      multiply: Returns the result of a product; None leaves the product as it is. If there is no
        `multiply`, all stay.
      names: The names of parameters, by what `Source.parameter` says.
      mark: What the program says of products that stay as they are.
      other_uses: Filled with the parameters that anything but a product uses; None: nobody asks.
      look: Called before each operation, to know parameters that the function has made.
      seen: The names of the primitives of the products that have run.
    """

    parent_trace: Any

    def __init__(
        self,
        multiply: Multiply | None,
        names: Mapping[Any, str],
        *,
        mark: Mark = _NOWHERE,
        other_uses: set[Any] | None = None,
        look: Callable[["MatmulTrace"], None] | None = None,
        seen: list[str] | None = None,
    ) -> None:
        super().__init__()
        with take_current_trace() as parent:
            pass
        self._known: dict[int, tuple[Any, Known]] = {}
        self._parameters: list[jax.Array] = []
        if isinstance(parent, MatmulTrace):  # of the module around this one
            self._known, parent = parent._known, parent.parent_trace
        self.parent_trace = parent
        self.multiply, self.names, self.mark = multiply, names, mark
        self.other_uses, self.look = other_uses, look
        self.seen: list[str] = [] if seen is None else seen
        self.is_eager = getattr(parent, "is_eager", isinstance(parent, EAGER))
        self.requires_low = parent.requires_low
        # Flax compares this reference to forbid that a variable of one trace is changed in another.
        # It is the parent's: no value of this trace differs from one of that.
        self._weakref = parent._weakref

    def know(self, x: Any, known: Known) -> None:
        with contextlib.suppress(TypeError):  # a number of Python or NumPy, which is a constant
            self._known[id(x)] = weakref.ref(x), known

    def know_inputs(self, tree: Any) -> None:
        """Notes that the arrays in a pytree are no parameters, and no constants."""
        for x in jax.tree.leaves(tree):
            if isinstance(x, jax.Array):
                self.know(x, _ACTIVATION)

    def know_parameter(self, x: jax.Array, original: Any = None) -> None:
        """Notes that an array is a parameter, whose key in `names` is its id."""
        self._parameters.append(x)  # so that no other array gets its id
        self.know(x, Known(Source(id(x), order=()), original=original))

    def known_of(self, x: Any) -> Known:
        reference, known = self._known.get(id(x), (None, _ACTIVATION))
        if reference is not None and reference() is x:
            return known
        is_activation = isinstance(x, jax.core.Tracer)
        return _ACTIVATION if is_activation else Known(CONSTANT)

    def original_codes(self, x: Any) -> Any:
        """The stored parameter that an array is, if it is one; else the array."""
        original = self.known_of(x).original
        return original if isinstance(original, QArray) else x

    def original(self, x: Any) -> Any:
        known = self.known_of(x)
        return x if known.original is None else known.original

    def again(self) -> "MatmulTrace":
        """The same on top of the present trace, for the body of a loop."""
        return MatmulTrace(
            self.multiply,
            self.names,
            mark=self.mark,
            other_uses=self.other_uses,
            look=self.look,
            seen=self.seen,
        )

    def stage_value(self, value: Any) -> Any:
        return self.parent_trace.stage_value(value)

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self.parent_trace):
            if _running.get() is not self:
                # It comes from a module inside of this one, through a `vmap` between them.
                return primitive.bind(*args, **params)
            if self.look is not None:
                self.look(self)
            name, mark = primitive.name, mark_in(primitive, params)
            if mark is not None and mark.is_left:
                out = primitive.bind(*args, **params)
                self.know(out, self.known_of(args[0])._replace(is_left=True))
                return out
            if name not in MATMULS and not _computes_products(primitive, params):
                return self._as_it_is(primitive, args, params)
            if self.multiply is not None and not any(self.known_of(x).is_left for x in args):
                if name in _REWRITES:
                    return self._replaced_within(name, args, params)
                found = self._found(name, args, params) if name in MATMULS else None
                if found is not None:
                    self.seen.append(name)
                    with _watched(None):  # equal products share one trace, eager or not
                        out = self.multiply(found)
                    if isinstance(out, Mark):
                        return self._left(primitive, args, params, out)
                    if out is not None:
                        self.know(out, Known(features=of_result(found, out.ndim)))
                        return out
            return self._left(primitive, args, params, self.mark)

    def process_custom_jvp_call(self, *args: Any, **params: Any) -> Any:
        outs = self.parent_trace.process_custom_jvp_call(*args, **params)
        return self._noted(Step("custom_jvp_call", {}, *_types(args[-1], outs)), args[-1], outs)

    def process_custom_vjp_call(self, *args: Any, **params: Any) -> Any:
        outs = self.parent_trace.process_custom_vjp_call(*args, **params)
        with set_current_trace(self.parent_trace):
            outs = [with_mark(out, self.mark) for out in outs]
        return self._noted(Step("custom_vjp_call", {}, *_types(args[-1], outs)), args[-1], outs)

    def process_call(self, *args: Any, **params: Any) -> Any:
        return self.parent_trace.process_call(*args, **params)

    def process_shard_map(
        self, primitive: Any, function: Callable[..., Any], args: Any, **params: Any
    ) -> Any:
        known = [self.known_of(x) for x in args]

        def inside(*shards: Any) -> Any:
            inner = self.again()
            with replacing_matmuls(inner):
                for x, one in zip(shards, known, strict=True):
                    inner.know(x, one.within())
                return function(*shards)

        outs = self.parent_trace.process_shard_map(primitive, inside, args, **params)
        self._note_uses(known, [])
        self.know_inputs(list(outs))
        return outs

    def _replaced_within(self, name: str, args: Any, params: Any) -> Any:
        outs = _REWRITES[name](self, args, params)
        if name not in ("jit", "pjit"):
            self._note_uses([self.known_of(x) for x in args], [])
            for out in outs:
                self.know(out, _ACTIVATION)
        return outs

    def _left(self, primitive: Any, args: Any, params: Any, mark: Mark) -> Any:
        """An operation with products that stay as they are.

        The mark after it is for reports. The one before it tells a trace around this one, which may
        see it only later, in the body of a loop, that a rule leaves it.
        """
        if self.multiply is None:
            self.seen.append(primitive.name)
        args = list(args)
        at = next((i for i, x in enumerate(args) if _is_number(x)), None)
        if mark.is_left and at is not None:
            args[at] = with_mark(args[at], mark)
        outs = self._as_it_is(primitive, args, params)
        if primitive.multiple_results:
            return [self._marked(out, mark) for out in outs]
        return self._marked(outs, mark)

    def _marked(self, x: Any, mark: Mark) -> Any:
        out = with_mark(x, mark)
        if out is not x:
            self.know(out, self.known_of(x))
        return out

    def _as_it_is(self, primitive: Any, args: Any, params: Any) -> Any:
        if self.is_eager and primitive.name == "jit":
            params = {**params, "jaxpr": _copied(params["jaxpr"])}
        outs = primitive.bind(*args, **params)
        listed = outs if primitive.multiple_results else [outs]
        is_plain = all(self.known_of(x) is _ACTIVATION for x in args) and len(args) > 0
        if is_plain and primitive.name not in _MOVING:  # saves a third of the time
            self.know_inputs([x for x in listed if not isinstance(x, jax.core.Tracer)])
            return outs
        step = Step(primitive.name, params, *_types(args, listed))
        bind = functools.partial(_bound, primitive, args[1:], params)
        self._noted(step, args, listed, bind)
        return outs

    def _noted(self, step: Step, args: Any, outs: Any, bind: Any = None) -> Any:
        """Notes what is known of the results of an operation, which it returns."""
        known = [self.known_of(x) for x in args]
        sources = sources_of(step, [x.source for x in known])
        self._note_uses(known, sources)
        places = moved(step, [x.features for x in known]) if known else [LAST] * len(outs)
        for out, source, place in zip(outs, sources, places, strict=True):
            original = None
            if source.parameter is not None and bind is not None:
                original = original_of(step, bind, args[0], known[0].original)
            this = Known(source, place, original)
            if this != _ACTIVATION or not isinstance(out, jax.core.Tracer):
                self.know(out, this)
        return outs

    def _note_uses(self, known: Sequence[Known], sources: Sequence[Source]) -> None:
        if self.other_uses is None:
            return
        if not sources or sources[0].order is None:
            for value in known:
                if value.source.order is not None:
                    self.other_uses.add(value.source.parameter)

    def _found(self, name: str, args: Any, params: Any) -> Matmul | None:
        """The product that an operation computes.

        None for integers, and for ragged products other than `lax.ragged_dot`.
        """
        if not all(_is_float(x) for x in args[:2]):
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
        lhs, rhs = known = [self.known_of(x) for x in args[:2]]
        dtype = params["preferred_element_type"]
        first, second = (self.names.get(x.source.parameter, "") for x in known)
        return Matmul(
            name,
            function,
            self.original(args[0]),
            self.original(args[1]),
            tuple(args[2:]),
            (first, second),
            args[0].dtype if dtype is None else dtype,
            (lhs.source, rhs.source),
            (lhs.features, rhs.features),
        )


def _types(args: Any, outs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(map(jax.typeof, args)), tuple(map(jax.typeof, outs))


def _bound(primitive: Any, others: Any, params: Any, x: Any) -> Any:
    return primitive.bind(x, *others, **params)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _is_number(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.number)


with jax.core.eval_context(), take_current_trace() as _trace:
    EAGER: Any = type(_trace)
_running: contextvars.ContextVar[MatmulTrace | None] = contextvars.ContextVar("run", default=None)
# Part of the key by which `jax.jit` finds compiled functions: without it, an eager call of
# `jnp.matmul` would run one that was compiled before, and no trace would see its product.
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
    """In this context products are computed by `trace.multiply`."""
    watched = _watched(True) if trace.is_eager else contextlib.nullcontext()
    with set_current_trace(trace), set_variable(_running, trace), watched:
        yield trace


def is_watched() -> bool:
    """Whether a product that is computed now is seen, and may be replaced."""
    with take_current_trace() as trace:
        return isinstance(trace, MatmulTrace)


@functools.lru_cache(maxsize=4096)
def has_products(jaxpr: Any) -> bool:
    """Whether a jaxpr computes a product that is not a quantized one."""
    return any(
        eqn.primitive.name in MATMULS or _computes_products(eqn.primitive, eqn.params)
        for eqn in jaxpr.eqns
    )


def _computes_products(primitive: Any, params: Any) -> bool:
    """Whether an operation runs jaxprs that compute products which are not quantized ones."""
    if primitive.name == "linear_with_transpose" or params.get("name") == QUANTIZED_MATMUL:
        return False
    return any(map(has_products, jaxprs_in(params)))


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    return jaxprs_in(eqn.params)


def jaxprs_in(params: Mapping[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else [value]:
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found


def with_values(leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """A copy of `leaves` with `values` at `places`."""
    merged = list(leaves)
    for place, value in zip(places, values, strict=True):
        merged[place] = value
    return merged


def _inlined(trace: MatmulTrace, args: Any, params: Any) -> Any:
    return _run(trace, params["jaxpr"], args)


def _run(trace: MatmulTrace, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    with set_current_trace(trace):
        return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))


def _remat(trace: MatmulTrace, args: Any, params: Any) -> Any:
    body = _body(trace, ClosedJaxpr(params["jaxpr"], ()), args)
    options = {name: params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(body, **options)(*map(trace.original_codes, args))


def scan_lengths(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants and how many carried values a scan has."""
    if "ft_in" in params:  # jax 0.12: three trees of consts, carry and xs
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def _scan(trace: MatmulTrace, args: Any, params: Any) -> Any:
    fixed, carries = scan_lengths(params)
    consts, state, xs = args[:fixed], args[fixed:][:carries], args[fixed + carries :]
    body = _body(trace, params["jaxpr"], args, range(fixed, fixed + carries))
    passed = [*map(trace.original_codes, consts)]

    def step(carry: Any, x: Any) -> Any:
        outs = body(*passed, *carry, *x)
        return outs[:carries], outs[carries:]

    sliced = [_sliceable(trace, x) for x in xs]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, list(state), sliced, **options)
    return [*carry, *ys]


def _cond(trace: MatmulTrace, args: Any, params: Any) -> Any:
    index, *rest = args
    branches = [_body(trace, closed, rest) for closed in params["branches"]]
    return lax.switch(index, branches, *map(trace.original_codes, rest))


def _while(trace: MatmulTrace, args: Any, params: Any) -> Any:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = args[:n_cond], args[n_cond : n_cond + n_body]
    state = args[n_cond + n_body :]
    test = _body(trace, params["cond_jaxpr"], [*of_cond, *state], range(n_cond, 10**6))
    step = _body(trace, params["body_jaxpr"], [*of_body, *state], range(n_body, 10**6))
    of_cond, of_body = ([*map(trace.original_codes, part)] for part in (of_cond, of_body))
    return lax.while_loop(
        lambda carry: test(*of_cond, *carry)[0], lambda carry: step(*of_body, *carry), list(state)
    )


def _sliceable(trace: MatmulTrace, x: Any) -> Any:
    """Prepares a value that a scan slices along its first axis.

    A QArray that is a stack of kernels, each with its own scales, is sliced as codes. Any other
    stays dequantized: its slices would tear blocks apart or lack a scale.
    """
    codes = trace.original_codes(x)
    if isinstance(codes, QArray):
        has_one = codes.tensor_scale is not None and codes.tensor_scale.ndim == 0
        if codes.ndim < 2 or codes.blocks.lengths[0] != 1 or has_one:
            return x
    return codes


def _body(
    trace: MatmulTrace, closed: ClosedJaxpr, args: Sequence[Any], carried: range = range(0)
) -> Callable[..., list[Any]]:
    """A jaxpr as a function of arrays and stored parameters, with its products replaced.

    What is known of its arguments is what is known of `args`. Those that a loop carries may change
    from one iteration to the next, so their features are taken to lie along the last axis.
    """
    known = [trace.known_of(x) for x in args]
    places = [LAST if i in carried else one.features for i, one in enumerate(known)]

    def function(*arrays: Any) -> list[Any]:
        inner = trace.again()
        with replacing_matmuls(inner):
            values = []
            for x, one, place in zip(arrays, known, places, strict=True):
                value = x.dequantize() if isinstance(x, QArray) else x
                original = x if value is not x else None
                inner.know(value, one.within()._replace(features=place, original=original))
                values.append(value)
            return _run(inner, closed, values)

    return function


_REWRITES = {
    "jit": _inlined,
    "pjit": _inlined,
    "checkpoint": _remat,
    "remat": _remat,
    "remat2": _remat,
    "scan": _scan,
    "cond": _cond,
    "while": _while,
}
