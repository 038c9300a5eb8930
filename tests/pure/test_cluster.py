"""Requests of a cluster: the answers of one engine, whoever computes them, each ended once."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest

from ramify.cluster.connection import Connection
from ramify.cluster.wire import MAX_CALLS, MAX_UNSENT_BYTES, Pong, Return
from ramify.engine.cache_admin.calls import PinPublicPrefixes
from ramify.engine.cache_admin.warmup import PUBLIC, WarmPrompt, WarmupResult
from ramify.engine.serving.streams import merge_outputs
from ramify.errors import (
    DrainingError,
    EngineStoppedError,
    InvalidParamsError,
    InvariantError,
    PinError,
    TokenOutOfRangeError,
    UnknownRequestError,
)
from ramify.outputs import FinishReason
from ramify.params import SamplingParams
from tests.pure.async_bench import AsyncBench
from tests.pure.cluster_bench import ClusterBench, prompts, run, until
from tests.pure.engine_bench import expected

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")


def test_answers_are_those_of_one_engine() -> None:
    """Many requests at once: each gets its own answer, on whatever replica, and nothing is left."""
    bench = ClusterBench()
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            outputs = await asyncio.gather(
                *(bench.llm.generate(prompt, params) for prompt in prompts(30))
            )
            for prompt, output in zip(prompts(30), outputs, strict=True):
                assert list(output.token_ids) == expected(prompt, 8, ends=())
                assert output.finish_reason is FinishReason.LENGTH
                assert output.usage.prompt_tokens == len(prompt)
            assert all(member.bench.core.num_steps for member in bench.members)

    run(main())


def test_an_error_of_a_request_is_the_engine_s() -> None:
    """What an engine refuses is refused with the same exception, and its numbers."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            with pytest.raises(TokenOutOfRangeError, match="99") as info:
                await bench.llm.generate([3, 99])
            assert info.value.token == 99
            with pytest.raises(InvalidParamsError, match="logit_bias") as other:
                await bench.llm.generate([3], SamplingParams(logit_bias={77: 1.0}))
            assert other.value.name == "logit_bias"

    run(main())


