"""Run whole decoder layers in one call: the op list, and K/V write + attention behind each rope op."""

from __future__ import annotations

from typing import Any

from ramify.kernels.cpu.attention_args import QueryRows, with_address, with_window_and_sinks
from ramify.kernels.cpu.jit import compile_cached, data_address, jit
from ramify.kernels.cpu.norm_rope import norm_rope, task_rows
from ramify.kernels.cpu.op_list import run_op
from ramify.kernels.cpu.op_records import OP_KIND, OP_NORM_ROPE, OP_NUM_TASKS
from ramify.kernels.cpu.paged_attention import attend_task
from ramify.kernels.cpu.simd import copy_row
from ramify.kernels.cpu.task_queue import COUNTER_BYTES, finish_and_wait, next_task
from ramify.kernels.cpu.workers import run_workers


@jit
def _write_kv(buffers: Any, slots: Any, planes: Any, token_bytes: Any, token_span: Any) -> None:
    """Write keys and values of tokens [from, to) into their slots.

    Args:
        buffers, slots: see `_run_fused_layers`.
        planes, token_bytes: addresses of the K and V planes, and bytes of a token there.
    """
    rows, row_stride, key_offset, value_offset = buffers[1], buffers[2], buffers[3], buffers[4]
    for t in range(token_span[0], token_span[1]):
        row, slot = rows + row_stride * t, slots[t]
        copy_row(planes[0] + slot * token_bytes[0], row + key_offset, token_bytes[0] // 4)
        copy_row(planes[1] + slot * token_bytes[1], row + value_offset, token_bytes[1] // 4)


@jit
def _run_fused_layers_as_worker(
    ops: Any, eps: Any, positions: Any, scratch: Any, counters: Any, buffers: Any,
    planes: Any, slots: Any, params: Any, keys: Any, rope: Any, values: Any, tasks: Any, starts: Any,
    splits: Any, tokens: Any, token_positions: Any, table: Any, state: Any, task_scratch: Any,
    split_counters: Any, worker: int,
) -> None:  # fmt: skip
    op_counters, layer = data_address(counters), 0
    for i in range(len(ops)):
        if ops[i, OP_KIND] != OP_NORM_ROPE:
            run_op(ops[i], eps[i], positions, scratch[worker], op_counters, worker)
            op_counters += COUNTER_BYTES
            continue
        rows = QueryRows(buffers[0], buffers[1], buffers[2], buffers[5])
        key_address, value_address = planes[layer, 0], planes[layer, 1]
        layer_params = with_window_and_sinks(params, planes[layer, 2], planes[layer, 3])
        layer += 1
        total, done, task = ops[i, OP_NUM_TASKS], 0, next_task(op_counters)
        while task < total:
            norm_rope(ops[i], eps[i], positions, task)
            token_span = task_rows(ops[i], len(positions), task)
            kv_addresses = (key_address, value_address)
            token_bytes = (keys.token_stride, values.token_stride)
            _write_kv(buffers, slots, kv_addresses, token_bytes, token_span)
            done += 1
            task = next_task(op_counters)
        finish_and_wait(op_counters, done, total)
        op_counters += COUNTER_BYTES
        for phase in range(len(starts) - 1):
            phase_tasks = tasks[starts[phase] : starts[phase + 1]]
            done, task = 0, next_task(op_counters)
            while task < len(phase_tasks):
                task = attend_task(
                    layer_params, with_address(keys, key_address), rope,
                    with_address(values, value_address),
                    phase_tasks, splits, task, op_counters, split_counters, tokens, token_positions,
                    table, rows, state, task_scratch[worker],
                )  # fmt: skip
                done += 1
            finish_and_wait(op_counters, done, len(phase_tasks))
            op_counters += COUNTER_BYTES


def _run_fused_layers(
    ops: Any, eps: Any, positions: Any, num_workers: int, scratch: Any, counters: Any, buffers: Any,
    planes: Any, slots: Any, params: Any, keys: Any, rope: Any, values: Any, tasks: Any, starts: Any,
    splits: Any, tokens: Any, token_positions: Any, table: Any, state: Any, task_scratch: Any,
    split_counters: Any,
) -> None:  # fmt: skip
    """Run ops one after the other; behind each rope op, write its K/V and run attention.

    Args:
        ops, eps, positions, num_workers, scratch: as for `op_list.run_ops`.
        counters: [>= ops + layers * phases, 2] int64: each phase of attention counts as an op.
        buffers: [6] int64: kind of rows and of K/V; address of the QKV rows and bytes from row to
            row; bytes from a row's start to its keys, and to its values; address of attention's
            output [T, num_heads * value_dim].
        planes: [layers, 4] int64: addresses of the K and V planes; the window, or 0; address of the
            sinks, or 0.
        slots: [T] int64 of the tokens.
        params, keys, rope, values, tasks, splits, tokens, token_positions, table, state,
            task_scratch, split_counters: as for `paged_attention.paged_attention`, with the planes
            of any layer and the tasks of all phases.
        starts: [phases + 1] int64: first task of each phase, and the end.
    """
    for i in range(len(counters)):
        counters[i, 0] = counters[i, 1] = 0
    args = (
        ops, eps, positions, scratch, counters, buffers, planes, slots, params, keys, rope, values, tasks, starts,
        splits, tokens, token_positions, table, state, task_scratch, split_counters,
    )  # fmt: skip
    run_workers(_run_fused_layers_as_worker, args, num_workers)


run_fused_layers = compile_cached(_run_fused_layers)
