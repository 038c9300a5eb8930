"""`AsyncLLM` over a fake device: streams, slow readers, leaving and limits."""

import asyncio
import gc
import random
import threading

import pytest

from ramify.engine.core import EngineCore
from ramify.engine.serving.streams import merge_outputs
from ramify.errors import (
    InvalidParamsError,
    OutOfPagesError,
    OverloadedError,
    PromptTooLongError,
    UnknownRequestError,
)
from ramify.outputs import FinishReason, RequestOutput, StepOutput
from ramify.params import SamplingParams
from tests.pure.async_bench import AsyncBench, expected, no_request, run, until_idle

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def sampling(max_tokens: int, **others: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)  # type: ignore[arg-type]


def test_the_increments_are_the_answer() -> None:
    """The increments' tokens and text add up to the output, which only the last increment has."""
    bench = AsyncBench()

    async def main() -> list[StepOutput]:
        async with bench.llm as llm:
            return [event async for event in llm.stream(PROMPT, sampling(12))]

    events = run(main())

    tokens = [token for event in events for token in event.new_token_ids]
    assert tokens == expected(PROMPT, 12, ends=())
    assert [event.output for event in events[:-1]] == [None] * (len(events) - 1)
    output = events[-1].output
    assert output is not None
    assert list(output.token_ids) == tokens
    assert "".join(event.text for event in events) == output.text
    assert events[-1].finish_reason is output.finish_reason is FinishReason.LENGTH
    bench.assert_nothing_left()


def test_several_answers_are_told_by_index() -> None:
    """With n=3, each answer's tokens are those of the increments with its index."""
    bench = AsyncBench()

    async def main() -> list[StepOutput]:
        async with bench.llm as llm:
            stream = llm.stream(PROMPT, sampling(9, n=3, temperature=1.0, seed=4))
            first = await anext(stream)
            await until_idle(llm)
            return [first, *[event async for event in stream]]

    events = run(main())

    output = events[-1].output
    assert output is not None
    for index, completion in enumerate(output.completions):
        tokens_of_index = [
            t for event in events if event.index == index for t in event.new_token_ids
        ]
        assert tokens_of_index == list(completion.token_ids)


def test_a_slow_reader_gets_few_increments_and_loses_nothing() -> None:
    """The engine does not wait for a slow reader: it merges the unread increments."""
    bench = AsyncBench()

    async def main() -> list[StepOutput]:
        async with bench.llm as llm:
            stream = llm.stream(PROMPT, sampling(200, logprobs=1))
            first = await anext(stream)
            await until_idle(llm)
            return [first, *[event async for event in stream]]

    events = run(main())

    assert len(events) <= 2
    assert [t for e in events for t in e.new_token_ids] == expected(PROMPT, 200, ends=())
    assert sum(len(event.logprobs) for event in events) == 200
    assert events[0].cache is not None


def test_increments_that_are_merged_keep_what_only_one_of_them_has() -> None:
    """A merge keeps the cache report of the first increment and the output of the last."""
    bench = AsyncBench()
    llm_events = []
    bench.bench.add(PROMPT, max_tokens=4, ignore_eos=True)
    while bench.bench.core.has_unfinished:
        llm_events += bench.bench.step()

    merged = merge_outputs(llm_events)

    assert merged.cache == llm_events[0].cache
    assert merged.cache is not None
    assert merged.output is llm_events[-1].output
    assert list(merged.new_token_ids) == expected(PROMPT, 4, ends=())


def test_what_is_not_to_be_shared_is_not() -> None:
    """The K/V of a request with max_shared=0 is not shared with later requests."""
    bench = AsyncBench()

    async def main() -> list[int]:
        async with bench.llm as llm:
            first = await llm.stream(PROMPT, sampling(2), max_shared=0).whole()
            second = await llm.stream(PROMPT, sampling(2)).whole()
            third = await llm.stream(PROMPT, sampling(2)).whole()
            return [output.cache.read_tokens for output in (first, second, third)]

    assert run(main()) == [0, 0, 7]  # all but the last token


