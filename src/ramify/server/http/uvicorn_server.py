"""The socket of a server: says where it listens, and ends only when live requests have ended."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from ramify.server.operations.health import Readiness

logger = logging.getLogger(__name__)


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
