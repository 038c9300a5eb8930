"""Few rows of weights against values that are read where they lie, in pairs: `decode_microkernels.pv_in_place` for those.

A word of weights belongs to two keys that follow each other, the first at an even place of its
block; where only one of them is wanted, zeros stand for the value of the other.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import BF16, CACHE_LINE, ITEM_BYTES
from ramify.kernels.cpu.decode_microkernels import (
    accumulate_rows,
    for_each_row_tile,
    line_prefetcher,
    load_accumulators,
    load_broadcast,
    load_offset,
    row_addresses,
    store_accumulators,
)
from ramify.kernels.cpu.kv_pack import interleave_values_vnni
from ramify.kernels.cpu.simd import bf16_dot, i64, load, offset, vector_type

# elements of a value that are multiplied at once, while there are so many
_WIDTHS = (64, 32, 16, 8)
_int = types.int64


def _load_value_pairs(
    builder: Any, source: Any, offsets: Any, keys: list[Any], width: int
) -> list[Any]:
    """So many elements of the values of two keys, as words; None is a key that is not wanted."""
    size = min(width, 32)
    kind = vector_type(size, ir.IntType(16))
    places = [None if key is None else load_offset(builder, offsets, key) for key in keys]
    found = []
    for at in range(0, width, size):
        rows = []
        for place in places:
            if place is None:
                rows.append(ir.Constant(kind, [0] * size))
            else:
                begin = builder.add(builder.add(source, place), i64(2 * at))
                rows.append(load(builder, begin, kind))
        found += interleave_values_vnni(builder, *rows)
    return found


@intrinsic
def pv_in_place_vnni(
    _: Any, plane: Any, source: Any, offsets: Any, first_is_odd: Any, count: Any, width: Any, weights: Any,
    stride: Any, last: Any, tile: Any, into: Any, into_stride: Any, prefetch_rows: Any,
) -> Any:  # fmt: skip
    """into[r, :width] += sum over j < count of weights[r, first_is_odd + j] * value j, for a tile's rows.

    Args:
        first_is_odd: 1 if the first word of weights belongs to a key before those, and to the first.
        weights: address of the rows 0 to `last` of bfloat16, `stride` bytes from each to the next;
            of what is not a value's weight it is 0.

    The others are those of `decode_microkernels.pv_in_place`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, first_is_odd, count, width = args[:6]
        weights, stride, last, tile, into, into_stride = args[6:12]
        fetch = line_prefetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))
        num_pairs = builder.lshr(builder.sub(count, first_is_odd), i64(1))
        alone = builder.and_(builder.sub(count, first_is_odd), i64(1))

        def columns(num_rows: int, at_once: int, begin: Any, steps: Any) -> None:
            """`steps` times so many elements of each row, from the element `begin` on."""
            rows = row_addresses(builder, weights, stride, last, num_rows)
            lanes = 16 if at_once >= 32 else 8
            vectors = range(0, at_once, lanes)
            sums = [
                [cgutils.alloca_once(builder, vector_type(lanes)) for _ in vectors] for _ in rows
            ]
            with cgutils.for_range(builder, steps) as loop:
                column = builder.add(begin, builder.mul(loop.index, i64(at_once)))
                start = offset(builder, source, column, 2)
                lines = [offset(builder, into, column, 4)]
                while len(lines) < num_rows:
                    lines.append(builder.add(lines[-1], into_stride))
                places = [[builder.add(line, i64(4 * at)) for at in vectors] for line in lines]
                for mine, at in zip(sums, places, strict=True):
                    load_accumulators(builder, at, mine, lanes)

                def add(keys: list[Any], word: Any) -> None:
                    """Two keys by their numbers, one of them perhaps None, and a word of weights."""
                    values = _load_value_pairs(builder, start, offsets, keys, at_once)
                    for row, mine in zip(rows, sums, strict=True):
                        accumulate_rows(
                            builder,
                            bf16_dot,
                            load_broadcast(builder, row, word, lanes),
                            values,
                            mine,
                        )

                with builder.if_then(builder.icmp_signed("!=", first_is_odd, i64(0)), likely=False):
                    add([None, i64(0)], i64(0))
                with cgutils.for_range(builder, num_pairs) as pairs:
                    key = builder.add(first_is_odd, builder.mul(pairs.index, i64(2)))
                    fetch(max(1, 2 * at_once * ITEM_BYTES[BF16] // CACHE_LINE))
                    add([key, builder.add(key, i64(1))], builder.add(first_is_odd, pairs.index))
                with builder.if_then(builder.icmp_signed("!=", alone, i64(0)), likely=False):
                    key = builder.sub(count, i64(1))
                    add([key, None], builder.add(first_is_odd, num_pairs))
                for mine, at in zip(sums, places, strict=True):
                    store_accumulators(builder, mine, at)

        def emit(num_rows: int) -> None:
            done = i64(0)
            for at_once in _WIDTHS:
                steps = builder.udiv(builder.sub(width, done), i64(at_once))
                columns(num_rows, at_once, done, steps)
                done = builder.add(done, builder.mul(steps, i64(at_once)))

        for_each_row_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 11, prefetch_rows), code
