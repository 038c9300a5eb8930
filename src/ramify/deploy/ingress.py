"""`Ingress`: the server of `ramify serve` over engines that come and go."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ramify.cluster.client import ClusterLLM
from ramify.cluster.credentials import TlsFiles
from ramify.cluster.launch import load_tokenizer
from ramify.cluster.routes import CacheRoutes
from ramify.deploy.config import DeployConfig
from ramify.deploy.membership import PERIOD_S, Meet, Membership
from ramify.errors import RamifyError
from ramify.models.checkpoint.find import find_text_files
from ramify.server.app import Server
from ramify.server.http.listen_address import bind_address
from ramify.server.http.uvicorn_server import DrainingServer
from ramify.server.run import (
    SWITCH_S,
    ServeInputs,
    ServeOptions,
    frozen_heap,
    make_listener,
    make_server,
    text_files_of,
)
from ramify.server.telemetry.options import OtlpOptions

logger = logging.getLogger(__name__)

FIRST_ENGINE_S = 3600.0  # for an engine to come: it may load, and compile, for long
LISTEN_CHECK_S = 0.02
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - where HAProxy listens whatever it is given
OF_THE_CHECKPOINT = ("revision", "offline")


class IngressError(RamifyError):
    """The server of a deployment does not serve; the text says why."""


def serve_options(config: DeployConfig) -> ServeOptions:
    """The options of `ramify serve` for the servers of a deployment."""
    ingress = config.ingress
    return ServeOptions(
        model=config.model,
        engine={name: config.engine[name] for name in OF_THE_CHECKPOINT if name in config.engine},
        host=ALL_ADDRESSES if ingress.haproxy else ingress.host,
        port=ingress.port,
        served_names=tuple(ingress.served_model_name),
        tool_call_parser=ingress.tool_call_parser,
        reasoning_parser=ingress.reasoning_parser,
        generation_config=ingress.generation_config,
        drops_forbidden_tools=ingress.drop_forbidden_tools,
        tools_first=ingress.tools_first,
        prompt_rules=tuple(ingress.prompt_rules),
        key_file=None if ingress.api_key_file is None else Path(ingress.api_key_file),
        insecure=ingress.insecure,
        allowed_hosts=tuple(ingress.allowed_hosts),
        allowed_origins=tuple(ingress.allowed_origins),
        public=None if config.public is None else Path(config.public),
        log_json=config.log_json,
        drain_s=config.drain_s,
        max_connections=ingress.max_connections,
        max_connections_per_address=ingress.max_connections_per_address,
        otlp=OtlpOptions.of(ingress.otlp_endpoint),
    )


@asynccontextmanager
async def open_cluster(
    options: ServeOptions,
    meet: Meet,
    tls: TlsFiles | None = None,
    *,
    stride: int = 1,
    period_s: float = PERIOD_S,
) -> AsyncIterator[ClusterLLM]:
    """A client over the engines that `meet` names, once the first has joined.

    Args:
        stride: of `CacheRoutes`.

    Raises:
        ConfigError: see `TlsFiles.credentials`.
        CheckpointError: there is no such model.
        NoReplicaError: no engine has come.
    """
    tokenizer = await asyncio.to_thread(
        load_tokenizer, find_text_files, options.model, options.engine
    )
    credentials = None if tls is None else tls.credentials()
    routes = CacheRoutes(stride=stride)
    client = ClusterLLM({}, tokenizer, routes=routes, fixed_weights=True)
    membership = Membership(client, routes, meet, credentials=credentials, period_s=period_s)
    keeper = asyncio.create_task(membership.keep())
    try:
        await client.start(FIRST_ENGINE_S)
        yield client
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await client.aclose()


class Ingress:
    """A server: `open` it, then let it `listen`, or give its `app` to another program's listener.

    Args:
        tls: certificates that engines want to be shown.
        stride: of `CacheRoutes`.
    """

    def __init__(
        self, options: ServeOptions, tls: TlsFiles | None = None, *, stride: int = 1
    ) -> None:
        self._options, self._tls, self._stride = options, tls, stride
        self._resources = AsyncExitStack()
        self._server: Server | None = None
        self._inputs: ServeInputs | None = None
        self._listener: DrainingServer | None = None
        self._serving: asyncio.Task[Any] | None = None

    async def open(self, meet: Meet) -> None:
        """Wait for an engine.

        Raises:
            ConfigError, CheckpointError: wrong options, or no model.
            NoReplicaError: no engine has come.
        """
        options = self._options
        self._inputs = ServeInputs.of(options)
        path = await asyncio.to_thread(text_files_of, options)
        client = await self._resources.enter_async_context(
            open_cluster(options, meet, self._tls, stride=self._stride)
        )
        self._server = await make_server(options, client, self._inputs, path)
        sys.setswitchinterval(SWITCH_S)
        self._resources.enter_context(frozen_heap())

    def app(self) -> Any:
        """The ASGI application."""
        assert self._server is not None, "not open"
        return self._server.app()

    async def listen(self) -> None:
        """Listen at the options' address, which servers of this user share.

        The system gives each connection to one of them, and one takes another's place without a gap.

        Raises:
            ConfigError: the address cannot be bound.
        """
        assert self._server is not None and self._inputs is not None, "not open"
        options = self._options
        bound = bind_address(options.host, options.port, is_shared=True)
        self._listener = make_listener(options, self._server, self._inputs, shares_port=True)
        self._serving = asyncio.create_task(self._listener.serve(bound))
        while not self._listener.started:
            self.check()
            await asyncio.sleep(LISTEN_CHECK_S)

    def check(self) -> None:
        """Raise IngressError if it has ended."""
        if self._serving is not None and self._serving.done():
            error = None if self._serving.cancelled() else self._serving.exception()
            raise IngressError(f"the server has ended: {error or 'it was stopped'}")

    async def close(self) -> None:
        """Take no new requests, let the live ones end, then end."""
        if self._server is not None:
            self._server.health.is_draining = True
        if self._listener is not None and self._serving is not None:
            self._listener.handle_exit(signal.SIGTERM, None)
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._resources.aclose()


def ingress_of(config: DeployConfig) -> Ingress:
    """A server of a deployment."""
    return Ingress(serve_options(config), config.tls, stride=config.ingress.routing_stride)
