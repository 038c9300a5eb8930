"""Grouped GEMM of a mixture of experts: a matrix of each expert, over blocks of token-expert pairs.

A program reads the expert of its block from the device. Tiles and splits are those of
`gemm.BatchInvariantGemm`: a row has the bits of that GEMM over the expert's matrix, whoever is beside it.
"""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.expert_pairs import ExpertPairs
from ramify.kernels.triton.gemm import GemmTiles, _finish, _sum_split
from ramify.kernels.triton.launch import aligned


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def grouped_gemm(
    x, weight, bias, out, pairs, block_experts, num_pairs, num_blocks,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    GROUP_M: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // PAIRS_PER_ROW] @ weight[expert].T + bias[expert]. Grid: (tiles,).

    Args:
        x: [num_pairs / PAIRS_PER_ROW, K], weight: [experts, N, K], bias: [experts, N]; contiguous.
        out: [num_pairs, N]; rows of pairs in no block are left.
        pairs: [num_blocks, BLOCK_M] int32; num_pairs where a block has none.
        block_experts: [num_blocks] int32; -1 for a block without pairs.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # `GROUP_M` blocks, column by column: neighbours are often of one expert, whose columns are in L2
    tile = tl.program_id(0)
    group = tile // (GROUP_M * tiles_n)
    in_group = tile % (GROUP_M * tiles_n)
    height = tl.minimum(num_blocks - group * GROUP_M, GROUP_M)
    block = group * GROUP_M + in_group % height
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    column = in_group // height * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for split in range((K + SPLIT_K - 1) // SPLIT_K):
        total += _sum_split(
            x, weight + expert * (N * K), pair // PAIRS_PER_ROW, column,
            num_pairs // PAIRS_PER_ROW, split, N, K, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K,
        )  # fmt: skip
    mask = (pair < num_pairs)[:, None] & (column < N)[None, :]
    at = pair.to(tl.int64)[:, None] * N + column[None, :]
    columns = tl.broadcast_to(column[None, :], (BLOCK_M, BLOCK_N))
    _finish(total, bias + expert * N, out, out, at, columns, mask, HAS_BIAS, False)


class GroupedGemm:
    """x @ weight[expert].T + bias[expert] of every pair, in which the bits of a row depend on that row alone.

    Args:
        weight: [experts, N, K], float32, bfloat16 or float16.
        bias: [experts, N].
        tiles: None: `GemmTiles.of` the weight's dtype.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, tiles: GemmTiles | None = None
    ) -> None:
        self.weight, self.bias = aligned(weight), bias
        self.tiles = GemmTiles.of(weight.dtype) if tiles is None else tiles

    def __call__(self, x: Tensor, pairs: ExpertPairs, *, pairs_per_row: int) -> Tensor:
        """[num_pairs / pairs_per_row, K] -> [num_pairs, N]; rows of pairs without an expert are undefined.

        Args:
            pairs: in blocks of `tiles.rows`.
        """
        (_, n, k), tiles, num_pairs = self.weight.shape, self.tiles, pairs.num_pairs
        num_blocks, block_rows = pairs.pairs.shape
        assert block_rows == tiles.rows
        assert len(x) * pairs_per_row == num_pairs
        out = x.new_empty(num_pairs, n)
        if not num_pairs:
            return out
        grouped_gemm[(num_blocks * triton.cdiv(n, tiles.columns),)](
            aligned(x), self.weight, self.weight if self.bias is None else self.bias, out,
            pairs.pairs, pairs.block_experts, num_pairs, num_blocks,
            N=n, K=k, BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=tiles.block_k,
            SPLIT_K=tiles.split_of(k), GROUP_M=tiles.group_rows, PAIRS_PER_ROW=pairs_per_row,
            HAS_BIAS=self.bias is not None, num_warps=tiles.warps, num_stages=tiles.stages,
            enable_fp_fusion=False,
        )  # fmt: skip
        return out
