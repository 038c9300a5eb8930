"""Run a list of ops (packed GEMM, norms, rope, routing to experts) in one call, a barrier after each.

ggml runs its graphs in this way: workers share each op's tasks, then go on to the next op together.
"""

from __future__ import annotations

from typing import Any

from ramify.kernels.cpu.jit import compile_cached, data_address, jit
from ramify.kernels.cpu.moe import moe_op
from ramify.kernels.cpu.norm_rope import norm_rope, norm_rows
from ramify.kernels.cpu.op_records import OP_GEMM, OP_KIND, OP_NORM, OP_NORM_ROPE, OP_NUM_TASKS
from ramify.kernels.cpu.packed_gemm import gemm_num_tasks, packed_gemm
from ramify.kernels.cpu.task_queue import COUNTER_BYTES, finish_and_wait, next_task
from ramify.kernels.cpu.workers import run_workers


@jit
def run_op(op: Any, eps: float, positions: Any, scratch: Any, counters: int, worker: int) -> None:
    """Run a worker's share of an op, then wait at its barrier.

    Args:
        op, eps, positions: see `_run_ops`.
        scratch: row of the worker.
        counters: address of the op's counters.
        worker: index of the worker.
    """
    kind = op[OP_KIND]
    if kind == OP_GEMM:
        total, done = gemm_num_tasks(op), packed_gemm(op, eps, scratch, counters, worker)
    else:
        total, done, task = op[OP_NUM_TASKS], 0, next_task(counters)
        while task < total:
            if kind == OP_NORM_ROPE:
                norm_rope(op, eps, positions, task)
            elif kind == OP_NORM:
                norm_rows(op, eps, scratch, task)
            else:
                moe_op(op, scratch, task)
            done += 1
            task = next_task(counters)
    finish_and_wait(counters, done, total)


@jit
def _run_ops_as_worker(
    ops: Any, eps: Any, positions: Any, scratch: Any, counters: Any, worker: int
) -> None:
    for i in range(len(ops)):
        op_counters = data_address(counters) + COUNTER_BYTES * i
        run_op(ops[i], eps[i], positions, scratch[worker], op_counters, worker)


def _run_ops(
    ops: Any, eps: Any, positions: Any, num_workers: int, scratch: Any, counters: Any
) -> None:
    """Run ops one after the other; all workers share the tasks of each.

    Args:
        ops: [n, OP_FIELDS] int64, see `op_records`.
        eps: [n] float64, of the norms.
        positions: [num_rows] int64, for rope.
        scratch: [>= num_workers, >= gemm_scratch_floats] float32.
        counters: [>= n, 2] int64.
    """
    for i in range(len(ops)):
        counters[i, 0] = counters[i, 1] = 0
    run_workers(_run_ops_as_worker, (ops, eps, positions, scratch, counters), num_workers)


run_ops = compile_cached(_run_ops)
