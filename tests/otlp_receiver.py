"""An OTLP/HTTP collector for tests: takes what exporters post, and parses it with OpenTelemetry's own types."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ramify.errors import MissingPackageError
from ramify.server.telemetry.options import import_opentelemetry


def need_opentelemetry() -> None:
    """Skip the module where the extra is not installed."""
    try:
        import_opentelemetry()
    except MissingPackageError as error:
        pytest.skip(str(error), allow_module_level=True)


class Collector:
    """What has arrived. `status` is that of the answers; while `gate` is not set, they wait."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        self.status, self.gate = 200, threading.Event()
        self.gate.set()
        self.headers: list[dict[str, str]] = []
        self.traces: list[Any] = []  # ExportTraceServiceRequest
        self.metrics: list[Any] = []  # ExportMetricsServiceRequest
        self.bodies: list[bytes] = []
        self.kinds: dict[str, tuple[Any, list[Any]]] = {
            "/v1/traces": (ExportTraceServiceRequest, self.traces),
            "/v1/metrics": (ExportMetricsServiceRequest, self.metrics),
        }
        self.url = ""
        self.arrived = threading.Condition()

    @property
    def spans(self) -> list[Any]:
        """All spans, in the order of their arrival."""
        return [
            span
            for request in self.traces
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def last_metrics(self) -> dict[str, Any]:
        """The metrics of the last report, by name."""
        return {
            metric.name: metric
            for of_resource in self.metrics[-1].resource_metrics
            for of_scope in of_resource.scope_metrics
            for metric in of_scope.metrics
        }

    def wait_for_spans(self, count: int) -> list[Any]:
        """The spans, once there are so many."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.spans) >= count, 30)
        return self.spans

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Parse a request; returns the status of its answer."""
        self.gate.wait(60)
        if self.status == 200:
            kind, requests = self.kinds[path]
            raw = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
            with self.arrived:
                self.headers.append(headers)
                self.bodies.append(raw)
                requests.append(kind.FromString(raw))
                self.arrived.notify_all()
        return self.status


def attributes(values: Any) -> dict[str, Any]:
    """Attributes of a span, point or resource as a dictionary."""
    return {value.key: _plain(value.value) for value in values.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(element) for element in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens until the end of the block."""
    state = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = state.take(self.path, headers, body)
            with suppress(OSError):  # an exporter may have given up
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        state.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
