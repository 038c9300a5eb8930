"""Expand block-table rows to flat slot indices on the table's device, for kernels that read flat lists."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.errors import ConfigError


def flat_slots(
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
    total: int,
    starts: Tensor | None = None,
) -> Tensor:
    """Slots of tokens starts[i] .. starts[i] + lengths[i] - 1 of each request i, concatenated: [total] int64.

    slot = table[row, position // page_size] * page_size + position % page_size. A hole (-1) in the
    table gives a slot below 0, never a slot of another page. No host sync: the only size that is not
    a shape is `total`, which the host knows (`AttentionBatch.total_kv`).

    Args:
        table: [num_rows, max_pages] int32 or int64, pages in order.
        rows: [batch] int64, rows of the table, in any order; batch may be 0.
        lengths: [batch] int32 or int64, tokens of each request; 0 is allowed.
        page_size: tokens per page.
        total: the sum of `lengths`. Smaller cuts off the end; larger is an index out of range.
        starts: [batch] int32 or int64, position of the first token; None: 0 for all.

    Raises:
        ConfigError: shapes or dtypes disagree; the values of tensors are not read.
    """
    batch = rows.shape[0]
    vectors = [rows, lengths] if starts is None else [rows, lengths, starts]
    if table.dim() != 2 or any(vector.shape != (batch,) for vector in vectors):
        shapes = ", ".join(str(tuple(vector.shape)) for vector in vectors)
        raise ConfigError(
            f"table {tuple(table.shape)} with {shapes}; it must be [num_rows, max_pages], and rows, "
            "lengths and starts [batch]"
        )
    if any(tensor.dtype not in (torch.int32, torch.int64) for tensor in (table, *vectors)):
        raise ConfigError("table, rows, lengths and starts must be int32 or int64")
    if page_size < 1 or total < 0:
        raise ConfigError(f"page_size={page_size} and total={total} must be at least 1 and 0")
    if batch == 0 or total == 0:
        return torch.zeros(0, dtype=torch.int64, device=table.device)
    ends = lengths.cumsum(0, dtype=torch.int64)
    indices = torch.arange(total, device=table.device)
    request = torch.searchsorted(ends, indices, right=True)
    # from an index in the result to a position of its request
    shift = lengths - ends
    if starts is not None:
        shift = shift + starts
    positions = indices + shift[request]
    pages = table[rows[request], positions // page_size].long()
    return pages * page_size + positions % page_size
