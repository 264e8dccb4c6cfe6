"""`quantize`: an nnx model whose kernels are stored as codes and scales, to be served."""

from collections.abc import Mapping
from typing import Any, TypeVar

from flax import nnx

from qtoolkit.formats import Rules, SpecLike
from qtoolkit.nnx._post_training import parameter_names, plain_model, with_params
from qtoolkit.nnx._report import site_of
from qtoolkit.nnx._rewriting import adapters, original_class, product_states
from qtoolkit.nnx._wrap import FoundModule, modules_of, rewired, stacked
from qtoolkit.products import Operand, Recipe
from qtoolkit.products.internal import (
    Axes,
    einsum_axes,
    of_kernel,
    serving_rules,
    settings,
    stored_kernel,
    tuned,
)
from qtoolkit.scaling import QArray

Model = TypeVar("Model", bound=nnx.Module)


def quantize(
    model: Model,
    recipe: Recipe | Rules[Recipe] | SpecLike | None = None,
    calibration: Any = None,
    *,
    method: str = "nearest",
    sequential: bool = False,
    damping: float = 0.01,
    act_order: bool = False,
    kv_cache: SpecLike | None = None,
) -> Model:
    """A model like `model`, to be served: its kernels are 8-bit or narrower codes with scales.

        served = qtoolkit.nnx.quantize(model, qtoolkit.recipes.weight_only_e4m3)
        y = nnx.jit(served)(x)

    It computes what `wrap(model, recipe)` computes, bit for bit: kernels are rounded once, here,
    instead of in each call, and products take the codes as they are. Activations are rounded as
    `recipe` says. A float32 model takes 3.9x fewer bytes in E4M3, 7.4x in int4 by groups of 128.
    Kernels that were trained with learned scales (LSQ) are stored with these.

    It stores the kernels of `nnx.Linear`, `LinearGeneral`, `Einsum` and `Conv`, also those inside
    of attention and recurrent cells, and under `nnx.vmap` and `nnx.scan`. All other parameters stay
    as they are: biases, norms, embeddings, kernels under a mask, and parameters of modules that
    compute products by themselves, which are rounded in each call as in a wrapped model. Kernels
    that are `QArray`s already, from `qtoolkit.checkpoints.load`, are used as they are.

    With a calibration, kernels are rounded so that the matmuls lose little, not the kernels. The
    method is one of

    * "gptq", also after each of the others: "awq+gptq";
    * "awq" and "smoothquant": the channels of kernels are multiplied by factors. The norm or matmul
      before takes up their reciprocals where the model then computes the same. Elsewhere the kernel
      keeps its factors (`QArray.factors`), and its matmul divides the inputs by them;
    * "hadamard": kernels are rotated by a random Hadamard transform in blocks of up to 128
      channels, so that outliers are spread. It is folded into the matmuls, biases and tables that
      write the channels, also through RMSNorms. Elsewhere the kernel keeps it (`QArray.rotation`),
      and its matmul rotates the inputs.

    The model is run operation by operation, also through `jit`, `scan`, `while_loop`, `cond` and
    `checkpoint`; kernels of a stack, groups of convolutions and experts have inputs of their own.
    Experts and groups with fewer rows of inputs than channels are rounded to nearest, and a warning
    names them. Memory for GPTQ: channels**2 float32 numbers for each kernel.

    Args:
      model: Any `nnx.Module`. If it is from `wrap` and `recipe` is None, it keeps its recipes and
        scales. It is not changed.
      recipe: As for `wrap`. A format, "e4m3fn" or a `BlockFormat`, means kernels of that format
        with unquantized activations.
      calibration: Batches of inputs, as for `calibrate`, all of one shape; the model must not be
        wrapped then. For GPTQ that is not sequential also what `calibrate(model, batches,
        "hessian")` returns.
      method: How kernels are rounded.
      sequential: Whether GPTQ gives each layer the inputs that the quantized layers before it
        compute, so that it makes their errors good as well. One run, all batches at once. A kernel
        that is used several times is quantized at its first use.
      damping, act_order: As in `qtoolkit.scaling.gptq`.
      kv_cache: As for `wrap`.

    Returns:
      A model of the same class, or a subclass of the same name. `nnx.split`, `nnx.state`,
      `nnx.jit`, `jax.export` and orbax take it like any other: a kernel is an `nnx.Param` whose
      value is a `QArray`, a pytree. What is not stored is shared with `model`.

    Raises:
      TypeError: As `wrap`.
      ValueError: As `wrap`; no kernel is left to be stored; one holds an infinity or a NaN, is
        stored in another format than `recipe` says, has a learned scale that was not started, or a
        learned offset (LSQ+), which codes cannot hold since their zero points are integers;
        `recipe` is None and `model` is not wrapped; or the calibration is missing, reaches a kernel
        with too few rows (fewer than channels), not at all, or only with infinities and NaNs.

    Gradient: Stored kernels have none: `value_and_grad` raises, and `nnx.grad` refuses integers, so
    select other parameters, e.g. `wrt=nnx.LoRAParam`. Gradients of inputs and other parameters use
    the cotangent, rounded by the recipe, and the kernel as it is stored.

    Source: OCP FP8 and arXiv:2209.05433 (formats); arXiv:2210.17323 (groups of int4);
    arXiv:1902.08153 (learned scales).

    Examples:
      >>> model = nnx.Linear(32, 4, rngs=nnx.Rngs(0))
      >>> served = qt.nnx.quantize(model, "int4_group32")
      >>> served.kernel.get_value()
      QArray(int4_group32@0, float32[32,4]: codes uint8[32,2], scale float32[1,4])
      >>> x = jnp.ones((1, 32))
      >>> wrapped = qt.nnx.wrap(model, qt.Recipe((None, "int4_group32"), gradient=None))
      >>> bool((served(x) == wrapped(x)).all())
      True
    """
    rules = None if recipe is None else serving_rules(recipe)
    how = settings(method, calibration, sequential, damping, act_order)
    served = rewired("quantize", model, rules, kv_cache)
    made: Mapping[str, QArray] = {}
    if how.needs_inputs:
        plain = plain_model("quantize", model)
        made, params = tuned(plain, _operands(served), calibration, how)
        if params is not plain.params:
            served = rewired("quantize", with_params(model, params), rules, kv_cache)
    known: dict[Any, Any] = {}
    found = [layer for layer in modules_of(served) if site_of(layer.module) is not None]
    by_id = {place: made[name] for place, name in parameter_names(served).items() if name in made}
    stored = [_store(layer, known, recipe is not None, by_id) for layer in found]
    if not any(stored):
        names = ", ".join(layer.shown for layer in found[:3])
        raise ValueError(
            f"quantize: {type(model).__name__} has no kernel to store: the recipe leaves them "
            f"wide, or modules compute by themselves ({names}); expected nnx.Linear, "
            "LinearGeneral, Einsum or Conv with a format for its kernel, e.g. "
            "qtoolkit.recipes.weight_only_e4m3"
        )
    return served


