"""How many multiplications the products of a jaxpr take, and which of them run natively."""

import math
from typing import Any

import jax

from qtoolkit.products._control_flow import MATMULS, SCALED, jaxprs_in
from qtoolkit.products._derivative import DifferentiatedProduct


def multiplications_of(eqn: Any) -> int:
    """How many multiplications of numbers the product in an equation takes."""
    lhs, rhs = (x.aval.shape for x in eqn.invars[:2])
    params = eqn.params
    if eqn.primitive.name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        summed = (n for i, n in enumerate(rhs) if i != features)
        return math.prod(eqn.outvars[0].aval.shape) * math.prod(summed)
    groups: Any = ()
    numbers = params.get("dimension_numbers")
    if numbers is None:  # of ragged_dot_general
        ragged = params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    (_, contracted), (_, batch) = numbers
    kept = (n for i, n in enumerate(rhs) if i not in {*contracted, *batch, *groups})
    return math.prod(lhs) * math.prod(kept)


def multiplications_of_gradient(eqn: Any, product: DifferentiatedProduct) -> int:
    """The same for each gradient of a quantized product: as many as the product itself takes."""
    rhs = product.inputs[1].shape
    summed = product.plan.axes(*product.inputs)[1].contracted
    return math.prod(eqn.invars[-1].aval.shape) * math.prod(rhs[axis] for axis in summed)


def runs_of(eqn: Any) -> int:
    """How often the jaxprs in an equation run; 1 if that is not known: in `lax.while_loop`."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    if eqn.primitive.name == "shard_map":
        sizes = eqn.params["mesh"].shape
        return math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
    return 1


def is_native(eqn: Any) -> bool:
    """Whether a product multiplies arrays of 8 bits or less."""
    widths = [x.aval.dtype.itemsize for x in eqn.invars[:2]]
    return eqn.primitive.name == SCALED or max(widths) == 1


def native_gradients(eqn: Any, axis_names: tuple[str, ...]) -> list[bool]:
    """`is_native` of the products in an equation that computes gradients, found by tracing it."""
    function, first = eqn.params["forward"], eqn.params["residuals"]
    closed = jax.make_jaxpr(
        lambda *xs: function(xs[:first], xs[first:]), axis_env=[(name, 1) for name in axis_names]
    )(*(_traceable(x.aval) for x in eqn.invars))
    return list(map(is_native, _products(closed.jaxpr)))


def _traceable(aval: Any) -> Any:
    """An argument like `aval`, outside of the `jax.shard_map` that it may come from."""
    if any(aval.sharding.mesh.explicit_axes):
        return aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _products(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in (*MATMULS, SCALED):
            found.append(eqn)
        else:
            found += [product for inner in jaxprs_in(eqn.params) for product in _products(inner)]
    return found
