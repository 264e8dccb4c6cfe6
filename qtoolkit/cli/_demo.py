"""`qtoolkit demo`: FP8-aware training beside float32, then a converted checkpoint, in one table."""

import dataclasses
import importlib.util
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from qtoolkit import checkpoints
from qtoolkit.cli._language_model import (
    ByteTransformer,
    Corpus,
    Pair,
    evaluate,
    load_corpus,
    train_pair,
    validation_windows,
)
from qtoolkit.formats import format
from qtoolkit.products import Recipe


def run(*, steps: int, out: str | Path, seed: int, format: str) -> None:
    """Trains, converts, evaluates, and writes the folder `out`; prints what it does and a table.

    Args:
      steps: Optimizer steps of each of the two models.
      out: Folder for checkpoints, plots and the table; made if missing, its files overwritten.
      seed: Of the initialisation and of the batches.
      format: What the operands of the forward products, and the converted weights, are rounded to.
    """
    recipe = Recipe(forward=_format(format))
    assert recipe.forward is not None
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    corpus = load_corpus()
    console.print(f"text: {corpus.description}", highlight=False, markup=False)
    started = time.perf_counter()
    pair = _train(console, corpus, recipe, steps, seed)
    wide_path = folder / "float32.safetensors"
    converted_path = folder / f"{recipe.forward.name}.safetensors"
    checkpoints.save(wide_path, parameters(pair.wide.model), overwrite=True)
    report = checkpoints.convert(
        wide_path, converted_path, format=recipe.forward.name, overwrite=True
    )
    restored = restore(pair.wide.model, checkpoints.dequantize(checkpoints.load(converted_path)))
    results = Results(
        wide=pair.wide.final_loss,
        trained=pair.quantized.final_loss,
        converted=float(evaluate(restored, validation_windows(corpus))),
        wide_now=pair.wide.losses[-1],
        step_seconds=(pair.wide.step_seconds, pair.quantized.step_seconds),
        sizes=(wide_path.stat().st_size, converted_path.stat().st_size),
        sqnr=report.mean_sqnr_db or math.nan,
        format=recipe.forward.name,
        gradient=recipe.gradient.name if recipe.gradient is not None else "float32",
    )
    headline = (
        f"{steps} steps, seed {seed}, {time.perf_counter() - started:.0f} s, jax {jax.__version__}"
    )
    _print_table(console, results, headline)
    (folder / "table.md").write_text(results.markdown(f"{headline}; {corpus.description}"))
    _plot(console, folder, pair, report, results)
    console.print(f"written to {folder}/", highlight=False, markup=False, soft_wrap=True)


def _format(name: str) -> Any:
    fmt = format(name)
    checkpoints.safetensors_dtype(fmt)  # refuses, before any training, what no file could hold
    return fmt