@pytest.mark.parametrize(
    ("way", "num_read"),
    [*((way, n) for way in ("break", "aclose") for n in (0, 1, 2, 5)), ("cancel", 1)],
)
def test_whoever_leaves_ends_the_request_at_once(way: str, num_read: int) -> None:
    """A reader that breaks, closes or is cancelled ends its request within one step."""
    bench = AsyncBench(closed=True)

    async def read(queued: asyncio.Event) -> None:
        stream = bench.llm.stream(PROMPT, sampling(50))
        await stream.accepted()
        queued.set()
        left = num_read
        async for _ in stream:
            left -= 1
            if left <= 0 and way != "cancel":
                break
        if way == "aclose":
            await stream.aclose()

    async def main() -> None:
        async with bench.llm as llm:
            queued = asyncio.Event()
            task = asyncio.create_task(read(queued))
            await queued.wait()
            for _ in range(max(1, num_read)):
                await bench.gate.arrive()
                if way == "cancel":
                    continue
                bench.gate.allowed.release()
            if way == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await task
            steps = bench.bench.device.num_steps
            bench.gate.allowed.release()
            assert await no_request(llm)
            assert bench.bench.device.num_steps <= steps + 1
            bench.gate.open()

    run(main())
    bench.assert_nothing_left()


def test_a_request_cancelled_before_it_was_queued_never_is() -> None:
    """A request cancelled while a step runs, before the engine read its command, gets no id."""
    bench = AsyncBench(closed=True)

    async def main() -> None:
        async with bench.llm as llm:
            other = asyncio.create_task(llm.generate(PROMPT, sampling(1)))
            await bench.gate.arrive()
            late = asyncio.create_task(llm.generate(PROMPT[::-1], sampling(50)))
            await asyncio.sleep(0)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            bench.gate.open()
            assert list((await other).token_ids) == expected(PROMPT, 1)
            # one id was given out
            assert await llm.run(lambda core: next(core.lifecycle._ids)) == 1

    run(main())
    bench.assert_nothing_left()


def test_a_stream_that_nobody_keeps_ends() -> None:
    """Dropping the last reference to a stream ends its request without `aclose`."""
    bench = AsyncBench()

    async def main() -> None:
        async with bench.llm as llm:
            stream = llm.stream(PROMPT, sampling(1500))
            await anext(stream)
            del stream
            gc.collect()
            assert await no_request(llm)

    run(main())
    bench.assert_nothing_left()


