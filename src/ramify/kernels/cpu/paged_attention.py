"""Exact attention over blocks of keys, compiled by Numba: threads, tasks, tiles.

The unit of arithmetic is one query row against one block of `BLOCK_KEYS` keys at a fixed absolute
position: scores, their maximum, the sum of vector_math, the weighted sum of values. A row folds
its blocks left to right (the online softmax of Milakov and Gimelshein, 2018). Keys that a row does
not see weigh exactly 0, and sums end in +0, so that neither the tile a row is computed in nor how
far its tile reaches changes a bit of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from ramify.kernels.cpu.abi import BLOCK_KEYS, F32
from ramify.kernels.cpu.attention_args import (
    AttentionParams,
    InPlaceBlock,
    KVBlock,
    KVPlane,
    PrefetchRange,
    QueryRows,
    is_vnni,
)
from ramify.kernels.cpu.attention_microkernels import packed_block_gemm
from ramify.kernels.cpu.decode_attention import (
    MAX_IN_PLACE_ROWS,
    attend_block_in_place,
    padded_row_count,
    pv_visible_only_vnni,
    readable_in_place,
)
from ramify.kernels.cpu.elementwise import divide_f32, scale_to_f32
from ramify.kernels.cpu.jit import compile_cached, data_address, jit
from ramify.kernels.cpu.kv_pack import pack_keys, pack_values
from ramify.kernels.cpu.online_softmax import (
    block_slots,
    exp_and_sum,
    load_scales,
    mask_and_row_max,
    merge_state,
    row_key_range,
    visible_blocks,
    visible_key_range,
)
from ramify.kernels.cpu.simd import TILE_M, TILE_N, copy_row, row_is_finite
from ramify.kernels.cpu.task_queue import next_task

_BLOCK, _TILE_N, _TILE_M = BLOCK_KEYS, TILE_N, TILE_M  # globals are constants to Numba
_MAX_IN_PLACE_ROWS = MAX_IN_PLACE_ROWS
_PADDED_IN_PLACE_ROWS = padded_row_count(MAX_IN_PLACE_ROWS)


def attention_scratch_floats(params: AttentionParams, max_rows: int) -> int:
    """Floats that one worker needs, if no task has more than `max_rows` rows in all its heads."""
    packed = BLOCK_KEYS * (params.key_dim + params.value_stride)
    tiled = max(TILE_M, padded_row_count(MAX_IN_PLACE_ROWS) * params.num_kv_heads)
    tile = tiled * (BLOCK_KEYS + params.value_stride + 2)
    floats = packed + tile + 3 * BLOCK_KEYS + max_rows * params.key_dim
    return -(-(floats + 2 * (7 * BLOCK_KEYS + 3 * max_rows)) // 16) * 16


@jit
def _attend_packed_tile(
    params: AttentionParams, queries: int, num_rows: int, first_row: int, num_visible: Any, keys: KVBlock, values: KVBlock,
    block_output: int, scores: int, row_stats: Any, state: Any, state_rows: Any, prefetch_range: PrefetchRange,
) -> None:  # fmt: skip
    """Rows [first_row, first_row + num_rows) of a task against a block that is laid out.

    Args:
        num_visible: see `online_softmax.visible_key_range`.
        prefetch_range: fetched meanwhile.
    """
    low, high = visible_key_range(params, num_visible, first_row, num_rows)
    if low >= high:
        return
    width = -(-(high - low) // _TILE_N) * _TILE_N
    depth, stride = params.key_dim, params.value_stride
    mine = queries + 4 * depth * first_row
    words = depth // 2 if is_vnni(keys.plane) else depth
    from_low = keys.packed + low // _TILE_N * (4 * _TILE_N * words)
    packed_block_gemm(num_rows, mine, depth, from_low, 4 * _TILE_N * words, scores, _BLOCK, words, width,
            np.float32(params.scale), keys.plane, prefetch_range)  # fmt: skip
    for r in range(num_rows):  # all before the first exponential, which waits for its row's largest
        end = num_visible[first_row + r] - low
        row_stats[2 * r] = mask_and_row_max(params, scores + 4 * _BLOCK * r, end, width)
    for r in range(num_rows):
        row_stats[2 * r + 1] = exp_and_sum(
            values.plane, scores + 4 * _BLOCK * r, width, row_stats[2 * r]
        )
    _pv(params, values, scores, num_rows, (low, high), block_output, prefetch_range)
    numbers = row_is_finite(block_output, stride * num_rows)  # of all rows, as nearly always
    for r in range(num_rows):
        sums = block_output + 4 * stride * r
        begin, end = row_key_range(params, num_visible[first_row + r] - low, high - low)
        if begin < end:
            if not numbers and not row_is_finite(sums, stride):
                row = scores + 4 * _BLOCK * r
                if is_vnni(values.plane):
                    offsets = values.offsets + 8 * (low + begin)
                    pv_visible_only_vnni(
                        params, values.plane, values.base, offsets, (begin, end), row, sums
                    )
                else:
                    _pv(
                        params,
                        values,
                        row + 4 * begin,
                        1,
                        (low + begin, low + end),
                        sums,
                        prefetch_range,
                    )
            merge_state(
                state,
                state_rows[first_row + r],
                row_stats[2 * r],
                row_stats[2 * r + 1],
                sums,
                stride,
            )


@jit
def _pv(
    params: AttentionParams, values: KVBlock, weights: int, num_rows: int, span: Any, into: int, prefetch_range: PrefetchRange
) -> None:  # fmt: skip
    """Weighted sums over values [low, high) of a block."""
    low, high = span
    stride, words, keys = params.value_stride, high - low, _BLOCK
    if is_vnni(values.plane):
        low, words, keys = low // 2, -(-words // 2), _BLOCK // 2
    first = values.packed + 4 * _TILE_N * low
    nothing = PrefetchRange(prefetch_range.keys, prefetch_range.values, 0, 0)
    packed_block_gemm(num_rows, weights, _BLOCK, first, 4 * _TILE_N * keys, into, stride, words, stride,
            np.float32(1.0), values.plane, nothing)  # fmt: skip


@jit
def _load_query(
    rows: QueryRows, plane: KVPlane, token: int, head: int, params: AttentionParams, into: int
) -> None:
    """One query row in float32, scaled; in pairs as it is."""
    depth, scale = params.key_dim, np.float32(params.scale)
    if is_vnni(plane):
        copy_row(into, rows.queries + rows.stride * token + 2 * depth * head, depth // 2)
    elif rows.kind == F32:
        scale_to_f32(rows.queries + rows.stride * token + 4 * depth * head, into, depth, scale, 0)
    else:
        scale_to_f32(rows.queries + rows.stride * token + 2 * depth * head, into, depth, scale, 1)


@jit
def _store_output(
    rows: QueryRows, token: int, head: int, params: AttentionParams, state_row: Any
) -> None:
    """One row of the result: its weighted sum over the sum of its weights, from a row of `state`."""
    width, row = params.value_dim, token * params.num_heads + head
    sums, weight = data_address(state_row), state_row[params.value_stride + 1]
    if rows.kind == F32:
        divide_f32(sums, weight, rows.out + 4 * width * row, width, 0)
    else:
        divide_f32(sums, weight, rows.out + 2 * width * row, width, 1)


@jit
def _merge_splits(
    params: AttentionParams,
    task: Any,
    split: Any,
    tokens: Any,
    positions: Any,
    rows: QueryRows,
    state: Any,
) -> None:
    """What tasks made of single blocks, folded in order; rows that now have their last are written.

    The bits are those of one task that folds each block when it has read it.
    """
    begin, end, at = split[0], split[1], split[2]
    first, count, group = task[1], task[2], params.num_heads // params.num_kv_heads
    stride = params.value_stride
    for h in range(params.num_kv_heads):
        for t in range(count):
            for g in range(group):
                head = h * group + g
                row = head * params.state_head_stride + tokens[first + t]
                if split[4]:
                    state[row, stride + 1] = 0.0
                place = at + (h * count + t) * group + g
                for _ in range(begin, end):
                    top, weight = state[place, stride], state[place, stride + 1]
                    if weight != np.float32(0.0):  # nothing was seen of a block without weight
                        merge_state(state, row, top, weight, data_address(state[place]), stride)
                    place += count * params.num_heads
                if positions[first + t] < end * _BLOCK:
                    _store_output(rows, tokens[first + t], head, params, state[row])


@jit
def attend_task(
    params: AttentionParams, key_plane: KVPlane, rope_plane: KVPlane, value_plane: KVPlane, tasks: Any, splits: Any, number: int,
    task_counter: int, counters: Any, tokens: Any, positions: Any, table: Any, rows: QueryRows, state: Any, scratch: Any,
) -> Any:  # fmt: skip
    """All rows of a task against its blocks, in order; rows whose last block it has are written.

    The task of a joint has one block, whose result goes into rows of `state` that are its own; the
    last to finish folds them all.

    Args:
        task_counter: address of the counter of tasks that have been taken.
        counters: see `_attend`.

    Returns the number of the next task for this worker: its first block is fetched during the last
    of this one.

    Between tiles K/V of the next head or block is fetched, a share at a time, and again a little
    ahead while it is laid out (the next block's keys and values follow this one's).
    """
    seq, first, count, head0, head1, group0, group1, block0, _, joint = tasks[number]
    depth, stride, num_heads = params.key_dim, params.value_stride, params.num_heads
    heads, whole_group, group = (
        params.num_kv_heads,
        num_heads // params.num_kv_heads,
        group1 - group0,
    )
    num_rows = count * group
    is_few = (
        num_rows <= _MAX_IN_PLACE_ROWS
        and readable_in_place(key_plane)
        and readable_in_place(value_plane)
        and not rope_plane.width
    )
    num_tiles, tiled = (
        -(-num_rows // _TILE_M),
        max(_TILE_M, _PADDED_IN_PLACE_ROWS * params.num_kv_heads),
    )
    keys = data_address(scratch)
    values = keys + 4 * _BLOCK * depth
    scores = values + 4 * _BLOCK * stride
    block_output = scores + 4 * tiled * _BLOCK
    at = _BLOCK * (depth + stride) + tiled * (_BLOCK + stride)
    row_stats = scratch[at : at + 2 * tiled]
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
    # Offsets are read `PREFETCH_KEYS` past their end: something as long stands behind each.
    in_rope, ints = ints[:_BLOCK], ints[_BLOCK:]
    slots, next_slots, ints = ints[:_BLOCK], ints[_BLOCK : 2 * _BLOCK], ints[2 * _BLOCK :]
    in_keys, next_keys, ints = ints[:_BLOCK], ints[_BLOCK : 2 * _BLOCK], ints[2 * _BLOCK :]
    in_values, next_values, ints = ints[:_BLOCK], ints[_BLOCK : 2 * _BLOCK], ints[2 * _BLOCK :]
    num_visible, row_positions, state_rows = ints[:num_rows], ints[num_rows:], ints[2 * num_rows :]
    keys_at, values_at = data_address(in_keys), data_address(in_values)
    next_keys_at, next_values_at = data_address(next_keys), data_address(next_values)
    for t in range(count):
        for g in range(group):
            row_positions[t * group + g] = positions[first + t]
        for h in range(head0, head1):
            for g in range(group):
                head = h * whole_group + group0 + g
                row = head * params.state_head_stride + tokens[first + t]
                place = (h - head0) * num_rows + t * group + g
                to = folded + 4 * depth * place
                _load_query(rows, key_plane, tokens[first + t], head, params, to)
                if joint >= 0:  # group0 is 0 here
                    row = splits[joint, 2] + (block0 - splits[joint, 0]) * count * num_heads
                    row += (h * count + t) * group + g
                state_rows[place] = row
                if block0 == 0 or joint >= 0:
                    state[row, stride + 1] = 0.0
    block0, block1, highest = visible_blocks(params, tasks[number], positions)
    following, next_head0, next_heads = np.int64(-1), head0, head1 - head0
    if block0 < block1:
        left = min(_BLOCK, highest + 1 - block0 * _BLOCK)
        block_slots(table, seq, params.page_size, block0 * _BLOCK, left, next_slots)
    for block in range(block0, block1):
        start = block * _BLOCK
        num_keys = min(_BLOCK, highest + 1 - start)
        padded = -(-num_keys // 8) * 8  # keys are packed by eight
        for j in range(padded):
            slots[j] = next_slots[j]
        left = 0
        if block + 1 < block1:
            left = min(_BLOCK, highest + 1 - start - _BLOCK)
            block_slots(table, seq, params.page_size, start + _BLOCK, left, next_slots)
        else:
            following = next_task(task_counter)
            if following < len(tasks):
                task = tasks[following]
                begin, end, last = visible_blocks(params, task, positions)
                left = max(0, min(_BLOCK, last + 1 - begin * _BLOCK)) if begin < end else 0
                block_slots(table, task[0], params.page_size, begin * _BLOCK, left, next_slots)
                next_head0, next_heads = task[3], task[4] - task[3]
        for j in range(padded):
            in_keys[j], in_values[j] = (
                slots[j] * key_plane.token_stride,
                slots[j] * value_plane.token_stride,
            )
            in_rope[j] = slots[j] * rope_plane.token_stride
        for j in range(left):
            next_keys[j] = next_slots[j] * key_plane.token_stride
            next_values[j] = next_slots[j] * value_plane.token_stride
        for r in range(num_rows):
            num_visible[r] = row_positions[r] + 1 - start
        if is_few:
            few = InPlaceBlock(key_plane, value_plane, head0, head1 - head0, num_rows, keys_at, values_at, folded, scores,
                      block_output, next_keys_at, left, next_head0, next_heads)  # fmt: skip
            attend_block_in_place(
                params,
                few,
                num_visible,
                slots,
                key_factors,
                value_factors,
                row_stats,
                state,
                state_rows,
            )
            continue
        for h in range(head0, head1):
            at_key, at_value = (
                key_plane.address + h * key_plane.head_stride,
                value_plane.address + h * value_plane.head_stride,
            )
            load_scales(key_plane, slots, padded, heads, h, key_factors)
            load_scales(value_plane, slots, padded, heads, h, value_factors)
            of_keys = KVBlock(key_plane, at_key, keys_at, key_factors.ctypes.data, keys)
            of_values = KVBlock(value_plane, at_value, values_at, value_factors.ctypes.data, values)
            packed = depth // 2 if is_vnni(key_plane) else depth  # words of a key
            pack_keys(of_keys, keys, packed, num_keys)
            if rope_plane.width:
                load_scales(rope_plane, slots, padded, heads, h, rope_factors)
                of_rope = KVBlock(rope_plane, rope_plane.address + h * rope_plane.head_stride, in_rope.ctypes.data,
                                rope_factors.ctypes.data, 0)  # fmt: skip
                words = key_plane.width // 2 if is_vnni(key_plane) else key_plane.width
                pack_keys(of_rope, keys + 4 * _TILE_N * words, packed, num_keys)
            pack_values(of_values, values, stride, num_keys)
            mine = folded + 4 * depth * (h - head0) * num_rows
            # what is fetched meanwhile: the next head, block or task
            to_keys, to_values, head, to_come = next_keys_at, next_values_at, next_head0, left
            if h + 1 < head1:
                to_keys, to_values, head, to_come = keys_at, values_at, h + 1, num_keys
            next_of_keys = KVBlock(
                key_plane, key_plane.address + head * key_plane.head_stride, to_keys, 0, 0
            )
            next_of_values = KVBlock(
                value_plane, value_plane.address + head * value_plane.head_stride, to_values, 0, 0
            )
            for tile in range(num_tiles):
                begin, end = tile * to_come // num_tiles, (tile + 1) * to_come // num_tiles
                later = PrefetchRange(next_of_keys, next_of_values, begin, end)
                r = tile * _TILE_M
                _attend_packed_tile(params, mine, min(_TILE_M, num_rows - r), r, num_visible, of_keys, of_values,
                             block_output, scores, row_stats, state, state_rows[(h - head0) * num_rows :],
                             later)  # fmt: skip
    if joint < 0:
        for t in range(count):
            if positions[first + t] < tasks[number][8] * _BLOCK:
                for h in range(head0, head1):
                    for g in range(group):
                        row = state_rows[(h - head0) * num_rows + t * group + g]
                        head = h * whole_group + group0 + g
                        _store_output(rows, tokens[first + t], head, params, state[row])
    elif next_task(data_address(counters) + 8 * (1 + joint)) == splits[joint, 3] - 1:
        counters[1 + joint] = 0  # for the next launch
        _merge_splits(params, tasks[number], splits[joint], tokens, positions, rows, state)
    return following if following >= 0 else next_task(task_counter)


def _paged_attention(
    params: AttentionParams, keys: KVPlane, rope: KVPlane, values: KVPlane, tasks: Any, splits: Any, tokens: Any, positions: Any,
    table: Any, rows: QueryRows, state: Any, scratch: Any, counters: Any,
) -> None:  # fmt: skip
    """Run all tasks of a phase; workers take the next one as they become free.

    Args:
        keys, rope, values: the planes: keys (all of them, or latents), their rotary part or none,
            values.
        tasks: [n, 10] int64: row of `table`; tokens [first, first + count) of `tokens` and
            `positions`; K/V heads from, to; heads of their groups from, to; blocks from, to; the
            joint that it is a part of, or -1.
        splits: [m, 5] int64: blocks from, to; the first row of `state` for what tasks make of a
            single block, by block, K/V head, token and head of its group; the number of tasks; 1
            if its rows have folded nothing before.
        tokens, positions: [m] int64: rows of q, and where in its request each stands.
        table: [requests, pages] int32.
        rows: queries and results.
        state: [num_heads * state_head_stride and those of the joints, at least value_stride + 2] float32,
            kept between phases: a row's weighted sum, maximum and sum of weights; first all tokens
            of a head, then of the next. Rows begin with a line of the cache, so that no two workers
            write to one; those that share a prefix, by head, hardly to neighbours, either, which
            the processor would fetch ahead.
        scratch: [num_workers, attention_scratch_floats] float32.
        counters: [1 + m] int64, for the workers to share: the next task; by joint, how many tasks
            are done, which is 0 before and after.
    """
    counters[0] = params.num_workers  # the first ones are given out
    for worker in prange(params.num_workers):
        at = np.int64(worker)
        while at < len(tasks):
            at = attend_task(params, keys, rope, values, tasks, splits, at, data_address(counters), counters,
                             tokens, positions, table, rows, state, scratch[worker])  # fmt: skip


paged_attention = compile_cached(_paged_attention)
