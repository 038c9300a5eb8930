"""The state that steps read and write, as one object that recovery can reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.types import CacheStats
from ramify.config import ResolvedConfig
from ramify.engine.request import Request
from ramify.engine.scheduling.scheduler import Scheduler
from ramify.engine.step import Executor, OverlappingExecutor
from ramify.engine.tier_parts import TierParts, TierStats
from ramify.engine.tiered_executor import TieredExecutor
from ramify.engine.tiering import EngineTiering
from ramify.errors import InvariantError
from ramify.kv.block_table import PagedBlockTable


@dataclass(slots=True)
class FailureCounts:
    """Failures since the engine was built."""

    failed_steps: int = 0  # forward passes that raised
    failed_requests: int = 0  # rolled back because their own logits were not finite
    out_of_memory: int = 0  # failed steps that were retried with half the token budget
    errors: int = 0  # requests that ended with a StepFailedError
    evicted_suspect_pages: int = 0  # evicted because a request that had read them failed
    audits: int = 0
    mismatches: int = 0  # audits that raised
    rebuilds: int = 0  # times that all bookkeeping was built anew


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Requests now, and work since the engine was built."""

    num_running: int  # each answer of a request with n > 1 counts
    num_waiting: int
    num_steps: int
    num_computed_tokens: int  # query rows of all steps: prompt, output and draft tokens
    num_preemptions: int
    cache: CacheStats
    num_fair_preemptions: int  # of `num_preemptions`, for a tenant that had no row
    failures: FailureCounts  # a copy
    num_draft_tokens: int  # verified
    num_accepted_draft_tokens: int
    num_hit_checks: int  # cache hits that were recomputed cold and compared, see `verify_sample`
    num_hit_mismatches: int
    num_stuck_steps: int  # steps that took longer than `step_timeout_s`
    # To compute before a further prompt: of the queue, of running prompts.
    num_waiting_tokens: int = 0
    tiers: dict[str, TierStats] = field(default_factory=dict)  # by name: host, disk
    tier_totals: dict[str, int] = field(default_factory=dict)  # see `EngineTiering.totals`


class EngineContext:
    """Prefix cache, block table, planner, scheduler and executor of one engine.

    `reset` replaces table, planner and scheduler: keep a reference to the context, not to these.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        executor: Executor,
        clock: Callable[[], float],
        tiers: TierParts | None = None,
    ) -> None:
        self.config = config
        self.cache = PrefixCache(
            config.num_pages,
            config.page_size,
            policy=config.requested.cache.policy,
            window=config.window,
            clock=clock,
        )
        self.tiering: EngineTiering | None = None
        if tiers is not None:
            self.tiering = EngineTiering(
                self.cache,
                tiers,
                clock,
                max_step_tokens=config.max_batch_tokens,
                max_model_len=config.max_model_len,
            )
        self.set_executor(executor)
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_draft_tokens = self.num_accepted_draft_tokens = 0
        self.failures = FailureCounts()
        self.reset()

    def set_executor(self, executor: Executor) -> None:
        """Run the forward passes with `executor` from now on."""
        tiering, may_overlap = self.tiering, self.config.requested.scheduler.overlap != "off"
        self.executor = executor if tiering is None else TieredExecutor(executor, tiering)
        # None if no step may be begun ahead. With tiers none may: their threads write to pages, in no
        # order with the steps.
        self.overlapping: OverlappingExecutor | None = None
        if may_overlap and isinstance(self.executor, OverlappingExecutor):
            self.overlapping = self.executor

    def reset(self) -> None:
        """Replace block table, planner and scheduler with empty ones; keep the cache.

        Live requests are not notified; the caller does that.
        """
        config = self.config
        if self.tiering is not None:
            self.tiering.reset()
        self.table = PagedBlockTable(config.max_num_seqs, config.max_table_pages, config.page_size)
        cache_options = config.requested.cache
        self.planner = RadixAttentionPlanner(
            self.cache,
            self.table,
            share=cache_options.prefix_cache,
            partial_pages=cache_options.partial_pages,
        )
        self.scheduler = Scheduler(
            self.planner,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            coalesce_steps=config.requested.scheduler.coalesce_steps,
            fair_wait_steps=config.requested.scheduler.fair_wait_steps,
            loads=self.tiering,
        )

    def stats(
        self, *, num_hit_checks: int, num_hit_mismatches: int, num_stuck_steps: int
    ) -> EngineStats:
        """A snapshot, for the thread that runs the engine; with counters that others keep."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_steps=self.num_steps,
            num_computed_tokens=self.num_computed_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            cache=self.cache.stats(),
            num_fair_preemptions=self.scheduler.num_fair_preemptions,
            failures=replace(self.failures),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
            num_hit_checks=num_hit_checks,
            num_hit_mismatches=num_hit_mismatches,
            num_stuck_steps=num_stuck_steps,
            num_waiting_tokens=self.scheduler.num_waiting_tokens,
            tiers={} if self.tiering is None else self.tiering.stats(),
            tier_totals={} if self.tiering is None else self.tiering.totals(),
        )

    def check(self, live: Iterable[Request]) -> None:
        """Recount cache, block table and running requests. O(nodes + pages).

        Raises:
            InvariantError: they disagree, or one of the `live` requests is in no queue.
        """
        self.cache.check()
        if self.tiering is not None:
            self.tiering.check()
        rows, private = set[int](), set[int]()
        num_private = 0
        for request in self.scheduler.running:
            sequence = request.sequence
            if sequence.row is None or sequence.lease is None:
                raise InvariantError(f"request {request.id} runs without a row or a lease")
            pages = self.table.pages(sequence.row)
            if pages != [*sequence.lease.pages, *sequence.private]:
                raise InvariantError(
                    f"row {sequence.row} has not the pages of request {request.id}"
                )
            if sequence.num_computed > len(pages) * self.config.page_size:
                raise InvariantError(f"request {request.id} has more tokens computed than pages")
            if any(self.cache.is_free(page) for page in pages):
                raise InvariantError(f"request {request.id} reads a page that is free")
            rows.add(sequence.row)
            owned = [page for page in sequence.private if page != self.cache.num_pages]
            private.update(owned)
            num_private += len(owned)
        if len(rows) != len(self.scheduler.running):
            raise InvariantError("two requests have one row of the block table")
        if len(private) != num_private or num_private > self.cache.stats().private_pages:
            raise InvariantError("a private page belongs to two requests, or to the cache")
        if any(not request.is_finished for request in live) and not self.scheduler.has_unfinished:
            raise InvariantError("a live request is in no queue")
