"""FP8-aware training compared with float32 and `astype`, then a conversion: what `make run` runs.

Command: python experiments/demo.py [--steps 400] [--out qtoolkit-demo] [--seed 0] [--format e4m3fn]
Claim: the loss in FP8 is within 2 % of that in float32, and that of the converted weights too. The
third run, "astype", only casts the operands of its matmuls to the format and back, without scales.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from benchmarks._language_model import (
    CONTEXT,
    ByteTransformer,
    Corpus,
    TrainingPair,
    continuation,
    evaluate,
    load_corpus,
    train_pair,
    validation_windows,
)
from flax import nnx
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

from qtoolkit import checkpoints
from qtoolkit.checkpoints.internal import safetensors_dtype
from qtoolkit.formats import format as resolve
from qtoolkit.products import Recipe

PROMPT = 5_000  # where in the validation text the models begin to write


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The figures of one demo: losses in bits per byte, sizes in bytes, SQNR in dB.

    Attributes:
      wide, quantized, naive: Means of the last five evaluations of the float32 model, of the
        quantized one, and of the one that only casts by `astype`.
      wide_final, converted: Loss of the float32 model's final weights, before and after conversion.
      step_seconds: Median step, of the float32 model and of the quantized one.
      sizes: Of the two checkpoints.
      sqnr_db: Mean over the converted weights.
      format, gradient: Names of the formats of the forward matmuls and of the cotangents.
    """

    wide: float
    quantized: float
    naive: float
    wide_final: float
    converted: float
    step_seconds: tuple[float, float]
    sizes: tuple[int, int]
    sqnr_db: float
    format: str
    gradient: str

    def rows(self) -> list[tuple[str, str]]:
        """What is measured, and the figure, as they are printed."""
        float32_ms, quantized_ms = (1e3 * seconds for seconds in self.step_seconds)
        float32_size, size = self.sizes
        return [
            ("float32, last five evaluations", _loss(self.wide)),
            (
                f"{self.format} / {self.gradient}, last five evaluations",
                f"{_loss(self.quantized)} ({self.quantized / self.wide - 1:+.2%})",
            ),
            (
                f"{self.format} by astype, last five evaluations",
                f"{_loss(self.naive)} ({self.naive / self.wide - 1:+.2%})",
            ),
            ("float32, final weights", _loss(self.wide_final)),
            (
                f"final weights, converted to {self.format}",
                f"{_loss(self.converted)} ({self.converted / self.wide_final - 1:+.2%})",
            ),
            (
                "time of a step, float32 and quantized",
                f"{float32_ms:.1f} and {quantized_ms:.1f} ms "
                f"(ratio {quantized_ms / float32_ms:.2f})",
            ),
            (
                f"size of the checkpoint, float32 and {self.format}",
                f"{float32_size:,} and {size:,} bytes (ratio {size / float32_size:.2f})",
            ),
            ("mean SQNR of the converted weights", f"{self.sqnr_db:.1f} dB"),
        ]

    def conclusion(self) -> str:
        """What the figures say, in three sentences."""
        formats = f"{self.format} (gradients in {self.gradient})"
        float32_size, size = self.sizes
        return (
            f"Training in {formats} ended {_change(self.quantized / self.wide)} float32. "
            f"With `astype` alone, without scales, it ended {_change(self.naive / self.wide)} it. "
            f"The {self.format} file has {size / float32_size:.0%} of the bytes of the float32 "
            f"file, and its loss is {_change(self.converted / self.wide_final)} the original's."
        )

    def markdown(self, caption: str) -> str:
        """The table as Markdown, with a line of text under it."""
        lines = ["| measured | figure |", "| --- | --- |"]
        lines += [f"| {name} | {figure} |" for name, figure in self.rows()]
        return "\n".join([*lines, "", caption, ""])


def _change(ratio: float) -> str:
    """Of a loss to another one: "0.67% above"."""
    if math.isnan(ratio):
        return "in NaN, incomparable with"
    return f"{abs(ratio - 1):.2%} {'above' if ratio >= 1 else 'below'}"


def _loss(bits_per_byte: float) -> str:
    return f"{bits_per_byte:.4f} bits/byte"


