"""Metrics of the cache tiers, and the tokens that a request reads by tier."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from ramify.params import SamplingParams
from ramify.server.generation import CacheUsage, total_usage
from ramify.server.operations.tier_metrics import tier_metrics
from tests.pure.engine_bench import Bench
from tests.pure.tier_bench import TierBench

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tiers.md"
A, B, C = [7] * 33, [9] * 45, [11] * 45


def loaded_bench() -> TierBench:
    """A bench that has loaded a prompt from its host tier."""
    bench = TierBench(host_pages=64)
    for prompt in (A, B, C):
        bench.answer(prompt)
        bench.settle()
    return bench


def test_the_table_has_every_metric_of_a_tier() -> None:
    """And there are none without tiers."""
    bench = loaded_bench()

    metrics = tier_metrics({"": bench.core.stats()})

    names = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in metrics
    }
    assert names == set(
        re.findall(r"^\| `(ramify_tier_\w+)`", PAGE.read_text("utf-8"), re.MULTILINE)
    )
    assert tier_metrics({"": Bench().core.stats()}) == []


def test_the_figures_are_those_of_the_tiers() -> None:
    """By tier, and in a cluster by replica."""
    bench = loaded_bench()
    again = bench.answer(A)
    loaded = bench.tiering.counts.loaded["host"]

    by_name = {metric.name: metric for metric in tier_metrics({"r1": bench.core.stats()})}

    samples = {
        (sample.labels["replica"], sample.labels["tier"]): sample.value
        for sample in by_name["ramify_tier_loaded_pages"].samples
    }
    assert samples == {("r1", "host"): loaded, ("r1", "disk"): 0}
    assert bench.outputs[again].cache.tier_tokens == {"host": loaded * 4}


def test_errors_are_told_apart_by_kind_and_a_server_has_no_size() -> None:
    """What a shared server holds of this engine is not known: no figure stands for it."""
    bench = loaded_bench()
    stats = bench.core.stats()
    remote = replace(stats.tiers["disk"], budget_bytes=0, errors={"timeout": 3, "corrupt": 1})
    stats = replace(stats, tiers={**stats.tiers, "remote": remote})

    by_name = {metric.name: metric for metric in tier_metrics({"": stats})}

    errors = {
        (sample.labels["tier"], sample.labels["kind"]): sample.value
        for sample in by_name["ramify_tier_errors"].samples
    }
    assert errors == {("remote", "timeout"): 3, ("remote", "corrupt"): 1}
    for name, tiers in (("ramify_tier_pages", {"host", "disk"}),
                        ("ramify_tier_available", {"host", "disk", "remote"})):  # fmt: skip
        assert {sample.labels["tier"] for sample in by_name[name].samples} == tiers


def test_tokens_by_tier_are_no_more_than_those_read() -> None:
    """What was loaded for a request may be evicted again before it runs."""
    bench = TierBench()
    request_id = bench.core.add_request(A, SamplingParams(max_tokens=1))
    [request] = bench.core.live
    request.tier_tokens = {"host": 8, "disk": 100}
    request.cache_counts = (20, 0)

    report = request.cache_report(cache_on=True)

    assert request.id == request_id
    assert report.tier_tokens == {"host": 8, "disk": 12}


def test_an_answer_of_several_prompts_adds_up_what_each_read_by_tier() -> None:
    """And says what was in the pool."""
    usages = [
        CacheUsage(read=48, shared=0, computed=1, written=0, miss=None, tiers={"disk": 32}),
        CacheUsage(
            read=16, shared=0, computed=1, written=0, miss=None, tiers={"disk": 8, "host": 8}
        ),
        CacheUsage(read=16, shared=0, computed=1, written=0, miss=None),
    ]

    total = total_usage([SimpleNamespace(cache=usage) for usage in usages])  # type: ignore[misc]

    assert total is not None
    assert total.as_json()["read_by_tier"] == {"pool": 32, "disk": 40, "host": 8}
    assert "read_by_tier" not in usages[2].as_json()
