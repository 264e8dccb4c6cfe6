"""Casts of whole pytrees: the leaves in one compiled call."""

import collections
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts._casts import cast_for, check_arguments, types_of
from qtoolkit.casts._checks import check_source
from qtoolkit.casts._modes import Stochastic, check_rounding
from qtoolkit.casts._projection import Projection, projection_of
from qtoolkit.formats import Format, FormatLike, Rules, format


def cast_tree(
    tree: Any,
    fmt: FormatLike | Rules[Any],
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    donate: bool = False,
) -> Any:
    """`cast` of the leaves of a pytree, compiled as one function for each structure.

    Parameters as dicts or as `nnx.State`, whole `nnx` modules, optimizer states. Leaves that stay
    are returned as they are, the same objects; results are sharded as their leaves. Leaves on
    different devices are cast in one call for each set of devices.

    Args:
      tree: Arrays of JAX and NumPy and Python's numbers are cast as by `cast`. Of a
        `jax.ShapeDtypeStruct` the dtype changes.
      fmt: A format with a dtype of its own, or any spelling of one: floating-point leaves are cast,
        all others stay. Or `Rules` of formats, None leaving a leaf alone, over paths such as
        "blocks/0/kernel" (of an `nnx.Variable` and other boxes with their array in `.value`, the
        path of the box) and scalar types of dtypes (`np.float32`, `np.integer`). Where no rule
        matches, floating-point leaves get the default.
      rounding, saturation: As in `cast`.
      key: A key of `jax.random`, for stochastic rounding. Each leaf uses
        `jax.random.fold_in(key, zlib.crc32(path.encode()))`: no leaf depends on the others.
      donate: Whether the arrays that are cast may be used up: their memory is reused or freed, and
        they are deleted. Arrays that are in the tree more than once, and traced ones, are not.

    Returns:
      The same structure, the dtype of each leaf that was cast being that of its format.

    Raises:
      TypeError, ValueError: As `cast`; the message names the path of the leaf, or the rule that
        matches no leaf.

    Examples:
      >>> params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4), "head": jnp.ones(4)}
      >>> rules = qt.Rules({"kernel": "e4m3fn", "head": None}, default="bfloat16")
      >>> jax.tree.map(lambda leaf: str(leaf.dtype), qt.cast_tree(params, rules))
      {'bias': 'bfloat16', 'head': 'float32', 'kernel': 'float8_e4m3fn'}
    """
    check_rounding("cast_tree", rounding, saturation)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in pairs]
    paths = [leaf_path(keys) for keys, _ in pairs]
    targets = {
        index: target
        for index, target in enumerate(_targets(paths, leaves, fmt))
        if target is not None
    }
    sources = _checked_sources(paths, leaves, targets, rounding, saturation, key)
    counts = collections.Counter(map(id, leaves))
    calls: dict[Any, list[int]] = collections.defaultdict(list)
    for index, source in sources.items():
        calls[_placement(source)].append(index)

    results = list(leaves)
    for members in calls.values():
        lost = [i for i in members if donate and _may_be_deleted(leaves[i], counts)]
        # XLA reuses the memory of a leaf for a result of its size, and frees other memory.
        reused = [i for i in lost if format(leaves[i].dtype).bits == targets[i].bits]
        members = reused + [i for i in members if i not in set(reused)]
        keys = _leaf_keys(key, [paths[i] for i in members])
        projections = [
            projection_of("cast_tree", sources[i].shape, rounding, saturation, leaf_key)
            for i, leaf_key in zip(members, keys, strict=True)
        ]
        with types_of(sources[members[0]]):
            cast_leaves = _cast_leaves(
                [sources[i] for i in members[: len(reused)]],
                [sources[i] for i in members[len(reused) :]],
                projections,
                tuple(targets[i] for i in members),
            )
        for i, result in zip(members, cast_leaves, strict=True):
            results[i] = result
        for i in lost:
            leaves[i].delete()
    for index, target in targets.items():
        if index not in sources:
            results[index] = leaves[index].update(dtype=target.dtype, weak_type=False)
    return jax.tree_util.tree_unflatten(treedef, results)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _cast_leaves(
    reused: list[Any],
    others: list[Any],
    projections: list[Projection],
    formats: tuple[Format, ...],
) -> list[jax.Array]:
    return [
        cast_for("cast_tree", x, fmt, projection)
        for x, projection, fmt in zip([*reused, *others], projections, formats, strict=True)
    ]


