"""The pictures of the documentation and of the README, drawn from the library, for both modes.

Command: python docs/pictures.py [--out docs/pages/pictures]
Claim: every picture shows what the library computes or what an experiment stored, no figure is
typed in.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import qtoolkit as qt

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/pages/pictures"
sys.path.append(str(ROOT / "experiments"))
sys.path.append(str(ROOT / "docs"))

from benchmarks._gaps import figure_of_gaps  # noqa: E402  # experiments are no package
from benchmarks._results import load  # noqa: E402
from dark_pictures import dark  # noqa: E402

PICTURES: dict[str, Callable[[], Any]] = {}


def picture(function: Callable[[], Any]) -> Callable[[], Any]:
    """Adds a picture under the name of the function that returns its figure."""
    PICTURES[function.__name__] = function
    return function


@picture
def formats() -> Any:
    return qt.plots.number_line(["e5m2", "e4m3fn", "e2m3fn", "e2m1fn", "nf4", "posit8"])


@picture
def fp8() -> Any:
    return qt.plots.number_line(["e4m3fn", "e5m2"])


BLUE, ORANGE, GREY = "#1f4e79", "#e08a00", "#bbbbbb"  # told apart without colour vision, too


@picture
def rounding() -> Any:
    """A staircase for each mode; marks at the ties, where alone the two nearest modes differ."""
    modes = {
        "nearest_even": "to the nearer value; ties to the even code",
        "nearest_away": "to the nearer value; ties away from zero",
        "toward_zero": "to the neighbour nearer to zero",
        "toward_positive": "to the neighbour above",
        "toward_negative": "to the neighbour below",
        "stochastic": "up or down by chance; right on average",
    }
    x = np.linspace(-1.6, 1.6, 3201, dtype=np.float32)
    ties = np.arange(-1.25, 1.5, 0.5, dtype=np.float32)
    values = np.arange(-2, 2.5, 0.5)
    figure, panels = plt.subplots(2, 3, figsize=(9, 6.6), sharex=True, sharey=True)
    for axes, (mode, what) in zip(panels.flat, modes.items(), strict=True):
        axes.plot(x, x, color=GREY, linewidth=1)
        if mode == "stochastic":
            # Of each x many draws: the larger a mark, the more of them gave this value.
            few = np.linspace(-1.6, 1.6, 49, dtype=np.float32)
            draws = np.repeat(few, 2000)
            y = qt.round_to_format(draws, "e2m1fn", rounding=mode, key=jax.random.key(0))
            for value in values:
                share = (np.asarray(y).reshape(len(few), -1) == value).mean(axis=1)
                axes.scatter(few, np.full(len(few), value), s=22 * share, color=BLUE, linewidths=0)
        else:
            y = np.asarray(qt.round_to_format(x, "e2m1fn", rounding=mode))
            for value in values:
                step = x[y == value]
                axes.plot(step, np.full(len(step), value), color=BLUE, linewidth=2.5)
        if mode.startswith("nearest"):
            tied = qt.round_to_format(ties, "e2m1fn", rounding=mode)
            axes.plot(ties, tied, "o", color=ORANGE, markersize=6)
        axes.set_title(f"{mode}\n", fontsize=11, fontweight="bold")
        axes.text(0.5, 1.03, what, ha="center", fontsize=9, transform=axes.transAxes)
        axes.set_xticks([-1, 0, 1])
        axes.set_yticks(values)
        axes.set_xlim(-1.65, 1.65)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Six ways to round to e2m1fn, whose values near zero are multiples of 0.5")
    figure.supxlabel(
        "x (orange: ties, exactly between two values; size of a stochastic mark: how often)",
        fontsize=10,
    )
    figure.supylabel("x, rounded (grey: x itself)", fontsize=10)
    return figure


@picture
def saturation() -> Any:
    x = np.linspace(380, 520, 1401, dtype=np.float32)
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.2), sharey=True)
    for axes, saturation in zip(panels, qt.casts.SATURATIONS, strict=True):
        for fmt, colour in (("e4m3fn", "#1f4e79"), ("e5m2", "#e08a00")):
            scale = float(qt.format(fmt).max_finite) / 448  # both end at 448 in the picture
            end = np.append(x, np.inf).astype(np.float32)
            y = np.asarray(qt.round_to_format(end * scale, fmt, saturation=saturation)) / scale
            axes.plot(x, np.where(np.isfinite(y[:-1]), y[:-1], np.nan), color=colour)
            lost = x[~np.isfinite(y[:-1])]
            if lost.size:
                kind = "NaN" if np.isnan(y[:-1]).any() else "infinity"
                axes.axvspan(lost[0], lost[-1], color=colour, alpha=0.12)
                low = 400 if fmt == "e4m3fn" else 425
                axes.text(lost[0] + 2, low, f"{fmt}:\n{kind}", fontsize=8, color=colour)
            infinity = "NaN" if np.isnan(y[-1]) else f"{y[-1]:.0f}".replace("inf", "infinity")
            axes.plot([], [], color=colour, label=f"{fmt}; infinity becomes {infinity}")
        axes.set_title(saturation, fontsize=10)
        axes.legend(fontsize=7, loc="upper left", frameon=False)
        axes.set_ylim(375, 530)
        axes.grid(alpha=0.25)
    figure.supxlabel("x; e5m2 scaled so that its largest value, 57,344, is at 448 too", fontsize=10)
    figure.supylabel("x, rounded", fontsize=10)
    return figure


@picture
def scales() -> Any:
    axes = qt.plots.error_against_magnitude(
        ["e4m3fn", "mxfp8_e4m3", "nvfp4", "mxfp4", "int8"], octaves=24
    )
    return axes.figure


@picture
def gradients() -> Any:
    """A panel for each estimator: the slope that backward takes, in place of rounding's."""
    from qtoolkit.gradients import Ramp

    rules = [
        ("clipped", '"clipped" (default)', "1 in the range: clamped values stop moving"),
        ("identity", '"identity"', "1 everywhere: values may drift away"),
        ("zero", '"zero"', "the true derivative: nothing is trained"),
        (Ramp(0.5), "Ramp(0.5)", "falls slowly: clamped values can return"),
    ]
    x = np.linspace(0, 14, 2801, dtype=np.float32)
    end = float(qt.format("e2m1fn").max_finite)
    figure, panels = plt.subplots(2, 2, figsize=(9, 4.4), sharex=True, sharey=True)
    for axes, (rule, name, what) in zip(panels.flat, rules, strict=True):
        slope = jax.grad(lambda v, rule=rule: qt.fake_cast(v, "e2m1fn", gradient=rule).sum())(x)
        axes.axvspan(end, x[-1], color=ORANGE, alpha=0.12, linewidth=0)
        axes.fill_between(x, slope, color=BLUE, alpha=0.15, linewidth=0)
        axes.plot(x, slope, color=BLUE, linewidth=1.8)
        axes.set_title(f"{name}\n", fontsize=11, fontweight="bold")
        axes.text(0.5, 1.03, what, ha="center", fontsize=9, transform=axes.transAxes)
        axes.set_xlim(0, x[-1])
        axes.set_ylim(-0.1, 1.4)
        axes.set_xticks([0, 2, 4, 6, 10, 14])
        axes.set_yticks([0, 0.5, 1])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].text(10, 0.5, "beyond the\nlargest value, 6", ha="center", fontsize=8.5)
    figure.suptitle("The slope that training uses in place of the derivative of rounding to e2m1fn")
    figure.supxlabel("x (negative x: the same)", fontsize=10)
    figure.supylabel("slope of fake_cast(x)", fontsize=10)
    return figure


