"""Pack the keys and values of a KV block for the attention micro-kernels.

Packing gathers, dequantises and transposes. With width W of a key and N = TILE_N:
    keys     K[key, d] -> [key // N, d, key % N]            float32
    values   V[key, d] -> [d // N, key, d % N]              float32
    VNNI     two bf16 a word: keys d and d + 1, values of key and key + 1; half the words

`transpose_keys_*` and `interleave_values_vnni` also serve kernels that read K/V in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import BF16, BLOCK_KEYS, CACHE_LINE, F32, ITEM_BYTES
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

PREFETCH_KEYS = 16  # keys from what is read to what is prefetched
_int = types.int64


def transpose_keys_f32(builder: Any, keys: list[Any], kind: int) -> list[Any]:
    """Transpose eight elements of eight keys: a float32 vector [key] per element."""
    if kind != BF16:
        return transpose_8x8(builder, [load_as_f32(builder, key, kind) for key in keys])
    columns = []
    for words in transpose_keys_vnni(builder, keys):
        columns += split_bf16_words(builder, words)
    return columns


def transpose_keys_vnni(builder: Any, keys: list[Any]) -> list[Any]:
    """Transpose eight bf16, as four 32-bit words, of 8 or 16 keys: a vector [key] per word.

    Vector i of `rows` holds keys i, i + 4, ... in quarters of 128 bits. Shuffling words takes half as
    many shuffles as single elements would, and none crosses a quarter.
    """
    rows = [
        _concat(builder, [load(builder, key, vector_type(4, i32)) for key in keys[i::4]])
        for i in range(4)
    ]
    lanes = len(keys)
    quarters = range(0, lanes, 4)
    columns = []
    for begin in (0, 2):
        interleaved = [q + begin + i // 2 + i % 2 * lanes for q in quarters for i in range(4)]
        low, high = (shuffle(builder, rows[i], rows[i + 1], interleaved) for i in (0, 2))
        for word in (0, 2):
            merged = [q + word + i % 2 + i // 2 * lanes for q in quarters for i in range(4)]
            columns.append(shuffle(builder, low, high, merged))
    return columns


def _concat(builder: Any, vectors: list[Any]) -> Any:
    """Concatenate vectors; their number is a power of two."""
    while len(vectors) > 1:
        indices = list(range(2 * vectors[0].type.count))
        vectors = [
            shuffle(builder, a, b, indices)
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def interleave_values_vnni(builder: Any, first: Any, second: Any) -> list[Any]:
    """Words (first[d], second[d]) of 16-bit elements: one vector of eight words, else two vectors."""
    count = first.type.count
    words = count if count == 8 else count // 2
    return [
        builder.bitcast(
            shuffle(
                builder, first, second, [begin + i // 2 + i % 2 * count for i in range(2 * words)]
            ),
            vector_type(words),
        )
        for begin in range(0, count, words)
    ]


def prefetch_keys(builder: Any, source: Any, offsets: Any, index: Any, stored: int) -> None:
    """Prefetch a share of the cache lines of eight keys into L1; all at once would stall.

    Args:
        offsets: address of [8] int64: bytes from `source` to each key.
        index: of the eight elements that are read now; their bytes are the share.
    """
    for k in range(ITEM_BYTES[stored]):
        line = builder.add(builder.mul(index, i64(ITEM_BYTES[stored])), i64(k))
        key = builder.and_(line, i64(7))
        key_start = builder.add(source, load(builder, offset(builder, offsets, key, 8), i64))
        byte = builder.mul(builder.lshr(line, i64(3)), i64(CACHE_LINE))
        emit_prefetch(builder, builder.add(key_start, byte), 3)


def _row_starts(builder: Any, source: Any, offsets: Any, count: int) -> list[Any]:
    """Addresses of `count` keys or values, whose offsets from `source` are int64 at `offsets`."""
    return [
        builder.add(source, load(builder, builder.add(offsets, i64(8 * i)), i64))
        for i in range(count)
    ]


@intrinsic
def pack_8_keys_f32(
    _: Any, plane: Any, source: Any, offsets: Any, scales: Any, into: Any, stride: Any, width: Any
) -> Any:
    """into[d, :8] = keys[:8, d] * scales in float32, for d < width.

    Args:
        plane: of the keys; its type is their storage kind.
        offsets: address of [8] int64: bytes from `source` to each key; readable `PREFETCH_KEYS` further.
        scales: address of [8] float32.
        stride: floats from row to row of `into`.
        width: elements of a key, a multiple of 8.
    """
    stored = storage_kind(plane)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, scales, into, stride, width = args
        starts = _row_starts(builder, source, offsets, 8)
        key_scales = load(builder, scales, vector_type(8))
        next_offsets = builder.add(offsets, i64(8 * PREFETCH_KEYS))

        with cgutils.for_range(builder, builder.udiv(width, i64(8))) as loop:
            prefetch_keys(builder, source, next_offsets, loop.index, stored)
            element = builder.mul(loop.index, i64(8))
            step = builder.mul(element, i64(ITEM_BYTES[stored]))
            addresses = [builder.add(start, step) for start in starts]
            row = builder.add(into, builder.mul(builder.mul(element, stride), i64(4)))
            for i, column in enumerate(transpose_keys_f32(builder, addresses, stored)):
                target = builder.add(row, builder.mul(stride, i64(4 * i)))
                store(builder, builder.fmul(column, key_scales), target)
        return context.get_dummy_value()

    return types.void(plane, _int, _int, _int, _int, _int, _int), code


@intrinsic
def pack_8_keys_vnni(
    _: Any, plane: Any, source: Any, offsets: Any, into: Any, stride: Any, width: Any
) -> Any:
    """into[d // 2, :8] = words (keys[:8, d], keys[:8, d + 1]): `pack_8_keys_f32` for VNNI."""
    stored = storage_kind(plane)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, into, stride, width = args
        starts = _row_starts(builder, source, offsets, 8)
        next_offsets = builder.add(offsets, i64(8 * PREFETCH_KEYS))
        with cgutils.for_range(builder, builder.udiv(width, i64(8))) as loop:
            prefetch_keys(builder, source, next_offsets, loop.index, stored)
            step = builder.mul(loop.index, i64(8 * ITEM_BYTES[BF16]))
            row = builder.add(into, builder.mul(builder.mul(loop.index, stride), i64(16)))
            words = transpose_keys_vnni(builder, [builder.add(start, step) for start in starts])
            for i, word in enumerate(words):
                store(builder, word, builder.add(row, builder.mul(stride, i64(4 * i))))
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 5), code


