"""Words for how many elements share a scale."""

import functools
from collections.abc import Callable

from qtoolkit.formats._block import BlockFormat
from qtoolkit.formats._names import Format, found
from qtoolkit.formats._spec import SpecLike, spec

_SHAPES: dict[str, Callable[[Format], BlockFormat]] = {
    "none": functools.partial(BlockFormat.tensor, scale=None),
    "tensor": BlockFormat.tensor,
    "channel": BlockFormat.channel,
    "token": BlockFormat.token,
}


def scaled_by(where: str, of: SpecLike, scaling: str | None) -> BlockFormat:
    """The block format for an element format and a word such as "channel" for its scales.

    Args:
      where: Who asks, for the messages.
      of: A block format, which has scales of its own; or an element format; or a spelling.
      scaling: "none", "tensor", "channel" (a scale for each index of the last axis) or "token" (one
        for each vector along it). None: those of a block format, none for an element.

    Raises:
      ValueError: Another word; one beside a block format; or `of` is unknown.
      TypeError: `of` is no format.
    """
    if scaling is not None and (not isinstance(scaling, str) or scaling not in _SHAPES):
        raise ValueError(f"{where}: scaling={scaling!r}, expected one of {', '.join(_SHAPES)}")
    element = None if isinstance(of, BlockFormat) else found(of)
    if element is not None:
        return _SHAPES[scaling or "none"](element)
    resolved = spec(of)
    if scaling is not None:
        raise ValueError(
            f"{where}: scaling={scaling!r} beside {resolved.name}, which has scales of its own; "
            f"leave it out, or give the element format, {resolved.element.name}"
        )
    return resolved
