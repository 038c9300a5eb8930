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
from numba import prange

from ramify.attention import (
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
from ramify.attention.block_rows import (
    BLOCK_KEYS,
    address,
    find_slots,
    fold,
    jit,
    own_keys,
    reach,
    scale_factors,
    soften,
    span_of,
    to_weights,
)
from ramify.attention.compiled import compiled
from ramify.attention.few_rows import FEW_ROWS, attend_few, is_plain, mix_alone
from ramify.attention.kernel_args import (
    Block,
    Few,
    Later,
    Part,
    Rows,
    Shape,
    in_pairs,
)
from ramify.attention.laid_out import pack_keys, pack_values, product
from ramify.attention.row_ops import divide_row, scale_up
from ramify.attention.simd import (
    F32,
    TILE_COLUMNS,
    TILE_ROWS,
    copy_row,
    is_finite,
)
from ramify.attention.workers import take_next

_BLOCK, _COLUMNS, _ROWS = BLOCK_KEYS, TILE_COLUMNS, TILE_ROWS  # globals are constants to Numba
_FEW = FEW_ROWS
_TILED = few_rows.room(FEW_ROWS)


def scratch_floats(shape: Shape, max_rows: int) -> int:
    """Floats that one worker needs, if no task has more than `max_rows` rows in all its heads."""
    packed = BLOCK_KEYS * (shape.key_dim + shape.value_stride)
    tiled = max(TILE_ROWS, few_rows.room(FEW_ROWS) * shape.num_kv_heads)
    tile = tiled * (BLOCK_KEYS + shape.value_stride + 2)
    floats = packed + tile + 3 * BLOCK_KEYS + max_rows * shape.key_dim
    return -(-(floats + 2 * (7 * BLOCK_KEYS + 3 * max_rows)) // 16) * 16


@jit
def _attend_tile(
    shape: Shape, queries: int, num_rows: int, first_row: int, seen: Any, keys: Block, values: Block,
    partial: int, scores: int, tops: Any, state: Any, state_rows: Any, later: Later,
) -> None:  # fmt: skip
    """Rows [first_row, first_row + num_rows) of a task against a block that is laid out.

    Args:
        seen: see `block_rows.span_of`.
        later: fetched meanwhile.
    """
    low, high = span_of(shape, seen, first_row, num_rows)
    if low >= high:
        return
    width = -(-(high - low) // _COLUMNS) * _COLUMNS
    depth, stride = shape.key_dim, shape.value_stride
    mine = queries + 4 * depth * first_row
    words = depth // 2 if in_pairs(keys.part) else depth
    from_low = keys.packed + low // _COLUMNS * (4 * _COLUMNS * words)
    product(num_rows, mine, depth, from_low, 4 * _COLUMNS * words, scores, _BLOCK, words, width,
            np.float32(shape.scale), keys.part, later)  # fmt: skip
    for r in range(num_rows):  # all before the first exponential, which waits for its row's largest
        end = seen[first_row + r] - low
        tops[2 * r] = soften(shape, scores + 4 * _BLOCK * r, end, width)
    for r in range(num_rows):
        tops[2 * r + 1] = to_weights(values.part, scores + 4 * _BLOCK * r, width, tops[2 * r])
    _weigh(shape, values, scores, num_rows, (low, high), partial, later)
    numbers = is_finite(partial, stride * num_rows)  # of all rows, as nearly always
    for r in range(num_rows):
        sums = partial + 4 * stride * r
        begin, end = own_keys(shape, seen[first_row + r] - low, high - low)
        if begin < end:
            if not numbers and not is_finite(sums, stride):
                row = scores + 4 * _BLOCK * r
                if in_pairs(values.part):
                    offsets = values.offsets + 8 * (low + begin)
                    mix_alone(shape, values.part, values.source, offsets, (begin, end), row, sums)
                else:
                    _weigh(shape, values, row + 4 * begin, 1, (low + begin, low + end), sums, later)
            fold(state, state_rows[first_row + r], tops[2 * r], tops[2 * r + 1], sums, stride)


@jit
def _weigh(
    shape: Shape, values: Block, weights: int, num_rows: int, span: Any, into: int, later: Later
) -> None:  # fmt: skip
    """Weighted sums over values [low, high) of a block."""
    low, high = span
    stride, words, keys = shape.value_stride, high - low, _BLOCK
    if in_pairs(values.part):
        low, words, keys = low // 2, -(-words // 2), _BLOCK // 2
    first = values.packed + 4 * _COLUMNS * low
    nothing = Later(later.keys, later.values, 0, 0)
    product(num_rows, weights, _BLOCK, first, 4 * _COLUMNS * keys, into, stride, words, stride,
            np.float32(1.0), values.part, nothing)  # fmt: skip


@jit
def _take_query(rows: Rows, part: Part, token: int, head: int, shape: Shape, into: int) -> None:
    """One query row in float32, scaled; in pairs as it is."""
    depth, scale = shape.key_dim, np.float32(shape.scale)
    if in_pairs(part):
        copy_row(into, rows.queries + rows.stride * token + 2 * depth * head, depth // 2)
    elif rows.kind == F32:
        scale_up(rows.queries + rows.stride * token + 4 * depth * head, into, depth, scale, 0)
    else:
        scale_up(rows.queries + rows.stride * token + 2 * depth * head, into, depth, scale, 1)


@jit
def _put_mean(rows: Rows, token: int, head: int, shape: Shape, folded: Any) -> None:
    """One row of the result: its weighted sum over the sum of its weights, from a row of `state`."""
    width, row = shape.value_dim, token * shape.num_heads + head
    sums, weight = address(folded), folded[shape.value_stride + 1]
    if rows.kind == F32:
        divide_row(sums, weight, rows.out + 4 * width * row, width, 0)
    else:
        divide_row(sums, weight, rows.out + 2 * width * row, width, 1)


@jit
def _join(
    shape: Shape, task: Any, joint: Any, tokens: Any, positions: Any, rows: Rows, state: Any
) -> None:
    """What tasks made of single blocks, folded in order; rows that now have their last are written.

    The bits are those of one task that folds each block when it has read it.
    """
    begin, end, at = joint[0], joint[1], joint[2]
    first, count, group = task[1], task[2], shape.num_heads // shape.num_kv_heads
    stride = shape.value_stride
    for h in range(shape.num_kv_heads):
        for t in range(count):
            for g in range(group):
                head = h * group + g
                row = head * shape.head_rows + tokens[first + t]
                if joint[4]:
                    state[row, stride + 1] = 0.0
                place = at + (h * count + t) * group + g
                for _ in range(begin, end):
                    top, weight = state[place, stride], state[place, stride + 1]
                    if weight != np.float32(0.0):  # nothing was seen of a block without weight
                        fold(state, row, top, weight, address(state[place]), stride)
                    place += count * shape.num_heads
                if positions[first + t] < end * _BLOCK:
                    _put_mean(rows, tokens[first + t], head, shape, state[row])


@jit
def attend_task(
    shape: Shape, latent: Part, rope: Part, value: Part, tasks: Any, joints: Any, number: int,
    taken: int, counters: Any, tokens: Any, positions: Any, table: Any, rows: Rows, state: Any, scratch: Any,
) -> Any:  # fmt: skip
    """All rows of a task against its blocks, in order; rows whose last block it has are written.

    The task of a joint has one block, whose result goes into rows of `state` that are its own; the
    last to finish folds them all.

    Args:
        taken: address of the counter of tasks that have been taken.
        counters: see `_attend`.

    Returns the number of the next task for this worker: its first block is fetched during the last
    of this one.

    Between tiles K/V of the next head or block is fetched, a share at a time, and again a little
    ahead while it is laid out (the next block's keys and values follow this one's).
    """
    seq, first, count, head0, head1, group0, group1, block0, _, joint = tasks[number]
    depth, stride, num_heads = shape.key_dim, shape.value_stride, shape.num_heads
    heads, whole_group, group = shape.num_kv_heads, num_heads // shape.num_kv_heads, group1 - group0
    num_rows = count * group
    is_few = num_rows <= _FEW and is_plain(latent) and is_plain(value) and not rope.width
    num_tiles, tiled = -(-num_rows // _ROWS), max(_ROWS, _TILED * shape.num_kv_heads)
    keys = address(scratch)
    values = keys + 4 * _BLOCK * depth
    scores = values + 4 * _BLOCK * stride
    partial = scores + 4 * tiled * _BLOCK
    at = _BLOCK * (depth + stride) + tiled * (_BLOCK + stride)
    tops = scratch[at : at + 2 * tiled]
    at += 2 * tiled
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
    keys_at, values_at = address(in_keys), address(in_values)
    next_keys_at, next_values_at = address(next_keys), address(next_values)
    for t in range(count):
        for g in range(group):
            row_positions[t * group + g] = positions[first + t]
        for h in range(head0, head1):
            for g in range(group):
                head = h * whole_group + group0 + g
                row = head * shape.head_rows + tokens[first + t]
                place = (h - head0) * num_rows + t * group + g
                to = folded + 4 * depth * place
                _take_query(rows, latent, tokens[first + t], head, shape, to)
                if joint >= 0:  # group0 is 0 here
                    row = joints[joint, 2] + (block0 - joints[joint, 0]) * count * num_heads
                    row += (h * count + t) * group + g
                state_rows[place] = row
                if block0 == 0 or joint >= 0:
                    state[row, stride + 1] = 0.0
    block0, block1, highest = reach(shape, tasks[number], positions)
    following, next_head0, next_heads = np.int64(-1), head0, head1 - head0
    if block0 < block1:
        left = min(_BLOCK, highest + 1 - block0 * _BLOCK)
        find_slots(table, seq, shape.page_size, block0 * _BLOCK, left, next_slots)
    for block in range(block0, block1):
        start = block * _BLOCK
        num_keys = min(_BLOCK, highest + 1 - start)
        padded = -(-num_keys // 8) * 8  # keys are packed by eight
        for j in range(padded):
            slots[j] = next_slots[j]
        left = 0
        if block + 1 < block1:
            left = min(_BLOCK, highest + 1 - start - _BLOCK)
            find_slots(table, seq, shape.page_size, start + _BLOCK, left, next_slots)
        else:
            following = take_next(taken)
            if following < len(tasks):
                task = tasks[following]
                begin, end, last = reach(shape, task, positions)
                left = max(0, min(_BLOCK, last + 1 - begin * _BLOCK)) if begin < end else 0
                find_slots(table, task[0], shape.page_size, begin * _BLOCK, left, next_slots)
                next_head0, next_heads = task[3], task[4] - task[3]
        for j in range(padded):
            in_keys[j], in_values[j] = slots[j] * latent.token, slots[j] * value.token
            in_rope[j] = slots[j] * rope.token
        for j in range(left):
            next_keys[j] = next_slots[j] * latent.token
            next_values[j] = next_slots[j] * value.token
        for r in range(num_rows):
            seen[r] = row_positions[r] + 1 - start
        if is_few:
            few = Few(latent, value, head0, head1 - head0, num_rows, keys_at, values_at, folded, scores,
                      partial, next_keys_at, left, next_head0, next_heads)  # fmt: skip
            attend_few(shape, few, seen, slots, key_factors, value_factors, tops, state, state_rows)
            continue
        for h in range(head0, head1):
            at_key, at_value = latent.address + h * latent.head, value.address + h * value.head
            scale_factors(latent, slots, padded, heads, h, key_factors)
            scale_factors(value, slots, padded, heads, h, value_factors)
            of_keys = Block(latent, at_key, keys_at, key_factors.ctypes.data, keys)
            of_values = Block(value, at_value, values_at, value_factors.ctypes.data, values)
            packed = depth // 2 if in_pairs(latent) else depth  # words of a key
            pack_keys(of_keys, keys, packed, num_keys)
            if rope.width:
                scale_factors(rope, slots, padded, heads, h, rope_factors)
                of_rope = Block(rope, rope.address + h * rope.head, in_rope.ctypes.data,
                                rope_factors.ctypes.data, 0)  # fmt: skip
                words = latent.width // 2 if in_pairs(latent) else latent.width
                pack_keys(of_rope, keys + 4 * _COLUMNS * words, packed, num_keys)
            pack_values(of_values, values, stride, num_keys)
            mine = folded + 4 * depth * (h - head0) * num_rows
            # what is fetched meanwhile: the next head, block or task
            to_keys, to_values, head, to_come = next_keys_at, next_values_at, next_head0, left
            if h + 1 < head1:
                to_keys, to_values, head, to_come = keys_at, values_at, h + 1, num_keys
            next_of_keys = Block(latent, latent.address + head * latent.head, to_keys, 0, 0)
            next_of_values = Block(value, value.address + head * value.head, to_values, 0, 0)
            for tile in range(num_tiles):
                begin, end = tile * to_come // num_tiles, (tile + 1) * to_come // num_tiles
                later = Later(next_of_keys, next_of_values, begin, end)
                r = tile * _ROWS
                _attend_tile(shape, mine, min(_ROWS, num_rows - r), r, seen, of_keys, of_values,
                             partial, scores, tops, state, state_rows[(h - head0) * num_rows :],
                             later)  # fmt: skip
    if joint < 0:
        for t in range(count):
            if positions[first + t] < tasks[number][8] * _BLOCK:
                for h in range(head0, head1):
                    for g in range(group):
                        row = state_rows[(h - head0) * num_rows + t * group + g]
                        head = h * whole_group + group0 + g
                        _put_mean(rows, tokens[first + t], head, shape, state[row])
    elif take_next(address(counters) + 8 * (1 + joint)) == joints[joint, 3] - 1:
        counters[1 + joint] = 0  # for the next launch
        _join(shape, tasks[number], joints[joint], tokens, positions, rows, state)
    return following if following >= 0 else take_next(taken)


def _attend(
    shape: Shape, latent: Part, rope: Part, value: Part, tasks: Any, joints: Any, tokens: Any, positions: Any,
    table: Any, rows: Rows, state: Any, scratch: Any, counters: Any,
) -> None:  # fmt: skip
    """Run all tasks of a phase; workers take the next one as they become free.

    Args:
        latent, rope, value: the planes: keys (all of them, or latents), their rotary part or none,
            values.
        tasks: [n, 10] int64: row of `table`; tokens [first, first + count) of `tokens` and
            `positions`; K/V heads from, to; heads of their groups from, to; blocks from, to; the
            joint that it is a part of, or -1.
        joints: [m, 5] int64: blocks from, to; the first row of `state` for what tasks make of a
            single block, by block, K/V head, token and head of its group; the number of tasks; 1
            if its rows have folded nothing before.
        tokens, positions: [m] int64: rows of q, and where in its request each stands.
        table: [requests, pages] int32.
        rows: queries and results.
        state: [num_heads * head_rows and those of the joints, at least value_stride + 2] float32,
            kept between phases: a row's weighted sum, maximum and sum of weights; first all tokens
            of a head, then of the next. Rows begin with a line of the cache, so that no two workers
            write to one; those that share a prefix, by head, hardly to neighbours, either, which
            the processor would fetch ahead.
        scratch: [num_workers, scratch_floats] float32.
        counters: [1 + m] int64, for the workers to share: the next task; by joint, how many tasks
            are done, which is 0 before and after.
    """
    counters[0] = shape.num_workers  # the first ones are given out
    for worker in prange(shape.num_workers):
        at = np.int64(worker)
        while at < len(tasks):
            at = attend_task(shape, latent, rope, value, tasks, joints, at, address(counters), counters,
                             tokens, positions, table, rows, state, scratch[worker])  # fmt: skip


attend = compiled(
    _attend,
    __file__,
    block_rows.__file__,
    direct.__file__,
    direct_pairs.__file__,
    exponentials.__file__,
    few_rows.__file__,
    kernel_args.__file__,
    key_vectors.__file__,
    laid_out.__file__,
    row_ops.__file__,
    workers.__file__,
)
