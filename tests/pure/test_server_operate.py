"""What operators use: cache administration, pins, metrics, logs and the trace file."""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ramify.analysis.log_files import read_log
from ramify.analysis.reader import ReadQuality
from ramify.engine.core import EngineCore
from ramify.outputs import StepOutput
from ramify.server.generation import Generation
from ramify.server.history.cache_miss import REASONS
from ramify.server.operations.load_monitor import LoadMonitor, LoadSnapshot
from ramify.server.operations.metrics import Metrics
from ramify.server.operations.request_log import JsonFormatter, LineFile, log_request, trace_line
from ramify.server.tenants import ApiKeys
from tests.pure.live_server import TOKENIZER, Live, ids, live

ROME = "The old bridge of Rome was built by Marcus and stands near the market. "
PARIS = "In Paris the river is wide, and Claire sells flowers there every morning. "
OPERATOR = [
    ("GET", "/v1/cache"),
    ("DELETE", "/v1/cache"),
    ("GET", "/v1/cache/tree"),
    ("GET", "/v1/cache/pins"),
    ("POST", "/v1/cache/pins"),
    ("DELETE", "/v1/cache/pins/1"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/v1/loads"),
    ("GET", "/metrics"),
]
# Metrics that vLLM's dashboards query.
DASHBOARD = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:prompt_tokens_total
vllm:generation_tokens_total vllm:request_success_total vllm:num_preemptions_total
vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
vllm:e2e_request_latency_seconds_bucket vllm:request_queue_time_seconds_bucket
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
""".split()


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    with live() as running:
        yield running


@pytest.fixture
def empty(shared: Live) -> Live:
    for pin in shared.get("/v1/cache/pins").json()["pins"]:
        assert delete(shared, f"/v1/cache/pins/{pin['id']}").status_code == 200
    assert shared.post("/reset_prefix_cache", {}).status_code == 200
    return shared


def delete(running: Live, path: str, **options: Any) -> httpx.Response:
    return httpx.delete(running.url + path, timeout=60, **options)


def cached(running: Live) -> int:
    return int(running.get("/v1/cache").json()["cached_pages"])


def test_statistics_and_tree_tell_what_is_there(empty: Live) -> None:
    """Pages add up; the tree's nodes have the prompts' texts."""
    empty.ask(ROME)
    empty.ask(ROME)
    stats, tree = empty.get("/v1/cache").json(), empty.get("/v1/cache/tree").json()

    pages = stats["free_pages"] + stats["cached_pages"] + stats["private_pages"]
    assert pages == stats["num_pages"]
    assert 0 < stats["hit_rate"] < 1
    assert tree["num_nodes"] == stats["num_nodes"]
    assert "The old bridge" in tree["nodes"][0]["text"]
    assert sum(node["num_pages"] for node in tree["nodes"]) == stats["cached_pages"]


def test_deletion_takes_what_is_named(empty: Live) -> None:
    """The prompts under a prefix, of an age, of a tenant, or all."""
    empty.ask(ROME + "Who built it?")
    empty.ask(PARIS + "Who sells?")
    before = cached(empty)

    deleted = delete(empty, "/v1/cache", params={"prefix": ROME}).json()
    assert deleted == {"pages": before - cached(empty), "kept_pages": 0}
    assert deleted["pages"] > 0
    tree = empty.get("/v1/cache/tree").json()
    assert all("Rome" not in node["text"] for node in tree["nodes"])
    assert delete(empty, "/v1/cache", params={"older_than": 3600}).json()["pages"] == 0
    assert cached(empty) > 0
    assert delete(empty, "/v1/cache", params={"tenant": "nobody"}).json()["pages"] == 0
    assert delete(empty, "/v1/cache").json()["pages"] > 0
    assert cached(empty) == 0


def test_a_pin_survives_a_deletion(empty: Live) -> None:
    """Until it is unpinned; then its id is unknown and its pages can be evicted."""
    missing = empty.post("/v1/cache/pins", {"prompt": ROME})
    assert missing.status_code == 409
    empty.ask(ROME)
    pin = empty.post("/v1/cache/pins", {"prompt": ROME, "ttl_s": 100}).json()
    assert pin["tokens"] == len(ids(ROME)) // 4 * 4
    [listed] = empty.get("/v1/cache/pins").json()["pins"]
    assert (listed["id"], listed["ttl_s"], listed["owner"]) == (pin["id"], 100, "operator")

    assert delete(empty, "/v1/cache").json()["kept_pages"] == pin["pages"]
    assert cached(empty) == pin["pages"]

    assert delete(empty, f"/v1/cache/pins/{pin['id']}").json()["deleted"] is True
    assert delete(empty, f"/v1/cache/pins/{pin['id']}").status_code == 404
    delete(empty, "/v1/cache")
    assert cached(empty) == 0


def test_explain_tells_before_and_changes_nothing(empty: Live) -> None:
    """For a body of any API: cached tokens and miss reason, before it runs; nothing is cached."""
    text = "Nobody has told this to the server yet: the tower of Pisa leans. "
    bodies = [
        {"prompt": text + "Who?"},
        {"messages": [{"role": "user", "content": text}]},
        {"input": text},
        {"system": text, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 5},
    ]
    for body in bodies:
        explained = empty.post("/v1/cache/explain", body).json()
        assert (explained["cached_tokens"], explained["miss"]["reason"]) == (0, "cold")
    assert cached(empty) == 0

    empty.ask(text + "Who?")
    explained = empty.post("/v1/cache/explain", {"prompt": text + "When?"}).json()

    assert explained["cached_tokens"] >= len(ids(text)) // 4 * 4 - 4
    assert explained["miss"]["reason"] == "diverged"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/cache/tree?max_nodes=0", None),
        ("GET", "/v1/cache/tree?max_nodes=2001", None),
        ("GET", "/v1/cache/tree?max_nodes=many", None),
        ("DELETE", "/v1/cache?older_than=soon", None),
        ("DELETE", "/v1/cache?older_than=-1", None),
        ("DELETE", "/v1/cache?older_than=nan", None),
        ("DELETE", "/v1/cache?everything=1", None),
        ("POST", "/v1/cache/pins", {}),
        ("POST", "/v1/cache/pins", {"prompt": "a", "token_ids": [1]}),
        ("POST", "/v1/cache/pins", {"prompt": ""}),
        ("POST", "/v1/cache/pins", {"token_ids": [-1]}),
        ("POST", "/v1/cache/pins", {"token_ids": [10**30]}),
        ("POST", "/v1/cache/pins", {"token_ids": [10**9]}),
        ("POST", "/v1/cache/pins", {"prompt": "a", "ttl_s": 0}),
        ("POST", "/v1/cache/pins", {"messages": [{"role": "nobody"}]}),
        ("POST", "/v1/cache/pins", []),
        ("POST", "/v1/cache/explain", []),
        ("POST", "/v1/cache/explain", {}),
        ("POST", "/v1/cache/explain", {"messages": [], "system": 5}),
        ("DELETE", "/v1/cache/pins/one", None),
        ("DELETE", "/v1/cache/pins/99999999999999999999", None),
    ],
)
def test_bad_input_is_the_clients_fault(shared: Live, method: str, path: str, body: object) -> None:
    """4xx in the form of the API; nothing is deleted."""
    shared.ask(ROME)
    before = cached(shared)

    answer = httpx.request(method, shared.url + path, json=body, timeout=60)

    assert answer.status_code in (400, 404, 409), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    message = answer.json()["error"]["message"]
    assert message
    assert not set(message) & set("[{`"), "a list or a type of Python"
    assert cached(shared) == before


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", "tree?max_nodes=0", "max_nodes: 0 is not possible; it must be between 1 and 2000"),
        ("DELETE", "?everything=1", "everything: there is no such parameter; the parameters are "),
    ],
)
def test_a_wrong_parameter_is_named_with_what_is_possible(
    shared: Live, method: str, path: str, message: str
) -> None:
    """In words, without Python's lists."""
    answer = httpx.request(method, f"{shared.url}/v1/cache/{path}".replace("/?", "?"), timeout=60)

    assert answer.json()["error"]["message"].startswith(message)


def test_only_the_operator_may() -> None:
    """403 for a user's key, 401 without a key; explain works for every key, on its own prompts."""
    with live(ApiKeys.of("sk-user", "sk-other", admin="sk-admin")) as running:

        def call(method: str, path: str, key: str | None, body: object = None) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = httpx.request(
                method, running.url + path, json=body, headers=headers, timeout=60
            )
            return answer.status_code

        for method, path in OPERATOR:
            assert call(method, path, None) == 401, path
            assert call(method, path, "sk-wrong") == 401, path
            assert call(method, path, "sk-user", {"prompt": ROME}) == 403, path
        assert call("GET", "/v1/cache", "sk-admin") == 200
        assert call("GET", "/v1/cache/tree", "sk-admin") == 200
        assert call("GET", "/metrics", "sk-admin") == 200
        user_headers = {"Authorization": "Bearer sk-user"}
        running.ask(ROME, headers={}, prompt=ROME)
        answer = running.post(
            "/v1/completions", {"prompt": ROME, "max_tokens": 1}, headers=user_headers
        )
        assert answer.status_code == 200
        cached_tokens = {
            key: running.post(
                "/v1/cache/explain", {"prompt": ROME}, headers={"Authorization": f"Bearer {key}"}
            ).json()["cached_tokens"]
            for key in ("sk-user", "sk-other")
        }
        assert cached_tokens["sk-user"] > 0
        assert cached_tokens["sk-other"] == 0


def test_without_keys_from_elsewhere_nobody_is_the_operator() -> None:
    """Without keys, a server on a public host rejects admin requests."""
    with live(local_admin=False) as running:
        assert running.get("/v1/cache").status_code == 403
        assert running.ask().status_code == 200


def test_metrics_are_prometheus_and_have_the_names_of_dashboards(empty: Live) -> None:
    """They parse, histograms are cumulative, counters only grow, and both names have equal values."""
    first = sample(empty)
    num_prompt = 0
    for _ in range(3):
        num_prompt += empty.ask(ROME, max_tokens=5).json()["usage"]["prompt_tokens"]
    second = sample(empty)

    for (name, labels), value in first.items():
        if name.endswith(("_total", "_count", "_sum", "_bucket")):
            assert second[name, labels] >= value, name
    names = {name for name, _ in second}
    assert set(DASHBOARD) <= names
    growth = {key: value - first.get(key, 0.0) for key, value in second.items()}
    model = (("model_name", "fake"),)
    for name in (
        "prompt_tokens_total",
        "generation_tokens_total",
        "e2e_request_latency_seconds_count",
    ):
        assert growth[f"vllm:{name}", model] == growth[f"ramify_{name}", ()]
    assert growth["ramify_prompt_tokens_total", ()] == num_prompt
    assert growth["ramify_generation_tokens_total", ()] == 15
    # tokens may be merged into one event
    assert growth["ramify_inter_token_latency_seconds_count", ()] <= 12
    assert growth["ramify_requests_total", (("reason", "length"),)] == 3
    sources = {
        dict(labels)["source"]: value
        for (name, labels), value in growth.items()
        if name == "ramify_prompt_tokens_by_source_total"
    }
    assert sum(sources.values()) == num_prompt
    assert growth["ramify_cache_hit_tokens_total", ()] == sources["read"] > 0
    buckets: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
    for (name, labels), value in second.items():
        if name.endswith("_bucket"):
            other_labels = tuple(label for label in labels if label[0] != "le")
            buckets.setdefault((name.removesuffix("_bucket"), other_labels), []).append(value)
    for (name, labels), values in buckets.items():
        assert values == sorted(values)
        assert values[-1] == second[f"{name}_count", labels]


def sample(running: Live) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (metric.name, tuple(sorted(metric.labels.items()))): metric.value
        for family in text_string_to_metric_families(running.get("/metrics").text)
        for metric in family.samples
    }


