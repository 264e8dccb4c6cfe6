"""The modules of an nnx model, with their paths and their own parameters."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qtoolkit.nnx._classes import original_class
from qtoolkit.nnx._state import Products, ProductState
from qtoolkit.products.internal import FoundModule as Matched
from qtoolkit.scaling import QArray

_WITH_KERNEL: Any = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)
# Flax's layers that compute matmuls, and the names of these: of kernels, or numbers.
LAYERS: dict[type[nnx.Module], tuple[str, ...]] = {
    nnx.Linear: ("kernel",),
    nnx.LinearGeneral: ("kernel",),
    nnx.Einsum: ("kernel",),
    nnx.Conv: ("kernel",),
    nnx.ConvTranspose: ("kernel",),
    nnx.MultiHeadAttention: ("0", "1"),
    nnx.LoRA: ("lora_a", "lora_b"),
    nnx.Embed: ("embedding",),
}


def matmuls_of_layer(module: Any) -> tuple[str, ...]:
    """The names of the matmuls of a layer of Flax; () for other modules.

    `qwix.apply_lora_to_model` adds further kernels to layers.
    """
    names = next((names for kind, names in LAYERS.items() if isinstance(module, kind)), ())
    return (*names, *adapters(module)) if names else ()


def adapters(module: Any) -> tuple[str, ...]:
    """The names of further kernels of a layer of Flax."""
    if not isinstance(module, tuple(LAYERS)):
        return ()
    known = ("kernel", "bias", "embedding", "lora_a", "lora_b")
    params = (name for name, value in vars(module).items() if isinstance(value, nnx.Param))
    return tuple(name for name in params if name not in known)


def is_of_flax(module: Any) -> bool:
    return original_class(type(module)).__module__.split(".")[0] == "flax"


def stacked(layer: Any) -> tuple[int, ...]:
    """The leading axes of a layer's kernel that `nnx.vmap` added."""
    kernel: Any
    match layer:
        case nnx.MultiHeadAttention():
            return stacked(layer.query)
        case nnx.Embed():
            kernel, rank = layer.embedding, 2
        case nnx.LoRA():
            kernel, rank = layer.lora_a, 2
        case nnx.Linear():
            kernel, rank = layer.kernel, 2
        case nnx.LinearGeneral():
            kernel, axes = layer.kernel, (layer.batch_axis, layer.in_features, layer.out_features)
            rank = sum(map(len, axes))
        case nnx.Einsum() | nnx.Conv() | nnx.ConvTranspose():
            kernel, rank = layer.kernel, len(layer.kernel_shape)
        case _:  # a user's module
            return ()
    return tuple(kernel.shape[: len(kernel.shape) - rank])


