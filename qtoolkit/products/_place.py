"""Where in a model a matmul belongs, carried through a program as data.

An identity primitive around the result of a matmul has the place as a parameter. JAX keeps it under
`jit`, `vmap`, `scan`, `remat` and differentiation. The cotangent passes it on its way back, so that
a report also knows the place of dgrad and wgrad. It lowers to nothing. (A name in the name stack,
or a parameter of the jitted matmul, would not do: equal matmuls of many layers share one trace.)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from qtoolkit.formats.internal import add_json_kinds
from qtoolkit.products._lines import warn
from qtoolkit.products._recipe import UNQUANTIZED, Recipe

MODEL = "(model)"  # the path of the model itself


def listed(names: Sequence[str]) -> str:
    """The first eight names, for messages."""
    return ", ".join(names[:8]) + " ..." * (len(names) > 8)


class Place(NamedTuple):
    """Names a matmul: the path of its layer, and the name of the matmul within that layer."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path or MODEL}:{self.name}"


add_json_kinds(Place)


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a program says about one of its matmuls.

    Attributes:
      place: The layer, and the matmul within it.
      recipe: To what lhs and rhs are rounded; None if a rule excludes the layer, or if the matmul
        lies in a function with a derivative of its own.
      stored: Labels of lhs and rhs if they come as codes, whatever the recipe says; else "".
      is_excluded: Whether a rule excludes the layer, so that no trace may replace the matmul.
      warning: What to say if somebody differentiates the matmul.
    """

    place: Place
    recipe: Recipe | None = None
    stored: tuple[str, str] = ("", "")
    is_excluded: bool = False
    warning: str = ""

    @property
    def path(self) -> str:
        return self.place.path or MODEL

    @property
    def labels(self) -> tuple[str, str]:
        """The formats to which lhs and rhs are rounded."""
        operands = (None, None) if self.recipe is None else self.recipe.forward
        pairs = zip(self.stored, operands, strict=True)
        first, second = (label or (UNQUANTIZED if o is None else str(o)) for label, o in pairs)
        return first, second


_place_p = Primitive("qtoolkit_place")


def with_mark(x: Any, mark: Mark) -> Any:
    """`x` with a mark for those who read the program; outside of a program, just `x`."""
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
    by_variable: dict[Any, Mark] = {}
    for eqn in jaxpr.eqns:
        marks = [after[var] for var in eqn.outvars if var in after]
        marks += [before[x] for x in eqn.invars if not hasattr(x, "val") and x in before]
        if marks:
            by_variable.update(dict.fromkeys(eqn.outvars, marks[0]))
    return by_variable


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x,), (dot,) = primals, tangents
    if isinstance(dot, ad.Zero):
        return _place_p.bind(x, **params), dot
    if params["mark"].warning:
        warn(params["mark"].warning)
    return _place_p.bind(x, **params), _place_p.bind(dot, **params)


def _transpose(cotangent: Any, _: Any, *, mark: Mark, is_transposed: bool) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [_place_p.bind(cotangent, mark=mark, is_transposed=not is_transposed)]


_place_p.def_impl(lambda x, **_: x)
_place_p.def_abstract_eval(lambda aval, **_: aval)
ad.primitive_jvps[_place_p] = _jvp
ad.primitive_transposes[_place_p] = _transpose
batching.primitive_batchers[_place_p] = lambda xs, axes, **params: (
    _place_p.bind(*xs, **params),
    axes[0],
)
mlir.register_lowering(_place_p, lambda context, x, **_: [x])
