"""Instruments: what is done with every matmul of a model besides computing it.

While an `Instrument` is set, each quantized matmul calls it in place of itself. It may compute the
matmul by another recipe (`Quantized`), list it (`Finding`), or measure its operands (`Tapping`).

Taps measure operands, and get the numbers out as a gradient. Calibration and `numerics` must look
at arrays deep inside of a model, under `jit`, `scan`, `remat`, `vmap` and `shard_map`. A value
computed there cannot simply be returned, but a gradient can leave all of these. So each matmul
takes an array of zeros as a further argument, which does not change its result. Its derivative rule
says that the gradient of these zeros is whatever the tap measured, for instance [number of runs,
amax]. `jax.grad` by the zeros then returns the measurements. JAX adds up gradients, so a matmul
that runs several times in a step gives the sum over its runs: a tap must measure numbers that make
sense when they are added.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from qtoolkit.casts.internal import varying_alike
from qtoolkit.products._place import Place
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rounded import Rounded

Value = TypeVar("Value")
HIGH_PRECISION = Recipe((None, None), None)
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


class Instrument(Protocol):
    """Called in place of every matmul of a layer while it is set: see `instrumented`."""

    def product(
        self,
        place: Place,
        recipe: Recipe,
        state: Any,
        compute: Callable[..., jax.Array],
        stored: Stored,
    ) -> jax.Array:
        """Returns the result: `compute(recipe, state, tap, zeros)`, or something in its place."""
        ...


@contextmanager
def set_variable(variable: contextvars.ContextVar[Any], value: Value) -> Iterator[Value]:
    """In this context `variable` has another value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


_instrument: contextvars.ContextVar[Instrument | None] = contextvars.ContextVar(
    "instrument", default=None
)
# jax.jit caches traces. This value is part of the cache key, so that a function that was traced
# without an instrument is traced again once one is set.
_traced_under = jax.make_user_context(None)


def instrument() -> Instrument | None:
    return _instrument.get()


@contextmanager
def instrumented(by: Instrument) -> Iterator[None]:
    with set_variable(_instrument, by), _traced_under(object()):
        yield


def without_measuring() -> AbstractContextManager[None]:
    """In this context taps list matmuls, but measure nothing.

    For the inside of a `jax.custom_vjp`: it refuses functions that close over an array by which
    somebody differentiates, as the zeros of a measured matmul are.
    """
    by = instrument()
    if isinstance(by, Tapping):
        return instrumented(dataclasses.replace(by, zeros={}))
    return nullcontext()


@dataclasses.dataclass
class Tapping:
    """The instrument that passes the tap and an array of zeros to each matmul.

    Attributes:
      tap: What to measure.
      zeros: The zeros for each matmul. One that is missing here gets zeros of its own, by which
        nobody differentiates.
      matmuls: Filled while the model runs: for each matmul, in the order in which they ran, its
        recipe, and which of its operands are stored codes.
    """

    tap: Tap
    zeros: Mapping[Place, jax.Array] = dataclasses.field(default_factory=dict)
    matmuls: dict[Place, tuple[Recipe, Stored]] = dataclasses.field(default_factory=dict)

    def product(
        self, place: Place, recipe: Recipe, state: Any, compute: Any, stored: Stored
    ) -> jax.Array:
        self.matmuls.setdefault(place, (recipe, stored))
        zeros = self.zeros.get(place)
        if zeros is None:
            zeros = jnp.zeros((len(ROLES), self.tap.size), jnp.float32)
        # Inside, the zeros are an argument of a jitted function rather than a value it closes over,
        # so the trace does not depend on this instrument: let equal matmuls share one trace.
        with _traced_under(None):
            return compute(recipe, state, self.tap, zeros)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tapped:
    """What a tap measured in one run of a function. A pytree: a jitted function can return it.

    Attributes:
      rows: For each matmul float32[len(ROLES), size]: the measurements, summed over its runs.
        Zeros for a matmul on which the result of the function does not depend.
      places: The matmuls, in the order in which they ran.
      recipes: Their recipes.
      stored: Which of their operands are stored codes.
    """

    rows: tuple[jax.Array, ...]
    places: tuple[Place, ...] = dataclasses.field(metadata={"static": True})
    recipes: tuple[Recipe, ...] = dataclasses.field(metadata={"static": True})
    stored: tuple[Stored, ...] = dataclasses.field(metadata={"static": True})


