"""Words for how many elements share a scale."""

from typing import Any

from qtoolkit.formats._block import BlockFormat, spec
from qtoolkit.formats._names import Format, format

SCALINGS = ("none", "tensor", "channel", "token")


def scaled_by(where: str, of: Any, scaling: str | None, default: str = "none") -> BlockFormat:
    """The block format that an element format and a word for its scales stand for.

    Args:
      where: Who asks, for the messages.
      of: A block format, which has scales of its own; or an element format; or a spelling.
      scaling: "none", "tensor", "channel" (a scale for each index of the last axis) or "token" (one
        for each vector along it). None: those of a block format, for an element `default`.

    Raises:
      ValueError: Another word; one beside a block format; or `of` is unknown.
      TypeError: `of` is no format.
    """
    if scaling is not None and (not isinstance(scaling, str) or scaling not in SCALINGS):
        raise ValueError(f"{where}: scaling={scaling!r}, expected one of {', '.join(SCALINGS)}")
    found = spec(of)
    if _is_element(of):
        return _SHAPES[scaling or default](found.element)
    if scaling is not None:
        raise ValueError(
            f"{where}: scaling={scaling!r} beside {found.name}, which has scales of its own; leave "
            f"it out, or give the element format, {found.element.name}"
        )
    return found


def _is_element(of: Any) -> bool:
    if isinstance(of, BlockFormat):
        return False
    try:
        format(of)
    except ValueError:
        return False
    return True


def _unscaled(element: Format) -> BlockFormat:
    return BlockFormat.tensor(element, scale=None)


_SHAPES = {
    "none": _unscaled,
    "tensor": BlockFormat.tensor,
    "channel": BlockFormat.channel,
    "token": BlockFormat.token,
}
