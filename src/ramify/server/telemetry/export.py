"""Queues, threads and exporters: nothing here makes a request or a step wait for the collector."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    MetricExportResult,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.core import Metric as Family

from ramify import __version__
from ramify.server.telemetry.metric_points import otlp_metrics
from ramify.server.telemetry.options import OtlpOptions
from ramify.server.telemetry.request_spans import SpanRecord

logger = logging.getLogger(__name__)

SCOPE = "ramify"
BATCH_SPANS = 512  # of one export, as the SDK has it; more than a queue may be
SDK_LOGGER = "opentelemetry"


class ExportCounts(Protocol):
    """Counts what the exporters did; for any thread."""

    def add(self, signal: str, count: int, *, is_sent: bool) -> None:
        """Count spans, or reports of metrics, that were sent or dropped."""
        ...


def resource() -> Resource:
    """This server; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before our own values."""
    own = {
        "service.name": "ramify",
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),
    }
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})


class OutageLog:
    """Logs when exports of a signal begin to fail, and when they succeed again."""

    def __init__(self, signal: str) -> None:
        self._signal, self._is_failing = signal, False

    def note(self, is_sent: bool) -> None:
        """Note the result of an export."""
        if not is_sent and not self._is_failing:
            logger.warning(
                "OTLP: %s do not reach the collector; they are dropped and counted in "
                "ramify_otlp_dropped_total",
                self._signal,
            )
        elif is_sent and self._is_failing:
            logger.info("OTLP: %s reach the collector again", self._signal)
        self._is_failing = not is_sent


class CountedSpanExporter:
    """An exporter of spans that counts them. The SDK's batch thread alone calls `export`."""

    def __init__(self, exporter: OTLPSpanExporter, counts: ExportCounts) -> None:
        self._exporter, self._counts = exporter, counts
        self._outage = OutageLog("spans")
        self.num_taken = 0  # spans, from the queue

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Send a batch; see `SpanExporter`."""
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            is_sent = result is SpanExportResult.SUCCESS
            self._counts.add("spans", len(spans), is_sent=is_sent)
            self._outage.note(is_sent)
        return result

    def shutdown(self) -> None:
        """See `SpanExporter`."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See `SpanExporter`."""
        return bool(self._exporter.force_flush(timeout_millis))


class SpanQueue:
    """Spans on their way to the collector; `put` drops those of a request that find no room.

    The SDK's own queue drops its oldest spans, one log line each, and counts none: it never fills up here.
    """

    def __init__(self, options: OtlpOptions, sender: Resource, counts: ExportCounts) -> None:
        self._counts, self._limit = counts, options.max_queued_spans
        self._exporter = CountedSpanExporter(OTLPSpanExporter(options.url("traces")), counts)
        self._provider = TracerProvider(resource=sender, shutdown_on_exit=False)
        batches = BatchSpanProcessor(
            self._exporter,
            max_queue_size=self._limit,
            max_export_batch_size=None if self._limit >= BATCH_SPANS else self._limit,
        )
        self._provider.add_span_processor(batches)
        self._tracer = self._provider.get_tracer(SCOPE, __version__)
        self._contexts = TraceContextTextMapPropagator()
        self._num_put = 0

    def put(self, record: SpanRecord, headers: Mapping[str, str]) -> None:
        """Queue a request's spans, if they are sampled.

        Args:
            headers: of the request, whose `traceparent` and `tracestate` name the span above.
        """
        span = self._tracer.start_span(
            record.name,
            context=self._contexts.extract(headers),
            kind=SpanKind.SERVER,
            attributes=record.attributes,
            start_time=record.start_ns,
        )
        if not span.is_recording():
            return
        num_spans = 1 + len(record.children)
        if self._num_put - self._exporter.num_taken + num_spans > self._limit:
            self._counts.add("spans", num_spans, is_sent=False)
            return
        self._num_put += num_spans
        above = set_span_in_context(span)
        for child in record.children:
            self._tracer.start_span(
                child.name, above, attributes=child.attributes, start_time=child.start_ns
            ).end(child.end_ns)
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(record.end_ns)

    def close(self) -> None:
        """Send what is queued, for 30 s at most."""
        self._provider.shutdown()

    def abandon(self) -> None:
        """Drop what is queued or about to be sent again, but for a request that is on its way."""
        self._exporter.shutdown()


class MetricReports:
    """Sends reports of metrics from a thread of its own; while it sends, at most one waits."""

    def __init__(
        self, options: OtlpOptions, sender: Resource, counts: ExportCounts, *, model: str
    ) -> None:
        self._counts, self._resource, self._model = counts, sender, model
        self._exporter = OTLPMetricExporter(options.url("metrics"))
        self._outage = OutageLog("metrics")
        self._start_ns = time.time_ns()
        self._waiting: queue.Queue[tuple[int, list[Family]] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._send_all, name="otlp metrics", daemon=True)
        self._thread.start()

    def put(self, families: list[Family]) -> None:
        """Queue a report; it is dropped if another waits."""
        try:
            self._waiting.put_nowait((time.time_ns(), families))
        except queue.Full:
            self._counts.add("metrics", 1, is_sent=False)

    def close(self) -> None:
        """Send the report that waits."""
        self._waiting.put(None)
        self._thread.join()
        self._exporter.shutdown()

    def abandon(self) -> None:
        """Drop the reports that wait or are about to be sent again."""
        self._exporter.shutdown()

    def _send_all(self) -> None:
        while (report := self._waiting.get()) is not None:
            now_ns, families = report
            is_sent = False
            try:
                is_sent = self._send(now_ns, families)
            except Exception:
                logger.exception("OTLP: a report of metrics cannot be made")
            self._counts.add("metrics", 1, is_sent=is_sent)
            self._outage.note(is_sent)

    def _send(self, now_ns: int, families: list[Family]) -> bool:
        metrics = otlp_metrics(families, model=self._model, start_ns=self._start_ns, now_ns=now_ns)
        scope = ScopeMetrics(InstrumentationScope(SCOPE, __version__), metrics, "")
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        return bool(self._exporter.export(data) is MetricExportResult.SUCCESS)


class Exporters:
    """Both signals of a server, as far as the options want them."""

    def __init__(self, options: OtlpOptions, counts: ExportCounts, *, model: str) -> None:
        # Each failed batch, with its reason: the lines of a retry in between say no more.
        logging.getLogger(SDK_LOGGER).setLevel(logging.ERROR)
        sender = resource()
        self.spans = SpanQueue(options, sender, counts) if options.traces else None
        self.metrics = (
            MetricReports(options, sender, counts, model=model) if options.metrics else None
        )

    @property
    def _signals(self) -> list[SpanQueue | MetricReports]:
        return [signal for signal in (self.spans, self.metrics) if signal is not None]

    def closing(self) -> list[threading.Thread]:
        """Threads that send what is queued, and end; nobody has to wait for them."""
        threads = [
            threading.Thread(target=signal.close, name="otlp close", daemon=True)
            for signal in self._signals
        ]
        for thread in threads:
            thread.start()
        return threads

    def abandon(self) -> None:
        """Drop what the threads of `closing` have not sent."""
        for signal in self._signals:
            signal.abandon()
