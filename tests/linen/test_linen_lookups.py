"""Tables of embeddings in few bits in linen: rows that are looked up, by a formula of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import qtoolkit as qt

INT4 = qt.Recipe((None, "int4_group32"), gradient=None, lookups=True)
RULES = qt.Rules({"embed|table": INT4}, default=qt.Recipe((None, None), None))
TOKENS = jnp.asarray([[3, 0, 10], [10, 7, 3]])


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, 64, name="embed")
        return embed.attend(nn.Dense(64)(embed(tokens)))


class Own(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = self.param("table", jax.nn.initializers.normal(), (11, 64))
        return nn.Dense(5)(jnp.take(table, tokens, axis=0))


def by_numpy(table):
    """The table in symmetric integers of 4 bits, with a scale for each 32 numbers of a row."""
    x = np.asarray(table, np.float32).reshape(len(table), -1, 32)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(7)
    return (np.clip(np.rint(x / scale), -7, 7) * scale).reshape(np.shape(table))


def table_of(params):
    return params["embed"]["embedding"] if "embed" in params else params["table"]


@pytest.mark.parametrize("module", [Tied(), Own()], ids=["tied", "own"])
def test_rows_are_those_of_the_rounded_table(module):
    variables = module.init(jax.random.key(0), TOKENS)
    rounded = jax.tree.map(lambda x: x, variables)
    table = by_numpy(table_of(variables["params"]))
    if "embed" in rounded["params"]:
        rounded["params"]["embed"]["embedding"] = table
    else:
        rounded["params"]["table"] = table
    wrapped = qt.linen.wrap(module, RULES)
    served, weights = qt.linen.quantize(module, variables, RULES, TOKENS)
    assert isinstance(table_of(weights["params"]), qt.QArray)
    expected = module.apply(rounded, TOKENS)
    y = wrapped.apply(variables, TOKENS)
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(served.apply(weights, TOKENS), y)


def test_an_embedding_alone_and_its_gradient():
    module = nn.Embed(11, 64)
    variables = module.init(jax.random.key(0), TOKENS)
    wrapped = qt.linen.wrap(module, INT4)
    rows = by_numpy(variables["params"]["embedding"])[np.asarray(TOKENS)]
    np.testing.assert_array_equal(wrapped.apply(variables, TOKENS), rows)
    served, weights = qt.linen.quantize(module, variables, INT4, TOKENS)
    np.testing.assert_array_equal(served.apply(weights, TOKENS), rows)
    grads = jax.grad(lambda variables: wrapped.apply(variables, TOKENS).sum())(variables)
    expected = np.zeros((11, 64), np.float32)
    np.add.at(expected, np.asarray(TOKENS), 1)
    np.testing.assert_array_equal(grads["params"]["embedding"], expected)
