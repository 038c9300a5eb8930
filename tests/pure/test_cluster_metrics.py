"""Metrics of a server over replicas: series by replica, and counts of routing and of mirrors."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from ramify.engine.cache_admin.warmup import WarmPrompt
from ramify.server.operations.replica_metrics import RunningTotals
from ramify.server.run import replica_rows
from tests.pure.cluster_bench import run, until, until_warm
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, chat, gated
from tests.pure.test_cluster_server import ClusterServer

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text("utf-8")
SAMPLE = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LONG = "Hello you there. " * 20


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
            await until_warm(client)
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


def test_prompts_that_warm_a_replica_are_no_decisions() -> None:
    """`cache.warm`, and its end by the death of a replica, change no series of routing."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        gate = gated(bench.other)
        gate.is_open = True
        async with bench.serving() as client:
            assert (await bench.post("/v1/chat/completions", chat(LONG))).status == 200
            before = routing_series(await metrics_of(bench))
            warmed = await client.cache.warm([WarmPrompt(LONG), WarmPrompt("Hello you " * 30)])
            assert warmed.num_failed == 0
            assert routing_series(await metrics_of(bench)) == before
            gate.is_open = False
            warming = asyncio.ensure_future(client.cache.warm([WarmPrompt("Hello there " * 30)]))
            await gate.arrive()
            gone = [*client.dispatch.replicas.values()][1]
            gone.address = "127.0.0.1:1"
            gone.disconnect("the test ends it")
            await warming
            gate.open()
            after = routing_series(await metrics_of(bench))
            assert after == before
            assert sum(value for (name, _), value in after.items() if "decisions" in name) == 1

    run(main())


def routing_series(series: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return {key: value for key, value in series.items() if key[0].startswith("ramify_routing_")}


def test_a_replica_that_is_gone_is_down_and_has_no_series() -> None:
    """`ramify_replica_up` is 0, its engine series end, and vLLM's counters keep what it had counted."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving() as client:
            await until_warm(client)
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


def test_totals_do_not_fall_with_an_engine() -> None:
    """The counters of an engine that has ended stay in the total; those of its successor are added."""
    totals = RunningTotals()
    totals.add("0", 1, {"steps": 5.0})
    totals.add("1", 7, {"steps": 2.0})

    totals.add("0", 1, {"steps": 6.0})
    totals.add("0", 2, {"steps": 1.0})
    totals.add("0", 3, {"steps": 4.0})

    assert totals.total("steps") == 6 + 1 + 4 + 2


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
