"""TLS to a shared store, against a real server: what is verified, and what a fault of it says and costs."""

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError, StoreUnavailableError
from ramify.kv.stores.page_store import WriteOutcome
from ramify.kv.stores.valkey import ValkeyStore
from ramify.kv.stores.valkey_link import ValkeyLink, shown_url
from tests.pure.store_cases import IDENTITY, hits, put
from tests.pure.test_valkey_store import Clock
from tests.pure.valkey_server import tls_server_binary

pytest.importorskip("valkey", reason="the shared store needs valkey: pip install 'ramify[remote]'")
certificates = pytest.importorskip(
    "tests.certificates", reason="cryptography is not installed (pip install ramify[dev])"
)

PAGE_BYTES = 4096
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


class TlsServer:
    """A server with a port for TLS and a plain one; `start` may be given other certificates."""

    def __init__(self, folder: Path) -> None:
        binary = tls_server_binary()
        if binary is None:
            pytest.skip("no server with TLS: install redis-server or valkey-server from the system")
        self._binary, self._folder = binary, folder
        self.authority = certificates.Authority.make("ours")
        self.port, self.plain_port = free_port(), free_port()
        self.ca_file = folder / "ca.pem"
        self.ca_file.write_bytes(self.authority.credentials().authority)
        self._process: subprocess.Popen[str] | None = None

    def start(self, name: str = HOST, *, is_expired: bool = False, clients: str = "no") -> None:
        """Start it, in place of the one that runs."""
        self.stop()
        shown = self.authority.credentials(name, is_expired=is_expired)
        (self._folder / "cert.pem").write_bytes(shown.certificate)
        (self._folder / "key.pem").write_bytes(shown.key)
        options = {
            "port": self.plain_port, "tls-port": self.port, "bind": HOST, "save": "",
            "dir": self._folder, "tls-cert-file": self._folder / "cert.pem",
            "tls-key-file": self._folder / "key.pem", "tls-ca-cert-file": self.ca_file,
            "tls-auth-clients": clients, "maxmemory-policy": "allkeys-lru",
        }  # fmt: skip
        command = [self._binary]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            # Both ports listen by then.
            if "eady to accept connections" in line:
                return
        pytest.fail(f"the server did not start: {''.join(lines)}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def url(self, *options: str, host: str = HOST, is_trusted: bool = True) -> str:
        given = [f"ssl_ca_certs={self.ca_file}"] if is_trusted else []
        return f"rediss://{host}:{self.port}?{'&'.join([*given, *options])}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsServer]:
    server = TlsServer(tmp_path)
    yield server
    server.stop()


@contextmanager
def connected(url: str, clock: Callable[[], float] | None = None) -> Iterator[ValkeyStore]:
    store = ValkeyStore(
        url, identity=IDENTITY, page_bytes=PAGE_BYTES, clock=Clock() if clock is None else clock
    )
    yield store
    store.close()


def test_pages_go_over_a_verified_connection(server: TlsServer) -> None:
    """By an address and by a name; several connections, and pages larger than a record of TLS."""
    for name in (HOST, "localhost"):
        server.start(name)
        with connected(server.url(host=name)) as store:
            assert "connected" in store.start_report
            assert put(store, range(40)) == [WriteOutcome.WRITTEN] * 40
            assert hits(store, range(41)) == list(range(40))
            assert store.counts().errors == ()


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another name": ({"name": "cache.example"}, {}, "not for 127.0.0.1"),
    "another address": ({"name": "10.1.2.3"}, {}, "use the name that is in it"),
    "expired": ({"is_expired": True}, {}, "no longer valid (certificate has expired)"),
    "an authority that is not trusted": ({}, {"is_trusted": False}, "ssl_ca_certs=FILE"),
    "no certificate of the client": ({"clients": "yes"}, {}, "ssl_certfile=FILE"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_connection_that_cannot_be_verified_is_not_used(server: TlsServer, fault: str) -> None:
    """The start says why and goes on, nothing is sent; once the server is mended it is used by itself."""
    of_server, of_url, reason = FAULTS[fault]
    server.start(**of_server)
    clock = Clock()

    with connected(server.url(**of_url), clock) as store:
        assert "out of reach" in store.start_report and reason in store.start_report
        assert store.counts().unavailable
        with pytest.raises(StoreUnavailableError, match="the shared store rediss://"):
            put(store, range(3))
        if of_url:
            return
        server.start()
        clock.now = 100.0
        store.maintain()
        assert put(store, range(3)) == [WriteOutcome.WRITTEN] * 3


def test_a_port_of_the_other_kind_is_named(server: TlsServer) -> None:
    """TLS to a plain port, and the other way round: the reason has the way out."""
    server.start()

    with connected(f"rediss://{HOST}:{server.plain_port}?ssl_ca_certs={server.ca_file}") as store:
        assert "it does not answer to TLS; name its port for TLS" in store.start_report
    with connected(f"redis://{HOST}:{server.port}") as store:
        assert "a port for TLS needs valkeys://" in store.start_report


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak TLS"), (b"", "ended the connection")],
)
def test_somebody_else_at_the_port_is_a_reason(answer: bytes, words: str) -> None:
    """Who speaks another protocol, or hangs up."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(answer)
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with connected(f"rediss://{HOST}:{listener.getsockname()[1]}") as store:
        thread.join()
        listener.close()

        assert "out of reach" in store.start_report and words in store.start_report


def test_a_client_shows_its_certificate(server: TlsServer, tmp_path: Path) -> None:
    """Where the server wants one: files in the URL."""
    server.start(clients="yes")
    shown = certificates.write(server.authority.credentials(), tmp_path / "client")

    with connected(
        server.url(f"ssl_certfile={shown.certificate}", f"ssl_keyfile={shown.key}")
    ) as store:
        assert put(store, range(3)) == [WriteOutcome.WRITTEN] * 3


@pytest.mark.parametrize("option", ["ssl_cert_reqs=none", "ssl_check_hostname=false"])
def test_what_is_verified_can_be_less(server: TlsServer, option: str) -> None:
    """By name only: another name in the certificate is taken then."""
    server.start("cache.example")

    with connected(server.url(option)) as store:
        assert put(store, range(3)) == [WriteOutcome.WRITTEN] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("ssl_ca_certs=/nowhere/ca.pem", "No such file"),
        ("ssl_certfile=/nowhere/cert.pem", "/nowhere/cert.pem"),
        ("ssl_ca_cert=/ca.pem", "those of TLS are"),
        ("ssl_cert_reqs=maybe", "none or required"),
        ("ssl_ciphers=rot13", "No cipher"),
        ("colour=red", "colour"),
    ],
)
def test_options_that_there_are_not_are_refused_at_the_start(options: str, words: str) -> None:
    """With the value, and without the password."""
    with pytest.raises(ConfigError) as raised:
        ValkeyLink(f"valkeys://:secret@h?{options}")

    assert words in str(raised.value) and "secret" not in str(raised.value)


def test_passwords_in_a_query_are_not_shown() -> None:
    """Of the server and of the key; other URLs are shown as they are."""
    shown = shown_url("rediss://h:1?ssl_password=a&ssl_certfile=f&password=b")

    assert shown == "rediss://h:1?ssl_password=***&ssl_certfile=f&password=***"
    assert shown_url("unix:///s?db=1") == "unix:///s?db=1"
