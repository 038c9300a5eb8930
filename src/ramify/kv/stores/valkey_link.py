"""Connections to a Valkey or Redis server: pipelines of commands that end by a deadline.

The client's timeouts are for each read of a socket: a slow network could stretch one answer without
end. Here a call ends at its deadline, however many reads it takes.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ramify.errors import ConfigError, MissingPackageError

CONNECT_S = 1.0
_READ_BYTES = 1 << 18
_MAX_IDLE = 8
_SCHEMES = frozenset({"valkey", "valkeys", "redis", "rediss", "unix"})
Command = tuple[bytes | str | int, ...]


class ReplyError:
    """An error that the server answered to one command."""

    def __init__(self, message: str) -> None:
        self.message = message

    @property
    def is_wrong_type(self) -> bool:
        """Whether the key holds a value of another type: all other errors are the server's."""
        return self.message.startswith("WRONGTYPE")


@dataclass(slots=True)
class Exchange:
    """The answers to a pipeline, fewer than its commands if it failed.

    Args:
        failure: what ended it early: "timeout", "connection", "protocol" or "refused"; empty: nothing did.
    """

    replies: list[Any] = field(default_factory=list)
    failure: str = ""
    reason: str = ""
    elapsed_s: float = 0.0


class _DeadlineSocket:
    """A socket whose calls end at `deadline`, a value of time.monotonic()."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self.deadline = sock, deadline

    def _arm(self) -> None:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("deadline passed")
        self._sock.settimeout(remaining)

    def recv(self, num_bytes: int) -> bytes:
        self._arm()
        return self._sock.recv(num_bytes)

    def recv_into(self, buffer: bytearray) -> int:
        self._arm()
        return self._sock.recv_into(buffer)

    def sendall(self, content: bytes) -> None:
        self._arm()
        self._sock.sendall(content)

    def settimeout(self, _seconds: float | None) -> None:
        """The deadline alone counts."""

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


class ValkeyLink:
    """Connections to one server. Any number of threads; each call has a connection to itself.

    Args:
        url: valkey://, redis://, with TLS valkeys:// or rediss://, or unix://PATH.

    Raises:
        ConfigError: no such URL.
        MissingPackageError: `valkey` is not installed.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise ConfigError(
                f"the store {shown_url(url)!r} has scheme {parts.scheme!r}; use one of "
                f"{', '.join(f'{scheme}://' for scheme in sorted(_SCHEMES))}"
            )
        try:
            import valkey
            from valkey import connection
        except ModuleNotFoundError as error:
            raise MissingPackageError("valkey", "remote") from error
        self._exceptions = valkey.exceptions
        try:
            arguments = connection.parse_url(url)
        except ValueError as error:
            raise ConfigError(f"the store {shown_url(url)!r} is no URL: {error}") from error
        base = arguments.pop("connection_class", connection.Connection)

        class DeadlineConnection(base):  # type: ignore[valid-type,misc]
            def connect_by(self, deadline: float) -> None:
                self.connect_deadline = min(deadline, time.monotonic() + CONNECT_S)
                # A timeout of 0 would not wait at all, which is another error.
                self.socket_connect_timeout = max(self.connect_deadline - time.monotonic(), 1e-3)
                self.connect()

            def _connect(self) -> _DeadlineSocket:
                self.bounded = _DeadlineSocket(super()._connect(), self.connect_deadline)
                return self.bounded

        self._connection_class = DeadlineConnection
        self._arguments = {
            **arguments,
            "socket_timeout": CONNECT_S,
            "socket_connect_timeout": CONNECT_S,
            "socket_read_size": _READ_BYTES,
            "lib_name": None,
            "lib_version": None,
        }
        self.shown_url = shown_url(url)
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._is_closed = False

    def exchange(self, commands: Sequence[Command], deadline: float) -> Exchange:
        """Send commands in one pipeline and read their answers, until the deadline. Raises nothing."""
        exchange = Exchange()
        start = time.monotonic()
        exceptions = self._exceptions
        connection = self._take()
        try:
            connection.connect_by(deadline)
            connection.bounded.deadline = deadline
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            for _ in commands:
                try:
                    reply = connection.read_response(disable_decoding=True)
                except exceptions.ResponseError as error:
                    reply = ReplyError(str(error))
                exchange.replies.append(reply)
        except (exceptions.TimeoutError, TimeoutError) as error:
            exchange.failure, exchange.reason = "timeout", str(error) or "timed out"
        except (exceptions.BusyLoadingError, exceptions.AuthenticationError) as error:
            exchange.failure, exchange.reason = "refused", str(error) or type(error).__name__
        except exceptions.InvalidResponse as error:
            exchange.failure, exchange.reason = "protocol", f"not the protocol of Valkey: {error}"
        except (exceptions.ValkeyError, OSError) as error:
            exchange.failure, exchange.reason = "connection", str(error) or type(error).__name__
        finally:
            self._give_back(connection, usable=len(exchange.replies) == len(commands))
        exchange.elapsed_s = time.monotonic() - start
        return exchange

    def _take(self) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connection_class(**self._arguments)

    def _give_back(self, connection: Any, *, usable: bool) -> None:
        if usable:
            with self._lock:
                if not self._is_closed and len(self._idle) < _MAX_IDLE:
                    self._idle.append(connection)
                    return
        # Answers that were not read would be taken for those of the next call.
        connection.disconnect()

    def close_idle(self) -> None:
        """Close the connections that no call uses: their server has gone."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def close(self) -> None:
        """Close every connection; those in use once their call has ended."""
        self._is_closed = True
        self.close_idle()


def shown_url(url: str) -> str:
    """A URL without its password."""
    parts = urlsplit(url)
    if not parts.password:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))
