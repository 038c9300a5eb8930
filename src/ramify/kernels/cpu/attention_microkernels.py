"""A block of keys and values laid out for many rows, and products with it.

What is here is a part of the kernels of `paged_attention`.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import CACHE_LINE
from ramify.kernels.cpu.attention_args import KVBlock, KVPlane, PrefetchRange, item_bytes
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.simd import (
    LANES,
    TILE_M,
    TILE_N,
    TILE_N_VECTORS,
    bf16_dot,
    broadcast,
    constant,
    f32,
    fma,
    i64,
    load,
    load_i64,
    offset,
    prefetch,
    store,
    vector_type,
)

_TILE_N, _TILE_M, _CACHE_LINE = TILE_N, TILE_M, CACHE_LINE  # globals are constants to Numba
_int, _float = types.int64, types.float32


def _make_tile(num_rows: int) -> Any:
    @intrinsic
    def tile(
        _: Any, plane: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, depth: Any,
        scale: Any,
    ) -> Any:  # fmt: skip
        """c[r, :TILE_N] = scale * sum over k < depth of a[r, k] * b[k, :], k ascending.

        Strides in floats, or in words of pairs if `plane`, the plane that b is made of, is one; without pairs `scale` is not looked at. The +0 at the end
        makes a sum of zeros +0 however many there were, so that trailing products by zero may be
        left out.
        """
        pairs = plane.instance_class.vnni
        add = bf16_dot if pairs else fma

        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            _, a, a_stride, b, b_stride, c, c_stride, depth, scale = args
            zero = constant(0.0, LANES)
            sums = [
                [cgutils.alloca_once(builder, vector_type(LANES)) for _ in range(TILE_N_VECTORS)]
                for _ in range(num_rows)
            ]
            for row in sums:
                for one in row:
                    builder.store(zero, one)
            starts = [builder.add(a, builder.mul(a_stride, i64(4 * r))) for r in range(num_rows)]
            with cgutils.for_range(builder, depth) as loop:
                line = offset(builder, b, builder.mul(loop.index, b_stride), 4)
                lines = [
                    load(builder, builder.add(line, i64(4 * LANES * v)), vector_type(LANES))
                    for v in range(TILE_N_VECTORS)
                ]
                for row, start in zip(sums, starts, strict=True):
                    x = load(builder, offset(builder, start, loop.index, 4), f32)
                    wide = broadcast(builder, x, LANES)
                    for one, other in zip(row, lines, strict=True):
                        builder.store(add(builder, wide, other, builder.load(one)), one)
            factor = broadcast(builder, scale, LANES)
            for r, row in enumerate(sums):
                into = builder.add(c, builder.mul(c_stride, i64(4 * r)))
                for v, one in enumerate(row):
                    total = builder.load(one)
                    if pairs:
                        total = builder.fmul(total, factor)
                    total = builder.fadd(total, zero)
                    store(builder, total, builder.add(into, i64(4 * LANES * v)))
            return context.get_dummy_value()

        return types.void(plane, *[_int] * 7, _float), code

    return tile


attention_tile_1, attention_tile_2, attention_tile_4, attention_tile_full = (
    _make_tile(num_rows) for num_rows in (1, 2, 4, TILE_M)
)


@jit
def _prefetch_rows(block: KVBlock, begin: int, end: int) -> None:
    """Begin to fetch some rows of a block into the second-level cache."""
    for i in range(begin, end):
        at = block.base + load_i64(block.offsets + 8 * i)
        for line in range(0, block.plane.width * item_bytes(block.plane), _CACHE_LINE):
            prefetch(at + line, 2)


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
