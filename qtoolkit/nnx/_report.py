"""`report`: every matmul of a wrapped model, quantized or not."""

import dataclasses
import functools
from typing import Any

from flax import linen, nnx

from qtoolkit.nnx._call import bound_function, call_model
from qtoolkit.nnx._function import sites_in
from qtoolkit.nnx._modules import matmuls_of_layer
from qtoolkit.products import Report, native_calls
from qtoolkit.products.internal import MODEL, naming_missing_inputs, report_of


def check_module(where: str, model: Any) -> None:
    if isinstance(model, nnx.Module):
        return
    hint = ""
    if isinstance(model, linen.Module):
        hint = f"; use qtoolkit.linen.{where}"
    elif where in ("wrap", "quantize"):
        name = model.__name__ if isinstance(model, type) else "MLP"
        hint = f"; write qtoolkit.nnx.{where}({name}(..., rngs=nnx.Rngs(0)), recipe)"
    raise TypeError(f"{where}: model has type {type(model).__name__}, expected an nnx.Module{hint}")


def report(
    wrapped: Any, *inputs: Any, method: Any = None, compiled: Any = None, **options: Any
) -> Report:
    """Counts the matmuls and convolutions of a model, forward and backward.

        print(qtoolkit.nnx.report(wrapped, batch))
        print(qtoolkit.nnx.report(wrapped, image, method="encode"))
        print(qtoolkit.nnx.report(loss, wrapped, batch))

    The model is traced with `inputs`, and differentiated by its parameters and by inputs of
    floats; nothing is computed, and its state stays as it is. Axis names that the model asks for,
    as `BatchNorm(axis_name="batch")` does, are those of axes of size 1.

    Args:
      wrapped: A model from `wrap`; in one that is not wrapped no matmul is quantized.
        Or a function of the model, such as a loss; then the model is the next argument.
      inputs, options: What the model or the function is called with. Arrays are traced, all else
        passed on.
      method: The name of a method that is called in place of `__call__`, or a function.
      compiled: A compiled step of the model, `jax.jit(step).lower(...).compile()`; the report then
        says which matmuls it runs in FP8, see `qtoolkit.products.native_calls`.

    Returns:
      A `Report`, whose text is a table.

    Raises:
      TypeError: There is no `nnx.Module`; `method` is given for a function.

    Examples:
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(2, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs))
      >>> wrapped = qt.nnx.wrap(model, qt.Rules({"layers/1": qt.Recipe("e4m3fn")}))
      >>> report = qt.nnx.report(wrapped, jnp.ones((1, 2)))
      >>> print(str(report).splitlines()[-1])
      3 of 5 matmuls quantized, 42.9% of all multiplications
      >>> for product in report.left:
      ...     print(product.path, product.part, product.reason)
      layers/0 forward excluded by a rule
      layers/0 backward excluded by a rule
    """
    function, wrapped, inputs = _called(wrapped, inputs, method)
    call = bound_function(function, wrapped, inputs, options)
    modules = call.traced.modules
    quantizing = call.traced.quantizing()
    paths = [
        path
        for path, module in ((site.path, module) for site, module in sites_in(wrapped))
        if path in modules and matmuls_of_layer(module) and quantizing.of_module(path) is not None
    ]
    with naming_missing_inputs("report", inputs, options):
        found = report_of(call.traced, call.leaves, call.planted(), [p or MODEL for p in paths])
    if not modules:  # what `wrap` returned was not used
        reason = "no layer of the model is wrapped"
        left = (dataclasses.replace(product, reason=reason) for product in found.left)
        found = dataclasses.replace(found, left=tuple(left))
    ran = None if compiled is None else native_calls(compiled)
    return dataclasses.replace(found, compiled=ran)


def _called(wrapped: Any, inputs: tuple[Any, ...], method: Any) -> tuple[Any, Any, Any]:
    """The function to trace, of a model and inputs; the model; the inputs."""
    is_function = callable(wrapped) and not isinstance(wrapped, type | nnx.Module | linen.Module)
    if not is_function:
        check_module("report", wrapped)
        if callable(method):
            return method, wrapped, inputs
        function = functools.partial(call_model, method=method or "__call__")
        return function, wrapped, inputs
    if method is not None:
        raise TypeError(
            f"report: method={method!r} and a function, expected one of them; call the method "
            "in the function"
        )
    if not inputs or not isinstance(inputs[0], nnx.Module):
        got = f"type {type(inputs[0]).__name__}" if inputs else "nothing"
        raise TypeError(
            f"report: after a function comes {got}, expected its nnx.Module; write "
            "qtoolkit.nnx.report(loss, model, batch)"
        )
    return wrapped, inputs[0], inputs[1:]
