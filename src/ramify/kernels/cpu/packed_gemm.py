"""Batch-invariant GEMM over packed weights: blocked loops, norm prologue, epilogues.

Each element of the result is one fixed float32 expression: the bias, plus one sum per KC strip in
ascending order, each a chain of FMA in ascending k (VNNI: of dot products over KC words, which read
subnormals as zeros). Codes have the sums of `quantized_gemm`, tiles of bfloat16 those of `tile_gemm`.
Tiles, blocks and threads decide when an element is computed, never its bits.

The loops are those of Goto and van de Geijn (Anatomy of high-performance matrix multiplication, 2008)
in the names of BLIS: an NR x KC strip of a weight micro-panel stays in L1 while the MC rows of a
block pass by. `kernels.cpu` has the layouts of packed weights and rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ramify.kernels.cpu.abi import (
    ADD_RESIDUAL,
    BF16,
    BF16_TILES,
    BF16_VNNI,
    CODES4,
    CODES8,
    F32,
    SILU_MUL,
    block_size,
    is_tile_kind,
    round_up_to_cache_line,
)
from ramify.kernels.cpu.code_tiles import (
    PLANE_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    configure_code_tiles,
    release_code_tiles,
    words_to_planes,
)
from ramify.kernels.cpu.gemm_microkernels import (
    K_UNROLL,
    MR_TILES,
    NR,
    PANELS_PER_TILE,
    init_accumulators,
    num_edge_tiles,
    pack_a_rows,
    run_epilogue,
    run_microkernel,
)
from ramify.kernels.cpu.jit import data_address, jit
from ramify.kernels.cpu.norm_rope import norm_row
from ramify.kernels.cpu.op_records import GEMM, GemmOp
from ramify.kernels.cpu.quantized_gemm import (
    factor_stride,
    has_byte_rows,
    multiply_strips,
    multiply_tile_strips,
    quantized_scratch_floats,
    round_row,
    rows_per_tile,
    sum_groups,
    uses_tiles,
)
from ramify.kernels.cpu.quantized_microkernels import words_to_bytes
from ramify.kernels.cpu.simd import copy_bytes, load_element, load_i64, store_f32
from ramify.kernels.cpu.task_queue import next_task_from_either_end
from ramify.kernels.cpu.tile_gemm import (
    multiply_tiles,
    pack_row_tiles,
    packed_depth,
)

MC = 96  # a multiple of every MR; MC x KC packed rows stay in L2
PREFETCH_STRIPS = 4  # KC strips from what is read to what is prefetched
KC = 128  # shorter chains are more accurate; 256 was no faster (float32, AVX2)
_PACK_UNIT = 8  # rows, and elements of a row, that are packed at a time


class GemmArgs(NamedTuple):
    """A GEMM: addresses, sizes, strides in bytes."""

    kind: int  # of rows, norm and result: F32 or BF16
    weight_kind: int  # see `abi`
    # Epilogue, see `abi`. ADD_RESIDUAL: out += scale * sums; from SILU_MUL on, even panels gate odd ones.
    mode: int
    rows: int  # address of [num_rows, width]
    row_stride: int
    num_rows: int
    width: int  # K
    depth: int  # words of a packed row, see `packed_depth`
    norm: int  # address of the norm's weights [width], [2, width] for LAYER_NORM, or 0
    weight: int  # address of the micro-panels
    num_panels: int
    bias: int  # address of [num_panels * NR] float32, or 0
    out: int  # address of [num_rows, num_columns]
    out_stride: int
    num_columns: int
    # of the RMS norm's weights: storage kind of the rows, or F32 (see `rms_scale_row`); or LAYER_NORM
    norm_kind: int
    gather: int  # address of int64 [num_rows]: the place of each row in `rows`; 0: in order
    scale: float  # of ADD_RESIDUAL
    # of codes, see `op_records.GemmOp` and `quantized_gemm`
    group_words: int
    num_groups: int
    block_words: int  # see `abi.block_size`
    num_blocks: int
    scales: int
    scale_kind: int
    scale_stride: int
    scale_step: int
    mins: int
    factors: int
    levels: int
    code_tiles: int
    code_offset: int
    row_bits: int


class Buffers(NamedTuple):
    """Addresses of a worker's scratch."""

    packed: int  # rows of a block, tile after tile: [depth, MR] words each
    sums: int  # [rows, NR] of each panel
    normed: int  # [_PACK_UNIT, depth] words
    edge_row: int  # [NR]
    zeros: int  # [NR]
    # of codes: a row of x; scales and sums of x, tile after tile; scales of a strip
    row: int
    x_scales: int
    x_sums: int
    wide: int