class Same:
    """A node as a key of dictionaries: equal to itself alone."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def __hash__(self) -> int:
        return object.__hash__(self.node)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.node is other.node


@dataclasses.dataclass
class FoundModule:
    """A module of a model, with all of its paths.

    Attributes:
      paths: "blocks/0/mlp"; several if it is shared; "" for the model itself.
      kinds: Its type and the types of the modules around it, on all paths: rules may name any.
    """

    module: nnx.Module
    paths: list[str] = dataclasses.field(default_factory=list)
    kinds: list[type] = dataclasses.field(default_factory=list)

    @property
    def kernels(self) -> list[str]:
        """The names of its own parameters that may be kernels: those with two axes or more."""
        params = ((name, x) for name, x in vars(self.module).items() if isinstance(x, nnx.Param))
        return [name for name, x in params if len(getattr(x.get_value(), "shape", ())) > 1]

    @property
    def has_products(self) -> bool:
        """Whether it may compute matmuls: of modules of the user only a trace knows it."""
        if isinstance(self.module, nnx.List | nnx.Dict):
            return False
        is_bridge = isinstance(self.module, nnx.bridge.ToNNX)
        return is_bridge or bool(matmuls_of_layer(self.module)) or not is_of_flax(self.module)

    @property
    def shown(self) -> str:
        return self.paths[0] or "(the model itself)"

    def as_matched(self) -> Matched:
        """What rules match."""
        name = original_class(type(self.module)).__name__
        return Matched(self.paths, self.kinds, name, self.has_products)


def modules_of(model: nnx.Module) -> list[FoundModule]:
    """Every module once, with all its paths; `nnx.iter_modules` gives the first one alone."""
    found: dict[Same, FoundModule] = {}

    def visit(node: Any, path: tuple[str, ...], around: tuple[Any, ...]) -> None:
        if any(node is outer for outer in around):
            return  # a cycle: Flax raises for it later
        around = (*around, node)
        if isinstance(node, Products | ProductState):
            return  # of a model that was wrapped before
        if isinstance(node, nnx.Module):
            this = found.setdefault(Same(node), FoundModule(node))
            this.paths.append("/".join(path))
            this.kinds += [original_class(type(x)) for x in around if isinstance(x, nnx.Module)]
        for key, child in _children(node):
            visit(child, (*path, key), around)

    visit(model, (), ())
    return list(found.values())


def own_parameters(model: nnx.Module) -> Iterator[tuple[str, nnx.Param[Any]]]:
    """The parameters that are attributes of modules, by the first path of the module."""
    for found in modules_of(model):
        for name, value in vars(found.module).items():
            if isinstance(value, nnx.Param):
                yield f"{found.paths[0]}/{name}".lstrip("/"), value


def _children(node: Any) -> list[tuple[str, Any]]:
    """What a node holds, by its keys there."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if all(child is not node for _, child in pairs):
        return [(jax.tree_util.keystr(key, simple=True), child) for key, child in pairs]
    # No JAX container: an array, a constant, or a module that was declared with pytree=False.
    return list(vars(node).items()) if isinstance(node, nnx.Module) else []


def _parameters(where: str, found: FoundModule) -> Iterator[tuple[str, Any]]:
    """A layer's own parameters, with their names as messages begin with them."""
    for name, value in vars(found.module).items():
        if isinstance(value, nnx.Param):
            yield _shown(where, found, name), value.get_value()


def _shown(where: str, found: FoundModule, name: str) -> str:
    return f"{where}: {found.shown}: {type(found.module).__name__}.{name}"


def check_parameters(caller: str, found: FoundModule) -> None:
    """Raises if a layer's own parameters have types or dtypes that cannot be rounded."""
    kernel = vars(found.module).get("kernel")
    if isinstance(found.module, _WITH_KERNEL) and not isinstance(kernel, nnx.Variable | jax.Array):
        raise TypeError(
            f"{_shown(caller, found, 'kernel')} has type {type(kernel).__name__}, expected an "
            f"nnx.Param: somebody else has quantized the layer, as qwix's PtqProvider does; give "
            f"{caller} the model that it was made of, or exclude the layer by a rule"
        )
    for where, raw in _parameters(caller, found):
        if isinstance(raw, QArray) and caller == "wrap":
            raise TypeError(
                f"{where} is a QArray, expected an array: training needs arrays; to run "
                "the model as it is write qtoolkit.nnx.quantize(model, recipe), to train it "
                "dequantize() them"
            )
        dtype = getattr(raw, "dtype", None)
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        if is_of_flax(found.module) and is_float and jnp.finfo(dtype).bits not in (16, 32):
            raise TypeError(
                f"{where} has dtype {dtype}, expected float32, float16 or bfloat16; create the "
                "layer with another param_dtype, or exclude it by a rule with None"
            )


def check_excluded(caller: str, found: FoundModule) -> None:
    """Raises if a layer that a rule excludes has a stored kernel: Flax cannot multiply codes."""
    for where, raw in _parameters(caller, found):
        if isinstance(raw, QArray):
            raise ValueError(
                f"{where} is a QArray, and a rule excludes the layer, expected a recipe for "
                "it; or dequantize() it first"
            )
