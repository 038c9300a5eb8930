"""Traces and metrics by OTLP: a real server, a real exporter, and a collector that parses what it gets."""

import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from ramify.errors import ConfigError, NoReplicaError
from ramify.server.telemetry import server_telemetry
from ramify.server.telemetry.options import OtlpOptions
from ramify.server.tenants import ApiKeys
from tests.otlp_receiver import Collector, attributes, collector, need_opentelemetry
from tests.pure.live_server import LIMIT_S, Live, events, live, until
from tests.pure.test_batches import begin, chat_body, client_of, end_of, line

need_opentelemetry()

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{ABOVE}-01"}
SECRET = "The vault of Marcus opens with the word heliotrope at noon."
PHASES = {"queue", "prefill", "decode"}
SPANS = 1 + len(PHASES)


def otlp(target: Collector | str, **options: Any) -> OtlpOptions:
    url = target if isinstance(target, str) else target.url
    return OtlpOptions(endpoint=url, **({"interval_s": 3600.0} | options))


def stop(running: Live) -> float:
    """End a server as SIGTERM does; returns the seconds that it took."""
    begin_s = time.monotonic()
    running.listener.handle_exit(signal.SIGTERM, None)
    running.thread.join(LIMIT_S)
    assert not running.thread.is_alive()
    return time.monotonic() - begin_s


def roots(spans: list[Any]) -> list[Any]:
    return [span for span in spans if span.name not in PHASES]