def _operands(served: Any) -> dict[str, Operand]:
    """How each kernel that can be stored is rounded, by the name of the parameter."""
    operands: dict[str, Operand] = {}
    names = parameter_names(served)
    for layer in modules_of(served):
        module: Any = layer.module
        site = site_of(module)
        operand = None if site is None else site.recipe.forward[1]
        name = None if kernel_axes(module) is None else names.get(id(module.kernel))
        if operand is None or name is None:
            continue
        if operands.setdefault(name, operand) != operand:
            raise ValueError(
                f"quantize: {layer.shown}: the kernel is shared with another layer, {name}, whose "
                f"recipe rounds it by {operands[name]}, expected one format for a kernel that a "
                f"method quantizes, got {operand}; give both layers one recipe"
            )
    return operands


def _store(
    found: FoundModule, known: dict[Any, Any], is_asked: bool, made: Mapping[int, QArray]
) -> bool:
    """Stores the kernel of a layer, if it has one that can be stored; those of `made` as they are.

    `made` is by the `id` of the Variable. Returns whether the kernel is stored now. If the user
    gave a recipe (`is_asked`), a kernel that was stored before must have the format that it says.
    """
    layer: Any = found.module
    axes = kernel_axes(layer)
    if axes is None:
        return False
    kernel = layer.kernel
    value = kernel.get_value()
    operand = site_of(layer).recipe.forward[1]
    if isinstance(value, QArray):
        if is_asked and operand is not None:
            _check_stored(found, value, operand)
        return True
    if operand is None:
        return False
    kept = product_states(layer).get("0")
    amax, key, learned = (None, None, None) if kept is None else of_kernel(kept.arrays)
    scale: nnx.Variable[Any] | None = None
    if kept is not None and operand.is_learned:  # it becomes the scale of the codes
        scale, kept.scales[1] = kept.scales[1], None
    # Layers that share a kernel also share the stored one, if they store it in the same way.
    name = id(kernel), operand, axes, id(scale)
    if name not in known:
        where = f"quantize: {found.shown}: {type(layer).__name__}.kernel"
        states = amax, key, learned
        array = made.get(id(kernel))
        if array is None:
            array = stored_kernel(where, value, operand, axes, len(stacked(layer)), *states)
        stored = type(kernel).from_metadata(array, kernel.get_metadata())
        # Keep kernel and scale alive: an object made later could get the `id` of a freed one.
        known[name] = (kernel, scale), stored
    layer.kernel = known[name][1]
    return True


def _check_stored(found: FoundModule, kernel: QArray, operand: Operand) -> None:
    got, asked = kernel.spec.element, operand.spec.element
    if got != asked:
        raise ValueError(
            f"quantize: {found.shown}: kernel is stored in {got.name} already, expected a wide one "
            f"or one in {asked.name}, as the recipe says; quantize the model that it came from, or "
            "leave the layer alone by a rule with None"
        )


def kernel_axes(layer: Any) -> Axes | None:
    """The axes of a layer's kernel in its product, without leading axes of a stack.

    None if the layer has no attribute for its product, or multiplies something else than its
    kernel.
    """
    call: Any = original_class(type(layer)).__call__
    if not call.__module__.startswith("flax.") or adapters(layer):
        return None
    if getattr(layer, "mask", None) is not None:
        return None
    match layer:
        case nnx.Linear():
            return Axes((0,), (1,))
        case nnx.LinearGeneral():
            first = len(layer.batch_axis)
            last = first + len(layer.in_features)
            kept = range(last, last + len(layer.out_features))
            return Axes(tuple(range(first, last)), tuple(kept))
        case nnx.Einsum() if layer.einsum_str:
            return einsum_axes(layer.einsum_str, tuple(layer.kernel_shape))
        case nnx.Conv():
            spatial = tuple(range(len(layer.kernel_size)))
            return Axes((*spatial, len(spatial)), (len(spatial) + 1,))
    return None
