"""Who computes what in the next step: first come, first served, around the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ramify.attention.batch import AttentionBatch
from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache.key import ATOM_BYTES, common_pages
from ramify.engine.request import Request
from ramify.errors import OutOfPagesError


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A planned step: its requests in batch order, and those that it had to preempt."""

    requests: tuple[Request, ...]
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class _Leader:
    """A live computation that a waiting request may share, or must wait for."""

    namespace: bytes
    atoms: bytes  # everything it will compute
    num_tokens: int  # computed, or announced in this step for others to attach to


class Scheduler:
    """Owns the queues; decides with the cache's own answers and lets `plan` be the judge.

    A step takes those first that waited longest: as a rule everybody's decode token, then the
    next chunk of whoever is part-way. Then it admits from the queue while budget, rows and pages
    last. A waiting request that shares a prefix
    with a live computation attaches to it if this step completes the shared part, and waits
    otherwise, so that no token is computed twice.

    Args:
        planner: the cache and block table behind it are the engine's.
        max_num_seqs: running requests at once.
        max_batch_tokens: new tokens per step; may be smaller than max_num_seqs.
    """

    def __init__(
        self, planner: RadixAttentionPlanner, *, max_num_seqs: int, max_batch_tokens: int
    ) -> None:
        self.planner = planner
        self.max_num_seqs, self.max_batch_tokens = max_num_seqs, max_batch_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._step = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether anyone waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def join(self, request: Request) -> None:
        """Take in a branch that holds its pages and a row already."""
        self.running.append(request)

    def remove(self, request: Request) -> None:
        """Take an ended request out; its published pages stay warm."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:  # not a branch whose prompt is still computed
            self.waiting.remove(request)
        self.send_back(self._requests_of(self.planner.release([request.sequence])))

    def send_back(self, requests: Iterable[Request]) -> None:
        """Running requests that hold nothing any more wait again, in order of arrival."""
        back = list(requests)
        for request in back:
            if request in self.running:
                self.running.remove(request)
            request.restart()
            self.waiting.append(request)
        if back:
            self.waiting = deque(sorted(self.waiting, key=lambda one: one.id))

    def schedule(self) -> Scheduled | None:
        """Plan the next step; None when there is nothing to do.

        Raises:
            OutOfPagesError: a single request does not fit, since leases taken outside the engine
                hold the pages; nothing changed, and it fits once they are released.
        """
        self._step += 1
        work, admitted = self._suspect()
        if not work and not admitted:
            work = self._continue_running()
            admitted = self._admit(work)
        while work or admitted:
            try:
                batch = self._plan(work + admitted)
            except OutOfPagesError as error:
                if any(one.draft for one, _ in work):  # guesses are the first to go
                    work = [(one, num_new - len(one.draft)) for one, num_new in work]
                    for one, _ in work:
                        one.draft = ()
                elif work and admitted:
                    self._drop(admitted, error.asked - error.free - error.evictable, keep=0)
                elif len(admitted) > 1:  # with nobody running, the first must go on
                    self._drop(admitted, error.asked - error.free - error.evictable, keep=1)
                elif len(self.running) + len(admitted) < 2:
                    raise  # somebody outside the engine holds leases; it can go on without them
                elif admitted:  # a suspect is tried alone, and those that pause make room
                    self._preempt(work)
                else:
                    work = self._preempt(work) or self._continue_running()
                continue
            for request, _ in admitted:
                self.waiting.remove(request)
                self.running.append(request)
            for request, _ in work + admitted:
                request.last_step = self._step
            return Scheduled(tuple(one for one, _ in work + admitted), batch)
        return None

    def _plan(self, chosen: list[tuple[Request, int]]) -> AttentionBatch:
        """`plan` with everybody's drafts behind the tokens that are known."""
        for one, _ in chosen:
            one.sequence.tokens.extend(one.draft)
            one.sequence.num_draft = len(one.draft)
        try:
            return self.planner.plan(
                [one.sequence for one, _ in chosen], [num_new for _, num_new in chosen]
            )
        except BaseException:
            for one, _ in chosen:
                del one.sequence.tokens[len(one.sequence.tokens) - len(one.draft) :]
                one.sequence.num_draft = 0
            raise

    # -- choosing ----------------------------------------------------------------------------

    def _suspect(self) -> tuple[list[tuple[Request, int]], list[tuple[Request, int]]]:
        """Work and admissions when a step has failed: its oldest request, alone, until it has a
        new token, then the next. So a request that always fails takes nobody with it.
        """  # noqa: D205
        for queue, admits in ((self.running, False), (self.waiting, True)):
            one = min((one for one in queue if one.failures), key=lambda one: one.id, default=None)
            if one is not None:
                alone = [(one, min(one.sequence.num_uncomputed, self.max_batch_tokens))]
                return ([], alone) if admits else (alone, [])
        return [], []

    def _continue_running(self) -> list[tuple[Request, int]]:
        """Running requests, those that waited longest first, decode before prefill on a tie."""
        budget, work = self.max_batch_tokens, []
        order = sorted(self.running, key=lambda one: (one.last_step, one.is_prefill, one.id))
        for request in order:
            if not budget:
                break
            num_new = min(request.sequence.num_uncomputed, budget)
            request.draft = request.draft[: budget - num_new]
            num_new += len(request.draft)
            work.append((request, num_new))
            budget -= num_new
        return work

    def _admit(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        budget = self.max_batch_tokens - sum(num_new for _, num_new in work)
        rows = self.max_num_seqs - len(self.running)
        if not (budget and rows and self.waiting):
            return []
        page_size, cache = self.planner.page_size, self.planner.cache
        leaders = self._leaders(work)
        room = cache.num_available - self._outstanding()
        admitted: list[tuple[Request, int]] = []
        for request in self.waiting:
            if not budget or not rows:
                break
            sequence = request.sequence
            atoms = sequence.tokens.tobytes()
            cached = 0
            if self.planner.share and sequence.reuse:
                cached = cache.match(sequence.key(len(sequence.tokens))).num_tokens
                shared = self._shared_tokens(request.namespace, atoms, cached, leaders)
                if shared is None:
                    continue  # a leader is still on its way through the common prefix
                cached = max(cached, shared)
            need = -(-len(sequence.tokens) // page_size) - cached // page_size
            alone = not work and not admitted
            if need > room and not alone:
                break
            num_new = min(len(sequence.tokens) - cached, budget)
            admitted.append((request, num_new))
            announced = cached + _num_announced(request, num_new)
            leaders.append(_Leader(request.namespace, atoms, announced))
            budget, rows, room = budget - num_new, rows - 1, room - need - 1
        return admitted

    def _leaders(self, work: list[tuple[Request, int]]) -> list[_Leader]:
        """Running prefills, whether or not they are in this step."""
        planned = {id(request): num_new for request, num_new in work}
        return [
            _Leader(
                one.namespace,
                one.sequence.tokens[: one.sequence.max_shared].tobytes(),
                one.sequence.num_computed + _num_announced(one, planned.get(id(one), 0)),
            )
            for one in self.running
            if one.is_prefill
        ]

    def _shared_tokens(
        self, namespace: bytes, atoms: bytes, cached: int, leaders: list[_Leader]
    ) -> int | None:
        """Tokens that leaders of this step compute for the caller, or None: it should wait."""
        page_size = self.planner.page_size
        page_bytes = page_size * ATOM_BYTES
        start = cached * ATOM_BYTES
        usable = atoms[: (len(atoms) // ATOM_BYTES - 1) // page_size * page_bytes]
        best = cached
        for leader in leaders:
            if (
                leader.namespace != namespace
                or leader.atoms[: start + page_bytes] != (usable[: start + page_bytes])
            ):
                continue
            common = cached + common_pages(usable, leader.atoms, page_bytes, start) * page_size
            ready = leader.num_tokens // page_size * page_size
            if common > ready and leader.num_tokens * ATOM_BYTES < len(leader.atoms):
                return None
            best = max(best, min(common, ready))
        return best

    def _outstanding(self) -> int:
        """Pages that running requests will ask for to finish their prefill, and one each."""
        page_size = self.planner.page_size
        total = 0
        for one in self.running:
            sequence = one.sequence
            held = len(sequence.private) + (
                0 if sequence.lease is None else len(sequence.lease.pages)
            )
            total += max(0, -(-len(sequence.tokens) // page_size) - held) + 1
        return total

    # -- when pages run out --------------------------------------------------------------------

    def _drop(self, admitted: list[tuple[Request, int]], missing: int, keep: int) -> None:
        """Leave the newest admissions for later, until about `missing` pages are saved.

        What they pin is not counted: without them, that can be evicted too.
        """
        while len(admitted) > keep and missing > 0:
            _, num_new = admitted.pop()
            missing -= -(-num_new // self.planner.page_size)

    def _preempt(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Send the newest running request back to the queue; the step goes on without it.

        Nobody follows a running request in this step any more: admissions were dropped first.
        """
        victim = max(self.running, key=lambda one: one.id)
        self.num_preemptions += 1
        victim.preemptions += 1
        self.planner.release([victim.sequence])
        self.send_back([victim])
        return [(one, num_new) for one, num_new in work if one is not victim]

    def _requests_of(self, sequences: Iterable[object]) -> list[Request]:
        wanted = set(map(id, sequences))
        return [one for one in self.running if id(one.sequence) in wanted]


def _num_announced(request: Request, num_new: int) -> int:
    """Of the tokens that a step computes, those that `plan` lets others attach to at once.

    Not single ones, and not those of a request that must not read: the tree may know its first
    pages already, and then nothing can be announced behind them before they are published.
    """
    return num_new if num_new > 1 and request.sequence.reuse else 0
