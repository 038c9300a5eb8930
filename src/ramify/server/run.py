"""`ramify serve`: everything put together, from options to a listening socket."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ramify.engine.async_llm import AsyncLLM
from ramify.errors import ConfigError
from ramify.server.app import Server
from ramify.server.logs import JsonFormatter, Recorder, log_request
from ramify.server.protocol import PatientProtocol
from ramify.server.service import Service
from ramify.server.tenants import Keys

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 << 10
KEEP_ALIVE_S = 75
BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `ramify serve` was asked for."""

    model: str = "ramify-tiny"
    engine: Mapping[str, Any] = field(default_factory=dict)  # options of `AsyncLLM`
    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()  # the first is the model's own
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    key_file: Path | None = None
    insecure: bool = False
    warm: Path | None = None
    record: Path | None = None
    record_tokens: bool = False
    log_json: bool = False
    drain_s: float = 30.0

    def keys(self) -> Keys | None:
        """Who may call; None is everybody.

        Raises:
            ConfigError: keys are given twice, or everybody from elsewhere could call.
        """
        if self.key_file is not None:
            if self.api_keys or self.admin_key:
                raise ConfigError(
                    "both --api-key-file and --api-key are given; put all in the file"
                )
            return Keys.load(self.key_file)
        if self.api_keys or self.admin_key:
            return Keys.of(*self.api_keys, admin=self.admin_key)
        if not is_local(self.host) and not self.insecure:
            raise ConfigError(
                f"--host {self.host} lets everybody call this server; give --api-key or "
                "--api-key-file, or say --insecure if that is meant"
            )
        return None


def is_local(host: str) -> bool:
    """Whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(options: ServeOptions) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        ConfigError, ModelError: nothing was started.
    """
    keys = options.keys()
    _log_to_stderr(options.log_json)
    llm = AsyncLLM(options.model, progress=sys.stderr.isatty(), **options.engine)
    try:
        return asyncio.run(_serve(options, llm, keys))
    except KeyboardInterrupt:
        return 130


async def _serve(options: ServeOptions, llm: AsyncLLM, keys: Keys | None) -> int:
    if llm.tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer.json, which a server needs")
    names = options.served_names or (Path(options.model).name or options.model,)
    service = Service(
        llm,
        llm.tokenizer,
        model=names[0],
        aliases=names[1:],
        max_model_len=llm.config.max_model_len,
        page_size=llm.config.page_size,
        prefix_cache=llm.config.asked.cache.prefix_cache,
    )
    service.listeners.append(log_request)
    if options.record is not None:
        service.listeners.append(
            Recorder(
                _appender(options.record),
                page_size=service.page_size,
                with_tokens=options.record_tokens,
            )
        )
    server = Server(service, keys, local_admin=is_local(options.host))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if options.warm is not None:
            told = await llm.cache.warm(options.warm)
            logger.info("warmed: %s", told)
        server.ready = True
        yield
        server.ready = False

    config = uvicorn.Config(
        server.app(lifespan),
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.drain_s)),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        http=PatientProtocol,
        ws="none",
    )
    uvicorn_server = _Server(config, server, lambda url: start_table(url, service, llm, keys))
    try:
        await uvicorn_server.serve()
    finally:
        await llm.drain(options.drain_s)
    return 0 if uvicorn_server.started else 1


class _Server(uvicorn.Server):
    """Says where it listens, and that it is not ready any more as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, server: Server, table: Callable[[str], str]) -> None:
        super().__init__(config)
        self._served, self._table = server, table

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for one in (each for server in self.servers for each in server.sockets):
            host, port = one.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            sys.stderr.write(f"{self._table(url)}\n\nlistening on {url}\n")
            sys.stderr.flush()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._served.ready = False
        self._served.draining = True
        if sig == signal.SIGINT and self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)


def start_table(url: str, service: Service, llm: AsyncLLM, keys: Keys | None) -> str:
    """What is served, how large, and how to call it."""
    config = llm.config
    longest = config.max_model_len
    rows = {
        "model": f"{service.model} ({str(llm.engine.decoder.dtype).removeprefix('torch.')})",
        "attention": f"{llm.engine.attention.name}, "
        + ("exact" if config.asked.attention.exact else "not exact"),
        "K/V cache": f"{config.num_pages:,} pages x {config.page_size} = "
        f"{config.kv_cache_tokens:,} tokens, {config.kv_cache_bytes / 2**20:,.0f} MiB",
        "at once": f"{config.max_num_seqs} requests; {config.kv_cache_tokens / longest:.1f} of "
        f"{longest:,} tokens",
        "prefix cache": config.asked.cache.policy if service.prefix_cache else "off",
        "keys": "none" if keys is None else "needed",
        "URL": url,
    }
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    body = '{"messages":[{"role":"user","content":"Hello"}]}'
    curl = f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    return "\n".join([*lines, "", curl])


def _appender(path: Path) -> Any:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise ConfigError(f"--record {path} cannot be written: {error}") from error
    return lambda line: os.write(handle, line.encode())


def _log_to_stderr(as_json: bool) -> None:
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
