"""The state of wrapped modules in collections, and the step that updates it.

The collection "qtoolkit" holds, in the scope of the wrapped module, a dictionary for each layer
with matmuls, "self.mlp.Dense_0"; that holds one for each matmul, "__call__.kernel", with arrays
as `products._states` names them. The collection "qtoolkit_scales" holds learned scales likewise.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.core import FrozenDict, freeze

from qtoolkit.products.internal import (
    HISTORY,
    MOVING,
    PROBE,
    advance,
    flow,
    observe,
    probe_of,
)
from qtoolkit.scaling import QArray

COLLECTION, SCALES = "qtoolkit", "qtoolkit_scales"
_ROOT = "self"  # the wrapped module
MISSING = (
    "differentiated without the state of delayed scales or a warm-up, which the variables lack: "
    'scales are current ones; pass {**variables, "params": params}, with the collection "qtoolkit" '
    "that init returned"
)
KEPT_NOWHERE = (
    "differentiated under nn.jit, or where Flax differentiates inside of the model: layers keep no "
    "state there, so their delayed scales are current ones; use a recipe with current scales for "
    "them, e.g. te_current, or compile the whole step by jax.jit in place of nn.jit"
)

Kept = Mapping[str, Any]
Path = tuple[str, ...]


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
    The devices of `jax.pmap` and `jax.shard_map` share one history; so do layers that `nn.scan`
    stacks inside of the wrapped module. A matmul that did not run keeps its history.
    `jax.grad` and `jax.value_and_grad` work as well: with `mutable=["qtoolkit"]`, `apply` returns
    updated histories of inputs and kernels, and cotangents have current scales; without `mutable`,
    or without the collection, all scales are current ones. A warning says so. Calls of `apply` that
    are not differentiated use the delayed scales and do not change them. A matmul with a kernel is
    identified by method and kernel, "__call__.kernel"; a matmul of two activations by its number
    among these. A matmul that did not run in `init`, because of an `if` in Python, has no history
    and uses current scales.

    Args:
      loss: A function of (variables, *args, **kwargs) that returns a scalar or (scalar, aux). It
        passes the variables to `apply` of wrapped modules.
      has_aux: As in `jax.value_and_grad`. Where the aux holds the state that the loss was given,
        or a part of it, as `apply(..., mutable=True)` returns it unchanged, it gets the state after
        the step. State of other models stays.
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

    def __init__(self, variables: Any, wrt: str | Sequence[str], has_aux: bool) -> None:
        hint = '; pass {"params": params, "qtoolkit": state}'
        check_variables("value_and_grad", variables, hint)
        _check_bridged(variables)
        self.variables, self.wrt, self.has_aux = variables, wrt, has_aux
        self.trained = _trained(variables, wrt)
        self.state = variables.get(COLLECTION, {})

    def pure(self, loss: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
        return loss, self.variables

    def differentiated(
        self, loss: Callable[..., Any], zeros: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any, Any, Any]:
        probes = {
            path: probe_of(kept)
            for path, kept in _parts((), self.state)
            if _is_product(kept) and HISTORY in kept
        }

        def function(trained: Any, probes: Any, zeros: Any) -> Any:
            def with_probe(path: Path, kept: Kept) -> Kept:
                return {**kept, PROBE: probes[path]} if path in probes else kept

            variables = {**self.variables, **trained}
            if COLLECTION in variables:
                variables[COLLECTION] = _mapped(self.state, with_probe)
            out = loss(variables, zeros, *args, **kwargs)
            if not self.has_aux or not isinstance(out, tuple) or len(out) != 2:
                return out  # JAX says what is wrong
            return out[0], _marked(out[1], variables.get(COLLECTION, {}))

        graded = jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=self.has_aux)
        value, (grads, histograms, rows) = graded(self.trained, probes, zeros)
        return value, grads[self.wrt] if isinstance(self.wrt, str) else grads, histograms, rows

    def finished(self, value: Any, grads: Any, probes: Any) -> tuple[Any, ...]:
        state = _mapped(self.state, lambda path, kept: advance(observe(kept, probes.get(path))))
        state = freeze(state) if isinstance(self.state, FrozenDict) else state
        if self.has_aux:
            value = value[0], _with_state(value[1], state)
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Given:
    """Stands in an aux for the part of the state at `path` that the loss was given."""

    path: tuple[str, ...]


def _marked(aux: Any, state: Any) -> Any:
    """What a loss returned beside its value, with `_Given` in place of state that it was given.

    Such state is known by its arrays, which are the same objects.
    """
    parts = {_arrays(part): _Given(path) for path, part in _parts((), state) if _arrays(part)}

    def is_part(node: Any) -> bool:
        return isinstance(node, Mapping) and _arrays(node) in parts

    return jax.tree.map(
        lambda node: parts[_arrays(node)] if is_part(node) else node, aux, is_leaf=is_part
    )


def _with_state(aux: Any, state: Any) -> Any:
    """`aux` with the parts of the state after the step in place of `_Given`.

    With those from before it, whoever merges the updates of all collections into the variables
    would undo the step: histories would never move.
    """
    return jax.tree.map(
        lambda node: at(state, node.path) if isinstance(node, _Given) else node,
        aux,
        is_leaf=lambda node: isinstance(node, _Given),
    )


def _arrays(part: Any) -> tuple[int, ...]:
    """Which arrays they are, but for the probes: of these differentiation makes others."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(part)
    return tuple(id(x) for path, x in leaves if path[-1:] != (jax.tree_util.DictKey(PROBE),))


