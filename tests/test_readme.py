"""The README's Python runs, and its comments say what comes out."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import qtoolkit as qt

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 8
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert type(names["fp8"]) is type(names["model"])
    assert names["four_bits"].dtype == jnp.uint8
    assert names["four_bits"].shape == (2,)
    assert names["small"]["dense"]["kernel"].dtype == jnp.float8_e4m3fn
    assert names["small"]["dense"]["bias"].dtype == jnp.float32


def test_the_figures_in_its_comments():
    x = jnp.asarray([0.3, 449.0, jnp.inf, jnp.nan])
    np.testing.assert_array_equal(qt.encode(x, "e4m3fn"), [42, 126, 126, 127])
    unsaturated = qt.cast(x, jnp.float8_e4m3fn, saturation="none").astype(jnp.float32)
    np.testing.assert_array_equal(unsaturated, [0.3125, 448, np.nan, np.nan])
