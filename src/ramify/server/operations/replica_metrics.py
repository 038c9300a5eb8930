"""Metrics of a cluster: its replicas, its router, and counters that survive the end of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ramify.server.replicas import Replicas, ReplicaState, RoutingCounts


class RunningTotals:
    """Sums of the counters of replicas. An engine that has ended keeps its share: no total falls."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, Mapping[str, float]]] = {}  # by replica
        self._ended: Counter[str] = Counter()

    def add(self, replica: str, incarnation: int, values: Mapping[str, float]) -> None:
        """Take the counters of a replica, since its engine `incarnation` started."""
        before = self._last.get(replica)
        if before is not None and before[0] != incarnation:
            for name, value in before[1].items():
                self._ended[name] += value  # type: ignore[assignment]
        self._last[replica] = incarnation, values

    def total(self, name: str) -> float:
        """The sum of a counter over all engines, as they were last seen."""
        return self._ended[name] + sum(values.get(name, 0.0) for _, values in self._last.values())


class ReplicaCollector(Collector):
    """What a server knows of its replicas at each scrape; nothing for one engine."""

    def __init__(self) -> None:
        self._replicas: Replicas | None = None

    def watch(self, replicas: Replicas | None) -> None:
        """Export the state of these replicas from now on."""
        self._replicas = replicas

    def collect(self) -> Iterable[Metric]:
        """States and counters, as they are now."""
        if self._replicas is None:
            return
        yield from _states(self._replicas.states())
        yield from _counts(self._replicas.counts())


def _states(states: Iterable[ReplicaState]) -> Iterable[Metric]:
    up = GaugeMetricFamily("ramify_replica_up", "1: it takes requests", labels=["replica"])
    starts = CounterMetricFamily(
        "ramify_replica_starts", "engines that have connected in this place", labels=["replica"]
    )
    known = GaugeMetricFamily(
        "ramify_replica_mirror_known",
        "1: the server knows what the replica has cached",
        labels=["replica"],
    )
    pages = GaugeMetricFamily(
        "ramify_replica_mirror_pages", "pages believed to be cached there", labels=["replica"]
    )
    queue_s = GaugeMetricFamily(
        "ramify_replica_queue_seconds", "work there before a further request", labels=["replica"]
    )
    for state in states:
        labels = [state.name]
        up.add_metric(labels, float(state.state == "ready"))
        starts.add_metric(labels, float(state.num_starts))
        known.add_metric(labels, float(state.is_mirrored))
        pages.add_metric(labels, float(state.mirrored_pages))
        queue_s.add_metric(labels, state.queue_s)
    return up, starts, known, pages, queue_s


def _counts(counts: RoutingCounts) -> Iterable[Metric]:
    mirrors = counts.mirrors
    yield _by_label(
        "routing_decisions",
        "replicas chosen for requests; one that is sent elsewhere is counted again",
        "reason",
        counts.decisions,
    )
    yield _by_label("routing_refusals", "requests that no replica took", "reason", counts.refusals)
    for name, help_text, value in (
        ("routing_predicted_tokens", "prompt tokens expected to hit", counts.predicted_tokens),
        (
            "routing_cached_tokens",
            "prompt tokens of the same requests that hit",
            counts.cached_tokens,
        ),
        ("routing_wrong_tokens", "differences of the two, by request", counts.wrong_tokens),
        ("routing_reroutes", "requests sent elsewhere before their first token", counts.reroutes),
        ("routing_resumptions", "answers continued elsewhere", counts.resumptions),
        ("mirror_gaps", "times that cache events were lost", mirrors.gaps),
        ("mirror_mismatches", "digests that differed", mirrors.mismatches),
        ("mirror_late_messages", "messages doubled or overtaken", mirrors.late_messages),
    ):
        yield CounterMetricFamily(f"ramify_{name}", help_text, value=float(value))
    snapshots = {
        "asked": mirrors.snapshots_asked,
        "applied": mirrors.snapshots_applied,
        "failed": mirrors.snapshots_failed,
    }
    yield _by_label("mirror_snapshots", "snapshots of caches", "result", snapshots)


def _by_label(name: str, help_text: str, label: str, values: Mapping[str, int]) -> Metric:
    metric = CounterMetricFamily(f"ramify_{name}", help_text, labels=[label])
    for key, value in sorted(values.items()):
        metric.add_metric([key], float(value))
    return metric
