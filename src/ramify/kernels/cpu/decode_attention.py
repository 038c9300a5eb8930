"""Attention of at most MAX_IN_PLACE_ROWS rows per head over a KV block in place: decode and drafts.

Few rows are memory-bound, and packing a block would not pay. So K/V is read in the order of memory:
all heads of a task read KEYS_PER_PASS keys before any reads the next, and meanwhile whole rows of
later passes are prefetched. The bits are those of a packed block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramify.kernels.cpu.abi import BLOCK_KEYS, CACHE_LINE
from ramify.kernels.cpu.attention_args import (
    AttentionParams,
    InPlaceBlock,
    KVPlane,
    has_scales,
    is_vnni,
    item_bytes,
)
from ramify.kernels.cpu.attention_tiles import STEP
from ramify.kernels.cpu.decode_microkernels import (
    KEYS_PER_VECTOR,
    ROW_TILES,
    pv_in_place,
    qk_in_place,
)
from ramify.kernels.cpu.decode_microkernels_tiles import pv_in_place_tiles, qk_in_place_tiles
from ramify.kernels.cpu.decode_microkernels_vnni import pv_in_place_vnni
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.online_softmax import (
    exp_and_sum,
    load_scales,
    mask_and_row_max,
    merge_state,
    row_key_range,
    visible_key_range,
)
from ramify.kernels.cpu.simd import TILE_N, row_is_finite, store_f32

MAX_IN_PLACE_ROWS = 8  # query rows per head; tasks with more pack their blocks
KEYS_PER_PASS = 32  # keys that all heads read before the next ones
PREFETCH_PASSES = 2  # passes from what is read to what is prefetched
_MAX_ROW_TILE = ROW_TILES[-1]


def padded_row_count(num_rows: int) -> int:
    """`num_rows` of a head rounded up to what their row tiles write."""
    return num_rows if num_rows < 3 else -(-num_rows // _MAX_ROW_TILE) * _MAX_ROW_TILE


_padded_row_count = jit(padded_row_count)


@jit
def readable_in_place(plane: KVPlane) -> bool:
    """Whether a plane can be read in place: whole vectors, and scales only for quantized kinds."""
    return plane.width % 8 == 0 and (not plane.scales or has_scales(plane))


@jit
def _row_tile(num_rows: int) -> int:
    """The smallest of ROW_TILES for `num_rows` rows."""
    return num_rows if num_rows < 3 else _MAX_ROW_TILE


@jit
def _prefetch_target(block: InPlaceBlock, pass_index: int, key_range: Any) -> Any:
    """What a pass reads, as `line_prefetcher` takes it: address, row offsets, rows, lines per row.

    Passes go over the keys of `key_range`, then over its values, then over the next block's keys.
    """
    low, high = key_range
    num_passes = -(-(high - low) // KEYS_PER_PASS)
    plane, head, num_heads = block.keys, block.head, block.num_heads
    offsets, end = block.key_offsets + 8 * low, high - low
    if pass_index >= 2 * num_passes:
        offsets, end = block.next_offsets, block.next_count
        head, num_heads = block.next_head, block.next_heads
        pass_index -= 2 * num_passes
    elif pass_index >= num_passes:
        plane, offsets = block.values, block.value_offsets + 8 * low
        pass_index -= num_passes
    begin = pass_index * KEYS_PER_PASS
    num_lines = -(
        -((num_heads - 1) * plane.head_stride + plane.width * item_bytes(plane)) // CACHE_LINE
    )
    return (
        plane.address + head * plane.head_stride,
        offsets + 8 * begin,
        min(KEYS_PER_PASS, end - begin),
        num_lines,
    )


@jit
def _prefetch_share(target: Any, head: int, num_heads: int, first_row: int) -> Any:
    """Rows of a target to prefetch beside a row tile: a head's share for its first tile, else any line."""
    source, offsets, num_rows, num_lines = target
    begin, end = head * num_rows // num_heads, (head + 1) * num_rows // num_heads
    if first_row > 0 or begin >= end:
        return source, offsets, 1, 1
    return source, offsets + 8 * begin, end - begin, num_lines


