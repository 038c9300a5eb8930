"""`Acceptor`: accepts connections of one listening socket, within a `ConnectionLimit`.

asyncio accepts whatever comes, up to its backlog at once, and logs a traceback for every connection
that fails for want of a descriptor.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Callable

from ramify.counts import counted
from ramify.server.http.connection_limit import ConnectionLimit

logger = logging.getLogger(__name__)

# Connections accepted, or idle ones closed, in one turn of the event loop.
BATCH = 16
# Seconds until accepting is tried again when the system has no descriptor.
RETRY_S = 1.0
# Seconds between two lines of the log.
LOG_S = 60.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
)
REFUSAL_BODY = b'{"error":{"message":"%s","type":"server_error","code":"too_many_connections"}}'


class Acceptor:
    """Accept connections while the limit allows it, closing idle ones to make room.

    Accepting pauses, so that clients wait in the backlog, while all connections are busy. A connection
    from an address that has too many busy ones gets 503.

    Args:
        listening: a socket that listens; closed by `close`.
        create_protocol: makes the protocol of a connection, which reports to `limit`.
    """

    def __init__(
        self,
        listening: socket.socket,
        create_protocol: Callable[[], asyncio.Protocol],
        limit: ConnectionLimit,
    ) -> None:
        listening.setblocking(False)
        self._listening, self._create_protocol, self._limit = listening, create_protocol, limit
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_accepting = self._is_closed = False
        self._logged_s = -LOG_S
        limit.on_room.append(self._resume)
        self._resume()

    def close(self) -> None:
        """Accept nothing more and close the socket."""
        self._is_closed = True
        self._pause()
        if self._retry is not None:
            self._retry.cancel()
        self._limit.on_room.remove(self._resume)
        self._listening.close()

    def _accept(self) -> None:
        """Accept connections that wait, at most `BATCH`; the event loop calls it when there is one."""
        if self._limit.is_full:
            self._make_room()
        for _ in range(BATCH):
            if self._limit.is_full:
                return
            try:
                client, peer = self._listening.accept()
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._wait_for_descriptors(error)
                return
            self._connect(client, client_address(peer))

    def _connect(self, client: socket.socket, address: str) -> None:
        client.setblocking(False)
        if self._limit.is_full_for(address) and not self._limit.close_idle(1, address):
            self._log(
                f"{address} has {counted(self._limit.max_per_address, 'connection')} in use, the limit "
                "(--max-connections-per-address); further ones are refused"
            )
            _refuse(client, self._limit.max_per_address)
            return
        protocol = self._create_protocol()
        self._limit.add(protocol, address)  # type: ignore[arg-type]
        handshake = self._loop.create_task(self._open(protocol, client))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _open(self, protocol: asyncio.Protocol, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, client)
        except OSError:  # the client has gone
            self._limit.remove(protocol)  # type: ignore[arg-type]
            client.close()

    def _make_room(self) -> None:
        """Close the longest idle connections; accept again when a connection has ended or is idle."""
        self._pause()
        num_closed = self._limit.close_idle(BATCH)
        consequence = "idle ones are closed" if num_closed else "new ones wait until one ends"
        self._log(
            f"open: {counted(self._limit.num_connections, 'connection')}, the limit (--max-connections); "
            f"{consequence}"
        )

    def _wait_for_descriptors(self, error: OSError) -> None:
        self._pause()
        self._limit.close_idle(BATCH)
        self._retry = self._loop.call_later(RETRY_S, self._retry_now)
        self._log(f"no connection can be accepted: {error.strerror}; idle ones are closed")

    def _retry_now(self) -> None:
        self._retry = None
        self._resume()

    def _pause(self) -> None:
        if self._is_accepting:
            self._loop.remove_reader(self._listening.fileno())
            self._is_accepting = False

    def _resume(self) -> None:
        if not self._is_accepting and not self._is_closed and self._retry is None:
            self._loop.add_reader(self._listening.fileno(), self._accept)
            self._is_accepting = True

    def _log(self, message: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            logger.warning("%s; this is logged once a minute", message)


def client_address(peer: object) -> str:
    """The address that connections are counted by: of IPv6 the /64, which one host may own."""
    host = str(peer[0]) if isinstance(peer, tuple) else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


def _refuse(client: socket.socket, max_per_address: int) -> None:
    """Answer 503 as far as the socket takes it at once, and close it."""
    body = REFUSAL_BODY % b"this address has %d connections in use, the limit" % max_per_address
    try:
        client.send(REFUSAL % (len(body), body))
    except OSError:
        pass  # the client has gone
    finally:
        client.close()
