"""Which keys a query reads: scores of a small index over all its keys, cached ones included.

The lightning indexer of DeepSeek-V3.2 (2025). A query scores every key that it may see, from
position 0 up to its own, whatever part of them was cached, and keeps the best. The unit of
arithmetic is one query row against one tile of `KEY_TILE` keys at a fixed absolute position, so
that what a query keeps does not depend on chunking, batch mates or pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import (
    FP32_ROW_MULTIPLE,
    Exactness,
    ProbeStore,
    batch_variant_row_counts,
)
from ramify.attention.gather import gather_plane_f32
from ramify.errors import ConfigError

KEY_TILE = 256
ROW_TILE = 64  # queries that are scored together: 64 heads x 256 keys of them are 4 MB
BATCHED, ROW_BY_ROW = "batched", "row_by_row"


def causal_key_ranges(batch: AttentionBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys that each query may see, [T] begins and [T] ends, the ends exclusive.

    They count along the keys of all requests one after the other (`seq_lens_kv`): cached tokens
    have their place in it, and later tokens of the same step are beyond the end.
    """
    kv_starts = np.cumsum(batch.seq_lens_kv, dtype=np.int64) - batch.seq_lens_kv
    begins = np.repeat(kv_starts, np.diff(batch.cu_seqlens_q)).astype(np.int64)
    return begins, begins + batch.positions + np.int64(1)


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What the index asks of one layer's step."""

    q: Tensor  # [rows, num_heads, head_dim]; rows beyond the batch are padding
    weights: Tensor  # [rows, num_heads] float32, of the heads' scores


@dataclass(frozen=True, slots=True)
class IndexTile:
    """Up to `ROW_TILE` queries of one request and the slots of all keys they may see."""

    start: int
    stop: int
    num_keys: int  # of the last query, which sees the most
    slots: Tensor  # [tiles * KEY_TILE] int64; any slot beyond the keys
    num_visible: Tensor  # [stop - start] int64


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """One step's queries, and how many keys the one that sees most may keep."""

    tiles: list[IndexTile]
    width: int


class SparseIndex:
    """Scores and selects; the same for every layer.

    Args:
        top_k: keys that a query keeps at most.
        num_heads, head_dim: of the index.
        exact: a query's choice must not depend on the other rows.
        store: verdicts of earlier probes; None uses the file of this user.
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
        """How scores are computed, and why."""
        return [self._verdict]

    def plan(self, batch: AttentionBatch) -> IndexPlan:
        """Queries with their windows; once per step."""
        begins, ends = causal_key_ranges(batch)
        lens = ends - begins
        tiles = []
        for seq in range(batch.num_seqs):
            own = batch.kv_slots(seq)
            first, last = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
            for start in range(first, last, ROW_TILE):
                stop = min(start + ROW_TILE, last)
                num_keys = int(lens[stop - 1])
                slots = np.zeros(-(-num_keys // KEY_TILE) * KEY_TILE, np.int64)
                slots[:num_keys] = own[:num_keys]
                tiles.append(
                    IndexTile(
                        start,
                        stop,
                        num_keys,
                        torch.from_numpy(slots).to(self.device),
                        torch.from_numpy(lens[start:stop]).to(self.device),
                    )
                )
        return IndexPlan(tiles, min(self.top_k, int(lens.max(initial=0))))

    def select(self, plan: IndexPlan, query: IndexQuery, planes: Mapping[str, Tensor]) -> Tensor:
        """The positions that each query reads.

        Args:
            planes: with `index_key`, [pages, page_size, head_dim], this step's already written.

        Returns:
            [rows, min(top_k, most keys)] int32: the best `top_k` of each query's window, the lowest
            positions among equals, in ascending order, then -1; all -1 for padding rows.
        """
        chosen = torch.full(
            (len(query.q), plan.width), -1, dtype=torch.int32, device=query.q.device
        )
        for tile in plan.tiles:
            rows = slice(tile.start, tile.stop)
            places = torch.arange(tile.num_keys, device=self.device)
            seen = places < tile.num_visible[:, None]
            if tile.num_keys > self.top_k:  # otherwise every query keeps all it sees
                keys = gather_plane_f32(planes, "index_key", tile.slots)
                scores = self._scores(query.q[rows], query.weights[rows], keys)
                seen = topk_mask(scores[:, : tile.num_keys], seen, self.top_k)
            rank = torch.where(seen, seen.cumsum(1) - 1, plan.width)
            wide = chosen.new_full((tile.stop - tile.start, plan.width + 1), -1)
            wide.scatter_(1, rank, places.int().expand_as(rank))
            chosen[rows] = wide[:, :-1]
        return chosen

    def _scores(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """[n, keys] float32 from q [n, heads, dim], weights [n, heads], keys [keys, dim]."""
        if self._verdict.strategy == BATCHED:
            return self._batched_scores(q, weights, keys)
        pairs = zip(q.split(1), weights.split(1), strict=True)
        return torch.cat([self._batched_scores(one, weight, keys) for one, weight in pairs])

    def _batched_scores(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        num_rows, num_heads, dim = q.shape
        padded = -(-num_rows // FP32_ROW_MULTIPLE) * FP32_ROW_MULTIPLE
        rows = q.new_zeros(padded, num_heads, dim, dtype=torch.float32)
        rows[:num_rows] = q
        rows = rows.flatten(0, 1)
        shares = weights.unbind(1)  # the published scales are positive and change no order
        scores = rows.new_empty(num_rows, len(keys))
        for at in range(0, len(keys), KEY_TILE):
            tile = keys[at : at + KEY_TILE].T
            found = torch.mm(rows, tile).relu_().unflatten(0, (padded, num_heads))[:num_rows]
            total = found[:, 0] * shares[0][:, None]
            for head in range(1, num_heads):  # a fixed order of additions
                total += found[:, head] * shares[head][:, None]
            scores[:, at : at + KEY_TILE] = total
        return scores

    def _probe(self, num_heads: int, head_dim: int) -> tuple[str, str]:
        draw = torch.Generator().manual_seed(0)
        counts = (*range(1, 10), 15, 16, 24, 33, ROW_TILE)
        num_rows = ROW_TILE + 9
        q = torch.randn(num_rows, num_heads, head_dim, generator=draw)
        weights = torch.randn(num_rows, num_heads, generator=draw)
        keys = torch.randn(2 * KEY_TILE, head_dim, generator=draw)

        def run(places: Tensor) -> Tensor:
            rows = slice(int(places[0]), int(places[-1]) + 1)
            return self._batched_scores(q[rows], weights[rows], keys)

        differing = batch_variant_row_counts(run, torch.arange(num_rows), counts)
        if not differing:
            return BATCHED, "rows agree at every count tried"
        return ROW_BY_ROW, f"batched: rows differ at {', '.join(map(str, differing))} rows"


def topk_mask(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """[n, keys] bool: the `count` largest scores of each row among what it sees, or all of that.

    Args:
        scores: [n, keys] float32; what is not seen may be NaN.
        visible: [n, keys] bool.

    Among equals the lowest place wins. Without a sort: the count-th largest value is a threshold.
    """
    scores = scores.masked_fill(~visible, -torch.inf)
    least = scores.topk(min(count, scores.shape[1]), -1).values[:, -1:]
    above = scores > least
    level = (scores == least) & visible
    room = count - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))
