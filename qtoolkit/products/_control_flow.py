"""Operations that hold jaxprs: which of them compute matmuls, and how to run their bodies anew.

JAX has traced the body of a `lax.scan` to a jaxpr before any trace around it sees the `scan`. To
replace a matmul in it, the body is made a Python function again, which evaluates the jaxpr under a
`MatmulTrace`, and the public function of JAX is called with that: `lax.scan` traces it anew. What
the replaced matmuls need besides, such as state, it closes over, and JAX makes it an operand.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, take_current_trace

from qtoolkit.scaling import QArray

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
SCALED = "scaled_dot"  # never replaced: its operands are rounded already
QUANTIZED_MATMUL = "qtoolkit_product"  # the jitted function around each quantized matmul


with jax.core.eval_context(), take_current_trace() as _trace:
    _EAGER: Any = type(_trace)


class PassingTrace(jax.core.Trace):
    """A trace that computes every operation in the trace underneath, its parent."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.parent_trace = parent
        self.is_eager: bool = getattr(parent, "is_eager", isinstance(parent, _EAGER))
        self.requires_low = parent.requires_low
        # Flax compares this reference to forbid that a variable of one trace is changed in another.
        # It is the parent's: no value of this trace differs from one of that.
        self._weakref = parent._weakref

    def stage_value(self, value: Any) -> Any:
        return self.parent_trace.stage_value(value)

    def process_custom_jvp_call(self, *args: Any, **params: Any) -> Any:
        return self.parent_trace.process_custom_jvp_call(*args, **params)

    def process_custom_vjp_call(self, *args: Any, **params: Any) -> Any:
        return self.parent_trace.process_custom_vjp_call(*args, **params)

    def process_call(self, *args: Any, **params: Any) -> Any:
        return self.parent_trace.process_call(*args, **params)

    def process_shard_map(self, *args: Any, **params: Any) -> Any:
        return self.parent_trace.process_shard_map(*args, **params)


@functools.lru_cache(maxsize=4096)
def _has_matmuls(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in MATMULS or holds_matmuls(eqn.primitive, eqn.params)
        for eqn in jaxpr.eqns
    )


