"""Batch-invariant GEMM: tiles of one shape, and K in splits of one length, whatever the number of rows.

An element of the result is a sum over splits of `SPLIT_K` in ascending order; a split is one chain of
`tl.dot` over blocks of `BLOCK_K`, of the same instructions in every launch. A program takes tiles
over all splits, or over one split each, whose partial sums `merge_splits` adds in the same order: how
many programs share a tile changes no bit.
"""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.launch import aligned
from ramify.kernels.triton.rounding import INTERPRETED, round_to

MERGE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """Shapes of the GEMM, the same for every number of rows.

    Compiled without spills for sm_80, sm_90 and sm_100, which 4 warps or 3 stages were not; not yet
    measured.
    """

    rows: int = 64
    columns: int = 128
    block_k: int = 64
    split_k: int = 1024  # a multiple of block_k
    group_rows: int = 8  # tiles of rows that share the columns which are in L2
    warps: int = 8
    stages: int = 4

    @classmethod
    def of(cls, dtype: torch.dtype) -> GemmTiles:
        """The shapes for operands of `dtype`."""
        # float32 is multiplied without tensor cores, from registers
        return cls(32, 32, 32, 1024, 8, 4, 2) if dtype == torch.float32 else cls()

    def split_of(self, k: int) -> int:
        """Elements of K in a split: of a shorter K one split, no longer than it."""
        return min(self.split_k, -(-k // self.block_k) * self.block_k)


@triton.jit
def _dot(a, b, acc):
    """acc + a [m, k] @ b [n, k].T in float32."""
    if (
        INTERPRETED
    ):  # the interpreter multiplies bfloat16 as integers, and NumPy's BLAS is not invariant
        return acc + tl.sum(a.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :], 2)
    return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


@triton.jit
def _sum_split(
    x, weight, row, column, num_rows, split,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Products of a tile [BLOCK_M, BLOCK_N] over one split of K."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # of whole length always: what is beyond K adds zeros
    for block in range(SPLIT_K // BLOCK_K):
        k = split * SPLIT_K + block * BLOCK_K + tl.arange(0, BLOCK_K)
        in_k = k < K
        a = tl.load(
            x + row.to(tl.int64)[:, None] * K + k[None, :],
            mask=(row < num_rows)[:, None] & in_k[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            weight + column.to(tl.int64)[:, None] * K + k[None, :],
            mask=(column < N)[:, None] & in_k[None, :], other=0.0,
        )  # fmt: skip
        acc = _dot(a, b, acc)
    return acc


@triton.jit
def _finish(
    total, bias, residual, out, at, column, mask, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    """Add the bias, round, add to the residual or store to `out`."""
    if HAS_BIAS:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = round_to(total, residual) + tl.load(residual + at, mask=mask, other=0.0).to(
            tl.float32
        )
        tl.store(residual + at, round_to(total, residual).to(residual.dtype.element_ty), mask=mask)
    else:
        tl.store(out + at, round_to(total, out).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_items"])
def batch_invariant_gemm(
    x, weight, bias, residual, out, partial, num_rows, num_items,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr, IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T + bias, or residual += that. Grid: (programs,), any number.

    An item is a tile, or with IS_SPLIT a tile and a split; a program takes every so-many-th item.

    Args:
        x: [num_rows, K], weight: [N, K], bias: [N]; contiguous.
        residual, out: [num_rows, N].
        partial: float32 [splits, num_rows, N], written with IS_SPLIT, in place of `out`.
    """
    num_splits: tl.constexpr = (K + SPLIT_K - 1) // SPLIT_K
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = 0
        tile = item
        if IS_SPLIT:
            split = item % num_splits
            tile = item // num_splits
        # tiles of `GROUP_M` rows of tiles, column by column
        group = tile // (GROUP_M * tiles_n)
        in_group = tile % (GROUP_M * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        row = (group * GROUP_M + in_group % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = in_group // height * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (row < num_rows)[:, None] & (column < N)[None, :]
        at = row.to(tl.int64)[:, None] * N + column[None, :]
        if IS_SPLIT:
            acc = _sum_split(
                x, weight, row, column, num_rows, split, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K,
            )  # fmt: skip
            tl.store(partial + tl.cast(split, tl.int64) * num_rows * N + at, acc, mask=mask)
        else:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for index in range(num_splits):
                total += _sum_split(
                    x, weight, row, column, num_rows, index, N, K, BLOCK_M, BLOCK_N, BLOCK_K,
                    SPLIT_K,
                )  # fmt: skip
            columns = tl.broadcast_to(column[None, :], (BLOCK_M, BLOCK_N))
            _finish(total, bias, residual, out, at, columns, mask, HAS_BIAS, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["num_rows"])
def merge_splits(
    partial, bias, residual, out, num_rows,
    N: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of splits in ascending order. Grid: (rows, blocks of N)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    at = tl.program_id(0).to(tl.int64) * N + column
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(NUM_SPLITS):
        total += tl.load(
            partial + tl.cast(split, tl.int64) * num_rows * N + at, mask=mask, other=0.0
        )
    _finish(total, bias, residual, out, at, column, mask, HAS_BIAS, HAS_RESIDUAL)


class BatchInvariantGemm:
    """x @ weight.T + bias, in which the bits of a row depend on that row alone.

    Args:
        weight: [N, K], float32, bfloat16 or float16.
        bias: [N].
        tiles: None: `GemmTiles.of` the weight's dtype.
        num_programs: of a launch; None: the multiprocessors of the device.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        tiles: GemmTiles | None = None,
        num_programs: int | None = None,
    ) -> None:
        self.weight, self.bias = aligned(weight), bias
        self.tiles = GemmTiles.of(weight.dtype) if tiles is None else tiles
        if num_programs is None:
            on_gpu = weight.device.type == "cuda"
            properties = torch.cuda.get_device_properties(weight.device) if on_gpu else None
            num_programs = properties.multi_processor_count if properties else 1
        self._num_programs = num_programs

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[rows, K] of the weight's dtype -> [rows, N]; with a residual, added to it in place."""
        (rows, _), (n, k) = x.shape, self.weight.shape
        out = residual if residual is not None else x.new_empty(rows, n)
        if not rows:
            return out
        tiles = self.tiles
        split_k = tiles.split_of(k)
        num_tiles = triton.cdiv(rows, tiles.rows) * triton.cdiv(n, tiles.columns)
        num_splits = triton.cdiv(k, split_k)
        # Too few tiles for the device: a program for each split of a tile.
        is_split = num_splits > 1 and num_tiles < self._num_programs
        partial = out
        if is_split:
            partial = torch.empty(num_splits, rows, n, dtype=torch.float32, device=x.device)
        num_items = num_tiles * num_splits if is_split else num_tiles
        bias = self.weight if self.bias is None else self.bias
        flags: dict[str, Any] = {
            "HAS_BIAS": self.bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "enable_fp_fusion": False,
        }
        batch_invariant_gemm[(min(num_items, self._num_programs),)](
            aligned(x), self.weight, bias, out, out, partial, rows, num_items,
            N=n, K=k, BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=tiles.block_k,
            SPLIT_K=split_k, GROUP_M=tiles.group_rows, IS_SPLIT=is_split,
            num_warps=tiles.warps, num_stages=tiles.stages, **flags,
        )  # fmt: skip
        if is_split:
            merge_splits[rows, triton.cdiv(n, MERGE_BLOCK)](
                partial, bias, out, out, rows,
                N=n, NUM_SPLITS=num_splits, BLOCK=MERGE_BLOCK, num_warps=4, **flags,
            )  # fmt: skip
        return out
