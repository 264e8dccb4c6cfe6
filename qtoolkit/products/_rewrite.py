"""Products that a function computes by itself, `x @ w` or `jnp.einsum`, replaced in its jaxpr.

The function is traced, and the trace evaluated with other products. Nothing is patched, and what
the function calls need not know. Products inside of custom derivatives stay as they are.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from qtoolkit.products._bilinear import Bilinear, RaggedDot
from qtoolkit.products._functions import conv_function, dot_function

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
MARKER = "qtoolkit_product"  # the jitted function around each quantized product
SCOPE, LEFT = "qtoolkit=", "plainly.="  # in name stacks: layers with a recipe, and without one
# What moves the elements of a parameter, and of its wide original alike.
_VIEWS = (
    *("transpose", "reshape", "broadcast_in_dim", "squeeze", "copy", "expand_dims", "slice"),
    *("dynamic_slice", "stop_gradient", "sharding_constraint"),
)
_RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


class Found(NamedTuple):
    """A product found in a trace.

    Attributes:
      name: Of its primitive.
      function: What it computes.
      lhs, rhs, extra: Its operands.
      is_parameter: Whether lhs and rhs follow from parameters and constants alone.
      dtype: Of the result.
    """

    name: str
    function: Bilinear
    lhs: jax.Array
    rhs: jax.Array
    extra: tuple[jax.Array, ...]
    is_parameter: tuple[bool, bool]
    dtype: Any


class _Value(NamedTuple):
    array: Any
    is_parameter: bool
    wide: Any = None  # a parameter before its cast to half precision
    is_constant: bool = False


Multiply = Callable[[Found], jax.Array | None]


def rewritten(
    function: Callable[..., Any], multiply: Multiply, is_parameter: Callable[..., Any]
) -> Callable[..., Any]:
    """`function` with `multiply(found)` in place of each product, unless that gives None.

    Args:
      function: Pure, of pytrees of arrays.
      is_parameter: From the arguments to a pytree of booleans, one for each of their leaves.
    """

    def rewriting(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        flags = jax.tree.leaves(is_parameter(*args))
        inputs = [_Value(x, flag) for x, flag in zip(jax.tree.leaves(args), flags, strict=True)]
        outs = _evaluate(closed.jaxpr, closed.consts, inputs, multiply)
        return jax.tree.unflatten(jax.tree.structure(shapes), [out.array for out in outs])

    return rewriting


def has_products(jaxpr: Any) -> bool:
    """Whether a jaxpr computes a product that is not a quantized one."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in PRODUCTS:
            return True
        if not is_quantized(eqn) and any(has_products(inner) for inner in inner_jaxprs(eqn)):
            return True
    return False


def is_quantized(eqn: Any) -> bool:
    is_marker = eqn.params.get("name") == MARKER and "jaxpr" in eqn.params
    return is_marker or eqn.primitive.name == "linear_with_transpose"


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, list | tuple) else [value]:
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Value], multiply: Multiply
) -> list[_Value]:
    values: dict[Any, _Value] = {}

    def read(atom: Any) -> _Value:
        if isinstance(atom, Literal):
            return _Value(atom.val, False, is_constant=True)
        return values[atom]

    values.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        with eqn.ctx.manager, _scopes(eqn):
            outs = _equation(eqn, operands, multiply)
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _constant(x: Any) -> _Value:
    return _Value(x, False, is_constant=not isinstance(x, jax.core.Tracer))


@contextlib.contextmanager
def _scopes(eqn: Any) -> Iterator[None]:
    """The name stack in which the equation was traced."""
    with contextlib.ExitStack() as stack:
        for name in str(eqn.source_info.name_stack).split("/"):
            if name and "(" not in name:  # the names of transformations have them
                stack.enter_context(jax.named_scope(name))
        yield


