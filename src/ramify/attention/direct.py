"""Few query rows against some keys that are read where they lie: `simd` for `few_rows`.

To lay a block out pays only when many rows read it. What is here gives the very bits of
`simd.tile_1` and its like on a block that was laid out: one chain of fused multiply-adds for each
score over the elements of a key, and for each element of a result over the keys, ascending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.attention.key_vectors import AHEAD, in_columns, key_columns, prefetch_keys
from ramify.attention.simd import (
    INT8,
    LINE,
    SIZES,
    _call,
    _const,
    _f32,
    _fill,
    _i64,
    _load,
    _prefetch,
    _step,
    _store,
    _vec,
    _widen,
    stored_as,
)

KEYS = 8  # whose scores are made at once, as many as `prefetch_keys` fetches
TILES = (1, 2, 4)  # query rows of a tile; where it has more rows than there are, the last repeats
_VECTORS = {1: 4, 2: 4, 4: 2}  # of a result that a tile of so many rows makes at once
_int = types.int64


def _each(builder: Any, tile: Any, emit: Callable[[int], None]) -> None:
    """`emit` for every tile; one of them runs."""
    for num_rows in TILES:
        with builder.if_then(builder.icmp_signed("==", tile, _i64(num_rows))):
            emit(num_rows)


def _rows(builder: Any, base: Any, stride: Any, last: Any, count: int) -> list[Any]:
    """Addresses of rows 0, 1 ... of which none is behind `last`; `stride` in bytes."""
    found = []
    for r in range(count):
        row = builder.select(builder.icmp_signed("<", _i64(r), last), _i64(r), last)
        found.append(builder.add(base, builder.mul(stride, row)))
    return found


def _offset(builder: Any, offsets: Any, index: Any) -> Any:
    return _load(builder, _step(builder, offsets, index, 8), _i64)


def _factor(builder: Any, factors: Any, index: Any) -> Any:
    return _fill(builder, _load(builder, _step(builder, factors, index, 4), _f32), 8)


def _fetcher(builder: Any, later: Sequence[Any]) -> Callable[[], None]:
    """What begins to fetch one more line of some rows, into the second level, at each call.

    Args:
        later: an address, that of int64 with the bytes from it to each row, how many rows there are
            (at least one) and how many lines a row has. Behind the last row, it comes once more.
    """
    source, offsets, num_rows, num_lines = later
    at_row, at_line = (cgutils.alloca_once(builder, _i64) for _ in range(2))
    for place in (at_row, at_line):
        builder.store(_i64(0), place)

    def fetch() -> None:
        row, line = builder.load(at_row), builder.load(at_line)
        start = builder.add(source, _offset(builder, offsets, row))
        _prefetch(builder, builder.add(start, builder.mul(line, _i64(LINE))), 2)
        line = builder.add(line, _i64(1))
        is_end = builder.icmp_signed(">=", line, num_lines)
        builder.store(builder.select(is_end, _i64(0), line), at_line)
        below = builder.add(row, builder.zext(is_end, _i64))
        is_row = builder.icmp_signed("<", below, num_rows)
        builder.store(builder.select(is_row, below, row), at_row)

    return fetch


@intrinsic
def scores(
    _: Any, part: Any, source: Any, offsets: Any, factors: Any, groups: Any, width: Any,
    queries: Any, last: Any, tile: Any, into: Any, stride: Any, later: Any,
) -> Any:  # fmt: skip
    """into[r, j] = queries[r] . key j, for `groups` times `KEYS` keys and the rows of a tile.

    Args:
        part: its type says what the keys are stored in.
        offsets, factors: addresses of int64, bytes from `source` to each key, with `AHEAD` more
            behind the last; and of the floats that keys of a kind with scales are multiplied with.
        width: elements of a key, a multiple of 8.
        queries: address of [last + 1, width] float32.
        tile: one of `TILES`; as many rows are written.
        stride: bytes from row to row of `into`.
        later: what is fetched meanwhile, see `_fetcher`.
    """
    stored = stored_as(part)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, factors, groups, width, queries, last, tile, into, stride = args[:11]
        fetch = _fetcher(builder, cgutils.unpack_tuple(builder, args[11], 4))
        row_bytes = builder.mul(width, _i64(4))

        def emit(num_rows: int) -> None:
            rows = _rows(builder, queries, row_bytes, last, num_rows)
            sums = [cgutils.alloca_once(builder, _vec(8)) for _ in rows]
            with cgutils.for_range(builder, groups) as group:
                first = builder.mul(group.index, _i64(KEYS))
                keys = [builder.add(first, _i64(i)) for i in range(KEYS)]
                soon = _step(builder, offsets, builder.add(first, _i64(AHEAD)), 8)
                starts = [builder.add(source, _offset(builder, offsets, key)) for key in keys]
                scales = _load(builder, _step(builder, factors, first, 4), _vec(8))
                for one in sums:
                    builder.store(_const(0.0, 8), one)

                def add(element: Any, count: int) -> None:
                    """So many elements of the keys, to the sums of all rows."""
                    begin = builder.mul(element, _i64(SIZES[stored]))
                    for eight in range(count // 8):
                        index = builder.add(builder.udiv(element, _i64(8)), _i64(eight))
                        prefetch_keys(builder, source, soon, index, stored)
                        for _ in range(SIZES[stored]):
                            fetch()
                    places = [builder.add(start, begin) for start in starts]
                    columns = key_columns(builder, places, stored, count)
                    if stored >= INT8:
                        columns = [builder.fmul(column, scales) for column in columns]
                    for d, column in enumerate(columns):
                        place = builder.mul(builder.add(element, _i64(d)), _i64(4))
                        for row, one in zip(rows, sums, strict=True):
                            x = _fill(builder, _load(builder, builder.add(row, place), _f32), 8)
                            total = _call(builder, "fma", x, column, builder.load(one))
                            builder.store(total, one)

                in_columns(builder, width, stored, add)
                for r, one in enumerate(sums):
                    at = builder.add(into, builder.mul(stride, _i64(r)))
                    total = builder.fadd(builder.load(one), _const(0.0, 8))
                    _store(builder, total, _step(builder, at, first, 4))

        _each(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(part, *[_int] * 10, later), code


@intrinsic
def mix(
    _: Any, part: Any, source: Any, offsets: Any, factors: Any, count: Any, width: Any,
    weights: Any, stride: Any, last: Any, tile: Any, into: Any, into_stride: Any, later: Any,
) -> Any:  # fmt: skip
    """into[r, :width] += sum over j < count of weights[r, j] * value j, for the rows of a tile.

    Each call ends in +0, as `simd.tile_1` does: between two calls for further keys it changes
    nothing.

    Args:
        part, offsets, factors, width: as in `scores`.
        weights: address of the float32 rows 0 to `last`, `stride` bytes from each to the next.
        tile: one of `TILES`; as many rows are written.
        into_stride: bytes from row to row of `into`.
        later: what is fetched meanwhile, see `_fetcher`.
    """
    stored = stored_as(part)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, factors, count, width = args[:6]
        weights, stride, last, tile, into, into_stride = args[6:12]
        fetch = _fetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))

        def columns(num_rows: int, vectors: int, begin: Any, steps: Any) -> None:
            """`steps` times so many vectors of each row, from the element `begin` on."""
            rows = _rows(builder, weights, stride, last, num_rows)
            sums = [cgutils.alloca_once(builder, _vec(8)) for _ in range(num_rows * vectors)]
            with cgutils.for_range(builder, steps) as loop:
                column = builder.add(begin, builder.mul(loop.index, _i64(8 * vectors)))
                places = [
                    builder.add(
                        builder.add(into, builder.mul(into_stride, _i64(r))),
                        builder.mul(builder.add(column, _i64(8 * v)), _i64(4)),
                    )
                    for r in range(num_rows)
                    for v in range(vectors)
                ]
                for one, place in zip(sums, places, strict=True):
                    builder.store(_load(builder, place, _vec(8)), one)
                start = builder.add(source, builder.mul(column, _i64(SIZES[stored])))
                with cgutils.for_range(builder, count) as keys:
                    at = builder.add(start, _offset(builder, offsets, keys.index))
                    soon = builder.add(keys.index, _i64(AHEAD))
                    ahead = builder.add(start, _offset(builder, offsets, soon))
                    for line in range(0, 8 * vectors * SIZES[stored], LINE):
                        _prefetch(builder, builder.add(ahead, _i64(line)), 3)
                        fetch()
                    value = [
                        _widen(builder, builder.add(at, _i64(8 * v * SIZES[stored])), stored)
                        for v in range(vectors)
                    ]
                    if stored >= INT8:
                        scale = _factor(builder, factors, keys.index)
                        value = [builder.fmul(one, scale) for one in value]
                    for r, row in enumerate(rows):
                        weight = _load(builder, _step(builder, row, keys.index, 4), _f32)
                        wide = _fill(builder, weight, 8)
                        for v, one in enumerate(value):
                            total = sums[r * vectors + v]
                            builder.store(
                                _call(builder, "fma", wide, one, builder.load(total)), total
                            )
                for one, place in zip(sums, places, strict=True):
                    _store(builder, builder.fadd(builder.load(one), _const(0.0, 8)), place)

        def emit(num_rows: int) -> None:
            vectors = _VECTORS[num_rows]
            whole = builder.udiv(width, _i64(8 * vectors))
            rest = builder.mul(whole, _i64(8 * vectors))
            columns(num_rows, vectors, _i64(0), whole)
            left = builder.udiv(builder.sub(width, rest), _i64(8))
            columns(num_rows, 1, rest, left)

        _each(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(part, *[_int] * 11, later), code
