"""The socket of a server: says where it listens, and ends only when live requests have ended."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ramify.server.operations.health import Readiness

logger = logging.getLogger(__name__)

HEADER_S = 10.0  # from the connection, or the first byte of a request, to the end of its headers
STALL_S = 60.0  # without a byte taken by the client while there is too much to send


class TimeoutProtocol(H11Protocol):
    """uvicorn's, which by itself waits for ever."""

    header_s, stall_s = HEADER_S, STALL_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.header_s, self._drop_client)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # it has sent all headers
            self._stop_header_timer()
        elif self._header_timer is None and self.conn.trailing_data[0]:
            self._header_timer = self.loop.call_later(self.header_s, self._drop_client)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._start_stall_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._stop_stall_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_header_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def _start_stall_timer(self, unsent: int) -> None:
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(self.stall_s, self._check_stalled, unsent)

    def _check_stalled(self, unsent: int) -> None:
        """It may have taken some of it: then it is slow, but alive."""
        now = self.transport.get_write_buffer_size()
        if now < unsent:
            self._start_stall_timer(now)
        else:
            logger.warning("a client took nothing for %.1f s and was left", self.stall_s)
            self._drop_client()

    def _drop_client(self) -> None:
        """What was to be sent is dropped; the application hears of a client that went away."""
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
    """uvicorn, with an end in two parts.

    At the first signal the socket stays open: new requests are told 503 and `/readyz` too, so that
    a load balancer sees it, while live ones are answered. Then, or after `drain_s`, it closes. A
    second signal ends at once.

    Args:
        health: what is told of the drain.
        on_listening: gets the URL; returns what is shown.
        abort: ends live requests with what they have.
        drain_s: for live requests.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        health: Readiness,
        *,
        on_listening: Callable[[str], str],
        abort: Callable[[], Awaitable[None]],
        drain_s: float,
    ) -> None:
        super().__init__(config)
        self._health, self._on_listening, self._abort = health, on_listening, abort
        self._drain_s = drain_s
        self._deadline_s: float | None = None
        self.is_forced = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for one in (each for server in self.servers for each in server.sockets):
            host, port = one.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            sys.stderr.write(f"{self._on_listening(url)}\n\nlistening on {url}\n")
            sys.stderr.flush()

    def handle_exit(self, sig: int, frame: Any) -> None:  # noqa: ARG002 - signal's own form
        """A signal; uvicorn's own would raise it again at the end, which is no exit code 0."""
        if self._deadline_s is None:
            self._health.is_draining = True
            self._deadline_s = time.monotonic() + self._drain_s
            word = signal.Signals(sig).name
            logger.info("%s: live requests have %.0f s to end", word, self._drain_s)
        else:
            # what is cancelled then is meant to be: no tracebacks
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self.is_forced = self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends."""
        if self._deadline_s is not None and not self.should_exit:
            live = len(self.server_state.tasks)
            if time.monotonic() >= self._deadline_s:
                logger.warning("%d requests are cut short", live)
                await self._abort()
                live = 0
            self.should_exit = not live
        return await super().on_tick(counter)
