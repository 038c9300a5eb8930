"""Choose a batch-invariant form of a row operation: the operation itself, or row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ramify.attention.exactness import (
    BATCHED,
    EXTRA_ROWS,
    PROBE_ROW_COUNTS,
    ROW_BY_ROW,
    Exactness,
    ProbeStore,
    dtype_name,
    probe_batch_invariance,
    row_by_row,
)

CANCELLED_OUTPUTS = 128


def probe_row_op(
    operation: str,
    op: Callable[..., Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    samples: Callable[[], tuple[Tensor, ...]],
    *,
    exact: bool,
    store: ProbeStore,
    counts: Sequence[int] = PROBE_ROW_COUNTS,
    strategy: str = BATCHED,
) -> tuple[Callable[..., Tensor], Exactness]:
    """`op` if the probe finds its rows independent of the batch, else `op` row by row; and the verdict.

    Args:
        operation: name in the report and in the verdict store.
        op: each argument and the result [rows, ...]; row i of the result depends on row i of the arguments.
        shape: of one row, for the report.
        samples: makes arguments to try, each [max(PROBE_ROW_COUNTS) + EXTRA_ROWS, ...], with the memory
            layout that the model will use.
        exact: False returns `op` without a probe.
        counts: row counts to try.
        strategy: the name of `op` in the verdict.
    """
    if not exact:
        return op, Exactness(operation, shape, dtype_name(dtype), strategy, "exact=False")

    verdict = store.verdict(
        operation,
        shape,
        dtype,
        lambda: probe_batch_invariance(op, samples(), counts, strategy),
        strategies=(strategy, ROW_BY_ROW),
    )
    return (op if verdict.strategy == strategy else row_by_row(op)), verdict


def sample_rows(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random rows [max(PROBE_ROW_COUNTS) + EXTRA_ROWS, *shape]: the rows that `probe_row_op` needs."""
    num_rows = max(PROBE_ROW_COUNTS) + EXTRA_ROWS
    return random_rows(num_rows, math.prod(shape), dtype).reshape(num_rows, *shape)


def random_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Seeded normal values [num_rows, width] of deviation 3, so that exponentials reach both tails."""
    generator = torch.Generator().manual_seed(num_rows * 1_000_003 + width)
    return (3 * torch.randn(num_rows, width, generator=generator)).to(dtype)


def cancelled_rows(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows made nearly orthogonal to some outputs of a matrix, so that those sums cancel.

    Kernels that add in another order differ in the last bits of a float32 sum. Rounded to bfloat16,
    one random sum in 10,000 to 100,000 shows it (measured, oneDNN with AMX); a sum that is 2^-8 of its
    terms shows 8 bits more.

    Args:
        rows: [..., rows, in_width].
        matrix: [..., out_width, in_width]; with NaN or infinity in it the rows are returned as they are.
    """
    num_outputs = min(CANCELLED_OUTPUTS, matrix.shape[-2], matrix.shape[-1] // 2)
    basis = torch.linalg.qr(matrix[..., :num_outputs, :].float().mT).Q
    if not bool(basis.isfinite().all()):
        return rows
    random = rows.float()
    cancelled: Tensor = random - random @ basis @ basis.mT
    return cancelled.to(rows.dtype)
