"""Workers that share tasks: each is done once, whoever takes it from which end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

import numba

from ramify.kernels.cpu.jit import data_address
from ramify.kernels.cpu.task_queue import next_task_from_either_end

# Callable from Python, unlike functions inside kernels.
callable_jit = numba.njit(nogil=True)


@callable_jit
def take(counters, total, last):
    return next_task_from_either_end(data_address(counters), total, last)


@callable_jit
def take_all(counters, total, last, times):
    """Count in `times` how often each task was taken."""
    task = next_task_from_either_end(data_address(counters), total, last)
    while task >= 0:
        times[task] += 1
        task = next_task_from_either_end(data_address(counters), total, last)


@given(st.integers(0, 40), st.lists(st.booleans(), max_size=60))
def test_from_both_ends_until_none_is_left(total: int, lasts: list[bool]) -> None:
    counters, left = np.zeros(2, np.int64), list(range(total))
    for last in lasts:
        expected = left.pop(-1 if last else 0) if left else -1
        assert take(counters, total, int(last)) == expected


def test_threads_take_each_task_once() -> None:
    together = threading.Barrier(4)

    def begin(*args: object) -> None:
        together.wait()
        take_all(*args)

    for total in (0, 1, 7, *[100_000] * 5):
        counters = np.zeros(2, np.int64)
        times = [np.zeros(total + 1, np.int64) for _ in range(4)]
        threads = [
            threading.Thread(target=begin, args=(counters, total, number % 2, mine))
            for number, mine in enumerate(times)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (np.sum(times, axis=0)[:total] == 1).all()
