"""Where in a model a matmul belongs, carried through a program as data.

An identity primitive around the result of a matmul has the place as a parameter. JAX keeps it under
`jit`, `vmap`, `scan`, `remat` and differentiation; the cotangent passes it on its way back, so that
dgrad and wgrad are found, too. It lowers to nothing.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from qtoolkit.products._recipe import Recipe

MODEL = "(model)"  # the path of the model itself


class Place(NamedTuple):
    """Names a product: the path of its layer, and the name of the product within that layer."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path or MODEL}:{self.name}"


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a program says about one of its matmuls.

    Attributes:
      place: The layer, and the product within it.
      recipe: To what lhs and rhs are rounded; None if a rule leaves the layer in high precision, or
        if the matmul lies in a function with a derivative of its own.
      stored: Labels of lhs and rhs if they come as codes, whatever the recipe says; else "".
      is_left: Whether a rule leaves the layer in high precision.
    """

    place: Place
    recipe: Recipe | None = None
    stored: tuple[str, str] = ("", "")
    is_left: bool = False

    @property
    def path(self) -> str:
        return self.place.path or MODEL

    @property
    def labels(self) -> tuple[str, str]:
        """The formats to which lhs and rhs are rounded."""
        operands = (None, None) if self.recipe is None else self.recipe.forward
        pairs = zip(self.stored, operands, strict=True)
        first, second = (label or ("wide" if o is None else str(o)) for label, o in pairs)
        return first, second


_place_p = Primitive("qtoolkit_place")


def with_mark(x: Any, mark: Mark) -> Any:
    """The identity, with a mark for those who read the program; nothing where there is none."""
    if not isinstance(x, jax.core.Tracer) or not jnp.issubdtype(x.dtype, np.number):
        return x
    return _place_p.bind(x, mark=mark, is_transposed=False)


def mark_in(primitive: Any, params: Mapping[str, Any]) -> Mark | None:
    """The mark that a primitive is; None for other primitives."""
    return params["mark"] if primitive is _place_p else None


def marks_of(jaxpr: Any) -> dict[Any, Mark]:
    """The mark of each equation of a jaxpr, by the variables that it makes.

    The mark follows the equation in the forward pass, and precedes it in the backward pass.
    """
    after, before = {}, {}
    for eqn in jaxpr.eqns:
        mark = mark_in(eqn.primitive, eqn.params)
        if mark is not None:
            (x,), (out,) = eqn.invars, eqn.outvars
            if eqn.params["is_transposed"]:
                before[out] = mark
            else:
                after[x] = mark
    found: dict[Any, Mark] = {}
    for eqn in jaxpr.eqns:
        marks = [after[var] for var in eqn.outvars if var in after]
        marks += [before[x] for x in eqn.invars if not hasattr(x, "val") and x in before]
        if marks:
            found.update(dict.fromkeys(eqn.outvars, marks[0]))
    return found


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x,), (dot,) = primals, tangents
    moved = dot if isinstance(dot, ad.Zero) else _place_p.bind(dot, **params)
    return _place_p.bind(x, **params), moved


def _transpose(cotangent: Any, _: Any, *, mark: Mark, is_transposed: bool) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [_place_p.bind(cotangent, mark=mark, is_transposed=not is_transposed)]


def _batch(operands: Any, axes: Any, **params: Any) -> Any:
    return _place_p.bind(*operands, **params), axes[0]


_place_p.def_impl(lambda x, **_: x)
_place_p.def_abstract_eval(lambda aval, **_: aval)
ad.primitive_jvps[_place_p] = _jvp
ad.primitive_transposes[_place_p] = _transpose
batching.primitive_batchers[_place_p] = _batch
mlir.register_lowering(_place_p, lambda context, x, **_: [x])
