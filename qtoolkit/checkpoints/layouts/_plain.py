"""qtoolkit's own layout: codes have the name of the weight, scales the name `NAME_scale`.

Scales are float32 and multiply. One scale for the tensor, or one per channel, has a shape that
broadcasts to the weight. For blocks of 128x128 the shape is
[..., ceil(rows / 128), ceil(columns / 128)]. Convolutions [O, I, kh, kw] have a scale per channel
instead of per block: their last two axes have only a few elements.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._tensors import CheckpointError, Entry, shown
from qtoolkit.checkpoints.layouts._encoding import Encoding
from qtoolkit.checkpoints.layouts._headers import Headers
from qtoolkit.checkpoints.layouts._layout import (
    BLOCK,
    BYTE_DTYPES,
    BYTE_ELEMENTS,
    FLOAT_SCALES,
    Layout,
    Scheme,
    by_block,
    by_channel,
    by_tensor,
    decode_bytes,
    scaling_of,
)
from qtoolkit.formats import BFLOAT16, FLOAT16, BlockFormat

SUFFIX = "_scale"


def store(entry: Entry, scheme: Scheme, axes: Sequence[int], input_scale: float | None) -> Encoding:
    shape, element = entry.shape, scheme.spec.element
    word = scaling_of(scheme.spec)
    lengths = tuple(max(n, 1) for n in shape)
    scale: tuple[int, ...]
    if word == "tensor" or len(shape) < 2:
        spec, scale = by_tensor(element), (1,)
    elif word == "channel":
        # A matrix, or a matrix for each expert, with the outputs along rows or columns.
        is_experts = len(shape) == 3 and len(axes) == 2 and axes[0] == 0
        spec = by_channel(element, axes[1] - 1 if is_experts else int(axes[0] != 0))
        lengths = tuple(1 if axis in axes else n for axis, n in enumerate(lengths))
        scale = tuple(n if axis in axes else 1 for axis, n in enumerate(shape))
    else:
        block = (min(BLOCK[0], lengths[-2]), min(BLOCK[1], lengths[-1]))
        spec, lengths = by_block(element, block), (*(1 for _ in shape[:-2]), *block)
        scale = (*shape[:-2], -(-shape[-2] // BLOCK[0]), -(-shape[-1] // BLOCK[1]))
    return Encoding(
        name=entry.name,
        shape=shape,
        spec=spec,
        lengths=lengths,
        codes=Entry(entry.name, BYTE_DTYPES[element], shape),
        scale=Entry(entry.name + SUFFIX, "F32", scale),
    )


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    encodings = {}
    for name, entry in headers.items():
        scale = headers.get(name + SUFFIX)
        if scale is not None and scale.dtype == "F64" and entry.dtype in BYTE_ELEMENTS:
            raise CheckpointError(
                f"{headers.path}: tensor {shown(scale.name)}: dtype F64, expected "
                f"{', '.join(FLOAT_SCALES)} for the codes {shown(name)}; save it as float32"
            )
        if entry.dtype not in BYTE_ELEMENTS or scale is None or scale.dtype not in FLOAT_SCALES:
            continue
        for other in (f"{name}_zero_point", f"{name}_tensor_scale"):
            if other in headers:
                what = "layout plain has one scale a block alone, expected no such tensor"
                raise headers.error(other, what)
        encodings[name] = decode_bytes(headers, name, name + SUFFIX)
    return encodings


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
            Scheme(name=fmt.name, spec=BlockFormat.tensor(fmt, scale=None), note="rounded")
            for fmt in (BFLOAT16, FLOAT16)
        ),
    ),
    decode=decode,
    store=store,
    linear_only=False,
    is_mixed=True,
    has_partial_blocks=True,
)
