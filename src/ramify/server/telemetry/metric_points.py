"""The metrics of a Prometheus registry as OTLP metrics: one bookkeeping, two ways out.

A family keeps its name; vLLM's second names are left out. Three histograms are sent a second time, under
the names of the GenAI semantic conventions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from ramify.server.telemetry.request_spans import PROVIDER

NS = 1_000_000_000
OTHER_NAMES = "vllm:"
CONVENTIONS: Mapping[str, str] = {
    "ramify_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "ramify_inter_token_latency_seconds": "gen_ai.server.time_per_output_token",
    "ramify_e2e_request_latency_seconds": "gen_ai.server.request.duration",
}
# Of these histograms: chats, completions and embeddings are not kept apart.
ANY_OPERATION = "inference"
UNITS = {"seconds": "s", "bytes": "By", "tokens": "{token}", "share": "1", "rate": "1"}
Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Series:
    """The samples of a histogram with the same labels."""

    cumulative: list[tuple[float, float]] = field(default_factory=list)  # (upper bound, count)
    total: float = 0.0
    created_ns: int | None = None

    def point(self, labels: Mapping[str, str], start_ns: int, now_ns: int) -> HistogramDataPoint:
        ordered = sorted(self.cumulative)
        counts = [0, *(int(count) for _, count in ordered)]
        return HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=start_ns if self.created_ns is None else self.created_ns,
            time_unix_nano=now_ns,
            count=counts[-1],
            sum=self.total,
            bucket_counts=[after - before for before, after in pairwise(counts)],
            explicit_bounds=[bound for bound, _ in ordered if not math.isinf(bound)],
            # The registry does not keep them.
            min=None,
            max=None,
        )


def otlp_metrics(
    families: Iterable[Family], *, model: str, start_ns: int, now_ns: int
) -> list[Metric]:
    """The metrics of the families, cumulative since `start_ns`, or since a series began if that is known.

    Args:
        model: that this server serves, for the names of the conventions.
        start_ns, now_ns: nanoseconds since the epoch.
    """
    metrics = []
    for family in families:
        if family.name.startswith(OTHER_NAMES):
            continue
        metric = _metric(family, start_ns, now_ns)
        if metric is None:
            continue
        metrics.append(metric)
        if family.name in CONVENTIONS:
            metrics.append(_by_convention(metric, CONVENTIONS[family.name], model))
    return metrics


def _metric(family: Family, start_ns: int, now_ns: int) -> Metric | None:
    data: Gauge | Sum | Histogram
    if family.type == "histogram":
        points = [
            series.point(dict(labels), start_ns, now_ns)
            for labels, series in _histograms(family.samples).items()
        ]
        data = Histogram(points, AggregationTemporality.CUMULATIVE)
    elif family.type == "counter":
        created = {
            _labels(sample): int(NS * sample.value)
            for sample in family.samples
            if sample.name.endswith("_created")
        }
        numbers = [
            NumberDataPoint(
                dict(sample.labels), created.get(_labels(sample), start_ns), now_ns, sample.value
            )
            for sample in family.samples
            if sample.name.endswith("_total")
        ]
        data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    elif family.type == "gauge":
        data = Gauge(
            [
                NumberDataPoint(dict(sample.labels), start_ns, now_ns, sample.value)
                for sample in family.samples
            ]
        )
    else:
        return None
    if not data.data_points:
        return None
    unit = UNITS.get(family.name.rpartition("_")[2], "")
    return Metric(family.name, family.documentation, unit, data)


def _histograms(samples: Iterable[Sample]) -> dict[Labels, _Series]:
    by_labels: defaultdict[Labels, _Series] = defaultdict(_Series)
    for sample in samples:
        series = by_labels[_labels(sample)]
        if sample.name.endswith("_bucket"):
            series.cumulative.append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            series.total = sample.value
        elif sample.name.endswith("_created"):
            series.created_ns = int(NS * sample.value)
    return dict(by_labels)


def _labels(sample: Sample) -> Labels:
    return tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))


def _by_convention(metric: Metric, name: str, model: str) -> Metric:
    attributes = {
        "gen_ai.operation.name": ANY_OPERATION,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
    }
    assert isinstance(metric.data, Histogram), "the conventions name histograms only"
    points = [
        HistogramDataPoint(
            attributes={**(point.attributes or {}), **attributes},
            start_time_unix_nano=point.start_time_unix_nano,
            time_unix_nano=point.time_unix_nano,
            count=point.count,
            sum=point.sum,
            bucket_counts=point.bucket_counts,
            explicit_bounds=point.explicit_bounds,
            min=point.min,
            max=point.max,
        )
        for point in metric.data.data_points
    ]
    return Metric(
        name, metric.description, "s", Histogram(points, AggregationTemporality.CUMULATIVE)
    )
