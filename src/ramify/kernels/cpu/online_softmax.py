"""What rows make of a block of keys, however it is read: which keys they see, softmax, running sums.

What is here is a part of the kernels of `paged_attention` and `decode_attention`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramify.kernels.cpu.abi import BLOCK_KEYS
from ramify.kernels.cpu.attention_args import AttentionParams, KVPlane, is_vnni
from ramify.kernels.cpu.jit import data_address, jit
from ramify.kernels.cpu.simd import (
    TILE_N,
    copy_row,
    load_element,
    rescale_add_row,
    store_f32,
)
from ramify.kernels.cpu.vector_math import (
    exp_minus_max,
    exp_minus_max_vnni,
    exp_scalar,
    row_max,
    tanh_soft_cap,
)

_MASKED = np.float32(-np.inf)  # the score of a key that a row does not see
_BLOCK, _TILE_N = BLOCK_KEYS, TILE_N  # globals are constants to Numba


@jit
def block_slots(table: Any, seq: int, page_size: int, start: int, count: int, slots: Any) -> None:
    """Slots of `count` keys from position `start` on, and the last again up to a multiple of 8."""
    index = start // page_size
    offset, j = start - index * page_size, 0
    while j < count:
        first = np.int64(table[seq, index]) * page_size + offset
        stop = min(count, j + page_size - offset)
        for i in range(j, stop):
            slots[i] = first + i - j
        j, offset, index = stop, 0, index + 1
    for i in range(count, -(-count // 8) * 8):
        slots[i] = slots[count - 1]


@jit
def load_scales(
    plane: KVPlane, slots: Any, count: int, num_heads: int, head: int, scales: Any
) -> None:
    """What the keys or values of a head are to be multiplied with, if their plane has scales."""
    if plane.scales:
        for j in range(count):
            scales[j] = load_element(plane.scales + 4 * (slots[j] * num_heads + head), 0)


@jit
def visible_blocks(params: AttentionParams, task: Any, positions: Any) -> Any:
    """Blocks [from, to) of which a row of a task sees something, and the last key that one sees."""
    first, count, block0, block1 = task[1], task[2], task[7], task[8]
    lowest, highest = positions[first], positions[first]
    for t in range(first, first + count):
        lowest, highest = min(lowest, positions[t]), max(highest, positions[t])
    if params.window:  # before it, nobody sees anything
        block0 = max(block0, (lowest + 1 - params.window) // _BLOCK)
    return block0, min(block1, highest // _BLOCK + 1), highest


@jit
def visible_key_range(params: AttentionParams, num_visible: Any, first: int, count: int) -> Any:
    """Keys [from, to) of a block that rows [first, first + count) see, from a whole tile on.

    `num_visible[row]` is how many of the block's keys a row sees, counted from the block's first, if no
    window cuts off the beginning; it may be negative or beyond the block.
    """
    low, high = _BLOCK, 0
    for r in range(first, first + count):
        end = num_visible[r]
        high = max(high, min(end, _BLOCK))
        low = min(low, max(0, end - params.window) if params.window else 0)
    return low // _TILE_N * _TILE_N, high


@jit
def mask_and_row_max(params: AttentionParams, row: int, end: int, width: int) -> Any:
    """Scores in place, -inf for keys from `end` on and before the window; returns their largest."""
    if params.soft_cap > 0:
        tanh_soft_cap(row, np.float32(params.soft_cap), width)
    for j in range(max(0, end), width):
        store_f32(row + 4 * j, _MASKED)
    if params.window:
        for j in range(min(width, end - params.window)):
            store_f32(row + 4 * j, _MASKED)
    return row_max(row, width)


@jit
def exp_and_sum(plane: KVPlane, row: int, width: int, max_score: float) -> Any:
    """Scores in place to weights of the values in a plane, given the largest; returns their sum."""
    if is_vnni(plane):
        return exp_minus_max_vnni(row, width, max_score)
    return exp_minus_max(row, width, max_score)


@jit
def row_key_range(params: AttentionParams, end: int, high: int) -> Any:
    """Keys [from, to) that one row sees, if any; 0 times what it does not see may be NaN."""
    return max(0, end - params.window) if params.window else 0, min(end, high)


@jit
def merge_state(
    state: Any, row: int, max_score: float, weight: float, block_output: int, width: int
) -> None:
    """One block's result of a row into its running weighted sum, then maximum, sum of weights."""
    old_top, old_weight = state[row, width], state[row, width + 1]
    into = data_address(state[row])
    if old_weight == np.float32(0.0):  # folding into nothing: the same bits, without the work
        state[row, width], state[row, width + 1] = max_score, weight
        copy_row(into, block_output, width)
        return
    best = max(old_top, max_score)
    old, new = exp_scalar(old_top - best), exp_scalar(max_score - best)
    state[row, width], state[row, width + 1] = best, old_weight * old + weight * new
    rescale_add_row(into, old, block_output, new, width)
