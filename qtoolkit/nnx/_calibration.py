"""`calibrate` and `freeze`: static scales for wrapped models."""

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from qtoolkit.nnx._numerics import check_wrapped
from qtoolkit.nnx._post_training import observed_inputs
from qtoolkit.nnx._products import StatefulProducts
from qtoolkit.nnx._report import site_of
from qtoolkit.nnx._state import ProductState
from qtoolkit.nnx._wrap import (
    FoundModule,
    attach,
    is_of_flax,
    needs_no_scale,
    product_states,
)
from qtoolkit.products import Calibration
from qtoolkit.products.internal import (
    Batch,
    Constant,
    Tapped,
    calibration_of,
    check_calibrated,
    first_scales,
    summary_of,
)
from qtoolkit.scaling import Bins, QArray

Model = TypeVar("Model", bound=nnx.Module)


def calibrate(
    wrapped: nnx.Module, batches: Iterable[Any], observer: Any = "absmax", **options: Any
) -> Any:
    """Finds one scale for each operand of a wrapped model's products, from batches of inputs.

        found = qtoolkit.nnx.calibrate(wrapped, batches, "percentile", fraction=0.999)
        frozen = qtoolkit.nnx.freeze(wrapped, found)

    It observes the operands of forward products that have one scale for the tensor, or a second
    scale for the tensor, as NVFP4 has (there only the amax), while the model computes as its recipe
    says. Formats with scales per token or block need no calibration. A product in a module's own
    method is identified by its kernel, a product of two activations by its number among these.
    Compiled once per model and shape. Arrays may be sharded: a scale is that of the whole batch.

    Args:
      wrapped: A model from `wrap`. Its state stays as it is.
      batches: The model is called with each: as `*batch` if it is a tuple, as `**batch` if it is a
        dictionary. Arrays are traced, all else is passed as it is.
      observer: "absmax", "moving_average", "percentile", "mse", "entropy" or "amax_history", or
        such a class of `qtoolkit.scaling`. "hessian" is for `quantize(model, recipe, calibration,
        method="gptq")`: it takes the model before `wrap`, and observes the inputs of all kernels.
      options: Arguments for its `of`, e.g. `fraction` of `Percentile`.

    Returns:
      `Calibration`, a pytree of observers (for "hessian" `InputStatistics`); calibrations of
      several devices or runs can be merged. A product that runs several times in a batch (a shared
      layer, layers that `nnx.scan` stacks) has one observer per operand. Its amax may be too large
      by less than 12.5 %, if the amaxes of several runs are that close to each other.

    Raises:
      TypeError: `wrapped` is no `nnx.Module`; `batches` is one array instead of several.
      ValueError: The model is not wrapped; no batches; an operand was finite in none of them, and
        the message counts them; an unknown observer; a product inside of a `lax.while_loop`.

    Examples:
      >>> wrapped = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_current)
      >>> batches = [jnp.asarray([[1.0, -2.0]]), jnp.asarray([[896.0, 3.0]])]
      >>> found = qt.nnx.calibrate(wrapped, batches)
      >>> found.states[0], found.states[0].scale()  # of the input: 896 / 448
      (AbsMax(e4m3fn by tensor, scales[1]: 2 seen, 0 bad), Array([2.], dtype=float32))
    """
    if observer == "hessian":
        return observed_inputs(wrapped, batches, **options)
    check_wrapped("calibrate", wrapped)
    graph, state = nnx.split(wrapped)
    summarize = functools.partial(_summary, Constant(graph), state)
    return calibration_of(summarize, batches, observer, options)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _summary(graph: Constant, state: Any, bins: Bins | None, batch: Batch) -> Tapped:
    return summary_of(bins, functools.partial(_called, graph), state, batch)


def _called(graph: Constant, state: Any, batch: Batch) -> Any:
    # A copy: the model may write its state, which `jax.grad` closes over.
    model: Any = nnx.merge(graph.value, state, copy=True)
    return batch.given_to(model)


