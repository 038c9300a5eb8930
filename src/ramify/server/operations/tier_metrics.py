"""Prometheus metrics of the cache tiers, by tier and, in a cluster, by replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ramify.engine.context import EngineStats
from ramify.engine.tier_parts import TierStats

# (name, help text, value in the figures of a tier)
TierMetric = tuple[str, str, Callable[[TierStats], float]]

# fmt: off
TIER_GAUGES: tuple[TierMetric, ...] = (
    ("tier_pages", "pages that a tier has", lambda tier: tier.pages),
    ("tier_used_bytes", "memory or disk blocks of a tier", lambda tier: tier.used_bytes),
    ("tier_budget_bytes", "most that a tier may use", lambda tier: tier.budget_bytes),
    ("tier_writable", "1: the tier takes pages now", lambda tier: tier.is_writable),
    ("tier_available", "1: the tier answers now", lambda tier: tier.is_available),
    ("tier_latency_seconds", "what a load takes beside its pages; 0: not measured", lambda tier: tier.latency_s),
    ("tier_bytes_per_second", "rate of a load; 0: not measured", lambda tier: tier.bytes_per_s),
    ("tier_pays_from_pages", "shortest load that is sooner than computing; 0: none is", lambda tier: tier.pays_from_pages),
)
# A shared server does not say how many pages of an engine it has.
OF_THE_BUDGET = frozenset(("tier_pages", "tier_used_bytes", "tier_budget_bytes"))
TIER_COUNTERS: tuple[TierMetric, ...] = (
    ("tier_written_pages", "pages written; they survive the end of the process if the tier does", lambda tier: tier.written_pages),
    ("tier_durable_pages", "pages written or kept that survive a loss of power", lambda tier: tier.durable_pages),
    ("tier_loaded_pages", "pages loaded into the pool", lambda tier: tier.loaded_pages),
    ("tier_computed_pages", "pages that the tier had, computed since that was sooner", lambda tier: tier.computed_pages),
    ("tier_evicted_pages", "pages that left the tier for others", lambda tier: tier.evicted_pages),
    ("tier_refused_pages", "pages that the tier did not take", lambda tier: tier.refused_pages),
    ("tier_failed_reads", "pages whose checksum or read failed", lambda tier: tier.failed_reads),
)
# fmt: on


def tier_metrics(replicas: Mapping[str, EngineStats]) -> list[Metric]:
    """The metrics of all tiers; none without tiers.

    Args:
        replicas: by name; the only engine of a server that is no cluster has the name "".
    """
    if not any(stats.tiers for stats in replicas.values()):
        return []
    labels = ["replica"] if any(replicas) else []
    metrics: list[Metric] = []
    for family, rows in ((GaugeMetricFamily, TIER_GAUGES), (CounterMetricFamily, TIER_COUNTERS)):
        for name, help_text, value_in in rows:
            metric = family(f"ramify_{name}", help_text, labels=[*labels, "tier"])
            for replica, stats in replicas.items():
                for tier, figures in stats.tiers.items():
                    if name in OF_THE_BUDGET and not figures.budget_bytes:
                        continue
                    metric.add_metric([replica, tier][-len(labels) - 1 :], float(value_in(figures)))
            metrics.append(metric)
    errors = CounterMetricFamily(
        "ramify_tier_errors", "failed reads and calls by kind", labels=[*labels, "tier", "kind"]
    )
    for replica, stats in replicas.items():
        for tier, figures in stats.tiers.items():
            for kind, count in figures.errors.items():
                errors.add_metric([replica, tier, kind][-len(labels) - 2 :], float(count))
    totals = CounterMetricFamily(
        "ramify_tier_events", "loads and pages by what became of them", labels=[*labels, "event"]
    )
    for replica, stats in replicas.items():
        for event, count in stats.tier_totals.items():
            totals.add_metric([replica, event][-len(labels) - 1 :], float(count))
    return [*metrics, errors, totals]
