"""How much the loss grows if one layer alone is quantized, for each layer."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import serializable
from qtoolkit.formats import Rules
from qtoolkit.formats.internal import plain_number
from qtoolkit.products._matmul import Call, Key, Matmul, Planted
from qtoolkit.products._measuring import check_ran
from qtoolkit.products._place import MODEL
from qtoolkit.products._program import Program
from qtoolkit.products._quantizing import (
    BY_RULE,
    Quantizing,
    StaticResult,
    Traced,
    compiled,
)
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._report import text_table
from qtoolkit.scaling import QArray

_STATIC: Any = {"static": True}
Kernels = tuple[tuple[str, Recipe | None], ...]  # parameters with recipes of their own


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sensitivity:
    """The loss with each layer alone quantized. A pytree.

    Attributes:
      losses: float32[layers + 2]: the loss with only layer i quantized, for each i; then the loss
        with no layer quantized; then with all.
      paths: The paths of the layers, in the order in which they run.
      recipes: Their recipes, in the same order.
      kernels: For each layer the parameters that have another recipe, with that recipe.
    """

    losses: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    recipes: tuple[Recipe, ...] = dataclasses.field(metadata=_STATIC)
    kernels: tuple[Kernels, ...] = dataclasses.field(metadata=_STATIC)

    @property
    def wide(self) -> float:
        """The loss with no layer quantized."""
        return float(self.losses[-2])

    @property
    def quantized(self) -> float:
        """The loss with all layers quantized."""
        return float(self.losses[-1])

    @property
    def ranking(self) -> tuple[tuple[str, float], ...]:
        """(path, increase of the loss if it alone is quantized), worst first; NaN is the worst."""
        costs = np.asarray(self.losses[:-2], np.float64) - self.wide
        order = np.argsort(-np.where(np.isnan(costs), np.inf, costs), kind="stable")
        return tuple((self.paths[i], float(costs[i])) for i in order)

    def rules(self, keep: int = 1) -> Rules[Recipe]:
        """Rules that quantize all layers but the `keep` worst ones.

        Each layer that ran has a rule of its own; layers that did not run are not quantized.

        Raises:
          ValueError: `keep` is no number from 0 to the number of layers; or the model was frozen.
        """
        keep = plain_number(keep)
        if type(keep) is not int or not 0 <= keep <= len(self.paths):
            raise ValueError(
                f"rules: keep={keep!r}, expected an integer from 0 to {len(self.paths)}, the "
                "number of layers"
            )
        if any(recipe.is_calibrated for recipe in self.recipes):
            raise ValueError(
                "rules: the model was frozen, and its recipes have Static() scaling, expected one "
                "that is not; write sensitivity(wrapped, batch, loss_fn) with the model from wrap"
            )
        worst = [path for path, _ in self.ranking[:keep]]
        pairs: list[tuple[str, Recipe | None]] = [(exactly(path), None) for path in worst]
        for path, recipe, kernels in zip(self.paths, self.recipes, self.kernels, strict=True):
            if path not in worst:
                pairs += [(exactly(f"{path}/{name}".strip("/")), own) for name, own in kernels]
                pairs.append((exactly(path), recipe))
        return Rules(pairs, default=None)

    def __str__(self) -> str:
        rows = [("layer", "loss added", "loss")]
        rows += [
            (path or MODEL, f"{cost:+.4g}", f"{self.wide + cost:.6g}")
            for path, cost in self.ranking
        ]
        rows += [("(none quantized)", "", f"{self.wide:.6g}")]
        rows += [("(all quantized)", f"{self.quantized - self.wide:+.4g}", f"{self.quantized:.6g}")]
        return "\n".join([*text_table(rows), *self._advice()])

    def _advice(self) -> list[str]:
        worst, cost = self.ranking[0]
        if math.isnan(self.wide):
            return ["the loss is NaN with no layer quantized: nothing can be compared"]
        if len(self.paths) == 1 or cost <= 0 or any(r.is_calibrated for r in self.recipes):
            return []
        name = worst or MODEL
        lines = [f"to keep {name} in high precision, wrap the model again by .rules(keep=1)"]
        if len(set(self.recipes)) == 1:
            lines.append(
                f"or by qtoolkit.Rules({{{exactly(worst)!r}: None}}, default=recipe), where "
                "`recipe` quantizes all layers"
            )
        return lines


def exactly(path: str) -> str:
    return f"^{re.escape(path)}$"


@dataclasses.dataclass(frozen=True, eq=False)
class _Choosing:
    """A `multiply` that quantizes only chosen layers.

    Attributes:
      chosen: A boolean for each path.
    """

    quantizing: Quantizing
    chosen: Mapping[str, jax.Array]

    def __call__(self, matmul: Matmul, call: Call, planted: Any) -> tuple[Any, None]:
        quantized, _ = self.quantizing(matmul, call, planted)
        if quantized is None:
            return None, None
        return jnp.where(self.chosen[matmul.path], quantized, call.plain()), None


def sensitivity_of(
    traced: Traced, leaves: list[Any], planted: Mapping[Key, Planted]
) -> Sensitivity:
    """Measures each layer that runs in a function that returns a loss."""
    if any(isinstance(leaf, QArray) for leaf in leaves):
        raise TypeError(
            "sensitivity: the model has stored kernels, from quantize, and no others to compare "
            "with; expected one from wrap: write sensitivity(wrap(model, recipe), ...) before "
            "quantize"
        )
    losses, static = _losses(traced, leaves, dict(planted))
    paths, recipes, kernels = zip(*static.value, strict=True)
    return Sensitivity(losses, paths, recipes, kernels)


@compiled
def _losses(traced: Traced, leaves: list[Any], planted: Mapping[Key, Planted]) -> Any:
    program = traced.program(leaves)
    multiply = traced.quantizing(observes=False, is_measured=True)
    layers = _layers(program, multiply)
    planted = multiply.replanted(program, leaves, planted)
    check_ran("sensitivity", layers)
    paths = [path for path, *_ in layers]

    def loss_with(chosen: jax.Array) -> jax.Array:
        choosing = _Choosing(multiply, dict(zip(paths, chosen, strict=True)))
        outs, _ = program.run(leaves, choosing, planted)
        return jnp.asarray(outs[0], jnp.float32)

    count = len(paths)
    choices = np.concatenate([np.eye(count), np.zeros((1, count)), np.ones((1, count))])
    losses = jax.lax.map(loss_with, jnp.asarray(choices, bool))
    return losses, StaticResult(tuple(layers))


def _layers(program: Program, multiply: Quantizing) -> list[tuple[str, Recipe, Kernels]]:
    """The layers that run quantized matmuls, with their recipes."""
    names: dict[str, dict[str, Recipe | None]] = {}
    quantized = set()
    for matmul in program.matmuls:
        recipe = multiply.recipe_of(matmul)
        if recipe is not None:
            quantized.add(matmul.path)
        of_layer = names.setdefault(matmul.path, {})
        is_left = recipe is None and multiply.reason_of(matmul) == BY_RULE
        if matmul.parameter is not None and (recipe is not None or is_left):
            of_layer[matmul.parameter.name.replace(".", "/")] = recipe
    layers: list[tuple[str, Recipe, Kernels]] = []
    for path, kernels in names.items():
        if path not in quantized:
            continue
        recipe = multiply.of_module(path)
        own = tuple((name, x) for name, x in kernels.items() if x != recipe)
        layers.append((path, recipe or Recipe((None, None), None), own))
    return layers
