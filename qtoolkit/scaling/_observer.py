"""Calibration: observers see batches one by one, can be merged, and give scales.

An observer is a frozen pytree, called state here: its arrays are leaves, its format and
configuration are static. It works under `jit`, `scan`, `vmap` and `shard_map`, and every method
returns a new one.

    state = AbsMax.of(spec, (8, 128))
    for x in batches:
        state = state.observe(x)
    q = quantize(x, spec, scale=state.scale())

Under `jit` over sharded arrays `observe` sees the whole batch, and nothing is left to merge. Where
each device or host has its own state, observe all batches first and merge once, at the end: counts
add up, so a second merge would count earlier batches twice.

Each field declares how it is merged; `merge` and `merge_across` both follow that.
"""

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.typing import ArrayLike

from qtoolkit import formats
from qtoolkit.casts.internal import (
    check_differentiable,
    exact_float32,
    from_magnitude_ordinal,
    from_stored,
    is_zero,
    magnitude_ordinal,
    serializable,
    to_stored,
)
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.scaling._blocks import blocks_of, magnitude_max, scale_shape
from qtoolkit.scaling._scales import scale_from, tensor_scale_from

Array = jax.Array
AxisNames = str | tuple[str, ...]
Summary = tuple[Array, ...]

Kind = TypeVar("Kind", bound=type)

_MOST = np.uint32(0xFFFFFFFF)


def saturating_sum(a: Array, b: Array) -> Array:
    """The sum of uint32 counts, 2**32 - 1 where it is more."""
    total = a + b
    return jnp.where(total < a, _MOST, total)


def _saturating_psum(counts: Array, axis_name: AxisNames) -> Array:
    """The sum of uint32 counts of fewer than 2**16 devices, 2**32 - 1 where it is more."""
    # 16 bits of each are summed at a time, so that no sum wraps.
    low = lax.psum(counts & np.uint32(0xFFFF), axis_name)
    high = lax.psum(counts >> np.uint32(16), axis_name) + (low >> np.uint32(16))
    total = (high << np.uint32(16)) | (low & np.uint32(0xFFFF))
    return jnp.where(high > np.uint32(0xFFFF), _MOST, total)


class Merge(NamedTuple):
    """How to merge the values of a field: (of two states, of all devices along mesh axes)."""

    two: Callable[[Array, Array], Array]
    across: Callable[[Array, AxisNames], Array]


# Metadata of fields. Static ones are configuration, which states that are merged must share; all
# others are arrays.
STATIC = {"static": True}
COUNT = {"merge": Merge(saturating_sum, _saturating_psum)}
MAX = {"merge": Merge(jnp.maximum, lax.pmax)}
SUM = {"merge": Merge(operator.add, lax.psum)}  # of NumPy's numbers, too


@functools.cache
def _rules(kind: Any) -> dict[str, Merge]:
    """How the fields of a dataclass are merged, by name."""
    fields = dataclasses.fields(kind)
    return {f.name: f.metadata["merge"] for f in fields if "merge" in f.metadata}


def merge_fields(state: Any, value: Callable[[Merge, str], Array]) -> Any:
    """A dataclass with `value` of the rule and the name of each field that has a rule."""
    kind: Any = type(state)
    rules = _rules(kind)
    return dataclasses.replace(state, **{name: value(rules[name], name) for name in rules})


