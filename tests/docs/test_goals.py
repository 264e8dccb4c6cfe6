"""Goals of newcomers, reached with what README and docs say; inference's is in tests/interop.

Of qtoolkit each uses only what stands on a page, word for word; the rest is the newcomer's own.
"""

import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import qtoolkit as qt

ROOT = Path(__file__).parents[2]


@pytest.fixture
def minutes(request):
    """The time limit of a goal, compilation included."""
    before = time.monotonic()
    yield
    assert time.monotonic() - before < 60 * request.param


def run(page, text, names):
    """Lines of a page, run as a reader would run them, in this namespace."""
    text = textwrap.dedent(text).strip("\n")
    assert text in (ROOT / page).read_text(encoding="utf-8"), f"{page} does not say:\n{text}"
    lines = [line.removeprefix(">>> ") for line in text.splitlines()]
    exec(compile("\n".join(lines), page, "exec"), names)


class Wave(nnx.Module):
    """A researcher's own: a layer, and a product written by hand."""

    def __init__(self, rngs):
        self.mix = nnx.Linear(16, 32, rngs=rngs)
        self.out = nnx.Param(jax.random.normal(rngs.params(), (32, 1)) / 4)

    def __call__(self, x):
        return jnp.sin(self.mix(x)) @ self.out[...]


@pytest.mark.docs
@pytest.mark.parametrize("minutes", [10], indirect=True)
def test_an_own_model_trains_in_fp8_with_report_and_plot(minutes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"qt": qt, "jax": jax, "jnp": jnp, "nnx": nnx, "optax": optax}
    names["model"] = Wave(nnx.Rngs(0))
    readme = "README.md"
    run(
        readme,
        """
        x = jax.random.normal(jax.random.key(0), (128, 16))
        y = jnp.sin(x[:, :1])


        @nnx.jit
        def step(model, optimizer):
            loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
            optimizer.update(model, grads)
            return loss


        def train(model):
            optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
            return [step(model, optimizer) for _ in range(20)]


        fp8 = qt.nnx.wrap(nnx.clone(model), qt.recipes.token_scaled)
        losses = {"float32": train(model), "FP8": train(fp8)}
        """,
        names,
    )
    assert isinstance(names["fp8"], Wave)
    assert names["losses"]["FP8"][-1] < names["losses"]["FP8"][0] / 2

    run("docs/pages/howto/train-nnx.md", "report = qt.nnx.report(fp8, x)", names)
    run("docs/pages/howto/train-nnx.md", "print(str(report).splitlines()[-1])", names)
    assert capsys.readouterr().out == "5 of 5 matmuls quantized\n"

    names["batch"] = names["x"]
    page = "docs/pages/howto/ptq-qat.md"
    run(page, "wrapped = qt.nnx.wrap(model, qt.recipes.te_current)", names)
    run(page, "def loss(model, batch):\n    return jnp.mean(model(batch) ** 2)", names)
    run(page, "numbers = qt.nnx.numerics(wrapped, batch, loss)", names)
    run(page, 'numbers.plot("numerics.png")', names)
    assert (tmp_path / "numerics.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.quick
@pytest.mark.parametrize("minutes", [5], indirect=True)
def test_e4m3fn_against_an_oracle_of_ones_own(minutes):
    page = "docs/pages/howto/study-formats.md"
    names = {"qt": qt, "np": np}
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    # Every code to its value.
    names["mine"] = theirs
    for line in ('"e4m3fn").values()', 'np.arange(256, dtype=np.uint8), "e4m3fn")'):
        kind = "qt.format(" if "values" in line else "qt.decode("
        expression = f"np.array_equal(mine, {kind}{line}, equal_nan=True)"
        assert expression in (ROOT / page).read_text(encoding="utf-8")
        assert eval(expression, names)
    # Every float16 number to its code, by another oracle than the page's: ml_dtypes, which does not
    # saturate, of numbers cut off where they would.
    names["x"] = x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):
        cut = np.clip(x.astype(np.float32), -448, 448)
        names["code"] = cut.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    expression = 'np.array_equal(code, qt.encode(x, "e4m3fn"))'
    assert expression in (ROOT / page).read_text(encoding="utf-8")
    assert eval(expression, names)