@jit
def _qk(
    params: AttentionParams, block: InPlaceBlock, key_range: Any, slots: Any, scales: Any
) -> None:
    """Scores of all rows with keys [low, high) of a block, pass by pass for all heads."""
    (low, high), plane, depth = key_range, block.keys, params.key_dim
    padded_rows = _padded_row_count(block.num_rows)
    for begin in range(low, high, KEYS_PER_PASS):
        count, pass_index = min(KEYS_PER_PASS, high - begin), (begin - low) // KEYS_PER_PASS
        target = _prefetch_target(block, pass_index + PREFETCH_PASSES, key_range)
        for h in range(block.num_heads):
            if plane.scales:
                load_scales(plane, slots[begin:], -(-count // 8) * 8, params.num_kv_heads, block.head + h,
                    scales)  # fmt: skip
            source = plane.address + (block.head + h) * plane.head_stride
            for r in range(0, block.num_rows, _MAX_ROW_TILE):
                num_rows = min(_MAX_ROW_TILE, block.num_rows - r)
                prefetch_rows = _prefetch_share(target, h, block.num_heads, r)
                into = block.scores + 4 * (BLOCK_KEYS * (h * padded_rows + r) + begin - low)
                if is_vnni(plane) and params.tiles:
                    qk_in_place_tiles(plane, source, block.key_offsets + 8 * begin, -(-count // KEYS_PER_VECTOR),
                        depth, block.queries + 4 * depth * (h * block.num_rows + r), num_rows - 1,
                        _row_tile(num_rows), into, 4 * BLOCK_KEYS, np.float32(params.scale),
                        prefetch_rows)  # fmt: skip
                    continue
                qk_in_place(plane, source, block.key_offsets + 8 * begin, scales.ctypes.data,
                    -(-count // KEYS_PER_VECTOR), depth, block.queries + 4 * depth * (h * block.num_rows + r),
                    num_rows - 1, _row_tile(num_rows), into, 4 * BLOCK_KEYS, np.float32(params.scale),
                    prefetch_rows)  # fmt: skip


@jit
def _pv(
    params: AttentionParams, block: InPlaceBlock, key_range: Any, slots: Any, scales: Any
) -> None:
    """Weighted sums of values [low, high) for all rows, pass by pass for all heads."""
    (low, high), plane, stride = key_range, block.values, params.value_stride
    padded_rows = _padded_row_count(block.num_rows)
    for d in range(block.num_heads * padded_rows * stride):
        store_f32(block.block_output + 4 * d, 0.0)
    for begin in range(low, high, KEYS_PER_PASS):
        count = min(KEYS_PER_PASS, high - begin)
        pass_index = -(-(high - low) // KEYS_PER_PASS) + (begin - low) // KEYS_PER_PASS
        target = _prefetch_target(block, pass_index + PREFETCH_PASSES, key_range)
        for h in range(block.num_heads):
            if plane.scales:
                load_scales(
                    plane, slots[begin:], count, params.num_kv_heads, block.head + h, scales
                )
            source = plane.address + (block.head + h) * plane.head_stride
            for r in range(0, block.num_rows, _MAX_ROW_TILE):
                num_rows = min(_MAX_ROW_TILE, block.num_rows - r)
                prefetch_rows = _prefetch_share(target, h, block.num_heads, r)
                row = h * padded_rows + r
                into = block.block_output + 4 * stride * row
                weights = block.scores + 4 * BLOCK_KEYS * row
                if is_vnni(plane):
                    weights += 2 * (begin - low)
                    if params.tiles:
                        pv_in_place_tiles(plane, source, block.value_offsets + 8 * begin, 0, count, plane.width,
                            weights, 4 * BLOCK_KEYS, num_rows - 1, _row_tile(num_rows), into, 4 * stride,
                            prefetch_rows)  # fmt: skip
                        continue
                    pv_in_place_vnni(plane, source, block.value_offsets + 8 * begin, 0, count, plane.width,
                        weights, 4 * BLOCK_KEYS, num_rows - 1, _row_tile(num_rows), into, 4 * stride,
                        prefetch_rows)  # fmt: skip
                    continue
                weights += 4 * (begin - low)
                pv_in_place(plane, source, block.value_offsets + 8 * begin, scales.ctypes.data, count,
                    plane.width, weights, 4 * BLOCK_KEYS, num_rows - 1, _row_tile(num_rows), into, 4 * stride,
                    prefetch_rows)  # fmt: skip


@jit
def attend_block_in_place(
    params: AttentionParams, block: InPlaceBlock, num_visible: Any, slots: Any, key_scales: Any, value_scales: Any, row_stats: Any,
    state: Any, state_rows: Any,
) -> None:  # fmt: skip
    """Attention of all rows of a task over a block, merged into `state`.

    Args:
        num_visible: see `online_softmax.visible_key_range`.
        slots: of the block's keys, up to a multiple of 8.
        key_scales, value_scales: [BLOCK_KEYS] float32 of ones; overwritten for quantized planes.
        row_stats: buffer of 2 floats (row max, sum of weights) per row of all heads.
        state_rows: [num_heads * num_rows] rows of `state`.
    """
    low, high = visible_key_range(params, num_visible, 0, block.num_rows)
    if low >= high:
        return
    key_range, stride = (low, high), params.value_stride
    padded_rows = _padded_row_count(block.num_rows)
    width = -(-(high - low) // TILE_N) * TILE_N
    _qk(params, block, key_range, slots, key_scales)
    for h in range(block.num_heads):
        for r in range(block.num_rows):
            stats = 2 * (h * block.num_rows + r)
            scores = block.scores + 4 * BLOCK_KEYS * (h * padded_rows + r)
            row_stats[stats] = mask_and_row_max(params, scores, num_visible[r] - low, width)
            row_stats[stats + 1] = exp_and_sum(block.values, scores, width, row_stats[stats])
    _pv(params, block, key_range, slots, value_scales)
    for h in range(block.num_heads):
        for r in range(block.num_rows):
            stats, padded_row = 2 * (h * block.num_rows + r), h * padded_rows + r
            output = block.block_output + 4 * stride * padded_row
            begin, end = row_key_range(params, num_visible[r] - low, high - low)
            if begin < end:
                if not row_is_finite(output, stride):
                    weights = block.scores + 4 * BLOCK_KEYS * padded_row
                    if is_vnni(block.values):
                        source = block.values.address + (block.head + h) * block.values.head_stride
                        offsets = block.value_offsets + 8 * (low + begin)
                        pv_visible_only_vnni(
                            params, block.values, source, offsets, (begin, end), weights, output
                        )
                    else:
                        _pv_visible_only(params, block, (low + begin, low + end), h, slots, value_scales,
                            weights + 4 * begin, output)  # fmt: skip
                row = state_rows[stats // 2]
                merge_state(state, row, row_stats[stats], row_stats[stats + 1], output, stride)


@jit
def pv_visible_only_vnni(
    params: AttentionParams,
    plane: KVPlane,
    source: int,
    offsets: int,
    keys: Any,
    weights: int,
    into: int,
) -> None:
    """P·V of a row over keys [begin, end) alone: 0 times a value beyond them may be NaN. VNNI.

    Args:
        offsets: address of int64: bytes from `source` to each of these values.
        weights: address of the row's bf16 weights, from an even key of the block on.
    """
    begin, end = keys
    for d in range(params.value_stride):
        store_f32(into + 4 * d, 0.0)
    if params.tiles:  # each STEP keys of the block by themselves
        first = begin
        while first < end:
            after = min(end, (first // STEP + 1) * STEP)
            pv_in_place_tiles(plane, source, offsets + 8 * (first - begin), first % 2, after - first, plane.width,
                weights + 4 * (first // 2), 4 * BLOCK_KEYS, 0, 1, into, 4 * params.value_stride,
                (source, offsets, 1, 1))  # fmt: skip
            first = after
        return
    pv_in_place_vnni(plane, source, offsets, begin % 2, end - begin, plane.width, weights + 4 * (begin // 2),
        4 * BLOCK_KEYS, 0, 1, into, 4 * params.value_stride, (source, offsets, 1, 1))  # fmt: skip


@jit
def _pv_visible_only(
    params: AttentionParams, block: InPlaceBlock, key_range: Any, head: int, slots: Any, scales: Any, weights: int, into: int
) -> None:  # fmt: skip
    """`pv_visible_only_vnni` of values [low, high) for float32 weights."""
    (low, high), plane, stride = key_range, block.values, params.value_stride
    if plane.scales:
        load_scales(plane, slots[low:], high - low, params.num_kv_heads, block.head + head, scales)
    for d in range(stride):
        store_f32(into + 4 * d, 0.0)
    pv_in_place(plane, plane.address + (block.head + head) * plane.head_stride, block.value_offsets + 8 * low,
        scales.ctypes.data, high - low, plane.width, weights, 4 * BLOCK_KEYS, 0, 1, into, 4 * stride,
        (block.block_output, block.value_offsets + 8 * low, 1, 1))  # fmt: skip
