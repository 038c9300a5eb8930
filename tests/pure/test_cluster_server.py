"""The unchanged server over replicas: the same answers, errors and admin calls as over one engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ramify.cluster.client import ClusterLLM
from ramify.cluster.replica import Replica
from ramify.cluster.routes import Routes
from ramify.server.app import Server
from ramify.server.engine_client import EngineClient
from ramify.server.operations.load_monitor import LoadMonitor
from ramify.server.operations.metrics import Metrics
from ramify.server.service import RequestService
from ramify.server.tenants import ApiKeys
from ramify.testing import FAKE_EMBEDDING_SIZE
from tests.pure.cluster_bench import run, until
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, chat

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get", "parameters": SCHEMA}}
GREEDY: dict[str, Any] = {"temperature": 0}
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "chat": ("POST", "/v1/chat/completions", chat("Hello") | GREEDY),
    "seeded": ("POST", "/v1/chat/completions", chat("Hello", temperature=1, seed=5, n=2)),
    "stream": (
        "POST",
        "/v1/chat/completions",
        chat("Hello", stream=True, stream_options={"include_usage": True}) | GREEDY,
    ),
    "logprobs": (
        "POST",
        "/v1/chat/completions",
        chat("Hi", logprobs=True, top_logprobs=2) | GREEDY,
    ),
    "schema": (
        "POST",
        "/v1/chat/completions",
        chat(
            "Hello",
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        )
        | GREEDY,
    ),
    "tools": (
        "POST",
        "/v1/chat/completions",
        chat("Hello", max_tokens=60, tools=[TOOL], tool_choice="required") | GREEDY,
    ),
    "messages": ("POST", "/v1/messages", {"model": "tiny", **chat("Hello"), **GREEDY}),
    "responses": ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 4, **GREEDY}),
    "completions": (
        "POST",
        "/v1/completions",
        {"prompt": ["Hello", "you"], "max_tokens": 4, "logprobs": 1, "echo": True, **GREEDY},
    ),
    "embeddings": ("POST", "/v1/embeddings", {"input": ["Hello", "you"]}),
    "explain": ("POST", "/v1/cache/explain", chat("Hello")),
    "too long": ("POST", "/v1/chat/completions", chat("word " * 4000)),
    "bad regex": (
        "POST",
        "/v1/chat/completions",
        chat("Hello", structured_outputs={"regex": "("}),
    ),
    "bad parameter": ("POST", "/v1/chat/completions", chat("Hello", logit_bias={"99999": 1})),
    "huge top_k": ("POST", "/v1/chat/completions", chat("Hello", top_k=2**64)),
    "huge max_tokens": (
        "POST",
        "/v1/messages",
        {"model": "tiny", **chat("Hello"), "max_tokens": 2**64},
    ),
    "large numbers": (
        "POST",
        "/v1/messages",
        {"model": "tiny", **chat("Hello"), "max_tokens": 2**63 - 1, "top_k": 2**63 - 1, **GREEDY},
    ),
    "no pin": ("DELETE", "/v1/cache/pins/5", b""),
    "pins": ("GET", "/v1/cache/pins", b""),
    "ready": ("GET", "/readyz", b""),
}
CHANGING = ("id", "created", "created_at", "completed_at", "step_age_s", "busy", "engine")


def stable(value: Any) -> Any:
    """JSON without what differs from one answer to the next: ids and times."""
    if isinstance(value, dict):
        return {
            name: stable(entry)
            for name, entry in value.items()
            if name not in CHANGING and not name.endswith("_id")
        }
    return [stable(entry) for entry in value] if isinstance(value, list) else value


class ClusterServer(ServerBench):
    """A `ServerBench` whose server reaches its engine, and a second one, through a cluster.

    Args:
        routes: of the cluster; None: the usual ones.
        keys: of the server; None: everybody is the operator.
    """

    def __init__(
        self, *, routes: Routes | None = None, keys: ApiKeys | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.routes, self.keys = routes, keys
        self.other = ServerBench(chat_template=TOOL_TEMPLATE)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ClusterLLM]:
        self.replicas = replicas = [Replica(self.llm), Replica(self.other.llm)]
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None
        ports = [await replica.start() for replica in replicas]
        client = ClusterLLM(
            {str(p): f"127.0.0.1:{p}" for p in ports}, tokenizer, routes=self.routes
        )
        await client.start(10.0)
        await until(lambda: all(r.is_ready for r in client.dispatch.replicas.values()))
        engine: EngineClient = client
        self.service = RequestService(
            engine, tokenizer, model="tiny", embedding_size=FAKE_EMBEDDING_SIZE
        )
        self.server = Server(self.service, self.keys)
        self.app = self.server.app(self._lifespan)
        self.server.health.is_ready = True
        try:
            yield client
            await until(lambda: client.dispatch.num_live == 0)
            assert not self.service.quotas.num_live
        finally:
            await client.aclose()
            for replica in replicas:
                await replica.close()


async def answers(bench: ServerBench) -> dict[str, Answer]:
    return {
        name: await bench.call(method, path, body)
        for name, (method, path, body) in REQUESTS.items()
    }


def test_every_answer_is_that_of_one_engine() -> None:
    """Chat, messages, responses, tools, grammars, embeddings, errors and admin calls do not differ."""

    async def both() -> tuple[dict[str, Answer], dict[str, Answer]]:
        alone = ServerBench(chat_template=TOOL_TEMPLATE)
        async with alone.running():
            wanted = await answers(alone)
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving():
            return wanted, await answers(bench)

    wanted, got = run(both())

    assert_same(got, wanted)


def test_what_is_cached_is_no_difference() -> None:
    """Answers of engines that have cached nothing are the same: a replica's event may come too late.

    A request then goes to the other replica, and computes what one engine has read.
    """

    async def both() -> tuple[dict[str, Answer], dict[str, Answer]]:
        alone, cold = ServerBench(chat_template=TOOL_TEMPLATE), dict[str, Answer]()
        async with alone.running():
            wanted = await answers(alone)
        for name in ("chat", "messages", "responses", "explain"):
            bench = ServerBench(chat_template=TOOL_TEMPLATE)
            async with bench.running():
                cold[name] = await bench.call(*REQUESTS[name])
        return wanted, cold

    wanted, got = run(both())

    assert_same(got, wanted)


def assert_same(got: Mapping[str, Answer], wanted: Mapping[str, Answer]) -> None:
    """Status and JSON of answers, by the names of `REQUESTS`."""
    for name, ours in got.items():
        theirs = wanted[name]
        assert ours.status == theirs.status, (name, ours.body, theirs.body)
        if name == "stream":
            assert texts_of(ours) == texts_of(theirs)
            continue
        mine, other = (without_cache(stable(answer.json)) for answer in (ours, theirs))
        assert mine == other, name


def without_cache(value: Any) -> Any:
    """JSON without what depends on which replica had cached what."""
    text = json.dumps(value)
    fields = json.loads(text)
    if isinstance(fields, dict):
        for name in ("cached_tokens", "miss", "segments", "replicas"):
            fields.pop(name, None)
        usage = fields.get("usage")
        if isinstance(usage, dict):
            # Anthropic's `input_tokens` are those that were neither read nor written.
            for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):
                if name in usage:
                    usage["input_tokens"] += usage[name]
            for name in [name for name in usage if "cache" in name or "details" in name]:
                usage.pop(name)
    return fields


def texts_of(answer: Answer) -> list[str]:
    """The text of a stream, and its usage."""
    text = "".join(
        choice["delta"].get("content") or ""
        for event in answer.events
        for choice in event.get("choices", [])
    )
    usage = [event["usage"]["completion_tokens"] for event in answer.events if event.get("usage")]
    return [text, str(usage)]


def test_statistics_are_sums() -> None:
    """`/v1/cache` adds up the replicas; pins and clearing work through the server."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving():
            for _ in range(3):
                assert (await bench.post("/v1/chat/completions", chat("Hello " * 30))).status == 200
            stats: dict[str, Any] = {}
            # On a loaded machine a replica may miss the limit; it is in the sums once it has answered.
            while stats.get("num_pages") != 2 * 512:
                stats = (await bench.call("GET", "/v1/cache")).json
                assert stats["num_pages"] in {512, 2 * 512}
            assert stats["page_size"] == 16
            assert stats["cached_pages"] > 0
            body = {"prompt": "Hello " * 30}
            warmed = await bench.service.engine.generate("Hello " * 30)
            assert warmed.error is None
            pinned = await bench.post("/v1/cache/pins", body)
            assert pinned.status == 200
            listed = (await bench.call("GET", "/v1/cache/pins")).json["pins"]
            assert [pin["id"] for pin in listed] == [pinned.json["id"]]
            deleted = await bench.call("DELETE", f"/v1/cache/pins/{pinned.json['id']}")
            assert deleted.status == 200
            assert (await bench.call("DELETE", "/v1/cache")).json["pages"] > 0
            assert (await bench.call("GET", "/v1/cache")).json["cached_pages"] == 0

    run(main())


