"""Runs a method of a bound linen module with its products replaced.

`rewritten` replaces products in pure functions. A linen method is not pure: it reads and writes the
variables of its module. So it is lifted, as `nn.remat` lifts a method: it becomes a pure function
from variables, rngs and arrays to results and new variables.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax.core import lift
from flax.linen import Module
from flax.linen.transforms import decorator_lift_transform

from qtoolkit.products.internal import Found, Origin, Standing, opened, rewritten, with_values
from qtoolkit.scaling import QArray

REWRITING = "qtoolkit_rewriting"  # the name under which interceptors see the lifted method
Multiply = Callable[[Found], jax.Array | None]


class Mover(Protocol):
    """Collects what products change of their state while a module runs."""

    moved: dict[Any, Any]

    def inner(self) -> AbstractContextManager[dict[Any, Any]]:
        """In this context products change state in an inner trace; it is collected apart."""


def run_rewritten(
    method: Callable[..., Any],
    module: Module,
    multiply: Multiply,
    args: Any,
    kwargs: Any,
    other_uses: set[Any] | None = None,
    mover: Mover | None = None,
) -> Any:
    """Returns `method(module, *args, **kwargs)` with `multiply(found)` in place of each product.

    As under `nn.remat`, the method runs on a copy of the module. Variables that it writes, and
    names that it gives to submodules, are then copied back to the module itself.

    Args:
      method: A plain function of the module, with or without `nn.compact`.
      multiply: As for `rewritten`.
      args, kwargs: JAX arrays among them are traced; everything else is passed as it is.
      other_uses: A set to which the paths of the module's own parameters are added that anything
        but a product uses. `multiply` finds the parameters of products in `Found.origins`. None:
        uses are not recorded.
      mover: Gets the state that products in the method have changed. None: they change none.
    """
    own = {
        _identity(value): (*module.path, name)
        for name, value in module.variables.get("params", {}).items()
        if not isinstance(value, Mapping)
    }

    originals: dict[int, Module] = {}

    # The arguments of the method are passed as two: by their names they would meet those of Flax's
    # own functions, which have parameters `module` and `scopes`.
    def inside(copy: Module, args: Any, kwargs: Any) -> Any:
        originals[id(copy)] = module
        return method(copy, *args, **kwargs)

    # With `capture_intermediates` Flax stores the result of every method named "__call__". The
    # method itself is one of these, so its lifted copy needs another name.
    inside.__name__ = inside.__qualname__ = REWRITING
    if hasattr(method, "compact"):
        inside.compact = True  # type: ignore[attr-defined]
    lifted = decorator_lift_transform(
        _lifted_rewriting, inside, multiply, own, other_uses, originals, mover
    )
    return lifted(module, args, kwargs)


def _lifted_rewriting(
    function: Callable[..., Any],
    multiply: Multiply,
    own: Mapping[int, tuple[str, ...]],
    other_uses: set[Any] | None,
    originals: Mapping[int, Module],
    mover: Mover | None,
) -> Callable[..., Any]:
    """A lifted transformation in the sense of `flax.core.lift`, such as `lift.checkpoint`.

    Args:
      function: A function of (scopes, args, kwargs).
      multiply, other_uses: As in `run_rewritten`.
      own: The path of each of the module's own parameters, by the `_identity` of its value.
      originals: The module, by the id of the copy on which the method runs. A function that the
        method returns may hold the copy.
    """

    def run(scope_of: Any, repacked: Any, variables: Any, rngs: Any, *arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        outside: list[Any] = []

        def pure(variables: Any, rngs: Any, arrays: list[jax.Array]) -> Any:
            scopes = scope_of(variables, rngs)
            arguments = jax.tree.unflatten(structure, with_values(leaves, places, arrays))
            with nullcontext({}) if mover is None else mover.inner() as moved:
                outs, closed = opened(function(scopes, *arguments), _is_module)
            out_places = [i for i, out in enumerate(outs) if isinstance(out, jax.Array)]
            # A traced function can only return arrays. Other results, such as None or strings,
            # are passed out through `outside`.
            rest = [
                None if i in set(out_places) else originals.get(id(out), out)
                for i, out in enumerate(outs)
            ]
            outside[:] = [closed, rest, out_places]
            return [outs[i] for i in out_places], repacked(scopes), moved

        names = _names(variables, own, other_uses)
        # The method sees the module's own stored kernels as ordinary arrays, hence `Standing`.
        # Those of submodules stay QArrays, since the submodule's own call treats them.
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
        arrays, written, moved = call(variables, rngs, [leaves[i] for i in places])
        if mover is not None:
            mover.moved.update(moved)
        closed, rest, out_places = outside
        return closed(with_values(rest, out_places, arrays)), written

    return lift.pack(run, (True,), (True,), (True,), "qtoolkit")


def _names(
    variables: Any, own: Mapping[int, tuple[str, ...]], other_uses: set[Any] | None
) -> list[Any]:
    """One entry for each array in `variables`, for the argument `parameters` of `rewritten`.

    The entry is the array's name if it is in the collection "params", else "". If `other_uses` is
    given, an array of the module itself has an `Origin` in place of its name. A `QArray` of a
    submodule is not one leaf but several arrays, so its name is repeated for each of them.
    """
    names: list[Any] = []
    with_paths, _ = jax.tree_util.tree_flatten_with_path(variables, is_leaf=_is_stored)
    for path, leaf in with_paths:
        name: Any = _name(path)
        is_own = _identity(leaf) in own
        if is_own and name and other_uses is not None:
            name = Origin(own[_identity(leaf)], name, other_uses)
        count = 1 if is_own or not isinstance(leaf, QArray) else len(jax.tree.leaves(leaf))
        names += [name] * count
    return names


def _made(results: Any) -> Any:
    """The argument `made` of `rewritten`: the names of parameters that the method has created.

    In `init` a method creates its parameters, and they are among the results of its trace.
    """
    outs, written, moved = results
    names = jax.tree_util.tree_map_with_path(lambda path, _: _name(path), written)
    return jax.tree.map(lambda _: "", outs), names, jax.tree.map(lambda _: "", moved)


def _name(path: Any) -> str:
    """The name of an array in the collection "params", from its path; "" in other collections."""
    # Other kinds of keys belong to boxes with metadata, such as `nn.Partitioned`.
    kinds = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path if isinstance(key, kinds)]
    # The first two keys are lifting's group of collections and scope.
    _, _, collection, *names = keys
    return ".".join(names) if collection == "params" else ""


def _identity(x: Any) -> int:
    """Identifies an array of the variables: Flax copies their trees, but not the leaves."""
    return id(x.codes if isinstance(x, QArray) else x)


def _is_module(x: Any) -> bool:
    return isinstance(x, Module)


def _is_stored(x: Any) -> bool:
    return isinstance(x, QArray)
