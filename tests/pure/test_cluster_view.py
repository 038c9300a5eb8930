"""One view over replicas: metrics, statistics, loads, explanations, and the flag of a resumed answer."""

import asyncio
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ramify.cluster.client import ClusterLLM
from ramify.cluster.decisions import Alternative, Decision, Refusal
from ramify.outputs import Placement
from ramify.server.answers.route import route_text
from ramify.server.operations.replica_metrics import RunningTotals
from ramify.server.run import replica_rows
from ramify.server.tenants import ApiKeys
from tests.pure.async_bench import Gate
from tests.pure.cluster_bench import run, until
from tests.pure.least_loaded import LeastLoaded
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, chat
from tests.pure.test_cluster_server import ClusterServer

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text("utf-8")
SAMPLE = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LONG = "Hello you there. " * 20
APIS: dict[str, tuple[str, Any]] = {
    "chat": ("/v1/chat/completions", chat("Hello", max_tokens=8, ignore_eos=True)),
    "completions": ("/v1/completions", {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}),
    "messages": ("/v1/messages", {"model": "tiny", **chat("Hello", max_tokens=8)}),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 8}),
}


# Else streams of these have no usage.
WITH_USAGE = {"stream_options": {"include_usage": True}}


def samples(answer: Answer) -> dict[tuple[str, str], float]:
    """The samples of an exposition, by name and labels."""
    return {
        (name, labels or ""): float(value)
        for name, labels, value in SAMPLE.findall(answer.body.decode())
    }


async def metrics_of(bench: ServerBench) -> dict[tuple[str, str], float]:
    return samples(await bench.call("GET", "/metrics"))


def test_series_have_a_replica_and_vllms_names_have_none() -> None:
    """Each of our engine series is once for each replica; under vLLM's name there is one, their sum."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving() as client:
            for _ in range(3):
                assert (await bench.post("/v1/chat/completions", chat(LONG))).status == 200
            series = await metrics_of(bench)
            names = list(client.dispatch.replicas)
            for name in names:
                assert series["ramify_kv_pages", f'replica="{name}"'] == 512
            assert ("ramify_kv_pages", "") not in series
            sizes = [labels for name, labels in series if name == "ramify_kv_cache_config_info"]
            assert len(sizes) == 2
            for name in names:
                assert f'num_pages="512",page_size="16",replica="{name}"' in sizes
            assert (
                "vllm:cache_config_info",
                'block_size="16",model_name="tiny",num_gpu_blocks="1024"',
            ) in series
            looked_up = [
                series["ramify_cache_lookup_tokens_total", f'replica="{name}"'] for name in names
            ]
            assert sum(looked_up) > 0
            label = 'model_name="tiny"'
            assert series["vllm:prefix_cache_queries_total", label] == sum(looked_up)
            assert [key for key in series if key[0] == "vllm:num_requests_running"] == [
                ("vllm:num_requests_running", label)
            ]

    run(main())


def test_one_engine_has_the_series_without_a_label() -> None:
    """Without a cluster no series has a replica, and none of the cluster is there."""

    async def main() -> dict[tuple[str, str], float]:
        bench = ServerBench()
        async with bench.running():
            return await metrics_of(bench)

    series = run(main())

    assert series["ramify_kv_pages", ""] == 512
    assert series["ramify_kv_cache_config_info", 'num_pages="512",page_size="16"'] == 1
    assert not [key for key in series if "replica" in key[0] or "replica" in key[1]]


def test_the_clusters_own_metrics() -> None:
    """Decisions, predicted and actual tokens, replicas, starts, mirrors and snapshots are counted."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving() as client:
            names = list(client.dispatch.replicas)
            await until(lambda: all(state.is_mirrored for state in client.replicas.states()))
            for _ in range(3):
                assert (await bench.post("/v1/chat/completions", chat(LONG))).status == 200
            series = await metrics_of(bench)
            for name in names:
                label = f'replica="{name}"'
                assert series["ramify_replica_up", label] == 1
                assert series["ramify_replica_starts_total", label] == 1
                assert series["ramify_replica_mirror_known", label] == 1
            decisions = {
                key: value
                for key, value in series.items()
                if key[0] == "ramify_routing_decisions_total"
            }
            assert sum(decisions.values()) == 3
            assert decisions["ramify_routing_decisions_total", 'reason="cached"'] == 2
            predicted = series["ramify_routing_predicted_tokens_total", ""]
            cached = series["ramify_routing_cached_tokens_total", ""]
            assert predicted == cached > 0
            assert series["ramify_routing_wrong_tokens_total", ""] == 0
            assert series["ramify_mirror_snapshots_total", 'result="asked"'] >= 2
            assert series["ramify_mirror_snapshots_total", 'result="applied"'] == 2
            assert sum(series["ramify_replica_mirror_pages", f'replica="{n}"'] for n in names) > 0
            exported = {name for name, labels in series if "ramify_r" in name or "mirror" in name}
            assert exported >= {"ramify_routing_reroutes_total", "ramify_routing_resumptions_total"}

    run(main())


def test_a_replica_that_is_gone_is_down_and_has_no_series() -> None:
    """`ramify_replica_up` is 0, its engine series end, and vLLM's counters keep what it had counted."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving() as client:
            for _ in range(2):
                assert (await bench.post("/v1/chat/completions", chat(LONG))).status == 200
            before = await metrics_of(bench)
            gone = next(iter(client.dispatch.replicas.values()))
            gone.address = "127.0.0.1:1"
            gone.disconnect("the test ends it")
            await until(lambda: gone.welcome is None)
            after = await metrics_of(bench)
            label = f'replica="{gone.name}"'
            assert after["ramify_replica_up", label] == 0
            assert ("ramify_kv_pages", label) not in after
            name = ("vllm:prefix_cache_queries_total", 'model_name="tiny"')
            assert after[name] == before[name] > 0
            stats = (await bench.call("GET", "/v1/cache")).json
            parts = {part["name"]: part for part in stats["replicas"]}
            assert parts[gone.name]["state"] == "not connected"
            assert "num_pages" not in parts[gone.name]
            assert stats["num_pages"] == 512
            banner = replica_rows(client.replicas)["replicas"]
            assert banner.startswith("1 of 2 ready")
            assert f"{gone.name} is not connected" in banner

    run(main())


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


def test_totals_do_not_fall_with_an_engine() -> None:
    """The counters of an engine that has ended stay in the total; those of its successor are added."""
    totals = RunningTotals()
    totals.add("0", 1, {"steps": 5.0})
    totals.add("1", 7, {"steps": 2.0})

    totals.add("0", 1, {"steps": 6.0})
    totals.add("0", 2, {"steps": 1.0})
    totals.add("0", 3, {"steps": 4.0})

    assert totals.total("steps") == 6 + 1 + 4 + 2


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


def gated(bench: ServerBench) -> Gate:
    """The device of an engine behind a gate that is closed."""
    gate = Gate(bench.device)
    gate.is_open = False
    bench.core.executor = gate
    return gate


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
    gates = [gated(each) for each in benches]
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


def test_the_page_has_every_metric_of_a_cluster() -> None:
    """The table in `docs/cluster.md` lists what a cluster exports beside the series of one engine."""

    async def main() -> set[str]:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving():
            await bench.post("/v1/chat/completions", chat("Hello"))
            text = (await bench.call("GET", "/metrics")).body.decode()
            return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))

    own = {name for name in run(main()) if re.match("ramify_(replica|routing|mirror)_", name)}

    assert own == set(re.findall(r"^\| `(ramify_\w+)`", PAGE, re.MULTILINE))
