"""One operand of a product, cut into blocks and rounded."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts import Stochastic
from qtoolkit.casts.internal import (
    NEAREST,
    Draw,
    differentiable_widened,
    dtype_from_codes,
    exact_float32,
    from_stored,
    has_native_codes,
    hash_words,
    hashed_index,
    mixed_key,
    ordinal,
    row_major,
    to_stored,
    traced_for_cpu,
)
from qtoolkit.formats import (
    FLOAT32,
    BlockFormat,
    FloatFormat,
    format,
)
from qtoolkit.formats.internal import hashed_once
from qtoolkit.products._bilinear import Axes
from qtoolkit.products._operand import Delayed, Hadamard, Operand, Static
from qtoolkit.products._zero_points import of_differences
from qtoolkit.scaling import hadamard_transform
from qtoolkit.scaling.internal import (
    Scales,
    along_contracted,
    asymmetric,
    computed_now,
    find_scales,
    finite_range,
    largest_magnitude,
    may_overflow,
    operand_codes,
    operand_values,
    power_above,
    scale_from,
    single_scale,
    tensor_scale_from,
    unscaled_values,
)

Array = jax.Array

LARGEST = 2**52  # 2**23 products of two such numbers sum to 2**127, which float32 holds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded:
    """An operand as a product takes it: x ~ q * scale.

    Attributes:
      q: Values of the element format, less their zero points, plus the infinities and NaNs of x; x
        itself if it is not quantized.
      scales: The scales and zero points as they are stored, in their own format.
      spec: The format, with the axes of its blocks; None if the operand is not quantized. It is
        that of q: `of_differences`.
      codes: The codes of q, if the operand came as codes or goes to XLA as such.
      turned: The codes with their axes in another order, so that each of the two products that read
        them finds those axes last that it sums over.
      order: That order.
    """

    q: Array
    scales: Scales
    spec: BlockFormat | None = dataclasses.field(metadata={"static": True})
    codes: Array | None = None
    turned: Array | None = None
    order: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    def codes_for(self, contracted: tuple[int, ...]) -> tuple[Array | None, tuple[int, ...] | None]:
        """Codes for a product that sums over these axes, and the order in which their axes are."""
        rank = self.q.ndim
        if self.turned is None or sorted(contracted) == list(range(rank - len(contracted), rank)):
            return self.codes, None
        return self.turned, self.order

    @property
    def scale(self) -> Array | None:
        """The scale of the whole operand, float32 scalar, if it may multiply the result instead.

        None if the operand is not quantized, has several scales or powers of two, or has elements
        so large that sums of their products might leave float32's range.
        """
        if self.spec is None or self.spec.block or self.spec.has_powers:
            return None
        if self.spec.element.max_finite > LARGEST:
            return None
        return None if self.spec.scale is None else single_scale(self.scales, self.spec)

    def unscaled(self) -> Array:
        """`q * scale`, finite where q is: float32, or the dtype of q where that is exact."""
        if self.spec is None or self.spec.scale is None:
            return self.q
        dtype = self.q.dtype if _is_exact(self.spec, self.q.dtype) else jnp.dtype(jnp.float32)
        return _unscaled(self.q, self.scales, self.spec, dtype, self.codes is None)

    def split_scale(self) -> tuple[Array, Array] | None:
        """An array, and a float32 scalar that may multiply the result; None if there is none.

        They are q and its one scale, or q times the scales of its blocks and that of the tensor.
        """
        scale = self.scale
        if scale is not None:
            return self.q, scale
        spec, scales = self.spec, self.scales
        if spec is None or scales.tensor_scale is None or spec.tensor_scale_divides:
            return None
        assert spec.tensor_scale is not None
        by_block = dataclasses.replace(spec, tensor_scale=None)
        by_blocks = Rounded(self.q, Scales(scales.scale), by_block, self.codes)
        tensor_scale = from_stored(scales.tensor_scale, spec.tensor_scale)
        return by_blocks.unscaled(), tensor_scale.reshape(())


def _is_exact(spec: BlockFormat, dtype: Any) -> bool:
    """Whether `dtype` holds an element times a scale exactly, but for its subnormal numbers."""
    assert spec.scale is not None
    target, element, scale = format(dtype), spec.element, spec.scale
    assert isinstance(target, FloatFormat)
    digits = element.mantissa_bits + scale.mantissa_bits + 2
    if spec.tensor_scale is not None or digits > target.mantissa_bits + 1:
        return False
    if spec.has_powers:  # as large and as small as numbers of float32
        return target.max_exponent == FLOAT32.max_exponent
    least = element.min_positive * scale.min_positive
    return target.min_subnormal <= least and not may_overflow(spec, dtype)


@hashed_once
@dataclasses.dataclass(frozen=True)
class Rounding:
    """How to round one array of one product: an `Operand` whose blocks have axes. Hashable.

    Attributes:
      operand: What the recipe says, with the axes of blocks filled in; None: it is not rounded.
      axis: The contracted axis along which a Hadamard transform runs, or None.
      axis_names: Mesh axes over which a scale is shared.
      is_native: Whether the product is one of 8-bit operands, if it can be.
      order: The order of axes of `Rounded.turned`; None if there is none.
    """

    operand: Operand | None
    axis: int | None
    axis_names: tuple[str, ...]
    is_native: bool = False
    order: tuple[int, ...] | None = None

    @property
    def makes_codes(self) -> bool:
        """Whether the operand is rounded to codes, from which q follows, and not to q."""
        operand = self.operand
        if not self.is_native or operand is None or operand.projection != NEAREST:
            return False
        spec = operand.spec
        return (
            has_native_codes(spec.element)
            and spec.scale == FLOAT32
            and not (
                spec.tensor_scale or spec.element_exponent or spec.zero_point or spec.amax_epsilon
            )
        )

    def rounded(self, x: Array, delayed: Array | None, key: Array | None) -> Rounded:
        """Rounds `x`.

        Args:
          delayed: float32 scalar, an amax of earlier steps or of calibration; or None. With
            `Delayed` scaling a 0 means that there is no history yet, and `x` is scaled by its own
            or by the `initial` one.
          key: Words of a key, for stochastic rounding; the values are mixed into it.
        """
        if self.operand is None:
            return Rounded(x, Scales(), None)
        operand, dtype = self.operand, x.dtype
        x = self.transformed(x)
        projection = operand.projection
        if isinstance(projection.rounding, Stochastic):
            draw = _draw(key, x, projection.rounding)
            projection = dataclasses.replace(projection, draw=draw)
        scales = self.known_scales(x, delayed)
        is_power = operand.has_power_of_two
        if not self.makes_codes:
            q, scales = operand_values(x, operand.spec, projection, scales, is_power=is_power)
            spec = of_differences(operand.spec)
            return Rounded(q.astype(dtype), scales, spec)  # exact: the dtype holds it
        if scales.scale is None:
            scales, _ = find_scales(x, operand.spec)
            assert scales.scale is not None
        if not is_power and not traced_for_cpu():
            # An exact division reads x many times. Where x is transposed just before, XLA for GPUs
            # would write intermediate results of it: 1.8 GB for a cotangent of 67 MB.
            x = lax.optimization_barrier(x)
        codes, turned = operand_codes(x, operand.spec, scales.scale, is_power=is_power), None
        if self.order is not None:
            is_free = isinstance(operand.scaling, Delayed) and operand.scaling.initial is not None
            codes, turned = _both_orders(codes, self.order, is_free)
        q = dtype_from_codes(codes, operand.spec.element).astype(dtype)
        return Rounded(q, scales, operand.spec, codes, turned, self.order)

    def transformed(self, x: Array) -> Array:
        """The array to be rounded: the Hadamard transform of `x`, float32, or else `x` itself."""
        if self.operand is None or self.operand.transform is None or self.axis is None:
            return x
        return _transformed(x, self.axis, self.operand.transform)

    def untransformed(self, operand: Rounded, shape: tuple[int, ...]) -> Rounded:
        """Undoes the Hadamard transform of a rounded operand: q * scale in float32.

        For forward mode: there the other factor is a tangent, which is not transformed.
        """
        if self.operand is None or self.operand.transform is None or self.axis is None:
            return operand
        y = hadamard_transform(
            operand.unscaled(),
            block=self.operand.transform.block,
            axis=self.axis,
            key=_sign_key(self.operand.transform),
            inverse=True,
        )
        return Rounded(lax.slice(y, (0,) * y.ndim, shape), Scales(), None)

    def scaled_tangent(self, x: Array, dot: Array, scales: Scales) -> Array:
        """The tangent of q, from `dot`, that of `x`: transformed as `x` is, over the scales."""
        operand = self.operand
        if operand is None:
            return dot
        if operand.transform is not None and self.axis is not None:
            transform = functools.partial(_transformed, axis=self.axis, transform=operand.transform)
            dot = jax.jvp(transform, (x,), (dot,))[1]
        if operand.spec.scale is None:
            return dot
        ones = jnp.ones_like(dot, dtype=jnp.float32)
        return dot.astype(jnp.float32) / unscaled_values(ones, operand.spec, scales)

    def known_scales(self, x: Array, delayed: Array | None) -> Scales:
        """The scales that do not follow from `x` and its format alone, None in place of others.

        These are static, delayed and calibrated ones, powers of two, and scales of whole tensors
        that the shards of a `shard_map` share.
        """
        assert self.operand is not None
        operand, fmt, scaling = self.operand, self.operand.spec, self.operand.scaling
        if operand.joined and delayed is not None:
            return Scales(None, tensor_scale_from(delayed, fmt))
        if isinstance(scaling, Static) and scaling.scale is not None:
            assert fmt.scale is not None
            shape = (1,) * x.ndim
            scale = to_stored(jnp.full(shape, scaling.scale, jnp.float32), fmt.scale)
            return Scales(scale + jnp.zeros_like(x, shape=shape, dtype=scale.dtype))  # varies as x
        if isinstance(scaling, Static):
            assert delayed is not None  # `quantized_product` has checked
            amax = delayed
            if fmt.tensor_scale is not None:
                return Scales(None, tensor_scale_from(amax, fmt))
        else:
            if self.axis_names and fmt.zero_point and operand.is_by_tensor:
                return self._shared_zero_point(x)
            is_plain = delayed is None and not self.axis_names and not operand.has_power_of_two
            if not operand.has_one_scale or is_plain:
                return Scales()
            history = scaling if isinstance(scaling, Delayed) else None
            if history is None or history.initial is None or delayed is None:
                amax = largest_magnitude(lax.stop_gradient(x))
                if self.axis_names:
                    amax = largest_over(amax, self.axis_names)
            else:
                amax = jnp.full((), history.initial, jnp.float32)
            if history is not None and delayed is not None:
                of_history = delayed * np.float32(2.0**history.margin)
                of_history = jnp.minimum(of_history, np.finfo(np.float32).max)
                amax = jnp.where(of_history > 0, of_history, amax)
        scale = scale_from(amax.reshape((1,) * x.ndim), fmt, None)
        return Scales(power_above(scale) if operand.has_power_of_two else scale)

    def _shared_zero_point(self, x: Array) -> Scales:
        """Scale and zero point of a whole tensor of which shards have parts."""
        assert self.operand is not None
        lowest, largest = finite_range(exact_float32(lax.stop_gradient(x)), tuple(range(x.ndim)))
        lowest = -largest_over(-lowest, self.axis_names)
        largest = largest_over(largest, self.axis_names)
        scale, zero_point = asymmetric(lowest, largest, self.operand.spec)
        return Scales(scale, None, zero_point)


def largest_over(x: Array, names: tuple[str, ...]) -> Array:
    try:
        for name in names:
            lax.axis_size(name)
    except NameError as error:  # JAX's word for an axis that is not there
        raise ValueError(
            f"Recipe: axis_names={names} are not all axes of a jax.shard_map around this matmul "
            f"({str(error).splitlines()[0]}); expected axes of its mesh. Under jit alone omit "
            "axis_names: arrays that are sharded there have one scale anyway"
        ) from None
    return lax.pmax(x, names)


def rounding_of(
    operand: Operand | None,
    axes: Axes,
    shape: tuple[int, ...],
    axis_names: tuple[str, ...],
    *,
    is_native: bool = False,
    is_dot: bool = False,
) -> Rounding:
    """Fills in the axes of an operand's blocks, for an array of this shape and these `axes`."""
    if operand is None:
        return Rounding(None, None, axis_names)
    fmt = operand.spec
    if not shape:
        fmt = dataclasses.replace(fmt, block=(), axes=None, other_axes=None)
    else:
        fmt = along_contracted(fmt, axes.contracted, axes.kept, len(shape))
    if fmt.axes is not None:
        fmt = _clipped(fmt, shape)
    axis = axes.transformed if operand.transform is not None else None
    how = Rounding(dataclasses.replace(operand, spec=fmt), axis, axis_names, is_native)
    if not (is_dot and how.makes_codes) or traced_for_cpu():
        return how
    return dataclasses.replace(how, order=_turned_order(axes, len(shape)))


