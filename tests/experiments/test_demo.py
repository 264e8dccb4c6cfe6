"""The demo end to end with few steps, and the parts it is made of."""

import contextlib
import functools
import importlib.util
import io
import re
import subprocess

import demo
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import typer
from benchmarks import _language_model as language_model
from benchmarks._language_model import CONTEXT
from flax import nnx
from rich.console import Console
from typer.testing import CliRunner

from qtoolkit import checkpoints
from qtoolkit.products import Recipe

PNG = b"\x89PNG\r\n\x1a\n"

small = functools.partial(language_model.ByteTransformer, 32, 1, 2)


@pytest.fixture(scope="module")
def corpus():
    return language_model.load_corpus()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole demo of three steps of a small model: its output and its folder."""
    folder = tmp_path_factory.mktemp("demo") / "new"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(language_model, "ByteTransformer", small)
        demo.run(steps=3, out=folder, seed=1, format="F8_E5M2")
    return output.getvalue(), folder


@pytest.mark.exhaustive
def test_it_leaves_checkpoints_plots_and_the_table(finished):
    output, folder = finished
    names = {path.name for path in folder.iterdir()}
    assert names == {"loss.png", "float32.safetensors", "e5m2.safetensors", "table.md"}
    assert (folder / "loss.png").read_bytes()[:8] == PNG
    assert "step     3/3  float32" in output
    assert re.search(r"compiling model 1 of 3, about \d:\d\d left\ncompiling model 2", output)
    assert "validation loss in bits per byte" in output
    assert re.search(r"step     3/3  float32 .* astype \S+  gap", output)
    assert re.search(r"They continue '.*':\n  float32  '.*'\n  e5m2     '.*'\n", output)
    conclusion = r"Training in e5m2 .* float32\. With `astype` .* it\. The e5m2 file .*'s\.\n"
    assert re.search(conclusion, output)
    assert f"the losses as a picture: {folder}/loss.png\n" in output
    command = re.search(r"^next: (.*)$", output, re.M)[1].split()
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "blocks.0.up.kernel" in shown


@pytest.mark.exhaustive
def test_the_figures_are_those_of_the_files(finished, corpus):
    _, folder = finished
    table = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", (folder / "table.md").read_text(), re.M))
    model = small(rngs=nnx.Rngs(7))
    windows = language_model.validation_windows(corpus)
    for name, row in (
        ("float32", "float32, final weights"),
        ("e5m2", "final weights, converted to e5m2"),
    ):
        tensors = checkpoints.dequantize(checkpoints.load(folder / f"{name}.safetensors"))
        loss = float(language_model.evaluate(demo.restore(model, tensors), windows))
        assert table[row].startswith(f"{loss:.4f} bits/byte")
        assert (
            f"{(folder / f'{name}.safetensors').stat().st_size:,}"
            in (table["size of the checkpoint, float32 and e5m2"])
        )
    assert 15 < float(table["mean SQNR of the converted weights"].split()[0]) < 40
    assert "e5m2 / e5m2, last five evaluations" in table


def test_validation_text_is_not_in_the_training_text(corpus):
    assert corpus.training.size > 10 * corpus.validation.size > 200_000
    training = corpus.training.tobytes()
    validation = corpus.validation.tobytes()
    starts = range(0, len(validation) - 200, 97)
    assert not any(validation[start : start + 200] in training for start in starts)
    assert training.decode().count("Python") > 100  # it is text


@pytest.mark.exhaustive
def test_both_models_start_alike_and_see_the_same_batches(corpus):
    nothing = Recipe(forward=None, gradient=None)
    pair = language_model.train_pair(corpus, nothing, steps=2, seed=3)
    np.testing.assert_allclose(pair.wide.losses, pair.quantized.losses, rtol=1e-4)
    assert pair.evaluated_at == [1, 2]
    again = language_model.train_pair(corpus, nothing, steps=2, seed=3)
    assert again.wide.losses == pair.wide.losses


@pytest.mark.exhaustive
def test_parameters_and_restore_are_inverse():
    model = language_model.ByteTransformer(rngs=nnx.Rngs(0))
    other = language_model.ByteTransformer(rngs=nnx.Rngs(1))
    restored = demo.restore(other, demo.parameters(model))
    tokens = jnp.arange(CONTEXT)[None]
    np.testing.assert_array_equal(restored(tokens), model(tokens))
    assert not np.array_equal(other(tokens), model(tokens))
    assert "blocks.0.attention.query.kernel" in demo.parameters(model)


def test_without_matplotlib_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install matplotlib" in demo._plot(tmp_path, None, None)


@pytest.mark.quick
def test_the_bar_stays_visible_on_a_small_terminal():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, height=24, color_system=None)
    run = language_model.TrainingRun(None, None, [2.0] * 20, [1.0])
    new = language_model.TrainingRun(None, None)
    pair = language_model.TrainingPair(run, run, list(range(20, 401, 20)), run)
    compiling = pair._replace(naive=new, evaluated_at=[])
    screen = demo._Screen(console, 400)
    for step, at, description in (
        (0, compiling, "compiling model 3 of 3"),
        (1, pair, "training"),
        (400, pair, "training"),
    ):
        screen(step, at)
        lines = ["".join(s.text for s in line) for line in console.render_lines(screen.renderable)]
        assert len(lines) < 24
        assert lines[-1].startswith(description)
        assert f"{step}/400" in lines[-1]
        assert re.search(r"\d:\d\d left", lines[-1])
    assert any("400" in line and "+0.00%" in line for line in lines[:-1])  # the newest row


@pytest.mark.exhaustive
def test_with_astype_rounds_every_operand_and_every_cotangent():
    """Oracle: E4M3 by ml_dtypes, without a scale; beyond 464 it is NaN."""
    model = language_model.ByteTransformer(width=16, layers=1, heads=2, rngs=nnx.Rngs(0))
    naive = language_model.with_astype(model, jnp.float8_e4m3fn)
    x = np.asarray(jax.random.normal(jax.random.key(0), (4, 16)))

    def cast(a):
        return np.asarray(a).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

    up, plain = naive.blocks[0].up, model.blocks[0].up
    expected = cast(x) @ cast(plain.kernel[...])
    np.testing.assert_allclose(up(x), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(up(x) - plain(x)).max() > 1e-3
    grads = nnx.grad(lambda layer: jnp.sum(1e-4 * layer(x)))(up)
    np.testing.assert_array_equal(grads["kernel"][...], 0)  # smaller than the least of E4M3
    assert np.isnan(up(1e3 * x)).any()
    tokens = jnp.arange(8)[None]
    assert np.abs(naive(tokens) - model(tokens)).max() > 1e-3
    _, state = nnx.split(naive)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.split(model)[1])


app = typer.Typer()
app.command()(demo.main)


def test_a_format_that_no_file_holds_is_refused_before_any_training(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["--out", "new", "--format", "nf4"])
    assert "format nf4: its codes are narrow" in str(result.exception)
    assert CliRunner().invoke(app, ["--steps", "0"]).exit_code == 2
    assert not list(tmp_path.iterdir())
