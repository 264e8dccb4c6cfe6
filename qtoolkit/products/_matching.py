"""Checks that rules name what is there: a misspelt rule must not pass in silence."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from qtoolkit.formats import Rules
from qtoolkit.products._checks import check_recipe
from qtoolkit.products._origins import Parameter
from qtoolkit.products._place import MODEL
from qtoolkit.products._recipe import Recipe


class FoundModule(NamedTuple):
    """A module of a model.

    Attributes:
      paths: "blocks/0/mlp"; several if it is shared; "" for the model itself.
      kinds: Its type and the types of the modules around it.
      name: The name of its own type.
      has_products: Whether it may compute matmuls: of modules of the user only a trace knows it.
    """

    paths: Sequence[str]
    kinds: Sequence[type]
    name: str
    has_products: bool


def kernels_as_modules(module: FoundModule, kernels: Sequence[str]) -> list[FoundModule]:
    """A module's kernels, as rules match them."""
    return [
        module._replace(paths=[Parameter(path, kernel).full_path for path in module.paths])
        for kernel in kernels
    ]


def training_rules(recipe: Any) -> Rules[Recipe]:
    """The recipes for a model to be trained, as `wrap` takes them."""
    check = functools.partial(check_recipe, "wrap")
    if not isinstance(recipe, Rules):
        return Rules((), default=check(recipe))
    rules = recipe.map(check)
    if all(value is None for _, value in rules.rules) and rules.default is None:
        raise ValueError(
            "wrap: the rules exclude every layer, expected a recipe for one or more; layers "
            "without a rule get the default, as Rules({...}, default=qtoolkit.recipes.token_scaled)"
        )
    return rules


def unused_rules(rules: Rules[Recipe], modules: Sequence[FoundModule]) -> list[str | type]:
    """The keys of rules that match nothing: no layer, or with None, or `lookups`, no module."""
    layers = [module for module in modules if module.has_products]
    return [
        key
        for key, value in rules.rules
        if Rules([(key, value)]).unused(*_matched(layers if _needs_matmul(value) else modules))
    ]


def check_rules(where: str, rules: Rules[Recipe], modules: Sequence[FoundModule]) -> None:
    for key in unused_rules(rules, modules):
        alone: Rules[Recipe] = Rules([(key, None)])
        for module in modules:
            if alone.match_index(module.paths, module.kinds) is not None:
                shown = key.__name__ if isinstance(key, type) else repr(key)
                raise ValueError(
                    f"{where}: rule {shown} matches {module.paths[0] or MODEL}, and {module.name} "
                    "has no matmul that wrap could quantize, expected a layer that has one; "
                    "remove the rule"
                )
    wanted = Rules([(key, value) for key, value in rules.rules if _needs_matmul(value)])
    wanted.check_used(where, *_matched([module for module in modules if module.has_products]))
    rules.check_used(where, *_matched(modules))


def _needs_matmul(recipe: Recipe | None) -> bool:
    """Whether a rule with this recipe needs a layer that multiplies."""
    return recipe is not None and not recipe.lookups


def _matched(modules: Sequence[FoundModule]) -> tuple[list[Sequence[str]], list[Sequence[type]]]:
    """The paths and the types that rules match."""
    return [module.paths for module in modules], [module.kinds for module in modules]
