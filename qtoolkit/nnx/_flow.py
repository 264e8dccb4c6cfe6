"""Measuring wrapped models, and setting the scales that they keep."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from qtoolkit.nnx._call import Bound, bound_function, call_model
from qtoolkit.nnx._function import site_of, sites_in
from qtoolkit.nnx._modules import matmuls_of_layer
from qtoolkit.nnx._post_training import plain_model
from qtoolkit.nnx._report import check_module
from qtoolkit.nnx._state import ProductState, product_states
from qtoolkit.nnx._wrap import keep, quantizing_of, rewired
from qtoolkit.post_training.internal import input_statistics
from qtoolkit.products import Calibration, Numerics, Recipe, Sensitivity
from qtoolkit.products.internal import AMAX, Batch, Kept, Parameter, flow
from qtoolkit.scaling import QArray

Model = TypeVar("Model", bound=nnx.Module)
Loss = Callable[[Any, Any], Any]


def _call(where: str, wrapped: Any, batch: Batch) -> Bound:
    """A call of a model with a batch."""
    check_wrapped(where, wrapped)
    return bound_function(call_model, wrapped, *batch.arguments)


def _call_of_loss(where: str, wrapped: Any, batch: Any, loss_fn: Any) -> Bound:
    check_wrapped(where, wrapped)
    loss = flow.checked_loss(where, loss_fn, "wrapped")
    return bound_function(loss, wrapped, (batch,), {})


def _products(model: nnx.Module) -> list[tuple[ProductState, Kept]]:
    return [
        (state, Kept(site.path, name, state.arrays, isinstance(module, nnx.Embed)))
        for site, module in sites_in(model)
        for name, state in product_states(module).items()
    ]


def calibrate(
    wrapped: nnx.Module, batches: Iterable[Any], observer: Any = "absmax", **options: Any
) -> Any:
    """Finds one scale for each operand of a wrapped model's matmuls, from batches of inputs.

        found = qtoolkit.nnx.calibrate(wrapped, batches, "percentile", fraction=0.999)
        frozen = qtoolkit.nnx.freeze(wrapped, found)

    It observes the operands of forward matmuls that have one scale for the tensor, or a second
    scale for the tensor, as NVFP4 has (there only the amax), while the model computes as its recipe
    says. A matmul is identified by its kernel, a matmul of two activations by its place in the
    code. Compiled once per model and shape. Arrays may be sharded:
    a scale is that of the whole batch.

    Args:
      wrapped: A model from `wrap`. Its state stays as it is.
      batches: The model is called with each: as `*batch` if it is a tuple, as `**batch` if it is a
        dictionary. Arrays are traced, all else is passed as it is.
      observer: "absmax", "moving_average", "percentile" or "mse", or
        such a class of `qtoolkit.scaling`; `options` are arguments for its `of`. "hessian" takes
        the model before `wrap`, for `quantize(model, recipe, calibration, method="gptq")`.

    Returns:
      `Calibration`, a pytree of observers; for "hessian" `InputStatistics`. Those of several runs
      or devices can be merged. A matmul that runs several times in a batch (in a loop, or as layers
      that `nnx.scan` stacks) has one observer per operand.

    Raises:
      TypeError: `wrapped` is no `nnx.Module`; `batches` is one array instead of several.
      ValueError: The model is not wrapped; no batches; an operand was finite in none of them; an
        unknown observer.

    Examples:
      >>> wrapped = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_current)
      >>> batches = [jnp.asarray([[1.0, -2.0]]), jnp.asarray([[896.0, 3.0]])]
      >>> found = qt.nnx.calibrate(wrapped, batches)
      >>> found.states[0], found.states[0].scale()  # of the input: 896 / 448
      (AbsMax(e4m3fn by tensor, scales[1]: 2 seen, 0 bad), Array([2.], dtype=float32))
    """
    if observer == "hessian":
        return input_statistics(plain_model("calibrate", wrapped), batches, **options)
    check_wrapped("calibrate", wrapped)
    return flow.calibrate(
        lambda batch: _call("calibrate", wrapped, batch), batches, observer, options
    )


def freeze(wrapped: Model, calibration: Calibration) -> Model:
    """A model like `wrapped` that takes its scales of whole tensors from a calibration.

    The result for an example then does not depend, in any bit, on other examples of its batch, nor
    that for a token on later tokens, provided that XLA computes the matmuls of both batches alike.
    The amaxes are `ScalingState` variables and are saved with the model; its recipes say
    `Static()`. It can be trained; cotangents have current scales. Parameters are shared.

    A method that no batch called has no scale: a later call of it raises; `attend` of an `Embed`
    gives NaN under `jit`. If no batch called a layer of Flax, this raises.

    Raises:
      TypeError: `wrapped` is no `nnx.Module`, or `calibration` no `Calibration`.
      ValueError: The model is not wrapped, or some of its layers, or an operand of a matmul, were
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
    sites = sites_in(wrapped)
    if len({site.rules for site, _ in sites}) > 1:
        raise ValueError(
            f"freeze: {type(wrapped).__name__} holds models that were wrapped by different "
            "recipes, expected one; calibrate and freeze each"
        )
    layers = []
    for site, module in sites:
        recipe = site.rules.lookup(site.paths, site.kinds)
        recipe = recipe and (recipe.with_stored(1) if _is_stored(module) else recipe)
        if recipe and recipe.frozen().is_calibrated and matmuls_of_layer(module):
            layers.append(flow.Layer(site.path, recipe, isinstance(module, nnx.Embed)))
    line = "freeze(wrapped, qtoolkit.nnx.calibrate(wrapped, batches))"
    amaxes = flow.frozen_amaxes(calibration, line, layers)
    frozen: Any = rewired("freeze", wrapped, sites[0][0].rules.map(Recipe.frozen), None)
    for site, module in sites_in(frozen):
        found, quantizing = amaxes.get(site.path, {}), quantizing_of(site)
        traced = {}
        for name in found:
            parameter = Parameter(site.path, name.split("#")[0].split("@")[0])
            is_kernel = hasattr(module, parameter.name.split(".")[0])
            recipe = quantizing.by_rules(site.path, parameter if is_kernel else None)
            if recipe is not None:
                traced[name] = recipe, ()
        keep(module, traced, product_states(module), is_traced=not matmuls_of_layer(module))
        for name, kept in product_states(module).items():
            if name in found and AMAX in kept.arrays:
                kept.write({AMAX: jnp.broadcast_to(found[name], kept.arrays[AMAX].shape)})
    return frozen


