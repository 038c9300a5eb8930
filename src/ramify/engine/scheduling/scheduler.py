"""Continuous-batching scheduler: decodes first, then chunked prefill; preempts if pages run out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ramify.attention.batch import AttentionBatch
from ramify.attention.planner import RadixAttentionPlanner
from ramify.engine.request import Request
from ramify.engine.scheduling.prefill import MIN_CHUNK, PrefillSelector, PrefixLoads, Work
from ramify.engine.scheduling.row_fairness import RowFairness
from ramify.engine.scheduling.run_ahead import select_ahead
from ramify.engine.scheduling.waiting_queue import PRIORITY_TOKENS, WaitingQueue
from ramify.errors import OutOfPagesError

PREFILL_SHARE = 8  # prefill gets 1 / PREFILL_SHARE of a budget that decodes alone would fill
# Steps in a row that are planned ahead while the first waiting request found no pages. After these the
# queue is read again: leases outside the engine may have ended.
MAX_AHEAD_WHILE_BLOCKED = 8


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A planned step: its requests in batch order, a computed prefix before its readers."""

    requests: tuple[Request, ...]
    batch: AttentionBatch


class Scheduler:
    """Chooses which requests the next step runs, and how many tokens of each.

    It estimates what fits. If `planner.plan` raises OutOfPagesError, it asks for less and plans
    again.

    **Decodes first.** Every decoding request gets its token in every step if the budget allows. If
    not, they take turns, and prefill gets 1/8 of the budget (every eighth step if the budget is
    below 8), so decodes never block prompts for ever.

    **Then prefill**: running prompts and waiting requests in one order, see `waiting_queue`: fair
    between tenants, then larger priority, then fewer uncached tokens, with ageing. So a short
    prompt can overtake a half-computed long one. The long one gets the budget that is left over,
    and comes first once the clock (tokens computed so far) reaches its rank. A chunk ends on a page
    boundary if that wastes at most 1/16 of the budget, and a prompt gets no chunk below `MIN_CHUNK`
    tokens while others have work. The first waiting request that finds no pages or row blocks those
    behind it, so large requests are not overtaken for ever either.

    **In-flight prefix sharing.** A waiting request whose prefix a running one is about to compute
    attaches to it, if this step completes the prefix; else it is parked until a step does. No token
    is computed twice. If that leader goes away, its followers wait again, and the first leads.

    The cost of a step does not depend on the number of waiting requests: at most as many cache
    lookups as free rows, plus `MAX_PROBES` and `NUM_RERANKED`.

    **When pages run out**, give up in this order: drafts, this step's newest admissions, then one
    running request: of the tenant that runs most, the lowest priority, then the least computed
    work. The request with the smallest `virtual_arrival` is never preempted, so one always ends.

    Args:
        max_num_seqs: maximum number of running requests.
        max_batch_tokens: maximum number of query tokens per step; may be below max_num_seqs.
        coalesce_steps: defer admissions for up to this many steps while others decode and the
            waiting prompts do not fill the budget, to prefill more of them together.
        fair_wait_steps: see `row_fairness`; 0: no request is preempted for another tenant's.
        loads: of the cache tiers; None without tiers.
    """

    def __init__(
        self,
        planner: RadixAttentionPlanner,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        coalesce_steps: int = 0,
        fair_wait_steps: int = 0,
        loads: PrefixLoads | None = None,
    ) -> None:
        self.planner, self._loads = planner, loads
        self.max_num_seqs, self.max_batch_tokens = max_num_seqs, max_batch_tokens
        self.coalesce_steps = coalesce_steps
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.num_preemptions = 0  # those for fairness included
        self.num_fair_preemptions = 0
        self.num_tokens = 0  # in all planned steps: the clock that ranks are read on
        self._requeued: set[Request] = set()  # waiting requests that have run before, or failed
        self._step = self._round_robin = 0
        self._num_deferred_steps = 0  # in a row, see `coalesce_steps`
        self._fairness = RowFairness(self.waiting, fair_wait_steps)
        self._blocked: Request | None = None
        self._is_queue_blocked = (
            False  # the last step had a row for a waiting request, but no pages
        )
        self._num_ahead = 0  # steps that were planned ahead since
        min_chunk = min(MIN_CHUNK, max(1, max_batch_tokens // 4))
        self._prefill = PrefillSelector(planner, self.waiting, min_chunk, max_batch_tokens, loads)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute before a further prompt: of waiting and of running prompts."""
        running = sum(max(0, request.sequence.num_uncomputed - 1) for request in self.running)
        return self.waiting.num_uncached + running

    def add(self, request: Request) -> None:
        """Queue a new request; a child arrived when its parent did."""
        if request.parent is not None:
            request.virtual_arrival = request.parent.virtual_arrival
        else:
            request.virtual_arrival = self.num_tokens - PRIORITY_TOKENS * request.priority
        self._enqueue(request)

    def add_running(self, request: Request) -> None:
        """Add a child that has pages and a row already, from `planner.fork`."""
        if request.parent is not None:
            request.virtual_arrival = request.rank = request.parent.virtual_arrival
        self._begin_to_run(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ends; its published pages stay cached."""
        self._requeued.discard(request)
        self._is_queue_blocked = False
        if self._loads is not None:
            self._loads.forget(request)
        # A child that has not begun is in neither queue: its parent still computes the prompt.
        if not self.waiting.remove(request) and request in self.running:
            self.running.remove(request)
            self.waiting.row_freed(request.tenant)
        abandoned = self.planner.release([request.sequence])
        if abandoned:
            ids = set(map(id, abandoned))
            self.requeue([follower for follower in self.running if id(follower.sequence) in ids])

    def requeue(self, requests: Iterable[Request]) -> None:
        """Queue running requests again whose pages were released; they keep their arrival."""
        for request in list(requests):
            if request in self.running:
                self.running.remove(request)
                self.waiting.row_freed(request.tenant)
            request.reset_for_recompute()
            self._enqueue(request)
            self._requeued.add(request)

    def wake(self, requests: Iterable[Request]) -> None:
        """Rank requests again that were held for a load."""
        for request in requests:
            if request in self.waiting and request.is_held:
                self._is_queue_blocked = False
                self.waiting.add(request, self._prefill.num_uncached(request))

    def _enqueue(self, request: Request) -> None:
        self._is_queue_blocked = False
        self.waiting.add(request, self._prefill.num_uncached(request))
        if request.num_failed_steps:
            self._requeued.add(request)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when there is nothing to do.

        Raises:
            OutOfPagesError: a single request does not fit, since leases outside the engine hold the
                pages. No page is planned, but requests may have been preempted; it fits once they are
                released.
        """
        self._step += 1
        self.waiting.step, self._blocked = self._step, None
        isolated = self.next_isolated()
        if isolated is None:
            work, admitted = self._choose(first=self._make_room_for_starving())
        else:
            work, admitted = self._schedule_isolated(isolated)
        try:
            return self._plan_until_it_fits(work, admitted, is_isolated=isolated is not None)
        except BaseException:
            self._undo_admissions(admitted, len(admitted))
            raise

    def schedule_ahead(self) -> ScheduledStep | None:
        """Plan one more token of each running request, or a chunk of its prompt, behind the step in flight.

        Nobody is admitted or preempted.

        Returns:
            None if the next step depends on the result of the one in flight, or has no work.
        """
        if self.next_isolated() is not None or self._may_admit():
            return None
        selected = select_ahead(self.running)
        if selected is None:
            return None
        decodes, prompts = selected
        requests, counts, num_decodes = decodes, [1] * len(decodes), len(decodes)
        left = self.max_batch_tokens - num_decodes
        reserved = max(1, self.max_batch_tokens // PREFILL_SHARE) if prompts else 0
        if left < reserved:  # they take turns
            return None
        if prompts:
            work, _ = self._prefill.choose(prompts, left, num_free_rows=0, num_decodes=num_decodes)
            requests += [request for request, _ in work]
            counts += [num_new for _, num_new in work]
        if not requests:
            return None
        try:
            batch = self.planner.ahead.plan([request.sequence for request in requests], counts)
        except OutOfPagesError:  # to preempt, all must be known
            return None
        self._step += 1
        self.waiting.step, self._num_ahead = self._step, self._num_ahead + 1
        self._mark_scheduled(requests, counts)
        self.num_tokens += batch.num_tokens
        return ScheduledStep(tuple(requests), batch)

    def refund_ahead(self, step: ScheduledStep, going_on: Iterable[Request]) -> None:
        """Take back what tenants were charged for a step ahead, but for the requests that go on.

        The tokens ahead of the others are dropped: they have ended or failed, or the step is planned again.
        """
        kept, ends = set(going_on), step.batch.cu_seqlens_q.tolist()
        for request, begin, end in zip(step.requests, ends, ends[1:], strict=False):
            if request not in kept:
                self.waiting.charge(request, begin - end)

    def _may_admit(self) -> bool:
        """Whether the next step may admit a waiting request."""
        if not self.waiting:
            return False
        starving = self._fairness.starving_request(self.running, self._step + 1)
        if self.waiting.has_parked or starving is not None:
            return True
        if len(self.running) >= self.max_num_seqs:
            return False
        return not self._is_queue_blocked or self._num_ahead >= MAX_AHEAD_WHILE_BLOCKED

    def _make_room_for_starving(self) -> Request | None:
        """The request to admit first, if a tenant starves; preempts another's if it has to."""
        running, fairness = self.running, self._fairness
        starving = fairness.starving_request(running, self._step)
        if starving is None:
            return None
        needs_pages = not self._prefill.fits(starving, running)
        if needs_pages and not fairness.may_take_pages(starving, running):
            return None  # it waits for its turn in the queue
        if needs_pages or len(running) >= self.max_num_seqs:
            victim = fairness.victim(starving, running, self._step, needs_pages=needs_pages)
            if victim is not None:
                self.num_fair_preemptions += 1
                self._release_and_requeue(victim)
        return starving

    def _plan_until_it_fits(
        self, work: Work, admitted: Work, *, is_isolated: bool
    ) -> ScheduledStep | None:
        while work or admitted:
            chosen = work + admitted
            try:
                batch = self._plan(chosen)
            except OutOfPagesError as error:
                work = self._ask_for_less(work, admitted, error, is_isolated=is_isolated)
                continue
            for request, _ in admitted:
                self._begin_to_run(request)
                self._requeued.discard(request)
                request.last_step = self._step
            # Admissions were charged when they were chosen.
            self._mark_scheduled([request for request, _ in work], [count for _, count in work])
            self.num_tokens += batch.num_tokens
            return ScheduledStep(tuple([request for request, _ in chosen]), batch)
        return None

    def _mark_scheduled(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Note the step of running requests, and charge their tenants for its tokens."""
        step = self._step
        for request in requests:
            request.last_step = step
        if self.waiting.is_multi_tenant:
            for request, num_new in zip(requests, counts, strict=True):
                self.waiting.charge(request, num_new)

    def _begin_to_run(self, request: Request) -> None:
        self.running.append(request)
        if self._loads is not None:
            self._loads.forget(request)
        request.admitted_step, request.num_output_admitted = self._step, len(request.output_ids)

    def _plan(self, chosen: Work) -> AttentionBatch:
        """`planner.plan`, with drafts appended to their sequences; undone if it raises."""
        drafting = [request for request, _ in chosen if request.draft]
        for request in drafting:
            request.sequence.tokens.extend(request.draft)
            request.sequence.num_draft = len(request.draft)
        try:
            return self.planner.plan(
                [request.sequence for request, _ in chosen], [num_new for _, num_new in chosen]
            )
        except BaseException:
            for request in drafting:
                tokens = request.sequence.tokens
                del tokens[len(tokens) - len(request.draft) :]
                request.sequence.num_draft = 0
            raise

    # -- choosing requests -------------------------------------------------------------------

    def next_isolated(self) -> Request | None:
        """The oldest request that failed since its last token; it runs alone until its next token.

        So a request that always fails takes no other with it. Running requests go first.
        """
        for queue in (self.running, self._requeued):
            failed = [request for request in queue if request.num_failed_steps]
            if failed:
                return min(failed, key=lambda request: request.id)
        return None

    def mark_isolated(self, request: Request) -> None:
        """Let a failed request run alone when it waits; a running one does so anyway."""
        if request in self.waiting:
            self._requeued.add(request)

    def blocked_request(self) -> Request | None:
        """The request that `schedule` found no pages for when it raised OutOfPagesError."""
        return self._blocked

    def _schedule_isolated(self, isolated: Request) -> tuple[Work, Work]:
        """Work and admissions of a step that runs one request alone."""
        num_new = min(isolated.sequence.num_uncomputed, self.max_batch_tokens)
        if isolated in self.running:
            return [(isolated, num_new)], []
        if len(self.running) >= self.max_num_seqs:  # children took the last row
            self._preempt([])
        self.waiting.admit(isolated)
        self.waiting.charge(isolated, num_new)
        return [], [(isolated, num_new)]

    def _choose(self, *, admit: bool = True, first: Request | None = None) -> tuple[Work, Work]:
        """Work of running requests in this step, and admissions; `first` before all others."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        num_draft = 0
        for request in self.running:
            sequence = request.sequence
            if len(sequence.tokens) - sequence.num_computed > 1:
                prefills.append(request)
            else:
                decodes.append(request)
                num_draft += len(request.draft)
        budget, num_decodes = self.max_batch_tokens, len(decodes)
        rows = self.max_num_seqs - len(self.running) if admit and self.waiting else 0
        if first is None and self._defers_admissions(rows, budget - num_decodes, prefills):
            rows = 0
        work, admitted, used = Work(), Work(), 0
        if prefills or rows or self.waiting.has_parked:
            reserved = budget // PREFILL_SHARE or int(not self._step % PREFILL_SHARE)
            prefill_budget = max(budget - num_decodes, reserved)
            work, admitted = self._prefill.choose(
                prefills,
                prefill_budget,
                num_free_rows=rows,
                num_decodes=num_decodes,
                first=first,
            )
            used = sum(num_new for _, num_new in work + admitted)
        if admit:
            self._is_queue_blocked, self._num_ahead = rows > 0 and used == 0, 0
        left = budget - used
        if left < num_decodes:  # take turns: requests that have paused longest go first
            turn = self._round_robin % num_decodes
            decodes = decodes[turn:] + decodes[:turn]
            decodes = sorted(decodes, key=lambda request: request.last_step)[:left]
            self._round_robin += left
        if not num_draft:
            return [(request, 1) for request in decodes] + work, admitted
        left -= len(decodes)
        decode_work = []
        for request in decodes:
            request.draft = request.draft[:left]
            left -= len(request.draft)
            decode_work.append((request, 1 + len(request.draft)))
        return decode_work + work, admitted

    def _defers_admissions(self, num_free_rows: int, left: int, prefills: list[Request]) -> bool:
        """Whether to admit nothing in this step, so that more prompts are prefilled together."""
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

    def _ask_for_less(
        self, work: Work, admitted: Work, error: OutOfPagesError, *, is_isolated: bool
    ) -> Work:
        """Give up drafts, admissions or a running request; returns the work that is left.

        Removes from `admitted` in place. Raises `error` if a single request does not fit.
        """
        if any(request.draft for request, _ in work):
            return _without_drafts(work)
        if admitted and (work or len(admitted) > 1):
            # One request stays in the step: without work, the first admission.
            num_missing = max(1, error.asked - error.free - error.evictable)
            self._undo_admissions(admitted, len(admitted) - (not work), num_missing)
            return work
        if len(self.running) + len(admitted) < 2:
            self._blocked = (work or admitted)[0][0]
            raise error  # leases outside the engine hold the pages
        if not admitted:
            return self._preempt(work) or self._choose(admit=False)[0]
        if is_isolated:  # the running requests pause in this step anyway
            return self._preempt(work)
        # Do not preempt for it: the preempted request would come back and preempt in turn, for
        # ever. Admit nothing, run the others.
        self._undo_admissions(admitted, len(admitted))
        return self._choose(admit=False)[0]

    def _undo_admissions(self, admitted: Work, limit: int, num_missing: int | None = None) -> None:
        """Queue up to `limit` of the newest admissions again, until `num_missing` pages are saved.

        Counts what an admission saves at most: new pages, and cached pages that it would pin. If
        others pin them too, the plan fails again and the next admission goes.
        """
        page_size = self.planner.page_size
        while limit and (num_missing is None or num_missing > 0):
            request, num_new = admitted.pop()
            self.waiting.charge(request, -num_new)
            self.waiting.undo_admit(request)
            limit -= 1
            if num_missing is not None:
                num_cached = len(request.sequence.tokens) - (request.rank - request.virtual_arrival)
                num_missing -= -(-num_new // page_size) + num_cached // page_size

    def _preempt(self, work: Work) -> Work:
        """Requeue a running request; returns `work` without it.

        No admission of this step attaches to its pages: those were undone first.
        """
        oldest = min(self.running, key=lambda request: (request.virtual_arrival, request.id))
        others = [request for request in self.running if request is not oldest]
        # The tenant goes before the priority: tenants set priorities, for their own requests only.
        num_running = Counter(request.tenant for request in others)
        newest_id = {
            request.tenant: request.id for request in sorted(others, key=lambda other: other.id)
        }
        victim = min(
            others,
            key=lambda request: (
                -num_running[request.tenant],
                -newest_id[request.tenant],
                request.priority,
                _recompute_cost(request),
                -request.id,
            ),
            default=oldest,
        )
        self._release_and_requeue(victim)
        return [(request, num_new) for request, num_new in work if request is not victim]

    def _release_and_requeue(self, victim: Request) -> None:
        """Preempt a running request; its published pages stay cached."""
        self.num_preemptions += 1
        victim.preemptions += 1
        self.planner.release([victim.sequence])
        self.requeue([victim])


def _without_drafts(work: Work) -> Work:
    """Clear the drafts of requests; returns the work without their tokens."""
    tokens = [(request, num_new - len(request.draft)) for request, num_new in work]
    for request, _ in work:
        request.draft = ()
    return tokens


def _recompute_cost(request: Request) -> int:
    """Tokens that a running request has computed itself and may have to compute again."""
    sequence = request.sequence
    return sequence.num_computed - sequence.num_read - sequence.num_shared
