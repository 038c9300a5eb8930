"""Tiles of matrix products as LLVM IR: `attention.simd` for `panel_kernels`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.attention.exponentials import _exp, short_exp
from ramify.attention.row_ops import narrow, rounded
from ramify.attention.simd import (
    BF16,
    F32,
    LANES,
    LINE,
    SIZES,
    _call,
    _const,
    _dot,
    _f32,
    _fill,
    _fma,
    _halves_of,
    _i32,
    _i64,
    _load,
    _prefetch,
    _store,
    _transposed,
    _vec,
    _widen,
)

# two bfloat16 of a row in a 32-bit word, as the dot products of `simd.DOTS` want them
PAIRS = len(SIZES)

PANEL = 2 * LANES
# Rows of a tile. The largest has as many accumulators as hide the latency of an FMA and fit into
# the registers beside a line of weights and one element of a row.
TILES = (1, 2, 3, 4, 6) if LANES == 8 else (1, 2, 4, 8, 12)
GROUPS = (4, 2, 1, 1, 1)  # panels that a tile of so few rows computes at once, for the same reason
UNROLLED = 4  # inner elements between two looks at what is fetched meanwhile
_int = types.int64


def _line(builder: Any, address: Any, kind: int) -> list[Any]:
    """One line of a panel as two float32 vectors."""
    if kind != BF16:
        return [
            _load(builder, builder.add(address, _i64(4 * LANES * v)), _vec(LANES)) for v in (0, 1)
        ]
    return _halves_of(builder, _load(builder, address, _vec(LANES, _i32)))


def _accumulate(builder: Any, sums: list[Any], column: Any, vectors: list[Any], kind: int) -> None:
    """sums[r, v] += column[r] * vectors[v], for all rows; `column` is the address of the first."""
    add, at = _dot if kind == PAIRS else _fma, iter(sums)
    for r in range(len(sums) // len(vectors)):
        x = _load(builder, builder.add(column, _i64(4 * r)), _f32)
        wide = _fill(builder, x, LANES)
        for vector, one in zip(vectors, at, strict=False):
            builder.store(add(builder, wide, vector, builder.load(one)), one)


def _fetch(builder: Any, place: Any, gap: Any, count: int) -> None:
    """Begin to fetch `count` lines, or a single one where the next call is so near."""
    _prefetch(builder, place, 2)
    with builder.if_then(builder.icmp_signed(">", gap, _i64(LINE))):
        for line in range(1, count):
            _prefetch(builder, builder.add(place, _i64(LINE * line)), 2)


def _make_tile(num_rows: int, num_panels: int, kind: int) -> Any:
    line_bytes = PANEL * (2 if kind == BF16 else 4)

    @intrinsic
    def tile(
        _: Any, a: Any, b: Any, b_stride: Any, ahead: Any, gap: Any, c: Any, c_stride: Any, depth: Any
    ) -> Any:  # fmt: skip
        """c[panel, row, :] += sum over k < depth of a[k, row] * b[panel, k, :], k ascending.

        Strides from panel to panel, in bytes; a is [depth, num_rows], a panel of c is
        [num_rows, PANEL], both float32; in pairs a has words, and k counts them. Meanwhile what lies
        at `ahead` is fetched, every `UNROLLED` elements as much as they read, or a line where `gap`
        is no larger, and `gap` bytes further. Several panels are read as fast as they come from
        memory without.
        """

        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            a, b, b_stride, ahead, gap, c, c_stride, depth = args
            sums = [
                cgutils.alloca_once(builder, _vec(LANES)) for _ in range(2 * num_rows * num_panels)
            ]
            for one in sums:
                builder.store(_const(0.0, LANES), one)
            starts = [builder.add(b, builder.mul(b_stride, _i64(p))) for p in range(num_panels)]

            def add(k: Any) -> None:
                step = builder.mul(k, _i64(line_bytes))
                lines = [_line(builder, builder.add(start, step), kind) for start in starts]
                column = builder.add(a, builder.mul(k, _i64(4 * num_rows)))
                halves = [half for line in lines for half in line]
                _accumulate(builder, sums, column, halves, kind)

            rounds = builder.udiv(depth, _i64(UNROLLED))
            with cgutils.for_range(builder, rounds) as loop:
                if num_panels == 1:
                    place = builder.add(ahead, builder.mul(loop.index, gap))
                    _fetch(builder, place, gap, UNROLLED * line_bytes // LINE)
                first = builder.mul(loop.index, _i64(UNROLLED))
                for k in range(UNROLLED):
                    add(builder.add(first, _i64(k)))
            done = builder.mul(rounds, _i64(UNROLLED))
            with cgutils.for_range(builder, builder.sub(depth, done)) as loop:
                add(builder.add(done, loop.index))
            at = iter(sums)
            for r in range(num_rows):
                for p in range(num_panels):
                    into = builder.add(c, builder.mul(c_stride, _i64(p)))
                    for v in range(2):
                        place = builder.add(into, _i64(4 * LANES * (2 * r + v)))
                        before = _load(builder, place, _vec(LANES))
                        _store(builder, builder.fadd(before, builder.load(next(at))), place)
            return context.get_dummy_value()

        return types.void(*[_int] * 8), code

    return tile


f32_0, f32_1, f32_2, f32_3, f32_4 = (_make_tile(rows, 1, F32) for rows in TILES)
bf16_0, bf16_1, bf16_2, bf16_3, bf16_4 = (_make_tile(rows, 1, BF16) for rows in TILES)
pairs_0, pairs_1, pairs_2, pairs_3, pairs_4 = (_make_tile(rows, 1, PAIRS) for rows in TILES)
f32_wide_0, f32_wide_1 = (_make_tile(TILES[i], GROUPS[i], F32) for i in range(2))
bf16_wide_0, bf16_wide_1 = (_make_tile(TILES[i], GROUPS[i], BF16) for i in range(2))
pairs_wide_0, pairs_wide_1 = (_make_tile(TILES[i], GROUPS[i], PAIRS) for i in range(2))


@intrinsic(prefer_literal=True)
def pack_rows(
    _: Any, source: Any, stride: Any, count: Any, into: Any, tile: Any, steps: Any, kind: Any
) -> Any:
    """into[k, r] = source[r, k] in float32, for k < 8 * steps and r < 8.

    Args:
        stride: bytes from row to row.
        count: rows there are; the last one stands for those missing to eight.
        tile: floats from one k to the next. Where it is less than eight, each k overwrites what
            the one before wrote beyond it; behind the last one there must be room.
        kind: a literal, F32 or BF16.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, stride, count, into, tile, steps, _ = args
        stored, last = kind.literal_value, builder.sub(count, _i64(1))
        starts = []
        for r in range(8):
            row = builder.select(builder.icmp_signed("<", _i64(r), last), _i64(r), last)
            starts.append(builder.add(source, builder.mul(stride, row)))
        with cgutils.for_range(builder, steps) as loop:
            step = builder.mul(loop.index, _i64(8 * SIZES[stored]))
            rows = [_widen(builder, builder.add(start, step), stored) for start in starts]
            at = builder.add(into, builder.mul(loop.index, builder.mul(tile, _i64(32))))
            for k, column in enumerate(_transposed(builder, rows)):
                _store(builder, column, builder.add(at, builder.mul(tile, _i64(4 * k))))
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, _int, _int, kind), code


