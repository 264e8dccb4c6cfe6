"""Replaces the products that a function computes by itself, such as `x @ w` or `jnp.einsum`.

The function is traced to a jaxpr, and the jaxpr is evaluated with other products in place of its
own. Nothing is patched, so this works for whatever the function calls. Products inside of custom
derivatives are left as they are.
"""

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
from jax.extend.source_info_util import user_context

from qtoolkit.products._bilinear import (
    RAGGED,
    Bilinear,
    ConvGeneralDilated,
    DotGeneral,
    RaggedDot,
)
from qtoolkit.products._features import LAST, moved, of_result
from qtoolkit.products._found import Found, Origin, Standing
from qtoolkit.scaling import QArray

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
SCALED = "scaled_dot"  # never replaced: its operands are rounded already
MARKER = "qtoolkit_product"  # the jitted function around each quantized product
# Prefixes of names in the name stack: of layers with a recipe, and of layers that a rule leaves.
SCOPE, LEFT = "qtoolkit=", "plainly.="
# Primitives that only move elements. They are applied to a bfloat16 copy of a parameter and to its
# float32 original alike, so that a later product can round the original.
_VIEWS = (
    *("transpose", "reshape", "broadcast_in_dim", "squeeze", "copy", "expand_dims", "slice"),
    *("dynamic_slice", "stop_gradient", "sharding_constraint"),
)
_OF_CONVOLUTION = (  # parameters of the primitive that describe the product
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("feature_group_count", "batch_group_count", "precision"),
)


class _Value(NamedTuple):
    """A value during the evaluation of a jaxpr, with what is known about it: see `Found`."""

    array: Any
    parameter: str = ""
    wide: Any = None  # a parameter before its cast to half precision
    is_constant: bool = False
    origin: Origin | None = None
    features: int = LAST


Multiply = Callable[[Found], jax.Array | None]


def rewritten(
    function: Callable[..., Any],
    multiply: Multiply,
    parameters: Callable[..., Any] | None = None,
    made: Callable[[Any], Any] | None = None,
    captured: Mapping[int, str] = types.MappingProxyType({}),
) -> Callable[..., Any]:
    """`function` with `multiply(found)` in place of each product.

    Args:
      function: A pure function of pytrees of arrays. Its arguments may contain `Standing`, to pass
        a `QArray` to products as it is.
      multiply: Returns the result of a product; None leaves the product as it is.
      parameters: Called with the arguments, it returns a pytree with one leaf for each of their
        leaves: the name of a parameter or its `Origin`, or "" for anything else. None: it has no
        parameters.
      made: Called with the shapes of the results, it returns such a pytree for these, with names
        for parameters that the function creates. None: it creates none.
      captured: Names of parameters that the function closes over, by the ids of their arrays.
    """

    def rewriting(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        traced = jax.tree.unflatten(structure, [_stand_in(leaf) for leaf in leaves])
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*traced)
        given = [""] * len(leaves) if parameters is None else jax.tree.leaves(parameters(*args))
        inputs = [_input(leaf, one) for leaf, one in zip(leaves, given, strict=True)]
        names = {} if made is None else _names(closed.jaxpr.outvars, made(shapes))
        outs = _evaluate(closed, inputs, multiply, names, captured)
        for out in outs:
            _is_used_otherwise(out)
        arrays = [_widened(out).array for out in outs]
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    return rewriting


def _stand_in(leaf: Any) -> Any:
    if not isinstance(leaf, Standing):
        return leaf
    return jax.ShapeDtypeStruct(leaf.array.shape, leaf.array.dtype)


def _input(leaf: Any, given: Any) -> _Value:
    array = leaf.array if isinstance(leaf, Standing) else leaf
    if isinstance(given, Origin):
        return _Value(array, given.parameter, origin=given)
    return _Value(array, given)


def _names(variables: Sequence[Any], names: Any) -> dict[Any, str]:
    """A name for each variable of a jaxpr that is a parameter."""
    pairs = zip(variables, jax.tree.leaves(names), strict=True)
    return {
        variable: name for variable, name in pairs if name and not isinstance(variable, Literal)
    }


def _is_used_otherwise(value: _Value) -> None:
    if value.origin is not None:
        value.origin.other_uses.add(value.origin.name)


def _widened(value: _Value) -> _Value:
    """The value as an ordinary array, for operations other than products: a QArray dequantized."""
    if isinstance(value.array, QArray):
        return value._replace(array=value.array.dequantize())
    return value


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


