"""An engine in virtual time: steps take what a cost model says, reads what a store's link says."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ramify.config import EngineConfig, resolve
from ramify.engine.core import EngineCore
from ramify.engine.step import StepPlan, StepResult
from ramify.engine.tier_measurements import PROBE_LIMIT_S
from ramify.engine.tier_parts import TierParts
from ramify.engine.tiering import EngineTiering
from ramify.kv.mover_jobs import (
    PageLookUp,
    PageRead,
    PageWrite,
    Probe,
    ProbeEnded,
    ReaderJob,
    Removal,
    Removed,
    Result,
)
from ramify.kv.offload import NUM_READERS, PROBE_PAGES, StoreJobs
from ramify.kv.stores.memory import MemoryStore
from ramify.params import SamplingParams
from ramify.step_cost import CostModel
from ramify.testing import FakeExecutor
from tests.pure.tier_bench import memory_tier

PAGE, VOCAB = 4, 50
MAX_LEN = 512


@dataclass
class Link:
    """What reads of a store take: calls wait for the latency at the same time, pages for each other."""

    latency_s: float
    page_s: float


@dataclass
class VirtualTime:
    """Seconds, which pass when an engine computes or waits."""

    now: float = 0.0


class TimedExecutor:
    """Lets time pass for each step of another executor."""

    def __init__(self, inner: FakeExecutor, cost: CostModel, time: VirtualTime) -> None:
        self.inner, self.cost, self.time = inner, cost, time

    def begin(self, plan: StepPlan) -> None:
        batch = plan.batch
        num_reads = float(batch.positions.sum()) + batch.num_tokens
        self.time.now += self.cost.step(batch.num_tokens, num_reads)
        self.inner.begin(plan)

    def finish(self) -> StepResult:
        return self.inner.finish()

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_pages(pairs)


class VirtualMover:
    """Readers over one store whose reads end when its link says; writes take no time."""

    def __init__(self, store: MemoryStore, link: Link, time: VirtualTime) -> None:
        self.jobs, self.link, self.time = StoreJobs([store]), link, time
        self.free_s = [0.0] * NUM_READERS  # when each reader is
        self.link_free_s = 0.0
        self.ended: list[Result] = []
        # In flight: end, number, job, begin and the result of a probe or a look-up.
        self.flying: list[tuple[float, int, ReaderJob, float, Result | None]] = []
        self.num_reads = 0

    def write(self, waiting: deque[PageWrite]) -> None:
        while waiting:
            self.ended += self.jobs.write([waiting.popleft()])

    def remove(self, removal: Removal) -> None:
        self.ended.append(Removed(removal, self.jobs.remove(removal.hashes)))

    def read(self, job: ReaderJob) -> None:
        begin_s = max(self.time.now, heapq.heappop(self.free_s))
        result: Result | None = None
        if isinstance(job, PageLookUp):
            answer = self.jobs.look_up(job)
            end_s = begin_s + self.link.latency_s
            took_s = end_s - self.time.now
            result = replace(answer, end_s=job.begin_s + took_s)
        elif isinstance(job, Probe):
            result, end_s = self._probe(job, begin_s)
        else:
            end_s = self._transfer(begin_s, len(job.pages))
        heapq.heappush(self.free_s, end_s)
        self.num_reads += 1
        heapq.heappush(self.flying, (end_s, self.num_reads, job, begin_s, result))

    def _transfer(self, begin_s: float, num_pages: int) -> float:
        start_s = max(begin_s + self.link.latency_s, self.link_free_s)
        self.link_free_s = start_s + num_pages * self.link.page_s
        return self.link_free_s

    def _probe(self, job: Probe, begin_s: float) -> tuple[ProbeEnded, float]:
        reads: list[tuple[int, float]] = []
        at_s = begin_s
        for num_pages in (1, 1, PROBE_PAGES):
            if at_s > begin_s + PROBE_LIMIT_S:
                break
            end_s = self._transfer(at_s, num_pages)
            reads.append((num_pages, end_s - at_s))
            at_s = end_s
        return ProbeEnded(job, tuple(reads)), at_s

    def take_results(self) -> list[Result]:
        while self.flying and self.flying[0][0] <= self.time.now:
            end_s, _, job, begin_s, result = heapq.heappop(self.flying)
            if isinstance(job, PageRead):
                result = replace(self.jobs.read(job), begin_s=begin_s, end_s=end_s)
            assert result is not None
            self.ended.append(result)
        results, self.ended = self.ended, []
        return results

    def wait(self, timeout_s: float) -> bool:
        if not self.ended:
            ends = [self.flying[0][0]] if self.flying else []
            self.time.now = max(self.time.now, min([*ends, self.time.now + timeout_s]))
        return bool(self.ended) or bool(self.flying and self.flying[0][0] <= self.time.now)

    def close(self, timeout_s: float) -> bool:
        return True


@dataclass
class VirtualEngine:
    """An engine whose requests are timed.

    Args:
        cost: what its steps take.
        model: what it believes that they take; None: the truth.
        store: of its tier; None: it has no tier.
    """

    cost: CostModel
    model: CostModel | None = None
    store: MemoryStore | None = None
    link: Link = field(default_factory=lambda: Link(0.0, 0.0))
    is_calibrated: bool = False
    max_num_seqs: int = 8
    staging_pages: int = 1024

    def __post_init__(self) -> None:
        self.time = VirtualTime()
        options = EngineConfig.of(
            kv_cache_tokens=4 * MAX_LEN,
            page_size=PAGE,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=128,
        )
        config = resolve(options, model_max_len=MAX_LEN, token_bytes=1, free_memory=0)
        device = FakeExecutor(config.num_pages, PAGE, vocab_size=VOCAB)
        tiers = None
        if self.store is not None:
            tiers = TierParts(
                device=device,
                stores=(self.store,),
                mover=VirtualMover(self.store, self.link, self.time),
                step_model=self.model or self.cost,
                is_calibrated=self.is_calibrated,
                distant="remote" if self.store.tier == "remote" else "",
                staging_bytes=self.staging_pages * device.page_bytes,
            )
        self.core = EngineCore(
            config,
            TimedExecutor(device, self.cost, self.time),
            vocab_size=VOCAB,
            clock=lambda: self.time.now,
            tiers=tiers,
        )

    @property
    def tiering(self) -> EngineTiering:
        tiering = self.core.tiering
        assert tiering is not None
        return tiering

    def add(self, prompt: Sequence[int], max_tokens: int = 1) -> int:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.core.add_request(prompt, params)

    def finish(self) -> dict[int, float]:
        """Run to the end; returns when each request had its first token."""
        first_s: dict[int, float] = {}
        while self.core.has_unfinished:
            for event in self.core.step():
                if event.new_token_ids:
                    first_s.setdefault(event.request_id, self.time.now)
        return first_s

    def ttft(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of a prompt that the pool has nothing of."""
        self.core.cache.clear()
        begin_s = self.time.now
        request_id = self.add(prompt)
        seconds = self.finish()[request_id] - begin_s
        self.core.context.check(self.core.live)
        return seconds


def filled_store(prompt: Sequence[int], tier: str = "disk") -> MemoryStore:
    """A store that has the pages of a prompt; "remote" is beyond a network."""
    store = memory_tier(tier, 512, FakeExecutor(1, PAGE).page_bytes)
    engine = VirtualEngine(CostModel(0.0, 0.0, 0.0), store=store)
    engine.add(prompt)
    engine.finish()
    engine.core.close()
    return store
