"""Weights of several replicas are replaced in turn: what another process, machine or server does meanwhile."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.cluster.client import ClusterLLM
from ramify.cluster.rollout import replace_weights_in_turn
from ramify.errors import ConfigError, ReplicaLostError, RolloutError
from ramify.params import SamplingParams
from tests.pure.cluster_bench import ClusterBench, prompts, run, until

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
PROMPT = prompts(1)[0]
TOKENS = SamplingParams(max_tokens=24, ignore_eos=True)


class FakeReplica:
    """Has weights, and gets those that it is told to have."""

    is_ready, is_updating, last_error = True, False, None

    def __init__(self, name: str, restarts: bool = False, reads: str | None = None) -> None:
        self.name, self._restarts, self._reads = name, restarts, reads
        self._become(1, "old")

    def _become(self, incarnation: int, weights: str) -> None:
        identity = SimpleNamespace(weights=weights, digest=weights)
        self.welcome = SimpleNamespace(incarnation=incarnation, identity=identity)

    async def replace_weights(self, model: str, expected: str) -> None:
        assert expected == "old"
        self._become(2 if self._restarts else 1, self._reads or model)


def test_a_replica_that_came_back_as_another_process_has_not_the_weights() -> None:
    """Its keeper started it with those of before, so the update has failed."""
    names: list[str] = []
    replicas: Any = [FakeReplica("1", restarts=True)]

    with pytest.raises(ReplicaLostError, match="replica 1 ended before"):
        run(replace_weights_in_turn(replicas, "new", lambda *n: names.append(n[0])))

    assert names == []


def test_a_path_with_other_weights_at_another_machine_is_an_error() -> None:
    """The replicas would be of two models, and each would say that it has what was wanted."""
    replicas: Any = [FakeReplica("1"), FakeReplica("2", reads="newer")]

    with pytest.raises(
        RolloutError, match=r"replica 2 has other weights: .*newer.* first .* new"
    ) as info:
        run(replace_weights_in_turn(replicas, "new", lambda *_: None))

    assert info.value.done == ("1",)


def test_a_second_server_waits_for_the_first() -> None:
    """While a replica drains for one server, another one cannot begin."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            first = bench.members[0]
            first.gate.is_open = False
            live = asyncio.ensure_future(first.llm.generate(PROMPT, TOKENS))
            await first.gate.arrive()
            other = await another_server(bench)
            rolling = asyncio.ensure_future(bench.llm.reload_weights("new"))
            await until(lambda: other.dispatch.replicas["0"].is_updating)
            with pytest.raises(ConfigError, match="replica 0 replaces its weights for another"):
                await other.reload_weights("other")
            first.gate.open()
            await rolling
            await live
            await other.aclose()
            assert bench.llm.dispatch.members.namespaces() == [b"new"]

    run(main())


def test_of_two_servers_at_the_same_time_none_succeeds_by_halves() -> None:
    """The second begins between two replicas of the first: both are told of other weights."""
    bench = ClusterBench(3)

    async def main() -> None:
        async with bench.running():
            llm: Any = bench.members[1].llm
            load, is_loading, may_load = llm.load_weights, asyncio.Event(), asyncio.Event()

            async def slowly(model: str) -> Any:
                is_loading.set()
                await may_load.wait()
                return await load(model)

            llm.load_weights = slowly
            other = await another_server(bench)
            rolling = asyncio.ensure_future(bench.llm.reload_weights("new"))
            await is_loading.wait()
            await until(lambda: other.dispatch.replicas["0"].is_ready)
            with pytest.raises(
                RolloutError, match=r"replica 1 has other weights: .*being replaced"
            ):
                await other.reload_weights("other")
            may_load.set()
            with pytest.raises(RolloutError, match="replica 0 has other weights"):
                await rolling
            await other.aclose()
            await bench.llm.all_ready(10.0)
            await bench.llm.reload_weights("new")
            assert bench.llm.dispatch.members.namespaces() == [b"new"]

    run(main())


def test_a_replica_is_not_replaced_by_who_has_not_seen_its_weights() -> None:
    """The request names the identity that it replaces; nothing has changed."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            replica = bench.llm.dispatch.replicas["0"]
            assert replica.welcome is not None
            before = replica.welcome.identity.digest
            await bench.llm.reload_weights("new")
            with pytest.raises(ConfigError, match=f"and not {before}; send 'other' again"):
                await replica.replace_weights("other", before)
            assert bench.llm.dispatch.members.namespaces() == [b"new"]

    run(main())


async def another_server(bench: ClusterBench) -> ClusterLLM:
    addresses = {name: r.address for name, r in bench.llm.dispatch.replicas.items()}
    other = ClusterLLM(addresses, None)
    await other.start(10.0)
    await other.all_ready(10.0)
    return other