@picture
def recipes() -> Any:
    """The formats of the six operands of each preset, for `y = x @ w` and its gradients."""
    names = [n for n in qt.recipes.__all__ if isinstance(getattr(qt.recipes, n), qt.Recipe)]
    columns = ["forward\nx", "forward\nw", "dgrad\ndy", "dgrad\nw", "wgrad\nx", "wgrad\ndy"]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(names) + 1))
    for row, name in enumerate(names):
        for column, operand in enumerate(getattr(qt.recipes, name).operands):
            bits = 32 if operand is None else operand.spec.element.bits
            colour = {32: "#f2f2f2", 8: "#a9cbe8", 4: "#f3c08a"}[bits]
            axes.add_patch(plt.Rectangle((column, row), 0.96, 0.92, color=colour))
            text = "not quantized" if operand is None else operand.spec.element.name
            axes.text(column + 0.48, row + 0.46, text, ha="center", va="center", fontsize=8)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(names), 0)
    axes.set_xticks(np.arange(len(columns)) + 0.48, columns)
    axes.set_yticks(np.arange(len(names)) + 0.46, names)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


@picture
def gaps() -> Any:
    """What training by each preset lost relative to bfloat16, of the stored runs."""
    return figure_of_gaps(load(ROOT / "experiments/results/fp8_training.jsonl")[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    mpl.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    for name, function in PICTURES.items():
        figure = function()
        figure.set_layout_engine("constrained")
        # Without the version of matplotlib in the file, the same picture is the same bytes.
        figure.savefig(folder / f"{name}.png", dpi=120, metadata={"Software": None})
        (folder / f"{name}-dark.png").write_bytes(dark((folder / f"{name}.png").read_bytes()))
        plt.close(figure)


if __name__ == "__main__":
    main()
