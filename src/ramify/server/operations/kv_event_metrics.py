"""Metrics of a server that publishes KV events."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ramify.server.kv_events.feed import KvEventFeed


class KvEventCollector(Collector):
    """What a feed has published and dropped."""

    def __init__(self, feed: KvEventFeed) -> None:
        self._feed = feed

    def collect(self) -> Iterable[Metric]:
        """The counters, as they are now."""
        feed, sockets = self._feed, self._feed.sockets
        for name, help_text, value in (
            ("batches", "batches of KV events published", sockets.num_published),
            (
                "snapshots",
                "snapshots published, after drops and at the start",
                sockets.num_snapshots,
            ),
            ("dropped", "events dropped, for which a snapshot stood in", feed.num_dropped),
        ):
            yield CounterMetricFamily(f"ramify_kv_events_{name}", help_text, value=float(value))
