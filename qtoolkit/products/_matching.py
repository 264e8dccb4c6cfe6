"""Checks that rules name what is there: a misspelt rule must not pass in silence."""

from collections.abc import Sequence
from typing import NamedTuple

from qtoolkit.formats import Rules
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._taps import MODEL


class Module(NamedTuple):
    """A module of a model.

    Attributes:
      paths: "blocks/0/mlp"; several if it is shared; "" for the model itself.
      kinds: Its type and the types of the modules around it.
      name: The name of its own type.
      has_products: Whether it computes products that `wrap` can quantize.
    """

    paths: Sequence[str]
    kinds: Sequence[type]
    name: str
    has_products: bool


def check_rules(where: str, rules: Rules[Recipe], modules: Sequence[Module]) -> None:
    """Raises if a rule with a recipe matches no layer, or a rule with None matches no module."""
    layers = [module for module in modules if module.has_products]
    wanted = Rules([(key, value) for key, value in rules.rules if value is not None])
    for key in _unused(wanted, layers):
        alone: Rules[Recipe] = Rules([(key, None)])
        for module in modules:
            if alone.match_index(module.paths, module.kinds) is not None:
                shown = key.__name__ if isinstance(key, type) else repr(key)
                raise ValueError(
                    f"{where}: rule {shown} matches {module.paths[0] or MODEL}, and {module.name} "
                    "has no product that wrap could quantize, expected a layer that has one; leave "
                    "the rule out"
                )
    for part, among in ((wanted, layers), (rules, modules)):
        part.check_used(where, [m.paths for m in among], [m.kinds for m in among])


def _unused(rules: Rules[Recipe], modules: Sequence[Module]) -> tuple[str | type, ...]:
    return rules.unused([m.paths for m in modules], [m.kinds for m in modules])
