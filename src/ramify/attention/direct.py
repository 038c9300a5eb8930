"""Few query rows against some keys that are read where they lie: `simd` for `few_rows`.

To lay a block out pays only when many rows read it. What is here gives the very bits of
`simd.tile_1` and its like on a block that was laid out: one chain of fused multiply-adds, or of dot
products, for each score over the elements of a key, and for each element of a result over the keys
(in pairs: `direct_pairs`), ascending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.attention.kernel_args import stored_as
from ramify.attention.key_vectors import AHEAD, key_columns, key_pairs, prefetch_keys
from ramify.attention.simd import (
    BF16,
    INT8,
    LINE,
    SIZES,
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
    _shuffle,
    _step,
    _store,
    _vec,
    _widen,
)

KEYS = 8  # a vector of scores; as many as `prefetch_keys` fetches
TILES = (1, 2, 4)  # query rows of a tile; where it has more rows than there are, the last repeats
_VECTORS = {1: 4, 2: 4, 4: 2}  # of a result that a tile of so many rows makes at once
_int = types.int64


def each_tile(builder: Any, tile: Any, emit: Callable[[int], None]) -> None:
    """`emit` for every tile; one of them runs."""
    for num_rows in TILES:
        with builder.if_then(builder.icmp_signed("==", tile, _i64(num_rows))):
            emit(num_rows)


def rows_of(builder: Any, base: Any, stride: Any, last: Any, count: int) -> list[Any]:
    """Addresses of rows 0, 1 ... of which none is behind `last`; `stride` in bytes."""
    found = []
    for r in range(count):
        row = builder.select(builder.icmp_signed("<", _i64(r), last), _i64(r), last)
        found.append(builder.add(base, builder.mul(stride, row)))
    return found


def offset_at(builder: Any, offsets: Any, index: Any) -> Any:
    """The int64 of that number."""
    return _load(builder, _step(builder, offsets, index, 8), _i64)


def factor_at(builder: Any, factors: Any, index: Any, lanes: int = 8) -> Any:
    """The float, or the word, of that number in all lanes."""
    return _fill(builder, _load(builder, _step(builder, factors, index, 4), _f32), lanes)


def fetcher(builder: Any, later: Sequence[Any]) -> Callable[..., None]:
    """What begins to fetch one more line of some rows, or several, into the second level, at each call.

    Args:
        later: an address, that of int64 with the bytes from it to each row, how many rows there are
            (at least one) and how many lines a row has. Behind the last row, it comes again and again.
    """
    source, offsets, num_rows, num_lines = later
    row_bytes = builder.mul(num_lines, _i64(LINE))
    last = _step(builder, offsets, builder.sub(num_rows, _i64(1)), 8)
    line, end, row = (cgutils.alloca_once(builder, _i64) for _ in range(3))

    def begin(place: Any) -> None:
        """The row whose offset lies there."""
        start = builder.add(source, _load(builder, place, _i64))
        builder.store(start, line)
        builder.store(builder.add(start, row_bytes), end)
        builder.store(place, row)

    def fetch(count: int = 1) -> None:
        for _ in range(count):
            _prefetch(builder, builder.load(line), 2)
            further = builder.add(builder.load(line), _i64(LINE))
            builder.store(further, line)
            with builder.if_then(
                builder.icmp_signed(">=", further, builder.load(end)), likely=False
            ):
                below = builder.add(builder.load(row), _i64(8))
                is_row = builder.icmp_signed("<=", below, last)
                begin(builder.select(is_row, below, last))

    begin(offsets)
    return fetch


def _is_apart(stored: int, count: int) -> bool:
    """Whether so many vectors of values come as `_apart` makes them: it is half the work."""
    return stored == BF16 and count > 1


def _apart(builder: Any, vectors: list[Any]) -> list[Any]:
    """Two and two vectors as one of their even elements and one of their odd ones."""
    return _paired(builder, vectors, [[*range(at, 16, 2)] for at in (0, 1)])


def _together(builder: Any, vectors: list[Any]) -> list[Any]:
    """What `_apart` took apart."""
    halves = [[at + i // 2 + i % 2 * 8 for i in range(8)] for at in (0, 4)]
    return _paired(builder, vectors, halves)


def _paired(builder: Any, vectors: list[Any], halves: list[list[int]]) -> list[Any]:
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [_shuffle(builder, a, b, places) for a, b in pairs for places in halves]


def take_sums(
    builder: Any, places: list[Any], sums: list[Any], lanes: int = 8, *, is_apart: bool = False
) -> None:
    """Sums as they are in memory, in vectors of so many lanes."""
    found = [_load(builder, place, _vec(lanes)) for place in places]
    for x, one in zip(_apart(builder, found) if is_apart else found, sums, strict=True):
        builder.store(x, one)


def accumulate(
    builder: Any, add: Callable[..., Any], x: Any, vectors: list[Any], sums: list[Any]
) -> None:
    """sums += x * vectors, as `add` does it."""
    for y, one in zip(vectors, sums, strict=True):
        builder.store(add(builder, x, y, builder.load(one)), one)


def _how(
    stored: int, *, pairs: bool
) -> tuple[Callable[..., Any], int, Callable[..., list[Any]], int, int]:
    """How keys are multiplied: what adds, bytes of a query's element, what turns eight elements.

    And how many groups of keys have their chains of additions side by side, so that they wait less,
    and how many of these are one vector.
    """
    if pairs:
        return _dot, 2, key_pairs, 4, 2
    return _fma, 4, partial(key_columns, kind=stored), 2 if stored == BF16 else 1, 1


def put_sums(
    builder: Any, sums: list[Any], places: list[Any], *, is_apart: bool = False, scale: Any = None
) -> None:
    """Sums, times `scale` if there is one, that end in +0."""
    found = [builder.load(one) for one in sums]
    lanes = found[0].type.count
    if scale is not None:
        found = [builder.fmul(one, _fill(builder, scale, lanes)) for one in found]
    found = [builder.fadd(one, _const(0.0, lanes)) for one in found]
    for x, place in zip(_together(builder, found) if is_apart else found, places, strict=True):
        _store(builder, x, place)


@intrinsic
def scores(
    _: Any, part: Any, source: Any, offsets: Any, factors: Any, groups: Any, width: Any,
    queries: Any, last: Any, tile: Any, into: Any, stride: Any, scale: Any, later: Any,
) -> Any:  # fmt: skip
    """into[r, j] = queries[r] . key j, for `groups` times `KEYS` keys and the rows of a tile.

    In pairs the queries are bfloat16, at the beginnings of their rows, and results are multiplied
    by `scale`.

    Args:
        part: its type says what the keys are stored in.
        offsets, factors: addresses of int64, bytes from `source` to each key, with `AHEAD` more
            behind the last; and of the floats that keys of a kind with scales are multiplied with.
        width: elements of a key, a multiple of 8.
        queries: address of rows of `width` floats: float32, or bfloat16 in the first half.
        tile: one of `TILES`; as many rows are written.
        stride: bytes from row to row of `into`.
        later: what is fetched meanwhile, see `fetcher`.
    """
    stored, pairs = stored_as(part), part.instance_class.pairs
    add, query_size, turned, at_once, of_vector = _how(stored, pairs=pairs)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, factors, groups, width, queries, last, tile, into, stride = args[:11]
        fetch = fetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))
        row_bytes = builder.mul(width, _i64(4))

        def columns_of(first: Any, element: Any, num_keys: int) -> list[Any]:
            """Eight elements of some keys; what is read later is fetched."""
            if not pairs:  # from the second level these come soon enough
                index = builder.udiv(element, _i64(8))
                soon = _step(builder, offsets, builder.add(first, _i64(AHEAD)), 8)
                prefetch_keys(builder, source, soon, index, stored)
            fetch(SIZES[stored] * num_keys // KEYS)
            begin = builder.add(source, builder.mul(element, _i64(SIZES[stored])))
            keys = [
                offset_at(builder, offsets, builder.add(first, _i64(i))) for i in range(num_keys)
            ]
            columns = turned(builder, [builder.add(begin, key) for key in keys])
            if stored >= INT8:
                scales = _load(builder, _step(builder, factors, first, 4), _vec(8))
                columns = [builder.fmul(column, scales) for column in columns]
            return columns

        def some(rows: list[Any], begin: Any, rounds: Any, count: int, lanes: int) -> None:
            """`rounds` times so many vectors of keys, from the group `begin` on."""
            vec = _vec(lanes)
            sums = [[cgutils.alloca_once(builder, vec) for _ in range(count)] for _ in rows]
            with cgutils.for_range(builder, rounds) as loop:
                start = builder.mul(begin, _i64(KEYS))
                start = builder.add(start, builder.mul(loop.index, _i64(count * lanes)))
                firsts = [builder.add(start, _i64(i * lanes)) for i in range(count)]
                for one in chain.from_iterable(sums):
                    builder.store(_const(0.0, lanes), one)
                with cgutils.for_range(builder, builder.udiv(width, _i64(8))) as eights:
                    element = builder.mul(eights.index, _i64(8))
                    columns = [columns_of(first, element, lanes) for first in firsts]
                    begin_of = builder.mul(element, _i64(query_size))
                    for d in range(len(columns[0])):
                        place = builder.add(begin_of, _i64(4 * d))
                        for row, mine in zip(rows, sums, strict=True):
                            one = _load(builder, builder.add(row, place), _f32)
                            x, vectors = _fill(builder, one, lanes), [of[d] for of in columns]
                            accumulate(builder, add, x, vectors, mine)
                for r, mine in enumerate(sums):
                    line = builder.add(into, builder.mul(stride, _i64(r)))
                    places = [_step(builder, line, first, 4) for first in firsts]
                    put_sums(builder, mine, places, scale=args[11] if pairs else None)

        def emit(num_rows: int) -> None:
            rows = rows_of(builder, queries, row_bytes, last, num_rows)
            rounds = builder.udiv(groups, _i64(at_once))
            some(rows, _i64(0), rounds, at_once // of_vector, KEYS * of_vector)
            done = builder.mul(rounds, _i64(at_once))
            if at_once > 1:
                some(rows, done, builder.sub(groups, done), 1, KEYS)

        each_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(part, *[_int] * 10, types.float32, later), code


def _values_at(builder: Any, address: Any, stored: int, count: int) -> list[Any]:
    """So many vectors of 8 elements; those of bfloat16 as `_apart` would make them."""
    if not _is_apart(stored, count):
        places = [builder.add(address, _i64(8 * v * SIZES[stored])) for v in range(count)]
        return [_widen(builder, place, stored) for place in places]
    vectors = []
    for v in range(0, count, 2):
        pairs = _load(builder, builder.add(address, _i64(16 * v)), _vec(8, _i32))
        vectors += _halves_of(builder, pairs)
    return vectors


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
        later: what is fetched meanwhile, see `fetcher`.
    """
    stored = stored_as(part)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, factors, count, width = args[:6]
        weights, stride, last, tile, into, into_stride = args[6:12]
        fetch = fetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))

        def columns(num_rows: int, vectors: int, begin: Any, steps: Any) -> None:
            """`steps` times so many vectors of each row, from the element `begin` on."""
            rows = rows_of(builder, weights, stride, last, num_rows)
            sums = [[cgutils.alloca_once(builder, _vec(8)) for _ in range(vectors)] for _ in rows]
            is_apart = _is_apart(stored, vectors)
            with cgutils.for_range(builder, steps) as loop:
                column = builder.add(begin, builder.mul(loop.index, _i64(8 * vectors)))
                start = builder.add(source, builder.mul(column, _i64(SIZES[stored])))
                first = _step(builder, into, column, 4)
                lines = [
                    builder.add(first, builder.mul(into_stride, _i64(r))) for r in range(num_rows)
                ]
                places = [[builder.add(at, _i64(32 * v)) for v in range(vectors)] for at in lines]
                for mine, at in zip(sums, places, strict=True):
                    take_sums(builder, at, mine, is_apart=is_apart)

                with cgutils.for_range(builder, count) as keys:
                    soon = offset_at(builder, offsets, builder.add(keys.index, _i64(AHEAD)))
                    for line in range(0, 8 * vectors * SIZES[stored], LINE):
                        _prefetch(builder, builder.add(builder.add(start, soon), _i64(line)), 3)
                        fetch()
                    at = builder.add(start, offset_at(builder, offsets, keys.index))
                    value = _values_at(builder, at, stored, vectors)
                    if stored >= INT8:
                        scale = factor_at(builder, factors, keys.index)
                        value = [builder.fmul(one, scale) for one in value]
                    for row, mine in zip(rows, sums, strict=True):
                        weight = factor_at(builder, row, keys.index)
                        accumulate(builder, _fma, weight, value, mine)
                for mine, at in zip(sums, places, strict=True):
                    put_sums(builder, mine, at, is_apart=is_apart)

        def emit(num_rows: int) -> None:
            vectors = _VECTORS[num_rows]
            whole = builder.udiv(width, _i64(8 * vectors))
            rest = builder.mul(whole, _i64(8 * vectors))
            columns(num_rows, vectors, _i64(0), whole)
            left = builder.udiv(builder.sub(width, rest), _i64(8))
            columns(num_rows, 1, rest, left)

        each_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(part, *[_int] * 11, later), code
