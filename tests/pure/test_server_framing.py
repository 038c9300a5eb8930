"""Requests whose length can be read in two ways (request smuggling), on a raw socket."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from ramify.server.http.uvicorn_server import TimeoutProtocol
from tests.pure.live_server import Live, live

BODY = b'{"prompt": "Rome", "max_tokens": 1}'
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
LENGTH = b"Content-Length: %d" % len(BODY)
CODING = b"Transfer-Encoding: chunked"

# Header lines, the body and HTTP's version of requests that get one 400.
REFUSED: dict[str, tuple[tuple[bytes, ...], bytes, bytes]] = {
    "length and coding": ((LENGTH, CODING), CHUNKED, b"1.1"),
    "coding and length": ((CODING, LENGTH), CHUNKED, b"1.1"),
    "length 0 and coding": ((b"Content-Length: 0", CODING), CHUNKED, b"1.1"),
    "coding in HTTP/1.0": ((CODING,), CHUNKED, b"1.0"),
    "two lengths": ((LENGTH, b"Content-Length: 4"), BODY, b"1.1"),
    "two lengths in one line": ((LENGTH + b", 4",), BODY, b"1.1"),
    "negative length": ((b"Content-Length: -1",), b"", b"1.1"),
    "length with a sign": ((b"Content-Length: +%d" % len(BODY),), BODY, b"1.1"),
    "length in hex": ((b"Content-Length: 0x10",), BODY, b"1.1"),
    "length with an underscore": ((b"Content-Length: 3_5",), BODY, b"1.1"),
    "length with a point": ((b"Content-Length: 35.0",), BODY, b"1.1"),
    "empty length": ((b"Content-Length:",), BODY, b"1.1"),
    "length of 21 digits": ((b"Content-Length: " + b"9" * 21,), BODY, b"1.1"),
    "folded length": ((b"Content-Length: 3\r\n 5",), BODY, b"1.1"),
    "another coding": ((b"Transfer-Encoding: gzip",), BODY, b"1.1"),
    "two codings": ((b"Transfer-Encoding: gzip, chunked",), CHUNKED, b"1.1"),
    "chunked, then another": ((b"Transfer-Encoding: chunked, identity",), CHUNKED, b"1.1"),
    "chunked twice": ((CODING, CODING), CHUNKED, b"1.1"),
    "no coding's name": ((b"Transfer-Encoding: xchunked",), CHUNKED, b"1.1"),
    "vertical tab before the coding": ((b"Transfer-Encoding: \x0bchunked",), CHUNKED, b"1.1"),
    "space before the colon": ((b"Content-Length : %d" % len(BODY),), BODY, b"1.1"),
    "tab before the colon": ((b"Transfer-Encoding\t: chunked",), CHUNKED, b"1.1"),
    "space before the first name": ((b" " + LENGTH,), BODY, b"1.1"),
    "CR in a value": ((b"X: a\rContent-Length: 4", LENGTH), BODY, b"1.1"),
    "folded value": ((b"X: a\r\n b", LENGTH), BODY, b"1.1"),
    "folded coding": ((b"Transfer-Encoding:\r\n chunked",), CHUNKED, b"1.1"),
    "bare LF in the head": ((b"X: a\n" + LENGTH,), BODY, b"1.1"),
    "bare LF before a coding": ((LENGTH + b"\n" + CODING,), CHUNKED, b"1.1"),
    "NUL in a value": ((b"X: a\0b", LENGTH), BODY, b"1.1"),
    "line without a colon": ((b"Content-Length", LENGTH), BODY, b"1.1"),
    "second host": ((b"Host: example.com", LENGTH), BODY, b"1.1"),
    "chunk size of 21 digits": ((CODING,), b"1" * 21 + b"\r\n" + BODY, b"1.1"),
    "chunk size with a sign": ((CODING,), b"+" + CHUNKED, b"1.1"),
    "negative chunk size": ((CODING,), b"-" + CHUNKED, b"1.1"),
    "chunk size in C's hex": ((CODING,), b"0x" + CHUNKED, b"1.1"),
    "empty chunk size": ((CODING,), b"\r\n" + CHUNKED, b"1.1"),
    "LF behind the chunk size": ((CODING,), CHUNKED.replace(b"\r\n", b"\n"), b"1.1"),
    "chunk longer than its size": ((CODING,), b"3\r\n" + BODY + b"\r\n0\r\n\r\n", b"1.1"),
}

# Requests that RFC 9112 allows to take, each with one meaning: the second request is answered as well.
TAKEN: dict[str, tuple[bytes, bytes]] = {
    "equal lengths": (b"\r\n".join((LENGTH, LENGTH)), BODY),
    "coding in capitals": (b"TRANSFER-ENCODING: Chunked", CHUNKED),
    "line ends in the body": (b"Content-Length: %d" % (len(BODY) + 4), b"\n \n " + BODY),
    "chunk extension": (CODING, CHUNKED.replace(b"\r\n", b";x=1\r\n", 1)),
    "trailer that looks like a length": (CODING, CHUNKED[:-2] + b"Content-Length: 4\r\n\r\n"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as running:
        yield running


def answers(server: Live, request: bytes) -> tuple[list[int], str]:
    """The statuses of all answers to `request` until the server closes, and their text."""
    port = int(server.url.rpartition(":")[2])
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        client.sendall(request)
        try:
            while piece := client.recv(65536):
                received += piece
        except ConnectionResetError:
            pass  # what was not read when the server closed
    text = received.decode()
    return [int(status) for status in re.findall(r"HTTP/1\.1 (\d{3}) ", text)], text


@pytest.mark.parametrize("name", REFUSED)
def test_an_ambiguous_length_gets_one_400_and_the_end(server: Live, name: str) -> None:
    """The connection closes; what follows in it is never read as a request."""
    lines, body, version = REFUSED[name]
    head = b"POST /v1/completions HTTP/%s\r\nHost: localhost\r\n%s\r\n\r\n"

    statuses, text = answers(server, head % (version, b"\r\n".join(lines)) + body + SMUGGLED)

    assert statuses == [400], text
    assert "connection: close" in text.lower() and "smuggled" not in text


@pytest.mark.parametrize("name", TAKEN)
def test_an_unusual_length_with_one_meaning_is_served(server: Live, name: str) -> None:
    """Both requests are answered, each once."""
    lines, body = TAKEN[name]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    last = SMUGGLED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    statuses, text = answers(server, head + lines + b"\r\n\r\n" + body + last)

    assert statuses == [200, 404], text


class Impatient(TimeoutProtocol):
    header_s = 3.0


def test_a_chunk_beyond_the_limit_of_a_body_gets_413() -> None:
    """Its size, of 20 digits, reserves nothing; a client that goes on sending is dropped."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    with live(protocol=Impatient) as server:
        statuses, text = answers(server, head + b"f" * 20 + b"\r\n" + b" " * (33 << 20))

    assert statuses == [413], text


def test_a_bad_chunk_behind_an_early_answer_ends_the_connection(
    server: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that did not wait for the body stands; there is no second one and no traceback."""
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    port = int(server.url.rpartition(":")[2])

    with socket.create_connection(("127.0.0.1", port), 60) as client:
        client.sendall(head + b"4\r\n")
        answer = bytearray()
        while not answer.endswith(b"}}"):
            answer += client.recv(65536)
        client.sendall(b"{}  what is no chunk size\r\n" + SMUGGLED)
        rest = client.recv(65536)

    assert answer.startswith(b"HTTP/1.1 404") and rest == b""
    assert not [record for record in caplog.records if record.exc_info]
