"""Beginners' mistakes: what each message says was got, what was expected, and the line to write.

No oracle but the reader: each row has the line to write. Mistakes in the arguments of one function
are among the tests of that function.
"""

import dataclasses
import operator
import re

import jax.numpy as jnp
import numpy as np
import pytest
from command import run
from each import each
from flax import linen as nn
from flax import nnx
from refused import refused

import qtoolkit as qt

X = jnp.ones((4, 8))


class Tensor:
    """As one of PyTorch, of a dtype that NumPy does not have; the interop tests have real ones."""

    dtype = object()
    __array__ = __dlpack__ = detach = None


def q():
    return qt.quantize(X, "int8")


def model():
    return nnx.Linear(8, 4, rngs=nnx.Rngs(0))


# By the error's class: what is done, and the line to write or the name that was meant.
TYPES = {
    "wrap a name": (lambda: qt.nnx.wrap("model"), "write qtoolkit.nnx.wrap(MLP(..."),
    "wrap a class": (lambda: qt.nnx.wrap(nnx.Linear), "write qtoolkit.nnx.wrap(Linear(..."),
    "a linen module as nnx": (lambda: qt.nnx.wrap(nn.Dense(4)), "use qtoolkit.linen.wrap"),
    "an nnx model as linen": (lambda: qt.linen.wrap(model()), "use qtoolkit.nnx.wrap"),
    "a linen class": (lambda: qt.linen.wrap(nn.Dense), "write qtoolkit.linen.wrap(Dense(..."),
    "strict": (lambda: qt.nnx.wrap(model(), strict=True), "strict=(x,), or strict={'x': x}"),
    "strict in linen": (
        lambda: qt.linen.wrap(nn.Dense(4), strict="x"), "strict=(x,), or strict={'x': x}"
    ),
    "numerics with batch and loss exchanged": (
        lambda: qt.nnx.numerics(qt.nnx.wrap(model()), lambda m, x: m(x).sum(), X),
        "write numerics(wrapped, batch, loss_fn)",
    ),
    "numerics with a loss of more arguments": (
        lambda: qt.nnx.numerics(qt.nnx.wrap(model()), X, lambda m, x, y: m(x).sum()),
        "write for a loss of more arguments numerics(wrapped, (x, y), lambda",
    ),
    "numbers to pack": (
        lambda: qt.pack(X, "e2m1fn"), "write pack(qtoolkit.encode(x, fmt), fmt)"
    ),
    "jnp.dot(q, x)": (lambda: jnp.dot(q(), X.T), "call .dequantize() first"),
    "a text for a shape": (lambda: q().reshape("abc"), "reshape('abc')"),
    "p3109 by texts": (lambda: qt.p3109("8", 3), "p3109(8, 3)"),
    "no dimension numbers": (lambda: qt.dot_general(X, X.T, None), "(((1,), (0,)), ((), ()))"),
    "subscripts of numbers": (lambda: qt.einsum([1, 2], X, X.T), "'btd,df->btf'"),
    "an axis by name": (lambda: qt.gradients.lsq_scale(X, "int8", axis="rows"), "None, an integer"),
    "a block length without a tuple": (lambda: qt.BlockFormat(element="int8", block=32), "(32,)"),
    "a tensor of PyTorch": (  # the line to write was jnp.asarray, which raises for bfloat16
        lambda: qt.cast(Tensor(), "e4m3fn"), "jax.dlpack.from_dlpack(x.detach().contiguous())"
    ),
    "a tensor of PyTorch to ONNX": (
        lambda: qt.onnx.cast(Tensor(), "FLOAT8E4M3FN"), "jax.dlpack.from_dlpack("
    ),
    "a report without inputs": (
        lambda: qt.nnx.report(qt.nnx.wrap(nnx.Sequential(model()))), "report(..., x)"
    ),
    "three operands of einsum": (
        lambda: qt.einsum("ab,bc,cd->ad", X, X.T, X),
        "qtoolkit.einsum('ac,cd->ad', qtoolkit.einsum(",
    ),
    "None for what is served": (
        lambda: qt.nnx.quantize(qt.nnx.wrap(model()), None), "write 'wrapped'"
    ),
    "None for a recipe of an einsum": (
        lambda: qt.einsum("ab,bc->ac", X, X.T, recipe=None), "write qtoolkit.Recipe(None, None)"
    ),
    "saturate in a cast": (lambda: qt.cast(X, "e4m3fn", saturate=True), "saturation='finite'"),
    "scales": (lambda: qt.quantize(X, "int8", scales=1.0), "write scale="),
    "a scale of a cast": (lambda: qt.cast(X, "e4m3fn", scale=1.0), "qtoolkit.quantize has"),
    "a keyword misspelt": (lambda: qt.fake_quantize(X, "int8", roundin="to_odd"), "'rounding'"),
    **{
        f"{operator.__name__} of a QArray": (
            lambda operator=operator: operator(q(), X), "write q.dequantize() + 1"
        )
        for operator in (operator.add, operator.sub, operator.matmul, operator.lt)
    },
    "1 - q": (lambda: 1 - q(), "write q.dequantize() + 1"),
    "abs(q)": (lambda: abs(q()), "write q.dequantize() + 1"),
}  # fmt: skip
# What stands for a recipe in `wrap`.
RECIPES = {
    "a format": ("e4m3fn", "write qtoolkit.Recipe('e4m3fn')"),
    "a preset's name": ("te_current", "write qtoolkit.recipes.te_current"),
    "an unknown format": ("e9m9", "`qtoolkit formats` lists all"),  # the line was Recipe('e9m9')
    "a misspelt format": ("e4m3nf", "did you mean 'e4m3fn'"),
    "an ambiguous format": (qt.Rules({"": "fp8"}), "'fp8' is ambiguous"),
    "a misspelt preset": ("te_curent", "did you mean qtoolkit.recipes.te_current"),
    "a format of one's own": (
        dataclasses.replace(qt.format("e4m3fn"), name="mine"), "write qtoolkit.Recipe(fmt)"
    ),
    "an unsigned format": ("uint8", "('uint8', 'int8')"),
    "a dict": ({"head": None}, "write qtoolkit.Rules({...}"),
    "None": (None, "write qtoolkit.Recipe(None, None)"),  # which excludes a layer in Rules
}  # fmt: skip
VALUES = {
    "a rule that matches nothing": (
        lambda: qt.nnx.wrap(model(), qt.Rules({"haed": None}, default=qt.Recipe())),
        "rule 'haed' matches nothing",
    ),
    "an invalid regular expression": (lambda: qt.Rules({"(": None}), "'(^|/)head/'"),
    "axes of a QArray": (lambda: q().transpose(1, 2), "expected each of them once"),
    "another size": (lambda: q().reshape(5, 5), "expected lengths whose product is 32"),
    "three operands": (lambda: qt.Recipe(("e4m3fn", "e4m3fn", "e5m2")), "(lhs, rhs)"),
    "bf8": (lambda: qt.cast(X, "bf8"), "'e5m2'"),  # was taken for hifloat8 or bfloat16
}
ATTRIBUTES = {
    "q.astype": (lambda: q().astype(jnp.float32), ".dequantize().astype"),
    "a preset misspelt": (lambda: qt.recipes.te_curent, "did you mean 'te_current'"),
    "qt.wrap": (lambda: qt.wrap, "qtoolkit.nnx.wrap or qtoolkit.linen.wrap"),
    "qt.quantise": (lambda: qt.quantise, "qtoolkit.quantize"),
    "a name of another package": (lambda: qt.nnx.cast, "qtoolkit.cast?"),
    "a name with more": (lambda: qt.nnx.wrap_model, "qtoolkit.nnx.wrap?"),
    "a misspelt name of a package": (lambda: qt.checkpoints.convrt, "qtoolkit.checkpoints.convert"),
}

