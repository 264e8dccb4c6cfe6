"""A method of a bound module as a pure function, with other products in its trace."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import lift
from flax.linen import Module
from flax.linen.transforms import decorator_lift_transform

from qtoolkit.products.internal import Found, rewritten

REWRITING = "qtoolkit_rewriting"  # the name of the method inside, for interceptors
Multiply = Callable[[Found], jax.Array | None]


def run_rewritten(
    method: Callable[..., Any], module: Module, multiply: Multiply, args: Any, kwargs: Any
) -> Any:
    """`method(module, *args, **kwargs)` with `multiply(found)` in place of each product.

    As under `nn.remat`, the method runs on a copy of the module whose variables are arguments of a
    pure function; what it writes and the names it gives to submodules are taken over.

    Args:
      method: A plain function of the module, one marked by `nn.compact` or not.
      multiply: As for `rewritten`.
      args, kwargs: JAX arrays among them are traced, everything else is passed as it is.
    """

    def inside(module: Module, *args: Any, **kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    # Flax keeps what methods return under their names, where `capture_intermediates` asks for
    # "__call__": the method itself has one already.
    inside.__name__ = inside.__qualname__ = REWRITING
    if hasattr(method, "compact"):
        inside.compact = True  # type: ignore[attr-defined]
    lifted = decorator_lift_transform(_rewriting, inside, multiply)
    return lifted(module, *args, **kwargs)


def _rewriting(function: Callable[..., Any], multiply: Multiply) -> Callable[..., Any]:
    """A lifted transformation, like those of `flax.core.lift`."""

    def run(
        scope_of: Any, repacked: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        outside: list[Any] = []

        def pure(variables: Any, rngs: Any, arrays: list[jax.Array]) -> Any:
            scopes = scope_of(variables, rngs)
            args, kwargs = jax.tree.unflatten(structure, _put(leaves, places, arrays))
            outs, out_structure = jax.tree.flatten(function(scopes, *args, **kwargs))
            found = [i for i, out in enumerate(outs) if isinstance(out, jax.Array)]
            # What is no array leaves beside the trace.
            rest = [None if i in set(found) else out for i, out in enumerate(outs)]
            outside[:] = [out_structure, rest, found]
            return [outs[i] for i in found], repacked(scopes)

        variables, rngs = jax.tree.map(jnp.asarray, (variables, rngs))
        call = rewritten(pure, multiply, _parameters)
        arrays, written = call(variables, rngs, [leaves[i] for i in places])
        out_structure, rest, found = outside
        return jax.tree.unflatten(out_structure, _put(rest, found, arrays)), written

    return lift.pack(run, (True,), (True,), (True,), "qtoolkit", enable_kwargs=True)


def _put(leaves: list[Any], places: list[int], arrays: list[jax.Array]) -> list[Any]:
    merged = list(leaves)
    for place, array in zip(places, arrays, strict=True):
        merged[place] = array
    return merged


def _parameters(variables: Any, rngs: Any, arrays: Any) -> Any:
    """For each array, whether it is one of the collection "params"."""

    def is_parameter(path: Any, _: Any) -> bool:
        return any(getattr(key, "key", None) == "params" for key in path[:3])

    flags = jax.tree_util.tree_map_with_path(is_parameter, variables)
    return flags, *jax.tree.map(lambda _: False, (rngs, arrays))
