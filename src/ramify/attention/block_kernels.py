"""Exact attention over blocks of keys, compiled by Numba: threads, tasks, tiles.

The unit of arithmetic is one query row against one block of `BLOCK_KEYS` keys at a fixed absolute
position: scores, their maximum, the sum of exponentials, the weighted sum of values. A row folds
its blocks left to right (the online softmax of Milakov and Gimelshein, 2018). Keys that a row does
not see weigh exactly 0, and sums end in +0, so that neither the tile a row is computed in nor how
far its tile reaches changes a bit of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from ramify.attention.compiled import compiled
from ramify.attention.simd import (
    BF16,
    F16,
    F32,
    INT8,
    SIZES,
    TILE_COLUMNS,
    TILE_ROWS,
    copy_row,
    element_at,
    exp_of,
    fold_row,
    is_finite,
    prefetch,
    put_float,
    soft_cap_row,
    softmax_row,
    take_next,
    tile_1,
    tile_2,
    tile_4,
    tile_6,
    transpose_keys,
    widen_row,
)

BLOCK_KEYS = 256
_BLOCK, _COLUMNS, _ROWS = BLOCK_KEYS, TILE_COLUMNS, TILE_ROWS  # globals are constants to Numba
_LINE = 64  # bytes of a cache line


class Part(NamedTuple):
    """One plane as a kernel sees it: addresses and strides in bytes."""

    address: int
    width: int  # elements per token and head; 0: there is no such plane
    token: int  # from one slot to the next
    head: int  # from one head to the next
    scales: int  # address of float32 factors [slots, heads], or 0
    kind: int  # one of simd.F32 ...


class Shape(NamedTuple):
    """What is the same for all tasks of a launch."""

    page_size: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_stride: int  # floats of a row of values, value_dim rounded up to whole tiles
    window: int  # 0: none
    num_workers: int
    soft_cap: float  # 0: none


def scratch_floats(shape: Shape, max_rows: int) -> int:
    """Floats that one worker needs, if no task has more than `max_rows` rows in all its heads."""
    packed = BLOCK_KEYS * (shape.key_dim + shape.value_stride)
    return packed + TILE_ROWS * (BLOCK_KEYS + shape.value_stride) + max_rows * shape.key_dim


_jit = njit(nogil=True, error_model="numpy")


@_jit
def _element(kind: int, address: int) -> Any:
    if kind == F32:
        return element_at(address, 0)
    if kind == BF16:
        return element_at(address, 1)
    if kind == F16:
        return element_at(address, 2)
    if kind == INT8:
        return element_at(address, 3)
    return element_at(address, 4)


@_jit
def _fetch(part: Part, source: int, offsets: Any, j: int, count: int) -> None:
    """Begin to fetch some rows of a plane that will be wanted soon; source 0: nothing.

    Worth it where a task has several heads, whose rows are scattered over many pages.
    """
    for i in range(j, min(j + 8, count) if source else j):
        at = source + offsets[i]
        for line in range(0, part.width * SIZES[part.kind], _LINE):
            prefetch(at + line)


@_jit
def _pack_keys(
    part: Part, source: int, found: Any, ahead: int, next_found: Any, into: int, count: int
) -> None:
    """[width, BLOCK_KEYS] float32 from `count` keys, eight at a time; fetch those of `ahead`."""
    offsets, factors = found
    at, by, rest = offsets.ctypes.data, factors.ctypes.data, part.width % 8
    whole = part.width - rest
    for j in range(0, count, 8):
        where, scale, to = at + 8 * j, by + 4 * j, into + 4 * j
        _fetch(part, ahead, next_found[0], j, count)
        if part.kind == F32:
            transpose_keys(source, where, scale, to, _BLOCK, whole, 0)
        elif part.kind == BF16:
            transpose_keys(source, where, scale, to, _BLOCK, whole, 1)
        elif part.kind == F16:
            transpose_keys(source, where, scale, to, _BLOCK, whole, 2)
        elif part.kind == INT8:
            transpose_keys(source, where, scale, to, _BLOCK, whole, 3)
        else:
            transpose_keys(source, where, scale, to, _BLOCK, whole, 4)
    for d in range(whole, part.width):
        for j in range(count):
            x = _element(part.kind, source + offsets[j] + d * SIZES[part.kind])
            put_float(into + 4 * (d * _BLOCK + j), x * factors[j])


@_jit
def _pack_values(
    part: Part, source: int, found: Any, ahead: int, next_found: Any, into: int, stride: int,
    count: int,
) -> None:  # fmt: skip
    """[count, stride] float32 from `count` values; fetch those of `ahead`."""
    offsets, factors = found
    whole = part.width - part.width % 8
    for j in range(count):
        if j % 8 == 0:
            _fetch(part, ahead, next_found[0], j, count)
        row, to = source + offsets[j], into + 4 * stride * j
        if part.kind == F32:
            widen_row(row, to, whole, factors[j], 0)
        elif part.kind == BF16:
            widen_row(row, to, whole, factors[j], 1)
        elif part.kind == F16:
            widen_row(row, to, whole, factors[j], 2)
        elif part.kind == INT8:
            widen_row(row, to, whole, factors[j], 3)
        else:
            widen_row(row, to, whole, factors[j], 4)
        for d in range(whole, part.width):
            x = _element(part.kind, row + d * SIZES[part.kind])
            put_float(to + 4 * d, x * factors[j])
        for d in range(part.width, stride):
            put_float(to + 4 * d, np.float32(0.0))


@_jit
def _find_slots(table: Any, seq: int, page_size: int, start: int, count: int, slots: Any) -> None:
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


@_jit
def _scale(part: Part, slots: Any, count: int, num_heads: int, head: int, factors: Any) -> None:
    """What the keys or values of a head are to be multiplied with, if their plane has scales."""
    if part.scales:
        for j in range(count):
            factors[j] = element_at(part.scales + 4 * (slots[j] * num_heads + head), 0)


@_jit
def _places() -> Any:
    """For a block of a plane: byte offsets of its rows, and factors."""
    return np.zeros(_BLOCK, np.int64), np.ones(_BLOCK, np.float32)


@_jit
def _product(
    num_rows: int, a: int, a_stride: int, b: int, b_stride: int, c: int, c_stride: int,
    depth: int, num_columns: int,
) -> None:  # fmt: skip
    """c[:num_rows, :num_columns] = a[:num_rows, :depth] @ b[:depth, :num_columns], whole tiles."""
    done = 0
    while done < num_rows:
        left = num_rows - done
        x, y = a + 4 * done * a_stride, c + 4 * done * c_stride
        if left >= _ROWS:
            for j in range(0, 4 * num_columns, 4 * _COLUMNS):
                tile_6(x, a_stride, b + j, b_stride, y + j, c_stride, depth)
            done += _ROWS
        elif left >= 4:
            for j in range(0, 4 * num_columns, 4 * _COLUMNS):
                tile_4(x, a_stride, b + j, b_stride, y + j, c_stride, depth)
            done += 4
        elif left >= 2:
            for j in range(0, 4 * num_columns, 4 * _COLUMNS):
                tile_2(x, a_stride, b + j, b_stride, y + j, c_stride, depth)
            done += 2
        else:
            for j in range(0, 4 * num_columns, 4 * _COLUMNS):
                tile_1(x, a_stride, b + j, b_stride, y + j, c_stride, depth)
            done += 1


@_jit
def _fold(state: Any, row: int, top: float, weight: float, partial: int, width: int) -> None:
    """One block's result of a row into its running (maximum, sum of weights, weighted sum)."""
    old_top, old_weight = state[row, 0], state[row, 1]
    into = state[row].ctypes.data + 8
    if old_weight == np.float32(0.0):  # folding into nothing: the same bits, without the work
        state[row, 0], state[row, 1] = top, weight
        copy_row(into, partial, width)
        return
    best = max(old_top, top)
    old, new = exp_of(old_top - best), exp_of(top - best)
    state[row, 0], state[row, 1] = best, old_weight * old + weight * new
    fold_row(into, old, partial, new, width)


