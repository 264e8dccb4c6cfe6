"""`apply` of a wrapped module: compiled where nothing else is traced around it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
from flax import linen as nn

from qtoolkit.linen._call import OURS, entered, start_states, starting
from qtoolkit.linen._function import Bound, Tree, has_whole
from qtoolkit.linen._state import SCALES, planted_in
from qtoolkit.products.internal import (
    MODEL,
    NEEDS_NUMBERS,
    Contents,
    NoMatmulsError,
    StaticResult,
    check_started,
    hashes,
    is_eager,
    is_step_by_step,
    needs_numbers,
    not_started,
    remembering_no_matmuls,
    with_numbers,
    write_back,
)


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


@remembering_no_matmuls
@functools.partial(jax.jit, static_argnums=0)
def _jitted(call: Applied, arrays: list[Any]) -> Any:
    assert call.inputs is not None
    method = entered(call.method, is_compiled=True)
    variables, rngs, *given = call.inputs.whole(arrays)
    before = Contents.of(given)
    out = call(method, variables, rngs, *given)
    changed = given if Contents.of(given).differ_from(before) else None
    outs, tree = Tree.of_results((out, changed))
    return outs, StaticResult(tree)


def is_alone(inputs: Any) -> bool:
    """Whether nothing else is traced around a call, nor intercepts methods to see each of them."""
    return is_eager(inputs) and not nn.module._global_interceptor_stack


def applied(
    call: Applied, variables: Any, rngs: Any, args: Any, kwargs: Any, *, is_stable: bool
) -> Any:
    """Calls `apply`, compiled if nothing else is traced or compiled around it.

    Args:
      is_stable: Whether the next call has the same method: not a lambda, which is new each time.
    """
    inputs = variables, rngs, args, kwargs
    if is_stable and is_alone(inputs):
        try:
            run = functools.partial(_compiled, call, inputs)
            out = with_numbers(run, lambda: has_whole((args, kwargs)))
            _check_scales(call, inputs)
            return out
        except NoMatmulsError:
            return call(call.method, *inputs)
        except NEEDS_NUMBERS as error:
            if is_step_by_step():
                return call(entered(call.method), *inputs)
            name = f"{type(call.module).__name__}.{call.method.__name__}"
            what = (
                f"{name} needs the numbers of an array, which a wrapped module does not have "
                "while its call is traced, as under jax.jit"
            )
            raise needs_numbers(what, error) from error
    return call(entered(call.method), *inputs)


def _compiled(call: Applied, inputs: Any, numbers: bool) -> Any:
    tree, arrays = Tree.of(inputs, traces_numbers=numbers)
    call = dataclasses.replace(call, inputs=tree)
    if not hashes(call):
        return call(entered(call.method), *inputs)
    outs, static = _jitted(call, arrays)
    out, changed = static.value.whole(outs)
    if changed is not None:
        write_back(list(inputs[2:]), changed)
    return out


def first_states(
    module: nn.Module, method: Any, variables: Any, rngs: Any, args: Any, kwargs: Any
) -> dict[str, Any]:
    """The collections with the first states of matmuls: those that `init` does not make itself.

    They follow from shapes alone. So the method is traced for the first `init` of a module, and
    JAX finds the program for the others.
    """
    call = Applied(_with_parameters, module, method, True, False)
    inputs = {"params": variables.get("params", {})}, rngs, args, kwargs

    def compiled(numbers: bool) -> Any:
        tree, arrays = Tree.of(inputs, traces_numbers=numbers)
        bound = dataclasses.replace(call, inputs=tree)
        return (_jitted_start if hashes(bound) else _start)(bound, arrays)

    states: dict[str, Any] = {}
    # No error: NaN says that a scale is not started.
    with starting(method, module), jax.debug_nans(False):
        states.update(with_numbers(compiled, lambda: has_whole((args, kwargs))))
    return states


def _start(call: Applied, arrays: list[Any]) -> Any:
    assert call.inputs is not None
    method = functools.partial(start_states, call.method)
    _, variables = call(method, *call.inputs.whole(arrays))
    return {name: variables[name] for name in OURS if name in variables}


_jitted_start = jax.jit(_start, static_argnums=0)


def _with_parameters(
    module: nn.Module, variables: Any, /, *args: Any, rngs: Any, method: Any, **options: Any
) -> Any:
    """`apply` as a part of `init`, which has made the parameters."""

    def in_scope(scope: Any, *args: Any, **kwargs: Any) -> Any:
        return method(module.clone(parent=scope, _deep_clone=True), *args, **kwargs)

    for name in ("mutable", "capture_intermediates"):
        options.pop(name)
    rngs = rngs if isinstance(rngs, Mapping) else {"params": rngs}
    run = flax.core.apply(in_scope, mutable=True, flags={"initializing": True})
    return run(variables, *args, rngs=rngs, **options)


def _check_scales(call: Applied, inputs: Any) -> None:
    """Raises if a matmul has a learned scale that was not started."""
    variables, *others = inputs
    states = planted_in({SCALES: variables.get(SCALES)}, ())
    if not any(map(not_started, states.values())):
        return

    def plain(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
        return call(call.method, variables, rngs, args, kwargs)

    bound = Bound.of(plain, variables, others, {})
    program = bound.traced.program(bound.leaves)
    for _, _, key in bound.traced.quantizing().uses_of_states(program, states):
        check_started(f"wrap: {key.path or MODEL}: {key.name}", states[key])


def static_filter(mutable: Any) -> Any:
    """A filter of collections that hashes."""
    if isinstance(mutable, list | set | Mapping):
        return tuple(mutable)
    if isinstance(mutable, nn.DenyList):
        return nn.DenyList(static_filter(mutable.deny))
    return mutable