def _is_stored(layer: nnx.Module) -> bool:
    """Whether the layer itself has a stored kernel, which needs no calibration."""
    params = (value for value in vars(layer).values() if isinstance(value, nnx.Param))
    return any(isinstance(value.get_value(), QArray) for value in params)


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
      ('qtoolkit_products', 'kernel', 'scales', 0) 1.512
      ('qtoolkit_products', 'kernel', 'scales', 1) 0.545
    """
    call, products = _call("start_scales", wrapped, Batch.of(batch)), _products(wrapped)
    new = flow.start_scales(call, [kept for _, kept in products])
    for (state, _), values in zip(products, new, strict=True):
        state.write(values)


def numerics(wrapped: nnx.Module, batch: Any, loss_fn: Loss) -> Numerics:
    """What rounding does to every operand of a wrapped model's matmuls, forward and backward.

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
      a matmul that no gradient of the loss reaches (behind `jax.lax.stop_gradient`) has empty rows
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
    return flow.numerics(_call_of_loss("numerics", wrapped, batch, loss_fn))


def sensitivity(wrapped: nnx.Module, batch: Any, loss_fn: Loss) -> Sensitivity:
    """Ranks the layers of a wrapped model by how much quantizing each alone adds to the loss.

        found = qtoolkit.nnx.sensitivity(wrapped, batch, loss_fn)
        print(found)  # the worst first
        better = qtoolkit.nnx.wrap(model, found.rules(keep=2))

    The loss is computed once for each layer, with only that layer quantized, as its recipe says;
    then once with no layer quantized, and once with all. All losses are computed in one program,
    forward only. Choose a batch that is large enough for differences of the loss to mean something.

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
    call = _call_of_loss("sensitivity", wrapped, batch, loss_fn)
    return flow.sensitivity(call, [kept for _, kept in _products(wrapped)])


def check_wrapped(where: str, model: Any) -> None:
    """Raises unless `model` is an `nnx.Module` with a quantized layer."""
    check_module(where, model)
    if all(site_of(module) is None for _, module in nnx.iter_modules(model)):
        name = type(model).__name__
        raise ValueError(
            f"{where}: {name} is not wrapped, expected a model from qtoolkit.nnx.wrap; write "
            f"{where}(qtoolkit.nnx.wrap(model, recipe), ...)"
        )
