"""Q·Kᵀ and P·V of 1, 2 or 4 rows over K/V of bfloat16 read in place, with the sums of tiles, by FMA as LLVM IR.

`decode_microkernels` and `decode_microkernels_vnni` for planes whose blocks `attention_tiles`
multiplies when they are packed. Both run in the mode of `attention_tiles.flush_subnormals`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import BF16, CACHE_LINE, ITEM_BYTES
from ramify.kernels.cpu.attention_tiles import STEP
from ramify.kernels.cpu.decode_microkernels import (
    KEYS_PER_VECTOR,
    for_each_row_tile,
    line_prefetcher,
    load_accumulators,
    load_offset,
    store_accumulators,
)
from ramify.kernels.cpu.decode_microkernels_vnni import for_each_key_pair
from ramify.kernels.cpu.kv_pack import transpose_keys_vnni
from ramify.kernels.cpu.simd import (
    bf16_to_f32,
    broadcast,
    constant,
    f32,
    fma,
    i32,
    i64,
    load,
    offset,
    row_addresses,
    split_bf16_words,
    vector_type,
)

_CHUNK = 8  # elements of a key that are transposed at a time
# elements of a value that a tile of n rows multiplies at once; narrower ones for the rest
_WIDTHS = {1: (64, 32, 16, 8), 2: (64, 32, 16, 8), 4: (32, 16, 8)}
_int, _float = types.int64, types.float32


def _zeros(builder: Any, count: int, lanes: int) -> list[Any]:
    """Accumulators, as addresses."""
    return [cgutils.alloca_once(builder, vector_type(lanes)) for _ in range(count)]


def _clear(builder: Any, accumulators: list[Any], lanes: int) -> None:
    for acc in accumulators:
        builder.store(constant(0.0, lanes), acc)


def _add(builder: Any, x: Any, y: Any, acc: Any) -> None:
    builder.store(fma(builder, x, y, builder.load(acc)), acc)


@intrinsic
def qk_in_place_tiles(
    _: Any, plane: Any, source: Any, offsets: Any, groups: Any, width: Any, queries: Any, last: Any, tile: Any,
    into: Any, stride: Any, scale: Any, prefetch_rows: Any,
) -> Any:  # fmt: skip
    """into[r, j] = queries[r] · keys[j] * scale + 0, for `groups` * KEYS_PER_VECTOR keys and the rows of a tile.

    Args:
        width: elements of a key, a multiple of STEP.
        queries: address of rows of `width` float32.

    The others are as for `decode_microkernels.qk_in_place`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, groups, width, queries, last, tile, into, stride, scale = args[:11]
        prefetch = line_prefetcher(builder, cgutils.unpack_tuple(builder, args[11], 4))
        row_bytes = builder.mul(width, i64(4))

        def score_vectors(num_rows: int, begin: Any, count: Any, lanes: int) -> None:
            """Score `count` vectors of `lanes` keys, from group `begin` on."""
            rows = row_addresses(builder, queries, row_bytes, last, num_rows)
            totals, even, odd = (_zeros(builder, num_rows, lanes) for _ in range(3))
            with cgutils.for_range(builder, count) as loop:
                first = builder.mul(begin, i64(KEYS_PER_VECTOR))
                first = builder.add(first, builder.mul(loop.index, i64(lanes)))
                keys = [
                    builder.add(source, load_offset(builder, offsets, builder.add(first, i64(i))))
                    for i in range(lanes)
                ]
                _clear(builder, totals, lanes)
                with cgutils.for_range(builder, builder.udiv(width, i64(STEP))) as steps:
                    _clear(builder, [*even, *odd], lanes)
                    with cgutils.for_range(builder, i64(STEP // _CHUNK)) as chunks:
                        element = builder.mul(steps.index, i64(STEP))
                        element = builder.add(element, builder.mul(chunks.index, i64(_CHUNK)))
                        prefetch(ITEM_BYTES[BF16] * lanes // KEYS_PER_VECTOR)
                        addresses = [offset(builder, key, element, 2) for key in keys]
                        for d, words in enumerate(transpose_keys_vnni(builder, addresses)):
                            low, high = split_bf16_words(
                                builder, builder.bitcast(words, vector_type(lanes, i32))
                            )
                            at = builder.add(element, i64(2 * d))
                            for r, row in enumerate(rows):
                                for i, (y, acc) in enumerate(((low, even[r]), (high, odd[r]))):
                                    x_at = offset(builder, row, builder.add(at, i64(i)), 4)
                                    x = broadcast(builder, load(builder, x_at, f32), lanes)
                                    _add(builder, x, y, acc)
                    _add_steps(builder, totals, even, odd)
                for r, total in enumerate(totals):
                    out_row = builder.add(into, builder.mul(stride, i64(r)))
                    at = offset(builder, out_row, first, 4)
                    store_accumulators(builder, [total], [at], scale=scale)

        def emit(num_rows: int) -> None:
            wide = builder.lshr(groups, i64(1))
            score_vectors(num_rows, i64(0), wide, 2 * KEYS_PER_VECTOR)
            done = builder.shl(wide, i64(1))
            score_vectors(num_rows, done, builder.sub(groups, done), KEYS_PER_VECTOR)

        for_each_row_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 9, _float, prefetch_rows), code


def _add_steps(builder: Any, totals: list[Any], even: list[Any], odd: list[Any]) -> None:
    """totals += even + odd."""
    for total, *halves in zip(totals, even, odd, strict=True):
        step = builder.fadd(*map(builder.load, halves))
        builder.store(builder.fadd(builder.load(total), step), total)


@intrinsic
def pv_in_place_tiles(
    _: Any, plane: Any, source: Any, offsets: Any, first_is_odd: Any, count: Any, width: Any, weights: Any,
    stride: Any, last: Any, tile: Any, into: Any, into_stride: Any, prefetch_rows: Any,
) -> Any:  # fmt: skip
    """into[r, :width] += sum over j < count of weights[r, first_is_odd + j] * values[j], for a tile.

    Args:
        count: values, all of them of the same STEP keys of a block.

    The others are as for `decode_microkernels_vnni.pv_in_place_vnni`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, first_is_odd, count, width = args[:6]
        weights, stride, last, tile, into, into_stride = args[6:12]
        prefetch = line_prefetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))

        def add_columns(num_rows: int, at_once: int, begin: Any, steps: Any) -> None:
            """Add to `steps` * `at_once` elements of each row, from element `begin` on."""
            rows = row_addresses(builder, weights, stride, last, num_rows)
            lanes = 16 if at_once >= 16 else 8
            vectors = range(0, at_once, lanes)
            num_lines = max(1, 2 * at_once * ITEM_BYTES[BF16] // CACHE_LINE)
            halves = [[_zeros(builder, len(vectors), lanes) for _ in rows] for _ in range(2)]
            totals = _zeros(builder, len(vectors), lanes)
            with cgutils.for_range(builder, steps) as loop:
                column = builder.add(begin, builder.mul(loop.index, i64(at_once)))
                start = offset(builder, source, column, 2)
                for accs in (*halves[0], *halves[1]):
                    _clear(builder, accs, lanes)

                def add_pair(keys: list[Any], word: Any) -> None:
                    """Add the values of two keys (indices, or None), times word `word` of the weights."""
                    pairs = [
                        split_bf16_words(
                            builder,
                            broadcast(
                                builder, load(builder, offset(builder, row, word, 4), i32), lanes
                            ),
                        )
                        for row in rows
                    ]
                    for half, key in enumerate(keys):
                        if key is None:
                            continue
                        value = builder.add(start, load_offset(builder, offsets, key))
                        for v, element in enumerate(vectors):
                            at = builder.add(value, i64(2 * element))
                            raw = load(builder, at, vector_type(lanes, ir.IntType(16)))
                            y = bf16_to_f32(builder, raw)
                            for pair, accs in zip(pairs, halves[half], strict=True):
                                _add(builder, pair[half], y, accs[v])

                for_each_key_pair(
                    builder, first_is_odd, count, add_pair, lambda: prefetch(num_lines)
                )
                out_row = offset(builder, into, column, 4)
                for even, odd in zip(*halves, strict=True):
                    addresses = [builder.add(out_row, i64(4 * element)) for element in vectors]
                    load_accumulators(builder, addresses, totals, lanes)
                    _add_steps(builder, totals, even, odd)
                    store_accumulators(builder, totals, addresses)
                    out_row = builder.add(out_row, into_stride)

        def emit(num_rows: int) -> None:
            done = i64(0)
            for at_once in _WIDTHS[num_rows]:
                steps = builder.udiv(builder.sub(width, done), i64(at_once))
                add_columns(num_rows, at_once, done, steps)
                done = builder.add(done, builder.mul(steps, i64(at_once)))

        for_each_row_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 11, prefetch_rows), code
