"""The prompt tokens of one step: chunks of those part-way, and admissions, in one order."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES, common_pages
from ramify.engine.request import Request
from ramify.engine.scheduling.waiting_queue import WaitingQueue

MAX_PROBES = 32  # at waiting requests that are not admitted, per step
NUM_RERANKED = 4  # waiting requests whose ranks are brought up to date, per step
MIN_CHUNK = 64  # tokens: a smaller piece of a prompt waits for the next step if others have work


@dataclass(frozen=True, slots=True)
class _InFlightPrefix:
    """A live computation that a waiting request may share, or must wait for."""

    request: Request
    key: CacheKey  # of everything it will compute and keep for others
    num_tokens: int  # computed, or announced in this step for others to attach to


class PrefillSelector:
    """Gives the budget of a step to prompts; see `Scheduler` for the rules.

    Args:
        planner: answers what is cached, and how much room there is.
        queue: the waiting requests.
        min_chunk: tokens of the smallest piece of a prompt that another one leaves over.
    """

    def __init__(self, planner: RadixAttentionPlanner, queue: WaitingQueue, min_chunk: int) -> None:
        self._planner, self._queue, self._min_chunk = planner, queue, min_chunk
        self._page_size = planner.page_size
        self._in_flight: dict[
            Request, _InFlightPrefix
        ] = {}  # the rest is about the step being chosen
        self._running: list[Request] = []
        self._work: list[tuple[Request, int]] = []
        self._admitted: list[tuple[Request, int]] = []
        self._budget_left = self._num_free_rows = self._num_decodes = 0

    def num_uncached(self, request: Request) -> int:
        """What a request has to compute, for its rank: nothing if it reads nothing.

        Others can share what such a request computes, and it nothing of theirs: it goes first.
        """
        key, cached = self._match(request)
        return 0 if key is None and self._planner.share else len(request.sequence.tokens) - cached

    def _match(self, request: Request) -> tuple[CacheKey | None, int]:
        """What a request compares by, None if it reads nothing, and the tokens it would find."""
        sequence = request.sequence
        if not (self._planner.share and sequence.reuse):
            return None, 0
        key = sequence.key(len(sequence.tokens))
        return key, self._planner.cache.match(key).num_tokens

    def choose(
        self, running: list[Request], budget: int, *, num_free_rows: int, num_decodes: int
    ) -> tuple[list[tuple[Request, int]], list[tuple[Request, int]]]:
        """Chunks of running requests, and the admissions, which leave the queue.

        Args:
            running: those whose prompt is part-way.
            budget: tokens.
            num_free_rows: at most so many admissions; with 0 the queue is not looked at.
            num_decodes: other running requests.
        """
        queue, self._running, self._num_decodes = self._queue, running, num_decodes
        self._budget_left, self._num_free_rows, self._work, self._admitted = (
            budget,
            num_free_rows,
            [],
            [],
        )
        self._in_flight = {}
        if num_free_rows:
            for leader in queue.leaders():
                if leader not in running:
                    queue.wake_all(leader)
            for one in running:
                self._in_flight[one] = leading = self._in_flight_prefix(one, 0)
                queue.wake(one, self._num_attachable(leading))
            for request in queue.next_to_refresh(NUM_RERANKED):
                queue.add(request, self.num_uncached(request))
        self._choose(num_free_rows + MAX_PROBES)
        self._in_flight = {}
        return self._work, self._admitted

    def _choose(self, num_probes: int) -> None:
        queue = self._queue
        order = sorted(self._running, key=queue.key, reverse=True)
        room: int | None = None
        while self._budget_left > 0:
            waiter = queue.peek() if self._num_free_rows and num_probes else None
            if order and (waiter is None or queue.key(order[-1]) <= queue.key(waiter)):
                self._continue(order.pop())
                continue
            if waiter is None:
                break
            num_probes -= 1
            if room is None:
                room = self._planner.cache.num_available - self._num_pages_owed()
            taken = self._admit(waiter, room)
            if taken is None:
                self._num_free_rows = 0  # those behind it wait too
            room -= taken or 0

    def _continue(self, request: Request) -> None:
        """The next chunk of a running request."""
        sequence = request.sequence
        num_new = self._chunk(sequence.num_computed, sequence.num_uncomputed)
        if not num_new:
            return
        self._work.append((request, num_new))
        self._budget_left -= num_new
        if self._num_free_rows:
            leader = self._in_flight[request] = self._in_flight_prefix(request, num_new)
            self._queue.wake(request, self._num_attachable(leader))

    def _admit(self, request: Request, room: int) -> int | None:
        """Admit, park or put back the first in the queue.

        Returns the pages that this takes, or None if there is no room or budget for it.
        """
        queue, page_size = self._queue, self._page_size
        total = len(request.sequence.tokens)
        key, cached = self._match(request)
        if key is not None:
            leader, common, cached = self._find_in_flight_prefix(key, cached)
            if leader is not None:
                queue.park(request, leader, common)
                return 0
        if key is not None and request.virtual_arrival + total - cached > request.rank:
            queue.add(request, total - cached)  # pages were evicted since
            if queue.peek() is not request:
                return 0
        need = -(-total // page_size) - cached // page_size
        if need > room and (self._running or self._num_decodes or self._admitted):
            return None
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
        return need + 1

    # -- parts of it -------------------------------------------------------------------------

    def _chunk(self, start: int, num_tokens: int) -> int:
        """How many of a request's tokens from `start` on to compute: 0 for rather none."""
        left = self._budget_left
        if num_tokens <= left:
            return num_tokens
        whole = (start + left) // self._page_size * self._page_size - start
        chunk = whole if whole > 0 and (left - whole) * 16 <= left else left
        lone = not (self._work or self._admitted)
        return chunk if lone or chunk >= self._min_chunk else 0

    def _in_flight_prefix(self, request: Request, num_new: int) -> _InFlightPrefix:
        sequence = request.sequence
        known = sequence.num_computed + _num_announced(request, num_new)
        known_already = self._in_flight.get(request)
        if known_already is not None:
            return replace(known_already, num_tokens=known)
        return _InFlightPrefix(request, _publishable_key(request), known)

    def _num_attachable(self, prefix: _InFlightPrefix) -> int:
        """Tokens of a leader that whoever is planned after it in this step can attach to."""
        if prefix.num_tokens >= len(prefix.key):
            return prefix.num_tokens
        return prefix.num_tokens // self._page_size * self._page_size

    def _find_in_flight_prefix(self, key: CacheKey, cached: int) -> tuple[Request | None, int, int]:
        """A leader to wait for and up to which token; or None, and the tokens to attach to."""
        page_size = self._page_size
        page_bytes, start = page_size * ATOM_BYTES, cached * ATOM_BYTES
        usable = key.atoms[: (len(key) - 1) // page_size * page_bytes]
        page, before = usable[start : start + page_bytes], memoryview(usable)[:start]
        best, longest, behind = cached, 0, None
        if not page:
            return None, 0, cached
        for leader in self._in_flight.values():
            atoms = leader.key.atoms
            if atoms[start : start + page_bytes] != page or leader.key.namespace != key.namespace:
                continue
            if not atoms.startswith(before):
                continue
            common = cached + common_pages(usable, atoms, page_bytes, start) * page_size
            ready = self._num_attachable(leader)
            if common > ready and common > longest:
                longest, behind = common, leader.request
            best = max(best, min(common, ready))
        if longest > best:
            return behind, longest, cached
        return None, 0, best

    def _num_pages_owed(self) -> int:
        """Pages that running requests will ask for to finish their prefill, and one each."""
        page_size, total = self._page_size, self._num_decodes
        for one in self._running:
            sequence = one.sequence
            known = 0 if sequence.lease is None else sequence.lease.num_tokens
            held = len(sequence.private) + known // page_size
            total += max(0, -(-len(sequence.tokens) // page_size) - held) + 1
        return total


def _publishable_key(request: Request) -> CacheKey:
    sequence = request.sequence
    return sequence.key(sequence.shareable(len(sequence.tokens)))


def _num_announced(request: Request, num_new: int) -> int:
    """Of the tokens that a step computes, those that `plan` lets others attach to at once.

    Not single ones, and not those of a request that must not read: the tree may know its first
    pages already, and then nothing can be announced behind them before they are published.
    """
    return num_new if num_new > 1 and request.sequence.reuse else 0