def pytree(kind: Kind) -> Kind:
    """Registers a dataclass as a pytree whose structure differs from that of any other class."""
    # JAX (0.10 to 0.12) takes the structures of two classes from `jax.tree_util.register_dataclass`
    # as equal if their static fields are equal, as those of two observers may be. When their
    # hashes collided, `jax.jit` returned a state of the other class. It tells classes apart that
    # `register_pytree_with_keys` registers. Other dataclasses use `register_dataclass`, which
    # flattens in C++ and is faster; no two with equal static fields enter one jitted function.
    fields = dataclasses.fields(kind)
    static = tuple(f.name for f in fields if f.metadata.get("static"))
    arrays = tuple(f.name for f in fields if f.name not in static)
    keys = tuple(map(jax.tree_util.GetAttrKey, arrays))

    def flatten(state: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        parts = (tuple(getattr(state, name) for name in names) for names in (arrays, static))
        return next(parts), next(parts)

    def flatten_with_keys(state: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, configuration = flatten(state)
        return tuple(zip(keys, children, strict=True)), configuration

    def unflatten(configuration: tuple[Any, ...], children: Any) -> Any:
        return kind(**dict(zip((*static, *arrays), (*configuration, *children), strict=True)))

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)
    return serializable(kind)


class Mergeable:
    """A frozen dataclass whose fields say how they are merged."""

    def merge(self, other: Self) -> Self:
        """A state that has seen the batches of both. Associative and commutative, up to rounding.

        Raises:
          TypeError: `other` is of another class.
          ValueError: It has another format, shape or configuration.
        """
        where = f"{type(self).__name__}.merge"
        if type(other) is not type(self):
            raise TypeError(
                f"{where}: other is of type {type(other).__name__}, expected {type(self).__name__}"
            )
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        for name in (f.name for f in fields if "static" in f.metadata):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"{where}: other has {name}={theirs}, expected {mine}")
        return merge_fields(self, lambda merge, n: merge.two(getattr(self, n), getattr(other, n)))

    def merge_across(self, axis_name: AxisNames) -> Self:
        """A state that has seen the batches of all devices along mesh axes, the same on each.

        Args:
          axis_name: One or more axes of `shard_map`, or that of `pmap` or `vmap`.
        """
        return merge_fields(self, lambda merge, name: merge.across(getattr(self, name), axis_name))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Observer(Mergeable):
    """The base class of all observers.

    Attributes:
      spec: The block format that scales are for.
      shape: The shape of the scales.
      count: uint32 scalar, the batches that were observed, without bad ones.
      bad: uint32 scalar, the batches that held a NaN or an infinity. They changed nothing else.
        Both stay at 2**32 - 1 once there.

    Examples:
      >>> start = qt.scaling.AbsMax.of("e4m3fn", (2,))
      >>> seen = start.observe(jnp.asarray([1.0, -896.0])).observe(jnp.asarray([jnp.nan, 1e6]))
      >>> seen  # the batch with a NaN changed nothing but its count
      AbsMax(e4m3fn by tensor, scales[1]: 1 seen, 1 bad)
      >>> seen.scale(), seen.merge(start.observe(jnp.asarray([0.0, 1792.0]))).scale()
      (Array([2.], dtype=float32), Array([4.], dtype=float32))
    """

    spec: BlockFormat = dataclasses.field(metadata=STATIC)
    shape: tuple[int, ...] = dataclasses.field(metadata=STATIC)
    count: Array = dataclasses.field(metadata=COUNT)
    bad: Array = dataclasses.field(metadata=COUNT)

    def __repr__(self) -> str:
        count, bad = (_count_text(number) for number in (self.count, self.bad))
        scales = ",".join(map(str, self.shape))
        kind = type(self).__name__
        return f"{kind}({self.spec.name}, scales[{scales}]: {count} seen, {bad} bad)"

    def observe(self, x: ArrayLike) -> Self:
        """The state after one more batch.

        Args:
          x: float32, float16 or bfloat16, any shape with as many blocks along each axis as the one
            that the state was made for: axes of which a block is the whole may differ, all of them
            where there is one scale per tensor.

        Returns:
          A state of the same structure, shapes and dtypes. A batch that holds a NaN or an infinity
          counts only in `bad`.

        Raises:
          TypeError: `x` has another dtype.
          ValueError: `x` is empty or has other blocks.
        """
        where = f"{type(self).__name__}.observe"
        batch = check_differentiable(where, x, wide=False)
        shape = scale_shape(where, self.spec, batch.shape)
        if shape != self.shape:
            raise ValueError(
                f"{where}: x of shape {batch.shape} has scales of shape {shape}, expected "
                f"{self.shape}; only axes of which a block is the whole may differ between batches"
            )
        batch = lax.stop_gradient(batch)
        mesh = jax.typeof(batch).sharding.mesh
        if AxisType.Explicit not in mesh.axis_types:
            return _observed(self, batch)
        # The new state has the shardings of the old one.
        old = jax.tree.map(lambda leaf: NamedSharding(mesh, jax.typeof(leaf).sharding.spec), self)
        return jax.sharding.auto_axes(_observed, out_sharding=old)(self, batch)

    def amax(self) -> Array:
        """The magnitude that becomes the largest element: float32, the shape of the scales.

        Finite; 0 where nothing but zeros was observed.
        """
        return _amax(self)

    def scale(self) -> Array:
        """The scales for `quantize(x, spec, scale=...)`, by the rule of the format from `amax`.

        Returns:
          float32 values of the format of the scales, in their shape; positive and finite. 1 (as the
          format holds it) where nothing but zeros, or nothing at all, was observed.
        """
        return _scale(self)

    def tensor_scale(self) -> Array | None:
        """The second scale, for `quantize(x, spec, scale=..., tensor_scale=...)`.

        Returns:
          float32 scalar for formats that have a `tensor_scale`, as NVFP4 has; else None. 1 where
          `scale` is all 1 for want of data.
        """
        return None if self.spec.tensor_scale is None else _tensor_scale(self)

    def _block_amax(self) -> Array:
        """Computes `amax`; each observer has its own way."""
        raise NotImplementedError

    def _range(self) -> Array:
        """The amax of each block, from which the second scale is computed."""
        return self._block_amax()

    def _summary(self, x: Array) -> Summary:
        """What the state needs to know of a batch: by default the patterns of its amaxes."""
        return (amax_bits(x, self.spec),)

    def _after(self, summary: Summary) -> Self:
        """The state after a good batch, with the old counters."""
        raise NotImplementedError


