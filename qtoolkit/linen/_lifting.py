"""A method of a bound module as a pure function, with other products in its trace."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import lift
from flax.linen import Module
from flax.linen.transforms import decorator_lift_transform

from qtoolkit.products.internal import Found, Origin, Standing, rewritten, with_values
from qtoolkit.scaling import QArray

REWRITING = "qtoolkit_rewriting"  # the name of the method inside, for interceptors
Multiply = Callable[[Found], jax.Array | None]


def run_rewritten(
    method: Callable[..., Any],
    module: Module,
    multiply: Multiply,
    args: Any,
    kwargs: Any,
    other_uses: set[Any] | None = None,
) -> Any:
    """`method(module, *args, **kwargs)` with `multiply(found)` in place of each product.

    As under `nn.remat`, the method runs on a copy of the module whose variables are arguments of a
    pure function; what it writes and the names it gives to submodules are taken over.

    Args:
      method: A plain function of the module, one marked by `nn.compact` or not.
      multiply: As for `rewritten`.
      args, kwargs: JAX arrays among them are traced, everything else is passed as it is.
      other_uses: Gets the paths of the module's own parameters that are used by anything but
        products, which find theirs as `origins`; None: nobody asks.
    """
    own = {
        _identity(value): (*module.path, name)
        for name, value in module.variables.get("params", {}).items()
        if not isinstance(value, Mapping)
    }

    def inside(module: Module, *args: Any, **kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    # Flax keeps what methods return under their names, where `capture_intermediates` asks for
    # "__call__": the method itself has one already.
    inside.__name__ = inside.__qualname__ = REWRITING
    if hasattr(method, "compact"):
        inside.compact = True  # type: ignore[attr-defined]
    lifted = decorator_lift_transform(_rewriting, inside, multiply, own, other_uses)
    return lifted(module, *args, **kwargs)


def _rewriting(
    function: Callable[..., Any],
    multiply: Multiply,
    own: Mapping[int, tuple[str, ...]],
    other_uses: set[Any] | None,
) -> Callable[..., Any]:
    """A lifted transformation, like those of `flax.core.lift`."""

    def run(
        scope_of: Any, repacked: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        outside: list[Any] = []

        def pure(variables: Any, rngs: Any, arrays: list[jax.Array]) -> Any:
            scopes = scope_of(variables, rngs)
            args, kwargs = jax.tree.unflatten(structure, with_values(leaves, places, arrays))
            outs, out_structure = jax.tree.flatten(function(scopes, *args, **kwargs))
            found = [i for i, out in enumerate(outs) if isinstance(out, jax.Array)]
            # What is no array leaves beside the trace.
            rest = [None if i in set(found) else out for i, out in enumerate(outs)]
            outside[:] = [out_structure, rest, found]
            return [outs[i] for i in found], repacked(scopes)

        names = _names(variables, own, other_uses)
        # The module's own kernels of codes are arrays to it; submodules see to theirs.
        variables = jax.tree.map(
            lambda x: Standing(x) if isinstance(x, QArray) and _identity(x) in own else x,
            variables,
            is_leaf=_is_stored,
        )
        variables, rngs = jax.tree.map(
            lambda x: x if isinstance(x, Standing) else jnp.asarray(x), (variables, rngs)
        )
        others = [""] * (len(jax.tree.leaves(rngs)) + len(places))
        call = rewritten(pure, multiply, lambda *_: [*names, *others], _made)
        arrays, written = call(variables, rngs, [leaves[i] for i in places])
        out_structure, rest, found = outside
        return jax.tree.unflatten(out_structure, with_values(rest, found, arrays)), written

    return lift.pack(run, (True,), (True,), (True,), "qtoolkit", enable_kwargs=True)


def _names(
    variables: Any, own: Mapping[int, tuple[str, ...]], other_uses: set[Any] | None
) -> list[Any]:
    """For each array its name, if it is in the collection "params", else "".

    Where other uses are asked for, an array of the module's own has an `Origin`. The arrays of a
    submodule's `QArray` have a name each.
    """
    names: list[Any] = []
    found, _ = jax.tree_util.tree_flatten_with_path(variables, is_leaf=_is_stored)
    for path, leaf in found:
        name: Any = _name(path)
        is_own = _identity(leaf) in own
        if is_own and name and other_uses is not None:
            name = Origin(own[_identity(leaf)], name, other_uses)
        count = 1 if is_own or not isinstance(leaf, QArray) else len(jax.tree.leaves(leaf))
        names += [name] * count
    return names


def _made(results: Any) -> Any:
    """The names of the parameters that a method has made, among what the trace of it gives."""
    outs, written = results
    return jax.tree.map(lambda _: "", outs), jax.tree_util.tree_map_with_path(_named, written)


def _named(path: Any, _: Any) -> str:
    return _name(path)


def _name(path: Any) -> str:
    """That of an array in the collection "params" of a module, "" in other collections."""
    kinds = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)  # boxes with metadata have others
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path if isinstance(key, kinds)]
    _, _, collection, *names = keys  # behind a group of collections and a scope
    return ".".join(names) if collection == "params" else ""


def _identity(x: Any) -> int:
    """Flax rebuilds the trees of variables, but not their leaves."""
    return id(x.codes if isinstance(x, QArray) else x)


def _is_stored(x: Any) -> bool:
    return isinstance(x, QArray)
