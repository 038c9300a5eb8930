"""Which request used each page last: the input of every bound and curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.simulation.page_trace import PageTrace

CHUNK_PAGES = 1 << 20  # of which the last users are looked up together
FIRST_USE = -1


@dataclass(frozen=True, slots=True, eq=False)
class ReuseRuns:
    """Neighbouring pages of a request that the same earlier request used last, as runs.

    Runs are in order of request, then from the root to the leaf. Requests that share a prefix are in
    a chain of last users, so that a request has few runs however long it is.
    """

    trace: PageTrace
    request: NDArray[np.int32]  # [runs]
    last_user: NDArray[np.int32]  # [runs] request that used the pages last; FIRST_USE: none did
    num_pages: NDArray[np.int32]  # [runs]
    is_lookup: NDArray[np.bool_]  # [runs] pages of the prompt; False: of the answer

    @classmethod
    def of(cls, trace: PageTrace) -> ReuseRuns:
        """Find the runs. Memory beside the trace: 4 bytes an id, 13 a run."""
        last_user = np.full(trace.num_ids, FIRST_USE, np.int32)
        columns: list[tuple[NDArray[np.int32], ...]] = []
        lengths = np.diff(trace.offsets)
        first = 0
        while first < len(trace):
            after = int(
                np.searchsorted(trace.offsets, trace.offsets[first] + CHUNK_PAGES, side="right")
            )
            after = min(max(after - 1, first + 1), len(trace))
            columns.append(_runs_of_chunk(trace, last_user, lengths, first, after))
            first = after
        empty = np.zeros(0, np.int32)
        request, user, num_pages, is_lookup = (
            (np.concatenate(parts) for parts in zip(*columns, strict=True))
            if columns
            else (empty, empty, empty, empty)
        )
        return cls(trace, request, user, num_pages, is_lookup.astype(np.bool_))

    @property
    def is_hit(self) -> NDArray[np.bool_]:
        """[runs]: pages of a prompt that a cache of any size could hold."""
        return self.is_lookup & (self.last_user >= 0)


def _runs_of_chunk(
    trace: PageTrace,
    last_user: NDArray[np.int32],
    lengths: NDArray[np.int64],
    first: int,
    after: int,
) -> tuple[NDArray[np.int32], ...]:
    """Runs of the requests `first` to `after - 1`; updates `last_user`."""
    begin = int(trace.offsets[first])
    page_ids = trace.page_ids[begin : int(trace.offsets[after])]
    request = np.repeat(np.arange(first, after, dtype=np.int32), lengths[first:after])
    order = np.argsort(page_ids, kind="stable")
    is_again = np.zeros(len(page_ids), np.bool_)
    is_again[1:] = page_ids[order[1:]] == page_ids[order[:-1]]
    user = np.empty(len(page_ids), np.int32)
    user[order] = last_user[page_ids[order]]
    again = np.flatnonzero(is_again)
    user[order[again]] = request[order[again - 1]]
    last_user[page_ids] = request  # of equal ids the last assignment stays
    starts = trace.offsets[first:after] - begin
    is_edge = np.ones(len(page_ids), np.bool_)
    is_edge[1:] = user[1:] != user[:-1]
    is_edge[starts[starts < len(page_ids)]] = True
    lookup_ends = starts + trace.num_lookup_pages[first:after]
    is_edge[lookup_ends[lookup_ends < len(page_ids)]] = True
    edges = np.flatnonzero(is_edge)
    num_pages = np.diff(np.append(edges, len(page_ids))).astype(np.int32)
    depth = edges - starts[request[edges] - first]
    is_lookup = depth < trace.num_lookup_pages[request[edges]]
    return request[edges], user[edges], num_pages, is_lookup.astype(np.int32)
