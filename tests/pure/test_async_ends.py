"""The ways an `AsyncLLM` ends: drain, close, an engine bug, program exit; who gets an error."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.engine.core import EngineCore
from ramify.errors import (
    DrainingError,
    EngineStoppedError,
)
from ramify.outputs import FinishReason
from ramify.params import SamplingParams
from tests.pure.async_bench import AsyncBench, expected, run, until_idle

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LEFT_OPEN = """
import asyncio
from ramify.engine.async_llm import AsyncLLM
from ramify.params import SamplingParams
from tests.pure.engine_bench import Bench

async def main():
    llm = AsyncLLM.from_core(Bench().core)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=1500, ignore_eos=True))
    print("begun" if (await anext(stream)).new_token_ids else "nothing")
    return llm, stream

kept = asyncio.run(main())
"""


def sampling(max_tokens: int, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)  # type: ignore[arg-type]


def test_draining_finishes_what_is_there() -> None:
    """`drain` refuses new requests with a retry hint, finishes live requests, then closes."""
    bench = AsyncBench(closed=True)

    async def main() -> None:
        llm = bench.llm
        task = asyncio.create_task(llm.generate(PROMPT, sampling(5)))
        await bench.gate.arrive()
        drained = asyncio.create_task(llm.drain())
        await asyncio.sleep(0)
        with pytest.raises(DrainingError) as refused:
            await llm.generate(PROMPT)
        assert refused.value.retry_after_s > 0
        assert str(llm.health().state) == "draining"
        bench.gate.open()
        assert await drained
        assert list((await task).token_ids) == expected(PROMPT, 5, ends=())
        with pytest.raises(EngineStoppedError, match="was closed"):
            await llm.generate(PROMPT)

    run(main())
    bench.assert_nothing_left()


def test_draining_ends_in_time() -> None:
    """When the drain timeout expires, an unfinished request ends with finish reason ABORT."""
    bench = AsyncBench(closed=True)

    async def main() -> None:
        llm = bench.llm
        task = asyncio.create_task(llm.generate(PROMPT, sampling(500)))
        await bench.gate.arrive()
        drained = asyncio.create_task(llm.drain(0.0))
        asyncio.get_running_loop().call_later(0.01, bench.gate.open)  # when time has run out
        assert not await drained
        assert (await task).finish_reason is FinishReason.ABORT

    run(main())
    bench.assert_nothing_left()


@pytest.mark.parametrize("used", [False, True])
def test_after_close_everything_is_an_error(used: bool) -> None:
    """`aclose` ends open streams with ABORT, later calls raise, and a second close does nothing."""
    bench = AsyncBench()

    async def main() -> None:
        llm = bench.llm
        stream = llm.stream(PROMPT, sampling(1500))
        if used:
            await anext(stream)
        await llm.aclose()
        await llm.aclose()
        if used:
            assert (await stream.whole()).finish_reason is FinishReason.ABORT
        with pytest.raises(EngineStoppedError):
            await llm.generate(PROMPT)
        with pytest.raises(EngineStoppedError):
            await llm.run(lambda core: core)
        assert not llm.health().is_alive
        assert await llm.drain()

    run(main())
    bench.assert_nothing_left()


def test_a_bug_in_the_engine_ends_every_stream_with_an_error() -> None:
    """An engine bug fails every pending request with EngineStoppedError, and health reports it."""
    bench = AsyncBench(fail_at={3}, error=SystemExit("broken"))

    async def main() -> None:
        llm = bench.llm
        tasks = [asyncio.create_task(llm.generate(PROMPT[k:], sampling(50))) for k in range(4)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineStoppedError) for result in results)
        assert "SystemExit: broken" in str(results[0])
        await asyncio.to_thread(llm._engine_thread.join)
        health = llm.health()
        assert not health.is_alive
        assert "broken" in str(health.error)
        with pytest.raises(EngineStoppedError, match="bug"):
            await llm.generate(PROMPT)
        await llm.aclose()

    run(main())


def test_whatever_a_call_raises_is_its_callers_alone() -> None:
    """`run` re-raises its callable's BaseException to its caller only; the engine goes on."""
    bench = AsyncBench()

    class Stopped(BaseException):
        pass

    def stop(core: EngineCore) -> None:
        raise Stopped

    async def main() -> None:
        async with bench.llm as llm:
            with pytest.raises(Stopped):
                await llm.run(stop)
            output = await llm.generate(PROMPT, sampling(5))
            assert list(output.token_ids) == expected(PROMPT, 5, ends=())

    run(main())
    bench.assert_nothing_left()


def test_health_tells_how_old_a_step_is() -> None:
    """`health` reports the age of the running step without waiting for that step."""
    bench = AsyncBench(closed=True)

    async def main() -> None:
        async with bench.llm as llm:
            assert llm.health().step_age_s is None
            task = asyncio.create_task(llm.generate(PROMPT, sampling(2)))
            await bench.gate.arrive()
            health = llm.health()
            assert health.is_alive
            assert health.is_busy
            assert health.step_age_s is not None
            bench.gate.open()
            await task
            stats = await llm.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_steps) == (0, 0, 2)
            assert not llm.health().is_busy

    run(main())


def test_an_event_loop_that_is_gone_holds_nothing() -> None:
    """The engine ends the requests of a closed event loop when it next notifies that loop."""
    bench = AsyncBench()
    streams = []

    async def begin() -> None:
        stream = bench.llm.stream(PROMPT, sampling(1500))
        streams.append(stream)
        await anext(stream)

    asyncio.run(begin())

    async def main() -> None:
        await until_idle(bench.llm)
        await bench.llm.aclose()

    run(main())
    bench.assert_nothing_left()


def test_a_program_that_closes_nothing_ends_all_the_same() -> None:
    """A program that leaves a stream open exits with code 0 and writes nothing to stderr."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])

    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_OPEN],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (run.returncode, run.stdout, run.stderr) == (0, "begun\n", "")
