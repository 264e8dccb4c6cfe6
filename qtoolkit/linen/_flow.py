"""Measuring wrapped modules, and setting the scales that they keep."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from qtoolkit.formats import Rules
from qtoolkit.linen._function import Bound
from qtoolkit.linen._post_training import plain_model
from qtoolkit.linen._report import types_of_init
from qtoolkit.linen._state import (
    COLLECTION,
    SCALES,
    at,
    check_arguments,
    key_of,
    path_of,
    products_of,
    with_part,
)
from qtoolkit.linen._wrap import wrap
from qtoolkit.post_training.internal import input_statistics
from qtoolkit.products import Calibration, Numerics, Recipe, Sensitivity
from qtoolkit.products.internal import AMAX, Batch, Kept, flow, input_scale, matching

Model = TypeVar("Model", bound=nn.Module)
Loss = Callable[[Any, Any], Any]


def _call(where: str, wrapped: Any, variables: Any, batch: Batch) -> Bound:
    """A call of a module with a batch."""
    check_arguments(where, wrapped, variables)
    return Bound.of(_Apply(wrapped), variables, *batch.arguments)


@dataclasses.dataclass(frozen=True)
class _Apply:
    """`apply` of a module, which hashes if the module does."""

    module: nn.Module

    def __call__(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        return self.module.apply(variables, *args, **kwargs)


def _call_of_loss(where: str, wrapped: Any, variables: Any, batch: Any, loss_fn: Any) -> Bound:
    check_arguments(where, wrapped, variables)
    loss = flow.checked_loss(where, loss_fn, "wrapped, variables")
    return Bound.of(loss, variables, (batch,), {})


def _learned(scales: Any) -> dict[tuple[str, ...], Kept]:
    """The learned scales of each matmul, by its path in the collection."""
    found = {}
    for path, arrays in products_of(scales):
        *around, layer, name = path
        parts = [*around, *path_of(layer).split(".")]
        found[path] = Kept("/".join(filter(None, parts)), name, arrays)
    return found


def calibrate(
    wrapped: nn.Module,
    variables: Any,
    batches: Iterable[Any],
    observer: Any = "absmax",
    **options: Any,
) -> Any:
    """Finds one scale for each operand of a wrapped module's matmuls, from batches of inputs.

    As `qtoolkit.nnx.calibrate`; `wrapped.apply(variables, ...)` is called with each batch.

    Raises:
      TypeError: `wrapped` is no linen module, `variables` no dictionary with "params"; `batches` is
        one array instead of several.
      ValueError: As `qtoolkit.nnx.calibrate`.

    Examples:
      >>> module = qt.linen.wrap(nn.Dense(1), qt.recipes.te_current)
      >>> batches = [jnp.asarray([[1.0, -2.0]]), jnp.asarray([[896.0, 3.0]])]
      >>> variables = module.init(jax.random.key(0), batches[0])
      >>> found = qt.linen.calibrate(module, variables, batches)
      >>> found.states[0], found.states[0].scale()  # of the input: 896 / 448
      (AbsMax(e4m3fn by tensor, scales[1]: 2 seen, 0 bad), Array([2.], dtype=float32))
    """
    if observer == "hessian":
        return input_statistics(plain_model("calibrate", wrapped, variables), batches, **options)
    check_arguments("calibrate", wrapped, variables)
    return flow.calibrate(
        lambda batch: _call("calibrate", wrapped, variables, batch), batches, observer, options
    )


def freeze(wrapped: Model, variables: Any, calibration: Calibration) -> tuple[Model, Any]:
    """A module like `wrapped` with the scales of a calibration, and its variables.

    As `qtoolkit.nnx.freeze`. The collection "qtoolkit" then holds the amaxes of each matmul;
    layers that `nn.scan` stacks share one.

    Raises:
      TypeError: As `calibrate`, or `calibration` is no `Calibration`.
      ValueError: The module is not wrapped, or a matmul that ran was not calibrated: the message
        names it. A layer that did not run in calibration raises when it runs. A layer of which only
        one operand was calibrated, by another recipe, returns NaN.

    Examples:
      >>> module = qt.linen.wrap(nn.Dense(1), qt.recipes.te_current)
      >>> x = jnp.asarray([[0.3, 1.0], [0.5, 0.7]])
      >>> variables = module.init(jax.random.key(0), x)
      >>> found = qt.linen.calibrate(module, variables, [x])
      >>> frozen, variables = qt.linen.freeze(module, variables, found)
      >>> for m in (module, frozen):  # does the second example leave the first as it is?
      ...     print(bool((m.apply(variables, x) == m.apply(variables, x.at[1].multiply(100.0)))[0]))
      False
      True
    """
    check_arguments("freeze", wrapped, variables)
    found = flow.frozen_amaxes(calibration, "calibrate(wrapped, variables, batches)")
    rules: Rules[Recipe] | None = getattr(wrapped, "qtoolkit_rules", None)
    if rules is None:
        raise ValueError(
            f"freeze: {type(wrapped).__name__} is not wrapped, expected a module from "
            "qtoolkit.linen.wrap"
        )
    state = dict(variables.get(COLLECTION, {}))
    for path, amaxes in found.items():
        kept = dict(state.get(key_of(path), {}))
        for name, amax in amaxes.items():
            known = [(path, name, side) in calibration.keys for side in (0, 1)]
            with jax.debug_nans(False):  # no error: NaN says that an operand was not calibrated
                kept[name] = {AMAX: jnp.where(jnp.array([*known, True]), amax, jnp.nan)}
        state[key_of(path)] = kept
    cache = getattr(wrapped, "qtoolkit_cache", None)
    frozen = wrap(wrapped, rules.map(Recipe.frozen), kv_cache=cache)
    return frozen, {**variables, COLLECTION: state}


def input_scales(wrapped: nn.Module, variables: Any, batch: Any) -> dict[str, float]:
    """The static scales of activations that an engine needs: those that training used.

    As `qtoolkit.nnx.input_scales`, by the names of parameters in "params". The module is traced
    with a batch, as for `calibrate`, to see which recipe each matmul has. Layers that `nn.scan`
    stacks share one scale, the largest; of a kernel with several uses it is the largest, too.

    Raises:
      TypeError: As `calibrate`.

    Examples:
      >>> module = qt.linen.wrap(nn.Dense(2), qt.recipes.te_delayed_hybrid)
      >>> x = jnp.full((1, 4), 896.0)
      >>> variables = module.init(jax.random.key(0), x)
      >>> loss = qt.linen.value_and_grad(lambda variables, x: module.apply(variables, x).sum())
      >>> _, _, state = loss(variables, x)
      >>> qt.linen.input_scales(module, {**variables, "qtoolkit": state}, x)
      {'kernel': 2.142857074737549}
    """
    call = _call("input_scales", wrapped, variables, Batch.of(batch))
    matmuls = call.traced.program(call.leaves).matmuls
    multiply, known = call.traced.quantizing(), matching(matmuls, call.states)
    found: dict[str, float] = {}
    for matmul in matmuls:
        recipe = multiply.recipe_of(matmul)
        if recipe is None or matmul.parameter is None:
            continue
        kept = call.states.get(known.get(matmul.key, matmul.key), {})
        name = matmul.parameter.full_path.replace("/", ".")
        scale = input_scale(recipe, name, kept)
        if scale is not None:
            found[name] = max(scale, found.get(name, 0.0))
    return found


def start_scales(wrapped: nn.Module, variables: Any, batch: Any) -> Any:
    """The variables with first values of learned scales, from the operands in one batch.

        wrapped = qtoolkit.linen.wrap(model, qtoolkit.recipes.int4_lsq)
        variables = wrapped.init(key, batch)
        variables = qtoolkit.linen.start_scales(wrapped, variables, batch)

    As `qtoolkit.nnx.start_scales`. The collection "qtoolkit_scales" is not part of "params", so
    differentiate by both: `jax.grad(loss)(variables)`, or
    `value_and_grad(loss, wrt=("params", "qtoolkit_scales"))`; `optax.multi_transform` gives each
    its own optimizer. Each layer that `nn.scan` stacks has its own scale. Variables that were
    trained before wrapping will do: missing scales are added.

    Raises:
      TypeError: As `calibrate`.
      ValueError: There is no learned scale; or the batch does not reach one.

    Examples:
      >>> module = qt.linen.wrap(nn.Dense(1), qt.recipes.int4_lsq)
      >>> x = jnp.asarray([[1.0, -3.0]])
      >>> variables = qt.linen.start_scales(module, module.init(jax.random.key(0), x), x)
      >>> jax.tree.map(lambda scale: f"{scale.item():.3f}", variables["qtoolkit_scales"])
      {'self': {'kernel': {'lhs_scale': '1.512', 'rhs_scale': '0.463'}}}
    """
    check_arguments("start_scales", wrapped, variables)
    scales = variables.get(SCALES)
    if not scales:  # as `init` makes them
        types = types_of_init(wrapped, batch).get(SCALES, {})
        with jax.debug_nans(False):
            scales = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), types)
    if not scales:
        raise ValueError(
            f"start_scales: {type(wrapped).__name__} has no learned scale, expected a module from "
            "wrap and a recipe with Learned scaling such as qtoolkit.recipes.int4_lsq"
        )
    variables, products = {**variables, SCALES: scales}, _learned(scales)
    call = _call("start_scales", wrapped, variables, Batch.of(batch))
    new = flow.start_scales(call, list(products.values()))
    for path, values in zip(products, new, strict=True):
        scales = with_part(scales, path, {**at(scales, path), **values})
    return {**variables, SCALES: scales}


def numerics(wrapped: nn.Module, variables: Any, batch: Any, loss_fn: Loss) -> Numerics:
    """What rounding does to every operand of a wrapped module's matmuls, forward and backward.

    As `qtoolkit.nnx.numerics`; `loss_fn` takes (variables, batch) and calls `wrapped.apply`. Layers
    that `nn.scan` stacks have one row for all; layers alike under `nn.jit` may share a trace, and
    then have one row, too.

    Raises:
      TypeError: As `calibrate`; the loss is no float scalar.
      ValueError: No quantized matmul ran: the module is not wrapped, or the loss calls another.

    Examples:
      >>> module = qt.linen.wrap(nn.Dense(1), qt.recipes.te_current)
      >>> x = jnp.asarray([[448.0, 0.3, 0.0001, 0.0]])
      >>> variables = module.init(jax.random.key(0), x)
      >>> found = qt.linen.numerics(module, variables, x, lambda v, x: module.apply(v, x).sum())
      >>> for row in found.rows:  # of three numbers that are not zero one became zero
      ...     print(row.operand, row.parts, f"{row.tally.flushed_fraction:.0%}")
      lhs forward, wgrad 33%
      rhs forward, dgrad 0%
      cotangent dgrad, wgrad 0%
    """
    return flow.numerics(_call_of_loss("numerics", wrapped, variables, batch, loss_fn))


def sensitivity(wrapped: nn.Module, variables: Any, batch: Any, loss_fn: Loss) -> Sensitivity:
    """Ranks the layers of a wrapped module by how much quantizing each alone adds to the loss.

    As `qtoolkit.nnx.sensitivity`; `loss_fn` takes (variables, batch).

    Examples:
      >>> model = nn.Sequential([nn.Dense(8), nn.Dense(8)])
      >>> rules = qt.Rules({"layers_0": qt.Recipe("int4"), "layers_1": qt.Recipe("e4m3fn")})
      >>> x = jax.random.normal(jax.random.key(0), (64, 8))
      >>> module, variables = qt.linen.wrap(model, rules), model.init(jax.random.key(1), x)
      >>> def loss(variables, x):
      ...     return ((module.apply(variables, x) - model.apply(variables, x)) ** 2).mean()
      >>> [path for path, _ in qt.linen.sensitivity(module, variables, x, loss).ranking]
      ['layers_0', 'layers_1']
    """
    call = _call_of_loss("sensitivity", wrapped, variables, batch, loss_fn)
    return flow.sensitivity(call, _learned(variables.get(SCALES, {})).values())