def tapped(
    where: str, tap: Tap, function: Callable[..., Any], *arguments: Any
) -> tuple[Tapped, ClosedJaxpr]:
    """Taps all matmuls of `function`, which returns a float scalar. Also returns its jaxpr."""
    listing = Tapping(tap)
    with instrumented(listing):
        closed = jax.make_jaxpr(function)(*arguments)
    # Inside of a `jax.shard_map`, mark the zeros as varying over the same mesh axes as the other
    # arrays. JAX sums the cotangent of a value that does not vary over all shards, and every shard
    # would then get the measurements of all instead of its own.
    arrays = [x for x in jax.tree.leaves((arguments, closed.consts)) if isinstance(x, jax.Array)]
    zero, *_ = varying_alike(jnp.zeros((len(ROLES), tap.size), jnp.float32), *arrays)
    zeros = dict.fromkeys(listing.matmuls, zero)

    def scalar_from(zeros: dict[Place, jax.Array]) -> Any:
        with instrumented(Tapping(tap, zeros)):
            return function(*arguments)

    with explained(where):
        sums = jax.grad(scalar_from)(zeros)
    rows = tuple(sums[place] for place in listing.matmuls)
    recipes, stored = zip(*listing.matmuls.values(), strict=True) if rows else ((), ())
    return Tapped(rows, tuple(listing.matmuls), recipes, stored), closed


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Says what to do where JAX cannot differentiate a tapped model."""
    try:
        yield
    except ValueError as error:
        if not has_no_derivative(error):
            raise
        raise ValueError(
            f"{where}: a matmul runs inside of a lax.while_loop, which has no gradient, expected "
            "a model that can be differentiated: measurements come out of it as gradients; use "
            "lax.scan, or lax.fori_loop with bounds that are numbers"
        ) from error
    except Exception as error:
        is_known = type(error).__name__ == "CustomVJPException"  # JAX exports no name for it
        if not is_known and not isinstance(error, jax.errors.UnexpectedTracerError):
            raise
        raise ValueError(
            f"{where}: a jax.custom_vjp in the model calls qtoolkit.dot, or closes over an array "
            "that depends on a matmul, expected one that does neither: measurements leave the "
            "model as gradients, of which its derivative knows nothing; call qtoolkit.dot_general "
            "there, with a recipe, and pass such an array as an argument"
        ) from error


def has_no_derivative(error: ValueError) -> bool:
    """Whether JAX raised this error because it cannot differentiate a `lax.while_loop`."""
    return "Reverse-mode differentiation does not work" in str(error)


def swapped_rows(rows: jax.Array) -> jax.Array:
    """A tap's rows with lhs and rhs exchanged: dgrad of one is wgrad of the other."""
    return rows[jnp.array([1, 0, 5, 4, 3, 2])]


@dataclasses.dataclass
class Finding:
    """The instrument that lists matmuls, and rounds nothing.

    Attributes:
      kernels: For each matmul, in the order in which they run, the shape of its kernel; None for
        two activations.
    """

    kernels: dict[Place, tuple[int, ...] | None] = dataclasses.field(default_factory=dict)

    def note(self, layer: Any, place: Place, kernel: Any) -> None:
        self.kernels.setdefault(place, None if kernel is None else kernel.shape)

    def product(
        self, place: Place, recipe: Recipe, state: Any, compute: Any, stored: Stored
    ) -> jax.Array:
        out: jax.Array = compute(HIGH_PRECISION, None)
        return out


class Quantized:
    """The instrument that computes all matmuls as their recipe says, also during a warm-up."""

    def product(
        self, place: Place, recipe: Recipe, state: Any, compute: Any, stored: Stored
    ) -> jax.Array:
        out: jax.Array = compute(recipe, state)
        return out


def note_matmul(layer: Any, place: Place, kernel: Any) -> None:
    """Tells an instrument that lists matmuls of one: its layer, its place, its kernel or None."""
    note = getattr(instrument(), "note", None)
    if note is not None:
        note(layer, place, kernel)


def layers_in(kernels: Mapping[Place, Any]) -> list[str]:
    """The paths of the layers that multiply a kernel, in the order in which they run."""
    return list(dict.fromkeys(place.path for place, shape in kernels.items() if shape is not None))


def kernels_in(
    function: Callable[..., Any], *arguments: Any
) -> dict[Place, tuple[int, ...] | None]:
    """The matmuls that run in a function, with the shapes of their kernels."""
    finding = Finding()
    with instrumented(finding):
        jax.eval_shape(function, *arguments)
    return finding.kernels
