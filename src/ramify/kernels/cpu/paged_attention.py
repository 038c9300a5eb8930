"""Batch-invariant paged attention: tasks, packed tiles, split-KV merge; entry `paged_attention`.

The unit of arithmetic is a query row and a block of BLOCK_KEYS keys at a fixed absolute position:
scores, row max, sum of exponentials, weighted sum of values. A row merges its blocks in ascending
order (`online_softmax`). Keys that it does not attend to weigh exactly 0, and sums end in + 0, so
that neither the tile of a row nor the keys of its tile change a bit. How a step is divided into
tasks (`attention.backends.cpu_partition`) changes none either.

A task with at most MAX_IN_PLACE_ROWS rows per head reads K/V in place (`decode_attention`); other tasks
(more rows, MLA, head sizes that are no multiple of 8) pack each block (`kv_pack`) for tiles of TILE_M
rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramify.kernels.cpu.abi import BF16, BF16_TILES, BLOCK_KEYS, F32
from ramify.kernels.cpu.attention_args import (
    AttentionParams,
    InPlaceBlock,
    KVBlock,
    KVPlane,
    PrefetchRange,
    QueryRows,
    is_vnni,
)
from ramify.kernels.cpu.attention_microkernels import packed_block_gemm, prefetch_range_rows
from ramify.kernels.cpu.attention_tiles import (
    STEP,
    fill_value_words,
    flush_subnormals,
    multiply_packed_block,
    restore_subnormals,
)
from ramify.kernels.cpu.code_tiles import (
    TILE_BYTES,
    TILE_ROWS,
    configure_code_tiles,
    release_code_tiles,
)
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
    add_sink,
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
from ramify.kernels.cpu.workers import run_workers

_PADDED_IN_PLACE_ROWS = padded_row_count(MAX_IN_PLACE_ROWS)
_MAX_TILE_ROWS = max(TILE_M, TILE_ROWS)  # rows of a head that are computed at once


def attention_scratch_floats(params: AttentionParams, max_rows: int) -> int:
    """Scratch of a worker in floats; no task has more than `max_rows` rows, all heads counted."""
    packed = BLOCK_KEYS * (params.key_dim + params.value_stride)
    tiled = max(_MAX_TILE_ROWS, padded_row_count(MAX_IN_PLACE_ROWS) * params.num_kv_heads)
    tile = tiled * (BLOCK_KEYS + params.value_stride + 2)
    queries = (max_rows + TILE_ROWS - 1) * params.key_dim  # tiles read beyond the last
    floats = packed + tile + 3 * BLOCK_KEYS + queries
    return -(-(floats + 2 * (7 * BLOCK_KEYS + 3 * max_rows)) // 16) * 16


@jit
def _attend_packed_tile(
    params: AttentionParams, queries: int, num_rows: int, first_row: int, num_visible: Any, keys: KVBlock, values: KVBlock,
    block_output: int, scores: int, row_stats: Any, state: Any, state_rows: Any, prefetch_range: PrefetchRange,
) -> None:  # fmt: skip
    """Attention of rows [first_row, first_row + num_rows) of a head over a packed block.

    Args:
        num_visible: see `online_softmax.visible_key_range`.
        prefetch_range: prefetched meanwhile.
    """
    low, high = visible_key_range(params, num_visible, first_row, num_rows)
    if low >= high:
        return
    width = -(-(high - low) // TILE_N) * TILE_N
    depth, stride = params.key_dim, params.value_stride
    tile_queries = queries + 4 * depth * first_row
    key_words = depth // 2 if is_vnni(keys.plane) else depth
    packed_keys = keys.packed + low // TILE_N * (4 * TILE_N * key_words)
    if is_vnni(keys.plane) and params.tiles:
        multiply_packed_block(params.tiles, num_rows, tile_queries, 4 * depth, packed_keys, 4 * TILE_N * key_words,
            scores, 4 * BLOCK_KEYS, depth, width, np.float32(params.scale))  # fmt: skip
        prefetch_range_rows(prefetch_range)
    else:
        packed_block_gemm(num_rows, tile_queries, depth, packed_keys, 4 * TILE_N * key_words, scores, BLOCK_KEYS,
            key_words, width, np.float32(params.scale), keys.plane, prefetch_range)  # fmt: skip
    for r in range(num_rows):  # all rows first: the exponentials of a row wait for its max
        end = num_visible[first_row + r] - low
        row_stats[2 * r] = mask_and_row_max(params, scores + 4 * BLOCK_KEYS * r, end, width)
    for r in range(num_rows):
        row_stats[2 * r + 1] = exp_and_sum(
            values.plane, scores + 4 * BLOCK_KEYS * r, width, row_stats[2 * r]
        )
    _pv(params, values, scores, num_rows, (low, high), block_output, prefetch_range)
    all_finite = row_is_finite(block_output, stride * num_rows)  # of all rows, the usual case
    for r in range(num_rows):
        output = block_output + 4 * stride * r
        begin, end = row_key_range(params, num_visible[first_row + r] - low, high - low)
        if begin < end:
            if not all_finite and not row_is_finite(output, stride):
                weights = scores + 4 * BLOCK_KEYS * r
                if is_vnni(values.plane):
                    offsets = values.offsets + 8 * (low + begin)
                    pv_visible_only_vnni(
                        params, values.plane, values.base, offsets, (begin, end), weights, output
                    )
                else:
                    weights, key_range = weights + 4 * begin, (low + begin, low + end)
                    _pv(params, values, weights, 1, key_range, output, prefetch_range)
            row = state_rows[first_row + r]
            merge_state(state, row, row_stats[2 * r], row_stats[2 * r + 1], output, stride)


@jit
def _pv(
    params: AttentionParams, values: KVBlock, weights: int, num_rows: int, key_range: Any, into: int, prefetch_range: PrefetchRange
) -> None:  # fmt: skip
    """Weighted sums of values [low, high) of a packed block."""
    low, high = key_range
    stride, words, block_words = params.value_stride, high - low, BLOCK_KEYS
    if is_vnni(values.plane):
        low, words, block_words = low // 2, -(-words // 2), BLOCK_KEYS // 2
    packed = values.packed + 4 * TILE_N * low
    if is_vnni(values.plane) and params.tiles:
        depth = -(-(high - key_range[0]) // STEP) * STEP
        multiply_packed_block(params.tiles, num_rows, weights, 4 * BLOCK_KEYS, packed, 4 * TILE_N * block_words, into,
            4 * stride, depth, stride, np.float32(1.0))  # fmt: skip
        return
    no_prefetch = PrefetchRange(prefetch_range.keys, prefetch_range.values, 0, 0)
    packed_block_gemm(num_rows, weights, BLOCK_KEYS, packed, 4 * TILE_N * block_words, into, stride, words, stride,
        np.float32(1.0), values.plane, no_prefetch)  # fmt: skip


@jit
def _load_query(
    rows: QueryRows, plane: KVPlane, token: int, head: int, params: AttentionParams, in_place: bool, into: int
) -> None:  # fmt: skip
    """Load a query row: float32, times `scale`; VNNI: bf16, unchanged; tiles in place: widened to float32."""
    depth, scale = params.key_dim, np.float32(params.scale)
    row = rows.queries + rows.stride * token + (4 if rows.kind == F32 else 2) * depth * head
    if is_vnni(plane) and params.tiles and in_place:
        scale_to_f32(row, into, depth, np.float32(1.0), rows.kind)
    elif is_vnni(plane):
        copy_row(into, row, depth // 2)
    else:
        scale_to_f32(row, into, depth, scale, rows.kind)


@jit
def _store_output(
    rows: QueryRows, token: int, head: int, params: AttentionParams, state_row: Any
) -> None:
    """Write an output row: the weighted sum of a row of `state` over its sum of weights.

    The sink of the head joins the sum here, once all blocks are merged: so it counts once however
    they are split.
    """
    width, row = params.value_dim, token * params.num_heads + head
    acc, row_sum = data_address(state_row), state_row[params.value_stride + 1]
    if params.sinks:
        row_sum = add_sink(row_sum, state_row[params.value_stride], params.sinks + 4 * head)
    if rows.kind == F32:
        divide_f32(acc, row_sum, rows.out + 4 * width * row, width, F32)
    else:
        divide_f32(acc, row_sum, rows.out + 2 * width * row, width, BF16)


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
    """Merge the blocks of a split in order, and write the rows whose last block is among them.

    The bits are those of a single task that merges each block as it goes.
    """
    begin, end, first_split_row = split[0], split[1], split[2]
    first, count, group = task[1], task[2], params.num_heads // params.num_kv_heads
    stride = params.value_stride
    for h in range(params.num_kv_heads):
        for t in range(count):
            for g in range(group):
                head = h * group + g
                row = head * params.state_head_stride + tokens[first + t]
                if split[4]:
                    state[row, stride + 1] = 0.0
                split_row = first_split_row + (h * count + t) * group + g
                for _ in range(begin, end):
                    row_max, row_sum = state[split_row, stride], state[split_row, stride + 1]
                    if row_sum != np.float32(0.0):  # else the row attends to no key of the block
                        merge_state(
                            state, row, row_max, row_sum, data_address(state[split_row]), stride
                        )
                    split_row += count * params.num_heads
                if positions[first + t] < end * BLOCK_KEYS:
                    _store_output(rows, tokens[first + t], head, params, state[row])


@jit
def attend_task(
    params: AttentionParams, key_plane: KVPlane, rope_plane: KVPlane, value_plane: KVPlane, tasks: Any, splits: Any, task_index: int,
    task_counter: int, counters: Any, tokens: Any, positions: Any, table: Any, rows: QueryRows, state: Any, scratch: Any,
) -> Any:  # fmt: skip
    """Attention of a task's rows over its blocks in order; writes rows whose last block it has.

    A task of a split has one block, whose result goes into its own rows of `state`; the task of the
    split that finishes last merges all of them.

    Args:
        task_counter: address of the counter of tasks taken.
        counters: see `_paged_attention`.

    Returns the index of this worker's next task: its first block is prefetched during the last
    block of this one.

    K/V of the next head, block or task is prefetched into L2 after each tile, a share at a time, and
    into L1 while it is packed.
    """
    seq, first, count, head0, head1, group0, group1, block0, _, split = tasks[task_index]
    key_dim, value_stride = params.key_dim, params.value_stride
    num_heads, num_kv_heads = params.num_heads, params.num_kv_heads
    gqa_group_size, group_heads = num_heads // num_kv_heads, group1 - group0
    num_rows = count * group_heads  # per K/V head
    in_place = (
        num_rows <= MAX_IN_PLACE_ROWS
        and readable_in_place(key_plane)
        and readable_in_place(value_plane)
        and not rope_plane.width
    )
    by_tiles = is_vnni(key_plane) and params.tiles != 0
    rows_at_once = TILE_ROWS if by_tiles else TILE_M
    num_tiles = -(-num_rows // rows_at_once)
    mode = 0
    if by_tiles:
        mode = flush_subnormals()
        if params.tiles == BF16_TILES and not in_place:
            configure_code_tiles(TILE_ROWS, TILE_BYTES)
    tile_rows = max(_MAX_TILE_ROWS, _PADDED_IN_PLACE_ROWS * num_kv_heads)
    packed_keys = data_address(scratch)
    packed_values = packed_keys + 4 * BLOCK_KEYS * key_dim
    scores = packed_values + 4 * BLOCK_KEYS * value_stride
    block_output = scores + 4 * tile_rows * BLOCK_KEYS
    float_offset = BLOCK_KEYS * (key_dim + value_stride) + tile_rows * (BLOCK_KEYS + value_stride)
    row_stats = scratch[float_offset : float_offset + 2 * tile_rows]
    float_offset += 2 * tile_rows
    key_scales = scratch[float_offset : float_offset + BLOCK_KEYS]
    value_scales = scratch[float_offset + BLOCK_KEYS : float_offset + 2 * BLOCK_KEYS]
    rope_scales = scratch[float_offset + 2 * BLOCK_KEYS : float_offset + 3 * BLOCK_KEYS]
    for j in range(BLOCK_KEYS):
        key_scales[j] = value_scales[j] = rope_scales[j] = 1.0
    queries = packed_keys + 4 * (float_offset + 3 * BLOCK_KEYS)
    ints = scratch[len(scratch) - 2 * (7 * BLOCK_KEYS + num_rows * (2 + head1 - head0)) :].view(
        np.int64
    )
    # Offsets are read `PREFETCH_KEYS` past their end, so an array follows each: behind those of keys
    # and values, the next block's.
    rope_offsets, ints = ints[:BLOCK_KEYS], ints[BLOCK_KEYS:]
    slots, next_slots = ints[:BLOCK_KEYS], ints[BLOCK_KEYS : 2 * BLOCK_KEYS]
    ints = ints[2 * BLOCK_KEYS :]
    key_offsets, next_key_offsets = ints[:BLOCK_KEYS], ints[BLOCK_KEYS : 2 * BLOCK_KEYS]
    ints = ints[2 * BLOCK_KEYS :]
    value_offsets, next_value_offsets = ints[:BLOCK_KEYS], ints[BLOCK_KEYS : 2 * BLOCK_KEYS]
    ints = ints[2 * BLOCK_KEYS :]
    num_visible, row_positions, state_rows = ints[:num_rows], ints[num_rows:], ints[2 * num_rows :]
    key_offsets_at, value_offsets_at = data_address(key_offsets), data_address(value_offsets)
    next_key_offsets_at = data_address(next_key_offsets)
    next_value_offsets_at = data_address(next_value_offsets)
    for t in range(count):
        for g in range(group_heads):
            row_positions[t * group_heads + g] = positions[first + t]
        for h in range(head0, head1):
            for g in range(group_heads):
                head = h * gqa_group_size + group0 + g
                row = head * params.state_head_stride + tokens[first + t]
                query_row = (h - head0) * num_rows + t * group_heads + g
                query = queries + 4 * key_dim * query_row
                _load_query(rows, key_plane, tokens[first + t], head, params, in_place, query)
                if split >= 0:  # group0 is 0 here
                    row = splits[split, 2] + (block0 - splits[split, 0]) * count * num_heads
                    row += (h * count + t) * group_heads + g
                state_rows[query_row] = row
                if block0 == 0 or split >= 0:
                    state[row, value_stride + 1] = 0.0
    block0, block1, last_key = visible_blocks(params, tasks[task_index], positions)
    next_index, next_head0, next_heads = np.int64(-1), head0, head1 - head0
    if block0 < block1:
        next_count = min(BLOCK_KEYS, last_key + 1 - block0 * BLOCK_KEYS)
        block_slots(table, seq, params.page_size, block0 * BLOCK_KEYS, next_count, next_slots)
    for block in range(block0, block1):
        start = block * BLOCK_KEYS
        num_keys = min(BLOCK_KEYS, last_key + 1 - start)
        padded = -(-num_keys // 8) * 8  # keys are packed by eight
        for j in range(padded):
            slots[j] = next_slots[j]
        next_count = 0
        if block + 1 < block1:
            next_count = min(BLOCK_KEYS, last_key + 1 - start - BLOCK_KEYS)
            block_slots(table, seq, params.page_size, start + BLOCK_KEYS, next_count, next_slots)
        else:
            next_index = next_task(task_counter)
            if next_index < len(tasks):
                task = tasks[next_index]
                begin, end, last = visible_blocks(params, task, positions)
                next_count = (
                    max(0, min(BLOCK_KEYS, last + 1 - begin * BLOCK_KEYS)) if begin < end else 0
                )
                block_slots(
                    table, task[0], params.page_size, begin * BLOCK_KEYS, next_count, next_slots
                )
                next_head0, next_heads = task[3], task[4] - task[3]
        for j in range(padded):
            key_offsets[j], value_offsets[j] = (
                slots[j] * key_plane.token_stride,
                slots[j] * value_plane.token_stride,
            )
            rope_offsets[j] = slots[j] * rope_plane.token_stride
        for j in range(next_count):
            next_key_offsets[j] = next_slots[j] * key_plane.token_stride
            next_value_offsets[j] = next_slots[j] * value_plane.token_stride
        for r in range(num_rows):
            num_visible[r] = row_positions[r] + 1 - start
        if in_place:
            kv_block = InPlaceBlock(key_plane, value_plane, head0, head1 - head0, num_rows, key_offsets_at, value_offsets_at,
                queries, scores, block_output, next_key_offsets_at, next_count, next_head0, next_heads)  # fmt: skip
            attend_block_in_place(params, kv_block, num_visible, slots, key_scales, value_scales, row_stats,
                state, state_rows)  # fmt: skip
            continue
        for h in range(head0, head1):
            key_base = key_plane.address + h * key_plane.head_stride
            value_base = value_plane.address + h * value_plane.head_stride
            load_scales(key_plane, slots, padded, num_kv_heads, h, key_scales)
            load_scales(value_plane, slots, padded, num_kv_heads, h, value_scales)
            key_block = KVBlock(
                key_plane, key_base, key_offsets_at, key_scales.ctypes.data, packed_keys
            )
            value_block = KVBlock(
                value_plane, value_base, value_offsets_at, value_scales.ctypes.data, packed_values
            )
            key_words = key_dim // 2 if is_vnni(key_plane) else key_dim  # words of a key
            pack_keys(key_block, packed_keys, key_words, num_keys)
            if rope_plane.width:
                load_scales(rope_plane, slots, padded, num_kv_heads, h, rope_scales)
                rope_block = KVBlock(rope_plane, rope_plane.address + h * rope_plane.head_stride,
                    rope_offsets.ctypes.data, rope_scales.ctypes.data, 0)  # fmt: skip
                rope_start = key_plane.width // 2 if is_vnni(key_plane) else key_plane.width
                pack_keys(rope_block, packed_keys + 4 * TILE_N * rope_start, key_words, num_keys)
            pack_values(value_block, packed_values, value_stride, num_keys)
            if by_tiles:
                fill_value_words(
                    packed_values, 2 * TILE_N * BLOCK_KEYS, value_stride // TILE_N, num_keys
                )
            head_queries = queries + 4 * key_dim * (h - head0) * num_rows
            # Prefetch K/V of the next head; behind the last head, of the next block or task.
            next_head, num_next_keys = h + 1, num_keys
            next_keys_at, next_values_at = key_offsets_at, value_offsets_at
            if next_head == head1:
                next_head, num_next_keys = next_head0, next_count
                next_keys_at, next_values_at = next_key_offsets_at, next_value_offsets_at
            next_key_base = key_plane.address + next_head * key_plane.head_stride
            next_value_base = value_plane.address + next_head * value_plane.head_stride
            next_key_block = KVBlock(key_plane, next_key_base, next_keys_at, 0, 0)
            next_value_block = KVBlock(value_plane, next_value_base, next_values_at, 0, 0)
            for tile in range(num_tiles):
                begin = tile * num_next_keys // num_tiles
                end = (tile + 1) * num_next_keys // num_tiles
                prefetch_range = PrefetchRange(next_key_block, next_value_block, begin, end)
                r = tile * rows_at_once
                _attend_packed_tile(params, head_queries, min(rows_at_once, num_rows - r), r, num_visible, key_block,
                    value_block, block_output, scores, row_stats, state, state_rows[(h - head0) * num_rows:],
                    prefetch_range)  # fmt: skip
    if split < 0:
        for t in range(count):
            if positions[first + t] < tasks[task_index][8] * BLOCK_KEYS:
                for h in range(head0, head1):
                    for g in range(group_heads):
                        row = state_rows[(h - head0) * num_rows + t * group_heads + g]
                        head = h * gqa_group_size + group0 + g
                        _store_output(rows, tokens[first + t], head, params, state[row])
    elif next_task(data_address(counters) + 8 * (1 + split)) == splits[split, 3] - 1:
        counters[1 + split] = 0  # for the next launch
        _merge_splits(params, tasks[task_index], splits[split], tokens, positions, rows, state)
    if by_tiles:
        restore_subnormals(mode)
        if params.tiles == BF16_TILES and not in_place:
            release_code_tiles()
    return next_index if next_index >= 0 else next_task(task_counter)


@jit
def _attend_as_worker(
    params: AttentionParams, keys: KVPlane, rope: KVPlane, values: KVPlane, tasks: Any, splits: Any, tokens: Any, positions: Any,
    table: Any, rows: QueryRows, state: Any, scratch: Any, counters: Any, worker: int,
) -> None:  # fmt: skip
    task_index = worker
    while task_index < len(tasks):
        task_index = attend_task(params, keys, rope, values, tasks, splits, task_index,
            data_address(counters), counters, tokens, positions, table, rows, state,
            scratch[worker])  # fmt: skip


def _paged_attention(
    params: AttentionParams, keys: KVPlane, rope: KVPlane, values: KVPlane, tasks: Any, splits: Any, tokens: Any, positions: Any,
    table: Any, rows: QueryRows, state: Any, scratch: Any, counters: Any,
) -> None:  # fmt: skip
    """Run all tasks of a phase; workers take tasks as they become free.

    Args:
        keys, rope, values: planes: keys (MLA: latents), their rotary part (MLA) or none, values.
        tasks: [n, 10] int64: row of `table`; first, count: tokens [first, first + count) of `tokens`
            and `positions`; K/V heads from, to; query heads of a group from, to; blocks from, to;
            its split, or -1.
        splits: [m, 5] int64: blocks from, to; first row of `state` for the partial results, ordered
            by block, K/V head, token, query head of the group; number of tasks; 1 if its rows have
            merged no block before.
        tokens, positions: int64 of equal length: rows of q, and their positions in the request.
        table: [requests, pages] int32.
        rows: queries and output.
        state: [num_heads * state_head_stride + rows of splits, >= value_stride + 2] float32, kept
            between phases: weighted sum, row max and sum of weights at
            [head * state_head_stride + token]. Rows are aligned to cache lines, so that no two
            workers write to the same line; workers that share a prefix by heads hardly write to
            adjacent lines, which the CPU prefetches in pairs.
        scratch: [num_workers, attention_scratch_floats] float32.
        counters: [1 + m] int64: the next task; finished tasks per split, 0 before and after.
    """
    counters[0] = params.num_workers  # each worker begins with the task of its index
    args = (params, keys, rope, values, tasks, splits, tokens, positions, table, rows, state, scratch, counters)  # fmt: skip
    run_workers(_attend_as_worker, args, params.num_workers)


paged_attention = compile_cached(_paged_attention)
