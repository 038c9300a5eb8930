"""The server knows an engine by the protocol `EngineClient`, and by nothing else."""

from typing import Any

from ramify.engine.async_llm import AsyncLLM
from ramify.server.engine_client import EngineClient
from tests.pure.async_bench import AsyncBench
from tests.pure.server_bench import ServerBench, chat, run

MEMBERS = frozenset(name for name in vars(EngineClient) if not name.startswith("_"))
REQUESTS: tuple[tuple[str, str, object], ...] = (
    ("POST", "/v1/chat/completions", chat("Hello")),
    ("POST", "/v1/chat/completions", chat("Hello", stream=True, n=2)),
    ("POST", "/v1/messages", {"model": "tiny", **chat("Hello")}),
    ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
    ("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
    ("POST", "/v1/embeddings", {"input": "Hello"}),
    ("POST", "/v1/cache/explain", chat("Hello")),
    ("POST", "/v1/cache/pins", {"prompt": "A prefix that fills a page of sixteen tokens"}),
    ("GET", "/v1/cache/pins", b""),
    ("DELETE", "/v1/cache/pins/0", b""),
    ("GET", "/v1/cache", b""),
    ("GET", "/v1/cache/tree", b""),
    ("DELETE", "/v1/cache?tenant=&pins=true", b""),
    ("POST", "/reset_prefix_cache", b""),
    ("GET", "/v1/loads", b""),
    ("GET", "/metrics", b""),
    ("GET", "/readyz", b""),
    ("GET", "/v1/models", b""),
)


class Recorded:
    """An engine with the members of the protocol only; records which of them are read."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        assert name in MEMBERS, f"{name} is not in EngineClient"
        self.names.add(name)
        return getattr(self._engine, name)


def test_async_llm_is_an_engine_client() -> None:
    """`AsyncLLM` has every member of the protocol; mypy compares their types."""
    client: EngineClient = AsyncLLM.from_core(AsyncBench().bench.core)

    assert [name for name in sorted(MEMBERS) if not hasattr(client, name)] == []


def test_every_endpoint_gets_by_with_the_protocol() -> None:
    """No endpoint needs more of the engine than `EngineClient`; the calls reach the engine."""
    bench = ServerBench()
    engine = Recorded(bench.llm)
    bench.service.engine = engine

    async def statuses() -> list[tuple[str, int]]:
        async with bench.running():
            return [
                (target, (await bench.call(method, target, body)).status)
                for method, target, body in REQUESTS
            ]

    refused = [entry for entry in run(statuses()) if entry[1] != 200]

    # Nothing of the pinned prefix is cached, so there is no pin to delete either.
    assert refused == [("/v1/cache/pins", 409), ("/v1/cache/pins/0", 404)]
    assert {"stream", "stats", "cache"} <= engine.names
