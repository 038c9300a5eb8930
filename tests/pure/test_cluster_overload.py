"""Full queues: refused as by one engine, by tenant; what was cut off waits for its rest."""

import asyncio
from typing import Any

import pytest

from ramify.cluster.codecs import encode_error
from ramify.cluster.routes import CacheRoutes
from ramify.engine.scheduling.queue_limits import QueueLimits
from ramify.errors import ClusterFullError, OverloadedError, ReplicaLostError
from ramify.outputs import FinishReason, RequestOutput
from ramify.params import SamplingParams
from ramify.server.errors import as_api_error
from tests.pure.cluster_bench import ClusterBench, prompts, run, until
from tests.pure.engine_bench import expected

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
TOKENS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPT = prompts(1)[0]


def small() -> ClusterBench:
    """Two replicas whose steps are held: each runs a request, and lets two wait."""
    return ClusterBench(2, max_num_seqs=1, options={"max_waiting": 2})


async def hold(bench: ClusterBench) -> None:
    """Let no step begin, once the router knows the limits of the queues."""
    routes = bench.routes
    assert isinstance(routes, CacheRoutes)
    await until(lambda: all(work.max_waiting == 2 for work in routes.router._replicas.values()))
    for member in bench.members:
        member.gate.is_open = False


def release(bench: ClusterBench) -> None:
    for member in bench.members:
        member.gate.open()


def send(bench: ClusterBench, count: int, **options: Any) -> list[asyncio.Task[RequestOutput]]:
    streams = [bench.llm.stream(prompt, TOKENS, **options) for prompt in prompts(count)]
    return [asyncio.ensure_future(stream.whole()) for stream in streams]


def test_full_queues_refuse_as_one_engine_does() -> None:
    """At once, with a time to wait; what was accepted ends as it should, and then there is room."""
    bench = small()

    async def main() -> None:
        async with bench.running():
            await hold(bench)
            tasks = send(bench, 12)
            await until(lambda: sum(task.done() for task in tasks) == 8)
            refused = [task.exception() for task in tasks if task.done()]
            assert {type(error) for error in refused} == {ClusterFullError}
            assert all(1 <= error.retry_after_s <= 60 for error in refused)  # type: ignore[union-attr]
            release(bench)
            for prompt, task in zip(prompts(12), tasks, strict=True):
                if task.exception() is None if task.done() else True:
                    assert list((await task).token_ids) == expected(prompt, 12, ends=())
            assert (await bench.llm.generate(PROMPT, TOKENS)).error is None

    run(main())


def test_the_status_of_full_queues_is_that_of_a_full_queue() -> None:
    """503 with `Retry-After` and one code: a client need not know how many engines there are."""
    ours, theirs = as_api_error(ClusterFullError(2, 7.4)), as_api_error(OverloadedError(9, 9, 7.4))

    assert (ours.status, ours.code, ours.headers) == (503, "overloaded", {"Retry-After": "7"})
    assert (ours.status, ours.headers, ours.openai()) == (
        theirs.status,
        theirs.headers,
        theirs.openai(),
    )


def test_a_tenant_without_its_share_enters_a_full_queue() -> None:
    """One that fills all queues keeps nobody else out, and is refused itself."""
    bench = small()

    async def main() -> None:
        async with bench.running():
            await hold(bench)
            first = send(bench, 12, tenant="a")
            await until(lambda: sum(task.done() for task in first) == 8)
            [other] = send(bench, 1, tenant="b")
            [again] = send(bench, 1, tenant="a")
            with pytest.raises(ClusterFullError):
                await again
            release(bench)
            assert list((await other).token_ids) == expected(PROMPT, 12, ends=())
            await asyncio.gather(*first, return_exceptions=True)

    run(main())


