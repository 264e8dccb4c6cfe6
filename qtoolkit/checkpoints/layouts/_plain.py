"""qtoolkit's own layout: the codes under the weight's own name, the scales beside it.

`NAME_scale` is float32 and multiplies. One scale in all, or one per channel, has a shape that
broadcasts to the weight; for blocks of 128x128 the shape is
[..., ceil(rows / 128), ceil(columns / 128)]. Convolutions [O, I, kh, kw] have a scale per channel
instead of per block: their last two axes have only a few elements.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._header import CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._stored import Entry, Stored
from qtoolkit.checkpoints.layouts._layout import (
    BLOCK,
    BYTE_DTYPES,
    BYTE_ELEMENTS,
    FLOAT_SCALES,
    Layout,
    Scheme,
    Tensors,
    by_block,
    by_channel,
    by_tensor,
    read_bytes_weight,
    scaling_of,
)
from qtoolkit.formats import BFLOAT16, FLOAT16, BlockFormat

SUFFIX = "_scale"


def store(
    info: TensorInfo, scheme: Scheme, axes: Sequence[int], input_scale: float | None
) -> Stored:
    shape, element = info.shape, scheme.spec.element
    last = shape[-1] if shape else 1
    codes = Entry(info.name, BYTE_DTYPES[element], shape)
    word = scaling_of(scheme.spec)
    spec = scheme.spec
    scale: tuple[int, ...]
    if word == "tensor" or len(shape) < 2:
        matrices, spec, scale = (1, math.prod(shape[:-1]), last), by_tensor(element), (1,)
    elif word == "channel":
        matrices, spec = _channels(shape, axes, scheme)
        scale = tuple(n if axis in axes else 1 for axis, n in enumerate(shape))
    else:
        rows, columns = shape[-2:]
        matrices = (math.prod(shape[:-2]), rows, columns)
        block = (min(BLOCK[0], max(rows, 1)), min(BLOCK[1], max(columns, 1)))
        spec = by_block(element, block)
        scale = (*shape[:-2], -(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    return Stored(
        name=info.name,
        shape=shape,
        matrices=matrices,
        spec=spec,
        codes=codes,
        scale=Entry(info.name + SUFFIX, "F32", scale),
    )


def _channels(
    shape: tuple[int, ...], axes: Sequence[int], scheme: Scheme
) -> tuple[tuple[int, int, int], BlockFormat]:
    """The weight as one matrix, or one for each expert, with the outputs along rows or columns."""
    element, rank = scheme.spec.element, len(shape)
    if rank == 3 and len(axes) == 2 and axes[0] == 0:
        count, rows, columns = shape
        return (count, rows, columns), by_channel(element, axes[1] - 1)
    if axes[0] == 0:
        return (1, shape[0], math.prod(shape[1:])), by_channel(element, 0)
    columns = math.prod(shape[axis] for axis in axes)
    return (1, math.prod(shape[: axes[0]]), columns), by_channel(element, 1)


def read(config: Mapping[str, Any], tensors: Tensors, where: str) -> dict[str, Stored]:
    found = {}
    for name, info in tensors.items():
        scale = tensors.get(name + SUFFIX)
        if scale is not None and scale.dtype == "F64" and info.dtype in BYTE_ELEMENTS:
            raise CheckpointError(
                f"{where}: tensor {shown(scale.name)}: dtype F64, expected "
                f"{', '.join(FLOAT_SCALES)} beside the codes {shown(name)}; save it as float32"
            )
        if info.dtype not in BYTE_ELEMENTS or scale is None or scale.dtype not in FLOAT_SCALES:
            continue
        for entry in (f"{name}_zero_point", f"{name}_tensor_scale"):
            if entry in tensors:
                raise CheckpointError(
                    f"{where}: tensor {shown(entry)}: layout plain has one scale a block and "
                    "nothing beside it, expected no such tensor; dequantize the arrays in Python: "
                    "qtoolkit.checkpoints.load(FILE)[NAME].dequantize()"
                )
        found[name] = read_bytes_weight(tensors, name, name + SUFFIX, where)
    return found


LAYOUT = Layout(
    name="plain",
    title="qtoolkit's own: codes under the weight's name, float32 scales under NAME_scale",
    loaders="qtoolkit.checkpoints.load and dequantize; other readers get codes and scales",
    schemes=(
        *(
            Scheme(name=f"{fmt.name} by {word}", spec=make(fmt))
            for fmt in BYTE_DTYPES
            for word, make in (("tensor", by_tensor), ("channel", by_channel), ("block", by_block))
        ),
        *(
            Scheme(name=fmt.name, spec=BlockFormat.tensor(fmt, scale=None), about="rounded")
            for fmt in (BFLOAT16, FLOAT16)
        ),
    ),
    store=store,
    read=read,
    config=lambda used, kept: {},
    linear_only=False,
    is_mixed=True,
)
