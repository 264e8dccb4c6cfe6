"""What stands for a block format wherever one is asked for."""

from typing import TypeAlias

from qtoolkit.formats._block import NF4_BLOCK64, BlockFormat, is_wide
from qtoolkit.formats._hints import BLOCKS, not_found
from qtoolkit.formats._names import NF4, FormatLike, found

# What `spec` resolves: a block format, its name, or what `qtoolkit.format` resolves.
SpecLike: TypeAlias = BlockFormat | FormatLike


def spec(of: SpecLike) -> BlockFormat:
    """The block format that the argument `spec` of `quantize` and its siblings stands for.

    Args:
      of: A block format (returned as it is); the name of a published one, "mxfp4", upper or lower
        case; or an element format or any spelling of one, which is resolved as follows. "e4m3fn",
        "int8" and all others that need a scale (`needs_scale`): one scale for the whole tensor.
        "nf4": its published blocks of 64. "float16" and "bfloat16", which need no scale, and
        formats with the range of float32, for which a scale could overflow: none.

    Raises:
      ValueError: Nothing has that name, or several may be meant ("mxfp8", "fp8"); the message names
        up to three to use instead. Or the format needs a scale and cannot have one (int32).
      TypeError: `of` is neither a format nor a string nor a dtype.

    Examples:
      >>> str(qt.spec("e4m3fn"))
      'e4m3fn by tensor'
      >>> str(qt.spec("mxfp4"))
      'mxfp4'
      >>> str(qt.spec("bfloat16"))
      'bfloat16, unscaled'
    """
    if isinstance(of, BlockFormat):
        return of
    if isinstance(of, str) and of.lower() in BLOCKS:
        return BLOCKS[of.lower()]
    element = found(of)
    if element is None:
        raise not_found("spec", of)
    if element == NF4:
        return NF4_BLOCK64
    if is_wide(element) or not element.needs_scale:
        return BlockFormat.tensor(element, scale=None)
    return BlockFormat.tensor(element)
