"""Matrix products on CPU whose rows cannot depend on each other, compiled by Numba.

Every element of a result is one fixed expression in float32: the bias, plus one sum per strip of
`STRIP` inner elements, in ascending order, each a chain of fused multiply-adds in ascending order.
Tiles, blocks, panels and threads decide what is computed when, never a bit of it. The loops are
those of Goto and van de Geijn (Anatomy of high-performance matrix multiplication, 2008): a strip of
a panel of weights stays in the first-level cache while the rows of a block pass by.

Weights lie in panels of `PANEL` columns, [panels, in_width, PANEL]. In bfloat16 they lie as pairs,
column j in the low half of a 32-bit word and column j + LANES in the high half, so that a shift and
a mask make float32 of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import njit, prange

from ramify.attention.compiled import compiled
from ramify.attention.simd import F32, element_at, put_float, take_next
from ramify.models import panel_tiles
from ramify.models.panel_tiles import (
    GROUPS,
    PANEL,
    TILES,
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
    pack_rows,
    store_line,
)

BLOCK_ROWS = 96  # a multiple of every tile: the packed rows of a strip stay in the second level
STRIP = 128  # shorter chains are nearer to the truth; 256 was no faster (measured, AVX2)
_PANEL, _STRIP, _GROUPS, _TILES = PANEL, STRIP, GROUPS, TILES  # globals are constants to Numba
_ROUND = 8  # rows are packed so many elements at a time

_jit = njit(nogil=True, error_model="numpy")


@_jit
def _add_strip(
    kind: int, tile: int, group: int, a: int, b: int, b_stride: int, c: int, c_stride: int, depth: int
) -> None:  # fmt: skip
    """The tile of that number for `group` panels: one, or as many as `GROUPS` says."""
    if kind == F32:
        if tile == 4:
            f32_4(a, b, b_stride, c, c_stride, depth)
        elif tile == 3:
            f32_3(a, b, b_stride, c, c_stride, depth)
        elif tile == 2:
            f32_2(a, b, b_stride, c, c_stride, depth)
        elif tile == 1 and group == 1:
            f32_1(a, b, b_stride, c, c_stride, depth)
        elif tile == 1:
            f32_wide_1(a, b, b_stride, c, c_stride, depth)
        elif group == 1:
            f32_0(a, b, b_stride, c, c_stride, depth)
        else:
            f32_wide_0(a, b, b_stride, c, c_stride, depth)
    elif tile == 4:
        bf16_4(a, b, b_stride, c, c_stride, depth)
    elif tile == 3:
        bf16_3(a, b, b_stride, c, c_stride, depth)
    elif tile == 2:
        bf16_2(a, b, b_stride, c, c_stride, depth)
    elif tile == 1 and group == 1:
        bf16_1(a, b, b_stride, c, c_stride, depth)
    elif tile == 1:
        bf16_wide_1(a, b, b_stride, c, c_stride, depth)
    elif group == 1:
        bf16_0(a, b, b_stride, c, c_stride, depth)
    else:
        bf16_wide_0(a, b, b_stride, c, c_stride, depth)


@_jit
def _pack(
    kind: int, source: int, stride: int, num_rows: int, width: int, into: int, tile: int
) -> None:
    """[width, tile] float32 from `num_rows` rows, at most `tile`; the others hold anything."""
    steps = width // 8
    for r in range((num_rows - 1) // 8 * 8, -1, -8):  # downwards: see `pack_rows`
        at, to, count = source + stride * r, into + 4 * r, min(8, num_rows - r)
        if kind == F32:
            pack_rows(at, stride, count, to, tile, steps, 0)
        else:
            pack_rows(at, stride, count, to, tile, steps, 1)
    for k in range(8 * steps, width):
        for r in range(tile):
            at = source + stride * min(r, num_rows - 1)
            x = element_at(at + 4 * k, 0) if kind == F32 else element_at(at + 2 * k, 1)
            put_float(into + 4 * (k * tile + r), x)


@_jit
def _store_rows(kind: int, sums: int, num_rows: int, columns: int, out: int, stride: int) -> None:
    """Some columns of a panel of sums into the result; strides in bytes."""
    for r in range(num_rows):
        line, at = sums + 4 * _PANEL * r, out + stride * r
        to = at if columns == _PANEL else line
        if kind == F32:
            if columns == _PANEL:
                store_line(line, at, 0)
            else:
                copy_bytes(at, line, 4 * columns)
        else:
            store_line(line, to, 1)
            if columns < _PANEL:
                copy_bytes(at, line, 2 * columns)


class Product(NamedTuple):
    """One product as the kernel sees it: addresses, sizes, strides in bytes."""

    kind: int  # of rows, weights, bias and result: F32 or BF16
    rows: int  # address of [num_rows, width]
    row_stride: int
    num_rows: int
    width: int
    weight: int  # address of the panels
    bias: int  # address of [num_panels * PANEL] float32, or 0
    out: int  # address of [num_rows, num_columns]
    out_stride: int
    num_columns: int


class Cut(NamedTuple):
    """Who computes what: no bit of the result depends on it."""

    block_rows: int  # a multiple of the tile's rows
    tile: int  # a place in TILES
    pieces: int  # runs of panels that are tasks of their own
    num_workers: int


@_jit
def _multiply_block(
    product: Product, cut: Cut, tile_rows: int, first: int, panels: Any, packed: int, sums: int
) -> None:
    """A block of rows, packed already, times some panels."""
    size = 4 if product.kind == F32 else 2
    width, (begin, end) = product.width, panels
    rows = min(cut.block_rows, product.num_rows - first)
    num_tiles = -(-rows // tile_rows)
    b_stride, c_stride = size * _PANEL * width, 4 * _PANEL * tile_rows * num_tiles
    panel = begin
    while panel < end:
        group = _GROUPS[cut.tile]
        group = group if panel + group <= end else 1
        for p in range(group):
            bias = product.bias + 4 * _PANEL * (panel + p) if product.bias else 0
            fill_rows(sums + c_stride * p, bias, tile_rows * num_tiles)
        weight = product.weight + b_stride * panel
        for k in range(0, width, _STRIP):
            depth, b = min(_STRIP, width - k), weight + size * _PANEL * k
            for t in range(num_tiles):
                a = packed + 4 * tile_rows * (t * width + k)
                c = sums + 4 * _PANEL * tile_rows * t
                _add_strip(product.kind, cut.tile, group, a, b, b_stride, c, c_stride, depth)
        for p in range(group):
            at = (panel + p) * _PANEL
            out = product.out + product.out_stride * first + size * at
            columns = min(_PANEL, product.num_columns - at)
            _store_rows(product.kind, sums + c_stride * p, rows, columns, out, product.out_stride)
        panel += group


def _multiply(product: Product, cut: Cut, scratch: Any, counter: Any) -> None:
    """rows @ weight.T + bias; workers take the next task as they become free.

    Args:
        scratch: [num_workers, scratch_floats] float32.
        counter: [1] int64, for the workers to share.
    """
    counter[0] = 0
    shared = counter.ctypes.data
    tile_rows = _TILES[cut.tile]
    num_panels = -(-product.num_columns // _PANEL)
    num_tasks = -(-product.num_rows // cut.block_rows) * cut.pieces
    for worker in prange(cut.num_workers):
        packed = scratch[worker].ctypes.data
        sums = packed + 4 * (cut.block_rows * product.width + _ROUND)
        ready = -1
        while True:
            task = take_next(shared)
            if task >= num_tasks:
                break
            block, piece = task // cut.pieces, task % cut.pieces
            first = block * cut.block_rows
            if block != ready:
                ready = block
                rows = min(cut.block_rows, product.num_rows - first)
                for r in range(0, rows, tile_rows):
                    source = product.rows + product.row_stride * (first + r)
                    into = packed + 4 * product.width * r
                    _pack(product.kind, source, product.row_stride, min(tile_rows, rows - r),
                          product.width, into, tile_rows)  # fmt: skip
            panels = num_panels * piece // cut.pieces, num_panels * (piece + 1) // cut.pieces
            _multiply_block(product, cut, tile_rows, first, panels, packed, sums)


def scratch_floats(block_rows: int, width: int) -> int:
    """Floats that one worker needs."""
    return block_rows * (width + GROUPS[0] * PANEL) + _ROUND


multiply = compiled(_multiply, __file__, panel_tiles.__file__)
