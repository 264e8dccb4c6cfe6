"""Generators and coroutines whose steps run in a context. Oracle: the same generator without it."""

import contextlib

import pytest

from qtoolkit.products._control_flow import run_in


def steps(log):
    value = None
    try:
        while value != "end":
            try:
                value = yield (len(log), value)
            except ValueError as error:
                value = str(error)
            log.append(value)
        return "returned"
    finally:
        log.append("closed")


def driven(make):
    """What a generator yields, returns and logs, when it is sent values and errors."""
    log = []
    running = make(log)
    results = [next(running), running.send("a"), running.throw(ValueError("b")), running.send("c")]
    with pytest.raises(StopIteration) as end:
        running.send("end")
    other_log = []
    other = make(other_log)
    next(other)
    other.close()
    with pytest.raises(StopIteration):
        next(other)
    failing = make([])
    next(failing)
    with pytest.raises(KeyError):
        failing.throw(KeyError("x"))
    return results, end.value.value, log, other_log


@contextlib.contextmanager
def depth_of(depths):
    depths.append(+1)
    yield
    depths.append(-1)


def test_a_generator_behaves_as_without_a_context():
    assert driven(lambda log: run_in(contextlib.nullcontext, steps, log)) == driven(steps)


def test_only_the_steps_run_in_the_context():
    depths, inside = [], []

    def counting():
        for _ in range(2):
            inside.append(sum(depths))
            yield

    running = run_in(lambda: depth_of(depths), counting)
    for _ in running:
        assert sum(depths) == 0
    assert inside == [1, 1]


def test_a_coroutine_and_a_function():
    depths = []

    async def awaiting(x):
        return x, sum(depths)

    with pytest.raises(StopIteration) as end:
        run_in(lambda: depth_of(depths), awaiting, 3).send(None)
    assert end.value.value == (3, 1)
    assert run_in(lambda: depth_of(depths), lambda: sum(depths)) == 1
