"""`ramify replica`, and what each child of `ramify serve --replicas N` runs: one engine behind a port."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ramify.cluster.credentials import Credentials, import_grpc
from ramify.cluster.replica import Replica
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.cache_admin.warmup import WarmPrompt, read_prompts
from ramify.server.kv_events.feed import published
from ramify.server.kv_events.options import KvEventOptions
from ramify.server.operations.engine_end import CHECK_S, ENGINE_FAILED, exit_if_stuck
from ramify.server.operations.stderr_writer import stderr_in_background
from ramify.server.run import compile_kernels, frozen_heap, log_to_file, log_to_stderr

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The options of `ramify replica`."""

    model: str = "ramify-tiny"
    engine: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of `AsyncLLM`
    host: str = "127.0.0.1"
    port: int = 0
    credentials: Credentials = field(default_factory=Credentials)
    warm: Path | None = None
    public: Path | None = None
    name: str = ""  # in log lines
    log_json: bool = False
    log_file: Path | None = None  # None: stderr
    drain_s: float = 30.0
    memory_parts: int = 1  # engines that share the memory of this machine
    kv_events: KvEventOptions | None = None  # None: none are published


class Stages(Protocol):
    """Who wants to know how far a replica's start is."""

    async def loaded(self) -> None:
        """The model is loaded; kernels are compiled, or read from disk, when this returns."""
        ...

    def ready(self, port: int, kv_cache_tokens: int) -> None:
        """Servers can connect; the engine has room for the K/V of these tokens."""
        ...


class StdoutStages:
    """Writes a line of JSON with the port to stdout."""

    async def loaded(self) -> None:
        """See `Stages`."""

    def ready(self, port: int, kv_cache_tokens: int) -> None:
        """See `Stages`."""
        del kv_cache_tokens
        sys.stdout.write(json.dumps({"port": port}) + "\n")
        sys.stdout.flush()


def run_replica(options: ReplicaOptions, stages: Stages) -> int:
    """Be a replica until a signal; returns the exit code.

    At the first SIGINT or SIGTERM servers send no new requests, and the live ones have `drain_s`
    seconds to end. A second signal ends them at once.

    Raises:
        ConfigError, ModelError: wrong options, or a model that cannot be loaded.
        MissingPackageError: gRPC is not installed.
    """
    if options.credentials.has_tls:
        # gRPC alone knows of a failed handshake, and writes it to stderr from this level on.
        os.environ.setdefault("GRPC_VERBOSITY", "INFO")
    import_grpc()
    options.credentials.check_address(options.host)
    if options.kv_events is not None:
        options.kv_events.check_free()
    public = None if options.public is None else read_prompts(options.public)
    warm = None if options.warm is None else read_prompts(options.warm)
    with stderr_in_background():
        if options.log_file is None:
            log_to_stderr(options.log_json, replica=options.name)
        else:
            log_to_file(options.log_file, options.log_json, replica=options.name)
        try:
            llm = AsyncLLM(
                options.model,
                progress=sys.stderr.isatty(),
                memory_parts=options.memory_parts,
                **options.engine,
            )
            return asyncio.run(_serve(options, stages, llm, public, warm))
        except KeyboardInterrupt:
            return INTERRUPTED


async def _serve(
    options: ReplicaOptions,
    stages: Stages,
    llm: AsyncLLM,
    public: list[WarmPrompt] | None,
    warm: list[WarmPrompt] | None,
) -> int:
    async def warm_up() -> None:
        if public is not None:
            logger.info("public: %s", await llm.cache.share(public))
        if warm is not None:
            logger.info("warmed: %s", await llm.cache.warm(warm))

    replica = Replica(llm, options.credentials, warm_up=warm_up)
    signals, resources = Signals(), AsyncExitStack()
    failure: asyncio.Future[str] | None = None
    try:
        await stages.loaded()
        await compile_kernels(llm)
        await resources.enter_async_context(published(llm, options.kv_events))
        # Servers that know the address connect at once.
        port = await replica.start(options.host, options.port)
        signals.install()
        stages.ready(port, llm.config.kv_cache_tokens)
        failure = asyncio.ensure_future(until_failure(llm))
        first = asyncio.ensure_future(signals.first.wait())
        with frozen_heap():
            await asyncio.wait((failure, first), return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if failure.done():
            logger.error("%s; this replica ends", failure.result())
            return ENGINE_FAILED
        return await _drain(options, replica, signals)
    finally:
        signals.restore()
        await resources.aclose()
        await replica.close()
        # Not before: the end of an engine waits for its step, which may get stuck meanwhile.
        if failure is not None:
            failure.cancel()


async def _drain(options: ReplicaOptions, replica: Replica, signals: Signals) -> int:
    logger.info("draining: live requests have %.0f s to end", options.drain_s)
    drained = asyncio.ensure_future(replica.drain(options.drain_s))
    second = asyncio.ensure_future(signals.second.wait())
    await asyncio.wait((drained, second), return_when=asyncio.FIRST_COMPLETED)
    if not drained.done():
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)
        return INTERRUPTED
    second.cancel()
    if not drained.result():
        logger.warning("requests were cut short")
    return 0


class Signals:
    """SIGINT and SIGTERM as events: the first one, and any after it. Made in the main thread."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take the signals, until `restore`."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def until_failure(llm: AsyncLLM, check_s: float = CHECK_S) -> str:
    """Wait until the engine has ended; returns a text for the log.

    A step that is stuck cannot be ended: the process exits at once, for another one to take its place.
    """
    while True:
        health = llm.health()
        exit_if_stuck(health)
        if not health.is_alive:
            return "the engine has stopped"
        await asyncio.sleep(check_s)
