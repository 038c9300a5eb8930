"""Partition a step into GPU programs: tiles of query rows over splits of their keys.

A split is a fixed number of keys at a fixed absolute position. A tile takes either all splits of
its rows, or one split, whose partial result is merged later (split-KV). Where requests share the
pages of a split, one tile reads it for the rows of all. The partition never changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.attention.batch import AttentionBatch

# first entry of `tokens`, tokens, row of the block table, first split, end split, is partial, 0, 0
ITEM_FIELDS = 8
ALL_SPLITS = 1 << 30


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    """Parameters of the partition, the same for every step.

    A request of at most `decode_limit` new tokens is a decode, with `decode_tokens` tokens per
    tile; the others are prefills, with `prefill_tokens`.
    """

    split: int  # keys of a split
    decode_tokens: int
    prefill_tokens: int
    decode_limit: int
    programs_per_item: int  # one per tile of heads
    saturating_programs: int  # from here on, splitting keys adds no parallelism
    per_token: bool = False  # sparse attention: each token is an item with its own keys


@dataclass(frozen=True, slots=True, eq=False)
class GpuPartition:
    """The items of a step: a tile of rows over a range of splits each."""

    prefill_items: NDArray[np.int32]  # [n, ITEM_FIELDS]
    decode_items: NDArray[np.int32]  # [n, ITEM_FIELDS]
    tokens: NDArray[np.int32]  # [entries] query rows of the items
    split_offsets: NDArray[np.int32]  # [T] index of a token's first partial result
    split_tokens: NDArray[np.int32]  # [n] tokens whose partial results are merged
    num_partials: int


def split_leaders(
    shared_with: NDArray[np.int32], shared_len: NDArray[np.int32], num_splits: int, split: int
) -> NDArray[np.int64]:
    """The earliest request that has a split's keys in the same slots: [B, num_splits].

    Args:
        shared_with, shared_len: as in `AttentionBatch`.
    """
    lead = np.repeat(np.arange(len(shared_with))[:, None], num_splits, 1)
    for seq in np.flatnonzero(shared_with >= 0).tolist():
        other = int(shared_with[seq])
        assert other < seq, f"request {seq} shares with {other}, which is not earlier"
        whole = min(int(shared_len[seq]) // split, num_splits)
        lead[seq, :whole] = lead[other, :whole]
    return lead


def partition_step(batch: AttentionBatch, config: PartitionConfig) -> GpuPartition:
    """Partition a step into items, those with the most splits first."""
    num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
    q_lens = np.diff(batch.cu_seqlens_q).astype(np.int64)
    tokens = np.arange(num_tokens, dtype=np.int32)
    offsets = np.zeros(num_tokens, np.int32)
    owner = np.repeat(np.arange(num_seqs), q_lens)
    if config.per_token:
        items = _items(tokens, 1, owner, 0, ALL_SPLITS, 0)
        return GpuPartition(items[:0], items, tokens, offsets, offsets[:0], 0)
    num_splits = -(-batch.seq_lens_kv.astype(np.int64) // config.split)
    lead = split_leaders(
        batch.shared_with, batch.shared_len, int(num_splits.max(initial=1)), config.split
    )
    decode = q_lens <= config.decode_limit
    programs = int((-(-q_lens[decode] // config.decode_tokens)).sum()) * config.programs_per_item
    is_split = decode & (num_splits > 1)
    if programs >= config.saturating_programs:
        is_split &= _shares_split(lead, decode, num_splits)
    prefill_items, unsplit_items = (
        _unsplit_items(batch, np.flatnonzero(seqs), tile, config.split)
        for seqs, tile in (
            (~decode, config.prefill_tokens),
            (decode & ~is_split, config.decode_tokens),
        )
    )
    split_tokens = np.flatnonzero(is_split[owner])
    splits = batch.positions[split_tokens] // config.split + 1
    offsets[split_tokens] = np.cumsum(splits) - splits
    token, split = _pairs(split_tokens, splits)
    leader = lead[owner[token], split]
    order = np.lexsort((leader, split))
    token, split, leader = token[order], split[order], leader[order]
    start = _tile_starts(split, leader, config.decode_tokens)
    count = np.diff(start, append=len(token))
    partial = _items(num_tokens + start, count, leader[start], split[start], split[start] + 1, 1)
    return GpuPartition(
        prefill_items,
        np.concatenate([unsplit_items, partial]),
        np.concatenate([tokens, token.astype(np.int32)]),
        offsets,
        split_tokens.astype(np.int32),
        int(splits.sum()),
    )


def _unsplit_items(
    batch: AttentionBatch, seqs: NDArray[np.int64], tile: int, split: int
) -> NDArray[np.int32]:
    """Tiles of `tile` tokens of these requests over all their splits, most splits first."""
    begin = batch.cu_seqlens_q[seqs].astype(np.int64)
    q_lens = batch.cu_seqlens_q[seqs + 1] - begin
    seq, index = _pairs(np.arange(len(seqs)), -(-q_lens // tile))
    start = begin[seq] + index * tile
    count = np.minimum(tile, q_lens[seq] - index * tile)
    ends = batch.positions[start + count - 1] // split + 1
    items = _items(start, count, seqs[seq], 0, ends, 0)
    return items[np.argsort(-ends, kind="stable")]


def _pairs(
    values: NDArray[np.int64], counts: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Repeat each value `count` times; second, 0 .. count - 1 for each value."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(values, counts), np.arange(total) - np.repeat(ends - counts, counts)


def _tile_starts(
    split: NDArray[np.int64], leader: NDArray[np.int64], tile: int
) -> NDArray[np.int64]:
    """The first row of each tile: at most `tile` rows of the same split and leader."""
    if not len(split):
        return np.zeros(0, np.int64)
    differs = np.ones(len(split), bool)
    differs[1:] = (split[1:] != split[:-1]) | (leader[1:] != leader[:-1])
    begin = np.flatnonzero(differs)
    index = np.arange(len(split)) - np.repeat(begin, np.diff(begin, append=len(split)))
    return np.flatnonzero(index % tile == 0)


def _shares_split(
    lead: NDArray[np.int64], decode: NDArray[np.bool_], num_splits: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether a decode shares a split with another decode: [B] bool."""
    shares = np.zeros(len(decode), bool)
    rows = np.flatnonzero(decode)
    for split in range(lead.shape[1]):
        seqs = rows[num_splits[rows] > split]
        count = np.bincount(lead[seqs, split], minlength=len(decode))
        shares[seqs] |= count[lead[seqs, split]] > 1
    return shares


def _items(*fields: NDArray[np.integer] | int) -> NDArray[np.int32]:
    """[n, ITEM_FIELDS] from the first fields; the others are 0."""
    items = np.zeros((len(np.atleast_1d(fields[0])), ITEM_FIELDS), np.int32)
    for index, field in enumerate(fields):
        items[:, index] = field
    return items
