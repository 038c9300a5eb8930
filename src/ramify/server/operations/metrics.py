"""Prometheus metrics: under `ramify_*` names, some also under the `vllm:*` names of dashboards.

A new metric of engine or cache: a field of `EngineStats` or `CacheStats`, a row in `GAUGES` or
`COUNTERS`, and a line in the documentation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ramify.engine.context import EngineStats
from ramify.errors import EngineStoppedError
from ramify.outputs import StepOutput
from ramify.server.engine_client import EngineClient
from ramify.server.generation import Generation
from ramify.server.operations.replica_metrics import ReplicaCollector, RunningTotals
from ramify.server.operations.tier_metrics import tier_metrics
from ramify.server.replicas import ClusterStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
READ_S = 2.0  # a scrape does not wait for a long step
# Upper bounds of histogram buckets.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
GAP_SECONDS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0)
TOKENS = (1, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)

SIZES, SIZES_TEXT = "ramify_kv_cache_config_info", "sizes of the K/V cache, as labels of a 1"

MetricFamily = GaugeMetricFamily | CounterMetricFamily
# (name, vLLM's name or None, help text, value in a snapshot)
EngineMetric = tuple[str, str | None, str, Callable[[EngineStats], float]]

# fmt: off
GAUGES: tuple[EngineMetric, ...] = (
    ("requests_running", "num_requests_running", "requests in the running batch", lambda stats: stats.num_running),
    ("requests_waiting", "num_requests_waiting", "requests that wait to be admitted", lambda stats: stats.num_waiting),
    ("waiting_tokens", None, "prompt tokens to compute before a further prompt", lambda stats: stats.num_waiting_tokens),
    ("kv_cache_used_share", "kv_cache_usage_perc", "share of the pages with K/V", lambda stats: 1 - stats.cache.free_pages / stats.cache.num_pages),
    ("kv_leases", None, "prefixes that requests hold now", lambda stats: stats.cache.num_leases),
    ("sessions", None, "sessions that are alive", lambda stats: stats.cache.num_sessions),
    ("kv_pages", None, "pages of the pool", lambda stats: stats.cache.num_pages),
    ("kv_pages_free", None, "pages with nothing", lambda stats: stats.cache.free_pages),
    ("kv_pages_cached", None, "pages that the prefix cache holds", lambda stats: stats.cache.cached_pages),
    ("kv_pages_pinned", None, "pages that pins hold", lambda stats: stats.cache.pinned_pages),
    ("cache_ideal_hit_rate", None, "token hit rate that a cache without limit would have had", lambda stats: stats.cache.ideal_hit_rate),
)
COUNTERS: tuple[EngineMetric, ...] = (
    ("cache_lookup_tokens", "prefix_cache_queries", "prompt tokens looked up", lambda stats: stats.cache.lookup_tokens),
    ("cache_hit_tokens", "prefix_cache_hits", "prompt tokens that hit", lambda stats: stats.cache.hit_tokens),
    ("cache_copied_tokens", None, "prompt tokens that hit and were copied from part of a page", lambda stats: stats.cache.copied_tokens),
    ("cache_evicted_pages", None, "pages evicted", lambda stats: stats.cache.evicted_pages),
    ("cache_session_pages", None, "pages evicted first because their session was ended", lambda stats: stats.cache.evictions.get("session_ended", 0)),
    ("ended_sessions", None, "sessions that were ended", lambda stats: stats.cache.ended_sessions),
    ("preemptions", "num_preemptions", "requests sent back to the queue, for want of pages or for another tenant", lambda stats: stats.num_preemptions),
    ("fair_preemptions", None, "requests sent back to the queue for a tenant that had no row", lambda stats: stats.num_fair_preemptions),
    ("steps", None, "steps of the engine", lambda stats: stats.num_steps),
    ("computed_tokens", None, "rows that the model computed", lambda stats: stats.num_computed_tokens),
    ("draft_tokens", "spec_decode_num_draft_tokens", "draft tokens verified", lambda stats: stats.num_draft_tokens),
    ("accepted_draft_tokens", "spec_decode_num_accepted_tokens", "draft tokens accepted", lambda stats: stats.num_accepted_draft_tokens),
    ("failed_steps", None, "forward passes that raised", lambda stats: stats.failures.failed_steps),
    ("out_of_memory_steps", None, "failed steps that were retried smaller", lambda stats: stats.failures.out_of_memory),
    ("failed_requests", None, "requests rolled back for logits that are not finite", lambda stats: stats.failures.failed_requests),
    ("request_errors", None, "requests that ended with an error of the engine", lambda stats: stats.failures.errors),
    ("suspect_pages", None, "cached pages evicted because a request that had read them failed", lambda stats: stats.failures.evicted_suspect_pages),
    ("audits", None, "recounts of pages, leases and queues", lambda stats: stats.failures.audits),
    ("audit_mismatches", None, "audits that found a contradiction", lambda stats: stats.failures.mismatches),
    ("repairs", None, "times that all bookkeeping was built anew", lambda stats: stats.failures.rebuilds),
    ("hit_checks", None, "cache hits recomputed cold and compared", lambda stats: stats.num_hit_checks),
    ("hit_mismatches", None, "cache hits that changed an answer", lambda stats: stats.num_hit_mismatches),
    ("stuck_steps", None, "steps that took longer than step_timeout_s", lambda stats: stats.num_stuck_steps),
)
# fmt: on


def _sizes(stats: EngineStats) -> list[str]:
    """Tokens of a page and number of pages, where routers look for them: in labels."""
    return [str(stats.cache.page_size), str(stats.cache.num_pages)]


class EngineCollector(Collector):
    """Engine and cache metrics of one snapshot, which `show` gets before each scrape."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._metrics: list[Metric] = []
        self._totals = RunningTotals()  # of a cluster

    def show(self, stats: EngineStats) -> None:
        """Replace the snapshot."""
        metrics: list[Metric] = []
        for family, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, vllm_name, help_text, value_of in rows:
                value = float(value_of(stats))
                metrics.append(family(f"ramify_{name}", help_text, value=value))
                if vllm_name is not None:
                    metrics.append(self._of_vllm(family, vllm_name, help_text, value))
        sizes = GaugeMetricFamily(SIZES, SIZES_TEXT, labels=["page_size", "num_pages"])
        sizes.add_metric(_sizes(stats), 1.0)
        self._metrics = [
            *metrics,
            *tier_metrics({"": stats}),
            sizes,
            self._sizes_of_vllm(stats),
        ]

    def show_replicas(self, stats: ClusterStats) -> None:
        """Replace the snapshot by that of a cluster.

        Our names have a series for each replica. vLLM's names have one, of the whole: who reads
        them knows one engine at an address.
        """
        for name, replica in stats.replicas.items():
            counters = {row[0]: float(row[-1](replica.stats)) for row in COUNTERS}
            self._totals.add(name, replica.incarnation, counters)
        metrics: list[Metric] = []
        for family, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, vllm_name, help_text, value_of in rows:
                metric = family(f"ramify_{name}", help_text, labels=["replica"])
                for label, replica in stats.replicas.items():
                    metric.add_metric([label], float(value_of(replica.stats)))
                metrics.append(metric)
                if vllm_name is None:
                    continue
                if rows is COUNTERS:
                    whole = self._totals.total(name)
                    metrics.append(self._of_vllm(family, vllm_name, help_text, whole))
                elif stats.sums is not None:
                    whole = float(value_of(stats.sums))
                    metrics.append(self._of_vllm(family, vllm_name, help_text, whole))
        by_replica = {label: replica.stats for label, replica in stats.replicas.items()}
        sizes = GaugeMetricFamily(SIZES, SIZES_TEXT, labels=["replica", "page_size", "num_pages"])
        for label, replica in stats.replicas.items():
            sizes.add_metric([label, *_sizes(replica.stats)], 1.0)
        metrics.append(sizes)
        if stats.sums is not None:
            metrics.append(self._sizes_of_vllm(stats.sums))
        self._metrics = [*metrics, *tier_metrics(by_replica)]

    def _sizes_of_vllm(self, stats: EngineStats) -> Metric:
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        metric = GaugeMetricFamily("vllm:cache_config_info", SIZES_TEXT, labels=labels)
        metric.add_metric([self._model, *_sizes(stats)], 1.0)
        return metric

    def _of_vllm(
        self, family: type[MetricFamily], name: str, help_text: str, value: float
    ) -> Metric:
        metric = family(f"vllm:{name}", help_text, labels=["model_name"])
        metric.add_metric([self._model], value)
        return metric

    def collect(self) -> Iterable[Metric]:
        """The last snapshot."""
        return self._metrics