def holds_matmuls(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Whether an operation runs jaxprs that compute matmuls which are not quantized yet."""
    if primitive.name == "linear_with_transpose" or params.get("name") == QUANTIZED_MATMUL:
        return False
    return any(map(_has_matmuls, jaxprs_in(params)))


def holds_any_matmuls(params: Mapping[str, Any]) -> bool:
    """The same of all matmuls, also of those that are quantized."""
    return any(
        eqn.primitive.name in MATMULS or holds_any_matmuls(eqn.params)
        for jaxpr in jaxprs_in(params)
        for eqn in jaxpr.eqns
    )


def jaxprs_in(params: Mapping[str, Any]) -> list[Any]:
    """The jaxprs among the parameters of an equation, alone or in lists."""
    jaxprs = []
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else [value]:
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                jaxprs.append(jaxpr)
    return jaxprs


def scan_lengths(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants and how many carried values a scan has."""
    if "ft_in" in params:  # jax 0.12: three trees of consts, carry and xs
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


# What runs in place of a jaxpr: from its operands, or pytrees in their place, to its results and
# whatever else the trace wants out of it.
Body = Callable[..., tuple[list[Any], Any]]


def run_with_bodies(
    name: str,
    args: Sequence[Any],
    params: Mapping[str, Any],
    body_of: Callable[[ClosedJaxpr], Body],
) -> tuple[list[Any], Any]:
    """A `scan`, `cond` or `remat` with other bodies. A scan stacks what else is wanted."""
    results: tuple[list[Any], Any]
    if name == "cond":
        index, *operands = args
        results = lax.switch(index, [*map(body_of, params["branches"])], *operands)
        return results
    if name != "scan":
        options = {name: params[name] for name in ("prevent_cse", "policy")}
        body = body_of(ClosedJaxpr(params["jaxpr"], ()))
        results = jax.checkpoint(body, **options)(*args)
        return results
    fixed, carries = scan_lengths(params)
    consts, carry, xs = args[:fixed], args[fixed:][:carries], args[fixed + carries :]
    body = body_of(params["jaxpr"])

    def step(carry: Any, x: Any) -> Any:
        outs, more = body(*consts, *carry, *x)
        return outs[:carries], (outs[carries:], more)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, (ys, more) = lax.scan(step, list(carry), list(xs), **options)
    return [*last, *ys], more


# The rules below take a `MatmulTrace`, and the operands and parameters of an operation. A stored
# parameter goes into a body as its codes and scales (`trace.stored`), a pytree; in the body it is
# dequantized for what is no matmul (`trace.body`).


def _jit(trace: Any, args: Any, params: Any) -> list[Any]:
    return list(trace.run(params["jaxpr"], args))  # inlined: what is known of values stays known


def _remat(trace: Any, args: Any, params: Any) -> list[Any]:
    given = [*map(trace.stored, args)]
    return run_with_bodies("remat", given, params, lambda closed: trace.body(closed, args))[0]


def _cond(trace: Any, args: Any, params: Any) -> list[Any]:
    index, *rest = args
    given = [index, *map(trace.stored, rest)]
    return run_with_bodies("cond", given, params, lambda closed: trace.body(closed, rest))[0]


def _scan(trace: Any, args: Any, params: Any) -> list[Any]:
    fixed, carries = scan_lengths(params)
    end = fixed + carries
    given = [*map(trace.stored, args[:fixed]), *args[fixed:end]]
    given += [_sliceable(trace.stored(x), x) for x in args[end:]]
    return run_with_bodies(
        "scan", given, params, lambda closed: trace.body(closed, args, range(fixed, end))
    )[0]


def _sliceable(stored: Any, x: Any) -> Any:
    """What a scan slices along its first axis: codes if each slice has scales of its own, else `x`.

    Slices of other stored parameters would tear blocks apart or lack a scale.
    """
    if isinstance(stored, QArray):
        shares_scale = stored.tensor_scale is not None and stored.tensor_scale.ndim == 0
        if stored.ndim < 2 or stored.blocks.lengths[0] != 1 or shares_scale:
            return x
    return stored


def _while(trace: Any, args: Any, params: Any) -> list[Any]:
    n_test, n_step = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_step, carry = args[:n_test], args[n_test:][:n_step], args[n_test + n_step :]
    loop = range(n_test, n_test + len(carry)), range(n_step, n_step + len(carry))
    test = trace.body(params["cond_jaxpr"], [*of_test, *carry], loop[0])
    step = trace.body(params["body_jaxpr"], [*of_step, *carry], loop[1])
    of_test, of_step = ([*map(trace.stored, part)] for part in (of_test, of_step))
    return list(
        lax.while_loop(
            lambda carry: test(*of_test, *carry)[0][0],
            lambda carry: step(*of_step, *carry)[0],
            list(carry),
        )
    )


INLINED = ("jit", "pjit")
BODIES: dict[str, Callable[[Any, Any, Any], list[Any]]] = {
    **dict.fromkeys(INLINED, _jit),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), _remat),
    "scan": _scan,
    "cond": _cond,
    "while": _while,
}


def run_in(
    context: Callable[[], contextlib.AbstractContextManager[Any]],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a function in a context; a generator or coroutine runs each of its steps in a new one.

    The call of a generator function runs none of its code. Each `next` does, where the caller
    iterates, and what the caller computes in between must not run in our context.
    """
    with context():
        out = function(*args, **kwargs)
    return _in_steps(out, context) if isinstance(out, Generator | Coroutine) else out


@types.coroutine
def _in_steps(
    running: Any, context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Iterator[Any]:
    step, value = running.send, None
    while True:
        is_done = False
        with context():
            try:
                out = step(value)
            except StopIteration as end:  # caught here, so that the context ends as after any step
                is_done, out = True, end.value
        if is_done:
            return out
        try:
            step, value = running.send, (yield out)
        except GeneratorExit:
            running.close()
            raise
        except BaseException as error:
            step, value = running.throw, error
