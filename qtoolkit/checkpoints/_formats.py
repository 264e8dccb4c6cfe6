"""Formats that tensors can be converted to, schemes that hold them, and static input scales."""

import contextlib
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._arguments import InputScales
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._checks import DIFFUSERS
from qtoolkit.checkpoints._report import TensorPlan
from qtoolkit.checkpoints._roles import module_of
from qtoolkit.checkpoints._tensors import DTYPE_OF, CheckpointError, MisuseError, configs_in, shown
from qtoolkit.checkpoints.layouts import LAYOUTS, Layout, Scheme
from qtoolkit.checkpoints.layouts._layout import BYTE_DTYPES, HIGH_PRECISION
from qtoolkit.formats import (
    BFLOAT16,
    BLOCK_FORMATS,
    FLOAT16,
    FORMATS,
    BlockFormat,
    Format,
    FormatLike,
    SpecLike,
)
from qtoolkit.formats import format as resolve

WeightFormat = Format | BlockFormat | Scheme  # what weights are quantized to
# By the names that their publishers give them; of several of a name, the first in its layout.
_SCHEMES = {
    scheme.name: scheme
    for layout in reversed(LAYOUTS.values())
    for scheme in reversed(layout.schemes)
    if layout.linear_only and not layout.experts_of
}
_BLOCKS = {fmt.name: fmt for fmt in BLOCK_FORMATS}
# The formats that the plain layout holds: codes of a byte each, and 16-bit floats.
PLAIN_FORMATS: tuple[Format, ...] = (*BYTE_DTYPES, BFLOAT16, FLOAT16)


def scheme_of(layout: Layout, fmt: WeightFormat, scaling: str | None) -> Scheme:
    """The scheme of a layout for a format and a value of `scaling`; raises where it has none."""
    if isinstance(fmt, BlockFormat) and scaling is not None:
        raise MisuseError(
            f"scaling={scaling!r}: {fmt.name} is a block format, whose scales are its own, "
            "expected no scaling=; omit it"
        )
    has_scales = isinstance(fmt, BlockFormat) or fmt.needs_scale
    if scheme := layout.find(fmt, scaling if has_scales else None):
        return scheme
    others = [
        other.name
        for other in LAYOUTS.values()
        if other is not layout and not other.experts_of and other.find(fmt)
    ]
    if not others and layout.name == "plain" and isinstance(fmt, Format):
        safetensors_dtype(fmt)  # raises with the reason
    what = f"layout {layout.name}: cannot hold {fmt.name}"
    what += "" if scaling is None or not (others or has_scales) else f" with scaling={scaling!r}"
    own, named = [scheme.spelling for scheme in layout.schemes], ""
    if not others:
        raise CheckpointError(
            f"{what}, expected one of {', '.join(own)}; `qtoolkit layouts` shows which layout "
            "takes what"
        )
    if layout.name == "plain":  # the others hold no other names, and would say to come back
        named = " for weights named NAME.weight (a Flax model: quantize of qtoolkit.nnx or .linen)"
        own = list(dict.fromkeys(scheme.spec.element.name for scheme in layout.schemes))
    layouts = " or ".join(f"layout={name!r}" for name in others)
    raise CheckpointError(f"{what}; use {layouts}{named}, or one of {', '.join(own)}")


def weight_format(fmt: SpecLike | Scheme) -> WeightFormat:
    """The format or published block format that `fmt` spells, or that of the scheme it names; the
    scheme itself, if another one has weights of this format.
    """
    if isinstance(fmt, BlockFormat | Scheme):
        return fmt
    if isinstance(fmt, str) and fmt.lower() in _BLOCKS:
        return _BLOCKS[fmt.lower()]
    scheme = scheme_named(fmt)
    if scheme is None:
        return resolve(fmt)
    return scheme if scheme.is_named else scheme.spec


def scheme_named(fmt: Any) -> Scheme | None:
    """The scheme of that name, None of others. "fp8" is none: it is ambiguous, and "FP8" is not."""
    if not isinstance(fmt, str) or fmt.lower() in _BLOCKS or fmt == "fp8":
        return None
    return _SCHEMES.get(fmt, _SCHEMES.get(fmt.upper()))


def by_scheme(fmt: Any, scaling: str | None) -> tuple[Any, str | None]:
    """The format and scaling of the scheme that `fmt` names; else what was given."""
    scheme = scheme_named(fmt)
    if scheme is None:
        return fmt, scaling
    if scaling not in (None, scheme.scaling):
        raise MisuseError(
            f"scaling={scaling!r}: {fmt} is {scheme.spelling}, expected no other scaling=; omit it"
        )
    return scheme.format, scheme.scaling


