"""Prometheus metrics: our names, and those of vLLM that dashboards look for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ramify.engine.context import EngineStats
from ramify.engine.core import EngineCore
from ramify.outputs import StepOutput
from ramify.server.generation import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
GAPS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0)
TOKENS = (1, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)

# (name, vLLM's name or None, help text, value in a snapshot)
EngineMetric = tuple[str, str | None, str, Callable[[EngineStats], float]]

# fmt: off
GAUGES: tuple[EngineMetric, ...] = (
    ("requests_running", "num_requests_running", "requests in the running batch", lambda stats: stats.num_running),
    ("requests_waiting", "num_requests_waiting", "requests that wait to be admitted", lambda stats: stats.num_waiting),
    ("kv_cache_used_share", "kv_cache_usage_perc", "share of the pages with K/V", lambda stats: 1 - stats.cache.free_pages / stats.cache.num_pages),
    ("kv_leases", None, "prefixes that requests hold now", lambda stats: stats.cache.num_leases),
    ("kv_pages", None, "pages of the pool", lambda stats: stats.cache.num_pages),
    ("kv_pages_free", None, "pages with nothing", lambda stats: stats.cache.free_pages),
    ("kv_pages_cached", None, "pages that the prefix cache holds", lambda stats: stats.cache.cached_pages),
    ("kv_pages_pinned", None, "pages that are kept on purpose", lambda stats: stats.cache.pinned_pages),
    ("cache_ideal_hit_rate", None, "token hit rate that a cache without limit would have had", lambda stats: stats.cache.ideal_hit_rate),
)
COUNTERS: tuple[EngineMetric, ...] = (
    ("cache_lookup_tokens", "prefix_cache_queries", "prompt tokens looked up", lambda stats: stats.cache.lookup_tokens),
    ("cache_hit_tokens", "prefix_cache_hits", "prompt tokens found in the cache", lambda stats: stats.cache.hit_tokens),
    ("cache_evicted_pages", None, "pages evicted", lambda stats: stats.cache.evicted_pages),
    ("preemptions", "num_preemptions", "requests sent back to the queue for want of pages", lambda stats: stats.num_preemptions),
    ("steps", None, "steps of the engine", lambda stats: stats.num_steps),
    ("computed_tokens", None, "rows that the model computed", lambda stats: stats.num_computed_tokens),
)
# fmt: on


class EngineCollector(Collector):
    """Values that were read in the engine's thread just before they are told."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._values: list[Metric] = []

    def read(self, core: EngineCore) -> None:
        """Take all values; in the engine's thread."""
        stats = core.stats()
        found: list[Metric] = []
        for make, kinds in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, alias, told, value in kinds:
                number = float(value(stats))
                found.append(make(f"ramify_{name}", told, value=number))
                if alias is not None:
                    theirs = make(f"vllm:{alias}", told, labels=["model_name"])
                    theirs.add_metric([self._model], number)
                    found.append(theirs)
        self._values = found

    def collect(self) -> Iterable[Metric]:
        """What was read last."""
        return self._values


class DualCounter:
    """A counter under our name and, with the model as a label, under vLLM's."""

    def __init__(self, ours: Counter, theirs: Counter) -> None:
        self._both = (ours, theirs)

    def inc(self, count: float) -> None:
        """Count so many more."""
        for one in self._both:
            one.inc(count)


class DualHistogram:
    """A histogram under our name and, with the model as a label, under vLLM's."""

    def __init__(self, ours: Histogram, theirs: Histogram) -> None:
        self._both = (ours, theirs)

    def observe(self, value: float | None) -> None:
        """One more value; None is none."""
        for one in self._both if value is not None else ():
            one.observe(value or 0.0)


class Metrics:
    """Counts of the server, and values of its engine.

    Args:
        model: the label `model_name`, by which dashboards for vLLM choose.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(model)
        self.registry.register(self.engine)
        self._model = model
        self.num_prompt = self.num_output = self.num_saved = 0  # tokens, for who asks often
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
        self._misses = self._counter("cache_misses", "prompts by why not all was found", "reason")
        self._ttft = self._dual_histogram(
            "time_to_first_token_seconds", "to the first token", SECONDS
        )
        self._gaps = self._dual_histogram("inter_token_latency_seconds", "between tokens", GAPS)
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
            buckets=GAPS,
            registry=self.registry,
        )
        self._last_s: dict[tuple[str, int], float] = {}  # of live answers: when a token came

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(f"ramify_{name}", told, labels, registry=self.registry)

    def _dual_counter(self, name: str, told: str) -> DualCounter:
        theirs = Counter(f"vllm:{name}", told, ("model_name",), registry=self.registry)
        return DualCounter(self._counter(name, told), theirs.labels(self._model))

    def _dual_histogram(self, name: str, told: str, buckets: tuple[float, ...]) -> DualHistogram:
        ours = Histogram(f"ramify_{name}", told, buckets=buckets, registry=self.registry)
        theirs = Histogram(
            f"vllm:{name}", told, ("model_name",), buckets=buckets, registry=self.registry
        )
        return DualHistogram(ours, theirs.labels(self._model))

    def count_response(self, route: str, status: int) -> None:
        """A response begins."""
        self._responses.labels(route, str(status)).inc()

    def observe_tokens(self, generation: Generation, event: StepOutput) -> None:
        """Tokens have come to whoever reads them; merged ones count as evenly spread."""
        count = len(event.new_token_ids)
        if not count:
            return
        self._output_tokens.inc(count)
        self.num_output += count
        now, key = time.monotonic(), (generation.id, event.index)
        last = self._last_s.get(key)
        self._last_s[key] = now
        for _ in range(count if last is not None else 0):
            self._gaps.observe((now - (last or now)) / count)

    def observe_request(self, generation: Generation) -> None:
        """A request has ended."""
        for index in range(generation.request.params.n):
            self._last_s.pop((generation.id, index), None)
        output = generation.output
        reason = "disconnected" if output is None else str(output.finish_reason)
        self._requests.labels(reason).inc()
        self._success.labels(self._model, "abort" if output is None else reason).inc()
        if output is None:
            return
        num_prompt, use = len(output.prompt_token_ids), output.cache
        self._prompt_tokens.inc(num_prompt)
        self.num_prompt += num_prompt
        self.num_saved += use.read_tokens + use.shared_tokens
        for source, count in (
            ("read", use.read_tokens),
            ("shared", use.shared_tokens),
            ("computed", use.computed_tokens),
        ):
            self._sources.labels(source).inc(count)
        if generation.miss is not None:
            self._misses.labels(generation.miss.reason).inc()
        times = output.metrics
        self._ttft.observe(times.ttft_s)
        self._total.observe(times.total_s)
        self._queue.observe(times.queue_s)
        self._prompt_sizes.observe(float(num_prompt))
        self._output_sizes.observe(float(output.usage.completion_tokens))

    def exposition(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)
