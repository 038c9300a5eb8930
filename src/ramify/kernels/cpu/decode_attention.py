"""Few query rows against a block of keys that is read where it lies, in the order of memory.

To lay a block out pays only when many rows read it. Few rows wait for memory instead: so all heads
of a task read some keys, which lie side by side, before any reads the next, and while they do, what
is wanted a little later is fetched, whole rows at a time. The bits are those of a laid out block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramify.kernels.cpu import decode_microkernels, decode_microkernels_vnni
from ramify.kernels.cpu.abi import BLOCK_KEYS, CACHE_LINE
from ramify.kernels.cpu.attention_args import (
    AttentionParams,
    InPlaceBlock,
    KVPlane,
    has_scales,
    is_vnni,
    item_bytes,
)
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

MAX_IN_PLACE_ROWS = 8  # up to so many rows of a task read a block where it lies
KEYS_PER_PASS = 32  # keys that all heads read before the next
PREFETCH_PASSES = 2  # times as many keys, or values, lie between what is read and what is fetched
_BLOCK, _TILE_N, _CACHE_LINE = BLOCK_KEYS, TILE_N, CACHE_LINE  # globals are constants to Numba
_KEYS_PER_PASS, _PREFETCH_PASSES, _MAX_ROW_TILE, _KEYS_PER_VECTOR = (
    KEYS_PER_PASS,
    PREFETCH_PASSES,
    decode_microkernels.ROW_TILES[-1],
    decode_microkernels.KEYS_PER_VECTOR,
)
_qk_in_place, _pv_in_place, _pv_in_place_vnni = (
    decode_microkernels.qk_in_place,
    decode_microkernels.pv_in_place,
    decode_microkernels_vnni.pv_in_place_vnni,
)


def padded_row_count(num_rows: int) -> int:
    """Rows that tiles for so many rows of a head write at most."""
    return (
        num_rows
        if num_rows < 3
        else -(-num_rows // decode_microkernels.ROW_TILES[-1]) * decode_microkernels.ROW_TILES[-1]
    )


_padded_row_count = jit(padded_row_count)


@jit
def readable_in_place(plane: KVPlane) -> bool:
    """Whether a plane can be read where it lies: whole vectors, scales just where a kind has them."""
    return plane.width % 8 == 0 and (not plane.scales or has_scales(plane))


@jit
def _row_tile(num_rows: int) -> int:
    """The smallest of `decode_microkernels.ROW_TILES` for so many rows."""
    return num_rows if num_rows < 3 else _MAX_ROW_TILE


@jit
def _prefetch_target(block: InPlaceBlock, unit: int, span: Any) -> Any:
    """What is read in a unit: source, address of the offsets from it, rows, lines of each.

    Units are so many keys, one after the other, then so many values, then keys of the next block.
    """
    low, high = span
    units = -(-(high - low) // _KEYS_PER_PASS)
    part, head, heads = block.keys, block.head, block.num_heads
    offsets, end = block.key_offsets + 8 * low, high - low
    if unit >= 2 * units:
        offsets, end = block.next_offsets, block.next_count
        head, heads = block.next_head, block.next_heads
        unit -= 2 * units
    elif unit >= units:
        part, offsets = block.values, block.value_offsets + 8 * low
        unit -= units
    begin = unit * _KEYS_PER_PASS
    lines = -(-((heads - 1) * part.head_stride + part.width * item_bytes(part)) // _CACHE_LINE)
    return (
        part.address + head * part.head_stride,
        offsets + 8 * begin,
        min(_KEYS_PER_PASS, end - begin),
        lines,
    )


@jit
def _prefetch_share(target: Any, number: int, of: int) -> Any:
    """A part of the rows that are wanted; if there is none, any line."""
    source, offsets, rows, lines = target
    begin, end = number * rows // of, (number + 1) * rows // of
    if begin >= end:
        return source, offsets, 1, 1
    return source, offsets + 8 * begin, end - begin, lines


@jit
def _qk(params: AttentionParams, block: InPlaceBlock, span: Any, slots: Any, scales: Any) -> None:
    """Scores of all rows with keys [low, high), some of them for all heads at a time."""
    (low, high), part, depth, rows = (
        span,
        block.keys,
        params.key_dim,
        _padded_row_count(block.num_rows),
    )
    for begin in range(low, high, _KEYS_PER_PASS):
        count, unit = min(_KEYS_PER_PASS, high - begin), (begin - low) // _KEYS_PER_PASS
        wanted = _prefetch_target(block, unit + _PREFETCH_PASSES, span)
        for h in range(block.num_heads):
            if part.scales:
                load_scales(part, slots[begin:], -(-count // 8) * 8, params.num_kv_heads,
                              block.head + h, scales)  # fmt: skip
            source = part.address + (block.head + h) * part.head_stride
            for r in range(0, block.num_rows, _MAX_ROW_TILE):
                num_rows = min(_MAX_ROW_TILE, block.num_rows - r)
                later = (
                    _prefetch_share(wanted, h, block.num_heads)
                    if r == 0
                    else _prefetch_share(wanted, 0, _BLOCK)
                )
                into = block.scores + 4 * (_BLOCK * (h * rows + r) + begin - low)
                _qk_in_place(part, source, block.key_offsets + 8 * begin, scales.ctypes.data,
                        -(-count // _KEYS_PER_VECTOR), depth, block.queries + 4 * depth * (h * block.num_rows + r),
                        num_rows - 1, _row_tile(num_rows), into, 4 * _BLOCK, np.float32(params.scale),
                        later)  # fmt: skip


@jit
def _pv(params: AttentionParams, block: InPlaceBlock, span: Any, slots: Any, scales: Any) -> None:
    """Weighted sums over values [low, high) for all rows, some values for all heads at a time."""
    (low, high), part, stride, rows = (
        span,
        block.values,
        params.value_stride,
        _padded_row_count(block.num_rows),
    )
    for d in range(block.num_heads * rows * stride):
        store_f32(block.block_output + 4 * d, 0.0)
    for begin in range(low, high, _KEYS_PER_PASS):
        count = min(_KEYS_PER_PASS, high - begin)
        unit = -(-(high - low) // _KEYS_PER_PASS) + (begin - low) // _KEYS_PER_PASS
        wanted = _prefetch_target(block, unit + _PREFETCH_PASSES, span)
        for h in range(block.num_heads):
            if part.scales:
                load_scales(part, slots[begin:], count, params.num_kv_heads, block.head + h, scales)
            source = part.address + (block.head + h) * part.head_stride
            for r in range(0, block.num_rows, _MAX_ROW_TILE):
                num_rows = min(_MAX_ROW_TILE, block.num_rows - r)
                later = (
                    _prefetch_share(wanted, h, block.num_heads)
                    if r == 0
                    else _prefetch_share(wanted, 0, _BLOCK)
                )
                place = h * rows + r
                into = block.block_output + 4 * stride * place
                weights = block.scores + 4 * _BLOCK * place
                if is_vnni(part):
                    weights += 2 * (begin - low)
                    _pv_in_place_vnni(part, source, block.value_offsets + 8 * begin, 0, count, part.width,
                               weights, 4 * _BLOCK, num_rows - 1, _row_tile(num_rows), into,
                               4 * stride, later)  # fmt: skip
                    continue
                weights += 4 * (begin - low)
                _pv_in_place(part, source, block.value_offsets + 8 * begin, scales.ctypes.data, count,
                     part.width, weights, 4 * _BLOCK, num_rows - 1, _row_tile(num_rows), into,
                     4 * stride, later)  # fmt: skip


@jit
def attend_block_in_place(
    params: AttentionParams, block: InPlaceBlock, num_visible: Any, slots: Any, key_scales: Any, value_scales: Any, row_stats: Any,
    state: Any, state_rows: Any,
) -> None:  # fmt: skip
    """All rows of a task against a block.

    Args:
        num_visible: see `online_softmax.visible_key_range`.
        slots: of the block's keys, up to a multiple of 8.
        key_scales, value_scales: [BLOCK_KEYS] float32, ones; overwritten if there are scales.
        row_stats: room for 2 floats per row of all heads.
        state_rows: by head, rows of `state`, into which the block is folded.
    """
    low, high = visible_key_range(params, num_visible, 0, block.num_rows)
    if low >= high:
        return
    span, stride, rows = (low, high), params.value_stride, _padded_row_count(block.num_rows)
    width = -(-(high - low) // _TILE_N) * _TILE_N
    _qk(params, block, span, slots, key_scales)
    for h in range(block.num_heads):
        for r in range(block.num_rows):
            at, line = 2 * (h * block.num_rows + r), block.scores + 4 * _BLOCK * (h * rows + r)
            row_stats[at] = mask_and_row_max(params, line, num_visible[r] - low, width)
            row_stats[at + 1] = exp_and_sum(block.values, line, width, row_stats[at])
    _pv(params, block, span, slots, value_scales)
    for h in range(block.num_heads):
        for r in range(block.num_rows):
            at, place = 2 * (h * block.num_rows + r), h * rows + r
            sums = block.block_output + 4 * stride * place
            begin, end = row_key_range(params, num_visible[r] - low, high - low)
            if begin < end:
                if not row_is_finite(sums, stride):
                    row = block.scores + 4 * _BLOCK * place
                    if is_vnni(block.values):
                        source = block.values.address + (block.head + h) * block.values.head_stride
                        offsets = block.value_offsets + 8 * (low + begin)
                        pv_visible_only_vnni(
                            params, block.values, source, offsets, (begin, end), row, sums
                        )
                    else:
                        _pv_visible_only(params, block, (low + begin, low + end), h, slots, value_scales,
                                     row + 4 * begin, sums)  # fmt: skip
                merge_state(
                    state, state_rows[at // 2], row_stats[at], row_stats[at + 1], sums, stride
                )


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
    """The weighted sum of one row over keys [begin, end), in pairs; no other key is looked at.

    Args:
        offsets: address of the bytes from `source` to each of them.
        weights: of a row of them from key 0 on, an even one of its block.
    """
    begin, end = keys
    for d in range(params.value_stride):
        store_f32(into + 4 * d, 0.0)
    _pv_in_place_vnni(plane, source, offsets, begin % 2, end - begin, plane.width, weights + 4 * (begin // 2),
               4 * _BLOCK, 0, 1, into, 4 * params.value_stride, (source, offsets, 1, 1))  # fmt: skip


@jit
def _pv_visible_only(
    params: AttentionParams, block: InPlaceBlock, span: Any, head: int, slots: Any, scales: Any, weights: int, into: int
) -> None:  # fmt: skip
    """The weighted sum of one row over values [low, high)."""
    (low, high), part, stride = span, block.values, params.value_stride
    if part.scales:
        load_scales(part, slots[low:], high - low, params.num_kv_heads, block.head + head, scales)
    for d in range(stride):
        store_f32(into + 4 * d, 0.0)
    _pv_in_place(part, part.address + (block.head + head) * part.head_stride, block.value_offsets + 8 * low,
         scales.ctypes.data, high - low, part.width, weights, 4 * _BLOCK, 0, 1, into, 4 * stride,
         (block.block_output, block.value_offsets + 8 * low, 1, 1))  # fmt: skip
