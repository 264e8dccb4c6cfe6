"""What GPUs have of their own: a conversion to FP8, and layouts of arrays in memory."""

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import mlir

from qtoolkit.casts._codes import codes_of
from qtoolkit.casts._elementwise import _define, by_platform
from qtoolkit.casts._projection import UNCLAMPED
from qtoolkit.formats import E4M3FN, E5M2, FloatFormat, Format


def has_native_codes(fmt: Format) -> TypeGuard[FloatFormat]:
    """Whether `native_codes` encodes to `fmt`."""
    return fmt in (E4M3FN, E5M2)


def native_codes(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The uint8 codes of float32 `x`, at most the largest value, to nearest even; elementwise."""
    # On GPUs of NVIDIA from compute capability 8.9 on, XLA converts by one instruction,
    # `cvt.rn.satfinite.e4m3x2.f32`, where the arithmetic on bit patterns takes some thirty. The two
    # are equal by definition: PTX ISA says of `.rn` that it rounds to nearest even, of these
    # formats that they have subnormal numbers, and saturation changes nothing in the range of `x`.
    # The benchmark `gpu_training.py` compares all 2**32 numbers.
    return _conversions(fmt)(x)


@functools.lru_cache
def _conversions(fmt: FloatFormat) -> Callable[[jax.Array], jax.Array]:
    def by_integers(x: jax.Array) -> jax.Array:
        return codes_of(x, fmt, UNCLAMPED)

    def by_hardware(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x.astype(fmt.dtype), jnp.uint8)

    return by_platform(
        f"{fmt.name}_codes",
        cpu=by_integers,
        others=by_integers,
        cuda=by_hardware,
        aval=lambda x: x.update(dtype=np.dtype(np.uint8), weak_type=False),
    )


_row_major = Primitive("row_major")


def row_major(x: jax.Array) -> jax.Array:
    """`x`, which a program for one GPU of NVIDIA then stores with its last axis contiguous."""
    # In a program for several devices it does nothing: XLA would gather all shards of an array
    # whose layout is constrained. Inside of `jax.shard_map` each shard is an array by itself.
    return _row_major.bind(x)


def _constrained(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _lower(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
    return _by_constraint(ctx, x) if _is_whole(ctx.module_context.axis_context) else [x]


def _is_whole(place: Any) -> bool:
    """Whether arrays lie on one device each, as JAX describes where a program will run."""
    if hasattr(place, "num_devices"):
        return bool(place.num_devices == 1)
    return place.manual_axes == frozenset(place.mesh.axis_names)


_row_major.def_abstract_eval(lambda x: x)
_define(_row_major, lambda x: x)
_by_constraint = mlir.lower_fun(_constrained, multiple_results=False)
mlir.register_lowering(_row_major, _lower, platform="cuda")
