"""Prefill of one step: chunks of running prompts, and admissions, in one order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES, common_pages
from ramify.config import live_pages
from ramify.engine.request import Request
from ramify.engine.scheduling.waiting_queue import WaitingQueue

Work = list[tuple[Request, int]]  # (request, number of its tokens to compute in a step)

MAX_PROBES = 32  # waiting requests per step that are looked at and not admitted
NUM_RERANKED = 4  # waiting requests per step whose rank is recomputed
MIN_CHUNK = 64  # tokens; a smaller chunk waits for the next step if others have work


@dataclass(frozen=True, slots=True)
class _InFlightPrefix:
    """What a running request computes, for a waiting one to attach to or to wait for."""

    request: Request
    key: CacheKey  # of all tokens that it will publish
    num_tokens: int  # computed, or announced by this step


class PrefixLoads(Protocol):
    """Loads prefixes from cache tiers for waiting requests; `engine.tiering.EngineTiering`."""

    def holds(self, request: Request) -> bool:
        """Whether a request at the head of the queue waits for a load; may begin one."""
        ...

    def forget(self, request: Request) -> None:
        """A request was admitted, or has ended: it waits for no load."""
        ...


class PrefillSelector:
    """Distributes a step's prefill budget; `Scheduler` has the rules."""

    def __init__(
        self,
        planner: RadixAttentionPlanner,
        queue: WaitingQueue,
        min_chunk: int,
        max_batch_tokens: int,
        loads: PrefixLoads | None = None,
    ) -> None:
        self._planner, self._queue, self._min_chunk = planner, queue, min_chunk
        self._loads = loads
        self._page_size, self._max_batch_tokens = planner.page_size, max_batch_tokens
        # State of the step that `choose` works on.
        self._in_flight: dict[Request, _InFlightPrefix] = {}
        self._running: list[Request] = []
        self._work: Work = []
        self._admitted: Work = []
        self._budget_left = self._num_free_rows = self._num_decodes = 0

    def num_uncached(self, request: Request) -> int:
        """Tokens that a request has to compute, for its rank; 0 if it must not read the cache.

        Such a request goes first: others can share what it computes, but not the other way round.
        """
        key, cached = self._match(request)
        return 0 if key is None and self._planner.share else len(request.sequence.tokens) - cached

    def _match(self, request: Request) -> tuple[CacheKey | None, int]:
        """Cache key of a request, None if it must not read; and the number of cached tokens."""
        sequence = request.sequence
        if not (self._planner.share and sequence.reuse):
            return None, 0
        key = sequence.key(len(sequence.tokens))
        return key, self._planner.cache.match(key).num_tokens

    def fits(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether there are pages for a waiting request and for what running ones still need."""
        planner, sequence = self._planner, request.sequence
        reads = planner.share and sequence.reuse
        prefills = [other for other in running if other.sequence.num_uncomputed > 1]
        num_owed = self._num_pages_owed(prefills, len(running) - len(prefills))
        num_tokens = len(sequence.tokens)
        num_live = self._num_live_pages(num_tokens)
        if num_live + num_owed <= planner.num_available:
            return True
        if num_live * self._page_size < num_tokens:  # it never holds all its pages at once
            return False
        key = sequence.key(num_tokens if reads else 0)
        num_more = num_tokens - len(key) + num_owed * self._page_size
        return planner.cache.can_allocate(key, num_more)

    def choose(
        self,
        running: list[Request],
        budget: int,
        *,
        num_free_rows: int,
        num_decodes: int,
        first: Request | None = None,
    ) -> tuple[Work, Work]:
        """Chunks of running requests, and admissions, which leave the queue.

        Args:
            running: requests whose prompt is partly computed.
            budget: tokens.
            num_free_rows: maximum number of admissions; with 0 the queue is not read, but parked
                requests are woken: their tenant may be owed a row.
            num_decodes: number of other running requests.
            first: a waiting request to admit before all others, and alone.
        """
        queue, self._running, self._num_decodes = self._queue, running, num_decodes
        self._budget_left, self._num_free_rows = budget, num_free_rows
        self._work, self._admitted, self._in_flight = [], [], {}
        if num_free_rows or queue.has_parked:
            self._wake_parked()
        if num_free_rows:
            for request in queue.next_to_refresh(NUM_RERANKED):
                queue.add(request, self.num_uncached(request))
        self._choose(num_free_rows + MAX_PROBES, first)
        self._in_flight = {}
        return self._work, self._admitted

    def _wake_parked(self) -> None:
        """Wake the requests whose prefix running ones have computed, or do not compute any more."""
        self._queue.wake_abandoned(self._running)
        for leader in self._running:
            self._in_flight[leader] = prefix = self._in_flight_prefix(leader, 0)
            self._queue.wake(leader, self._num_attachable(prefix))

    def _choose(self, num_probes: int, first: Request | None) -> None:
        queue = self._queue
        running = sorted(self._running, key=queue.key, reverse=True)
        num_free_pages: int | None = None
        while self._budget_left > 0:
            waiting = (first or queue.peek()) if self._num_free_rows and num_probes else None
            is_first, first = waiting is not None and waiting is first, None
            if (
                running
                and not is_first
                and (waiting is None or queue.key(running[-1]) <= queue.key(waiting))
            ):
                self._continue(running.pop())
                continue
            if waiting is None:
                break
            num_probes -= 1
            if num_free_pages is None:
                num_owed = self._num_pages_owed(self._running, self._num_decodes)
                num_free_pages = self._planner.num_available - num_owed
            num_pages = self._admit(waiting, num_free_pages, is_first=is_first)
            if num_pages is None or (is_first and num_pages):
                # It blocks those behind it. Beside `first`, nobody else is admitted: the pages that
                # they read from the cache may be those that it needs.
                self._num_free_rows = 0
            num_free_pages -= num_pages or 0

    def _continue(self, request: Request) -> None:
        """Add the next chunk of a running request."""
        sequence = request.sequence
        num_planned = sequence.num_planned  # of a step in flight
        num_new = self._chunk(
            sequence.num_computed + num_planned, sequence.num_uncomputed - num_planned
        )
        if not num_new:
            return
        self._work.append((request, num_new))
        self._budget_left -= num_new
        if self._num_free_rows:
            prefix = self._in_flight[request] = self._in_flight_prefix(request, num_new)
            self._queue.wake(request, self._num_attachable(prefix))

    def _admit(self, request: Request, num_free_pages: int, *, is_first: bool) -> int | None:
        """Admit, park or re-rank the first request of the queue.

        Args:
            is_first: whatever its new rank is.

        Returns:
            Pages that this takes (0 unless admitted); None if pages or budget do not suffice.
        """
        queue, page_size = self._queue, self._page_size
        total = len(request.sequence.tokens)
        key, cached = self._match(request)
        num_in_tree = cached
        if key is not None:
            leader, common, cached = self._find_in_flight_prefix(key, cached)
            if leader is not None:
                queue.park(request, leader, common)
                return 0
            if self._loads is not None and cached == num_in_tree and self._loads.holds(request):
                queue.hold(request)
                return 0
        if key is not None and request.virtual_arrival + total - cached > request.rank:
            queue.add(request, total - cached)  # pages were evicted since it was ranked
            if not is_first and queue.peek() is not request:
                return 0
        num_pages = -(-total // page_size) - cached // page_size
        num_pages = min(num_pages, self._num_live_pages(total))
        is_alone = not (self._running or self._num_decodes or self._admitted)
        if num_pages > num_free_pages and not is_alone:
            return None
        if key is not None and cached == num_in_tree:
            cached += self._planner.partial.count(key)
        num_new = self._chunk(cached, total - cached)
        if not num_new:
            return None
        queue.admit(request)
        queue.charge(request, num_new)
        self._admitted.append((request, num_new))
        self._budget_left -= num_new
        self._num_free_rows -= 1
        announced = cached + _num_announced(request, num_new)
        self._in_flight[request] = _InFlightPrefix(request, _publishable_key(request), announced)
        return num_pages + 1  # one for its first output

    # -- helpers of `_continue` and `_admit` -------------------------------------------------

    def _num_live_pages(self, num_tokens: int) -> int:
        window = self._planner.cache.window
        return live_pages(num_tokens, self._page_size, window, self._max_batch_tokens)

    def _num_pages_owed(self, prefills: Iterable[Request], num_decodes: int) -> int:
        """Pages that running requests need to finish their prefill, and one more for each."""
        total = num_decodes
        for request in prefills:
            sequence = request.sequence
            num_leased = 0 if sequence.lease is None else sequence.lease.num_tokens
            num_held = len(sequence.private) + num_leased // self._page_size
            total += max(0, self._num_live_pages(len(sequence.tokens)) - num_held) + 1
        return total

    def _chunk(self, start: int, num_tokens: int) -> int:
        """Number of tokens to compute from `start` on; 0 if the budget leaves too small a chunk."""
        left = self._budget_left
        if num_tokens <= left:
            return num_tokens
        aligned = (start + left) // self._page_size * self._page_size - start
        chunk = aligned if aligned > 0 and (left - aligned) * 16 <= left else left
        is_first = not (self._work or self._admitted)
        return chunk if is_first or chunk >= self._min_chunk else 0

    def _in_flight_prefix(self, request: Request, num_new: int) -> _InFlightPrefix:
        sequence = request.sequence
        num_tokens = sequence.num_computed + _num_announced(request, num_new)
        prefix = self._in_flight.get(request)
        if prefix is not None:
            return replace(prefix, num_tokens=num_tokens)
        return _InFlightPrefix(request, _publishable_key(request), num_tokens)

    def _num_attachable(self, prefix: _InFlightPrefix) -> int:
        """Tokens of a prefix that a request planned after its leader in this step can attach to."""
        if prefix.num_tokens >= len(prefix.key):
            return prefix.num_tokens
        return prefix.num_tokens // self._page_size * self._page_size

    def _find_in_flight_prefix(self, key: CacheKey, cached: int) -> tuple[Request | None, int, int]:
        """(leader to wait for, tokens of it to wait for, cached), or (None, 0, tokens to share)."""
        page_size = self._page_size
        page_bytes, start = page_size * ATOM_BYTES, cached * ATOM_BYTES
        # The last token is always computed, for its logits.
        matchable = key.atoms[: (len(key) - 1) // page_size * page_bytes]
        next_page = matchable[start : start + page_bytes]
        cached_atoms = memoryview(matchable)[:start]
        if not next_page:
            return None, 0, cached
        num_attachable, num_later, leader = cached, 0, None
        for prefix in self._in_flight.values():
            atoms = prefix.key.atoms
            # Compare the first uncached page first: it differs for nearly all.
            if (
                atoms[start : start + page_bytes] != next_page
                or prefix.key.namespace != key.namespace
                or not atoms.startswith(cached_atoms)
            ):
                continue
            common = cached + common_pages(matchable, atoms, page_bytes, start) * page_size
            ready = self._num_attachable(prefix)
            if common > ready and common > num_later:
                num_later, leader = common, prefix.request
            num_attachable = max(num_attachable, min(common, ready))
        if num_later > num_attachable:
            return leader, num_later, cached
        return None, 0, num_attachable


def _publishable_key(request: Request) -> CacheKey:
    sequence = request.sequence
    return sequence.key(sequence.shareable(len(sequence.tokens)))


def _num_announced(request: Request, num_new: int) -> int:
    """Of `num_new` tokens, those that `plan` announces for others to attach to in the same step.

    None of a single token, and none of a request that must not read the cache: if the tree has its
    first pages already, nothing can be announced behind them before they are published.
    """
    return num_new if num_new > 1 and request.sequence.reuse else 0
