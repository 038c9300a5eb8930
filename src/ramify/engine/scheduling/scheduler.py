"""Who computes what in the next step: decodes, then the least work, around the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ramify.attention.batch import AttentionBatch
from ramify.attention.planner import RadixAttentionPlanner
from ramify.engine.request import Request
from ramify.engine.scheduling.prefill import MIN_CHUNK, PrefillSelector
from ramify.engine.scheduling.waiting_queue import PRIORITY_TOKENS, WaitingQueue
from ramify.errors import OutOfPagesError, OverloadedError, TokensWaitError

PREFILL_SHARE = 8  # prompts get one part in so many of a budget that decodes could fill


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A planned step: its requests in batch order, leaders before followers."""

    requests: tuple[Request, ...]
    batch: AttentionBatch


class Scheduler:
    """Owns the queues; decides with the cache's own answers and lets `plan` be the judge.

    **Decodes first.** Each running request that decodes gets its token in each step, as long as
    the budget has one for each. If it has not, they take turns, and prompts get an eighth of it (of
    a budget below 8: every eighth step), so that no decode keeps a prompt out for ever.

    **Then prompts**, those part-way and those that wait, in one order
    (`engine.scheduling.waiting_queue`): fair between tenants, larger priorities first, then the least uncached work, with ageing. A short
    prompt so passes a long one that is part-way, which goes on with what is left and has its turn
    when the clock reaches its rank. Chunks end on page boundaries if that leaves at most a 16th of
    the budget unused, and a prompt is not cut into pieces below `MIN_CHUNK` tokens that another
    chunk of the step leaves over. The first of the order that finds no pages or row holds up those
    behind it, so that large requests are not passed for ever either.

    **Single flight.** A waiting request that shares a prefix with a live computation attaches to
    it if this step completes the shared part, and is parked until then otherwise, so that no token
    is computed twice. When the leader is gone, its followers wait like others, and the first of
    them leads.

    Per step the cost does not depend on the number of waiting requests: at most as many lookups
    as there are free rows, `MAX_PROBES` and `NUM_RERANKED`.

    **When pages run out**, the running request of the lowest priority goes back to the queue, and
    among those the one that has the least computed, but never the one of the least
    `virtual_arrival`: the first that came (with priorities counted as in
    `engine.scheduling.waiting_queue`) is never preempted, so that there is always one that ends.

    Args:
        planner: the cache and block table behind it are the engine's.
        max_num_seqs: running requests at once.
        max_batch_tokens: new tokens per step; may be smaller than max_num_seqs.
        coalesce_steps: hold admissions for up to so many steps while others decode and the waiting
            prompts do not fill the budget, so that more of them are computed together.
    """

    def __init__(
        self,
        planner: RadixAttentionPlanner,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        coalesce_steps: int = 0,
    ) -> None:
        self.planner = planner
        self.max_num_seqs, self.max_batch_tokens = max_num_seqs, max_batch_tokens
        self.coalesce_steps = coalesce_steps
        self.max_waiting_tokens: int | None = None  # that wait to be computed; None: any number
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_tokens = 0  # of all planned steps: the clock
        self._requeued: set[Request] = set()  # waiting ones that ran before
        self._step = self._round_robin = 0
        self._num_deferred_steps = 0  # steps in a row without admissions, to coalesce them
        self._prefill = PrefillSelector(
            planner, self.waiting, min(MIN_CHUNK, max(1, max_batch_tokens // 4))
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether anyone waits or runs."""
        return bool(self.waiting or self.running)

    def check_queue_len(self, max_waiting: int | None, now_s: float) -> None:
        """Raise OverloadedError if so many requests wait; None is no limit.

        It is worth trying again when half of those that wait have begun: as long as the one that
        came first has waited for its place, halved, but 1 s to 60 s.
        """
        count = len(self.waiting)
        if max_waiting is None or count < max_waiting:
            return
        waited_s = now_s - min(one.arrival_s for one in self.waiting)
        raise OverloadedError(count, max_waiting, min(60.0, max(1.0, waited_s / 2)))

    def check_queued_tokens(self, num_tokens: int, now_s: float) -> None:
        """Raise OverloadedError if with so many more too many prompt tokens would wait.

        A prompt that nobody waits before is never too long.
        """
        queued, limit = self.waiting.num_uncached, self.max_waiting_tokens
        if limit is None or not queued or queued + num_tokens <= limit:
            return
        waited_s = now_s - min(one.arrival_s for one in self.waiting)
        raise TokensWaitError(queued, num_tokens, limit, min(60.0, max(1.0, waited_s / 2)))

    def add(self, request: Request) -> None:
        """Queue a new request, or a branch, which came when its leader did."""
        if request.parent is not None:
            request.virtual_arrival = request.parent.virtual_arrival
        else:
            request.virtual_arrival = self.num_tokens - PRIORITY_TOKENS * request.priority
        self._enqueue(request)

    def add_running(self, request: Request) -> None:
        """Take in a branch that holds its pages and a row already."""
        if request.parent is not None:
            request.virtual_arrival = request.rank = request.parent.virtual_arrival
        self.running.append(request)

    def remove(self, request: Request) -> None:
        """Take an ended request out; its published pages stay warm."""
        self._requeued.discard(request)
        if not self.waiting.remove(request) and request in self.running:
            self.running.remove(request)  # else a branch whose prompt is still computed
        back = self.planner.release([request.sequence])
        if back:
            wanted = set(map(id, back))
            self.requeue([one for one in self.running if id(one.sequence) in wanted])

    def requeue(self, requests: Iterable[Request]) -> None:
        """Running requests that hold nothing any more wait again, as if they had always waited."""
        for request in list(requests):
            if request in self.running:
                self.running.remove(request)
            request.reset_for_recompute()
            self._enqueue(request)
            self._requeued.add(request)

    def _enqueue(self, request: Request) -> None:
        self.waiting.add(request, self._prefill.num_uncached(request))
        if request.num_failed_steps:
            self._requeued.add(request)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when there is nothing to do.

        Raises:
            OutOfPagesError: a single request does not fit, since leases taken outside the engine
                hold the pages; nothing changed, and it fits once they are released.
        """
        self._step += 1
        suspect = self.next_isolated()
        work, admitted = self._choose() if suspect is None else self._schedule_isolated(suspect)
        try:
            return self._plan_until_it_fits(work, admitted, is_isolated=suspect is not None)
        except BaseException:
            self._undo_admissions(admitted, len(admitted))
            raise

    def _plan_until_it_fits(
        self,
        work: list[tuple[Request, int]],
        admitted: list[tuple[Request, int]],
        *,
        is_isolated: bool,
    ) -> ScheduledStep | None:
        while work or admitted:
            chosen = work + admitted
            try:
                batch = self._plan(chosen)
            except OutOfPagesError as error:
                if any(one.draft for one, _ in work):  # guesses are the first to go
                    work = [(one, num_new - len(one.draft)) for one, num_new in work]
                    for one, _ in work:
                        one.draft = ()
                elif admitted and (work or len(admitted) > 1):
                    # with nobody running, the first must go on; a suspect is tried alone
                    missing = max(1, error.asked - error.free - error.evictable)
                    self._undo_admissions(admitted, len(admitted) - (not work), missing)
                elif len(self.running) + len(admitted) < 2:
                    raise  # somebody outside the engine holds leases; it can go on without them
                elif (
                    admitted and is_isolated
                ):  # a suspect is tried alone; those that pause make room
                    self._preempt(work)
                elif admitted:  # it came before those that run, but not in their place: in turn,
                    # each would take the other's room, for ever
                    self._undo_admissions(admitted, len(admitted))
                    work = self._choose(admit=False)[0]
                else:
                    work = self._preempt(work) or self._choose(admit=False)[0]
                continue
            self._mark_scheduled(work, admitted)
            self.num_tokens += batch.num_tokens
            return ScheduledStep(tuple([one for one, _ in chosen]), batch)
        return None

    def _mark_scheduled(
        self, work: list[tuple[Request, int]], admitted: list[tuple[Request, int]]
    ) -> None:
        """Note who is in the step that was planned."""
        step, counts = self._step, self.waiting.is_multi_tenant
        for request, _ in admitted:
            self.running.append(request)
            self._requeued.discard(request)
        for request, _ in work + admitted:
            request.last_step = step
        if counts:  # admissions were charged when they were chosen
            for request, num_new in work:
                self.waiting.charge(request, num_new)

    def _plan(self, chosen: list[tuple[Request, int]]) -> AttentionBatch:
        """`plan` with everybody's drafts behind the tokens that are known."""
        drafting = [one for one, _ in chosen if one.draft]
        for one in drafting:
            one.sequence.tokens.extend(one.draft)
            one.sequence.num_draft = len(one.draft)
        try:
            return self.planner.plan(
                [one.sequence for one, _ in chosen], [num_new for _, num_new in chosen]
            )
        except BaseException:
            for one in drafting:
                del one.sequence.tokens[len(one.sequence.tokens) - len(one.draft) :]
                one.sequence.num_draft = 0
            raise

    # -- choosing ----------------------------------------------------------------------------

    def next_isolated(self) -> Request | None:
        """When a step has failed: its oldest request, which is tried alone until it has a new
        token, then the next. So a request that always fails takes nobody with it.
        """  # noqa: D205
        for queue in (self.running, self._requeued):
            one = min(
                (one for one in queue if one.num_failed_steps), key=lambda one: one.id, default=None
            )
            if one is not None:
                return one
        return None

    def mark_isolated(self, request: Request) -> None:
        """A request has failed: if it waits, it is tried alone."""
        if request in self.waiting:
            self._requeued.add(request)

    def blocked_request(self) -> Request | None:
        """Whom `schedule` found no pages for when it raised that."""
        first = self.running[0] if self.running else self.waiting.peek()
        return self.next_isolated() or first

    def _schedule_isolated(
        self, isolated: Request
    ) -> tuple[list[tuple[Request, int]], list[tuple[Request, int]]]:
        """Work and admissions of a step in which one request is tried alone."""
        alone = [(isolated, min(isolated.sequence.num_uncomputed, self.max_batch_tokens))]
        if isolated in self.running:
            return alone, []
        if len(self.running) >= self.max_num_seqs:  # branches took the last row
            self._preempt([])
        self.waiting.admit(isolated)
        self.waiting.charge(isolated, alone[0][1])
        return [], alone

    def _choose(
        self, *, admit: bool = True
    ) -> tuple[list[tuple[Request, int]], list[tuple[Request, int]]]:
        """What running requests compute in this step, and whom to admit."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        num_draft = 0
        for one in self.running:
            sequence = one.sequence
            if len(sequence.tokens) - sequence.num_computed > 1:
                prefills.append(one)
            else:
                decodes.append(one)
                num_draft += len(one.draft)
        budget, count = self.max_batch_tokens, len(decodes)
        rows = self.max_num_seqs - len(self.running) if admit and self.waiting else 0
        if self._defers_admissions(rows, budget - count, prefills):
            rows = 0
        work, admitted, used = list[tuple[Request, int]](), list[tuple[Request, int]](), 0
        if prefills or rows:
            least = budget // PREFILL_SHARE or int(not self._step % PREFILL_SHARE)
            left = max(budget - count, least)
            work, admitted = self._prefill.choose(
                prefills, left, num_free_rows=rows, num_decodes=count
            )
            used = sum(num_new for _, num_new in work + admitted)
        rest = budget - used
        if rest < count:  # those that paused are first, and the others pause in turn
            turn = self._round_robin % count
            decodes = sorted(decodes[turn:] + decodes[:turn], key=lambda one: one.last_step)[:rest]
            self._round_robin += rest
        if not num_draft:
            return [(one, 1) for one in decodes] + work, admitted
        rest -= len(decodes)
        tokens = []
        for one in decodes:
            one.draft = one.draft[:rest]
            rest -= len(one.draft)
            tokens.append((one, 1 + len(one.draft)))
        return tokens + work, admitted

    def _defers_admissions(self, num_free_rows: int, left: int, prefills: list[Request]) -> bool:
        """Whether to admit nobody in this step, since more may come to be computed together."""
        if not num_free_rows or not self.coalesce_steps:
            return False
        enough = len(self.waiting) >= num_free_rows or self.waiting.num_uncached >= left
        if (
            enough
            or prefills
            or not self.running
            or self._num_deferred_steps >= self.coalesce_steps
        ):
            self._num_deferred_steps = 0
            return False
        self._num_deferred_steps += 1
        return True

    # -- when pages run out --------------------------------------------------------------------

    def _undo_admissions(
        self, admitted: list[tuple[Request, int]], most: int, missing: int | None = None
    ) -> None:
        """Leave up to `most` of the newest admissions for later, until about `missing` pages are
        saved. What they pin is not counted: without them, that can be evicted too.
        """  # noqa: D205
        while most and (missing is None or missing > 0):
            request, num_new = admitted.pop()
            self.waiting.charge(request, -num_new)
            self.waiting.add(request, request.rank - request.virtual_arrival)
            most -= 1
            if missing is not None:
                missing -= -(-num_new // self.planner.page_size)

    def _preempt(self, work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Send a running request back to the queue; the step goes on without it.

        Nobody follows a running request in this step any more: admissions were dropped first.
        """
        senior = min(self.running, key=lambda one: (one.virtual_arrival, one.id))
        others = [one for one in self.running if one is not senior]
        # of the tenant that has most: a priority is a tenant's own to give, and counts among its own
        held = Counter(one.tenant for one in others)
        newest = {one.tenant: one.id for one in sorted(others, key=lambda one: one.id)}
        victim = min(
            others,
            key=lambda one: (
                -held[one.tenant],
                -newest[one.tenant],
                one.priority,
                _recompute_cost(one),
                -one.id,
            ),
            default=senior,
        )
        self.num_preemptions += 1
        victim.preemptions += 1
        self.planner.release([victim.sequence])
        self.requeue([victim])
        return [(one, num_new) for one, num_new in work if one is not victim]


def _recompute_cost(request: Request) -> int:
    """Tokens that a running request has computed itself: what it may have to compute again."""
    sequence = request.sequence
    return sequence.num_computed - sequence.num_read - sequence.num_shared
