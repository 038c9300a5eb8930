"""Q·Kᵀ and P·V over a packed KV block by tiles of bfloat16 (AMX), or by their emulation; the mode that goes with it.

A score is one chain over the elements of a key, 32 at a time, an element of the output one over the
keys of a block, 32 at a time from the block's beginning on: `tile_microkernels` has the sum of 32.
Few rows that read K/V in place have the same sums by FMA (`decode_microkernels_tiles`), which needs
the mode of `flush_subnormals`. So neither rows nor tiles change a bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu import targets
from ramify.kernels.cpu.abi import BF16_TILES
from ramify.kernels.cpu.code_tiles import HAS_TILES, TILE_BYTES, TILE_ROWS
from ramify.kernels.cpu.gemm_microkernels import NR
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.simd import (
    LANES,
    TILE_N,
    TILE_N_VECTORS,
    broadcast,
    constant,
    i32,
    i64,
    load,
    offset,
    store,
    store_f32,
    vector_type,
)
from ramify.kernels.cpu.tile_microkernels import (
    B_STEP,
    FLUSH_SUBNORMALS,
    TILE_WORDS,
    call_mxcsr,
    emit_row,
    move_tile,
    multiply_tile,
    zero_tile,
)

STEP = 2 * TILE_WORDS  # elements of a key, or keys, of a tile
# Of `configure_code_tiles`: tiles of C, of A, and of B.
_C_TILES, _A_TILE, _B_TILES = (0, 1), 4, (6, 7)
_int, _float = types.int64, types.float32


def _emit_tiles(builder: Any, args: list[Any]) -> None:
    """See `_multiply`: by instructions."""
    a, a_stride, b, b_tile, c, c_stride, steps, column_tiles, rows, scale = args
    with cgutils.for_range(builder, column_tiles) as tiles:
        b_at = builder.add(b, builder.mul(tiles.index, b_tile))
        c_at = offset(builder, c, tiles.index, 4 * TILE_N)
        for tile in _C_TILES:
            zero_tile(builder, tile)
        with cgutils.for_range(builder, steps) as loop:
            a_at = offset(builder, a, loop.index, TILE_BYTES)
            move_tile(builder, "tileloadd64", _A_TILE, a_at, a_stride)
            for half, (c_tile, b_tile_number) in enumerate(zip(_C_TILES, _B_TILES, strict=True)):
                at = builder.add(offset(builder, b_at, loop.index, B_STEP), i64(TILE_BYTES * half))
                move_tile(builder, "tileloadd64", b_tile_number, at, i64(4 * NR))
                multiply_tile(builder, c_tile, _A_TILE, b_tile_number)
        for half, tile in enumerate(_C_TILES):
            at = builder.add(c_at, i64(TILE_BYTES * half))
            move_tile(builder, "tilestored64", tile, at, c_stride)
        _emit_scale(builder, c_at, c_stride, rows, scale)


def _emit_emulation(builder: Any, args: list[Any]) -> None:
    """See `_multiply`: by FMA."""
    a, a_stride, b, b_tile, c, c_stride, steps, column_tiles, rows, scale = args
    zeros = cgutils.alloca_once_value(builder, ir.Constant(vector_type(NR), [0.0] * NR))
    start = builder.ptrtoint(zeros, i64)
    with cgutils.for_range(builder, column_tiles) as tiles:
        b_at = builder.add(b, builder.mul(tiles.index, b_tile))
        c_at = offset(builder, c, tiles.index, 4 * TILE_N)
        with cgutils.for_range(builder, rows) as loop:
            row = builder.add(a, builder.mul(loop.index, a_stride))
            into = builder.add(c_at, builder.mul(loop.index, c_stride))
            emit_row(builder, row, i64(TILE_BYTES), b_at, start, into, steps)
        _emit_scale(builder, c_at, c_stride, rows, scale)


def _emit_scale(builder: Any, c: Any, c_stride: Any, rows: Any, scale: Any) -> None:
    """c[rows, :TILE_N] = c * scale + 0."""
    wide_scale = broadcast(builder, scale, LANES)
    with cgutils.for_range(builder, rows) as loop:
        row = builder.add(c, builder.mul(loop.index, c_stride))
        for v in range(TILE_N_VECTORS):
            at = builder.add(row, i64(4 * LANES * v))
            y = builder.fmul(load(builder, at, vector_type(LANES)), wide_scale)
            store(builder, builder.fadd(y, constant(0.0, LANES)), at)


@intrinsic
def _multiply(
    _: Any, is_real: Any, a: Any, a_stride: Any, b: Any, b_tile: Any, c: Any, c_stride: Any, steps: Any,
    column_tiles: Any, rows: Any, scale: Any,
) -> Any:  # fmt: skip
    """c[:rows, :TILE_N * column_tiles] = a @ b * scale + 0 for rows <= TILE_ROWS; strides in bytes.

    `is_real`: by tiles of TILE_ROWS rows, which are read and written beyond `rows`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        is_real, *operands = args
        if LANES != 16:  # compiled all the same, never executed
            return context.get_dummy_value()
        if not HAS_TILES:
            _emit_emulation(builder, operands)
            return context.get_dummy_value()
        with builder.if_else(is_real) as (real, emulated):
            with real:
                _emit_tiles(builder, operands)
            with emulated:
                _emit_emulation(builder, operands)
        return context.get_dummy_value()

    return types.void(types.boolean, *[_int] * 9, _float), code