def _clipped(fmt: BlockFormat, shape: tuple[int, ...]) -> BlockFormat:
    """`fmt` with one block along each axis that is known to be shorter than its block length."""
    assert fmt.axes is not None
    lengths = list(fmt.block)
    for i, (axis, length) in enumerate(zip(fmt.axes, fmt.block, strict=True)):
        if length is None or not -len(shape) <= axis < len(shape):
            continue
        try:
            if shape[axis] < length:
                lengths[i] = None
        except jax.errors.InconclusiveDimensionOperation:
            pass  # a symbolic size: `BlockFormat.block_lengths` raises and says what to export for
    return fmt if lengths == list(fmt.block) else dataclasses.replace(fmt, block=tuple(lengths))


def _turned_order(axes: Axes, rank: int) -> tuple[int, ...] | None:
    """The order of axes in which those that another product sums over come last; None if the array
    is summed over axes that are neither the last ones nor next to the last ones.
    """
    contracted, kept = sorted(axes.contracted), sorted(axes.kept)
    batch = [axis for axis in range(rank) if axis not in contracted and axis not in kept]
    orders = [(*batch, *kept, *contracted), (*batch, *contracted, *kept)]
    if not contracted or not kept or tuple(range(rank)) not in orders:
        return None
    return orders[0] if orders[1] == tuple(range(rank)) else orders[1]


