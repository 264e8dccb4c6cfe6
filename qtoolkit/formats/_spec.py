"""What stands for a block format wherever one is asked for."""

import functools
from collections.abc import Callable
from typing import TypeAlias

from qtoolkit.formats._block import BlockFormat, is_wide
from qtoolkit.formats._format import BLOCKS, not_found
from qtoolkit.formats._names import NF4, Format, FormatLike, find
from qtoolkit.formats._published import NF4_BLOCK64

# What `spec` resolves: a block format, its name, or what `qtoolkit.format` resolves.
SpecLike: TypeAlias = BlockFormat | FormatLike

_SHAPES: dict[str, Callable[[Format], BlockFormat]] = {
    "none": functools.partial(BlockFormat.tensor, scale=None),
    "tensor": BlockFormat.tensor,
    "channel": BlockFormat.channel,
    "token": BlockFormat.token,
}


def spec(like: SpecLike) -> BlockFormat:
    """The block format that the argument `spec` of `quantize` and related functions stands for.

    Args:
      like: A block format (returned as it is); the name of a published one, "mxfp4", upper or lower
        case; or an element format or any spelling of one, which is resolved as follows. "e4m3fn",
        "int8" and all others that need a scale (`needs_scale`): one scale for the whole tensor.
        "nf4": its published blocks of 64. "float16" and "bfloat16", which need no scale, and
        formats with the range of float32, for which a scale could overflow: none.

    Raises:
      ValueError: Nothing has that name, or several may be meant ("mxfp8", "fp8"); the message names
        up to three to use instead. Or the format needs a scale and cannot have one (int32).
      TypeError: `like` is neither a format nor a string nor a dtype.

    Examples:
      >>> str(qt.spec("e4m3fn"))
      'e4m3fn by tensor'
      >>> str(qt.spec("mxfp4"))
      'mxfp4'
      >>> str(qt.spec("bfloat16"))
      'bfloat16, unscaled'
    """
    if isinstance(like, BlockFormat):
        return like
    if isinstance(like, str) and like.lower() in BLOCKS:
        return BLOCKS[like.lower()]
    element = find(like)
    if element is None:
        raise not_found("spec", like)
    if element == NF4:
        return NF4_BLOCK64
    if is_wide(element) or not element.needs_scale:
        return BlockFormat.tensor(element, scale=None)
    return BlockFormat.tensor(element)


def scaled_by(where: str, like: SpecLike, scaling: str | None) -> BlockFormat:
    """The block format for an element format and a word such as "channel" for its scales.

    Args:
      like: A block format, which has scales of its own; or an element format; or a spelling.
      scaling: "none", "tensor", "channel" (a scale for each index of the last axis) or "token" (one
        for each vector along it). None: those of a block format, none for an element.
    """
    if scaling is not None and (not isinstance(scaling, str) or scaling not in _SHAPES):
        raise ValueError(f"{where}: scaling={scaling!r}, expected one of {', '.join(_SHAPES)}")
    element = None if isinstance(like, BlockFormat) else find(like)
    if element is not None:
        return _SHAPES[scaling or "none"](element)
    resolved = spec(like)
    if scaling is not None:
        raise ValueError(
            f"{where}: scaling={scaling!r} with {resolved.name}, which has scales of its own; "
            f"omit it, or give the element format, {resolved.element.name}"
        )
    return resolved
