"""What a step computes, as arrays: complete, frozen, built by one factory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import add, itemgetter

import numpy as np
from numpy.typing import NDArray

from ramify.kv.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class Extend:
    """One request's share of a step: `num_new` tokens appended after `num_cached`."""

    request_id: int
    row: int  # of the block table, which owns the pages
    num_cached: int
    num_new: int

    @property
    def kv_len(self) -> int:
        """Tokens visible to attention once this step has written its own."""
        return self.num_cached + self.num_new


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Attention metadata of one step over B requests with T new tokens in all.

    Query row i of a request sits at position `kv_len - q_len + i`. An empty batch is legal.

    `shared_with[i]` is an earlier request of the batch in whose pages the first `shared_len[i]`
    tokens of request i lie too, or -1: what a backend may read once for both. It comes from the
    tree and decides nothing but who shares a read.
    """

    cu_seqlens_q: NDArray[np.int32]  # [B + 1] offsets of each request's query rows
    seq_lens_kv: NDArray[np.int32]  # [B] tokens visible, those of this step included
    num_cached: NDArray[np.int32]  # [B] tokens whose K/V was there before this step
    block_table: NDArray[np.int32]  # [B, P] pages in order, -1 beyond the last
    positions: NDArray[np.int32]  # [T]
    slot_mapping: NDArray[np.int64]  # [T] where each new token's K/V goes
    shared_with: NDArray[np.int32]  # [B]
    shared_len: NDArray[np.int32]  # [B]
    page_size: int
    max_q_len: int
    max_kv_len: int
    total_kv: int  # sum of seq_lens_kv
    has_cached: bool  # whether any request has K/V from before this step

    @property
    def num_seqs(self) -> int:
        """B."""
        return len(self.seq_lens_kv)

    @property
    def num_tokens(self) -> int:
        """T, the number of query rows."""
        return len(self.positions)

    @classmethod
    def build(
        cls,
        extends: Sequence[Extend],
        table: BlockTable,
        sharing: Sequence[tuple[int, int]] = (),
    ) -> AttentionBatch:
        """The metadata of a step, without a step per token.

        Args:
            sharing: per request (an earlier one, tokens in common), as `PrefixCache.sharing`
                tells; by default nothing is known to be shared.
        """
        rows = np.array([one.row for one in extends], np.int64)
        cached, new = [one.num_cached for one in extends], [one.num_new for one in extends]
        return cls.from_rows(rows, cached, new, table, sharing_arrays(sharing, len(extends)))

    @classmethod
    def from_rows(
        cls,
        rows: NDArray[np.int64],
        cached: Sequence[int],
        new: Sequence[int],
        table: BlockTable,
        sharing: tuple[NDArray[np.int32], NDArray[np.int32]],
    ) -> AttentionBatch:
        """The same from rows of the table, tokens cached and new of each request, B each.

        Between two forward passes every numpy function finds its code gone from the caches: few
        different ones are called, and no reductions.

        Args:
            sharing: as `sharing_arrays` makes it.
        """
        page_size, count = table.page_size, len(rows)
        lengths = list(map(add, cached, new))
        cu_q = np.array([0, *accumulate(new)], np.int32)
        past, kv = np.array(cached, np.int32), np.array(lengths, np.int32)
        pages = _pages(table, rows, lengths, kv)
        owner = np.repeat(_iota(count)[:-1], new)
        positions = np.arange(len(owner), dtype=np.int32) + (past - cu_q[:-1])[owner]
        page_of = pages[owner, positions // page_size]
        assert np.count_nonzero(page_of >= 0) == len(owner), "a new token has no page"
        slots = page_of.astype(np.int64) * page_size + positions % page_size
        arrays = (cu_q, kv, past, pages, positions, slots)
        for array in arrays:
            array.flags.writeable = False
        return cls(
            *arrays,
            *sharing,
            page_size=page_size,
            max_q_len=int(max(new, default=0)),
            max_kv_len=int(max(lengths, default=0)),
            total_kv=int(sum(lengths)),
            has_cached=any(cached),
        )

    @classmethod
    def from_decodes(
        cls,
        rows: NDArray[np.int64],
        cached: Sequence[int],
        table: BlockTable,
        sharing: tuple[NDArray[np.int32], NDArray[np.int32]],
    ) -> AttentionBatch:
        """What `from_rows` makes of requests with a token each, in fewer steps."""
        page_size, count = table.page_size, len(rows)
        lengths = [at + 1 for at in cached]
        cu_q, positions = _iota(count), np.array(cached, np.int32)
        kv, last = positions + 1, positions // page_size
        pages = _pages(table, rows, lengths, kv)
        page_of = pages[cu_q[:-1], last]
        assert np.count_nonzero(page_of >= 0) == count, "a new token has no page"
        slots = (page_of - last).astype(np.int64) * page_size + positions
        for array in (kv, pages, positions, slots):
            array.flags.writeable = False
        return cls(
            cu_q,
            kv,
            positions,
            pages,
            positions,
            slots,
            *sharing,
            page_size=page_size,
            max_q_len=min(1, count),
            max_kv_len=max(lengths, default=0),
            total_kv=sum(lengths),
            has_cached=any(cached),
        )

    def next_decode(self, rows: NDArray[np.int64], table: BlockTable) -> AttentionBatch:
        """What `from_decodes` makes of the same requests in the next step, of a token each.

        Between the two nothing but the ends of their rows may have changed. Most requests go on in
        the page that they were in.

        Args:
            rows: of the table.
        """
        size, num_pages = self.page_size, self.block_table.shape[1]
        positions, slots, pages = self.seq_lens_kv, self.slot_mapping + 1, self.block_table
        entered = [i for i, at in enumerate(positions.tolist()) if at % size == 0]
        width = -(-(self.max_kv_len + 1) // size)
        if entered:
            pages = np.full((len(rows), width), -1, np.int32)
            pages[:, :num_pages] = self.block_table
            for i in entered:
                last = int(positions[i]) // size
                page = int(table.array[rows[i], last])
                assert page >= 0, "a new token has no page"
                pages[i, last], slots[i] = page, page * size
            pages.flags.writeable = False
        kv = positions + 1
        kv.flags.writeable = slots.flags.writeable = False
        return AttentionBatch(
            self.cu_seqlens_q,
            kv,
            positions,
            pages,
            positions,
            slots,
            self.shared_with,
            self.shared_len,
            page_size=size,
            max_q_len=1,
            max_kv_len=self.max_kv_len + 1,
            total_kv=self.total_kv + len(rows),
            has_cached=True,
        )

    def prefix_leaders(self, num_tokens: int) -> list[int]:
        """For each request the first one in whose pages its first `num_tokens` tokens lie: [B].

        Requests with the same leader read the same keys up to there; one that shares with nobody
        is its own.
        """
        found: list[int] = []
        for i, (other, common) in enumerate(
            zip(self.shared_with.tolist(), self.shared_len.tolist(), strict=True)
        ):
            found.append(found[other] if common >= num_tokens and other >= 0 else i)
        return found

    def select(
        self, seqs: Sequence[int], num_rows: NDArray[np.int64] | None = None
    ) -> AttentionBatch:
        """The batch of some of its requests; they share what they shared.

        Also those that shared with one that is not among them, with each other.

        Args:
            seqs: places in this batch, ascending.
            num_rows: [len(seqs)] the last so many query rows of each, at least 1; by default all of
                them. K/V of those before is then there already.
        """
        assert list(seqs) == sorted(seqs)
        shared_with, shared_len = self._sharing_of(seqs)
        ends = self.cu_seqlens_q[1:][seqs]
        lens = ends - self.cu_seqlens_q[:-1][seqs] if num_rows is None else num_rows
        cu_q = np.zeros(len(seqs) + 1, np.int32)
        np.cumsum(lens, out=cu_q[1:])
        rows = np.arange(cu_q[-1]) + np.repeat(ends - cu_q[1:], lens)
        kv = self.seq_lens_kv[seqs]
        cached = (kv - lens).astype(np.int32)
        arrays = (
            cu_q,
            kv,
            cached,
            self.block_table[seqs],
            self.positions[rows],
            self.slot_mapping[rows],
            shared_with,
            shared_len,
        )
        for array in arrays:
            array.flags.writeable = False
        return AttentionBatch(
            *arrays,
            page_size=self.page_size,
            max_q_len=int(lens.max(initial=0)),
            max_kv_len=int(kv.max(initial=0)),
            total_kv=int(kv.sum()),
            has_cached=bool(cached.any()),
        )

    def _sharing_of(self, seqs: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`shared_with` and `shared_len` of some requests among themselves."""
        others, lengths = self.shared_with.tolist(), self.shared_len.tolist()
        places = {seq: place for place, seq in enumerate(seqs)}
        # by who is not among them: places of those that shared with it, and how much
        left: dict[int, list[tuple[int, int]]] = {}
        found: list[tuple[int, int]] = []
        for place, seq in enumerate(seqs):
            other, length, best = others[seq], lengths[seq], (-1, 0)
            while other >= 0 and length > best[1]:
                if other in places:
                    best = places[other], length
                    break
                stand_ins = left.setdefault(other, [])
                for at, common in stand_ins:
                    best = max(best, (at, min(common, length)), key=itemgetter(1))
                stand_ins.append((place, length))
                other, length = others[other], min(length, lengths[other])
            found.append(best)
        return sharing_arrays(found, len(seqs))

    def kv_slots(self, seq: int) -> NDArray[np.int64]:
        """Slots of all keys that request `seq` sees, in position order: [kv_len]."""
        kv_len = int(self.seq_lens_kv[seq])
        position = np.arange(kv_len)
        pages = self.block_table[seq].astype(np.int64)
        slots: NDArray[np.int64] = pages[position // self.page_size] * self.page_size
        slots += position % self.page_size
        return slots


def sharing_arrays(
    sharing: Sequence[tuple[int, int]], num_seqs: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What `PrefixCache.sharing` tells as `shared_with` and `shared_len`, [B] each, read-only.

    If it tells nothing, nothing is known to be shared.
    """
    if not any(length for _, length in sharing):
        return _unshared(num_seqs)
    others, lengths = (np.array(column, np.int32) for column in zip(*sharing, strict=True))
    others.flags.writeable = lengths.flags.writeable = False
    return others, lengths


def _pages(
    table: BlockTable, rows: NDArray[np.int64], lengths: Sequence[int], kv: NDArray[np.int32]
) -> NDArray[np.int32]:
    """The pages of so many tokens of each row, -1 beyond the last: [B, most pages]."""
    size = table.page_size
    used = [-(-length // size) for length in lengths]
    width = max(used, default=0)
    pages = table.array[rows, :width]
    if np.count_nonzero(pages >= 0) != sum(used):  # some to spare; `from_rows` sees if one lacks
        pages[np.arange(width, dtype=np.int32) * size >= kv[:, None]] = -1
    return pages


@lru_cache(maxsize=256)
def _iota(count: int) -> NDArray[np.int32]:
    """0 .. count, read-only."""
    numbers = np.arange(count + 1, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


@lru_cache(maxsize=256)
def _unshared(num_seqs: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    others, lengths = np.full(num_seqs, -1, np.int32), np.zeros(num_seqs, np.int32)
    others.flags.writeable = lengths.flags.writeable = False
    return others, lengths
