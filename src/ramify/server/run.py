"""`ramify serve`: build engine, service and server from options, and serve until a signal."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from ramify.config import ResolvedConfig
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.cache_admin.warmup import WarmPrompt, read_prompts
from ramify.engine.execution.host_memory import resident_memory
from ramify.errors import ConfigError
from ramify.models.checkpoint.find import find_text_files
from ramify.models.configs.sampling_defaults import AUTO
from ramify.models.gguf.config import read_sampling_defaults
from ramify.models.gguf.container import model_name
from ramify.params import SamplingParams
from ramify.prompt_rules import rules_named
from ramify.server.app import Server
from ramify.server.batches.store import BatchStore
from ramify.server.engine_client import EngineClient
from ramify.server.http.browser_guard import LOOPBACK_HOSTS
from ramify.server.http.connection_limit import ConnectionLimit, raise_descriptor_limit
from ramify.server.http.listen_address import bind_address
from ramify.server.http.uvicorn_server import DrainingServer, TimeoutProtocol
from ramify.server.kv_events.feed import published
from ramify.server.kv_events.options import KvEventOptions
from ramify.server.operations.engine_end import ENGINE_FAILED, end_engine
from ramify.server.operations.kv_event_metrics import KvEventCollector
from ramify.server.operations.request_log import (
    JsonFormatter,
    LineFile,
    LogFileHandler,
    log_request,
    trace_line,
)
from ramify.server.operations.stderr_writer import stderr_in_background
from ramify.server.replicas import Replicas
from ramify.server.service import ANY_NAME, RequestService
from ramify.server.telemetry.options import OtlpOptions
from ramify.server.tenants import ApiKeys
from ramify.tier_options import parse_size

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 << 10
KEEP_ALIVE_S = 75
BACKLOG = 1024
WARM_UP_TOKENS = 8
# Interval after which the engine's thread must hand the interpreter lock to the event loop, which
# gives it up at every send. 500 streams on two busy cores: the event loop's delay was below 50 ms in
# 92 % of the samples, with Python's default of 5 ms in 86 %.
SWITCH_S = 0.0005
# Opens engines that are elsewhere, and closes them again.
OpenClient = Callable[[], AbstractAsyncContextManager[EngineClient]]
# For uvicorn to close connections after the drain.
CLOSE_S = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `ramify serve`."""

    model: str = "ramify-tiny"
    engine: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of `AsyncLLM`
    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()  # the first is the model's name; "*" serves any name
    tool_call_parser: str | None = None  # a name of an output format; None: the template's
    reasoning_parser: str | None = None
    generation_config: str = AUTO  # "auto", "none", or a directory that has the file
    drops_forbidden_tools: bool = False  # if `tool_choice` is none
    tools_first: bool = False  # before the system prompt, if the chat template can
    prompt_rules: tuple[str, ...] = ()  # of prompt hygiene
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    key_file: Path | None = None
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    warm: Path | None = None
    public: Path | None = None
    record: Path | None = None
    record_tokens: bool = False
    log_json: bool = False
    log_file: Path | None = None  # None: stderr
    drain_s: float = 30.0
    max_connections: int | None = None
    max_connections_per_address: int | None = None
    kv_events: KvEventOptions | None = None  # None: none are published
    otlp: OtlpOptions | None = None  # None: no traces or metrics are sent
    batch_dir: Path | None = None  # of files and batches; None: none are served
    batch_disk: str = "10GB"

    def connections(self) -> ConnectionLimit:
        """The limit of connections; raises this process's limit of descriptors if it can.

        Raises:
            ConfigError: more connections than descriptors allow, or more per address than in all.
        """
        return ConnectionLimit.of(
            self.max_connections,
            self.max_connections_per_address,
            num_descriptors=raise_descriptor_limit(),
        )

    def keys(self) -> ApiKeys | None:
        """The keys that may call; None: no key is needed.

        Raises:
            ConfigError: there are keys and a key file, or a public host without keys.
        """
        if self.key_file is not None:
            if self.api_keys or self.admin_key:
                flag = "--api-key" if self.api_keys else "--admin-key"
                raise ConfigError(
                    f"both --api-key-file and {flag} are given; put all keys in the file: `ramify keys` "
                    "adds one, with --admin that of an operator"
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


def hosts_to_answer(options: ServeOptions, *, has_keys: bool) -> tuple[str, ...] | None:
    """Host headers that a server answers; None: any.

    Without keys, on this machine only, the names of this machine. With keys, or where others can
    connect anyway, any, unless some are given.
    """
    if not options.allowed_hosts and (has_keys or not is_local(options.host)):
        return None
    return (*LOOPBACK_HOSTS, options.host, *options.allowed_hosts)


def is_local(host: str) -> bool:
    """True if only this machine can reach a listening address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(options: ServeOptions, open_client: OpenClient | None = None) -> int:
    """Serve until a signal; returns the exit code.

    Args:
        open_client: opens engines that are elsewhere; None: loads one here.

    Raises:
        ConfigError, ModelError: wrong options, or a model that cannot be loaded.
    """
    with stderr_in_background(), ExitStack() as sockets:
        inputs = ServeInputs.of(options)
        bound = bind_address(options.host, options.port)
        if options.log_file is None:
            log_to_stderr(options.log_json)
        else:
            log_to_file(options.log_file, options.log_json)
        sys.setswitchinterval(SWITCH_S)
        for sock in bound:
            sockets.enter_context(sock)
        try:
            if open_client is not None:
                return asyncio.run(_serve_client(options, open_client, inputs, bound))
            llm = AsyncLLM(options.model, progress=sys.stderr.isatty(), **options.engine)
            return asyncio.run(_serve_here(options, llm, inputs, bound))
        except KeyboardInterrupt:
            return 130


@dataclass(frozen=True, slots=True)
class ServeInputs:
    """What a server needs beside the model, made before the model loads: errors come at once."""

    keys: ApiKeys | None
    connections: ConnectionLimit
    record: LineFile | None
    batches: BatchStore | None
    public: list[WarmPrompt] | None
    warm: list[WarmPrompt] | None

    @classmethod
    def of(cls, options: ServeOptions) -> ServeInputs:
        """Read and open everything that the options name.

        Raises:
            ConfigError, CheckpointError: it cannot be read or opened.
        """
        keys, connections = options.keys(), options.connections()
        rules_named(options.prompt_rules)
        if options.kv_events is not None:
            options.kv_events.check_free()
        batches = BatchStore.open(
            options.batch_dir,
            parse_size("--batch-disk", options.batch_disk),
            has_several_tenants=keys is not None and keys.num_tenants > 1,
        )
        # A model of the hub has its directory only once it is loaded.
        read_sampling_defaults(options.generation_config, Path(options.model))
        return cls(
            keys,
            connections,
            public=None if options.public is None else read_prompts(options.public),
            warm=None if options.warm is None else read_prompts(options.warm),
            record=None if options.record is None else LineFile(options.record),
            batches=batches,
        )


async def _serve_here(
    options: ServeOptions, llm: AsyncLLM, inputs: ServeInputs, bound: list[socket.socket]
) -> int:
    try:
        await compile_kernels(llm)
        async with published(llm, options.kv_events) as feed:
            server = await make_server(options, llm, inputs, Path(llm.description.path))
            if feed is not None:
                server.metrics.registry.register(KvEventCollector(feed))
            return await _listen(make_listener(options, server, inputs), bound)
    finally:
        await end_engine(llm)


async def _serve_client(
    options: ServeOptions, open_client: OpenClient, inputs: ServeInputs, bound: list[socket.socket]
) -> int:
    async with open_client() as client:
        # The engine's own path may be one of another machine.
        path = await asyncio.to_thread(text_files_of, options)
        server = await make_server(options, client, inputs, path)
        return await _listen(make_listener(options, server, inputs), bound)


def text_files_of(options: ServeOptions) -> Path:
    """Where the tokenizer, the chat template and the configuration of the model are on this machine.

    Raises:
        CheckpointError: there is no such model.
    """
    return find_text_files(
        options.model,
        revision=options.engine.get("revision"),
        offline=bool(options.engine.get("offline")),
    )


async def make_server(
    options: ServeOptions, llm: EngineClient, inputs: ServeInputs, path: Path
) -> Server:
    """The server of an engine that is ready; `--public` and `--warm` are computed when this returns.

    Args:
        path: of the engine's checkpoint on this machine.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    keys, record = inputs.keys, inputs.record
    if llm.tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer, which a server needs")
    default_name = model_name(Path(options.model)) or options.model
    model = llm.description
    service = RequestService(
        llm,
        llm.tokenizer,
        model=next((name for name in options.served_names if name != ANY_NAME), default_name),
        aliases=options.served_names,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        pooling=model.pooling,
        sampling_defaults=read_sampling_defaults(options.generation_config, path),
        embedding_size=model.hidden_size,
        wrapper=model.wrapper,
        drops_forbidden_tools=options.drops_forbidden_tools,
        tools_first=options.tools_first,
        prompt_rules=options.prompt_rules,
    )
    if options.tools_first and not service.prompt_renderer.conventions.has_tools_first:
        logger.warning(
            "--tools-first: the chat template of %s cannot write tools before the system prompt",
            options.model,
        )
    service.listeners.append(log_request)
    if record is not None:
        service.listeners.append(
            lambda generation: record.write(
                trace_line(generation, with_tokens=options.record_tokens)
            )
        )
    server = Server(
        service,
        keys,
        local_admin=is_local(options.host),
        allowed_hosts=hosts_to_answer(options, has_keys=keys is not None),
        allowed_origins=options.allowed_origins,
        otlp=options.otlp,
        batch_store=inputs.batches,
    )
    if inputs.public is not None:
        public = await llm.cache.share(inputs.public)
        logger.info("public: %s", public)
    if inputs.warm is not None:
        warmed = await llm.cache.warm(inputs.warm)
        logger.info("warmed: %s", warmed)
    return server


def make_listener(
    options: ServeOptions, server: Server, inputs: ServeInputs, *, shares_port: bool = False
) -> DrainingServer:
    """What accepts connections for a server; see `DrainingServer`."""
    llm = server.service.engine
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
        timeout_graceful_shutdown=CLOSE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        http=TimeoutProtocol,
        ws="none",
    )
    return DrainingServer(
        config,
        server.health,
        on_listening=lambda url: startup_banner(url, server.service, llm, inputs.keys),
        abort=partial(end_engine, llm),
        drain_s=options.drain_s,
        connections=inputs.connections,
        shares_port=shares_port,
    )


