"""Matrix products on CPU whose rows cannot depend on each other, compiled by Numba.

Every element of a result is one fixed expression in float32: the bias, plus one sum per strip of
`KC` inner elements, in ascending order, each a chain of fused multiply-adds in ascending order;
in pairs, of `KC` words and dot products, which take subnormals for zeros.
Tiles, blocks, panels and threads decide what is computed when, never a bit of it. The loops are
those of Goto and van de Geijn (Anatomy of high-performance matrix multiplication, 2008): a strip of
a panel of weights stays in the first-level cache while the rows of a block pass by.

Weights lie in panels of `NR` columns, [panels, in_width, NR]. In bfloat16 column j lies in the
low half of a 32-bit word and column j + LANES in the high half, so that a shift and a mask make
float32 of them. Where the processor multiplies bfloat16 by itself (`simd.HAS_BF16_DOT`), a word is a pair of
inner elements instead, of rows and weights alike, and a product adds both to the sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ramify.kernels.cpu.abi import ADD_RESIDUAL, BF16, CACHE_LINE, F32, SILU_MUL, STORE
from ramify.kernels.cpu.gemm_microkernels import (
    BF16_VNNI,
    K_UNROLL,
    MR_TILES,
    NR,
    PANELS_PER_TILE,
    bf16_multi_panel_0,
    bf16_multi_panel_1,
    bf16_tile_0,
    bf16_tile_1,
    bf16_tile_2,
    bf16_tile_3,
    bf16_tile_4,
    copy_bytes,
    epilogue_add,
    epilogue_silu_mul,
    epilogue_store,
    f32_multi_panel_0,
    f32_multi_panel_1,
    f32_tile_0,
    f32_tile_1,
    f32_tile_2,
    f32_tile_3,
    f32_tile_4,
    init_accumulators,
    pack_a_rows,
    vnni_multi_panel_0,
    vnni_multi_panel_1,
    vnni_tile_0,
    vnni_tile_1,
    vnni_tile_2,
    vnni_tile_3,
    vnni_tile_4,
)
from ramify.kernels.cpu.jit import data_address, jit
from ramify.kernels.cpu.norm_rope import inverse_rms, rms_scale_row, sum_squares
from ramify.kernels.cpu.simd import load_element, store_f32
from ramify.kernels.cpu.task_queue import next_task_from_either_end

MC = 96  # a multiple of every tile: the packed rows of a strip stay in the second level
PREFETCH_STRIPS = 4  # strips between what is read and what is fetched
KC = 128  # shorter chains are nearer to the truth; 256 was no faster (float32, AVX2)
_NR, _KC, _PANELS_PER_TILE, _MR_TILES = (
    NR,
    KC,
    PANELS_PER_TILE,
    MR_TILES,
)  # globals are constants to Numba
_PREFETCH_STRIPS, _K_UNROLL, _BF16_VNNI = PREFETCH_STRIPS, K_UNROLL, BF16_VNNI
_PACK_UNIT = 8  # rows are packed so many elements at a time

_LARGEST = len(MR_TILES) - 1


class GemmArgs(NamedTuple):
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
    bias: int  # address of [num_panels * NR] float32, or 0
    out: int  # address of [num_rows, num_columns]
    out_stride: int
    num_columns: int


def round_up_to_cache_line(num_bytes: int) -> int:
    """Whole lines of the cache, so that no vector lies across two of them."""
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE


_round_up_to_cache_line = jit(round_up_to_cache_line)


@jit
def _run_microkernel(
    kind: int, tile: int, group: int, a: int, b: int, b_stride: int, prefetch_at: int, prefetch_stride: int, c: int,
    c_stride: int, depth: int,
) -> None:  # fmt: skip
    """The tile of that number for `group` panels: one, or as many as `PANELS_PER_TILE` says."""
    if kind == F32:
        if tile == 4:
            f32_tile_4(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif tile == 3:
            f32_tile_3(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif tile == 2:
            f32_tile_2(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif tile == 1 and group == 1:
            f32_tile_1(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif tile == 1:
            f32_multi_panel_1(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif group == 1:
            f32_tile_0(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        else:
            f32_multi_panel_0(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
    elif kind == _BF16_VNNI:
        if tile == 4:
            vnni_tile_4(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif tile == 3:
            vnni_tile_3(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif tile == 2:
            vnni_tile_2(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif tile == 1 and group == 1:
            vnni_tile_1(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif tile == 1:
            vnni_multi_panel_1(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        elif group == 1:
            vnni_tile_0(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
        else:
            vnni_multi_panel_0(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
    elif tile == 4:
        bf16_tile_4(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
    elif tile == 3:
        bf16_tile_3(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
    elif tile == 2:
        bf16_tile_2(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
    elif tile == 1 and group == 1:
        bf16_tile_1(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
    elif tile == 1:
        bf16_multi_panel_1(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
    elif group == 1:
        bf16_tile_0(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)
    else:
        bf16_multi_panel_0(a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth)


@jit
def _rms_norm_rows(
    kind: int, source: int, stride: int, num_rows: int, width: int, norm: int, eps: float, into: int
) -> None:
    """Some rows over their root mean square, times the weights at `norm`, to [num_rows, width].

    In float32, but for pairs, which stay pairs.
    """
    for r in range(num_rows):
        row, to = source + stride * r, into + 4 * width * r
        if kind == F32:
            scale = inverse_rms(sum_squares(row, width, 0), width, eps)
            rms_scale_row(row, norm, to, width, scale, 0, 0)
        elif kind == _BF16_VNNI:
            scale = inverse_rms(sum_squares(row, 2 * width, 1), 2 * width, eps)
            rms_scale_row(row, norm, to, 2 * width, scale, 1, 1)
        else:
            scale = inverse_rms(sum_squares(row, width, 1), width, eps)
            rms_scale_row(row, norm, to, width, scale, 1, 0)


@jit
def _pack_a(
    gemm: GemmArgs, eps: float, first: int, num_rows: int, into: int, tile: int, lines: int
) -> None:
    """[width, tile] float32 or pairs from at most `tile` rows, normalised if so wanted.

    The others hold anything.
    """
    kind, width, stride = gemm.kind, gemm.width, gemm.row_stride
    steps = width // 8
    for r in range((num_rows - 1) // 8 * 8, -1, -8):  # downwards: see `pack_a_rows`
        at, to, count = gemm.rows + stride * (first + r), into + 4 * r, min(8, num_rows - r)
        if gemm.norm:
            _rms_norm_rows(kind, at, stride, count, width, gemm.norm, eps, lines)
            at, stride_now, whole = lines, 4 * width, True
        else:
            stride_now, whole = stride, kind != BF16
        if whole:  # words of 32 bits, whatever is in them
            pack_a_rows(at, stride_now, count, to, tile, steps, 0)
        else:
            pack_a_rows(at, stride_now, count, to, tile, steps, 1)
        for k in range(8 * steps, width):
            for i in range(min(8, tile - r)):
                row = at + stride_now * min(i, count - 1)
                if whole:
                    x = load_element(row + 4 * k, 0)
                else:
                    x = load_element(row + 2 * k, 1)
                store_f32(to + 4 * (k * tile + i), x)


@jit
def _epilogue(
    gemm: GemmArgs, sums: int, ups: int, num_rows: int, columns: int, out: int, spare: int
) -> None:
    """Some columns of a panel of sums into the result; `spare` has room for a line."""
    size = 4 if gemm.kind == F32 else 2
    whole = columns == _NR
    for r in range(num_rows):
        line, up = sums + 4 * _NR * r, ups + 4 * _NR * r
        at = out + gemm.out_stride * r
        to = at if whole else spare
        if gemm.mode == ADD_RESIDUAL and not whole:
            copy_bytes(spare, at, size * columns)
        if gemm.kind == F32:
            if gemm.mode == STORE:
                epilogue_store(line, to, 0)
            elif gemm.mode == ADD_RESIDUAL:
                epilogue_add(line, to, 0)
            else:
                epilogue_silu_mul(line, up, to, 0)
        elif gemm.mode == STORE:
            epilogue_store(line, to, 1)
        elif gemm.mode == ADD_RESIDUAL:
            epilogue_add(line, to, 1)
        else:
            epilogue_silu_mul(line, up, to, 1)
        if not whole:
            copy_bytes(at, spare, size * columns)


@jit
def _num_edge_tiles(tile: int, rows: int) -> int:
    """How many tiles of a block are of the next smaller kind, so that few rows are computed in vain."""
    found, least = 0, -(-rows // _MR_TILES[tile]) * _MR_TILES[tile]
    if tile == _LARGEST:
        for count in (1, 2):
            left = max(0, rows - count * _MR_TILES[tile - 1])
            total = count * _MR_TILES[tile - 1] + -(-left // _MR_TILES[tile]) * _MR_TILES[tile]
            if total < least:
                found, least = count, total
    return found


@jit
def _gemm_block(
    gemm: GemmArgs,
    tile: int,
    first: int,
    rows: int,
    panels: Any,
    packed: int,
    sums: int,
    spare: int,
) -> None:
    """A block of rows, packed already, times panels [from, to)."""
    size = 2 if gemm.kind == BF16 else 4
    made = 4 if gemm.kind == F32 else 2  # bytes of an element of the result
    width, tile_rows, (panel, end) = gemm.width, _MR_TILES[tile], panels
    num_small = _num_edge_tiles(tile, rows)
    small_rows = _MR_TILES[tile - 1] if num_small else tile_rows
    num_large = -(-(rows - num_small * small_rows) // tile_rows)
    large = num_large * tile_rows  # rows in large tiles
    padded = large + num_small * small_rows
    b_stride, c_stride = size * _NR * width, 4 * _NR * padded
    # A tile fetches its share of a later strip (of this panel or of the next: they follow each other)
    # between its own arithmetic: all at once, it would wait for its own.
    share = size * _NR * _KC // (num_large + num_small)
    prefetch_stride = share * _K_UNROLL // _KC
    unit = 2 if gemm.mode == SILU_MUL else 1  # panels that make one of the result
    while panel < end:
        group = _PANELS_PER_TILE[tile]
        if panel + max(group, unit) > end:
            group = 1
        several = max(group, unit)
        for p in range(several):
            bias = gemm.bias + 4 * _NR * (panel + p) if gemm.bias else 0
            init_accumulators(sums + c_stride * p, bias, padded)
        for p in range(0, several, group):
            weight, into = gemm.weight + b_stride * (panel + p), sums + c_stride * p
            for k in range(0, width, _KC):
                depth, b = min(_KC, width - k), weight + size * _NR * k
                prefetch_at = b + _PREFETCH_STRIPS * size * _NR * _KC
                for t in range(num_large):
                    a = packed + 4 * tile_rows * (t * width + k)
                    c = into + 4 * _NR * tile_rows * t
                    _run_microkernel(gemm.kind, tile, group, a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride,
                               depth)  # fmt: skip
                    prefetch_at += share
                for t in range(num_small):
                    row = large + t * small_rows
                    a, c = packed + 4 * (row * width + small_rows * k), into + 4 * _NR * row
                    _run_microkernel(gemm.kind, tile - 1, group, a, b, b_stride, prefetch_at, prefetch_stride, c,
                               c_stride, depth)  # fmt: skip
                    prefetch_at += share
        for p in range(0, several, unit):
            at = (panel + p) // unit * _NR
            out = gemm.out + gemm.out_stride * first + made * at
            columns = min(_NR, gemm.num_columns - at)
            line = sums + c_stride * p
            _epilogue(gemm, line, line + c_stride, rows, columns, out, spare)
        panel += several


@jit
def gemm_num_tasks(op: Any) -> Any:
    """Of a product."""
    return -(-op[4] // op[13]) * op[15]


@jit
def packed_gemm(op: Any, eps: float, scratch: Any, counters: int, worker: int) -> Any:
    """Tasks of a product, each some panels of a block of rows, as long as there are any.

    Args:
        op: [16] int64: a `GemmArgs`, then block_rows, the tile's place in MR_TILES, and num_n_splits;
            block_rows is a multiple of the tile's rows, and each block is computed in so many
            pieces. No bit of the result depends on these three.
        eps: of the norm.
        scratch: [gemm_scratch_floats] float32, this worker's own.
        counters: address of those of this operation.
        worker: its number. The even ones begin with the first rows, the odd ones with the last: two
            that take turns would each pack all of them.

    Returns how many this worker has done.
    """
    product = GemmArgs(
        op[0], op[1], op[2], op[3], op[4], op[5], op[6],
        op[7], op[8], op[9], op[10], op[11], op[12],
    )  # fmt: skip
    block_rows, tile, num_n_splits = op[13], op[14], op[15]
    tile_rows, total = _MR_TILES[tile], gemm_num_tasks(op)
    packed = data_address(scratch)
    sums = packed + _round_up_to_cache_line(4 * (block_rows * product.width + _PACK_UNIT))
    lines = sums + 4 * _NR * _PANELS_PER_TILE[0] * block_rows
    spare = lines + 4 * _PACK_UNIT * product.width
    unit = 2 if product.mode == SILU_MUL else 1
    num_panel_groups = product.num_panels // unit
    ready, done = -1, 0
    while True:
        task = next_task_from_either_end(counters, total, worker % 2)
        if task < 0:
            return done
        block, n_split = task // num_n_splits, task % num_n_splits
        first = block * block_rows
        rows = min(block_rows, product.num_rows - first)
        if block != ready:
            ready = block
            num_small, r = _num_edge_tiles(tile, rows), 0
            while r < rows:
                is_small = num_small and rows - r <= num_small * _MR_TILES[tile - 1]
                size = _MR_TILES[tile - 1] if is_small else tile_rows
                into, count = packed + 4 * product.width * r, min(size, rows - r)
                _pack_a(product, eps, first + r, count, into, size, lines)
                r += size
        panels = (
            unit * (num_panel_groups * n_split // num_n_splits),
            unit * (num_panel_groups * (n_split + 1) // num_n_splits),
        )
        _gemm_block(product, tile, first, rows, panels, packed, sums, spare)
        done += 1


def gemm_scratch_floats(block_rows: int, width: int) -> int:
    """Floats that one worker needs, whole lines of the cache."""
    packed, lines = block_rows * width + _PACK_UNIT, _PACK_UNIT * width
    sums = block_rows * PANELS_PER_TILE[0] * NR
    return (
        round_up_to_cache_line(4 * packed) + round_up_to_cache_line(4 * (sums + lines + NR))
    ) // 4
