"""Spans of requests as plain values, without the packages of OpenTelemetry."""

from dataclasses import replace

import pytest

from ramify.errors import ConfigError
from ramify.outputs import Placement
from ramify.server.generation import Generation
from ramify.server.history.cache_miss import CacheMiss
from ramify.server.routes import ENDPOINTS
from ramify.server.telemetry.options import ENDPOINT, OtlpOptions
from ramify.server.telemetry.request_spans import OPERATIONS, EndedRequest, request_span
from tests.pure.server_bench import ServerBench, chat, run


def ended_generation(body: object) -> Generation:
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            assert (await bench.post("/v1/chat/completions", body)).status == 200

    run(main())
    [generation] = bench.ended
    return generation


def test_every_endpoint_that_runs_the_model_has_an_operation() -> None:
    """The paths are of the server's table, each of a request with a body."""
    paths = {endpoint.path for endpoint in ENDPOINTS if endpoint.method == "POST"}

    assert OPERATIONS.keys() <= paths
    assert {endpoint.path for endpoint in ENDPOINTS if endpoint.streams} <= (
        OPERATIONS.keys() | {"/v1/responses/{name}"}
    )


def test_replica_and_tiers_are_attributes() -> None:
    """The replica by its name, the tokens of each tier, and why the next page was computed."""
    generation = ended_generation(chat("Where is the violin that Mara lost in the garden?"))
    assert generation.cache is not None
    generation.placement = Placement(1, "cached", 8)
    generation.cache = replace(
        generation.cache,
        read=24,
        tiers={"disk": 16},
        miss=CacheMiss("evicted", 24, tier="disk", tier_reason="late"),
    )
    request = EndedRequest("/v1/chat/completions", 200, False, "ann", 10, 10**20, (generation,))

    span = request_span(request, model="tiny", replica_name={1: "10.0.0.2:9000"}.__getitem__)

    assert span.name == "chat tiny"
    assert span.attributes["ramify.replica"] == "10.0.0.2:9000"
    assert span.attributes["ramify.route.reason"] == "cached"
    assert span.attributes["ramify.tokens.read"] == 24
    assert span.attributes["ramify.tokens.read.pool"] == 8
    assert span.attributes["ramify.tokens.read.disk"] == 16
    assert span.attributes["ramify.miss.reason"] == "evicted"
    assert span.attributes["ramify.miss.at_token"] == 24
    assert span.attributes["ramify.miss.tier_reason"] == "late"
    assert [child.name for child in span.children] == ["queue", "prefill", "decode"]


def test_phases_end_with_the_request() -> None:
    """Though the clock of the machine was set back meanwhile."""
    generation = ended_generation(chat("Hello", session_id="shop"))
    request = EndedRequest("/v1/chat/completions", 200, False, "", 10, 20, (generation,))

    span = request_span(request, model="tiny", replica_name=str)

    assert span.attributes["gen_ai.conversation.id"] == "shop"
    assert [child.end_ns for child in span.children] == [20, 20, 20]


@pytest.mark.parametrize(
    ("endpoint", "environment", "words"),
    [
        ("collector:4318", {}, "--otlp-endpoint 'collector:4318' is no URL; give http://HOST:4318"),
        (
            None,
            {ENDPOINT: "grpc://a:4317"},
            "OTEL_EXPORTER_OTLP_ENDPOINT 'grpc://a:4317' is no URL",
        ),
        (
            "http://a:4317",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', but only http/protobuf",
        ),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused(
    endpoint: str | None, environment: dict[str, str], words: str
) -> None:
    """Before the model loads, with the value and what to give."""
    with pytest.raises(ConfigError) as raised:
        OtlpOptions.of(endpoint, environment)

    assert words in str(raised.value)


def test_nothing_is_sent_unless_it_is_wanted() -> None:
    """Without an endpoint, or where OpenTelemetry is switched off for all programs."""
    assert OtlpOptions.of(None, {}) is None
    assert OtlpOptions.of("http://a:4318", {"OTEL_SDK_DISABLED": "true"}) is None
