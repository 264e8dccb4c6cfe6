"""Two rounded operands multiplied: emulated in high precision, or natively in 8 bits."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    differentiable_widened,
    dtype_from_codes,
    elementwise,
    from_stored,
    holds,
    power_from_stored,
    power_to_stored,
    traced_for_cpu,
)
from qtoolkit.formats import E4M3FN, E8M0FNU, FLOAT32, BlockFormat, FloatFormat, Format
from qtoolkit.products._bilinear import Bilinear, DotGeneral
from qtoolkit.products._residuals import code_values, in_place, poisoned
from qtoolkit.products._rounded import LARGEST, Rounded
from qtoolkit.products._scaled import Blocked, Scaled, times_scales
from qtoolkit.scaling.internal import Blocks, blocks_of, explicit_spec, single_scale

Array = jax.Array
_STATIC: Any = {"static": True}
_BFLOAT16_DIGITS = 8  # significant bits
_MX_BLOCK = 32
_LEAST_EXPONENT = -126  # of bfloat16's normal numbers; XLA for CPUs reads smaller ones as zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
    """One of the three matmuls of a product, without its operands: forward, dgrad or wgrad.

    Attributes:
      function: The bilinear function.
      extra: Its integer arrays.
      contracted: Which axes of the first and of the second operand are summed.
      dtype: The dtype of the result that is wanted.
      is_native: Whether XLA should be given operands of 8 bits.
      side: None for the forward matmul of lhs and rhs. 0 for dgrad, the matmul of the cotangent and
        rhs, which gives the gradient of lhs. 1 for wgrad, that of the cotangent and lhs.
      gradient: The shape of that gradient, as float32.
    """

    function: Bilinear = dataclasses.field(metadata=_STATIC)
    extra: tuple[Array, ...]
    contracted: tuple[tuple[int, ...], tuple[int, ...]] = dataclasses.field(metadata=_STATIC)
    dtype: Any = dataclasses.field(metadata=_STATIC)
    is_native: bool = dataclasses.field(metadata=_STATIC)
    side: int | None = dataclasses.field(default=None, metadata=_STATIC)
    gradient: jax.ShapeDtypeStruct | None = dataclasses.field(default=None, metadata=_STATIC)

    def __call__(self, first: Any, second: Any, dtype: Any = jnp.float32) -> Array:
        if self.side is None or self.gradient is None:
            return self.function(first, second, *self.extra, dtype=dtype)
        is_scaled = isinstance(first, Blocked | Scaled)
        if is_scaled or not any(any(explicit_spec(x)) for x in (first, second)):
            out = self.function.transposed(
                self.side, first, second, self.gradient, *self.extra, dtype=dtype
            )
            if out is not None:
                return out
        transpose = jax.linear_transpose(lambda x: self.placed(x, second), self.gradient)
        return transpose(first.astype(jnp.float32))[0]

    def placed(self, x: Array, other: Array) -> Array:
        """The function itself in float32, with `x` as the operand on `side`."""
        x, other = x.astype(jnp.float32), other.astype(jnp.float32)
        lhs, rhs = (other, x) if self.side else (x, other)
        return self.function(lhs, rhs, *self.extra)


def multiplied(part: Part, first: Rounded, second: Rounded) -> Array:
    """The matmul of two rounded operands: native if the recipe asks for it and XLA can, else
    emulated. `twice_differentiable` computes the same and has a derivative also where it is native.

    Returns:
      float32; natively bfloat16 where that is wanted. (float16 does not hold a result before it is
      scaled.)
    """
    native = native_operands(part, first, second) if part.is_native else None
    if native is None:
        return emulated(part, first, second)
    out_dtype = part.dtype if part.dtype == jnp.bfloat16 else jnp.float32
    first_operand, second_operand, scale = native
    out = part(first_operand, second_operand, out_dtype)
    if scale is None:
        return out
    # One scalar in the dtype of the result is the only form that XLA for GPUs folds into the call
    # of cuBLASLt: two scalars, or a float32 one for a bfloat16 result, cost a pass over the result.
    # Without a barrier XLA's compiler for GPUs pulls what makes the scale into the kernel of the
    # matmul and fails (jaxlib 0.11.2: "Expected instruction to have shape equal to f32[]").
    return out * lax.optimization_barrier(scale).astype(out.dtype)


twice_differentiable = jax.custom_jvp(multiplied)


@twice_differentiable.defjvp
def _twice_differentiable_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    # Neither 8-bit arrays nor `lax.scaled_dot` have a tangent: take that of the emulated part.
    out = twice_differentiable(*primals)
    return out, jax.jvp(emulated, primals, tangents)[1].astype(out.dtype)


def emulated(multiply: Callable[[Array, Array], Array], first: Rounded, second: Rounded) -> Array:
    """`multiply(first, second)` in float32.

    If both operands have a scale for the whole tensor, these multiply the result: the values q of
    most formats are so far from the ends of float32 that no sum of their products overflows. If one
    operand has none, q * scale is computed before the product. An unquantized operand may be 1e36,
    and 1e36 times q = 448 would overflow before a scale of 1 / 448 could bring it back; so would
    the square of q = 2**63, the largest number of P3109's 8p1. Scales of blocks differ along the
    summed axis, so they cannot multiply the result and are applied first, too.
    """
    one, other = first.split_scale(), second.split_scale()
    if one is not None and other is not None:
        return times_scales(multiply(*_of_one_dtype(one[0], other[0])), one[1], other[1])
    return multiply(*_of_one_dtype(first.unscaled(), second.unscaled()))


def _of_one_dtype(first: Array, second: Array) -> tuple[Array, Array]:
    """Both as they are if their dtypes are equal and can be multiplied, else as float32."""
    # XLA for CPUs leaves some products of bfloat16 with float32 sums to code that does not have
    # them (jaxlib 0.10.2, "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"):
    # where the CPU has AVX512-BF16, and a transpose feeds the product or its batch axes do not come
    # first. In float32 the same products are exact, too.
    if first.dtype == second.dtype and not (first.dtype == jnp.bfloat16 and traced_for_cpu()):
        return first, second
    return differentiable_widened(first), differentiable_widened(second)


def native_operands(part: Part, first: Rounded, second: Rounded) -> tuple[Any, Any, Any] | None:
    """The operands that XLA multiplies natively, and a float32 scalar that multiplies the result.

    Returns:
      Two arrays of 8-bit floats, or two `Blocked`, or two `Scaled`; and the scalar, or None if
      there is nothing to multiply by. None where the matmul has to be emulated.
    """
    along, along_second = part.contracted
    one, other = _one_scale(first), _one_scale(second)
    have_8_bits = _has_8_bits(first) and _has_8_bits(second)
    if one is not None and other is not None:
        if not have_8_bits:
            return None
        return _own_elements(first, along), _own_elements(second, along_second), one * other
    function = part.function
    if not isinstance(function, DotGeneral) or function.out_sharding is not None:
        return None  # only this one takes operands with scales
    if (
        have_8_bits
        and _has_scales_of_rows(first, along)
        and _has_scales_of_rows(second, along_second)
    ):
        return _scaled(first, along), _scaled(second, along_second), None
    lengths = _block_length(first, along), _block_length(second, along_second)
    # E8M0 and other scales are not mixed. E8M0 reaches the ends of float32, so a result might
    # overflow before the other operand's second scale could bring it back.
    if 1 in lengths or _spec(first).has_powers != _spec(second).has_powers:
        return None
    has_powers, whole = _spec(first).has_powers, math.lcm(*lengths)
    size = -(-first.q.shape[along[-1]] // whole) * whole
    # XLA cannot compile an axis of a single block for a GPU (jaxlib 0.10.2): pad it to two.
    if size == max(lengths):
        size *= 2
    return (
        _blocked(first, along[-1], lengths[0], size),
        _blocked(second, along_second[-1], lengths[1], size),
        None if has_powers else _tensor_scale(first) * _tensor_scale(second),
    )


def _one_scale(operand: Rounded) -> Array | None:
    """The one scale of the operand, a float32 scalar, also where it is stored as a power of two.

    Such a scale must not become many for `lax.scaled_dot`, which is slower than bfloat16 on GPUs
    whose hardware takes no blocks, and which XLA does not compile for them without Triton.
    """
    spec = operand.spec
    if spec is None or spec.block or spec.other_axes is not None or spec.scale != E8M0FNU:
        return operand.scale
    # 2**-127, the scale of zeros alone, is no normal number.
    return jnp.maximum(single_scale(operand.scales, spec), np.float32(2.0**_LEAST_EXPONENT))


def _spec(operand: Rounded) -> BlockFormat:
    assert operand.spec is not None
    return operand.spec


def _has_8_bits(operand: Rounded) -> bool:
    """Whether the elements are floats of 8 bits for which JAX has a dtype."""
    if operand.spec is None:
        return False
    element = operand.spec.element
    return isinstance(element, FloatFormat) and element.bits == 8 and element.dtype is not None


def _own_elements(operand: Rounded, contracted: tuple[int, ...]) -> Array:
    codes, order = operand.codes_for(contracted)
    elements = _elements(operand.q, codes, _spec(operand).element)
    return in_place(elements, order)


def _has_scales_of_rows(operand: Rounded, contracted: tuple[int, ...]) -> bool:
    """Whether the operand has float32 scales that do not change along the axes that are summed."""
    spec, scale = _spec(operand), operand.scales.scale
    if spec.scale != FLOAT32 or scale is None or spec.tensor_scale or spec.element_exponent:
        return False
    return spec.element.max_finite <= LARGEST and all(scale.shape[axis] == 1 for axis in contracted)


def _scaled(operand: Rounded, contracted: tuple[int, ...]) -> Scaled:
    """The operand with one scale for each place; blocks along axes that are kept are spread."""
    assert operand.scales.scale is not None
    blocks = blocks_of(operand.q, _spec(operand))
    scale = operand.scales.scale
    for axis, (n, length) in enumerate(zip(operand.q.shape, blocks.lengths, strict=True)):
        if axis not in contracted and length not in (1, n):
            scale = lax.slice_in_dim(jnp.repeat(scale, length, axis), 0, n, axis=axis)
    return Scaled(_own_elements(operand, contracted), scale)


def _elements(q: Array, codes: Array | None, fmt: Format) -> Array:
    """`q` as an array of a format; `codes` are its codes where they are known."""
    assert isinstance(fmt, FloatFormat)
    return dtype_from_codes(code_values(q, fmt) if codes is None else codes, fmt)


def _blocked_format(spec: BlockFormat) -> FloatFormat | None:
    """The format in which elements are passed to `lax.scaled_dot`; None if none is possible.

    Usually that is the operand's own. FP4 and FP6 with powers of two as scales are passed as
    E4M3FN, which has all of their values: JAX has no dtype for FP6, and XLA fails to compile FP4
    with E8M0 scales for GPUs (jaxlib 0.10.2, compiled for H100 and B200 by their description:
    "Failed to lower from shared dialect to Triton").
    """
    element = spec.element
    if not isinstance(element, FloatFormat):
        return None
    if spec.has_powers and element.bits < 8 and holds(element, np.dtype(E4M3FN.dtype)):
        return E4M3FN
    return element if element.bits in (4, 8) and element.dtype is not None else None


def _block_length(operand: Rounded, contracted: tuple[int, ...]) -> int:
    """The length of a block along the last contracted axis; 1 if the product must be emulated.

    `lax.scaled_dot` takes blocks of two elements or more and multiplies elements by scales in
    bfloat16, unless hardware does it. It is exact if both together have at most 8 significant bits.
    If the whole axis is one block, it is cut into blocks of 32, which hardware supports.
    """
    spec = operand.spec
    if spec is None or spec.scale is None or spec.element_exponent or not contracted:
        return 1
    if spec.tensor_scale_divides:
        return 1
    element, scale = _blocked_format(spec), spec.scale
    if element is None or scale.dtype is None or scale.bits != 8:
        return 1
    is_marked = element.has_nan or scale.has_nan
    digits = element.mantissa_bits + 1 + scale.mantissa_bits + 1
    # JAX 0.10 cannot lower `scaled_dot` with symbolic sizes.
    is_known = all(isinstance(n, int) for n in operand.q.shape)
    fits = element.has_zero and is_marked and is_known and digits <= _BFLOAT16_DIGITS
    if not fits or (spec.has_powers and scale != E8M0FNU) or any(explicit_spec(operand.q)):
        return 1
    n, length = (x[contracted[-1]] for x in (operand.q.shape, blocks_of(operand.q, spec).lengths))
    return _MX_BLOCK if length == n > 1 else length


def _tensor_scale(operand: Rounded) -> Array:
    second, fmt = operand.scales.tensor_scale, _spec(operand).tensor_scale
    if second is None:
        return jnp.ones((), jnp.float32)
    assert fmt is not None
    return from_stored(second, fmt)


def _blocked(operand: Rounded, axis: int, length: int, size: int) -> Blocked:
    """Elements, and one scale for each `length` elements along `axis`.

    The scale of a larger block is repeated: a block of 16 x 16 gives 16 blocks of 1 x 16. If the
    element format has no NaN, a block with an infinite or NaN q gets NaN as its scale. That makes
    the same elements of the result non-finite as q would.

    Args:
      size: The length to which the axis is padded with zeros.
    """
    spec, q, scale = _spec(operand), operand.q, operand.scales.scale
    assert spec.scale is not None
    assert scale is not None
    fmt = _blocked_format(spec)
    assert fmt is not None
    for other, block in enumerate(blocks_of(q, spec).lengths):
        if other != axis and block > 1:
            spread = jnp.repeat(scale, block, axis=other)
            scale = lax.slice_in_dim(spread, 0, q.shape[other], axis=other)
        elif other == axis and block != length:
            scale = jnp.repeat(scale, -(-block // length), axis=axis)
    missing = size - q.shape[axis]
    q = _padded(q, axis, missing, 0)
    scale = _padded(scale, axis, size // length - scale.shape[axis], 1)
    rows = Blocks(q.shape, tuple(length if i == axis else 1 for i in range(q.ndim)))
    codes = None if operand.codes is None else _padded(operand.codes, axis, missing, 0)
    if spec.has_powers:
        exponent, is_nan = power_from_stored(scale, spec.scale)
        view = rows.split(q)
        q = rows.join(_raised(view, jnp.broadcast_to(rows.spread(exponent), view.shape)))
        codes = None
        scale = power_to_stored(jnp.maximum(exponent, _LEAST_EXPONENT), is_nan, spec.scale)
    if codes is None and not fmt.has_nan:
        scale = poisoned(scale, q, rows, spec.scale)
    return Blocked(_elements(q, codes, fmt), scale)


def _padded(x: Array, axis: int, missing: int, value: int) -> Array:
    if not missing:
        return x
    widths = [(0, missing if i == axis else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, np.asarray(value, x.dtype), widths)


@elementwise
def _raised(q: Array, exponent: Array) -> Array:
    """`q`, halved where the scale is 2**-127, which the caller then raises to 2**-126.

    XLA for CPUs would read 2**-127, a subnormal bfloat16, as zero. q * scale does not change where
    it is a normal number.
    """
    return jnp.where(exponent < _LEAST_EXPONENT, q * q.dtype.type(0.5), q)
