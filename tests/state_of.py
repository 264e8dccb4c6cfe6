"""What wrapped models keep for their matmuls, by names that do not depend on how they keep it.

Tests name a matmul by the path of its module and its kernel: `state_of(model, "mlp")["kernel"]`.
The second use of a kernel is "kernel#2"; matmuls of two activations are "0", "1", ..., in order.
Where the state lies and what it is called there is known in this file alone, for nnx and linen.
"""

import collections
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import unfreeze

import qtoolkit as qt

# Of nnx: the attribute of a module that holds the state; of linen: the collections.
ATTRIBUTE, COLLECTIONS = "qtoolkit_products", ("qtoolkit", "qtoolkit_scales")
_OF_NNX = (qt.nnx.ScalingState, qt.nnx.Probe, qt.nnx.LsqScale, qt.nnx.LsqOffset)
_PAIRS = {"scales": "scale", "offsets": "offset"}  # of nnx: lists for lhs and rhs
Parts = dict[str, Any]


def states_of(tree: Any, methods: tuple[str, ...] = ()) -> dict[str, dict[str, Parts]]:
    """The state of all matmuls: {"blocks/0/mlp": {"kernel": {"history": ..., "bad": ...}}}.

    Args:
      tree: An nnx model, an `nnx.State` or gradients of one, linen's variables, or what
        `linen.value_and_grad` returned as the state. Leaves are what it holds: Variables or arrays.
      methods: Methods of the modules that may stand in front of a kernel's name.
    """
    found: dict[str, dict[str, Parts]] = collections.defaultdict(dict)
    for path, leaf in sorted(_leaves(tree), key=lambda pair: tuple(map(str, pair[0]))):
        *owner, name, part = _with_one_part(path)
        module = "/".join(_modules(owner))
        found[module].setdefault(name, {})[part] = leaf
    return {
        path: dict(zip(by_kernel(states, methods), states.values(), strict=True))
        for path, states in found.items()
    }


def state_of(tree: Any, path: str = "", methods: tuple[str, ...] = ()) -> dict[str, Parts]:
    """The state of the matmuls of the module at `path`; empty if it has none."""
    found = states_of(tree, methods)
    if path and path not in found and isinstance(tree, nnx.Module):  # another path of a shared one
        return state_of(functools.reduce(_child, path.split("/"), tree), "", methods)
    return found.get(path, {})


def arrays_of(tree: Any) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """What `states_of` returns, as arrays of NumPy."""
    is_leaf = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    return jax.tree.map(_array, states_of(tree), is_leaf=is_leaf)


def history_of(tree: Any, path: str = "", name: str = "kernel") -> np.ndarray:
    """The largest magnitudes of lhs, rhs, cotangent, the newest first: float32[..., 3, steps]."""
    return _array(state_of(tree, path)[name]["history"])


def histories_of(tree: Any) -> list[np.ndarray]:
    states = [state for layer in arrays_of(tree).values() for state in layer.values()]
    return [state["history"] for state in states if "history" in state]


def shapes_of(tree: Any) -> dict[str, dict[str, set[str]]]:
    """Which arrays there are: {"mlp": {"kernel": {"history", "bad"}}}."""
    return {
        path: {name: set(parts) for name, parts in layer.items()}
        for path, layer in states_of(tree).items()
    }


