"""Tiles of bfloat16 (AMX's `tdpbf16ps`) as LLVM IR, and the same arithmetic by FMA where a CPU has none.

A tile of C is [rows <= 16, 16] float32, of A [rows, 32] bfloat16, of B [16, 16] words of bfloat16 (k, k + 1).
`tdpbf16ps` computes for each element of C, with subnormals read and written as zeros:

    even = odd = 0
    for k in 0, 2, ..., 30:  even = fma(a[k], b[k], even);  odd = fma(a[k + 1], b[k + 1], odd)
    c += even + odd

No order depends on the number of rows. That the emulation has these bits is tested wherever a CPU has tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu import targets
from ramify.kernels.cpu.abi import BF16_TILES, BF16_TILES_EMULATED, CACHE_LINE
from ramify.kernels.cpu.code_tiles import HAS_TILES, TILE_BYTES
from ramify.kernels.cpu.gemm_microkernels import NR, emit_cases
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.simd import (
    LANES,
    broadcast,
    call_function,
    constant,
    emit_prefetch,
    fma,
    i32,
    i64,
    load,
    offset,
    split_bf16_words,
    store,
    vector_type,
)

TILE_WORDS = 16  # of a row of A, and rows of B: 32 elements of K
B_STEP = 4 * NR * TILE_WORDS  # bytes of a micro-panel for TILE_WORDS

_C_TILES, _A_TILES, _B_TILES = (0, 1, 2, 3), (4, 5), (6, 7)
FLUSH_SUBNORMALS = 0x9FC0  # MXCSR: read and written as zeros; no exceptions, round to nearest
_int = types.int64
_byte = ir.IntType(8)


def _tile_call(builder: Any, name: str, *args: Any) -> None:
    call_function(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


def move_tile(builder: Any, name: str, tile: int, address: Any, stride: Any) -> None:
    """Load or store a tile, `name` is the instruction; `stride` in bytes from row to row."""
    _tile_call(builder, name, _tile(tile), _pointer(builder, address), stride)


def multiply_tile(builder: Any, c: int, a: int, b: int) -> None:
    """c += a @ b."""
    _tile_call(builder, "tdpbf16ps", *map(_tile, (c, a, b)))


def zero_tile(builder: Any, tile: int) -> None:
    """Set a tile to zeros."""
    _tile_call(builder, "tilezero", _tile(tile))


def _tile(number: int) -> Any:
    return ir.Constant(_byte, number)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _byte.as_pointer())


def _emit_tiles(builder: Any, num_row_tiles: int, args: list[Any]) -> None:
    """See `run_tile_microkernel`: by instructions."""
    a, rows, a_stride, b, start, start_row, c, steps, prefetch_at, prefetch_lines = args
    row_bytes, wide_row_bytes = i64(TILE_BYTES), i64(4 * NR)

    # A tile of C for each row tile and half of the panel.
    blocks = [(r, half) for r in range(num_row_tiles) for half in (0, 1)]
    c_tiles = dict(zip(blocks, _C_TILES, strict=False))

    def c_address(block: tuple[int, int], base: Any, row: Any) -> Any:
        r, half = block
        row_tile = builder.add(base, builder.mul(builder.mul(rows, row), i64(r)))
        return builder.add(row_tile, i64(TILE_BYTES * half))

    for block, tile in c_tiles.items():
        move_tile(builder, "tileloadd64", tile, c_address(block, start, start_row), start_row)
    with cgutils.for_range(builder, steps) as loop:
        a_at = builder.add(a, builder.mul(loop.index, builder.mul(rows, row_bytes)))
        b_at = offset(builder, b, loop.index, B_STEP)
        lines_done = builder.mul(loop.index, prefetch_lines)
        fetch_at = offset(builder, prefetch_at, lines_done, CACHE_LINE)
        with cgutils.for_range(builder, prefetch_lines) as lines:
            emit_prefetch(builder, offset(builder, fetch_at, lines.index, CACHE_LINE), 2)
        for r in range(num_row_tiles):
            a_tile = builder.add(a_at, builder.mul(a_stride, i64(r)))
            move_tile(builder, "tileloadd64", _A_TILES[r], a_tile, row_bytes)
            for half, b_tile in enumerate(_B_TILES):
                if r == 0:
                    half_at = builder.add(b_at, i64(TILE_BYTES * half))
                    move_tile(builder, "tileloadd64", b_tile, half_at, wide_row_bytes)
                multiply_tile(builder, c_tiles[r, half], _A_TILES[r], b_tile)
    for block, tile in c_tiles.items():
        move_tile(
            builder, "tilestored64", tile, c_address(block, c, wide_row_bytes), wide_row_bytes
        )


def emit_row(builder: Any, a: Any, a_step: Any, b: Any, start: Any, c: Any, steps: Any) -> None:
    """c[NR] = start[NR] + products of a row of A, `a_step` bytes from tile to tile, and a micro-panel, by FMA."""
    offsets = [i64(4 * LANES * v) for v in range(NR // LANES)]
    totals = [cgutils.alloca_once(builder, vector_type(LANES)) for _ in offsets]
    for total, at in zip(totals, offsets, strict=True):
        builder.store(load(builder, builder.add(start, at), vector_type(LANES)), total)
    with cgutils.for_range(builder, steps) as loop:
        a_at = builder.add(a, builder.mul(loop.index, a_step))
        b_at = offset(builder, b, loop.index, B_STEP)
        chains = [[constant(0.0, LANES)] * 2 for _ in offsets]
        for k in range(TILE_WORDS):
            word = broadcast(builder, load(builder, builder.add(a_at, i64(4 * k)), i32), LANES)
            xs = split_bf16_words(builder, word)
            for v, chain in enumerate(chains):
                at = builder.add(b_at, i64(4 * (NR * k + LANES * v)))
                ys = split_bf16_words(builder, load(builder, at, vector_type(LANES, i32)))
                chain[:] = [fma(builder, *terms) for terms in zip(xs, ys, chain, strict=True)]
        for total, (even, odd) in zip(totals, chains, strict=True):
            builder.store(builder.fadd(builder.load(total), builder.fadd(even, odd)), total)
    for total, at in zip(totals, offsets, strict=True):
        store(builder, builder.load(total), builder.add(c, at))


def _emit_emulation(builder: Any, num_row_tiles: int, args: list[Any]) -> None:
    """See `run_tile_microkernel`: by FMA."""
    a, rows, a_stride, b, start, start_row, c, steps, *_ = args
    a_step = builder.mul(rows, i64(TILE_BYTES))
    with _subnormals_as_zeros(builder), cgutils.for_range(builder, rows) as loop:
        for r in range(num_row_tiles):
            row = builder.add(
                offset(builder, a, loop.index, TILE_BYTES), builder.mul(a_stride, i64(r))
            )
            index = builder.add(loop.index, builder.mul(rows, i64(r)))
            start_at = builder.add(start, builder.mul(index, start_row))
            c_at = offset(builder, c, index, 4 * NR)
            emit_row(builder, row, a_step, b, start_at, c_at, steps)


def call_mxcsr(builder: Any, name: str, at: Any) -> None:
    """Load or store the mode of arithmetic; `at` points to 32 bits.

    The fences keep loads and stores, and so the arithmetic between them, on their side.
    """
    builder.fence("seq_cst", "singlethread")
    pointer = builder.bitcast(at, _byte.as_pointer())
    call_function(builder, f"llvm.x86.sse.{name}", ir.VoidType(), pointer)
    builder.fence("seq_cst", "singlethread")


@contextmanager
def _subnormals_as_zeros(builder: Any) -> Iterator[None]:
    """What is emitted inside reads and writes subnormals as zeros, as tiles do; on x86."""
    if not targets.IS_X86:
        yield
        return
    before, during = (cgutils.alloca_once(builder, i32) for _ in range(2))

    builder.store(i32(FLUSH_SUBNORMALS), during)
    call_mxcsr(builder, "stmxcsr", before)
    call_mxcsr(builder, "ldmxcsr", during)
    yield
    call_mxcsr(builder, "ldmxcsr", before)


@intrinsic
def _select_tiles(
    _: Any, kind: Any, num_row_tiles: Any, a: Any, rows: Any, a_stride: Any, b: Any, start: Any,
    start_row: Any, c: Any, steps: Any, prefetch_at: Any, prefetch_lines: Any,
) -> Any:  # fmt: skip
    """See `run_tile_microkernel`."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        kind, num_row_tiles, *operands = args
        emulated = (BF16_TILES_EMULATED, _emit_emulation)
        forms = dict([emulated, (BF16_TILES, _emit_tiles)] if HAS_TILES else [emulated])

        def emit_kind(form: int) -> None:
            def emit_row_tiles(row_tiles: int) -> None:
                forms[form](builder, row_tiles, operands)

            emit_cases(builder, num_row_tiles, (1, 2), emit_row_tiles)

        emit_cases(builder, kind, [*forms], emit_kind)
        return context.get_dummy_value()

    return types.void(*[_int] * 12), code