def run(*, steps: int, out: str | Path, seed: int, format: str) -> None:
    """Train, convert, evaluate, and write the folder `out`; print what is done and a table.

    Args:
      steps: Optimizer steps of each of the three models.
      out: Folder for checkpoints, plots and the table; made if missing, its files overwritten.
      seed: Of the initialisation and of the batches.
      format: What the operands of the forward matmuls, and the converted weights, are rounded to.
    """
    safetensors_dtype(format)  # refuses, before any training, what no file could hold
    recipe = Recipe(forward=resolve(format))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    corpus = load_corpus()
    _say(console, corpus.description)
    started = time.perf_counter()
    pair = _train(console, corpus, recipe, steps, seed)
    results = _convert(folder, corpus, recipe, pair)
    # Where and when: what a reader needs to judge the milliseconds in the table.
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    host = f"jax {jax.__version__} on {jax.default_backend()} ({cores}), {date.today()}"
    headline = f"{steps} steps, seed {seed}, {time.perf_counter() - started:.0f} s, {host}"
    _print_table(console, results, headline)
    (folder / "table.md").write_text(results.markdown(f"{headline}; {corpus.description}"))
    picture = _plot(folder, pair, results)
    for line in ("", *_texts(corpus, pair, results), "", results.conclusion(), ""):
        _say(console, line)
    _say(console, f"{picture}\n{_next_command(folder, results)}")


def _train(console: Console, corpus: Corpus, recipe: Recipe, steps: int, seed: int) -> TrainingPair:
    has_room = console.is_terminal and console.width >= _TABLE_WIDTH
    display = _Screen(console, steps) if has_room else _PlainLines(console, steps)
    kernel = recipe.forward[1]
    assert kernel is not None
    with display:
        return train_pair(
            *(corpus, recipe),
            steps=steps,
            seed=seed,
            naive=kernel.spec.element.dtype,
            report=display,
        )


class _Remaining:
    """Estimates when the training ends. Before it was timed, from figures of 2 cores."""

    COMPILING, STEP = 12.0, 0.35  # seconds: of one model, and of all three

    def __init__(self, steps: int) -> None:
        self.steps, self.first = steps, 0.0

    def __call__(self, step: int, pair: TrainingPair) -> float:
        """Seconds from now on."""
        now = time.perf_counter()
        if step > 1:
            return (now - self.first) / (step - 1) * (self.steps - step)
        self.first = now
        compiled = [run.seconds[0] for run in pair.runs if run.seconds]
        one = sum(compiled) / len(compiled) if compiled else self.COMPILING
        return one * (len(pair.runs) - len(compiled)) + self.STEP * (self.steps - step)


class _TimeLeft(ProgressColumn):
    """Counts down to the end that the field `end` of a task says."""

    def render(self, task: Task) -> Text:
        return Text(_minutes(task.fields["end"] - time.perf_counter()))


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02} left"


