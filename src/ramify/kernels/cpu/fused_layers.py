"""Whole layers in one call of compiled code: products and turns, and attention after each turn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from ramify.kernels.cpu.abi import OP_KIND, OP_NORM_ROPE, OP_NUM_TASKS
from ramify.kernels.cpu.attention_args import QueryRows, with_address
from ramify.kernels.cpu.jit import compile_cached, data_address, jit
from ramify.kernels.cpu.norm_rope import norm_rope, token_range
from ramify.kernels.cpu.op_list import run_op
from ramify.kernels.cpu.paged_attention import attend_task
from ramify.kernels.cpu.simd import copy_row
from ramify.kernels.cpu.task_queue import COUNTER_BYTES, finish_and_wait, next_task

_OP_KIND, _OP_NORM_ROPE, _COUNTER_BYTES, _OP_NUM_TASKS = (
    OP_KIND,
    OP_NORM_ROPE,
    COUNTER_BYTES,
    OP_NUM_TASKS,
)  # globals are constants to Numba


@jit
def _write_kv(buffers: Any, slots: Any, planes: Any, sizes: Any, tokens: Any) -> None:
    """Keys and values of tokens [from, to) into their slots.

    Args:
        buffers, slots: see `_run_fused_layers`.
        planes, sizes: addresses of K and of V, and bytes of a token there.
    """
    for t in range(tokens[0], tokens[1]):
        row, slot = buffers[1] + buffers[2] * t, slots[t]
        copy_row(planes[0] + slot * sizes[0], row + buffers[3], sizes[0] // 4)
        copy_row(planes[1] + slot * sizes[1], row + buffers[4], sizes[1] // 4)


def _run_fused_layers(
    ops: Any, eps: Any, positions: Any, num_workers: int, scratch: Any, counters: Any, buffers: Any,
    planes: Any, slots: Any, params: Any, keys: Any, rope: Any, values: Any, tasks: Any, starts: Any,
    splits: Any, tokens: Any, token_positions: Any, table: Any, state: Any, task_scratch: Any,
    split_counters: Any,
) -> None:  # fmt: skip
    """One operation after the other; attention runs, on rows that a turn has turned, behind it.

    Args:
        ops, eps, positions, num_workers, scratch: as for `op_list.run_ops`.
        counters: [at least operations, 2] int64; the phases of each layer's attention are
            operations, too.
        buffers: [6] int64: dtype of rows and of K/V; address of the rows of q, k and v, and bytes
            from one to the next; bytes from a row's beginning to its keys, and to its values;
            address of the results, rows of as many elements as the queries have.
        planes: [layers, 2] int64: addresses of K and of V.
        slots: [T] int64: where the rows' keys and values go.
        params, keys, rope, values, tasks, splits, tokens, token_positions, table, state,
            task_scratch, split_counters: as for `paged_attention.paged_attention`, with the planes of any
            layer, all tasks.
        starts: [phases + 1] int64: where each phase begins among the tasks, and the end.
    """
    for i in range(len(counters)):
        counters[i, 0] = counters[i, 1] = 0
    for worker in prange(num_workers):
        at, layer = data_address(counters), 0
        for i in range(len(ops)):
            if ops[i, _OP_KIND] != _OP_NORM_ROPE:
                run_op(ops[i], eps[i], positions, scratch[worker], at, np.int64(worker))
                at += _COUNTER_BYTES
                continue
            where = QueryRows(buffers[0], buffers[1], buffers[2], buffers[5])
            to_keys, to_values = planes[layer, 0], planes[layer, 1]
            layer += 1
            total, done, task = ops[i, _OP_NUM_TASKS], 0, next_task(at)
            while task < total:
                norm_rope(ops[i], eps[i], positions, task)
                share = token_range(ops[i], len(positions), task)
                _write_kv(
                    buffers,
                    slots,
                    (to_keys, to_values),
                    (keys.token_stride, values.token_stride),
                    share,
                )
                done += 1
                task = next_task(at)
            finish_and_wait(at, done, total)
            at += _COUNTER_BYTES
            for phase in range(len(starts) - 1):
                some = tasks[starts[phase] : starts[phase + 1]]
                done, task = 0, next_task(at)
                while task < len(some):
                    task = attend_task(
                        params, with_address(keys, to_keys), rope, with_address(values, to_values), some, splits,
                        task, at, split_counters, tokens, token_positions, table, where, state,
                        task_scratch[worker],
                    )  # fmt: skip
                    done += 1
                finish_and_wait(at, done, len(some))
                at += _COUNTER_BYTES


run_fused_layers = compile_cached(_run_fused_layers)
