"""One view over replicas: statistics, loads, explanations, and the flag of a resumed answer."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ramify.cluster.client import ClusterLLM
from ramify.cluster.decisions import Alternative, Decision, Refusal
from ramify.cluster.merging import MAX_REPLICAS
from ramify.outputs import Placement
from ramify.server.answers.route import route_text
from ramify.server.tenants import ApiKeys
from tests.pure.cluster_bench import run, until
from tests.pure.least_loaded import LeastLoaded
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, chat, gated
from tests.pure.test_cluster_server import ClusterServer

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
LONG = "Hello you there. " * 20
APIS: dict[str, tuple[str, Any]] = {
    "chat": ("/v1/chat/completions", chat("Hello", max_tokens=8, ignore_eos=True)),
    "completions": ("/v1/completions", {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}),
    "messages": ("/v1/messages", {"model": "tiny", **chat("Hello", max_tokens=8)}),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 8}),
}


# Else streams of these have no usage.
WITH_USAGE = {"stream_options": {"include_usage": True}}


def test_a_busy_replica_has_its_last_values() -> None:
    """A replica in a long step answers too late: what it had before stands in, until it is gone."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        gates = [gated(bench), gated(bench.other)]
        for gate in gates:
            gate.is_open = True
        async with bench.serving() as client:
            view = client.replicas
            before = await view.stats(10.0)
            assert len(before.replicas) == 2
            gates[0].is_open = gates[1].is_open = False
            answering = asyncio.ensure_future(bench.post(*APIS["chat"]))
            await until(lambda: bool(client.dispatch._places))
            busy = next(iter(client.dispatch._places.values()))[0]
            await gates[busy.slot].arrive()
            late = await view.stats(0.05)
            gates[1 - busy.slot].open()
            busy.address = "127.0.0.1:1"
            busy.disconnect("the test ends it")
            await until(lambda: busy.welcome is None)
            gates[busy.slot].open()
            assert (await answering).status == 200
            gone = await view.stats(10.0)
            assert late.replicas[busy.name] == before.replicas[busy.name]
            assert late.sums is not None
            assert late.sums.cache.num_pages == 1024
            assert busy.name not in gone.replicas

    run(main())


