"""Keys and values from where they lie to vectors of float32 or of pairs, as LLVM IR.

It is `simd` for few and for many rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import BF16, BLOCK_KEYS, CACHE_LINE, ITEM_BYTES
from ramify.kernels.cpu.attention_args import (
    KVBlock,
    is_vnni,
    item_bytes,
    load_plane_element,
    storage_kind,
)
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.simd import (
    TILE_N,
    broadcast,
    constant,
    emit_prefetch,
    f32,
    i32,
    i64,
    load,
    load_as_f32,
    load_element,
    load_i64,
    offset,
    shuffle,
    split_bf16_words,
    store,
    store_f32,
    transpose_8x8,
    vector_type,
)

PREFETCH_KEYS = 16  # keys between those that are read and those that are fetched meanwhile
_BLOCK, _TILE_N = BLOCK_KEYS, TILE_N  # globals are constants to Numba
_int = types.int64


def transpose_keys_f32(builder: Any, places: list[Any], kind: int) -> list[Any]:
    """Eight elements of eight keys: a vector of float32 for each element."""
    if kind != BF16:
        return transpose_8x8(builder, [load_as_f32(builder, place, kind) for place in places])
    columns = []
    for pair in transpose_keys_vnni(builder, places):
        columns += split_bf16_words(builder, pair)
    return columns


def transpose_keys_vnni(builder: Any, places: list[Any]) -> list[Any]:
    """Four words of 32 bits, two elements each, of 8 or 16 keys: a vector for each word.

    A key's words fill a quarter of 512 bits, behind them are those of the key four further, and so
    on: so half as many shuffles turn them as with elements one by one, and nothing crosses quarters.
    """
    rows = [
        _concat(builder, [load(builder, place, vector_type(4, i32)) for place in places[i::4]])
        for i in range(4)
    ]
    lanes = len(places)
    quarters = range(0, lanes, 4)
    turned = []
    for at in (0, 2):
        by_one = [q + at + i // 2 + i % 2 * lanes for q in quarters for i in range(4)]
        low, high = (shuffle(builder, rows[i], rows[i + 1], by_one) for i in (0, 2))
        for word in (0, 2):
            by_two = [q + word + i % 2 + i // 2 * lanes for q in quarters for i in range(4)]
            turned.append(shuffle(builder, low, high, by_two))
    return turned


def _concat(builder: Any, vectors: list[Any]) -> Any:
    """One behind the other; a power of two of them."""
    while len(vectors) > 1:
        places = list(range(2 * vectors[0].type.count))
        vectors = [
            shuffle(builder, a, b, places) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def interleave_values_vnni(builder: Any, first: Any, second: Any) -> list[Any]:
    """Two values of 16-bit elements as words of one element of each: a vector for eight, else two."""
    count = first.type.count
    width = count if count == 8 else count // 2
    return [
        builder.bitcast(
            shuffle(
                builder, first, second, [at + i // 2 + i % 2 * count for i in range(2 * width)]
            ),
            vector_type(width),
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
    for k in range(ITEM_BYTES[stored]):
        line = builder.add(builder.mul(index, i64(ITEM_BYTES[stored])), i64(k))
        key = builder.and_(line, i64(7))
        start = builder.add(source, load(builder, offset(builder, offsets, key, 8), i64))
        at = builder.mul(builder.lshr(line, i64(3)), i64(CACHE_LINE))
        emit_prefetch(builder, builder.add(start, at), 3)


@intrinsic
def pack_8_keys_f32(
    _: Any, plane: Any, source: Any, offsets: Any, scales: Any, into: Any, stride: Any, width: Any
) -> Any:
    """Eight keys as columns of `into`, in float32, each times its factor.

    Args:
        plane: its type says what the keys are stored in.
        offsets, scales: addresses of int64, bytes from `source` to eight keys, with `PREFETCH_KEYS` more
            behind them; and of eight floats.
        stride: floats from one line of `into` to the next.
        width: elements of a key, a multiple of 8.
    """
    stored = storage_kind(plane)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, scales, into, stride, width = args
        starts = []
        for i in range(8):
            key_offset = load(builder, builder.add(offsets, i64(8 * i)), i64)
            starts.append(builder.add(source, key_offset))
        key_scales = load(builder, scales, vector_type(8))
        later = builder.add(offsets, i64(8 * PREFETCH_KEYS))

        with cgutils.for_range(builder, builder.udiv(width, i64(8))) as loop:
            prefetch_keys(builder, source, later, loop.index, stored)
            element = builder.mul(loop.index, i64(8))
            begin = builder.mul(element, i64(ITEM_BYTES[stored]))
            places = [builder.add(start, begin) for start in starts]
            line = builder.add(into, builder.mul(builder.mul(element, stride), i64(4)))
            for i, column in enumerate(transpose_keys_f32(builder, places, stored)):
                at = builder.add(line, builder.mul(stride, i64(4 * i)))
                store(builder, builder.fmul(column, key_scales), at)
        return context.get_dummy_value()

    return types.void(plane, _int, _int, _int, _int, _int, _int), code


@intrinsic
def pack_8_keys_vnni(
    _: Any, plane: Any, source: Any, offsets: Any, into: Any, stride: Any, width: Any
) -> Any:
    """Eight keys as columns of `into`, a word of two elements a line: `pack_8_keys_f32` in pairs."""
    stored = storage_kind(plane)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, into, stride, width = args
        starts = [
            builder.add(source, load(builder, builder.add(offsets, i64(8 * i)), i64))
            for i in range(8)
        ]
        later = builder.add(offsets, i64(8 * PREFETCH_KEYS))
        with cgutils.for_range(builder, builder.udiv(width, i64(8))) as loop:
            prefetch_keys(builder, source, later, loop.index, stored)
            step = builder.mul(loop.index, i64(8 * ITEM_BYTES[BF16]))
            line = builder.add(into, builder.mul(builder.mul(loop.index, stride), i64(16)))
            words = transpose_keys_vnni(builder, [builder.add(start, step) for start in starts])
            for i, word in enumerate(words):
                store(builder, word, builder.add(line, builder.mul(stride, i64(4 * i))))
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 5), code


@intrinsic
def pack_value_tiles_vnni(
    _: Any, plane: Any, source: Any, offsets: Any, count: Any, into: Any, stride: Any, width: Any, columns: Any
) -> Any:  # fmt: skip
    """`count` times two values as tiles of `TILE_N` words of one element of each.

    Args:
        plane, source, offsets: as in `pack_value_tiles_f32`.
        into, stride: address of the first tile, [count, TILE_N], and bytes from tile to tile.
        width: elements of a value, a multiple of 8.
        columns: elements of a row of tiles; those from `width` on are zeros.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, count, into, stride, width, columns = args

        def place(line: Any, column: Any) -> Any:
            """Of a column's word in a line of the first tile."""
            tile = builder.udiv(column, i64(TILE_N))
            inner = builder.sub(column, builder.mul(tile, i64(TILE_N)))
            return builder.add(offset(builder, line, inner, 4), builder.mul(tile, stride))

        with cgutils.for_range(builder, count) as loop:
            at = offset(builder, offsets, loop.index, 16)
            starts, ahead = [], []
            for i in range(2):
                one = builder.add(at, i64(8 * i))
                starts.append(builder.add(source, load(builder, one, i64)))
                later = load(builder, builder.add(one, i64(8 * PREFETCH_KEYS)), i64)
                ahead.append(builder.add(source, later))
            line = offset(builder, into, loop.index, 4 * TILE_N)

            def some(begin: Any, steps: Any, count: int) -> None:
                with cgutils.for_range(builder, steps) as parts:
                    column = builder.add(begin, builder.mul(parts.index, i64(count)))
                    rows = [
                        load(
                            builder,
                            offset(builder, start, column, 2),
                            vector_type(count, ir.IntType(16)),
                        )
                        for start in starts
                    ]
                    if count * ITEM_BYTES[BF16] >= CACHE_LINE:
                        for one in ahead:
                            emit_prefetch(builder, offset(builder, one, column, 2), 3)
                    to = place(line, column)
                    for i, words in enumerate(interleave_values_vnni(builder, *rows)):
                        store(builder, words, builder.add(to, i64(4 * i * words.type.count)))

            whole = builder.udiv(width, i64(TILE_N))
            some(i64(0), whole, TILE_N)
            done = builder.mul(whole, i64(TILE_N))
            some(done, builder.udiv(builder.sub(width, done), i64(8)), 8)
            rest = builder.udiv(builder.sub(columns, width), i64(8))
            with cgutils.for_range(builder, rest) as parts:
                column = builder.add(width, builder.mul(parts.index, i64(8)))
                store(builder, constant(0.0, 8), place(line, column))
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 7), code


