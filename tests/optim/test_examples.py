"""The examples in docstrings run, as they stand there, and are at most eight lines long."""

import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qtoolkit
from qtoolkit import optim

FUNCTIONS = ("master_weights", "quantize_state", "stochastic_round_updates", "SecondMoment")


def loss(params):
    return jnp.sum((params["w"] - 1) ** 2)


@pytest.mark.docs
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example(name):
    text = textwrap.dedent("    " + getattr(optim, name).__doc__)
    (example,) = re.findall(r"\n\n((?:    [ \S]+\n)+)", text)[:1]
    code = textwrap.dedent(example)
    assert len(code.splitlines()) <= 8
    is_half = name in ("master_weights", "stochastic_round_updates")
    params = {"w": jnp.full((64, 64), 3, jnp.bfloat16 if is_half else jnp.float32)}
    names = {
        "jax": jax, "jnp": jnp, "optax": optax, "qtoolkit": qtoolkit, "loss": loss,
        "params": params, "grads": jax.grad(loss)(params),
    }  # fmt: skip
    exec(compile(code, name, "exec"), names)
    if name == "master_weights":
        assert (np.asarray(names["state"].master["w"]) != 3).all()
    elif "apply_updates" in code:
        assert names["params"]["w"].dtype == params["w"].dtype
        assert np.mean(np.asarray(names["params"]["w"]) != np.asarray(params["w"])) > 0.05
