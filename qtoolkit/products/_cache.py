"""The KV cache of attention, stored as codes and scales."""

import jax
import jax.numpy as jnp

from qtoolkit.casts.internal import WIDTHS, check_holds, exact_float32
from qtoolkit.formats import BlockFormat, SpecLike, spec
from qtoolkit.scaling import QArray, quantize

Array = jax.Array


def cache_format(where: str, like: SpecLike) -> BlockFormat:
    """The format of a KV cache; elements such as "int8" get a scale for each token and head."""
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


def cached(where: str, x: Array, fmt: BlockFormat, before: QArray | None = None) -> QArray:
    """Quantizes a KV cache of shape [..., features].

    Args:
      before: The quantized cache before the step that gave `x`, whose format is kept. Tokens that
        the step left alone keep their codes, too: rounding them a second time could move them.
    """
    fmt = fmt if before is None else before.spec
    check_holds(where, fmt.element, x.dtype)
    after = quantize(jax.lax.stop_gradient(x), fmt, packed=fmt.element.bits in WIDTHS)
    if before is None:
        return after
    is_same = exact_float32(before.dequantize()) == exact_float32(x)
    kept = jnp.all(is_same, axis=-1, keepdims=True)
    return jax.tree.map(lambda old, new: jnp.where(kept, old, new), before, after)
