"""Models and their inputs as arguments of JAX's transformations."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

NEEDS_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def is_traced_numpy(x: Any, traces_numbers: bool) -> bool:
    """Whether a leaf is an array of NumPy which a model gets as one of JAX.

    Args:
      traces_numbers: Whether also one of integers or booleans, see `with_numbers`.
    """
    if not isinstance(x, np.ndarray | np.generic):
        return False
    is_number = any(jax.dtypes.issubdtype(x.dtype, kind) for kind in (np.number, np.bool_))
    return is_number and (traces_numbers or not is_whole(x))


def is_whole(x: Any) -> bool:
    """Whether it is an array of NumPy in which a model may get a shape or a mask."""
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "iub"


def with_numbers(call: Callable[[bool], Any], has_numbers: Callable[[], bool]) -> Any:
    """`call(True)`, which traces all arrays of NumPy; `call(False)` if Python needs numbers.

    Then NumPy's integers and booleans, and Python's floats, stay as they are. In them a model may
    get a shape or a mask, and without quantization it takes them.

    Args:
      has_numbers: Whether there are any among the inputs.
    """
    try:
        return call(True)
    except NEEDS_NUMBERS:
        if not has_numbers():
            raise
    return call(False)


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
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those by position and by name: a batch is a tuple or a dictionary of them, or one."""
        batch = self.with_arrays(self.arrays)
        if isinstance(batch, dict):
            return (), batch
        return batch if isinstance(batch, tuple) else (batch,), {}

    def given_to(self, function: Callable[..., Any], *first: Any) -> Any:
        args, options = self.arguments
        return function(*first, *args, **options)


def write_back(live: Any, changed: Any) -> None:
    """Lets lists and dictionaries hold what a function has put into its copies of them."""
    pairs: list[Any] = []
    if isinstance(live, list):
        pairs = list(zip(live, changed, strict=False))
        kept = [old if _is_container(old) else new for old, new in pairs]
        live[:] = [*kept, *changed[len(kept) :]]
    elif isinstance(live, dict):
        pairs = [(live[name], changed[name]) for name in live if name in changed]
        by_name = {n: live[n] if _is_container(live.get(n)) else x for n, x in changed.items()}
        live.clear()
        live.update(by_name)
    elif isinstance(live, tuple):
        pairs = list(zip(live, changed, strict=True))
    for old, new in pairs:
        if _is_container(old):
            write_back(old, new)


def _is_container(x: Any) -> bool:
    return type(x) in (list, dict, tuple)


class Contents(NamedTuple):
    """What lists, dictionaries and tuples among arguments hold, to see whether a function puts
    something else into them.
    """

    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, arguments: Any, is_leaf: Callable[[Any], bool] | None = None) -> "Contents":
        return cls(*jax.tree.flatten(arguments, is_leaf=is_leaf))

    def differ_from(self, before: "Contents") -> bool:
        if self.structure != before.structure:
            return True
        return any(a is not b for a, b in zip(self.leaves, before.leaves, strict=True))
