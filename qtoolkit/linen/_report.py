"""`report`: every matmul of a wrapped module, quantized or not."""

import dataclasses
import functools
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList
from flax.errors import ModifyScopeVariableError, ScopeCollectionNotFound

from qtoolkit.linen._function import Bound, found_modules, rules_of
from qtoolkit.linen._state import COLLECTION, check_arguments
from qtoolkit.products import Report
from qtoolkit.products.internal import (
    Batch,
    check_all_quantized,
    report_of,
    strict_inputs,
    traced_with_axes,
    unused_rules,
)

_EVERY_WRITTEN = DenyList(["params", COLLECTION])


def report(
    wrapped: Any,
    variables: Any,
    *inputs: Any,
    rngs: Any = None,
    method: Any = None,
    mutable: Any = _EVERY_WRITTEN,
    **options: Any,
) -> Report:
    """Counts the matmuls and convolutions of a module, forward and backward.

        print(qtoolkit.linen.report(wrapped, variables, batch))
        print(qtoolkit.linen.report(wrapped, variables, image, method="encode"))
        print(qtoolkit.linen.report(loss, variables, batch))

    `wrapped.apply` is traced, and differentiated by variables and inputs of floats; nothing is
    computed. Axis names that the module asks for, as `BatchNorm(axis_name="batch")` does, are those
    of axes of size 1.

    Args:
      wrapped: A module from `wrap`; in one that is not wrapped no matmul is quantized. Or a
        function of variables that applies such a module, for example a loss.
      variables: As for `apply`, arrays or `jax.ShapeDtypeStruct`s; for a function any pytree.
      inputs, options: What the module or the function is called with. Arrays are traced; all else
        is passed as it is.
      rngs, method, mutable: As for `apply`. Left out: keys for whatever asks, and every collection
        but "params" may be written; none if Flax then finds no parameters, as it does in
        `nn.map_variables(init=True)`.

    Returns:
      A `Report`, whose text is a table. Its `unreached` are rules that match nothing that ran.

    Raises:
      TypeError: `wrapped` is neither a linen module nor a function; rngs or method are given for a
        function.

    Examples:
      >>> module = qt.linen.wrap(nn.Dense(1), qt.recipes.te_current)
      >>> x = jnp.ones((1, 2))
      >>> report = qt.linen.report(module, module.init(jax.random.key(0), x), x)
      >>> print(str(report).splitlines()[-1])
      2 of 2 matmuls quantized
      >>> [product.part for product in report.quantized]
      ['forward', 'wgrad']
    """
    is_function = callable(wrapped) and not isinstance(wrapped, type | nn.Module)
    if is_function:
        _check_no_options(rngs=rngs, method=method)
    else:
        check_arguments("report", wrapped, variables)
    if rngs is None:
        rngs = {"params": jax.random.key(0)}

    def bound(mutable: Any) -> Bound:
        def apply(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            flags = {"rngs": rngs, "method": method, "mutable": mutable}
            return wrapped.apply(variables, *args, **flags, **kwargs)

        if is_function:
            return Bound.of(wrapped, variables, inputs, options)
        return Bound.of(apply, variables, (rngs, *inputs), options)

    call = bound(mutable)
    try:
        found = report_of(call.traced, call.leaves, call.planted())
    except ScopeCollectionNotFound as error:
        # Where a collection may be written, but "params" may not, Flax's
        # `nn.map_variables(init=True)` loses the parameters: it keeps what may be written.
        if mutable is not _EVERY_WRITTEN:
            raise
        try:
            call = bound(False)
            found = report_of(call.traced, call.leaves, call.planted())
        except ModifyScopeVariableError:  # another collection must be written
            raise error from None
    program = traced_with_axes(call.traced, call.leaves)
    unused = tuple(
        f"rule {key if isinstance(key, str) else key.__name__}"
        for rules in dict.fromkeys(x.rules for x in call.layers.modules.values())
        if rules is not None
        for key in unused_rules(
            rules, found_modules(call.layers, rules, program.matmuls, variables)
        )
    )
    idle = tuple(name for name in found.idle if name not in unused)
    return dataclasses.replace(found, unreached=unused, idle=idle)


def _check_no_options(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise TypeError(
                f"report: {name} is given for a function, expected them for a module only; pass "
                "them to `apply` in the function"
            )


def kernels_of(wrapped: nn.Module, inputs: Any) -> list[str]:
    """The paths of the modules whose kernels run, in their order."""
    apply = functools.partial(wrapped.apply, rngs={"params": jax.random.key(0)}, mutable=True)
    args, options = strict_inputs(inputs)
    call = Bound.of(apply, types_of_init(wrapped, args or options), args, options)
    paths, rules = call.traced.program(call.leaves).paths_of_kernels, rules_of(wrapped)
    return [path for path in paths if call.layers.at(path).rules == rules]


def types_of_init(wrapped: nn.Module, batch: Any) -> Any:
    """The types of the variables that `init` makes with a batch."""

    def init(batch: Batch) -> Any:
        return batch.given_to(wrapped.init, {"params": jax.random.key(0)})

    return jax.eval_shape(init, Batch.of(batch))


def check_strict(wrapped: nn.Module, inputs: Any) -> None:
    """Raises if a matmul is not quantized though no rule says so, or if none is quantized."""
    name = type(wrapped).__name__
    arguments, options = strict_inputs(inputs)
    variables = types_of_init(wrapped, arguments or options)
    found = report(wrapped, variables, *arguments, **options)
    if found.unreached:  # of a module inside that is wrapped by rules of its own
        raise ValueError(
            f"wrap: {', '.join(found.unreached)} matches no layer with matmuls inside of {name}, "
            "expected every rule to match one"
        )
    check_all_quantized(name, found)
