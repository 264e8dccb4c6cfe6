"""The threads of a conversion."""

import itertools

import pytest

from qtoolkit.checkpoints._produce import Workers


def test_threads_give_results_in_order_and_their_errors():
    def fail(i):
        if i == 7:
            raise OSError("disk")
        return i

    with Workers(3) as workers:
        assert list(workers.map(lambda i: i * i, range(100))) == [i * i for i in range(100)]
        results = workers.map(fail, range(100))
        assert list(itertools.islice(results, 7)) == list(range(7))
        with pytest.raises(OSError, match="disk"):
            next(results)
        assert list(workers.map(str, range(3))) == ["0", "1", "2"]  # they go on
