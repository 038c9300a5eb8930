"""Top-k key selection for sparse attention: the lightning indexer of DeepSeek-V3.2 (2025).

Each query scores all keys from position 0 to its own, cached or new, and selects the best
`top_k`. Scores are computed per query row and tile of `KEY_TILE` keys at a fixed absolute position,
so that the selection does not depend on chunking, batch or pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import (
    BATCHED,
    EXTRA_ROWS,
    FP32_ROW_MULTIPLE,
    ROW_BY_ROW,
    Exactness,
    ProbeStore,
    probe_batch_invariance,
    row_by_row,
)
from ramify.attention.staging_buffers import upload_together
from ramify.errors import ConfigError
from ramify.kv.layout import read_plane

KEY_TILE = 256
ROW_TILE = 64  # queries scored at a time: 4 MB at 64 heads and 256 keys


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """Index queries of a layer; rows beyond the batch are padding."""

    q: Tensor  # [rows, num_heads, head_dim]
    weights: Tensor  # [rows, num_heads] float32, of the heads' scores


@dataclass(frozen=True, slots=True)
class IndexTile:
    """Up to `ROW_TILE` queries [start, stop) of a request, and the slots of their visible keys."""

    start: int
    stop: int
    num_keys: int  # visible to the last query
    slots: Tensor  # [tiles * KEY_TILE] int64; any valid slot beyond the keys
    num_visible: Tensor  # [stop - start] int64


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The query tiles of a step, and the most keys that any query selects."""

    tiles: list[IndexTile]
    width: int


