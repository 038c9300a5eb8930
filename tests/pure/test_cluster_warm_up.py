"""A replica that joins later computes what others have: public prefixes, `--warm`, hot prefixes."""

import asyncio
import logging
from array import array
from typing import Any

import pytest

from ramify.cache import CacheKey
from ramify.cluster.credentials import Credentials
from ramify.cluster.remote_replica import RemoteReplica
from ramify.cluster.warm_up import WarmUp
from ramify.engine.cache_admin.warmup import PUBLIC, WarmPrompt
from ramify.params import SamplingParams
from tests.pure.cluster_bench import ClusterBench, Member, prompts, run, until
from tests.pure.least_loaded import LeastLoaded

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
TOKENS = SamplingParams(max_tokens=3, ignore_eos=True)
SHARED = [*range(3, 23)]  # 5 pages


async def num_cached(member: Member, ids: list[int]) -> int:
    """Tokens of a prefix that a replica has cached."""
    key = CacheKey(array("i", [*ids, 1]), member.bench.core.namespaces.base)
    return await member.llm.run(lambda core: core.cache.match(key).num_tokens)


async def until_cached(member: Member, ids: list[int], num_tokens: int) -> None:
    async with asyncio.timeout(10.0):
        while await num_cached(member, ids) < num_tokens:  # noqa: ASYNC110 - polls the engine
            await asyncio.sleep(0.01)


async def start_again(bench: ClusterBench, number: int) -> Member:
    member = bench.members[number]
    await member.kill()
    replica = bench.llm.dispatch.replicas[str(number)]
    await until(lambda: not replica.is_ready)
    await member.start_again()
    await until(lambda: replica.is_ready)
    return member


def test_hot_prefixes_are_computed_where_a_replica_joins() -> None:
    """Those that several prompts began with, and no other; a request for them hits there at once."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            for end in range(6):
                await bench.llm.generate([*SHARED, 30 + end, 31], TOKENS)
            alone = [*range(25, 45)]
            await bench.llm.generate(alone, TOKENS)
            member = await start_again(bench, 1)
            await until_cached(member, SHARED, 20)
            await until(lambda: bench.llm.dispatch.num_live == 0)
            assert await num_cached(member, alone) == 0
            bench.llm.dispatch.replicas["0"].is_draining = True
            output = await bench.llm.generate([*SHARED, 49], TOKENS)
            assert output.cache.read_tokens == 20

    run(main())


def test_hot_prefixes_wait_until_the_replica_is_idle() -> None:
    """Requests of clients come first: a replica takes them as soon as it has joined."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            for end in range(6):
                await bench.llm.generate([*SHARED, 30 + end, 31], TOKENS)
            member = bench.members[1]
            await member.kill()
            await until(lambda: not bench.llm.dispatch.replicas["1"].is_ready)
            bench.llm.dispatch.replicas["0"].is_draining = True
            await member.start_again()
            member.gate.is_open = False
            await until(lambda: bench.llm.dispatch.replicas["1"].is_ready)
            live = asyncio.ensure_future(bench.llm.generate(prompts(1)[0], TOKENS))
            await member.gate.arrive()
            await asyncio.sleep(0.3)
            assert bench.llm.dispatch.num_live == 1
            member.gate.open()
            assert (await live).error is None
            await until_cached(member, SHARED, 20)
            bench.llm.dispatch.replicas["0"].is_draining = False
            await until(lambda: bench.llm.dispatch.num_live == 0)

    run(main())


def test_hot_prefixes_do_not_wait_for_ever() -> None:
    """A replica that always has a request is warmed beside them."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            for end in range(6):
                await bench.llm.generate([*SHARED, 30 + end, 31], TOKENS)
            member = bench.members[1]
            await member.kill()
            replica = bench.llm.dispatch.replicas["1"]
            await until(lambda: not replica.is_ready)
            bench.llm.dispatch.replicas["0"].is_draining = True

            async def ask_again_and_again() -> None:
                while True:
                    await bench.llm.generate(prompts(1)[0], TOKENS)

            await member.start_again()
            await until(lambda: replica.is_ready)
            clients = [asyncio.ensure_future(ask_again_and_again()) for _ in range(3)]
            await until_cached(member, SHARED, 20)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            bench.llm.dispatch.replicas["0"].is_draining = False
            await until(lambda: bench.llm.dispatch.num_live == 0)

    run(main())


def test_a_part_that_fails_is_logged_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Public prefixes that cannot be computed, by a bug or not, leave the warm-up prompts."""
    computed: list[Any] = []

    async def compute(prompt: WarmPrompt, replica: RemoteReplica) -> Any:
        del replica
        if prompt.prompt == SHARED:
            raise ZeroDivisionError("planted")
        computed.append(prompt)
        return ValueError("refused")

    async def main() -> None:
        cluster: Any = None
        replica = RemoteReplica("9", 9, "127.0.0.1:1", cluster, Credentials())
        warm_up = WarmUp(LeastLoaded(), compute)
        warm_up.declare_public([SHARED])
        warm_up.remember([WarmPrompt([7, 8])])
        warm_up.begin(replica)
        await until(lambda: bool(computed))
        await asyncio.sleep(0)
        await warm_up.close()

    with caplog.at_level(logging.WARNING):
        run(main())
    messages = [record.getMessage() for record in caplog.records]
    assert "replica 9: a part of its warm-up has ended by a bug" in messages
    assert "replica 9: a prompt was not warmed: refused" in messages


