"""How the relative error of formats depends on the magnitude of a number."""

import math
from typing import Any

import numpy as np

from qtoolkit import formats
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.plots._curves import _STYLES, _figure
from qtoolkit.scaling import quantize

_ELEMENTS = 2**14  # in one array, at least, that a format is tried on
_BINS_IN_OCTAVE = 8


def error_against_magnitude(
    specs: SpecLike | tuple[SpecLike, ...] | list[Any],
    *,
    amax: float = 1.0,
    octaves: int = 24,
    rounding: str = "nearest_even",
    axes: Any = None,
) -> Any:
    """Draw the relative error of quantized numbers over their magnitude, on logarithmic axes.

    The numbers share a tensor and a block with one of magnitude `amax`, and so a scale. A line is
    the root of the mean square of |x - y| / |x| over an octave; it is 1 where all become zero.

    Args:
      specs: One of what `qtoolkit.quantize` takes, or a list: "mxfp4", "e4m3fn" with one scale for
        the tensor, a `BlockFormat`. `BlockFormat.tensor(fmt, scale=None)` is a format without a
        scale.
      amax: The largest magnitude, a float32 number.
      octaves: How far down the axis goes: to amax / 2**octaves.
      rounding: As in `qtoolkit.encode`; not stochastic.
      axes: The matplotlib Axes to draw on; None for those of a new figure.

    Returns:
      The Axes, not written anywhere: `axes.figure.savefig(path)`.

    Raises:
      ValueError: No format at all, or an unknown one; `amax` or `octaves` out of range.

    Examples:
      >>> axes = qt.plots.error_against_magnitude(["int8", "e4m3fn", "mxfp4"])
      >>> [text.get_text() for text in axes.get_legend().get_texts()]
      ['int8 by tensor', 'e4m3fn by tensor', 'mxfp4']
      >>> axes.figure.savefig("errors.png")
    """
    resolved = [
        formats.spec(spec) for spec in (specs if isinstance(specs, list | tuple) else [specs])
    ]
    if not resolved:
        raise ValueError("error_against_magnitude: no formats, expected one or more")
    if not 2.0**-100 <= amax <= 2.0**100:
        raise ValueError(f"error_against_magnitude: amax={amax}, expected 2**-100 to 2**100")
    if not 1 <= octaves <= 100:
        raise ValueError(f"error_against_magnitude: octaves={octaves}, expected 1 to 100")
    if axes is None:
        _, (axes,) = _figure(8.0, 4.0)
    edges = amax * np.exp2(np.arange(-octaves * _BINS_IN_OCTAVE, 1) / _BINS_IN_OCTAVE)
    for row, spec in enumerate(resolved, start=len(axes.lines)):
        colour = _STYLES[row % len(_STYLES)][0]
        dashes = _STYLES[(row + row // len(_STYLES)) % len(_STYLES)][1]
        errors = _errors(spec, amax, edges, rounding)
        centres = np.sqrt(edges[:-1] * edges[1:])
        axes.plot(centres, errors, dashes, color=colour, linewidth=1.6, label=spec.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("|x|" if amax == 1 else f"|x|, in a block whose largest is {amax:.4g}")
    axes.set_ylabel("relative error, RMS")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return axes


def _errors(spec: BlockFormat, amax: float, edges: np.ndarray, rounding: str) -> np.ndarray:
    """RMS relative error in the octave around each gap of the edges; NaN where it is zero."""
    shape = _shape(spec)
    lengths = spec.block_lengths(shape)
    # The first element of each block has magnitude amax. The others, in equal steps of the
    # logarithm, are dealt out so that each block has small and large ones.
    first = np.ones(shape, bool)
    for axis, length in enumerate(lengths):
        index = np.arange(shape[axis]) % length
        first &= (index == 0).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    if first.all():  # blocks of one element are all alike
        first[...] = False
    x = np.full(shape, amax, np.float32)
    count = np.count_nonzero(~first)
    steps = np.random.default_rng(0).permutation((np.arange(count) + 0.5) / count)
    x[~first] = edges[0] * (edges[-1] / edges[0]) ** steps
    y = np.asarray(quantize(x, spec, rounding=rounding).dequantize(), np.float64)
    exact = x[~first].astype(np.float64)
    relative = np.abs(exact - y[~first]) / exact
    bins = np.clip(np.searchsorted(edges, exact, side="right") - 1, 0, len(edges) - 2)
    octave = np.ones(_BINS_IN_OCTAVE)
    squares, counts = (
        np.convolve(np.bincount(bins, weights, minlength=len(edges) - 1), octave, "same")
        for weights in (relative**2, None)
    )
    rms = np.sqrt(squares / counts)
    return np.where(rms > 0, rms, np.nan)


def _shape(spec: BlockFormat) -> tuple[int, ...]:
    """A shape with room for whole blocks along every axis that `spec` tells about."""
    axes = spec.axes if spec.axes is not None else tuple(range(-len(spec.block), 0))
    rank = max([1, *(a + 1 if a >= 0 else -a for a in axes)])
    if spec.block and spec.block != (None,) and spec.other_axes is None:
        rank = max(rank, 2)  # by channel: the rest of the axes hold the elements of a block
    side = math.ceil(_ELEMENTS ** (1 / rank))
    sizes = [side] * rank
    for axis, length in zip(axes, spec.block, strict=True):
        if length is not None:
            sizes[axis] = -(-side // length) * length
    return tuple(sizes)