def with_parts(collection: Any, **values: Any) -> Any:
    """A collection of linen with other arrays in the state of each matmul, by name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: values.get(path[-1].key, leaf), collection
    )


def replace(model: nnx.Module, variable: nnx.Variable[Any], other: nnx.Variable[Any]) -> None:
    """Puts another Variable wherever the model has this one."""
    places = [path for path, node in nnx.iter_graph(model) if node is variable]
    for *owner, name in places:
        parent = functools.reduce(lambda node, key: _child(node, str(key)), owner, model)
        if isinstance(name, int):
            parent[name] = other
        else:
            setattr(parent, name, other)


def by_kernel(names: Iterable[str], methods: tuple[str, ...] = ()) -> list[str]:
    """Names of matmuls as qtoolkit gives them, "kernel" or "mlp:kernel", by their kernels.

    Args:
      names: Those of one module or several, each only once: which number a name has depends on the
        others.
      methods: As for `states_of`.
    """
    split = [_path_and_name(name) for name in names]
    numbers: dict[str, int] = collections.Counter()
    found = []
    for path, name in split:
        if use := _kernel_and_place(name):  # of a kernel that a call uses several times
            uses = [other for where, other in split if where == path and _kernel_and_place(other)]
            alike = {other for other in uses if other.startswith(f"{use[0]}@")}
            number = sorted(alike, key=_place).index(name) + 1
            found.append(path + use[0] + (f"#{number}" if number > 1 else ""))
            continue
        if "@" in name:  # a matmul of two activations, by its place in the user's code
            others = [other for where, other in split if where == path and "@" in other]
            alike = {other for other in others if not _kernel_and_place(other)}
            name = str(sorted(alike, key=_place).index(name))
        elif name == "0" and (path, "1") not in split:  # of a layer with one matmul
            name = "kernel"
        head, _, rest = name.partition(".")
        plain = path + (rest if head in ("__call__", *methods) else name)
        numbers[plain] += 1
        found.append(plain if numbers[plain] == 1 else f"{plain}#{numbers[plain]}")
    return found


def keyed_by_kernel(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """What qtoolkit returns for each matmul, with names of `by_kernel`."""
    return dict(zip(by_kernel(by_name), by_name.values(), strict=True))


def recipe_of(layer: nnx.Module) -> qt.Recipe | None:
    """The recipe of a layer of a wrapped model; None if it has none."""
    site = getattr(layer, "qtoolkit_site", None)
    return None if site is None else site.rules.lookup(site.paths, site.kinds)


def _leaves(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The arrays or Variables of state, each with its path."""
    if isinstance(tree, nnx.Module):
        pairs: Iterable[Any] = nnx.iter_graph(tree)
    elif isinstance(tree, nnx.State):
        pairs = nnx.to_flat_state(tree)
    else:
        tree = unfreeze(tree)
        is_variables = any(name in tree for name in ("params", *COLLECTIONS))
        for part in (tree.get(name, {}) for name in COLLECTIONS) if is_variables else (tree,):
            for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
                yield tuple(entry.key for entry in path), leaf
        return
    for path, leaf in pairs:
        # `nnx.bridge.ToNNX` makes types of Variables that are called like linen's collections.
        if isinstance(leaf, _OF_NNX) or type(leaf).__name__ in COLLECTIONS:
            yield path, leaf


def _with_one_part(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path with "lhs_scale" in place of "scales", 0."""
    *start, kind, side = path
    return (*start, f"{('lhs', 'rhs')[side]}_{_PAIRS[kind]}") if kind in _PAIRS else path


def _modules(owner: Iterable[Any]) -> Iterator[str]:
    """The path of a module from that of its state: linen's keys are "self.blocks.dense"."""
    for entry in map(str, owner):
        if entry == ATTRIBUTE or entry == "self":
            continue
        yield from entry.removeprefix("self.").split(".") if entry[:5] == "self." else (entry,)


def _path_and_name(name: str) -> tuple[str, str]:
    """("mlp:", "attend@3:12") of "mlp:attend@3:12"; the path is "" where there is none."""
    place = re.fullmatch("([^:@]*:)?(.*)", name)
    assert place is not None
    return place[1] or "", place[2]


def _kernel_and_place(name: str) -> tuple[str, str] | None:
    """("up", "attend@3:12") of "up@attend@3:12"; None for a place alone."""
    parts = re.fullmatch("([^@]+)@([^@.]+@.*)", name)
    return (parts[1], parts[2]) if parts else None


def _place(name: str) -> list[Any]:
    """For sorting by line and column: "__call__@3:12.attend@5:8"."""
    return [(not x.isdigit(), int(x) if x.isdigit() else 0, x) for x in re.split("[@:.#']", name)]


def _child(module: Any, name: str) -> Any:
    if hasattr(module, name):  # a matmul may be called "0"
        return getattr(module, name)
    return module[int(name) if name.isdigit() else name]


def _array(leaf: Any) -> np.ndarray:
    return np.asarray(leaf[...] if isinstance(leaf, nnx.Variable) else leaf)
