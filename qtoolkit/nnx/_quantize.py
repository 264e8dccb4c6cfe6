"""`quantize`: an nnx model whose kernels are stored as codes and scales, to be served."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from flax import nnx

from qtoolkit.formats import Rules, SpecLike
from qtoolkit.nnx._classes import original_class
from qtoolkit.nnx._function import site_of
from qtoolkit.nnx._modules import (
    FoundModule,
    Same,
    adapters,
    is_of_flax,
    modules_of,
    stacked,
)
from qtoolkit.nnx._post_training import parameter_names, plain_model, with_params
from qtoolkit.nnx._state import product_states
from qtoolkit.nnx._wrap import keep, quantizing_of, rewired, traced_call
from qtoolkit.post_training import InputStatistics
from qtoolkit.post_training.internal import (
    AS_WRAPPED,
    PlainModel,
    Storable,
    checked_batches,
    einsum_axes,
    kept_or_serving_rules,
    quantize_kernels,
    settings,
)
from qtoolkit.products import Operand, Recipe
from qtoolkit.products.internal import (
    Axes,
    KernelUse,
    KernelUses,
    KVCacheLike,
    Parameter,
    of_kernel,
    strict_inputs,
)
from qtoolkit.scaling import QArray

Model = TypeVar("Model", bound=nnx.Module)


def quantize(
    model: Model,
    recipe: Recipe | Rules[Recipe] | SpecLike = AS_WRAPPED,
    calibration: Any = None,
    *,
    method: str = "nearest",
    sequential: bool = False,
    damping: float = 0.01,
    act_order: bool = False,
    kv_cache: KVCacheLike | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] | Callable[..., Any] | None = None,
) -> Model:
    """A model like `model`, to be served: its kernels are 8-bit or narrower codes with scales.

        served = qtoolkit.nnx.quantize(model, qtoolkit.recipes.weight_only_e4m3)
        y = nnx.jit(served)(x)

    It computes what `wrap(model, recipe)` computes, bit for bit: kernels are rounded once, here,
    instead of in each call, and matmuls take the codes as they are. Activations are rounded as
    `recipe` says. A float32 model takes 3.9x fewer bytes in E4M3, 7.4x in int4 by groups of 128.
    Kernels that were trained with learned scales (LSQ) are stored with these.

    It stores the kernels of `nnx.Linear`, `LinearGeneral`, `Einsum` and `Conv`, also those inside
    of attention and recurrent cells, and under `nnx.vmap` and `nnx.scan`. Given `inputs` or batches
    to calibrate with, it traces the model, and also stores the parameters of modules that compute
    matmuls by themselves (`x @ self.kernel`, `jnp.einsum`, `jax.lax.ragged_dot`): those that are
    attributes of the module, and that only its matmuls use, in one way. All other parameters stay
    as they are: biases, norms, kernels under a mask; and those of such modules without `inputs`,
    which are rounded in each call as in a wrapped model. Kernels that are `QArray`s already, from
    `qtoolkit.checkpoints.load`, are used as they are.

    Tables of embeddings, of `nnx.Embed` and those that your modules look up (`self.table[tokens]`),
    are stored where the recipe says `lookups=True`, and rounded to nearest whatever the method. A
    look-up then reads the codes of its rows alone; a head that is tied to the table multiplies the
    same codes.

    With a calibration, kernels are rounded so that the matmuls lose little, not the kernels. The
    method is one of

    * "gptq", also after the others: "awq+gptq";
    * "awq" and "smoothquant": the channels of kernels are multiplied by factors. The norm or matmul
      before takes up their reciprocals where the model then computes the same. Elsewhere the kernel
      keeps its factors (`QArray.factors`), and its matmul divides the inputs by them;
    * "hadamard": kernels are rotated by a random Hadamard transform in blocks of up to 128
      channels, so that outliers are spread. It is folded into the matmuls, biases and tables that
      write the channels, also through RMSNorms. Elsewhere the kernel keeps it (`QArray.rotation`),
      and its matmul rotates the inputs;
    * "hadamard+awq" and "hadamard+smoothquant", also before "+gptq": factors of a model that is
      rotated where that can be folded; a kernel that keeps its rotation applies its factors first.

    The model is run operation by operation, also through `jit`, `scan`, `while_loop`, `cond` and
    `checkpoint`; kernels of a stack, groups of convolutions and experts have inputs of their own.
    Experts and groups with fewer rows of inputs than channels are rounded to nearest, and a warning
    names them. Memory for GPTQ: channels**2 float32 numbers for each kernel.

    Args:
      model: Any `nnx.Module`. It is not changed.
      recipe: As for `wrap`, but it reaches parts that were wrapped by themselves, too. A format,
        "e4m3fn" or a `BlockFormat`, means kernels of that format with unquantized activations.
        "wrapped" keeps the recipes and scales of a model from `wrap`.
      calibration: Batches of inputs, as for `calibrate`, all of one shape; the model must not be
        wrapped then. For GPTQ that is not sequential also what `calibrate(model, batches,
        "hessian")` returns.
      method: How kernels are rounded.
      sequential: Whether GPTQ gives each layer the inputs that the quantized layers before it
        compute, so that it makes their errors good as well. One run, all batches at once. A kernel
        that is used several times is quantized at its first use.
      damping, act_order: As in `qtoolkit.scaling.gptq`.
      kv_cache: As for `wrap`.
      inputs: Inputs of the model, to trace it with, as for `wrap`: `(x, y)`, `{"x": x, "y": y}`, or
        a function of the model. None: the first batch of `calibration`.

    Returns:
      A model of the same class, or a subclass of the same name. `nnx.split`, `nnx.state`,
      `nnx.jit`, `jax.export` and orbax take it like any other: a kernel is an `nnx.Param` whose
      value is a `QArray`, a pytree. What is not stored is shared with `model`.

    Raises:
      TypeError: As `wrap`.
      ValueError: As `wrap`; there is no kernel to store; one holds an infinity or a NaN, is
        stored in another format than `recipe` says, has a learned scale that was not started, or a
        learned offset (LSQ+) in a format without a zero point; `recipe` is "wrapped" and `model`
        is not; or the calibration is missing, reaches a kernel
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
      >>> class Layer(nnx.Module):
      ...     def __init__(self):
      ...         self.weight = nnx.Param(jnp.ones((32, 4)))
      ...     def __call__(self, x):
      ...         return x @ self.weight
      >>> qt.nnx.quantize(Layer(), "int8", inputs=(jnp.ones((1, 32)),)).weight.get_value()
      QArray(int8 by tensor, float32[32,4]: codes uint8[32,4], scale float32[1,1])
    """
    how = settings(method, calibration, sequential, damping, act_order)
    if how.needs_inputs and not isinstance(calibration, InputStatistics):
        calibration = checked_batches("quantize", calibration)
        if inputs is None:
            args, options = calibration[0].arguments
            inputs = args or options
    if inputs is not None and not callable(inputs):
        strict_inputs(inputs, "inputs", "quantize")
    served = _Served(model, kept_or_serving_rules(recipe), kv_cache, inputs)
    if not quantize_kernels(served, calibration, how):
        names = ", ".join(layer.shown for layer in served.layers()[:3])
        raise ValueError(
            f"quantize: {type(model).__name__} has no kernel to store: the recipe leaves them "
            f"unquantized, or modules compute by themselves ({names}); expected nnx.Linear, "
            "LinearGeneral, Einsum or Conv with a format for its kernel, e.g. "
            "qtoolkit.recipes.weight_only_e4m3; for parameters of your own modules add "
            "inputs=(x,), to trace the model with"
        )
    return served.model


class _Place(NamedTuple):
    """Where a model has a kernel: an attribute of a layer, and the name of its matmul there."""

    layer: Any
    attribute: str
    product: str


class _Served:
    """A copy of an nnx model that gets stored kernels, see `Served` of post_training."""

    def __init__(self, model: Any, rules: Rules[Recipe] | None, kv_cache: Any, inputs: Any) -> None:
        self.original, self.rules, self.kv_cache = model, rules, kv_cache
        self.model = rewired("quantize", model, rules, kv_cache)
        self.traced = KernelUses({}, frozenset())
        if inputs is not None:
            call = traced_call("quantize", self.model, inputs)
            self.traced = KernelUses.of(call.traced.program(call.leaves), call.traced.quantizing())

    def plain(self) -> PlainModel:
        return plain_model("quantize", self.original)

    def take(self, params: Mapping[str, Any]) -> None:
        changed = with_params(self.original, params)
        self.model = rewired("quantize", changed, self.rules, self.kv_cache)

    def layers(self) -> list[FoundModule]:
        return [layer for layer in modules_of(self.model) if site_of(layer.module) is not None]

    def kernels(self) -> list[tuple[list[_Place], Storable]]:
        """The kernels, each with the places that store it in the same way."""
        names = parameter_names(self.model)
        found: dict[Any, tuple[list[_Place], Storable]] = {}
        for one in self.layers():
            for attribute, axes, lead, product, use in self._kernels_of(one, names):
                layer: Any = one.module
                site: Any = site_of(layer)
                recipe = quantizing_of(site).by_rules(site.path, Parameter(site.path, attribute))
                parameter = getattr(layer, attribute)
                operand = None if recipe is None else recipe.forward[1]
                operand = operand if use is None else use.operand
                value, is_table = parameter.get_value(), isinstance(layer, nnx.Embed)
                if isinstance(value, QArray):
                    if self.rules is not None and operand is not None:
                        _check_stored(one, attribute, value, operand)
                elif recipe is None or operand is None or (is_table and not recipe.lookups):
                    continue
                kept = product_states(layer).get(product)
                scale = None if kept is None else kept.variables.get("rhs_scale")
                state = of_kernel({} if kept is None else kept.arrays)
                where = f"quantize: {one.shown}: {type(layer).__name__}.{attribute}"
                name = names.get(Same(parameter), "")
                is_table = is_table or name in self.traced.tables
                this = Storable(name, where, value, operand, axes, lead, state, is_table)
                key = Same(parameter), operand, axes, Same(scale)
                place = _Place(layer, attribute, product)
                found.setdefault(key, ([], this))[0].append(place)
        return list(found.values())

    def _kernels_of(
        self, found: FoundModule, names: Mapping[Same, str]
    ) -> Iterator[tuple[str, Axes, int, str, KernelUse | None]]:
        """The attributes of a layer that are kernels, with their axes in the matmul, how many
        axes of a stack come before these, the name of the matmul, and its use if it was traced.
        """
        layer: Any = found.module
        axes = kernel_axes(layer)
        if isinstance(layer, nnx.Embed):
            yield "embedding", Axes((1,), (0,)), len(stacked(layer)), "embedding", None
        if axes is not None:
            yield "kernel", axes, len(stacked(layer)), "kernel", None
        if is_of_flax(layer):
            return
        for name in found.kernels:
            parameter = getattr(layer, name)
            use = self.traced.storable(names.get(Same(parameter), ""))
            if use is None or (axes is not None and name == "kernel"):
                continue
            shape = tuple(parameter.get_value().shape)
            lead = len(shape) - len(use.shape)
            if shape[lead:] == use.shape:
                yield name, use.axes, lead, use.key.name, use

    def store(self, places: list[_Place], array: QArray) -> None:
        first = getattr(places[0].layer, places[0].attribute)
        is_new = array is not first.get_value()
        stored = type(first).from_metadata(array, first.get_metadata()) if is_new else first
        for layer, attribute, product in places:
            setattr(layer, attribute, stored)
            states = product_states(layer)
            wanted = {name: (state.recipe, state.lead) for name, state in states.items()}
            if product in wanted:
                recipe, lead = wanted[product]
                wanted[product] = recipe.with_stored(1), lead
                keep(layer, wanted, states, is_traced=True)


def _check_stored(found: FoundModule, name: str, kernel: QArray, operand: Operand) -> None:
    got, asked = kernel.spec.element, operand.spec.element
    if got != asked:
        raise ValueError(
            f"quantize: {found.shown}: {name} is stored in {got.name} already, expected an array "
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
            shape = (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
            axes = Axes(tuple(range(first, last)), tuple(range(last, len(shape))))
            return axes.ones_first(shape)
        case nnx.Einsum() if layer.einsum_str:
            return einsum_axes(layer.einsum_str, tuple(layer.kernel_shape))
        case nnx.Conv():
            spatial = tuple(range(len(layer.kernel_size)))
            return Axes((*spatial, len(spatial)), (len(spatial) + 1,))
    return None
