"""`PagedIndex`: top-k key selection for sparse attention, with scores by a Triton kernel over the pages.

The selection of `sparse_index.SparseIndex` without its loops over tiles: a launch for the scores of many
query rows, and operations of torch on all of them together. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.sparse_index import IndexQuery, topk_mask
from ramify.attention.staging_buffers import StagingBuffers, next_power_of_two
from ramify.errors import ConfigError

ROW_TILE = 16  # query rows of a program
KEY_TILE = 128  # the columns of a table of scores are a power of two times this
MAX_SCORES = 1 << 24  # float32 scores in flight, 64 MB


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Query rows [start, stop) whose scores are computed together, by items [first_item, end_item)."""

    start: int
    stop: int
    first_item: int
    end_item: int


@dataclass(frozen=True, slots=True, eq=False)
class PagedIndexPlan:
    """A step on the device. The next `plan` of the same index overwrites its buffers."""

    arrays: dict[str, Tensor]
    groups: tuple[RowGroup, ...]  # none: every query selects all keys that it sees
    num_rows: int
    num_keys: int  # columns of the table of scores
    width: int  # most keys that a query selects
    signature: Hashable  # a CUDA graph of `select` is valid for all plans with the same


class PagedIndex:
    """Scores keys and selects the `top_k` best of each query; the same object for every layer.

    Args:
        top_k: most keys per query.
        num_heads, head_dim: of the index.
        device: CUDA, or the CPU with Triton's interpreter.
        page_size: of the pool.
        exact: for the report; a score depends on its row and its key alone in any case.
    """

    def __init__(
        self,
        *,
        top_k: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
        page_size: int,
        exact: bool = True,
    ) -> None:
        if min(top_k, num_heads, head_dim) < 1:
            raise ConfigError(
                f"top_k={top_k}, num_heads={num_heads}, head_dim={head_dim}: each must be >= 1"
            )
        self.top_k, self.device, self._page_size = top_k, device, page_size
        self.num_heads, self.head_dim = num_heads, head_dim
        reason = f"a row of {num_heads} heads × {KEY_TILE} keys" if exact else "exact=False"
        shape = (num_heads, head_dim)
        self._verdict = Exactness("index scores", shape, "float32", "triton", reason)
        self._arrays = StagingBuffers(device)

    def exactness(self) -> list[Exactness]:
        """The kernel of the scores."""
        return [self._verdict]

    def plan(self, batch: AttentionBatch) -> PagedIndexPlan:
        """Group the query rows and upload their metadata in one copy. Called once per step."""
        is_scored = batch.max_kv_len > self.top_k
        width = self.top_k if is_scored else next_power_of_two(batch.max_kv_len)
        num_keys = KEY_TILE * next_power_of_two(-(-batch.max_kv_len // KEY_TILE))
        items, groups = _items_of(batch), tuple[RowGroup, ...]()
        if is_scored:
            groups = _groups_of(items, max(1, MAX_SCORES // num_keys))
        arrays = self._arrays.upload(
            {"positions": batch.positions, "items": items, "block_table": batch.block_table}
        )
        signature = (groups, num_keys, width, batch.num_tokens, self._arrays.generation)
        return PagedIndexPlan(arrays, groups, batch.num_tokens, num_keys, width, signature)

    def select(
        self, plan: PagedIndexPlan, query: IndexQuery, planes: Mapping[str, Tensor]
    ) -> Tensor:
        """The positions that each query attends to: see `SparseIndex.select`.

        Returns:
            [rows, n] int32, n at least the most keys that a query selects: ascending, then -1.
        """
        shape = len(query.q), plan.width
        selected = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        positions = plan.arrays["positions"][: plan.num_rows]
        if not plan.groups:
            column = torch.arange(plan.width, dtype=torch.int32, device=self.device)
            selected[: plan.num_rows] = torch.where(column <= positions, column, -1)
            return selected
        column = torch.arange(plan.num_keys, dtype=torch.int32, device=self.device)
        for group in plan.groups:
            rows = slice(group.start, group.stop)
            scores = self.scores(plan, group, query, planes)
            mask = topk_mask(scores, column <= positions[rows], self.top_k)
            # the extra column takes the keys that are not selected and is cut off
            target = torch.where(mask, mask.cumsum(1) - 1, plan.width)
            packed = selected.new_full((len(scores), plan.width + 1), -1)
            packed.scatter_(1, target, column.expand_as(target))
            selected[rows] = packed[:, :-1]
        return selected

    def scores(
        self,
        plan: PagedIndexPlan,
        group: RowGroup,
        query: IndexQuery,
        planes: Mapping[str, Tensor],
    ) -> Tensor:
        """Scores of a group's rows: [rows, `plan.num_keys`] float32, -inf where a row sees no key."""
        from ramify.kernels.triton.index_scores import index_scores

        shape = group.stop - group.start, plan.num_keys
        scores = torch.full(shape, -torch.inf, device=self.device)
        arrays = plan.arrays
        index_scores(
            query.q,
            query.weights,
            planes,
            scores,
            items=arrays["items"][group.first_item : group.end_item],
            positions=arrays["positions"],
            block_table=arrays["block_table"],
            page_size=self._page_size,
            first_row=group.start,
        )
        return scores


def _items_of(batch: AttentionBatch) -> NDArray[np.int32]:
    """Tiles of at most `ROW_TILE` query rows of a request: [n, 4] first row, rows, request, 0."""
    begin = batch.cu_seqlens_q[:-1].astype(np.int64)
    q_lens = np.diff(batch.cu_seqlens_q).astype(np.int64)
    counts = -(-q_lens // ROW_TILE)
    request = np.repeat(np.arange(batch.num_seqs), counts)
    index = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    items = np.zeros((len(request), 4), np.int32)
    items[:, 0] = begin[request] + index * ROW_TILE
    items[:, 1] = np.minimum(ROW_TILE, q_lens[request] - index * ROW_TILE)
    items[:, 2] = request
    return items


def _groups_of(items: NDArray[np.int32], max_rows: int) -> tuple[RowGroup, ...]:
    """Runs of items with at most `max_rows` rows, or one item."""
    ends = items[:, 0] + items[:, 1]
    groups, first = list[RowGroup](), 0
    while first < len(items):
        start = int(items[first, 0])
        end = max(first + 1, int(np.searchsorted(ends, start + max_rows, side="right")))
        groups.append(RowGroup(start, int(ends[end - 1]), first, end))
        first = end
    return tuple(groups)
