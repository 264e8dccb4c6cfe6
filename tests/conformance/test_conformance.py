"""README.md beside this file says what is true: its numbers, versions and operators."""

import inspect
import re
import subprocess
import sys

import pytest
from conformance_table import (
    HERE,
    NODE_TESTS,
    PROMOTE,
    README,
    ROWS,
    module,
    sections,
    with_numbers,
)

from qtoolkit import onnx, openvino, pypto
from qtoolkit.onnx import _types as onnx_types

TEXT = README.read_text(encoding="utf-8")
OPERATORS = {
    "onnx.cast": "Cast",
    "onnx.cast_like": "CastLike",
    "onnx.quantize_linear": "QuantizeLinear",
    "onnx.dequantize_linear": "DequantizeLinear",
    "onnx.dynamic_quantize_linear": "DynamicQuantizeLinear",
    "onnx.range": "Range",
    "onnx.bit_cast": "BitCast",
    "openvino.fake_convert": "FakeConvert-13",
    "openvino.convert": "Convert-1",
    "openvino.promoted_type": "ConvertPromoteTypes-14",
    "openvino.convert_promote_types": "ConvertPromoteTypes-14",
    "openvino.range": "Range-4",
}


def test_the_committed_numbers_are_those_of_the_tests():
    command = [sys.executable, str(HERE / "conformance_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


SHOWN = """Node tests: 9 run, 8 pass,
1 deviate.

### `onnx.cast`

| What | Oracle | Cases | Deviations |
| --- | --- | --- | --- |
| official | f8e4m3 of 2 | 7 | 1 |
| every number | the page | 3 types, 1,000 elements | none |

### `openvino.range`

| What | Oracle | Cases | Deviations |
| --- | --- | --- | --- |
| dtypes | NumPy | 144 pairs | 20 |
"""
COUNTED = {"official": ([60], [2]), "every number": ([4, 8_044_842], [])}


def test_numbers_are_put_in_their_place():
    new = with_numbers(SHOWN, {"onnx.cast": COUNTED, "openvino.range": {"dtypes": ([9], [])}})
    expected = SHOWN.replace("| 7 | 1 |", "| 60 | 2 |").replace(
        "9 run, 8 pass,\n1", "60 run, 58 pass,\n2"
    )
    expected = expected.replace("3 types, 1,000 ", "4 types, 8,044,842 ")
    assert new == expected.replace("| 144 pairs | 20 |", "| 9 pairs | none |")
    assert with_numbers(new, {"onnx.cast": COUNTED}) == new


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"official": ([60], [2])}, r"onnx.cast: rows \['official', 'every number'\], expected"),
        ({**COUNTED, "another": ([1], [])}, r"expected \['official', 'every number', 'another'\]"),
        ({**COUNTED, "every number": ([4], [])}, r"'3 types, 1,000 elements' has room for other"),
    ],
)
def test_wrong_rows_and_wrong_counts_are_named(found, message):
    with pytest.raises(AssertionError, match=message):
        with_numbers(SHOWN, {"onnx.cast": found})


def test_every_public_function_has_its_section():
    public = {
        f"{package.__name__.removeprefix('qtoolkit.')}.{name}"
        for package in (onnx, openvino, pypto)
        for name in package.__all__
        if inspect.isfunction(getattr(package, name))
    }
    assert public == set(sections(TEXT)) == set(ROWS)
    assert set(OPERATORS) == public - {"pypto.cast"}


def test_every_official_case_that_deviates_is_named():
    named = set(re.findall(r"`(test_cast\w+)`", TEXT))
    named |= {f"{name}_expanded" for name in named if "castlike" in name}
    assert named == module(NODE_TESTS).NAN_TO_FLOAT4


def page(operator):
    """What the section says of page and versions, and the docstring of its source."""
    package, _, name = operator.partition(".")
    line = re.search(r"^Page: (.+?)\n\n", sections(TEXT)[operator], re.MULTILINE | re.DOTALL)[1]
    doc = getattr({"onnx": onnx, "openvino": openvino, "pypto": pypto}[package], name).__doc__
    return " ".join(line.split()), " ".join(doc.partition("Source: ")[2].split())


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name.startswith("onnx.")])
def test_versions_of_onnx(operator):
    from onnx.defs import get_all_schemas_with_history

    line, source = page(operator)
    title = OPERATORS[operator]
    versions = sorted(
        schema.since_version
        for schema in get_all_schemas_with_history()
        if schema.domain == "" and schema.name == title
    )
    listed = ", ".join(map(str, versions))
    assert line == f"{title}. Versions: {listed}."
    assert re.match(rf"ONNX {title} {listed}[.;]", source)
    assert versions[-1] <= onnx_types.LATEST_OPSET


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name.startswith("openvino.")])
def test_versions_of_openvino(operator):
    line, source = page(operator)
    assert line == f"{OPERATORS[operator]}."
    if source.startswith("as `promoted_type`"):
        _, source = page("openvino.promoted_type")
    assert source.startswith(f"OpenVINO 2026, {OPERATORS[operator]}")
    (wheel,) = set(re.findall(r"wheel ([\d.]*\d)", TEXT))
    assert re.search(rf"wheel {re.escape(wheel)}[.,]", source)

    loaded = module(PROMOTE)  # its oracle loads OpenVINO without telemetry
    nodes = loaded.core.operators
    x, scalar = (nodes.parameter(shape, loaded.core.element("f32")) for shape in ([1], []))
    made = {
        "FakeConvert": lambda: nodes.fake_convert(x, x),
        "Convert": lambda: nodes.convert(x, "f16"),
        "ConvertPromoteTypes": lambda: nodes.convert_promote_types(x, x),
        "Range": lambda: nodes.range(scalar, scalar, scalar, "f32"),
    }
    title, _, version = OPERATORS[operator].partition("-")
    info = made[title]().get_type_info()
    assert (info.name, info.version_id) == (title, f"opset{version}")


def test_versions_of_pypto():
    line, source = page("pypto.cast")
    commits = re.findall(r"[0-9a-f]{9} \(\d{4}-\d\d-\d\d\)", line)
    assert len(commits) == 2
    assert commits == re.findall(r"[0-9a-f]{9} \(\d{4}-\d\d-\d\d\)", source)