def unused_url() -> str:
    """Of a port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_trace_follows_the_client_and_says_where_tokens_came_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client's trace goes on; counts, cache and miss are attributes; phases fill the request's time.

    No text of prompt or answer leaves the server, nor does a stop string.
    """
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chats")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with collector() as target, live(otlp=otlp(target), model="fake") as running:
        running.ask(SECRET)
        answer = running.post(
            "/v1/completions",
            {"prompt": SECRET, "max_tokens": 4, "model": "fake", "seed": 7, "stop": ["heliotrope"]},
            headers=TRACEPARENT,
        )
        assert answer.status_code == 200
        stop(running)
        usage = answer.json()["usage"]

        first, second = sorted(roots(target.spans), key=lambda span: span.start_time_unix_nano)
        children = [span for span in target.spans if span.parent_span_id == second.span_id]
        sent = b"".join(target.bodies)
        of_server = attributes(target.traces[0].resource_spans[0].resource)

    assert (second.trace_id.hex(), second.parent_span_id.hex()) == (TRACE, ABOVE)
    assert first.trace_id != second.trace_id
    assert not first.parent_span_id
    assert second.name == "text_completion fake"
    assert second.kind == 2  # SERVER
    values = attributes(second)
    assert values["gen_ai.operation.name"] == "text_completion"
    assert values["gen_ai.request.model"] == values["gen_ai.response.model"] == "fake"
    assert (values["gen_ai.request.seed"], values["gen_ai.request.max_tokens"]) == (7, 4)
    assert values["gen_ai.response.id"] == answer.json()["id"]
    assert values["gen_ai.response.finish_reasons"] == ["length"]
    assert values["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert values["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 4
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert values["gen_ai.usage.cache_read.input_tokens"] == cached > 0
    assert values["ramify.tokens.read"] + values["ramify.tokens.computed"] == usage["prompt_tokens"]
    assert attributes(first)["ramify.miss.reason"] == "cold"
    assert {span.name for span in children} == PHASES
    by_name = {span.name: span for span in children}
    assert by_name["queue"].end_time_unix_nano == by_name["prefill"].start_time_unix_nano
    assert by_name["prefill"].end_time_unix_nano == by_name["decode"].start_time_unix_nano
    assert second.start_time_unix_nano <= by_name["queue"].start_time_unix_nano
    assert by_name["decode"].end_time_unix_nano <= second.end_time_unix_nano
    assert attributes(by_name["prefill"])["ramify.tokens.read"] == values["ramify.tokens.read"]
    assert b"heliotrope" not in sent
    assert b"Marcus" not in sent
    assert of_server["service.name"] == "chats"
    assert of_server["deployment.environment.name"] == "test"
    assert of_server["service.version"]


def test_a_line_of_a_batch_has_a_trace_of_its_own(tmp_path: Path) -> None:
    """With the id of its batch, and the phases in the engine."""
    with (
        collector() as target,
        live(otlp=otlp(target), batch_dir=tmp_path) as running,
        client_of(running) as client,
    ):
        batch = begin(client, [line("a", chat_body("Rome")), line("b", chat_body("Oslo"))])
        assert end_of(client, batch).status == "completed"
        stop(running)
        spans = [span for span in roots(target.spans) if span.name.startswith("chat")]

    assert [attributes(span)["ramify.batch"] for span in spans] == [batch.id] * 2
    assert len({span.trace_id for span in spans}) == 2
    assert len(target.spans) == 2 * SPANS


def test_metrics_are_those_of_the_registry() -> None:
    """A report has the values of /metrics under the same names, and three under the conventions'."""
    with collector() as target, live(otlp=otlp(target)) as running:
        for _ in range(3):
            running.ask()
        running.until_idle()
        scraped = running.metrics()
        stop(running)
        reported = target.last_metrics()

    [prompt] = reported["ramify_prompt_tokens"].sum.data_points
    assert prompt.as_double == scraped["ramify_prompt_tokens_total"] > 0
    assert reported["ramify_prompt_tokens"].sum.is_monotonic
    [pages] = reported["ramify_kv_pages"].gauge.data_points
    assert pages.as_double == scraped["ramify_kv_pages"]
    by_source = reported["ramify_prompt_tokens_by_source"].sum.data_points
    for point in by_source:
        source = attributes(point)["source"]
        name = f'ramify_prompt_tokens_by_source_total{{source="{source}"}}'
        assert point.as_double == scraped[name]
    assert not any(name.startswith("vllm:") for name in reported)
    for name, ours in (
        ("gen_ai.server.time_to_first_token", "ramify_time_to_first_token_seconds"),
        ("gen_ai.server.time_per_output_token", "ramify_inter_token_latency_seconds"),
        ("gen_ai.server.request.duration", "ramify_e2e_request_latency_seconds"),
    ):
        [point] = reported[name].histogram.data_points
        assert point.count == sum(point.bucket_counts) == scraped[f"{ours}_count"] > 0
        assert point.sum == pytest.approx(scraped[f"{ours}_sum"])
        assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
        assert point.start_time_unix_nano < point.time_unix_nano
        assert attributes(point)["gen_ai.provider.name"] == "ramify"
        assert reported[name].unit == "s"
    buckets = scraped['ramify_e2e_request_latency_seconds_bucket{le="100.0"}']
    assert sum(point.bucket_counts[:-1]) == buckets


def test_metrics_are_reported_while_the_server_runs() -> None:
    """At the interval, each report with what has happened by then."""
    with collector() as target, live(otlp=otlp(target, interval_s=0.02)) as running:
        running.ask()
        until(lambda: len(target.metrics) > 1 and "ramify_requests" in target.last_metrics())


def test_metrics_go_on_without_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has metrics of its own; why the engine's are missing is logged."""

    async def unread(*_: Any) -> None:
        raise NoReplicaError(1.0, "none answers")

    with collector() as target, live(otlp=otlp(target, interval_s=0.02)) as running:
        monkeypatch.setattr(running.server.metrics, "read_engine", unread)
        until(lambda: len(target.metrics) > 2)

        assert "ramify_otlp_sent" in target.last_metrics()
    assert "none answers" in caplog.text


def test_a_refused_request_has_a_trace_of_its_own() -> None:
    """With the route, the status and the tenant, and no phases; it is no error of the server."""
    keys = ApiKeys.of("ann", "bob")
    with collector() as target, live(keys, otlp=otlp(target)) as running:
        headers = {"authorization": "Bearer ann"}
        body = {"prompt": SECRET, "temperature": -1}
        assert running.post("/v1/completions", body, headers=headers).status_code == 400
        assert running.post("/v1/completions", body).status_code == 401
        assert running.get("/v1/models", headers=headers).status_code == 200
        stop(running)
        refused, unknown = target.spans

    values = attributes(refused)
    assert refused.name == "text_completion"
    assert (values["http.response.status_code"], values["error.type"]) == (400, "400")
    assert values["ramify.tenant"]
    assert refused.status.code == 0
    assert attributes(unknown)["http.response.status_code"] == 401
    assert "ramify.tenant" not in attributes(unknown)


def test_a_failed_answer_is_an_error_of_the_server() -> None:
    """Though the status of its stream was 200."""
    with (
        collector() as target,
        live(otlp=otlp(target), fail_at=range(2, 99), error=RuntimeError("broken")) as running,
    ):
        body = {"prompt": SECRET, "max_tokens": 4, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as answer:
            list(events(answer))
        stop(running)
        [span] = roots(target.spans)

    assert span.status.code == 2
    assert attributes(span)["error.type"] == span.status.message
    assert attributes(span)["gen_ai.request.stream"] is True


def test_a_client_that_leaves_is_no_error() -> None:
    """Status 499, the tokens so far, no phases."""
    with collector() as target, live(otlp=otlp(target), next_token=lambda _: 30) as running:
        body = {"prompt": SECRET, "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as answer:
            next(events(answer))
        running.until_idle()
        stop(running)
        [span] = target.spans

    values = attributes(span)
    assert values["http.response.status_code"] == 499
    assert values["gen_ai.response.finish_reasons"] == ["disconnected"]
    assert values["gen_ai.usage.output_tokens"] > 0
    assert span.status.code == 0


def test_an_unsampled_trace_is_not_sent() -> None:
    """The client's decision counts; a header that is malformed begins a new trace."""
    with collector() as target, live(otlp=otlp(target)) as running:
        body = {"prompt": SECRET, "max_tokens": 4}
        for traceparent in (f"00-{TRACE}-{ABOVE}-00", "00-zz-1-01"):
            headers = {"traceparent": traceparent}
            assert running.post("/v1/completions", body, headers=headers).status_code == 200
        stop(running)

        assert len(roots(target.spans)) == 1
        assert target.spans[0].trace_id.hex() != TRACE


def test_without_a_collector_requests_are_answered_and_losses_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A port on which nobody listens: as quick as ever, dropped spans are counted, the end is bounded."""
    monkeypatch.setattr(server_telemetry, "CLOSE_S", 0.2)
    with live(otlp=otlp(unused_url())) as running:
        for _ in range(8):
            assert running.ask().status_code == 200
        running.until_idle()
        took_s = stop(running)
        dropped = running.server.metrics.registry.get_sample_value(
            "ramify_otlp_dropped_total", {"signal": "spans"}
        )

    assert took_s < 5
    assert dropped == 8 * SPANS


def test_a_collector_that_refuses_is_counted() -> None:
    """Status 400 drops at once."""
    with collector() as target, live(otlp=otlp(target)) as running:
        target.status = 400
        running.ask()
        stop(running)
        registry = running.server.metrics.registry

        for signal_name, count in (("spans", SPANS), ("metrics", 1)):
            labels = {"signal": signal_name}
            assert registry.get_sample_value("ramify_otlp_dropped_total", labels) == count
            assert registry.get_sample_value("ramify_otlp_sent_total", labels) is None


def test_a_slow_collector_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers nothing: the queue stays within its limit, the rest is counted, the end comes in time."""
    monkeypatch.setattr(server_telemetry, "CLOSE_S", 0.2)
    limit = 3 * SPANS
    options = {"max_queued_spans": limit, "interval_s": 0.02}
    with collector() as target, live(otlp=otlp(target, **options)) as running:
        target.gate.clear()
        for _ in range(10):
            assert running.ask().status_code == 200
        running.until_idle()
        registry = running.server.metrics.registry

        def dropped(name: str) -> float:
            return registry.get_sample_value("ramify_otlp_dropped_total", {"signal": name}) or 0.0

        until(lambda: dropped("metrics") > 0)
        lost = dropped("spans")
        took_s = stop(running)

        # The first batch is on its way, if the exporter's thread was quick; the queue has the next.
        assert 10 * SPANS - 2 * limit <= lost <= 10 * SPANS - limit
        assert took_s < 5
        assert not [
            thread
            for thread in threading.enumerate()
            if not thread.daemon and "otlp" in thread.name
        ]


def test_sigterm_sends_what_is_queued() -> None:
    """Within the time of the shutdown, though no batch was due."""
    with collector() as target, live(otlp=otlp(target)) as running:
        running.ask()
        assert not target.metrics
        took_s = stop(running)

        assert len(target.spans) == SPANS
        assert "ramify_requests" in target.last_metrics()
        assert took_s < 5  # after which a batch of spans would be due


def test_a_signal_can_be_left_out() -> None:
    """Traces without metrics."""
    with collector() as target, live(otlp=otlp(target, metrics=False)) as running:
        running.ask()
        stop(running)

        assert len(target.spans) == SPANS
        assert not target.metrics


def test_the_environment_of_opentelemetry_counts() -> None:
    """The endpoint alone sends; the flag goes before it; exporters, queue and interval follow theirs."""
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRIC_EXPORT_INTERVAL": "5000",
        "OTEL_BSP_MAX_QUEUE_SIZE": "64",
    }
    of_environment = OtlpOptions.of(None, environment)
    of_flag = OtlpOptions.of("https://b:4318/", environment)

    assert of_environment == OtlpOptions(traces=False, interval_s=5.0, max_queued_spans=64)
    assert of_environment.url("traces") is None  # the exporter reads it
    assert of_flag is not None
    assert of_flag.url("metrics") == "https://b:4318/v1/metrics"
    with pytest.raises(ConfigError, match=r"OTEL_METRIC_EXPORT_INTERVAL is '0'; give a whole"):
        OtlpOptions.of(None, environment | {"OTEL_METRIC_EXPORT_INTERVAL": "0"})
