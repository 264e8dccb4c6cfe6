"""Models and their inputs as arguments of JAX's transformations."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What JAX raises where Python needs the numbers in a traced array: for a shape, `if`, or a mask.
_NEEDS_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextlib.contextmanager
def naming_missing_inputs(where: str, inputs: Any, options: Any) -> Iterator[None]:
    """Says that there are no inputs where the call of a model fails without any."""
    try:
        yield
    except TypeError as error:
        if inputs or options:
            raise
        raise TypeError(
            f"{where}: the model was called without inputs ({error}), expected those of its call; "
            f"add them: {where}(..., x)"
        ) from error


def as_jax(tree: Any, integers: bool = True, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """A pytree with JAX arrays in place of NumPy arrays, with their dtypes as JAX has them.

    It is the tree itself if there is nothing to convert: a model may write to what it is given.

    Args:
      integers: Whether arrays of integers and booleans are converted, too.
      is_leaf: As in `jax.tree.flatten`.
    """
    # To a trace a NumPy array is a constant, and what is computed from constants and a parameter
    # counts as a parameter: the scores of two activations would be rounded as by a kernel, and
    # named after it.
    leaves, structure = jax.tree.flatten(tree, is_leaf)
    is_converted = [_is_data(x) and (integers or not _is_whole(x)) for x in leaves]
    if not any(is_converted):
        return tree
    pairs = zip(leaves, is_converted, strict=True)
    with jax.core.eval_context():  # no tracers under `jax.jit`: a mask needs their numbers
        leaves = [jnp.asarray(x) if is_it else x for x, is_it in pairs]
    return jax.tree.unflatten(structure, leaves)


def with_numbers(call: Callable[[bool], Any], inputs: Any) -> Any:
    """`call(True)`, which converts all `inputs`; `call(False)` if Python needs some as numbers.

    Then NumPy's integers and booleans stay as they are. In them a model may get a shape or a mask,
    and without quantization it takes them.
    """
    try:
        return call(True)
    except _NEEDS_NUMBERS:
        if not any(_is_data(x) and _is_whole(x) for x in jax.tree.leaves(inputs)):
            raise
    return call(False)


def _is_data(x: Any) -> bool:
    """Whether it is a NumPy array that JAX takes: of numbers or booleans."""
    return isinstance(x, np.ndarray) and any(
        jax.dtypes.issubdtype(x.dtype, kind) for kind in (np.number, np.bool_)
    )


def _is_whole(x: np.ndarray) -> bool:
    return any(jax.dtypes.issubdtype(x.dtype, kind) for kind in (np.integer, np.bool_))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of one call of a model. Only arrays are leaves; train=False, say, is static.

    Attributes:
      arrays: The leaves that are arrays.
      others: All leaves, with None in place of arrays.
      structure: The structure of the whole tree.
    """

    arrays: list[Any]
    others: tuple[Any, ...] = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, batch: Any) -> "Batch":
        leaves, structure = jax.tree.flatten(batch)
        others = tuple(None if hasattr(leaf, "dtype") else leaf for leaf in leaves)
        return cls([leaf for leaf in leaves if hasattr(leaf, "dtype")], others, structure)

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """The whole tree, with these arrays in place of its own."""
        remaining = iter(arrays)
        leaves = [next(remaining) if leaf is None else leaf for leaf in self.others]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def inputs(self) -> Any:
        """The arguments as `wrap(inputs=)` takes them: a tuple, or a dictionary by name."""
        batch = self.with_arrays(self.arrays)
        return batch if isinstance(batch, tuple | dict) else (batch,)

    def bound(self, function: Callable[..., Any]) -> Callable[[Any, Iterable[Any]], list[Any]]:
        """A function of (first, arrays) that calls `function(first, *args, **kwargs)`.

        For a batch made of (args, kwargs). It returns the arrays among the leaves of the result, so
        that JAX can trace it whatever else the model returns.
        """

        def call(first: Any, arrays: Iterable[Any]) -> list[Any]:
            args, kwargs = self.with_arrays(arrays)
            outs = jax.tree.leaves(function(first, *args, **kwargs))
            return [out for out in outs if hasattr(out, "dtype")]

        return call

    def given_to(self, function: Callable[..., Any], *first: Any) -> Any:
        """Calls `function(*first, ...)` with the batch: a tuple as `*batch`, a dictionary as
        `**batch`, anything else as one argument.
        """
        inputs = self.inputs
        if isinstance(inputs, dict):
            return function(*first, **inputs)
        return function(*first, *inputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A static argument of `jax.jit`: it hashes, whatever it holds.

    A value without a hash, such as a model that keeps a plain dataclass or a list, may have changed
    since it was traced, and nobody could tell. So this argument is equal to itself alone, and each
    one that holds such a value is traced once.
    """

    value: Any

    def __hash__(self) -> int:
        return hash(self.value) if self._hashes else id(self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Constant) or not (self._hashes and other._hashes):
            return False
        return bool(self.value == other.value)

    @functools.cached_property
    def _hashes(self) -> bool:
        try:
            hash(self.value)
        except TypeError:
            return False
        return True
