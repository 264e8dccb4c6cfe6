"""What both Flax packages do with a model: train, measure, calibrate and report it.

nnx and linen each say, through an `Adapter` or a `Step`, how to call a model and how to read and
write its state. `products._states` names the arrays of the state.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from qtoolkit.products._calibration import (
    Calibration,
    Summary,
    calibration_of,
    check_calibrated,
    summary_of,
)
from qtoolkit.products._calls import MeasuredStep, training_step
from qtoolkit.products._inputs import Batch
from qtoolkit.products._learned import Starting, first_scale
from qtoolkit.products._matmul import Key, Planted
from qtoolkit.products._measuring import (
    Loss,
    Measured,
    explained,
    measured_matmuls,
    numerics_of,
)
from qtoolkit.products._numerics import Numerics
from qtoolkit.products._place import MODEL, Place
from qtoolkit.products._quantizing import StaticResult, Traced, compiled
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._sensitivity import Sensitivity, sensitivity_of
from qtoolkit.products._states import LEARNED, first_values
from qtoolkit.products._step_metrics import WatchTap, measurement_zeros, metrics_of
from qtoolkit.products._stored import check_trainable


class Call(Protocol):
    """A call of a wrapped model, or a function of one, as `Program`s need it.

    `traced` is the function of arrays, `leaves` the arrays.
    """

    @property
    def traced(self) -> Traced: ...

    @property
    def leaves(self) -> list[Any]: ...

    def planted(self) -> dict[Key, Planted]: ...


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
      package: "nnx" or "linen".
      trained: The parameters by which to differentiate.
    """

    package: str
    trained: Any

    def called(self, loss: Callable[..., Any], args: Any, kwargs: Any) -> Call:
        """A call of the loss."""

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
    matmuls: dict[Key, Measured] = {}
    if metrics:
        call = step.called(loss, args, kwargs)
        matmuls = measured_matmuls(call.traced.program(call.leaves), call.traced.quantizing())
    keys = {str(Place(*key)): key for key in matmuls}

    def watched(model: Any, zeros: Any, *args: Any, **kwargs: Any) -> Any:
        given = {keys[name]: x for name, x in zeros.items()}
        measured = MeasuredStep(WatchTap(), given, model) if metrics else None
        with training_step(step.package, measured):
            return loss(model, *args, **kwargs)

    about = explained("value_and_grad: metrics=True") if metrics else nullcontext()
    with about:
        value, grads, probes, rows = step.differentiated(
            watched, measurement_zeros(matmuls), args, kwargs
        )
    results = step.finished(value, grads, probes)
    return (*results, metrics_of(matmuls, rows)) if metrics else results


def calibrate(
    call_of: Callable[[Batch], Call], batches: Iterable[Any], observer: Any, options: dict[str, Any]
) -> Calibration:
    def summarize(bins: Any, batch: Batch) -> Summary:
        call = call_of(batch)
        return summary_of(call.traced, bins, call.leaves, call.planted())

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
    missing: list[str] = []
    for layer in layers:
        missing.extend(calibration.partly_known(layer.path, layer.recipe))
        if not layer.may_idle and layer.path not in amaxes:
            missing.append(layer.path)
    check_calibrated("freeze", dict.fromkeys(missing))
    return amaxes


def numerics(call: Call) -> Numerics:
    return numerics_of(call.traced, call.leaves, call.planted())


def sensitivity(call: Call, products: Iterable[Kept]) -> Sensitivity:
    for product in products:
        scales = [product.arrays[name] for name in LEARNED[::2] if name in product.arrays]
        if not product.may_idle and any(bool(jnp.any(jnp.isnan(scale))) for scale in scales):
            raise ValueError(
                f"sensitivity: {product.path or MODEL} has a learned scale that has not been "
                "started, expected a number; write start_scales, as qtoolkit.nnx.start_scales("
                "wrapped, batch) or qtoolkit.linen.start_scales(wrapped, variables, batch)"
            )
    return sensitivity_of(call.traced, call.leaves, call.planted())


def start_scales(call: Call, products: Sequence[Kept]) -> list[dict[str, Any]]:
    """For each matmul the learned scales and offsets that had no value, from one batch."""
    seen, static = _seen_to_start(call.traced, call.leaves, call.planted())
    values = {
        (*key, side): first_scale(seen[key].largest[side], seen[key].total[side], operand)
        for key, side, operand in static.value
    }
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


@compiled
def _seen_to_start(traced: Traced, leaves: list[Any], planted: Any) -> Any:
    program = traced.program(leaves)
    multiply = traced.quantizing(observes=False, is_measured=True)
    planted = multiply.replanted(program, leaves, planted)
    _, seen = program.run(leaves, Starting(multiply), planted)
    operands = {
        (matmul.key, side, operand): None
        for matmul in program.matmuls
        if (recipe := multiply.recipe_of(matmul)) is not None
        for side, operand in enumerate(recipe.forward)
        if operand is not None and operand.is_learned
    }
    return seen, StaticResult(tuple(operands))


def _measured(values: Any, product: Kept, side: int) -> Any:
    return values.get((product.path, product.name, side))


def checked_loss(where: str, loss_fn: Any, given: str) -> Callable[..., Any]:
    """A loss, which must be a float scalar, as a function of (model, batch)."""
    if not callable(loss_fn):
        raise TypeError(
            f"{where}: loss_fn has type {type(loss_fn).__name__}, expected a function to a float "
            f"scalar; write {where}({given}, batch, loss_fn)"
        )
    with suppress(ValueError):  # of a function of C, which has no signature
        first = given.split(", ")[-1]
        try:
            inspect.signature(loss_fn).bind(first, "batch")
        except TypeError as error:
            raise TypeError(
                f"{where}: loss_fn is called as loss_fn({first}, batch), and {error}; write for a "
                f"loss of more arguments {where}({given}, (x, y), lambda {first}, batch: "
                f"loss({first}, *batch))"
            ) from None
    return Loss(where, loss_fn)
