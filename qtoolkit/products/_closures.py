"""Functions among the results of a traced method: arrays that they hold leave the trace, too."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from qtoolkit.products._rewrite import with_values

Leaves = list[Any]


def opened(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda _: False
) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """`jax.tree.flatten`, but a function counts as a node: what it closes over are its leaves.

    A method may return `lambda x: x @ w.T` with a `w` that it was given. Traced, that function
    would take the tracer of `w` out of its trace.

    Returns:
      The leaves of the tree, then the tracers that functions hold and what `is_leaf` accepts; and a
      function that makes the tree from others in their place. It makes the functions anew.
    """
    functions = list(_functions(tree, is_leaf, set()))
    own, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    kept, kept_structure = jax.tree.flatten([_held(f) for f in functions], is_leaf=is_leaf)
    moved = [i for i, x in enumerate(kept) if isinstance(x, jax.core.Tracer) or is_leaf(x)]

    def closed(leaves: Leaves) -> Any:
        made = {id(function): _copied(function) for function in functions if moved}
        leaves = [made.get(id(leaf), leaf) for leaf in leaves]
        held = [made.get(id(leaf), leaf) for leaf in with_values(kept, moved, leaves[len(own) :])]
        contents = jax.tree.unflatten(kept_structure, held)
        for function, content in zip(made.values(), contents, strict=bool(moved)):
            cells, function.__defaults__, function.__kwdefaults__ = content
            for cell, value in zip(function.__closure__ or (), cells, strict=True):
                if value:
                    cell.cell_contents = value[0]
        return jax.tree.unflatten(structure, leaves[: len(own)])

    return [*own, *(kept[i] for i in moved)], closed


def _functions(tree: Any, is_leaf: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """The functions in a tree, and those that these hold."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_leaf):
        if isinstance(leaf, types.FunctionType) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield leaf
            yield from _functions(_held(leaf), is_leaf, seen)


def _held(function: types.FunctionType) -> Any:
    """What a function holds: a list for each cell, empty where the cell is; its default values."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    return cells, function.__defaults__, function.__kwdefaults__


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # its variable is not set yet, or no more
        return []


def _copied(function: types.FunctionType) -> types.FunctionType:
    """The same function with empty cells."""
    cells = function.__closure__ and tuple(types.CellType() for _ in function.__closure__)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, cells
    )
    copy.__dict__.update(function.__dict__)
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy
