"""Makes an elementwise function a single JAX primitive, which is traced once for all shapes.

Rounding an array takes twenty to sixty operations of JAX. As ordinary operations they are traced
again for every shape, differentiated, and lowered one by one, which was most of the time of tracing
a quantized model. Here such a function becomes one primitive. Its jaxpr, of scalars, is traced once
for each combination of dtypes, and replayed on arrays once for each shape in a program.
"""

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir, xla

Function = TypeVar("Function", bound=Callable[..., Any])


def elementwise(function: Function) -> Function:
    """Makes `function` one operation, with derivative zero.

    Use it inside of functions that have a derivative rule of their own.

    Args:
      function: Takes arrays and pytrees of arrays, which are broadcast to one shape, and other
        hashable arguments. Returns an array of that shape, or a pytree of such. Each
        element of the result must depend only on the elements at its place. It may use operations
        of JAX that work on scalars as on arrays, and `look_up`; no reductions, no reshapes.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if _inlined.depth:
            return function(*arguments)
        leaves, structure = jax.tree.flatten(arguments)
        is_array = tuple(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
        arrays = list(itertools.compress(leaves, is_array))
        if not arrays:  # numbers of NumPy alone
            return function(*arguments)
        others = tuple(leaf for leaf, it_is in zip(leaves, is_array, strict=True) if not it_is)
        # For the cache: 1 and 1.0 are equal, and so are 0.0 and -0.0, but not what they make.
        kinds = tuple(
            (type(x), str(x) if isinstance(x, float | np.floating) else "") for x in others
        )
        if len({x.shape for x in arrays}) > 1:
            arrays = jnp.broadcast_arrays(*arrays)
        dtypes = tuple(x.dtype for x in arrays)
        x64 = bool(jax.config.read("jax_enable_x64"))
        traced = _traced(function, structure, is_array, others, kinds, dtypes, x64)
        outs = _elementwise.bind(*_alike(*arrays), jaxpr=traced.jaxpr, x64=x64)
        return jax.tree.unflatten(traced.structure, outs)

    return call  # type: ignore[return-value]


class _Traced(NamedTuple):
    jaxpr: ClosedJaxpr
    structure: Any  # of the result


class _Inlined(threading.local):
    """Whether the functions called are parts of one that is being traced."""

    depth = 0


_inlined = _Inlined()


@functools.lru_cache(maxsize=4096)
def _traced(
    function: Callable[..., Any],
    structure: Any,
    is_array: tuple[bool, ...],
    others: tuple[Any, ...],
    kinds: tuple[Any, ...],
    dtypes: tuple[Any, ...],
    x64: bool,
) -> _Traced:
    """Trace a function of scalars. `kinds` and `x64` are only part of the cache's key."""
    del kinds, x64
    out_structure = None

    def flat(*numbers: jax.Array) -> list[jax.Array]:
        nonlocal out_structure
        arrays, rest = iter(numbers), iter(others)
        leaves = [next(arrays if it_is else rest) for it_is in is_array]
        _inlined.depth += 1
        try:
            out = function(*jax.tree.unflatten(structure, leaves))
        finally:
            _inlined.depth -= 1
        outs, out_structure = jax.tree.flatten(out)
        return outs

    numbers = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
    # No mesh: `jnp.full_like` would reshard its constant to the mesh of this first call, and the
    # jaxpr could not be replayed on another mesh, Explicit after Auto.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return _Traced(jax.make_jaxpr(flat)(*numbers), out_structure)


def _evaluated(*arrays: jax.Array, jaxpr: ClosedJaxpr, for_cpu: bool) -> list[jax.Array]:
    shape = inner = arrays[0].shape
    # XLA evaluates `bitcast_convert` of a constant by copying its bytes. If the operand is a
    # transposed constant that was passed to a function (an inner `jax.jit`), it stands in memory in
    # the order of the constant, and the result has its elements at wrong places (jax 0.10 and 0.12;
    # `jnp.signbit` shows it, too). A reshape puts the elements into their order. For CPUs a barrier
    # does better, which XLA removes before it fuses; for GPUs XLA removes it late, and a cast would
    # not be fused with what makes its operand.
    if len(shape) > 1 and for_cpu:
        arrays = tuple(map(lax.optimization_barrier, arrays))
    elif len(shape) > 1:
        inner = (1, *shape)
    # Compute arrays of one element as scalars; otherwise XLA needs one simplification pass over the
    # whole program for each operation.
    if all(n == 1 for n in shape) and not is_sharded(arrays[0]):
        inner = ()
    if inner == shape:
        return _replayed(*arrays, jaxpr=jaxpr)
    reshaped = (lax.reshape(x, inner) for x in arrays)
    return [lax.reshape(x, shape) for x in _replayed(*reshaped, jaxpr=jaxpr)]


def _lowered(
    ctx: mlir.LoweringRuleContext,
    *arrays: Any,
    jaxpr: ClosedJaxpr,
    x64: bool,
    for_cpu: bool = False,
) -> Any:
    # Programs are lowered outside of the `jax.enable_x64` that they were traced in. Without it
    # constants of 64 bits would lose half of them, also in the operations inside of this one.
    with jax.enable_x64(True) if x64 else nullcontext():
        return mlir.lower_fun(_evaluated)(ctx, *arrays, jaxpr=jaxpr, for_cpu=for_cpu)


def is_sharded(x: jax.Array) -> bool:
    """Whether `x` lies along an axis of an Explicit mesh.

    A `lax.cond` must not take or return such arrays. Under `vmap` its predicate may differ between
    examples; JAX then turns it into a select whose predicate lacks their sharding, and raises.
    """
    return any(entry is not None for entry in jax.typeof(x).sharding.spec)


def _replayed(*arrays: jax.Array, jaxpr: ClosedJaxpr) -> list[jax.Array]:
    """Evaluates the jaxpr, which was traced with scalars, on arrays."""
    values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values |= zip(jaxpr.jaxpr.invars, arrays, strict=True)
    is_varying = any(jax.typeof(x).manual_axis_type.varying for x in arrays)

    def read(variable: Any) -> Any:
        if isinstance(variable, Literal):
            aval: Any = variable.aval
            return np.asarray(variable.val, aval.dtype)
        return values[variable]

    for equation in jaxpr.jaxpr.eqns:
        operands: Any = [read(variable) for variable in equation.invars]
        if "jaxpr" in equation.params:  # a function of JAX with a jit of its own
            outs = _replayed(*operands, jaxpr=equation.params["jaxpr"])
        else:
            if equation.primitive in _OF_ONE_SHAPE:
                operands = _of_one_shape(operands)
            if is_varying:
                operands = varying_alike(*operands)
            outs = equation.primitive.bind(*operands, **equation.params)
            outs = outs if equation.primitive.multiple_results else [outs]
        values |= zip(equation.outvars, outs, strict=True)
    return _of_one_shape([*map(read, jaxpr.jaxpr.outvars), *arrays])[: len(jaxpr.out_avals)]


def _of_one_shape(operands: list[Any]) -> list[Any]:
    """Broadcast constants to the shape of the arrays."""
    like = next((x for x in operands if np.ndim(x)), None)
    if like is None:
        return operands
    return [x if np.ndim(x) else lax.full_like(like, x, dtype=x.dtype) for x in operands]


_elementwise = Primitive("elementwise")
_elementwise.multiple_results = True
_look_up = Primitive("look_up")
# Operations that do not broadcast scalars, as sums and comparisons do.
_OF_ONE_SHAPE: set[Any] = {lax.select_n_p}


def by_platform(
    name: str,
    *,
    cpu: Callable[..., jax.Array],
    others: Callable[..., jax.Array],
    aval: Callable[..., Any],
    cuda: Callable[..., jax.Array] | None = None,
) -> Callable[..., jax.Array]:
    """A function of arrays of one shape, elementwise: `cpu` on CPUs, `cuda` on GPUs of NVIDIA where
    it is given, `others` elsewhere.

    `jax.lax.platform_dependent` would trace all versions at every use, and leave conditionals in
    the program. This is a single operation when it is traced, and becomes one of the versions when
    it is lowered. Its derivative is zero, like that of `elementwise`.

    Args:
      aval: Computes the type of the result from those of the arguments.
    """
    primitive = Primitive(name)
    _OF_ONE_SHAPE.add(primitive)
    primitive.def_abstract_eval(aval)
    _define(primitive, others, cpu=cpu, cuda=cuda)
    return lambda *operands: primitive.bind(*_alike(*operands))


@dataclasses.dataclass(frozen=True, eq=False)
class _Table:
    """Constants to look up, hashable by identity."""

    entries: np.ndarray


def look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """The entries of a table at indices, which must lie inside it; elementwise."""
    return _look_up.bind(index, table=_Table(table))


def _entries(index: jax.Array, *, table: _Table) -> jax.Array:
    sharding = jax.typeof(index).sharding  # Explicit meshes ask for it
    entries = jnp.asarray(table.entries).at[index]
    return entries.get(mode="promise_in_bounds", out_sharding=sharding)


def varying_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Marks all arrays as varying along every mesh axis along which one of them varies.

    Inside `jax.shard_map` JAX's own operations do this for their operands; our primitives need it
    done. The cotangent of an array that did not vary becomes the sum over the shards.
    """
    if len(arrays) == 1:
        return arrays
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*varying)
    return tuple(
        lax.pcast(x, tuple(every - along), to="varying") if along != every else x
        for x, along in zip(arrays, varying, strict=True)
    )


def _alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """`varying_alike`; on Explicit meshes also reshard all arrays as one of them is."""
    if len(arrays) == 1:
        return arrays
    shapes = list(dict.fromkeys(x.shape for x in arrays))
    if len(shapes) > 1:
        raise TypeError(f"elementwise: arrays of shapes {' and '.join(map(str, shapes))}, not one")
    shardings = [jax.typeof(x).sharding for x in arrays]
    if any(one.spec != shardings[0].spec for one in shardings):
        best = max(shardings, key=lambda one: sum(entry is not None for entry in one.spec))
        arrays = tuple(jax.sharding.reshard(x, best) for x in arrays)
    return varying_alike(*arrays)


def _define(
    primitive: Primitive,
    function: Callable[..., Any],
    **by_platform: Callable[..., Any] | None,
) -> None:
    """Define how an operation is lowered, mapped and differentiated.

    It is lowered to `function`, except on platforms that have a function of their own.
    """
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    ad.primitive_jvps[primitive] = functools.partial(_constant, primitive)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batched, primitive)
    several = primitive.multiple_results
    mlir.register_lowering(primitive, mlir.lower_fun(function, several))
    for platform, own in by_platform.items():
        if own is not None:
            lower = mlir.lower_fun(own, several)
            mlir.register_lowering(primitive, lower, platform=platform)


def _constant(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    del tangents
    out = primitive.bind(*primals, **params)
    return out, jax.tree.map(lambda x: ad.Zero(jax.typeof(x).to_tangent_aval()), out)


def _batched(
    primitive: Primitive,
    axis: Any,
    operands: tuple[jax.Array, ...],
    places: tuple[Any, ...],
    **params: Any,
) -> tuple[Any, Any]:
    if all(place is None for place in places):  # JAX calls such rules then, too
        out = primitive.bind(*operands, **params)
        return out, jax.tree.map(lambda x: None, out)
    moved = (
        # Along an axis of an Explicit mesh, if that is what is mapped.
        batching.broadcast(x, axis.size, 0, axis.explicit_mesh_axis)
        if place is None
        else jnp.moveaxis(x, place, 0)
        for x, place in zip(operands, places, strict=True)
    )
    out = primitive.bind(*moved, **params)
    return out, jax.tree.map(lambda x: 0, out)


_elementwise.def_abstract_eval(
    lambda x, *_, jaxpr, x64: [x.update(dtype=y.dtype, weak_type=False) for y in jaxpr.out_avals]
)
_define(_elementwise, _evaluated)
mlir.register_lowering(_elementwise, _lowered)
mlir.register_lowering(_elementwise, functools.partial(_lowered, for_cpu=True), platform="cpu")
_look_up.def_abstract_eval(lambda x, table: x.update(dtype=table.entries.dtype, weak_type=False))
_define(_look_up, _entries)


def _by_place(x: jax.Array) -> jax.Array:
    axes = [axis for axis, n in enumerate(x.shape) if not isinstance(n, int) or n > 1]
    if not axes:
        return lax.eq(x, x)
    sharding = jax.typeof(x).sharding
    sharding = sharding if sharding.mesh.explicit_axes else None
    iotas = (
        lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=sharding) for axis in axes
    )
    place = functools.reduce(lax.bitwise_or, iotas)
    place, _ = varying_alike(place, x)
    return lax.ne(place, lax.full_like(place, np.uint32(2**32 - 1)))


_is_somewhere = Primitive("is_somewhere")
_is_somewhere.def_abstract_eval(lambda x: x.update(dtype=np.dtype(bool), weak_type=False))
_define(_is_somewhere, _by_place)


def is_somewhere(x: jax.Array) -> jax.Array:
    """True for every element, in a way that XLA cannot simplify to a constant."""
    # It compares the OR of an element's indices with a number of 32 ones. Indices are below 2**31,
    # so LLVM, which runs after XLA, proves the result and drops the comparison. From the sum of the
    # indices it cannot: dividing tiles of 128x128 took a third longer.
    return _is_somewhere.bind(x)


def traced_for_cpu() -> bool:
    """Whether programs traced now run on CPUs unless their arguments lie elsewhere.

    For choices that must be visible in a trace, as policies of `jax.checkpoint` need it. To trace
    for a GPU on a host without one, set `jax.default_device("gpu")`.
    """
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend() == "cpu"
    return getattr(device, "platform", device) == "cpu"


# `lax.optimization_barrier` on CPUs, nothing elsewhere.
barrier_on_cpu = by_platform(
    "barrier_on_cpu", cpu=lax.optimization_barrier, others=lambda x: x, aval=lambda x: x
)
_on_cpu = by_platform(
    "on_cpu",
    cpu=lambda: jnp.asarray(True),
    others=lambda: jnp.asarray(False),
    aval=lambda: jax.typeof(np.True_),
)


def on_cpu() -> jax.Array:
    """Whether the program runs on a CPU, for the predicate of a `lax.cond`.

    It becomes a constant when the program is compiled (or loaded, if it was exported for several
    platforms), and XLA keeps only one branch. On CPUs a branch is useful, because XLA does not
    repeat its work in every kernel that reads the result. On GPUs it makes the device wait for the
    host.
    """
    return _on_cpu()
