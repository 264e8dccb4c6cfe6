"""`allocate`: a format for each layer under a size."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from qtoolkit.linen._flow import sensitivity
from qtoolkit.linen._function import Bound
from qtoolkit.linen._post_training import plain_model
from qtoolkit.linen._quantize import stored_kernels
from qtoolkit.linen._wrap import wrap
from qtoolkit.post_training import Allocation
from qtoolkit.post_training.internal import allocated, serving_rules, stored_kernel
from qtoolkit.products.internal import KernelUses
from qtoolkit.scaling import QArray


def allocate(
    module: nn.Module,
    variables: Any,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any, Any], Any],
    *,
    choices: Sequence[Any],
    bytes: int,
) -> Allocation:
    """Choose a format for each layer, so that all kernels fit a size at the least loss.

    As `qtoolkit.nnx.allocate`.

    Args:
      module: A module that is not wrapped.
      variables: What `init` returned.
      batch: A pytree of arrays.
      loss_fn: From (module, variables, batch) to a float scalar: it is called with the module
        wrapped by each choice, and calls `module.apply(variables, ...)`.
      choices, bytes: As for `qtoolkit.nnx.allocate`.

    Returns:
      `Allocation`, rules for `quantize` and `wrap`.

    Raises:
      TypeError, ValueError: As `qtoolkit.nnx.allocate`.

    Examples:
      >>> module, x = nn.Sequential([nn.Dense(64), nn.Dense(64)]), jnp.ones((4, 64)) / 7
      >>> variables = module.init(jax.random.key(0), x)
      >>> def loss(module, variables, x):
      ...     return jnp.square(module.apply(variables, x)).mean()
      >>> rules = qt.linen.allocate(
      ...     module, variables, x, loss, choices=["int4_group32", "int8"], bytes=6000)
      >>> [recipe.forward[1].spec.name for _, recipe in rules.rules], rules.size
      (['int4_group32', 'int4_group32'], 5120)
    """
    plain_model("allocate", module, variables)

    def measured(recipe: Any) -> tuple[Any, dict[str, int], dict[str, int]]:
        wrapped = wrap(module, serving_rules(recipe))

        def loss(variables: Any, batch: Any) -> Any:
            return loss_fn(wrapped, variables, batch)

        call = Bound.of(loss, variables, (batch,), {})
        kernels = KernelUses.of(call.traced.program(call.leaves), call.traced.quantizing())
        sizes = _kernel_bytes(variables["params"], kernels)
        return sensitivity(wrapped, variables, batch, loss), *sizes

    return allocated(choices, bytes, measured)


def _kernel_bytes(params: Any, kernels: KernelUses) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of the kernels of each layer as `quantize` stores them, and as they are."""
    sizes, unquantized = Counter[str](), Counter[str]()
    for place, use, x, lead in stored_kernels(params, kernels):
        if use.operand is not None and not isinstance(x, QArray):
            store = functools.partial(stored_kernel, "allocate")
            given = {"operand": use.operand, "axes": use.axes, "stacked": lead}
            leaves = jax.tree.leaves(jax.eval_shape(functools.partial(store, **given), x))
            layer = "/".join(place[:-1])
            sizes[layer] += sum(a.size * a.dtype.itemsize for a in leaves)
            unquantized[layer] += x.size * x.dtype.itemsize
    return sizes, unquantized
