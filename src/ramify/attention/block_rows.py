"""What rows make of a block of keys, however it is read: which keys they see, softmax, running sums.

What is here is a part of the kernels of `block_kernels` and `few_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ramify.attention.exponentials import exp_of, exp_pairs, exp_row, largest, soft_cap_row
from ramify.attention.kernel_args import Part, Shape, in_pairs
from ramify.attention.simd import (
    TILE_COLUMNS,
    copy_row,
    element_at,
    fold_row,
    put_float,
)

BLOCK_KEYS = 256
_NOTHING = np.float32(-np.inf)  # the score of a key that a row does not see
_BLOCK, _COLUMNS = BLOCK_KEYS, TILE_COLUMNS  # globals are constants to Numba

jit = njit(nogil=True, error_model="numpy")


@jit
def address(array: Any) -> Any:
    """Signed: to Numba, what is unsigned in one branch and signed in another is a float."""
    return np.int64(array.ctypes.data)


@jit
def find_slots(table: Any, seq: int, page_size: int, start: int, count: int, slots: Any) -> None:
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
def scale_factors(
    part: Part, slots: Any, count: int, num_heads: int, head: int, factors: Any
) -> None:
    """What the keys or values of a head are to be multiplied with, if their plane has scales."""
    if part.scales:
        for j in range(count):
            factors[j] = element_at(part.scales + 4 * (slots[j] * num_heads + head), 0)


@jit
def reach(shape: Shape, task: Any, positions: Any) -> Any:
    """Blocks [from, to) of which a row of a task sees something, and the last key that one sees."""
    first, count, block0, block1 = task[1], task[2], task[7], task[8]
    lowest, highest = positions[first], positions[first]
    for t in range(first, first + count):
        lowest, highest = min(lowest, positions[t]), max(highest, positions[t])
    if shape.window:  # before it, nobody sees anything
        block0 = max(block0, (lowest + 1 - shape.window) // _BLOCK)
    return block0, min(block1, highest // _BLOCK + 1), highest


@jit
def span_of(shape: Shape, seen: Any, first: int, count: int) -> Any:
    """Keys [from, to) of a block that rows [first, first + count) see, from a whole tile on.

    `seen[row]` is how many of the block's keys a row sees, counted from the block's first, if no
    window cuts off the beginning; it may be negative or beyond the block.
    """
    low, high = _BLOCK, 0
    for r in range(first, first + count):
        end = seen[r]
        high = max(high, min(end, _BLOCK))
        low = min(low, max(0, end - shape.window) if shape.window else 0)
    return low // _COLUMNS * _COLUMNS, high


@jit
def soften(shape: Shape, row: int, end: int, width: int) -> Any:
    """Scores in place, -inf for keys from `end` on and before the window; returns their largest."""
    if shape.soft_cap > 0:
        soft_cap_row(row, np.float32(shape.soft_cap), width)
    for j in range(max(0, end), width):
        put_float(row + 4 * j, _NOTHING)
    if shape.window:
        for j in range(min(width, end - shape.window)):
            put_float(row + 4 * j, _NOTHING)
    return largest(row, width)


@jit
def to_weights(part: Part, row: int, width: int, top: float) -> Any:
    """Scores in place to weights of the values in a plane, given the largest; returns their sum."""
    if in_pairs(part):
        return exp_pairs(row, width, top)
    return exp_row(row, width, top)


@jit
def own_keys(shape: Shape, end: int, high: int) -> Any:
    """Keys [from, to) that one row sees, if any; 0 times what it does not see may be NaN."""
    return max(0, end - shape.window) if shape.window else 0, min(end, high)


@jit
def fold(state: Any, row: int, top: float, weight: float, partial: int, width: int) -> None:
    """One block's result of a row into its running weighted sum, then maximum, sum of weights."""
    old_top, old_weight = state[row, width], state[row, width + 1]
    into = address(state[row])
    if old_weight == np.float32(0.0):  # folding into nothing: the same bits, without the work
        state[row, width], state[row, width + 1] = top, weight
        copy_row(into, partial, width)
        return
    best = max(old_top, top)
    old, new = exp_of(old_top - best), exp_of(top - best)
    state[row, width], state[row, width + 1] = best, old_weight * old + weight * new
    fold_row(into, old, partial, new, width)
