"""The state of wrapped modules in collections.

The collection "qtoolkit" holds, in the scope of the wrapped module, a dictionary for each layer
with matmuls, "self.mlp.Dense_0"; that holds one for each matmul, named after its kernel, "kernel",
or its place, "attend@matmul(q,k_T)", with arrays as `products._states` names them. The collection
"qtoolkit_scales" holds learned scales likewise.
"""

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import FrozenDict, unfreeze

from qtoolkit.products.internal import (
    Key,
    as_float32,
)
from qtoolkit.scaling import QArray

COLLECTION, SCALES = "qtoolkit", "qtoolkit_scales"
_ROOT = "self"  # the wrapped module
Kept = Mapping[str, Any]
Path = tuple[str, ...]


def key_of(path: str) -> str:
    """The key of a layer in the collections: "self.mlp.Dense_0", or "self" for the wrapped module.

    A key must not be the name of a submodule. Flax would treat state with the key "Dense_0" as that
    layer's own variables, and an `nn.vmap` around the layer would slice it.
    """
    return f"{_ROOT}/{path}".strip("/").replace("/", ".")


def path_of(key: str) -> str:
    """The path of a layer, with dots, from its key."""
    return key.removeprefix(_ROOT).removeprefix(".")


def products_of(collection: Any) -> list[tuple[Path, Kept]]:
    """The arrays of each matmul in a collection, with its path there."""
    found = _parts((), collection)
    return [(path, part) for path, part in found if part and not _holds_mapping(part)]


def _holds_mapping(part: Kept) -> bool:
    return any(isinstance(inner, Mapping) for inner in part.values())


def _parts(path: Path, part: Any) -> Iterator[tuple[Path, Any]]:
    """The mappings in `part`, the outer ones last."""
    if isinstance(part, Mapping):
        for name, inner in part.items():
            yield from _parts((*path, name), inner)
        yield path, part


def planted_in(variables: Any, root: Path) -> dict[Key, dict[str, Any]]:
    """The states of matmuls in both collections, by the paths of their modules in the model.

    Args:
      root: The path of the module whose variables these are.
    """
    states: dict[Key, dict[str, Any]] = {}
    if isinstance(variables, Mapping):
        for collection in (COLLECTION, SCALES):
            for path, arrays in products_of(variables.get(collection)):
                states.setdefault(_key(root, path), {}).update(as_float32(arrays))
    return states


def _key(root: Path, path: Path) -> Key:
    *around, layer, name = path
    return Key("/".join(filter(None, (*root, *around, *path_of(layer).split(".")))), name)


def with_states(
    collection: Any, root: Path, new: Mapping[Key, Mapping[str, Any]]
) -> dict[str, Any]:
    """The entries of a collection that get new states of matmuls: each where its old one is."""
    places = {_key(root, path): path for path, _ in products_of(collection)}
    changed: dict[str, Any] = {}
    before = unfreeze(collection) if isinstance(collection, FrozenDict) else collection
    for key, arrays in new.items():
        path, name = key
        inner = path[len("/".join(root)) :].strip("/")
        place = places.get(key, (key_of(inner), name))
        first, rest = place[0], place[1:]
        tree = changed.get(first, before.get(first, {}))
        kept = functools.reduce(lambda part, key: part.get(key, {}), rest, tree)
        changed[first] = with_part(tree, rest, {**kept, **as_before(arrays, kept)})
    return changed


def with_read_state(variables: Any, reads: Mapping[Key, Collection[str]]) -> dict[str, Any]:
    """The variables, with those arrays of each matmul's state that somebody reads, by name."""
    new = {name: x for name, x in variables.items() if name not in (COLLECTION, SCALES)}
    for collection in (COLLECTION, SCALES):
        for path, arrays in products_of(variables.get(collection)):
            names = reads.get(_key((), path), ())
            if part := {name: x for name, x in arrays.items() if name in names}:
                new[collection] = with_part(new.get(collection, {}), path, part)
    return new


def as_before(arrays: Kept, before: Kept) -> dict[str, Any]:
    """Arrays in the dtypes that they had: somebody may have cast the state to bfloat16."""
    return {n: x.astype(before[n].dtype) if n in before else x for n, x in arrays.items()}


def at(tree: Any, path: Path) -> Any:
    return functools.reduce(lambda part, name: part[name], path, tree)


def unboxed(parameter: Any) -> Any:
    """The array of a parameter that may lie in a box of Flax, such as `nn.Partitioned`."""
    if not isinstance(parameter, nn.meta.AxisMetadata):
        return parameter
    return jax.tree.leaves(parameter, is_leaf=lambda x: isinstance(x, QArray))[0]


def boxed_as(parameter: Any, array: Any) -> Any:
    """`array` in the box in which the array of `parameter` lies, if it lies in one."""
    is_box = isinstance(parameter, nn.meta.AxisMetadata)
    return parameter.replace_boxed(array) if is_box else array


def with_part(tree: Any, path: Path, part: Any) -> Any:
    """A copy of the tree with `part` at `path`."""
    if not path:
        return part
    first, *rest = path
    return {**tree, first: with_part(tree.get(first, {}), tuple(rest), part)}


def check_arguments(where: str, module: Any, variables: Any) -> None:
    """Raises unless `module` is a linen module and `variables` a dictionary with "params".

    Whether it has quantized layers is not checked: `Fp8Dense` in it is known only when it runs.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{where}: module has type {type(module).__name__}, expected an instance of "
            "flax.linen.Module"
        )
    check_variables(where, variables)


def check_variables(where: str, variables: Any, hint: str = "") -> None:
    """Raises unless `variables` is a dictionary with "params"; `hint` ends the message."""
    is_mapping = isinstance(variables, Mapping)
    if not is_mapping or "params" not in variables:
        got = f"has type {type(variables).__name__}"
        if is_mapping:
            got = f"has the keys {', '.join(map(str, variables)) or '(none)'}"
        raise TypeError(
            f"{where}: variables {got}, expected a dictionary of collections with "
            f'"params", as init returns it{hint}'
        )
