"""Recipes as text. Oracle: equality of frozen data, and the JSON as it is documented."""

import json
import re

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

import qtoolkit as qt
from qtoolkit.casts import Projection, Stochastic
from qtoolkit.formats import BlockFormat, FloatFormat, IntFormat, Overflow, Rules, Specials
from qtoolkit.products import Current, Delayed, Hadamard, Operand, Recipe, Static, recipes

from_json, to_json = recipes.from_json, recipes.to_json
NAMES = sorted(set(recipes.__all__) - {"from_json", "to_json"})


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_presets_round_trip(name):
    recipe = getattr(recipes, name)
    text = to_json(recipe)
    assert from_json(text) == recipe
    assert hash(from_json(text.encode())) == hash(recipe)
    assert json.loads(text)["type"] == "Recipe"
    assert to_json(from_json(text)) == text


OWN = FloatFormat(
    name="mine",
    exponent_bits=3,
    mantissa_bits=3,
    bias=3,
    specials=Specials.FN,
    overflow=Overflow.NAN,
)
ONE_SCALE = st.sampled_from(["e4m3fn", "e5m2", "int8", "int4", "e2m1fn"]).map(BlockFormat.tensor)
BLOCKS = st.one_of(
    st.sampled_from(["mxfp8_e4m3", "nvfp4", "int4_group32", "deepseek_128x128"]).map(qt.spec),
    st.builds(
        BlockFormat,
        element=st.sampled_from(["e4m3fn", "e5m2", "int4", OWN, IntFormat(name="int5", bits=5)]),
        block=st.tuples(st.one_of(st.none(), st.integers(1, 64)), st.integers(1, 64)),
        axes=st.one_of(st.none(), st.sampled_from([(0, 1), (-1, 0)])),
        scale=st.sampled_from(["float32", "e8m0fnu"]),
        amax_epsilon=st.sampled_from([0.0, 1e-4]),
    ),
    st.builds(BlockFormat.token, st.just("e4m3fn"), st.integers(-2, 1)),
)
PROJECTIONS = st.builds(
    Projection,
    st.sampled_from(["nearest_even", "toward_zero"])
    | st.builds(Stochastic, st.sampled_from("ABC"), st.integers(1, 24)),
    st.sampled_from(["finite", "propagate"]),
)
SCALINGS = st.builds(Current) | st.builds(Static, st.floats(2.0**-126, 2.0**127))
ONE_SCALINGS = SCALINGS | st.builds(Current, st.booleans()) | st.just(Static(0.25, True))
INITIAL = st.none() | st.floats(2.0**-126, 2.0**127)
DELAYED = st.builds(Delayed, st.just(1024), st.integers(0, 9), st.booleans(), INITIAL)
TRANSFORMS = st.none() | st.builds(
    Hadamard, st.sampled_from([2, 16, 128]), st.none() | st.integers(0, 9)
)


@st.composite
def pairs(draw):
    transform = draw(TRANSFORMS)

    def operand():
        if transform is None and draw(st.booleans()):
            return None
        if draw(st.booleans()):
            scalings = ONE_SCALINGS if transform else ONE_SCALINGS | DELAYED
            return Operand(draw(ONE_SCALE), draw(PROJECTIONS), draw(scalings), transform)
        return Operand(draw(BLOCKS), draw(PROJECTIONS), transform=transform)

    return operand(), operand()


RECIPES = st.builds(
    Recipe,
    pairs(),
    dgrad=pairs(),
    wgrad=pairs(),
    arithmetic=st.sampled_from(["emulate", "native"]),
    axis_names=st.lists(st.sampled_from("abc"), unique=True).map(tuple),
)


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(RECIPES)
def test_any_recipe_round_trips(recipe):
    again = from_json(to_json(recipe))
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.operands == recipe.operands


def test_rules_of_recipes_round_trip():
    rules = Rules([("head|embed", None), (r"blocks/\d+", recipes.nvfp4)], recipes.mxfp8)
    again = from_json(to_json(rules))
    assert isinstance(again, Rules)
    assert again.rules == rules.rules
    assert again.default == rules.default
    assert from_json(to_json(Rules([("a", recipes.te_current)]))).default is None


def changed(path, value):
    """The text of `recipes.nvfp4` with another value at `path`."""
    data = json.loads(to_json(recipes.nvfp4))
    at = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(data)