@_jit
def _attend_tile(
    shape: Shape, queries: int, num_rows: int, first_row: int, seen: Any,
    packed: Any, scores: Any, tops: Any, state: Any, state_rows: Any,
) -> None:  # fmt: skip
    """Rows [first_row, first_row + num_rows) of a task against the block in `packed`.

    `seen[row]` is how many of the block's keys a row sees, counted from the block's first, if no
    window cuts off the beginning; it may be negative or beyond the block.
    """
    keys, values, partial = packed
    low, high = _BLOCK, 0
    for r in range(first_row, first_row + num_rows):
        end = seen[r]
        high = max(high, min(end, _BLOCK))
        low = min(low, max(0, end - shape.window) if shape.window else 0)
    if low >= high:
        return
    low = low // _COLUMNS * _COLUMNS
    width = -(-(high - low) // _COLUMNS) * _COLUMNS
    into = scores.ctypes.data
    depth, stride = shape.key_dim, shape.value_stride
    _product(num_rows, queries + 4 * depth * first_row, depth, keys + 4 * low, _BLOCK,
             into, _BLOCK, depth, width)  # fmt: skip
    for r in range(num_rows):
        row, end = into + 4 * _BLOCK * r, seen[first_row + r] - low
        if shape.soft_cap > 0:
            soft_cap_row(row, np.float32(shape.soft_cap), width)
        for j in range(max(0, end), width):
            scores[r, j] = -np.inf
        if shape.window:
            for j in range(min(width, end - shape.window)):
                scores[r, j] = -np.inf
        tops[r, 0], tops[r, 1] = softmax_row(row, width)
    _product(num_rows, into, _BLOCK, values + 4 * low * stride, stride,
             partial, stride, high - low, stride)  # fmt: skip
    for r in range(num_rows):
        if not is_finite(partial + 4 * stride * r, stride):
            # 0 times what a row does not see may be NaN: over its own keys alone
            end = seen[first_row + r] - low
            begin, end = max(0, end - shape.window) if shape.window else 0, min(end, high - low)
            if begin < end:
                _product(1, into + 4 * (_BLOCK * r + begin), _BLOCK,
                         values + 4 * (low + begin) * stride, stride,
                         partial + 4 * stride * r, stride, end - begin, stride)  # fmt: skip
        if tops[r, 0] != -np.inf:  # else the row sees nothing of this block
            _fold(state, state_rows[first_row + r], tops[r, 0], tops[r, 1],
                  partial + 4 * stride * r, stride)  # fmt: skip


@_jit
def _attend_task(
    shape: Shape, latent: Part, rope: Part, value: Part, task: Any, tokens: Any, positions: Any,
    table: Any, queries: int, state: Any, out: Any, scratch: Any,
) -> None:  # fmt: skip
    """All rows of a task against its blocks, in order; rows whose last block it has are written.

    While a block is laid out, what comes next is fetched: K/V of the next head, or block.
    """
    seq, first, count, head0, head1, group0, group1, block0, block1 = task
    depth, stride, num_heads = shape.key_dim, shape.value_stride, shape.num_heads
    heads, whole_group, group = shape.num_kv_heads, num_heads // shape.num_kv_heads, group1 - group0
    num_rows = count * group
    keys = scratch.ctypes.data
    values = keys + 4 * _BLOCK * depth
    at = _BLOCK * (depth + stride)
    scores = scratch[at : at + _ROWS * _BLOCK].reshape(_ROWS, _BLOCK)
    partial = keys + 4 * (at + _ROWS * _BLOCK)
    folded = partial + 4 * _ROWS * stride
    slots, next_slots = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
    seen, row_positions = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    tops = np.empty((_ROWS, 2), np.float32)
    in_keys, in_rope, in_values = _places(), _places(), _places()
    next_keys, next_values = _places(), _places()
    state_rows = np.empty((head1 - head0, num_rows), np.int64)
    lowest, highest = positions[first], positions[first]
    for t in range(count):
        lowest, highest = min(lowest, positions[first + t]), max(highest, positions[first + t])
        row_positions[t * group : (t + 1) * group] = positions[first + t]
        for h in range(head0, head1):
            for g in range(group):
                row = tokens[first + t] * num_heads + h * whole_group + group0 + g
                place = t * group + g
                state_rows[h - head0, place] = row
                to = folded + 4 * depth * ((h - head0) * num_rows + place)
                copy_row(to, queries + 4 * depth * row, depth)
                if block0 == 0:
                    state[row, 1] = 0.0
    if shape.window:  # before it, nobody sees anything
        block0 = max(block0, (lowest + 1 - shape.window) // _BLOCK)
    block1 = min(block1, highest // _BLOCK + 1)
    if block0 < block1:
        count_next = min(_BLOCK, highest + 1 - block0 * _BLOCK)
        _find_slots(table, seq, shape.page_size, block0 * _BLOCK, count_next, next_slots)
    for block in range(block0, block1):
        start = block * _BLOCK
        num_keys = min(_BLOCK, highest + 1 - start)
        padded = -(-num_keys // 8) * 8  # keys are packed by eight
        slots[:padded] = next_slots[:padded]
        if block + 1 < block1:
            left = min(_BLOCK, highest + 1 - start - _BLOCK)
            _find_slots(table, seq, shape.page_size, start + _BLOCK, left, next_slots)
        for j in range(padded):
            in_keys[0][j], in_values[0][j] = slots[j] * latent.token, slots[j] * value.token
            in_rope[0][j] = slots[j] * rope.token
            next_keys[0][j] = next_slots[j] * latent.token
            next_values[0][j] = next_slots[j] * value.token
        for r in range(num_rows):
            seen[r] = row_positions[r] + 1 - start
        for h in range(head0, head1):
            at_key, at_value = latent.address + h * latent.head, value.address + h * value.head
            ahead_key, ahead_value, soon_keys, soon_values = 0, 0, in_keys, in_values
            if h + 1 < head1:
                ahead_key, ahead_value = at_key + latent.head, at_value + value.head
            elif block + 1 < block1 and head1 > head0 + 1:
                ahead_key = latent.address + head0 * latent.head
                ahead_value = value.address + head0 * value.head
                soon_keys, soon_values = next_keys, next_values
            _scale(latent, slots, padded, heads, h, in_keys[1])
            _pack_keys(latent, at_key, in_keys, ahead_key, soon_keys, keys, num_keys)
            if rope.width:
                _scale(rope, slots, padded, heads, h, in_rope[1])
                _pack_keys(rope, rope.address + h * rope.head, in_rope, 0, in_rope,
                           keys + 4 * _BLOCK * latent.width, num_keys)  # fmt: skip
            _scale(value, slots, padded, heads, h, in_values[1])
            _pack_values(value, at_value, in_values, ahead_value, soon_values,
                         values, stride, num_keys)  # fmt: skip
            mine = folded + 4 * depth * (h - head0) * num_rows
            for r in range(0, num_rows, _ROWS):
                _attend_tile(shape, mine, min(_ROWS, num_rows - r), r, seen,
                             (keys, values, partial), scores, tops, state,
                             state_rows[h - head0])  # fmt: skip
    for t in range(count):
        if positions[first + t] < task[8] * _BLOCK:
            for h in range(head1 - head0):
                for g in range(group):
                    row = state_rows[h, t * group + g]
                    weight = state[row, 1]
                    for d in range(shape.value_dim):
                        out[row, d] = state[row, 2 + d] / weight


def _attend(
    shape: Shape, latent: Part, rope: Part, value: Part, tasks: Any, tokens: Any, positions: Any, table: Any,
    queries: int, state: Any, out: Any, scratch: Any, counter: Any,
) -> None:  # fmt: skip
    """Run all tasks of a phase; workers take the next one as they become free.

    Args:
        latent, rope, value: the planes: keys (all of them, or latents), their rotary part or none,
            values.
        tasks: [n, 9] int64: row of `table`; tokens [first, first + count) of `tokens` and
            `positions`; K/V heads from, to; heads of their groups from, to; blocks from, to.
        tokens, positions: [m] int64: rows of q, and where in its request each stands.
        table: [requests, pages] int32.
        queries: address of [T, num_heads, key_dim] float32, scaled.
        state: [T * num_heads, 2 + value_stride] float32, kept between phases.
        out: [T * num_heads, value_dim] float32.
        scratch: [num_workers, scratch_floats] float32.
        counter: [1] int64, for the workers to share.
    """
    counter[0] = 0
    shared = counter.ctypes.data
    for worker in prange(shape.num_workers):
        while True:
            at = take_next(shared)
            if at >= len(tasks):
                break
            _attend_task(shape, latent, rope, value, tasks[at], tokens, positions, table, queries, state, out,
                         scratch[worker])  # fmt: skip


attend = compiled(_attend, __file__)
