"""How a step is cut into programs for a GPU: tiles of query rows over splits of their keys.

Integers only. A split is a fixed number of keys at a fixed absolute position. A tile takes either
all splits of its rows, or one split whose result is merged later; and where requests share the
pages of a split, one tile reads it for the rows of all of them. None of this changes arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.attention.batch import AttentionBatch

ITEM_FIELDS = (
    8  # first entry of `tokens`, tokens, row of the block table, first split, end, partial
)
ALL_SPLITS = 1 << 30


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    """What does not change from step to step.

    A request of at most `decode_limit` new tokens is short: its tiles hold `decode_tokens` tokens,
    those of the others `prefill_tokens`.
    """

    split: int  # keys
    decode_tokens: int
    prefill_tokens: int
    decode_limit: int
    programs_per_item: int  # one for each tile of heads
    saturating_programs: int  # with as many, splitting keys brings no more parallelism
    per_token: bool = False  # every token has keys of its own: no tiles of several, no splits


@dataclass(frozen=True, slots=True, eq=False)
class GpuPartition:
    """A step cut into items; all arrays int32."""

    prefill_items: NDArray[np.int32]  # [n, ITEM_FIELDS]
    decode_items: NDArray[np.int32]  # [n, ITEM_FIELDS]
    tokens: NDArray[np.int32]  # [entries] what the items' rows are
    split_offsets: NDArray[np.int32]  # [T] of a token's partial results, one for each split
    split_tokens: NDArray[np.int32]  # [n] tokens whose splits are merged
    num_partials: int


def split_leaders(
    shared_with: NDArray[np.int32], shared_len: NDArray[np.int32], num_splits: int, split: int
) -> NDArray[np.int64]:
    """[B, num_splits] the earliest request known to have a split's keys in the very same slots.

    Args:
        shared_with: [B] the index of an earlier request, or -1.
        shared_len: [B] tokens from the start whose slots are the same in both.
    """
    lead = np.repeat(np.arange(len(shared_with))[:, None], num_splits, 1)
    for seq in np.flatnonzero(shared_with >= 0).tolist():
        other = int(shared_with[seq])
        assert other < seq, f"request {seq} shares with {other}, which is not earlier"
        whole = min(int(shared_len[seq]) // split, num_splits)
        lead[seq, :whole] = lead[other, :whole]
    return lead


def partition_step(batch: AttentionBatch, config: PartitionConfig) -> GpuPartition:
    """The items of a step, those with the most splits first."""
    num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
    q_lens = np.diff(batch.cu_seqlens_q).astype(np.int64)
    everyone = np.arange(num_tokens, dtype=np.int32)
    nothing = np.zeros(num_tokens, np.int32)
    if config.per_token:
        seqs = np.repeat(np.arange(num_seqs), q_lens)
        items = _items(everyone, 1, seqs, 0, ALL_SPLITS, 0)
        return GpuPartition(items[:0], items, everyone, nothing, nothing[:0], 0)
    num_splits = -(-batch.seq_lens_kv.astype(np.int64) // config.split)
    lead = split_leaders(
        batch.shared_with, batch.shared_len, int(num_splits.max(initial=1)), config.split
    )
    short = q_lens <= config.decode_limit
    programs = int((-(-q_lens[short] // config.decode_tokens)).sum()) * config.programs_per_item
    cut_up = short & (num_splits > 1)
    if programs >= config.saturating_programs:
        cut_up &= _shares_split(lead, short, num_splits)
    long_items = _unsplit_items(batch, np.flatnonzero(~short), config.prefill_tokens, config.split)
    whole = _unsplit_items(
        batch, np.flatnonzero(short & ~cut_up), config.decode_tokens, config.split
    )
    owner = np.repeat(np.arange(num_seqs), q_lens)
    split_tokens = np.flatnonzero(cut_up[owner])
    splits = batch.positions[split_tokens] // config.split + 1
    slots = nothing
    slots[split_tokens] = np.cumsum(splits) - splits
    token, split = _pairs(split_tokens, splits)
    leader = lead[owner[token], split]
    order = np.lexsort((leader, split))
    token, split, leader = token[order], split[order], leader[order]
    start = _tile_starts(split, leader, config.decode_tokens)
    count = np.diff(start, append=len(token))
    partial = _items(num_tokens + start, count, leader[start], split[start], split[start] + 1, 1)
    return GpuPartition(
        long_items,
        np.concatenate([whole, partial]),
        np.concatenate([everyone, token.astype(np.int32)]),
        slots,
        split_tokens.astype(np.int32),
        int(splits.sum()),
    )


def _unsplit_items(
    batch: AttentionBatch, seqs: NDArray[np.int64], tile: int, split: int
) -> NDArray[np.int32]:
    """Tiles of `tile` tokens of these requests over all of their splits, most splits first."""
    begin = batch.cu_seqlens_q[seqs].astype(np.int64)
    q_lens = batch.cu_seqlens_q[seqs + 1] - begin
    which, index = _pairs(np.arange(len(seqs)), -(-q_lens // tile))
    start = begin[which] + index * tile
    count = np.minimum(tile, q_lens[which] - index * tile)
    ends = batch.positions[start + count - 1] // split + 1
    items = _items(start, count, seqs[which], 0, ends, 0)
    return items[np.argsort(-ends, kind="stable")]


def _pairs(
    values: NDArray[np.int64], counts: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every value as often as its count says, and how often it has come before."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(values, counts), np.arange(total) - np.repeat(ends - counts, counts)


def _tile_starts(
    split: NDArray[np.int64], leader: NDArray[np.int64], tile: int
) -> NDArray[np.int64]:
    """Where tiles of at most `tile` rows of the same split and leader begin."""
    if not len(split):
        return np.zeros(0, np.int64)
    new = np.ones(len(split), bool)
    new[1:] = (split[1:] != split[:-1]) | (leader[1:] != leader[:-1])
    begin = np.flatnonzero(new)
    index = np.arange(len(split)) - np.repeat(begin, np.diff(begin, append=len(split)))
    return np.flatnonzero(index % tile == 0)


def _shares_split(
    lead: NDArray[np.int64], decode: NDArray[np.bool_], num_splits: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """[B] whether a short request shares a split with another short one."""
    together = np.zeros(len(decode), bool)
    rows = np.flatnonzero(decode)
    for split in range(lead.shape[1]):
        here = rows[num_splits[rows] > split]
        count = np.bincount(lead[here, split], minlength=len(decode))
        together[here] |= count[lead[here, split]] > 1
    return together


def _items(*fields: NDArray[np.integer] | int) -> NDArray[np.int32]:
    """[n, ITEM_FIELDS] from the fields that are not 0."""
    items = np.zeros((len(np.atleast_1d(fields[0])), ITEM_FIELDS), np.int32)
    for index, field in enumerate(fields):
        items[:, index] = field
    return items
