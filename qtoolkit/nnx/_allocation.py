"""`allocate`: a format for each layer under a size."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from qtoolkit.nnx._flow import sensitivity
from qtoolkit.nnx._modules import own_parameters
from qtoolkit.nnx._post_training import plain_model
from qtoolkit.nnx._quantize import quantize
from qtoolkit.nnx._wrap import wrap
from qtoolkit.post_training import Allocation
from qtoolkit.post_training.internal import allocated, serving_rules
from qtoolkit.scaling import QArray


def allocate(
    model: nnx.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    choices: Sequence[Any],
    bytes: int,
) -> Allocation:
    """Choose a format for each layer, so that all kernels fit a size at the least loss.

        rules = qtoolkit.nnx.allocate(
            model, batch, loss_fn, choices=["int4_group32", "e4m3fn", None], bytes=30_000_000)
        print(rules)
        served = qtoolkit.nnx.quantize(model, rules)

    `sensitivity` measures for each choice by how much the loss grows if one layer alone takes it;
    the sum of these is minimized (exactly, up to rounding of sizes to 1/4096 of the limit: see
    `gap`). The loss of all layers together may differ from the sum.

    Args:
      model: A model that is not wrapped.
      batch, loss_fn: As for `sensitivity`.
      choices: Formats or recipes, as for `quantize`; None is the layer as it is.
      bytes: The limit for the kernels that `quantize` stores, with their scales.

    Returns:
      `Allocation`: `Rules` for `quantize` and `wrap`, printed as a table with what each layer
      costs. Layers without a kernel that `quantize` stores are excluded. It stores parameters of
      modules that compute matmuls by themselves only if it is given `inputs` or a calibration.

    Raises:
      TypeError: `model` is no `nnx.Module`, or a choice no format.
      ValueError: The model is wrapped; no choices; or `bytes` is less than the smallest choices
        take.

    Source: arXiv:1911.03852 (sensitivities and a size, HAWQ-V2).

    Examples:
      >>> layers = [nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(2)]
      >>> model, x = nnx.Sequential(*layers), jax.random.normal(jax.random.key(0), (32, 64))
      >>> target = model(x)
      >>> def loss(model, x):
      ...     return jnp.square(model(x) - target).mean()
      >>> rules = qt.nnx.allocate(model, x, loss, choices=["int4_group32", "int8"], bytes=8000)
      >>> [recipe.forward[1].spec.name for _, recipe in rules.rules]
      ['int8 by tensor', 'int4_group32']
    """
    plain_model("allocate", model)

    def measured(recipe: Any) -> tuple[Any, dict[str, int], dict[str, int]]:
        sizes, unquantized = Counter[str](), Counter[str]()
        arrays = {path: x.get_value() for path, x in own_parameters(model)}
        served = quantize(model, recipe, inputs=lambda model: loss_fn(model, batch))
        for path, parameter in own_parameters(served):
            array, layer = parameter.get_value(), path.rpartition("/")[0]
            if isinstance(array, QArray):
                sizes[layer] += array.nbytes
                unquantized[layer] += arrays[path].nbytes
        wrapped = wrap(model, serving_rules(recipe))
        return sensitivity(wrapped, batch, loss_fn), sizes, unquantized

    return allocated(choices, bytes, measured)
