"""Updates the state of modules from `qtoolkit.linen.wrap` that run inside `nnx.bridge.ToNNX`.

`ToNNX` keeps the collection "qtoolkit" as nested dictionaries of variables, whose type nnx makes
from the collection's name. During a `qtoolkit.nnx.value_and_grad` each matmul in it gets a probe
next to its history, as in `qtoolkit.linen.value_and_grad`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flax import nnx

from qtoolkit.products.internal import HISTORY, MOVING, PROBE, advance, observe, probe_of

Path = tuple[Any, ...]


def bridged_state() -> type[nnx.Variable[Any]]:
    """The type of variables in the collection "qtoolkit"."""
    return nnx.variable_type_from_name("qtoolkit", allow_register=True)


def is_bridged_probe(path: Path, variable: Any) -> bool:
    """A filter of nnx."""
    kind = getattr(variable, "type", type(variable))
    return path[-1] == PROBE and issubclass(kind, bridged_state())


@contextmanager
def bridged_probes(model: nnx.Module) -> Iterator[None]:
    """In this context the matmuls of linen modules in `model` have probes."""
    for _, node in _products(model):
        if HISTORY in node:
            node[PROBE] = bridged_state()(probe_of(node))
    try:
        yield
    finally:
        for _, node in _products(model):  # nnx may have put other dictionaries in their place
            node.pop(PROBE, None)


def roll_bridged(model: nnx.Module, histograms: dict[Path, Any]) -> None:
    """Updates histories after a step; `histograms` are the gradients of the probes, by path."""
    for path, node in _products(model):
        arrays = {name: variable[...] for name, variable in node.items()}
        for name, value in advance(observe(arrays, histograms.get((*path, PROBE)))).items():
            node[name][...] = value


def _products(model: nnx.Module) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The state of each matmul of the linen modules in `model`, with its path."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.bridge.ToNNX):
            for name, child in vars(module).items():
                yield from _within(child, (*path, name))


def _within(node: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if not isinstance(node, dict):
        return
    if any(isinstance(node.get(name), bridged_state()) for name in MOVING):
        yield path, node
    for name, child in node.items():
        yield from _within(child, (*path, name))
