"""Products and turns in one call of compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from ramify.attention import block_rows, exponentials, kernel_args, row_ops, workers
from ramify.attention.block_rows import address, jit
from ramify.attention.compiled import compiled
from ramify.attention.workers import STEP, leave, take_next
from ramify.models import panel_kernels, panel_tiles, row_kernels, row_tiles
from ramify.models.panel_kernels import multiply, num_tasks
from ramify.models.row_kernels import turn

MULTIPLY, TURN = range(2)
KIND = 16  # the place of one of them, behind the numbers of `multiply`
WIDTH = KIND + 1
TASKS = 11  # where `turn` has the number of its tasks
_KIND, _TURN, _TASKS, _STEP = KIND, TURN, TASKS, STEP  # globals are constants to Numba


@jit
def operate(
    numbers: Any, eps: float, positions: Any, scratch: Any, counters: int, worker: int
) -> None:
    """This worker's part of an operation, and its wait for the others.

    Args:
        numbers, eps, positions: see `_run_all`.
        scratch: this worker's own.
        counters: address of those of this operation.
        worker: its number.
    """
    if numbers[_KIND] == _TURN:
        total, done, task = numbers[_TASKS], 0, take_next(counters)
        while task < total:
            turn(numbers, eps, positions, task)
            done += 1
            task = take_next(counters)
    else:
        total, done = num_tasks(numbers), multiply(numbers, eps, scratch, counters, worker)
    leave(counters, done, total)


def _run_all(
    program: Any, eps: Any, positions: Any, num_workers: int, scratch: Any, counters: Any
) -> None:
    """One after the other; each is cut into tasks for all workers.

    Args:
        program: [n, WIDTH] int64: the numbers of `panel_kernels.multiply` or `row_kernels.turn`,
            with which of them it is at `KIND`.
        eps: [n] float64.
        positions: [num_rows] int64, for turns.
        scratch: [at least num_workers, scratch_floats] float32.
        counters: [at least n, 2] int64.
    """
    for i in range(len(program)):
        counters[i, 0] = counters[i, 1] = 0
    for worker in prange(num_workers):  # at times unsigned: `operate` would be compiled twice
        for i in range(len(program)):
            at = address(counters) + _STEP * i
            operate(program[i], eps[i], positions, scratch[worker], at, np.int64(worker))


run_all = compiled(
    _run_all,
    __file__,
    block_rows.__file__,
    exponentials.__file__,
    kernel_args.__file__,
    panel_kernels.__file__,
    panel_tiles.__file__,
    row_kernels.__file__,
    row_ops.__file__,
    row_tiles.__file__,
    workers.__file__,
)
