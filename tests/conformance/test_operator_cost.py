"""What the published operators cost inside `jit`: nothing beyond the casts that they name."""

import re

import jax
import jax.numpy as jnp
import pytest

import qtoolkit as qt
from qtoolkit import onnx, openvino, pypto

SAME = [
    (lambda x: qt.cast(x, "e4m3fn"), lambda x: onnx.cast(x, "FLOAT8E4M3FN")),
    (lambda x: qt.cast(x, "e5m2"), lambda x: onnx.cast(x, "FLOAT8E5M2")),
    (lambda x: qt.cast(x, "e4m3fn"), lambda x: pypto.cast(x, "e4m3fn", extended=True)),
    (lambda x: qt.cast(x, "e4m3fn", saturation="none"), lambda x: openvino.convert(x, "f8e4m3")),
    (
        lambda x: qt.fake_convert(x, 2.0, 0.5, fmt="e4m3fn"),
        lambda x: openvino.fake_convert(x, 2.0, 0.5, destination_type="f8e4m3"),
    ),
    (
        lambda x: qt.fake_convert(x, x[:1], fmt="e5m2"),
        lambda x: openvino.fake_convert(x, x[:1], destination_type="f8e5m2"),
    ),
]


def _program(function, x):
    """The optimized program, without the names and lines that it came from."""
    text = jax.jit(function).lower(x).compile().as_text()
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = re.sub(r"(?m)^\d+ .*\n", "", text)
    return re.sub(r"HloModule \S+", "HloModule", text)


@pytest.mark.quick
@pytest.mark.parametrize(("ours", "operator"), SAME)
def test_an_operator_compiles_to_the_program_of_its_cast(ours, operator):
    x = jnp.ones((8, 64), jnp.float32)
    program = _program(ours, x)
    assert _program(operator, x) == program
    assert _program(lambda x: qt.cast(x, "e4m3_ieee"), x) != program
    assert "fusion" in program
