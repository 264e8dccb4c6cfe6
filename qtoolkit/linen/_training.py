"""`value_and_grad`: a training step that also updates the state of matmuls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax.core import FrozenDict, freeze

from qtoolkit.linen._function import Bound
from qtoolkit.linen._state import COLLECTION, Kept, Path, as_before, check_variables, products_of
from qtoolkit.products.internal import (
    HISTORY,
    MOVING,
    PROBE,
    advance,
    as_float32,
    flow,
    observe,
    probe_of,
)


def value_and_grad(
    loss: Callable[..., Any],
    *,
    has_aux: bool = False,
    wrt: str | Sequence[str] = "params",
    metrics: bool = False,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for wrapped modules: it also updates delayed scales and keys.

        value, grads, state = qtoolkit.linen.value_and_grad(loss)(variables, batch)
        params = optax.apply_updates(variables["params"], updates)
        variables = {**variables, "params": params, "qtoolkit": state}

    A step with an infinity or a NaN in an operand or a cotangent does not change the histories of
    that matmul. Its state `bad` counts such steps, and those with an operand that is more than
    twice as large as the history by which it is scaled: without a `margin` such elements saturate.
    The devices of `jax.pmap` and `jax.shard_map` share one history. Each layer that `nn.scan`
    stacks has its own. A matmul that did not run keeps its history.
    `jax.grad` and `jax.value_and_grad` work as well: with `mutable=["qtoolkit"]`, `apply` returns
    updated histories of inputs and kernels, and cotangents have current scales; without `mutable`,
    or without the collection, all scales are current ones. A warning says so. Calls of `apply` that
    are not differentiated use the delayed scales and do not change them. A matmul with a kernel is
    identified by the kernel, "kernel"; a matmul of two activations, or one of several with one
    kernel, by the text of its code in the module, "attend@matmul(q,k_T)". A matmul that did not run
    in `init`, because of an `if` in Python, has no history and uses current scales.

    Args:
      loss: A function of (variables, *args, **kwargs) that returns a scalar or (scalar, aux). It
        passes the variables to `apply` of wrapped modules.
      has_aux: As in `jax.value_and_grad`. Where the aux holds the collection "qtoolkit", as
        `apply(..., mutable=True)` returns it, that is the state before the step.
      wrt: The collection to differentiate by, or several: ("params", "qtoolkit_scales") where
        scales are learned.
      metrics: As for `qtoolkit.nnx.value_and_grad`; they are the last result.

    Returns:
      A function of (variables, *args, **kwargs), where `variables` is the dictionary of collections
      that `init` returned. It returns (value, gradients, state), or ((value, aux), gradients,
      state). Gradients have the structure of variables["params"], or of the collection that `wrt`
      names; if it names several, they are a dictionary by name. State is the collection "qtoolkit"
      after the step, empty if `variables` has none.

    Raises:
      TypeError: `variables` is not such a dictionary, or holds kernels from `quantize`.
      ValueError: `wrt` names a collection that `variables` lacks, or "qtoolkit", which is state;
        an nnx model in `nnx.bridge.to_linen` keeps histories or keys, which cannot be updated here.

    Examples:
      >>> module = qt.linen.wrap(nn.Dense(1), qt.recipes.te_delayed_hybrid)
      >>> x = jnp.asarray([[0.3, 448.0]])
      >>> variables = module.init(jax.random.key(0), x)
      >>> step = qt.linen.value_and_grad(lambda variables, x: module.apply(variables, x).mean())
      >>> loss, grads, state = step(variables, x)
      >>> [f"{g:.4f}" for g in grads["kernel"].ravel()]  # x, of which 0.3 was rounded
      ['0.3125', '448.0000']
    """

    def function(variables: Any, *args: Any, **kwargs: Any) -> Any:
        step = _Step(variables, wrt, has_aux)
        return flow.value_and_grad(step, loss, args, kwargs, metrics=metrics)

    return function


class _Step:
    """A training step with the variables of a linen module, see `products._flow.Step`."""

    package = "linen"

    def __init__(self, variables: Any, wrt: str | Sequence[str], has_aux: bool) -> None:
        hint = '; pass {"params": params, "qtoolkit": state}'
        check_variables("value_and_grad", variables, hint)
        _check_bridged(variables)
        self.variables, self.wrt, self.has_aux = variables, wrt, has_aux
        self.trained = _trained(variables, wrt)
        self.state = variables.get(COLLECTION, {})

    def called(self, loss: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return Bound.of(loss, self.variables, args, kwargs)

    def differentiated(
        self, loss: Callable[..., Any], zeros: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any, Any, Any]:
        probes = {path: probe_of(kept) for path, kept in products_of(self.state) if HISTORY in kept}

        def function(trained: Any, probes: Any, zeros: Any) -> Any:
            def with_probe(path: Path, kept: Kept) -> Kept:
                return {**kept, PROBE: probes[path]} if path in probes else kept

            variables = {**self.variables, **trained}
            if COLLECTION in variables:
                variables[COLLECTION] = _mapped(self.state, with_probe)
            return loss(variables, zeros, *args, **kwargs)

        graded = jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=self.has_aux)
        value, (grads, histograms, rows) = graded(self.trained, probes, zeros)
        return value, grads[self.wrt] if isinstance(self.wrt, str) else grads, histograms, rows

    def finished(self, value: Any, grads: Any, probes: Any) -> tuple[Any, ...]:
        def after(path: Path, kept: Kept) -> Kept:
            return as_before(advance(observe(as_float32(kept), probes.get(path))), kept)

        state = _mapped(self.state, after)
        state = freeze(state) if isinstance(self.state, FrozenDict) else state
        return value, grads, state


def _check_bridged(variables: Mapping[str, Any]) -> None:
    """Raises if an nnx model in `nnx.bridge.to_linen` has state, which nobody would update.

    Its collections have the names of nnx's types of variables, with the model's attributes inside.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(variables.get("ScalingState", {}))
    for path, _ in leaves:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if names and names[-1] in MOVING:
            raise ValueError(
                f"value_and_grad: {'/'.join(map(str, names))} is state of an nnx model in "
                "nnx.bridge.to_linen, which cannot be updated here, expected a recipe without "
                "Delayed scaling and stochastic rounding, e.g. te_current; or train the model with "
                "qtoolkit.nnx.value_and_grad"
            )


def _trained(variables: Mapping[str, Any], wrt: str | Sequence[str]) -> dict[str, Any]:
    """The collections to differentiate by."""
    names = tuple(wrt) if isinstance(wrt, Iterable) and not isinstance(wrt, str) else (wrt,)
    known = [name for name in variables if name != COLLECTION]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise ValueError(
            f"value_and_grad: wrt={wrt!r}, expected collections among {', '.join(known)}"
        )
    return {name: variables[name] for name in names}


def _mapped(state: Any, function: Callable[[Path, Kept], Kept], path: Path = ()) -> Any:
    """The collection with `function` of each matmul."""
    if _is_product(state):
        return function(path, state)
    if isinstance(state, Mapping):
        return {name: _mapped(child, function, (*path, name)) for name, child in state.items()}
    return state


def _is_product(node: Any) -> bool:
    return isinstance(node, Mapping) and any(
        name in node and not isinstance(node[name], Mapping) for name in MOVING
    )
