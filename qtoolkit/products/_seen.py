"""What is seen of a matmul when a program runs."""

from typing import Any, NamedTuple


class Seen(NamedTuple):
    """What is seen of a matmul: pytrees of arrays. Several runs are merged, shards too.

    Attributes:
      largest: Merged by maximum.
      total: Merged by addition.
    """

    largest: Any = ()
    total: Any = ()
