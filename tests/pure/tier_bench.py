"""An engine with cache tiers over a fake device, and a mover that works when the test says so."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ramify.engine.tier_parts import STAGING_BYTES, STUCK_S, TierParts
from ramify.engine.tiering import EngineTiering
from ramify.kv.mover_jobs import (
    PageLookUp,
    PageRead,
    PageWrite,
    Probe,
    ReaderJob,
    Removal,
    Removed,
    Result,
)
from ramify.kv.offload import StoreJobs
from ramify.kv.stores.memory import MemoryStore
from ramify.kv.stores.page_store import PageStore
from ramify.outputs import Explanation, StepOutput
from ramify.params import SamplingParams
from ramify.step_cost import CostModel
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import Bench

POISON = 0xA5


class ManualMover:
    """Carries out jobs one by one; `wait` carries out one if `works_in_wait`."""

    def __init__(self, stores: Sequence[PageStore], *, works_in_wait: bool = True) -> None:
        self.jobs = StoreJobs(stores)
        self.works_in_wait, self.is_closed = works_in_wait, False
        self.writes: deque[PageWrite | Removal] = deque()
        self.reads: list[PageRead] = []
        self.look_ups: deque[PageLookUp] = deque()
        self.answer_s = 0.0  # that a look-up is said to have taken
        self.results: list[Result] = []

    def write(self, waiting: deque[PageWrite]) -> None:
        while waiting:
            self.writes.append(waiting.popleft())

    def remove(self, removal: Removal) -> None:
        self.writes.append(removal)

    def read(self, job: ReaderJob) -> None:
        if isinstance(job, Probe):
            self.results.append(self.jobs.probe(job))
            return
        if isinstance(job, PageLookUp):
            self.look_ups.append(job)
            return
        for view in job.views:  # whatever is used of it must come from the store
            view[:] = bytes([POISON]) * len(view)
        self.reads.append(job)

    def run_look_up(self) -> None:
        """The oldest look-up."""
        if self.look_ups:
            answer = self.jobs.look_up(self.look_ups.popleft())
            self.results.append(replace(answer, end_s=answer.look_up.begin_s + self.answer_s))

    def run_write(self) -> None:
        """The oldest job of the writer."""
        if not self.writes:
            return
        job = self.writes.popleft()
        if isinstance(job, Removal):
            self.results.append(Removed(job, self.jobs.remove(job.hashes)))
        else:
            self.results += self.jobs.write([job])
            job.data[:] = bytes([POISON]) * len(job.data)

    def run_read(self, number: int = 0) -> None:
        """A job of the readers; any may come first."""
        if self.reads:
            self.results.append(self.jobs.read(self.reads.pop(number % len(self.reads))))

    def run_all(self) -> None:
        while self.writes:
            self.run_write()
        while self.look_ups:
            self.run_look_up()
        while self.reads:
            self.run_read()

    def take_results(self) -> list[Result]:
        results, self.results = self.results, []
        return results

    def wait(self, timeout_s: float) -> bool:
        if self.works_in_wait and not self.results:
            if self.look_ups:
                self.run_look_up()
            elif self.reads:
                self.run_read()
            else:
                self.run_write()
        return bool(self.results)

    def kill(self) -> None:
        """Drop all jobs, as the end of a process does. Its collector calls `close` at any time."""
        self.writes.clear()
        self.look_ups.clear()
        self.reads.clear()

    def close(self, timeout_s: float) -> bool:
        self.run_all()
        self.is_closed = True
        return True


def memory_tier(tier: str, num_pages: int, page_bytes: int) -> MemoryStore:
    """A store in memory under the name of another tier."""
    store = MemoryStore(page_bytes, num_pages)
    store.tier = tier
    return store


@dataclass
class TierBench(Bench):
    """A bench whose pool is backed by stores in memory."""

    pool_tokens: int = 64
    max_model_len: int = 256
    step_s: float = 0.0  # no load is late
    token_s: float = 1.0  # that a token is expected to take
    host_pages: int = 0
    disk_pages: int = 256
    remote_pages: int = 0
    stores: list[PageStore] = field(default_factory=list)
    works_in_wait: bool = True
    staging_bytes: int = STAGING_BYTES
    stuck_s: float = STUCK_S
    explanations: dict[int, Explanation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        page_bytes = FakeExecutor(1, self.page_size).page_bytes
        if not self.stores:
            sizes = {"host": self.host_pages, "disk": self.disk_pages, "remote": self.remote_pages}
            self.stores = [
                memory_tier(tier, count, page_bytes) for tier, count in sizes.items() if count
            ]
        self.mover = ManualMover(self.stores, works_in_wait=self.works_in_wait)
        self.tiers = lambda device: TierParts(
            device=device,
            stores=tuple(self.stores),
            mover=self.mover,
            step_model=CostModel(step_s=0.0, token_s=self.token_s, read_s=0.0),
            staging_bytes=self.staging_bytes,
            distant="remote" if any(store.tier == "remote" for store in self.stores) else "",
            stuck_s=self.stuck_s,
        )
        super().__post_init__()

    @property
    def tiering(self) -> EngineTiering:
        tiering = self.core.tiering
        assert tiering is not None
        return tiering

    def check(self) -> None:
        super().check()
        self.core.context.check(self.core.live)

    def answer(self, prompt: Sequence[int], max_tokens: int = 1) -> int:
        """Answer a prompt with nothing else to do, and explain its miss; returns its id."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request_id = self.core.add_request(prompt, params, explain=True)
        self.tokens[request_id] = []
        self.run()
        return request_id

    def step(self) -> list[StepOutput]:
        events = super().step()
        for event in events:
            if event.prefix is not None and event.prefix.explanation is not None:
                self.explanations[event.request_id] = event.prefix.explanation
        return events

    def read_tokens(self, request_id: int) -> int:
        """Tokens of its prompt that were in the pool when it began."""
        return self.outputs[request_id].cache.read_tokens

    def settle(self) -> None:
        """Finish all that the mover has to do, and take its results."""
        is_busy = True
        while is_busy:
            self.core.tend_tiers()
            is_busy = bool(
                self.mover.writes or self.mover.reads or self.mover.look_ups or self.mover.results
            )
            self.mover.run_all()
            self.tiering.poll()
        self.core.scheduler.wake(self.tiering.take_awake())

    def num_stored(self, tier: str) -> int:
        counts = {store.tier: store.counts().num_pages for store in self.stores}
        return counts[tier]
