"""Sessions of the library and of clusters: a name for their pages, which go first when they are closed."""

from typing import Any

import pytest

from ramify.engine.llm import LLM
from ramify.errors import InvalidParamsError
from ramify.params import SamplingParams
from tests.pure.async_bench import AsyncBench, run
from tests.pure.cluster_bench import ClusterBench
from tests.pure.engine_bench import Bench

PROMPT = list(range(2, 14))
NUM_NEW = 4  # tokens of an answer
PARAMS = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


def ended_pages(bench: Bench) -> int:
    """Evict everything that is not held; returns how many pages went as those of ended sessions."""
    cache = bench.core.cache
    before = cache.stats().evictions["session_ended"]
    cache.give_back(cache.reserve(cache.num_available))
    return cache.stats().evictions["session_ended"] - before


def test_a_closed_session_lets_its_pages_go() -> None:
    """Once it is closed, and not before; closing twice changes nothing."""
    bench = Bench(page_size=2)
    llm = LLM.from_core(bench.core)
    with llm.session(PROMPT) as session:
        session.generate(PARAMS)
        assert llm.cache.stats().num_sessions == 1

    session.close()

    assert (llm.cache.stats().num_sessions, llm.cache.stats().ended_sessions) == (0, 1)
    assert ended_pages(bench) == (len(PROMPT) + NUM_NEW - 1) // 2


def test_forks_keep_the_pages_of_a_closed_session() -> None:
    """The pages go first when the last fork is closed; what another request has used does not."""
    bench = Bench(page_size=2)
    llm = LLM.from_core(bench.core)
    session = llm.session(PROMPT)
    session.generate(PARAMS)
    [fork] = session.fork(1)
    llm.generate([PROMPT[:5]], PARAMS)  # shares the first two pages

    session.close()
    assert llm.cache.stats().ended_sessions == 0
    fork.append([20, 21])
    fork.generate(PARAMS)
    fork.close()

    assert llm.cache.stats().ended_sessions == 1
    num_pages = (len(PROMPT) + 2 * NUM_NEW + 2 - 1) // 2
    assert ended_pages(bench) == num_pages - 2


def test_a_turn_after_close_begins_anew() -> None:
    """A session may be used after it was closed, and closed again."""
    bench = Bench(page_size=2)
    llm = LLM.from_core(bench.core)
    session = llm.session(PROMPT)
    for _ in range(2):
        session.generate(PARAMS)
        session.close()

    assert llm.cache.stats().ended_sessions == 2


def test_answers_of_one_request_are_in_its_session() -> None:
    """The pages of all answers of a request with `n` are the session's."""
    bench = Bench(page_size=2)
    params = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=3, ignore_eos=True)
    bench.core.add_request(PROMPT, params, session="s")
    while bench.core.has_unfinished:
        bench.core.step()

    cached = bench.core.cache.stats().cached_pages
    assert LLM.from_core(bench.core).cache.end_session("s") == cached


def test_a_name_is_a_text() -> None:
    """Anything else refuses the request."""
    with pytest.raises(InvalidParamsError, match="session=7"):
        Bench().core.add_request(PROMPT, PARAMS, session=7)


def test_an_async_session_is_closed_too() -> None:
    """`aclose` ends it, and is quiet when the engine has ended before."""

    async def main() -> None:
        bench = AsyncBench()
        async with bench.llm as llm:
            async with llm.session(PROMPT) as session:
                await session.generate(PARAMS)
                assert (await llm.cache.stats()).num_sessions == 1
            assert (await llm.cache.stats()).ended_sessions == 1
            late = llm.session(PROMPT)
            await late.generate(PARAMS)
        await late.aclose()

    run(main())


def test_a_session_ends_at_every_replica() -> None:
    """Its requests may have been at several; the pages are those of all, None if no replica knows it."""

    async def main() -> None:
        async with ClusterBench(2).running() as cluster:
            llm = cluster.llm
            for number in range(6):
                prompt = [number + 2] * 40
                await llm.stream(prompt, PARAMS, session="s", tenant="ann").whole()
            cached = (await llm.cache.stats()).cached_pages
            assert cached > 0

            assert await llm.cache.end_session("s") is None
            assert await llm.cache.end_session("s", tenant="ann") == cached
            assert await llm.cache.end_session("s", tenant="ann") is None

    run(main())


def test_a_tenants_share_takes_ended_sessions_first() -> None:
    """Where a tenant must give up its own pages, those of its ended session go before older ones."""
    bench = Bench(page_size=2, pool_tokens=64, max_model_len=48)
    llm = LLM.from_core(bench.core)

    def serve(first: int, **options: Any) -> None:
        prompt = [first] * 16
        bench.core.add_request(
            prompt, SamplingParams(max_tokens=1), tenant="ann", cache_share=0.5, **options
        )
        while bench.core.has_unfinished:
            bench.core.step()

    serve(2)
    serve(3, session="s")
    pages = llm.cache.end_session("s", tenant="ann")
    bench.core.add_request([9] * 24, SamplingParams(max_tokens=1), tenant="bob")
    while bench.core.has_unfinished:
        bench.core.step()
    serve(4)

    assert pages == 8
    hits = [
        llm.cache.explain([first] * 17, tenant=tenant).hit_tokens
        for first, tenant in ((2, "ann"), (3, "ann"), (9, "bob"))
    ]
    assert hits[0] == hits[2] == 16
    assert hits[1] < 16
