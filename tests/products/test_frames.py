"""The way of a matmul from a layer of Flax to `lax.dot_general`, counted in frames."""

import traceback

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.extend.core import set_current_trace, take_current_trace

import qtoolkit as qt


class Watching(jax.core.Trace):
    """Keeps the stack under which each matmul is computed."""

    def __init__(self):
        super().__init__()
        with take_current_trace() as parent:
            self.parent_trace = parent
        self.stacks = []

    def process_primitive(self, primitive, args, params, /):
        if primitive.name == "dot_general":
            self.stacks.append(traceback.extract_stack())
        with set_current_trace(self.parent_trace):
            return primitive.bind(*args, **params)

    def process_custom_jvp_call(self, *args, **params):
        return self.parent_trace.process_custom_jvp_call(*args, **params)


def frames(call):
    """Our frames between the layer of Flax and its matmul."""
    watching = Watching()
    with jax.disable_jit(), set_current_trace(watching):
        call()
    (stack,) = watching.stacks
    of_flax = [i for i, frame in enumerate(stack) if "flax" in frame.filename]
    return [f for f in stack[of_flax[-1] :] if "/qtoolkit/products/" in f.filename]


def test_ten_frames_in_six_files():
    x, dense = jnp.ones((2, 4)), nn.Dense(4)
    linear = qt.nnx.wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    variables, wrapped = dense.init(jax.random.key(0), x), qt.linen.wrap(dense)
    for call in (lambda: linear(x), lambda: wrapped.apply(variables, x)):
        way = frames(call)
        assert 0 < len(way) <= 10
        assert len({frame.filename for frame in way}) <= 6


def test_marks_are_only_in_programs_that_a_report_reads():
    """A mark around each matmul cost a tenth of what quantizing adds to tracing."""
    x, linear = jnp.ones((2, 4)), qt.nnx.wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    assert "qtoolkit_place" not in str(jax.make_jaxpr(lambda x: linear(x))(x))
    assert [product.path for product in qt.nnx.report(linear, x).quantized] == ["(model)"] * 3
