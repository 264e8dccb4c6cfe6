"""What pages claim about others: figures of stored runs, and messages as they are raised."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks._gaps import GAPS, paired_gaps
from benchmarks._results import load
from flax import linen as nn
from flax import nnx

import qtoolkit as qt

ROOT = Path(__file__).parents[2]
PLAIN = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
DELAYED = qt.nnx.wrap(PLAIN, qt.recipes.te_delayed_hybrid)
X = jnp.ones((1, 4))


def page(name):
    return (ROOT / "docs/pages" / name).read_text(encoding="utf-8")


@pytest.mark.quick
def test_recommended_recipes_meet_their_target():
    """Oracle: the runs that are stored in experiments/results."""
    text = " ".join(page("howto/choose-a-recipe.md").split())
    (first,) = re.findall(r"\| a first try; [^|]* \| `(\w+)` \|", text)
    claim = r"bfloat16\. (.*) meet it on all three models\. (.*) miss it on \"cnn\""
    ((meet, miss),) = re.findall(claim, text)
    means = {
        model: {gap["recipe"]: np.mean(gap["to bfloat16"]) for gap in gaps}
        for model, gaps in paired_gaps(
            load(ROOT / "experiments/results/fp8_training.jsonl")[1:]
        ).items()
    }
    recommended = re.findall(r"`(\w+)`", meet)
    assert first in recommended
    assert len(means) == 3
    for recipe in recommended:
        assert all(mean[recipe] <= GAPS[recipe] for mean in means.values()), recipe
    for recipe in re.findall(r"`(\w+)`", miss):
        assert 0 < means["cnn"][recipe] - GAPS[recipe] < 0.001


def converted(folder):
    names = {"model.layers.0.mlp.up_proj.weight": np.ones((64, 64), np.float32)}
    (folder / "in").mkdir()
    qt.checkpoints.save(folder / "in/model.safetensors", names)
    (folder / "in/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    qt.checkpoints.convert(folder / "in", folder / "out", format="int4_group128")


# What Troubleshooting quotes, and what raises it; "..." stands for anything.
RAISED = {
    "format: 'e4m3' is ambiguous": lambda _: qt.format("e4m3"),
    "cast: format e2m3fn has no ... dtype": lambda _: qt.cast(1.0, "e2m3fn"),
    "has no derivative": lambda _: jax.grad(lambda x: qt.cast(x, "e4m3fn").astype(x.dtype))(1.0),
    "wrap: the rules exclude every layer": lambda _: qt.nnx.wrap(PLAIN, qt.Rules({})),
    "matches nothing": lambda _: qt.nnx.wrap(PLAIN, qt.Rules({"heed": qt.recipes.te_current})),
    "wrap: model has type ..., expected an nnx.Module": lambda _: qt.nnx.wrap(nn.Dense(4)),
    "RuntimeWarning: differentiated without ... value_and_grad": lambda _: jax.grad(
        lambda x: DELAYED(x).sum()
    )(X),
    "Non-exhaustive filters": lambda _: nnx.split(DELAYED, nnx.Param),
    "data ... static attribute": lambda _: nnx.update(nnx.clone(PLAIN), nnx.state(DELAYED)),
    "Incorrect number of leaves": lambda _: nnx.merge(nnx.graphdef(PLAIN), nnx.state(DELAYED)),
    "expected a multiple of 128": converted,
    "jax_enable_x64": lambda _: qt.cast(np.float64(1.0), "int64"),
}


@pytest.mark.parametrize("quoted", RAISED)
def test_troubleshooting_quotes_messages_as_they_are(quoted, tmp_path):
    assert f"`{quoted}`" in page("troubleshooting.md")
    text = ""
    try:
        RAISED[quoted](tmp_path)
    except Exception as error:  # of Flax and JAX, too
        text = f"{type(error).__name__}: {error}"
    assert re.search(".*".join(map(re.escape, quoted.split("..."))), text, re.DOTALL), text