def freeze(wrapped: Model, calibration: Calibration) -> Model:
    """A model like `wrapped` that takes its scales of whole tensors from a calibration.

    The result for an example then does not depend, in any bit, on other examples of its batch, nor
    that for a token on later tokens, provided that XLA computes the products of both batches alike.
    The amaxes are `ScalingState` variables beside the products and are saved with the model; its
    recipes say `Static()`. It can be trained; cotangents have current scales.

    Args:
      wrapped: A model from `wrap`. It is not changed; parameters are shared.
      calibration: From `calibrate`, of this model. A method that no batch called has no scale: a
        later call of it raises; `attend` of an `Embed` gives NaN under `jit`. If no batch called a
        layer of Flax, this raises.

    Returns:
      A model of the class of `wrapped`.

    Raises:
      TypeError: `wrapped` is no `nnx.Module`, or `calibration` no `Calibration`.
      ValueError: The model is not wrapped, or some of its layers, or an operand of a product, were
        not calibrated: the message names them.

    Examples:
      >>> wrapped = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_current)
      >>> frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, [jnp.asarray([[1.0, -2.0]])]))
      >>> x = jnp.asarray([[0.3, 1.0], [0.5, 0.7]])
      >>> for model in (wrapped, frozen):  # does the second example leave the first as it is?
      ...     print(bool((model(x)[0] == model(x.at[1].multiply(100.0))[0]).all()))
      False
      True
    """
    check_wrapped("freeze", wrapped)
    if not isinstance(calibration, Calibration):
        raise TypeError(
            f"freeze: calibration has type {type(calibration).__name__}, expected a Calibration; "
            "write freeze(wrapped, qtoolkit.nnx.calibrate(wrapped, batches))"
        )
    missing = [str(place) for place in calibration.unreached]
    seen: set[int] = set()

    def frozen(_: Any, node: Any) -> Any:
        site = None if not isinstance(node, nnx.Module) else site_of(node)
        if site is None or id(node) in seen or isinstance(node, StatefulProducts):
            return node
        seen.add(id(node))
        recipe = site.recipe.frozen()
        needed = site.recipe.beside_stored(1) if _is_stored(node) else site.recipe
        if not needed.frozen().is_calibrated:
            return node
        amaxes, found = calibration.amaxes(site.path), FoundModule(node, [site.path])
        missing.extend(calibration.partly_known(site.path, needed))
        if not amaxes and is_of_flax(node) and not needs_no_scale(node):
            if all(place.path != site.path for place in calibration.unreached):
                missing.append(site.path)
            return node
        attach(node, recipe, found, names=tuple(amaxes))
        if amaxes:
            _fill(node, amaxes)
        if "dot" in amaxes:
            node.qtoolkit_dot = ProductState(recipe, (), f"{site.path}:dot")
            node.qtoolkit_dot.amax[...] = amaxes["dot"]
        return node

    model = nnx.recursive_map(frozen, wrapped, graph=True)
    check_calibrated("freeze", dict.fromkeys(missing))
    return model


def _is_stored(layer: nnx.Module) -> bool:
    """Whether the layer itself has a stored kernel, which needs no calibration."""
    params = (value for value in vars(layer).values() if isinstance(value, nnx.Param))
    return any(isinstance(value.get_value(), QArray) for value in params)


def _fill(layer: Any, amaxes: dict[str, jax.Array]) -> None:
    """Writes calibrated amaxes into the states of a layer's products."""
    for name, kept in product_states(layer).items():
        found = amaxes.get(name, jnp.zeros((3,), jnp.float32))
        kept.amax[...] = jnp.broadcast_to(found, kept.amax.shape)


def start_scales(wrapped: nnx.Module, batch: Any) -> None:
    """Sets the learned scales and offsets of a model that have not been started, from one batch.

        wrapped = qtoolkit.nnx.wrap(model, qtoolkit.recipes.int4_lsq)
        qtoolkit.nnx.start_scales(wrapped, batch)  # before the optimizer is made

    LSQ starts a scale at 2 mean(|x|) / sqrt(Qp), x being its operand, weights or activations. With
    an offset (LSQ+), scale and offset start such that the format covers the range of x and zero.
    Until then they are NaN: the model raises if it is called eagerly, and gives NaN under `jit`.
    Scales that are numbers already stay as they are.

    Args:
      wrapped: A model from `wrap`, which is changed.
      batch: What it is called with, as in `calibrate`.

    Raises:
      TypeError: `wrapped` is no `nnx.Module`.
      ValueError: The model is not wrapped or has no learned scale; or the batch does not reach one.
        Only an `Embed` whose `attend` was not called is allowed: its scales stay NaN.

    Source: arXiv:1902.08153, section 2.1; arXiv:2004.09576, section 3.2, without its search.

    Examples:
      >>> model = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.int4_lsq)
      >>> qt.nnx.start_scales(model, jnp.asarray([[1.0, -3.0]]))
      >>> for path, scale in nnx.to_flat_state(nnx.state(model, qt.nnx.LsqScale)):
      ...     print(path, f"{scale.get_value().item():.3f}")
      ('dot_general', 'products', 0, 'scales', 0) 1.512
      ('dot_general', 'products', 0, 'scales', 1) 0.545
    """
    check_wrapped("start_scales", wrapped)
    graph, state = nnx.split(wrapped)
    values = _first_jitted(Constant(graph), state, Batch.of(batch))
    if not values:
        raise ValueError(
            "start_scales: no learned scale was used, expected a recipe with Learned scaling such "
            "as qtoolkit.recipes.int4_lsq"
        )
    missing: list[str] = []
    for _, module in nnx.iter_modules(wrapped):
        site = None if isinstance(module, StatefulProducts) else site_of(module)
        if site is None:
            continue
        for name, kept in product_states(module).items():
            for side in (0, 1):
                is_started = _start(kept, side, values.get((site.path, name, side)))
                if not (is_started or needs_no_scale(module)):
                    missing.append(site.path)
    check_calibrated("start_scales", dict.fromkeys(missing))


def _start(kept: ProductState, side: int, value: jax.Array | None) -> bool:
    """Starts the scale and the offset of an operand, if it has them; False if `value` has none."""
    is_started = True
    for place, variables in enumerate((getattr(kept, "scales", ()), getattr(kept, "offsets", ()))):
        variable = variables[side] if len(variables) else None
        if variable is None or not jnp.any(jnp.isnan(variable[...])):
            continue
        if value is None or jnp.isnan(value[place]):
            is_started = False
        else:
            variable[...] = jnp.where(jnp.isnan(variable[...]), value[place], variable[...])
    return is_started


@functools.partial(jax.jit, static_argnums=0)
def _first_jitted(graph: Constant, state: Any, batch: Batch) -> Any:
    return first_scales(functools.partial(_called, graph), state, batch)