def _parts(path: Path, part: Any) -> Iterator[tuple[Path, Any]]:
    """The mappings in `part`, the outer ones last."""
    if isinstance(part, Mapping):
        for name, inner in part.items():
            yield from _parts((*path, name), inner)
        yield path, part


def key_of(path: str) -> str:
    """The key of a layer in the collections: "self.mlp.Dense_0", or "self" for the wrapped module.

    A key must not be the name of a submodule. Flax would treat state with the key "Dense_0" as that
    layer's own variables, and an `nn.vmap` around the layer would slice it.
    """
    return f"{_ROOT}/{path}".strip("/").replace("/", ".")


def path_of(key: str) -> str:
    """The path of a layer, with dots, from its key."""
    return key.removeprefix(_ROOT).removeprefix(".")


def products_of(collection: Any) -> list[tuple[Path, Kept]]:
    """The arrays of each matmul in a collection, with its path there."""
    found = _parts((), collection)
    return [(path, part) for path, part in found if part and not _holds_mapping(part)]


def _holds_mapping(part: Kept) -> bool:
    return any(isinstance(inner, Mapping) for inner in part.values())


def at(tree: Any, path: Path) -> Any:
    return functools.reduce(lambda part, name: part[name], path, tree)


def unboxed(parameter: Any) -> Any:
    """The array of a parameter that may lie in a box of Flax, such as `nn.Partitioned`."""
    if not isinstance(parameter, nn.meta.AxisMetadata):
        return parameter
    return jax.tree.leaves(parameter, is_leaf=lambda x: isinstance(x, QArray))[0]


def boxed_as(parameter: Any, array: Any) -> Any:
    """`array` in the box in which the array of `parameter` lies, if it lies in one."""
    is_box = isinstance(parameter, nn.meta.AxisMetadata)
    return parameter.replace_boxed(array) if is_box else array


def with_part(tree: Any, path: Path, part: Any) -> Any:
    """A copy of the tree with `part` at `path`."""
    if not path:
        return part
    first, *rest = path
    return {**tree, first: with_part(tree[first], tuple(rest), part)}


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


def check_variables(where: str, variables: Any, hint: str = "") -> None:
    """Raises unless `variables` is a dictionary with "params"; `hint` ends the message."""
    is_mapping = isinstance(variables, Mapping)
    if not is_mapping or "params" not in variables:
        got = f"has type {type(variables).__name__}"
        if is_mapping:
            got = f"has the keys {', '.join(map(str, variables)) or '(none)'}"
        raise TypeError(
            f"{where}: variables {got}, expected a dictionary of collections with "
            f'"params", as init returns it{hint}'
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
