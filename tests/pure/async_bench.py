"""An `AsyncLLM` over a fake device whose steps a test can hold up."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.engine.step import StepPlan, StepResult
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import Bench, expected
from tests.pure.whole_steps import WholeSteps

T = TypeVar("T")
LIMIT_S = 60.0  # a test that hangs fails with its stack


class Gate(WholeSteps):
    """An executor that computes a step when it is allowed one."""

    def __init__(self, device: FakeExecutor) -> None:
        self.device = device
        self.allowed = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)
        self.is_open = True

    def execute(self, plan: StepPlan) -> StepResult:
        if not self.is_open:
            self.reached.release()
            assert self.allowed.acquire(timeout=LIMIT_S)
        return self.device.execute(plan)

    def zero_pages(self, pages: Any) -> None:
        self.device.zero_pages(pages)

    def copy_pages(self, pairs: Any) -> None:
        self.device.copy_pages(pairs)

    async def arrive(self) -> None:
        """Until a step stands at the gate."""
        assert await asyncio.to_thread(self.reached.acquire, True, LIMIT_S)

    def open(self) -> None:
        self.is_open = True
        self.allowed.release()


class AsyncBench:
    """`llm` over `bench.core`; nobody but the engine's thread touches the core while it runs."""

    def __init__(self, *, closed: bool = False, **options: Any) -> None:
        self.bench = Bench(**options)
        self.gate = Gate(self.bench.device)
        self.gate.is_open = not closed
        self.bench.core.executor = self.gate
        self.llm = AsyncLLM.from_core(self.bench.core)

    def assert_nothing_left(self) -> None:
        """When the thread is over: no request, no page, no lease."""
        core = self.bench.core
        assert not core.has_unfinished
        assert not core.live
        assert not self.llm._engine_thread._collectors
        for pin in core.cache.pins():
            core.cache.unpin(pin)
        stats = core.cache.stats()
        assert (stats.num_leases, stats.private_pages) == (0, 0)
        core.cache.clear()
        assert core.cache.stats().free_pages == core.cache.num_pages
        core.cache.check()


async def no_request(llm: AsyncLLM) -> bool:
    """Whether nothing is live, once the engine has done what it was asked before."""

    def look(core: EngineCore) -> bool:
        core.cache.check()
        return not core.live

    return await llm.run(look)


async def until_idle(llm: AsyncLLM) -> None:
    while not await no_request(llm):
        pass


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`; no task may be left but the one that asks."""

    async def watched() -> T:
        result = await asyncio.wait_for(main, LIMIT_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(watched())


__all__ = ["AsyncBench", "expected", "no_request", "run", "until_idle"]
