"""What a program compiled for an H100 does with a weight."""

import re

import pytest
from test_native_fp8_compile import MLP, RECIPES, compiled

from qtoolkit.products._compiled import Program


@pytest.mark.parametrize("name", [*RECIPES, "token_scaled"])
def test_no_wide_copy_of_a_weight(name):
    """Nothing that reads the weight writes 16 or 32 bits for each of its elements."""
    _, k, n = MLP["up"]
    program = Program(compiled("cuBLASLt chosen", name, MLP["up"]))
    weights = {
        one.name
        for one in program.computations[program.entry]
        if one.op == "parameter" and one.rest.startswith("1)")
    }
    readers = 0
    for one in program.computations[program.entry]:
        if not weights.intersection(one.operands):
            continue
        if one.op == "bitcast":
            weights.add(one.name)
            continue
        readers += 1
        written = re.findall(r"\b(bf16|f16|f32|u16|u32)\[([\d,]+)\]", one.type)
        assert not [dims for _, dims in written if dims in (f"{k},{n}", f"{n},{k}")], one
    assert readers >= 1
