"""README.md beside this file says what is true: its operators, versions and official cases."""

import inspect
import re
from pathlib import Path

import pytest

from qtoolkit import onnx, openvino, pypto

HERE = Path(__file__).parent
TEXT = (HERE / "README.md").read_text(encoding="utf-8")
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


def sections():
    """By operator: the text below its heading."""
    parts = re.split(r"^(?:### `(.+)`|## .+)$", TEXT, flags=re.MULTILINE)
    return {name: body for name, body in zip(parts[1::2], parts[2::2], strict=True) if name}


def test_every_public_function_has_its_section():
    public = {
        f"{package.__name__.removeprefix('qtoolkit.')}.{name}"
        for package in (onnx, openvino, pypto)
        for name in package.__all__
        if inspect.isfunction(getattr(package, name))
    }
    assert public == set(sections())
    assert set(OPERATORS) == public - {"pypto.cast"}


def test_official_cases_are_counted_and_those_that_deviate_are_named(monkeypatch):
    monkeypatch.syspath_prepend(HERE.parent / "onnx")
    from test_onnx_conformance import CASES, NAN_TO_FLOAT4

    named = set(re.findall(r"`(test_cast\w+)`", TEXT))
    assert named | {f"{name}_expanded" for name in named if "castlike" in name} == NAN_TO_FLOAT4
    run, deviate = sum(CASES.values()), len(NAN_TO_FLOAT4)
    words = " ".join(TEXT.split())
    assert f"{run} run, {run - deviate} pass, {deviate} deviate, none is skipped" in words


def page(operator):
    """What the section says of page and versions, and the docstring of its source."""
    package, _, name = operator.partition(".")
    line = re.search(r"^Page: (.+?)\n\n", sections()[operator], re.MULTILINE | re.DOTALL)[1]
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


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name.startswith("openvino.")])
def test_versions_of_openvino(operator, monkeypatch):
    line, source = page(operator)
    assert line == f"{OPERATORS[operator]}."
    if source.startswith("as `promoted_type`"):
        _, source = page("openvino.promoted_type")
    assert source.startswith(f"OpenVINO 2026, {OPERATORS[operator]}")
    (wheel,) = set(re.findall(r"wheel ([\d.]*\d)", TEXT))
    assert re.search(rf"wheel {re.escape(wheel)}[.,]", source)

    monkeypatch.syspath_prepend(HERE.parent / "openvino")
    import openvino_oracle as core  # loads OpenVINO without telemetry

    nodes = core.operators
    x, scalar = (nodes.parameter(shape, core.element("f32")) for shape in ([1], []))
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
