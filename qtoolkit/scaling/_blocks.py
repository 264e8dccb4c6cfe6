"""Where the blocks of an array lie, and the largest finite magnitude of each."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from qtoolkit.casts.internal import (
    barrier_on_cpu,
    check_differentiable,
    elementwise,
    exact_float32,
    from_magnitude_ordinal,
    infinity_ordinal,
    magnitude_ordinal,
)
from qtoolkit.formats import BlockFormat

_STAGE = 32  # XLA for CPUs fuses a reduction of at most so many elements with their computation
_VECTOR = 8  # neighbours that must stay adjacent, so that the loop is vectorized
_SMALL = 2**20  # elements that one core reduces about as fast as two


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of an array, and a view of the array in which each block has axes of its own.

    The view splits an axis with several blocks in two: which block, and which place in the block.

    Attributes:
      shape: The shape of the array.
      lengths: The length of a block along each axis; the last one may be shorter.
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks along each axis: the shape of the scales."""
        return tuple(
            1 if b == n else -(-n // b) for n, b in zip(self.shape, self.lengths, strict=True)
        )

    @property
    def is_split(self) -> tuple[bool, ...]:
        """For each axis, whether the view splits it in two: not if it is one block, or if blocks
        have length 1.
        """
        return tuple(b not in (1, n) for n, b in zip(self.shape, self.lengths, strict=True))

    def split(self, x: jax.Array) -> jax.Array:
        """The view of an array; ragged ends are padded with zeros."""
        # On an Explicit mesh each shard must hold whole blocks: a reshape cannot move elements
        # between shards, as one on an Auto mesh does.
        for axis, is_split in enumerate(self.is_split):
            if is_split:
                check_shards("block scaling", x, axis, self.lengths[axis])
        missing = [n * b - s for n, b, s in zip(self.counts, self.lengths, self.shape, strict=True)]
        if any(missing):
            x = jnp.pad(x, [(0, n) for n in missing])
        return self._to_view(x, self.lengths)

    def join(self, view: jax.Array) -> jax.Array:
        """The array of a view."""
        padded = tuple(n * b for n, b in zip(self.counts, self.lengths, strict=True))
        x = self._from_view(view, padded)
        return x if padded == self.shape else lax.slice(x, (0,) * x.ndim, self.shape)

    def spread(self, scales: jax.Array) -> jax.Array:
        """One number for each block, in a shape that broadcasts to the view."""
        return self._to_view(scales, (1,) * len(self.shape))

    def gather(self, spread: jax.Array) -> jax.Array:
        """The numbers of `spread` in the shape of the scales, `counts`."""
        return self._from_view(spread, self.counts)

    @property
    def element_axes(self) -> tuple[int, ...]:
        """The axes of the view that run over the elements of a block: reduce over these."""
        axes, at = [], 0
        for length, is_split in zip(self.lengths, self.is_split, strict=True):
            at += is_split
            if length != 1:
                axes.append(at)
            at += 1
        return tuple(axes)

    def reshaped(self, shape: tuple[int, ...]) -> "Blocks":
        """The same blocks of the array in another shape, where none is torn."""
        olds = [(n, b) for n, b in zip(self.shape, self.lengths, strict=True) if n > 1]
        sizes = [n for n in shape if n > 1]
        lengths: list[int] = []
        for begin, end, length in _groups([n for n, _ in olds], sizes):
            of_group = _group_lengths(olds[begin:end], sizes[len(lengths) : len(lengths) + length])
            if of_group is None:
                raise ValueError(
                    f"QArray: reshape{shape} of shape {self.shape} would tear blocks of "
                    f"{self.lengths}; dequantize() first"
                )
            lengths += of_group
        remaining = iter(lengths)
        return Blocks(shape, tuple(1 if n == 1 else next(remaining) for n in shape))

    def _to_view(self, x: jax.Array, within: tuple[int, ...]) -> jax.Array:
        """Splits the axes to be split: blocks, and `within` elements of each."""
        shape: list[int] = []
        sharded: list[Any] = []
        parts = zip(self.counts, within, self.is_split, explicit_spec(x), strict=True)
        for count, length, is_split, entry in parts:
            shape += (count, length) if is_split else (count * length,)
            sharded += (entry, None) if is_split else (entry,)
        return _reshaped(x, shape, sharded)

    def _from_view(self, view: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        entries = iter(explicit_spec(view))
        sharded = []
        for is_split in self.is_split:
            sharded.append(next(entries))
            if is_split:  # the axis within blocks is not sharded
                next(entries)
        return _reshaped(view, shape, sharded)


def blocks_of(x: jax.Array, spec: BlockFormat) -> Blocks:
    return Blocks(x.shape, spec.block_lengths(x.shape))


def scale_shape(where: str, spec: BlockFormat, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`spec.scale_shape(shape)`, with errors that begin with `where`."""
    try:
        return spec.scale_shape(shape)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class TornBlocksError(ValueError):
    """Shards on an Explicit mesh do not hold whole blocks."""


def check_shards(where: str, x: jax.Array, axis: int, length: int) -> None:
    """Raises if an axis is sharded over an Explicit mesh so that blocks of `length` are torn."""
    sharded = explicit_spec(x)
    shards = _count(x, sharded[axis])
    n = x.shape[axis]
    if sharded[axis] is None or n % (shards * length) == 0:
        return
    names = _names(sharded[axis])
    # The first axis that could take the mesh axes of this one, too.
    fits = (
        m % (shards * _count(x, entry) * length) == 0
        for m, entry in zip(x.shape, sharded, strict=True)
    )
    other = next((i for i, it_fits in enumerate(fits) if it_fits and i != axis), None)
    new_spec = [None if place == axis else entry for place, entry in enumerate(sharded)]
    if other is None:
        advice = f"keep the axis whole, as no other one holds whole blocks in {shards} shards"
    else:
        both = (*_names(sharded[other]), *names)
        new_spec[other] = both if len(both) > 1 else both[0]
        advice = f"move {' and '.join(map(repr, names))} to axis {other}"
    raise TornBlocksError(
        f"{where}: axis {axis} has {n} elements in {shards} shards over mesh axes {names}, "
        f"expected whole blocks of {length} in each, got {n / shards / length:g}; {advice}: x of "
        f"shape {x.shape} becomes jax.sharding.reshard(x, P({', '.join(map(repr, new_spec))})); or "
        f"make the axis {-(-n // (shards * length)) * shards * length} long, or use an Auto mesh"
    )


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _count(x: jax.Array, entry: Any) -> int:
    """How many shards an axis has whose entry of the sharding is this."""
    mesh = jax.typeof(x).sharding.mesh
    return math.prod(mesh.shape[name] for name in _names(entry))


def _groups(olds: list[int], news: list[int]) -> Iterator[tuple[int, int, int]]:
    """Splits two shapes of one size, without ones, into the shortest runs of equal size.

    Yields begin and end of each run in `olds`, and its length in `news`.
    """
    i = j = 0
    while i < len(olds):
        begin, first = i, j
        old, new = olds[i], news[j]
        i, j = i + 1, j + 1
        while old != new:
            if old < new:
                old, i = old * olds[i], i + 1
            else:
                new, j = new * news[j], j + 1
        yield begin, i, j - first


def _group_lengths(olds: list[tuple[int, int]], news: list[int]) -> list[int] | None:
    """Lengths of blocks along axes of sizes `news` in place of axes (size, length of a block)."""
    if all(b == 1 for _, b in olds):
        return [1] * len(news)
    if all(b == n for n, b in olds):
        return news
    *outer, (n, b) = olds
    is_same = len(olds) == len(news) == 1
    if any(c > 1 for _, c in outer) or not (is_same or (n % b == 0 and news[-1] % b == 0)):
        return None
    return [1] * (len(news) - 1) + [b]


def _reshaped(x: jax.Array, shape: Sequence[int], sharded: Sequence[Any]) -> jax.Array:
    """A reshape that says where the shards of an Explicit mesh go."""
    if x.shape == tuple(shape):
        return x
    if all(entry is None for entry in sharded):
        return x.reshape(shape)
    return jnp.reshape(x, shape, out_sharding=PartitionSpec(*sharded))


def explicit_spec(x: jax.Array) -> tuple[Any, ...]:
    """The mesh axes of each axis of `x`; None for all but those of Explicit meshes."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def amax(x: jax.Array, axis: int | Sequence[int] | None = None) -> jax.Array:
    """The largest finite |x|. Infinities and NaNs do not count.

    Args:
      x: float32, float16 or bfloat16, any shape; empty ones have amax 0. Subnormals count.
      axis: The axes to reduce; None for all.

    Returns:
      float32: the rank of `x`, reduced axes with length 1; a scalar where `axis` is None.

    Raises:
      TypeError: `x` has another dtype; `axis` is something else.
      ValueError: An axis is out of range, or comes twice.

    Examples:
      >>> x = jnp.asarray([[1.0, -3.0], [jnp.inf, 2.0], [jnp.nan, 0.5]])
      >>> qt.scaling.amax(x)
      Array(3., dtype=float32)
      >>> qt.scaling.amax(x, axis=-1)
      Array([[3. ],
             [2. ],
             [0.5]], dtype=float32)
    """
    x = lax.stop_gradient(check_differentiable("amax", x, wide=False))
    axes = check_axes("amax", axis, x.ndim)
    magnitude = magnitude_max(x, tuple(range(x.ndim)) if axes is None else axes, nan_wins=False)
    return exact_float32(magnitude.reshape(()) if axes is None else magnitude)


def magnitude_max(view: jax.Array, axes: tuple[int, ...], *, nan_wins: bool) -> jax.Array:
    """The largest finite |x| over `axes`, which keep length 1; NaN for NaN where `nan_wins`."""
    # Compared as integers, so that subnormals count. Zero where nothing is finite.
    return from_magnitude_ordinal(largest_ordinal(view, axes, nan_wins=nan_wins), view.dtype)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """The largest finite |x| of all, a float32 scalar."""
    return exact_float32(magnitude_max(x, tuple(range(x.ndim)), nan_wins=False)).reshape(())


def magnitude_or_infinity(x: jax.Array) -> jax.Array:
    """The largest |x| of all, a float32 scalar: infinite or NaN if one element is."""
    largest = _max(magnitude_ordinal(x), tuple(range(x.ndim)), explicit_spec(x))
    return exact_float32(from_magnitude_ordinal(largest, x.dtype)).reshape(())


def largest_ordinal(view: jax.Array, axes: tuple[int, ...], *, nan_wins: bool) -> jax.Array:
    """The `magnitude_ordinal` of `magnitude_max`."""
    return _max(_finite(view, nan_wins), axes, explicit_spec(view))


@elementwise
def _finite(view: jax.Array, nan_wins: bool) -> jax.Array:
    """The magnitudes as integers in the same order; 0 for elements that do not count."""
    ordinals, inf = magnitude_ordinal(view), infinity_ordinal(view.dtype)
    is_skipped = ordinals == inf if nan_wins else ordinals >= inf
    return jnp.where(is_skipped, np.zeros_like(inf), ordinals)


def _max(x: jax.Array, axes: tuple[int, ...], sharded: tuple[Any, ...]) -> jax.Array:
    """The maximum over `axes`, in two steps, on CPUs with a barrier between them."""
    # XLA for CPUs fuses the computation of the elements into a reduction over at most `_STAGE`
    # elements; before a longer one it writes the elements to memory. So the first step is short. If
    # the second step is short, too, XLA fuses both into one loop over columns on one core, which
    # compiles in half the time and is as fast for small arrays. For others the second step is long.
    # XLA for GPUs fuses the first step with a cast of the same elements, so no barrier there.
    if not axes:
        return x
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
    known = [axis for axis in axes if isinstance(x.shape[axis], int)]  # not symbolic
    if not known:
        return lax.reduce_max(x, axes).reshape(shape)
    axis = known[-1] if known[-1] == x.ndim - 1 else max(known, key=lambda axis: x.shape[axis])
    is_last = axis == x.ndim - 1
    step = _divisor(x.shape[axis], _VECTOR if is_last else _STAGE + 1)
    if step > 1 and sharded[axis] is None:
        rest = x.shape[axis] // step
        parts = [[n] for n in x.shape]
        parts[axis] = [step, rest] if is_last else [rest, step]
        if len(known) == x.ndim and x.size <= _SMALL and not any(sharded):
            parts = [[factor for n in part for factor in _factors(n)] for part in parts]
            axes = tuple(range(sum(map(len, parts)) - 1))
        within = sum(map(len, parts[:axis])) + (not is_last)
        short = x.reshape([n for part in parts for n in part])
        x = barrier_on_cpu(jnp.max(short, axis=within))
    if all(n == 1 for n in shape):
        axes = tuple(range(x.ndim))
    return lax.reduce_max(x, axes).reshape(shape)


def _factors(n: int) -> list[int]:
    """Factors of n, ascending, of at most `_STAGE` but for a prime."""
    factors = []
    while (factor := _divisor(n, 1)) > 1:
        factors.append(factor)
        n //= factor
    return sorted(factors + [n] * (n > 1))


def _divisor(n: int, least_rest: int) -> int:
    """The largest divisor of n that one loop may reduce and that leaves `least_rest` or more."""
    return max((d for d in range(2, _STAGE + 1) if n % d == 0 and n // d >= least_rest), default=1)


def check_axes(where: str, axis: Any, ndim: int) -> tuple[int, ...] | None:
    """The axes that `axis` names, from 0 up and rising; None for all."""
    if axis is None:
        return None
    try:
        axes = tuple(map(operator.index, axis if isinstance(axis, Sequence) else (axis,)))
    except TypeError:
        raise TypeError(
            f"{where}: axis={axis!r}, expected None, an integer or several of them"
        ) from None
    if any(not -ndim <= a < ndim for a in axes) or len({a % ndim for a in axes}) < len(axes):
        raise ValueError(
            f"{where}: axis={axis} of an array with {ndim} axes, expected different axes from "
            f"{-ndim} to {ndim - 1}"
        )
    return tuple(sorted(a % ndim for a in axes))


def checked_axis(where: str, name: str, array: jax.Array, axis: int) -> int:
    """`axis` counted from the front; ValueError where `array` has none such."""
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{where}: axis {axis} of {name}, an array of shape {array.shape}, expected "
            + (f"{-array.ndim} to {array.ndim - 1}" if array.ndim else "an array with an axis")
        )
    return axis % array.ndim