class KeyIndex(Protocol):
    """Selects the keys that each query of sparse attention reads; the same object for every layer."""

    device: torch.device

    def exactness(self) -> list[Exactness]:
        """The strategy of the scores, and why."""

    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare a step: everything that is the same for all layers. Called once per step."""

    def select(self, plan: Any, query: IndexQuery, planes: Mapping[str, Tensor]) -> Tensor:
        """The positions that each query attends to: [rows, n] int32, ascending, then -1.

        Args:
            planes: has `index_key`, [pages, page_size, head_dim], with this step's keys written.
        """


class SparseIndex:
    """Scores keys and selects the `top_k` best of each query; the same object for every layer.

    Args:
        top_k: most keys per query.
        num_heads, head_dim: of the index.
        exact: make a query's selection independent of the other rows.
        store: verdicts of earlier probes; None: `ProbeStore.default()`.
    """

    def __init__(
        self,
        *,
        top_k: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
        exact: bool = True,
        store: ProbeStore | None = None,
    ) -> None:
        if min(top_k, num_heads, head_dim) < 1:
            raise ConfigError(
                f"top_k={top_k}, num_heads={num_heads}, head_dim={head_dim}: each must be >= 1"
            )
        self.top_k, self.device = top_k, device
        shape = (num_heads, head_dim)
        if not exact:
            self._verdict = Exactness("index scores", shape, "float32", BATCHED, "exact=False")
            return
        store = ProbeStore.default() if store is None else store
        self._verdict = store.verdict(
            "index scores",
            shape,
            torch.float32,
            lambda: self._probe(num_heads, head_dim),
            strategies=(BATCHED, ROW_BY_ROW),
        )

    def exactness(self) -> list[Exactness]:
        """The strategy of the scores, and why."""
        return [self._verdict]

    def plan(self, batch: AttentionBatch) -> IndexPlan:
        """Split the queries into tiles. Called once per step."""
        lens = batch.positions.astype(np.int64) + 1  # visible keys, cached ones included
        arrays: list[NDArray[np.int64]] = []
        for seq in range(batch.num_seqs):
            kv_slots = batch.kv_slots(seq)
            slots = np.zeros(-(-len(kv_slots) // KEY_TILE) * KEY_TILE, np.int64)
            slots[: len(kv_slots)] = kv_slots
            arrays.append(slots)
        num_visible, *slots_of = upload_together([lens, *arrays], self.device)
        tiles = []
        for seq, padded in enumerate(slots_of):
            first, last = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
            for start in range(first, last, ROW_TILE):
                stop = min(start + ROW_TILE, last)
                num_keys = int(lens[stop - 1])
                visible = padded[: -(-num_keys // KEY_TILE) * KEY_TILE]
                tiles.append(IndexTile(start, stop, num_keys, visible, num_visible[start:stop]))
        return IndexPlan(tiles, min(self.top_k, int(lens.max(initial=0))))

    def select(self, plan: IndexPlan, query: IndexQuery, planes: Mapping[str, Tensor]) -> Tensor:
        """The positions that each query attends to.

        Args:
            planes: has `index_key`, [pages, page_size, head_dim], with this step's keys written.

        Returns:
            [rows, min(top_k, most keys)] int32: the `top_k` best visible positions of each query
            in ascending order, then -1. Ties go to lower positions; padding rows are all -1.
        """
        selected = torch.full(
            (len(query.q), plan.width), -1, dtype=torch.int32, device=query.q.device
        )
        for tile in plan.tiles:
            rows = slice(tile.start, tile.stop)
            positions = torch.arange(tile.num_keys, device=self.device)
            mask = positions < tile.num_visible[:, None]
            if tile.num_keys > self.top_k:  # otherwise every query selects all visible keys
                keys = read_plane(planes, "index_key", tile.slots).float()
                scores = self._scores(query.q[rows], query.weights[rows], keys)
                mask = topk_mask(scores[:, : tile.num_keys], mask, self.top_k)
            # the extra column takes the keys that are not selected and is cut off
            column = torch.where(mask, mask.cumsum(1) - 1, plan.width)
            packed = selected.new_full((tile.stop - tile.start, plan.width + 1), -1)
            packed.scatter_(1, column, positions.int().expand_as(column))
            selected[rows] = packed[:, :-1]
        return selected

    def _scores(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """[n, keys] float32 from q [n, heads, dim], weights [n, heads], keys [keys, dim]."""
        if self._verdict.strategy == BATCHED:
            return self._batched_scores(q, weights, keys)
        return row_by_row(partial(self._batched_scores, keys=keys))(q, weights)

    def _batched_scores(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """sum over heads of weight[head] * relu(q[head] · key), for all rows in one matmul."""
        num_rows, num_heads, dim = q.shape
        padded = -(-num_rows // FP32_ROW_MULTIPLE) * FP32_ROW_MULTIPLE
        rows = q.new_zeros(padded, num_heads, dim, dtype=torch.float32)
        rows[:num_rows] = q
        rows = rows.flatten(0, 1)
        # without DeepSeek's scales: positive, they change no order
        head_weights = weights.unbind(1)
        scores = rows.new_empty(num_rows, len(keys))
        for begin in range(0, len(keys), KEY_TILE):
            tile = keys[begin : begin + KEY_TILE].T
            by_head = torch.mm(rows, tile).relu_().unflatten(0, (padded, num_heads))[:num_rows]
            total = by_head[:, 0] * head_weights[0][:, None]
            for head in range(1, num_heads):  # a fixed order of additions
                total += by_head[:, head] * head_weights[head][:, None]
            scores[:, begin : begin + KEY_TILE] = total
        return scores

    def _probe(self, num_heads: int, head_dim: int) -> tuple[str, str]:
        draw = torch.Generator().manual_seed(0)
        counts = (*range(1, 10), 15, 16, 24, 33, ROW_TILE)
        num_rows = ROW_TILE + EXTRA_ROWS
        q = torch.randn(num_rows, num_heads, head_dim, generator=draw)
        weights = torch.randn(num_rows, num_heads, generator=draw)
        keys = torch.randn(2 * KEY_TILE, head_dim, generator=draw)
        q, weights, keys = (rows.to(self.device) for rows in (q, weights, keys))
        op = partial(self._batched_scores, keys=keys)
        return probe_batch_invariance(op, (q, weights), counts)


def topk_mask(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """True at the `count` largest visible scores of each row, or at all visible: [n, keys] bool.

    Ties go to lower indices. Not a sort: the count-th largest score is the threshold.

    Args:
        scores: [n, keys] float32; may be NaN where not visible.
        visible: [n, keys] bool.
    """
    scores = scores.masked_fill(~visible, -torch.inf)
    threshold = scores.topk(min(count, scores.shape[1]), -1).values[:, -1:]
    above = scores > threshold
    tied = (scores == threshold) & visible
    num_tied = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= num_tied))
