"""`LookUps`: asks the store beyond a network for the pages of waiting requests, in the mover's threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ramify.cache.tier_look_ups import (
    ANSWER_S,
    MAX_LOOK_UP_PAGES,
    AnswerTimes,
    LookUpTable,
    wait_s,
)
from ramify.engine.request import Request
from ramify.engine.tier_copies import CopiesOut
from ramify.engine.tier_parts import TierCounts, TierParts
from ramify.kv.mover_jobs import LookedUp, PageLookUp
from ramify.outputs import TierMiss

MAX_IN_FLIGHT = 64  # look-ups; a server that is so far behind gets no more
UNANSWERED = "unanswered"  # reason of a `TierMiss`


class LookUps:
    """The look-ups in flight, and what was answered. For the engine's thread."""

    def __init__(
        self,
        page_size: int,
        clock: Callable[[], float],
        counts: TierCounts,
        copies_out: CopiesOut,
    ) -> None:
        self._size, self._clock, self._counts = page_size, clock, counts
        self._copies_out = copies_out

    def begin(self, parts: TierParts) -> None:
        """Ask these stores from now on; nothing is in flight."""
        self._parts = parts
        self._table: LookUpTable[Request] = LookUpTable()
        self._in_flight: dict[PageLookUp, Request] = {}
        self._answer_times = AnswerTimes()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an answer."""
        return self._table.num_waiting

    def lists(self, request: Request, page_hash: bytes) -> bool:
        """Whether the store has answered that it has a page of a request's prompt."""
        return self._table.lists(request, page_hash)

    def may_ask(self, request: Request, page: int) -> bool:
        """Whether the store answers calls, and was not asked about this page of a prompt yet."""
        store = self._parts.distant_store
        if store is None or not self._table.may_ask(request, page):
            return False
        return len(self._in_flight) < MAX_IN_FLIGHT and not store.counts().unavailable

    def ask(self, request: Request, hashes: Sequence[bytes], first: int, compute_s: float) -> None:
        """Ask about pages that no store of this machine has; the request waits for the answer.

        Args:
            hashes: of the prompt's pages from page `first` on.
            compute_s: that the prompt takes without them.
        """
        end = first + min(len(hashes), MAX_LOOK_UP_PAGES)
        self._counts.look_ups += 1
        self._table.begin(request, first, end, wait_s(compute_s))
        hashes = tuple(hashes[: end - first])
        begin_s = time.monotonic()
        job = PageLookUp(self._parts.distant, hashes, begin_s, begin_s + ANSWER_S)
        self._in_flight[job] = request
        self._parts.mover.read(job)

    def holds(self, request: Request) -> bool:
        """Whether a request that could run waits for an answer; from the first call on, its time runs."""
        now_s, limit_s = self._clock(), self._table.limit_of(request)
        if limit_s is not None:
            is_worth = self._answer_times.is_worth_waiting(limit_s)
            self._table.begin_wait(request, now_s + limit_s if is_worth else now_s)
        for late, first, end in self._table.take_late(now_s, [request]):
            self._unanswered(late, first, end)
        return self._table.is_waiting(request)

    def ended(self, result: LookedUp) -> Request | None:
        """Take an answer; returns the request if it still waited."""
        look_up = result.look_up
        request = self._in_flight.pop(look_up, None)
        if request is None:  # asked about K/V of other weights
            return None
        hashes = look_up.hashes
        self._answer_times.add(result.end_s - look_up.begin_s)
        if result.listed is None:
            return request if self._table.answered(request, ()) else None
        listed = {page for page, is_there in zip(hashes, result.listed, strict=True) if is_there}
        self._copies_out.note_distant(listed, are_there=True)
        self._copies_out.note_distant(set(hashes) - listed, are_there=False)
        return request if self._table.answered(request, listed) else None

    def take_late(self) -> list[Request]:
        """The requests that do not wait for their answer any longer."""
        late = self._table.take_late(self._clock(), self._table.waiting())
        for request, first, end in late:
            self._unanswered(request, first, end)
        return [request for request, _, _ in late]

    def forget(self, request: Request) -> None:
        """A request was admitted, or has ended."""
        self._table.forget(request)

    def reset(self) -> None:
        """Let no request wait: the queues that they waited in are gone."""
        self._table = LookUpTable()

    def check(self) -> None:
        """Raise InvariantError if a request waits for what was not asked."""
        self._table.check()

    def _unanswered(self, request: Request, first: int, end: int) -> None:
        self._counts.look_ups_late += 1
        begin, end = first * self._size, end * self._size
        request.tier_miss = TierMiss(self._parts.distant, UNANSWERED, begin, end)
