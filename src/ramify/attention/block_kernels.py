"""Exact attention over blocks of keys, compiled by Numba: threads, tasks, tiles.

The unit of arithmetic is one query row against one block of `BLOCK_KEYS` keys at a fixed absolute
position: scores, their maximum, the sum of exponentials, the weighted sum of values. A row folds
its blocks left to right (the online softmax of Milakov and Gimelshein, 2018). Keys that a row does
not see weigh exactly 0, and sums end in +0, so that neither the tile a row is computed in nor how
far its tile reaches changes a bit of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from ramify.attention import direct, kernel_args, row_ops
from ramify.attention.compiled import compiled
from ramify.attention.kernel_args import Block, Later, Part, Rows, Shape
from ramify.attention.row_ops import divide_row, scale_up
from ramify.attention.simd import (
    F32,
    LINE,
    TILE_COLUMNS,
    TILE_ROWS,
    copy_row,
    copy_values,
    element_at,
    exp_of,
    fold_row,
    has_scales,
    int_at,
    is_finite,
    prefetch,
    put_float,
    soft_cap_row,
    softmax_row,
    stored_at,
    stored_size,
    take_next,
    tile_1,
    tile_2,
    tile_4,
    tile_6,
    transpose_keys,
)

BLOCK_KEYS = 256
DIRECT_ROWS = 8  # up to so many rows of a task read a block where it lies; more have it laid out
_BLOCK, _COLUMNS, _ROWS = BLOCK_KEYS, TILE_COLUMNS, TILE_ROWS  # globals are constants to Numba
_DIRECT, _DIRECT_TILE, _AT_ONCE = DIRECT_ROWS, direct.TILES[-1], direct.KEYS
_scores, _mix, _LINE = direct.scores, direct.mix, LINE
_NOTHING = np.float32(-np.inf)


def scratch_floats(shape: Shape, max_rows: int) -> int:
    """Floats that one worker needs, if no task has more than `max_rows` rows in all its heads."""
    packed = BLOCK_KEYS * (shape.key_dim + shape.value_stride)
    tile = TILE_ROWS * (BLOCK_KEYS + shape.value_stride + 2)
    floats = packed + tile + 3 * BLOCK_KEYS + max_rows * shape.key_dim
    return -(-(floats + 2 * (7 * BLOCK_KEYS + 3 * max_rows)) // 16) * 16


_jit = njit(nogil=True, error_model="numpy")


@_jit
def _fetch(block: Block, begin: int, end: int) -> None:
    """Begin to fetch some rows of a block into the second-level cache."""
    for i in range(begin, end):
        at = block.source + int_at(block.offsets + 8 * i)
        for line in range(0, block.part.width * stored_size(block.part), _LINE):
            prefetch(at + line, 2)


@_jit
def _pack_keys(keys: Block, into: int, depth: int, count: int) -> None:
    """Columns of [tiles, depth, TILE_COLUMNS] float32 from `count` keys.

    A tile of a product lies in one piece: lines a power of two apart would share few places of
    the first-level cache.
    """
    part, source = keys.part, keys.source
    rest = part.width % 8
    whole = part.width - rest
    for j in range(0, count, 8):
        where, scale = keys.offsets + 8 * j, keys.factors + 4 * j
        to = into + 4 * (j // _COLUMNS * depth * _COLUMNS + j % _COLUMNS)
        transpose_keys(part, source, where, scale, to, _COLUMNS, whole)
    for d in range(whole, part.width):
        for j in range(count):
            at = source + int_at(keys.offsets + 8 * j) + d * stored_size(part)
            x = stored_at(part, at) * element_at(keys.factors + 4 * j, 0)
            tile = into + 4 * _COLUMNS * (j // _COLUMNS * depth + d)
            put_float(tile + 4 * (j % _COLUMNS), x)


@_jit
def _pack_values(values: Block, into: int, stride: int, count: int) -> None:
    """[stride / TILE_COLUMNS, BLOCK_KEYS, TILE_COLUMNS] float32."""
    part, size = values.part, stored_size(values.part)
    tiles = part.width // _COLUMNS
    tile = 4 * _COLUMNS * _BLOCK
    copy_values(part, values.source, values.offsets, values.factors, count, into, tile, tiles)
    for d in range(tiles * _COLUMNS, stride, _COLUMNS):
        for j in range(count):
            at = values.source + int_at(values.offsets + 8 * j) + d * size
            factor = element_at(values.factors + 4 * j, 0)
            to = into + tile * (d // _COLUMNS) + 4 * _COLUMNS * j
            for i in range(_COLUMNS):
                x = (
                    stored_at(part, at + i * size) * factor
                    if d + i < part.width
                    else np.float32(0.0)
                )
                put_float(to + 4 * i, x)


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
def _product(
    num_rows: int, a: int, a_stride: int, b: int, b_tile: int, c: int, c_stride: int,
    depth: int, num_columns: int, later: Later,
) -> None:  # fmt: skip
    """c[:num_rows, :num_columns] = a[:num_rows, :depth] @ b[:depth, :num_columns], whole tiles.

    Args:
        b: address of the first tile, [depth, TILE_COLUMNS]; the next is `b_tile` bytes further.
        later: fetched meanwhile, a little after each tile: all at once, the next would wait.
    """
    done, fetched = 0, later.begin
    share = -(-(later.end - later.begin) * _COLUMNS // num_columns)
    while done < num_rows:
        left = num_rows - done
        x, y = a + 4 * done * a_stride, c + 4 * done * c_stride
        rows = _ROWS if left >= _ROWS else (4 if left >= 4 else (2 if left >= 2 else 1))
        for tile in range(num_columns // _COLUMNS):
            at, to = b + b_tile * tile, y + 4 * _COLUMNS * tile
            if rows == _ROWS:
                tile_6(x, a_stride, at, _COLUMNS, to, c_stride, depth)
            elif rows == 4:
                tile_4(x, a_stride, at, _COLUMNS, to, c_stride, depth)
            elif rows == 2:
                tile_2(x, a_stride, at, _COLUMNS, to, c_stride, depth)
            else:
                tile_1(x, a_stride, at, _COLUMNS, to, c_stride, depth)
            if fetched < later.end:
                upto = min(fetched + share, later.end)
                _fetch(later.keys, fetched, upto)
                if later.values.part.address != later.keys.part.address:  # latents are both
                    _fetch(later.values, fetched, upto)
                fetched = upto
        done += rows


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
def _tile_of(num_rows: int) -> int:
    """The smallest of `direct.TILES` for so many rows."""
    return num_rows if num_rows < 3 else _DIRECT_TILE


@_jit
def _score(
    shape: Shape, keys: Block, queries: int, num_rows: int, span: Any, into: int, later: Later
) -> None:  # fmt: skip
    """Scores of some rows with keys [low, high) of a block, up to a whole tile."""
    low, high = span
    depth = shape.key_dim
    if keys.packed:
        width = -(-(high - low) // _COLUMNS) * _COLUMNS
        tile = 4 * _COLUMNS * depth
        first = keys.packed + low // _COLUMNS * tile
        _product(num_rows, queries, depth, first, tile, into, _BLOCK, depth, width, later)
        return
    _scores(keys.part, keys.source, keys.offsets + 8 * low, keys.factors + 4 * low,
            -(-(high - low) // _AT_ONCE), depth, queries, num_rows - 1, _tile_of(num_rows), into,
            4 * _BLOCK)  # fmt: skip


@_jit
def _weigh(
    shape: Shape, values: Block, weights: int, num_rows: int, span: Any, into: int, later: Later
) -> None:  # fmt: skip
    """Weighted sums over values [low, high) of a block."""
    low, high = span
    stride = shape.value_stride
    if values.packed:
        first = values.packed + 4 * _COLUMNS * low
        _product(num_rows, weights, _BLOCK, first, 4 * _COLUMNS * _BLOCK, into, stride,
                 high - low, stride, later)  # fmt: skip
        return
    tile = _tile_of(num_rows)
    for d in range(tile * stride):
        put_float(into + 4 * d, np.float32(0.0))
    _mix(values.part, values.source, values.offsets + 8 * low, values.factors + 4 * low, high - low,
         values.part.width, weights, 4 * _BLOCK, num_rows - 1, tile, into, 4 * stride)  # fmt: skip


@_jit
def _attend_tile(
    shape: Shape, queries: int, num_rows: int, first_row: int, seen: Any, keys: Block, values: Block,
    partial: int, scores: int, tops: Any, state: Any, state_rows: Any, later: Later,
) -> None:  # fmt: skip
    """Rows [first_row, first_row + num_rows) of a task against a block.

    `seen[row]` is how many of the block's keys a row sees, counted from the block's first, if no
    window cuts off the beginning; it may be negative or beyond the block.
    """
    nothing = Later(later.keys, later.values, 0, 0)
    low, high = _BLOCK, 0
    for r in range(first_row, first_row + num_rows):
        end = seen[r]
        high = max(high, min(end, _BLOCK))
        low = min(low, max(0, end - shape.window) if shape.window else 0)
    if low >= high:
        return
    low = low // _COLUMNS * _COLUMNS
    width = -(-(high - low) // _COLUMNS) * _COLUMNS
    into, stride = scores, shape.value_stride
    mine = queries + 4 * shape.key_dim * first_row
    _score(shape, keys, mine, num_rows, (low, high), into, later)
    for r in range(num_rows):
        row, end = into + 4 * _BLOCK * r, seen[first_row + r] - low
        if shape.soft_cap > 0:
            soft_cap_row(row, np.float32(shape.soft_cap), width)
        for j in range(max(0, end), width):
            put_float(row + 4 * j, _NOTHING)
        if shape.window:
            for j in range(min(width, end - shape.window)):
                put_float(row + 4 * j, _NOTHING)
        tops[2 * r], tops[2 * r + 1] = softmax_row(row, width)
    _weigh(shape, values, into, num_rows, (low, high), partial, nothing)
    for r in range(num_rows):
        if not is_finite(partial + 4 * stride * r, stride):
            # 0 times what a row does not see may be NaN: over its own keys alone
            end = seen[first_row + r] - low
            begin, end = max(0, end - shape.window) if shape.window else 0, min(end, high - low)
            if begin < end:
                _weigh(shape, values, into + 4 * (_BLOCK * r + begin), 1,
                       (low + begin, low + end), partial + 4 * stride * r, nothing)  # fmt: skip
        if tops[2 * r] != _NOTHING:  # else the row sees nothing of this block
            _fold(state, state_rows[first_row + r], tops[2 * r], tops[2 * r + 1],
                  partial + 4 * stride * r, stride)  # fmt: skip


@_jit
def _take_query(rows: Rows, token: int, head: int, shape: Shape, into: int) -> None:
    """One query row in float32, scaled."""
    depth, scale = shape.key_dim, np.float32(shape.scale)
    if rows.kind == F32:
        scale_up(rows.queries + rows.stride * token + 4 * depth * head, into, depth, scale, 0)
    else:
        scale_up(rows.queries + rows.stride * token + 2 * depth * head, into, depth, scale, 1)


@_jit
def _put_mean(rows: Rows, row: int, shape: Shape, sums: int, weight: float) -> None:
    """One row of the result: its weighted sum over the sum of its weights."""
    width = shape.value_dim
    if rows.kind == F32:
        divide_row(sums, weight, rows.out + 4 * width * row, width, 0)
    else:
        divide_row(sums, weight, rows.out + 2 * width * row, width, 1)


@_jit
def _is_plain(part: Part) -> bool:
    """Whether `direct` can read a plane: whole vectors, scales just where a kind has them."""
    return part.width % 8 == 0 and (not part.scales or has_scales(part))


@_jit
def _attend_task(
    shape: Shape, latent: Part, rope: Part, value: Part, task: Any, tokens: Any, positions: Any,
    table: Any, rows: Rows, state: Any, scratch: Any,
) -> None:  # fmt: skip
    """All rows of a task against its blocks, in order; rows whose last block it has are written.

    Between tiles K/V of the next head or block is fetched, a share at a time, and again a little
    ahead while it is laid out (the next block's keys and values follow this one's). Few rows read a
    block where it lies, and `direct` fetches a little ahead.
    """
    seq, first, count, head0, head1, group0, group1, block0, block1 = task
    depth, stride, num_heads = shape.key_dim, shape.value_stride, shape.num_heads
    heads, whole_group, group = shape.num_kv_heads, num_heads // shape.num_kv_heads, group1 - group0
    num_rows = count * group
    is_direct = num_rows <= _DIRECT and _is_plain(latent) and _is_plain(value) and not rope.width
    tile_rows = _DIRECT_TILE if is_direct else _ROWS
    keys = scratch.ctypes.data
    values = keys + 4 * _BLOCK * depth
    laid_keys, laid_values = (0, 0) if is_direct else (keys, values)
    scores = values + 4 * _BLOCK * stride
    partial = scores + 4 * _ROWS * _BLOCK
    at = _BLOCK * (depth + stride) + _ROWS * (_BLOCK + stride)
    tops = scratch[at : at + 2 * _ROWS]
    at += 2 * _ROWS
    key_factors = scratch[at : at + _BLOCK]
    value_factors = scratch[at + _BLOCK : at + 2 * _BLOCK]
    rope_factors = scratch[at + 2 * _BLOCK : at + 3 * _BLOCK]
    for j in range(_BLOCK):
        key_factors[j] = value_factors[j] = rope_factors[j] = 1.0
    folded = keys + 4 * (at + 3 * _BLOCK)
    ints = scratch[len(scratch) - 2 * (7 * _BLOCK + num_rows * (2 + head1 - head0)) :].view(
        np.int64
    )
    # Offsets are read `AHEAD` past their end: something as long stands behind each.
    in_rope, ints = ints[:_BLOCK], ints[_BLOCK:]
    slots, next_slots, ints = ints[:_BLOCK], ints[_BLOCK : 2 * _BLOCK], ints[2 * _BLOCK :]
    in_keys, next_keys, ints = ints[:_BLOCK], ints[_BLOCK : 2 * _BLOCK], ints[2 * _BLOCK :]
    in_values, next_values, ints = ints[:_BLOCK], ints[_BLOCK : 2 * _BLOCK], ints[2 * _BLOCK :]
    seen, row_positions, state_rows = ints[:num_rows], ints[num_rows:], ints[2 * num_rows :]
    keys_at, values_at = in_keys.ctypes.data, in_values.ctypes.data
    lowest, highest = positions[first], positions[first]
    for t in range(count):
        lowest, highest = min(lowest, positions[first + t]), max(highest, positions[first + t])
        for g in range(group):
            row_positions[t * group + g] = positions[first + t]
        for h in range(head0, head1):
            for g in range(group):
                row = tokens[first + t] * num_heads + h * whole_group + group0 + g
                place = (h - head0) * num_rows + t * group + g
                state_rows[place] = row
                to = folded + 4 * depth * place
                _take_query(rows, tokens[first + t], h * whole_group + group0 + g, shape, to)
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
        for j in range(padded):
            slots[j] = next_slots[j]
        left = 0
        if block + 1 < block1:
            left = min(_BLOCK, highest + 1 - start - _BLOCK)
            _find_slots(table, seq, shape.page_size, start + _BLOCK, left, next_slots)
        for j in range(padded):
            in_keys[j], in_values[j] = slots[j] * latent.token, slots[j] * value.token
            in_rope[j] = slots[j] * rope.token
            next_keys[j] = next_slots[j] * latent.token
            next_values[j] = next_slots[j] * value.token
        for r in range(num_rows):
            seen[r] = row_positions[r] + 1 - start
        for h in range(head0, head1):
            at_key, at_value = latent.address + h * latent.head, value.address + h * value.head
            next_key, next_value, num_next = at_key + latent.head, at_value + value.head, num_keys
            next_keys_at, next_values_at = keys_at, values_at
            if h + 1 == head1:
                next_key = latent.address + head0 * latent.head
                next_value = value.address + head0 * value.head
                next_keys_at, next_values_at = next_keys.ctypes.data, next_values.ctypes.data
                num_next = left
            _scale(latent, slots, padded, heads, h, key_factors)
            _scale(value, slots, padded, heads, h, value_factors)
            of_keys = Block(latent, at_key, keys_at, key_factors.ctypes.data, laid_keys)
            of_values = Block(value, at_value, values_at, value_factors.ctypes.data, laid_values)
            if is_direct:
                num_next = 0
            else:
                _pack_keys(of_keys, keys, depth, num_keys)
                if rope.width:
                    _scale(rope, slots, padded, heads, h, rope_factors)
                    of_rope = Block(rope, rope.address + h * rope.head, in_rope.ctypes.data,
                                    rope_factors.ctypes.data, 0)  # fmt: skip
                    _pack_keys(of_rope, keys + 4 * _COLUMNS * latent.width, depth, num_keys)
                _pack_values(of_values, values, stride, num_keys)
            mine = folded + 4 * depth * (h - head0) * num_rows
            next_keys_block = Block(latent, next_key, next_keys_at, 0, 0)
            next_values_block = Block(value, next_value, next_values_at, 0, 0)
            for r in range(0, num_rows, tile_rows):
                end = min(r + tile_rows, num_rows)
                later = Later(next_keys_block, next_values_block, r * num_next // num_rows,
                              end * num_next // num_rows)  # fmt: skip
                _attend_tile(shape, mine, end - r, r, seen, of_keys, of_values, partial, scores, tops,
                             state, state_rows[(h - head0) * num_rows :], later)  # fmt: skip
    for t in range(count):
        if positions[first + t] < task[8] * _BLOCK:
            for h in range(head1 - head0):
                for g in range(group):
                    row = state_rows[h * num_rows + t * group + g]
                    _put_mean(rows, row, shape, state[row].ctypes.data + 8, state[row, 1])


def _attend(
    shape: Shape, latent: Part, rope: Part, value: Part, tasks: Any, tokens: Any, positions: Any, table: Any,
    rows: Rows, state: Any, scratch: Any, counter: Any,
) -> None:  # fmt: skip
    """Run all tasks of a phase; workers take the next one as they become free.

    Args:
        latent, rope, value: the planes: keys (all of them, or latents), their rotary part or none,
            values.
        tasks: [n, 9] int64: row of `table`; tokens [first, first + count) of `tokens` and
            `positions`; K/V heads from, to; heads of their groups from, to; blocks from, to.
        tokens, positions: [m] int64: rows of q, and where in its request each stands.
        table: [requests, pages] int32.
        rows: queries and results.
        state: [T * num_heads, 2 + value_stride] float32, kept between phases.
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
            _attend_task(shape, latent, rope, value, tasks[at], tokens, positions, table, rows, state,
                         scratch[worker])  # fmt: skip


attend = compiled(_attend, __file__, direct.__file__, kernel_args.__file__, row_ops.__file__)
