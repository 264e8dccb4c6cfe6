"""What post-training methods need of a linen module."""

from collections.abc import Mapping
from typing import Any

import jax
from flax.core import DenyList
from flax.traverse_util import flatten_dict, unflatten_dict

from qtoolkit.linen._state import boxed_as, check_variables, unboxed
from qtoolkit.post_training.internal import PlainModel
from qtoolkit.products.internal import Batch


def plain_model(where: str, module: Any, variables: Any, method: Any = None) -> PlainModel:
    """A module that is not wrapped, as the methods run it."""
    check_variables(where, variables)
    if getattr(module, "qtoolkit_rules", None) is not None:
        raise ValueError(
            f"{where}: {type(module).__name__} is wrapped, and the method needs the inputs of its "
            "high-precision matmuls, expected the module before wrap; pass that and a recipe"
        )

    def call(arrays: Mapping[str, Any], batch: Batch) -> Any:
        given = {**variables, "params": with_params(variables, arrays)}
        others = {"rngs": {"params": jax.random.key(0)}, "mutable": DenyList(["params"])}

        def apply(*inputs: Any, **named: Any) -> Any:
            return module.apply(given, *inputs, method=method, **others, **named)

        return batch.given_to(apply)

    flat = flatten_dict(variables["params"])
    return PlainModel(call, {"/".join(path): unboxed(x) for path, x in flat.items()})


def with_params(variables: Any, arrays: Mapping[str, Any]) -> Any:
    """The tree of parameters with arrays by name."""
    flat = flatten_dict(variables["params"])
    names = {path: "/".join(path) for path in flat}
    new = {path: boxed_as(x, arrays.get(names[path], unboxed(x))) for path, x in flat.items()}
    return unflatten_dict(new)