def test_statistics_have_a_part_for_each_replica() -> None:
    """The parts of `/v1/cache` add up to its sums."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving():
            for _ in range(2):
                assert (await bench.post("/v1/chat/completions", chat(LONG))).status == 200
            stats = (await bench.call("GET", "/v1/cache")).json
            parts = stats["replicas"]
            assert [part["replica"] for part in parts] == [0, 1]
            for name in ("num_pages", "cached_pages", "lookup_tokens", "hit_tokens"):
                assert sum(part[name] for part in parts) == stats[name], name
            assert stats["hit_tokens"] > 0

    run(main())


def test_loads_of_one_engine_and_of_replicas() -> None:
    """`/v1/loads` has an entry for each engine, with what waits and runs there, and their sums."""

    async def main() -> None:
        alone = ServerBench()
        async with alone.running():
            single = (await alone.call("GET", "/v1/loads")).json
            assert [entry["dp_rank"] for entry in single["loads"]] == [0]
            assert single["loads"][0]["max_total_num_tokens"] == 8192
            assert single["loads"][0]["num_used_tokens"] == 0
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        bench.other = ServerBench(chat_template=TOOL_TEMPLATE, max_num_seqs=3)
        gates = [gated(bench), gated(bench.other)]
        async with bench.serving():
            answering = [
                asyncio.ensure_future(
                    bench.post(
                        "/v1/chat/completions",
                        chat(f"{n} {LONG}", max_tokens=1000, ignore_eos=True),
                    )
                )
                for n in range(2)
            ]
            for gate in gates:
                await gate.arrive()
            # Calls run between steps: the engines answer when they may go on.
            reading = asyncio.ensure_future(bench.call("GET", "/v1/loads"))
            while not reading.done():
                for gate in gates:
                    gate.allowed.release()
                await asyncio.sleep(0.01)
            loads = (await reading).json
            assert sorted(entry["dp_rank"] for entry in loads["loads"]) == [0, 1]
            limits = {entry["dp_rank"]: entry["max_running_requests"] for entry in loads["loads"]}
            assert limits == {0: 16, 1: 3}
            assert loads["aggregate"]["total_running_reqs"] == 2
            assert all(entry["num_used_tokens"] > 0 for entry in loads["loads"])
            total = sum(entry["num_total_tokens"] for entry in loads["loads"])
            assert loads["aggregate"]["total_tokens"] == total
            for gate in gates:
                gate.open()
            assert [answer.status for answer in await asyncio.gather(*answering)] == [200, 200]
            second = (await bench.call("GET", "/v1/loads?dp_rank=1&include=core")).json["loads"]
            assert [entry["dp_rank"] for entry in second] == [1]
            assert "queues" not in second[0]
            for query in ("dp_rank=x", "include=nothing", "format=prometheus"):
                assert (await bench.call("GET", f"/v1/loads?{query}")).status == 400
            unknown = await bench.call("GET", "/v1/loads?dp_rank=7")
            assert unknown.status == 404
            assert "there are 0, 1" in unknown.body.decode()

    run(main())


@pytest.mark.parametrize(
    ("placement", "num_cached", "text"),
    [
        (Placement(3, "cached", 1024), 1024, "hit on replica 3"),
        (Placement(0, "least work", 0), 0, "computed on replica 0"),
        (
            Placement(3, "spill", 16, 1, 4096, 2.14, "queue"),
            16,
            "hit on replica 3; replica 1 has 4,096 tokens of it but 2.1 s of queue",
        ),
        (
            Placement(3, "spill", 0, 1, 4096, 2.14, "bound"),
            0,
            "computed on replica 3; replica 1 has 4,096 tokens of it but more than its share of the work",
        ),
        (
            Placement(3, "spill", 0, 1, 32, 0.0, "full"),
            0,
            "computed on replica 3; replica 1 has 32 tokens of it but a full queue",
        ),
        (
            Placement(3, "spill", 0, 1, 32, 2.14, "full").without_load(),
            0,
            "computed on replica 3; replica 1 has 32 tokens of it but is busy",
        ),
        (Placement(3, "cached", 1024).without_load(), 1024, "hit on replica 3"),
    ],
)
def test_a_placement_as_a_sentence(placement: Placement, num_cached: int, text: str) -> None:
    """The sentence says where the prompt hit, and why not on the replica that has more of it."""
    assert route_text(placement, num_cached) == text


class Spilling(LeastLoaded):
    """Says of each decision that the other replica has more of the prompt."""

    def choose(
        self,
        page_hashes: Sequence[bytes],
        num_tokens: int,
        *,
        max_tokens: int | None = None,
        exclude: Collection[str] = (),
        beyond_limits: bool = False,
    ) -> Decision | Refusal:
        decision = super().choose(
            page_hashes, num_tokens, exclude=exclude, beyond_limits=beyond_limits
        )
        if isinstance(decision, Refusal):
            return decision
        other = next(name for name in self._live if name != decision.replica)
        alternative = Alternative(other, 4096, 2.14, "queue")
        return replace(decision, reason="spill", alternative=alternative)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("key", ["key-admin", "key-ann"])
def test_the_route_is_in_the_answer(api: str, key: str) -> None:
    """It names the replica, and the one that has more of the prompt; the operator sees the work there."""

    async def main() -> None:
        keys = ApiKeys.of("key-ann", admin="key-admin")
        bench = ClusterServer(chat_template=TOOL_TEMPLATE, routes=Spilling(), keys=keys)
        async with bench.serving():
            path, body = APIS[api]
            whole = (await bench.post(path, body, key)).json
            streamed = body | {"stream": True}
            streamed |= WITH_USAGE if api in ("chat", "completions") else {}
            events = (await bench.post(path, streamed, key)).events
            last = [usage for event in events if (usage := usage_of(event))][-1]
            for usage in (usage_of(whole), last):
                route = usage["route"]
                here, there = route["replica"], 1 - route["replica"]
                assert here in (0, 1)
                assert route["reason"] == "spill"
                is_admin = key == "key-admin"
                load = {"queue_s": 2.14, "reason": "queue"} if is_admin else {"reason": "busy"}
                assert route["instead_of"] == {"replica": there, "cached": 4096, **load}
                why = "2.1 s of queue" if is_admin else "is busy"
                assert f"replica {there} has 4,096 tokens of it but {why}" in route["text"]

    run(main())


def usage_of(payload: dict[str, Any]) -> Any:
    """`usage.ramify_cache` of a response, or of an event of a stream; None if it has none."""
    holder = payload.get("response", payload)
    return (holder.get("usage") or {}).get("ramify_cache")


def test_several_prompts_have_no_route() -> None:
    """A request with several prompts may be at several replicas: its sums name none of them."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving():
            body = {"prompt": [LONG, "Hello"], "max_tokens": 1}
            usage = usage_of((await bench.post("/v1/completions", body)).json)
            assert usage["computed"] > 0
            assert "route" not in usage

    run(main())


