"""Names of the arrays in a nested state, and the way back. JAX is imported only for the way back.

Keys are joined by dots: "layers.0.kernel". An nnx Variable has no key of its own.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._tensors import CheckpointError, listed, shown


def named_arrays(path: Path, tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The arrays of a state, each with its name: keys joined by dots."""
    children = _children(path, tree, keys)
    if children is None and tree is not None:
        yield ".".join(keys), tree
    for key, child in children or ():
        yield from named_arrays(path, child, (*keys, key) if key else keys)


def _children(path: Path, tree: Any, keys: tuple[str, ...]) -> list[tuple[str, Any]] | None:
    """The children of a container with their keys; None for an array.

    An nnx Variable has one child, its value, with the key "".
    """
    if isinstance(tree, Mapping):
        # Indexing an nnx.State makes a State of each inner dictionary, but the pytree has plain
        # dictionaries.
        tree = getattr(tree, "raw_mapping", tree)
        wrong = [key for key in tree if not isinstance(key, str | int) or key == ""]
        if wrong:
            raise CheckpointError(
                f"{path}: {shown('.'.join(keys)) or 'the state'}: key {wrong[0]!r}, expected text "
                "or an integer; rename it"
            )
        return [(str(key), child) for key, child in tree.items()]
    if isinstance(tree, list | tuple):
        return [(str(i), child) for i, child in enumerate(tree)]
    if hasattr(tree, "get_value") and hasattr(tree, "get_metadata"):
        return [("", tree.get_value())]
    return None


def fill_tree(
    path: Path, tree: Any, readers: Mapping[str, Callable[[], Any]], keys: tuple[str, ...] = ()
) -> Any:
    """A tree with the structure of `tree`; its arrays are read one after the other."""
    children = _children(path, tree, keys)
    if children is None:
        return None if tree is None else _read_leaf(path, ".".join(keys), tree, readers)
    new = [
        fill_tree(path, child, readers, (*keys, key) if key else keys) for key, child in children
    ]
    if isinstance(tree, dict):
        copied = copy.copy(tree)  # keeps the default_factory of a defaultdict
        copied.update(zip(tree, new, strict=True))
        return copied
    if isinstance(tree, Mapping):
        return type(tree)(zip(tree, new, strict=True))  # type: ignore[call-arg]
    if isinstance(tree, list):
        return new
    if isinstance(tree, tuple):
        return type(tree)(*new) if hasattr(tree, "_fields") else tuple(new)
    return type(tree).from_metadata(new[0], tree.get_metadata())


def _read_leaf(path: Path, name: str, wanted: Any, readers: Mapping[str, Callable[[], Any]]) -> Any:
    if not hasattr(wanted, "shape"):
        what = shown(name) or "`like`"
        raise CheckpointError(
            f"{path}: {what} has type {type(wanted).__name__}, expected a pytree of arrays; of a "
            "model of nnx write load(path, like=nnx.state(model, nnx.Param)), of linen like=params"
        )
    if name not in readers:
        raise structure_error(
            path,
            [name],
            "which the file has not; save them with the others, or give `like` without them, as "
            "nnx.state(model, nnx.Param)",
        )
    import jax.numpy as jnp

    array, problem = readers[name](), ""
    if "key<" in str(getattr(wanted, "dtype", "")):
        problem = (
            "`like` has a key of jax.random there, of which files have the numbers alone; "
            "exclude keys, e.g. like=nnx.state(model, nnx.Param)"
        )
    elif tuple(array.shape) != wanted.shape:
        problem = (
            f"shape {tuple(array.shape)}, expected {wanted.shape}, that of `like`; load it into "
            "the model that it is of"
        )
    elif jnp.issubdtype(array.dtype, jnp.floating) != jnp.issubdtype(wanted.dtype, jnp.floating):
        problem = (
            f"dtype {array.dtype}, expected {wanted.dtype}, that of `like`; convert codes with "
            "their scales: load the file that `convert` or `save` wrote"
        )
    if problem:
        raise CheckpointError(f"{path}: tensor {shown(name)}: {problem}")
    if isinstance(wanted, np.ndarray) or array.dtype.itemsize == 8:
        return array  # JAX would narrow 64 bits
    return _place(array, wanted)


def _place(array: Any, wanted: Any) -> Any:
    """An array, or the arrays of a `QArray`, on the devices of `wanted`."""
    import jax
    import jax.numpy as jnp

    of_codes = wanted.codes if is_qarray(wanted) else wanted
    sharding: Any = getattr(of_codes, "sharding", None)
    everywhere: Any = sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        everywhere = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    elif sharding is None or sharding.device_set == jnp.zeros(()).sharding.device_set:
        return array if is_qarray(array) else jnp.asarray(array)

    def put(x: Any) -> jax.Array:
        one = np.asarray(x)
        where = sharding if one.shape == of_codes.shape else everywhere
        return jax.make_array_from_callback(one.shape, where, lambda index: one[index])

    return jax.tree.map(put, array)


def structure_error(path: Path, names: Collection[str], problem: str) -> CheckpointError:
    some = listed(map(shown, names), 3)
    return CheckpointError(f"{path}: tensor{'s'[: len(names) > 1]} {some}, {problem}")


def is_qarray(x: Any) -> bool:
    return hasattr(x, "codes") and hasattr(x, "spec")  # without JAX