class _Screen(Live):
    """The losses so far, as many as fit above the progress bar."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console=console, refresh_per_second=4)
        columns = TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn()
        self.progress = Progress(*columns, _TimeLeft(), console=console)
        self.task = self.progress.add_task("", total=steps, end=0.0)
        self.remaining = _Remaining(steps)

    def __call__(self, step: int, pair: TrainingPair) -> None:
        self.progress.update(
            self.task,
            completed=step,
            description=_stage(step, pair),
            end=time.perf_counter() + self.remaining(step, pair),
        )
        # Of the lines, eight belong to the title and frame of the table, the bar, and the prompt.
        rows = _losses(pair)[-max(1, self.console.height - 8) :]
        table = Table(*_COLUMNS, title="validation loss, bits per byte")
        for row in rows:
            table.add_row(*row)
        self.update(Group(table, self.progress))


def _stage(step: int, pair: TrainingPair) -> str:
    compiled = sum(bool(run.seconds) for run in pair.runs)
    number = f"{compiled + 1} of {len(pair.runs)}"
    return "training" if compiled == len(pair.runs) else f"compiling model {number}"


_COLUMNS = ("step", "float32", "quantized", "gap", "astype", "gap")
_TABLE_WIDTH = 60  # characters of a terminal that they fit into


def _losses(pair: TrainingPair) -> list[list[str]]:
    """For each evaluation the step and the loss of every run, with its gap to float32."""
    table = []
    for i, step in enumerate(pair.evaluated_at):
        reference = pair.wide.losses[i]
        row = [str(step), f"{reference:.4f}"]
        for run in pair.runs[1:]:
            row += [f"{run.losses[i]:.4f}", f"{run.losses[i] / reference - 1:+.2%}"]
        table.append(row)
    return table


class _PlainLines(contextlib.AbstractContextManager[None]):
    """One line for each evaluation, where there is no terminal to draw on."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps, self.printed = console, steps, 0
        self.remaining = _Remaining(steps)

    def __exit__(self, *_: Any) -> None:
        pass

    def __call__(self, step: int, pair: TrainingPair) -> None:
        left = _minutes(self.remaining(step, pair))
        if step == 0:
            _say(self.console, f"{_stage(step, pair)}, about {left}")
        if step == 1:
            text = "validation loss in bits per byte; astype: plain casts without scales"
            _say(self.console, text)
        if len(pair.evaluated_at) > self.printed:
            self.printed = len(pair.evaluated_at)
            _, *figures = _losses(pair)[-1]
            named = zip(_COLUMNS[1:], figures, strict=False)
            line = "  ".join(f"{name} {figure}" for name, figure in named)
            _say(self.console, f"step {step:>5}/{self.steps}  {line}  {left}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _convert(folder: Path, corpus: Corpus, recipe: Recipe, pair: TrainingPair) -> Results:
    """Save the float32 model, convert the file, and evaluate what the converted file holds."""
    kernel, cotangent = recipe.forward[1], recipe.wgrad[1]
    assert kernel is not None
    name = kernel.spec.element.name
    float32_path, converted_path = (folder / f"{stem}.safetensors" for stem in ("float32", name))
    checkpoints.save(float32_path, parameters(pair.wide.model), overwrite=True)
    report = checkpoints.convert(float32_path, converted_path, format=name, overwrite=True)
    restored = restore(pair.wide.model, checkpoints.dequantize(checkpoints.load(converted_path)))
    return Results(
        wide=pair.wide.final_loss,
        quantized=pair.quantized.final_loss,
        naive=math.nan if pair.naive is None else pair.naive.final_loss,
        wide_final=pair.wide.losses[-1],
        converted=float(evaluate(restored, validation_windows(corpus))),
        step_seconds=(pair.wide.step_seconds, pair.quantized.step_seconds),
        sizes=(float32_path.stat().st_size, converted_path.stat().st_size),
        sqnr_db=report.mean_sqnr_db or math.nan,
        format=name,
        gradient="float32" if cotangent is None else cotangent.spec.element.name,
    )


def _print_table(console: Console, results: Results, headline: str) -> None:
    if console.is_terminal:
        table = Table("measured", "figure", title=headline)
        for row in results.rows():
            table.add_row(*row)
        console.print(table)
        return
    width = max(len(name) for name, _ in results.rows())
    _say(console, headline)
    for name, figure in results.rows():
        _say(console, f"{name:<{width}}  {figure}")


def _plot(folder: Path, pair: TrainingPair, results: Results) -> str:
    """Draws the losses, and says where the picture is."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: matplotlib is missing; pip install matplotlib"
    from qtoolkit.plots import loss_curves

    curves = {
        "float32": pair.wide.losses,
        f"{results.format} / {results.gradient}": pair.quantized.losses,
    }
    if pair.naive is not None:
        curves[f"{results.format} by astype"] = pair.naive.losses
    loss_curves(folder / "loss.png", pair.evaluated_at, curves, gap_to="float32")
    return f"the losses as a picture: {folder / 'loss.png'}"


def _texts(corpus: Corpus, pair: TrainingPair, results: Results) -> list[str]:
    """How the float32 and the quantized model continue a text that they never saw."""
    prompt = corpus.validation[PROMPT : PROMPT + CONTEXT].tobytes()
    lines = [f"They continue {prompt.decode()!r}:"]
    for name, run in (("float32", pair.wide), (results.format, pair.quantized)):
        lines.append(f"  {name:<8} {continuation(run.model, prompt, 120)!r}")
    return lines


def _next_command(folder: Path, results: Results) -> str:
    command = Path(sys.executable).with_name("qtoolkit")
    if command.is_relative_to(Path.cwd()):
        command = command.relative_to(Path.cwd())
    return f"next: {command} inspect {folder / results.format}.safetensors"


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


def main(
    steps: Annotated[int, typer.Option(min=1, help="training steps of each run")] = 400,
    out: Annotated[Path, typer.Option(help="folder for checkpoints and plots")] = Path(
        "qtoolkit-demo"
    ),
    seed: Annotated[int, typer.Option(help="of the initialisation and the batches")] = 0,
    format: Annotated[str, typer.Option(help="of the operands and the weights")] = "e4m3fn",
) -> None:
    run(steps=steps, out=out, seed=seed, format=resolve(format).name)


if __name__ == "__main__":
    typer.run(main)