def _equation(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[_Value]:
    name = eqn.primitive.name
    if LEFT in str(eqn.source_info.name_stack):  # of a layer that a rule leaves as it is
        return _bound(eqn, operands)
    if name in PRODUCTS:
        found = _found(eqn, operands)
        out = None if found is None else multiply(found)
        if out is not None:
            return [_Value(out, False)]
    elif not is_quantized(eqn) and any(map(has_products, inner_jaxprs(eqn))):
        rewrite = _REWRITES.get(name)
        if rewrite is not None:
            return rewrite(eqn, operands, multiply)
    return _bound(eqn, operands)


def _bound(eqn: Any, operands: list[_Value]) -> list[_Value]:
    """The equation as it is."""
    params = eqn.primitive.get_bind_params(eqn.params)
    outs = eqn.primitive.bind(*(x.array for x in operands), **params)
    outs = outs if eqn.primitive.multiple_results else [outs]
    name = eqn.primitive.name
    is_constant = all(x.is_constant for x in operands)
    is_parameter = not is_constant and all(x.is_parameter or x.is_constant for x in operands)
    wide = None
    if is_parameter and name == "convert_element_type":
        wide = _before_cast(operands[0], outs[0].dtype)
    elif is_parameter and name in _VIEWS and operands[0].wide is not None:
        others = (x.array for x in operands[1:])
        wide = eqn.primitive.bind(operands[0].wide, *others, **params)
    return [_Value(out, is_parameter, wide, is_constant) for out in outs]


def _before_cast(operand: _Value, dtype: Any) -> Any:
    """The original of a parameter cast to half precision; a rounding of the user's own stays."""
    if dtype not in (jnp.bfloat16, jnp.float16) or operand.array.dtype != jnp.float32:
        return None
    return operand.array


def _found(eqn: Any, operands: list[_Value]) -> Found | None:
    """The product of an equation; None for integers, and for ragged sums of other kinds."""
    lhs, rhs, *extra = operands
    params = eqn.params
    if not all(jnp.issubdtype(x.array.dtype, jnp.floating) for x in (lhs, rhs)):
        return None
    function: Bilinear
    match eqn.primitive.name:
        case "dot_general":
            names = ("dimension_numbers", "precision", "out_sharding")
            function = dot_function(*(params[name] for name in names))
        case "ragged_dot_general":
            if (
                params["ragged_dot_dimension_numbers"] != _RAGGED
                or params["group_offset"] is not None
            ):
                return None
            function = RaggedDot(params["precision"])
        case _:
            function = conv_function(
                params["window_strides"],
                params["padding"],
                params["lhs_dilation"],
                params["rhs_dilation"],
                params["dimension_numbers"],
                params["feature_group_count"],
                params["batch_group_count"],
                params["precision"],
                None,
            )
    return Found(
        eqn.primitive.name,
        function,
        _as_parameter(lhs),
        _as_parameter(rhs),
        tuple(x.array for x in extra),
        (lhs.is_parameter, rhs.is_parameter),
        eqn.outvars[0].aval.dtype,
    )


def _as_parameter(value: _Value) -> Any:
    """A parameter is rounded from its own dtype: not from a bfloat16 copy, which rounds twice."""
    return value.array if value.wide is None else value.wide


def _call(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[_Value]:
    closed = eqn.params["jaxpr"]
    return _evaluate(closed.jaxpr, closed.consts, operands, multiply)


def _remat(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[_Value]:
    params = eqn.params
    rerun = jax.checkpoint(
        _on_arrays(params["jaxpr"], (), operands, multiply),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    return _values(rerun(*(x.array for x in operands)))


def _scan(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[_Value]:
    params = eqn.params
    if "ft_in" in params:  # jax 0.12: three trees of consts, carry and xs
        consts, carries, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        consts, carries = params["num_consts"], params["num_carry"]
    closed = params["jaxpr"]
    body = _on_arrays(closed.jaxpr, closed.consts, operands, multiply)
    kept, state, xs = (
        [x.array for x in part]
        for part in (
            operands[:consts],
            operands[consts : consts + carries],
            operands[consts + carries :],
        )
    )

    def step(carry: Any, x: Any) -> Any:
        outs = body(*kept, *carry, *x)
        return outs[:carries], outs[carries:]

    carry, ys = lax.scan(
        step,
        state,
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return _values([*carry, *ys])


def _cond(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[_Value]:
    index, *rest = operands
    branches = [
        _on_arrays(closed.jaxpr, closed.consts, rest, multiply) for closed in eqn.params["branches"]
    ]
    return _values(lax.switch(index.array, branches, *(x.array for x in rest)))


def _while(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[_Value]:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = operands[:n_cond], operands[n_cond : n_cond + n_body]
    state = operands[n_cond + n_body :]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    test = _on_arrays(condition.jaxpr, condition.consts, [*of_cond, *state], multiply)
    step = _on_arrays(body.jaxpr, body.consts, [*of_body, *state], multiply)
    out = lax.while_loop(
        lambda carry: test(*(x.array for x in of_cond), *carry)[0],
        lambda carry: step(*(x.array for x in of_body), *carry),
        [x.array for x in state],
    )
    return _values(out)


def _on_arrays(
    jaxpr: Any, consts: Sequence[Any], like: Sequence[_Value], multiply: Multiply
) -> Callable[..., list[Any]]:
    """A jaxpr as a function of arrays, which are parameters where those of `like` are."""
    flags = [(value.is_parameter, value.is_constant) for value in like]

    def function(*arrays: Any) -> list[Any]:
        inputs = [_Value(x, p, None, c) for x, (p, c) in zip(arrays, flags, strict=True)]
        return [out.array for out in _evaluate(jaxpr, consts, inputs, multiply)]

    return function


def _values(arrays: Sequence[Any]) -> list[_Value]:
    return [_Value(x, False) for x in arrays]


_REWRITES = {
    "jit": _call,
    "pjit": _call,
    "checkpoint": _remat,
    "remat": _remat,
    "remat2": _remat,
    "scan": _scan,
    "cond": _cond,
    "while": _while,
}
