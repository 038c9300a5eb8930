"""Head norms and rotary positions over the rows of a step, compiled by Numba: one order of sums."""

from __future__ import annotations

from typing import Any

from numba import njit, prange

from ramify.attention import row_ops
from ramify.attention.compiled import compiled
from ramify.attention.simd import F32
from ramify.models import panel_kernels, panel_tiles, row_tiles
from ramify.models.panel_kernels import inverse_rms
from ramify.models.row_tiles import scale_row, sum_squares, turn_row

_jit = njit(nogil=True, error_model="numpy")


@_jit
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


def _turn(numbers: Any, eps: float, positions: Any) -> None:
    """Queries and keys of every token in place.

    Args:
        numbers: [13] int64: F32 or BF16; address of the rows and bytes from row to row; heads of
            queries, which come first in a row, then of keys, and elements of a head; addresses of
            the query and key norms' weights [head_dim] (or 0), of cosines and of sines
            [limit, head_dim / 2]; limit, num_workers; and a place where 1 is written if a
            position is not below limit: its row is left as it is.
        positions: [num_rows] int64.
    """
    kind, rows, stride = numbers[0], numbers[1], numbers[2]
    num_q, num_k, head_dim = numbers[3], numbers[4], numbers[5]
    q_norm, k_norm, cos, sin = numbers[6], numbers[7], numbers[8], numbers[9]
    limit, num_workers, size = numbers[10], numbers[11], 4 if numbers[0] == F32 else 2
    for worker in prange(num_workers):
        first = len(positions) * worker // num_workers
        end = len(positions) * (worker + 1) // num_workers
        for token in range(first, end):
            if positions[token] < 0 or positions[token] >= limit:
                numbers[12] = 1
                continue
            angle = positions[token] * (head_dim // 2) * size
            for head in range(num_q + num_k):
                at = rows + stride * token + size * head_dim * head
                norm = q_norm if head < num_q else k_norm
                _turn_head(kind, at, head_dim, norm, eps, cos + angle, sin + angle)


turn = compiled(
    _turn,
    __file__,
    panel_kernels.__file__,
    panel_tiles.__file__,
    row_tiles.__file__,
    row_ops.__file__,
)
