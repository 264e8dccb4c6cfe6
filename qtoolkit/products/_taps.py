"""Taps measure the operands of a matmul, also those of its derivative, and return numbers.

The cotangent is known in the backward pass alone, from which nothing can be returned but a
gradient. So each matmul takes an array of zeros as a further argument, which does not change its
result. Its derivative rule says that the gradient of these zeros is whatever the tap measured.
`jax.grad` by the zeros then returns the measurements. JAX adds up gradients, so a matmul that runs
several times in a step gives the sum over its runs: a tap must measure numbers that make sense when
they are added.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from qtoolkit.products._rounded import Rounded

ROLES = ("lhs", "rhs", "dgrad cotangent", "dgrad rhs", "wgrad lhs", "wgrad cotangent")

# (input, kernel) of a matmul: a label such as "e4m3fn by tensor, stored" for an operand that is
# stored as codes and scales, "" for an ordinary array.
Stored = tuple[str, str]


class Tap(Protocol):
    """A measurement of the operands of a matmul, as an array of fixed size. Hashable.

    Attributes:
      roles: The operands to measure, as indices into `ROLES`.
      size: How many numbers it returns for each operand.
    """

    @property
    def roles(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int: ...

    def __call__(self, x: jax.Array, rounded: Rounded) -> jax.Array:
        """Measures one operand: float32[size].

        Args:
          x: The operand before rounding, but after the Hadamard transform if the recipe has one.
          rounded: The same operand after rounding.
        """
        ...


def swapped_rows(rows: jax.Array) -> jax.Array:
    """A tap's rows with lhs and rhs exchanged: dgrad of one is wgrad of the other."""
    return rows[jnp.array([1, 0, 5, 4, 3, 2])]


class Seen(NamedTuple):
    """What a `multiply` sees of a matmul: pytrees. Several runs are merged, shards too.

    Attributes:
      largest: Merged by maximum.
      total: Merged by addition.
    """

    largest: Any = ()
    total: Any = ()
