"""`numerics` and `sensitivity` of wrapped modules."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from qtoolkit.linen._state import SCALES, check_variables
from qtoolkit.products import Numerics, Sensitivity
from qtoolkit.products.internal import Constant, Sums, check_loss, sensitivity_of, sums_of

Loss = Callable[[Any, Any], Any]


def numerics(wrapped: nn.Module, variables: Any, batch: Any, loss_fn: Loss) -> Numerics:
    """What rounding does to every operand of a wrapped module's products, forward and backward.

        found = qtoolkit.linen.numerics(wrapped, variables, batch, loss_fn)
        print(found)

    As `qtoolkit.nnx.numerics`. Layers that `nn.scan` stacks have one row for all; layers alike
    under `nn.jit` may share a trace, and then have one row, too.

    Args:
      wrapped: A module from `wrap`.
      variables: What `init` returned, a dictionary of collections.
      batch: A pytree of arrays.
      loss_fn: From (variables, batch) to a float scalar, or to (scalar, aux), as for
        `value_and_grad`; it calls `wrapped.apply`.

    Returns:
      `Numerics`, a pytree: those of several batches add up.

    Raises:
      TypeError: `wrapped` is no linen module, `variables` no dictionary with "params"; the loss is
        no float scalar.
      ValueError: No quantized product ran: the module is not wrapped, or the loss calls another.

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
    check_arguments("numerics", wrapped, variables)
    check_loss("numerics", loss_fn, "wrapped, variables")
    sums: Sums = _measured(sums_of, Constant(loss_fn), variables, batch)
    return sums.numerics()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _measured(measure: Callable[..., Any], loss_fn: Constant, variables: Any, batch: Any) -> Any:
    return measure(loss_fn.value, variables, batch)


def sensitivity(wrapped: nn.Module, variables: Any, batch: Any, loss_fn: Loss) -> Sensitivity:
    """Ranks the layers of a wrapped module by how much quantizing each alone adds to the loss.

    As `qtoolkit.nnx.sensitivity`.

    Args:
      wrapped, variables, batch, loss_fn: As for `numerics`.

    Returns:
      `Sensitivity`: `.ranking`, `.rules(keep)`, `.wide` and `.quantized`.

    Raises:
      TypeError, ValueError: As `numerics`; the module has stored kernels, from `quantize`, of which
        no wide ones are known; or a learned scale has not been started.

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
    check_arguments("sensitivity", wrapped, variables)
    check_loss("sensitivity", loss_fn, "wrapped, variables")
    if any(bool(jnp.any(jnp.isnan(x))) for x in jax.tree.leaves(variables.get(SCALES, {}))):
        raise ValueError(
            "sensitivity: a learned scale has not been started, expected numbers; write "
            "variables = qtoolkit.linen.start_scales(wrapped, variables, batch)"
        )
    found: Sensitivity = _measured(sensitivity_of, Constant(loss_fn), variables, batch)
    return found


def check_arguments(where: str, module: Any, variables: Any) -> None:
    """Raises unless `module` is a linen module and `variables` a dictionary with "params".

    Whether it has quantized layers is not checked: `Fp8Dense` in it is known only when it runs.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{where}: module has type {type(module).__name__}, expected an instance of "
            "flax.linen.Module"
        )
    check_variables(where, variables)