State = TypeVar("State", bound=Observer)


@jax.jit
def _amax(state: Observer) -> Array:
    return state._block_amax()


@jax.jit
def _scale(state: Observer) -> Array:
    spec, amax = state.spec, state._block_amax()
    assert spec.scale is not None
    scale = scale_from(amax, spec, stored_tensor_scale(state))
    one = to_stored(jnp.ones_like(amax), spec.scale)
    return jnp.where(is_zero(amax), from_stored(one, spec.scale), from_stored(scale, spec.scale))


@jax.jit
def _tensor_scale(state: Observer) -> Array:
    scale, fmt = stored_tensor_scale(state), state.spec.tensor_scale
    assert scale is not None
    assert fmt is not None
    return from_stored(scale, fmt)


def stored_tensor_scale(state: Observer) -> Array | None:
    """The second scale as it is stored, for formats that have one."""
    if state.spec.tensor_scale is None:
        return None
    return tensor_scale_from(jnp.max(state._range()), state.spec)


@jax.jit
def _observed(state: State, x: Array) -> State:
    return _counting(state, state._after(state._summary(x)), jnp.all(jnp.isfinite(x)))


@jax.jit
def observed_summary(state: State, is_good: Array, amax: Array, *counts: Array) -> State:
    """`state.observe(x)` from float32 amaxes in the shape of the scales, and a histogram if any."""
    return _counting(state, state._after((magnitude_ordinal(amax), *counts)), is_good)


def _counting(state: State, after: State, is_good: Array) -> State:
    after = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), after, state)
    good = is_good.astype(jnp.uint32)
    return dataclasses.replace(
        after,
        count=saturating_sum(state.count, good),
        bad=saturating_sum(state.bad, np.uint32(1) - good),
    )


def start(
    where: str, spec: SpecLike, shape: tuple[int, ...], *, zero_point: bool
) -> dict[str, Any]:
    """The fields that all states share, before the first batch; arguments checked."""
    fmt = formats.spec(spec)
    if fmt.scale is None:
        raise ValueError(f"{where}: {fmt.name} has no scale, expected a format that has")
    if fmt.zero_point != zero_point:
        has, use = ("a", "MinMax") if fmt.zero_point else ("no", "AbsMax")
        raise ValueError(f"{where}: {fmt.name} has {has} zero point; use {use}")
    if not isinstance(shape, tuple | list):
        raise TypeError(
            f"{where}: shape has type {type(shape).__name__}, expected that of an array, e.g. "
            "x.shape"
        )
    # Two separate arrays: JAX cannot donate a buffer that occurs twice.
    count, bad = (jnp.zeros((), jnp.uint32) for _ in range(2))
    scales = scale_shape(where, fmt, tuple(shape))
    return {"spec": fmt, "shape": scales, "count": count, "bad": bad}


def check_number(where: str, name: str, value: Any) -> None:
    """TypeError where a setting is no number, so that it can be compared with its range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: {name}={value!r}, expected a number")


def amax_bits(x: Array, spec: BlockFormat) -> Array:
    """The float32 pattern of the amax of each block, in the shape of the scales."""
    blocks = blocks_of(x, spec)
    amax = magnitude_max(blocks.split(x), blocks.element_axes, nan_wins=False)
    return magnitude_ordinal(exact_float32(blocks.gather(amax)))


def _count_text(count: Any) -> str:
    """A count as a number, if its value is known."""
    has_value = isinstance(count, jax.Array | np.ndarray) and not isinstance(count, jax.core.Tracer)
    return str(int(count)) if has_value and np.ndim(count) == 0 else str(count)


def from_bits(bits: Array) -> Array:
    """The float32 magnitudes of `amax_bits`."""
    return from_magnitude_ordinal(bits, jnp.float32)
