"""Measures every operand of a model's matmuls, forward and backward, for `Numerics` and metrics."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import varying_alike
from qtoolkit.products._matmul import Key, Planted
from qtoolkit.products._numerics import Numerics, Row
from qtoolkit.products._place import Place
from qtoolkit.products._program import Program
from qtoolkit.products._quantizing import (
    Quantizing,
    StaticResult,
    Traced,
    compiled,
    stored_labels,
)
from qtoolkit.products._recipe import UNQUANTIZED, Recipe
from qtoolkit.products._report import left_of
from qtoolkit.products._rounded import Rounded
from qtoolkit.products._taps import ROLES, Stored
from qtoolkit.scaling.internal import TALLY_SIZE, Tally, tally_of, tally_vector

# A role is one of six uses of an operand, see `_taps.ROLES`. For each role: which operand it
# is, and which matmul uses it.
_OPERAND_OF_ROLE = ("lhs", "rhs", "cotangent", "rhs", "lhs", "cotangent")
_MATMUL_OF_ROLE = ("forward", "forward", "dgrad", "dgrad", "wgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class _TallyTap:
    """Measures an operand: its `Tally` as one vector, which leaves the program as a gradient."""

    roles: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    size: int = TALLY_SIZE

    def __call__(self, x: jax.Array, rounded: Rounded) -> jax.Array:
        return tally_vector(x, rounded.q, rounded.spec, rounded.scales)


class Measured(NamedTuple):
    """What a tap can measure of a matmul: its recipe, and labels of stored operands."""

    recipe: Recipe
    stored: Stored


def measured_matmuls(program: Program, multiply: Quantizing) -> dict[Key, Measured]:
    """The quantized matmuls of a program, in the order in which they run."""
    found: dict[Key, Measured] = {}
    for matmul in program.matmuls:
        recipe = multiply.recipe_of(matmul)
        if recipe is not None:
            stored = stored_labels(matmul)
            recipe = recipe.with_stored(1) if any(stored) else recipe
            found.setdefault(matmul.key, Measured(recipe, stored))
    return found


def numerics_of(traced: Traced, leaves: list[Any], planted: Mapping[Key, Planted]) -> Numerics:
    """Measures all matmuls in one step of a function that returns a loss."""
    with explained("numerics"):
        measured, static = _measured(traced, leaves, dict(planted))
    matmuls, left = static.value
    row_labels = [
        (number, role, twin, label)
        for number, (key, matmul) in enumerate(matmuls)
        for role, twin, label in labels(key, *matmul)
    ]
    *indices, _ = zip(*row_labels, strict=True)
    tallies = _tallies(measured, *map(np.array, indices))
    rows = (
        Row(**label, tally=jax.tree.map(operator.itemgetter(i), tallies))
        for i, (*_, label) in enumerate(row_labels)
    )
    return Numerics(rows=tuple(rows), left=left)


@compiled
def _measured(traced: Traced, leaves: list[Any], planted: dict[Key, Planted]) -> Any:
    """For each matmul float32[len(ROLES), TALLY_SIZE]; and the matmuls, also those without."""
    tap = _TallyTap()
    program, multiply, planted = traced.measuring(leaves, planted, tap)
    matmuls = measured_matmuls(program, multiply)
    check_ran("numerics", matmuls)
    # Inside of a `jax.shard_map`, mark the zeros as varying over the same mesh axes as the other
    # arrays. JAX sums the cotangent of a value that does not vary over all shards, and every shard
    # would then get the measurements of all instead of its own.
    arrays = [x for x in jax.tree.leaves(leaves) if jnp.issubdtype(x.dtype, jnp.number)]
    zero, *_ = varying_alike(jnp.zeros((len(ROLES), tap.size), jnp.float32), *arrays)

    def loss(zeros: dict[Key, jax.Array]) -> Any:
        given = {
            key: dataclasses.replace(planted.get(key, Planted({})), shared=x)
            for key, x in zeros.items()
        }
        return program.run(leaves, multiply, planted | given)[0][0]

    sums = jax.grad(loss)(dict.fromkeys(matmuls, zero))
    rows = tuple(sums[key] for key in matmuls)
    return rows, StaticResult((tuple(matmuls.items()), left_of(program, multiply)))


@contextlib.contextmanager
def explained(where: str) -> Iterator[None]:
    """Says what to do where JAX cannot differentiate a model that is measured."""
    try:
        yield
    except ValueError as error:
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
        raise ValueError(
            f"{where}: a matmul runs inside of a lax.while_loop, which has no gradient, expected "
            "a model that can be differentiated: measurements come out of it as gradients; use "
            "lax.scan, or lax.fori_loop with bounds that are numbers"
        ) from error


@jax.jit
def _tallies(
    measured: tuple[jax.Array, ...], matmul: jax.Array, role: jax.Array, twin: jax.Array
) -> Tally:
    """The tallies of all rows of the report, computed by one program.

    Args:
      measured: For each matmul float32[roles, TALLY_SIZE]: what the tap measured.
      matmul, role, twin: int[rows]: for each row of the report the index of its matmul, the role of
        its operand, and the twin of that role, see `labels`.
    """
    vectors = jnp.stack(measured)
    # An operand with a twin was measured in one of the two roles; the vector of the other is zeros.
    # Which one depends on the matmul. So add both, unless they are the same vector.
    of_twin = jnp.where((role == twin)[:, None], np.float32(0), vectors[matmul, twin])
    return jax.vmap(tally_of)(vectors[matmul, role] + of_twin)


def check_ran(where: str, products: Collection[Any]) -> None:
    if not products:
        raise ValueError(
            f"{where}: no quantized matmul ran, expected a wrapped model; wrap it first, and let "
            "the loss call the wrapped one"
        )


@dataclasses.dataclass(frozen=True)
class Loss:
    """A function that returns `loss` or `(loss, aux)`, so that it returns only the loss.

    Equal for one function: JAX then finds what it has compiled.
    """

    where: str
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        out = self.function(*arguments)
        value = out[0] if isinstance(out, tuple) else out
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape != () or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{self.where}: loss_fn gave {dtype}{list(shape)}, expected a float scalar, or a "
                "tuple that begins with one"
            )
        return value


def labels(
    place: Place, recipe: Recipe, stored: Stored
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The rows of the report of a matmul: for each its role, twin, and the other fields of `Row`.

    Two roles are twins if they round the same array in the same way, as forward and dgrad often
    round the kernel. Twins have one row, that of the earlier role. A role without a twin is its
    own twin here.
    """
    twins = {earlier: later for later, earlier in recipe.twins.items()}
    for role, operand in enumerate(recipe.operands):
        if role in recipe.twins:
            continue
        twin = twins.get(role, role)
        side = _OPERAND_OF_ROLE[role]
        if operand is not None:
            fmt, element = str(operand), operand.spec.element
            least = getattr(element, "min_subnormal", None)
            least = element.min_positive if least is None else least
            limits = float(least), float(element.max_finite)
        else:
            label = {"lhs": stored[0], "rhs": stored[1]}.get(side)
            fmt, limits = label or UNQUANTIZED, None
        names = {
            "path": place.path,
            "product": place.name,
            "operand": side,
            "parts": ", ".join(_MATMUL_OF_ROLE[one] for one in dict.fromkeys((role, twin))),
            "fmt": fmt,
            "limits": limits,
        }
        yield role, twin, names
