"""A block of keys and values laid out for many rows, and products with it.

What is here is a part of the kernels of `paged_attention`.
"""

from __future__ import annotations

import numpy as np

from ramify.kernels.cpu.abi import BLOCK_KEYS, CACHE_LINE
from ramify.kernels.cpu.attention_args import (
    KVBlock,
    KVPlane,
    PrefetchRange,
    is_vnni,
    item_bytes,
    load_plane_element,
)
from ramify.kernels.cpu.kv_pack import (
    pack_8_keys_f32,
    pack_8_keys_vnni,
    pack_value_tiles_f32,
    pack_value_tiles_vnni,
)
from ramify.kernels.cpu.online_softmax import jit
from ramify.kernels.cpu.simd import (
    TILE_M,
    TILE_N,
    attention_tile_1,
    attention_tile_2,
    attention_tile_4,
    attention_tile_full,
    load_element,
    load_i64,
    prefetch,
    store_f32,
)

_BLOCK, _TILE_N, _TILE_M = BLOCK_KEYS, TILE_N, TILE_M  # globals are constants to Numba
_CACHE_LINE = CACHE_LINE


@jit
def _prefetch_rows(block: KVBlock, begin: int, end: int) -> None:
    """Begin to fetch some rows of a block into the second-level cache."""
    for i in range(begin, end):
        at = block.base + load_i64(block.offsets + 8 * i)
        for line in range(0, block.plane.width * item_bytes(block.plane), _CACHE_LINE):
            prefetch(at + line, 2)


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


@jit
def packed_block_gemm(
    num_rows: int, a: int, a_stride: int, b: int, b_tile: int, c: int, c_stride: int,
    depth: int, num_columns: int, scale: float, plane: KVPlane, prefetch_range: PrefetchRange,
) -> None:  # fmt: skip
    """c[:num_rows, :num_columns] = a[:num_rows, :depth] @ b[:depth, :num_columns], whole tiles.

    In pairs `depth` counts words, and the product is multiplied by `scale`, which is not looked at
    otherwise: `a` is scaled already.

    Args:
        plane: the plane that b is made of.
        b: address of the first tile, [depth, TILE_N]; the next is `b_tile` bytes further.
        prefetch_range: fetched meanwhile, a little after each tile: all at once, the next would wait.
    """
    done, fetched = 0, prefetch_range.begin
    share = -(-(prefetch_range.end - prefetch_range.begin) * _TILE_N // num_columns)
    while done < num_rows:
        left = num_rows - done
        x, y = a + 4 * done * a_stride, c + 4 * done * c_stride
        rows = _TILE_M if left >= _TILE_M else (4 if left >= 4 else (2 if left >= 2 else 1))
        for tile in range(num_columns // _TILE_N):
            at, to = b + b_tile * tile, y + 4 * _TILE_N * tile
            if rows == _TILE_M:
                attention_tile_full(plane, x, a_stride, at, _TILE_N, to, c_stride, depth, scale)
            elif rows == 4:
                attention_tile_4(plane, x, a_stride, at, _TILE_N, to, c_stride, depth, scale)
            elif rows == 2:
                attention_tile_2(plane, x, a_stride, at, _TILE_N, to, c_stride, depth, scale)
            else:
                attention_tile_1(plane, x, a_stride, at, _TILE_N, to, c_stride, depth, scale)
            if fetched < prefetch_range.end:
                upto = min(fetched + share, prefetch_range.end)
                _prefetch_rows(prefetch_range.keys, fetched, upto)
                if (
                    prefetch_range.values.plane.address != prefetch_range.keys.plane.address
                ):  # latents are both
                    _prefetch_rows(prefetch_range.values, fetched, upto)
                fetched = upto
        done += rows