def test_one_engine_has_no_route() -> None:
    """Without a cluster an answer names no replica and no resumption."""

    async def main() -> Answer:
        bench = ServerBench()
        async with bench.running():
            return await bench.post("/v1/chat/completions", chat("Hello"))

    usage = run(main()).json["usage"]["ramify_cache"]

    assert not usage.keys() & {"route", "resumed"}


def test_an_explanation_has_the_cached_tokens_of_each_replica() -> None:
    """`/v1/cache/explain` says what would hit where; the best is `cached_tokens`. Tenants see no load."""

    async def main() -> None:
        keys = ApiKeys.of("key-ann", admin="key-admin")
        bench = ClusterServer(chat_template=TOOL_TEMPLATE, keys=keys)
        async with bench.serving():
            for key in ("key-ann", "key-admin"):
                answer = await bench.post("/v1/chat/completions", chat(LONG), key)
                place = answer.json["usage"]["ramify_cache"]["route"]["replica"]
                report = (await bench.post("/v1/cache/explain", chat(LONG), key)).json
                cached = {part["replica"]: part["cached_tokens"] for part in report["replicas"]}
                assert cached == {place: report["cached_tokens"], 1 - place: 0}
                assert report["cached_tokens"] > 0
                for part in report["replicas"]:
                    assert ("queue_s" in part) == (key == "key-admin")

    run(main())


async def answer_after_a_death(bench: ClusterServer, path: str, body: Any) -> Answer:
    """Ask; kill the replica that computes it once it has delivered a token."""
    benches: list[ServerBench] = [bench, bench.other]
    gates = [gated(server) for server in benches]
    async with bench.serving() as client:
        answering = asyncio.ensure_future(bench.post(path, body))
        await until(lambda: bool(client.dispatch._places))
        place = next(iter(client.dispatch._places.values()))[0].slot
        await gates[place].arrive()
        gates[place].allowed.release()
        await until(lambda: has_tokens(client))
        replica = bench.replicas[place]
        server, replica._server = replica._server, None
        gates[1 - place].open()
        await server.stop(None)
        gates[place].open()
        return await answering


def has_tokens(client: ClusterLLM) -> bool:
    return any(request.has_tokens for request in client.dispatch._live.values())


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_equal", [True, False], ids=["equal", "other threads"])
def test_a_resumed_answer_says_so(api: str, is_equal: bool) -> None:
    """`resumed` is there, and true, where a replica with another identity has gone on; else it is absent."""
    bench = ClusterServer(chat_template=TOOL_TEMPLATE, routes=LeastLoaded())
    if not is_equal:
        identity = bench.other.llm._core_identity
        bench.other.llm._core_identity = replace(identity, threads=identity.threads + 1)
    path, body = APIS[api]

    answer = run(answer_after_a_death(bench, path, body))

    assert answer.status == 200, answer.body
    usage = answer.json["usage"]["ramify_cache"]
    assert usage.get("resumed") == (None if is_equal else True)


def test_branches_of_all_replicas_and_below_a_node_of_one() -> None:
    """Ids name the replica as well; a tenant sees its own at each."""

    async def main() -> None:
        keys = ApiKeys.of("a", "b", admin="o")
        bench = ClusterServer(chat_template=TOOL_TEMPLATE, routes=LeastLoaded(), keys=keys)
        path = "/v1/cache/branches"
        async with bench.serving():
            for key in ("a", "b"):
                await bench.post("/v1/chat/completions", chat(f"{key} {LONG}"), key=key)
            everything = (await bench.call("GET", path, key="o")).json
            below = [
                (await bench.call("GET", f"{path}?below={node['id']}", key="o")).json["nodes"][0]
                for node in everything["nodes"]
            ]
            own = (await bench.call("GET", path, key="a")).json["nodes"]
            # Of a sixth replica further on; of none; one that a replica does not have.
            nowhere = (everything["nodes"][0]["id"] + 5, 1, 999 * MAX_REPLICAS + 1)
            missing = [await bench.call("GET", f"{path}?below={node}", key="o") for node in nowhere]
        assert [node["id"] for node in below] == [node["id"] for node in everything["nodes"]]
        assert {node["replica"] for node in everything["nodes"]} == {0, 1}
        assert {node["tenant"] for node in everything["nodes"]} > {own[0]["tenant"]}
        assert [answer.status for answer in missing] == [404, 404, 404]
        for node, answer in zip(nowhere, missing, strict=True):
            assert f"node {node} is not" in answer.json["error"]["message"]

    run(main())
