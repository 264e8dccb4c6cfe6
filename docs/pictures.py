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


@picture
def rounding() -> Any:
    x = np.linspace(-3.4, 3.4, 1361, dtype=np.float32)
    figure, panels = plt.subplots(2, 3, figsize=(9, 5.6), sharex=True, sharey=True)
    modes = [*qt.casts.DETERMINISTIC[:5], "stochastic"]
    for axes, mode in zip(panels.flat, modes, strict=True):
        key = jax.random.key(0) if mode == "stochastic" else None
        y = qt.round_to_format(x, "e2m1fn", rounding=mode, key=key)
        axes.plot(x, x, color="#bbbbbb", linewidth=1)
        axes.plot(x, y, ".", color="#1f4e79", markersize=2.5)
        axes.set_title(mode, fontsize=10)
        axes.grid(alpha=0.25)
    figure.supxlabel("x")
    figure.supylabel("x rounded to e2m1fn")
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
            text = f"infinity: {y[-1]:.0f}" if np.isfinite(y[-1]) else f"infinity: {y[-1]}"
            axes.plot([], [], color=colour, label=f"{fmt}, {text}")
        axes.set_title(saturation, fontsize=10)
        axes.legend(fontsize=7, loc="upper left", frameon=False)
        axes.set_ylim(375, 530)
        axes.grid(alpha=0.25)
    figure.supxlabel("x; e5m2 scaled so that its largest value, 57,344, is at 448 too", fontsize=10)
    return figure


@picture
def scales() -> Any:
    axes = qt.plots.error_against_magnitude(
        ["e4m3fn", "mxfp8_e4m3", "nvfp4", "mxfp4", "int8"], octaves=24
    )
    return axes.figure


@picture
def gradients() -> Any:
    from qtoolkit.gradients import DSQ, Ramp, ReSTE

    x = np.linspace(-8, 8, 1601, dtype=np.float32)
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), sharex=True)
    above.plot(x, x, color="#bbbbbb", linewidth=1)
    above.plot(x, qt.fake_cast(x, "e2m1fn"), color="#1f4e79")
    above.set_ylabel("fake_cast(x, e2m1fn)")
    rules = [("identity", "identity"), ("clipped", "clipped"), ("zero", "zero")]
    rules += [("DSQ()", DSQ()), ("Ramp(0.5)", Ramp(0.5)), ("ReSTE()", ReSTE())]
    for index, (name, rule) in enumerate(rules):
        slope = jax.grad(lambda v, rule=rule: qt.fake_cast(v, "e2m1fn", gradient=rule).sum())(x)
        below.plot(x, slope, ("-", "--", ":")[index % 3], label=name, linewidth=1.4)
    below.set_ylabel("its gradient")
    below.legend(fontsize=8, ncols=3, frameon=False)
    below.set_ylim(-0.2, 3)
    below.set_xlabel("x")
    for axes in (above, below):
        axes.grid(alpha=0.25)
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
