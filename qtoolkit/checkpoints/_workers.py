"""Threads that quantize chunks. No JAX here."""

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """Threads that are started once, for many tensors.

    Each thread allocates from a heap of its own, which glibc keeps when the thread ends. With
    threads of their own for every matrix, a stack of 64 experts took 85 to 170 MiB more.

    Attributes:
      count: How many threads; 1 stands for none, everything is done where it is asked for.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = concurrent.futures.ThreadPoolExecutor(count) if count > 1 else None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """`map`, in order; at most one item for each thread, and one more, is computed ahead.

        `function` must not wait for these threads itself.
        """
        items = iter(items)
        first = list(itertools.islice(items, 2))
        items = itertools.chain(first, items)
        if self._pool is None or len(first) < 2:
            yield from map(function, items)
            return
        pool = self._pool
        pending = collections.deque(
            pool.submit(function, item) for item in itertools.islice(items, self.count + 1)
        )
        try:
            while pending:
                result = pending.popleft().result()
                pending.extend(pool.submit(function, item) for item in itertools.islice(items, 1))
                yield result
        finally:
            # What runs may still read the source. Nobody would ever say of a cancelled one that it
            # ended, if the threads are gone already.
            concurrent.futures.wait([future for future in pending if not future.cancel()])


ALONE = Workers(1)
