"""`numerics` and `sensitivity` of wrapped models."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qtoolkit.nnx._report import check_module, site_of
from qtoolkit.nnx._state import LsqScale
from qtoolkit.nnx._wrap import needs_no_scale, product_states
from qtoolkit.products import Numerics, Sensitivity
from qtoolkit.products.internal import Constant, Sums, check_loss, sensitivity_of, sums_of

Loss = Callable[[Any, Any], Any]


def numerics(wrapped: nnx.Module, batch: Any, loss_fn: Loss) -> Numerics:
    """What rounding does to every operand of a wrapped model's products, forward and backward.

        found = qtoolkit.nnx.numerics(wrapped, batch, loss_fn)
        print(found)
        found.plot("numerics.png")

    One step is computed, forward and backward, as the recipe rounds it; its parameters, histories
    and keys stay as they are. Compiled once for a model, a loss function and shapes.

    Args:
      wrapped: A model from `wrap`.
      batch: A pytree of arrays.
      loss_fn: From (model, batch) to a float scalar, or to (scalar, aux), as for `value_and_grad`.

    Returns:
      `Numerics`, a pytree: those of several batches add up. Sums leave the program as gradients, so
      a product that no gradient of the loss reaches (behind `jax.lax.stop_gradient`) has empty rows
      and is named in `unreached`.

    Raises:
      TypeError: `wrapped` is no `nnx.Module`; the loss is no float scalar.
      ValueError: The model is not wrapped, or the loss calls another one.

    Examples:
      >>> wrapped = qt.nnx.wrap(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), qt.recipes.te_current)
      >>> x = jnp.asarray([[448.0, 0.3, 0.0001, 0.0]])
      >>> found = qt.nnx.numerics(wrapped, x, lambda model, x: model(x).sum())
      >>> for row in found.rows:  # of three numbers that are not zero one became zero
      ...     print(row.operand, row.parts, f"{row.tally.flushed_fraction:.0%}")
      lhs forward, wgrad 33%
      rhs forward, dgrad 0%
      cotangent dgrad, wgrad 0%
    """
    check_wrapped("numerics", wrapped)
    check_loss("numerics", loss_fn, "wrapped")
    graph, state = nnx.split(wrapped)
    sums: Sums = _measured(sums_of, Constant(graph), state, Constant(loss_fn), batch)
    return sums.numerics()


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def _measured(
    measure: Callable[..., Any], graph: Constant, state: Any, loss_fn: Constant, batch: Any
) -> Any:
    def loss(state: Any, batch: Any) -> Any:
        return loss_fn.value(nnx.merge(graph.value, state, copy=True), batch)

    return measure(loss, state, batch)


def sensitivity(wrapped: nnx.Module, batch: Any, loss_fn: Loss) -> Sensitivity:
    """Ranks the layers of a wrapped model by how much quantizing each alone adds to the loss.

        found = qtoolkit.nnx.sensitivity(wrapped, batch, loss_fn)
        print(found)  # the worst first
        better = qtoolkit.nnx.wrap(model, found.rules(keep=2))

    The loss is computed once for each layer, with that layer quantized as its recipe says and all
    others wide; then once with no layer quantized, and once with all. Forward only, in one program.
    Choose a batch that is large enough for differences of the loss to mean something.

    Args:
      wrapped, batch, loss_fn: As for `numerics`.

    Returns:
      `Sensitivity`: `.ranking`, `.rules(keep)`, `.wide` and `.quantized`, the losses of the model
      plain and quantized.

    Raises:
      TypeError, ValueError: As `numerics`; the model has stored kernels, from `quantize`, whose
        original values are gone; or a learned scale has not been started.

    Examples:
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs))
      >>> wrapped = qt.nnx.wrap(model, qt.Rules({"0": qt.Recipe("int4"), "1": qt.Recipe("e4m3fn")}))
      >>> x = jax.random.normal(jax.random.key(0), (64, 8))
      >>> found = qt.nnx.sensitivity(wrapped, x, lambda m, x: ((m(x) - model(x)) ** 2).mean())
      >>> [(path, f"{added:.3f}") for path, added in found.ranking]  # the worst first
      [('layers/0', '0.029'), ('layers/1', '0.001')]
    """
    check_wrapped("sensitivity", wrapped)
    check_loss("sensitivity", loss_fn, "wrapped")
    for path, module in nnx.iter_modules(wrapped):
        scales = [] if needs_no_scale(module) else _learned_scales(module)
        if any(bool(jnp.any(jnp.isnan(scale[...]))) for scale in scales):
            where = "/".join(map(str, path)) or "the model"
            raise ValueError(
                f"sensitivity: {where} has a learned scale that has not been started, expected a "
                "number; write qtoolkit.nnx.start_scales(wrapped, batch)"
            )
    graph, state = nnx.split(wrapped)
    found: Sensitivity = _measured(sensitivity_of, Constant(graph), state, Constant(loss_fn), batch)
    return found


def _learned_scales(layer: Any) -> list[LsqScale]:
    """The learned scales of a layer's own products."""
    kept = [getattr(state, "scales", ()) for state in product_states(layer).values()]
    return [scale for scales in kept for scale in scales if scale is not None]


def check_wrapped(where: str, model: Any) -> None:
    """Raises unless `model` is an `nnx.Module` with a quantized layer."""
    check_module(where, model)
    if all(site_of(module) is None for _, module in nnx.iter_modules(model)):
        name = type(model).__name__
        raise ValueError(
            f"{where}: {name} is not wrapped, expected a model from qtoolkit.nnx.wrap; write "
            f"{where}(qtoolkit.nnx.wrap(model, recipe), ...)"
        )