def _leaf_keys(key: jax.Array | None, paths: list[str]) -> list[jax.Array | None]:
    if key is None:
        return [None] * len(paths)
    hashes = np.array([zlib.crc32(path.encode()) for path in paths], np.uint32)
    folded = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, hashes)
    # Separate arrays: slices of one would take XLA four times as long.
    return list(jax.random.key_data(folded))


def leaf_path(keys: tuple[Any, ...]) -> str:
    """A path such as "a/0/kernel". Boxes of one array, such as Flax's variables, add nothing."""
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _targets(
    paths: list[str], leaves: list[Any], fmt: FormatLike | Rules[Any]
) -> list[Format | None]:
    """The format of each leaf, None where it stays."""

    def with_dtype(spec: FormatLike) -> Format:
        target = format(spec)
        if target.dtype is None:
            raise TypeError(
                f"cast_tree: format {target.name} has no numpy or JAX dtype, expected one that "
                "has; use jax.tree.map and encode for its codes"
            )
        return target

    if not isinstance(fmt, Rules):
        target = with_dtype(fmt)
        return [target if _is_float(leaf) else None for leaf in leaves]
    rules: Rules[Format] = fmt.map(with_dtype)
    kinds = [_scalar_type(leaf) for leaf in leaves]
    rules.check_used("cast_tree", paths, kinds)
    return [
        None
        if rules.match_index(path, kind) is None and not _is_float(leaf)
        else rules.lookup(path, kind)
        for path, kind, leaf in zip(paths, kinds, leaves, strict=True)
    ]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, float) or jnp.issubdtype(_scalar_type(leaf), jnp.floating)


def _scalar_type(leaf: Any) -> type:
    """The scalar type of a leaf's dtype; its own where it has none."""
    return getattr(getattr(leaf, "dtype", None), "type", type(leaf))


def _checked_sources(
    paths: list[str],
    leaves: list[Any],
    targets: dict[int, Format],
    rounding: str | Stochastic,
    saturation: str,
    key: Any,
) -> dict[int, jax.Array | np.ndarray]:
    """The leaves to be cast that are not abstract. Raises what `cast` would raise."""
    sources = {}
    known = set()
    for index, target in targets.items():
        where, leaf = f"cast_tree: {paths[index]}", leaves[index]
        if isinstance(leaf, jax.ShapeDtypeStruct):
            source = jax.eval_shape(functools.partial(check_source, where), leaf)
        else:
            source = sources[index] = check_source(where, leaf)
        if (source.dtype, target) not in known:
            check_arguments(where, source, target, rounding, saturation, key)
            known.add((source.dtype, target))
    return sources


def _placement(source: jax.Array | np.ndarray) -> Any:
    """A key that the arguments of one compiled call must share."""
    if isinstance(source, np.ndarray):
        return "64 bits that JAX would cut"
    if isinstance(source, jax.core.Tracer) or not source.committed:
        return None
    if isinstance(source.sharding, jax.sharding.NamedSharding):
        return tuple(source.sharding.mesh.devices.flat)
    return frozenset(source.sharding.device_set)


def _may_be_deleted(leaf: Any, counts: collections.Counter[int]) -> bool:
    traced = isinstance(leaf, jax.core.Tracer)
    return isinstance(leaf, jax.Array) and not traced and counts[id(leaf)] == 1
