"""Bilinear functions as hashable data: what they compute, and over which axes they sum.

They are made with the arguments of JAX's functions after the operands.
"""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax

from qtoolkit.products._scaled import Blocked, Scaled, remaining_axes, scaled_dot, scaled_result

# What `lax.ragged_dot` computes with the kernels rhs[groups, k, n], and its derivative by these,
# whose rhs is the cotangent [rows, n].
RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_BY_GROUP = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def _copied(function: Any) -> Callable[..., Any]:
    """A copy that runs JAX's code, even while qwix has replaced the code of the original.

    An interceptor such as qwix does so while a model runs. Inside a quantized matmul it would get
    codes in place of the operands, and leave its tracers in traces that JAX caches.
    """
    if not isinstance(function, types.FunctionType):
        return function  # somebody has replaced it for good
    code = function.__code__
    if code.co_name != function.__name__:
        raise ImportError(
            f"qtoolkit.products: imported while {function.__name__} of JAX runs the code of "
            f"{code.co_filename}, expected its own; import qtoolkit.products before the model runs"
        )
    copied = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


dot_general, conv_general_dilated, ragged_dot_general, _einsum = map(
    _copied, (lax.dot_general, lax.conv_general_dilated, lax.ragged_dot_general, jnp.einsum)
)


def einsum(*args: Any, **options: Any) -> Any:
    return _einsum(*args, _dot_general=dot_general, **options)


class Axes(NamedTuple):
    """The axes of one operand in one product. Batch axes are in neither tuple.

    `along_contracted` says along which of them blocks are cut: usually the last ones. So axes of
    length 1, along which a block would be a single element, come first. The contracted axes of both
    operands are in the same order: the i-th of lhs is multiplied with the i-th of rhs.

    Attributes:
      contracted: The axes that are summed over.
      kept: The axes that the result has, and the other operand does not.
      fixed: The axes along which no Hadamard transform may run. (x H)(H w) = x w holds only for an
        axis that is summed as a whole in both operands; it is false where the axis is summed in
        groups, or the other operand lacks it or has it with length 1.
    """

    contracted: tuple[int, ...]
    kept: tuple[int, ...]
    fixed: frozenset[int] = frozenset()

    @property
    def transformed(self) -> int | None:
        """The axis along which a Hadamard transform of both operands may run, or None."""
        last = self.contracted[-1:]
        return last[0] if last and last[0] not in self.fixed else None

    def reordered(self, order: tuple[int, ...]) -> "Axes":
        """The same axes, numbered as in `a`, if this operand is `a.transpose(order)`."""
        contracted, kept, fixed = (tuple(order[axis] for axis in axes) for axes in self)
        return Axes(contracted, kept, frozenset(fixed))

    def ones_first(self, shape: Sequence[Any]) -> "Axes":
        """The same axes of an operand of this shape, those of length 1 before the others."""
        # Flax's attention sums over queries and, behind them, over the heads that share a key:
        # usually one.
        contracted, kept = (sorted(x, key=lambda axis: shape[axis] != 1) for x in self[:2])
        return Axes(tuple(contracted), tuple(kept), self.fixed)

    def turned(self) -> "Axes":
        """The axes in the derivative product, which sums over the axes that were kept."""
        return Axes(self.kept, self.contracted, self.fixed)


