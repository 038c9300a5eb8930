"""Q·Kᵀ and P·V of 1, 2 or 4 query rows over K/V read in place, as LLVM IR.

Packing a block pays only if many rows read it. The bits are those of `attention_tile_*` over a packed
block: one ascending chain of FMA (VNNI: of dot products) per score over the elements of a key, and
per element of the output over the keys (VNNI: `decode_microkernels_vnni`).
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
    row_addresses,
    shuffle,
    split_bf16_words,
    store,
    vector_type,
)

KEYS_PER_VECTOR = 8  # scores of a vector; `prefetch_keys` prefetches as many keys
ROW_TILES = (1, 2, 4)  # query rows of a tile; the last row repeats where there are fewer
# output vectors per row that a tile of n rows computes at once
_VECTORS_PER_TILE = {1: 4, 2: 4, 4: 2}
_int = types.int64


def for_each_row_tile(builder: Any, tile: Any, emit: Callable[[int], None]) -> None:
    """Emit code for every tile size; `tile` selects the one that runs."""
    for num_rows in ROW_TILES:
        with builder.if_then(builder.icmp_signed("==", tile, i64(num_rows))):
            emit(num_rows)


def load_offset(builder: Any, offsets: Any, index: Any) -> Any:
    """offsets[index] of an array of int64."""
    return load(builder, offset(builder, offsets, index, 8), i64)


def load_broadcast(builder: Any, values: Any, index: Any, lanes: int = 8) -> Any:
    """values[index] of an array of 32-bit words, in all lanes."""
    return broadcast(builder, load(builder, offset(builder, values, index, 4), f32), lanes)


def line_prefetcher(builder: Any, prefetch_rows: Sequence[Any]) -> Callable[..., None]:
    """A function that emits the prefetch of the next `count` cache lines of some rows into L2.

    Args:
        prefetch_rows: an address, the address of int64 byte offsets from it to each row, the number
            of rows (at least 1), and cache lines per row. After the last row, it starts over with it.
    """
    source, offsets, num_rows, num_lines = prefetch_rows
    row_bytes = builder.mul(num_lines, i64(CACHE_LINE))
    last_offset = offset(builder, offsets, builder.sub(num_rows, i64(1)), 8)
    line, end, row_offset = (cgutils.alloca_once(builder, i64) for _ in range(3))

    def start_row(offset_address: Any) -> None:
        """Go to the row whose offset is at this address."""
        start = builder.add(source, load(builder, offset_address, i64))
        builder.store(start, line)
        builder.store(builder.add(start, row_bytes), end)
        builder.store(offset_address, row_offset)

    def prefetch(count: int = 1) -> None:
        for _ in range(count):
            emit_prefetch(builder, builder.load(line), 2)
            next_line = builder.add(builder.load(line), i64(CACHE_LINE))
            builder.store(next_line, line)
            with builder.if_then(
                builder.icmp_signed(">=", next_line, builder.load(end)), likely=False
            ):
                next_row = builder.add(builder.load(row_offset), i64(8))
                is_row = builder.icmp_signed("<=", next_row, last_offset)
                start_row(builder.select(is_row, next_row, last_offset))

    start_row(offsets)
    return prefetch


def _is_deinterleaved(stored: int, count: int) -> bool:
    """Whether `count` vectors of values are loaded deinterleaved, which is half the work for bf16."""
    return stored == BF16 and count > 1


def _deinterleave(builder: Any, vectors: list[Any]) -> list[Any]:
    """Each two vectors as one of their even and one of their odd elements."""
    return _shuffle_pairs(builder, vectors, [[*range(parity, 16, 2)] for parity in (0, 1)])


def _interleave(builder: Any, vectors: list[Any]) -> list[Any]:
    """The inverse of `_deinterleave`."""
    indices = [[begin + i // 2 + i % 2 * 8 for i in range(8)] for begin in (0, 4)]
    return _shuffle_pairs(builder, vectors, indices)


def _shuffle_pairs(builder: Any, vectors: list[Any], index_lists: list[list[int]]) -> list[Any]:
    pairs = zip(vectors[::2], vectors[1::2], strict=True)
    return [shuffle(builder, a, b, indices) for a, b in pairs for indices in index_lists]


def load_accumulators(
    builder: Any,
    addresses: list[Any],
    sums: list[Any],
    lanes: int = 8,
    *,
    is_deinterleaved: bool = False,
) -> None:
    """Load sums of previous calls into the accumulators."""
    vectors = [load(builder, address, vector_type(lanes)) for address in addresses]
    for x, acc in zip(
        _deinterleave(builder, vectors) if is_deinterleaved else vectors, sums, strict=True
    ):
        builder.store(x, acc)


def accumulate_rows(
    builder: Any, add: Callable[..., Any], x: Any, vectors: list[Any], sums: list[Any]
) -> None:
    """sums += x * vectors by `add`, that is `fma` or `bf16_dot`."""
    for y, acc in zip(vectors, sums, strict=True):
        builder.store(add(builder, x, y, builder.load(acc)), acc)


def _qk_scheme(
    stored: int, *, vnni: bool
) -> tuple[Callable[..., Any], int, Callable[..., list[Any]], int, int]:
    """How scores are computed, by storage kind.

    Returns `fma` or `bf16_dot`; bytes of a query's element; the transposition of eight elements;
    groups of KEYS_PER_VECTOR keys per round, whose chains run side by side to hide latency; groups per
    vector.
    """
    if vnni:
        return bf16_dot, 2, transpose_keys_vnni, 4, 2
    return fma, 4, partial(transpose_keys_f32, kind=stored), 2 if stored == BF16 else 1, 1


def store_accumulators(
    builder: Any,
    sums: list[Any],
    addresses: list[Any],
    *,
    is_deinterleaved: bool = False,
    scale: Any = None,
) -> None:
    """Store the accumulators, times `scale` if given, + 0."""
    vectors = [builder.load(x) for x in sums]
    lanes = vectors[0].type.count
    if scale is not None:
        vectors = [builder.fmul(x, broadcast(builder, scale, lanes)) for x in vectors]
    vectors = [builder.fadd(x, constant(0.0, lanes)) for x in vectors]
    for y, address in zip(
        _interleave(builder, vectors) if is_deinterleaved else vectors, addresses, strict=True
    ):
        store(builder, y, address)


@intrinsic
def qk_in_place(
    _: Any, plane: Any, source: Any, offsets: Any, scales: Any, groups: Any, width: Any,
    queries: Any, last: Any, tile: Any, into: Any, stride: Any, scale: Any, prefetch_rows: Any,
) -> Any:  # fmt: skip
    """into[r, j] = queries[r] · keys[j], for `groups` * KEYS_PER_VECTOR keys and the rows of a tile.

    VNNI: queries are bf16, and scores are multiplied by `scale`.

    Args:
        plane: of the keys; its type is their storage kind.
        offsets: address of int64: bytes from `source` to each key; readable `PREFETCH_KEYS` further.
        scales: address of float32 per key, for quantized kinds.
        width: elements of a key, a multiple of 8.
        queries: address of rows of `width` floats: float32, or bf16 in the first half.
        last: index of the last query row.
        tile: one of `ROW_TILES`: how many rows are written.
        stride: bytes from row to row of `into`.
        prefetch_rows: prefetched meanwhile, see `line_prefetcher`.
    """
    stored, vnni = storage_kind(plane), plane.instance_class.vnni
    add, query_bytes, transpose, groups_per_round, groups_per_vector = _qk_scheme(stored, vnni=vnni)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, scales, groups, width, queries, last, tile, into, stride = args[:11]
        prefetch = line_prefetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))
        row_bytes = builder.mul(width, i64(4))

        def columns_of(first: Any, element: Any, num_keys: int) -> list[Any]:
            """Eight elements of some keys, transposed; prefetches what is read next."""
            if not vnni:  # VNNI: reading from L2 is fast enough
                index = builder.udiv(element, i64(8))
                next_offsets = offset(builder, offsets, builder.add(first, i64(PREFETCH_KEYS)), 8)
                prefetch_keys(builder, source, next_offsets, index, stored)
            prefetch(ITEM_BYTES[stored] * num_keys // KEYS_PER_VECTOR)
            source_at = builder.add(source, builder.mul(element, i64(ITEM_BYTES[stored])))
            keys = [
                load_offset(builder, offsets, builder.add(first, i64(i))) for i in range(num_keys)
            ]
            columns = transpose(builder, [builder.add(source_at, key) for key in keys])
            if stored >= INT8:
                key_scales = load(builder, offset(builder, scales, first, 4), vector_type(8))
                columns = [builder.fmul(column, key_scales) for column in columns]
            return columns

        def score_groups(rows: list[Any], begin: Any, rounds: Any, count: int, lanes: int) -> None:
            """Score `rounds` * `count` vectors of `lanes` keys, from group `begin` on."""
            vector = vector_type(lanes)
            sums = [[cgutils.alloca_once(builder, vector) for _ in range(count)] for _ in rows]
            with cgutils.for_range(builder, rounds) as loop:
                start = builder.mul(begin, i64(KEYS_PER_VECTOR))
                start = builder.add(start, builder.mul(loop.index, i64(count * lanes)))
                firsts = [builder.add(start, i64(i * lanes)) for i in range(count)]
                for acc in chain.from_iterable(sums):
                    builder.store(constant(0.0, lanes), acc)
                with cgutils.for_range(builder, builder.udiv(width, i64(8))) as chunks:
                    element = builder.mul(chunks.index, i64(8))
                    columns = [columns_of(first, element, lanes) for first in firsts]
                    query_offset = builder.mul(element, i64(query_bytes))
                    for d in range(len(columns[0])):
                        word_offset = builder.add(query_offset, i64(4 * d))
                        for row, accs in zip(rows, sums, strict=True):
                            word = load(builder, builder.add(row, word_offset), f32)
                            x = broadcast(builder, word, lanes)
                            vectors = [group[d] for group in columns]
                            accumulate_rows(builder, add, x, vectors, accs)
                for r, accs in enumerate(sums):
                    out_row = builder.add(into, builder.mul(stride, i64(r)))
                    addresses = [offset(builder, out_row, first, 4) for first in firsts]
                    store_accumulators(builder, accs, addresses, scale=args[11] if vnni else None)

        def emit(num_rows: int) -> None:
            rows = row_addresses(builder, queries, row_bytes, last, num_rows)
            rounds = builder.udiv(groups, i64(groups_per_round))
            count = groups_per_round // groups_per_vector
            score_groups(rows, i64(0), rounds, count, KEYS_PER_VECTOR * groups_per_vector)
            done = builder.mul(rounds, i64(groups_per_round))
            if groups_per_round > 1:
                score_groups(rows, done, builder.sub(groups, done), 1, KEYS_PER_VECTOR)

        for_each_row_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 10, types.float32, prefetch_rows), code


def _load_values(builder: Any, address: Any, stored: int, count: int) -> list[Any]:
    """Load `count` vectors of 8 elements, deinterleaved where `_is_deinterleaved`."""
    if not _is_deinterleaved(stored, count):
        addresses = [builder.add(address, i64(8 * v * ITEM_BYTES[stored])) for v in range(count)]
        return [load_as_f32(builder, address, stored) for address in addresses]
    vectors = []
    for v in range(0, count, 2):
        words = load(builder, builder.add(address, i64(16 * v)), vector_type(8, i32))
        vectors += split_bf16_words(builder, words)
    return vectors


@intrinsic
def pv_in_place(
    _: Any, plane: Any, source: Any, offsets: Any, scales: Any, count: Any, width: Any,
    weights: Any, stride: Any, last: Any, tile: Any, into: Any, into_stride: Any, prefetch_rows: Any,
) -> Any:  # fmt: skip
    """into[r, :width] += sum over j < count of weights[r, j] * values[j], for the rows of a tile.

    Each call adds + 0 at its end, as `attention_tile_*` does; between calls that changes nothing.

    Args:
        plane, offsets, scales, width, last, tile, prefetch_rows: as for `qk_in_place`.
        weights, stride: address of float32 rows, and bytes from row to row.
        into_stride: bytes from row to row of `into`.
    """
    stored = storage_kind(plane)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, scales, count, width = args[:6]
        weights, stride, last, tile, into, into_stride = args[6:12]
        prefetch = line_prefetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))

        def add_columns(num_rows: int, vectors: int, begin: Any, steps: Any) -> None:
            """Add to `steps` * `vectors` vectors of each row, from element `begin` on."""
            rows = row_addresses(builder, weights, stride, last, num_rows)
            sums = [
                [cgutils.alloca_once(builder, vector_type(8)) for _ in range(vectors)] for _ in rows
            ]
            deinterleaved = _is_deinterleaved(stored, vectors)
            with cgutils.for_range(builder, steps) as loop:
                column = builder.add(begin, builder.mul(loop.index, i64(8 * vectors)))
                start = builder.add(source, builder.mul(column, i64(ITEM_BYTES[stored])))
                out = offset(builder, into, column, 4)
                addresses = []
                for r in range(num_rows):
                    out_row = builder.add(out, builder.mul(into_stride, i64(r)))
                    addresses.append([builder.add(out_row, i64(32 * v)) for v in range(vectors)])
                for accs, out_addresses in zip(sums, addresses, strict=True):
                    load_accumulators(builder, out_addresses, accs, is_deinterleaved=deinterleaved)

                with cgutils.for_range(builder, count) as keys:
                    next_key = builder.add(keys.index, i64(PREFETCH_KEYS))
                    next_start = builder.add(start, load_offset(builder, offsets, next_key))
                    for line in range(0, 8 * vectors * ITEM_BYTES[stored], CACHE_LINE):
                        emit_prefetch(builder, builder.add(next_start, i64(line)), 3)
                        prefetch()
                    value_address = builder.add(start, load_offset(builder, offsets, keys.index))
                    value = _load_values(builder, value_address, stored, vectors)
                    if stored >= INT8:
                        scale = load_broadcast(builder, scales, keys.index)
                        value = [builder.fmul(x, scale) for x in value]
                    for row, accs in zip(rows, sums, strict=True):
                        weight = load_broadcast(builder, row, keys.index)
                        accumulate_rows(builder, fma, weight, value, accs)
                for accs, out_addresses in zip(sums, addresses, strict=True):
                    store_accumulators(builder, accs, out_addresses, is_deinterleaved=deinterleaved)

        def emit(num_rows: int) -> None:
            vectors = _VECTORS_PER_TILE[num_rows]
            num_wide = builder.udiv(width, i64(8 * vectors))
            done = builder.mul(num_wide, i64(8 * vectors))
            add_columns(num_rows, vectors, i64(0), num_wide)
            num_narrow = builder.udiv(builder.sub(width, done), i64(8))
            add_columns(num_rows, 1, done, num_narrow)

        for_each_row_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 11, prefetch_rows), code