@intrinsic
def pack_value_tiles_f32(
    _: Any, plane: Any, source: Any, offsets: Any, scales: Any, count: Any, into: Any, stride: Any, tiles: Any
) -> Any:  # fmt: skip
    """`count` values as `tiles` tiles of `TILE_N`, in float32, each value times its factor.

    Args:
        plane: its type says what the values are stored in.
        offsets, scales: addresses of int64, bytes from `source` to each value, with `PREFETCH_KEYS` more
            behind the last; and of as many floats as there are values.
        into, stride: address of the first tile, [count, TILE_N], and bytes from tile to tile.
    """
    stored = storage_kind(plane)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, scales, count, into, stride, tiles = args
        with cgutils.for_range(builder, count) as values:
            place = offset(builder, offsets, values.index, 8)
            start = builder.add(source, load(builder, place, i64))
            later = load(builder, builder.add(place, i64(8 * PREFETCH_KEYS)), i64)
            ahead = builder.add(source, later)
            factor = load(builder, offset(builder, scales, values.index, 4), f32)
            scale = broadcast(builder, factor, 8)
            line = offset(builder, into, values.index, 4 * TILE_N)
            with cgutils.for_range(builder, tiles) as loop:
                step = builder.mul(loop.index, i64(TILE_N * ITEM_BYTES[stored]))
                for at in range(0, TILE_N * ITEM_BYTES[stored], CACHE_LINE):
                    emit_prefetch(builder, builder.add(builder.add(ahead, step), i64(at)), 3)
                to = builder.add(line, builder.mul(loop.index, stride))
                for at in range(0, TILE_N, 8):
                    place = builder.add(builder.add(start, step), i64(at * ITEM_BYTES[stored]))
                    x = load_as_f32(builder, place, stored)
                    store(builder, builder.fmul(x, scale), builder.add(to, i64(4 * at)))
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 7), code