def test_what_cannot_be_served_is_told_and_nothing_else_is_hurt() -> None:
    """Invalid requests raise before their first increment, and later requests still run."""
    bench = AsyncBench(max_model_len=64)

    async def main() -> None:
        async with bench.llm as llm:
            with pytest.raises(PromptTooLongError):
                await llm.stream(PROMPT * 20).accepted()
            with pytest.raises(InvalidParamsError, match="no tokenizer"):
                await llm.generate("a text")
            with pytest.raises(InvalidParamsError, match="priority"):
                await llm.generate(PROMPT, priority="high")  # type: ignore[arg-type]
            with pytest.raises(ZeroDivisionError):
                await llm.run(lambda core: 1 // 0)
            with pytest.raises(UnknownRequestError):
                await llm.abort(77)
            assert list((await llm.generate(PROMPT, sampling(3))).token_ids) == expected(
                PROMPT, 3, ends=()
            )

    run(main())
    bench.assert_nothing_left()


def test_a_request_that_fails_while_it_runs_has_an_output() -> None:
    """A request whose steps fail returns its tokens so far, and `error` says what happened."""
    bench = AsyncBench(fail_at={2, 3})

    async def main() -> RequestOutput:
        async with bench.llm as llm:
            return await llm.generate(PROMPT, sampling(9))

    output = run(main())

    assert output.finish_reason is FinishReason.ERROR
    assert len(output.token_ids) == 2
    assert "failed" in str(output.error)


def test_too_many_waiting_requests_are_refused_with_a_hint() -> None:
    """A request over `max_waiting` raises OverloadedError; requests already queued are served."""
    bench = AsyncBench(max_num_seqs=1, options={"max_waiting": 2}, closed=True)

    async def main() -> None:
        async with bench.llm as llm:
            first = asyncio.create_task(llm.generate(PROMPT, sampling(2)))
            await bench.gate.arrive()
            more = [llm.stream(PROMPT[k:], sampling(2)) for k in range(1, 4)]
            tasks = [asyncio.create_task(stream.accepted()) for stream in more]
            await asyncio.sleep(0)
            bench.gate.open()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(results[2], OverloadedError)
            assert results[2].retry_after_s > 0
            assert "max_waiting is 2" in str(results[2])
            assert [len((await stream.whole()).token_ids) for stream in more[:2]] == [2, 2]
            await first

    run(main())
    bench.assert_nothing_left()


def test_several_event_loops_share_an_engine() -> None:
    """Four event loops use the same engine, and each gets the answers to its own prompts."""
    bench = AsyncBench()
    tokens_by_number: dict[int, list[int]] = {}

    def serve(number: int) -> None:
        async def main() -> None:
            outputs = await asyncio.gather(
                *(bench.llm.generate([number, *PROMPT, k], sampling(20)) for k in range(4))
            )
            tokens_by_number[number] = [token for output in outputs for token in output.token_ids]

        asyncio.run(main())

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(bench.llm.aclose())

    for number in range(4):
        wanted = [expected([number, *PROMPT, k], 20, ends=()) for k in range(4)]
        assert tokens_by_number[number] == [token for tokens in wanted for token in tokens]
    bench.assert_nothing_left()


def test_a_request_that_pins_leave_no_room_for_is_told() -> None:
    """A request that cannot fit beside the pins fails with OutOfPagesError; others still run."""
    bench = AsyncBench(pool_tokens=48, page_size=4)

    async def main() -> None:
        async with bench.llm as llm:
            await llm.generate(list(range(1, 24)), sampling(2))

            def pin(core: EngineCore) -> None:
                from ramify.cache import CacheKey

                core.cache.pin(CacheKey(range(1, 24), core.namespaces.base), "a test")

            await llm.run(pin)
            refused = await llm.generate(list(range(24, 48)), sampling(20))
            assert refused.finish_reason is FinishReason.ERROR
            assert isinstance(refused.error, OutOfPagesError)
            assert len((await llm.generate([5, 6], sampling(2))).token_ids) == 2

    run(main())
    bench.assert_nothing_left()


def test_two_hundred_streams_with_random_leavers_and_slow_readers() -> None:
    """Every stream ends with the expected tokens, and no page, request or task is left."""
    bench = AsyncBench(pool_tokens=2048, max_num_seqs=32, max_batch_tokens=128)
    rng = random.Random(5)
    ended: list[str] = []

    async def read(number: int) -> None:
        prompt = [*PROMPT * rng.randrange(1, 4), number % 50, number // 50]
        kind = rng.choice(["whole", "slow", "leave", "cancel"])
        length = rng.randrange(1, 40)
        tokens: list[int] = []
        stream = bench.llm.stream(prompt, sampling(length), tenant=rng.choice(["", "a"]))
        limit = rng.randrange(length + 1) if kind in ("leave", "cancel") else length + 1
        try:
            async for event in stream:
                tokens += event.new_token_ids
                if kind == "slow":
                    for _ in range(rng.randrange(50)):
                        await asyncio.sleep(0)
                if len(tokens) >= limit:
                    if kind == "leave":
                        break
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
        finally:
            wanted = expected(prompt, length, ends=())
            assert tokens == wanted[: len(tokens)]
            if kind in ("whole", "slow"):
                assert tokens == wanted
            ended.append(kind)

    async def main() -> None:
        async with bench.llm as llm:
            tasks = [asyncio.create_task(read(number)) for number in range(200)]
            for task in rng.sample(tasks, 20):
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert not [result for result in done if isinstance(result, Exception)]
            assert await no_request(llm)

    run(main())
    assert len(ended) > 170
    bench.assert_nothing_left()
