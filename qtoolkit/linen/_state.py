"""The state of wrapped modules in collections, and the step that updates it.

The collection "qtoolkit" holds, in the scope of the wrapped module, a dictionary for each layer
with matmuls, "self.mlp.Dense_0"; that holds one for each matmul, named after its kernel, "kernel",
or its place, "attend@3:12", with arrays as `products._states` names them. The collection
"qtoolkit_scales" holds learned scales likewise.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import FrozenDict, freeze, unfreeze

from qtoolkit.products.internal import (
    HISTORY,
    LEARNED,
    MODEL,
    MOVING,
    PROBE,
    Key,
    advance,
    as_float32,
    flow,
    observe,
    probe_of,
)
from qtoolkit.scaling import QArray

COLLECTION, SCALES = "qtoolkit", "qtoolkit_scales"
_ROOT = "self"  # the wrapped module
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
    The devices of `jax.pmap` and `jax.shard_map` share one history. Each layer that `nn.scan`
    stacks has its own. A matmul that did not run keeps its history.
    `jax.grad` and `jax.value_and_grad` work as well: with `mutable=["qtoolkit"]`, `apply` returns
    updated histories of inputs and kernels, and cotangents have current scales; without `mutable`,
    or without the collection, all scales are current ones. A warning says so. Calls of `apply` that
    are not differentiated use the delayed scales and do not change them. A matmul with a kernel is
    identified by the kernel, "kernel"; a matmul of two activations, or one of several with one
    kernel, by its place in the code of the module, "attend@3:12": function, line and column. A
    matmul that did not run in `init`, because of an `if` in Python, has no history and uses current
    scales.

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
        from qtoolkit.linen._function import Bound  # it imports this file

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


def _parts(path: Path, part: Any) -> Iterator[tuple[Path, Any]]:
    """The mappings in `part`, the outer ones last."""
    if isinstance(part, Mapping):
        for name, inner in part.items():
            yield from _parts((*path, name), inner)
        yield path, part


def planted_in(variables: Any, root: Path) -> dict[Key, dict[str, Any]]:
    """The states of matmuls in both collections, by the paths of their modules in the model.

    Args:
      root: The path of the module whose variables these are.
    """
    states: dict[Key, dict[str, Any]] = {}
    if isinstance(variables, Mapping):
        for collection in (COLLECTION, SCALES):
            for path, arrays in products_of(variables.get(collection)):
                states.setdefault(_key(root, path), {}).update(as_float32(arrays))
    return states


def _key(root: Path, path: Path) -> Key:
    *around, layer, name = path
    return "/".join(filter(None, (*root, *around, *path_of(layer).split(".")))), name


def with_states(
    collection: Any, root: Path, new: Mapping[Key, Mapping[str, Any]]
) -> dict[str, Any]:
    """The entries of a collection that get new states of matmuls: each where its old one is."""
    places = {_key(root, path): path for path, _ in products_of(collection)}
    changed: dict[str, Any] = {}
    before = unfreeze(collection) if isinstance(collection, FrozenDict) else collection
    for key, arrays in new.items():
        path, name = key
        inner = path[len("/".join(root)) :].strip("/")
        place = places.get(key, (key_of(inner), name))
        first, rest = place[0], place[1:]
        tree = changed.get(first, before.get(first, {}))
        kept = functools.reduce(lambda part, key: part.get(key, {}), rest, tree)
        changed[first] = with_part(tree, rest, {**kept, **as_before(arrays, kept)})
    return changed


def as_before(arrays: Kept, before: Kept) -> dict[str, Any]:
    """Arrays in the dtypes that they had: somebody may have cast the state to bfloat16."""
    return {n: x.astype(before[n].dtype) if n in before else x for n, x in arrays.items()}


def has_nan(arrays: Kept) -> bool:
    """Whether a learned scale has no value yet. Under `jit` nobody can look."""
    scales = (x for name, x in arrays.items() if name in LEARNED)
    known = (x for x in scales if not isinstance(x, jax.core.Tracer) and x.is_fully_addressable)
    return any(bool(np.isnan(np.asarray(x)).any()) for x in known)


def check_started(key: Key, arrays: Kept) -> None:
    """Raises if a learned scale of a matmul has no value yet. Under `jit` it makes NaN."""
    if has_nan(arrays):
        raise ValueError(
            f"wrap: {key[0] or MODEL}: a learned scale of {key[1]} has not been started; write "
            "variables = qtoolkit.linen.start_scales(wrapped, variables, batch) before the "
            "optimizer is made"
        )


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
    return {**tree, first: with_part(tree.get(first, {}), tuple(rest), part)}


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
