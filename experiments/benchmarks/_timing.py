"""Interleaved timing of functions in one process, as medians with the spread."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


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


@dataclasses.dataclass(frozen=True)
class Promise:
    """The median of a row is at most (or at least) `factor` times that of the row `of`."""

    factor: float
    of: str
    at_least: bool = False

    def verdict(self, ratio: float) -> str:
        kept = ratio >= self.factor if self.at_least else ratio <= self.factor
        sign = ">=" if self.at_least else "<="
        word = "holds" if kept else "FALLS SHORT"
        return f"{sign} {self.factor:g} x {self.of}: {ratio:.2f}, {word}"


def print_table(
    title: str,
    seconds: Mapping[str, np.ndarray],
    yardstick: str,
    promises: Mapping[str, Promise] | None = None,
) -> list[str]:
    """Median, middle half, ratio of medians to the yardstick's and promise, a line each.

    Returns the lines whose promise falls short.
    """
    print(f"\n{title}")
    short = []
    base = np.median(seconds[yardstick])
    width = max(map(len, seconds))
    for name, values in seconds.items():
        low, high = np.quantile(values, [0.25, 0.75]) * 1e3
        median = np.median(values)
        line = (
            f"  {name:<{width}}  {median * 1e3:9.3f} ms  [{low:8.3f}, {high:8.3f}]"
            f"  ratio {median / base:6.2f}"
        )
        if promises and name in promises:
            verdict = promises[name].verdict(median / np.median(seconds[promises[name].of]))
            line += f"  promised {verdict}"
            if verdict.endswith("FALLS SHORT"):
                short.append(f"{title}: {name}: {verdict}")
        print(line)
    return short
