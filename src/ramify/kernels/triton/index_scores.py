"""Scores of the sparse index over paged keys: sum over heads of weight * relu(q · key).

A program takes a few query rows of a request and a tile of keys at a fixed absolute position. The heads
of a row are the rows of its product, so the bits of a score depend on that query row and that key alone.
"""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.launch import aligned, padded
from ramify.kernels.triton.paged_attention import TYPES, _dot, _load_kv, _to_dot_operand
from ramify.kernels.triton.rounding import INTERPRETED

KEY_TILE = 128
FP32_KEY_TILE = 32  # float32 is multiplied without tensor cores, from registers
ROW_TILE = 16  # query rows that a program reads its keys for
FLOAT8 = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}


@triton.jit(do_not_specialize=["table_width", "num_keys", "first_row"])
def index_scores_of_tiles(
    q, weights, keys, key_scale, out, items, positions, block_table, table_width, num_keys, first_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, SCALED: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Write the scores of the keys that a row sees. Grid: (items, tiles of BLOCK_N keys).

    Args:
        q: [T, HEADS, DIM]; weights: [T, HEADS] float32.
        keys: [slots, DIM]; key_scale: [slots] float32, with SCALED.
        out: float32 [rows from first_row on, num_keys]; keys that a row does not see are left.
        items: [n, 4] int32: first row, number of rows, row of the block table, 0.
        positions: [T] int32.
    """
    item = items + tl.program_id(0) * 4
    start = tl.load(item)
    count = tl.load(item + 1)
    pages = block_table + tl.load(item + 2) * table_width
    key = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.load(positions + start + count - 1)
    if tl.program_id(1) * BLOCK_N > last:
        return
    in_range = key <= last
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    page = tl.load(pages + key // PAGE, mask=in_range, other=0)
    slots = page.to(tl.int64) * PAGE + key % PAGE
    tile, scale = _load_kv(
        keys, key_scale, slots, 1, 0, in_range, dim, DIM, FP8, TYPE, INTERPRETED, SCALED
    )
    tile = tl.trans(tile)
    for index in range(count):
        row = (start + index).to(tl.int64)
        query = tl.load(
            q + (row * HEADS + head[:, None]) * DIM + dim[None, :],
            mask=(head < HEADS)[:, None] & (dim < DIM)[None, :], other=0.0,
        )  # fmt: skip
        products = _dot(_to_dot_operand(query, TYPE, INTERPRETED), tile, INTERPRETED)
        if SCALED:
            products = products * scale[None, :]
        weight = tl.load(weights + row * HEADS + head, mask=head < HEADS, other=0.0)
        total = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
        is_visible = key <= tl.load(positions + row)
        tl.store(out + (row - first_row) * num_keys + key, total, mask=is_visible)


def index_scores(
    q: Tensor,
    weights: Tensor,
    planes: Mapping[str, Tensor],
    out: Tensor,
    *,
    items: Tensor,
    positions: Tensor,
    block_table: Tensor,
    page_size: int,
    first_row: int,
) -> None:
    """Write the scores of the items' rows to `out`, of the keys that each row sees.

    Args:
        q: [T, heads, dim], float32, bfloat16 or float16.
        weights: [T, heads] float32.
        planes: `index_key` [pages, page_size, dim], and with 8 bits `index_key_scale`.
        out: [rows, keys] float32; row 0 is of query row `first_row`.
        items: [n, 4] int32: first row, rows (at most `ROW_TILE`), row of the block table, 0.
        positions, block_table: int32 [T] and [requests, most pages].
    """
    keys, scale = planes["index_key"], planes.get("index_key_scale")
    num_heads, dim = q.shape[1:]
    is_wide = torch.float32 in (q.dtype, keys.dtype)
    dtype, key_tile = (torch.float32, FP32_KEY_TILE) if is_wide else (q.dtype, KEY_TILE)
    index_scores_of_tiles[len(items), triton.cdiv(out.shape[1], key_tile)](
        aligned(q), aligned(weights),
        keys.view(torch.uint8) if keys.dtype in FLOAT8 else keys,
        weights if scale is None else scale,
        out, items, positions, block_table, block_table.shape[1], out.shape[1], first_row,
        HEADS=num_heads, DIM=dim, BLOCK_H=padded(num_heads), BLOCK_D=padded(dim),
        BLOCK_N=key_tile, PAGE=page_size, FP8=FLOAT8.get(keys.dtype, 0),
        SCALED=scale is not None, TYPE=TYPES[str(dtype).removeprefix("torch.")],
        num_warps=8 if is_wide else 4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