@jit
def pack_keys(keys: KVBlock, into: int, depth: int, count: int) -> None:
    """Columns of [tiles, depth, TILE_N] float32, or words of pairs, from `count` keys.

    A tile of a product lies in one piece: lines a power of two apart would share few places of
    the first-level cache.
    """
    part, source = keys.plane, keys.base
    rest = part.width % 8
    whole = part.width - rest
    for j in range(0, count, 8):
        where, scale = keys.offsets + 8 * j, keys.scales + 4 * j
        to = into + 4 * (j // _TILE_N * depth * _TILE_N + j % _TILE_N)
        if is_vnni(part):
            pack_8_keys_vnni(part, source, where, to, _TILE_N, part.width)
        else:
            pack_8_keys_f32(part, source, where, scale, to, _TILE_N, whole)
    for d in range(whole, part.width):
        for j in range(count):
            at = source + load_i64(keys.offsets + 8 * j) + d * item_bytes(part)
            x = load_plane_element(part, at) * load_element(keys.scales + 4 * j, 0)
            tile = into + 4 * _TILE_N * (j // _TILE_N * depth + d)
            store_f32(tile + 4 * (j % _TILE_N), x)


@jit
def pack_values(values: KVBlock, into: int, stride: int, count: int) -> None:
    """[stride / TILE_N, BLOCK_KEYS, TILE_N] float32; in pairs words of half as many keys."""
    part, size = values.plane, item_bytes(values.plane)
    if is_vnni(part):
        pack_value_tiles_vnni(part, values.base, values.offsets, -(-count // 2), into,
                         2 * _TILE_N * _BLOCK, part.width, stride)  # fmt: skip
        return
    tiles = part.width // _TILE_N
    tile = 4 * _TILE_N * _BLOCK
    pack_value_tiles_f32(part, values.base, values.offsets, values.scales, count, into, tile, tiles)
    for d in range(tiles * _TILE_N, stride, _TILE_N):
        for j in range(count):
            at = values.base + load_i64(values.offsets + 8 * j) + d * size
            factor = load_element(values.scales + 4 * j, 0)
            to = into + tile * (d // _TILE_N) + 4 * _TILE_N * j
            for i in range(_TILE_N):
                x = (
                    load_plane_element(part, at + i * size) * factor
                    if d + i < part.width
                    else np.float32(0.0)
                )
                store_f32(to + 4 * i, x)
