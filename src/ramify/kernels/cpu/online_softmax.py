"""Online softmax over KV blocks: visible keys, mask and row max, exp and sum, merge of states.

For packed blocks (`paged_attention`) and blocks read in place (`decode_attention`) alike. `state` of
a row: its weighted sum of values [value_stride], row max, sum of weights (Milakov and Gimelshein,
Online normalizer calculation for softmax, 2018).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramify.kernels.cpu.abi import BLOCK_KEYS, F32
from ramify.kernels.cpu.attention_args import AttentionParams, KVPlane, is_vnni
from ramify.kernels.cpu.jit import data_address, jit
from ramify.kernels.cpu.simd import TILE_N, copy_row, load_element, rescale_add_row, store_f32
from ramify.kernels.cpu.vector_math import (
    exp_minus_max,
    exp_minus_max_vnni,
    exp_scalar,
    row_max,
    tanh_soft_cap,
)

# Beyond it exp_scalar would overflow; the keys' weights are below 1e-34 of the sink's then.
_MAX_SINK = np.float32(80.0)
_MASKED = np.float32(-np.inf)  # the score of a key that a row does not attend to


@jit
def block_slots(table: Any, seq: int, page_size: int, start: int, count: int, slots: Any) -> None:
    """Slots of `count` keys from position `start` on; the last repeats up to a multiple of 8."""
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
    """Load the scales of a head's keys or values, if their plane has scales."""
    if plane.scales:
        for j in range(count):
            scales[j] = load_element(plane.scales + 4 * (slots[j] * num_heads + head), F32)


@jit
def visible_blocks(params: AttentionParams, task: Any, positions: Any) -> Any:
    """Blocks [from, to) that some row of a task attends to, and the last key that some row attends to."""
    first, count, block0, block1 = task[1], task[2], task[7], task[8]
    lowest, highest = positions[first], positions[first]
    for t in range(first, first + count):
        lowest, highest = min(lowest, positions[t]), max(highest, positions[t])
    if params.window:
        block0 = max(block0, (lowest + 1 - params.window) // BLOCK_KEYS)
    return block0, min(block1, highest // BLOCK_KEYS + 1), highest


@jit
def visible_key_range(params: AttentionParams, num_visible: Any, first: int, count: int) -> Any:
    """Keys [from, to) of a block that rows [first, first + count) attend to; `from` starts a tile.

    `num_visible[row]`: keys of the block up to the row's position, the window left aside. It may be
    negative or exceed the block.
    """
    low, high = BLOCK_KEYS, 0
    for r in range(first, first + count):
        end = num_visible[r]
        high = max(high, min(end, BLOCK_KEYS))
        low = min(low, max(0, end - params.window) if params.window else 0)
    return low // TILE_N * TILE_N, high


@jit
def mask_and_row_max(params: AttentionParams, row: int, end: int, width: int) -> Any:
    """Cap scores, set those from key `end` on and before the window to -inf; returns the row max."""
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
    """Scores to softmax weights in place, as P·V with this plane takes them; returns their sum."""
    if is_vnni(plane):
        return exp_minus_max_vnni(row, width, max_score)
    return exp_minus_max(row, width, max_score)


@jit
def row_key_range(params: AttentionParams, end: int, high: int) -> Any:
    """Keys [from, to) that a single row attends to, possibly none."""
    return max(0, end - params.window) if params.window else 0, min(end, high)


@jit
def add_sink(row_sum: float, max_score: float, sink: int) -> Any:
    """A row's sum of weights, relative to its max, plus that of the sink at this address."""
    return row_sum + exp_scalar(min(load_element(sink, F32) - max_score, _MAX_SINK))


@jit
def merge_state(
    state: Any, row: int, max_score: float, row_sum: float, block_output: int, width: int
) -> None:
    """Merge a block's output, row max and sum of weights into a row of `state`."""
    old_max, old_sum = state[row, width], state[row, width + 1]
    into = data_address(state[row])
    if old_sum == np.float32(0.0):  # empty state: the same bits, less work
        state[row, width], state[row, width + 1] = max_score, row_sum
        copy_row(into, block_output, width)
        return
    new_max = max(old_max, max_score)
    old_scale, block_scale = exp_scalar(old_max - new_max), exp_scalar(max_score - new_max)
    new_sum = old_sum * old_scale + row_sum * block_scale
    state[row, width], state[row, width + 1] = new_max, new_sum
    rescale_add_row(into, old_scale, block_output, block_scale, width)
