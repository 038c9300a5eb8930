"""`ConnectionLimit` and `Acceptor`: more clients than descriptors, on real sockets."""

from __future__ import annotations

import asyncio
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from ramify.errors import ConfigError
from ramify.server.http.acceptor import client_address
from ramify.server.http.connection_limit import ConnectionLimit
from ramify.server.http.uvicorn_server import TimeoutProtocol
from tests.pure.live_server import live, until

SERVER = """
import logging, resource, sys
from ramify.server.http.connection_limit import ConnectionLimit, raise_descriptor_limit
from ramify.server.http.uvicorn_server import TimeoutProtocol
from tests.pure.live_server import live

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
logging.basicConfig()
limit = ConnectionLimit.of(None, None, num_descriptors=raise_descriptor_limit())
with live(connections=limit) as server:
    print(server.url.rpartition(":")[2], flush=True)
    sys.stdin.readline()
"""
BODY = b'{"prompt": "Who lives in Rome?", "max_tokens": 4}'
JSON = {"content-type": "application/json"}


class Idle:
    """A connection that only counts how often it was closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close_idle(self) -> None:
        self.num_closed += 1


@contextmanager
def few_descriptors() -> Iterator[tuple[int, list[str]]]:
    """A server in a process of 256 descriptors; yields its port and its lines on stderr."""
    lines: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
    reader.start()
    try:
        yield int(process.stdout.readline()), lines
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
        reader.join(60)
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def answer_s(client: http.client.HTTPConnection) -> float:
    """Seconds of a request on an open connection, which must be answered with 200."""
    begin_s = time.monotonic()
    client.request("POST", "/v1/completions", BODY, JSON)
    response = client.getresponse()
    response.read()
    assert response.status == 200
    return time.monotonic() - begin_s


@pytest.mark.parametrize("addresses", [("127.0.0.1",), tuple(f"127.0.1.{n}" for n in range(9))])
def test_idle_connections_do_not_use_up_the_descriptors(addresses: tuple[str, ...]) -> None:
    """450 idle connections, of 256 descriptors: nobody waits, at most a line of log, no traceback.

    A tenant's open connection goes on, and one that connects later is served as well.
    """
    with ExitStack() as attackers, few_descriptors() as (port, lines):
        tenant = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        attackers.callback(tenant.close)
        answer_s(tenant)
        durations_s = []
        for number in range(450):
            source = (addresses[number % len(addresses)], 0)
            attackers.enter_context(
                socket.create_connection(("127.0.0.1", port), 60, source_address=source)
            )
            if number % 50 == 49:
                durations_s.append(answer_s(tenant))
        newcomer = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        attackers.callback(newcomer.close)
        answer_s(newcomer)
        durations_s.append(answer_s(tenant))
        log = list(lines)

    assert sorted(durations_s)[len(durations_s) // 2] < 1
    assert "".join(log).count("WARNING") <= 1, log
    assert "ERROR" not in "".join(log) and "Traceback" not in "".join(log)


def busy_connection(server_port: int) -> socket.socket:
    """A connection whose request is not answered before the engine may go on."""
    client = socket.create_connection(("127.0.0.1", server_port), 60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(BODY)}\r\n"
    client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + BODY)
    return client


def test_a_connection_waits_while_all_are_busy() -> None:
    """The newcomer's request is answered when one of the others has ended; no answer is cut."""
    limit = ConnectionLimit(3, 3)
    with live(connections=limit) as server, ExitStack() as clients:
        port = int(server.url.rpartition(":")[2])
        server.gate.is_open = False
        others = [clients.enter_context(busy_connection(port)) for _ in range(3)]
        until(lambda: server.server.service.quotas.num_live == 3)
        newcomer = clients.enter_context(busy_connection(port))
        newcomer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            newcomer.recv(1)
        assert limit.num_connections == 3

        server.gate.open()

        newcomer.settimeout(60)
        for client in (newcomer, *others):
            assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_address_with_too_many_busy_connections_gets_503() -> None:
    """Another address is served at once."""
    limit = ConnectionLimit(8, 2)
    with live(connections=limit) as server, ExitStack() as clients:
        port = int(server.url.rpartition(":")[2])
        server.gate.is_open = False
        for _ in range(2):
            clients.enter_context(busy_connection(port))
        until(lambda: server.server.service.quotas.num_live == 2)

        refused = clients.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        answer = refused.recv(65536)
        elsewhere = http.client.HTTPConnection(
            "127.0.0.1", port, 60, source_address=("127.0.2.1", 0)
        )
        clients.callback(elsewhere.close)
        elsewhere.request("GET", "/livez")

        assert answer.startswith(b"HTTP/1.1 503") and b'"too_many_connections"' in answer
        assert elsewhere.getresponse().status == 200
        server.gate.open()


