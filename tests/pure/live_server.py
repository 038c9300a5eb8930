"""A server on a real socket in a thread of this process, over a fake device."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import uvicorn

import ramify
from ramify.config import EngineConfig, resolve
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.server.app import Server
from ramify.server.batches.directory import BatchDirectory
from ramify.server.batches.store import BatchStore
from ramify.server.http.connection_limit import ConnectionLimit
from ramify.server.http.uvicorn_server import DrainingServer, TimeoutProtocol
from ramify.server.service import RequestService
from ramify.server.telemetry.options import OtlpOptions
from ramify.server.tenants import ApiKeys
from ramify.testing import FakeExecutor
from tests.pure.async_bench import Gate

TOKENIZER = Tokenizer.load(Path(ramify.__file__).parent / "data" / "ramify-tiny")
PAGE_SIZE = 4
LIMIT_S = 60.0


@dataclass
class Live:
    """A running server and its parts; `gate` can hold up the engine before a step."""

    url: str
    server: Server
    llm: AsyncLLM
    gate: Gate
    listener: DrainingServer
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LIMIT_S, **options)

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=LIMIT_S, **options)

    def ask(self, text: str = "Who lives in Rome?", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": text, "max_tokens": 4} | fields)

    def look(self, call: Callable[[EngineCore], Any]) -> Any:
        return self.llm._engine_thread.call(call).result(LIMIT_S)

    def is_idle(self) -> bool:
        """True if no request, lease, private page or quota usage is left."""

        def look(core: EngineCore) -> bool:
            core.cache.check()
            stats = core.cache.stats()
            return not core.live and not stats.num_leases and not stats.private_pages

        return self.look(look) and not self.server.service.quotas.num_live

    def until_idle(self) -> None:
        until(self.is_idle)

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").text.splitlines()
        return {
            name: float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")
        }


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def fake_engine(
    *,
    next_token: Callable[[Sequence[int]], int] | None = None,
    fail_at: Any = (),
    error: BaseException | None = None,
    max_num_seqs: int = 64,
    max_waiting: int = 1024,
    pool_tokens: int = 8192,
    step_timeout_s: float = 300.0,
) -> tuple[AsyncLLM, Gate]:
    requested = EngineConfig.of(
        kv_cache_tokens=pool_tokens,
        page_size=PAGE_SIZE,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
        step_timeout_s=step_timeout_s,
    )
    config = resolve(requested, model_max_len=2048, token_bytes=1, free_memory=0)
    device = FakeExecutor(
        config.num_pages,
        PAGE_SIZE,
        vocab_size=TOKENIZER.vocab_size,
        next_token=next_token,
        fail_at=fail_at,
        error=error,
    )
    gate = Gate(device)
    core = EngineCore(
        config,
        gate,
        vocab_size=TOKENIZER.vocab_size,
        detokenizer_factory=partial(Detokenizer, TOKENIZER),
    )
    return AsyncLLM.from_core(core, TOKENIZER), gate


@contextmanager
def live(
    keys: ApiKeys | None = None,
    *,
    drain_s: float = 30.0,
    local_admin: bool = True,
    model: str = "fake",
    protocol: type[TimeoutProtocol] = TimeoutProtocol,
    connections: ConnectionLimit | None = None,
    otlp: OtlpOptions | None = None,
    batch_dir: Path | None = None,
    batch_bytes: int = 1 << 30,
    **options: Any,
) -> Iterator[Live]:
    """Start a server; it listens until the end of the block."""
    llm, gate = fake_engine(**options)
    service = RequestService(llm, TOKENIZER, model=model)
    store = None
    if batch_dir is not None:
        directory = BatchDirectory(batch_dir)
        store = BatchStore(directory, max_bytes=batch_bytes, max_tenant_bytes=batch_bytes)
    server = Server(service, keys, local_admin=local_admin, otlp=otlp, batch_store=store)
    started: list[tuple[str, asyncio.AbstractEventLoop]] = []

    def on_listening(url: str) -> str:
        started.append((url, asyncio.get_running_loop()))
        return ""

    config = uvicorn.Config(
        server.app(),
        port=0,
        http=protocol,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    listener = DrainingServer(
        config,
        server.health,
        on_listening=on_listening,
        abort=llm.aclose,
        drain_s=drain_s,
        connections=connections or ConnectionLimit(1000, 1000),
    )
    thread = threading.Thread(target=listener.run, name="server")
    thread.start()
    try:
        until(lambda: bool(started) or not thread.is_alive())
        url, loop = started[0]
        yield Live(url, server, llm, gate, listener, thread, loop)
    finally:
        gate.open()
        listener.should_exit = listener.force_exit = True
        thread.join(LIMIT_S)
        llm._engine_thread.stop()
        llm._engine_thread.join(LIMIT_S)
        if store is not None:
            store.directory.close()
    assert not thread.is_alive()


def ids(text: str) -> array[int]:
    return TOKENIZER.encode(text)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
