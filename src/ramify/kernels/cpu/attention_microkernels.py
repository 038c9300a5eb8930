"""Q·Kᵀ and P·V over a packed KV block (see `kv_pack`): micro-kernels, and the loop over them."""

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

_int, _float = types.int64, types.float32


def _make_tile(num_rows: int) -> Any:
    @intrinsic
    def tile(
        _: Any, plane: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, depth: Any,
        scale: Any,
    ) -> Any:  # fmt: skip
        """c[r, :TILE_N] = sum over k < depth of a[r, k] * b[k, :], k ascending, + 0.

        Strides in 32-bit words: floats or, if `plane` (that b was packed from) is VNNI, pairs of
        bf16; then the sum is multiplied by `scale`. The + 0 turns a sum of -0 into +0, so that
        trailing products by zero may be left out.
        """
        vnni = plane.instance_class.vnni
        add = bf16_dot if vnni else fma

        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            _, a, a_stride, b, b_stride, c, c_stride, depth, scale = args
            zero = constant(0.0, LANES)
            sums = [
                [cgutils.alloca_once(builder, vector_type(LANES)) for _ in range(TILE_N_VECTORS)]
                for _ in range(num_rows)
            ]
            for row in sums:
                for acc in row:
                    builder.store(zero, acc)
            a_rows = [builder.add(a, builder.mul(a_stride, i64(4 * r))) for r in range(num_rows)]
            with cgutils.for_range(builder, depth) as loop:
                b_at = offset(builder, b, builder.mul(loop.index, b_stride), 4)
                b_row = [
                    load(builder, builder.add(b_at, i64(4 * LANES * v)), vector_type(LANES))
                    for v in range(TILE_N_VECTORS)
                ]
                for row, a_row in zip(sums, a_rows, strict=True):
                    x = load(builder, offset(builder, a_row, loop.index, 4), f32)
                    wide_x = broadcast(builder, x, LANES)
                    for acc, b_vector in zip(row, b_row, strict=True):
                        builder.store(add(builder, wide_x, b_vector, builder.load(acc)), acc)
            wide_scale = broadcast(builder, scale, LANES)
            for r, row in enumerate(sums):
                into = builder.add(c, builder.mul(c_stride, i64(4 * r)))
                for v, acc in enumerate(row):
                    y = builder.load(acc)
                    if vnni:
                        y = builder.fmul(y, wide_scale)
                    y = builder.fadd(y, zero)
                    store(builder, y, builder.add(into, i64(4 * LANES * v)))
            return context.get_dummy_value()

        return types.void(plane, *[_int] * 7, _float), code

    return tile


attention_tile_1, attention_tile_2, attention_tile_4, attention_tile_full = (
    _make_tile(num_rows) for num_rows in (1, 2, 4, TILE_M)
)


@jit
def _prefetch_rows(block: KVBlock, begin: int, end: int) -> None:
    """Prefetch rows [begin, end) of a block into L2."""
    for i in range(begin, end):
        row = block.base + load_i64(block.offsets + 8 * i)
        for line in range(0, block.plane.width * item_bytes(block.plane), CACHE_LINE):
            prefetch(row + line, 2)


@jit
def prefetch_range_rows(prefetch_range: PrefetchRange) -> None:
    """Prefetch all of a range into L2."""
    begin, end = prefetch_range.begin, prefetch_range.end
    _prefetch_rows(prefetch_range.keys, begin, end)
    # MLA: the latents are both keys and values
    if prefetch_range.values.plane.address != prefetch_range.keys.plane.address:
        _prefetch_rows(prefetch_range.values, begin, end)


@jit
def packed_block_gemm(
    num_rows: int, a: int, a_stride: int, b: int, b_tile: int, c: int, c_stride: int,
    depth: int, num_columns: int, scale: float, plane: KVPlane, prefetch_range: PrefetchRange,
) -> None:  # fmt: skip
    """c[:num_rows, :num_columns] = a[:num_rows, :depth] @ b[:depth, :num_columns], in whole tiles.

    VNNI: `depth` counts words of two bf16, and c is multiplied by `scale`. Otherwise `scale` is
    unused: `a` is scaled already.

    Args:
        plane: that b was packed from.
        b: address of the first tile, [depth, TILE_N]; the next is `b_tile` bytes further.
        prefetch_range: prefetched a share after each tile; all at once would delay the next tile.
    """
    row, prefetched = 0, prefetch_range.begin
    keys_per_tile = -(-(prefetch_range.end - prefetch_range.begin) * TILE_N // num_columns)
    while row < num_rows:
        left = num_rows - row
        a_at, c_row = a + 4 * row * a_stride, c + 4 * row * c_stride
        rows = TILE_M if left >= TILE_M else (4 if left >= 4 else (2 if left >= 2 else 1))
        for tile in range(num_columns // TILE_N):
            b_at, c_at = b + b_tile * tile, c_row + 4 * TILE_N * tile
            if rows == TILE_M:
                attention_tile_full(
                    plane, a_at, a_stride, b_at, TILE_N, c_at, c_stride, depth, scale
                )
            elif rows == 4:
                attention_tile_4(plane, a_at, a_stride, b_at, TILE_N, c_at, c_stride, depth, scale)
            elif rows == 2:
                attention_tile_2(plane, a_at, a_stride, b_at, TILE_N, c_at, c_stride, depth, scale)
            else:
                attention_tile_1(plane, a_at, a_stride, b_at, TILE_N, c_at, c_stride, depth, scale)
            if prefetched < prefetch_range.end:
                end = min(prefetched + keys_per_tile, prefetch_range.end)
                prefetch_range_rows(
                    PrefetchRange(prefetch_range.keys, prefetch_range.values, prefetched, end)
                )
                prefetched = end
        row += rows
