"""A block of keys and values laid out for many rows, and products with it.

What is here is a part of the kernels of `block_kernels`.
"""

from __future__ import annotations

import numpy as np

from ramify.attention.block_rows import BLOCK_KEYS, jit
from ramify.attention.kernel_args import Block, Later, Part, in_pairs, stored_at, stored_size
from ramify.attention.key_vectors import (
    copy_value_pairs,
    copy_values,
    transpose_keys,
    transpose_pairs,
)
from ramify.attention.simd import (
    LINE,
    TILE_COLUMNS,
    TILE_ROWS,
    element_at,
    int_at,
    prefetch,
    put_float,
    tile_1,
    tile_2,
    tile_4,
    tile_all,
)

_BLOCK, _COLUMNS, _ROWS = BLOCK_KEYS, TILE_COLUMNS, TILE_ROWS  # globals are constants to Numba
_LINE = LINE


@jit
def _fetch(block: Block, begin: int, end: int) -> None:
    """Begin to fetch some rows of a block into the second-level cache."""
    for i in range(begin, end):
        at = block.source + int_at(block.offsets + 8 * i)
        for line in range(0, block.part.width * stored_size(block.part), _LINE):
            prefetch(at + line, 2)


@jit
def pack_keys(keys: Block, into: int, depth: int, count: int) -> None:
    """Columns of [tiles, depth, TILE_COLUMNS] float32, or words of pairs, from `count` keys.

    A tile of a product lies in one piece: lines a power of two apart would share few places of
    the first-level cache.
    """
    part, source = keys.part, keys.source
    rest = part.width % 8
    whole = part.width - rest
    for j in range(0, count, 8):
        where, scale = keys.offsets + 8 * j, keys.factors + 4 * j
        to = into + 4 * (j // _COLUMNS * depth * _COLUMNS + j % _COLUMNS)
        if in_pairs(part):
            transpose_pairs(part, source, where, to, _COLUMNS, part.width)
        else:
            transpose_keys(part, source, where, scale, to, _COLUMNS, whole)
    for d in range(whole, part.width):
        for j in range(count):
            at = source + int_at(keys.offsets + 8 * j) + d * stored_size(part)
            x = stored_at(part, at) * element_at(keys.factors + 4 * j, 0)
            tile = into + 4 * _COLUMNS * (j // _COLUMNS * depth + d)
            put_float(tile + 4 * (j % _COLUMNS), x)


@jit
def pack_values(values: Block, into: int, stride: int, count: int) -> None:
    """[stride / TILE_COLUMNS, BLOCK_KEYS, TILE_COLUMNS] float32; in pairs words of half as many keys."""
    part, size = values.part, stored_size(values.part)
    if in_pairs(part):
        copy_value_pairs(part, values.source, values.offsets, -(-count // 2), into,
                         2 * _COLUMNS * _BLOCK, part.width, stride)  # fmt: skip
        return
    tiles = part.width // _COLUMNS
    tile = 4 * _COLUMNS * _BLOCK
    copy_values(part, values.source, values.offsets, values.factors, count, into, tile, tiles)
    for d in range(tiles * _COLUMNS, stride, _COLUMNS):
        for j in range(count):
            at = values.source + int_at(values.offsets + 8 * j) + d * size
            factor = element_at(values.factors + 4 * j, 0)
            to = into + tile * (d // _COLUMNS) + 4 * _COLUMNS * j
            for i in range(_COLUMNS):
                x = (
                    stored_at(part, at + i * size) * factor
                    if d + i < part.width
                    else np.float32(0.0)
                )
                put_float(to + 4 * i, x)


@jit
def product(
    num_rows: int, a: int, a_stride: int, b: int, b_tile: int, c: int, c_stride: int,
    depth: int, num_columns: int, scale: float, part: Part, later: Later,
) -> None:  # fmt: skip
    """c[:num_rows, :num_columns] = a[:num_rows, :depth] @ b[:depth, :num_columns], whole tiles.

    In pairs `depth` counts words, and the product is multiplied by `scale`, which is not looked at
    otherwise: `a` is scaled already.

    Args:
        part: the plane that b is made of.
        b: address of the first tile, [depth, TILE_COLUMNS]; the next is `b_tile` bytes further.
        later: fetched meanwhile, a little after each tile: all at once, the next would wait.
    """
    done, fetched = 0, later.begin
    share = -(-(later.end - later.begin) * _COLUMNS // num_columns)
    while done < num_rows:
        left = num_rows - done
        x, y = a + 4 * done * a_stride, c + 4 * done * c_stride
        rows = _ROWS if left >= _ROWS else (4 if left >= 4 else (2 if left >= 2 else 1))
        for tile in range(num_columns // _COLUMNS):
            at, to = b + b_tile * tile, y + 4 * _COLUMNS * tile
            if rows == _ROWS:
                tile_all(part, x, a_stride, at, _COLUMNS, to, c_stride, depth, scale)
            elif rows == 4:
                tile_4(part, x, a_stride, at, _COLUMNS, to, c_stride, depth, scale)
            elif rows == 2:
                tile_2(part, x, a_stride, at, _COLUMNS, to, c_stride, depth, scale)
            else:
                tile_1(part, x, a_stride, at, _COLUMNS, to, c_stride, depth, scale)
            if fetched < later.end:
                upto = min(fetched + share, later.end)
                _fetch(later.keys, fetched, upto)
                if later.values.part.address != later.keys.part.address:  # latents are both
                    _fetch(later.values, fetched, upto)
                fetched = upto
        done += rows
