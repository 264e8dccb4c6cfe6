"""Beginners' mistakes: what each message says was got, what was expected, and the line to write.

No oracle but the reader: each row names the three parts, and a message lacks none of them. Mistakes
in the arguments of one function are among the tests of that function.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import run
from flax import linen as nn
from flax import nnx

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


def gradient(function):
    return jax.grad(lambda x: function(x).astype(jnp.float32).sum())(X)


# What is done, the error's class, what was got, what is expected, and what to write.
PYTHON = {
    "wrap a name": (
        lambda: qt.nnx.wrap("model"), TypeError,
        "has type str", "expected an nnx.Module", "write qtoolkit.nnx.wrap(MLP(...",
    ),
    "wrap a class": (
        lambda: qt.nnx.wrap(nnx.Linear), TypeError,
        "has type ModuleMeta", "expected an nnx.Module", "write qtoolkit.nnx.wrap(Linear(...",
    ),
    "wrap a linen module as nnx": (
        lambda: qt.nnx.wrap(nn.Dense(4)), TypeError,
        "has type Dense", "expected an nnx.Module", "use qtoolkit.linen.wrap",
    ),
    "wrap an nnx model as linen": (
        lambda: qt.linen.wrap(model()), TypeError,
        "has type Linear", "expected an instance of flax.linen.Module", "use qtoolkit.nnx.wrap",
    ),
    "wrap a linen class": (
        lambda: qt.linen.wrap(nn.Dense), TypeError,
        "has type type", "expected an instance of", "write qtoolkit.linen.wrap(Dense(...",
    ),
    "a format for a recipe": (
        lambda: qt.nnx.wrap(model(), "e4m3fn"), TypeError,
        "recipe has type str", "expected a Recipe", "write qtoolkit.Recipe('e4m3fn')",
    ),
    "a preset's name for a recipe": (
        lambda: qt.nnx.wrap(model(), "te_current"), TypeError,
        "recipe has type str", "expected a Recipe", "write qtoolkit.recipes.te_current",
    ),
    "an unknown format for a recipe": (  # the line to write was Recipe('e9m9')
        lambda: qt.nnx.wrap(model(), "e9m9"), TypeError,
        "unknown format 'e9m9'", "expected a Recipe, e.g. qtoolkit.Recipe('e4m3fn')", "lists all",
    ),
    "a misspelt format for a recipe": (
        lambda: qt.linen.wrap(nn.Dense(4), "e4m3nf"), TypeError,
        "unknown format 'e4m3nf'", "expected a Recipe", "did you mean 'e4m3fn'",
    ),
    "an ambiguous format for a recipe": (
        lambda: qt.nnx.wrap(model(), qt.Rules({"": "fp8"})), TypeError,
        "rule '': wrap: recipe has type str", "expected a Recipe", "'fp8' is ambiguous",
    ),
    "a misspelt preset for a recipe": (
        lambda: qt.nnx.wrap(model(), "te_curent"), TypeError,
        "recipe has type str", "expected a Recipe", "did you mean qtoolkit.recipes.te_current",
    ),
    "a format of one's own for a recipe": (
        lambda: qt.nnx.wrap(model(), dataclasses.replace(qt.format("e4m3fn"), name="mine")),
        TypeError, "recipe has type FloatFormat", "expected a Recipe", "write qtoolkit.Recipe(fmt)",
    ),
    "an unsigned format for a recipe": (
        lambda: qt.nnx.wrap(model(), "uint8"), TypeError,
        "recipe has type str", "no negative numbers", "('uint8', 'int8')",
    ),
    "strict without inputs": (
        lambda: qt.nnx.wrap(model(), strict=True), TypeError,
        "strict has type bool", "expected inputs", "write strict=(x,), or strict={'x': x}",
    ),
    "strict without inputs in linen": (
        lambda: qt.linen.wrap(nn.Dense(4), strict="x"), TypeError,
        "strict has type str", "expected inputs", "write strict=(x,), or strict={'x': x}",
    ),
    "numerics with batch and loss exchanged": (
        lambda: qt.nnx.numerics(qt.nnx.wrap(model()), lambda m, x: m(x).sum(), X), TypeError,
        "loss_fn has type", "expected a function", "write numerics(wrapped, batch, loss_fn)",
    ),
    "numerics with a loss of more arguments": (
        lambda: qt.nnx.numerics(qt.nnx.wrap(model()), X, lambda m, x, y: m(x).sum()), TypeError,
        "is called as loss_fn(wrapped, batch)", "missing a required argument: 'y'",
        "write for a loss of more arguments numerics(wrapped, (x, y), lambda",
    ),
    "a dict for rules": (
        lambda: qt.nnx.wrap(model(), {"head": None}), TypeError,
        "recipe has type dict", "expected a Recipe or Rules", "write qtoolkit.Rules({...}",
    ),
    "a rule that matches nothing": (
        lambda: qt.nnx.wrap(model(), qt.Rules({"haed": None}, default=qt.Recipe())), ValueError,
        "rule 'haed' matches nothing", "expected every rule", "there is '' (the whole)",
    ),
    "an invalid regular expression": (
        lambda: qt.Rules({"(": None}), ValueError,
        "rule '(': invalid", "expected one such as '(^|/)head/'", "write special characters with",
    ),
    "a preset misspelt": (
        lambda: qt.recipes.te_curent, AttributeError,
        "no recipe 'te_curent'", "Expected one of", "did you mean 'te_current'",
    ),
    "qt.wrap": (
        lambda: qt.wrap, AttributeError,
        "'wrap'", "did you mean", "qtoolkit.nnx.wrap or qtoolkit.linen.wrap",
    ),
    "qt.quantise": (
        lambda: qt.quantise, AttributeError,
        "'quantise'", "did you mean", "qtoolkit.quantize",
    ),
    "numbers to pack": (
        lambda: qt.pack(X, "e2m1fn"), TypeError,
        "got dtype float32", "expected uint8", "write pack(qtoolkit.encode(x, fmt), fmt)",
    ),
    "q + 1": (
        lambda: q() + 1, TypeError,
        "got an operator", "expected .dequantize() first", "write q.dequantize() + 1",
    ),
    "1 - q": (
        lambda: 1 - q(), TypeError,
        "got an operator", "expected .dequantize() first", "write q.dequantize() + 1",
    ),
    "q @ x": (
        lambda: q() @ X.T, TypeError,
        "got an operator", "expected .dequantize() first", "write q.dequantize() + 1",
    ),
    "abs(q)": (
        lambda: abs(q()), TypeError,
        "got an operator", "expected .dequantize() first", "write q.dequantize() + 1",
    ),
    "q < 1": (
        lambda: q() < 1, TypeError,
        "got an operator", "expected .dequantize() first", "write q.dequantize() + 1",
    ),
    "jnp.dot(q, x)": (
        lambda: jnp.dot(q(), X.T), TypeError,
        "QArray", "where an array is expected", "call .dequantize() first",
    ),
    "q.astype": (
        lambda: q().astype(jnp.float32), AttributeError,
        "QArray has no attribute 'astype'", "write", ".dequantize().astype",
    ),
    "axes of a QArray": (
        lambda: q().transpose(1, 2), ValueError,
        "transpose(1, 2)", "expected each of them once", "2 axes",
    ),
    "a text for a shape": (
        lambda: q().reshape("abc"), TypeError,
        "reshape('abc')", "expected integers", "QArray",
    ),
    "another size": (
        lambda: q().reshape(5, 5), ValueError,
        "reshape(5, 5)", "expected lengths whose product is 32", "may be -1",
    ),
    "p3109 by texts": (
        lambda: qt.p3109("8", 3), TypeError,
        "bits='8'", "expected an integer", "p3109(8, 3)",
    ),
    "no dimension numbers": (
        lambda: qt.dot_general(X, X.T, None), TypeError,
        "dimension_numbers=None", "expected the contracted", "(((1,), (0,)), ((), ()))",
    ),
    "subscripts of numbers": (
        lambda: qt.einsum([1, 2], X, X.T), TypeError,
        "subscripts=[1, 2]", "expected a text", "'btd,df->btf'",
    ),
    "an axis by name": (
        lambda: qt.gradients.lsq_scale(X, "int8", axis="rows"), TypeError,
        "axis='rows'", "expected None, an integer", "lsq_scale",
    ),
    "a block length without a tuple": (
        lambda: qt.BlockFormat(element="int8", block=32), TypeError,
        "block=32", "expected a tuple", "e.g. (32,)",
    ),
    "three operands": (
        lambda: qt.Recipe(("e4m3fn", "e4m3fn", "e5m2")), ValueError,
        "forward has 3 operands", "expected two", "(lhs, rhs)",
    ),
    "an 8-bit input to a wrapped layer": (
        lambda: qt.nnx.wrap(model())(X.astype(jnp.float8_e4m3fn)), Exception,  # JAX's own
        "float8_e4m3fn", "8-bit floats do not support implicit promotion", "x.astype('float32')",
    ),
    "a tensor of PyTorch": (  # the line to write was jnp.asarray, which raises for bfloat16
        lambda: qt.cast(Tensor(), "e4m3fn"), TypeError,
        "x has", "expected an array", "jax.dlpack.from_dlpack(x.detach().contiguous())",
    ),
    "a tensor of PyTorch to ONNX": (
        lambda: qt.onnx.cast(Tensor(), "FLOAT8E4M3FN"), TypeError,
        "x has", "expected an array", "jax.dlpack.from_dlpack(",
    ),
    "a report without inputs": (
        lambda: qt.nnx.report(qt.nnx.wrap(nnx.Sequential(model()))), TypeError,
        "called without inputs", "expected those of its call", "report(..., x)",
    ),
    "a name of another package": (
        lambda: qt.nnx.cast, AttributeError,
        "'qtoolkit.nnx' has no attribute 'cast'", "did you mean", "qtoolkit.cast?",
    ),
    "a name with more": (
        lambda: qt.nnx.wrap_model, AttributeError,
        "has no attribute 'wrap_model'", "did you mean", "qtoolkit.nnx.wrap?",
    ),
    "a misspelt name of a package": (
        lambda: qt.checkpoints.convrt, AttributeError,
        "has no attribute 'convrt'", "did you mean", "qtoolkit.checkpoints.convert?",
    ),
    "three operands of einsum": (
        lambda: qt.einsum("ab,bc,cd->ad", X, X.T, X), TypeError,
        "got 3 operands", "expected two", "qtoolkit.einsum('ac,cd->ad', qtoolkit.einsum(",
    ),
    "None for a recipe": (  # which excludes a layer in Rules, and quantized here
        lambda: qt.nnx.wrap(model(), None), TypeError,
        "recipe is None", "expected a Recipe", "omit it for E4M3",
    ),
    "None for a recipe in linen": (
        lambda: qt.linen.wrap(nn.Dense(4), None), TypeError,
        "recipe is None", "expected a Recipe", "write qtoolkit.Recipe(None, None)",
    ),
    "None for a recipe of an einsum": (
        lambda: qt.einsum("ab,bc->ac", X, X.T, recipe=None), TypeError,
        "recipe is None", "expected a Recipe", "write qtoolkit.Recipe(None, None)",
    ),
    "None for what is served": (
        lambda: qt.nnx.quantize(qt.nnx.wrap(model()), None), TypeError,
        "recipe is None", "expected a Recipe", "write 'wrapped'",
    ),
    "saturate in a cast": (
        lambda: qt.cast(X, "e4m3fn", saturate=True), TypeError,
        "no argument 'saturate'", "write", "saturation='finite'",
    ),
    "scales": (
        lambda: qt.quantize(X, "int8", scales=1.0), TypeError,
        "no argument 'scales'", "write", "scale=",
    ),
    "a scale of a cast": (
        lambda: qt.cast(X, "e4m3fn", scale=1.0), TypeError,
        "no argument 'scale'", "has", "qtoolkit.quantize",
    ),
    "a keyword misspelt": (
        lambda: qt.fake_quantize(X, "int8", roundin="to_odd"), TypeError,
        "no argument 'roundin'", "did you mean", "'rounding'",
    ),
    "bf8": (  # was taken for hifloat8 or bfloat16
        lambda: qt.cast(X, "bf8"), ValueError,
        "unknown format 'bf8'", "did you mean", "'e5m2'",
    ),
}  # fmt: skip

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


@pytest.mark.parametrize("mistake", PYTHON)
def test_a_mistake_in_python(mistake):
    action, kind, *parts = PYTHON[mistake]
    with pytest.raises(kind) as error:
        action()
    message = str(error.value)
    assert [part for part in parts if part not in message] == [], message
    assert len(message) < 500


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
