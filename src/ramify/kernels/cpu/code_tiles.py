"""Products of rows of integers and 8-bit codes by tiles (AMX's `tdpbssd` and `tdpbusd`) as LLVM IR.

An integer of 16 bits is 256 * high + low, bytes of their own planes: high signed, low unsigned. One of 8
bits is its low byte, signed. Sums of a group are exact in int32, so results have the bits of
`quantized_microkernels`: the number of rows may choose.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu import targets
from ramify.kernels.cpu.abi import CODES4
from ramify.kernels.cpu.gemm_microkernels import NR
from ramify.kernels.cpu.quantized_microkernels import CODES4_PAIRS, load_levels, split_codes
from ramify.kernels.cpu.simd import (
    LANES,
    broadcast,
    call_function,
    constant,
    f32,
    fma,
    i32,
    i64,
    load,
    offset,
    shuffle,
    store,
    vector_type,
)

TILE_ROWS = 16
TILE_BYTES = 64  # of a row of a tile
PLANE_BYTES = TILE_ROWS * TILE_BYTES  # of TILE_BYTES elements of TILE_ROWS rows, high or low
BUFFER_BYTES = 2 * TILE_ROWS * NR * 4  # of the sums of a group, of high and of low bytes

HAS_TILES = targets.compiles_tiles() and LANES == 16
_HIGH, _LOW = (0, 1), (2, 3)  # tiles of sums, for each half of a panel
_A_HIGH, _A_LOW, _B = 4, 5, (6, 7)
_int = types.int64
_byte = ir.IntType(8)


def _call(builder: Any, name: str, *args: Any) -> None:
    call_function(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


def _tiles(*numbers: int) -> list[Any]:
    return [ir.Constant(_byte, number) for number in numbers]


@intrinsic
def configure_code_tiles(_: Any, rows: Any, row_bytes: Any) -> Any:
    """Set the shapes of this thread's tiles: `rows` rows of x, `row_bytes` elements of K."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        if not HAS_TILES:
            return context.get_dummy_value()
        rows, row_bytes = args
        config = cgutils.alloca_once(builder, ir.ArrayType(_byte, TILE_BYTES))
        at = builder.ptrtoint(config, i64)
        store(builder, constant(0, TILE_BYTES // 4, i32), at)
        store(builder, ir.Constant(_byte, 1), at)  # the palette
        few, whole = builder.trunc(rows, _byte), ir.IntType(16)(TILE_BYTES)
        short = builder.trunc(row_bytes, ir.IntType(16))
        depth = builder.trunc(builder.lshr(row_bytes, i64(2)), _byte)
        shapes = dict.fromkeys((*_HIGH, *_LOW), (whole, few))
        shapes |= dict.fromkeys((_A_HIGH, _A_LOW), (short, few))
        shapes |= dict.fromkeys(_B, (whole, depth))
        for tile, (num_bytes, num_rows) in shapes.items():
            store(builder, num_bytes, builder.add(at, i64(16 + 2 * tile)))
            store(builder, num_rows, builder.add(at, i64(48 + tile)))
        _call(builder, "ldtilecfg", builder.bitcast(config, _byte.as_pointer()))
        return context.get_dummy_value()

    return types.void(_int, _int), code


@intrinsic
def release_code_tiles(_: Any) -> Any:
    """Give this thread's tiles back: the kernel would save them at each switch of threads."""

    def code(context: Any, builder: Any, _: Any, __: Any) -> Any:
        if HAS_TILES:
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def words_to_planes(_: Any, words: Any, bits: Any, width: Any, into: Any, step: Any) -> Any:
    """Split a row of words of int16 [width / 2] into bytes: high ones, and PLANE_BYTES behind them low ones.

    Args:
        bits: 16, or 8: only low ones are written.
        width: a multiple of 8.
        into: address of the row's first TILE_BYTES; `step` bytes to the next.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        words, bits, width, into, step = args
        has_high = builder.icmp_signed("==", bits, i64(16))
        bytes_of = vector_type(8, _byte)
        with cgutils.for_range(builder, builder.udiv(width, i64(8))) as loop:
            halves = vector_type(8, ir.IntType(16))
            ordered = load(builder, offset(builder, words, loop.index, 16), halves)
            x = shuffle(builder, ordered, ordered, [0, 2, 1, 3, 4, 6, 5, 7])
            high = builder.trunc(builder.ashr(x, constant(8, 8, ir.IntType(16))), bytes_of)
            tile = builder.mul(builder.lshr(loop.index, i64(3)), step)
            place = builder.mul(builder.and_(loop.index, i64(7)), i64(8))
            at = builder.add(builder.add(into, tile), place)
            with builder.if_then(has_high):
                store(builder, high, at)
            store(builder, builder.trunc(x, bytes_of), builder.add(at, i64(PLANE_BYTES)))
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, _int), code


@intrinsic
def widen_codes(_: Any, codes: Any, words: Any, into: Any, levels: Any) -> Any:
    """4-bit codes of a panel, `words` words of x, as 8-bit ones; `levels` as for the micro-kernel."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        codes, words, into, levels_at = args
        if not HAS_TILES:
            return context.get_dummy_value()
        levels = load_levels(builder, levels_at, is_bytes=False)
        low_bytes, by_8 = (constant(value, 2 * LANES, ir.IntType(16)) for value in (255, 8))
        with cgutils.for_range(builder, builder.udiv(words, i64(CODES4_PAIRS))) as loop:
            source = offset(builder, codes, loop.index, 4 * NR)
            target = offset(builder, into, loop.index, 8 * NR)
            for v in range(NR // LANES):
                at = builder.add(source, i64(4 * LANES * v))
                pieces = split_codes(
                    builder, CODES4, load(builder, at, vector_type(LANES, i32)), levels
                )
                for unit in (0, 1):
                    even, odd = pieces[2 * unit : 2 * unit + 2]
                    both = builder.or_(builder.and_(even, low_bytes), builder.shl(odd, by_8))
                    store(builder, both, builder.add(target, i64(4 * (NR * unit + LANES * v))))
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int), code


@intrinsic
def run_tile_groups(
    _: Any, bits: Any, a: Any, b: Any, c: Any, rows: Any, groups: Any, group: Any, row_bytes: Any, scales: Any,
    mins: Any, scales_step: Any, x_scales: Any, block_shift: Any, x_sums: Any, buffer: Any,
) -> Any:  # fmt: skip
    """c[rows, NR] += for each group: scales * x_scale * (sum of codes * x) + mins * x_sum.

    Args:
        bits: of the integers of a row, 8 or 16.
        a: planes of a row tile, from the first group on, which begins TILE_BYTES elements.
        b: 8-bit codes of a panel from the first group on: words [K / 4, NR].
        group, row_bytes: elements of a group, and of a tile as configured; at most TILE_BYTES.
        x_scales, x_sums: [blocks, TILE_ROWS] and [groups, TILE_ROWS].
        buffer: address of BUFFER_BYTES.

    The others are those of `run_quantized_microkernel`, of one panel.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        if HAS_TILES:
            bits, *others = args
            is_short = builder.icmp_signed("==", bits, i64(8))
            with builder.if_else(is_short) as (short, long):
                with short:
                    _emit_groups(builder, others, has_high=False)
                with long:
                    _emit_groups(builder, others, has_high=True)
        return context.get_dummy_value()

    return types.void(*[_int] * 15), code


def _emit_groups(builder: Any, args: Any, *, has_high: bool) -> None:
    """See `run_tile_groups`. Without high bytes low ones are signed."""
    a, b, c, rows, groups, group, row_bytes, scales, mins = args[:9]
    scales_step, x_scales, block_shift, x_sums, buffer = args[9:]
    floats, ints = vector_type(LANES), vector_type(LANES, i32)

    def move(name: str, tile: int, address: Any, stride: int) -> None:
        pointer = builder.inttoptr(address, _byte.as_pointer())
        _call(builder, name, *_tiles(tile), pointer, i64(stride))

    steps = builder.udiv(group, row_bytes)
    with cgutils.for_range(builder, groups) as loop:
        for tile in (*_HIGH, *_LOW) if has_high else _LOW:
            _call(builder, "tilezero", *_tiles(tile))
        first = builder.mul(loop.index, group)
        with cgutils.for_range(builder, steps) as inner:
            k = builder.add(first, builder.mul(inner.index, row_bytes))
            planes = offset(builder, a, builder.lshr(k, i64(6)), 2 * PLANE_BYTES)
            planes = builder.add(planes, builder.and_(k, i64(TILE_BYTES - 1)))
            if has_high:
                move("tileloadd64", _A_HIGH, planes, TILE_BYTES)
            move("tileloadd64", _A_LOW, builder.add(planes, i64(PLANE_BYTES)), TILE_BYTES)
            panel = offset(builder, b, k, NR)
            for half, tile in enumerate(_B):
                move("tileloadd64", tile, builder.add(panel, i64(TILE_BYTES * half)), 4 * NR)
                if has_high:
                    _call(builder, "tdpbssd", *_tiles(_HIGH[half], _A_HIGH, tile))
                name = "tdpbusd" if has_high else "tdpbssd"
                _call(builder, name, *_tiles(_LOW[half], _A_LOW, tile))
        low_at = builder.add(buffer, i64(BUFFER_BYTES // 2))
        for half in (0, 1):
            place = i64(TILE_BYTES * half)
            if has_high:
                move("tilestored64", _HIGH[half], builder.add(buffer, place), 4 * NR)
            move("tilestored64", _LOW[half], builder.add(low_at, place), 4 * NR)
        weight_scales = builder.mul(scales_step, loop.index)
        vectors = range(NR // LANES)

        def of_columns(address: Any, weight_scales: Any = weight_scales) -> list[Any]:
            start = builder.add(address, weight_scales)
            return [load(builder, builder.add(start, i64(4 * LANES * v)), floats) for v in vectors]

        block = builder.lshr(loop.index, block_shift)
        row_scales = offset(builder, x_scales, block, 4 * TILE_ROWS)
        row_sums = offset(builder, x_sums, loop.index, 4 * TILE_ROWS)
        wide_scales = of_columns(scales)
        with cgutils.for_range(builder, rows) as row:
            x_scale = load(builder, offset(builder, row_scales, row.index, 4), f32)
            wide = broadcast(builder, x_scale, LANES)
            begin = builder.mul(row.index, i64(4 * NR))
            for v in vectors:
                place = builder.add(begin, i64(4 * LANES * v))
                total = load(builder, builder.add(low_at, place), ints)
                if has_high:
                    high = load(builder, builder.add(buffer, place), ints)
                    total = builder.add(builder.shl(high, constant(8, LANES, i32)), total)
                factor = builder.fmul(wide_scales[v], wide)
                at = builder.add(c, place)
                before = load(builder, at, floats)
                store(builder, fma(builder, builder.sitofp(total, floats), factor, before), at)
        with builder.if_then(builder.icmp_signed("!=", mins, i64(0))):
            minimums = of_columns(mins)
            with cgutils.for_range(builder, rows) as row:
                x_sum = load(builder, offset(builder, row_sums, row.index, 4), f32)
                wide = broadcast(builder, x_sum, LANES)
                begin = builder.mul(row.index, i64(4 * NR))
                for v in vectors:
                    at = builder.add(c, builder.add(begin, i64(4 * LANES * v)))
                    store(builder, fma(builder, minimums[v], wide, load(builder, at, floats)), at)
