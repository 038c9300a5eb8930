"""Slots of whole requests, made where the block table lies: what kernels over flat lists read."""

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
    """Slots of a stretch of each request, one request after the other: [total] int64.

    With `page_size=1` these are the entries of the table themselves. A hole (-1) in the table gives
    a slot below 0, never one of another page. Nothing waits for the device: the only size that is
    not a shape is `total`, which the host knows (`AttentionBatch.total_kv`).

    Args:
        table: [num_rows, max_pages] int32 or int64, pages in order.
        rows: [batch] int64, of the table, in any order; no requests give no slots.
        lengths: [batch] int32 or int64, tokens of each request; 0 is a request without slots.
        page_size: tokens per page.
        total: the sum of `lengths`. Too small a number cuts the end off; too large a one is an
            index out of range.
        starts: [batch] int32 or int64, the position of the first token, 0 for all if left out.

    Raises:
        ConfigError: shapes or dtypes that do not fit; the values of tensors are not looked at.
    """
    batch = rows.shape[0]
    given = [rows, lengths] if starts is None else [rows, lengths, starts]
    if table.dim() != 2 or any(each.shape != (batch,) for each in given):
        raise ConfigError(
            f"table {tuple(table.shape)} with {', '.join(str(tuple(each.shape)) for each in given)}"
            "; it must be [num_rows, max_pages], and rows, lengths and starts [batch]"
        )
    if any(each.dtype not in (torch.int32, torch.int64) for each in (table, *given)):
        raise ConfigError("table, rows, lengths and starts must be int32 or int64")
    if page_size < 1 or total < 0:
        raise ConfigError(f"page_size={page_size} and total={total} must be at least 1 and 0")
    if batch == 0 or total == 0:
        return torch.zeros(0, dtype=torch.int64, device=table.device)
    ends = lengths.cumsum(0, dtype=torch.int64)
    places = torch.arange(total, device=table.device)
    owner = torch.searchsorted(ends, places, right=True)
    shift = lengths - ends  # from a place in the list to a position of its request
    if starts is not None:
        shift = shift + starts
    positions = places + shift[owner]
    pages = table[rows[owner], positions // page_size].long()
    return pages * page_size + positions % page_size
