"""Sessions whose answer is abandoned, cancelled, or cut off by closing the engine or session."""

import asyncio
import gc
import time
from typing import Any

import pytest

from ramify.engine.llm import LLM
from ramify.errors import EngineStoppedError, InvalidParamsError
from ramify.outputs import FinishReason
from ramify.params import SamplingParams
from tests.pure.async_bench import LIMIT_S, AsyncBench, expected, run, until_idle
from tests.pure.engine_bench import Bench

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def sampling(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def test_a_drained_engine_gives_a_pinned_session_its_answer() -> None:
    """Draining the engine refuses the session's pin and still returns its answer."""
    made = AsyncBench(closed=True, page_size=1)

    async def main() -> None:
        session = made.llm.session(PROMPT, pin=True)
        task = asyncio.create_task(session.generate(sampling(3)))
        await made.gate.arrive()
        drained = asyncio.create_task(made.llm.drain())
        await asyncio.sleep(0)
        made.gate.open()
        output = await task
        assert await drained
        assert list(output.token_ids) == expected(PROMPT, 3, ends=())
        assert list(session.token_ids) == [*PROMPT, *output.token_ids]
        await session.aclose()

    run(main())
    made.assert_nothing_left()


def test_a_session_may_be_closed_after_its_engine() -> None:
    """Closing a session after its engine works; a pin is refused with the reason."""
    made = AsyncBench(page_size=1)

    async def main() -> None:
        async with made.llm as llm:
            session = llm.session(PROMPT, pin=True)
            await session.generate(sampling(3))
            assert session.pin_refused is None
        await session._pin(0)  # as after an answer with which a drained engine has ended
        assert "closed" in str(session.pin_refused)
        await session.aclose()
        with pytest.raises(EngineStoppedError):
            await session.generate(sampling(3))
        session.append([1])

    run(main())


@pytest.mark.parametrize("keeps", [False, True])
def test_whoever_leaves_a_stream_leaves_the_session_free(keeps: bool) -> None:
    """A session is free once its stream has no reference left, or is closed."""
    made = AsyncBench(page_size=1)

    async def main() -> None:
        async with made.llm as llm:
            session = llm.session(PROMPT)
            kept = session.stream(sampling(1500)) if keeps else None
            async for event in kept or session.stream(sampling(1500)):
                assert event.new_token_ids
                break
            if kept is not None:
                with pytest.raises(InvalidParamsError, match="running answer"):
                    session.append([1])
                await kept.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(kept)
            gc.collect()
            session.append([7])
            await until_idle(llm)
            assert list(session.token_ids) == [*PROMPT, 7]
            other = session.stream(sampling(2))
            async with session.stream(sampling(1500)) as stream:
                await anext(stream)
                with pytest.raises(InvalidParamsError, match="running answer"):
                    await anext(other)  # which must not end what the first one is making
                with pytest.raises(InvalidParamsError, match="running answer"):
                    session.rollback(1)
            tokens = [
                token
                async for event in session.stream(sampling(2))
                for token in event.new_token_ids
            ]
            assert list(session.token_ids) == [*PROMPT, 7, *tokens]

    run(main())
    made.assert_nothing_left()


def test_an_answer_that_is_cancelled_is_not_remembered_whenever_that_is() -> None:
    """A cancelled answer is not added to the session, at whatever point it is cancelled."""
    made = AsyncBench(page_size=1)

    async def main() -> None:
        async with made.llm as llm:
            for turns in range(60):
                session = llm.session([turns, *PROMPT], pin=True)
                task = asyncio.create_task(session.generate(sampling(3)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                [done] = await asyncio.gather(task, return_exceptions=True)
                given = () if isinstance(done, BaseException) else done.token_ids
                assert list(session.token_ids) == [turns, *PROMPT, *given]
                session.append([1])
                await session.aclose()
            assert not await llm.cache.pins()

    run(main())
    made.assert_nothing_left()


def test_a_session_that_is_closed_in_the_middle_of_an_answer_pins_nothing() -> None:
    """A session closed during an answer pins nothing; its next answer is pinned."""
    made = AsyncBench(page_size=1)

    async def main() -> None:
        async with made.llm as llm:
            session = llm.session(PROMPT, pin=True)
            async with session:
                stream = session.stream(sampling(5))
                await anext(stream)
            async for _ in stream:
                pass
            assert len(session.token_ids) == 15
            assert not await llm.cache.pins()
            await session.generate(sampling(2))
            assert len(await llm.cache.pins()) == 1
            await session.aclose()

    run(main())
    made.assert_nothing_left()


@pytest.mark.parametrize("ttl_s", [0, -1.0, "1", True, float("nan")])
def test_a_time_to_live_is_checked_before_the_first_answer(ttl_s: Any) -> None:
    """An invalid `ttl_s` is refused when the session is created."""
    llm = LLM.from_core(Bench().core)
    with pytest.raises(InvalidParamsError, match="ttl_s"):
        llm.session(PROMPT, pin=True, ttl_s=ttl_s)
    with pytest.raises(InvalidParamsError, match="ttl_s"):
        AsyncBench().llm.session(PROMPT, ttl_s=ttl_s)


def test_what_looks_like_a_session_option_is_none_is_refused() -> None:
    """Misspelled options, bytes as tokens and a dict as SamplingParams are refused."""
    llm = LLM.from_core(Bench().core)
    with pytest.raises(InvalidParamsError, match="tennant"):
        llm.session(PROMPT, tennant="a")
    session = llm.session(PROMPT)
    for more in (b"abcd", bytearray(b"abc"), b""):
        with pytest.raises(InvalidParamsError, match="token ids"):
            session.append(more)
    with pytest.raises(InvalidParamsError, match="SamplingParams"):
        session.generate({"max_tokens": 5})  # type: ignore[arg-type]
    assert list(session.token_ids) == PROMPT


def test_who_gives_up_waiting_for_an_idle_engine_holds_up_nobody() -> None:
    """Cancelling `call_when_idle` releases the requests that were held back for it."""
    made = AsyncBench(closed=True)

    async def main() -> None:
        async with made.llm as llm:
            before = llm.stream(PROMPT, sampling(1500))
            await before.accepted()
            ran: list[int] = []
            waiting = asyncio.wrap_future(
                llm._engine_thread.call_when_idle(lambda core: ran.append(1))
            )
            held = asyncio.create_task(llm.generate(PROMPT[::-1], sampling(2)))
            await made.gate.arrive()
            await asyncio.sleep(0)
            waiting.cancel()
            made.gate.open()
            assert len((await held).token_ids) == 2
            assert llm._engine_thread._collectors  # the long one goes on
            assert not ran
            await before.aclose()

    run(main())
    made.assert_nothing_left()


def test_draining_tells_when_somebody_else_has_ended_it() -> None:
    """`drain` returns False if the engine is closed before all requests have finished."""
    made = AsyncBench(closed=True)

    async def main() -> None:
        llm = made.llm
        task = asyncio.create_task(llm.generate(PROMPT, sampling(1500)))
        await made.gate.arrive()
        drained = asyncio.create_task(llm.drain())
        await asyncio.sleep(0)
        closed = asyncio.create_task(llm.aclose())
        await asyncio.sleep(0)
        made.gate.open()
        await closed
        assert (await task).finish_reason is FinishReason.ABORT
        assert not await drained
        assert await llm.drain()  # nothing was there any more

    run(main())
    made.assert_nothing_left()


def test_a_call_may_raise_what_no_future_holds() -> None:
    """A StopIteration inside `run` reaches the caller as a RuntimeError."""
    made = AsyncBench()

    async def main() -> None:
        async with made.llm as llm:
            nothing: list[int] = []
            with pytest.raises(RuntimeError, match="StopIteration"):
                await llm.run(lambda core: next(iter(nothing)))

    run(main())


def test_an_abort_tells_the_end_of_every_answer() -> None:
    """An abort ends each completion once; the last event carries the request's output."""
    made = AsyncBench()

    async def main() -> None:
        async with made.llm as llm:
            stream = llm.stream(PROMPT, sampling(1500, n=3))
            request_id = await stream.accepted()
            ends: list[tuple[int, bool]] = []
            async for event in stream:
                if not ends and event.index == 2:
                    await llm.abort(request_id)
                    ends.append((-1, False))
                if event.finish_reason is not None:
                    assert event.finish_reason is FinishReason.ABORT
                    ends.append((event.index, event.output is not None))
            assert ends == [(-1, False), (0, False), (1, False), (2, True)]

    run(main())
    made.assert_nothing_left()


def test_an_event_loop_that_is_closed_before_it_looks_holds_nothing() -> None:
    """The engine aborts a request whose event loop was closed with events undelivered."""
    made = AsyncBench()
    loop = asyncio.new_event_loop()
    stream = made.llm.stream(PROMPT, sampling(1500))
    loop.run_until_complete(stream.accepted())
    core = made.bench.core
    limit_s = time.monotonic() + LIMIT_S
    while core.num_computed_tokens < 40:  # nobody turns the loop
        assert time.monotonic() < limit_s
    loop.close()

    async def main() -> None:
        await until_idle(made.llm)
        assert core.num_computed_tokens < 1000
        await made.llm.aclose()

    run(main())
    made.assert_nothing_left()


def test_a_stream_that_another_task_closes_lets_its_reader_go() -> None:
    """Closing a stream from another task ends its reader and frees the session."""
    made = AsyncBench(closed=True, page_size=1)

    async def main() -> None:
        async with made.llm as llm:
            session = llm.session(PROMPT)
            for stream in (
                session.stream(sampling(1500)),
                llm.stream(PROMPT[::-1], sampling(1500)),
            ):
                reader = asyncio.create_task(anext(stream, None))
                await made.gate.arrive()
                await stream.aclose()
                assert await asyncio.wait_for(reader, LIMIT_S) is None
                made.gate.allowed.release()
            session.append([1])
            early = llm.stream(PROMPT, sampling(1500))
            reader = asyncio.create_task(anext(early, None))
            await asyncio.sleep(0)
            await early.aclose()
            assert await asyncio.wait_for(reader, LIMIT_S) is None
            made.gate.open()
            await until_idle(llm)

    run(main())
    made.assert_nothing_left()


def test_a_session_belongs_to_its_answer_until_that_is_pinned() -> None:
    """While an answer is being pinned, closing its stream does not free the session."""
    made = AsyncBench(page_size=1)

    async def main() -> None:
        async with made.llm as llm:
            begun, go = asyncio.Event(), asyncio.Event()
            session = llm.session(PROMPT, pin=True)

            async def slow(num_closed: int) -> None:
                begun.set()
                await go.wait()

            session._pin = slow  # type: ignore[method-assign]
            for cancels in (False, True):
                begun.clear()
                go.clear()
                before = session.token_ids
                stream = session.stream(sampling(1))
                reader = asyncio.create_task(anext(stream))
                await begun.wait()
                await stream.aclose()
                with pytest.raises(InvalidParamsError, match="running answer"):
                    session.append([1])
                if cancels:
                    reader.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await reader
                    assert session.token_ids == before
                else:
                    go.set()
                    event = await reader
                    assert session.token_ids == (*before, *event.new_token_ids)
                session.append([1])

    run(main())


def test_an_abort_tells_the_text_that_was_kept_back() -> None:
    """An abort emits the text that was held back as a possible start of a stop string."""
    made = AsyncBench(closed=True, next_token=lambda _: 2)  # whose letter is C

    async def main() -> None:
        async with made.llm as llm:
            stream = llm.stream(PROMPT, sampling(1500, n=2, stop="C@@"))
            request_id, texts = await stream.accepted(), ["", ""]
            for _ in range(4):
                await made.gate.arrive()
                made.gate.allowed.release()
            await made.gate.arrive()
            ended = asyncio.create_task(llm.abort(request_id))
            await asyncio.sleep(0.01)
            made.gate.open()
            await ended
            async for event in stream:
                texts[event.index] += event.text
                if event.output is not None:
                    assert texts == [completion.text for completion in event.output.completions]
            assert set(texts[0]) == {"C"}

    run(main())
    made.assert_nothing_left()


def test_two_tasks_that_wait_for_one_stream_make_one_request() -> None:
    """Two tasks on one stream submit it once, also while its prompt is being prepared."""
    made = AsyncBench()

    async def main() -> None:
        async with made.llm as llm:
            stream = llm.stream(PROMPT, sampling(1500))
            submit, submitted = stream._submit, list[bool]()

            async def slowly(is_whole: bool) -> Any:
                submitted.append(is_whole)
                await asyncio.sleep(0.01)
                return await submit(is_whole)

            stream._submit = slowly
            await asyncio.gather(stream.accepted(), anext(stream))
            assert len(submitted) == 1
            await stream.aclose()
            left = llm.stream(PROMPT, sampling(1500))
            left._submit = slowly
            first, second = asyncio.create_task(left.accepted()), asyncio.create_task(anext(left))
            await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(StopAsyncIteration):
                await second
            assert len(submitted) == 2

    run(main())
    made.assert_nothing_left()


def test_a_session_that_is_interrupted_while_it_pins_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while pinning leaves the session unchanged; the next call gives the same answer."""
    llm = LLM.from_core(Bench(page_size=1).core)
    session = llm.session(PROMPT, pin=True)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.cache), "pin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(sampling(3))

    assert list(session.token_ids) == PROMPT
    assert list(session.generate(sampling(3)).token_ids) == expected(PROMPT, 3, ends=())


def test_who_left_while_weights_are_reloaded_takes_no_place() -> None:
    """A cancelled request that was held back no longer counts against `max_waiting`."""
    made = AsyncBench(closed=True, options={"max_waiting": 2})

    async def main() -> None:
        async with made.llm as llm:
            running = asyncio.create_task(llm.generate(PROMPT, sampling(3)))
            await made.gate.arrive()
            idle = asyncio.wrap_future(llm._engine_thread.call_when_idle(lambda core: None))
            held = [asyncio.create_task(llm.generate([i, 5], sampling(1))) for i in range(2)]
            await asyncio.sleep(0.05)
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            last = asyncio.create_task(llm.generate([9, 5], sampling(1)))
            await asyncio.sleep(0.05)
            made.gate.open()
            await idle
            assert list((await last).token_ids) == expected([9, 5], 1, ends=())
            await running

    run(main())
    made.assert_nothing_left()
