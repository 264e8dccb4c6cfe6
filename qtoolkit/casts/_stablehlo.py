"""Writes elementwise jaxprs as StableHLO, one operation for each equation.

`jax.interpreters.mlir.lower_fun` would trace an elementwise operation again for every shape, and
then lower each of its equations by an MLIR function for that shape; that was a quarter of the time
that lowering a quantized model took. Here the jaxpr, which is of scalars, is read directly, and the
type of the arrays is put in place of the scalar types.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir


class Rule(NamedTuple):
    """How an operation is lowered that is none of JAX's.

    Attributes:
      lower: A function of MLIR's context and values, as JAX asks for.
      function: What the operation does to numbers as to arrays, which is written down in place of
        it where `Writer` can; None where it is not known or depends on the shape.
    """

    lower: Callable[..., Any]
    function: Callable[..., Any] | None = None


Rules = Mapping[Any, Rule]


def is_writable(jaxpr: ClosedJaxpr, rules: Rules) -> bool:
    """Whether `Writer` knows all the operations of `jaxpr`."""
    return all(_is_writable(equation, rules) for equation in jaxpr.jaxpr.eqns)


def _is_writable(equation: Any, rules: Rules) -> bool:
    primitive, params = equation.primitive, equation.params
    if "jaxpr" in params:
        return is_writable(params["jaxpr"], rules)
    if primitive is lax.select_n_p:
        return equation.invars[0].aval.dtype == np.bool_ and len(equation.invars) == 3
    if primitive is lax.convert_element_type_p:
        return params["new_dtype"] != np.bool_
    if primitive is lax.round_p:
        return params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    if primitive is lax.reduce_precision_p:
        return True
    return primitive in rules or primitive in _TO_DTYPE or primitive in _OPERATIONS


class Writer:
    """Writes operations at MLIR's current insertion point.

    Attributes:
      ctx: JAX's context of the operation that is lowered.
      aval: The arrays' static shape; its dtype counts for nothing.
      rules: For operations of `is_writable`.
    """

    def __init__(self, ctx: mlir.LoweringRuleContext, aval: Any, rules: Rules) -> None:
        self.ctx, self.aval, self.rules = ctx, aval, rules
        self._constants: dict[tuple[bytes, Any], ir.Value] = {}

    def results(self, jaxpr: ClosedJaxpr, arrays: list[ir.Value]) -> list[ir.Value]:
        """What `jaxpr` does to numbers, done to arrays."""
        values = dict(zip(jaxpr.jaxpr.invars, arrays, strict=True))
        constants = (self._constant(np.asarray(number)) for number in jaxpr.consts)
        values |= zip(jaxpr.jaxpr.constvars, constants, strict=True)

        def read(variable: Any) -> ir.Value:
            if isinstance(variable, Literal):
                aval: Any = variable.aval
                return self._constant(np.asarray(variable.val, aval.dtype))
            return values[variable]

        for equation in jaxpr.jaxpr.eqns:
            outs = self._written(equation, [read(variable) for variable in equation.invars])
            values |= zip(equation.outvars, outs, strict=True)
        return [read(variable) for variable in jaxpr.jaxpr.outvars]

    def shaped(self, value: ir.Value) -> ir.Value:
        """`value`, of as many elements, in the shape of the arrays."""
        old = ir.RankedTensorType(value.type)
        new = ir.RankedTensorType.get(self.aval.shape, old.element_type)
        return value if new == old else stablehlo.reshape(new, value)

    def _written(self, equation: Any, operands: list[ir.Value]) -> list[ir.Value]:
        primitive, params = equation.primitive, equation.params
        if "jaxpr" in params:  # a function of JAX with a jit of its own
            return self.results(params["jaxpr"], operands)
        if primitive in self.rules:
            return self._by_rule(equation, operands)
        if primitive is lax.reduce_precision_p:
            bits = [mlir.i32_attr(params[f"{part}_bits"]) for part in ("exponent", "mantissa")]
            return [stablehlo.reduce_precision(operands[0], bits[0], bits[1])]
        if primitive in _TO_DTYPE:
            return [_TO_DTYPE[primitive](self._type(params["new_dtype"]), *operands)]
        if primitive in _COMPARISONS:
            kind = _kind_of_comparison(equation.invars[0].aval.dtype)
            return [_OPERATIONS[primitive](*operands, compare_type=kind)]
        return [_OPERATIONS[primitive](*operands)]

    def _by_rule(self, equation: Any, operands: list[ir.Value]) -> list[ir.Value]:
        rule = self.rules[equation.primitive]
        if rule.function is not None and not equation.params:
            x64 = bool(jax.config.read("jax_enable_x64"))
            dtypes = tuple(x.aval.dtype for x in equation.invars)
            jaxpr = _of_numbers(rule.function, dtypes, x64)
            if is_writable(jaxpr, self.rules):
                return self.results(jaxpr, operands)
        avals_in, avals_out = (
            [self.aval.update(dtype=x.aval.dtype, weak_type=False) for x in variables]
            for variables in (equation.invars, equation.outvars)
        )
        primitive = equation.primitive
        ctx = self.ctx.replace(primitive=primitive, avals_in=avals_in, avals_out=avals_out)
        return list(rule.lower(ctx, *operands, **equation.params))

    def _constant(self, number: np.ndarray) -> ir.Value:
        key = (number.tobytes(), number.dtype)
        if key not in self._constants:
            value = mlir.ir_constant(number)
            if self.aval.shape:
                dims = mlir.dense_int_array([])
                value = stablehlo.broadcast_in_dim(self._type(number.dtype), value, dims)
            self._constants[key] = value
        return self._constants[key]

    def _type(self, dtype: Any) -> ir.Type:
        return ir.RankedTensorType.get(self.aval.shape, mlir.dtype_to_ir_type(np.dtype(dtype)))


@functools.lru_cache(maxsize=256)
def _of_numbers(function: Callable[..., Any], dtypes: tuple[Any, ...], x64: bool) -> ClosedJaxpr:
    """What a function does to numbers, found once; `x64` is how it would be traced."""
    del x64
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))


def all_true(ctx: mlir.LoweringRuleContext, x: ir.Value) -> list[ir.Value]:
    """True for every element, by its place: no bits of an element's places are all set."""
    aval: Any = ctx.avals_in[0]
    axes = [axis for axis, n in enumerate(aval.shape) if n > 1]
    if not axes:
        kind = _kind_of_comparison(aval.dtype)
        return [_COMPARISONS[lax.eq_p](x, x, compare_type=kind)]
    places = ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(np.dtype(np.uint32)))
    iotas = (stablehlo.iota(places, mlir.i64_attr(axis)) for axis in axes)
    ones = mlir.ir_constant(np.uint32(2**32 - 1))
    ones = stablehlo.broadcast_in_dim(places, ones, mlir.dense_int_array([]))
    kind = _kind_of_comparison(np.uint32)
    place = functools.reduce(stablehlo.or_, iotas)
    return [_COMPARISONS[lax.ne_p](place, ones, compare_type=kind)]


