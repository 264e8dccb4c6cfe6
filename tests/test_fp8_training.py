"""The experiment `fp8_training`: its command, that it goes on where it was, and its table."""

import fp8_training
import numpy as np
import pytest
import typer
from benchmarks._gaps import paired_gaps, text_of_gaps
from benchmarks._results import load
from flax import nnx
from typer.testing import CliRunner


def run(*arguments):
    app = typer.Typer()
    app.command()(fp8_training.main)
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


class Small(nnx.Module):
    """In place of the convolutional one, which takes long to compile."""

    def __init__(self, seed):
        self.first = nnx.Linear(64, 16, rngs=nnx.Rngs(seed))
        self.second = nnx.Linear(16, 10, rngs=nnx.Rngs(seed + 1))

    def __call__(self, images):
        return self.second(nnx.relu(self.first(images.reshape(-1, 64))))


@pytest.fixture
def images(monkeypatch):
    """In place of those of scikit-learn, which the tests do without."""
    draw = np.random.default_rng(0)
    found = fp8_training.Images(draw.random((24, 8, 8)), draw.integers(0, 10, 24), 20, "noise")

    def small(quick):
        return fp8_training.cnn(lambda: found, quick)._replace(make=Small)

    monkeypatch.setitem(fp8_training.MODELS, "cnn", small)


@pytest.mark.exhaustive
def test_a_quick_run_is_stored_and_not_repeated(images, monkeypatch, tmp_path):
    plot = tmp_path / "gaps.png"
    command = ["--quick", "--model", "cnn", "--recipe", "te_current", "--seeds", "1"]
    command += ["--results", tmp_path, "--plot", plot]
    first = run(*command)
    _, *rows = load(tmp_path / "fp8_training.jsonl")
    assert [row["recipe"] for row in rows] == ["float32", "bfloat16", "te_current"]
    wide, half, quantized = (np.array(row["losses"]) for row in rows)
    assert wide[-1] < wide[0]
    assert len({tuple(losses) for losses in (wide, half, quantized)}) == 3
    np.testing.assert_allclose(quantized, wide, rtol=0.05)
    assert f"{quantized.mean() / half.mean() - 1:+.3%}" in first.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(fp8_training, "trained", None)  # would fail where it is called
    assert run(*command).output == first.output[first.output.index("###") :]


def test_unknown_names():
    assert "'mlp', expected one of transformer, cnn" in run("--model", "mlp").output
    assert run("--recipe", "fp7").exit_code == 2


@pytest.mark.quick
def test_gaps_are_paired_by_seed():
    """By hand: 2.2 / 2 and 3.6 / 3, whose mean is 1.15 with a standard error of 0.05."""
    losses = {("bfloat16", 0): 2.0, ("bfloat16", 1): 3.0, ("te_current", 0): 2.2}
    losses |= {("te_current", 1): 3.6, ("int8_qat", 1): 3.0}
    rows = [
        {"model": "cnn", "recipe": r, "seed": s, "steps": 1, "data": "d", "losses": [9.0, *[x] * 5]}
        for (r, s), x in losses.items()
    ]
    gaps = {gap["recipe"]: gap["to bfloat16"] for gap in paired_gaps(rows)["cnn"]}
    np.testing.assert_allclose(gaps["te_current"], [0.1, 0.2])
    assert gaps["int8_qat"] == [0.0]
    text = text_of_gaps(rows)
    means, promise = "- | +15.000% ± 5.000% | +20.000%", "<= 0.5% | **missed**"
    assert f"| te_current | 2.9000 | {means} | 2 | {promise} |" in text
    assert "| int8_qat | 3.0000 | - | +0.000% | +0.000% | 1 |  |  |" in text
