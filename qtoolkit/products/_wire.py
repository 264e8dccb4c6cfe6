"""Codes in place of numbers on the way between devices.

`gathered` moves the codes of a kernel, which each device has rounded on its shard, where XLA would
gather the kernel itself (`Operand.gather`). `all_to_all` does so for the tokens of experts.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from qtoolkit.formats import SpecLike
from qtoolkit.products._lines import warn
from qtoolkit.scaling import QArray, quantize

Array = jax.Array


def gathered(parts: Any, shape: tuple[int, ...], axis_name: str, axis: int | None = None) -> Any:
    """The codes and scales of an array whose shards along a mesh axis each device then has all.

    Where the axis is not known, as on a single device, or where the shards are the user's own, in a
    `jax.shard_map` over it, these are the parts as they are.

    Args:
      parts: A pytree of arrays with as many axes as the array, or none.
      shape: Of the array.
      axis: See `Operand.gather_axis`.
    """
    if axis is not None and not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"Operand: gather_axis={axis}, and a kernel of shape {shape}, expected an axis of it, "
            f"from {-len(shape)} to {len(shape) - 1}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.axis_names:
        if jax.device_count() > 1:
            warn(
                f"Operand: gather={axis_name!r}, but no mesh with this axis is set where the "
                "matmul is traced: XLA gathers kernels, not their codes; write with "
                "jax.set_mesh(mesh): around the step"
            )
        return parts
    if axis_name in mesh.manual_axes:
        return parts
    if mesh.axis_types[mesh.axis_names.index(axis_name)] == AxisType.Explicit:
        return jax.tree.map(functools.partial(_resharded, axis_name), parts)
    size = mesh.shape[axis_name]
    axis = sharded_axis(shape, size) if axis is None else axis % len(shape)
    if axis is None:
        return parts
    lengths = [p.shape[axis] for p in jax.tree.leaves(parts) if p.ndim == len(shape)]
    if any(n > 1 and n % size for n in lengths):
        warn(
            f"Operand: gather={axis_name!r}, and a kernel of shape {shape} that {size} devices do "
            f"not share evenly along axis {axis}, in whole blocks: XLA moves the kernel, not "
            f"only its codes; shard an axis of a multiple of {size} blocks, and name it with "
            "gather_axis="
        )
    if shape[axis] % size:
        return parts
    # Not a sharding constraint: XLA may move what makes the codes behind it, and gather the kernel.
    gather = functools.partial(lax.all_gather, axis_name=axis_name, axis=axis, tiled=True)
    of_shards = P(*(axis_name if i == axis else None for i in range(len(shape))))
    everywhere = jax.shard_map(
        gather, in_specs=of_shards, out_specs=P(), axis_names={axis_name}, check_vma=False
    )

    def whole(part: Array) -> Array:
        is_sharded = part.ndim == len(shape) and part.shape[axis] % size == 0
        return everywhere(part) if is_sharded else part

    return jax.tree.map(whole, parts)


def _resharded(axis_name: str, part: Array) -> Array:
    spec = jax.typeof(part).sharding.spec
    return jax.sharding.reshard(part, P(*(_without(axis_name, names) for names in spec)))


def sharded_axis(shape: tuple[int, ...], size: int) -> int | None:
    """The axis along which an array lies in `size` shards: the longest one that can be cut."""
    lengths = [n if n % size == 0 else 0 for n in shape]
    return lengths.index(max(lengths)) if any(lengths) else None


def _without(axis_name: str, names: Any) -> Any:
    """The mesh axes of one axis of an array, without `axis_name`."""
    if not isinstance(names, tuple):
        return None if names == axis_name else names
    return tuple(name for name in names if name != axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def all_to_all(
    x: Array,
    axis_name: str,
    split_axis: int,
    concat_axis: int,
    spec: SpecLike = "mxfp8_e4m3",
    gradient: SpecLike | None = None,
) -> Array:
    """`jax.lax.all_to_all(..., tiled=True)` of codes and scales: tokens on their way to experts.

    Each device rounds its own tokens, before they are sent. The experts get what the codes stand
    for, in the dtype of `x`. In the backward pass cotangents go back, in high precision or as
    codes.

    Args:
      x: float32, float16 or bfloat16, in a `jax.shard_map` over `axis_name`.
      axis_name, split_axis, concat_axis: As for `jax.lax.all_to_all`.
      spec: The format: with blocks along the last axis, such as "mxfp8_e4m3", or
        `BlockFormat.token("e4m3fn")`. Tokens then have scales of their own, so the result is that
        of a single device.
      gradient: The format of cotangents; None: they are not rounded.

    Raises:
      ValueError: An axis is the last one, whose blocks would be torn apart; or the format has a
        scale that tokens share.

    Examples:
      >>> mesh = jax.make_mesh((1,), ("experts",))
      >>> send = lambda x: qt.products.all_to_all(x, "experts", 0, 1, "mxfp8_e4m3")
      >>> specs = {"in_specs": jax.P("experts"), "out_specs": jax.P("experts")}
      >>> x = jnp.asarray([[[0.3, 448.0]]])  # 0.3 becomes 0.3125
      >>> jax.shard_map(send, mesh=mesh, **specs)(x)
      Array([[[3.125e-01, 4.480e+02]]], dtype=float32)
    """
    return _sent(x, axis_name, split_axis, concat_axis, spec)


def _forward(
    x: Array, axis_name: str, split: int, concat: int, spec: Any, gradient: Any
) -> tuple[Array, None]:
    return _sent(x, axis_name, split, concat, spec), None


def _backward(
    axis_name: str, split: int, concat: int, spec: Any, gradient: Any, _: None, cotangent: Array
) -> tuple[Array]:
    if gradient is not None:
        return (_sent(cotangent, axis_name, concat, split, gradient),)
    return (lax.all_to_all(cotangent, axis_name, concat, split, tiled=True),)


all_to_all.defvjp(_forward, _backward)


def _sent(x: Array, axis_name: str, split: int, concat: int, spec: SpecLike) -> Array:
    q = quantize(x, spec)
    last = x.ndim - 1
    is_by_token = q.scale is None or q.blocks.lengths[:-1] == (1,) * last
    shared = q.tensor_scale is not None or not is_by_token
    if last in (split % x.ndim, concat % x.ndim) or shared:
        raise ValueError(
            f"all_to_all: axes {split} and {concat} of {x.dtype}{list(x.shape)} in "
            f"{q.spec.name}, expected axes before the last one, and a format whose scales belong "
            'to one token, such as "mxfp8_e4m3" or qtoolkit.BlockFormat.token("e4m3fn")'
        )

    def send(part: Array) -> Array:
        return lax.all_to_all(part, axis_name, split, concat, tiled=True)

    scale = None if q.scale is None else send(q.scale)
    return QArray(send(q.codes), scale, q.spec, dtype=q.dtype).dequantize().astype(x.dtype)