@intrinsic
def fill_rows(_: Any, into: Any, line: Any, num_rows: Any) -> Any:
    """`num_rows` lines of PANEL floats: copies of the one at `line`, or zeros if that is 0."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        into, line, num_rows = args
        places = [cgutils.alloca_once_value(builder, _const(0.0, LANES)) for _ in range(2)]
        with builder.if_then(builder.icmp_signed("!=", line, _i64(0))):
            for v, place in enumerate(places):
                builder.store(
                    _load(builder, builder.add(line, _i64(4 * LANES * v)), _vec(LANES)), place
                )
        values = [builder.load(place) for place in places]
        with cgutils.for_range(builder, num_rows) as loop:
            for v, value in enumerate(values):
                at = builder.add(into, builder.mul(loop.index, _i64(4 * PANEL)))
                _store(builder, value, builder.add(at, _i64(4 * LANES * v)))
        return context.get_dummy_value()

    return types.void(_int, _int, _int), code


@intrinsic
def copy_bytes(_: Any, into: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        into, source = (builder.inttoptr(one, pointer) for one in args[:2])
        cgutils.raw_memcpy(builder, into, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(_int, _int, _int), code


@intrinsic(prefer_literal=True)
def store_line(_: Any, source: Any, into: Any, kind: Any) -> Any:
    """PANEL sums as elements of `kind`, a literal."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, into, _ = args
        stored = kind.literal_value
        for x, at in zip(_halves(builder, source), _places(builder, into, stored), strict=True):
            _store(builder, narrow(builder, x, stored), at)
        return context.get_dummy_value()

    return types.void(_int, _int, kind), code


@intrinsic(prefer_literal=True)
def add_line(_: Any, source: Any, into: Any, kind: Any) -> Any:
    """PANEL sums, rounded to `kind`, are added to the elements at `into`."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, into, _ = args
        stored = kind.literal_value
        for x, at in zip(_halves(builder, source), _places(builder, into, stored), strict=True):
            before = _widen(builder, at, stored, LANES)
            total = builder.fadd(before, rounded(builder, x, stored))
            _store(builder, narrow(builder, total, stored), at)
        return context.get_dummy_value()

    return types.void(_int, _int, kind), code


@intrinsic(prefer_literal=True)
def gate_line(_: Any, gate: Any, up: Any, into: Any, kind: Any) -> Any:
    """silu(gate) * up of PANEL sums each, rounded to `kind` after each of the three."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        gate, up, into, _ = args
        stored = kind.literal_value
        both = zip(
            _halves(builder, gate),
            _halves(builder, up),
            _places(builder, into, stored),
            strict=True,
        )
        for g, u, at in both:
            active = silu(builder, rounded(builder, g, stored), stored)
            product = builder.fmul(active, rounded(builder, u, stored))
            _store(builder, narrow(builder, product, stored), at)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, kind), code


def _halves(builder: Any, source: Any) -> list[Any]:
    """A line of PANEL sums."""
    return [_load(builder, builder.add(source, _i64(4 * LANES * v)), _vec(LANES)) for v in (0, 1)]


def _places(builder: Any, into: Any, kind: int) -> list[Any]:
    return [builder.add(into, _i64(SIZES[kind] * LANES * v)) for v in (0, 1)]


def silu(builder: Any, x: Any, kind: int) -> Any:
    """x / (1 + exp(-x)) of a float32 vector, rounded to `kind`; by exp of what is not positive."""
    exp, zero, one = _exp if kind == F32 else short_exp, _const(0.0, LANES), _const(1.0, LANES)
    e = exp(builder, builder.fsub(zero, _call(builder, "fabs", x)))
    negative = builder.fcmp_ordered("<", x, zero)
    over = builder.select(negative, builder.fmul(x, e), x)
    return rounded(builder, builder.fdiv(over, builder.fadd(one, e)), kind)
