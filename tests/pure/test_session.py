"""Sessions of token ids: every turn continues from the last turn, in every fork."""

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest

from ramify.engine.llm import LLM
from ramify.engine.sessions.session import Session
from ramify.errors import (
    ChatTemplateError,
    EmptyPromptError,
    InvalidParamsError,
    PromptTooLongError,
)
from ramify.params import SamplingParams
from tests.pure.async_bench import AsyncBench, no_request, run
from tests.pure.engine_bench import Bench, expected

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def sampling(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


@pytest.mark.parametrize(("page_size", "read"), [(1, 14), (4, 12)])
def test_a_turn_computes_only_what_is_new(page_size: int, read: int) -> None:
    """A turn hits whole pages of the turns before; the last token has no K/V yet."""
    llm = LLM.from_core(Bench(page_size=page_size).core)
    session = llm.session(PROMPT)
    first = session.generate(sampling(5))
    session.append([7, 8, 9])

    second = session.generate(sampling(4))

    assert second.cache.read_tokens == read
    assert second.cache.computed_tokens == 10 + 5 + 3 - read
    whole = [*PROMPT, *first.token_ids, 7, 8, 9]
    assert list(second.token_ids) == expected(whole, 4, ends=())
    assert list(session.token_ids) == [*whole, *second.token_ids]
    assert session.messages == []


def test_forks_go_their_own_ways_from_one_prefix() -> None:
    """Two forks compute only their own tokens; their common prefix is computed once."""
    bench = Bench(page_size=1)
    llm = LLM.from_core(bench.core)
    session = llm.session(PROMPT)
    session.generate(sampling(1))
    computed = bench.core.num_computed_tokens

    first, second = session.fork(2)
    first.append([20])
    second.append([30])
    outputs = [branch.generate(sampling(3)) for branch in (first, second)]

    start = list(session.token_ids)
    assert len(start) == 11
    for branch, output, token in ((first, outputs[0], 20), (second, outputs[1], 30)):
        assert list(branch.token_ids) == [*start, token, *output.token_ids]
        assert output.cache.computed_tokens <= 2
    assert bench.core.num_computed_tokens - computed == (2 + 2) + (1 + 2)
    with pytest.raises(InvalidParamsError, match="count=0"):
        session.fork(0)


def test_going_back_to_a_mark_or_by_tokens() -> None:
    """`rollback` takes a mark or a number of tokens, and refuses a position the session lacks."""
    session = LLM.from_core(Bench().core).session(PROMPT)
    mark = session.mark()
    session.generate(sampling(5))
    session.append([1, 2])

    session.rollback(2)
    assert len(session.token_ids) == 15
    session.rollback(mark)
    assert list(session.token_ids) == PROMPT
    for wrong in (11, -1, "x", True):
        with pytest.raises(InvalidParamsError, match="to="):
            session.rollback(wrong)  # type: ignore[arg-type]
    session.rollback(10)
    with pytest.raises(InvalidParamsError):
        session.rollback(mark)
    with pytest.raises(EmptyPromptError):
        session.generate()


def test_what_fails_is_not_remembered() -> None:
    """A failed step or a refused request leaves the session's tokens unchanged."""
    session = LLM.from_core(Bench(fail_at={0, 1}, max_model_len=64).core).session(PROMPT)

    assert session.generate(sampling(3)).error is not None
    assert list(session.token_ids) == PROMPT
    with pytest.raises(InvalidParamsError, match="n=2"):
        session.generate(sampling(3, n=2))
    with pytest.raises(InvalidParamsError):
        session.append(["a"])  # type: ignore[arg-type]
    session.append([5] * 60)
    with pytest.raises(PromptTooLongError):
        session.generate()
    session.rollback(60)
    assert list(session.generate(sampling(3)).token_ids) == expected(PROMPT, 3, ends=())


def test_sessions_begin_with_what_they_can_be_made_of() -> None:
    """A text needs a tokenizer, messages need a template; a prompt with messages is refused."""
    llm = LLM.from_core(Bench().core)
    with pytest.raises(InvalidParamsError, match="tokenizer"):
        llm.session("a text")
    with pytest.raises(ChatTemplateError):
        llm.session(system="You are kind.")
    with pytest.raises(InvalidParamsError, match="begin"):
        llm.session(PROMPT, messages=[])
    with pytest.raises(InvalidParamsError):
        llm.session(3)  # type: ignore[arg-type]
    empty = llm.session()
    empty.append(PROMPT)
    assert list(empty.token_ids) == PROMPT


def test_the_newest_turn_is_pinned_until_the_end() -> None:
    """The pin follows the newest turn and resists eviction; `pin_refused` reports a refusal."""
    llm = LLM.from_core(Bench(pool_tokens=64, page_size=4).core)
    with llm.session(PROMPT, pin=True, tenant="a") as session:
        session.generate(sampling(3))
        [first] = llm.cache.pins("session")
        session.append([1, 2, 3, 4])
        session.generate(sampling(3))
        [second] = llm.cache.pins("session")
        assert second.num_pages > first.num_pages
        llm.generate([[k] * 40 for k in range(1, 9)], sampling(2))
        assert session.generate(sampling(1)).cache.read_tokens >= 16
        assert session.pin_refused is None
        session.append([9] * 20)
        session.generate(sampling(1))
        assert "max_pinned_share" in str(session.pin_refused)
        assert len(llm.cache.pins()) == 1
    assert llm.cache.pins() == []
    session.close()


def test_a_pin_whose_time_is_over_is_no_fault() -> None:
    """After a pin's ttl has passed, the next turn pins again, and `close` raises nothing."""
    bench = Bench()
    session = LLM.from_core(bench.core).session(PROMPT, pin=True, ttl_s=5)
    session.generate(sampling(3))
    bench.time += 100
    session.generate(sampling(3))
    assert len(bench.core.cache.pins()) == 1
    bench.time += 100
    session.close()


@pytest.mark.parametrize("seed", range(5))
def test_any_story_is_that_of_a_list_of_tokens(seed: int) -> None:
    """Random appends, answers, forks and rollbacks match token lists while pages run out."""
    rng = random.Random(seed)
    bench = Bench(pool_tokens=256, page_size=4, max_model_len=120)
    llm = LLM.from_core(bench.core)
    sessions: list[tuple[Session, list[int]]] = [(llm.session(PROMPT), PROMPT[:])]
    for _ in range(120):
        at = rng.randrange(len(sessions))
        session, tokens = sessions[at]
        match rng.choice("afgr"):
            case "a":
                more = [rng.randrange(50) for _ in range(rng.randrange(1, 9))]
                session.append(more)
                tokens += more
            case "g" if 0 < len(tokens) < 100:
                count = rng.randrange(1, 9)
                answer = list(session.generate(sampling(count)).token_ids)
                assert answer == expected(tokens, count, ends=())
                tokens += answer
            case "f":
                twin = (session.fork(1)[0], tokens[:])
                sessions = [*sessions, twin] if len(sessions) < 6 else [*sessions[1:], twin]
            case "r":
                back = rng.randrange(len(tokens) + 1)
                session.rollback(back)
                del tokens[len(tokens) - back :]
        assert list(session.token_ids) == tokens
    llm.cache.clear()
    assert llm.cache.stats().free_pages == llm.cache.core.num_pages


def test_the_same_over_an_engine_in_a_thread() -> None:
    """A session answers one call at a time; a cancelled answer leaves its tokens unchanged."""
    async_bench = AsyncBench(page_size=1)

    async def main() -> None:
        async with async_bench.llm as llm, llm.session(PROMPT, pin=True) as session:
            first = await session.generate(sampling(5))
            assert list(first.token_ids) == expected(PROMPT, 5, ends=())
            branch, sibling = session.fork()
            sibling.append([9])
            both = await asyncio.gather(branch.generate(sampling(3)), sibling.generate(sampling(3)))
            assert all(output.cache.read_tokens >= 14 for output in both)
            known = branch.token_ids
            async with aclosing(branch.stream(sampling(500))) as stream:
                async for event in stream:
                    assert event.new_token_ids
                    with pytest.raises(InvalidParamsError, match="await it, or fork"):
                        await branch.generate()
                    with pytest.raises(InvalidParamsError, match="await it, or fork"):
                        branch.append([9])  # the answer would seem to follow it
                    with pytest.raises(InvalidParamsError, match="await it, or fork"):
                        branch.rollback(1)
                    break
            assert await no_request(llm)
            assert branch.token_ids == known
            task = asyncio.create_task(branch.generate(sampling(500)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            mark = branch.mark()
            branch.append([3])
            branch.rollback(mark)
            assert branch.token_ids == known
            assert list((await branch.generate(sampling(2))).token_ids) == expected(
                known, 2, ends=()
            )
            assert len(await llm.cache.pins("session")) == 3
            for fork in (branch, sibling):
                await fork.aclose()
            assert len(await llm.cache.pins("session")) == 1

    run(main())
    async_bench.assert_nothing_left()


def test_whoever_is_cancelled_leaves_no_pin() -> None:
    """A turn cancelled while it pins, or while it ends the previous pin, leaves no pin."""
    async_bench = AsyncBench(page_size=1)

    async def main() -> None:
        async with async_bench.llm as llm:
            for number in range(20):
                session = llm.session([number, *PROMPT], pin=True)
                if number % 2:
                    await session.generate(sampling(5))
                before = len(async_bench.bench.core.cache._pin_table)
                task = asyncio.create_task(session.generate(sampling(5)))
                while not task.done():
                    if len(async_bench.bench.core.cache._pin_table) > before:
                        task.cancel()
                        break
                    await asyncio.sleep(0)
                await asyncio.gather(task, return_exceptions=True)
                await session.aclose()
                assert not await llm.cache.pins()

    run(main())
    async_bench.assert_nothing_left()
