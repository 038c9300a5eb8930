"""Whole layers in one call of compiled code: products and turns, and attention after each turn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from ramify.attention import (
    block_kernels,
    block_rows,
    direct,
    direct_pairs,
    exponentials,
    few_rows,
    kernel_args,
    key_vectors,
    laid_out,
    row_ops,
    workers,
)
from ramify.attention.block_kernels import attend_task
from ramify.attention.block_rows import address, jit
from ramify.attention.compiled import compiled
from ramify.attention.kernel_args import Rows, moved
from ramify.attention.simd import copy_row
from ramify.attention.workers import STEP, leave, take_next
from ramify.models import chain_kernels, panel_kernels, panel_tiles, row_kernels, row_tiles
from ramify.models.chain_kernels import KIND, TASKS, TURN, operate
from ramify.models.row_kernels import share_of, turn

_KIND, _TURN, _STEP, _TASKS = KIND, TURN, STEP, TASKS  # globals are constants to Numba


@jit
def _store(numbers: Any, slots: Any, planes: Any, sizes: Any, tokens: Any) -> None:
    """Keys and values of tokens [from, to) into their slots.

    Args:
        numbers, slots: see `_run_layers`.
        planes, sizes: addresses of K and of V, and bytes of a token there.
    """
    for t in range(tokens[0], tokens[1]):
        row, slot = numbers[1] + numbers[2] * t, slots[t]
        copy_row(planes[0] + slot * sizes[0], row + numbers[3], sizes[0] // 4)
        copy_row(planes[1] + slot * sizes[1], row + numbers[4], sizes[1] // 4)


def _run_layers(
    program: Any, eps: Any, positions: Any, num_workers: int, scratch: Any, counters: Any, numbers: Any,
    planes: Any, slots: Any, shape: Any, keys: Any, rope: Any, values: Any, tasks: Any, starts: Any,
    joints: Any, tokens: Any, token_positions: Any, table: Any, state: Any, task_scratch: Any,
    joint_counters: Any,
) -> None:  # fmt: skip
    """One operation after the other; attention runs, on rows that a turn has turned, behind it.

    Args:
        program, eps, positions, num_workers, scratch: as for `chain_kernels.run_all`.
        counters: [at least operations, 2] int64; the phases of each layer's attention are
            operations, too.
        numbers: [6] int64: dtype of rows and of K/V; address of the rows of q, k and v, and bytes
            from one to the next; bytes from a row's beginning to its keys, and to its values;
            address of the results, rows of as many elements as the queries have.
        planes: [layers, 2] int64: addresses of K and of V.
        slots: [T] int64: where the rows' keys and values go.
        shape, keys, rope, values, tasks, joints, tokens, token_positions, table, state,
            task_scratch, joint_counters: as for `block_kernels.attend`, with the planes of any
            layer, all tasks.
        starts: [phases + 1] int64: where each phase begins among the tasks, and the end.
    """
    for i in range(len(counters)):
        counters[i, 0] = counters[i, 1] = 0
    for worker in prange(num_workers):
        at, layer = address(counters), 0
        for i in range(len(program)):
            if program[i, _KIND] != _TURN:
                operate(program[i], eps[i], positions, scratch[worker], at, np.int64(worker))
                at += _STEP
                continue
            where = Rows(numbers[0], numbers[1], numbers[2], numbers[5])
            to_keys, to_values = planes[layer, 0], planes[layer, 1]
            layer += 1
            total, done, task = program[i, _TASKS], 0, take_next(at)
            while task < total:
                turn(program[i], eps[i], positions, task)
                share = share_of(program[i], len(positions), task)
                _store(numbers, slots, (to_keys, to_values), (keys.token, values.token), share)
                done += 1
                task = take_next(at)
            leave(at, done, total)
            at += _STEP
            for phase in range(len(starts) - 1):
                some = tasks[starts[phase] : starts[phase + 1]]
                done, task = 0, take_next(at)
                while task < len(some):
                    task = attend_task(
                        shape, moved(keys, to_keys), rope, moved(values, to_values), some, joints,
                        task, at, joint_counters, tokens, token_positions, table, where, state,
                        task_scratch[worker],
                    )  # fmt: skip
                    done += 1
                leave(at, done, len(some))
                at += _STEP


run_layers = compiled(
    _run_layers,
    __file__,
    block_kernels.__file__,
    block_rows.__file__,
    chain_kernels.__file__,
    direct.__file__,
    direct_pairs.__file__,
    exponentials.__file__,
    few_rows.__file__,
    kernel_args.__file__,
    key_vectors.__file__,
    laid_out.__file__,
    panel_kernels.__file__,
    panel_tiles.__file__,
    row_kernels.__file__,
    row_ops.__file__,
    row_tiles.__file__,
    workers.__file__,
)
