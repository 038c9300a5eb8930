"""Head norms and rotary positions over the rows of a step, compiled by Numba: one order of sums."""

from __future__ import annotations

from typing import Any

from ramify.attention.block_rows import jit
from ramify.attention.simd import F32
from ramify.models.panel_kernels import inverse_rms
from ramify.models.row_tiles import scale_row, sum_squares, turn_row


@jit
def _turn_head(
    kind: int, head: int, head_dim: int, norm: int, eps: float, cos: int, sin: int
) -> None:
    """One head in place: normalised if `norm` is the address of weights, then turned."""
    if kind == F32:
        if norm:
            scale = inverse_rms(sum_squares(head, head_dim, 0), head_dim, eps)
            scale_row(head, norm, head, head_dim, scale, 0, 0)
        turn_row(head, cos, sin, head_dim // 2, 0)
    else:
        if norm:
            scale = inverse_rms(sum_squares(head, head_dim, 1), head_dim, eps)
            scale_row(head, norm, head, head_dim, scale, 1, 1)
        turn_row(head, cos, sin, head_dim // 2, 1)


@jit
def share_of(numbers: Any, num_rows: int, task: int) -> Any:
    """Rows from, to."""
    return num_rows * task // numbers[11], num_rows * (task + 1) // numbers[11]


@jit
def turn(numbers: Any, eps: float, positions: Any, task: int) -> None:
    """Queries and keys of some tokens in place.

    Args:
        numbers: [13] int64: F32 or BF16; address of the rows and bytes from row to row; heads of
            queries, which come first in a row, then of keys, and elements of a head; addresses of
            the query and key norms' weights [head_dim] (or 0), of cosines and of sines
            [limit, head_dim / 2]; limit; the number of tasks; and a place where 1 is written if a
            position is not below limit: its row is left as it is.
        positions: [num_rows] int64.
    """
    kind, rows, stride = numbers[0], numbers[1], numbers[2]
    num_q, num_k, head_dim = numbers[3], numbers[4], numbers[5]
    q_norm, k_norm, cos, sin = numbers[6], numbers[7], numbers[8], numbers[9]
    limit, size = numbers[10], 4 if numbers[0] == F32 else 2
    first, end = share_of(numbers, len(positions), task)
    for token in range(first, end):
        if positions[token] < 0 or positions[token] >= limit:
            numbers[12] = 1
            continue
        angle = positions[token] * (head_dim // 2) * size
        for head in range(num_q + num_k):
            at = rows + stride * token + size * head_dim * head
            norm = q_norm if head < num_q else k_norm
            _turn_head(kind, at, head_dim, norm, eps, cos + angle, sin + angle)
