"""A replica dies: each request ends once, with the tokens of an engine that never died."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from ramify.cluster.dispatch import MAX_RESUMPTIONS
from ramify.cluster.remote_request import RemoteRequest
from ramify.cluster.wire import PROTOCOL_VERSION, Output, Welcome
from ramify.engine.core import EngineCore
from ramify.engine.description import EngineDescription
from ramify.engine.identity import EngineIdentity
from ramify.engine.request_options import RequestOptions
from ramify.engine.serving.streams import LoopDispatcher, OutputCollector
from ramify.errors import NoReplicaError, ReplicaLostError
from ramify.outputs import FinishReason, RequestOutput, StepOutput
from ramify.params import SamplingParams
from tests.pure.cluster_bench import ClusterBench, Member, prompts, run, until
from tests.pure.engine_bench import Bench, expected

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
PROMPT = prompts(1)[0]


def whole(params: SamplingParams, prompt: Sequence[int] = PROMPT) -> RequestOutput:
    """The answer of one engine that nobody disturbs."""
    bench = Bench()
    request_id = bench.core.add_request(prompt, params)
    while bench.core.has_unfinished:
        for event in bench.core.step():
            if event.output is not None:
                assert event.request_id == request_id
                return event.output
    raise AssertionError("no output")


async def read_and_kill(
    bench: ClusterBench, params: SamplingParams, kill_at: set[int]
) -> tuple[list[StepOutput], RequestOutput]:
    """Read a stream token by token; kill the replica that computes it after these numbers of tokens."""
    for member in bench.members:
        member.gate.is_open = False
    stream = bench.llm.stream(PROMPT, params)
    request_id = await stream.accepted()
    events: list[StepOutput] = []
    num_tokens = 0
    while True:
        member = bench.place_of(request_id)
        if num_tokens in kill_at:
            kill_at.discard(num_tokens)
            await member.kill()
            await until(partial(has_left, bench, request_id, member))
            continue
        member.gate.allowed.release()
        for _ in range(params.n):  # each answer gets a token in a step
            event = await anext(stream)
            events.append(event)
            if event.output is not None:
                return events, event.output
        num_tokens += 1


def has_left(bench: ClusterBench, request_id: int, member: Member) -> bool:
    place = bench.llm.dispatch._places.get(request_id)
    return place is None or bench.member_of(place[0].name) is not member


def is_ready(bench: ClusterBench, number: int) -> bool:
    return bench.llm.dispatch.replicas[str(number)].is_ready


@pytest.mark.parametrize("num_tokens", range(9))
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "n": 2}, {"stop": ("zz",), "logprobs": 1}],
    ids=["greedy", "sampled", "two answers", "stop strings"],
)
def test_a_death_after_each_token(num_tokens: int, options: dict[str, Any]) -> None:
    """Whenever the replica dies, the client gets the undisturbed answer, each token once."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, **options)
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            seeded = params.seeded() if "temperature" in options else params
            events, output = await read_and_kill(bench, seeded, {num_tokens} - {8})
            wanted = whole(seeded)
            assert output.completions == wanted.completions
            for index in range(params.n):
                own = [event for event in events if event.index == index]
                tokens = [token for event in own for token in event.new_token_ids]
                assert tuple(tokens) == wanted.completions[index].token_ids
                assert "".join(event.text for event in own) == wanted.completions[index].text
                assert sum(event.finish_reason is not None for event in own) == 1
            assert output.usage.completion_tokens == wanted.usage.completion_tokens
            assert output.usage.prompt_tokens == len(PROMPT)
            assert output.error is None
            assert not output.resumed, "both replicas are exact and have one identity"
            dispatch = bench.llm.dispatch
            assert dispatch.num_resumptions == (0 < num_tokens < 8)
            assert dispatch.num_reroutes == (num_tokens == 0)

    run(main())


def test_a_resumed_answer_is_no_wrong_prediction() -> None:
    """What the router expected of the second replica is not compared with the hit on the first."""
    bench = ClusterBench(2)
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            first = await bench.llm.generate(PROMPT, params)
            _, output = await read_and_kill(bench, params, {2})
            assert output.cache.read_tokens > first.cache.read_tokens == 0
            counts = bench.llm.replicas.counts()
            assert (counts.resumptions, counts.wrong_tokens) == (1, 0)

    run(main())


def test_an_answer_survives_two_deaths() -> None:
    """A third replica ends what two have begun."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    bench = ClusterBench(3)

    async def main() -> None:
        async with bench.running():
            _, output = await read_and_kill(bench, params, {2, 4})
            assert output.token_ids == whole(params).token_ids
            assert output.usage.completion_tokens == 20

    run(main())


def test_a_replica_that_was_full_may_take_over_later() -> None:
    """What has refused a request before another accepted it goes on with it when that one dies."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            for member in bench.members:
                member.gate.is_open = False
            stream = bench.llm.stream(PROMPT, params)
            await stream._begin()
            [request] = bench.llm.dispatch._live.values()
            first = bench.place_of(request.id)
            [other] = [member for member in bench.members if member is not first]
            request.refused_by.add(str(bench.members.index(other)))
            await stream.accepted()
            first.gate.allowed.release()
            await anext(stream)
            await first.kill()
            other.gate.open()
            output = [event async for event in stream][-1].output
            assert output is not None
            assert output.token_ids == whole(params).token_ids

    run(main())