def _both_orders(codes: Array, order: tuple[int, ...], has_free_scale: bool) -> tuple[Array, Array]:
    """Codes, and the same with their axes in another order, for the two products that read them.

    Args:
      has_free_scale: Whether the scale does not depend on the elements, so that their amax can be
        taken while they are cast.
    """
    # cuBLASLt multiplies 8-bit operands only if the axis that is summed is the last one of both.
    # Layouts are fixed (`row_major`), or XLA transposes the 16-bit operand, or calls the second
    # array a view of the first and copies it later.
    codes = row_major(codes)
    if has_free_scale:
        # XLA puts no amax into a kernel that transposes. So one kernel casts and takes the amax,
        # and a second one turns the codes: it reads one byte for each element, where a kernel for
        # the amax alone would read two.
        codes = lax.optimization_barrier(codes)
        return codes, row_major(lax.transpose(codes, order))
    # The barrier around both makes one kernel write both.
    return lax.optimization_barrier((codes, row_major(lax.transpose(codes, order))))


@functools.partial(jax.jit, static_argnums=(3,))
def _rounded_jitted(x: Array, delayed: Array | None, key: Array | None, how: Rounding) -> Rounded:
    return how.rounded(x, delayed, key)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def rounded(x: Array, delayed: Array | None, key: Array | None, how: Rounding) -> Rounded:
    """`how.rounded(x, delayed, key)` with a derivative: that of q = x / scale, scale constant."""
    return _rounded_jitted(x, delayed, key, how)


