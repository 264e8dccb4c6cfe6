"""`qtoolkit convert --rules`."""

import json

import numpy as np
import pytest
from command import run
from stored import stored

from qtoolkit.checkpoints import save
from qtoolkit.formats import Rules

MODEL = {
    "head.weight": np.ones((4, 6), np.float32),
    "norm.weight": np.ones((4, 6), np.float32),
    "up.weight": np.ones((4, 6), np.float32),
    "bias": np.ones(6, np.float32),
}


@pytest.fixture
def source(tmp_path):
    save(tmp_path / "src", MODEL, {"format": "pt"})
    return tmp_path / "src"


def written(path, text):
    path.write_text(text)
    return path


def test_rules_from_a_file(source, tmp_path):
    text = '{"rules": [["^head", null], ["norm", "F8_E5M2"]], "default": "int8"}'
    rules = written(tmp_path / "rules.json", text)
    result = run("convert", source, tmp_path / "dst", "--rules", rules, "--skip", "bias")
    assert result.exit_code == 0, result.output
    assert "dst: e5m2, int8, a scale per tensor\n" in result.stdout
    assert "quantized  2 tensors\n" in result.stdout
    assert "excluded   2 tensors (" in result.stdout
    assert "rule '^head': 1" in result.stdout
    assert "--skip: 1" in result.stdout
    found = stored(tmp_path / "dst")
    assert {name: array.dtype.name for name, array in found.items()} == {
        "head.weight": "float32",
        "norm.weight": "float8_e5m2",
        "norm.weight_scale": "float32",
        "up.weight": "int8",
        "up.weight_scale": "float32",
        "bias": "float32",
    }
    shown = run("inspect", tmp_path / "dst").stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("metadata qtoolkit: ")]
    recorded = json.loads(line.removeprefix("metadata qtoolkit: "))["rules"]
    assert Rules.from_json(json.dumps(recorded)) == Rules.from_json(text)


def test_rules_that_keep_everything(source, tmp_path):
    rules = written(tmp_path / "rules.json", '{"rules": []}')
    planned = run("convert", source, tmp_path / "dst", "--rules", rules, "--dry-run")
    assert "dst: nothing; a dry run, nothing was written\n" in planned.stdout
    result = run("convert", source, tmp_path / "dst", "--rules", rules)
    assert result.exit_code == 0, result.output
    assert "dst: nothing\n" in result.stdout
    assert "excluded   4 tensors (no rule: 4)" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "rules.json: Rules: invalid JSON (Expecting value: line 1 column 1 (char 0)); expected",
        ),
        ("[]", "rules.json: Rules: expected {"),
        ('{"rules": [["(", null]]}', "rules.json: Rules: rule '(': invalid regular expression"),
        (
            '{"rules": [["a", "e4m4"]]}',
            "rules.json: Rules: rule 'a': format: unknown format 'e4m4'",
        ),
        (
            '{"rules": [["up", "nf4"]]}',
            "Rules: rule 'up': convert: format nf4: its codes are narrow",
        ),
        ('{"rules": [["upp", "int8"]]}', "src: rule 'upp' matches nothing, expected every rule"),
    ],
)
def test_failures_are_one_line(source, tmp_path, text, message):
    rules = written(tmp_path / "rules.json", text)
    result = run("convert", source, tmp_path / "dst", "--rules", rules)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("qtoolkit: ")
    assert message in line
    assert not (tmp_path / "dst").exists()


def test_misuse(source, tmp_path):
    missing = run("convert", source, tmp_path / "dst", "--rules", tmp_path / "none")
    assert missing.exit_code == 1
    assert missing.stderr == f"qtoolkit: {tmp_path}/none: No such file or directory\n"
    rules = written(tmp_path / "rules.json", '{"rules": []}')
    both = run("convert", source, tmp_path / "dst", "--rules", rules, "--format", "int8")
    assert both.exit_code == 2
    assert "--format and --rules exclude each other" in both.stderr