def _selected(which: ir.Value, if_false: ir.Value, if_true: ir.Value) -> ir.Value:
    return stablehlo.select(which, if_true, if_false)


def _kind_of_comparison(dtype: Any) -> ir.Attribute:
    signed = "SIGNED" if jnp.issubdtype(dtype, np.signedinteger) else "UNSIGNED"
    name = "FLOAT" if jnp.issubdtype(dtype, np.inexact) else signed
    return stablehlo.ComparisonTypeAttr.get(name)


def _comparison(direction: str) -> Callable[..., ir.Value]:
    def compared(a: ir.Value, b: ir.Value, compare_type: ir.Attribute) -> ir.Value:
        attribute = stablehlo.ComparisonDirectionAttr.get(direction)
        return stablehlo.compare(a, b, attribute, compare_type=compare_type)

    return compared


_TO_DTYPE: dict[Any, Callable[..., ir.Value]] = {
    lax.bitcast_convert_type_p: stablehlo.bitcast_convert,
    lax.convert_element_type_p: stablehlo.convert,
}
_COMPARISONS: dict[Any, Callable[..., ir.Value]] = {
    lax.eq_p: _comparison("EQ"),
    lax.ge_p: _comparison("GE"),
    lax.gt_p: _comparison("GT"),
    lax.le_p: _comparison("LE"),
    lax.lt_p: _comparison("LT"),
    lax.ne_p: _comparison("NE"),
}
_OPERATIONS: dict[Any, Callable[..., ir.Value]] = {
    **_COMPARISONS,
    lax.abs_p: stablehlo.abs,
    lax.add_p: stablehlo.add,
    lax.and_p: stablehlo.and_,
    lax.clz_p: stablehlo.count_leading_zeros,
    lax.div_p: stablehlo.divide,
    lax.is_finite_p: stablehlo.is_finite,
    lax.max_p: stablehlo.maximum,
    lax.min_p: stablehlo.minimum,
    lax.mul_p: stablehlo.multiply,
    lax.neg_p: stablehlo.negate,
    lax.not_p: stablehlo.not_,
    lax.or_p: stablehlo.or_,
    lax.round_p: stablehlo.round_nearest_even,
    lax.select_n_p: _selected,
    lax.shift_left_p: stablehlo.shift_left,
    lax.shift_right_arithmetic_p: stablehlo.shift_right_arithmetic,
    lax.shift_right_logical_p: stablehlo.shift_right_logical,
    lax.sub_p: stablehlo.subtract,
    lax.xor_p: stablehlo.xor,
}
