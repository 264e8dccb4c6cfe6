"""Makes a `QArray` of a quantized weight of any layout. JAX loads when one is made."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from qtoolkit.checkpoints._header import NUMPY_DTYPES
from qtoolkit.checkpoints._stored import Entry, Stored, unpack_codes
from qtoolkit.formats import BlockFormat


def qarray_of(stored: Stored, read: Callable[[Entry], np.ndarray], dtype: Any) -> Any:
    """A `QArray` whose `dequantize` gives the values of the weight.

    Elements of less than a byte are packed.

    Args:
      stored: The weight.
      read: Gives the bytes of one of its entries, uint8, flat.
      dtype: That of the numbers: float32, bfloat16 or float16.

    Returns:
      The array; None if its blocks are not the same along each axis of the weight.
    """
    lengths = _lengths(stored)
    if lengths is None or stored.scale is None:
        return None
    import jax.numpy as jnp

    from qtoolkit.scaling import QArray

    spec = _spec(stored, lengths)
    count, rows, columns = stored.matrices
    codes = unpack_codes(read(stored.codes).reshape(count * rows, -1), columns, stored)
    counts = tuple(-(-n // length) for n, length in zip(stored.shape, lengths, strict=True))
    assert spec.scale is not None
    # A byte of E8M0 is U8 in some layouts.
    scale_dtype = (spec.has_powers and spec.scale.dtype) or NUMPY_DTYPES[stored.scale.dtype]
    second = None
    if stored.second is not None:
        of_all = math.prod(stored.second.shape) == 1
        second = jnp.asarray(
            read(stored.second).view(np.float32).reshape(() if of_all else stored.shape[:-2])
        )
    array = QArray(
        jnp.asarray(codes.view(spec.element.code_dtype).reshape(stored.shape)),
        jnp.asarray(read(stored.scale).view(scale_dtype).reshape(counts)),
        spec,
        tensor_scale=second,
        dtype=dtype,
        lengths=lengths,
    )
    return array.pack() if spec.element.bits < 8 else array


def _lengths(stored: Stored) -> tuple[int, ...] | None:
    """The length of a block along each axis of the weight, from those of its matrices."""
    shape, sizes = stored.shape, stored.matrices
    if 0 in shape:
        return None
    blocks = (1, *stored.spec.block_lengths(sizes[1:]))
    ends = range(len(shape) + 1)
    for first, second in itertools.combinations_with_replacement(ends, 2):
        parts = shape[:first], shape[first:second], shape[second:]
        if tuple(map(math.prod, parts)) == sizes:
            lengths = [_spread(*part) for part in zip(blocks, parts, strict=True)]
            if None not in lengths:
                return tuple(n for part in lengths if part is not None for n in part)
    return None


def _spread(length: int, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The length of a block along the one axis that these would be, along each; None if uneven."""
    if length == math.prod(axes):
        return axes
    return (length,) * len(axes) if length == 1 or len(axes) == 1 else None


def _spec(stored: Stored, lengths: tuple[int, ...]) -> BlockFormat:
    """The format of the whole weight."""
    spec, shape = stored.spec, stored.shape
    outputs = [axis for axis, n in enumerate(shape) if lengths[axis] != n]
    fields: dict[str, Any] = {}
    if len(shape) == 2:
        pass
    elif not outputs:
        fields = {"block": (), "axes": None, "other_axes": None}
    elif len(outputs) == 1 and lengths[outputs[0]] == 1:
        fields = {"block": (1,), "axes": (outputs[0],), "other_axes": None}
    else:
        fields = {"block": lengths, "axes": tuple(range(len(shape))), "other_axes": 1}
    if stored.second is not None and stored.second_divides:
        fields["tensor_scale_divides"] = True
    return dataclasses.replace(spec, **fields) if fields else spec
