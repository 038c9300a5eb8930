"""Prometheus metrics: our names, and those of vLLM that dashboards look for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ramify.engine.core import EngineCore
from ramify.server.service import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
TOKENS = (1, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)

# What the engine knows: (name, its vLLM name or None, what it is, how to read it).
Gauge = tuple[str, str | None, str, Callable[[EngineCore], float]]


def _gauges() -> Iterable[Gauge]:
    def used(core: EngineCore) -> float:
        stats = core.cache.stats()
        return 1 - stats.free_pages / stats.num_pages

    return (
        (
            "requests_running",
            "num_requests_running",
            "requests in the running batch",
            lambda core: len(core.scheduler.running),
        ),
        (
            "requests_waiting",
            "num_requests_waiting",
            "requests that wait to be admitted",
            lambda core: len(core.scheduler.waiting),
        ),
        ("kv_cache_used_share", "kv_cache_usage_perc", "share of the pages with K/V", used),
        ("kv_pages", None, "pages of the pool", lambda core: core.cache.num_pages),
        ("kv_pages_free", None, "pages with nothing", lambda core: core.cache.stats().free_pages),
        (
            "kv_pages_cached",
            None,
            "pages that the prefix cache holds",
            lambda core: core.cache.stats().cached_pages,
        ),
        (
            "kv_pages_pinned",
            None,
            "pages that are kept on purpose",
            lambda core: core.cache.stats().pinned_pages,
        ),
        (
            "cache_ideal_hit_rate",
            None,
            "token hit rate that a cache without limit would have had",
            lambda core: core.cache.stats().ideal_hit_rate,
        ),
    )


def _counters() -> Iterable[Gauge]:
    return (
        (
            "cache_lookup_tokens",
            "prefix_cache_queries",
            "prompt tokens looked up",
            lambda core: core.cache.stats().lookup_tokens,
        ),
        (
            "cache_hit_tokens",
            "prefix_cache_hits",
            "prompt tokens found in the cache",
            lambda core: core.cache.stats().hit_tokens,
        ),
        (
            "cache_evicted_pages",
            None,
            "pages evicted",
            lambda core: core.cache.stats().evicted_pages,
        ),
        (
            "preemptions",
            "num_preemptions",
            "requests sent back to the queue for want of pages",
            lambda core: core.scheduler.num_preemptions,
        ),
        ("steps", None, "steps of the engine", lambda core: core.num_steps),
        (
            "computed_tokens",
            None,
            "rows that the model computed",
            lambda core: core.num_computed_tokens,
        ),
    )


class EngineCollector(Collector):
    """Values that were read in the engine's thread just before they are told."""

    def __init__(self) -> None:
        self._values: list[Metric] = []

    def read(self, core: EngineCore) -> None:
        """Take all values; in the engine's thread."""
        found: list[Metric] = []
        for make, kinds in ((GaugeMetricFamily, _gauges()), (CounterMetricFamily, _counters())):
            for name, alias, told, value in kinds:
                number = float(value(core) or 0)
                found.append(make(f"ramify_{name}", told, value=number))
                if alias is not None:
                    found.append(make(f"vllm:{alias}", told, value=number))
        self._values = found

    def collect(self) -> Iterable[Metric]:
        """What was read last."""
        return self._values


class Metrics:
    """Counts of the server, and values of its engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.requests = self._counter("requests", "requests that have ended", "reason")
        self.answers = self._counter("http_responses", "responses", "route", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens", alias=True)
        self.output_tokens = self._counter("generation_tokens", "tokens generated", alias=True)
        self.source_tokens = self._counter(
            "prompt_tokens_by_source", "prompt tokens: read, shared in flight, computed", "source"
        )
        self.misses = self._counter("cache_misses", "prompts by why not all was found", "reason")
        self.ttft = self._histogram("time_to_first_token_seconds", "to the first token", SECONDS)
        self.tbt = self._histogram("inter_token_latency_seconds", "between tokens", SECONDS)
        self.total = self._histogram("e2e_request_latency_seconds", "of whole requests", SECONDS)
        self.prompts = self._histogram("request_prompt_tokens", "of requests", TOKENS)

    def _counter(
        self, name: str, told: str, *labels: str, alias: bool = False
    ) -> tuple[Counter, ...]:
        names = [f"ramify_{name}", *([f"vllm:{name}"] if alias else [])]
        return tuple(Counter(one, told, labels, registry=self.registry) for one in names)

    def _histogram(self, name: str, told: str, buckets: Iterable[float]) -> tuple[Histogram, ...]:
        return tuple(
            Histogram(f"{home}{name}", told, buckets=tuple(buckets), registry=self.registry)
            for home in ("ramify_", "vllm:")
        )

    def note(self, generation: Generation) -> None:
        """A request has ended."""
        output = generation.output
        reason = "disconnected" if output is None else str(output.finish_reason)
        self.requests[0].labels(reason).inc()
        if output is None:
            return
        for one in self.prompt_tokens:
            one.inc(len(output.prompt_token_ids))
        for one in self.output_tokens:
            one.inc(output.usage.completion_tokens)
        for source, count in (
            ("read", output.cache.read_tokens),
            ("shared", output.cache.shared_tokens),
            ("computed", output.cache.computed_tokens),
        ):
            self.source_tokens[0].labels(source).inc(count)
        if generation.miss is not None:
            self.misses[0].labels(generation.miss.reason).inc()
        times = output.metrics
        rate = times.decode_tokens_per_s
        for histograms, value in (
            (self.ttft, times.ttft_s),
            (self.tbt, 1 / rate if rate else None),
            (self.total, times.total_s),
            (self.prompts, float(len(output.prompt_token_ids))),
        ):
            for histogram in histograms if value is not None else ():
                histogram.observe(value or 0.0)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)
