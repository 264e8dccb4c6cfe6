"""`Layout` and `Scheme`, and what layouts share: block formats, ways to store a weight."""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import Entry, shown
from qtoolkit.checkpoints.layouts._encoding import (
    NIBBLES,
    Encoding,
    Packing,
    ReadEntry,
    floats,
    merged_matrices,
    untile,
)
from qtoolkit.checkpoints.layouts._headers import Headers
from qtoolkit.formats import (
    BFLOAT16,
    E2M1FN,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FLOAT16,
    FLOAT32,
    INT8,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
    FloatFormat,
    Format,
)

BLOCK = (128, 128)
SCALINGS = ("tensor", "channel", "block")
# Formats of codes that are a byte each, by the dtype in files.
BYTE_ELEMENTS: dict[str, Format] = {
    "F8_E4M3": E4M3FN,
    "F8_E5M2": E5M2,
    "F8_E4M3FNUZ": E4M3FNUZ,
    "F8_E5M2FNUZ": E5M2FNUZ,
    "I8": INT8,
}
BYTE_DTYPES = {fmt: dtype for dtype, fmt in BYTE_ELEMENTS.items()}
HIGH_PRECISION: dict[str, FloatFormat] = {"F32": FLOAT32, "BF16": BFLOAT16, "F16": FLOAT16}
FLOAT_SCALES = tuple(HIGH_PRECISION)
_MXFP8 = {"F8_E4M3": MXFP8_E4M3, "F8_E5M2": MXFP8_E5M2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way in which a layout stores weights.

    Attributes:
      name: As the layout's publisher calls it.
      spec: The block format of a weight [outputs, inputs].
      note: What else a reader should know.
      needs_input_scale: Whether loaders ask for static activation scales.
      is_named: Whether its name alone tells it from another scheme with weights of this format.
    """

    name: str
    spec: BlockFormat
    note: str = ""
    needs_input_scale: bool = False
    is_named: bool = False

    @property
    def needs_scale(self) -> bool:
        return self.spec.scale is not None

    @property
    def format(self) -> str:
        """The value of `format` for this scheme."""
        if self.is_named or self.spec.zero_point:  # that has no published name
            return self.name
        return self.spec.name if scaling_of(self.spec) is None else self.spec.element.name

    @property
    def scaling(self) -> str | None:
        """The value of `scaling`; None if the format has no scales or defines its own."""
        word = scaling_of(self.spec)
        return None if word == "none" else word

    @property
    def spelling(self) -> str:
        """Both: "e4m3fn (scaling='channel')", "mxfp4"."""
        return self.format + ("" if self.scaling is None else f" (scaling={self.scaling!r})")


SchemeModules = Mapping[Scheme, Sequence[str]]  # the schemes in use, with the modules of each


def _refuse(*_: Any) -> Any:
    raise NotImplementedError("a layout that is only read")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout: two functions, `decode` to read it and `store` to write it, and the config.

    Attributes:
      name: As given to `layout`.
      title: A description in one line.
      loaders: Who loads it.
      note: What else a reader should know of all schemes.
      schemes: What it can store, the default first; () if it is only read.
      decode: (quantization config or {}, headers) -> how each quantized weight
        that it finds is stored, by name.
      store: (entry of the weight, scheme, output axes, input scale) -> how it is to be stored.
      config: (schemes in use with their modules, modules that are not quantized) ->
        quantization_config; {} if none.
      files: (as for `config`) -> further JSON files by name.
      with_scale_rules: spec -> the spec with the rules by which its publisher finds scales.
      methods: The values of `quant_method` in a config that names this layout.
      own_key: The key of config.json under which only this layout has its config; "" if there is
        none.
      own_config: config.json -> its config under that key, with a `quant_method`; {} if none.
      check_marks: (headers, names of quantized weights, whether a config describes them) ->
        the names of the small tensors in which the program describes weights; raises if it
        describes one of these in a way that is not read.
      metadata_keys: Names of weights and tensors -> keys of the metadata that describe them.
      has_marks: Whether files mark the weights, so that without a config it is asked before layouts
        that know them by names alone.
      linear_only: Whether it stores matrices [outputs, inputs] only.
      experts_of: The `model_type` of the only models that the layout can hold. It stores nothing
        but their experts: for each layer one tensor [experts, inputs, outputs]. "" if the layout is
        not limited in this way.
      is_mixed: Whether weights of one checkpoint may have different schemes.
      has_partial_blocks: Whether the last blocks of a row or column may be partial.
      tables: The schemes in which its loaders read tables of embeddings, which they look up.
      static: Maps schemes that work without static activation scales to those that are written
        instead if such scales are given.
      refused: Regular expressions for names of tensors that its loaders cannot load, each with the
        reason.
    """

    name: str
    title: str
    loaders: str
    decode: Callable[[Mapping[str, Any], Headers], dict[str, Encoding]]
    schemes: tuple[Scheme, ...] = ()
    store: Callable[[Entry, Scheme, Sequence[int], float | None], Encoding] = _refuse
    config: Callable[[SchemeModules, Sequence[str]], dict[str, Any]] = lambda used, unquantized: {}
    files: Callable[[SchemeModules, Sequence[str]], dict[str, Any]] = lambda used, unquantized: {}
    with_scale_rules: Callable[[BlockFormat], BlockFormat] = lambda spec: spec
    methods: tuple[str, ...] = ()
    own_key: str = ""
    own_config: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    check_marks: Callable[[Headers, Container[str], bool], set[str]] = lambda *_: set()
    metadata_keys: Callable[[Iterable[str]], set[str]] = lambda names: set()
    has_marks: bool = False
    note: str = ""
    linear_only: bool = True
    experts_of: str = ""
    is_mixed: bool = False
    has_partial_blocks: bool = False
    tables: frozenset[Scheme] = frozenset()
    static: Mapping[Scheme, Scheme] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def find(self, fmt: Format | BlockFormat | Scheme, scaling: str | None = None) -> Scheme | None:
        """The scheme that holds a format with a value of `scaling`; None if the layout has none.

        `scaling` None: the first that fits.
        """
        for scheme in self.schemes:
            if isinstance(fmt, Scheme) or scheme.is_named:
                is_held = scheme == fmt
            elif isinstance(fmt, BlockFormat):
                is_held = scheme.spec == fmt and scaling is None
            else:
                is_held = scheme.spec.element == fmt and scaling in (None, scaling_of(scheme.spec))
            if is_held:
                return scheme
        return None

    def misfit(self, shape: Sequence[int], spec: BlockFormat) -> str:
        """Why blocks of a format do not fill a weight; "" if they do."""
        # Loaders split and merge weights along both axes. So blocks must be whole, unless the
        # loaders document how they read partial blocks.
        axes = (-2, -1) if self.experts_of else (-1, -2)
        for axis, length in zip(axes, reversed(spec.block), strict=False):
            if not self.has_partial_blocks and shape[axis] % (length or 1):
                return f"axis {axis} has {shape[axis]} elements, expected a multiple of {length}"
        return ""


def scaling_of(spec: BlockFormat) -> str | None:
    """The value of `scaling` for a spec: "none" without scales, None for those like "nvfp4" whose
    own name describes their scales.
    """
    if spec.scale is None:
        return "none"
    if spec.tensor_scale is not None or spec.scale != FLOAT32 or spec.amax_epsilon:
        return None
    if spec.block == () and spec.other_axes is None:
        return "tensor"
    if spec.other_axes is None and spec.block == (1,):
        return "channel"
    return "block" if spec.block == BLOCK else None


# Cached: checking a format takes longer than quantizing a small tensor by it, and its name is found
# once if equal formats are one object.
block_format = functools.cache(BlockFormat)
NVFP4_ALONE = block_format(element=E2M1FN, block=(16,), scale=E4M3FN)  # without a tensor scale


by_tensor = functools.cache(BlockFormat.tensor)


@functools.cache
def by_channel(element: Format, axis: int = 0) -> BlockFormat:
    """A scale for each output of [outputs, inputs], or [inputs, outputs] with axis 1."""
    return BlockFormat.channel(element, axis)


def by_block(element: Format, block: tuple[int, int] = BLOCK) -> BlockFormat:
    return block_format(element=element, block=block)


def _scales_in_order(encoding: Encoding, read: ReadEntry) -> np.ndarray:
    """The scales of a matrix that lie in tiles, as numbers of their format."""
    assert encoding.scale is not None
    assert encoding.spec.scale is not None
    assert encoding.spec.scale.dtype is not None
    rows, columns = encoding.shape
    scales = untile(read(encoding.scale), rows, -(-columns // encoding.lengths[-1]))
    return scales.view(encoding.spec.scale.dtype).reshape(-1)


def times_factors(encoding: Encoding, values: np.ndarray, read: ReadEntry) -> np.ndarray:
    """The weight of a matmul whose inputs are multiplied by factors, the last of `others`."""
    return values * floats(encoding.others[-1], read)


def block_counts(shape: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // length) for n, length in zip(shape, lengths, strict=False))


def decode_bytes(
    headers: Headers,
    name: str,
    scale_name: str,
    block: Sequence[int] | None = None,
    *,
    are_floats: bool = False,
) -> Encoding:
    """How a weight is stored that has one code per byte, and scales that multiply.

    The shape of the scales tells which elements share a scale: see `_blocks_by_shape`. `are_floats`
    tells that the config says so: then I8 may be the bytes of floats.
    """
    codes = headers.check(name, tuple(BYTE_ELEMENTS))
    if are_floats and codes.dtype == "I8":
        raise headers.error(name, "dtype I8, expected F8_E4M3 or F8_E5M2, as config.json says")
    scale = headers.check(scale_name, (*FLOAT_SCALES, "F8_E8M0"))
    is_named = f".{name}".endswith("weight")  # [outputs, inputs]
    if scale.shape == codes.shape[:1] == codes.shape[1:] != (1,) and not is_named:
        n = scale.shape[0]
        what = f"[{n}] of {list(codes.shape)}, expected [{n}, 1], of rows, or [1, {n}], of columns"
        raise headers.error(scale_name, what)
    blocks = _blocks_by_shape(codes.shape, scale.shape, block)
    if blocks is None:
        raise headers.error(
            name,
            f"{list(codes.shape)} with scales {list(scale.shape)}, expected one in all, one per "
            "channel, per group or per block of 128x128",
        )
    lengths, fields = blocks
    spec = block_format(
        element=BYTE_ELEMENTS[codes.dtype],
        scale="e8m0fnu" if scale.dtype == "F8_E8M0" else HIGH_PRECISION[scale.dtype],
        **fields,
    )
    return Encoding(
        name=name, shape=codes.shape, spec=spec, lengths=lengths, codes=codes, scale=scale
    )


def decode_groups(
    headers: Headers,
    name: str,
    shape: tuple[int, ...],
    spec: BlockFormat,
    codes: Entry,
    scale: Entry,
    *,
    packing: Packing | None = None,
    tensor_scale: Entry | None = None,
    tiled_by: str = "",
) -> Encoding:
    """How a weight, or a stack of experts, is stored that has scales for groups of the last axis.

    There may be a tensor scale, one in all or one for each expert. `tiled_by` names the program if
    the scales of a matrix lie in tiles: see `untile`. Raises where shapes do not fit.
    """
    (length,) = spec.block
    assert length is not None
    groups = (*shape[:-1], -(-shape[-1] // length)) if shape else ()
    of = f"{shown(codes.name)}, {list(codes.shape)}"
    rows, across = groups if len(groups) == 2 else (0, 0)
    tiles = -(-rows // 128) * 512 * -(-across // 4)
    if tiled_by and (not rows or scale.nbytes != tiles):
        what = f"{scale} of {codes}, expected {tiles} bytes, tiles of 128 rows and 4 scales"
        raise headers.error(scale.name, what, tiled_by)
    if len(shape) < 2 or shape[-1] < length or not (tiled_by or scale.shape == groups):
        raise headers.error(
            scale.name, f"{list(scale.shape)}, expected a scale for every {length} of a row of {of}"
        )
    count = math.prod(shape[:-2])
    if tensor_scale is not None and math.prod(tensor_scale.shape) not in (1, count):
        each = f", or one for each of {count}," if count > 1 else ""
        what = f"{list(tensor_scale.shape)}, expected one tensor scale{each} of {of}"
        raise headers.error(tensor_scale.name, what)
    return Encoding(
        name=name,
        shape=shape,
        spec=spec,
        lengths=(*(1 for _ in shape[:-1]), length),
        codes=codes,
        scale=scale,
        scale_of=_scales_in_order if tiled_by else None,
        tensor_scale=tensor_scale,
        packing=packing,
    )


def microscaled(headers: Headers, name: str, scale_name: str) -> Encoding | None:
    """How the weight `name` is stored in OCP's MX formats; None if dtypes or shapes differ.

    Each 32 neighbours in a row share a scale: a byte b, which stands for 2**(b - 127). Files call
    its dtype F8_E8M0 or U8. The bytes of MXFP4 hold two codes each, and are U8 or I8.
    """
    codes, scale = headers[name], headers[scale_name]
    if scale.dtype not in ("U8", "F8_E8M0") or not codes.shape:
        return None
    *rows, columns = codes.shape
    if codes.dtype in _MXFP8 and scale.shape == (*rows, -(-columns // 32)):
        return decode_groups(headers, name, codes.shape, _MXFP8[codes.dtype], codes, scale)
    if codes.dtype in ("I8", "U8") and scale.shape == (*rows, -(-columns // 16)):
        shape = (*rows, 2 * columns)
        return decode_groups(headers, name, shape, MXFP4, codes, scale, packing=NIBBLES)
    return None


def _blocks_by_shape(
    shape: tuple[int, ...], scale: tuple[int, ...], block: Sequence[int] | None
) -> tuple[tuple[int, ...], dict[str, Any]] | None:
    """The lengths of the blocks that share a scale, and the arguments of their `BlockFormat`.

    None if the shape of the scales fits no blocks. The first reading that fits is taken: a scale
    for each output is what others mean, even where blocks would have the same number of scales.
    """
    rank = len(shape)
    by_row: dict[str, Any] = {"block": (1,), "axes": (0,), "other_axes": None}
    by_column = by_row | {"axes": (1,)}
    # [] or [1, 1]: one scale in all.
    if not math.prod(shape) or math.prod(scale) == 1:
        return tuple(max(n, 1) for n in shape), {"other_axes": None}
    # [o] or [o, 1]: one for each index of the first axis.
    if shape and scale in (shape[:1], (shape[0], *(1,) * (rank - 1))):
        return (1, *shape[1:]), by_row
    if len(scale) != rank:
        return None
    # [1, o], or [1, heads, o] of an attention kernel: one for each index of the last axes.
    outputs = [axis for axis, n in enumerate(scale) if n != 1]
    is_last = outputs == [*range(rank - len(outputs), rank)]
    if is_last and all(scale[axis] == shape[axis] for axis in outputs):
        return tuple(1 if axis in outputs else n for axis, n in enumerate(shape)), by_column
    if rank < 2:
        return None
    if scale[:-2] != shape[:-2]:
        # [l, 1, h, d]: one for each output of each layer of a stack of kernels [l, inputs, h, d].
        lengths = tuple(1 if s == n else n for s, n in zip(scale, shape, strict=True))
        is_stack = all(s in (1, n) for s, n in zip(scale, shape, strict=True))
        return (lengths, by_column) if is_stack and merged_matrices(shape, lengths) else None
    # [..., rows / 128, columns / 128]: one for each block of a matrix, or of those of a stack. Only
    # the config tells the lengths: 2 scales of a row of 192 may be for 128 and 64, or 96 each.
    rows, columns = shape[-2:]
    for height, width in [block] if block else [BLOCK, (1, BLOCK[1])]:
        if scale[-2:] == block_counts((rows, columns), (height, width)):
            cut = min(height, rows), min(width, columns)
            return (*(1,) * (rank - 2), *cut), {"block": cut}
    # [e, 1, o] or [e, o, 1]: one for each output of each expert.
    if scale[-2:] == (1, columns):
        return (*(1,) * (rank - 2), rows, 1), by_column
    if scale[-2:] == (rows, 1):
        return (*(1,) * (rank - 1), columns), by_row
    return None