class SmallBuffers(TimeoutProtocol):
    """Of two answers that nobody reads, some thousand bytes stay unsent: too few to pause writing."""

    stall_s = 1.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


@pytest.mark.parametrize("closes", [False, True])
def test_a_client_that_never_reads_does_not_keep_its_connection(closes: bool) -> None:
    """A connection that is to close, idle or at its request, is dropped though output is unsent."""
    head = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n"
    last = head + b"connection: close\r\n" * closes + b"\r\n"
    limit = ConnectionLimit(2, 2)
    with live(connections=limit, protocol=SmallBuffers) as server, ExitStack() as clients:
        port = int(server.url.rpartition(":")[2])
        for _ in range(2):
            client = clients.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect(("127.0.0.1", port))
            client.sendall(head + b"\r\n" + last)
        until(lambda: server.listener.server_state.total_requests == 4)

        newcomer = http.client.HTTPConnection("127.0.0.1", port, 30)
        clients.callback(newcomer.close)
        newcomer.request("GET", "/livez")

        assert newcomer.getresponse().status == 200


def test_silent_connections_are_closed_before_those_kept_alive() -> None:
    """Within both, the longest idle first; one with a request in progress never."""
    limit = ConnectionLimit(4, 4)
    served, busy, silent, later = (Idle() for _ in range(4))
    for connection in (served, busy, silent, later):
        limit.add(connection, "a")
    limit.set_idle(served, is_silent=False)
    limit.set_idle(silent, is_silent=True)
    limit.set_idle(later, is_silent=True)

    order = []
    while limit.close_idle(1):
        order.append([connection.num_closed for connection in (served, busy, silent, later)])

    assert order == [[0, 0, 1, 0], [0, 0, 1, 1], [1, 0, 1, 1]]


def test_a_connection_is_counted_until_it_ends() -> None:
    """Closing only asks for the end; an address is forgotten with its last connection."""
    limit = ConnectionLimit(2, 1)
    first, second = Idle(), Idle()
    limit.add(first, "a")
    limit.add(second, "b")
    limit.set_idle(first, is_silent=True)

    assert limit.close_idle(9, "b") == 0 and limit.close_idle(9, "a") == 1
    assert limit.is_full and limit.is_full_for("a")
    limit.remove(first)
    limit.remove(first)
    assert limit.num_connections == 1 and not limit.is_full_for("a") and limit.is_full_for("b")


def test_limits_stay_below_the_descriptors() -> None:
    """By default all descriptors but 128, three quarters of them for an address."""
    of = ConnectionLimit.of
    default, few = of(None, None, num_descriptors=1024), of(None, None, num_descriptors=64)
    small = of(1, None, num_descriptors=1024)
    assert (default.max_connections, default.max_per_address) == (896, 672)
    assert (few.max_connections, few.max_per_address) == (32, 24)
    assert (small.max_connections, small.max_per_address) == (1, 1)
    with pytest.raises(ConfigError, match=r"--max-connections 897 .* 1024 .* 896"):
        of(897, None, num_descriptors=1024)
    with pytest.raises(ConfigError, match=r"--max-connections-per-address 11 .* 10"):
        of(10, 11, num_descriptors=1024)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.7", 1), "10.0.0.7"),
        (("2001:db8::7", 1, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (("::ffff:10.0.0.7", 1, 0, 0), "10.0.0.7"),
        ("", ""),
    ],
)
def test_an_ipv6_host_is_its_network(peer: object, address: str) -> None:
    """A host may own a /64; an IPv4 address in IPv6 form is the IPv4 address."""
    assert client_address(peer) == address
