"""Codes of fewer than eight bits in words, for arrays of NumPy and of JAX alike."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np


def packed_words(
    codes: Any,
    bits: int,
    count: int,
    dtype: np.dtype,
    *,
    order: Sequence[int] = (),
    biased: bool = False,
) -> Any:
    """Words of `count` codes along the last axis, which ends with zero codes if it must.

    Args:
      codes: uint8; no bits are set above the lowest `bits`, unless `biased`.
      dtype: Unsigned, with room for a word.
      order: The place in its word of each code, from the lowest bits on; () for 0, 1, 2 and so on.
      biased: Whether codes of signed integers are stored as their values + 2**(bits - 1).
    """
    xp = codes.__array_namespace__()
    if biased:
        codes = (codes ^ np.uint8(1 << (bits - 1))) & np.uint8((1 << bits) - 1)
    if missing := -codes.shape[-1] % count:
        codes = xp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    grouped = codes.reshape((*codes.shape[:-1], codes.shape[-1] // count, count))
    parts = (
        grouped[..., place].astype(dtype) << dtype.type(at * bits)
        for place, at in enumerate(order or range(count))
    )
    return functools.reduce(operator.or_, parts)
