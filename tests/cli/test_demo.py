"""The demo end to end with few steps, and the parts it is made of."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from qtoolkit import checkpoints
from qtoolkit.cli import _demo, _language_model
from qtoolkit.cli._app import app
from qtoolkit.products import Recipe

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def corpus():
    return _language_model.load_corpus()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole demo of three steps: its output and its folder."""
    folder = tmp_path_factory.mktemp("demo") / "new"
    arguments = ["demo", "--steps", "3", "--seed", "1", "--format", "F8_E5M2", "--out", str(folder)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output, folder


def test_it_leaves_checkpoints_plots_and_the_table(finished):
    output, folder = finished
    names = {path.name for path in folder.iterdir()}
    plots = {"loss.png", "weight-error.png"}
    assert names == plots | {"float32.safetensors", "e5m2.safetensors", "table.md"}
    for name in plots:
        assert (folder / name).read_bytes()[:8] == PNG
    assert "step     3/3  float32" in output
    assert str(folder) in output.replace("\n", "")


def test_the_figures_are_those_of_the_files(finished, corpus):
    _, folder = finished
    table = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", (folder / "table.md").read_text(), re.M))
    model = _language_model.ByteTransformer(rngs=nnx.Rngs(7))
    windows = _language_model.validation_windows(corpus)
    for name, row in (
        ("float32", "float32, final weights"),
        ("e5m2", "the same, converted to e5m2"),
    ):
        tensors = checkpoints.dequantize(checkpoints.load(folder / f"{name}.safetensors"))
        loss = float(_language_model.evaluate(_demo.restore(model, tensors), windows))
        assert table[row].startswith(f"{loss:.4f} bits/byte")
        assert (
            f"{(folder / f'{name}.safetensors').stat().st_size:,}"
            in (table["checkpoint, float32 and e5m2"])
        )
    assert 15 < float(table["mean SQNR of the converted weights"].split()[0]) < 40
    assert "trained in e5m2 / e5m2, last five" in table


def test_text_for_validation_is_kept_apart(corpus):
    assert corpus.training.size > 10 * corpus.validation.size > 200_000
    training = corpus.training.tobytes()
    validation = corpus.validation.tobytes()
    starts = range(0, len(validation) - 200, 97)
    assert not any(validation[start : start + 200] in training for start in starts)
    assert training.decode().count("Python") > 100  # it is text


def test_both_models_start_alike_and_see_the_same_batches(corpus):
    nothing = Recipe(forward=None, gradient=None)
    pair = _language_model.train_pair(corpus, nothing, steps=2, seed=3)
    np.testing.assert_allclose(pair.wide.losses, pair.quantized.losses, rtol=1e-4)
    assert pair.evaluated_at == [1, 2]
    again = _language_model.train_pair(corpus, nothing, steps=2, seed=3)
    assert again.wide.losses == pair.wide.losses


def test_parameters_and_restore_are_inverse():
    model = _language_model.ByteTransformer(rngs=nnx.Rngs(0))
    other = _language_model.ByteTransformer(rngs=nnx.Rngs(1))
    restored = _demo.restore(other, _demo.parameters(model))
    tokens = jnp.arange(_language_model.CONTEXT)[None]
    np.testing.assert_array_equal(restored(tokens), model(tokens))
    assert not np.array_equal(other(tokens), model(tokens))
    assert "blocks.0.attention.query.kernel" in _demo.parameters(model)


def test_without_matplotlib_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    from rich.console import Console

    _demo._plot(Console(), tmp_path, None, None, None)
    assert "pip install 'qtoolkit[plots]'" in capsys.readouterr().out


def test_an_out_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "qtoolkit", "demo", "--steps", "1", "--out"]
    done = subprocess.run(
        [*command, tmp_path / "file"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch(r"qtoolkit: .*file: File exists.*\n", done.stderr)


@pytest.mark.parametrize("seconds", [1, 3])  # while it loads, while it compiles
def test_ctrl_c_is_one_line(tmp_path, start, seconds):
    command = [sys.executable, "-m", "qtoolkit", "demo", "--steps", "100000", "--out", tmp_path]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = start(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("text:")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(r"qtoolkit: interrupted; .* may be incomplete\n", errors)
    assert not list(tmp_path.iterdir())
