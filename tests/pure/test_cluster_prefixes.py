"""A named prefix over several engines: computed and pinned at each, also at one that joins later."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ramify.cluster.client import ClusterLLM
from ramify.cluster.remote_replica import RemoteReplica
from ramify.cluster.replica import Replica
from ramify.engine.cache_admin.warmup import WarmPrompt
from ramify.errors import ReplicaLostError
from ramify.outputs import RequestOutput
from tests.pure.cluster_bench import run, until
from tests.pure.prefix_requests import CHAT, PATH, QUESTION, SYSTEM, body, cache_of, define
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench
from tests.pure.test_cluster_server import ClusterServer

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")


async def pinned(*benches: ServerBench) -> list[int]:
    """Tokens that each engine has pinned."""
    pins = [await bench.llm.cache.pins() for bench in benches]
    return [sum(len(pin.key) for pin in of_engine) for of_engine in pins]


@asynccontextmanager
async def joined(client: ClusterLLM, name: str) -> AsyncIterator[ServerBench]:
    """A further engine that has joined."""
    bench = ServerBench(chat_template=TOOL_TEMPLATE)
    replica = Replica(bench.llm)
    try:
        client.add(name, f"127.0.0.1:{await replica.start()}")
        await until(lambda: name in client.dispatch.replicas)
        await until(lambda: client.dispatch.replicas[name].is_ready)
        yield bench
        client.remove(name)
    finally:
        await replica.close()


@pytest.mark.parametrize("is_public", [False, True])
def test_every_engine_pins_a_prefix_until_it_is_deleted(is_public: bool) -> None:
    """Those that are there, and one that joins later; nothing is remembered for those that join then."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving() as client:
            defined = await define(bench, system=SYSTEM, public=is_public)
            whole = defined.json["pinned_tokens"]
            assert whole == defined.json["tokens"] // 16 * 16
            assert await pinned(bench, bench.other) == [whole, whole]
            used = await bench.post(CHAT, body(CHAT, QUESTION, prefix="desk"))
            assert cache_of(used)["prefix"]["read"] >= whole
            async with joined(client, "late") as late:
                while await pinned(late) != [whole]:  # noqa: ASYNC110 - polls the engine
                    await asyncio.sleep(0.01)
                await bench.call("DELETE", f"{PATH}/desk")
                assert await pinned(bench, bench.other, late) == [0, 0, 0]
            assert not client._warm_up._prompts
            assert not client._warm_up._public

    run(main())


def test_what_an_engine_could_not_compute_is_pinned_at_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of two engines is lost meanwhile: 503, no name, no pins, nothing for those that join."""
    compute = ClusterLLM._warm_one

    async def warm_one(
        self: ClusterLLM, prompt: WarmPrompt, replica: RemoteReplica
    ) -> RequestOutput | Exception:
        output = await compute(self, prompt, replica)
        is_first = replica is next(iter(self.dispatch.replicas.values()))
        return ReplicaLostError("planted") if is_first else output

    monkeypatch.setattr(ClusterLLM, "_warm_one", warm_one)

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving() as client:
            defined = await define(bench, system=SYSTEM)
            assert defined.status == 503
            assert await pinned(bench, bench.other) == [0, 0]
            assert not client._warm_up._prompts

    run(main())


def test_a_prefix_that_no_engine_could_unpin_is_deleted_by_the_next_try() -> None:
    """Without a connection to any engine: 503, and engines that join meanwhile do not pin it."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving() as client:
            assert (await define(bench, system=SYSTEM)).status == 200
            replicas = client.dispatch.replicas.values()
            welcomes = [replica.welcome for replica in replicas]
            for replica in replicas:
                replica.welcome = None
            assert (await bench.call("DELETE", f"{PATH}/desk")).status == 503
            assert not client._warm_up._prompts
            for replica, welcome in zip(replicas, welcomes, strict=True):
                replica.welcome = welcome
            assert (await bench.call("DELETE", f"{PATH}/desk")).status == 200
            assert await pinned(bench, bench.other) == [0, 0]

    run(main())