_packed_depth, _is_tile_kind, _block_size = jit(packed_depth), jit(is_tile_kind), jit(block_size)
_round_up_to_cache_line = jit(round_up_to_cache_line)


@jit
def _norm_rows(gemm: GemmArgs, eps: float, source: int, num_rows: int, into: int) -> None:
    """into [num_rows, depth] = norm of rows at `source`; float32, or VNNI words."""
    target_kind = BF16 if gemm.weight_kind == BF16_VNNI else F32
    for r in range(num_rows):
        row, target = source + gemm.row_stride * r, into + 4 * gemm.depth * r
        norm_row(gemm.kind, row, gemm.width, gemm.norm, gemm.norm_kind, eps, target, target_kind)


@jit
def _round_row(
    gemm: GemmArgs, eps: float, index: int, words: int, scales: int, sums: int, tile: int, buffer: int
) -> None:  # fmt: skip
    """Round a row of x, normalised if there is a norm, to words of integers; see `quantized_gemm`."""
    row, kind = gemm.rows + gemm.row_stride * index, gemm.kind
    if gemm.gather:
        row = gemm.rows + gemm.row_stride * load_i64(gemm.gather + 8 * index)
    if gemm.norm:
        norm_row(kind, row, gemm.width, gemm.norm, gemm.norm_kind, eps, buffer, F32)
        row, kind = buffer, F32
    round_row(row, kind, gemm.width, gemm.row_bits, 2 * gemm.block_words, words, scales, 4 * tile)
    # Codes without levels start from their sums, which are zeros for an offset of 0.
    if gemm.mins or (gemm.weight_kind == CODES4 and not gemm.levels):
        sum_groups(gemm, words, scales, 4 * tile, sums, 4 * tile)


