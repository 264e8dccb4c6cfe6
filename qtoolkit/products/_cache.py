"""The KV cache of attention, stored as codes and scales."""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts.internal import WIDTHS, check_holds, exact_float32
from qtoolkit.formats import BlockFormat, SpecLike, spec
from qtoolkit.scaling import QArray, quantize
from qtoolkit.scaling.internal import InputTransform

Array = jax.Array
_LONGEST = 128  # the longest block of a rotation
_LEAVES = ("codes", "scale", "zero_point")


@dataclasses.dataclass(frozen=True)
class KVCache:
    """How attention keeps its keys and values between steps: in few bits.

    `wrap` and `quantize` take it as `kv_cache=` for attention of Flax; `empty`, `store` and `read`
    are for your own. A token is rounded once, when it is stored.

    Attributes:
      keys, values: Their formats: "int8" with a scale for each token and head, or a format with
        blocks along the features. None: they are not quantized. One format given alone is for both.
      rotate: Whether they are rotated before they are rounded, by a random Hadamard transform in
        blocks of up to 128 features, and rotated back when they are read. It spreads channels
        with large numbers, as keys have.
      seed: Of the signs of the transform.

    Raises:
      ValueError: A format has no negative numbers, or scales that tokens share.

    Source: arXiv:2404.00456 (rotated caches).

    Examples:
      >>> cache = qt.products.KVCache("int8", "int4", rotate=True)
      >>> kept = cache.empty((1, 8, 2, 64))  # batch, tokens, heads, features
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 64))
      >>> kept = cache.store(kept, (k, v), 3)
      >>> keys, values = cache.read(kept)
      >>> print(f"{jnp.abs(keys[:, 3:4] - k).max():.2f}, {jnp.abs(values[:, 3:4] - v).max():.2f}")
      0.03, 0.27
    """

    keys: BlockFormat | None
    values: BlockFormat | None
    rotate: bool = False
    seed: int = 0

    if TYPE_CHECKING:

        def __init__(
            self,
            keys: SpecLike | None,
            values: SpecLike | None = ...,
            rotate: bool = False,
            seed: int = 0,
        ) -> None: ...

    else:

        def __init__(self, keys, values=..., rotate=False, seed=0):
            both = (keys, keys if values is ... else values)
            formats = [None if x is None else _format_of_tokens("KVCache", x) for x in both]
            for name, value in zip(("keys", "values"), formats, strict=True):
                object.__setattr__(self, name, value)
            object.__setattr__(self, "rotate", bool(rotate))
            object.__setattr__(self, "seed", seed)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> tuple[Any, Any]:
        """Caches of zeros for keys and values, (QArray, QArray), as `store` and `read` take them.

        Args:
          shape: That of keys, [..., features].
          dtype: float32, bfloat16 or float16, that of the keys and values.
        """
        zeros = jnp.zeros(shape, dtype)
        return self._rounded("KVCache", zeros, 0), self._rounded("KVCache", zeros, 1)

    def store(
        self, kept: tuple[Any, Any], tokens: tuple[Array, Array], index: ArrayLike, axis: int = 1
    ) -> tuple[Any, Any]:
        """The caches with new tokens, rounded.

        Args:
          kept: From `empty` or `store`.
          tokens: Keys and values, with as many axes; along `axis` as many tokens as are new.
          index: Where the first of them goes, an integer. Under `jit` it may be traced.
          axis: The axis of tokens.
        """
        first, second = (
            self._written(old, x, side, index, axis)
            for side, (old, x) in enumerate(zip(kept, tokens, strict=True))
        )
        return first, second

    def read(self, kept: tuple[Any, Any]) -> tuple[Array, Array]:
        """Keys and values of all tokens, dequantized, in the dtype of `empty`."""
        keys, values = (x.dequantize() if isinstance(x, QArray) else x for x in kept)
        return keys, values

    def narrowed(self, where: str, x: Array, side: int, before: QArray | None) -> Any:
        """A cache of Flax after a step, of shape [..., features].

        Args:
          side: 0 for keys, 1 for values.
          before: The quantized cache before the step. Tokens that the step left alone keep their
            codes: rounding them a second time could move them.
        """
        after = self._rounded(where, x, side)
        if before is None or not isinstance(after, QArray):
            return after
        is_same = exact_float32(before.dequantize()) == exact_float32(x)
        kept = jnp.all(is_same, axis=-1, keepdims=True)
        return jax.tree.map(lambda old, new: jnp.where(kept, old, new), before, after)

    def _rounded(self, where: str, x: Array, side: int) -> Any:
        fmt = (self.keys, self.values)[side]
        if fmt is None:
            return x
        check_holds(where, fmt.element, x.dtype)
        x, dtype = lax.stop_gradient(x), x.dtype
        rotation = None
        if self.rotate:
            features = x.shape[-1]
            rotation = (min(features & -features, _LONGEST), self.seed, -1)
            x = InputTransform(None, rotation).of_kernel(x)
        array = quantize(x, fmt, packed=fmt.element.bits in WIDTHS)
        return dataclasses.replace(array, dtype=dtype, rotation=rotation)

    def _written(self, old: Any, x: Array, side: int, index: ArrayLike, axis: int) -> Any:
        axis %= x.ndim
        if axis == x.ndim - 1:
            raise ValueError(f"KVCache.store: axis={axis} is that of features, expected another")
        room = [old.shape[i] for i in range(old.ndim) if i != axis]
        if old.ndim != x.ndim or room != [x.shape[i] for i in range(x.ndim) if i != axis]:
            raise ValueError(
                f"KVCache.store: tokens have shape {x.shape}, expected that of the cache, "
                f"{old.shape}, but for axis {axis}"
            )
        if not isinstance(index, jax.core.Tracer):
            first = np.asarray(index).item()
            last = first + x.shape[axis]
            if first < 0 or last > old.shape[axis]:
                raise ValueError(
                    f"KVCache.store: tokens {first} to {last - 1} of {old.shape[axis]}, "
                    "expected an index at which they fit; make the cache longer"
                )

        def written(before: Array, part: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(before, part, index, axis)

        new = self._rounded("KVCache.store", x.astype(old.dtype), side)
        if not isinstance(old, QArray):
            return written(old, new)
        if (old.spec, old.rotation) != (new.spec, new.rotation):
            raise ValueError(
                f"KVCache.store: a cache of {old.spec.name}, rotation {old.rotation}, expected "
                f"{new.spec.name}, rotation {new.rotation}; store by the KVCache that made it"
            )
        parts = ((name, getattr(old, name), getattr(new, name)) for name in _LEAVES)
        changed: Any = {name: written(a, b) for name, a, b in parts if a is not None}
        return dataclasses.replace(old, **changed)


KVCacheLike: TypeAlias = KVCache | SpecLike | tuple[SpecLike | None, SpecLike | None]


def cache_format(where: str, like: KVCacheLike) -> KVCache:
    """The `KVCache` of what `kv_cache=` takes: one, a format, or a pair (keys, values)."""
    if isinstance(like, KVCache):
        return like
    try:
        return KVCache(*like) if isinstance(like, tuple) else KVCache(like)
    except ValueError as error:
        raise ValueError(str(error).replace("KVCache", where, 1)) from None


def _format_of_tokens(where: str, like: SpecLike) -> BlockFormat:
    """The format of keys or values; elements such as "int8" get a scale for each token and head."""
    found = spec(like)
    if not isinstance(like, BlockFormat) and not found.block and found.scale is not None:
        found = BlockFormat.token(found.element)
    if not (found.element.signed or found.zero_point):
        raise ValueError(
            f"{where}: kv_cache={found.element.name}, which has no negative numbers: those of keys "
            "and values would become its lowest; expected a signed format, e.g. 'int8'"
        )
    is_unscaled = found.scale is None
    is_along_features = len(found.block) == 1 and found.axes in (None, (-1,))
    if found.tensor_scale or not (is_unscaled or (is_along_features and found.other_axes == 1)):
        raise ValueError(
            f"{where}: kv_cache={found.name}, expected scales that belong to one token and head, "
            "e.g. 'e4m3fn' or 'mxfp8_e4m3': a token must not change what is kept of others"
        )
    return found
