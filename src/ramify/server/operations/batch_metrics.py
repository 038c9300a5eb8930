"""Metrics of batches; without a directory for them, all are 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ramify.server.batches.batches import Batches
from ramify.server.batches.records import Result
from ramify.server.operations.metrics import Metrics


class BatchCollector(Collector):
    """Lines of batches by result."""

    def __init__(self, batches: Batches | None) -> None:
        self._batches = batches

    def collect(self) -> Iterable[Metric]:
        """The counts of now."""
        lines = CounterMetricFamily(
            "ramify_batch_lines", "lines of batches that have a result", labels=["result"]
        )
        for result in get_args(Result):
            count = 0 if self._batches is None else self._batches.runner.results[result]
            lines.add_metric([result], count)
        yield lines


def watch_batches(metrics: Metrics, batches: Batches | None) -> None:
    """Add the metrics of batches."""
    metrics.registry.register(BatchCollector(batches))
    metrics.watch(
        "batches_unfinished",
        "batches that run or wait",
        lambda: 0 if batches is None else batches.runner.num_unfinished,
    )
    metrics.watch(
        "batch_rows",
        "rows of the engine's batch that lines of batches have",
        lambda: 0 if batches is None else batches.runner.slots.num_used,
    )
    metrics.watch(
        "batch_disk_bytes",
        "disk that files and batches take",
        lambda: 0 if batches is None else batches.store.space.num_bytes,
    )