@intrinsic
def pack_value_tiles_vnni(
    _: Any, plane: Any, source: Any, offsets: Any, count: Any, into: Any, stride: Any, width: Any, columns: Any
) -> Any:  # fmt: skip
    """Tiles [columns // TILE_N, count, TILE_N] of words (values[2i, d], values[2i + 1, d]).

    Args:
        plane, source, offsets, into, stride: as for `pack_value_tiles_f32`.
        count: words; twice as many values are read.
        width: elements of a value, a multiple of 8.
        columns: multiple of TILE_N; words from `width` on are zeros.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, count, into, stride, width, columns = args

        def word_address(row: Any, column: Any) -> Any:
            """Address of a column, given its row in the first tile."""
            tile = builder.udiv(column, i64(TILE_N))
            inner = builder.sub(column, builder.mul(tile, i64(TILE_N)))
            return builder.add(offset(builder, row, inner, 4), builder.mul(tile, stride))

        with cgutils.for_range(builder, count) as loop:
            first_offset_at = offset(builder, offsets, loop.index, 16)
            next_offset_at = builder.add(first_offset_at, i64(8 * PREFETCH_KEYS))
            starts = _row_starts(builder, source, first_offset_at, 2)
            next_starts = _row_starts(builder, source, next_offset_at, 2)
            row = offset(builder, into, loop.index, 4 * TILE_N)

            def copy_columns(begin: Any, steps: Any, count: int) -> None:
                with cgutils.for_range(builder, steps) as chunks:
                    column = builder.add(begin, builder.mul(chunks.index, i64(count)))
                    vector = vector_type(count, ir.IntType(16))
                    addresses = [offset(builder, start, column, 2) for start in starts]
                    values = [load(builder, address, vector) for address in addresses]
                    if count * ITEM_BYTES[BF16] >= CACHE_LINE:
                        for next_start in next_starts:
                            emit_prefetch(builder, offset(builder, next_start, column, 2), 3)
                    target = word_address(row, column)
                    for i, words in enumerate(interleave_values_vnni(builder, *values)):
                        store(builder, words, builder.add(target, i64(4 * i * words.type.count)))

            num_tiles = builder.udiv(width, i64(TILE_N))
            copy_columns(i64(0), num_tiles, TILE_N)
            done = builder.mul(num_tiles, i64(TILE_N))
            copy_columns(done, builder.udiv(builder.sub(width, done), i64(8)), 8)
            num_padding = builder.udiv(builder.sub(columns, width), i64(8))
            with cgutils.for_range(builder, num_padding) as chunks:
                column = builder.add(width, builder.mul(chunks.index, i64(8)))
                store(builder, constant(0.0, 8), word_address(row, column))
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 7), code


@intrinsic
def pack_value_tiles_f32(
    _: Any, plane: Any, source: Any, offsets: Any, scales: Any, count: Any, into: Any, stride: Any, tiles: Any
) -> Any:  # fmt: skip
    """Tiles [tiles, count, TILE_N] float32 of values [count, width], each value times its scale.

    Args:
        plane: of the values; its type is their storage kind.
        offsets: address of [count] int64: bytes from `source` to each value; readable `PREFETCH_KEYS`
            further.
        scales: address of [count] float32.
        into, stride: address of the first tile, and bytes from tile to tile.
    """
    stored = storage_kind(plane)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, source, offsets, scales, count, into, stride, tiles = args
        with cgutils.for_range(builder, count) as value:
            value_offset_at = offset(builder, offsets, value.index, 8)
            next_offset_at = builder.add(value_offset_at, i64(8 * PREFETCH_KEYS))
            [start] = _row_starts(builder, source, value_offset_at, 1)
            [next_start] = _row_starts(builder, source, next_offset_at, 1)
            value_scale = load(builder, offset(builder, scales, value.index, 4), f32)
            scale = broadcast(builder, value_scale, 8)
            row = offset(builder, into, value.index, 4 * TILE_N)
            with cgutils.for_range(builder, tiles) as loop:
                step = builder.mul(loop.index, i64(TILE_N * ITEM_BYTES[stored]))
                for byte in range(0, TILE_N * ITEM_BYTES[stored], CACHE_LINE):
                    emit_prefetch(builder, builder.add(builder.add(next_start, step), i64(byte)), 3)
                target = builder.add(row, builder.mul(loop.index, stride))
                for element in range(0, TILE_N, 8):
                    address = builder.add(
                        builder.add(start, step), i64(element * ITEM_BYTES[stored])
                    )
                    x = load_as_f32(builder, address, stored)
                    store(builder, builder.fmul(x, scale), builder.add(target, i64(4 * element)))
        return context.get_dummy_value()

    return types.void(plane, *[_int] * 7), code


@jit
def pack_keys(keys: KVBlock, into: int, depth: int, count: int) -> None:
    """Pack `count` keys into [tiles, depth, TILE_N]; depth counts floats, or VNNI words.

    Each tile is contiguous: rows a power of two apart would share few sets of the L1 cache.
    """
    plane, base = keys.plane, keys.base
    tail = plane.width % 8
    whole = plane.width - tail
    for j in range(0, count, 8):
        offsets, scale = keys.offsets + 8 * j, keys.scales + 4 * j
        target = into + 4 * (j // TILE_N * depth * TILE_N + j % TILE_N)
        if is_vnni(plane):
            pack_8_keys_vnni(plane, base, offsets, target, TILE_N, plane.width)
        else:
            pack_8_keys_f32(plane, base, offsets, scale, target, TILE_N, whole)
    for d in range(whole, plane.width):
        for j in range(count):
            address = base + load_i64(keys.offsets + 8 * j) + d * item_bytes(plane)
            x = load_plane_element(plane, address) * load_element(keys.scales + 4 * j, F32)
            row = into + 4 * TILE_N * (j // TILE_N * depth + d)
            store_f32(row + 4 * (j % TILE_N), x)


@jit
def pack_values(values: KVBlock, into: int, stride: int, count: int) -> None:
    """Pack `count` values into [stride / TILE_N, BLOCK_KEYS, TILE_N]; VNNI: BLOCK_KEYS / 2 words."""
    plane, value_bytes = values.plane, item_bytes(values.plane)
    if is_vnni(plane):
        pack_value_tiles_vnni(plane, values.base, values.offsets, -(-count // 2), into, 2 * TILE_N * BLOCK_KEYS,
            plane.width, stride)  # fmt: skip
        return
    num_tiles = plane.width // TILE_N
    tile_bytes = 4 * TILE_N * BLOCK_KEYS
    pack_value_tiles_f32(
        plane, values.base, values.offsets, values.scales, count, into, tile_bytes, num_tiles
    )
    for d in range(num_tiles * TILE_N, stride, TILE_N):
        for j in range(count):
            address = values.base + load_i64(values.offsets + 8 * j) + d * value_bytes
            scale = load_element(values.scales + 4 * j, F32)
            target = into + tile_bytes * (d // TILE_N) + 4 * TILE_N * j
            for i in range(TILE_N):
                x = (
                    load_plane_element(plane, address + i * value_bytes) * scale
                    if d + i < plane.width
                    else np.float32(0.0)
                )
                store_f32(target + 4 * i, x)
