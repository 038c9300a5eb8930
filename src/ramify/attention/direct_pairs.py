"""Few rows of weights against values that are read where they lie, in pairs: `direct.mix` for those.

A word of weights belongs to two keys that follow each other, the first at an even place of its
block; where only one of them is wanted, zeros stand for the value of the other.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.attention.direct import (
    accumulate,
    each_tile,
    factor_at,
    fetcher,
    offset_at,
    put_sums,
    rows_of,
    take_sums,
)
from ramify.attention.key_vectors import value_pairs
from ramify.attention.simd import (
    BF16,
    LINE,
    SIZES,
    _dot,
    _i64,
    _load,
    _step,
    _vec,
)

# elements of a value that are multiplied at once, while there are so many
_WIDTHS = (64, 32, 16, 8)
_int = types.int64


def _read(builder: Any, source: Any, offsets: Any, keys: list[Any], width: int) -> list[Any]:
    """So many elements of the values of two keys, as words; None is a key that is not wanted."""
    size = min(width, 32)
    kind = _vec(size, ir.IntType(16))
    places = [None if key is None else offset_at(builder, offsets, key) for key in keys]
    found = []
    for at in range(0, width, size):
        rows = []
        for place in places:
            if place is None:
                rows.append(ir.Constant(kind, [0] * size))
            else:
                begin = builder.add(builder.add(source, place), _i64(2 * at))
                rows.append(_load(builder, begin, kind))
        found += value_pairs(builder, *rows)
    return found


@intrinsic
def mix_pairs(
    _: Any, part: Any, source: Any, offsets: Any, skipped: Any, count: Any, width: Any, weights: Any,
    stride: Any, last: Any, tile: Any, into: Any, into_stride: Any, later: Any,
) -> Any:  # fmt: skip
    """into[r, :width] += sum over j < count of weights[r, skipped + j] * value j, for a tile's rows.

    Args:
        skipped: 1 if the first word of weights belongs to a key before those, and to the first.
        weights: address of the rows 0 to `last` of bfloat16, `stride` bytes from each to the next;
            of what is not a value's weight it is 0.

    The others are those of `direct.mix`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, skipped, count, width = args[:6]
        weights, stride, last, tile, into, into_stride = args[6:12]
        fetch = fetcher(builder, cgutils.unpack_tuple(builder, args[12], 4))
        num_pairs = builder.lshr(builder.sub(count, skipped), _i64(1))
        alone = builder.and_(builder.sub(count, skipped), _i64(1))

        def columns(num_rows: int, at_once: int, begin: Any, steps: Any) -> None:
            """`steps` times so many elements of each row, from the element `begin` on."""
            rows = rows_of(builder, weights, stride, last, num_rows)
            lanes = 16 if at_once >= 32 else 8
            vectors = range(0, at_once, lanes)
            sums = [[cgutils.alloca_once(builder, _vec(lanes)) for _ in vectors] for _ in rows]
            with cgutils.for_range(builder, steps) as loop:
                column = builder.add(begin, builder.mul(loop.index, _i64(at_once)))
                start = _step(builder, source, column, 2)
                lines = [_step(builder, into, column, 4)]
                while len(lines) < num_rows:
                    lines.append(builder.add(lines[-1], into_stride))
                places = [[builder.add(line, _i64(4 * at)) for at in vectors] for line in lines]
                for mine, at in zip(sums, places, strict=True):
                    take_sums(builder, at, mine, lanes)

                def add(keys: list[Any], word: Any) -> None:
                    """Two keys by their numbers, one of them perhaps None, and a word of weights."""
                    values = _read(builder, start, offsets, keys, at_once)
                    for row, mine in zip(rows, sums, strict=True):
                        accumulate(
                            builder, _dot, factor_at(builder, row, word, lanes), values, mine
                        )

                with builder.if_then(builder.icmp_signed("!=", skipped, _i64(0)), likely=False):
                    add([None, _i64(0)], _i64(0))
                with cgutils.for_range(builder, num_pairs) as pairs:
                    key = builder.add(skipped, builder.mul(pairs.index, _i64(2)))
                    fetch(max(1, 2 * at_once * SIZES[BF16] // LINE))
                    add([key, builder.add(key, _i64(1))], builder.add(skipped, pairs.index))
                with builder.if_then(builder.icmp_signed("!=", alone, _i64(0)), likely=False):
                    key = builder.sub(count, _i64(1))
                    add([key, None], builder.add(skipped, num_pairs))
                for mine, at in zip(sums, places, strict=True):
                    put_sums(builder, mine, at)

        def emit(num_rows: int) -> None:
            done = _i64(0)
            for at_once in _WIDTHS:
                steps = builder.udiv(builder.sub(width, done), _i64(at_once))
                columns(num_rows, at_once, done, steps)
                done = builder.add(done, builder.mul(steps, _i64(at_once)))

        each_tile(builder, tile, emit)
        return context.get_dummy_value()

    return types.void(part, *[_int] * 11, later), code