def format_names() -> tuple[str, ...]:
    """Every format that some layout holds, as `format` takes it."""
    schemes = (scheme for layout in LAYOUTS.values() for scheme in layout.schemes)
    return tuple(dict.fromkeys(scheme.format for scheme in schemes))


def default_layout(source: Checkpoint, formats: Sequence[WeightFormat], scaling: str | None) -> str:
    """The layout if none is given: compressed-tensors for folders, else plain; for formats that
    neither holds, the only one that does.
    """
    names = [
        layout.name
        for layout in LAYOUTS.values()
        if formats and not layout.experts_of and all(layout.find(fmt, scaling) for fmt in formats)
    ]
    is_diffusers = DIFFUSERS in source.config
    if source.config and not is_diffusers and "compressed-tensors" in names:
        return "compressed-tensors"
    is_torch = any(name.endswith(".weight") for name in source.tensors) and not is_diffusers
    return names[0] if is_torch and len(names) == 1 else "plain"


def model_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that config.json names, as safetensors spells it; None where it names none."""
    for part in configs_in(config):
        for key in ("dtype", "torch_dtype"):
            name = part.get(key)
            if isinstance(name, str) and name in ("float32", "float16", "bfloat16"):
                return DTYPE_OF[name]
    return None


def safetensors_dtype(fmt: FormatLike) -> str:
    """The dtype that the plain layout stores weights of `fmt` as: "F8_E4M3" for "e4m3fn"; raises
    for what it does not hold.
    """
    resolved = resolve(fmt)
    dtype = resolved.dtype
    if resolved in PLAIN_FORMATS:
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
        f"{', '.join(one.name for one in PLAIN_FORMATS)}"
    )


def high_precision_dtype(fmt: FormatLike) -> str:
    """The dtype of float32, float16 or bfloat16 as safetensors spells it; raises for others."""
    resolved = resolve(fmt)
    for dtype, known in HIGH_PRECISION.items():
        if known == resolved:
            return dtype
    raise CheckpointError(
        f"dtype {resolved.name} for what is not quantized, expected float32, bfloat16 or float16"
    )


def element_dtype(scheme: Scheme) -> str | None:
    """The dtype of codes of a scheme that its element format names; None of others."""
    element = scheme.spec.element
    dtype = element.dtype if scheme.format == element.name else None
    return None if dtype is None else DTYPE_OF.get(dtype.name)


def input_scale(
    scales: InputScales | None, tensor: Tensor, scheme: Scheme, layout: Layout
) -> float | None:
    """The activation scale of a tensor's module; None if its scheme has no activation scales."""
    scale: Any = scales
    if isinstance(scales, Mapping):
        scale = scales.get(module_of(tensor.name), scales.get(tensor.name))
    if scale is None and scheme.needs_input_scale:
        remedy = 'use scaling="channel" or layout="compressed-tensors", which need none'
        if scheme in layout.static.values():
            remedy = "omit input_scales="
        elif scheme.scaling is None:
            remedy = 'use layout="compressed-tensors", which needs none'
        raise CheckpointError(
            f"tensor {shown(tensor.name)}: {scheme.name} in layout {layout.name} has static "
            "activation scales, expected one for "
            f"{shown(module_of(tensor.name))}; give input_scales= of a calibration, or "
            f"{remedy}"
        )
    if scale is None:
        return None
    if not isinstance(scale, bool) and isinstance(scale, numbers.Real):
        # As float32 has it: files hold that, in which 1e-50 is 0.
        with np.errstate(over="ignore", under="ignore"), contextlib.suppress(OverflowError):
            number = float(np.float32(float(scale)))
            if 0 < number < math.inf:
                return number
    raise CheckpointError(
        f"tensor {shown(tensor.name)}: input scale {reprlib.repr(scale)}, expected a number above "
        "0 that float32 has; correct it in input_scales="
    )


def check_used(scales: InputScales | None, tensors: Sequence[TensorPlan], layout: Layout) -> None:
    """Raises if input scales were given that nothing uses, or that name no module."""
    if scales is None:
        return
    if not any(t.scheme is not None and t.scheme.needs_input_scale for t in tensors):
        raise MisuseError(
            f"input_scales=: nothing in layout {layout.name} with this format and "
            "scaling takes static activation scales, expected one that does; omit "
            'input_scales=, or use scaling="tensor" with layout="modelopt" or '
            "compressed-tensors"
        )
    names = {name for tensor in tensors for name in (tensor.name, module_of(tensor.name))}
    unknown = [
        name for name in (scales if isinstance(scales, Mapping) else {}) if name not in names
    ]
    if unknown:
        some = ", ".join(shown(module_of(t.name)) for t in tensors if t.scheme is not None)
        raise CheckpointError(
            f"input_scales=: {shown(unknown[0])} is no module of the checkpoint, expected "
            f"such as {some[:200]}; correct the name"
        )