def test_a_request_has_one_line(empty: Live, caplog: pytest.LogCaptureFixture) -> None:
    """With counts and miss reason, as text and as JSON, without its text; rejected requests too."""
    with caplog.at_level(logging.INFO, "ramify.requests"):
        empty.server.service.listeners.append(log_request)
        text = "Nobody has logged this line before: the harbour of Genoa is deep. "
        empty.ask(text)
        empty.ask(text)
        empty.server.service.listeners.remove(log_request)
        empty.ask(text, temperature="hot\nfake=line")

    cold, warm, rejected = caplog.records
    count = len(ids(text))
    assert f"prompt={count} hit=0 miss=cold" in cold.getMessage()
    assert f"prompt={count} hit={count - 1} miss=-" in warm.getMessage()
    assert "output=4 end=length ttft_ms=" in warm.getMessage()
    assert "status=400 param=temperature" in rejected.getMessage()
    assert "fake" not in rejected.getMessage()
    entry = json.loads(JsonFormatter().format(cold))
    assert (entry["prompt"], entry["miss"], entry["level"]) == (count, "cold", "info")
    assert "Genoa" not in caplog.text


def test_the_record_has_hashes_and_whole_lines(empty: Live, tmp_path: Path) -> None:
    """No text; token ids only with `with_tokens`; equal prefixes have equal hashes."""
    path = tmp_path / "record.jsonl"
    plain, full = LineFile(path), LineFile(tmp_path / "full.jsonl")
    recorders = [
        lambda generation: plain.write(trace_line(generation)),
        lambda generation: full.write(trace_line(generation, with_tokens=True)),
    ]
    empty.server.service.listeners.extend(recorders)
    empty.ask(ROME + "Who built it?")
    empty.ask(ROME + "Since when is it there?")
    for recorder in recorders:
        empty.server.service.listeners.remove(recorder)

    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert path.stat().st_mode & 0o077 == 0
    assert set(first) == {
        "timestamp", "id", "tenant", "input_length", "output_length", "page_size", "hash_ids", "segments",
        "hit", "end", "total_ms", "ttft_ms", "read", "shared", "written", "miss",
    }  # fmt: skip
    assert first["hit"] == first["read"] + first["shared"]
    assert 0 < first["ttft_ms"] <= first["total_ms"]
    assert first["end"] == "length"
    assert first["miss"]["reason"] in REASONS.values()
    common = len(ids(ROME)) // 4 - 1
    assert first["hash_ids"][:common] == second["hash_ids"][:common]
    assert first["hash_ids"][-1] != second["hash_ids"][-1]
    assert len(first["hash_ids"]) == first["input_length"] // 4
    [entry, _] = (json.loads(line) for line in (tmp_path / "full.jsonl").read_text().splitlines())
    assert TOKENIZER.decode(entry["token_ids"]) == ROME + "Who built it?"