def test_the_limits_are_those_of_all_queues() -> None:
    """A request of several prompts may have as many as wait at all replicas together."""
    bench = small()

    async def main() -> None:
        async with bench.running():
            single = QueueLimits.of(bench.members[0].llm.config)
            assert bench.members[0].llm.queue_limits == single
            assert single.max_waiting_tokens is not None
            assert bench.llm.queue_limits == QueueLimits(4, 2 * single.max_waiting_tokens)

    run(main())
    assert QueueLimits.total([QueueLimits(3, 5), QueueLimits(None, 6)]) == QueueLimits(None, 11)


async def cut_off(bench: ClusterBench) -> tuple[Any, int, list[asyncio.Task[RequestOutput]]]:
    """A stream with a token whose replica dies while the other one is full; its id, and the others."""
    await hold(bench)
    replicas, (first, second) = bench.llm.dispatch.replicas, bench.members
    replicas["1"].is_draining = True
    stream = bench.llm.stream(PROMPT, TOKENS)
    request_id = await stream.accepted()
    first.gate.allowed.release()
    assert len((await anext(stream)).new_token_ids) == 1
    replicas["0"].is_draining, replicas["1"].is_draining = True, False
    others = send(bench, 6)
    await second.gate.arrive()
    await until(lambda: any(task.done() for task in others))
    await first.kill()
    await until(lambda: len(bench.llm.dispatch._parked) == 1)
    return stream, request_id, others


def test_an_answer_that_was_cut_off_waits_for_room() -> None:
    """Its client cannot ask for the rest: it goes on when one of the others has ended."""
    bench = small()

    async def main() -> None:
        async with bench.running():
            stream, _, others = await cut_off(bench)
            release(bench)
            events = [event async for event in stream]
            output = events[-1].output
            assert output.finish_reason is FinishReason.LENGTH
            assert list(output.token_ids) == expected(PROMPT, 12, ends=())
            assert sum(len(event.new_token_ids) for event in events) == 11
            assert bench.llm.dispatch.num_resumptions == 1
            await asyncio.gather(*others, return_exceptions=True)

    run(main())


def test_the_wait_for_room_has_an_end() -> None:
    """Then the answer ends with one error, and nothing of it is left."""
    bench = small()

    async def main() -> None:
        async with bench.running(full_wait_s=0.1):
            stream, _, others = await cut_off(bench)
            output = [event async for event in stream][-1].output
            assert output.finish_reason is FinishReason.ERROR
            assert isinstance(output.error, OverloadedError | ReplicaLostError)
            assert len(bench.llm.dispatch._parked) == 0
            release(bench)
            await asyncio.gather(*others, return_exceptions=True)

    run(main())


@pytest.mark.parametrize("how", ["abort", "leave"])
def test_an_answer_that_waits_for_room_can_be_ended(how: str) -> None:
    """By its id, or by closing its stream."""
    bench = small()

    async def main() -> None:
        async with bench.running():
            stream, request_id, others = await cut_off(bench)
            if how == "abort":
                await bench.llm.abort(request_id)
                output = [event async for event in stream][-1].output
                assert output.finish_reason is FinishReason.ABORT
            else:
                await stream.aclose()
            assert len(bench.llm.dispatch._parked) == 0
            release(bench)
            await asyncio.gather(*others, return_exceptions=True)

    run(main())


def test_an_aborted_request_that_is_refused_goes_nowhere_else() -> None:
    """The replica's refusal may cross the abort: the answer ends as aborted."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            for member in bench.members:
                member.gate.is_open = False
            [task] = send(bench, 1)
            dispatch = bench.llm.dispatch
            await until(lambda: dispatch.num_live == 1)
            [request] = dispatch._live.values()
            replica, _ = dispatch._places[request.id]
            del replica.requests[request.key]
            request.is_aborted = True
            dispatch._refused(request, replica, encode_error(OverloadedError(1, 1, 1.0)))
            assert (await task).finish_reason is FinishReason.ABORT
            assert dispatch.num_live == 0
            release(bench)

    run(main())
