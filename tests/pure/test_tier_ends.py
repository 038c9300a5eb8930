"""The ways an engine with tiers ends: the stores are closed in each, so that the next one may open them."""

import asyncio
import gc

import pytest

from ramify.engine.async_llm import AsyncLLM
from ramify.engine.llm import LLM
from ramify.errors import EngineStoppedError
from ramify.params import SamplingParams
from tests.pure.test_tiering import A
from tests.pure.tier_bench import TierBench

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


def test_an_engine_that_ends_by_a_bug_closes_its_stores_and_writes_nothing() -> None:
    """What is in the pool may be wrong; the directory is free at once, not when the engine is collected."""
    bench = TierBench(fail_at={1}, error=SystemExit("broken"))

    async def main() -> None:
        llm = AsyncLLM.from_core(bench.core)
        with pytest.raises(EngineStoppedError, match="broken"):
            await llm.generate(A, PARAMS)
        await asyncio.to_thread(llm._engine_thread.join)

    asyncio.run(main())

    assert bench.mover.is_closed
    assert bench.tiering.counts.queued == 0


def test_a_page_that_cannot_be_copied_at_the_end_keeps_no_store_open() -> None:
    """The error is raised, and the stores are closed all the same."""
    bench = TierBench()
    bench.answer(A)

    def fail(page: int, into: memoryview) -> None:
        raise OSError("broken")

    bench.device.read_page = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="broken"):
        bench.core.close()

    assert bench.mover.is_closed
    bench.core.close()


def test_an_llm_whose_requests_cannot_be_aborted_closes_its_stores() -> None:
    """`LLM.close` raises what went wrong."""
    bench = TierBench()
    llm = LLM.from_core(bench.core)
    llm.add_request(A, PARAMS)
    bench.core.abort = _raise  # type: ignore[method-assign,assignment]

    with pytest.raises(RuntimeError, match="lost"):
        llm.close()

    assert bench.mover.is_closed


def _raise(request_id: int) -> None:
    raise RuntimeError("lost")


def test_an_engine_that_nobody_closes_frees_its_stores_when_it_is_collected() -> None:
    """The finalizer's last resort."""
    bench = TierBench()
    mover = bench.mover
    assert not mover.is_closed

    del bench
    gc.collect()

    assert mover.is_closed