def test_what_is_forgotten_meanwhile_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes that are deleted while a replica that has joined computes those before them."""
    computed, called = list[Any](), list[Any]()

    async def main() -> None:
        async def compute(prompt: WarmPrompt, replica: RemoteReplica) -> Any:
            computed.append(prompt.prompt)
            if prompt.prompt == [1, 2]:
                warm_up.forget_pinned(PUBLIC, [1, 2])
                warm_up.forget_pinned("ann", [5, 6])
            return ValueError("refused")

        async def call(self: RemoteReplica, call: Any) -> None:
            called.append(call)

        monkeypatch.setattr(RemoteReplica, "call", call)
        cluster: Any = None
        warm_up = WarmUp(LeastLoaded(), compute)
        warm_up.declare_public([[1, 2]])
        kept, gone = (WarmPrompt(ids, "ann", retention=((2, None),)) for ids in ([3, 4], [5, 6]))
        warm_up.remember([gone, kept])
        warm_up.begin(RemoteReplica("9", 9, "127.0.0.1:1", cluster, Credentials()))
        await until(lambda: [3, 4] in computed)
        await warm_up.close()

    run(main())
    assert computed == [[1, 2], [3, 4]]
    assert called == []


def test_public_prefixes_and_warm_prompts_reach_replicas_that_join_later() -> None:
    """Pinned and shared by all tenants there, as at those that were there."""
    bench = ClusterBench(2)
    warm = [*range(25, 45)]

    async def main() -> None:
        async with bench.running():
            await bench.llm.cache.share([WarmPrompt(SHARED)])
            await bench.llm.cache.warm([WarmPrompt(warm)])
            member = await start_again(bench, 1)
            await until_cached(member, SHARED, 20)
            await until_cached(member, warm, 20)

            async def is_pinned() -> bool:
                return len(await member.llm.cache.pins(PUBLIC)) == 1

            async with asyncio.timeout(10.0):
                while not await is_pinned():  # noqa: ASYNC110 - polls the engine
                    await asyncio.sleep(0.01)
            bench.llm.dispatch.replicas["0"].is_draining = True
            stream = bench.llm.stream([*SHARED, 49, 48, 47, 46, 45], TOKENS, tenant="a")
            assert (await stream.whole()).cache.read_tokens == 20
            await bench.llm.cache.end_pins(PUBLIC)

    run(main())


def test_pins_that_go_on_are_made_where_a_replica_joins_later() -> None:
    """A call for another tenant's pins of the same tokens ends none, and forgets none."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            cache = bench.llm.cache
            await cache.warm([WarmPrompt(SHARED, "ann", retention=((20, None),))])
            assert await cache.unpin_prefix(SHARED, owner="ann") == 0
            assert await cache.unpin_prefix(SHARED, owner="ann", tenant="bob") == 0
            member = await start_again(bench, 1)
            async with asyncio.timeout(10.0):
                while not await member.llm.cache.pins("ann"):  # noqa: ASYNC110 - polls the engine
                    await asyncio.sleep(0.01)
            assert await cache.unpin_prefix(SHARED, owner="ann", tenant="ann") > 0

    run(main())


def test_other_weights_are_warmed_again() -> None:
    """What was public and hot with the old weights is computed with those that replace them."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            await bench.llm.cache.share([WarmPrompt(SHARED)])
            hot = [*range(24, 44)]
            for end in range(6):
                await bench.llm.generate([*hot, 3 + end, 4], TOKENS)
            await bench.llm.reload_weights("new")
            for member in bench.members:
                await until_cached(member, SHARED, 20)
                await until_cached(member, hot, 20)
                assert member.bench.core.namespaces.base == b"new"
            await until(lambda: bench.llm.dispatch.num_live == 0)
            await bench.llm.cache.end_pins(PUBLIC)

    run(main())