@each(("path", "value", "where"), [
    (("colour",), 1, "recipe (Recipe) has the unknown field 'colour'"),
    (("dgrad", 0, "speck"), 1, "recipe.dgrad[0] (Operand) has the unknown field 'speck'"),
    (("forward", 1, "type"), "Operator", "recipe.forward[1] has type 'Operator'"),
    (("forward", 1, "type"), None, "recipe.forward[1] has type None"),
    (("forward", 0, "spec"), "nvfp5", "recipe.forward[0]: spec: unknown format 'nvfp5'"),
    (("forward", 1, "spec", "element"), "e9m9", "recipe.forward[1].spec: format: unknown format"),
    (("wgrad", 0, "transform", "block"), 12, "recipe.wgrad[0].transform: Hadamard: block=12"),
    (("dgrad", 0, "projection", "rounding", "bits"), 99, "recipe.dgrad[0].projection.rounding"),
    (("dgrad", 0, "scaling"), "delayed", "recipe.dgrad[0]: Operand: scaling has type str"),
    (("wgrad", 0), None, "recipe: Recipe: wgrad transforms its operands by None"),
    (("arithmetic",), "fast", "recipe: Recipe: arithmetic='fast'"),
    (("axis_names",), ["a", 1], "recipe: Recipe: axis_names=('a', 1)"),
    (("wgrad",), ["e4m3fn"], "recipe: Recipe: wgrad has 1 operands"),
    (("type",), ["Recipe"], "recipe has type ['Recipe']"),
    (("type",), "Static", "recipe (Static) has the unknown field"),
])  # fmt: skip
def test_errors_say_where(path, value, where):
    refused(ValueError, re.escape(f"from_json: {where}"), from_json, changed(path, value))


RULES = '{"type": "Rules", "rules": '


@each(("texts", "where"), [
    (("{", b"\xff", "[" * 100_000), "invalid JSON"),
    (("3", "null", "[]", '"mxfp8"', '{"type": "Hadamard"}'), "got "),
    (("{}",), "recipe has type None"),
    (('{"type": "Rules"}', RULES + '[["a"]]}', RULES + "3}"), "recipe (Rules) expected"),
    ((RULES + '[], "x": 1}',), "recipe (Rules) has the unknown field 'x'"),
    ((RULES + '[["a", {"type": "Recipe", "y": 1}]]}',), "recipe 'a' (Recipe) has the unknown fi"),
    ((RULES + '[["(", null]]}',), "recipe: Rules: rule '(': invalid"),
    ((RULES + '[["a", "e4m3fn"]]}',), "recipe 'a' is 'e4m3fn'"),
    ((RULES + '[], "default": 3}',), "recipe 'default' is 3"),
])  # fmt: skip
def test_wrong_texts(texts, where):
    for text in texts:
        refused(ValueError, re.escape(f"from_json: {where}"), from_json, text)


def test_what_has_no_text():
    refused(TypeError, "to_json: got str", to_json, "mxfp8")
    with refused(TypeError, "rule dict is a class, which JSON cannot hold"):
        to_json(Rules([(dict, recipes.mxfp8)]))


def places(data, path=()):
    """Every place in a JSON document."""
    items = enumerate(data) if isinstance(data, list) else data.items()
    for key, value in items:
        yield (*path, key)
        if isinstance(value, list | dict):
            yield from places(value, (*path, key))


@pytest.mark.sample("None", "['x']", "inf", "''", "3", "{'type': 'Recipe'}", "'x'")
@pytest.mark.parametrize(
    "value", [None, 3, 1e400, True, "x", "", [], ["x"], {}, {"type": "Recipe"}], ids=repr
)
def test_wrong_values_are_errors_of_from_json_or_harmless(value):
    for path in places(json.loads(to_json(recipes.nvfp4))):
        message = None
        try:
            found = from_json(changed(path, value))
        except ValueError as error:
            message = str(error)
        if message is None:
            assert from_json(to_json(found)) == found, path
        else:
            assert message.startswith("from_json: recipe"), path


@pytest.mark.quick
def test_a_recipe_prints_its_operands():
    recipe = Recipe(("e4m3fn", "mxfp8"), None, arithmetic="native", axis_names=("data",))
    assert repr(recipe) == (
        "<Recipe forward: (e4m3fn by tensor, current) x (mxfp8_e4m3); "
        "dgrad: unquantized x (mxfp8_e4m3); "
        "wgrad: (e4m3fn by tensor, current) x unquantized; native; scales over data>"
    )
    assert str(Recipe(None, None)) == (
        "<Recipe forward: unquantized x unquantized; dgrad: unquantized x unquantized; "
        "wgrad: unquantized x unquantized>"
    )
