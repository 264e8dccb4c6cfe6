"""Taps: what the products of a program see leaves it as the gradient of zeros.

A tap turns the operands of a product into float32 numbers that add. They are the cotangent of an
array of zeros, which the product takes beside its operands and which is closed over: so they pass
`jit`, `scan`, `remat`, `vmap` and `shard_map`, where nothing but cotangents could. What a product
that runs several times in a step gives is the sum.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from qtoolkit.casts.internal import varying_alike
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rounded import Cut, Rounded

ROLES = ("lhs", "rhs", "dgrad cotangent", "dgrad rhs", "wgrad lhs", "wgrad cotangent")


# What the input and the kernel of a product are where they come as codes, else "".
Stored = tuple[str, str]

MODEL = "(model)"  # the path of the model itself


class Place(NamedTuple):
    """Which product: the path of its layer, and its name there."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path or MODEL}:{self.name}"


class Tap(Protocol):
    """What to keep of the operands of a product. Hashable.

    Attributes:
      roles: Of which operands, as places in `ROLES`.
      size: How many numbers each operand gives.
    """

    @property
    def roles(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int: ...

    def __call__(self, x: jax.Array, rounded: Rounded, how: Cut) -> jax.Array:
        """float32[size], of an operand as it is rounded: after a Hadamard transform, if any."""
        ...


class Instrument(Protocol):
    """What stands between a layer and its products, while it is set."""

    def product(
        self,
        place: Place,
        recipe: Recipe,
        state: Any,
        compute: Callable[..., jax.Array],
        stored: Stored,
    ) -> jax.Array:
        """`compute(recipe, state, tap, zeros)`, or something else in its place."""
        ...


_instrument: contextvars.ContextVar[Instrument | None] = contextvars.ContextVar(
    "instrument", default=None
)
# Part of the key of jax.jit's caches: no trace made without an instrument is used under one.
_traced_under = jax.make_user_context(None)


def instrument() -> Instrument | None:
    """The one that is set."""
    return _instrument.get()


@contextmanager
def instrumented(by: Instrument) -> Iterator[None]:
    token = _instrument.set(by)
    try:
        with _traced_under(object()):
            yield
    finally:
        _instrument.reset(token)


@dataclasses.dataclass
class Tapping:
    """Gives each product its zeros.

    Attributes:
      tap: What to keep.
      zeros: For each place; new ones where there are none.
      found: The products that ran, in order, and their recipes.
      stored: Which of their operands are codes already.
    """

    tap: Tap
    zeros: Mapping[Place, jax.Array] = dataclasses.field(default_factory=dict)
    found: dict[Place, Recipe] = dataclasses.field(default_factory=dict)
    stored: dict[Place, Stored] = dataclasses.field(default_factory=dict)

    def product(
        self, place: Place, recipe: Recipe, state: Any, compute: Any, stored: Stored
    ) -> jax.Array:
        self.found.setdefault(place, recipe)
        self.stored.setdefault(place, stored)
        zeros = self.zeros.get(place)
        if zeros is None:
            zeros = jnp.zeros((len(ROLES), self.tap.size), jnp.float32)
        # A product's own traces take zeros as an argument: products alike share them.
        with _traced_under(None):
            return compute(recipe, state, self.tap, zeros)


class Tapped(NamedTuple):
    """What a tap kept of a function.

    Attributes:
      recipes: Of the products that ran, in order.
      stored: Which of their operands are codes already.
      sums: For each float32[len(ROLES), size], zeros where no gradient reached it.
      closed: The jaxpr of the function.
    """

    recipes: dict[Place, Recipe]
    stored: dict[Place, Stored]
    sums: dict[Place, jax.Array]
    closed: Any


def tapped(where: str, tap: Tap, function: Callable[..., Any], *arguments: Any) -> Tapped:
    """What a tap keeps of the products of `function`, which gives a float scalar."""
    finding = Tapping(tap)
    with instrumented(finding):
        closed = jax.make_jaxpr(function)(*arguments)
    # Along all axes of a `jax.shard_map` that arrays vary along: else their cotangent would be the
    # sum over the shards, on each of them.
    arrays = [x for x in jax.tree.leaves((arguments, closed.consts)) if isinstance(x, jax.Array)]
    none, *_ = varying_alike(jnp.zeros((len(ROLES), tap.size), jnp.float32), *arrays)
    zeros = dict.fromkeys(finding.found, none)

    def of(zeros: dict[Place, jax.Array]) -> Any:
        with instrumented(Tapping(tap, zeros)):
            return function(*arguments)

    try:
        sums = jax.grad(of)(zeros)
    except ValueError as error:
        if not has_no_derivative(error):
            raise
        raise ValueError(
            f"{where}: a product runs inside of a lax.while_loop, out of which no gradient comes, "
            "expected a model that can be differentiated: what is observed leaves it as one; use "
            "lax.scan, or lax.fori_loop with bounds that are numbers"
        ) from error
    return Tapped(finding.found, finding.stored, sums, closed)


def has_no_derivative(error: ValueError) -> bool:
    """Whether an error is JAX's of a `lax.while_loop` that is differentiated."""
    return "Reverse-mode differentiation does not work" in str(error)


def swapped_rows(rows: jax.Array) -> jax.Array:
    """The rows of lhs and rhs exchanged, as `State.swapped` does."""
    return rows[jnp.array([1, 0, 5, 4, 3, 2])]
