"""Head norms and rotary positions over the rows of a step, compiled by Numba: one order of sums."""

from __future__ import annotations

from typing import Any

from ramify.kernels.cpu.abi import F32
from ramify.kernels.cpu.online_softmax import jit
from ramify.kernels.cpu.packed_gemm import inverse_rms
from ramify.kernels.cpu.row_tiles import rms_scale_row, rope_row, sum_squares


@jit
def _norm_rope_head(
    kind: int, head: int, head_dim: int, norm: int, eps: float, cos: int, sin: int
) -> None:
    """One head in place: normalised if `norm` is the address of weights, then turned."""
    if kind == F32:
        if norm:
            scale = inverse_rms(sum_squares(head, head_dim, 0), head_dim, eps)
            rms_scale_row(head, norm, head, head_dim, scale, 0, 0)
        rope_row(head, cos, sin, head_dim // 2, 0)
    else:
        if norm:
            scale = inverse_rms(sum_squares(head, head_dim, 1), head_dim, eps)
            rms_scale_row(head, norm, head, head_dim, scale, 1, 1)
        rope_row(head, cos, sin, head_dim // 2, 1)


@jit
def token_range(op: Any, num_rows: int, task: int) -> Any:
    """Rows from, to."""
    return num_rows * task // op[11], num_rows * (task + 1) // op[11]


@jit
def norm_rope(op: Any, eps: float, positions: Any, task: int) -> None:
    """Queries and keys of some tokens in place.

    Args:
        op: [13] int64: F32 or BF16; address of the rows and bytes from row to row; heads of
            queries, which come first in a row, then of keys, and elements of a head; addresses of
            the query and key norms' weights [head_dim] (or 0), of cosines and of sines
            [limit, head_dim / 2]; limit; the number of tasks; and a place where 1 is written if a
            position is not below limit: its row is left as it is.
        positions: [num_rows] int64.
    """
    kind, rows, stride = op[0], op[1], op[2]
    num_q, num_k, head_dim = op[3], op[4], op[5]
    q_norm, k_norm, cos, sin = op[6], op[7], op[8], op[9]
    limit, size = op[10], 4 if op[0] == F32 else 2
    first, end = token_range(op, len(positions), task)
    for token in range(first, end):
        if positions[token] < 0 or positions[token] >= limit:
            op[12] = 1
            continue
        angle = positions[token] * (head_dim // 2) * size
        for head in range(num_q + num_k):
            at = rows + stride * token + size * head_dim * head
            norm = q_norm if head < num_q else k_norm
            _norm_rope_head(kind, at, head_dim, norm, eps, cos + angle, sin + angle)