class Bilinear(Protocol):
    """A hashable bilinear function of two arrays of one dtype, accumulated in float32.

    `extra` are further integer arrays that it needs, such as the group sizes of `ragged_dot`;
    `dtype` is that of the result, where the function can give another one than float32.
    """

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, *extra: jax.Array, dtype: Any = jnp.float32
    ) -> jax.Array: ...

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        """The axes of lhs, of rhs and of the result, for operands of these shapes.

        The axes of the result are given as they are used by dgrad, whose first operand is the
        cotangent: `contracted` are the axes that came from rhs, `kept` those that came from lhs.
        For wgrad, `turned()` exchanges them. For x[m, k] @ w[k, n] = y[m, n] the result's
        `contracted` is n, since dgrad is y[m, n] @ w.T[n, k].
        """
        ...

    def transposed(
        self,
        side: int,
        cotangent: jax.Array,
        other: jax.Array,
        gradient: jax.ShapeDtypeStruct,
        *extra: jax.Array,
        dtype: Any = jnp.float32,
    ) -> jax.Array | None:
        """The gradient of the operand on one side, like `gradient`.

        `jax.linear_transpose` would give the same, but only for float32 operands: here both keep
        their dtype, which may be of 16 or 8 bits. Tracing is faster, too. Not for arrays on
        Explicit meshes. None where JAX has no operation for it.
        """
        ...


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` of two arrays; without an `out_sharding` also of two `Blocked` or two
    `Scaled`.
    """

    dimension_numbers: Any
    precision: Any = None
    out_sharding: Any = None

    def __post_init__(self) -> None:
        try:
            (contract_l, contract_r), (batch_l, batch_r) = self.dimension_numbers
            numbers = (
                (_integers(contract_l), _integers(contract_r)),
                (_integers(batch_l), _integers(batch_r)),
            )
        except (TypeError, ValueError):
            raise TypeError(
                f"dot_general: dimension_numbers={self.dimension_numbers!r}, expected the "
                "contracted and the batch axes of both operands, as in (((1,), (0,)), ((), ())) "
                "for a matrix product"
            ) from None
        _set(self, dimension_numbers=numbers, precision=_precision(self.precision))

    def __call__(
        self, lhs: Any, rhs: Any, *extra: jax.Array, dtype: Any = jnp.float32
    ) -> jax.Array:
        numbers = self.dimension_numbers
        if isinstance(lhs, Blocked):
            return scaled_dot(lhs, rhs, numbers)
        if isinstance(lhs, Scaled):
            out = self(lhs.elements, rhs.elements, dtype=dtype)
            return scaled_result(out, lhs, rhs, numbers)
        return dot_general(
            lhs,
            rhs,
            numbers,
            precision=self.precision,
            preferred_element_type=dtype,
            out_sharding=self.out_sharding,
        )

    def transposed(
        self,
        side: int,
        cotangent: Any,
        other: Any,
        gradient: Any,
        *extra: jax.Array,
        dtype: Any = jnp.float32,
    ) -> jax.Array:
        contracted, batch = self.dimension_numbers
        of_side, of_other = contracted[side], contracted[1 - side]
        batch_side, batch_other = batch[side], batch[1 - side]
        kept_other = remaining_axes(other.ndim, of_other, batch_other)
        kept_side = cotangent.ndim - len(batch_side) - len(kept_other)
        first = len(batch_side) + (0 if side else kept_side)
        numbers = (
            (tuple(range(first, first + len(kept_other))), kept_other),
            (tuple(range(len(batch_side))), batch_other),
        )
        out = DotGeneral(numbers, self.precision)(cotangent, other, dtype=dtype)
        # The axes of `out` are now: batch; those that this side kept; those that the forward
        # product summed over, in the order in which the other operand has them.
        matching = tuple(of_side[of_other.index(axis)] for axis in sorted(of_other))
        places = (*batch_side, *remaining_axes(out.ndim, of_side, batch_side), *matching)
        return lax.transpose(out, tuple(places.index(axis) for axis in range(out.ndim)))

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        (contract_l, contract_r), (batch_l, batch_r) = self.dimension_numbers
        kept_l = remaining_axes(len(lhs), contract_l, batch_l)
        kept_r = remaining_axes(len(rhs), contract_r, batch_r)
        first = len(batch_l)
        middle = first + len(kept_l)
        of_lhs, of_rhs = range(first, middle), range(middle, middle + len(kept_r))
        out = [*(lhs[axis] for axis in (*batch_l, *kept_l)), *(rhs[axis] for axis in kept_r)]
        return (
            Axes(tuple(contract_l), kept_l).ones_first(lhs),
            Axes(tuple(contract_r), kept_r).ones_first(rhs),
            Axes(tuple(of_rhs), tuple(of_lhs)).ones_first(out),
        )


@dataclasses.dataclass(frozen=True)
class Einsum:
    subscripts: str
    precision: Any = None
    out_sharding: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.subscripts, str):
            raise TypeError(
                f"einsum: subscripts={self.subscripts!r}, expected a text such as 'btd,df->btf'"
            )
        _set(self, precision=_precision(self.precision))

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, *extra: jax.Array, dtype: Any = jnp.float32
    ) -> jax.Array:
        if lhs.dtype.itemsize == 1 and any(of.fixed for of in self.axes(lhs.shape, rhs.shape)[:2]):
            # In "ij,k->i" the labels j and k are summed over one operand alone, before the product.
            # XLA cannot sum 8-bit floats, which operands are in "native" arithmetic.
            lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        return einsum(
            self.subscripts,
            lhs,
            rhs,
            precision=self.precision,
            preferred_element_type=dtype,
            out_sharding=self.out_sharding,
        )

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        inputs, out, _ = opt_einsum.parser.parse_einsum_input(
            (self.subscripts, lhs, rhs), shapes=True
        )
        a, b = inputs.split(",")

        joint = {label for label in a if label in b}
        # One order for both operands, that of lhs: in "bij,jic->bc" the contracted labels are i, j
        # for rhs, too, though there j comes first. Labels that one operand alone sums come before
        # them, so that the last contracted axis is one that both operands have if possible. If the
        # lengths of a label differ, that of rhs counts: `einsum_axes` knows no other.
        length = dict([*zip(a, lhs, strict=True), *zip(b, rhs, strict=True)])
        summed = [label for label in a + b if label not in out]
        summed.sort(key=lambda label: (label in joint, length[label] != 1))
        of_a, of_b = (
            sorted((x for x in labels if x not in joint and x in out), key=lambda x: length[x] != 1)
            for labels in (a, b)
        )
        alone = set(summed) - joint
        twice = {label for labels in (a, b) for label in labels if labels.count(label) > 1}
        lengths = {*zip(a, lhs, strict=True), *zip(b, rhs, strict=True)}
        broadcast = {label for label in joint if sum(other == label for other, _ in lengths) > 1}

        def places(labels: str, wanted: list[str]) -> tuple[int, ...]:
            unique = dict.fromkeys(wanted)
            return tuple(i for want in unique for i, label in enumerate(labels) if label == want)

        def axes(labels: str, contracted: list[str], kept: list[str]) -> Axes:
            fixed = (i for i, label in enumerate(labels) if label in alone | twice | broadcast)
            return Axes(places(labels, contracted), places(labels, kept), frozenset(fixed))

        return axes(a, summed, of_a), axes(b, summed, of_b), axes(out, of_b, of_a)

    def transposed(
        self,
        side: int,
        cotangent: Any,
        other: Any,
        gradient: Any,
        *extra: jax.Array,
        dtype: Any = jnp.float32,
    ) -> jax.Array | None:
        shapes = (other.shape, gradient.shape) if side else (gradient.shape, other.shape)
        if any(of.fixed for of in self.axes(*shapes)[:2]):
            return None
        inputs, out, _ = opt_einsum.parser.parse_einsum_input(
            (self.subscripts, *shapes), shapes=True
        )
        labels = inputs.split(",")
        return einsum(
            f"{out},{labels[1 - side]}->{labels[side]}",
            cotangent,
            other,
            precision=self.precision,
            preferred_element_type=dtype,
        )


@dataclasses.dataclass(frozen=True)
class ConvGeneralDilated:
    window_strides: Any
    padding: Any
    lhs_dilation: Any = None
    rhs_dilation: Any = None
    dimension_numbers: Any = None
    feature_group_count: int = 1
    batch_group_count: int = 1
    precision: Any = None
    out_sharding: Any = None

    def __post_init__(self) -> None:
        padding = self.padding
        _set(
            self,
            window_strides=_integers(self.window_strides),
            padding=padding if isinstance(padding, str) else tuple(map(_integers, padding)),
            lhs_dilation=None if self.lhs_dilation is None else _integers(self.lhs_dilation),
            rhs_dilation=None if self.rhs_dilation is None else _integers(self.rhs_dilation),
            dimension_numbers=_hashable(self.dimension_numbers),
            precision=_precision(self.precision),
        )

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, *extra: jax.Array, dtype: Any = jnp.float32
    ) -> jax.Array:
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if lhs.dtype != rhs.dtype:  # "native" E4M3 and E5M2: a convolution takes one dtype
            lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        return conv_general_dilated(lhs, rhs, preferred_element_type=jnp.float32, **options)

    def transposed(self, *arguments: Any, **options: Any) -> None:
        # A transposed convolution of 16-bit operands has a result of 16 bits in JAX.
        return None

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        numbers = lax.conv_dimension_numbers(lhs, rhs, self.dimension_numbers)
        of_lhs, of_rhs, of_out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        is_grouped = max(self.feature_group_count, self.batch_group_count) > 1
        fixed = frozenset(range(len(lhs)) if is_grouped else ())
        return (
            Axes((*of_lhs[2:], of_lhs[1]), (*of_lhs[2:], of_lhs[0]), fixed),
            Axes((*of_rhs[2:], of_rhs[1]), (of_rhs[0],), fixed),
            Axes((of_out[1],), (*of_out[2:], of_out[0]), fixed),
        )


@dataclasses.dataclass(frozen=True)
class RaggedDot:
    precision: Any = None

    def __post_init__(self) -> None:
        _set(self, precision=_precision(self.precision))

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, *extra: jax.Array, dtype: Any = jnp.float32
    ) -> jax.Array:
        numbers = RAGGED if rhs.ndim == 3 else _BY_GROUP
        return ragged_dot_general(
            lhs, rhs, *extra, numbers, precision=self.precision, preferred_element_type=dtype
        )

    def transposed(
        self,
        side: int,
        cotangent: Any,
        other: Any,
        gradient: Any,
        *extra: jax.Array,
        dtype: Any = jnp.float32,
    ) -> jax.Array:
        lhs, rhs = (other, cotangent) if side else (cotangent, other.swapaxes(1, 2))
        return self(lhs, rhs, *extra, dtype=dtype)

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        rows = frozenset({0})  # summed in groups in wgrad
        return Axes((1,), (0,), rows), Axes((1,), (2,)), Axes((1,), (0,), rows)


def _set(function: Any, **values: Any) -> None:
    """Sets fields of a frozen dataclass while it is made."""
    for name, value in values.items():
        object.__setattr__(function, name, value)


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in np.asarray(values, int).reshape(-1))


def _hashable(value: Any) -> Any:
    """Lists as tuples, so that equal arguments make equal functions."""
    return tuple(map(_hashable, value)) if type(value) in (list, tuple) else value


def _precision(precision: Any) -> Any:
    """`precision`, or None in place of an algorithm such as F16_F16_F32.

    An algorithm prescribes the dtypes of the operands, and rounded operands may have others. Sums
    are float32 without it, too, because of `preferred_element_type`.
    """
    is_algorithm = isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)
    return None if is_algorithm else _hashable(precision)
