"""Products and turns in one call of compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from ramify.kernels.cpu.abi import OP_KIND, OP_NORM_ROPE, OP_NUM_TASKS
from ramify.kernels.cpu.jit import compile_cached, data_address, jit
from ramify.kernels.cpu.norm_rope import norm_rope
from ramify.kernels.cpu.packed_gemm import gemm_num_tasks, packed_gemm
from ramify.kernels.cpu.task_queue import COUNTER_BYTES, finish_and_wait, next_task

_OP_KIND, _OP_NORM_ROPE, _OP_NUM_TASKS, _COUNTER_BYTES = (
    OP_KIND,
    OP_NORM_ROPE,
    OP_NUM_TASKS,
    COUNTER_BYTES,
)  # globals are constants to Numba


@jit
def run_op(op: Any, eps: float, positions: Any, scratch: Any, counters: int, worker: int) -> None:
    """This worker's part of an operation, and its wait for the others.

    Args:
        op, eps, positions: see `_run_ops`.
        scratch: this worker's own.
        counters: address of those of this operation.
        worker: its number.
    """
    if op[_OP_KIND] == _OP_NORM_ROPE:
        total, done, task = op[_OP_NUM_TASKS], 0, next_task(counters)
        while task < total:
            norm_rope(op, eps, positions, task)
            done += 1
            task = next_task(counters)
    else:
        total, done = gemm_num_tasks(op), packed_gemm(op, eps, scratch, counters, worker)
    finish_and_wait(counters, done, total)


def _run_ops(
    ops: Any, eps: Any, positions: Any, num_workers: int, scratch: Any, counters: Any
) -> None:
    """One after the other; each is cut into tasks for all workers.

    Args:
        ops: [n, OP_FIELDS] int64: the numbers of `packed_gemm.packed_gemm` or `norm_rope.norm_rope`,
            with which of them it is at `OP_KIND`.
        eps: [n] float64.
        positions: [num_rows] int64, for turns.
        scratch: [at least num_workers, gemm_scratch_floats] float32.
        counters: [at least n, 2] int64.
    """
    for i in range(len(ops)):
        counters[i, 0] = counters[i, 1] = 0
    for worker in prange(num_workers):  # at times unsigned: `run_op` would be compiled twice
        for i in range(len(ops)):
            at = data_address(counters) + _COUNTER_BYTES * i
            run_op(ops[i], eps[i], positions, scratch[worker], at, np.int64(worker))


run_ops = compile_cached(_run_ops)
