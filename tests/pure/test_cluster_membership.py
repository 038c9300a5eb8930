"""Replicas that come and go while a client runs."""

import asyncio
from functools import partial

import pytest

from ramify.cluster.client import ClusterLLM
from ramify.cluster.credentials import Credentials
from ramify.cluster.merging import MAX_REPLICAS
from ramify.cluster.remote_replica import RemoteReplica
from ramify.cluster.routes import CacheRoutes
from ramify.errors import ConfigError, NoReplicaError
from ramify.params import SamplingParams
from tests.pure.cluster_bench import Member, prompts, run, until
from tests.pure.engine_bench import expected

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SECRETS = [Credentials(secret=letter * 32) for letter in "abc"]


def has_failed(replica: RemoteReplica) -> bool:
    return replica.last_error is not None


async def close(member: Member) -> None:
    member.gate.is_open = True
    member.gate.open()
    await member.replica.close()
    member.assert_nothing_left()


def test_replicas_come_with_their_secrets_and_go() -> None:
    """A client begins with none, takes each that is added, and forgets each that is removed."""
    members = [Member() for _ in range(3)]

    async def main() -> None:
        routes = CacheRoutes()
        llm = ClusterLLM({}, None, routes=routes)
        for member, secret in zip(members, SECRETS, strict=True):
            await member.start(secret)
        start = asyncio.ensure_future(llm.start(10.0))
        await asyncio.sleep(0)
        for number, (member, secret) in enumerate(zip(members, SECRETS, strict=True)):
            llm.add(str(number), f"127.0.0.1:{member.port}", secret)
        await start
        await llm.all_ready(10.0)
        outputs = await asyncio.gather(*(llm.generate(ids, SHORT) for ids in prompts(12)))
        for ids, output in zip(prompts(12), outputs, strict=True):
            assert list(output.token_ids) == expected(ids, 4, ends=())
        assert all(member.bench.core.num_steps for member in members)
        assert routes.router.queues().keys() == {"0", "1", "2"}

        llm.remove("1")
        await close(members[1])
        await until(lambda: "1" not in llm.dispatch.replicas)

        assert routes.router.queues().keys() == {"0", "2"}
        assert not routes.router.mirrors.is_known("1")
        assert not (await llm.generate(prompts(1)[0], SHORT)).resumed
        await llm.aclose()
        for member in (members[0], members[2]):
            await close(member)

    run(main())


def test_a_removed_replica_ends_what_it_has() -> None:
    """Its answers go on over the connection that there is; `add` before its end keeps it."""
    member = Member(max_model_len=4096, pool_tokens=8192)

    async def main() -> None:
        await member.start()
        address = f"127.0.0.1:{member.port}"
        llm = ClusterLLM({"0": address}, None)
        await llm.start(10.0)
        stream = llm.stream(prompts(1)[0], LONG)
        await anext(stream)

        llm.remove("0")
        events = [event async for event in stream]

        output = events[-1].output
        assert output is not None
        assert list(output.token_ids) == expected(prompts(1)[0], 60, ends=())
        assert llm.dispatch.num_resumptions == 0
        llm.add("0", address)
        await member.kill()
        await member.start_again()
        await until(lambda: llm.dispatch.members.has_ready)
        llm.remove("0")
        await close(member)
        await until(lambda: not llm.dispatch.replicas)
        with pytest.raises(NoReplicaError):
            await llm.generate(prompts(1)[0], SHORT)
        await llm.aclose()

    run(main())


def test_a_replica_that_is_leaving_may_come_back_elsewhere() -> None:
    """Added again at another address and with another secret, it is connected to there in the end."""
    members = [Member(max_model_len=4096, pool_tokens=8192) for _ in range(2)]

    async def main() -> None:
        for member, secret in zip(members, SECRETS, strict=False):
            await member.start(secret)
        llm = ClusterLLM({"0": f"127.0.0.1:{members[0].port}"}, None, credentials=SECRETS[0])
        await llm.start(10.0)
        stream = llm.stream(prompts(1)[0], LONG)
        events = [await anext(stream)]  # on a busy machine it may be the whole answer

        llm.remove("0")
        llm.add("0", f"127.0.0.1:{members[1].port}", SECRETS[1])
        events += [event async for event in stream]
        assert events[-1].output is not None
        assert llm.dispatch.num_resumptions == 0
        await close(members[0])
        await until(lambda: llm.dispatch.replicas["0"].num_starts == 2)

        await llm.generate(prompts(2)[1], SHORT)
        assert members[1].bench.core.num_steps
        await llm.aclose()
        await close(members[1])

    run(main())


def test_one_that_nobody_answers_for_is_removed_at_once() -> None:
    """Between two tries to connect as well; its number is given to another one late."""

    async def main() -> None:
        llm = ClusterLLM({}, None)
        start = asyncio.ensure_future(llm.start(30.0))
        await asyncio.sleep(0)
        slots = []
        for number in range(3):
            llm.add(str(number), "127.0.0.1:1")
            replica = llm.dispatch.replicas[str(number)]
            slots.append(replica.slot)
            await until(partial(has_failed, replica))
            llm.remove(str(number))
            await until(lambda: not llm.dispatch.replicas)
        assert slots == [0, 1, 2]
        llm.dispatch.members._num_slots = MAX_REPLICAS
        llm.add("again", "127.0.0.1:1")
        assert llm.dispatch.replicas["again"].slot == 0
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await llm.aclose()

    run(main())


def test_one_server_has_a_limit_of_replicas() -> None:
    """Their numbers are part of the ids of pins."""
    llm = ClusterLLM({str(number): "127.0.0.1:1" for number in range(MAX_REPLICAS)}, None)

    with pytest.raises(ConfigError, match="replica 1025 of one server, and the most are 1024"):
        llm.add("more", "127.0.0.1:1")
