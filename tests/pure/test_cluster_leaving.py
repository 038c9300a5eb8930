"""Clients and servers that leave: their requests end within two steps, and no socket is left."""

import asyncio
import sys
from pathlib import Path

import pytest

from ramify.cluster.client import ClusterLLM
from ramify.params import SamplingParams
from tests.pure.cluster_bench import ClusterBench, Member, prompts, run, until
from tests.pure.engine_bench import expected

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
PROMPT = prompts(1)[0]
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
TWO_STEPS = 2


async def assert_ends_within_two_steps(member: Member) -> None:
    """Allow steps until nothing is live; the one that stands at the gate is the first."""
    core = member.bench.core
    [connection] = member.replica._connections
    # The abort has arrived, and waits for the end of the step.
    await until(lambda: not connection._requests)
    before = member.bench.device.num_steps
    for _ in range(TWO_STEPS):
        member.gate.allowed.release()
    await until(lambda: not core.live)
    assert member.bench.device.num_steps - before <= TWO_STEPS
    member.gate.open()


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("num_answers", [1, 3])
def test_a_replica_stops_when_the_client_has_gone(num_tokens: int, num_answers: int) -> None:
    """Before the first token and after some, with one answer and with several."""
    bench = ClusterBench(1)
    params = SamplingParams(max_tokens=40, n=num_answers, temperature=1.0, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            member = bench.members[0]
            member.gate.is_open = False
            stream = bench.llm.stream(PROMPT, params)
            await stream.accepted()
            await member.gate.arrive()
            for _ in range(num_tokens):
                member.gate.allowed.release()
                for _ in range(num_answers):
                    await anext(stream)
                await member.gate.arrive()
            await stream.aclose()
            assert bench.llm.dispatch.num_live == 0
            await assert_ends_within_two_steps(member)
            bench.assert_nothing_reserved()
            assert (await bench.llm.generate(PROMPT, SHORT)).error is None

    run(main())


def test_a_replica_stops_when_a_server_has_gone() -> None:
    """Its requests end without a word of it; those of another server go on."""
    bench = ClusterBench(1)
    long = SamplingParams(max_tokens=30, ignore_eos=True)

    async def main() -> None:
        async with bench.running():
            member = bench.members[0]
            other = ClusterLLM({"0": f"127.0.0.1:{member.port}"}, None)
            await other.start(10.0)
            await other.all_ready(10.0)
            member.gate.is_open = False
            mine = asyncio.ensure_future(bench.llm.generate(PROMPT, long))
            await member.gate.arrive()
            theirs = other.stream(prompts(2)[1], SamplingParams(max_tokens=60, ignore_eos=True))
            await theirs._begin()
            await until(lambda: len(other.dispatch.replicas["0"].requests) == 1)
            await other.dispatch.members.close()  # the process has gone
            await until(lambda: sum(len(c._requests) for c in member.replica._connections) == 1)
            member.gate.open()
            assert list((await mine).token_ids) == expected(PROMPT, 30, ends=())
            await until(lambda: not member.bench.core.live)
            # As many steps as the answer that goes on has tokens, and two.
            assert member.bench.device.num_steps <= 30 + TWO_STEPS
            await theirs.aclose()
            await other.aclose()

    run(main())


def num_sockets() -> int:
    """Of this process."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += str(entry.readlink()).startswith("socket:")
        except OSError:  # it was that of the list itself
            continue
    return count


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_socket_is_left() -> None:
    """After replicas that died and came back, servers that left, and calls."""

    async def once() -> None:
        bench = ClusterBench(2)
        async with bench.running():
            for number in range(4):
                member = bench.members[number % 2]
                answers = [
                    asyncio.ensure_future(bench.llm.generate(prompt, SHORT))
                    for prompt in prompts(6)
                ]
                await member.kill()
                await member.start_again()
                assert not [output for output in await asyncio.gather(*answers) if output.error]
                await bench.llm.all_ready(10.0)
            await bench.llm.stats()
            other = ClusterLLM({"0": f"127.0.0.1:{bench.members[0].port}"}, None)
            await other.start(10.0)
            await other.aclose()

    async def main() -> None:
        await once()  # what gRPC makes for the process, and keeps
        before = num_sockets()
        await once()
        await until(lambda: num_sockets() <= before)

    run(main())
