"""`ServerTelemetry`: what a server sends to a collector, and when."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import Counter

from ramify.errors import RamifyError
from ramify.server.operations.metrics import READ_S, Metrics
from ramify.server.service import RequestService
from ramify.server.telemetry.options import OtlpOptions
from ramify.server.telemetry.request_spans import OPERATIONS, EndedRequest, request_span

if TYPE_CHECKING:
    from ramify.server.telemetry.export import Exporters

logger = logging.getLogger(__name__)

# At shutdown, for the last batches; a collector that takes longer loses them.
CLOSE_S = 2.0
LAST_READ_S = 0.5  # for an answer of the engine, before that
ABANDON_S = 0.5  # for what waits to be counted as dropped
END_S = LAST_READ_S + CLOSE_S + ABANDON_S
CHECK_S = 0.02


class OtlpCounts:
    """`ramify_otlp_sent_total` and `ramify_otlp_dropped_total`, by signal; for any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._sent, self._dropped = (
            Counter(
                f"ramify_otlp_{name}",
                f"spans and reports of metrics {text}",
                ("signal",),
                registry=metrics.registry,
            )
            for name, text in (
                ("sent", "that the OTLP collector took"),
                ("dropped", "that it did not take, or that found the queue full"),
            )
        )

    def add(self, signal: str, count: int, *, is_sent: bool) -> None:
        """Count spans, or reports of metrics, that were sent or dropped."""
        (self._sent if is_sent else self._dropped).labels(signal).inc(count)


class ServerTelemetry:
    """Traces and metrics of a server; for its event loop, which never waits for the collector.

    Raises:
        MissingPackageError: the extra `otel` is not installed.
    """

    def __init__(self, options: OtlpOptions, service: RequestService, metrics: Metrics) -> None:
        from ramify.server.telemetry.export import Exporters

        self._options, self._service, self._metrics = options, service, metrics
        counts = OtlpCounts(metrics)
        self._exporters: Exporters = Exporters(options, counts, model=service.model)

    def end_request(self, request: EndedRequest, headers: Mapping[str, str]) -> None:
        """Queue the spans of a request to an endpoint of the model; others have none.

        Args:
            headers: of the request.
        """
        spans = self._exporters.spans
        if spans is not None and request.route in OPERATIONS:
            record = request_span(
                request, model=self._service.model, replica_name=self._replica_name
            )
            spans.put(record, headers)

    def _replica_name(self, number: int) -> str:
        replicas = self._service.engine.replicas
        states = () if replicas is None else replicas.states()
        return next((state.name for state in states if state.number == number), str(number))

    async def run(self) -> None:
        """Report metrics at the options' interval until cancelled."""
        while self._exporters.metrics is not None:
            await asyncio.sleep(self._options.interval_s)
            await self._report()

    async def close(self) -> None:
        """Send the last metrics and what is queued, for `CLOSE_S` at most; then drop the rest."""
        await self._report(LAST_READ_S)
        threads = self._exporters.closing()
        if not await _have_ended(threads, CLOSE_S):
            logger.warning(
                "OTLP: the collector did not take the last spans and metrics within %.0f s", CLOSE_S
            )
            self._exporters.abandon()
            await _have_ended(threads, ABANDON_S)

    async def _report(self, timeout_s: float = READ_S) -> None:
        if self._exporters.metrics is None:
            return
        try:
            await self._metrics.read_engine(self._service.engine, timeout_s)
        except RamifyError as error:  # no replica, say: the server has metrics of its own
            logger.warning("OTLP: metrics of the engine are those of the last report: %s", error)
        self._exporters.metrics.put(list(self._metrics.registry.collect()))


async def _have_ended(threads: Sequence[threading.Thread], limit_s: float) -> bool:
    """Wait until threads end; returns whether they did within `limit_s`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    while any(thread.is_alive() for thread in threads):
        if loop.time() >= deadline_s:
            return False
        await asyncio.sleep(CHECK_S)
    return True
