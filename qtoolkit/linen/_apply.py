"""`apply` of a wrapped module: compiled where nothing else is traced around it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn

from qtoolkit.linen._call import NoMatmulsError, entered
from qtoolkit.linen._function import Bound, Tree, with_numbers
from qtoolkit.linen._state import SCALES, check_started, has_nan, planted_in
from qtoolkit.products.internal import NEEDS_NUMBERS, StaticResult, is_eager, matching


@dataclasses.dataclass(frozen=True)
class Applied:
    """`apply` of a wrapped module: a static argument of `jax.jit`. Holds no array.

    Attributes:
      apply: Flax's own one.
      method, mutable, capture_intermediates: As for `apply`.
      inputs: The tree of (variables, keys, args, kwargs).
    """

    apply: Callable[..., Any]
    module: nn.Module
    method: Callable[..., Any]
    mutable: Any
    capture_intermediates: Any
    inputs: Tree | None = None

    def __call__(
        self, method: Callable[..., Any], variables: Any, rngs: Any, args: Any, kwargs: Any
    ) -> Any:
        return self.apply(
            self.module,
            variables,
            *args,
            rngs=rngs,
            method=method,
            mutable=self.mutable,
            capture_intermediates=self.capture_intermediates,
            **kwargs,
        )


@functools.partial(jax.jit, static_argnums=0)
def _jitted(call: Applied, arrays: list[Any]) -> Any:
    assert call.inputs is not None
    method = entered(call.method, is_compiled=True)
    outs, tree = Tree.of_results(call(method, *call.inputs.whole(arrays)))
    return outs, StaticResult(tree)


# Calls that compute no matmul: they are not traced a second time.
_without_matmuls: dict[Applied, None] = {}
_MOST = 4096


def applied(
    call: Applied, variables: Any, rngs: Any, args: Any, kwargs: Any, *, is_stable: bool
) -> Any:
    """Calls `apply`, compiled if nothing else is traced or compiled around it.

    Args:
      is_stable: Whether the next call has the same method: not a lambda, which is new each time.
    """
    inputs = variables, rngs, args, kwargs
    # Those who intercept methods want to see each call.
    if is_stable and is_eager(inputs) and not nn.module._global_interceptor_stack:
        try:
            out = with_numbers(functools.partial(_compiled, call, inputs), (args, kwargs))
            _check_scales(call, inputs)
            return out
        except NoMatmulsError:
            return call(call.method, *inputs)
        except NEEDS_NUMBERS as error:
            _explain_numbers(call, error)
    return call(entered(call.method), *inputs)


def _compiled(call: Applied, inputs: Any, numbers: bool) -> Any:
    tree, arrays = Tree.of(inputs, traces_numbers=numbers)
    call = dataclasses.replace(call, inputs=tree)
    try:
        hash(call)
    except TypeError:  # a module with a list or an array among its attributes
        return call(entered(call.method), *inputs)
    if call in _without_matmuls:
        raise NoMatmulsError
    try:
        outs, static = _jitted(call, arrays)
    except NoMatmulsError:
        if len(_without_matmuls) >= _MOST:
            _without_matmuls.clear()
        _without_matmuls[call] = None
        raise
    return static.value.whole(outs)


def _check_scales(call: Applied, inputs: Any) -> None:
    """Raises if a matmul has a learned scale that was not started."""
    variables, *others = inputs
    states = planted_in({SCALES: variables.get(SCALES)}, ())
    if not any(map(has_nan, states.values())):
        return

    def plain(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
        return call(call.method, variables, rngs, args, kwargs)

    bound = Bound.of(plain, variables, others, {})
    matmuls = bound.traced.program(bound.leaves).matmuls
    multiply = bound.traced.quantizing()
    ran = [matmul for matmul in matmuls if multiply.recipe_of(matmul) is not None]
    for key in matching(ran, states).values():
        check_started(key, states[key])


def _explain_numbers(call: Applied, error: Exception) -> None:
    name = f"{type(call.module).__name__}.{call.method.__name__}"
    line = str(error).strip().split("\n")[0]
    raise TypeError(
        f"wrap: {name} needs the numbers of an array, which a wrapped module does not have while "
        f"its call is traced, as under jax.jit: {line} Expected a method that JAX can trace; write "
        "jnp.where or jax.lax.cond in place of an if, and jax.debug.print in place of print"
    ) from error


def static_filter(mutable: Any) -> Any:
    """A filter of collections that hashes."""
    if isinstance(mutable, list | set | Mapping):
        return tuple(mutable)
    if isinstance(mutable, nn.DenyList):
        return nn.DenyList(static_filter(mutable.deny))
    return mutable
