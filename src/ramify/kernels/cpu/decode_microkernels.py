"""Few query rows against some keys that are read where they lie: `simd` for `decode_attention`.

To lay a block out pays only when many rows read it. What is here gives the very bits of
`simd.attention_tile_1` and its like on a block that was laid out: one chain of fused multiply-adds, or of dot
products, for each score over the elements of a key, and for each element of a result over the keys
(in pairs: `decode_microkernels_vnni`), ascending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import BF16, CACHE_LINE, INT8, ITEM_BYTES
from ramify.kernels.cpu.attention_args import storage_kind
from ramify.kernels.cpu.kv_pack import (
    PREFETCH_KEYS,
    prefetch_keys,
    transpose_keys_f32,
    transpose_keys_vnni,
)
from ramify.kernels.cpu.simd import (
    bf16_dot,
    broadcast,
    constant,
    emit_prefetch,
    f32,
    fma,
    i32,
    i64,
    load,
    load_as_f32,
    offset,
    shuffle,
    split_bf16_words,
    store,
    vector_type,
)

KEYS_PER_VECTOR = 8  # a vector of scores; as many as `prefetch_keys` fetches
ROW_TILES = (
    1,
    2,
    4,
)  # query rows of a tile; where it has more rows than there are, the last repeats
_VECTORS_PER_TILE = {1: 4, 2: 4, 4: 2}  # of a result that a tile of so many rows makes at once
_int = types.int64


def for_each_row_tile(builder: Any, tile: Any, emit: Callable[[int], None]) -> None:
    """`emit` for every tile; one of them runs."""
    for num_rows in ROW_TILES:
        with builder.if_then(builder.icmp_signed("==", tile, i64(num_rows))):
            emit(num_rows)


def row_addresses(builder: Any, base: Any, stride: Any, last: Any, count: int) -> list[Any]:
    """Addresses of rows 0, 1 ... of which none is behind `last`; `stride` in bytes."""
    found = []
    for r in range(count):
        row = builder.select(builder.icmp_signed("<", i64(r), last), i64(r), last)
        found.append(builder.add(base, builder.mul(stride, row)))
    return found


def load_offset(builder: Any, offsets: Any, index: Any) -> Any:
    """The int64 of that number."""
    return load(builder, offset(builder, offsets, index, 8), i64)


def load_broadcast(builder: Any, values: Any, index: Any, lanes: int = 8) -> Any:
    """The float, or the word, of that number in all lanes."""
    return broadcast(builder, load(builder, offset(builder, values, index, 4), f32), lanes)


def line_prefetcher(builder: Any, prefetch_rows: Sequence[Any]) -> Callable[..., None]:
    """What begins to fetch one more line of some rows, or several, into the second level, at each call.

    Args:
        prefetch_rows: an address, that of int64 with the bytes from it to each row, how many rows there are
            (at least one) and how many lines a row has. Behind the last row, it comes again and again.
    """
    source, offsets, num_rows, num_lines = prefetch_rows
    row_bytes = builder.mul(num_lines, i64(CACHE_LINE))
    last = offset(builder, offsets, builder.sub(num_rows, i64(1)), 8)
    line, end, row = (cgutils.alloca_once(builder, i64) for _ in range(3))

    def begin(place: Any) -> None:
        """The row whose offset lies there."""
        start = builder.add(source, load(builder, place, i64))
        builder.store(start, line)
        builder.store(builder.add(start, row_bytes), end)
        builder.store(place, row)

    def fetch(count: int = 1) -> None:
        for _ in range(count):
            emit_prefetch(builder, builder.load(line), 2)
            further = builder.add(builder.load(line), i64(CACHE_LINE))
            builder.store(further, line)
            with builder.if_then(
                builder.icmp_signed(">=", further, builder.load(end)), likely=False
            ):
                below = builder.add(builder.load(row), i64(8))
                is_row = builder.icmp_signed("<=", below, last)
                begin(builder.select(is_row, below, last))

    begin(offsets)
    return fetch


def _is_deinterleaved(stored: int, count: int) -> bool:
    """Whether so many vectors of values come as `_deinterleave` makes them: it is half the work."""
    return stored == BF16 and count > 1


def _deinterleave(builder: Any, vectors: list[Any]) -> list[Any]:
    """Two and two vectors as one of their even elements and one of their odd ones."""
    return _shuffle_pairs(builder, vectors, [[*range(at, 16, 2)] for at in (0, 1)])


def _interleave(builder: Any, vectors: list[Any]) -> list[Any]:
    """What `_deinterleave` took apart."""
    halves = [[at + i // 2 + i % 2 * 8 for i in range(8)] for at in (0, 4)]
    return _shuffle_pairs(builder, vectors, halves)


def _shuffle_pairs(builder: Any, vectors: list[Any], halves: list[list[int]]) -> list[Any]:
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [shuffle(builder, a, b, places) for a, b in pairs for places in halves]


def load_accumulators(
    builder: Any,
    places: list[Any],
    sums: list[Any],
    lanes: int = 8,
    *,
    is_deinterleaved: bool = False,
) -> None:
    """Sums as they are in memory, in vectors of so many lanes."""
    found = [load(builder, place, vector_type(lanes)) for place in places]
    for x, one in zip(
        _deinterleave(builder, found) if is_deinterleaved else found, sums, strict=True
    ):
        builder.store(x, one)


def accumulate_rows(
    builder: Any, add: Callable[..., Any], x: Any, vectors: list[Any], sums: list[Any]
) -> None:
    """sums += x * vectors, as `add` does it."""
    for y, one in zip(vectors, sums, strict=True):
        builder.store(add(builder, x, y, builder.load(one)), one)


def _qk_scheme(
    stored: int, *, vnni: bool
) -> tuple[Callable[..., Any], int, Callable[..., list[Any]], int, int]:
    """How keys are multiplied: what adds, bytes of a query's element, what turns eight elements.

    And how many groups of keys have their chains of additions side by side, so that they wait less,
    and how many of these are one vector.
    """
    if vnni:
        return bf16_dot, 2, transpose_keys_vnni, 4, 2
    return fma, 4, partial(transpose_keys_f32, kind=stored), 2 if stored == BF16 else 1, 1


def store_accumulators(
    builder: Any,
    sums: list[Any],
    places: list[Any],
    *,
    is_deinterleaved: bool = False,
    scale: Any = None,
) -> None:
    """Sums, times `scale` if there is one, that end in +0."""
    found = [builder.load(one) for one in sums]
    lanes = found[0].type.count
    if scale is not None:
        found = [builder.fmul(one, broadcast(builder, scale, lanes)) for one in found]
    found = [builder.fadd(one, constant(0.0, lanes)) for one in found]
    for x, place in zip(
        _interleave(builder, found) if is_deinterleaved else found, places, strict=True
    ):
        store(builder, x, place)


@intrinsic
def qk_in_place(
    _: Any, plane: Any, source: Any, offsets: Any, scales: Any, groups: Any, width: Any,
    queries: Any, last: Any, tile: Any, into: Any, stride: Any, scale: Any, prefetch_rows: Any,
) -> Any:  # fmt: skip
    """into[r, j] = queries[r] . key j, for `groups` times `KEYS_PER_VECTOR` keys and the rows of a tile.

    In pairs the queries are bfloat16, at the beginnings of their rows, and results are multiplied
    by `scale`.

    Args:
        plane: its type says what the keys are stored in.
        offsets, scales: addresses of int64, bytes from `source` to each key, with `PREFETCH_KEYS` more
            behind the last; and of the floats that keys of a kind with scales are multiplied with.
        width: elements of a key, a multiple of 8.
        queries: address of rows of `width` floats: float32, or bfloat16 in the first half.
        tile: one of `ROW_TILES`; as many rows are written.
        stride: bytes from row to row of `into`.
        prefetch_rows: what is fetched meanwhile, see `line_prefetcher`.
    """
    stored, pairs = storage_kind(plane), plane.instance_class.vnni
    add, query_size, turned, at_once, of_vector = _qk_scheme(stored, vnni=pairs)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, scales, groups, width, queries, last, tile, into, stride = args[:11]
        fetch = line_prefetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))
        row_bytes = builder.mul(width, i64(4))

        def columns_of(first: Any, element: Any, num_keys: int) -> list[Any]:
            """Eight elements of some keys; what is read later is fetched."""
            if not pairs:  # from the second level these come soon enough
                index = builder.udiv(element, i64(8))
                soon = offset(builder, offsets, builder.add(first, i64(PREFETCH_KEYS)), 8)
                prefetch_keys(builder, source, soon, index, stored)
            fetch(ITEM_BYTES[stored] * num_keys // KEYS_PER_VECTOR)
            begin = builder.add(source, builder.mul(element, i64(ITEM_BYTES[stored])))
            keys = [
                load_offset(builder, offsets, builder.add(first, i64(i))) for i in range(num_keys)
            ]
            columns = turned(builder, [builder.add(begin, key) for key in keys])
            if stored >= INT8:
                key_scales = load(builder, offset(builder, scales, first, 4), vector_type(8))
                columns = [builder.fmul(column, key_scales) for column in columns]
            return columns

        def some(rows: list[Any], begin: Any, rounds: Any, count: int, lanes: int) -> None:
            """`rounds` times so many vectors of keys, from the group `begin` on."""
            vec = vector_type(lanes)
            sums = [[cgutils.alloca_once(builder, vec) for _ in range(count)] for _ in rows]
            with cgutils.for_range(builder, rounds) as loop:
                start = builder.mul(begin, i64(KEYS_PER_VECTOR))
                start = builder.add(start, builder.mul(loop.index, i64(count * lanes)))
                firsts = [builder.add(start, i64(i * lanes)) for i in range(count)]
                for one in chain.from_iterable(sums):
                    builder.store(constant(0.0, lanes), one)
                with cgutils.for_range(builder, builder.udiv(width, i64(8))) as eights:
                    element = builder.mul(eights.index, i64(8))
                    columns = [columns_of(first, element, lanes) for first in firsts]
                    begin_of = builder.mul(element, i64(query_size))
                    for d in range(len(columns[0])):
                        place = builder.add(begin_of, i64(4 * d))
                        for row, mine in zip(rows, sums, strict=True):
                            one = load(builder, builder.add(row, place), f32)
                            x, vectors = broadcast(builder, one, lanes), [of[d] for of in columns]
                            accumulate_rows(builder, add, x, vectors, mine)
                for r, mine in enumerate(sums):
                    line = builder.add(into, builder.mul(stride, i64(r)))
                    places = [offset(builder, line, first, 4) for first in firsts]
                    store_accumulators(builder, mine, places, scale=args[11] if pairs else None)

        def emit(num_rows: int) -> None:
            rows = row_addresses(builder, queries, row_bytes, last, num_rows)
            rounds = builder.udiv(groups, i64(at_once))
            some(rows, i64(0), rounds, at_once // of_vector, KEYS_PER_VECTOR * of_vector)
            done = builder.mul(rounds, i64(at_once))
            if at_once > 1:
                some(rows, done, builder.sub(groups, done), 1, KEYS_PER_VECTOR)

        for_each_row_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 10, types.float32, prefetch_rows), code


def _load_values(builder: Any, address: Any, stored: int, count: int) -> list[Any]:
    """So many vectors of 8 elements; those of bfloat16 as `_deinterleave` would make them."""
    if not _is_deinterleaved(stored, count):
        places = [builder.add(address, i64(8 * v * ITEM_BYTES[stored])) for v in range(count)]
        return [load_as_f32(builder, place, stored) for place in places]
    vectors = []
    for v in range(0, count, 2):
        pairs = load(builder, builder.add(address, i64(16 * v)), vector_type(8, i32))
        vectors += split_bf16_words(builder, pairs)
    return vectors


@intrinsic
def pv_in_place(
    _: Any, plane: Any, source: Any, offsets: Any, scales: Any, count: Any, width: Any,
    weights: Any, stride: Any, last: Any, tile: Any, into: Any, into_stride: Any, prefetch_rows: Any,
) -> Any:  # fmt: skip
    """into[r, :width] += sum over j < count of weights[r, j] * value j, for the rows of a tile.

    Each call ends in +0, as `simd.attention_tile_1` does: between two calls for further keys it changes
    nothing.

    Args:
        plane, offsets, scales, width: as in `qk_in_place`.
        weights: address of the float32 rows 0 to `last`, `stride` bytes from each to the next.
        tile: one of `ROW_TILES`; as many rows are written.
        into_stride: bytes from row to row of `into`.
        prefetch_rows: what is fetched meanwhile, see `line_prefetcher`.
    """
    stored = storage_kind(plane)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, scales, count, width = args[:6]
        weights, stride, last, tile, into, into_stride = args[6:12]
        fetch = line_prefetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))

        def columns(num_rows: int, vectors: int, begin: Any, steps: Any) -> None:
            """`steps` times so many vectors of each row, from the element `begin` on."""
            rows = row_addresses(builder, weights, stride, last, num_rows)
            sums = [
                [cgutils.alloca_once(builder, vector_type(8)) for _ in range(vectors)] for _ in rows
            ]
            is_apart = _is_deinterleaved(stored, vectors)
            with cgutils.for_range(builder, steps) as loop:
                column = builder.add(begin, builder.mul(loop.index, i64(8 * vectors)))
                start = builder.add(source, builder.mul(column, i64(ITEM_BYTES[stored])))
                first = offset(builder, into, column, 4)
                lines = [
                    builder.add(first, builder.mul(into_stride, i64(r))) for r in range(num_rows)
                ]
                places = [[builder.add(at, i64(32 * v)) for v in range(vectors)] for at in lines]
                for mine, at in zip(sums, places, strict=True):
                    load_accumulators(builder, at, mine, is_deinterleaved=is_apart)

                with cgutils.for_range(builder, count) as keys:
                    soon = load_offset(
                        builder, offsets, builder.add(keys.index, i64(PREFETCH_KEYS))
                    )
                    for line in range(0, 8 * vectors * ITEM_BYTES[stored], CACHE_LINE):
                        emit_prefetch(builder, builder.add(builder.add(start, soon), i64(line)), 3)
                        fetch()
                    at = builder.add(start, load_offset(builder, offsets, keys.index))
                    value = _load_values(builder, at, stored, vectors)
                    if stored >= INT8:
                        scale = load_broadcast(builder, scales, keys.index)
                        value = [builder.fmul(one, scale) for one in value]
                    for row, mine in zip(rows, sums, strict=True):
                        weight = load_broadcast(builder, row, keys.index)
                        accumulate_rows(builder, fma, weight, value, mine)
                for mine, at in zip(sums, places, strict=True):
                    store_accumulators(builder, mine, at, is_deinterleaved=is_apart)

        def emit(num_rows: int) -> None:
            vectors = _VECTORS_PER_TILE[num_rows]
            whole = builder.udiv(width, i64(8 * vectors))
            rest = builder.mul(whole, i64(8 * vectors))
            columns(num_rows, vectors, i64(0), whole)
            left = builder.udiv(builder.sub(width, rest), i64(8))
            columns(num_rows, 1, rest, left)

        for_each_row_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 11, prefetch_rows), code
