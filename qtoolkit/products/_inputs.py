"""NumPy arrays among the inputs of a model.

To a trace a NumPy array is a constant, and what is computed from constants and a parameter counts
as a parameter: the scores of two activations would be rounded as by a kernel, and named after it.
"""

from collections.abc import Callable
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


def as_jax(tree: Any, integers: bool = True) -> Any:
    """A pytree with JAX arrays in place of NumPy arrays, with their dtypes as JAX has them.

    It is the tree itself if there is nothing to convert: a model may write to what it is given.

    Args:
      integers: Whether arrays of integers and booleans are converted, too.
    """
    leaves, structure = jax.tree.flatten(tree)
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