@jit
def run_tile_microkernel(
    kind: int, num_row_tiles: int, a: int, rows: int, a_stride: int, b: int, start: int, start_row: int, c: int,
    steps: int, prefetch_at: int, prefetch_lines: int,
) -> None:  # fmt: skip
    """c = start + products of one or two row tiles and a micro-panel, `steps` tiles of K: one after the other.

    Args:
        kind: BF16_TILES, after `configure_code_tiles(rows, TILE_BYTES)`; or BF16_TILES_EMULATED.
        a: tiles of A, of `rows` rows, one behind the other; `a_stride` bytes from row tile to row tile.
        b: the micro-panel.
        start: rows of NR float32, `start_row` bytes from row to row.
        c: [row tiles * rows, NR] float32.
        prefetch_at: `prefetch_lines` cache lines from there on are prefetched in each step.
    """
    _select_tiles(
        kind,
        num_row_tiles,
        a,
        rows,
        a_stride,
        b,
        start,
        start_row,
        c,
        steps,
        prefetch_at,
        prefetch_lines,
    )


@intrinsic
def copy_to_tiles(_: Any, row: Any, num_bytes: Any, into: Any, step: Any) -> Any:
    """Copy a row of `num_bytes` into rows of tiles of A, `step` bytes apart; the last is filled up with zeros."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, num_bytes, into, step = args
        words = vector_type(TILE_WORDS, i32)
        whole = builder.udiv(num_bytes, i64(TILE_BYTES))
        with cgutils.for_range(builder, whole) as loop:
            x = load(builder, offset(builder, row, loop.index, TILE_BYTES), words)
            store(builder, x, builder.add(into, builder.mul(loop.index, step)))
        rest = builder.sub(num_bytes, builder.mul(whole, i64(TILE_BYTES)))
        with builder.if_then(builder.icmp_signed("!=", rest, i64(0))):
            last = builder.add(into, builder.mul(whole, step))
            store(builder, constant(0, TILE_WORDS, i32), last)
            source = offset(builder, row, whole, TILE_BYTES)
            cgutils.raw_memcpy(builder, _pointer(builder, last), _pointer(builder, source), rest, 1)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int), code
