"""Keys and values from where they lie to vectors of float32 or of pairs, as LLVM IR.

It is `simd` for few and for many rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.attention.kernel_args import stored_as
from ramify.attention.simd import (
    BF16,
    LINE,
    SIZES,
    TILE_COLUMNS,
    _const,
    _f32,
    _fill,
    _halves_of,
    _i32,
    _i64,
    _load,
    _prefetch,
    _shuffle,
    _step,
    _store,
    _transposed,
    _vec,
    _widen,
)

AHEAD = 16  # keys between those that are read and those that are fetched meanwhile
_int = types.int64


def key_columns(builder: Any, places: list[Any], kind: int) -> list[Any]:
    """Eight elements of eight keys: a vector of float32 for each element."""
    if kind != BF16:
        return _transposed(builder, [_widen(builder, place, kind) for place in places])
    columns = []
    for pair in key_pairs(builder, places):
        columns += _halves_of(builder, pair)
    return columns


def key_pairs(builder: Any, places: list[Any]) -> list[Any]:
    """Four words of 32 bits, two elements each, of 8 or 16 keys: a vector for each word.

    A key's words fill a quarter of 512 bits, behind them are those of the key four further, and so
    on: so half as many shuffles turn them as with elements one by one, and nothing crosses quarters.
    """
    rows = [
        _joined(builder, [_load(builder, place, _vec(4, _i32)) for place in places[i::4]])
        for i in range(4)
    ]
    lanes = len(places)
    quarters = range(0, lanes, 4)
    turned = []
    for at in (0, 2):
        by_one = [q + at + i // 2 + i % 2 * lanes for q in quarters for i in range(4)]
        low, high = (_shuffle(builder, rows[i], rows[i + 1], by_one) for i in (0, 2))
        for word in (0, 2):
            by_two = [q + word + i % 2 + i // 2 * lanes for q in quarters for i in range(4)]
            turned.append(_shuffle(builder, low, high, by_two))
    return turned


def _joined(builder: Any, vectors: list[Any]) -> Any:
    """One behind the other; a power of two of them."""
    while len(vectors) > 1:
        places = list(range(2 * vectors[0].type.count))
        vectors = [
            _shuffle(builder, a, b, places)
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def value_pairs(builder: Any, first: Any, second: Any) -> list[Any]:
    """Two values of 16-bit elements as words of one element of each: a vector for eight, else two."""
    count = first.type.count
    width = count if count == 8 else count // 2
    return [
        builder.bitcast(
            _shuffle(
                builder, first, second, [at + i // 2 + i % 2 * count for i in range(2 * width)]
            ),
            _vec(width),
        )
        for at in range(0, count, width)
    ]


def prefetch_keys(builder: Any, source: Any, offsets: Any, index: Any, stored: int) -> None:
    """Begin to fetch eight keys into the first level, a share of their lines at a time.

    All at once, the processor would stand still until the last is on its way.

    Args:
        offsets: address of int64, bytes from `source` to each key.
        index: which eight elements of other keys are read now; the share is as large.
    """
    for k in range(SIZES[stored]):
        line = builder.add(builder.mul(index, _i64(SIZES[stored])), _i64(k))
        key = builder.and_(line, _i64(7))
        start = builder.add(source, _load(builder, _step(builder, offsets, key, 8), _i64))
        at = builder.mul(builder.lshr(line, _i64(3)), _i64(LINE))
        _prefetch(builder, builder.add(start, at), 3)


@intrinsic
def transpose_keys(
    _: Any, part: Any, source: Any, offsets: Any, factors: Any, into: Any, stride: Any, width: Any
) -> Any:
    """Eight keys as columns of `into`, in float32, each times its factor.

    Args:
        part: its type says what the keys are stored in.
        offsets, factors: addresses of int64, bytes from `source` to eight keys, with `AHEAD` more
            behind them; and of eight floats.
        stride: floats from one line of `into` to the next.
        width: elements of a key, a multiple of 8.
    """
    stored = stored_as(part)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, factors, into, stride, width = args
        starts = []
        for i in range(8):
            offset = _load(builder, builder.add(offsets, _i64(8 * i)), _i64)
            starts.append(builder.add(source, offset))
        scales = _load(builder, factors, _vec(8))
        later = builder.add(offsets, _i64(8 * AHEAD))

        with cgutils.for_range(builder, builder.udiv(width, _i64(8))) as loop:
            prefetch_keys(builder, source, later, loop.index, stored)
            element = builder.mul(loop.index, _i64(8))
            begin = builder.mul(element, _i64(SIZES[stored]))
            places = [builder.add(start, begin) for start in starts]
            line = builder.add(into, builder.mul(builder.mul(element, stride), _i64(4)))
            for i, column in enumerate(key_columns(builder, places, stored)):
                at = builder.add(line, builder.mul(stride, _i64(4 * i)))
                _store(builder, builder.fmul(column, scales), at)
        return context.get_dummy_value()

    return types.void(part, _int, _int, _int, _int, _int, _int), code


@intrinsic
def transpose_pairs(
    _: Any, part: Any, source: Any, offsets: Any, into: Any, stride: Any, width: Any
) -> Any:
    """Eight keys as columns of `into`, a word of two elements a line: `transpose_keys` in pairs."""
    stored = stored_as(part)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, into, stride, width = args
        starts = [
            builder.add(source, _load(builder, builder.add(offsets, _i64(8 * i)), _i64))
            for i in range(8)
        ]
        later = builder.add(offsets, _i64(8 * AHEAD))
        with cgutils.for_range(builder, builder.udiv(width, _i64(8))) as loop:
            prefetch_keys(builder, source, later, loop.index, stored)
            step = builder.mul(loop.index, _i64(8 * SIZES[BF16]))
            line = builder.add(into, builder.mul(builder.mul(loop.index, stride), _i64(16)))
            words = key_pairs(builder, [builder.add(start, step) for start in starts])
            for i, word in enumerate(words):
                _store(builder, word, builder.add(line, builder.mul(stride, _i64(4 * i))))
        return context.get_dummy_value()

    return types.void(part, *[_int] * 5), code


@intrinsic
def copy_value_pairs(
    _: Any, part: Any, source: Any, offsets: Any, count: Any, into: Any, stride: Any, width: Any, columns: Any
) -> Any:  # fmt: skip
    """`count` times two values as tiles of `TILE_COLUMNS` words of one element of each.

    Args:
        part, source, offsets: as in `copy_values`.
        into, stride: address of the first tile, [count, TILE_COLUMNS], and bytes from tile to tile.
        width: elements of a value, a multiple of 8.
        columns: elements of a row of tiles; those from `width` on are zeros.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, count, into, stride, width, columns = args

        def place(line: Any, column: Any) -> Any:
            """Of a column's word in a line of the first tile."""
            tile = builder.udiv(column, _i64(TILE_COLUMNS))
            inner = builder.sub(column, builder.mul(tile, _i64(TILE_COLUMNS)))
            return builder.add(_step(builder, line, inner, 4), builder.mul(tile, stride))

        with cgutils.for_range(builder, count) as loop:
            at = _step(builder, offsets, loop.index, 16)
            starts, ahead = [], []
            for i in range(2):
                one = builder.add(at, _i64(8 * i))
                starts.append(builder.add(source, _load(builder, one, _i64)))
                later = _load(builder, builder.add(one, _i64(8 * AHEAD)), _i64)
                ahead.append(builder.add(source, later))
            line = _step(builder, into, loop.index, 4 * TILE_COLUMNS)

            def some(begin: Any, steps: Any, count: int) -> None:
                with cgutils.for_range(builder, steps) as parts:
                    column = builder.add(begin, builder.mul(parts.index, _i64(count)))
                    rows = [
                        _load(
                            builder, _step(builder, start, column, 2), _vec(count, ir.IntType(16))
                        )
                        for start in starts
                    ]
                    if count * SIZES[BF16] >= LINE:
                        for one in ahead:
                            _prefetch(builder, _step(builder, one, column, 2), 3)
                    to = place(line, column)
                    for i, words in enumerate(value_pairs(builder, *rows)):
                        _store(builder, words, builder.add(to, _i64(4 * i * words.type.count)))

            whole = builder.udiv(width, _i64(TILE_COLUMNS))
            some(_i64(0), whole, TILE_COLUMNS)
            done = builder.mul(whole, _i64(TILE_COLUMNS))
            some(done, builder.udiv(builder.sub(width, done), _i64(8)), 8)
            rest = builder.udiv(builder.sub(columns, width), _i64(8))
            with cgutils.for_range(builder, rest) as parts:
                column = builder.add(width, builder.mul(parts.index, _i64(8)))
                _store(builder, _const(0.0, 8), place(line, column))
        return context.get_dummy_value()

    return types.void(part, *[_int] * 7), code