def test_a_request_that_does_not_travel_is_refused_and_leaves_nothing() -> None:
    """A number beyond 64 bits fits into no message: its sender gets an error, its place is free again."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            with pytest.raises(InvalidParamsError, match="cannot be sent"):
                await bench.llm.generate([3], SamplingParams(top_k=10**30))
            bench.assert_nothing_reserved()

    run(main())


def test_an_abort_reaches_the_replica_and_its_reader_gets_the_end() -> None:
    """`abort` ends the request with the reason `abort`; leaving a stream ends it without a word."""
    bench = ClusterBench(2, max_model_len=4096, pool_tokens=8192)
    params = SamplingParams(max_tokens=3000, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            stream = bench.llm.stream(prompts(1)[0], params)
            first = await anext(stream)
            await bench.llm.abort(first.request_id)
            events = [event async for event in stream]
            output = events[-1].output
            assert output is not None
            assert output.finish_reason is FinishReason.ABORT
            with pytest.raises(UnknownRequestError):
                await bench.llm.abort(first.request_id)

            left = bench.llm.stream(prompts(1)[0], params)
            event = await anext(left)
            member = bench.place_of(event.request_id)
            await left.aclose()
            num_steps = member.bench.core.num_steps
            await member.until_idle()
            # Steps take no time here, and the message takes some: far fewer than the 3,000 left.
            assert member.bench.core.num_steps <= num_steps + 1000

    run(main())


def test_closing_aborts_live_requests() -> None:
    """They end as aborted, not as lost, and go to no other replica."""
    bench = ClusterBench(2, max_model_len=4096, pool_tokens=8192)
    params = SamplingParams(max_tokens=3000, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            streams = [bench.llm.stream(prompt, params) for prompt in prompts(4)]
            for stream in streams:
                await anext(stream)
            await bench.llm.aclose()
            for stream in streams:
                last = [event async for event in stream][-1].output
                assert last is not None
                assert last.error is None
                assert last.finish_reason is FinishReason.ABORT
            assert bench.llm.dispatch.num_resumptions == 0

    run(main())


def test_logprobs_explanations_and_several_answers_travel() -> None:
    """Everything in an increment and in an output is what `AsyncLLM` gives."""
    bench, alone = ClusterBench(1), AsyncBench()
    params = SamplingParams(
        max_tokens=5, n=2, logprobs=2, prompt_logprobs=1, temperature=1.0, seed=4, ignore_eos=True
    )
    prompt = prompts(1)[0]

    async def main() -> None:
        async with bench.running(), alone.llm:
            for _ in range(2):
                streams = [
                    llm.stream(prompt, params, explain=True) for llm in (bench.llm, alone.llm)
                ]
                ours, theirs = [[event async for event in stream] for stream in streams]
                reports = [e.prefix for e in ours if e.prefix]
                places = [report.placement for report in reports]
                assert [place and (place.replica, place.reason) for place in places] == [
                    (0, "only")
                ]
                assert [replace(report, placement=None) for report in reports] == [
                    e.prefix for e in theirs if e.prefix
                ]
                assert [e.cache for e in ours if e.cache] == [e.cache for e in theirs if e.cache]
                for index in range(2):
                    mine, other = (
                        merge_outputs([event for event in events if event.index == index])
                        for events in (ours, theirs)
                    )
                    assert mine.new_token_ids == other.new_token_ids
                    assert (mine.text, mine.logprobs) == (other.text, other.logprobs)
                    assert mine.finish_reason == other.finish_reason
                got, wanted = ours[-1].output, theirs[-1].output
                assert got is not None
                assert wanted is not None
                assert got.completions == wanted.completions
                assert got.prompt_logprobs == wanted.prompt_logprobs
                assert got.cache == wanted.cache
                assert not got.resumed

    run(main())


def test_admin_calls_reach_every_replica() -> None:
    """Statistics are sums, a prefix is pinned where it is cached, and clearing clears all."""
    bench = ClusterBench(3)
    prompt = [*range(3, 15)]

    async def main() -> None:
        async with bench.running():
            cache = bench.llm.cache
            warmed = await cache.warm([WarmPrompt(prompt)])
            assert (warmed.num_prompts, warmed.num_failed) == (1, 0)
            stats = await bench.llm.stats()
            assert stats.cache.cached_pages == 9
            assert stats.cache.page_size == 4
            pin = await cache.pin(prompt, owner="me")
            assert len(pin.key) == 12
            assert [listed.id for listed in await cache.pins()] == [pin.id]
            assert (await cache.clear()).num_pages == 6
            explanation = await cache.explain_to_tenant([*prompt, 1])
            assert explanation is not None
            assert explanation.hit_tokens == 12
            tree = await cache.tree(10)
            assert [node.num_pages for node in tree.nodes] == [3]
            await cache.unpin(pin)
            with pytest.raises(PinError, match=str(pin.id)):
                await cache.unpin(pin)
            assert (await cache.clear()).num_pages == 3
            with pytest.raises(PinError):
                await cache.pin(prompt)
            assert await cache.end_pins("me") == 0

    run(main())


def test_what_fails_on_one_replica_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A check fails if one cache is wrong; another call has the other's result, and a line in the log."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            await bench.llm.cache.check()
            engine = bench.members[1].llm
            page = await engine.run(lambda core: core.cache._store.ledger._free.pop())
            with pytest.raises(InvariantError):
                await bench.llm.cache.check()
            await engine.run(lambda core: core.cache._store.ledger._free.append(page))
            await bench.llm.cache.check()
            prefix = prompts(1, 8)[0]
            await bench.llm.cache.warm([WarmPrompt(prefix)])
            await engine.cache.clear()
            await bench.llm.run(PinPublicPrefixes([prefix], WarmupResult(1, 8, 0)))
            await bench.llm.cache.end_pins(PUBLIC)

    with caplog.at_level(logging.WARNING):
        run(main())
    failed = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert len(failed) == 1
    assert failed[0].startswith("replica 1: PinPublicPrefixes failed: no whole page of the prefix")


def test_the_log_names_a_replica_that_has_erased_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """One that is away keeps its cache, and comes back with it."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            await bench.llm.cache.clear()
            assert not caplog.messages
            await bench.members[1].kill()
            await until(lambda: bench.llm.dispatch.replicas["1"].welcome is None)
            await bench.llm.cache.clear()
            await bench.members[1].start_again()
            await bench.llm.all_ready(10.0)

    with caplog.at_level(logging.WARNING):
        run(main())

    lines = [line for line in caplog.messages if "ClearCache" in line]
    assert len(lines) == 1
    assert "ClearCache was not run on replica 1 (" in lines[0]


