"""`ramify serve`: everything put together, from options to a listening socket."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from ramify.engine.async_llm import AsyncLLM
from ramify.errors import ConfigError
from ramify.params import SamplingParams
from ramify.server.app import Server
from ramify.server.http.uvicorn_server import DrainingServer, TimeoutProtocol
from ramify.server.operations.request_log import JsonFormatter, LineFile, TraceWriter, log_request
from ramify.server.service import Service
from ramify.server.tenants import ApiKeys

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 << 10
KEEP_ALIVE_S = 75
BACKLOG = 1024
WARM_UP_TOKENS = 8
# A thread that sends on a socket lets go of the interpreter, and gets it back when the other one, the
# engine, has had it for this long. Measured with 500 streams on two busy cores: with Python's 5 ms the
# event loop was within 50 ms in 86 % of the cases, with this in 92 %.
SWITCH_S = 0.0005
LAST_S = 2  # for connections, when everything that was live has been answered


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
    public: Path | None = None
    record: Path | None = None
    record_tokens: bool = False
    log_json: bool = False
    drain_s: float = 30.0

    def keys(self) -> ApiKeys | None:
        """Who may call; None is everybody.

        Raises:
            ConfigError: keys are given twice, or everybody from elsewhere could call.
        """
        if self.key_file is not None:
            if self.api_keys or self.admin_key:
                raise ConfigError(
                    "both --api-key-file and --api-key are given; put all in the file"
                )
            return ApiKeys.load(self.key_file)
        if self.api_keys or self.admin_key:
            return ApiKeys.of(*self.api_keys, admin=self.admin_key)
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
    sys.setswitchinterval(SWITCH_S)
    llm = AsyncLLM(options.model, progress=sys.stderr.isatty(), **options.engine)
    try:
        return asyncio.run(_serve(options, llm, keys))
    except KeyboardInterrupt:
        return 130


async def _serve(options: ServeOptions, llm: AsyncLLM, keys: ApiKeys | None) -> int:
    if llm.tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer.json, which a server needs")
    names = options.served_names or (Path(options.model).name or options.model,)
    service = Service(
        llm,
        llm.tokenizer,
        model=names[0],
        aliases=names[1:],
    )
    service.listeners.append(log_request)
    if options.record is not None:
        record = LineFile(options.record).write
        service.listeners.append(
            TraceWriter(record, page_size=service.page_size, with_tokens=options.record_tokens)
        )
    server = Server(service, keys, local_admin=is_local(options.host))

    config = uvicorn.Config(
        server.app(),
        host=options.host,
        port=options.port,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        http=TimeoutProtocol,
        ws="none",
    )
    listener = DrainingServer(
        config,
        server.health,
        on_listening=lambda url: startup_banner(url, service, llm, keys),
        abort=llm.aclose,
        drain_s=options.drain_s,
    )
    try:
        await _compile_kernels(llm)
        if options.public is not None:
            shared = await llm.cache.share(options.public)
            logger.info("public: %s", shared)
        if options.warm is not None:
            told = await llm.cache.warm(options.warm)
            logger.info("warmed: %s", told)
        await listener.serve()
    finally:
        await llm.aclose()
    if listener.is_forced:
        return 130
    return 0 if listener.started else 1


async def _compile_kernels(llm: AsyncLLM) -> None:
    """The first steps compile kernels; nobody is to wait for that who was told that we are ready."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    output = await llm.generate([0] * WARM_UP_TOKENS, params)
    if output.error is not None:
        raise output.error
    await llm.cache.clear()


def startup_banner(url: str, service: Service, llm: AsyncLLM, keys: ApiKeys | None) -> str:
    """What is served, how large, and how to call it."""
    config = llm.config
    longest = config.max_model_len
    rows = {
        "model": f"{service.model} ({str(llm.engine.decoder.dtype).removeprefix('torch.')})",
        "attention": f"{llm.engine.backend_choice.name}, "
        + ("exact" if config.requested.attention.exact else "not exact"),
        "K/V cache": f"{config.num_pages:,} pages x {config.page_size} = "
        f"{config.kv_cache_tokens:,} tokens, {config.kv_cache_bytes / 2**20:,.0f} MiB",
        "at once": f"{config.max_num_seqs} requests; {config.kv_cache_tokens / longest:.1f} of "
        f"{longest:,} tokens",
        "prefix cache": config.requested.cache.policy if service.prefix_cache else "off",
        "keys": "none" if keys is None else "needed",
        "URL": url,
    }
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    body = '{"messages":[{"role":"user","content":"Hello"}]}'
    curl = f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    return "\n".join([*lines, "", curl])


def _log_to_stderr(as_json: bool) -> None:
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