# The arguments, and parts of what the command says.
COMMANDS = {
    "no such file": ("inspect nothing.safetensors", "nothing.safetensors", "No such file"),
    "fp8": ("convert a.safetensors b.safetensors --format fp8", "'fp8' is ambiguous", "'e4m3fn'"),
    "a format misspelt": ("formats e4m3nf", "unknown format 'e4m3nf'", "did you mean 'e4m3fn'"),
    "a layout for a format": (
        "convert a.safetensors b.safetensors --format gptq",
        "'gptq' is a layout that is read", "expected a format", "int4_group128",
    ),
    "format and rules": (
        "convert a.safetensors b.safetensors --format e5m2 --rules r.json",
        "--format", "--rules", "exclude",
    ),
    "another command's name": ("convrt a b", "No such command 'convrt'", "convert"),
    "not a number": ("convert a b --workers many", "--workers", "valid integer"),
    "no workers": ("convert a b --workers 0", "--workers", "1"),
    "no target": ("convert a.safetensors", "Missing argument 'DST'"),
    "an unknown option": ("inspect a.safetensors --all", "No such option", "--all"),
    "a picture for weights": ("inspect picture.safetensors", "picture.safetensors", "expected"),
}  # fmt: skip


@each(
    ("kind", "action", "hint"),
    [
        *((TypeError, *row) for row in TYPES.values()),
        *((ValueError, *row) for row in VALUES.values()),
        *((AttributeError, *row) for row in ATTRIBUTES.values()),
    ],
)
def test_a_mistake_in_python(kind, action, hint):
    with refused(kind, re.escape(hint)) as error:
        action()
    assert len(str(error.value)) < 500


@each("wrap", [lambda given: qt.nnx.wrap(model(), given), lambda g: qt.linen.wrap(nn.Dense(4), g)])
@each(("given", "hint"), RECIPES.values())
def test_what_stands_for_a_recipe(wrap, given, hint):
    refused(TypeError, "wrap: recipe .*expected a Recipe", wrap, given)
    refused(TypeError, re.escape(hint), wrap, given)


def test_an_8_bit_input_to_a_wrapped_layer():
    """The error is JAX's own."""
    with pytest.raises(Exception, match=r"x\.astype\('float32'\)"):
        qt.nnx.wrap(model())(X.astype(jnp.float8_e4m3fn))


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_at_the_command(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.safetensors").write_bytes(b"\x89PNG\r\n\x1a\n and more than eight bytes")
    words, *parts = COMMANDS[mistake]
    done = run(*words.split())
    assert done.exit_code in (1, 2)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    said = " ".join(done.output.split())
    assert [part for part in parts if part not in said] == [], said


def test_what_is_no_mistake():
    """Wrapping twice gives the new recipe; a flat state of arrays is saved as it is."""
    once = qt.nnx.wrap(model(), qt.Recipe())
    twice = qt.nnx.wrap(once, qt.recipes.token_scaled)
    fresh = qt.nnx.wrap(model(), qt.recipes.token_scaled)
    np.testing.assert_array_equal(twice(X), fresh(X))