def _train(console: Console, corpus: Corpus, recipe: Recipe, steps: int, seed: int) -> Pair:
    options = {"steps": steps, "seed": seed}
    if not console.is_terminal:
        return train_pair(corpus, recipe, report=_PlainLines(console, steps), **options)
    progress = Progress(
        TextColumn("training both models"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )
    task = progress.add_task("", total=steps)
    with Live(console=console, refresh_per_second=4) as live:

        def show(step: int, pair: Pair) -> None:
            progress.update(task, completed=step)
            grid = Table.grid()
            grid.add_row(_side_by_side(pair))
            grid.add_row(progress)
            live.update(grid)

        return train_pair(corpus, recipe, report=show, **options)


def _side_by_side(pair: Pair) -> Table:
    table = Table("step", "float32", "quantized", "gap", title="validation loss, bits per byte")
    rows = zip(pair.evaluated_at, pair.wide.losses, pair.quantized.losses, strict=True)
    for step, wide, quantized in rows:
        table.add_row(str(step), f"{wide:.4f}", f"{quantized:.4f}", f"{quantized / wide - 1:+.2%}")
    return table


class _PlainLines:
    """One line for each evaluation, where there is no terminal to draw on."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps, self.shown = console, steps, 0
        console.print("validation loss in bits per byte", highlight=False)

    def __call__(self, step: int, pair: Pair) -> None:
        if len(pair.evaluated_at) > self.shown:
            self.shown = len(pair.evaluated_at)
            wide, quantized = pair.wide.losses[-1], pair.quantized.losses[-1]
            self.console.print(
                f"step {step:>5}/{self.steps}  float32 {wide:.4f}  quantized {quantized:.4f}  "
                f"gap {quantized / wide - 1:+.2%}",
                highlight=False,
            )


@dataclasses.dataclass(frozen=True)
class Results:
    """The figures of one demo: losses in bits per byte, sizes in bytes, SQNR in dB.

    `wide` and `trained` are means of the last five evaluations, `wide_now` and `converted` the
    final weights' loss before and after conversion.
    """

    wide: float
    trained: float
    wide_now: float
    converted: float
    step_seconds: tuple[float, float]
    sizes: tuple[int, int]
    sqnr: float
    format: str
    gradient: str

    def rows(self) -> list[tuple[str, str]]:
        """What is measured, and the figure, as they are printed."""
        wide_seconds, seconds = self.step_seconds
        wide_size, size = self.sizes
        return [
            ("float32, last five evaluations", f"{self.wide:.4f} bits/byte"),
            (
                f"trained in {self.format} / {self.gradient}, last five",
                f"{self.trained:.4f} bits/byte ({self.trained / self.wide - 1:+.2%})",
            ),
            ("float32, final weights", f"{self.wide_now:.4f} bits/byte"),
            (
                f"the same, converted to {self.format}",
                f"{self.converted:.4f} bits/byte ({self.converted / self.wide_now - 1:+.2%})",
            ),
            (
                "step, float32 and quantized",
                f"{wide_seconds * 1e3:.1f} and {seconds * 1e3:.1f} ms "
                f"(ratio {seconds / wide_seconds:.2f})",
            ),
            (
                f"checkpoint, float32 and {self.format}",
                f"{wide_size:,} and {size:,} bytes (ratio {size / wide_size:.2f})",
            ),
            ("mean SQNR of the converted weights", f"{self.sqnr:.1f} dB"),
        ]

    def markdown(self, caption: str) -> str:
        """The table for a README."""
        lines = ["| measured | figure |", "| --- | --- |"]
        lines += [f"| {name} | {figure} |" for name, figure in self.rows()]
        return "\n".join([*lines, "", caption, ""])


def _print_table(console: Console, results: Results, headline: str) -> None:
    if console.is_terminal:
        table = Table("measured", "figure", title=headline)
        for row in results.rows():
            table.add_row(*row)
        console.print(table)
        return
    width = max(len(name) for name, _ in results.rows())
    console.print(headline, highlight=False)
    for name, figure in results.rows():
        console.print(f"{name:<{width}}  {figure}", highlight=False, soft_wrap=True)


def _plot(
    console: Console, folder: Path, pair: Pair, report: checkpoints.Report, results: Results
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print(
            "no plots: matplotlib is missing; pip install 'qtoolkit[plots]'", markup=False
        )
        return
    from qtoolkit.plots import loss_curves, weight_errors

    curves = {
        "float32": pair.wide.losses,
        f"{results.format} / {results.gradient}": pair.quantized.losses,
    }
    loss_curves(folder / "loss.png", pair.evaluated_at, curves)
    title = f"weights converted to {results.format}, scaling: {report.scaling}"
    errors = {
        tensor.name: tensor.sqnr_db
        for tensor in report.quantized
        if tensor.sqnr_db is not None and math.isfinite(tensor.sqnr_db)
    }
    weight_errors(folder / "weight-error.png", errors, title)


def parameters(model: nnx.Module) -> dict[str, jax.Array]:
    """The parameters of a model by dotted path: "blocks.0.up.kernel"."""
    return {
        ".".join(map(str, path)): variable[...]
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def restore(model: ByteTransformer, tensors: dict[str, Any]) -> ByteTransformer:
    """A copy of `model` with the parameters in `tensors`, named as `parameters` names them."""
    copy = nnx.clone(model)
    for path, variable in nnx.to_flat_state(nnx.state(copy, nnx.Param)):
        variable[...] = jnp.asarray(tensors[".".join(map(str, path))])
    return copy
