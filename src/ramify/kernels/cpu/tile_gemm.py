"""Blocks of the packed GEMM by tiles of bfloat16: rows packed as tiles of A, micro-panels as tiles of B.

Each element of the result is one chain over K: the bias, then for each 32 elements the sum that
`tile_microkernels` defines; K is filled up with zeros. So neither strips nor tiles of rows change a bit.
"""

from __future__ import annotations

from typing import Any

from ramify.kernels.cpu.abi import BF16, BF16_TILES, BF16_TILES_EMULATED, CACHE_LINE, F32
from ramify.kernels.cpu.code_tiles import TILE_BYTES, TILE_ROWS
from ramify.kernels.cpu.gemm_microkernels import NR
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.norm_rope import norm_row
from ramify.kernels.cpu.quantized_gemm import rows_per_tile
from ramify.kernels.cpu.simd import load_i64
from ramify.kernels.cpu.tile_microkernels import (
    B_STEP,
    TILE_WORDS,
    copy_to_tiles,
    run_tile_microkernel,
)

STRIP_STEPS = 8  # tiles of K whose micro-panel stays in L1 while the rows of a block pass by
PACKED_BYTES = 1 << 20  # of the rows of a block
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 96, 256
PREFETCH_STRIPS = 4  # from what is read to what is prefetched


def max_block_rows(width: int) -> int:
    """Rows of a block: the packed rows stay in L2 beside a strip of weights."""
    rows = PACKED_BYTES // (2 * width) // (2 * TILE_ROWS) * 2 * TILE_ROWS
    return max(MIN_BLOCK_ROWS, min(MAX_BLOCK_ROWS, rows))


def packed_depth(width: int, weight_kind: int) -> int:
    """Words of a packed row: K; BF16_VNNI and codes: K / 2; tiles of bfloat16: filled up to whole tiles."""
    if weight_kind in (BF16_TILES, BF16_TILES_EMULATED):
        return -(-width // (2 * TILE_WORDS)) * TILE_WORDS
    return width if weight_kind in (F32, BF16) else width // 2


@jit
def pack_row_tiles(
    gemm: Any, eps: float, first: int, rows: int, packed: int, normed: int
) -> None:  # fmt: skip
    """Pack (and gather or normalise) a block of rows to tiles of A: [row tile, step of K, row, 32].

    Args:
        normed: a buffer of a row.
    """
    per_tile = rows_per_tile(rows)
    for r in range(rows):
        place = load_i64(gemm.gather + 8 * (first + r)) if gemm.gather else first + r
        row = gemm.rows + gemm.row_stride * place
        if gemm.norm:
            norm_row(gemm.kind, row, gemm.width, gemm.norm, gemm.norm_kind, eps, normed, BF16)
            row = normed
        tile_bytes = 4 * gemm.depth * per_tile
        into = packed + tile_bytes * (r // per_tile) + TILE_BYTES * (r % per_tile)
        copy_to_tiles(row, 2 * gemm.width, into, TILE_BYTES * per_tile)


@jit
def multiply_tiles(
    gemm: Any, rows: int, panel: int, num_panels: int, packed: int, zeros: int, into: int, c_stride: int
) -> None:  # fmt: skip
    """into[panels] = bias + products of a packed block of rows and of `num_panels` panels.

    Args:
        zeros: address of NR floats.
        into: sums [row tiles * rows_per_tile, NR] of the first panel, `c_stride` bytes from panel to panel.
    """
    per_tile, tiles, steps = rows_per_tile(rows), -(-rows // TILE_ROWS), gemm.depth // TILE_WORDS
    a_stride, b_stride, a_step = (
        4 * gemm.depth * per_tile,
        4 * NR * gemm.depth,
        TILE_BYTES * per_tile,
    )
    strip = steps if tiles <= 2 else STRIP_STEPS
    lines = B_STEP // CACHE_LINE // (-(-tiles // 2))
    bias, bias_stride = zeros, 0
    if gemm.bias:
        bias, bias_stride = gemm.bias + 4 * NR * panel, 4 * NR
    # One panel after the other, however few rows: a single stream of weights, which the prefetch keeps ahead of.
    for p in range(num_panels):
        for begin in range(0, steps, strip):
            count = min(strip, steps - begin)
            b = gemm.weight + b_stride * (panel + p) + B_STEP * begin
            fetch = b + B_STEP * STRIP_STEPS * PREFETCH_STRIPS
            for t in range(0, tiles, 2):
                a = packed + a_stride * t + a_step * begin
                c = into + c_stride * p + 4 * NR * per_tile * t
                start, start_row = c, 4 * NR
                if begin == 0:
                    start, start_row = bias + bias_stride * p, 0
                run_tile_microkernel(
                    gemm.weight_kind, min(2, tiles - t), a, per_tile, a_stride, b, start, start_row, c, count,
                    fetch, lines,
                )  # fmt: skip
                fetch += CACHE_LINE * lines * count
