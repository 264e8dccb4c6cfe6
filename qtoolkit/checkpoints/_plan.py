"""What a conversion will do with every tensor, decided from the header alone. No JAX here.

Layout of a quantized tensor: its codes under its own name, and next to them `<name>_scale` in
float32, such that value = code * scale. It broadcasts: shape [1], or one scale per output channel.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qtoolkit._version import __version__
from qtoolkit.checkpoints._header import DTYPE_OF, CheckpointError, TensorInfo, layout, shown
from qtoolkit.checkpoints._safetensors import SafetensorsFile
from qtoolkit.formats import (
    BFLOAT16,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FLOAT16,
    FORMATS,
    INT8,
    Format,
    FormatLike,
    Rules,
)
from qtoolkit.formats import format as resolve

SCALINGS = ("tensor", "channel")
SCALE_SUFFIX = "_scale"
METADATA_KEY = "qtoolkit"

# What safetensors has a dtype for and weights are stored in.
TARGETS: tuple[Format, ...] = (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, INT8, BFLOAT16, FLOAT16)

# Any component of the name, components being parted by "." or "/". What is small and sensitive:
# tables of embeddings, the output layer often tied to them, norms, routers (a bare "gate" is one in
# mixture-of-experts models; "gate_proj" is not), biases (of two dimensions in Flax attention), and
# the scales of tensors that are quantized already.
DEFAULT_SKIP = (
    r"(^|[./])("
    r"[^./]*embed[^./]*|wte|wpe|lm_head"
    r"|[^./]*norm[^./]*|([^./]*_)?ln(\d+|_[^./]*)?"
    r"|([^./]*_)?router|([^./]*_)?gate"
    r"|[^./]*bias[^./]*|([^./]*_)?scales?(_inv|_\d+)?"
    r")([./]|$)"
)
_SOURCES = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """What becomes of one tensor.

    Attributes:
      source: The tensor as the source file has it.
      action: "quantize", or "keep": copied unchanged.
      reason: Why it is kept; empty where it is not.
      dtype: Its dtype in the target, as safetensors spells it.
      format: What it is quantized to; None where it is kept.
      channel_axis: The axis with one scale per index; None for one scale in all.
      scale_shape: Shape of `<name>_scale`; None where none is written.
    """

    source: TensorInfo
    action: Literal["quantize", "keep"]
    reason: str
    dtype: str
    format: Format | None = None
    channel_axis: int | None = None
    scale_shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def scale_name(self) -> str:
        return self.name + SCALE_SUFFIX

    @property
    def entries(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of what is written for it."""
        entries = [(self.name, self.dtype, self.source.shape)]
        if self.scale_shape is not None:
            entries.append((self.scale_name, "F32", self.scale_shape))
        return entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of a checkpoint.

    Attributes:
      format: What tensors are quantized to, or the rules that say so.
      scaling: "tensor" or "channel"; "none" where no format needs a scale.
      tensors: One plan for each tensor of the source, in the order of its data.
      outputs: Every tensor of the target, placed.
      metadata: Of the target: the source's, and what was done under "qtoolkit".
    """

    format: Format | Rules[Format]
    scaling: str
    tensors: tuple[TensorPlan, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]


def make_plan(
    source: SafetensorsFile,
    *,
    format: FormatLike | Rules[Any] = "e4m3fn",
    scaling: str = "tensor",
    skip: Sequence[str] = (),
) -> Plan:
    """Decides what `convert` does with every tensor of `source`.

    With one format, quantized are the float32, float16 and bfloat16 tensors of two or more
    dimensions whose names match neither `DEFAULT_SKIP` nor `skip`. `Rules` decide alone: neither
    `DEFAULT_SKIP` nor the number of dimensions counts, only `skip` comes before them. What no rule
    matches gets their default where it is float32, float16 or bfloat16.

    Args:
      source: The open checkpoint; only its header is used.
      format: Any spelling of one of `TARGETS`. Or `Rules` of them, over the names of the tensors;
        None keeps a tensor.
      scaling: "tensor", or "channel": a scale per index of the last axis of tensors named "kernel"
        (Flax: inputs first) and of the first axis of all others (PyTorch: outputs first); vectors
        and scalars have one scale in all.
      skip: Regular expressions; a tensor is kept where one is found in its name.

    Raises:
      CheckpointError: A tensor to be quantized is float64 (by a rule: neither float32 nor float16
        nor bfloat16), a scale's name is taken, a regular expression is invalid, a rule matches
        nothing, or a format is none of `TARGETS`.
      TypeError: A rule has a class as its key, or a value that is no format.
      ValueError: Unknown format or scaling.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"convert: scaling={scaling!r}, expected one of {', '.join(SCALINGS)}")
    given = _checked_rules(source, format) if isinstance(format, Rules) else _target(format)
    rules: Rules[Format] = given if isinstance(given, Rules) else Rules((), default=given)
    patterns = [_compiled(pattern) for pattern in (skip if not isinstance(skip, str) else (skip,))]
    tensors = []
    for info in source.tensors.values():
        fmt, reason = _choice(info, rules, rules is not given, patterns)
        tensors.append(_tensor_plan(source, info, fmt, reason, scaling))
    values = (rules.default, *(value for _, value in rules.rules))
    used = scaling if any(fmt is not None and fmt.needs_scale for fmt in values) else "none"
    about: dict[str, Any] = {"scaling": used, "version": __version__}
    if isinstance(given, Rules):
        about["rules"] = json.loads(given.to_json())
    else:
        about["format"] = given.name
    return Plan(
        format=given,
        scaling=used,
        tensors=tuple(tensors),
        outputs=layout(entry for tensor in tensors for entry in tensor.entries),
        metadata={**source.metadata, METADATA_KEY: json.dumps(about, sort_keys=True)},
    )


