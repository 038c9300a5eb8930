"""HTTP/1.1 with patience: clients that do not send, or do not read, are not waited for."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

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
