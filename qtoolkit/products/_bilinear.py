"""Bilinear functions as hashable data: what they compute, and over which axes they sum."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import opt_einsum
from jax import lax


class Axes(NamedTuple):
    """Of one operand in one product, in ascending preference: the last one is cut into blocks.

    Attributes:
      contracted: Those that are summed over.
      kept: Those of the result that the other operand does not have.
    """

    contracted: tuple[int, ...]
    kept: tuple[int, ...]

    def turned(self) -> "Axes":
        """In the product where what was kept is contracted."""
        return Axes(self.kept, self.contracted)


class Bilinear(Protocol):
    """A hashable bilinear function of two arrays of one dtype, accumulated in float32.

    `extra` are further arrays that it needs, of integers.
    """

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *extra: jax.Array) -> jax.Array: ...

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        """Of lhs, rhs and the result in the product, for operands of these shapes.

        In dgrad the cotangent is contracted over what rhs alone has, in wgrad over what lhs alone
        has: the `kept` axes of the one are the `contracted` ones of the other. Of the result,
        `contracted` are the axes of rhs alone and `kept` those of lhs alone.
        """
        ...


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    dimension_numbers: Any
    precision: Any
    out_sharding: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *extra: jax.Array) -> jax.Array:
        return lax.dot_general(
            lhs,
            rhs,
            self.dimension_numbers,
            precision=_accumulating(self.precision),
            preferred_element_type=jnp.float32,
            out_sharding=self.out_sharding,
        )

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        (contract_l, contract_r), (batch_l, batch_r) = self.dimension_numbers
        kept_l = _others(len(lhs), contract_l, batch_l)
        kept_r = _others(len(rhs), contract_r, batch_r)
        first = len(batch_l)
        middle = first + len(kept_l)
        of_lhs, of_rhs = range(first, middle), range(middle, middle + len(kept_r))
        out = Axes(tuple(of_rhs), tuple(of_lhs))
        return Axes(tuple(contract_l), kept_l), Axes(tuple(contract_r), kept_r), out


@dataclasses.dataclass(frozen=True)
class Einsum:
    subscripts: str
    precision: Any
    out_sharding: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *extra: jax.Array) -> jax.Array:
        return jnp.einsum(
            self.subscripts,
            lhs,
            rhs,
            precision=_accumulating(self.precision),
            preferred_element_type=jnp.float32,
            out_sharding=self.out_sharding,
        )

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        inputs, out, _ = opt_einsum.parser.parse_einsum_input(
            (self.subscripts, lhs, rhs), shapes=True
        )
        a, b = inputs.split(",")

        def places(labels: str, of: set[str]) -> tuple[int, ...]:
            return tuple(i for i, label in enumerate(labels) if label in of)

        summed = (set(a) | set(b)) - set(out)
        of_a, of_b = (set(a) - set(b)) & set(out), (set(b) - set(a)) & set(out)
        return (
            Axes(places(a, summed), places(a, of_a)),
            Axes(places(b, summed), places(b, of_b)),
            Axes(places(out, of_b), places(out, of_a)),
        )


@dataclasses.dataclass(frozen=True)
class ConvGeneralDilated:
    window_strides: tuple[int, ...]
    padding: Any
    lhs_dilation: tuple[int, ...] | None
    rhs_dilation: tuple[int, ...] | None
    dimension_numbers: Any
    feature_group_count: int
    batch_group_count: int
    precision: Any
    out_sharding: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *extra: jax.Array) -> jax.Array:
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        options["precision"] = _accumulating(self.precision)
        return lax.conv_general_dilated(lhs, rhs, preferred_element_type=jnp.float32, **options)

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        numbers = lax.conv_dimension_numbers(lhs, rhs, self.dimension_numbers)
        of_lhs, of_rhs, of_out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        return (
            Axes((*of_lhs[2:], of_lhs[1]), (*of_lhs[2:], of_lhs[0])),
            Axes((*of_rhs[2:], of_rhs[1]), (of_rhs[0],)),
            Axes((of_out[1],), (*of_out[2:], of_out[0])),
        )


@dataclasses.dataclass(frozen=True)
class RaggedDot:
    precision: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *extra: jax.Array) -> jax.Array:
        (group_sizes,) = extra
        return lax.ragged_dot(
            lhs,
            rhs,
            group_sizes,
            precision=_accumulating(self.precision),
            preferred_element_type=jnp.float32,
        )

    def axes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[Axes, Axes, Axes]:
        return Axes((1,), (0,)), Axes((1,), (2,)), Axes((1,), (0,))


def _others(rank: int, *taken: Any) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if not any(i in axes for axes in taken))


def _accumulating(precision: Any) -> Any:
    """What `lax.Precision` was asked for. An algorithm that names other dtypes than the rounded
    operands have, such as attention's F16_F16_F32, is left to XLA: sums are float32 anyway.
    """
    is_algorithm = isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)
    return None if is_algorithm else precision
