"""What both Flax packages do with a wrapped model, once: measure it, and set what it keeps.

nnx and linen say through an `Adapter` how their models are called. The state of a model is passed
as products, `Product` each, whose arrays `products._states` names.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from qtoolkit.products._calibration import (
    Calibration,
    calibration_of,
    check_calibrated,
    summary_of,
)
from qtoolkit.products._inputs import Batch, Constant
from qtoolkit.products._instruments import explained
from qtoolkit.products._learned import first_scales
from qtoolkit.products._numerics import Numerics, Sums, sums_of
from qtoolkit.products._place import MODEL
from qtoolkit.products._sensitivity import Sensitivity, sensitivity_of
from qtoolkit.products._states import LEARNED, first_values


class Adapter(Protocol):
    """A wrapped model without its arrays. Hashable: a static argument of `jax.jit`."""

    def model(self, arrays: Any) -> Any:
        """What a loss takes as its model, from the arrays of the model."""

    def call(self, arrays: Any) -> Callable[..., Any]:
        """The model as a function of its inputs."""


class Kept(NamedTuple):
    """What a model keeps for one product.

    Attributes:
      path: The path of its layer, "blocks/0/mlp".
      name: Its name in the layer.
      arrays: See `products._states`.
      may_idle: Whether the layer may be used without ever running the product, as an `Embed` that
        only looks up.
    """

    path: str
    name: str
    arrays: Any
    may_idle: bool = False


def calibrate(
    adapter: Adapter, arrays: Any, batches: Iterable[Any], observer: Any, options: dict[str, Any]
) -> Calibration:
    def summarize(bins: Any, batch: Batch) -> Any:
        with explained("calibrate"):  # some tracers escape only when `jit` ends
            return _of_batch(Constant((summary_of, bins)), adapter, arrays, batch)

    return calibration_of(summarize, batches, observer, options)


def check_calibration(calibration: Any, line: str) -> None:
    if not isinstance(calibration, Calibration):
        raise TypeError(
            f"freeze: calibration has type {type(calibration).__name__}, expected a Calibration; "
            f"write {line}"
        )


def numerics(adapter: Adapter, arrays: Any, batch: Any, loss_fn: Any, given: str) -> Numerics:
    _check_loss("numerics", loss_fn, given)
    with explained("numerics"):
        found: Sums = _of_loss(sums_of, adapter, Constant(loss_fn), arrays, batch)
    return found.numerics()


def sensitivity(
    adapter: Adapter, arrays: Any, batch: Any, loss_fn: Any, given: str, products: Iterable[Kept]
) -> Sensitivity:
    _check_loss("sensitivity", loss_fn, given)
    for product in products:
        scales = [product.arrays[name] for name in LEARNED[::2] if name in product.arrays]
        if not product.may_idle and any(bool(jnp.any(jnp.isnan(scale))) for scale in scales):
            raise ValueError(
                f"sensitivity: {product.path or MODEL} has a learned scale that has not been "
                "started, expected a number; write start_scales, as qtoolkit.nnx.start_scales("
                "wrapped, batch) or qtoolkit.linen.start_scales(wrapped, variables, batch)"
            )
    found: Sensitivity = _of_loss(sensitivity_of, adapter, Constant(loss_fn), arrays, batch)
    return found


def start_scales(
    adapter: Adapter, arrays: Any, batch: Any, products: Sequence[Kept]
) -> list[dict[str, Any]]:
    """For each product the learned scales and offsets that had no value, from one batch."""
    with explained("start_scales"):
        values = _of_batch(Constant((first_scales,)), adapter, arrays, Batch.of(batch))
    if not values:
        raise ValueError(
            "start_scales: no learned scale was used, expected a model from wrap and a recipe with "
            "Learned scaling such as qtoolkit.recipes.int4_lsq"
        )
    new, missing = [], []
    for product in products:
        measured = functools.partial(_measured, values, product)
        started, is_missing = first_values(product.arrays, measured)
        new.append(started)
        if is_missing and not product.may_idle:
            missing.append(product.path)
    check_calibrated("start_scales", dict.fromkeys(missing))
    return new


def _measured(values: Any, product: Kept, side: int) -> Any:
    return values.get((product.path, product.name, side))


def _check_loss(where: str, loss_fn: Any, given: str) -> None:
    if not callable(loss_fn):
        raise TypeError(
            f"{where}: loss_fn has type {type(loss_fn).__name__}, expected a function to a float "
            f"scalar; write {where}({given}, batch, loss_fn)"
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _of_batch(measure: Constant, adapter: Adapter, arrays: Any, batch: Batch) -> Any:
    function, *options = measure.value

    def called(arrays: Any, batch: Batch) -> Any:
        return batch.given_to(adapter.call(arrays))

    return function(*options, called, arrays, batch)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _of_loss(
    measure: Callable[..., Any], adapter: Adapter, loss_fn: Constant, arrays: Any, batch: Any
) -> Any:
    def loss(arrays: Any, batch: Any) -> Any:
        return loss_fn.value(adapter.model(arrays), batch)

    return measure(loss, arrays, batch)
