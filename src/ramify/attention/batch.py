"""Attention metadata of a step as read-only arrays: `AttentionBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import add, itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.kv.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class Extend:
    """A request's part of a step: `num_new` tokens after `num_cached` computed ones."""

    request_id: int
    row: int  # of the block table
    num_cached: int
    num_new: int

    @property
    def kv_len(self) -> int:
        """Tokens whose K/V exists once this step has written its own."""
        return self.num_cached + self.num_new


class PageCopy(NamedTuple):
    """Part of a cached page that a request goes on from, in a page of its own."""

    source: int  # page; it stays as it is until the step is committed, abandoned or released
    target: int
    num_tokens: int  # the first ones of the page; the request does not compute them


@dataclass(frozen=True, slots=True, eq=False)
class PagedKVArrays:
    """The pages of a batch as FlashInfer's wrappers take them: one list, and where each request begins.

    `qo_indptr`, which they take as well, is `AttentionBatch.cu_seqlens_q`.
    """

    paged_kv_indptr: NDArray[np.int32]  # [B + 1] offsets into `paged_kv_indices`
    paged_kv_indices: NDArray[np.int32]  # pages of all requests, in order
    paged_kv_last_page_len: NDArray[np.int32]  # [B] tokens in the last page; 0 without a page


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Attention metadata of one step over B requests with T new tokens in all.

    Query row i of a request has position `kv_len - q_len + i`. B and T may be 0.

    `shared_with[i]` is an earlier request of the batch, or -1: the first `shared_len[i]` tokens of
    both are in the same pages, so that a backend may read them once for both. The radix tree
    knows this; it never changes a result.

    Before the step writes K/V, the pages of `page_copies` have to be copied, all planes of them.
    """

    cu_seqlens_q: NDArray[np.int32]  # [B + 1] offsets of each request's query rows
    seq_lens_kv: NDArray[np.int32]  # [B] tokens of each request, those of this step included
    num_cached: NDArray[np.int32]  # [B] tokens whose K/V was computed before this step
    block_table: NDArray[np.int32]  # [B, P] pages in order, -1 beyond the last
    positions: NDArray[np.int32]  # [T]
    slot_mapping: NDArray[np.int64]  # [T] slot that each new token's K/V is written to
    shared_with: NDArray[np.int32]  # [B]
    shared_len: NDArray[np.int32]  # [B]
    page_size: int
    max_q_len: int
    max_kv_len: int
    page_copies: tuple[PageCopy, ...] = ()

    @property
    def num_seqs(self) -> int:
        """B."""
        return len(self.seq_lens_kv)

    @property
    def num_tokens(self) -> int:
        """T, the number of query rows."""
        return len(self.positions)

    @property
    def total_kv(self) -> int:
        """Tokens of all requests."""
        return int(self.seq_lens_kv.sum())

    @classmethod
    def build(
        cls,
        extends: Sequence[Extend],
        table: BlockTable,
        sharing: Sequence[tuple[int, int]] = (),
    ) -> AttentionBatch:
        """Build the metadata of a step from its requests.

        Args:
            sharing: per request (an earlier request or -1, tokens in common), as
                `PrefixCache.sharing` returns it; by default nothing is shared.
        """
        rows = np.array([extend.row for extend in extends], np.int64)
        cached = [extend.num_cached for extend in extends]
        new = [extend.num_new for extend in extends]
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
        """Build the metadata from block table rows and cached and new tokens, B of each.

        Calls few different numpy functions and no reductions: the forward pass before has evicted
        their code from the CPU's caches.

        Args:
            sharing: the result of `sharing_arrays`.
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
        )

    @classmethod
    def from_decodes(
        cls,
        rows: NDArray[np.int64],
        cached: Sequence[int],
        table: BlockTable,
        sharing: tuple[NDArray[np.int32], NDArray[np.int32]],
    ) -> AttentionBatch:
        """Like `from_rows` for requests with one new token each, but faster."""
        page_size, count = table.page_size, len(rows)
        lengths = [length + 1 for length in cached]
        cu_q, positions = _iota(count), np.array(cached, np.int32)
        kv, last = positions + 1, positions // page_size
        pages = _pages(table, rows, lengths, kv)
        page_of = pages[cu_q[:-1], last]
        assert np.count_nonzero(page_of >= 0) == count, "a new token has no page"
        slots = (page_of - last).astype(np.int64) * page_size + positions
        arrays = (cu_q, kv, positions, pages, positions, slots)
        for array in (kv, pages, positions, slots):
            array.flags.writeable = False
        return cls(
            *arrays,
            *sharing,
            page_size=page_size,
            max_q_len=min(1, count),
            max_kv_len=max(lengths, default=0),
        )

    def next_decode(self, rows: NDArray[np.int64], table: BlockTable) -> AttentionBatch:
        """Like `from_decodes` for the next token of the same requests, but faster.

        Since this batch was built, pages may only have been appended to their rows. Most requests
        stay in their page.

        Args:
            rows: [B] of the table.
        """
        size, num_pages = self.page_size, self.block_table.shape[1]
        positions, slots, pages = self.seq_lens_kv, self.slot_mapping + 1, self.block_table
        (in_new_page,) = (positions % size == 0).nonzero()
        if len(in_new_page):
            width = -(-(self.max_kv_len + 1) // size)
            pages = np.full((len(rows), width), -1, np.int32)
            pages[:, :num_pages] = self.block_table
            last = positions[in_new_page] // size
            new = table.array[rows[in_new_page], last]
            assert np.count_nonzero(new >= 0) == len(new), "a new token has no page"
            pages[in_new_page, last] = new
            slots[in_new_page] = new.astype(np.int64) * size
            pages.flags.writeable = False
        kv = positions + 1
        kv.flags.writeable = slots.flags.writeable = False
        arrays = (self.cu_seqlens_q, kv, positions, pages, positions, slots)
        return AttentionBatch(
            *arrays,
            self.shared_with,
            self.shared_len,
            page_size=size,
            max_q_len=1,
            max_kv_len=self.max_kv_len + 1,
        )

    def prefix_leaders(self, num_tokens: int) -> list[int]:
        """The first request that holds the same pages for the first `num_tokens` tokens: [B].

        Requests with the same leader read the same keys up to there. A request that shares with
        none is its own leader.
        """
        leaders: list[int] = []
        for i, (other, common) in enumerate(
            zip(self.shared_with.tolist(), self.shared_len.tolist(), strict=True)
        ):
            leaders.append(leaders[other] if common >= num_tokens and other >= 0 else i)
        return leaders

    def select(
        self, seqs: Sequence[int], num_rows: NDArray[np.int64] | None = None
    ) -> AttentionBatch:
        """The sub-batch of some requests, with what they share among themselves.

        Two requests that both shared with a request left out share with each other.

        Args:
            seqs: indices of requests in this batch, ascending.
            num_rows: [len(seqs)] how many of its last query rows each request keeps, at least 1;
                by default all. The rows before count as cached.
        """
        assert list(seqs) == sorted(seqs)
        sharing = self._sharing_of(seqs)
        ends = self.cu_seqlens_q[1:][seqs]
        lens = ends - self.cu_seqlens_q[:-1][seqs] if num_rows is None else num_rows
        cu_q = np.zeros(len(seqs) + 1, np.int32)
        np.cumsum(lens, out=cu_q[1:])
        rows = np.arange(cu_q[-1]) + np.repeat(ends - cu_q[1:], lens)
        kv = self.seq_lens_kv[seqs]
        cached = (kv - lens).astype(np.int32)
        positions, slots = self.positions[rows], self.slot_mapping[rows]
        arrays = (cu_q, kv, cached, self.block_table[seqs], positions, slots, *sharing)
        for array in arrays:
            array.flags.writeable = False
        return AttentionBatch(
            *arrays,
            page_size=self.page_size,
            max_q_len=int(lens.max(initial=0)),
            max_kv_len=int(kv.max(initial=0)),
        )

    def _sharing_of(self, seqs: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`shared_with` and `shared_len` of some requests among themselves."""
        others, lengths = self.shared_with.tolist(), self.shared_len.tolist()
        indices = {seq: index for index, seq in enumerate(seqs)}
        # by request left out: (index, tokens in common) of the requests that shared with it
        sharers: dict[int, list[tuple[int, int]]] = {}
        sharing: list[tuple[int, int]] = []
        for index, seq in enumerate(seqs):
            other, length, best = others[seq], lengths[seq], (-1, 0)
            while other >= 0 and length > best[1]:
                if other in indices:
                    best = indices[other], length
                    break
                siblings = sharers.setdefault(other, [])
                for sibling, common in siblings:
                    best = max(best, (sibling, min(common, length)), key=itemgetter(1))
                siblings.append((index, length))
                other, length = others[other], min(length, lengths[other])
            sharing.append(best)
        return sharing_arrays(sharing, len(seqs))

    def kv_slots(self, seq: int) -> NDArray[np.int64]:
        """Slots of all keys of request `seq`, in position order: [kv_len]."""
        kv_len = int(self.seq_lens_kv[seq])
        position = np.arange(kv_len)
        pages = self.block_table[seq].astype(np.int64)
        slots: NDArray[np.int64] = pages[position // self.page_size] * self.page_size
        slots += position % self.page_size
        return slots

    def paged_kv_arrays(self) -> PagedKVArrays:
        """The pages of every request in FlashInfer's form, on the host."""
        num_pages = -(-self.seq_lens_kv // self.page_size)
        indptr = np.zeros(self.num_seqs + 1, np.int32)
        np.cumsum(num_pages, out=indptr[1:])
        used = np.arange(self.block_table.shape[1]) < num_pages[:, None]
        before_last = np.maximum(num_pages - 1, 0) * self.page_size
        last_page_len = (self.seq_lens_kv - before_last).astype(np.int32)
        return PagedKVArrays(indptr, self.block_table[used], last_page_len)


def sharing_arrays(
    sharing: Sequence[tuple[int, int]], num_seqs: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Convert the result of `PrefixCache.sharing` to `shared_with` and `shared_len`, [B] each.

    Both are read-only. An empty `sharing` means that nothing is shared.
    """
    if not any(length for _, length in sharing):
        return _unshared(num_seqs)
    others, lengths = (np.array(column, np.int32) for column in zip(*sharing, strict=True))
    others.flags.writeable = lengths.flags.writeable = False
    return others, lengths


def _pages(
    table: BlockTable, rows: NDArray[np.int64], lengths: Sequence[int], kv: NDArray[np.int32]
) -> NDArray[np.int32]:
    """The pages of the first `lengths` tokens of each row, then -1: [B, most pages]."""
    size = table.page_size
    used = [-(-length // size) for length in lengths]
    width = max(used, default=0)
    pages = table.array[rows, :width]
    # Blank pages beyond `lengths`. A missing page is the caller's to detect.
    if np.count_nonzero(pages >= 0) != sum(used):
        pages[np.arange(width, dtype=np.int32) * size >= kv[:, None]] = -1
    return pages


@lru_cache(maxsize=256)
def _iota(count: int) -> NDArray[np.int32]:
    """0 .. count inclusive, read-only."""
    numbers = np.arange(count + 1, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


@lru_cache(maxsize=256)
def _unshared(num_seqs: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    others, lengths = np.full(num_seqs, -1, np.int32), np.zeros(num_seqs, np.int32)
    others.flags.writeable = lengths.flags.writeable = False
    return others, lengths