def test_the_analyser_reads_the_record(empty: Live, tmp_path: Path) -> None:
    """A request a line, with times, hits and hashes; another salt shares no hash."""
    path = tmp_path / "record.jsonl"
    file = LineFile(path)
    recorder = lambda generation: file.write(trace_line(generation))  # noqa: E731
    empty.server.service.listeners.append(recorder)
    empty.ask(ROME)
    empty.ask(ROME)
    empty.ask(ROME, cache_salt="pepper")
    empty.server.service.listeners.remove(recorder)

    quality = ReadQuality()
    cold, warm, salted = read_log(path, quality=quality)

    assert quality.formats == {"ramify-record": 3}
    assert (cold.hashed, warm.usage.num_read) == (warm.hashed, (len(ids(ROME)) - 1) // 4 * 4)
    assert cold.hashed is not None and salted.hashed is not None
    assert not set(cold.hashed.block_ids) & set(salted.hashed.block_ids)
    times = (cold.start_s, cold.first_output_s, cold.end_s, warm.end_s)
    assert None not in times and list(times) == sorted(times)  # type: ignore[type-var]
    assert salted.verdict is not None and salted.usage.num_read == 0


def test_tokens_that_come_together_are_evenly_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token, then four in one event: four gaps, each a quarter of the time between the events."""
    clock = iter((1.0, 2.0))
    time = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("ramify.server.operations.metrics.time", time)
    metrics, generation = Metrics("other"), cast("Generation", SimpleNamespace(id=1))

    metrics.observe_tokens(generation, StepOutput(1, (7,)))
    metrics.observe_tokens(generation, StepOutput(1, (7, 8, 9, 10)))

    lines = metrics.exposition().decode().splitlines()
    assert "ramify_inter_token_latency_seconds_count 4.0" in lines
    assert "ramify_inter_token_latency_seconds_sum 1.0" in lines
    assert "ramify_generation_tokens_total 5.0" in lines


def test_the_load_is_told_while_there_is_some(empty: Live) -> None:
    """A line with rates since the last line; none while the server is idle."""
    lines: list[str] = []
    is_written = asyncio.Event()

    def write_line(line: str) -> None:
        lines.append(line)
        is_written.set()

    metrics = Metrics("other")
    monitor = LoadMonitor(
        empty.server.service, metrics, write_line=write_line, tick_s=0.001, line_s=0.05
    )

    async def main() -> None:
        task = asyncio.create_task(monitor.run())
        await asyncio.sleep(0.12)
        assert lines == []
        metrics.num_prompt, metrics.num_output, metrics.num_saved = 1000, 50, 750
        await asyncio.wait_for(is_written.wait(), 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())

    assert "running=0 waiting=0" in lines[0]
    assert "hit=75% saved=750 prefill tokens" in lines[0]
    text = metrics.exposition().decode()
    assert "ramify_event_loop_delay_seconds_count" in text


def test_the_line_has_rates(empty: Live) -> None:
    """Tokens per second of the interval."""
    engine = empty.look(EngineCore.stats)
    line = LoadSnapshot(300, 70, 30, engine).line(LoadSnapshot(100, 50, 10, engine), 2.0)
    assert line is not None
    assert line.startswith("in=100 tok/s out=10 tok/s ")
    assert "hit=10%" in line


def test_a_long_prompt_shows_in_the_line_before_its_request_ends(empty: Live) -> None:
    """The tokens of each step count, those of a prompt that is still computed too."""
    before = replace(empty.look(EngineCore.stats), num_computed_tokens=500)
    engine = replace(before, num_running=1, num_computed_tokens=2500)

    line = LoadSnapshot(0, 0, 0, engine).line(LoadSnapshot(0, 0, 0, before), 10.0)
    restarted = replace(before, num_running=1)
    line_after = LoadSnapshot(0, 0, 0, restarted).line(LoadSnapshot(0, 0, 0, engine), 10.0)

    assert line is not None
    assert line_after is not None
    assert "in=0 tok/s out=0 tok/s computed=200 tok/s running=1" in line
    assert "computed=0 tok/s" in line_after


def test_failures_repairs_and_drafts_are_metrics() -> None:
    """What only a log line told before: failed steps, failed requests, drafts, hit checks."""

    def value(running: Live, name: str) -> float:
        text = running.get("/metrics").text
        return next(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"ramify_{name}_total"
        )

    with live(fail_at=[0], error=RuntimeError("bad step")) as running:
        assert running.ask().status_code == 200
        running.until_idle()
        running.look(lambda core: setattr(core.watchdog, "num_stuck", 3))
        running.look(lambda core: setattr(core.hit_verifier, "num_mismatches", 2))

        assert value(running, "failed_steps") == 1
        assert value(running, "request_errors") == 0
        assert value(running, "repairs") == 0
        assert value(running, "stuck_steps") == 3
        assert value(running, "hit_mismatches") == 2
        assert value(running, "draft_tokens") == 0