def test_warming_survives_the_death_of_a_replica() -> None:
    """The prompts of the one that died count as failed or not at all; the others compute theirs."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            first, second = bench.members
            first.gate.is_open = False
            warming = asyncio.ensure_future(
                bench.llm.cache.warm([WarmPrompt(prompt) for prompt in prompts(3, 18)])
            )
            await first.gate.arrive()
            await first.kill()
            warmed = await warming
            assert warmed.num_prompts == warmed.num_failed == 3
            assert (await second.llm.cache.stats()).cached_pages > 0

    run(main())


def test_many_calls_and_grammars_end_no_connection() -> None:
    """More calls than run at once wait at the server; those that nobody waits for take no place for ever."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            member = bench.members[0]
            member.gate.is_open = False
            live = asyncio.ensure_future(bench.llm.generate(prompts(1)[0]))
            await until(lambda: member.llm.health().is_busy)
            [connection] = member.replica._connections
            left, calls = (
                [
                    asyncio.ensure_future(bench.llm.cache.explain_to_tenant([3] * 9))
                    for _ in range(count)
                ]
                for count in (MAX_CALLS, 2 * MAX_CALLS)
            )
            await until(lambda: connection._num_calls == MAX_CALLS)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            member.gate.is_open = True
            member.gate.open()
            assert None not in await asyncio.gather(*calls)
            assert (await live).error is None
            assert not member.replica.num_broken

    run(main())


def test_nobody_waits_for_a_connection_that_has_ended() -> None:
    """What was still to be sent when the server left is sent to nobody: `flush` returns."""
    bench = AsyncBench()

    async def never(body: bytes) -> None:
        del body
        await asyncio.Event().wait()

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield

    async def main() -> None:
        async with bench.llm:
            connection = Connection(bench.llm, never, "test", lambda *_: None)
            connection.send(Pong(1))
            await connection.run(nothing())
            async with asyncio.timeout(5.0):
                await connection.flush()

    run(main())


def test_a_large_message_is_no_slow_reader() -> None:
    """A message of up to the limit is sent while nothing else waits; a second one is too much."""
    bench = AsyncBench()
    large = Return(1, msgspec.Raw(msgspec.msgpack.encode(bytes(MAX_UNSENT_BYTES + 1))))

    async def write(body: bytes) -> None:
        del body

    async def main() -> None:
        async with bench.llm:
            connection = Connection(bench.llm, write, "test", lambda *_: None)
            connection.send(large)
            before = connection.failure
            connection.send(Pong(1))
            assert before is None
            assert "reads too slowly" in str(connection.failure)

    run(main())


def test_what_a_drain_cuts_short_goes_on_elsewhere() -> None:
    """A replica that may not wait longer ends no answer: another one goes on with it."""
    bench = ClusterBench(2)
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            for member in bench.members:
                member.gate.is_open = False
            stream = bench.llm.stream(prompts(1)[0], params)
            request_id = await stream.accepted()
            first = bench.place_of(request_id)
            first.gate.allowed.release()
            await anext(stream)
            draining = asyncio.ensure_future(first.replica.drain(0.05))
            await until(lambda: bench.place_of(request_id) is not first)
            for member in bench.members:
                member.gate.open()
            output = [event async for event in stream][-1].output
            assert output is not None
            assert list(output.token_ids) == expected(prompts(1)[0], 20, ends=())
            assert output.finish_reason is FinishReason.LENGTH
            assert not await draining

    run(main())


def test_a_drained_replica_finishes_and_the_others_take_over() -> None:
    """`drain` of a replica loses no request; a drain of the client refuses new ones."""
    bench = ClusterBench(2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            tasks = [
                asyncio.ensure_future(bench.llm.generate(prompt, params)) for prompt in prompts(8)
            ]
            await until(lambda: bench.llm.dispatch.num_live == 8)
            assert await bench.members[0].replica.drain(10.0)
            for prompt, output in zip(prompts(8), await asyncio.gather(*tasks), strict=True):
                assert list(output.token_ids) == expected(prompt, 40, ends=())
            assert (await bench.llm.generate(prompts(1)[0], params)).error is None
            assert await bench.llm.drain(10.0)
            with pytest.raises((DrainingError, EngineStoppedError)):
                await bench.llm.generate(prompts(1)[0], params)

    run(main())
