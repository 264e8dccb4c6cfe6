"""`qtoolkit demo`: FP8-aware training beside float32, then a converted checkpoint, in one table."""

import importlib.util
import math
import os
import platform
import time
from datetime import date
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
from qtoolkit.demo._language_model import (
    ByteTransformer,
    Corpus,
    TrainingPair,
    evaluate,
    load_corpus,
    train_pair,
    validation_windows,
)
from qtoolkit.demo._results import Results
from qtoolkit.formats import format as resolve
from qtoolkit.products import Recipe


def run(*, steps: int, out: str | Path, seed: int, format: str) -> None:
    """Trains, converts, evaluates, and writes the folder `out`; prints what it does and a table.

    Args:
      steps: Optimizer steps of each of the two models.
      out: Folder for checkpoints, plots and the table; made if missing, its files overwritten.
      seed: Of the initialisation and of the batches.
      format: What the operands of the forward products, and the converted weights, are rounded to.
    """
    checkpoints.safetensors_dtype(format)  # refuses, before any training, what no file could hold
    recipe = Recipe(forward=resolve(format))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    corpus = load_corpus()
    console.print(f"text: {corpus.description}", highlight=False, markup=False)
    started = time.perf_counter()
    pair = _train(console, corpus, recipe, steps, seed)
    results, report = _convert(folder, corpus, recipe, pair)
    headline = f"{steps} steps, seed {seed}, {time.perf_counter() - started:.0f} s, {_host()}"
    _print_table(console, results, headline)
    (folder / "table.md").write_text(results.markdown(f"{headline}; {corpus.description}"))
    _plot(console, folder, pair, report, results)
    console.print(f"written to {folder}/", highlight=False, markup=False, soft_wrap=True)


def _host() -> str:
    """Where and when: what a reader needs to judge the milliseconds in the table."""
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    return f"jax {jax.__version__} on {jax.default_backend()} ({cores}), {date.today()}"


def _train(console: Console, corpus: Corpus, recipe: Recipe, steps: int, seed: int) -> TrainingPair:
    options = {"steps": steps, "seed": seed}
    if not console.is_terminal:
        return train_pair(corpus, recipe, report=_PlainLines(console, steps), **options)
    progress = Progress(
        TextColumn("training both models"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )
    task = progress.add_task("", total=steps)
    with Live(console=console, refresh_per_second=4) as live:

        def show(step: int, pair: TrainingPair) -> None:
            progress.update(task, completed=step)
            grid = Table.grid()
            grid.add_row(_side_by_side(pair))
            grid.add_row(progress)
            live.update(grid)

        return train_pair(corpus, recipe, report=show, **options)


def _side_by_side(pair: TrainingPair) -> Table:
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

    def __call__(self, step: int, pair: TrainingPair) -> None:
        if len(pair.evaluated_at) > self.shown:
            self.shown = len(pair.evaluated_at)
            wide, quantized = pair.wide.losses[-1], pair.quantized.losses[-1]
            self.console.print(
                f"step {step:>5}/{self.steps}  float32 {wide:.4f}  quantized {quantized:.4f}  "
                f"gap {quantized / wide - 1:+.2%}",
                highlight=False,
            )


def _convert(
    folder: Path, corpus: Corpus, recipe: Recipe, pair: TrainingPair
) -> tuple[Results, checkpoints.Report]:
    """Saves the float32 model, converts the file, and evaluates what the converted file holds."""
    kernel, cotangent = recipe.forward[1], recipe.wgrad[1]
    assert kernel is not None
    name = kernel.spec.element.name
    wide_path, converted_path = (folder / f"{stem}.safetensors" for stem in ("float32", name))
    checkpoints.save(wide_path, parameters(pair.wide.model), overwrite=True)
    report = checkpoints.convert(wide_path, converted_path, format=name, overwrite=True)
    restored = restore(pair.wide.model, checkpoints.dequantize(checkpoints.load(converted_path)))
    results = Results(
        wide=pair.wide.final_loss,
        quantized=pair.quantized.final_loss,
        wide_final=pair.wide.losses[-1],
        converted=float(evaluate(restored, validation_windows(corpus))),
        step_seconds=(pair.wide.step_seconds, pair.quantized.step_seconds),
        sizes=(wide_path.stat().st_size, converted_path.stat().st_size),
        sqnr_db=report.mean_sqnr_db or math.nan,
        format=name,
        gradient="float32" if cotangent is None else cotangent.spec.element.name,
    )
    return results, report


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
    console: Console, folder: Path, pair: TrainingPair, report: checkpoints.Report, results: Results
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
