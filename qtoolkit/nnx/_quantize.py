"""`quantize`: an nnx model whose kernels are stored as codes and scales, to be served."""

from collections.abc import Mapping
from typing import Any, TypeVar

from flax import nnx

from qtoolkit.formats import Rules, SpecLike
from qtoolkit.nnx._modules import FoundModule, modules_of
from qtoolkit.nnx._post_training import parameter_names, plain_model, with_params
from qtoolkit.nnx._report import site_of
from qtoolkit.nnx._rewriting import adapters, original_class, product_states
from qtoolkit.nnx._wrap import rewired, stacked
from qtoolkit.products import Operand, Recipe
from qtoolkit.products.internal import (
    Axes,
    PlainModel,
    einsum_axes,
    flow,
    of_kernel,
    serving_rules,
    settings,
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
    instead of in each call, and matmuls take the codes as they are. Activations are rounded as
    `recipe` says. A float32 model takes 3.9x fewer bytes in E4M3, 7.4x in int4 by groups of 128.
    Kernels that were trained with learned scales (LSQ) are stored with these.

    It stores the kernels of `nnx.Linear`, `LinearGeneral`, `Einsum` and `Conv`, also those inside
    of attention and recurrent cells, and under `nnx.vmap` and `nnx.scan`. All other parameters stay
    as they are: biases, norms, embeddings, kernels under a mask, and parameters of modules that
    compute matmuls by themselves, which are rounded in each call as in a wrapped model. Kernels
    that are `QArray`s already, from `qtoolkit.checkpoints.load`, are used as they are.

    With a calibration, kernels are rounded so that the matmuls lose little, not the kernels: the
    method is one of "gptq"; "awq" and "smoothquant", which multiply the channels of kernels by
    factors that the norm or matmul before takes up (kernels before which nothing can are rounded
    without, and a warning names them); "awq+gptq" and "smoothquant+gptq". The model is run
    operation by operation, also through `jit`, `scan` and `checkpoint`; kernels of a stack have
    inputs of their own. Convolutions with groups, and matmuls inside of a `while_loop`, must be
    excluded by a rule. Memory for GPTQ: channels**2 float32 numbers for each kernel.

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
        compute, so that it makes their errors good as well. One run, all batches at once.
      damping, act_order: As in `qtoolkit.scaling.gptq`.
      kv_cache: As for `wrap`.

    Returns:
      A model of the same class, or a subclass of the same name. `nnx.split`, `nnx.state`,
      `nnx.jit`, `jax.export` and orbax take it like any other: a kernel is an `nnx.Param` whose
      value is a `QArray`, a pytree. What is not stored is shared with `model`.

    Raises:
      TypeError: As `wrap`.
      ValueError: As `wrap`; there is no kernel to store; one holds an infinity or a NaN, is
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
    how = settings(method, calibration, sequential, damping, act_order)
    served = _Served(model, None if recipe is None else serving_rules(recipe), kv_cache)
    if not flow.quantize(served, calibration, how):
        names = ", ".join(layer.shown for layer in served.layers()[:3])
        raise ValueError(
            f"quantize: {type(model).__name__} has no kernel to store: the recipe leaves them "
            f"unquantized, or modules compute by themselves ({names}); expected nnx.Linear, "
            "LinearGeneral, Einsum or Conv with a format for its kernel, e.g. "
            "qtoolkit.recipes.weight_only_e4m3"
        )
    return served.model


class _Served:
    """A copy of an nnx model that gets stored kernels, see `products._flow.Served`."""

    def __init__(self, model: Any, rules: Rules[Recipe] | None, kv_cache: Any) -> None:
        self.original, self.rules, self.kv_cache = model, rules, kv_cache
        self.model = rewired("quantize", model, rules, kv_cache)

    def plain(self) -> PlainModel:
        return plain_model("quantize", self.original)

    def take(self, params: Mapping[str, Any]) -> None:
        changed = with_params(self.original, params)
        self.model = rewired("quantize", changed, self.rules, self.kv_cache)

    def layers(self) -> list[FoundModule]:
        return [layer for layer in modules_of(self.model) if site_of(layer.module) is not None]

    def kernels(self) -> list[tuple[list[Any], flow.Kernel]]:
        """The kernels, each with the layers that store it in the same way."""
        names = parameter_names(self.model)
        found: dict[Any, tuple[list[Any], flow.Kernel]] = {}
        for one in self.layers():
            layer: Any = one.module
            axes, operand = kernel_axes(layer), site_of(layer).recipe.forward[1]
            if axes is None:
                continue
            kernel, value = layer.kernel, layer.kernel.get_value()
            if isinstance(value, QArray):
                if self.rules is not None and operand is not None:
                    _check_stored(one, value, operand)
            elif operand is None:
                continue
            kept = product_states(layer).get("0")
            scale = kept.scales[1] if kept is not None and operand.is_learned else None
            state = of_kernel({} if kept is None else kept.arrays)
            where = f"quantize: {one.shown}: {type(layer).__name__}.kernel"
            name = names.get(id(kernel), "")
            this = flow.Kernel(name, where, value, operand, axes, len(stacked(layer)), state)
            key = id(kernel), operand, axes, id(scale)
            found.setdefault(key, ([], this))[0].append(layer)
        return list(found.values())

    def store(self, place: list[Any], array: QArray) -> None:
        kernel = place[0].kernel
        if array is kernel.get_value():
            return
        stored = type(kernel).from_metadata(array, kernel.get_metadata())
        for layer in place:
            layer.kernel = stored
            kept = product_states(layer).get("0")
            if kept is not None and site_of(layer).recipe.forward[1].is_learned:
                kept.scales[1] = None  # it is the scale of the codes now


def _check_stored(found: FoundModule, kernel: QArray, operand: Operand) -> None:
    got, asked = kernel.spec.element, operand.spec.element
    if got != asked:
        raise ValueError(
            f"quantize: {found.shown}: kernel is stored in {got.name} already, expected an array "
            f"or one in {asked.name}, as the recipe says; quantize the model that it came from, or "
            "exclude the layer by a rule with None"
        )


def kernel_axes(layer: Any) -> Axes | None:
    """The axes of a layer's kernel in its matmul, without leading axes of a stack.

    None if the layer has no attribute for its matmul, or multiplies something else than its
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