@intrinsic
def copy_values(
    _: Any, part: Any, source: Any, offsets: Any, factors: Any, count: Any, into: Any, stride: Any, tiles: Any
) -> Any:  # fmt: skip
    """`count` values as `tiles` tiles of `TILE_COLUMNS`, in float32, each value times its factor.

    Args:
        part: its type says what the values are stored in.
        offsets, factors: addresses of int64, bytes from `source` to each value, with `AHEAD` more
            behind the last; and of as many floats as there are values.
        into, stride: address of the first tile, [count, TILE_COLUMNS], and bytes from tile to tile.
    """
    stored = stored_as(part)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, factors, count, into, stride, tiles = args
        with cgutils.for_range(builder, count) as values:
            place = _step(builder, offsets, values.index, 8)
            start = builder.add(source, _load(builder, place, _i64))
            later = _load(builder, builder.add(place, _i64(8 * AHEAD)), _i64)
            ahead = builder.add(source, later)
            factor = _load(builder, _step(builder, factors, values.index, 4), _f32)
            scale = _fill(builder, factor, 8)
            line = _step(builder, into, values.index, 4 * TILE_COLUMNS)
            with cgutils.for_range(builder, tiles) as loop:
                step = builder.mul(loop.index, _i64(TILE_COLUMNS * SIZES[stored]))
                for at in range(0, TILE_COLUMNS * SIZES[stored], LINE):
                    _prefetch(builder, builder.add(builder.add(ahead, step), _i64(at)), 3)
                to = builder.add(line, builder.mul(loop.index, stride))
                for at in range(0, TILE_COLUMNS, 8):
                    place = builder.add(builder.add(start, step), _i64(at * SIZES[stored]))
                    x = _widen(builder, place, stored)
                    _store(builder, builder.fmul(x, scale), builder.add(to, _i64(4 * at)))
        return context.get_dummy_value()

    return types.void(part, *[_int] * 7), code
