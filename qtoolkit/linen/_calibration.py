"""`calibrate` and `freeze`: static scales for wrapped modules."""

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from qtoolkit.formats import Rules
from qtoolkit.linen._numerics import check_arguments
from qtoolkit.linen._run import key_of
from qtoolkit.linen._state import AMAX, COLLECTION
from qtoolkit.linen._wrap import wrap
from qtoolkit.products import Calibration, Recipe
from qtoolkit.products.internal import (
    Summary,
    calibration_of,
    check_calibrated,
    summary_of,
)
from qtoolkit.scaling import Bins

Model = TypeVar("Model", bound=nn.Module)


def calibrate(
    wrapped: nn.Module,
    variables: Any,
    batches: Iterable[Any],
    observer: Any = "absmax",
    **options: Any,
) -> Calibration:
    """Finds one scale for each operand of a wrapped module's products, from batches of inputs.

        found = qtoolkit.linen.calibrate(wrapped, variables, batches, "percentile")
        frozen, variables = qtoolkit.linen.freeze(wrapped, variables, found)

    As `qtoolkit.nnx.calibrate`; `wrapped.apply(variables, ...)` is called with each batch.

    Raises:
      TypeError: `wrapped` is no linen module, `variables` no dictionary with "params"; `batches` is
        one array instead of several.
      ValueError: No quantized product ran; no batches; an operand was finite in none of them, and
        the message counts them; an unknown observer.
    """
    check_arguments("calibrate", wrapped, variables)
    try:
        hash(wrapped)
    except TypeError as error:
        raise TypeError(
            f"calibrate: {type(wrapped).__name__} has an attribute that is no constant ({error}), "
            "expected a module that hashes; give it a tuple in place of an array or a list"
        ) from None
    summarize = functools.partial(_summary, wrapped, variables)
    return calibration_of(summarize, batches, observer, options)


def _summary(module: nn.Module, variables: Any, bins: Bins | None, batch: Any) -> Summary:
    return _summary_jitted(module, bins, variables, batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _summary_jitted(module: nn.Module, bins: Bins | None, variables: Any, batch: Any) -> Summary:
    def call(variables: Any, batch: Any) -> Any:
        if isinstance(batch, tuple):
            return module.apply(variables, *batch)
        if isinstance(batch, dict):
            return module.apply(variables, **batch)
        return module.apply(variables, batch)

    return summary_of(bins, call, variables, batch)


def freeze(wrapped: Model, variables: Any, calibration: Calibration) -> tuple[Model, Any]:
    """A module like `wrapped` with the scales of a calibration, and its variables.

    What it gives for an example does not depend, by a bit, on the others of its batch: see
    `qtoolkit.nnx.freeze`. The amaxes are in the collection "qtoolkit", for each product; layers
    that `nn.scan` stacks share one.

    Raises:
      TypeError: `wrapped` is no linen module, `variables` no dictionary with "params", or
        `calibration` no `Calibration`.
      ValueError: The module is not wrapped, or a product that ran was not calibrated: the message
        names it. A layer that calibration never ran raises when it runs; one of which it saw
        one operand alone, by another recipe, gives NaN.
    """
    check_arguments("freeze", wrapped, variables)
    if not isinstance(calibration, Calibration):
        raise TypeError(
            f"freeze: calibration has type {type(calibration).__name__}, expected a Calibration; "
            "write calibrate(wrapped, variables, batches)"
        )
    rules: Rules[Recipe] | None = getattr(wrapped, "qtoolkit_rules", None)
    if rules is None:
        raise ValueError(
            f"freeze: {type(wrapped).__name__} is not wrapped, expected a module from "
            "qtoolkit.linen.wrap"
        )
    check_calibrated("freeze", map(str, calibration.unreached))
    state = dict(variables.get(COLLECTION, {}))
    for path in calibration.paths:
        kept = dict(state.get(key_of(path), {}))
        for name, amax in calibration.amaxes(path).items():
            known = [(path, name, side) in calibration.keys for side in (0, 1)]
            kept[name] = {AMAX: jnp.where(jnp.array([*known, True]), amax, jnp.float32(jnp.nan))}
        state[key_of(path)] = kept
    cache = getattr(wrapped, "qtoolkit_cache", None)
    frozen = wrap(wrapped, rules.map(Recipe.frozen), kv_cache=cache)
    return frozen, {**variables, COLLECTION: state}
