"""P·V of 1, 2 or 4 rows over values read in place, by bf16 dot products, as LLVM IR.

`decode_microkernels.pv_in_place` for `BF16VnniPlane`. A word of weights belongs to the keys 2i and
2i + 1 of a block. Where P·V covers only one of the two keys, zeros replace the value of the other.
"""

from __future__ import annotations

from collections.abc import Callable
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
    store_accumulators,
)
from ramify.kernels.cpu.kv_pack import interleave_values_vnni
from ramify.kernels.cpu.simd import bf16_dot, i64, load, offset, row_addresses, vector_type

# elements of a value that are multiplied at once; narrower ones for the rest
_WIDTHS = (64, 32, 16, 8)
_int = types.int64


def _load_value_pairs(
    builder: Any, source: Any, offsets: Any, keys: list[Any], width: int
) -> list[Any]:
    """Load `width` elements of the values of two keys as words; zeros for a key that is None."""
    size = min(width, 32)
    vector = vector_type(size, ir.IntType(16))
    key_offsets = [None if key is None else load_offset(builder, offsets, key) for key in keys]
    words = []
    for first in range(0, width, size):
        rows = []
        for key_offset in key_offsets:
            if key_offset is None:
                rows.append(ir.Constant(vector, [0] * size))
            else:
                address = builder.add(builder.add(source, key_offset), i64(2 * first))
                rows.append(load(builder, address, vector))
        words += interleave_values_vnni(builder, *rows)
    return words


def for_each_key_pair(
    builder: Any,
    first_is_odd: Any,
    count: Any,
    add_pair: Callable[[list[Any], Any], None],
    prefetch: Callable[[], None],
) -> None:
    """Emit `add_pair` for the keys of each word of weights, ascending, and a prefetch for each whole one.

    Args:
        first_is_odd: 1 if key 0 belongs to the second half of the first word.
        count: keys.
        add_pair: takes the indices of two keys, None for one that is not there, and that of the word.
    """
    num_keys = builder.sub(count, first_is_odd)
    num_pairs, num_unpaired = builder.lshr(num_keys, i64(1)), builder.and_(num_keys, i64(1))
    with builder.if_then(builder.icmp_signed("!=", first_is_odd, i64(0)), likely=False):
        add_pair([None, i64(0)], i64(0))
    with cgutils.for_range(builder, num_pairs) as pairs:
        key = builder.add(first_is_odd, builder.mul(pairs.index, i64(2)))
        prefetch()
        add_pair([key, builder.add(key, i64(1))], builder.add(first_is_odd, pairs.index))
    with builder.if_then(builder.icmp_signed("!=", num_unpaired, i64(0)), likely=False):
        key = builder.sub(count, i64(1))
        add_pair([key, None], builder.add(first_is_odd, num_pairs))


@intrinsic
def pv_in_place_vnni(
    _: Any, plane: Any, source: Any, offsets: Any, first_is_odd: Any, count: Any, width: Any, weights: Any,
    stride: Any, last: Any, tile: Any, into: Any, into_stride: Any, prefetch_rows: Any,
) -> Any:  # fmt: skip
    """into[r, :width] += sum over j < count of weights[r, first_is_odd + j] * values[j], for a tile.

    Args:
        first_is_odd: 1 if values[0] belongs to the second weight of the first word.
        weights: address of bf16 rows; weights beyond the values are 0.

    The others are as for `decode_microkernels.pv_in_place`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, first_is_odd, count, width = args[:6]
        weights, stride, last, tile, into, into_stride = args[6:12]
        prefetch = line_prefetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))

        def add_columns(num_rows: int, at_once: int, begin: Any, steps: Any) -> None:
            """Add to `steps` * `at_once` elements of each row, from element `begin` on."""
            rows = row_addresses(builder, weights, stride, last, num_rows)
            lanes = 16 if at_once >= 32 else 8
            vectors = range(0, at_once, lanes)
            num_lines = max(1, 2 * at_once * ITEM_BYTES[BF16] // CACHE_LINE)
            sums = [
                [cgutils.alloca_once(builder, vector_type(lanes)) for _ in vectors] for _ in rows
            ]
            with cgutils.for_range(builder, steps) as loop:
                column = builder.add(begin, builder.mul(loop.index, i64(at_once)))
                start = offset(builder, source, column, 2)
                out_rows = [offset(builder, into, column, 4)]
                while len(out_rows) < num_rows:
                    out_rows.append(builder.add(out_rows[-1], into_stride))
                addresses = [
                    [builder.add(out_row, i64(4 * element)) for element in vectors]
                    for out_row in out_rows
                ]
                for accs, out_addresses in zip(sums, addresses, strict=True):
                    load_accumulators(builder, out_addresses, accs, lanes)

                def add_pair(keys: list[Any], word: Any) -> None:
                    """Add the values of two keys (indices, or None), times word `word` of the weights."""
                    values = _load_value_pairs(builder, start, offsets, keys, at_once)
                    for row, accs in zip(rows, sums, strict=True):
                        weight = load_broadcast(builder, row, word, lanes)
                        accumulate_rows(builder, bf16_dot, weight, values, accs)

                for_each_key_pair(
                    builder, first_is_odd, count, add_pair, lambda: prefetch(num_lines)
                )
                for accs, out_addresses in zip(sums, addresses, strict=True):
                    store_accumulators(builder, accs, out_addresses)

        def emit(num_rows: int) -> None:
            done = i64(0)
            for at_once in _WIDTHS:
                steps = builder.udiv(builder.sub(width, done), i64(at_once))
                add_columns(num_rows, at_once, done, steps)
                done = builder.add(done, builder.mul(steps, i64(at_once)))

        for_each_row_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 11, prefetch_rows), code
