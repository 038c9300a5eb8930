"""The clock of a request begins when its caller sends it, not when the running step ends."""

import asyncio
import threading

import pytest

from ramify.engine.request_options import RequestOptions
from ramify.engine.serving.engine_thread import EngineThread
from ramify.engine.serving.streams import LoopDispatcher, OutputCollector
from ramify.params import SamplingParams
from tests.pure.engine_bench import Bench


@pytest.mark.parametrize("num_answers", [1, 2])
def test_a_request_waits_from_when_it_was_sent(num_answers: int) -> None:
    """A request that comes while the engine is at work: that time is part of its queue and TTFT."""
    bench = Bench()
    engine_thread = EngineThread(bench.core)
    begun, release = threading.Event(), threading.Event()

    def work(core: object) -> None:
        begun.set()
        assert release.wait(60)
        bench.time += 7.0  # as long as a step takes

    async def run() -> None:
        engine_thread.call(work)
        assert begun.wait(60)
        collector = OutputCollector(LoopDispatcher(asyncio.get_running_loop()), final_only=True)
        params = SamplingParams(max_tokens=3, n=num_answers, temperature=1.0, ignore_eos=True)
        engine_thread.submit(collector, [1, 2, 3], params, RequestOptions(), prompt=None)
        release.set()
        output = None
        while output is None:
            await asyncio.wait_for(collector.wait(), 60)
            while (event := collector.take()) is not None:
                output = event.output or output

        assert output.metrics.queue_s == 7.0
        assert output.metrics.ttft_s == 7.0
        assert output.metrics.total_s == 7.0

    asyncio.run(run())
    engine_thread.stop()
    engine_thread.join(60)
