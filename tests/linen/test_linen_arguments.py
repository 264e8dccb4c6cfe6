"""Parameters that a linen module passes to another one as arrays, also to its generators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import qtoolkit as qt


class Head(nn.Module):
    def __call__(self, x, kernel):
        return x @ kernel.T

    def steps(self, x, kernel):
        for _ in range(2):
            yield x @ kernel.T


class Tied(nn.Module):
    """Passes a parameter of one module to another, as an array."""

    how: str

    def setup(self):
        self.embed, self.head = nn.Embed(8, 16), Head()

    def __call__(self, tokens):
        kernel, x = self.embed.embedding, self.embed(tokens)
        match self.how:
            case "vmap":
                return jax.vmap(lambda x: self.head(x, kernel))(x[None])[0]
            case "steps":
                return sum(self.head.steps(x, kernel)) / 2
        return self.head(x, kernel)


@pytest.mark.parametrize("how", ["array", "vmap", "steps"])
def test_a_parameter_that_is_passed_is_a_kernel(how):
    """Oracle: the plain matmul with the kernel rounded by `quantize`. It was no kernel."""
    module, tokens, spec = Tied(how), jnp.arange(4), qt.spec("e4m3fn")
    variables = module.init(jax.random.key(0), tokens)
    wrapped = qt.linen.wrap(module, qt.Recipe((None, spec), gradient=None))
    kernel = variables["params"]["embed"]["embedding"]
    expected = kernel[tokens] @ qt.quantize(kernel, spec).dequantize().T
    for call in (wrapped.apply, jax.jit(wrapped.apply)):
        np.testing.assert_allclose(call(variables, tokens), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(module.apply(variables, tokens) - expected)).max() > 1e-3
    rules = qt.Rules({"embed": None}, default=qt.Recipe())
    plain = qt.linen.wrap(module, rules).apply(variables, tokens)
    np.testing.assert_array_equal(plain, module.apply(variables, tokens))
