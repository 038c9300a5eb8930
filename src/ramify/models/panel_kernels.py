"""Matrix products on CPU whose rows cannot depend on each other, compiled by Numba.

Every element of a result is one fixed expression in float32: the bias, plus one sum per strip of
`STRIP` inner elements, in ascending order, each a chain of fused multiply-adds in ascending order;
in pairs, of `STRIP` words and dot products, which take subnormals for zeros.
Tiles, blocks, panels and threads decide what is computed when, never a bit of it. The loops are
those of Goto and van de Geijn (Anatomy of high-performance matrix multiplication, 2008): a strip of
a panel of weights stays in the first-level cache while the rows of a block pass by.

Weights lie in panels of `PANEL` columns, [panels, in_width, PANEL]. In bfloat16 column j lies in the
low half of a 32-bit word and column j + LANES in the high half, so that a shift and a mask make
float32 of them. Where the processor multiplies bfloat16 by itself (`simd.DOTS`), a word is a pair of
inner elements instead, of rows and weights alike, and a product adds both to the sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ramify.attention.block_rows import address, jit
from ramify.attention.simd import BF16, F32, LINE, element_at, put_float
from ramify.attention.workers import take_from_end
from ramify.models.panel_tiles import (
    GROUPS,
    PAIRS,
    PANEL,
    TILES,
    UNROLLED,
    add_line,
    bf16_0,
    bf16_1,
    bf16_2,
    bf16_3,
    bf16_4,
    bf16_wide_0,
    bf16_wide_1,
    copy_bytes,
    f32_0,
    f32_1,
    f32_2,
    f32_3,
    f32_4,
    f32_wide_0,
    f32_wide_1,
    fill_rows,
    gate_line,
    pack_rows,
    pairs_0,
    pairs_1,
    pairs_2,
    pairs_3,
    pairs_4,
    pairs_wide_0,
    pairs_wide_1,
    store_line,
)
from ramify.models.row_tiles import scale_row, sum_squares

BLOCK_ROWS = 96  # a multiple of every tile: the packed rows of a strip stay in the second level
AHEAD = 4  # strips between what is read and what is fetched
STRIP = 128  # shorter chains are nearer to the truth; 256 was no faster (float32, AVX2)
_PANEL, _STRIP, _GROUPS, _TILES = PANEL, STRIP, GROUPS, TILES  # globals are constants to Numba
_AHEAD, _UNROLLED, _PAIRS = AHEAD, UNROLLED, PAIRS
_ROUND = 8  # rows are packed so many elements at a time

_LARGEST = len(TILES) - 1

STORE, ADD, GATE = range(3)  # what becomes of the sums


class Product(NamedTuple):
    """One product as the kernel sees it: addresses, sizes, strides in bytes."""

    kind: int  # of rows, norm, weights and result: F32 or BF16, or PAIRS, words of two BF16
    mode: int  # STORE; ADD to what is there; GATE: silu(even panels) * odd panels
    rows: int  # address of [num_rows, width]
    row_stride: int
    num_rows: int
    width: int  # in elements of `kind`
    norm: int  # address of [width]: rows are RMS-normalised first; or 0
    weight: int  # address of the panels
    num_panels: int
    bias: int  # address of [num_panels * PANEL] float32, or 0
    out: int  # address of [num_rows, num_columns]
    out_stride: int
    num_columns: int


def aligned(num_bytes: int) -> int:
    """Whole lines of the cache, so that no vector lies across two of them."""
    return -(-num_bytes // LINE) * LINE


_aligned = jit(aligned)


@jit
def inverse_rms(total: float, width: int, eps: float) -> Any:
    """1 / sqrt(mean square + eps) in float32."""
    return np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(eps))


@jit
def _add_strip(
    kind: int, tile: int, group: int, a: int, b: int, b_stride: int, ahead: int, gap: int, c: int,
    c_stride: int, depth: int,
) -> None:  # fmt: skip
    """The tile of that number for `group` panels: one, or as many as `GROUPS` says."""
    if kind == F32:
        if tile == 4:
            f32_4(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif tile == 3:
            f32_3(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif tile == 2:
            f32_2(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif tile == 1 and group == 1:
            f32_1(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif tile == 1:
            f32_wide_1(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif group == 1:
            f32_0(a, b, b_stride, ahead, gap, c, c_stride, depth)
        else:
            f32_wide_0(a, b, b_stride, ahead, gap, c, c_stride, depth)
    elif kind == _PAIRS:
        if tile == 4:
            pairs_4(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif tile == 3:
            pairs_3(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif tile == 2:
            pairs_2(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif tile == 1 and group == 1:
            pairs_1(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif tile == 1:
            pairs_wide_1(a, b, b_stride, ahead, gap, c, c_stride, depth)
        elif group == 1:
            pairs_0(a, b, b_stride, ahead, gap, c, c_stride, depth)
        else:
            pairs_wide_0(a, b, b_stride, ahead, gap, c, c_stride, depth)
    elif tile == 4:
        bf16_4(a, b, b_stride, ahead, gap, c, c_stride, depth)
    elif tile == 3:
        bf16_3(a, b, b_stride, ahead, gap, c, c_stride, depth)
    elif tile == 2:
        bf16_2(a, b, b_stride, ahead, gap, c, c_stride, depth)
    elif tile == 1 and group == 1:
        bf16_1(a, b, b_stride, ahead, gap, c, c_stride, depth)
    elif tile == 1:
        bf16_wide_1(a, b, b_stride, ahead, gap, c, c_stride, depth)
    elif group == 1:
        bf16_0(a, b, b_stride, ahead, gap, c, c_stride, depth)
    else:
        bf16_wide_0(a, b, b_stride, ahead, gap, c, c_stride, depth)


@jit
def _normalise(
    kind: int, source: int, stride: int, num_rows: int, width: int, norm: int, eps: float, into: int
) -> None:
    """Some rows over their root mean square, times the weights at `norm`, to [num_rows, width].

    In float32, but for pairs, which stay pairs.
    """
    for r in range(num_rows):
        row, to = source + stride * r, into + 4 * width * r
        if kind == F32:
            scale = inverse_rms(sum_squares(row, width, 0), width, eps)
            scale_row(row, norm, to, width, scale, 0, 0)
        elif kind == _PAIRS:
            scale = inverse_rms(sum_squares(row, 2 * width, 1), 2 * width, eps)
            scale_row(row, norm, to, 2 * width, scale, 1, 1)
        else:
            scale = inverse_rms(sum_squares(row, width, 1), width, eps)
            scale_row(row, norm, to, width, scale, 1, 0)


@jit
def _pack(
    product: Product, eps: float, first: int, num_rows: int, into: int, tile: int, lines: int
) -> None:
    """[width, tile] float32 or pairs from at most `tile` rows, normalised if so wanted.

    The others hold anything.
    """
    kind, width, stride = product.kind, product.width, product.row_stride
    steps = width // 8
    for r in range((num_rows - 1) // 8 * 8, -1, -8):  # downwards: see `pack_rows`
        at, to, count = product.rows + stride * (first + r), into + 4 * r, min(8, num_rows - r)
        if product.norm:
            _normalise(kind, at, stride, count, width, product.norm, eps, lines)
            at, stride_now, whole = lines, 4 * width, True
        else:
            stride_now, whole = stride, kind != BF16
        if whole:  # words of 32 bits, whatever is in them
            pack_rows(at, stride_now, count, to, tile, steps, 0)
        else:
            pack_rows(at, stride_now, count, to, tile, steps, 1)
        for k in range(8 * steps, width):
            for i in range(min(8, tile - r)):
                row = at + stride_now * min(i, count - 1)
                if whole:
                    x = element_at(row + 4 * k, 0)
                else:
                    x = element_at(row + 2 * k, 1)
                put_float(to + 4 * (k * tile + i), x)


@jit
def _store_rows(
    product: Product, sums: int, ups: int, num_rows: int, columns: int, out: int, spare: int
) -> None:
    """Some columns of a panel of sums into the result; `spare` has room for a line."""
    size = 4 if product.kind == F32 else 2
    whole = columns == _PANEL
    for r in range(num_rows):
        line, up = sums + 4 * _PANEL * r, ups + 4 * _PANEL * r
        at = out + product.out_stride * r
        to = at if whole else spare
        if product.mode == ADD and not whole:
            copy_bytes(spare, at, size * columns)
        if product.kind == F32:
            if product.mode == STORE:
                store_line(line, to, 0)
            elif product.mode == ADD:
                add_line(line, to, 0)
            else:
                gate_line(line, up, to, 0)
        elif product.mode == STORE:
            store_line(line, to, 1)
        elif product.mode == ADD:
            add_line(line, to, 1)
        else:
            gate_line(line, up, to, 1)
        if not whole:
            copy_bytes(at, spare, size * columns)


@jit
def _num_small(tile: int, rows: int) -> int:
    """How many tiles of a block are of the next smaller kind, so that few rows are computed in vain."""
    found, least = 0, -(-rows // _TILES[tile]) * _TILES[tile]
    if tile == _LARGEST:
        for count in (1, 2):
            left = max(0, rows - count * _TILES[tile - 1])
            total = count * _TILES[tile - 1] + -(-left // _TILES[tile]) * _TILES[tile]
            if total < least:
                found, least = count, total
    return found


@jit
def _multiply_block(
    product: Product,
    tile: int,
    first: int,
    rows: int,
    panels: Any,
    packed: int,
    sums: int,
    spare: int,
) -> None:
    """A block of rows, packed already, times panels [from, to)."""
    size = 2 if product.kind == BF16 else 4
    made = 4 if product.kind == F32 else 2  # bytes of an element of the result
    width, tile_rows, (panel, end) = product.width, _TILES[tile], panels
    num_small = _num_small(tile, rows)
    small_rows = _TILES[tile - 1] if num_small else tile_rows
    num_large = -(-(rows - num_small * small_rows) // tile_rows)
    large = num_large * tile_rows  # rows in large tiles
    padded = large + num_small * small_rows
    b_stride, c_stride = size * _PANEL * width, 4 * _PANEL * padded
    # A tile fetches its share of a later strip (of this panel or of the next: they follow each other)
    # between its own arithmetic: all at once, it would wait for its own.
    share = size * _PANEL * _STRIP // (num_large + num_small)
    gap = share * _UNROLLED // _STRIP
    unit = 2 if product.mode == GATE else 1  # panels that make one of the result
    while panel < end:
        group = _GROUPS[tile]
        if panel + max(group, unit) > end:
            group = 1
        several = max(group, unit)
        for p in range(several):
            bias = product.bias + 4 * _PANEL * (panel + p) if product.bias else 0
            fill_rows(sums + c_stride * p, bias, padded)
        for p in range(0, several, group):
            weight, into = product.weight + b_stride * (panel + p), sums + c_stride * p
            for k in range(0, width, _STRIP):
                depth, b = min(_STRIP, width - k), weight + size * _PANEL * k
                ahead = b + _AHEAD * size * _PANEL * _STRIP
                for t in range(num_large):
                    a = packed + 4 * tile_rows * (t * width + k)
                    c = into + 4 * _PANEL * tile_rows * t
                    _add_strip(product.kind, tile, group, a, b, b_stride, ahead, gap, c, c_stride,
                               depth)  # fmt: skip
                    ahead += share
                for t in range(num_small):
                    row = large + t * small_rows
                    a, c = packed + 4 * (row * width + small_rows * k), into + 4 * _PANEL * row
                    _add_strip(product.kind, tile - 1, group, a, b, b_stride, ahead, gap, c,
                               c_stride, depth)  # fmt: skip
                    ahead += share
        for p in range(0, several, unit):
            at = (panel + p) // unit * _PANEL
            out = product.out + product.out_stride * first + made * at
            columns = min(_PANEL, product.num_columns - at)
            line = sums + c_stride * p
            _store_rows(product, line, line + c_stride, rows, columns, out, spare)
        panel += several


@jit
def num_tasks(numbers: Any) -> Any:
    """Of a product."""
    return -(-numbers[4] // numbers[13]) * numbers[15]


@jit
def multiply(numbers: Any, eps: float, scratch: Any, counters: int, worker: int) -> Any:
    """Tasks of a product, each some panels of a block of rows, as long as there are any.

    Args:
        numbers: [16] int64: a `Product`, then block_rows, the tile's place in TILES, and pieces;
            block_rows is a multiple of the tile's rows, and each block is computed in so many
            pieces. No bit of the result depends on these three.
        eps: of the norm.
        scratch: [scratch_floats] float32, this worker's own.
        counters: address of those of this operation.
        worker: its number. The even ones begin with the first rows, the odd ones with the last: two
            that take turns would each pack all of them.

    Returns how many this worker has done.
    """
    product = Product(
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6],
        numbers[7], numbers[8], numbers[9], numbers[10], numbers[11], numbers[12],
    )  # fmt: skip
    block_rows, tile, pieces = numbers[13], numbers[14], numbers[15]
    tile_rows, total = _TILES[tile], num_tasks(numbers)
    packed = address(scratch)
    sums = packed + _aligned(4 * (block_rows * product.width + _ROUND))
    lines = sums + 4 * _PANEL * _GROUPS[0] * block_rows
    spare = lines + 4 * _ROUND * product.width
    unit = 2 if product.mode == GATE else 1
    num_units = product.num_panels // unit
    ready, done = -1, 0
    while True:
        task = take_from_end(counters, total, worker % 2)
        if task < 0:
            return done
        block, piece = task // pieces, task % pieces
        first = block * block_rows
        rows = min(block_rows, product.num_rows - first)
        if block != ready:
            ready = block
            num_small, r = _num_small(tile, rows), 0
            while r < rows:
                is_small = num_small and rows - r <= num_small * _TILES[tile - 1]
                size = _TILES[tile - 1] if is_small else tile_rows
                into, count = packed + 4 * product.width * r, min(size, rows - r)
                _pack(product, eps, first + r, count, into, size, lines)
                r += size
        panels = unit * (num_units * piece // pieces), unit * (num_units * (piece + 1) // pieces)
        _multiply_block(product, tile, first, rows, panels, packed, sums, spare)
        done += 1


def scratch_floats(block_rows: int, width: int) -> int:
    """Floats that one worker needs, whole lines of the cache."""
    packed, lines = block_rows * width + _ROUND, _ROUND * width
    sums = block_rows * GROUPS[0] * PANEL
    return (aligned(4 * packed) + aligned(4 * (sums + lines + PANEL))) // 4
