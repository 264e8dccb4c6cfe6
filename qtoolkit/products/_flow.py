"""What both Flax packages do with a model: train, measure, calibrate and report it.

nnx and linen each say, through an `Adapter` or a `Step`, how to call a model and how to read and
write its state. `products._states` names the arrays of the state.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from qtoolkit.products._calibration import (
    Calibration,
    calibration_of,
    check_calibrated,
    summary_of,
)
from qtoolkit.products._forward_state import without_forward_updates
from qtoolkit.products._inputs import Batch, Constant
from qtoolkit.products._instruments import explained
from qtoolkit.products._learned import first_scales
from qtoolkit.products._numerics import Measurements, Numerics, measure
from qtoolkit.products._place import MODEL
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._report import Report, lacks_history, report_of
from qtoolkit.products._sensitivity import Sensitivity, sensitivity_of
from qtoolkit.products._states import LEARNED, first_values
from qtoolkit.products._step_metrics import (
    measured_matmuls,
    measurement_zeros,
    measuring_step,
    metrics_of,
)
from qtoolkit.products._stored import check_trainable


class Adapter(Protocol):
    """A wrapped model without its arrays. Hashable: a static argument of `jax.jit`."""

    def model(self, arrays: Any) -> Any:
        """What a loss takes as its model, from the arrays of the model."""

    def call(self, arrays: Any) -> Callable[..., Any]:
        """The model as a function of its inputs."""


class Kept(NamedTuple):
    """What a model keeps for one matmul.

    Attributes:
      path: The path of its layer, "blocks/0/mlp".
      name: Its name in the layer.
      arrays: See `products._states`.
      may_idle: Whether the layer may be used without ever running the matmul, as an `Embed` that
        only looks up.
    """

    path: str
    name: str
    arrays: Any
    may_idle: bool = False


class Step(Protocol):
    """One training step of a wrapped model, which `value_and_grad` runs.

    Attributes:
      trained: The parameters by which to differentiate.
    """

    trained: Any

    def pure(self, loss: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
        """The loss as a function of (arrays, *args, **kwargs), and the arrays of the model."""

    def differentiated(
        self, loss: Callable[..., Any], zeros: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any, Any, Any]:
        """(value, gradients, gradients of the probes, gradients of `zeros`).

        Args:
          loss: A function of (model, zeros, *args, **kwargs).
        """

    def finished(self, value: Any, grads: Any, probes: Any) -> tuple[Any, ...]:
        """Updates the state by the gradients of the probes. Returns what the user gets."""


def value_and_grad(
    step: Step, loss: Callable[..., Any], args: Any, kwargs: Any, *, metrics: bool
) -> tuple[Any, ...]:
    check_trainable(step.trained)
    products = {}
    if metrics:
        batch = Batch.of((args, kwargs))
        function, arrays = step.pure(loss)
        products = measured_matmuls(batch.bound(function), arrays, batch.arrays)

    def watched(model: Any, zeros: Any, *args: Any, **kwargs: Any) -> Any:
        with measuring_step(products, zeros) if metrics else nullcontext():
            return loss(model, *args, **kwargs)

    about = explained("value_and_grad: metrics=True") if metrics else nullcontext()
    with without_forward_updates(), about:
        value, grads, probes, rows = step.differentiated(
            watched, measurement_zeros(products), args, kwargs
        )
    results = step.finished(value, grads, probes)
    return (*results, metrics_of(products, rows)) if metrics else results


def calibrate(
    adapter: Adapter, arrays: Any, batches: Iterable[Any], observer: Any, options: dict[str, Any]
) -> Calibration:
    def summarize(bins: Any, batch: Batch) -> Any:
        with explained("calibrate"):  # some tracers escape only when `jit` ends
            return _of_batch(Constant((summary_of, bins)), adapter, arrays, batch)

    return calibration_of(summarize, batches, observer, options)


class Layer(NamedTuple):
    """What `freeze` has to know of a layer.

    Attributes:
      path: The path of the layer.
      recipe: The recipe of the operands that need a calibrated scale.
      may_idle: Whether it may be used although it ran in no batch.
    """

    path: str
    recipe: Recipe
    may_idle: bool


def frozen_amaxes(
    calibration: Calibration, line: str, layers: Iterable[Layer] = ()
) -> dict[str, dict[str, jax.Array]]:
    """For each layer the calibrated amaxes of its matmuls, by path and name.

    Args:
      line: What to write to get a calibration, for the message.
      layers: The layers of the model, if they are known before it runs.
    """
    if not isinstance(calibration, Calibration):
        raise TypeError(
            f"freeze: calibration has type {type(calibration).__name__}, expected a Calibration; "
            f"write {line}"
        )
    amaxes = {path: calibration.amaxes(path) for path in calibration.paths}
    missing = [str(place) for place in calibration.unreached]
    unreached = {place.path for place in calibration.unreached}
    for layer in layers:
        missing.extend(calibration.partly_known(layer.path, layer.recipe))
        if not layer.may_idle and layer.path not in amaxes and layer.path not in unreached:
            missing.append(layer.path)
    check_calibrated("freeze", dict.fromkeys(missing))
    return amaxes


def report(
    function: Callable[..., Any], arrays: Any, inputs: Any, layers: Iterable[tuple[str, list[Any]]]
) -> Report:
    """Reports on `function(arrays, *args, **options)`.

    Args:
      inputs: (args, options).
      layers: The paths of the layers that have a recipe, with the histories of their matmuls.
    """
    batch, layers = Batch.of(inputs), [(path or MODEL, histories) for path, histories in layers]
    unstarted = {path for path, histories in layers if lacks_history(histories)}
    paths = tuple(dict.fromkeys(path for path, _ in layers))
    return report_of(batch.bound(function), (arrays, batch.arrays), paths, unstarted)


def numerics(adapter: Adapter, arrays: Any, batch: Any, loss_fn: Any, given: str) -> Numerics:
    _check_loss("numerics", loss_fn, given)
    with explained("numerics"):
        measured: Measurements = _of_loss(measure, adapter, Constant(loss_fn), arrays, batch)
    return measured.numerics()


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
    """For each matmul the learned scales and offsets that had no value, from one batch."""
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
