"""Sockets of the address to listen on, bound before the model loads."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from ramify.errors import ConfigError
from ramify.reasons import reason_of


def bind_address(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """Bind a socket to each address of a host; none listens yet, so clients are refused.

    Args:
        port: 0 takes a free one, the same for all addresses.
        is_shared: other processes of this user may listen there as well, if theirs are shared, too;
            the system gives each connection to one of them.

    Raises:
        ConfigError: the port is in use, or the address cannot be bound.
    """
    with ExitStack() as undo:
        bound: list[socket.socket] = []
        for family, address in _addresses(host, port):
            sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            _set_options(sock)
            if is_shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                sock.bind((address[0], port, *address[2:]))
            except OSError as error:
                raise ConfigError(_problem(host, port, error)) from error
            port = port or sock.getsockname()[1]
            bound.append(sock)
        undo.pop_all()
    return bound


def _addresses(host: str, port: int) -> Sequence[tuple[int, tuple[str, ...]]]:
    try:
        entries = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"--host {host} is no address of this machine: {reason_of(error)}"
        ) from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in entries))  # type: ignore[misc]


def _set_options(sock: socket.socket) -> None:
    # Without it a port cannot be taken again while connections of an earlier server are closing.
    if os.name == "posix":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)


def _problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; end the program that has it, or choose another --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose a --port of 1024 or more"
    return f"--host {host} --port {port} cannot be bound: {reason_of(error)}"
