"""A real server process and a collector."""

from pathlib import Path

from tests.e2e.conftest import start_server
from tests.otlp_receiver import attributes, collector, need_opentelemetry

need_opentelemetry()


def test_sigterm_sends_the_last_trace(tmp_path: Path) -> None:
    """What is queued at SIGTERM arrives, and the exit code is 0."""
    with collector() as target:
        running = start_server(tmp_path / "log", "--otlp-endpoint", target.url)
        answer = running.openai().chat.completions.create(
            model="ramify-tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
        )
        running.openai().close()

        assert running.stop() == 0

        [span] = [span for span in target.spans if span.name == "chat ramify-tiny"]
        assert attributes(span)["gen_ai.response.id"] == answer.id
        assert len(target.spans) == 4
        assert "ramify_requests" in target.last_metrics()
        resource = target.traces[0].resource_spans[0].resource
        assert attributes(resource)["service.name"] == "ramify"
        assert "Traceback" not in running.log
