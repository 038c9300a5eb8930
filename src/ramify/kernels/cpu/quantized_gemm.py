"""Strips of the packed GEMM over weights of 8- or 4-bit integers: rows of x rounded to integers, sums by group.

Each element of the result is the bias, then for each group of weights in ascending order one FMA of the
exact integer sum with the product of two scales, and with offsets one FMA of the offset with the sum of x.
Rows of x have a scale for each block of elements, max |x| / 32767 (of 8 bits: / 127), from that row alone.

`models.ops.cpu.quantized_panels` writes the panels; `kernels.cpu` has their layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramify.kernels.cpu.abi import (
    BF16,
    BLOCK,
    CACHE_LINE,
    CODES8,
    F16,
    F32,
    FACTOR_SPAN,
    INT8,
    block_size,
)
from ramify.kernels.cpu.code_tiles import (
    BUFFER_BYTES,
    PLANE_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    run_tile_groups,
    widen_codes,
)
from ramify.kernels.cpu.gemm_microkernels import MR_TILES, NR, PANELS_PER_TILE
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.quantized_microkernels import (
    HAS_BYTE_DOT,
    absolute_maximum,
    multiply_scales,
    round_to_words,
    run_quantized_microkernel,
    store_i32,
    sum_words,
    widen_scales,
)
from ramify.kernels.cpu.simd import load_element, store_f32

# of a panel between two tiles of rows: whole blocks and groups, and those of one factor
STRIP_WORDS = BLOCK
assert 2 * STRIP_WORDS == FACTOR_SPAN
MIN_TILE_ROWS, MIN_TILE_ROWS_OF_8 = 8, 16  # fewer rows are as fast without tiles
# Blocks whose numbers are all smaller count as zeros: the factor of the rounding would overflow.
SMALLEST = np.float32(2.0**-100)
_LARGEST_OF_8, _LARGEST_OF_16 = np.float32(127), np.float32(32767)


@jit
def round_row(
    row: int,
    kind: int,
    width: int,
    bits: int,
    block: int,
    words: int,
    scales: int,
    scale_stride: int,
) -> None:
    """Round a row to integers of 8 or 16 bits, as words of int16, with a scale for each block.

    A block with a number that is not finite has a scale that is not finite.

    Args:
        row: address of [width] of kind F32 or BF16; `width` is a multiple of 8.
        block: elements, see `abi.block_size`.
        words: address of [width / 2]; may be `row` if that is float32.
        scales: where the first scale goes; `scale_stride` bytes from block to block.
    """
    limit = _LARGEST_OF_8 if bits == 8 else _LARGEST_OF_16
    for begin in range(0, width, block):
        count = min(block, width - begin)
        if kind == F32:
            largest = absolute_maximum(row + 4 * begin, count, F32)
        else:
            largest = absolute_maximum(row + 2 * begin, count, BF16)
        factor = np.float32(0.0)
        if largest >= SMALLEST:
            factor = limit / largest
        if kind == F32:
            round_to_words(row + 4 * begin, count, factor, words + 2 * begin, F32)
        else:
            round_to_words(row + 2 * begin, count, factor, words + 2 * begin, BF16)
        # 0 for small numbers, NaN and infinity as they are
        scale = np.float32(0.0) if largest < SMALLEST else largest / limit
        store_f32(scales + scale_stride * (begin // block), scale)


@jit
def sum_groups(
    gemm: Any, words: int, scales: int, scale_stride: int, sums: int, sum_stride: int
) -> None:
    """Sums of a rounded row by group of weights, as `run_quantized_microkernel` takes them.

    Args:
        words, scales: see `round_row`.
        sums: where the first goes; `sum_stride` bytes from group to group.
    """
    for group in range(gemm.num_groups):
        begin = group * gemm.group_words
        count = min(gemm.group_words, gemm.depth - begin)
        total = sum_words(words + 4 * begin, count)
        at = sums + sum_stride * group
        if gemm.mins:
            scale = load_element(scales + scale_stride * (begin // gemm.block_words), F32)
            store_f32(at, np.float32(total) * scale)
        else:
            store_i32(at, total * gemm.code_offset)


@jit
def has_byte_rows(gemm: Any) -> bool:
    """Whether packed rows are bytes, x + 128, that `vpdpbusd` multiplies: half as long."""
    return HAS_BYTE_DOT and gemm.row_bits == 8


@jit
def _block_shift(gemm: Any) -> int:
    """How often a group doubles to a block."""
    shift = 0
    while gemm.group_words << shift < gemm.block_words:
        shift += 1
    return shift


@jit
def factor_stride(gemm: Any) -> int:
    """Bytes of a panel's factors of scales, or of offsets, which follow."""
    spans: int = gemm.width // FACTOR_SPAN
    return 2 * NR * spans


