"""What training by a recipe loses relative to float32 and bfloat16, seed by seed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BASES = ("float32", "bfloat16")
# Of the mean gap of training by a recipe to training in bfloat16; integers have no target.
GAPS = {
    **dict.fromkeys(("te_current", "te_delayed_hybrid", "token_scaled", "mxfp8"), 0.005),
    **dict.fromkeys(("deepseek_v3", "fp8_lm", "fnuz_amd", "weight_only_e4m3"), 0.005),
    **dict.fromkeys(("nvfp4", "nvfp4, head in float32"), 0.03),
}


def paired_gaps(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """For each model, what each recipe gave: the losses of seeds, and gaps to runs of that seed."""
    finals: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        of_model = finals.setdefault(row["model"], {})
        loss = float(np.mean(row["losses"][-5:]))
        of_model.setdefault(row["recipe"], {})[row["seed"]] = loss

    def gaps(losses: dict[int, float], others: dict[int, float]) -> list[float]:
        return [loss / others[seed] - 1 for seed, loss in losses.items() if seed in others]

    return {
        model: [
            {
                "recipe": recipe,
                "losses": list(losses.values()),
                **{f"to {base}": gaps(losses, runs.get(base, {})) for base in BASES},
            }
            for recipe, losses in runs.items()
        ]
        for model, runs in finals.items()
    }


def text_of_gaps(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same as tables in Markdown, with the targets.

    Gaps are means over the seeds, those to bfloat16 with their standard error.
    """
    parts = []
    heads = ("recipe", "loss", "to float32", "to bfloat16", "largest", "seeds", "target", "")
    for model, gaps in paired_gaps(rows).items():
        lines = [" | ".join(heads), " | ".join(["---"] * len(heads))]
        lines += [" | ".join(_gap_cells(gap)) for gap in gaps]
        data = next(row["data"] for row in rows if row["model"] == model)
        steps = {row["steps"] for row in rows if row["model"] == model}
        title = f"### {model}\n\n{data}; steps: {', '.join(map(str, steps))}\n\n"
        parts.append(title + "".join(f"| {line} |\n" for line in lines))
    return "\n".join(parts)


def figure_of_gaps(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A panel for each model: gaps to bfloat16, a point for each seed, and their mean."""
    from matplotlib.figure import Figure

    tables = {
        model: [gap for gap in gaps if gap["to bfloat16"]]
        for model, gaps in paired_gaps(rows).items()
    }
    figure = Figure(figsize=(8, 3.8 * len(tables)), layout="constrained")
    panels = figure.subplots(len(tables), squeeze=False)[:, 0]
    for axes, (model, gaps) in zip(panels, tables.items(), strict=True):
        for place, gap in enumerate(gaps):
            values = 100 * np.array(gap["to bfloat16"])
            axes.plot(values, [place] * len(values), "o", color="#1f4e79", alpha=0.5)
            axes.plot(
                [values.mean()], [place], "|", color="#d1495b", markersize=18, markeredgewidth=2
            )
            if (target := GAPS.get(gap["recipe"])) is not None:
                ends = [place - 0.5, place + 0.5]
                axes.plot([100 * target] * 2, ends, ":", color="black", linewidth=1.5)
        axes.set_yticks(range(len(gaps)), [gap["recipe"] for gap in gaps])
        axes.invert_yaxis()
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set_xscale("symlog", linthresh=1.0)
        axes.margins(x=0.08)
        least, most = axes.get_xlim()
        ticks = [t for t in (-10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 30, 100) if least <= t <= most]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        seeds = sorted({len(gap["to bfloat16"]) for gap in gaps})
        axes.set_title(f"{model}, seeds: {' or '.join(map(str, seeds))}")
        axes.grid(alpha=0.25)
    panels[-1].set_xlabel(
        "validation loss relative to bfloat16, in % (beyond 1 % the axis is logarithmic)\n"
        "points: seeds; red bar: their mean; dotted line: the target, if the recipe has one"
    )
    return figure


def _gap_cells(gap: Mapping[str, Any]) -> list[str]:
    means = [f"{np.mean(gap[f'to {base}']):+.3%}" if gap[f"to {base}"] else "-" for base in BASES]
    paired, most = gap["to bfloat16"], GAPS.get(gap["recipe"])
    if len(paired) > 1:
        means[-1] += f" ± {np.std(paired, ddof=1) / len(paired) ** 0.5:.3%}"
    largest = f"{max(paired, key=abs):+.3%}" if paired else "-"
    cells = [gap["recipe"], f"{np.mean(gap['losses']):.4f}", *means, largest]
    promised = ["", ""]
    if most is not None and paired:
        promised = [f"<= {most:.1%}", "met" if np.mean(paired) <= most else "**missed**"]
    return [*cells, str(len(gap["losses"])), *promised]
