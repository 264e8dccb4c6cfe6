"""What post-training methods need of an nnx model."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from qtoolkit.nnx._function import site_of
from qtoolkit.nnx._modules import Same
from qtoolkit.nnx._report import check_module
from qtoolkit.post_training.internal import PlainModel
from qtoolkit.products.internal import Batch


def plain_model(where: str, model: Any) -> PlainModel:
    """A model that is not wrapped, as the methods run it."""
    check_module(where, model)
    if any(site_of(module) is not None for _, module in nnx.iter_modules(model)):
        raise ValueError(
            f"{where}: {type(model).__name__} is wrapped, and the method needs the inputs of its "
            "high-precision matmuls, expected the model before wrap; pass that and a recipe"
        )

    def call(arrays: Mapping[str, Any], batch: Batch) -> Any:
        return batch.given_to(with_params(model, arrays))

    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return PlainModel(call, {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat})


def with_params(model: nnx.Module, params: Mapping[str, Any]) -> Any:
    """A copy of a model with other values of its parameters, by name."""
    graph, old, *rest = nnx.split(model, nnx.Param, ...)
    flat = nnx.to_flat_state(old)
    leaves = [(path, leaf.replace(params["/".join(map(str, path))])) for path, leaf in flat]
    return nnx.merge(graph, nnx.from_flat_state(leaves), *rest, copy=True)


def parameter_names(model: nnx.Module) -> dict[Same, str]:
    """The names of a model's parameters, as in `plain_model`.

    A Variable that several layers share has one name, which need not be a path of each layer.
    """
    nodes = nnx.iter_graph(model, graph=True)
    return {Same(x): "/".join(map(str, path)) for path, x in nodes if isinstance(x, nnx.Param)}
