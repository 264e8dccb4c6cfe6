"""Checks of arguments, paths of leaves, and keys, that the transforms share."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from optax import GradientTransformation


def check_transform(where: str, tx: Any) -> None:
    if not isinstance(tx, GradientTransformation):
        raise TypeError(
            f"{where}: tx has type {type(tx).__name__}, expected a GradientTransformation of "
            "optax, e.g. optax.adamw(1e-3)"
        )


def check_integer(where: str, name: str, value: Any, least: int, largest: int) -> None:
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{where}: {name} is an array, expected a number of Python; do not let "
            f"optax.inject_hyperparams inject it: write optax.inject_hyperparams(lambda rate: "
            f"qtoolkit.optim.{where}(...))(rate=1e-3)"
        )
    if type(value) is not int or not least <= value <= largest:
        raise ValueError(f"{where}: {name}={value!r}, expected an integer of {least} to {largest}")


def leaf_path(keys: tuple[Any, ...]) -> str:
    """A path such as "a/0/kernel". Boxes of one array, such as Flax's variables, add nothing."""
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def key_words(seed: jax.Array, step: jax.Array, path: str) -> jax.Array:
    """A key for one array in one step, for the hash that draws bits: it mixes all four words."""
    return jnp.stack([seed, step, jnp.uint32(zlib.crc32(path.encode())), jnp.uint32(0)])