@rounded.defjvp
def _rounded_jvp(how: Rounding, primals: Any, tangents: Any) -> tuple[Rounded, Rounded]:
    x, delayed, key = primals
    out = rounded(x, delayed, key, how)
    dot = how.scaled_tangent(x, tangents[0], out.scales).astype(out.q.dtype)
    return out, dataclasses.replace(jax.tree.map(_zero_tangent, out), q=dot)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _unscaled(q: Array, scales: Scales, spec: BlockFormat, dtype: Any, is_own: bool) -> Array:
    return unscaled_values(q, spec, scales, dtype, is_own=is_own)


@_unscaled.defjvp
def _unscaled_jvp(
    spec: BlockFormat, dtype: Any, is_own: bool, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    q, scales = primals
    factors = unscaled_values(jnp.ones_like(q, dtype=jnp.float32), spec, scales)
    dot = tangents[0].astype(jnp.float32) * factors
    return _unscaled(q, scales, spec, dtype, is_own), dot.astype(dtype)


def _zero_tangent(x: Array) -> Any:
    """A zero tangent for `x`: zeros, or for integers the float0 array that JAX asks for."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _transformed(x: Array, axis: int, transform: Hadamard) -> Array:
    """The Hadamard transform along `axis`, which is padded with zeros; float32."""
    padded = differentiable_widened(x)
    # In this form JAX sees that the length is a multiple of a block, even if the size is symbolic.
    missing = -(-x.shape[axis] // transform.block) * transform.block - x.shape[axis]
    if missing:
        padded = jnp.pad(padded, [(0, missing if i == axis else 0) for i in range(x.ndim)])
    return hadamard_transform(padded, block=transform.block, axis=axis, key=_sign_key(transform))


def _sign_key(transform: Hadamard) -> Array | None:
    if transform.seed is None:
        return None
    with computed_now():
        return jax.random.key(transform.seed)


def _draw(key: Array | None, x: Array, rounding: Stochastic) -> Draw:
    """Random bits for the elements of `x`, by a key and a hash of all values of `x`."""
    # With the hash each step and layer draws other bits. It is a sum of the hashes of all elements,
    # and so the same however `x` is sharded.
    words = jnp.zeros((2,), jnp.uint32) if key is None else key
    hashed = ordinal(exact_float32(x)).astype(jnp.uint32) * np.uint32(2654435761)
    hashed = (hashed ^ (hashed >> np.uint32(15))) * np.uint32(2246822519)
    content = hash_words(jnp.sum(hashed ^ (hashed >> np.uint32(13)), dtype=jnp.uint32))
    first, second, third = mixed_key(words)
    bits = hashed_index((first ^ content, second + content, third), x.shape)
    return Draw(None, None, bits >> np.uint32(32 - rounding.bits))
