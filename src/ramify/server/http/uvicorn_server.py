"""uvicorn with limits for clients (`TimeoutProtocol`) and a draining shutdown (`DrainingServer`)."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.h11_impl import H11Protocol

from ramify.counts import counted
from ramify.errors import ConfigError
from ramify.reasons import reason_of
from ramify.server.health import Readiness
from ramify.server.http.acceptor import Acceptor
from ramify.server.http.connection_limit import ConnectionLimit
from ramify.server.http.strict_connection import StrictConnection

logger = logging.getLogger(__name__)

# Seconds from the connection, or from the first byte of a further request, to the end of its headers.
HEADER_S = 10.0
# Seconds without a byte read by the client while the write buffer is full.
STALL_S = 60.0
# Seconds in which a server without engine answers 503, so that load balancers turn away, before it ends.
LOST_ENGINE_S = 10.0
CHECK_TICKS = 10  # of `on_tick`: a second


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol; drops clients that do not send headers, or do not read, in time.

    uvicorn itself waits for them for ever.

    Args:
        connections: gets to know when the connection is idle and when it ends.
    """

    header_s, stall_s = HEADER_S, STALL_S

    def __init__(
        self, *args: Any, connections: ConnectionLimit | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.conn = StrictConnection(h11.SERVER, self.config.h11_max_incomplete_event_size or 16384)
        self._connections = connections
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.header_s, self._drop_client)
        self._report_state()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        has_all_headers = self.conn.their_state is not h11.IDLE
        if has_all_headers:
            self._stop_header_timer()
        elif self._header_timer is None and self.conn.trailing_data[0]:
            self._header_timer = self.loop.call_later(self.header_s, self._drop_client)
        self._report_state()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(self.header_s, self._drop_unread, self.cycle)
        self._limit_flush()
        self._report_state()

    def timeout_keep_alive_handler(self) -> None:
        """See `H11Protocol`."""
        super().timeout_keep_alive_handler()
        self._limit_flush()

    def send_400_response(self, msg: str) -> None:
        """Answer 400 and close; only close if the request that is malformed has an answer already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._start_stall_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._stop_stall_timer()
        super().resume_writing()
        self._limit_flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_header_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)
        if self._connections is not None:
            self._connections.remove(self)

    def close_idle(self) -> None:
        """Close the connection once its output is flushed."""
        self.transport.close()
        self._limit_flush()

    def _drop_unread(self, cycle: object) -> None:
        """Drop a client that still sends the body of a request that was answered long ago."""
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self._drop_client()

    def _report_state(self) -> None:
        if self._connections is None or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._connections.set_idle(self, is_silent=self.cycle is None)
        else:
            self._connections.set_busy(self)

    def _limit_flush(self) -> None:
        """Drop a client that does not take the last output of a connection that is closing."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if self.transport.is_closing() and unsent_bytes:
            self._start_stall_timer(unsent_bytes)

    def _start_stall_timer(self, unsent_bytes: int) -> None:
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(self.stall_s, self._check_stalled, unsent_bytes)

    def _check_stalled(self, unsent_bytes: int) -> None:
        """Drop the client unless it has read since the timer was started with `unsent_bytes`."""
        now_unsent_bytes = self.transport.get_write_buffer_size()
        if now_unsent_bytes < unsent_bytes:
            self._start_stall_timer(now_unsent_bytes)
        else:
            logger.warning("a client took nothing for %.1f s and was dropped", self.stall_s)
            self._drop_client()

    def _drop_client(self) -> None:
        """Close without flushing the write buffer; the application gets `http.disconnect`."""
        self.transport.abort()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class DrainingServer(uvicorn.Server):
    """uvicorn that finishes live requests before it stops.

    At the first SIGINT or SIGTERM the socket stays open: live requests go on, new requests and
    `/readyz` get 503, so that a load balancer turns away. The server stops when no request is live,
    or `abort`s them after `drain_s` seconds. A second signal stops it at once.

    It stops, too, `LOST_ENGINE_S` after its engine has ended by itself; `has_failed` says so.

    Args:
        health: `is_draining` is set at the first signal.
        connections: how many clients may be connected.
        on_listening: returns the banner for a URL; written to stderr.
        abort: ends live requests, with their output so far.
        shares_port: another server listens at the same port: at the first signal this one stops
            listening and closes idle connections, so that clients turn to the other one.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        health: Readiness,
        *,
        on_listening: Callable[[str], str],
        abort: Callable[[], Awaitable[None]],
        drain_s: float,
        connections: ConnectionLimit,
        shares_port: bool = False,
    ) -> None:
        super().__init__(config)
        self._shares_port = shares_port
        self._connections = connections
        self._acceptors: list[Acceptor] = []
        self._health, self._on_listening, self._abort = health, on_listening, abort
        self._drain_s = drain_s
        self._deadline_s: float | None = None
        self._lost_s: float | None = None  # since when there is no engine
        self.is_forced = self.has_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and write banner and URL to stderr.

        Accepting is `Acceptor`'s: asyncio's server only binds the sockets.

        Raises:
            ConfigError: another program listens on the address.
        """
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        try:
            await self._listen(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            raise ConfigError(
                f"the server cannot listen: {reason_of(error)}; choose another --port"
            ) from error
        for listening in (sock for server in self.servers for sock in server.sockets):
            host, port = listening.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            sys.stderr.write(f"{self._on_listening(url)}\n\nlistening on {url}\n")
            sys.stderr.flush()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        self._stop_listening()
        await super().shutdown(sockets)

    def _stop_listening(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors = []
        for server in self.servers:  # a socket listens until all its descriptors are closed
            server.close()

    async def _listen(self, sockets: list[socket.socket] | None) -> None:
        """Listen on `sockets`, or on the configured address, and accept from there."""
        create_server = partial(
            asyncio.get_running_loop().create_server, self._create_protocol, start_serving=False
        )
        if sockets is None:
            self.servers = [await create_server(host=self.config.host, port=self.config.port)]
        else:
            self.servers = [await create_server(sock=sock) for sock in sockets]
        for listening in (sock for server in self.servers for sock in server.sockets):
            accepted = listening.dup()
            accepted.listen(self.config.backlog)
            self._acceptors.append(Acceptor(accepted, self._create_protocol, self._connections))

    def _create_protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        return protocol(  # type: ignore[no-any-return]
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            connections=self._connections,
        )

    def handle_exit(self, sig: int, frame: Any) -> None:  # noqa: ARG002 - signature of signal handlers
        """Start the drain at the first signal, stop at the second.

        uvicorn's own handler raises the signal again at the end, so the exit code would not be 0.
        """
        if self._deadline_s is None:
            self._health.is_draining = True
            self._deadline_s = time.monotonic() + self._drain_s
            name = signal.Signals(sig).name
            logger.info("%s: live requests have %.0f s to end", name, self._drain_s)
        else:
            # uvicorn would log a traceback for each request that is cancelled now, on purpose.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self.is_forced = self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Stop when the drain is over; uvicorn calls this ten times a second and stops at True."""
        if self._deadline_s is not None and not self.should_exit:
            if self._shares_port and self._acceptors:
                self._stop_listening()
                for connection in [*self.server_state.connections]:
                    connection.shutdown()  # at once where it is idle, else after its response
            num_live = len(self.server_state.tasks)
            if time.monotonic() >= self._deadline_s:
                logger.warning("cut short: %s", counted(num_live, "request"))
                await self._abort()
                num_live = 0
            self.should_exit = not num_live
        if counter % CHECK_TICKS == 0:
            self._check_engine()
        return await super().on_tick(counter)

    def _check_engine(self) -> None:
        """Stop a while after the engine has ended, for another process to take this one's place."""
        if not self._health.has_lost_engine:
            self._lost_s = None
        elif self._lost_s is None:
            self._lost_s = time.monotonic()
            logger.error("the engine has ended; this server ends in %.0f s", LOST_ENGINE_S)
        elif time.monotonic() - self._lost_s >= LOST_ENGINE_S:
            self.has_failed = self.should_exit = True
