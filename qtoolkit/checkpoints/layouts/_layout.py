"""`Layout` and `Scheme`, and the functions that layouts share."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._header import CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._stored import Entry, Packing, Stored, check_entry
from qtoolkit.formats import (
    BFLOAT16,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FLOAT16,
    FLOAT32,
    INT8,
    BlockFormat,
    FloatFormat,
    Format,
)

Tensors = Mapping[str, TensorInfo]
BLOCK = (128, 128)
SCALINGS = ("tensor", "channel", "block")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way in which a layout stores weights.

    Attributes:
      name: As the layout's publisher calls it.
      spec: The block format of a weight [outputs, inputs].
      about: What else a reader should know.
      needs_input_scale: Whether loaders ask for static activation scales.
    """

    name: str
    spec: BlockFormat
    about: str = ""
    needs_input_scale: bool = False

    @property
    def format(self) -> str:
        """As given to `--format`."""
        return self.spec.name if scaling_of(self.spec) is None else self.spec.element.name

    @property
    def scaling(self) -> str | None:
        """As given to `--scaling`; None if the format has no scales, or scales of its own."""
        word = scaling_of(self.spec)
        return None if word == "none" else word

    @property
    def spelling(self) -> str:
        """Both: "e4m3fn (--scaling channel)", "mxfp4"."""
        return self.format + ("" if self.scaling is None else f" (--scaling {self.scaling})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout.

    Attributes:
      name: As given to `--layout`.
      title: A description in one line.
      loaders: Who loads it.
      note: What else a reader should know of all schemes.
      schemes: What it can store, the default first.
      store: (info, scheme, output axes, input scale) -> how the weight is stored.
      read: (quantization config or {}, tensors, path for messages) -> the quantized weights that
        it finds, by name.
      config: (schemes in use with their modules, modules kept) -> quantization_config, {} if none.
      files: (as for `config`) -> further JSON files by name.
      caution: (as for `config`) -> a warning if one of its loaders misreads them; else "".
      computed: spec -> the spec with the rules by which the layout's publisher finds scales.
      linear_only: Whether it stores matrices [outputs, inputs] only.
      is_mixed: Whether weights of one checkpoint may have different schemes.
      static: Maps schemes that work without static activation scales to those that are written
        instead if such scales are given.
      refused: Regular expressions for names of tensors that its loaders cannot load, each with the
        reason.

    Examples:
      >>> for layout in qt.checkpoints.LAYOUTS.values():
      ...     print(layout.name, "-", layout.title)
      plain - qtoolkit's own: codes under the weight's name, float32 scales under NAME_scale
      compressed-tensors - that of llm-compressor: weight or weight_packed, weight_scale
      finegrained-fp8 - DeepSeek's blocks of 128x128: weight, weight_scale_inv
      modelopt - that of NVIDIA's modelopt: weight, weight_scale, weight_scale_2, input_scale
    """

    name: str
    title: str
    loaders: str
    schemes: tuple[Scheme, ...]
    store: Callable[[TensorInfo, Scheme, Sequence[int], float | None], Stored]
    read: Callable[[Mapping[str, Any], Tensors, str], dict[str, Stored]]
    config: Callable[[Mapping[Scheme, Sequence[str]], Sequence[str]], dict[str, Any]]
    files: Callable[[Mapping[Scheme, Sequence[str]], Sequence[str]], dict[str, Any]] = (
        lambda used, kept: {}
    )
    computed: Callable[[BlockFormat], BlockFormat] = lambda spec: spec
    note: str = ""
    linear_only: bool = True
    is_mixed: bool = False
    static: Mapping[Scheme, Scheme] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    caution: Callable[[Mapping[Scheme, Sequence[str]], Sequence[str]], str] = lambda used, kept: ""

    def scheme(self, of: Format | BlockFormat, scaling: str | None) -> Scheme:
        """The scheme for a format and a value of `--scaling`; None: the first that fits.

        Raises:
          CheckpointError: The layout has none.
        """
        for scheme in self.schemes:
            if isinstance(of, BlockFormat):
                if scheme.spec == of and scaling is None:
                    return scheme
            elif scheme.spec.element == of and scaling in (None, scaling_of(scheme.spec)):
                return scheme
        word = "" if scaling is None else f" with --scaling {scaling}"
        raise CheckpointError(
            f"layout {self.name}: cannot hold {of.name}{word}, expected one of "
            f"{', '.join(self.spellings())}; `qtoolkit layouts` shows which layout takes what"
        )

    def spellings(self) -> list[str]:
        return [scheme.spelling for scheme in self.schemes]


def scaling_of(spec: BlockFormat) -> str | None:
    """The value of `--scaling` for a spec, "none" without scales; None if it needs its own name."""
    if spec.scale is None:
        return "none"
    if spec.tensor_scale is not None or spec.scale != FLOAT32 or spec.amax_epsilon:
        return None
    if spec.block == () and spec.other_axes is None:
        return "tensor"
    if spec.other_axes is None and spec.block == (1,):
        return "channel"
    return "block" if spec.block == BLOCK else None


# Cached: checking a format takes longer than quantizing a small tensor by it.
@functools.cache
def by_tensor(element: Format) -> BlockFormat:
    return BlockFormat.tensor(element)


@functools.cache
def by_channel(element: Format, axis: int = 0) -> BlockFormat:
    """A scale for each output of [outputs, inputs], or [inputs, outputs] with axis 1."""
    return BlockFormat.channel(element, axis)


@functools.cache
def by_block(element: Format, block: tuple[int, int] = BLOCK) -> BlockFormat:
    return BlockFormat(element=element, block=block)


def check_divisible(info: TensorInfo, spec: BlockFormat, layout: str) -> None:
    """Raises where blocks would not fill a matrix.

    Loaders split and merge weights along both axes, and some find the size of a block by dividing.
    """
    other = "" if layout == "compressed-tensors" else "--layout compressed-tensors "
    for axis, length in zip((-1, -2), reversed(spec.block), strict=False):
        if length is not None and length > 1 and info.shape[axis] % length:
            raise CheckpointError(
                f"tensor {shown(info.name)}, {list(info.shape)}: axis {axis} has "
                f"{info.shape[axis]} elements, expected a multiple of {length} for {spec.name} in "
                f"layout {layout}; leave it out with --skip"
                + ("" if scaling_of(spec) is None else f", or use {other}--scaling channel")
            )


# Formats of codes that are a byte each, by the dtype in files.
BYTE_ELEMENTS: dict[str, Format] = {
    "F8_E4M3": E4M3FN,
    "F8_E5M2": E5M2,
    "F8_E4M3FNUZ": E4M3FNUZ,
    "F8_E5M2FNUZ": E5M2FNUZ,
    "I8": INT8,
}
BYTE_DTYPES = {fmt: dtype for dtype, fmt in BYTE_ELEMENTS.items()}
WIDE: dict[str, FloatFormat] = {"F32": FLOAT32, "BF16": BFLOAT16, "F16": FLOAT16}
FLOAT_SCALES = tuple(WIDE)


def read_bytes_weight(
    tensors: Tensors, name: str, scale_name: str, where: str, block: Sequence[int] | None = None
) -> Stored:
    """Reads a weight with one code per byte and scales that multiply.

    The shape of the scales tells what each belongs to: one in all; [o, 1, ...] or [o], one for each
    index of the first axis; [1, ..., i], of the last axis; one per block of `block`, else of
    128x128; or one per group along the last axis.
    """
    codes = check_entry(tensors, name, tuple(BYTE_ELEMENTS), where)
    scale = check_entry(tensors, scale_name, (*FLOAT_SCALES, "F8_E8M0"), where)
    matrices, layout = _blocks_by_shape(codes.shape, scale.shape, block, f"{where}: {shown(name)}")
    spec = BlockFormat(
        element=BYTE_ELEMENTS[codes.dtype],
        scale="e8m0fnu" if scale.dtype == "F8_E8M0" else WIDE[scale.dtype],
        **layout,
    )
    return Stored(
        name=name, shape=codes.shape, matrices=matrices, spec=spec, codes=codes, scale=scale
    )


def read_groups(
    name: str,
    shape: tuple[int, ...],
    spec: BlockFormat,
    codes: Entry,
    scale: Entry,
    where: str,
    *,
    packing: Packing = "bytes",
    second: Entry | None = None,
    second_divides: bool = False,
) -> Stored:
    """Reads a weight, or one for each expert, with a scale for every group along the last axis.

    Raises:
      CheckpointError: The shape of the scales does not fit the groups, or there is neither one
        second scale nor one for each expert.
    """
    (length,) = spec.block
    assert length is not None
    groups = (*shape[:-1], -(-shape[-1] // length)) if shape else ()
    if len(shape) < 2 or shape[-1] < length or scale.shape != groups:
        raise CheckpointError(
            f"{where}: tensor {shown(scale.name)}: {list(scale.shape)}, expected a scale for every "
            f"{length} of a row of {shown(codes.name)}, {list(codes.shape)}; it cannot be read"
        )
    count = math.prod(shape[:-2])
    if second is not None and math.prod(second.shape) not in (1, count):
        raise CheckpointError(
            f"{where}: tensor {shown(second.name)}: {list(second.shape)}, expected one second scale"
            + (f", or one for each of {count}," if count > 1 else "")
            + f" of {shown(codes.name)}, {list(codes.shape)}; it cannot be read"
        )
    return Stored(
        name=name,
        shape=shape,
        matrices=(count, shape[-2], shape[-1]),
        spec=spec,
        codes=codes,
        scale=scale,
        second=second,
        second_divides=second_divides,
        packing=packing,
    )


def check_block(block: Any, key: str, where: str) -> Sequence[int] | None:
    """The lengths of a block as a config has them; None where it has none."""
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise CheckpointError(
            f"{where}: {key} {shown(str(block)[:80])} in config.json, expected two lengths, "
            "[128, 128]; fetch the checkpoint again"
        )
    return block


def _blocks_by_shape(
    shape: tuple[int, ...], scale: tuple[int, ...], block: Sequence[int] | None, where: str
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """The matrices of a weight and the blocks that scales of that shape belong to."""
    size, count = math.prod(shape), math.prod(scale)
    last = shape[-1] if shape else 1
    if not size:
        return (1, 0, 1), {"other_axes": None}
    if count == 1:
        return (1, size // last, last), {"other_axes": None}
    if shape and scale in (shape[:1], (shape[0], *(1,) * (len(shape) - 1))):
        return (1, shape[0], size // shape[0]), {"block": (1,), "axes": (0,), "other_axes": None}
    outputs = [axis for axis, n in enumerate(scale) if n != 1] if len(scale) == len(shape) else []
    suffix = tuple(range(len(shape) - len(outputs), len(shape)))
    if outputs and tuple(outputs) == suffix and all(scale[a] == shape[a] for a in outputs):
        columns = math.prod(shape[suffix[0] :])
        return (1, size // columns, columns), {"block": (1,), "axes": (1,), "other_axes": None}
    if len(shape) >= 2 and len(scale) == len(shape) and scale[:-2] == shape[:-2]:
        rows, columns = shape[-2:]
        matrices = (math.prod(shape[:-2]), rows, columns)
        candidates = [tuple(block) if block else BLOCK]
        # Else the shapes do not tell the length of a group.
        if scale[-1] and columns % scale[-1] == 0:
            candidates.append((1, columns // scale[-1]))
        for lengths in candidates:
            if scale[-2:] == block_counts((rows, columns), lengths):
                return matrices, {"block": (min(lengths[0], rows), min(lengths[1], columns))}
        if len(shape) == 3 and scale[1:] == (1, columns):
            return matrices, {"block": (1,), "axes": (1,), "other_axes": None}
    raise CheckpointError(
        f"{where}: {list(shape)} with scales {list(scale)}, expected one in all, one per channel, "
        "per group or per block of 128x128; it cannot be read"
    )


def block_counts(shape: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // length) for n, length in zip(shape, lengths, strict=False))


def entry_beside(name: str, suffix: str) -> str:
    """The name of an entry of the same module: "a.weight_scale" of "a.weight"."""
    return f"{name.rsplit('.', 1)[0]}.{suffix}" if "." in name else suffix