def with_values(leaves: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """A copy of `leaves` with `values` at `places`."""
    merged = list(leaves)
    for place, value in zip(places, values, strict=True):
        merged[place] = value
    return merged


def _evaluate(
    closed: ClosedJaxpr,
    inputs: Sequence[_Value],
    multiply: Multiply,
    names: Mapping[Any, str] = types.MappingProxyType({}),
    captured: Mapping[int, str] = types.MappingProxyType({}),
) -> list[_Value]:
    """Evaluates a jaxpr with its products replaced; `names` are those that `_names` found."""
    jaxpr = closed.jaxpr
    values: dict[Any, _Value] = {}

    def read(atom: Any) -> _Value:
        if isinstance(atom, Literal):
            return _Value(atom.val, is_constant=True)
        return values[atom]

    def write(variables: Sequence[Any], found: Iterable[_Value]) -> None:
        for variable, value in zip(variables, found, strict=True):
            name = names.get(variable)
            values[variable] = value._replace(parameter=name, is_constant=False) if name else value

    def const(x: Any) -> _Value:
        name = captured.get(id(x), "")
        return _Value(x, name, is_constant=not name and not isinstance(x, jax.core.Tracer))

    write(jaxpr.constvars, map(const, closed.consts))
    write(jaxpr.invars, inputs)
    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        # Keep the line of the user's program, which reports and errors show.
        with user_context(eqn.source_info.traceback), eqn.ctx.manager, _scopes(eqn):
            outs = _equation(eqn, operands, multiply)
        write(eqn.outvars, outs)
    return [read(atom) for atom in jaxpr.outvars]


@contextlib.contextmanager
def _scopes(eqn: Any) -> Iterator[None]:
    """The name stack in which the equation was traced."""
    with contextlib.ExitStack() as stack:
        for name in str(eqn.source_info.name_stack).split("/"):
            if name and "(" not in name:  # "jvp(...)" comes from a transformation, not a scope
                stack.enter_context(jax.named_scope(name))
        yield


def _equation(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[_Value]:
    name = eqn.primitive.name
    if LEFT in str(eqn.source_info.name_stack):  # a rule leaves this layer as it is
        return _bound(eqn, operands)
    if name in PRODUCTS:
        found = _found(eqn, operands)
        if found is not None and (out := multiply(found)) is not None:
            shapes = found.lhs.shape, found.rhs.shape
            place = of_result(found.function, shapes, out.ndim, found.kernel)
            return [_Value(out, features=place)]
    elif not is_quantized(eqn) and any(map(has_products, inner_jaxprs(eqn))):
        if name in ("jit", "pjit"):
            return _evaluate(eqn.params["jaxpr"], operands, multiply)
        if name in _REWRITES:
            for operand in operands:
                _is_used_otherwise(operand)
            return [_Value(out) for out in _REWRITES[name](eqn, operands, multiply)]
    return _bound(eqn, operands)


def _bound(eqn: Any, operands: list[_Value]) -> list[_Value]:
    """Evaluates an equation that is not replaced, and works out what is known of its results."""
    if len(operands) == 1 and isinstance(operands[0].array, QArray):
        array = _moved(eqn, operands[0].array)
        if array is not None:
            return [operands[0]._replace(array=array)]
    operands = [_widened(operand) for operand in operands]
    params = eqn.primitive.get_bind_params(eqn.params)
    outs = eqn.primitive.bind(*(x.array for x in operands), **params)
    outs = outs if eqn.primitive.multiple_results else [outs]
    name = eqn.primitive.name
    is_constant = all(x.is_constant for x in operands)
    parameter = ""
    if not is_constant and all(x.parameter or x.is_constant for x in operands):
        parameter = next(x.parameter for x in operands if x.parameter)
    wide = None
    if parameter and name == "convert_element_type":
        # A cast to a narrower dtype is a rounding that the user wants, so it is kept.
        is_half = outs[0].dtype in (jnp.bfloat16, jnp.float16)
        wide = operands[0].array if is_half and operands[0].array.dtype == jnp.float32 else None
    elif parameter and name in _VIEWS and operands[0].wide is not None:
        others = (x.array for x in operands[1:])
        wide = eqn.primitive.bind(operands[0].wide, *others, **params)
    origin = None
    if len(operands) == 1 and operands[0].origin is not None:
        # A "cast" to the same dtype only makes a weak type strong.
        is_same = outs[0].dtype == operands[0].array.dtype
        is_cast = name == "convert_element_type" and (wide is not None or is_same)
        origin = operands[0].origin.moved(eqn, is_cast)
    if origin is None:
        for operand in operands:
            _is_used_otherwise(operand)
    features = moved(eqn, [x.features for x in operands])
    return [
        _Value(out, parameter, wide, is_constant, origin, place)
        for out, place in zip(outs, features, strict=True)
    ]


def _moved(eqn: Any, array: QArray) -> QArray | None:
    """The QArray after an equation that only moves its elements; None for other equations."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    is_cast = name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating)
    if is_cast or name in ("copy", "copy_p", "stop_gradient", "sharding_constraint"):
        return array
    try:
        if name == "transpose":
            return array.transpose(eqn.params["permutation"])
        if name in ("reshape", "squeeze", "expand_dims"):
            return array.reshape(out.shape)
    except ValueError:  # it would tear a block apart, or the codes are packed
        return None
    return None


def _found(eqn: Any, operands: list[_Value]) -> Found | None:
    """The product that an equation computes.

    None for integers, and for ragged products other than `lax.ragged_dot`.
    """
    lhs, rhs, *extra = operands
    params = eqn.params
    if not all(jnp.issubdtype(x.array.dtype, jnp.floating) for x in (lhs, rhs)):
        return None
    function: Bilinear
    match eqn.primitive.name:
        case "dot_general":
            names = ("dimension_numbers", "precision", "out_sharding")
            function = DotGeneral(**{name: params[name] for name in names})
        case "ragged_dot_general":
            if (
                params["ragged_dot_dimension_numbers"] != RAGGED
                or params["group_offset"] is not None
            ):
                return None
            function = RaggedDot(params["precision"])
        case _:
            function = ConvGeneralDilated(**{name: params[name] for name in _OF_CONVOLUTION})
    return Found(
        eqn.primitive.name,
        function,
        _as_parameter(lhs),
        _as_parameter(rhs),
        tuple(x.array for x in extra),
        (lhs.parameter, rhs.parameter),
        eqn.outvars[0].aval.dtype,
        (lhs.origin, rhs.origin),
        (lhs.features, rhs.features),
    )


def _as_parameter(value: _Value) -> Any:
    """The array to be rounded for a product.

    For a bfloat16 copy of a float32 parameter that is the parameter itself: rounding the copy would
    round twice.
    """
    return value.array if value.wide is None else value.wide


def _remat(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[Any]:
    params = eqn.params
    rerun = jax.checkpoint(
        _on_arrays(ClosedJaxpr(params["jaxpr"], ()), operands, multiply),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    return rerun(*(x.array for x in operands))


def _scan(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[Any]:
    params = eqn.params
    if "ft_in" in params:  # jax 0.12: three trees of consts, carry and xs
        fixed, carries, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        fixed, carries = params["num_consts"], params["num_carry"]
    consts, state, xs = operands[:fixed], operands[fixed:][:carries], operands[fixed + carries :]
    body = _on_arrays(params["jaxpr"], [*consts, *map(_carried, state), *xs], multiply)

    def step(carry: Any, x: Any) -> Any:
        outs = body(*(x.array for x in consts), *carry, *x)
        return outs[:carries], outs[carries:]

    carry, ys = lax.scan(
        step,
        [_widened(x).array for x in state],
        [_sliceable(x).array for x in xs],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _cond(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[Any]:
    index, *rest = operands
    branches = [_on_arrays(closed, rest, multiply) for closed in eqn.params["branches"]]
    return lax.switch(index.array, branches, *(x.array for x in rest))


def _while(eqn: Any, operands: list[_Value], multiply: Multiply) -> list[Any]:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = operands[:n_cond], operands[n_cond : n_cond + n_body]
    state = list(map(_carried, operands[n_cond + n_body :]))
    test = _on_arrays(params["cond_jaxpr"], [*of_cond, *state], multiply)
    step = _on_arrays(params["body_jaxpr"], [*of_body, *state], multiply)
    return lax.while_loop(
        lambda carry: test(*(x.array for x in of_cond), *carry)[0],
        lambda carry: step(*(x.array for x in of_body), *carry),
        [_widened(x).array for x in state],
    )


def _sliceable(value: _Value) -> _Value:
    """Prepares a value that a scan slices along its first axis.

    A QArray that is a stack of kernels, each with its own scales, is sliced as codes. Any other is
    dequantized: its slices would tear blocks apart or lack a scale.
    """
    array = value.array
    if isinstance(array, QArray):
        has_one = array.tensor_scale is not None and array.tensor_scale.ndim == 0
        if array.ndim < 2 or array.blocks.lengths[0] != 1 or has_one:
            return _widened(value)
    return value


def _carried(value: _Value) -> _Value:
    """Prepares a value that a loop carries: its features are taken to lie along the last axis.

    Where they lie may change from one iteration to the next.
    """
    return value._replace(features=LAST)


def _on_arrays(
    closed: ClosedJaxpr, like: Sequence[_Value], multiply: Multiply
) -> Callable[..., list[Any]]:
    """A jaxpr as a function of arrays. What is known of its arguments is what `like` says."""
    known = [value._replace(array=None, wide=None, origin=None) for value in like]

    def function(*arrays: Any) -> list[Any]:
        inputs = [value._replace(array=x) for x, value in zip(arrays, known, strict=True)]
        return [out.array for out in _evaluate(closed, inputs, multiply)]

    return function


_REWRITES = {
    "checkpoint": _remat,
    "remat": _remat,
    "remat2": _remat,
    "scan": _scan,
    "cond": _cond,
    "while": _while,
}
