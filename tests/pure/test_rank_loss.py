"""An executor that has ended, as one whose processes have gone, ends its engine: no retry, no rebuild."""

import asyncio
from collections.abc import Sequence

import pytest

from ramify.engine.step import StepPlan, StepResult
from ramify.errors import EngineStoppedError, RankLostError
from ramify.params import SamplingParams
from ramify.server.errors import as_api_error
from ramify.server.http import uvicorn_server
from ramify.testing import FakeExecutor
from tests.pure.async_bench import AsyncBench, run
from tests.pure.engine_bench import Bench
from tests.pure.live_server import LIMIT_S, live
from tests.pure.whole_steps import WholeSteps

PROMPT = [3, 1, 4, 1, 5]
REASON = "rank 1 of 2 (process 17) was ended by SIGKILL"


def test_a_step_whose_executor_has_ended_raises() -> None:
    """Again in every later step; nothing is computed again, and nothing rebuilt."""
    bench = Bench(fail_at=range(1, 100), error=RankLostError(REASON))
    bench.core.add_request(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
    bench.core.step()

    for _ in range(2):
        with pytest.raises(RankLostError, match="SIGKILL; the engine has ended: make another"):
            bench.core.step()

    failures = bench.core.stats().failures
    assert (failures.failed_steps, failures.rebuilds) == (0, 0)


class Dying(WholeSteps):
    """An executor whose second step raises, and which has ended by the time pages are to be erased."""

    def __init__(self, inner: FakeExecutor, error: Exception) -> None:
        self.inner, self.error, self.num_steps = inner, error, 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.num_steps > 1:
            raise self.error
        return self.inner.execute(plan)

    def zero_pages(self, pages: Sequence[int]) -> None:
        raise RankLostError(REASON)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_pages(pairs)


@pytest.mark.parametrize("error", [RankLostError(REASON), RuntimeError("broken")])
def test_an_executor_that_ends_during_a_rollback_leaves_consistent_books(error: Exception) -> None:
    """Requests are queued before pages are erased: each waits, once, and may be aborted."""
    bench = Bench()
    bench.core.executor = Dying(bench.device, error)
    keys = [bench.add([last, *PROMPT], max_tokens=9, ignore_eos=True) for last in (1, 2)]
    bench.step()

    for _ in range(2):
        with pytest.raises(RankLostError, match="SIGKILL"):
            bench.core.step()

        scheduler = bench.core.scheduler
        assert (len(scheduler.waiting), len(scheduler.running)) == (2, 0)
        bench.core.context.check(bench.core.live)
    assert bench.core.stats().failures.rebuilds == 0
    for key in keys:
        bench.core.abort(key)
    assert not bench.core.has_unfinished
    assert bench.core.cache.stats().private_pages == 0


def test_readers_get_the_loss_and_the_engine_is_dead() -> None:
    """The error of the reader is that of the executor, and so is that of every later request."""
    bench = AsyncBench(fail_at=range(1, 100), error=RankLostError(REASON))

    async def main() -> None:
        llm = bench.llm
        with pytest.raises(RankLostError):
            await llm.generate(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
        with pytest.raises(RankLostError):
            await llm.generate(PROMPT)
        assert str(llm.health().state) == "dead"
        assert REASON in str(llm.health().error)

    run(main())


def test_an_idle_engine_ends_too() -> None:
    """Also if its thread has not begun: whoever asks for its health sees it, before a request fails."""
    bench = AsyncBench()

    async def main() -> None:
        llm = bench.llm
        llm._engine_thread.end_with(RankLostError(REASON))
        await asyncio.wrap_future(llm._engine_thread.ended)
        assert str(llm.health().state) == "dead"
        llm._engine_thread.end_with(RankLostError("another"))  # nothing comes of it
        with pytest.raises(EngineStoppedError, match="SIGKILL"):
            await llm.generate(PROMPT)

    run(main())


def test_the_server_says_when_to_come_back() -> None:
    """503 with `Retry-After`, without process ids; of an engine that was closed there is no such time."""
    response = as_api_error(RankLostError(REASON))

    assert (response.status, response.code) == (503, "engine_stopped")
    assert response.headers == {"Retry-After": "30"}
    assert "17" not in response.message
    assert as_api_error(EngineStoppedError("closed")).headers == {}


def test_a_server_whose_engine_has_ended_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds in which it answers 503; whoever started the process starts another one."""
    monkeypatch.setattr(uvicorn_server, "CHECK_TICKS", 1)
    monkeypatch.setattr(uvicorn_server, "LOST_ENGINE_S", 0.5)
    with live(fail_at=range(1, 100), error=RankLostError(REASON)) as server:
        assert server.get("/livez").status_code == 200
        assert server.ask().status_code == 503
        assert server.get("/livez").status_code == 503

        server.thread.join(LIMIT_S)

        assert server.listener.has_failed
