"""Few query rows against a block of keys that is read where it lies, in the order of memory.

To lay a block out pays only when many rows read it. Few rows wait for memory instead: so all heads
of a task read some keys, which lie side by side, before any reads the next, and while they do, what
is wanted a little later is fetched, whole rows at a time. The bits are those of a laid out block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramify.attention import direct, direct_pairs
from ramify.attention.block_rows import (
    BLOCK_KEYS,
    fold,
    jit,
    own_keys,
    scale_factors,
    soften,
    span_of,
    to_weights,
)
from ramify.attention.kernel_args import Few, Part, Shape, has_scales, in_pairs, stored_size
from ramify.attention.simd import LINE, TILE_COLUMNS, is_finite, put_float

FEW_ROWS = 8  # up to so many rows of a task read a block where it lies
AT_ONCE = 32  # keys that all heads read before the next
UNITS_AHEAD = 2  # times as many keys, or values, lie between what is read and what is fetched
_BLOCK, _COLUMNS, _LINE = BLOCK_KEYS, TILE_COLUMNS, LINE  # globals are constants to Numba
_AT_ONCE, _AHEAD, _TILE, _KEYS = AT_ONCE, UNITS_AHEAD, direct.TILES[-1], direct.KEYS
_scores, _mix, _mix_pairs = direct.scores, direct.mix, direct_pairs.mix_pairs


def room(num_rows: int) -> int:
    """Rows that tiles for so many rows of a head write at most."""
    return num_rows if num_rows < 3 else -(-num_rows // direct.TILES[-1]) * direct.TILES[-1]


_room = jit(room)


@jit
def is_plain(part: Part) -> bool:
    """Whether a plane can be read where it lies: whole vectors, scales just where a kind has them."""
    return part.width % 8 == 0 and (not part.scales or has_scales(part))


@jit
def _tile_of(num_rows: int) -> int:
    """The smallest of `direct.TILES` for so many rows."""
    return num_rows if num_rows < 3 else _TILE


@jit
def _wanted(few: Few, unit: int, span: Any) -> Any:
    """What is read in a unit: source, address of the offsets from it, rows, lines of each.

    Units are so many keys, one after the other, then so many values, then keys of the next block.
    """
    low, high = span
    units = -(-(high - low) // _AT_ONCE)
    part, head, heads = few.keys, few.head, few.num_heads
    offsets, end = few.key_offsets + 8 * low, high - low
    if unit >= 2 * units:
        offsets, end = few.next_offsets, few.next_count
        head, heads = few.next_head, few.next_heads
        unit -= 2 * units
    elif unit >= units:
        part, offsets = few.values, few.value_offsets + 8 * low
        unit -= units
    begin = unit * _AT_ONCE
    lines = -(-((heads - 1) * part.head + part.width * stored_size(part)) // _LINE)
    return part.address + head * part.head, offsets + 8 * begin, min(_AT_ONCE, end - begin), lines


@jit
def _share(wanted: Any, number: int, of: int) -> Any:
    """A part of the rows that are wanted; if there is none, any line."""
    source, offsets, rows, lines = wanted
    begin, end = number * rows // of, (number + 1) * rows // of
    if begin >= end:
        return source, offsets, 1, 1
    return source, offsets + 8 * begin, end - begin, lines


@jit
def _score(shape: Shape, few: Few, span: Any, slots: Any, factors: Any) -> None:
    """Scores of all rows with keys [low, high), some of them for all heads at a time."""
    (low, high), part, depth, rows = span, few.keys, shape.key_dim, _room(few.num_rows)
    for begin in range(low, high, _AT_ONCE):
        count, unit = min(_AT_ONCE, high - begin), (begin - low) // _AT_ONCE
        wanted = _wanted(few, unit + _AHEAD, span)
        for h in range(few.num_heads):
            if part.scales:
                scale_factors(part, slots[begin:], -(-count // 8) * 8, shape.num_kv_heads,
                              few.head + h, factors)  # fmt: skip
            source = part.address + (few.head + h) * part.head
            for r in range(0, few.num_rows, _TILE):
                num_rows = min(_TILE, few.num_rows - r)
                later = _share(wanted, h, few.num_heads) if r == 0 else _share(wanted, 0, _BLOCK)
                into = few.scores + 4 * (_BLOCK * (h * rows + r) + begin - low)
                _scores(part, source, few.key_offsets + 8 * begin, factors.ctypes.data,
                        -(-count // _KEYS), depth, few.queries + 4 * depth * (h * few.num_rows + r),
                        num_rows - 1, _tile_of(num_rows), into, 4 * _BLOCK, np.float32(shape.scale),
                        later)  # fmt: skip


@jit
def _weigh(shape: Shape, few: Few, span: Any, slots: Any, factors: Any) -> None:
    """Weighted sums over values [low, high) for all rows, some values for all heads at a time."""
    (low, high), part, stride, rows = span, few.values, shape.value_stride, _room(few.num_rows)
    for d in range(few.num_heads * rows * stride):
        put_float(few.partial + 4 * d, 0.0)
    for begin in range(low, high, _AT_ONCE):
        count = min(_AT_ONCE, high - begin)
        unit = -(-(high - low) // _AT_ONCE) + (begin - low) // _AT_ONCE
        wanted = _wanted(few, unit + _AHEAD, span)
        for h in range(few.num_heads):
            if part.scales:
                scale_factors(part, slots[begin:], count, shape.num_kv_heads, few.head + h, factors)
            source = part.address + (few.head + h) * part.head
            for r in range(0, few.num_rows, _TILE):
                num_rows = min(_TILE, few.num_rows - r)
                later = _share(wanted, h, few.num_heads) if r == 0 else _share(wanted, 0, _BLOCK)
                place = h * rows + r
                into = few.partial + 4 * stride * place
                weights = few.scores + 4 * _BLOCK * place
                if in_pairs(part):
                    weights += 2 * (begin - low)
                    _mix_pairs(part, source, few.value_offsets + 8 * begin, 0, count, part.width,
                               weights, 4 * _BLOCK, num_rows - 1, _tile_of(num_rows), into,
                               4 * stride, later)  # fmt: skip
                    continue
                weights += 4 * (begin - low)
                _mix(part, source, few.value_offsets + 8 * begin, factors.ctypes.data, count,
                     part.width, weights, 4 * _BLOCK, num_rows - 1, _tile_of(num_rows), into,
                     4 * stride, later)  # fmt: skip


@jit
def attend_few(
    shape: Shape, few: Few, seen: Any, slots: Any, key_factors: Any, value_factors: Any, tops: Any,
    state: Any, state_rows: Any,
) -> None:  # fmt: skip
    """All rows of a task against a block.

    Args:
        seen: see `block_rows.span_of`.
        slots: of the block's keys, up to a multiple of 8.
        key_factors, value_factors: [BLOCK_KEYS] float32, ones; overwritten if there are scales.
        tops: room for 2 floats per row of all heads.
        state_rows: by head, rows of `state`, into which the block is folded.
    """
    low, high = span_of(shape, seen, 0, few.num_rows)
    if low >= high:
        return
    span, stride, rows = (low, high), shape.value_stride, _room(few.num_rows)
    width = -(-(high - low) // _COLUMNS) * _COLUMNS
    _score(shape, few, span, slots, key_factors)
    for h in range(few.num_heads):
        for r in range(few.num_rows):
            at, line = 2 * (h * few.num_rows + r), few.scores + 4 * _BLOCK * (h * rows + r)
            tops[at] = soften(shape, line, seen[r] - low, width)
            tops[at + 1] = to_weights(few.values, line, width, tops[at])
    _weigh(shape, few, span, slots, value_factors)
    for h in range(few.num_heads):
        for r in range(few.num_rows):
            at, place = 2 * (h * few.num_rows + r), h * rows + r
            sums = few.partial + 4 * stride * place
            begin, end = own_keys(shape, seen[r] - low, high - low)
            if begin < end:
                if not is_finite(sums, stride):
                    row = few.scores + 4 * _BLOCK * place
                    if in_pairs(few.values):
                        source = few.values.address + (few.head + h) * few.values.head
                        offsets = few.value_offsets + 8 * (low + begin)
                        mix_alone(shape, few.values, source, offsets, (begin, end), row, sums)
                    else:
                        _weigh_alone(shape, few, (low + begin, low + end), h, slots, value_factors,
                                     row + 4 * begin, sums)  # fmt: skip
                fold(state, state_rows[at // 2], tops[at], tops[at + 1], sums, stride)


@jit
def mix_alone(
    shape: Shape, part: Part, source: int, offsets: int, keys: Any, weights: int, into: int
) -> None:
    """The weighted sum of one row over keys [begin, end), in pairs; no other key is looked at.

    Args:
        offsets: address of the bytes from `source` to each of them.
        weights: of a row of them from key 0 on, an even one of its block.
    """
    begin, end = keys
    for d in range(shape.value_stride):
        put_float(into + 4 * d, 0.0)
    _mix_pairs(part, source, offsets, begin % 2, end - begin, part.width, weights + 4 * (begin // 2),
               4 * _BLOCK, 0, 1, into, 4 * shape.value_stride, (source, offsets, 1, 1))  # fmt: skip


@jit
def _weigh_alone(
    shape: Shape, few: Few, span: Any, head: int, slots: Any, factors: Any, weights: int, into: int
) -> None:  # fmt: skip
    """The weighted sum of one row over values [low, high)."""
    (low, high), part, stride = span, few.values, shape.value_stride
    if part.scales:
        scale_factors(part, slots[low:], high - low, shape.num_kv_heads, few.head + head, factors)
    for d in range(stride):
        put_float(into + 4 * d, 0.0)
    _mix(part, part.address + (few.head + head) * part.head, few.value_offsets + 8 * low,
         factors.ctypes.data, high - low, part.width, weights, 4 * _BLOCK, 0, 1, into, 4 * stride,
         (few.partial, few.value_offsets + 8 * low, 1, 1))  # fmt: skip
