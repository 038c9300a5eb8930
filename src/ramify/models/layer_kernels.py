"""Whole layers in one call of compiled code: products and turns, and attention after each turn."""

from __future__ import annotations

from typing import Any

from ramify.attention import (
    block_kernels,
    block_rows,
    direct,
    few_rows,
    kernel_args,
    key_vectors,
    row_ops,
)
from ramify.attention.block_kernels import attend
from ramify.attention.compiled import compiled
from ramify.attention.kernel_args import Rows
from ramify.attention.simd import copy_row, moved
from ramify.models import chain_kernels, panel_kernels, panel_tiles, row_kernels, row_tiles
from ramify.models.chain_kernels import KIND, TURN
from ramify.models.panel_kernels import multiply
from ramify.models.row_kernels import turn

_KIND, _TURN = KIND, TURN  # globals are constants to Numba


def _run_layers(
    program: Any, eps: Any, positions: Any, scratch: Any, counter: Any, numbers: Any, planes: Any, slots: Any,
    shape: Any, keys: Any, rope: Any, values: Any, tasks: Any, starts: Any, joints: Any, tokens: Any,
    token_positions: Any, table: Any, state: Any, task_scratch: Any, task_counters: Any,
) -> None:  # fmt: skip
    """One operation after the other; attention runs, on rows that a turn has turned, behind it.

    Args:
        program, eps, positions, scratch, counter: as for `chain_kernels.run_all`.
        numbers: [6] int64: dtype of rows and of K/V; address of the rows of q, k and v, and bytes
            from one to the next; bytes from a row's beginning to its keys, and to its values;
            address of the results, rows of as many elements as the queries have.
        planes: [layers, 2] int64: addresses of K and of V.
        slots: [T] int64: where the rows' keys and values go.
        shape, keys, rope, values, tasks, joints, tokens, token_positions, table, state,
            task_scratch, task_counters: as for `block_kernels.attend`, with the planes of any
            layer, all tasks.
        starts: [phases + 1] int64: where each phase begins among the tasks, and the end.
    """
    rows, stride = numbers[1], numbers[2]
    where = Rows(numbers[0], rows, stride, numbers[5])
    layer = 0
    for i in range(len(program)):
        if program[i, _KIND] != _TURN:
            multiply(program[i], eps[i], scratch, counter)
            continue
        turn(program[i], eps[i], positions)
        to_keys, to_values = planes[layer, 0], planes[layer, 1]
        layer += 1
        for t in range(len(slots)):
            row, slot = rows + stride * t, slots[t]
            copy_row(to_keys + slot * keys.token, row + numbers[3], keys.token // 4)
            copy_row(to_values + slot * values.token, row + numbers[4], values.token // 4)
        for phase in range(len(starts) - 1):
            attend(shape, moved(keys, to_keys), rope, moved(values, to_values),
                   tasks[starts[phase] : starts[phase + 1]], joints, tokens, token_positions,
                   table, where, state, task_scratch, task_counters)  # fmt: skip


run_layers = compiled(
    _run_layers,
    __file__,
    block_kernels.__file__,
    block_rows.__file__,
    chain_kernels.__file__,
    direct.__file__,
    few_rows.__file__,
    kernel_args.__file__,
    key_vectors.__file__,
    panel_kernels.__file__,
    panel_tiles.__file__,
    row_kernels.__file__,
    row_ops.__file__,
    row_tiles.__file__,
    parallel=False,
)