def test_the_third_death_ends_an_answer() -> None:
    """Its reader gets one error, and the tokens so far."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    bench = ClusterBench(4)

    async def main() -> None:
        async with bench.running():
            for member in bench.members:
                member.gate.is_open = False
            stream = bench.llm.stream(PROMPT, params)
            request_id = await stream.accepted()
            for _ in range(3):
                member = bench.place_of(request_id)
                member.gate.allowed.release()
                await anext(stream)
                await member.kill()
                await until(partial(has_left, bench, request_id, member))
            last = await anext(stream)
            assert last.output is not None
            assert isinstance(last.output.error, ReplicaLostError)
            assert last.output.token_ids == whole(params).token_ids[:3]

    run(main())


@pytest.mark.parametrize("is_lost", [False, True], ids=["closed", "lost"])
def test_each_of_several_answers_gets_its_end(is_lost: bool) -> None:
    """As of one engine: a stream has a finish reason for every choice, and the output comes last."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=3, temperature=1.0)
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            member = bench.members[0]
            member.gate.is_open = False
            stream = bench.llm.stream(PROMPT, params)
            await stream.accepted()
            member.gate.allowed.release()
            for _ in range(3):
                await anext(stream)
            await (member.kill() if is_lost else bench.llm.aclose())
            ends = [event async for event in stream if event.finish_reason is not None]
            assert [event.index for event in ends] == [0, 1, 2]
            assert [event.output is not None for event in ends] == [False, False, True]
            reason = FinishReason.ERROR if is_lost else FinishReason.ABORT
            assert {event.finish_reason for event in ends} == {reason}

    run(main())


def test_a_replica_that_refuses_has_not_gone_on() -> None:
    """`resumed` is of the replica whose tokens came, not of one with another identity that was full."""
    core = Bench().core
    first = EngineIdentity.of_namespace(core.namespaces.base, core.config)
    other = replace(first, threads=first.threads + 1)

    async def main() -> list[bool]:
        collector = OutputCollector(LoopDispatcher(asyncio.get_running_loop()), final_only=False)
        params = SamplingParams(max_tokens=8, seed=1)
        ids = array("i", PROMPT)
        request = RemoteRequest(
            0, collector, ids, params, RequestOptions(), prompt=None, page_hashes=(), now_s=0.0
        )
        flags = []
        # Tokens of the first; nothing of one that refuses; tokens of an equal one, and of another.
        for identity, token_ids in ((first, [5]), (other, []), (first, [6]), (other, [7])):
            request.begin(welcome_of(core, identity))
            if token_ids:
                request.receive(Output(0, token_ids), 0.0)
            flags.append(request.is_resumed)
        return flags

    assert run(main()) == [False, False, False, True]


def welcome_of(core: EngineCore, identity: EngineIdentity) -> Welcome:
    description = EngineDescription(vocab_size=core.vocab_size, eos_token_ids=())
    base = core.namespaces.base
    return Welcome(PROTOCOL_VERSION, 1, "1", identity, base, None, core.config, description)


def test_no_replica_is_an_error_at_once() -> None:
    """Without a replica a request ends with an error that says when to try again."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            await bench.members[0].kill()
            await until(lambda: not bench.llm.dispatch.members.has_ready)
            with pytest.raises(NoReplicaError) as info:
                await bench.llm.generate(PROMPT)
            assert info.value.retry_after_s > 0
            assert bench.llm.replicas.counts().refusals == {"no replica": 1}
            assert str(bench.llm.health().state) == "unreachable"
            await bench.members[0].start_again()
            await until(lambda: bench.llm.dispatch.members.has_ready)
            assert (await bench.llm.generate(PROMPT)).error is None

    run(main())


def test_an_answer_goes_on_with_equal_weights_only() -> None:
    """Tokens of other weights are never mixed: the answer ends with an error; a new one begins anew."""
    bench = ClusterBench(1)
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            bench.members.append(Member())
            other = bench.members[1]
            other.bench.core.namespaces.base = b"other weights"
            other.llm._core_identity = type(other.llm._core_identity).of_namespace(
                b"other weights", other.bench.core.config
            )
            await other.start()
            dispatch = bench.llm.dispatch
            first = dispatch.replicas["0"]
            member = bench.members[0]
            member.gate.is_open = False
            stream = bench.llm.stream(PROMPT, params)
            await stream.accepted()
            member.gate.allowed.release()
            await anext(stream)
            first.address = f"127.0.0.1:{other.port}"  # what comes back there is another model
            await member.kill()
            await until(lambda: bench.llm.dispatch.num_live == 0)
            last = [event async for event in stream][-1]
            assert last.output is not None
            assert isinstance(last.output.error, ReplicaLostError)
            await until(lambda: dispatch.members.has_ready)
            output = await bench.llm.generate(PROMPT, params)
            assert list(output.token_ids) == expected(PROMPT, 20, ends=())

    run(main())


def test_many_requests_and_deaths() -> None:
    """Under load, with replicas that die and come back, every request ends once with the right tokens."""
    bench = ClusterBench(3)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    many = prompts(60)

    async def main() -> None:
        async with bench.running():
            tasks = [asyncio.ensure_future(bench.llm.generate(prompt, params)) for prompt in many]
            await until(lambda: bench.llm.dispatch.num_live > 0)
            # Not more: a request may be where each of them dies.
            for number in range(MAX_RESUMPTIONS):
                member = bench.members[number]
                await member.kill()
                await member.start_again()
                await until(partial(is_ready, bench, number))
            for prompt, output in zip(many, await asyncio.gather(*tasks), strict=True):
                assert list(output.token_ids) == expected(prompt, 30, ends=())
                assert output.usage.completion_tokens == 30

    run(main())