def dequantize(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The float32 values of what `convert` has quantized.

    Args:
      tensors: Arrays by name, as `load` returns them.

    Returns:
      The same, where every 8-bit tensor that comes with `<name>_scale` is replaced by its values,
      code * scale in float32, and the scale left out.
    """
    arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    scales = {
        name: arrays[name + SCALE_SUFFIX]
        for name, array in arrays.items()
        if array.dtype in _SCALED_DTYPES
        and arrays.get(name + SCALE_SUFFIX, array).dtype == np.float32
    }
    used = {name + SCALE_SUFFIX for name in scales}
    return {
        name: (array.astype(np.float32) * scales[name]).reshape(array.shape)
        if name in scales
        else array
        for name, array in arrays.items()
        if name not in used
    }


_SCALED_DTYPES = tuple(fmt.dtype for fmt in TARGETS if fmt.needs_scale)


def _target(fmt: FormatLike) -> Format:
    safetensors_dtype(fmt)
    return resolve(fmt)


def _checked_rules(source: SafetensorsFile, rules: Rules[Any]) -> Rules[Format]:
    try:
        formats: Rules[Format] = rules.map(_target)
        formats.to_json()  # what the metadata will hold
        formats.check_used(str(source.path), source.tensors)
    except ValueError as error:
        raise CheckpointError(shown(str(error))) from error
    return formats


def _choice(
    info: TensorInfo, rules: Rules[Format], plain: bool, skip: list[re.Pattern[str]]
) -> tuple[Format | None, str]:
    """The format of a tensor, or None and the reason to keep it."""
    position, fmt = rules.match_index(info.name), rules.lookup(info.name)
    if position is None and info.dtype not in (*_SOURCES, "F64"):
        return None, f"dtype {info.dtype}"
    if fmt is not None and info.dtype == safetensors_dtype(fmt):
        return None, f"{info.dtype} already"
    if plain and len(info.shape) < 2:
        return None, "fewer than two dimensions"
    if any(pattern.search(info.name) for pattern in skip):
        return None, "--skip"
    if plain and _DEFAULT_SKIP.search(info.name):
        return None, "skipped by default"
    if fmt is None:
        return None, "no rule" if position is None else f"rule {rules.rules[position][0]!r}"
    return fmt, ""


def _tensor_plan(
    source: SafetensorsFile, info: TensorInfo, fmt: Format | None, reason: str, scaling: str
) -> TensorPlan:
    if fmt is None:
        return TensorPlan(source=info, action="keep", reason=reason, dtype=info.dtype)
    where = f"{source.path}: tensor {shown(info.name)}"
    if info.dtype not in _SOURCES:
        raise CheckpointError(
            f"{where}: dtype {info.dtype}, expected F32, F16 or BF16; leave it out with --skip"
        )
    axis, shape = _scale_shape(info, scaling if fmt.needs_scale else "none")
    if shape is not None and info.name + SCALE_SUFFIX in source.tensors:
        raise CheckpointError(
            f"{where}: its scale would be named {shown(info.name + SCALE_SUFFIX)}, which the file "
            "has already, expected a free name; leave the tensor out with --skip or rename it"
        )
    return TensorPlan(
        source=info,
        action="quantize",
        reason="",
        dtype=safetensors_dtype(fmt),
        format=fmt,
        channel_axis=axis,
        scale_shape=shape,
    )


_DEFAULT_SKIP = re.compile(DEFAULT_SKIP, re.IGNORECASE)


def _scale_shape(info: TensorInfo, scaling: str) -> tuple[int | None, tuple[int, ...] | None]:
    """The channel axis and the shape of the scale, None where there is none."""
    if scaling == "none":
        return None, None
    rank = len(info.shape)
    if scaling == "tensor" or rank < 2:
        return None, (1,)
    axis = rank - 1 if re.split(r"[./]", info.name)[-1] == "kernel" else 0
    return axis, tuple(info.shape[i] if i == axis else 1 for i in range(rank))


def safetensors_dtype(fmt: FormatLike) -> str:
    """The dtype that safetensors stores weights of `fmt` as: "F8_E4M3" for "e4m3fn".

    Raises:
      CheckpointError: `fmt` is none of `TARGETS`.
      ValueError, TypeError: As `qtoolkit.format`.
    """
    resolved = resolve(fmt)
    dtype = resolved.dtype
    if resolved in TARGETS:
        assert dtype is not None
        return DTYPE_OF[dtype.name]
    if resolved.bits < 8:
        reason = "its codes are narrower than a byte"
    elif resolved not in FORMATS or dtype is None or dtype.name not in DTYPE_OF:
        reason = "safetensors has no dtype for it"
    else:
        reason = "no weights are stored in it"
    raise CheckpointError(
        f"convert: format {resolved.name}: {reason}, expected one of "
        f"{', '.join(target.name for target in TARGETS)}"
    )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"--skip {shown(pattern)}: invalid regular expression ({error}), expected one such as "
            r"'(^|/)head/'; write special characters with a backslash"
        ) from error
