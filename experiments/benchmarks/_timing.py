"""Interleaved timing of functions in one process."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def device_of(platform: str) -> jax.Device | None:
    """The first device of a platform, "gpu" for instance; None, and a line printed, without one."""
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        print(f"no {platform.upper()} found by JAX: {str(error).splitlines()[0]}")
        return None


def interleaved(
    functions: Mapping[str, Callable[[], Any]], *, runs: int = 25, warm: int = 2
) -> dict[str, np.ndarray]:
    """Seconds of each call of each function; a new order each turn, so that drift meets all.

    Each turn calls a function twice and times the second call: the first one refills the caches.
    """
    order = np.random.default_rng(0)
    for function in functions.values():
        for _ in range(warm):
            jax.block_until_ready(function())
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(runs):
        for name in order.permutation(list(functions)):
            function = functions[name]
            jax.block_until_ready(function())
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    return {name: np.asarray(values) for name, values in seconds.items()}
