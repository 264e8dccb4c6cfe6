"""`report`: every product of a wrapped module, quantized or left."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList
from flax.errors import ModifyScopeVariableError, ScopeCollectionNotFound

from qtoolkit.linen._numerics import check_arguments
from qtoolkit.linen._run import visiting
from qtoolkit.linen._state import COLLECTION
from qtoolkit.products import Report
from qtoolkit.products.internal import (
    Batch,
    check_all_quantized,
    report_of,
    strict_inputs,
    unused_rules,
)

_EVERY_WRITTEN = DenyList(["params", COLLECTION])


def report(
    wrapped: nn.Module,
    variables: Any,
    *inputs: Any,
    rngs: Any = None,
    method: Any = None,
    mutable: Any = _EVERY_WRITTEN,
    **options: Any,
) -> Report:
    """Counts the matrix products and convolutions of a module, forward and backward.

        print(qtoolkit.linen.report(wrapped, variables, batch))

    `wrapped.apply` is traced, and differentiated by variables and inputs of floats; nothing is
    computed.

    Args:
      wrapped: A module from `wrap`; one that is not wrapped has all its products left.
      variables: As for `apply`, arrays or `jax.ShapeDtypeStruct`s.
      inputs, options: What the module is called with. Arrays are traced; all else is passed as it
        is.
      rngs, method, mutable: As for `apply`. Left out: keys for whatever asks, and every collection
        but "params" may be written; none if Flax then finds no parameters, as it does in
        `nn.map_variables(init=True)`.

    Returns:
      A `Report`, whose text is a table. Its `unreached` are rules that match nothing that ran.

    Raises:
      TypeError: `wrapped` is no linen module.

    Examples:
      >>> module = qt.linen.wrap(nn.Dense(1), qt.recipes.te_current)
      >>> x = jnp.ones((1, 2))
      >>> report = qt.linen.report(module, module.init(jax.random.key(0), x), x)
      >>> print(str(report).splitlines()[-1])
      3 of 3 products quantized
      >>> [product.part for product in report.quantized]
      ['forward', 'dgrad', 'wgrad']
    """
    check_arguments("report", wrapped, variables)
    batch = Batch.of((inputs, options))
    # Replace state by zeros, so that it counts as constant and nothing differentiates by it.
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables.get(COLLECTION, {}))
    others = {name: held for name, held in variables.items() if name != COLLECTION}
    if rngs is None:
        rngs = {"params": jax.random.key(0)}

    def call(mutable: Any, variables: Any, arrays: list[Any]) -> Any:
        args, kwargs = batch.with_arrays(arrays)
        given = {**variables, COLLECTION: state} if state else variables
        outs = wrapped.apply(given, *args, rngs=rngs, method=method, mutable=mutable, **kwargs)
        return [out for out in jax.tree.leaves(outs) if isinstance(out, jax.Array)]

    arguments = others, batch.arrays
    with visiting() as visited:
        try:
            found = report_of(functools.partial(call, mutable), arguments)
        except ScopeCollectionNotFound as error:
            # Where a collection may be written, but "params" may not, Flax's
            # `nn.map_variables(init=True)` loses the parameters: it keeps what may be written.
            if mutable is not _EVERY_WRITTEN:
                raise
            try:
                found = report_of(functools.partial(call, False), arguments)
            except ModifyScopeVariableError:  # another collection must be written
                raise error from None
    unused = tuple(
        f"rule {key if isinstance(key, str) else key.__name__}"
        for rules in visited
        for key in unused_rules(rules, visited.modules(rules))
    )
    return dataclasses.replace(found, unreached=unused)


def check_strict(wrapped: nn.Module, inputs: Any) -> None:
    """Raises if a product is not quantized though no rule says so, or if none is quantized."""
    name = type(wrapped).__name__
    arguments, options = strict_inputs(inputs)
    batch = Batch.of((arguments, options))

    def init(*arrays: Any) -> Any:
        args, kwargs = batch.with_arrays(arrays)
        return wrapped.init({"params": jax.random.key(0)}, *args, **kwargs)

    variables = jax.eval_shape(init, *batch.arrays)
    found = report(wrapped, variables, *arguments, **options)
    if found.unreached:  # of a module inside that is wrapped by rules of its own
        raise ValueError(
            f"wrap: {', '.join(found.unreached)} matches no layer with products inside of {name}, "
            "expected every rule to match one"
        )
    check_all_quantized(name, found)
