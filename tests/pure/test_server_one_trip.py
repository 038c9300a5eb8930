"""One command into the engine: the reason of a miss, the pins and the hit are of one moment."""

import asyncio
import threading
from typing import Any

import pytest

from ramify.engine.step import StepPlan, StepResult
from ramify.errors import InvalidParamsError
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor
from tests.pure.async_bench import AsyncBench
from tests.pure.server_bench import ServerBench, chat, run
from tests.pure.whole_steps import WholeSteps

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PROMPT = "The violin is in the attic, behind the lamps of Mara. " * 8


def message(text: str, **others: Any) -> dict[str, Any]:
    """An Anthropic request whose user text is to be kept."""
    block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
    return body | others


class StepGate(WholeSteps):
    """An executor that stops before each step until it is allowed one."""

    def __init__(self, device: FakeExecutor) -> None:
        self._device = device
        self.allowed, self.reached = threading.Semaphore(0), threading.Semaphore(0)
        self.is_open = False
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.reached.release()
        if not self.is_open:
            assert self.allowed.acquire(timeout=60)
        return self._device.execute(plan)

    def zero_pages(self, pages: Any) -> None:
        self._device.zero_pages(pages)

    def copy_pages(self, pairs: Any) -> None:
        self._device.copy_pages(pairs)

    def close(self) -> None:
        """Stop before the next step; `arrive` waits for that."""
        self.is_open = False
        while self.reached.acquire(blocking=False):
            pass

    def open(self) -> None:
        self.is_open = True
        self.allowed.release()

    async def arrive(self) -> None:
        assert await asyncio.to_thread(self.reached.acquire, True, 60)


async def posted(bench: ServerBench, count: int) -> None:
    """Until so many commands wait for the end of the step."""
    while len(bench.llm._engine_thread._commands) < count:  # noqa: ASYNC110 - of another thread
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("count", [2, 5])
def test_equal_prompts_at_once_are_told_what_they_hit(count: int) -> None:
    """Whoever shares a prompt in flight is not told that it was cold."""
    bench = ServerBench()
    gate = StepGate(bench.device)
    bench.core.executor = gate

    async def main() -> list[dict[str, Any]]:
        async with bench.running():
            other = asyncio.ensure_future(bench.post(CHAT, chat("x", max_tokens=30)))
            await gate.arrive()
            posts = [asyncio.ensure_future(bench.post(CHAT, chat(PROMPT))) for _ in range(count)]
            await posted(bench, count)
            gate.open()
            answers = await asyncio.gather(*posts, other)
            return [answer.json["usage"]["ramify_cache"] for answer in answers[:count]]

    usages = run(main())

    assert sum(usage["shared_in_flight"] > 64 for usage in usages) == count - 1
    for usage in usages:
        cached = usage["read"] + usage["shared_in_flight"]
        miss = usage.get("miss", {"reason": "hit", "at_token": cached})
        assert miss["at_token"] == cached, usage
        assert (miss["reason"] == "cold") == (cached == 0), usage


def test_a_request_is_in_the_step_after_its_command() -> None:
    """While another decodes: computed in the next step, explained and pinned when that has ended."""
    bench = ServerBench()
    gate = StepGate(bench.device)
    bench.core.executor = gate

    async def main() -> list[str]:
        async with bench.running():
            first = asyncio.ensure_future(bench.post(CHAT, chat("x", max_tokens=30)))
            await gate.arrive()
            second = asyncio.ensure_future(bench.post(MESSAGES, message(PROMPT)))
            await posted(bench, 1)
            gate.allowed.release()
            await gate.arrive()
            assert len(gate.plans[1].request_ids) == 2
            gate.allowed.release()
            await gate.arrive()
            pinned = [pin.owner for pin in bench.core.cache._pin_table.list()]
            gate.open()
            assert [answer.status for answer in await asyncio.gather(first, second)] == [200, 200]
            return pinned

    assert run(main()) == [""]


def test_a_stream_is_told_why_it_missed_and_which_pins_were_refused() -> None:
    """With its first tokens, once; a stream that asks for nothing is told nothing."""
    bench = AsyncBench(pool_tokens=64)
    prompt = [7, 8, 9, 1] * 10

    async def main() -> None:
        async with bench.llm as llm:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            silent = [event async for event in llm.stream(prompt[:9], params)]
            assert [event.prefix for event in silent] == [None] * len(silent)
            retention = ((8, None), (8, 60.0), (40, None))
            events = [
                event
                async for event in llm.stream(prompt, params, explain=True, retention=retention)
            ]
            reports = [event.prefix for event in events if event.prefix is not None]
            assert len(reports) == 1
            assert reports[0].explanation is not None
            assert reports[0].explanation.hit_tokens == 8
            # 10 pages of 16, of which at most half may be pinned
            assert reports[0].num_pins_refused == 1
            assert [len(pin.key) for pin in await llm.cache.pins("")] == [8]

    run(main())
    bench.assert_nothing_left()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"retention": ((-1, None),)}, "retention"),
        ({"retention": ((4, 0.0),)}, "retention"),
        ({"retention": (4,)}, "retention"),
        ({"retention": ((4, None),) * 65}, "retention"),
        ({"cache_share": 1.5}, "cache_share"),
        ({"cache_share": "half"}, "cache_share"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_queued(
    options: dict[str, Any], name: str
) -> None:
    """The error names the option."""
    bench = AsyncBench()

    async def main() -> None:
        async with bench.llm as llm:
            with pytest.raises(InvalidParamsError, match=name):
                await llm.stream([1, 2, 3], **options).whole()

    run(main())
    bench.assert_nothing_left()


def test_a_refused_request_evicts_nothing() -> None:
    """The cache share is enforced once a request is accepted."""
    bench = AsyncBench(pool_tokens=64, max_model_len=64)

    async def main() -> tuple[int, int]:
        async with bench.llm as llm:
            params = SamplingParams(max_tokens=1)
            await llm.generate([5] * 32, params, tenant="ann")
            cached = (await llm.cache.stats()).cached_pages
            wrong = SamplingParams(max_tokens=1, logit_bias={999: 1.0})
            with pytest.raises(InvalidParamsError):
                await llm.stream([6] * 48, wrong, tenant="ann", cache_share=0.1).whole()
            return cached, (await llm.cache.stats()).cached_pages

    before, after = run(main())

    assert before == after > 0
