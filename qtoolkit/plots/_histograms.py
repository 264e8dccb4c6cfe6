"""Which codes of a format an array uses."""

import math
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from qtoolkit import formats
from qtoolkit.formats import SpecLike
from qtoolkit.plots._curves import _figure
from qtoolkit.scaling import metrics

_FINITE, _NOT_FINITE = "#1f4e79", "#d1495b"
_TICKS = 16  # and one more where zero is between them


def code_histogram(x: ArrayLike, spec: SpecLike, *, axes: Any = None, **how: Any) -> Any:
    """Draw how often each code of the elements occurs, as bars in the order of their values.

    Infinities and NaNs, where the format has them, stand apart at the right. The title has the
    fractions that saturated and became zero, and the SQNR.

    Args:
      x, spec: As in `qtoolkit.metrics`; elements of at most 8 bits.
      axes: The matplotlib Axes to draw on; None for those of a new figure.
      how: Further arguments of `qtoolkit.metrics`: scale, rounding and the like.

    Returns:
      The Axes, not written anywhere: `axes.figure.savefig(path)`.

    Raises:
      TypeError, ValueError: As `qtoolkit.metrics`, or the elements have more than 8 bits.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (1000,))
      >>> axes = qt.plots.code_histogram(x, "e2m1fn")
      >>> axes.get_title()
      'e2m1fn by tensor: 0 % saturated, 14.4 % became zero, SQNR 18.3 dB'
      >>> axes.figure.savefig("codes.png")
    """
    spec = formats.spec(spec)
    if spec.element.bits > 8:
        raise ValueError(
            f"code_histogram: {spec.name} has elements of {spec.element.bits} bits, expected at "
            "most 8"
        )
    errors = metrics(x, spec, **how)
    counts = np.asarray(errors.histogram, np.float64)
    percent = 100 * counts / counts.sum()
    values = spec.element.values()
    codes = np.lexsort((~np.signbit(values), values))  # -0 before 0
    codes = codes[np.isfinite(values[codes])]
    if axes is None:
        _, (axes,) = _figure(8.0, 3.6)
    width = 0.9 if len(codes) <= 64 else 1.0  # gaps of less than a pixel come and go
    axes.bar(range(len(codes)), percent[codes], width=width, color=_FINITE)
    ticks = _ticks(values[codes])
    gap = max(2, len(codes) // 20)
    last = len(codes) - 1
    specials = {"-Inf": values == -np.inf, "Inf": values == np.inf, "NaN": np.isnan(values)}
    for name, is_one in specials.items():
        if is_one.any():
            last += gap
            ticks[last] = name
            axes.bar(last, percent[is_one].sum(), width=0.45 * gap, color=_NOT_FINITE)
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set_xlim(-1, max(len(codes), last + 0.5 * gap))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(f"value of the code, {spec.element.name}")
    axes.set_ylabel("% of elements")
    axes.set_title(
        f"{spec.name}: {100 * float(errors.saturated):.3g} % saturated, "
        f"{100 * float(errors.flushed):.3g} % became zero, SQNR {float(errors.sqnr_db):.1f} dB",
        fontsize=10,
    )
    return axes


def _ticks(values: np.ndarray) -> dict[int, str]:
    """Places and labels for sorted values: from zero, or the two of them, in equal steps."""
    step = -(-len(values) // _TICKS)
    negative = np.count_nonzero(np.signbit(values))
    zeros = np.count_nonzero(values == 0)
    below = range(negative - (zeros == 2) - (step if step > 1 else 0), -1, -step)
    places = [*reversed(below), *range(negative, len(values), step)]
    return {place: _label(float(values[place])) for place in places}


def _label(value: float) -> str:
    fraction, exponent = math.frexp(abs(value))
    if fraction == 0.5 and not 2**-4 < abs(value) < 2**10:
        return f"${'-' * (value < 0)}2^{{{exponent - 1}}}$"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