@jit
def multiply_packed_block(
    kind: int, num_rows: int, a: int, a_stride: int, b: int, b_tile: int, c: int, c_stride: int, depth: int,
    num_columns: int, scale: float,
) -> None:  # fmt: skip
    """c[:num_rows, :num_columns] = a[:num_rows, :depth] @ b[:depth, :num_columns] * scale + 0.

    Args:
        kind: BF16_TILES, after `configure_code_tiles(TILE_ROWS, TILE_BYTES)`, or BF16_TILES_EMULATED.
        num_rows: at most TILE_ROWS; a and c have TILE_ROWS.
        a: address of rows of bfloat16, `a_stride` bytes apart.
        b: address of the first tile [depth / 2, TILE_N] of words; the next is `b_tile` bytes further.
        c: address of float32 rows, `c_stride` bytes apart.
        depth: a multiple of STEP.
        num_columns: a multiple of TILE_N.
    """
    _multiply(kind == BF16_TILES, a, a_stride, b, b_tile, c, c_stride, depth // STEP, num_columns // TILE_N,
        num_rows, scale)  # fmt: skip


@jit
def fill_value_words(values: int, tile_bytes: int, num_tiles: int, num_keys: int) -> None:
    """Zero the words of packed values behind `num_keys`, up to a whole STEP: 0 times an old one may be NaN."""
    begin, end = -(-num_keys // 2), -(-num_keys // STEP) * TILE_WORDS
    for tile in range(num_tiles):
        for word in range(begin * TILE_N, end * TILE_N):
            store_f32(values + tile_bytes * tile + 4 * word, 0.0)


@intrinsic
def flush_subnormals(_: Any) -> Any:
    """From now on read and write subnormals as zeros in this thread, as tiles do; returns what undoes it."""

    def code(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        before = cgutils.alloca_once_value(builder, i32(0))
        if targets.IS_X86:
            call_mxcsr(builder, "stmxcsr", before)
            call_mxcsr(
                builder, "ldmxcsr", cgutils.alloca_once_value(builder, i32(FLUSH_SUBNORMALS))
            )
        return builder.zext(builder.load(before), i64)

    return _int(), code


@intrinsic
def restore_subnormals(_: Any, before: Any) -> Any:
    """Undo `flush_subnormals`, which returned `before`."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        if targets.IS_X86:
            value = cgutils.alloca_once(builder, i32)
            builder.store(builder.trunc(args[0], i32), value)
            call_mxcsr(builder, "ldmxcsr", value)
        return context.get_dummy_value()

    return types.void(_int), code


assert TILE_ROWS == TILE_WORDS  # a tile of C has as many rows as one of A
