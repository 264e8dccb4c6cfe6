"""How much the loss grows if one layer alone is quantized, for each layer."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import serializable
from qtoolkit.formats import Rules
from qtoolkit.formats.internal import plain_number
from qtoolkit.products._instruments import HIGH_PRECISION, Stored, instrumented
from qtoolkit.products._numerics import check_ran, loss_of
from qtoolkit.products._place import MODEL, Place
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._report import text_table
from qtoolkit.scaling import QArray

_STATIC: Any = {"static": True}
Kernels = tuple[tuple[str, Recipe | None], ...]  # see `LayerRecipe`


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


@dataclasses.dataclass
class _Choosing:
    """The instrument that quantizes only chosen layers.

    Attributes:
      chosen: A boolean for each path. None: quantize all, in a first run that lists the layers.
      recipes, kernels: Filled while the model runs: by the path of each layer its recipe, and its
        parameters that have another one.
    """

    chosen: dict[str, jax.Array] | None
    recipes: dict[str, Recipe] = dataclasses.field(default_factory=dict)
    kernels: dict[str, Kernels] = dataclasses.field(default_factory=dict)

    def note(self, layer: Any, place: Place, kernel: Any) -> None:
        self.recipes.setdefault(place.path, layer.recipe)
        self.kernels.setdefault(place.path, layer.kernels)

    def product(
        self, place: Place, recipe: Recipe, state: Any, compute: Any, stored: Stored
    ) -> jax.Array:
        self.recipes.setdefault(place.path, recipe)
        quantized = compute(recipe, state)
        if self.chosen is None:
            return quantized
        return jnp.where(self.chosen[place.path], quantized, compute(HIGH_PRECISION, None))


def sensitivity_of(function: Callable[..., Any], *arguments: Any) -> Sensitivity:
    """Measures each layer that runs in a pure function that returns `loss` or `(loss, aux)`."""
    loss = loss_of("sensitivity", function)
    leaves = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, QArray))
    if any(isinstance(leaf, QArray) for leaf in leaves):
        raise TypeError(
            "sensitivity: the model has stored kernels, from quantize, and no others to compare "
            "with; expected one from wrap: write sensitivity(wrap(model, recipe), ...) before "
            "quantize"
        )
    listing = _Choosing(None)
    with instrumented(listing):
        jax.eval_shape(loss, *arguments)
    paths = tuple(listing.recipes)
    check_ran("sensitivity", paths)

    def loss_with(chosen: jax.Array) -> jax.Array:
        with instrumented(_Choosing(dict(zip(paths, chosen, strict=True)))):
            return loss(*arguments).astype(jnp.float32)

    count = len(paths)
    choices = np.concatenate([np.eye(count), np.zeros((1, count)), np.ones((1, count))])
    losses = jax.lax.map(loss_with, jnp.asarray(choices, bool))
    kernels = tuple(listing.kernels.get(path, ()) for path in paths)
    return Sensitivity(losses, paths, tuple(listing.recipes.values()), kernels)