async def _listen(listener: DrainingServer, bound: list[socket.socket]) -> int:
    """Serve until a signal; returns the exit code."""
    with frozen_heap():
        await listener.serve(bound)
    if listener.has_failed:
        return ENGINE_FAILED
    if listener.is_forced:
        return 130
    return 0 if listener.started else 1


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the garbage collector from what is in memory now: modules, the model, the tokenizer.

    Decoding a body with 95,000 lists starts a collection: it held the interpreter lock for 100 ms, and
    holds it for 1 ms with a frozen heap.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def compile_kernels(llm: EngineClient) -> None:
    """Run a prefill and a decode step, which compile kernels, before an engine is ready."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    # It shares nothing, so that its pages are free afterwards.
    output = await llm.stream([0] * WARM_UP_TOKENS, params, max_shared=0).whole()
    if output.error is not None:
        raise output.error


def startup_banner(
    url: str, service: RequestService, llm: EngineClient, keys: ApiKeys | None
) -> str:
    """Model, sizes, URL and a `curl` command, as shown when the server listens."""
    config = llm.config
    rows = {
        "model": f"{service.model} ({llm.description.dtype})",
        "attention": f"{llm.description.attention}, "
        + ("exact" if config.requested.attention.exact else "not exact"),
        "K/V cache": f"{config.num_pages:,} pages x {config.page_size} = "
        f"{config.kv_cache_tokens:,} tokens, at most {config.kv_cache_bytes / 2**20:,.0f} MiB",
        "memory": f"{resident_memory() / 2**20:,.0f} MiB resident; K/V adds to it as it is written",
        "requests": concurrency(config),
        "prefix cache": config.requested.cache.policy if service.prefix_cache else "off",
        "sampling": f"{service.sampling_defaults.summary()}, unless a request sets its own",
        **replica_rows(llm.replicas),
        "keys": "none" if keys is None else "needed",
        "URL": url,
    }
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    body = '{"messages":[{"role":"user","content":"Hello"}]}'
    curl = f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    return "\n".join([*lines, "", curl])


def replica_rows(replicas: Replicas | None) -> dict[str, str]:
    """The row of a cluster in the banner; none for one engine."""
    if replicas is None:
        return {}
    states = replicas.states()
    missing = [state for state in states if state.state != "ready"]
    names = ", ".join(
        state.name if state.name == str(state.number) else f"{state.number}: {state.name}"
        for state in states
    )
    text = f"{len(states) - len(missing)} of {len(states)} ready ({names}); sizes are those of each"
    for state in missing:
        text += f"; {state.name} is {state.state}"
    return {"replicas": text}


def concurrency(config: ResolvedConfig) -> str:
    """How many requests run at once, and how many of the longest, in words."""
    text = f"up to {config.max_num_seqs:,} at once"
    longest = f"{config.max_model_len:,} tokens"
    num_longest = config.num_pages // config.num_live_pages(config.max_model_len)
    if num_longest >= config.max_num_seqs:
        return f"{text}, each of up to {longest}"
    if num_longest:
        return f"{text}, or {num_longest:,} of the longest ({longest})"
    return f"{text}, each of up to {config.kv_cache_tokens:,} tokens (the model allows {longest})"


def log_to_stderr(as_json: bool, *, replica: str = "") -> None:
    """Write log lines to stderr, as text or JSON; for a program of its own.

    Args:
        replica: the name, for each line, of the replica that this process is; "": it is none.
    """
    _log_to(logging.StreamHandler(), as_json, replica)


def log_to_file(path: Path, as_json: bool, *, replica: str = "") -> None:
    """The same to a file, which may be renamed; SIGHUP is ignored from now on.

    Programs that rotate logs send it to those that would go on writing to the renamed file.

    Raises:
        ConfigError: the file cannot be opened.
    """
    _log_to(LogFileHandler(path), as_json, replica)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _log_to(handler: logging.Handler, as_json: bool, replica: str) -> None:
    name = f"replica {replica} " if replica else ""
    text = logging.Formatter(f"%(asctime)s %(levelname)s {name}%(name)s: %(message)s")
    handler.setFormatter(
        JsonFormatter({"replica": replica} if replica else {}) if as_json else text
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
