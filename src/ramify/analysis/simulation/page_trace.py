"""The pages of a log's prompts as integer ids: what every simulation reads."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.tokens import spread_ids

CHUNK_PAGES = 1 << 20  # page keys that are held as Python integers before they are packed
MAX_SPARSITY = 8  # ids up to this many times the number of pages are used as they are
FIRST_FRESH = -(2**62)  # far from the ids that traces have
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class PageTrace:
    """Requests in order of arrival, each as the ids of its full pages.

    An id stands for a page with all that precedes it: equal ids mean equal prefixes. Ids are
    0 .. num_ids - 1.
    """

    page_size: int  # tokens
    num_ids: int
    page_ids: NDArray[np.int32]  # [pages] of all requests, one after the other
    offsets: NDArray[np.int64]  # [requests + 1] of a request's pages in `page_ids`
    num_lookup_pages: NDArray[
        np.int32
    ]  # [requests] full pages of the prompt; then come the output's
    num_tokens: NDArray[np.int64]  # [requests] of the prompt
    num_output: NDArray[np.int64]  # [requests] tokens of the answer; -1: not logged
    start_s: NDArray[np.float64]  # [requests] arrival; nan: not logged
    session: NDArray[np.int32]  # [requests] number of the session; -1: not logged

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def total_tokens(self) -> int:
        """Input tokens of all requests."""
        return int(self.num_tokens.sum())

    @property
    def has_times(self) -> bool:
        """Whether every request has an arrival time."""
        return len(self) > 0 and not bool(np.isnan(self.start_s).any())

    def pages(self, request: int) -> NDArray[np.int32]:
        """Page ids of a request, the root first."""
        return self.page_ids[self.offsets[request] : self.offsets[request + 1]]

    def select(self, requests: NDArray[np.integer]) -> PageTrace:
        """The trace of some requests, in the order of `requests`."""
        lengths = np.diff(self.offsets)[requests]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(self.offsets[:-1][requests] - offsets[:-1], lengths)
        places += np.arange(offsets[-1])
        return PageTrace(
            page_size=self.page_size,
            num_ids=self.num_ids,
            page_ids=self.page_ids[places],
            offsets=offsets,
            num_lookup_pages=self.num_lookup_pages[requests],
            num_tokens=self.num_tokens[requests],
            num_output=self.num_output[requests],
            start_s=self.start_s[requests],
            session=self.session[requests],
        )


class PageTraceBuilder:
    """Collects requests; memory grows by 4 or 8 bytes a page and 40 a request."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._chunks: list[NDArray[np.int64]] = []
        self._keys = array("q")
        self._lengths, self._lookups = array("i"), array("i")
        self._num_tokens, self._num_output = array("q"), array("q")
        self._start_s = array("d")
        self._session = array("i")
        self._sessions: dict[Hashable, int] = {}
        self._scopes: dict[Hashable, int] = {}
        self._fresh = FIRST_FRESH  # key of a page that nobody else has

    def __len__(self) -> int:
        return len(self._lengths)

    def add(
        self,
        keys: list[int] | tuple[int, ...],
        *,
        num_tokens: int,
        scope: Hashable = "",
        num_lookup_pages: int | None = None,
        num_fresh_pages: int = 0,
        num_output: int | None = None,
        start_s: float | None = None,
        session: Hashable = None,
    ) -> None:
        """Add a request.

        Args:
            keys: of its pages; equal keys mean equal prefixes within a scope. 64 bits count.
            scope: requests of different scopes share nothing.
            num_lookup_pages: pages of the prompt; None: all of `keys`.
            num_fresh_pages: pages of the answer that no other request has, after those of `keys`.
            session: its name; None: not logged.
        """
        salt = self._scope_salt(scope)
        if salt:
            keys = [_signed(key ^ salt) for key in keys]
        num_before = len(self._keys)
        try:
            self._keys.extend(keys)
        except OverflowError:
            del self._keys[num_before:]
            self._keys.extend([_signed(key) for key in keys])
        for _ in range(num_fresh_pages):
            self._keys.append(self._fresh)
            self._fresh += 1
        self._lengths.append(len(keys) + num_fresh_pages)
        self._lookups.append(len(keys) if num_lookup_pages is None else num_lookup_pages)
        self._num_tokens.append(num_tokens)
        self._num_output.append(-1 if num_output is None else num_output)
        self._start_s.append(float("nan") if start_s is None else start_s)
        number = -1 if session is None else self._sessions.setdefault(session, len(self._sessions))
        self._session.append(number)
        if len(self._keys) >= CHUNK_PAGES:
            self._pack()

    def build(self) -> PageTrace:
        """The trace, in order of arrival where all times are logged, else in order of reading."""
        self._pack()
        lengths = np.array(self._lengths, np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        page_ids, num_ids = _dense_ids(self._chunks)
        self._chunks = []
        if not _are_prefixes(page_ids, offsets, num_ids):
            page_ids, num_ids = _chained_ids(page_ids, offsets)
        trace = PageTrace(
            page_size=self.page_size,
            num_ids=num_ids,
            page_ids=page_ids,
            offsets=offsets,
            num_lookup_pages=np.array(self._lookups, np.int32),
            num_tokens=np.array(self._num_tokens, np.int64),
            num_output=np.array(self._num_output, np.int64),
            start_s=np.array(self._start_s, np.float64),
            session=np.array(self._session, np.int32),
        )
        if trace.has_times and bool((np.diff(trace.start_s) < 0).any()):
            return trace.select(np.argsort(trace.start_s, kind="stable"))
        return trace

    def _scope_salt(self, scope: Hashable) -> int:
        """0 for the first scope, so that the dense ids of a trace stay dense."""
        number = self._scopes.setdefault(scope, len(self._scopes))
        return int(spread_ids(np.array([number]))[0]) if number else 0

    def _pack(self) -> None:
        keys = np.array(self._keys, np.int64)
        if len(keys) and keys.min() >= 0 and keys.max() < 2**31:
            keys = keys.astype(np.int32)
        self._chunks.append(keys)
        self._keys = array("q")


def _signed(key: int) -> int:
    key &= _MASK
    return key - (1 << 64) if key >> 63 else key


def _dense_ids(chunks: list[NDArray[np.int64]]) -> tuple[NDArray[np.int32], int]:
    """Keys as ids from 0, and a bound of the ids."""
    keys = np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
    if not len(keys):
        return keys.astype(np.int32), 0
    if keys.dtype == np.int32 and keys.max() < MAX_SPARSITY * len(keys) + CHUNK_PAGES:
        return keys.view(np.int32), int(keys.max()) + 1
    unique, inverse = np.unique(keys, return_inverse=True)
    return inverse.astype(np.int32), len(unique)


def _parents(page_ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """[pages]: the id before each page in its request; -1 before the first."""
    before = np.full(len(page_ids), -1, np.int32)
    before[1:] = page_ids[:-1]
    starts = offsets[:-1]
    before[starts[starts < len(page_ids)]] = -1
    return before


def _are_prefixes(page_ids: NDArray[np.int32], offsets: NDArray[np.int64], num_ids: int) -> bool:
    """Whether each id always follows the same id, as ids of prefixes do."""
    before = _parents(page_ids, offsets)
    parent = np.full(num_ids, -1, np.int32)
    parent[page_ids] = before
    return bool((parent[page_ids] == before).all())


def _chained_ids(
    page_ids: NDArray[np.int32], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int32], int]:
    """Ids of pages alone as ids of prefixes: equal if all pages before are equal too."""
    chained = np.zeros(len(page_ids), np.int32)
    lengths = np.diff(offsets)
    parents = np.zeros(len(lengths), np.int64)
    num_ids, depth = 0, 0
    alive = np.flatnonzero(lengths > 0)
    while len(alive):
        places = offsets[:-1][alive] + depth
        pairs = (parents[alive] << 32) | page_ids[places].astype(np.int64)
        unique, inverse = np.unique(pairs, return_inverse=True)
        chained[places] = inverse + num_ids
        parents[alive] = inverse + num_ids
        num_ids += len(unique)
        depth += 1
        alive = alive[lengths[alive] > depth]
    return chained, num_ids
