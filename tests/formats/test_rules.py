"""Rules: which one decides, and what is said of those that decide nothing."""

import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys

import pytest
from refused import refused

from qtoolkit.formats import BFLOAT16, E4M3FN, E5M2, FloatFormat, Overflow, Rules, Specials, format

OWN = FloatFormat(
    name="mine",
    exponent_bits=3,
    mantissa_bits=2,
    bias=3,
    specials=Specials.NONE,
    overflow=Overflow.MAX,
)


class Layer:
    pass


class Wide(Layer):
    pass


RULES = Rules([("(^|/)head/", None), (Wide, "wide"), ("kernel$", 1), (Layer, 2)], default=3)


@pytest.mark.parametrize(
    ("path", "kind", "which", "value"),
    [
        ("head/kernel", None, 0, None),
        ("a/head/kernel", Wide, 0, None),
        ("ahead/kernel", Wide, 1, "wide"),
        ("ahead/kernel", None, 2, 1),
        ("ahead/kernel", Layer, 2, 1),
        ("kernel/bias", Layer, 3, 2),
        ("kernel/bias", None, None, 3),
        ("", Wide, 1, "wide"),
        ("", None, None, 3),
        ("kernel/bias", (int, Wide), 1, "wide"),
        (("b/bias", "head/bias"), None, 0, None),
        (("b/kernel", "head/kernel"), Wide, 0, None),
        (("b/kernel", "b/bias"), int, 2, 1),
        ((), None, None, 3),
    ],
)
def test_the_first_rule_that_matches_decides(path, kind, which, value):
    assert RULES.match_index(path, kind) == which
    assert RULES.lookup(path, kind) == value


def test_every_order_of_every_pair_against_re_search():
    """Oracle: a loop over `re.search`."""
    keys = ["^a", "b$", "a/b", r"\d", "."]
    paths = ["a/b", "b/a", "a/0/b", "x", "", "1"]
    for first in keys:
        for second in keys:
            if first == second:
                continue
            rules = Rules({first: 1, second: 2}, default=3)
            for path in paths:
                expected = 1 if re.search(first, path) else 2 if re.search(second, path) else 3
                assert rules.lookup(path) == expected


def test_rules_are_frozen_hashable_data():
    same = Rules(dict(RULES.rules), 3)
    assert (same, hash(same)) == (RULES, hash(RULES))
    assert {RULES: 1}[same] == 1
    assert same != Rules(RULES.rules)
    assert same != Rules(RULES.rules[::-1], 3)
    assert Rules(iter([("a", None)])).rules == (("a", None),)
    assert dataclasses.replace(RULES, default=4) == Rules(RULES.rules, 4)
    for other in (copy.deepcopy(RULES), pickle.loads(pickle.dumps(RULES))):
        assert other == RULES
        assert other.lookup("x/kernel") == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        RULES.default = None
    assert repr(Rules({"a": 1})) == "Rules(rules=(('a', 1),), default=None)"
    assert Rules({}).lookup("anything") is None


def test_rules_that_match_nothing_are_found():
    rules = Rules({"^a": 1, "a/b": 2, "kernle$": 3, Layer: 4, int: 5})
    assert rules.unused(["a/b", "b"]) == ("kernle$", Layer, int)  # the second is overruled, no typo
    assert rules.unused(["a/b", ("b", "a/kernle")], [None, (str, Wide)]) == (int,)
    assert rules.unused([]) == ("^a", "a/b", "kernle$", Layer, int)
    rules.check_used("f", ["a/b", "kernle"], [bool, Layer])
    with refused(ValueError, r"^f: rule 'kernle\$', rule Layer, rule int matches nothing"):
        rules.check_used("f", ["a/b"])
    with refused(ValueError, r"there is a/b, c, d and 1 more$"):
        rules.check_used("f", ["a/b", ("c", "c2"), "d", "e"])
    refused(ValueError, r"there is nothing$", rules.check_used, "f", [])
    with pytest.raises(ValueError, match="shorter"):
        rules.unused(["a", "b"], [int])