def test_weights_are_replaced_through_the_server() -> None:
    """One request for all replicas; an error names what is wrong, and changes nothing."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving():
            replaced: list[str] = []
            engine: Any = bench.service.engine
            reload_weights = engine.reload_weights

            async def remember(model: str) -> None:
                replaced.append(model)

            answer = await bench.post("/v1/weights", {"model": "second"})
            assert (answer.status, answer.json["error"]["param"]) == (400, "model")
            assert "from_core" in answer.json["error"]["message"]
            assert (await bench.post("/v1/weights", {"mode": "x"})).status == 400
            engine.reload_weights = remember
            answer = await bench.post("/v1/weights", {"model": "second"})
            assert (answer.status, answer.json["model"], replaced) == (200, "second", ["second"])
            engine.reload_weights = reload_weights
            assert (await bench.post("/v1/chat/completions", chat("Hello"))).status == 200

    run(main())


def test_limits_of_a_batch_are_those_of_all_replicas() -> None:
    """As many prompt tokens may wait as at both."""

    async def main() -> None:
        alone = ServerBench(chat_template=TOOL_TEMPLATE)
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving():
            limit = alone.llm.config.max_waiting_tokens
            assert limit is not None
            assert alone.service.max_queued_tokens == limit
            assert bench.service.max_queued_tokens == 2 * limit

    run(main())


def test_without_replicas_the_server_says_so() -> None:
    """503 at once with `Retry-After`, `/readyz` names the reason; `/livez`, metrics and load line go on."""

    async def main() -> None:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving():
            engine = bench.service.engine
            assert isinstance(engine, ClusterLLM)
            for replica in engine.dispatch.replicas.values():
                replica.address = "127.0.0.1:1"
                replica.disconnect("the test ends it")
            await until(lambda: not engine.dispatch.members.has_ready)
            lines: list[str] = []
            metrics = Metrics("tiny")
            monitor = asyncio.ensure_future(
                LoadMonitor(
                    bench.service, metrics, write_line=lines.append, tick_s=0.001, line_s=0.01
                ).run()
            )
            answer = await bench.post("/v1/chat/completions", chat("Hello"))
            assert answer.status == 503
            assert answer.json["error"]["code"] == "no_replica"
            assert int(answer.headers["retry-after"]) >= 1
            assert (await bench.call("GET", "/readyz")).status == 503
            assert (await bench.call("GET", "/livez")).status == 200
            assert (await bench.call("GET", "/metrics")).status == 200
            for replica in engine.dispatch.replicas.values():
                replica.move(f"127.0.0.1:{replica.name}")
            await until(lambda: engine.dispatch.members.has_ready)

            def has_line() -> bool:
                metrics.num_prompt += 1000
                return bool(lines)

            await until(has_line)
            monitor.cancel()
            await asyncio.gather(monitor, return_exceptions=True)

    run(main())