class DualMetric:
    """A counter or histogram under its `ramify_` name and, labelled with the model, under vLLM's."""

    def __init__(self, *adds: Callable[[float], None]) -> None:
        self._adds = adds

    def add(self, value: float | None) -> None:
        """Add a value to both; None is not counted."""
        if value is not None:
            for add in self._adds:
                add(value)


class Metrics:
    """All metrics of a server: those that it counts itself, and those of its engine (`engine`).

    `num_prompt`, `num_output`, `num_saved` are token counts for the load line: of prompts, of
    answers, and of prompts without a forward pass (cached or shared in flight).

    Args:
        model: the label `model_name` of vLLM's metrics.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(model)
        self.registry.register(self.engine)
        self.replicas = ReplicaCollector()
        self.registry.register(self.replicas)
        self._model = model
        self.num_prompt = self.num_output = self.num_saved = 0
        self._requests = self._counter("requests", "requests that have ended", "reason")
        self._success = Counter(
            "vllm:request_success",
            "requests that have ended",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._responses = self._counter("http_responses", "responses", "route", "status")
        self._prompt_tokens = self._dual_counter("prompt_tokens", "prompt tokens")
        self._output_tokens = self._dual_counter("generation_tokens", "tokens generated")
        self._sources = self._counter(
            "prompt_tokens_by_source", "prompt tokens: read, shared in flight, computed", "source"
        )
        self._misses = self._counter(
            "cache_misses", "prompts by the reason for their miss", "reason"
        )
        self._ttft = self._dual_histogram(
            "time_to_first_token_seconds", "to the first token", SECONDS
        )
        self._gaps = self._dual_histogram(
            "inter_token_latency_seconds", "between tokens", GAP_SECONDS
        )
        self._total = self._dual_histogram(
            "e2e_request_latency_seconds", "of whole requests", SECONDS
        )
        self._queue = self._dual_histogram(
            "request_queue_time_seconds", "before the first step", SECONDS
        )
        self._prompt_sizes = self._dual_histogram("request_prompt_tokens", "of requests", TOKENS)
        self._output_sizes = self._dual_histogram(
            "request_generation_tokens", "of requests", TOKENS
        )
        self.loop_delay = Histogram(
            "ramify_event_loop_delay_seconds",
            "how late the server's event loop is",
            buckets=GAP_SECONDS,
            registry=self.registry,
        )
        # (response id, index of the answer) → time of its last token; live answers only.
        self._last_token_s: dict[tuple[str, int], float] = {}

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"ramify_{name}", help_text, labels, registry=self.registry)

    def _dual_counter(self, name: str, help_text: str) -> DualMetric:
        vllm = Counter(f"vllm:{name}", help_text, ("model_name",), registry=self.registry)
        return DualMetric(self._counter(name, help_text).inc, vllm.labels(self._model).inc)

    def _dual_histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> DualMetric:
        ours = Histogram(f"ramify_{name}", help_text, buckets=buckets, registry=self.registry)
        vllm = Histogram(
            f"vllm:{name}", help_text, ("model_name",), buckets=buckets, registry=self.registry
        )
        return DualMetric(ours.observe, vllm.labels(self._model).observe)

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        Gauge(f"ramify_{name}", help_text, registry=self.registry).set_function(value)

    def count_response(self, route: str, status: int) -> None:
        """Count a response by route and status, when it has ended; 499: its client has gone."""
        self._responses.labels(route, str(status)).inc()

    def observe_tokens(self, generation: Generation, event: StepOutput) -> None:
        """Count tokens that reach the reader of a generation, and the time between them.

        Tokens of one event count as evenly spread over the time since the event before.
        """
        count = len(event.new_token_ids)
        if not count:
            return
        self._output_tokens.add(count)
        self.num_output += count
        now, key = time.monotonic(), (generation.id, event.index)
        last_s = self._last_token_s.get(key)
        self._last_token_s[key] = now
        if last_s is not None:
            for _ in range(count):
                self._gaps.add((now - last_s) / count)

    def observe_request(self, generation: Generation) -> None:
        """Count a request that has ended: reason, tokens by source, latencies."""
        for index in range(generation.request.params.n):
            self._last_token_s.pop((generation.id, index), None)
        output = generation.output
        reason = generation.end_reason
        self._requests.labels(reason).inc()
        self._success.labels(self._model, "abort" if output is None else reason).inc()
        if output is None:
            return
        num_prompt, report = len(output.prompt_token_ids), output.cache
        self._prompt_tokens.add(num_prompt)
        self.num_prompt += num_prompt
        self.num_saved += report.read_tokens + report.shared_tokens
        for source, count in (
            ("read", report.read_tokens),
            ("shared", report.shared_tokens),
            ("computed", report.computed_tokens),
        ):
            self._sources.labels(source).inc(count)
        if generation.miss is not None:
            self._misses.labels(generation.miss.reason).inc()
        times = output.metrics
        self._ttft.add(times.ttft_s)
        self._total.add(times.total_s)
        self._queue.add(times.queue_s)
        self._prompt_sizes.add(float(num_prompt))
        self._output_sizes.add(float(output.usage.completion_tokens))

    async def read_engine(self, engine: EngineClient, timeout_s: float) -> None:
        """Read the engine's counters, or those of each replica; without an answer, the last ones stay."""
        replicas = engine.replicas
        self.replicas.watch(replicas)
        if replicas is not None:
            self.engine.show_replicas(await replicas.stats(timeout_s))
            return
        with suppress(TimeoutError, EngineStoppedError):
            async with asyncio.timeout(timeout_s):
                self.engine.show(await engine.stats())

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
