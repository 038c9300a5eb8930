"""Connections to a Valkey or Redis server: pipelines of commands that end by a deadline.

The client's timeouts are for each read of a socket: a slow network could stretch one answer without
end. Here a call ends at its deadline, however many reads it takes.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ramify.errors import ConfigError, MissingPackageError
from ramify.kv.stores import valkey_tls

CONNECT_S = 1.0
_READ_BYTES = 1 << 18
_MAX_IDLE = 8
_SCHEMES = frozenset({"valkey", "valkeys", "redis", "rediss", "unix"})
_SECRET_OPTIONS = frozenset({"password", "ssl_password"})
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


class _HandshakeTimeoutError(TimeoutError):
    """A server that takes connections and does not answer to TLS, as one does on a plain port."""


class ValkeyLink:
    """Connections to one server. Any number of threads; each call has a connection to itself.

    Args:
        url: valkey://, redis://, with TLS valkeys:// or rediss://, or unix://PATH.

    Raises:
        ConfigError: no such URL, or options in its query that there are not.
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
        self._host = str(arguments.get("host", "localhost"))
        context = None
        # What may be the reason where a connection ends before its first answer.
        self._hint = ""
        if parts.scheme in ("valkey", "redis"):
            self._hint = "; a port for TLS needs valkeys://"
        elif parts.scheme in ("valkeys", "rediss"):
            self._hint = (
                f"; if it wants a certificate of its clients, give {valkey_tls.CERTIFICATE_WANTED}"
            )
            # The client's own class verifies no name, and reads the system's authorities each time.
            base, context = (
                connection.Connection,
                valkey_tls.take_context(arguments, shown_url(url)),
            )

        class DeadlineConnection(base):  # type: ignore[valid-type,misc]
            has_answered = False

            def connect_by(self, deadline: float) -> None:
                self.connect_deadline = min(deadline, time.monotonic() + CONNECT_S)
                # A timeout of 0 would not wait at all, which is another error.
                self.socket_connect_timeout = max(self.connect_deadline - time.monotonic(), 1e-3)
                self.connect()

            def _connect(self) -> _DeadlineSocket:
                sock = super()._connect()
                if context is not None:
                    try:
                        sock.settimeout(max(self.connect_deadline - time.monotonic(), 1e-3))
                        sock = context.wrap_socket(sock, server_hostname=self.host)
                    except TimeoutError as error:
                        sock.close()
                        raise _HandshakeTimeoutError(valkey_tls.NO_HANDSHAKE) from error
                    except OSError:
                        sock.close()
                        raise
                self.bounded = _DeadlineSocket(sock, self.connect_deadline)
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
        try:
            self._connection_class(**self._arguments)
        except (TypeError, ValueError, self._exceptions.ValkeyError) as error:
            raise ConfigError(
                f"the store {self.shown_url!r} has an option in its query that the client does not "
                f"take: {error}"
            ) from error
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
                connection.has_answered = True
        except (exceptions.TimeoutError, TimeoutError) as error:
            cause = error.__context__
            shown = cause if isinstance(cause, _HandshakeTimeoutError) else error
            exchange.failure, exchange.reason = "timeout", str(shown) or "timed out"
        except (exceptions.BusyLoadingError, exceptions.AuthenticationError) as error:
            exchange.failure, exchange.reason = "refused", str(error) or type(error).__name__
        except exceptions.InvalidResponse as error:
            exchange.failure, exchange.reason = "protocol", f"not the protocol of Valkey: {error}"
        except (exceptions.ValkeyError, OSError) as error:
            exchange.failure, exchange.reason = "connection", self._describe(error, connection)
        finally:
            self._give_back(connection, usable=len(exchange.replies) == len(commands))
        exchange.elapsed_s = time.monotonic() - start
        return exchange

    def _describe(self, error: Exception, connection: Any) -> str:
        cut = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
        is_cut = isinstance(error.__context__, cut) or "closed by server" in str(error)
        if is_cut:
            hint = "" if connection.has_answered else self._hint
            return f"it has ended the connection{hint}"
        return valkey_tls.explain(error, self._host) or str(error) or type(error).__name__

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
    """A URL without its passwords."""
    parts = urlsplit(url)
    if parts.password:
        host = parts.netloc.rpartition("@")[2]
        parts = parts._replace(netloc=f"{parts.username or ''}:***@{host}")
    options = [
        f"{name}=***" if name in _SECRET_OPTIONS else option
        for option in parts.query.split("&")
        for name in [option.partition("=")[0]]
    ]
    shown = parts._replace(query="&".join(options))
    return url if shown == urlsplit(url) else urlunsplit(shown)