def test_map_changes_values_and_names_the_rule_that_fails():
    formats = Rules({"a": "F8_E4M3", Layer: None}, default="bf16").map(format)
    assert formats == Rules({"a": E4M3FN, Layer: None}, default=BFLOAT16)
    assert RULES.map(str) == Rules(
        [("(^|/)head/", None), (Wide, "wide"), ("kernel$", "1"), (Layer, "2")], default="3"
    )
    with refused(ValueError, r"Rules: rule Layer: format: unknown format 'e4m4'"):
        Rules({"a": "e4m3fn", Layer: "e4m4"}).map(format)
    refused(TypeError, r"Rules: default: format: got 4", Rules({}, default=4).map, format)


def test_json_round_trip():
    rules = Rules({r"(^|/)head\b": None, "ü": E5M2, "kernel$": "F8_E4M3", "b": "int5"}, "bf16")
    text = rules.to_json()
    assert json.loads(text) == {
        "default": "bfloat16",
        "rules": [[r"(^|/)head\b", None], ["ü", "e5m2"], ["kernel$", "e4m3fn"], ["b", "int5"]],
    }
    assert Rules.from_json(text) == rules.map(format)
    assert Rules.from_json(text.encode()).to_json() == text
    assert Rules.from_json('{"rules": []}') == Rules({})
    p3109 = Rules({"a": "binary8p3se"})
    assert Rules.from_json(p3109.to_json()) == p3109.map(format)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (Rules({"a": None, Layer: None}), TypeError, "Rules: rule Layer is a class, which JSON"),
        (Rules({"a": OWN}), TypeError, "Rules: rule 'a': FloatFormat.*'mine'.* cannot be written"),
        (Rules({"a": 1.5}), TypeError, "Rules: rule 'a': format: got 1.5"),
        (Rules({}, default="e4m4"), ValueError, "Rules: default: format: unknown format 'e4m4'"),
    ],
)
def test_what_json_cannot_hold(rules, error, message):
    refused(error, message, rules.to_json)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"Rules: invalid JSON \(Expecting value.*expected \{\"rules\": \[\[REGEX, NAME\]"),
        (b"\xff", "Rules: invalid JSON"),
        ("[" * 100_000, "Rules: invalid JSON"),
        ("[]", "Rules: expected"),
        ("{}", "Rules: expected"),
        ('{"rules": {"a": null}}', "Rules: expected"),
        ('{"rules": [["a"]]}', "Rules: expected"),
        ('{"rules": [[1, null]]}', "Rules: expected"),
        ('{"rules": [["a", 1]]}', "Rules: expected"),
        ('{"rules": [], "default": 1}', "Rules: expected"),
        ('{"rules": [], "fallback": null}', "Rules: expected"),
        ('{"rules": [["(", null]]}', r"Rules: rule '\(': invalid regular expression"),
        ('{"rules": [["a", "e4m4"]]}', "Rules: rule 'a': format: unknown format 'e4m4'"),
    ],
)
def test_text_that_holds_no_rules(text, message):
    refused(ValueError, message, Rules.from_json, text)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"a": 1, "a(": 2}, ValueError, r"Rules: rule 'a\(': invalid regular expression \(missing"),
        ([("a", 1), ("a", 2)], ValueError, "Rules: rule 'a' comes twice"),
        ([(Layer, 1), (Layer, 1)], ValueError, "Rules: rule Layer comes twice"),
        ({"a": [1]}, TypeError, "Rules: rule 'a': value of type list is not hashable"),
        ({1: "a"}, TypeError, "Rules: key 1 has type int, expected a string"),
        ([(re.compile("a"), 1)], TypeError, r"has type Pattern.*flags such as \(\?i\) go into it"),
        ("ab", TypeError, "Rules: got 'ab', expected a mapping or"),
        (["abc"], TypeError, r"Rules: got \['abc'\], expected a mapping or"),
        (5, TypeError, "Rules: got 5, expected a mapping or"),
    ],
)
def test_errors(rules, error, message):
    refused(error, message, Rules, rules)


def test_rules_do_not_load_jax():
    code = (
        "import sys; from qtoolkit.formats import Rules; Rules({'a': 'e5m2'}).to_json();"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
