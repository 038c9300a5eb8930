"""Batch-invariant GEMM with a matrix for each head, as MLA absorbs and projects with.

Tiles of one shape over the whole of K, in ascending blocks: the bits of a row of a head depend on that
row alone.
"""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.gemm import _dot
from ramify.kernels.triton.launch import aligned
from ramify.kernels.triton.rounding import round_to

BLOCK_M, BLOCK_N, BLOCK_K = 32, 64, 64
FP32_BLOCK_K = 32  # float32 is multiplied without tensor cores, from registers


@triton.jit(do_not_specialize=["num_rows"])
def batch_invariant_head_gemm(
    x, weight, out, num_rows,
    HEADS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STRIDE_HEAD: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[:, head] = x[:, head] @ weight[head]. Grid: (tiles of rows, tiles of columns, HEADS).

    Args:
        x: [num_rows, HEADS, K], contiguous; out: [num_rows, HEADS, N], contiguous.
        weight: [HEADS, K, N] of these strides.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2)
    at = row.to(tl.int64) * HEADS + head
    matrix = weight + head.to(tl.int64) * STRIDE_HEAD
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, K, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + at[:, None] * K + k[None, :],
            mask=(row < num_rows)[:, None] & (k < K)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            matrix + column[:, None] * STRIDE_N + k[None, :] * STRIDE_K,
            mask=(column < N)[:, None] & (k < K)[None, :], other=0.0,
        )  # fmt: skip
        total = _dot(a, b, total)
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    stored = round_to(total, out).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * N + column[None, :], stored, mask=mask)


class HeadGemm:
    """x [rows, heads, K] times a matrix of each head, in which the bits of a row depend on that row alone.

    Args:
        matrices: [heads, K, N], float32, bfloat16 or float16, of any strides; not copied.
    """

    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, heads, K] of the matrices' dtype -> [rows, heads, N]."""
        rows, (heads, k, n) = len(x), self._matrices.shape
        out = x.new_empty(rows, heads, n)
        if not rows:
            return out
        stride_head, stride_k, stride_n = self._matrices.stride()
        is_wide = x.dtype == torch.float32
        batch_invariant_head_gemm[triton.cdiv(rows, BLOCK_M), triton.cdiv(n, BLOCK_N), heads](
            aligned(x), self._matrices, out, rows, HEADS=heads, N=n, K=k,
            STRIDE_HEAD=stride_head, STRIDE_K=stride_k, STRIDE_N=stride_n,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=FP32_BLOCK_K if is_wide else BLOCK_K,
            num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
        return out