@jit
def _strip_scales(
    gemm: Any, panel: int, num_panels: int, first_group: int, num_groups: int, wide: int
) -> Any:
    """Addresses of float32 scales and mins of some groups; bytes from panel to panel and group to group."""
    start = gemm.scale_stride * panel + gemm.scale_step * first_group
    scales, mins = gemm.scales + start, gemm.mins + start if gemm.mins else 0
    if gemm.scale_kind == F32:
        return scales, mins, gemm.scale_stride, gemm.scale_step
    stride = 4 * NR * num_groups
    wide_mins = wide + stride * num_panels
    if gemm.scale_kind == INT8:
        # a strip has FACTOR_SPAN elements
        own = factor_stride(gemm)
        factors = gemm.factors + 2 * NR * (2 * first_group * gemm.group_words // FACTOR_SPAN)
        for p in range(num_panels):
            at = factors + own * (panel + p) * (2 if mins else 1)
            begin = gemm.scale_stride * p
            multiply_scales(scales + begin, num_groups, at, wide + stride * p)
            if mins:
                multiply_scales(mins + begin, num_groups, at + own, wide_mins + stride * p)
        return wide, wide_mins if mins else 0, stride, 4 * NR
    for p in range(num_panels):
        widen_scales(scales + gemm.scale_stride * p, NR * num_groups, wide + stride * p, F16)
        if mins:
            widen_scales(mins + gemm.scale_stride * p, NR * num_groups, wide_mins + stride * p, F16)
    return wide, wide_mins if mins else 0, stride, 4 * NR


@jit
def multiply_strips(
    gemm: Any, tile: int, num_panels: int, panel: int, rows: Any, packed: int, x_scales: int, x_sums: int,
    into: int, c_stride: int, wide: int,
) -> None:  # fmt: skip
    """Add the products of a block of rows and of `num_panels` panels to `into`, all strips.

    Args:
        tile: index in MR_TILES of the first tiles; those behind have the next smaller MR.
        rows: number of tiles of either size.
        packed, x_scales, x_sums: addresses of the block's words, scales and sums, tile after tile.
        into: sums [rows, NR] of the first panel, `c_stride` bytes from panel to panel.
        wide: buffer for the scales and mins of a strip.
    """
    num_full, num_edge = rows
    depth, group_words = gemm.depth, gemm.group_words
    code_bytes = NR * (2 if gemm.weight_kind == CODES8 else 1)  # of a word
    b_stride, block_shift = code_bytes * depth, _block_shift(gemm)
    is_bytes = has_byte_rows(gemm)
    word_bytes = 2 if is_bytes else 4  # of a packed row, for each word of int16
    for begin in range(0, depth, STRIP_WORDS):
        strip = min(STRIP_WORDS, depth - begin)
        whole = strip // group_words
        rest, first_group = strip - whole * group_words, begin // group_words
        scales, mins, stride, step = _strip_scales(
            gemm, panel, num_panels, first_group, whole + (1 if rest else 0), wide
        )
        b = gemm.weight + b_stride * panel + code_bytes * begin
        row = 0
        for t in range(num_full + num_edge):
            size = tile if t < num_full else tile - 1
            mr = MR_TILES[size]
            a = packed + word_bytes * (row * depth + mr * begin)
            scale_row = x_scales + 4 * (row * gemm.num_blocks + mr * (begin // gemm.block_words))
            sum_row = x_sums + 4 * (row * gemm.num_groups + mr * first_group)
            c = into + 4 * NR * row
            run_quantized_microkernel(
                gemm.weight_kind, is_bytes, size, num_panels, a, b, b_stride, c, c_stride, whole, group_words,
                scales, mins, stride, step, scale_row, block_shift, sum_row, gemm.levels,
            )  # fmt: skip
            if rest:
                done = whole * group_words
                run_quantized_microkernel(
                    gemm.weight_kind, is_bytes, size, num_panels, a + word_bytes * mr * done,
                    b + code_bytes * done, b_stride, c, c_stride, 1, rest, scales + step * whole,
                    mins + step * whole if mins else 0, stride, step,
                    scale_row + 4 * mr * (done // gemm.block_words), block_shift, sum_row + 4 * mr * whole,
                    gemm.levels,
                )  # fmt: skip
            row += mr


@jit
def uses_tiles(gemm: Any, rows: int) -> bool:
    """Whether a block of rows is multiplied by tiles of int8: the same bits."""
    least = MIN_TILE_ROWS_OF_8 if gemm.row_bits == 8 else MIN_TILE_ROWS
    return gemm.code_tiles != 0 and rows >= least


@jit
def rows_per_tile(rows: int) -> int:
    """Rows of each tile of a block: all alike, the last of which may be undefined."""
    return -(-rows // -(-rows // TILE_ROWS))


@jit
def multiply_tile_strips(
    gemm: Any, rows: int, panel: int, packed: int, x_scales: int, x_sums: int, into: int, wide: int
) -> None:
    """`multiply_strips` by tiles of int8, for one panel.

    Args:
        rows: of the block.
        packed: address of planes [row tile, K / TILE_BYTES, high or low, TILE_ROWS, TILE_BYTES].
    """
    depth, group_words = gemm.depth, gemm.group_words
    per_tile, num_tiles = rows_per_tile(rows), -(-rows // TILE_ROWS)
    code_bytes = NR * (2 if gemm.weight_kind == CODES8 else 1)  # of a word
    tile_bytes = 4 * depth * TILE_ROWS
    block_shift = _block_shift(gemm)
    buffer = -(-(wide + 4 * _wide_floats(2 * group_words)) // CACHE_LINE) * CACHE_LINE
    codes = buffer + BUFFER_BYTES
    for begin in range(0, depth, STRIP_WORDS):
        strip = min(STRIP_WORDS, depth - begin)
        whole = strip // group_words
        rest, first_group = strip - whole * group_words, begin // group_words
        scales, mins, _, step = _strip_scales(
            gemm, panel, 1, first_group, whole + (1 if rest else 0), wide
        )
        b = gemm.weight + code_bytes * (depth * panel + begin)
        if gemm.weight_kind != CODES8:
            widen_codes(b, strip, codes, gemm.levels)
            b = codes
        for t in range(num_tiles):
            a = packed + tile_bytes * t + 2 * PLANE_BYTES * (2 * begin // TILE_BYTES)
            scale_row = x_scales + 4 * TILE_ROWS * (t * gemm.num_blocks + begin // gemm.block_words)
            sum_row = x_sums + 4 * TILE_ROWS * (t * gemm.num_groups + first_group)
            c = into + 4 * NR * per_tile * t
            run_tile_groups(
                gemm.row_bits, a, b, c, per_tile, whole, 2 * group_words, gemm.code_tiles, scales, mins, step, scale_row,
                block_shift, sum_row, buffer,
            )  # fmt: skip
            if rest:
                done = whole * group_words
                run_tile_groups(
                    gemm.row_bits, a + 2 * PLANE_BYTES * (2 * done // TILE_BYTES), b + 2 * NR * done, c,
                    per_tile, 1, 2 * rest, gemm.code_tiles, scales + step * whole,
                    mins + step * whole if mins else 0, step,
                    scale_row + 4 * TILE_ROWS * (done // gemm.block_words), block_shift,
                    sum_row + 4 * TILE_ROWS * whole, buffer,
                )  # fmt: skip


def wide_floats(group: int) -> int:
    """Floats of the scales and mins of a strip of the most panels."""
    return 2 * PANELS_PER_TILE[0] * NR * -(-2 * STRIP_WORDS // group)


_wide_floats = jit(wide_floats)


def quantized_scratch_floats(block_rows: int, width: int, group: int, row_bits: int) -> int:
    """Scratch in floats beside that of other weights: a row, scales and sums of x, scales of a strip."""
    sums = block_rows * (-(-width // block_size(row_bits, group)) + -(-width // group))
    tiles = CACHE_LINE + BUFFER_BYTES + 2 * STRIP_WORDS * NR
    return width + sums + wide_floats(group) + tiles // 4