@jit
def _pack_a(
    gemm: GemmArgs, eps: float, first: int, row: int, num_rows: int, tile: int, buffers: Buffers
) -> None:
    """Pack (and gather, normalise or round) num_rows <= tile rows, from row `first` + `row` on.

    They become the tile [depth, tile] of `packed` at `row`: float32 or words. Columns beyond `num_rows`
    are undefined.
    """
    depth, stride, normed = gemm.depth, gemm.row_stride, buffers.normed
    # in memory, of a packed row: bytes are half as many
    words = depth // 2 if has_byte_rows(gemm) else depth
    into, first = buffers.packed + 4 * words * row, first + row
    x_scales = buffers.x_scales + 4 * gemm.num_blocks * row
    x_sums = buffers.x_sums + 4 * gemm.num_groups * row
    steps = words // 8
    for r in range((num_rows - 1) // 8 * 8, -1, -8):  # downwards: see `pack_a_rows`
        source, target, count = gemm.rows + stride * (first + r), into + 4 * r, min(8, num_rows - r)
        source_stride, is_word = stride, gemm.weight_kind != BF16
        if gemm.weight_kind >= CODES8:
            for i in range(count):
                scales, sums = x_scales + 4 * (r + i), x_sums + 4 * (r + i)
                _round_row(
                    gemm,
                    eps,
                    first + r + i,
                    normed + 4 * depth * i,
                    scales,
                    sums,
                    tile,
                    buffers.row,
                )
                if has_byte_rows(gemm):
                    words_to_bytes(normed + 4 * depth * i, gemm.width, gemm.weight_kind)
            source, source_stride = normed, 4 * depth
        elif gemm.gather:
            source_stride = (4 if gemm.kind == F32 else 2) * gemm.width
            for i in range(count):
                row = gemm.rows + stride * load_i64(gemm.gather + 8 * (first + r + i))
                copy_bytes(normed + source_stride * i, row, source_stride)
            source = normed
        elif gemm.norm:
            _norm_rows(gemm, eps, source, count, normed)
            source, source_stride, is_word = normed, 4 * depth, True
        if is_word:  # float32 or VNNI words: copied unchanged
            pack_a_rows(source, source_stride, count, target, tile, steps, F32)
        else:
            pack_a_rows(source, source_stride, count, target, tile, steps, BF16)
        for k in range(8 * steps, words):
            for i in range(min(8, tile - r)):
                row = source + source_stride * min(i, count - 1)
                if is_word:
                    x = load_element(row + 4 * k, F32)
                else:
                    x = load_element(row + 2 * k, BF16)
                store_f32(target + 4 * (k * tile + i), x)


@jit
def _pack_planes(gemm: GemmArgs, eps: float, first: int, rows: int, buffers: Buffers) -> None:
    """Round a block of rows and pack it as tiles of bytes; see `quantized_gemm.multiply_tile_strips`."""
    per_tile, tile_bytes = rows_per_tile(rows), 4 * gemm.depth * TILE_ROWS
    for r in range(rows):
        tile, place = r // per_tile, r % per_tile
        scales = buffers.x_scales + 4 * (gemm.num_blocks * TILE_ROWS * tile + place)
        sums = buffers.x_sums + 4 * (gemm.num_groups * TILE_ROWS * tile + place)
        _round_row(gemm, eps, first + r, buffers.normed, scales, sums, TILE_ROWS, buffers.row)
        planes = buffers.packed + tile_bytes * tile + TILE_BYTES * place
        words_to_planes(buffers.normed, gemm.row_bits, gemm.width, planes, 2 * PLANE_BYTES)


@jit
def _epilogue(
    gemm: GemmArgs, sums: int, ups: int, num_rows: int, columns: int, out: int, edge_row: int
) -> None:
    """Epilogue of a panel of sums: its first `columns` into `out`; `edge_row` is a buffer of NR."""
    out_bytes = 4 if gemm.kind == F32 else 2  # per element
    is_whole = columns == NR
    for r in range(num_rows):
        row, up_row = sums + 4 * NR * r, ups + 4 * NR * r
        out_row = out + gemm.out_stride * r
        target = out_row if is_whole else edge_row
        if gemm.mode == ADD_RESIDUAL and not is_whole:
            copy_bytes(edge_row, out_row, out_bytes * columns)
        run_epilogue(gemm.kind, gemm.mode, gemm.scale, row, up_row, target)
        if not is_whole:
            copy_bytes(out_row, edge_row, out_bytes * columns)


@jit
def _panels_per_result(mode: int) -> int:
    """Weight panels per panel of the result: a gated epilogue combines two."""
    return 2 if mode >= SILU_MUL else 1


@jit
def _panel_row_bytes(weight_kind: int) -> int:
    """Bytes of a panel for each word of a packed row."""
    if weight_kind == CODES4:
        return NR
    return NR * (2 if weight_kind in (BF16, CODES8) else 4)


@jit
def _gemm_block(
    gemm: GemmArgs,
    tile: int,
    first: int,
    rows: int,
    panels: Any,
    buffers: Buffers,
) -> None:
    """Multiply a block of packed rows with micro-panels [from, to), and run the epilogue."""
    packed, sums = buffers.packed, buffers.sums
    panel_row_bytes = _panel_row_bytes(gemm.weight_kind)
    out_bytes = 4 if gemm.kind == F32 else 2  # per element
    depth, tile_rows, (panel, end) = gemm.depth, MR_TILES[tile], panels
    num_edge = num_edge_tiles(tile, rows)
    edge_rows = MR_TILES[tile - 1] if num_edge else tile_rows
    num_full = -(-(rows - num_edge * edge_rows) // tile_rows)
    full_rows = num_full * tile_rows
    padded = full_rows + num_edge * edge_rows
    is_tiled, is_bf16_tiled = uses_tiles(gemm, rows), _is_tile_kind(gemm.weight_kind)
    if is_tiled or is_bf16_tiled:
        padded = -(-rows // TILE_ROWS) * TILE_ROWS
    b_stride, c_stride = panel_row_bytes * depth, 4 * NR * padded
    # Each tile prefetches a share of a later strip between its own arithmetic; all at once would
    # delay its own loads. Panels are contiguous: the strip may be one of the next panel.
    tile_prefetch = panel_row_bytes * KC // (num_full + num_edge)
    prefetch_stride = tile_prefetch * K_UNROLL // KC
    unit = _panels_per_result(gemm.mode)
    while panel < end:
        group = 1 if is_tiled or is_bf16_tiled else PANELS_PER_TILE[tile]
        if panel + max(group, unit) > end:
            group = 1
        num_panels = max(group, unit)
        if is_bf16_tiled:
            multiply_tiles(gemm, rows, panel, num_panels, packed, buffers.zeros, sums, c_stride)
        for p in range(0 if is_bf16_tiled else num_panels):
            bias = gemm.bias + 4 * NR * (panel + p) if gemm.bias else 0
            init_accumulators(sums + c_stride * p, bias, padded)
        for p in range(0, 0 if is_bf16_tiled else num_panels, group):
            weight, into = gemm.weight + b_stride * (panel + p), sums + c_stride * p
            if is_tiled:
                multiply_tile_strips(
                    gemm, rows, panel + p, packed, buffers.x_scales, buffers.x_sums, into, buffers.wide
                )  # fmt: skip
                continue
            if gemm.weight_kind >= CODES8:
                multiply_strips(
                    gemm, tile, group, panel + p, (num_full, num_edge), packed, buffers.x_scales,
                    buffers.x_sums, into, c_stride, buffers.wide,
                )  # fmt: skip
                continue
            for k in range(0, depth, KC):
                strip, b = min(KC, depth - k), weight + panel_row_bytes * k
                prefetch_at = b + PREFETCH_STRIPS * panel_row_bytes * KC
                for t in range(num_full):
                    a = packed + 4 * tile_rows * (t * depth + k)
                    c = into + 4 * NR * tile_rows * t
                    run_microkernel(gemm.weight_kind, tile, group, a, b, b_stride, prefetch_at, prefetch_stride,
                        c, c_stride, strip)  # fmt: skip
                    prefetch_at += tile_prefetch
                for t in range(num_edge):
                    row = full_rows + t * edge_rows
                    a, c = packed + 4 * (row * depth + edge_rows * k), into + 4 * NR * row
                    run_microkernel(gemm.weight_kind, tile - 1, group, a, b, b_stride, prefetch_at,
                        prefetch_stride, c, c_stride, strip)  # fmt: skip
                    prefetch_at += tile_prefetch
        for p in range(0, num_panels, unit):
            column = (panel + p) // unit * NR
            out = gemm.out + gemm.out_stride * first + out_bytes * column
            columns = min(NR, gemm.num_columns - column)
            gate = sums + c_stride * p
            _epilogue(gemm, gate, gate + c_stride, rows, columns, out, buffers.edge_row)
        panel += num_panels


@jit
def gemm_num_tasks(op: Any) -> Any:
    """Number of tasks of a GEMM op."""
    if op[GEMM.items]:
        num_items = load_i64(op[GEMM.num_items])
        return num_items * _splits_per_item(op, num_items)
    num_rows, block_rows, num_n_splits = (
        op[GEMM.num_rows],
        op[GEMM.block_rows],
        op[GEMM.num_n_splits],
    )
    return -(-num_rows // block_rows) * num_n_splits


@jit
def _splits_per_item(op: Any, num_items: int) -> Any:
    """Ranges of panels of each item of a grouped GEMM, for about `target_tasks` in all."""
    mode, num_panels, target_tasks = op[GEMM.mode], op[GEMM.num_panels], op[GEMM.num_n_splits]
    num_panel_groups = num_panels // _panels_per_result(mode)
    return max(1, min(num_panel_groups, -(-target_tasks // max(1, num_items))))


@jit
def _gemm_args(op: Any) -> GemmArgs:
    """A `GemmOp`'s arguments."""
    width, weight_kind, block = op[GEMM.width], op[GEMM.weight_kind], 2
    num_groups = num_blocks = 0
    depth = _packed_depth(width, weight_kind)
    if weight_kind >= CODES8:
        block = _block_size(op[GEMM.row_bits], op[GEMM.group])
        num_groups, num_blocks = -(-width // op[GEMM.group]), -(-width // block)
    return GemmArgs(
        op[GEMM.dtype], weight_kind, op[GEMM.mode], op[GEMM.x], op[GEMM.x_stride], op[GEMM.num_rows],
        width, depth, op[GEMM.norm], op[GEMM.weight], op[GEMM.num_panels], op[GEMM.bias], op[GEMM.out],
        op[GEMM.out_stride], op[GEMM.num_columns], op[GEMM.norm_kind], op[GEMM.gather],
        load_element(data_address(op) + 8 * GEMM.scale, F32), op[GEMM.group] // 2, num_groups, block // 2, num_blocks,
        op[GEMM.scales], op[GEMM.scale_kind], op[GEMM.scale_stride], op[GEMM.scale_step], op[GEMM.mins],
        op[GEMM.factors], op[GEMM.levels], op[GEMM.code_tiles], op[GEMM.code_offset], op[GEMM.row_bits],
    )  # fmt: skip


@jit
def _matrix(gemm: GemmArgs, index: int) -> GemmArgs:
    """The GEMM of one of the matrices that follow each other."""
    num_panels = gemm.num_panels
    weight = gemm.weight + _panel_row_bytes(gemm.weight_kind) * gemm.depth * num_panels * index
    bias = gemm.bias + 4 * NR * num_panels * index if gemm.bias else 0
    scales = gemm.scale_stride * num_panels * index
    factors = factor_stride(gemm) * num_panels * (2 if gemm.mins else 1) * index
    mins = gemm.mins + scales if gemm.mins else 0
    return GemmArgs(
        gemm.kind, gemm.weight_kind, gemm.mode, gemm.rows, gemm.row_stride, gemm.num_rows, gemm.width,
        gemm.depth, gemm.norm, weight, num_panels, bias, gemm.out, gemm.out_stride, gemm.num_columns,
        gemm.norm_kind, gemm.gather, gemm.scale, gemm.group_words, gemm.num_groups, gemm.block_words, gemm.num_blocks,
        gemm.scales + scales, gemm.scale_kind, gemm.scale_stride, gemm.scale_step,
        mins, gemm.factors + factors, gemm.levels, gemm.code_tiles, gemm.code_offset, gemm.row_bits,
    )  # fmt: skip


@jit
def _buffers(gemm: GemmArgs, block_rows: int, packed: int) -> Buffers:
    """A worker's scratch, as `gemm_scratch_floats` counts it."""
    if gemm.code_tiles or _is_tile_kind(gemm.weight_kind):
        block_rows = -(-block_rows // TILE_ROWS) * TILE_ROWS
    sums = packed + _round_up_to_cache_line(4 * (block_rows * gemm.depth + _PACK_UNIT))
    normed = sums + 4 * NR * PANELS_PER_TILE[0] * block_rows
    edge_row = normed + 4 * _PACK_UNIT * gemm.depth
    zeros = edge_row + 4 * NR
    row = zeros + 4 * NR
    init_accumulators(zeros, 0, 1)
    x_scales = row + 4 * gemm.width
    x_sums = x_scales + 4 * block_rows * gemm.num_blocks
    wide = x_sums + 4 * block_rows * gemm.num_groups
    return Buffers(packed, sums, normed, edge_row, zeros, row, x_scales, x_sums, wide)


@jit
def packed_gemm(op: Any, eps: float, scratch: Any, counters: int, worker: int) -> Any:
    """Take and run tasks of a GEMM until none is left; returns how many this worker did.

    A task is a block of rows times one of `num_n_splits` ranges of panels.

    Grouped: `items` is the address of items, four int64 each: the matrix, first row, rows, the tile's
    index. `num_items` is the address of their number. Panels and biases of the matrices follow each
    other; a block of rows is an item.

    Args:
        op: [OP_FIELDS] int64: a `GemmOp`.
        eps: of the norm.
        scratch: [gemm_scratch_floats] float32 of this worker.
        counters: address of the op's counters.
        worker: index of the worker. Even ones begin with the first rows, odd ones with the last: two
            workers that alternate would both pack all rows.
    """
    gemm = _gemm_args(op)
    block_rows, tile = op[GEMM.block_rows], op[GEMM.tile]
    num_n_splits, items = op[GEMM.num_n_splits], op[GEMM.items]
    if items:
        num_n_splits = _splits_per_item(op, load_i64(op[GEMM.num_items]))
    total = gemm_num_tasks(op)
    buffers = _buffers(gemm, block_rows, data_address(scratch))
    unit = _panels_per_result(gemm.mode)
    num_panel_groups = gemm.num_panels // unit
    matrix = gemm
    packed_block, done = -1, 0
    while True:
        task = next_task_from_either_end(counters, total, worker % 2)
        if task < 0:
            if gemm.code_tiles or gemm.weight_kind == BF16_TILES:
                release_code_tiles()
            return done
        block, n_split = task // num_n_splits, task % num_n_splits
        first = block * block_rows
        rows = min(block_rows, gemm.num_rows - first)
        if items:
            item = items + 8 * 4 * block
            matrix_index, first = load_i64(item), load_i64(item + 8)
            rows, tile = load_i64(item + 16), load_i64(item + 24)
            matrix = _matrix(gemm, matrix_index)
        if block != packed_block:
            packed_block = block
            num_edge, r = num_edge_tiles(tile, rows), 0
            if uses_tiles(gemm, rows):
                configure_code_tiles(rows_per_tile(rows), gemm.code_tiles)
                _pack_planes(gemm, eps, first, rows, buffers)
                r = rows
            elif _is_tile_kind(gemm.weight_kind):
                if gemm.weight_kind == BF16_TILES:
                    configure_code_tiles(rows_per_tile(rows), TILE_BYTES)
                pack_row_tiles(gemm, eps, first, rows, buffers.packed, buffers.normed)
                r = rows
            while r < rows:
                is_edge = num_edge and rows - r <= num_edge * MR_TILES[tile - 1]
                mr = MR_TILES[tile - 1] if is_edge else MR_TILES[tile]
                _pack_a(gemm, eps, first, r, min(mr, rows - r), mr, buffers)
                r += mr
        panels = (
            unit * (num_panel_groups * n_split // num_n_splits),
            unit * (num_panel_groups * (n_split + 1) // num_n_splits),
        )
        _gemm_block(matrix, tile, first, rows, panels, buffers)
        done += 1


def gemm_scratch_floats(block_rows: int, op: GemmOp) -> int:
    """Scratch of a worker in floats, a multiple of cache lines, for blocks of this many rows."""
    depth = packed_depth(op.width, op.weight_kind)
    if op.code_tiles or is_tile_kind(op.weight_kind):
        block_rows = -(-block_rows // TILE_ROWS) * TILE_ROWS
    packed, normed = block_rows * depth + _PACK_UNIT, _PACK_UNIT * depth
    sums = block_rows * PANELS_PER_TILE[0] * NR
    others = sums + normed + 2 * NR
    if op.group:
        others += quantized_scratch_floats(block_rows, op.width, op.group, op.row_bits)
    return (round_up_to_cache_line(4 * packed) + round_up_to_cache_line(4 * others)) // 4
