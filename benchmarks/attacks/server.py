"""A `ramify serve` process with two tenants and an operator, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.server.tenants import hash_key

START_S = 300.0
TIMEOUT_S = 60.0  # of a request
ATTACKER, OTHER, OPERATOR = "key-of-the-attacker", "key-of-another-tenant", "key-of-the-operator"
POOL_TOKENS = 131_072
NUM_DESCRIPTORS = 1024  # that the server may open


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the key with which it is called; "" sends none."""

    port: int
    key: str = ""

    def call(
        self,
        method: str,
        path: str,
        body: object = b"",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a request; returns status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, encoded(body), self._headers() | dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: object) -> int:
        """POST a body; returns the status."""
        return self.call("POST", path, body)[0]

    def hang_up(self, path: str, body: object, *, read_bytes: int = 0, drop: int = 0) -> None:
        """POST a body and close the connection after `read_bytes` of the answer.

        Args:
            drop: bytes at the body's end that are not sent.
        """
        raw = encoded(body)
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(raw)}"]
        lines += [f"{name}: {value}" for name, value in self._headers().items()]
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + raw[: len(raw) - drop])
            while read_bytes > 0 and (piece := connection.recv(4096)):
                read_bytes -= len(piece)

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json"} | key


def encoded(body: object) -> bytes:
    """A body as bytes; JSON, unless it is bytes."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


class AttackedServer:
    """A server process on a free port.

    Args:
        folder: for its log and its keys.
        with_keys: False: without keys, as one runs it on one's own machine.
    """

    def __init__(self, folder: Path, *, with_keys: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        command = ["sh", "-c", f'ulimit -n {NUM_DESCRIPTORS}; exec "$@"', "sh"]
        command += [sys.executable, "-m", "ramify", "serve", "ramify-tiny", "--port", "0"]
        command += ["--kv-cache-tokens", str(POOL_TOKENS), "--drain-seconds", "1"]
        if with_keys:
            keys = [
                {"hash": hash_key(ATTACKER), "tenant": "attacker"},
                {"hash": hash_key(OTHER), "tenant": "other"},
                {"hash": hash_key(OPERATOR), "tenant": "operator", "admin": True},
            ]
            (folder / "keys.json").write_text(json.dumps({"keys": keys}))
            command += ["--api-key-file", str(folder / "keys.json")]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + START_S
        while not (match := re.search(r"listening on http://\S+:(\d+)", self._log.read_text())):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                sys.exit(f"the server did not start:\n{self._log.read_text()}")
            time.sleep(0.1)
        self.port = int(match[1])

    def target(self, key: str = "") -> Target:
        """This server, for the holder of a key."""
        return Target(self.port, key)

    def metrics(self) -> dict[str, float]:
        """Prometheus' metrics by name and labels."""
        _, _, body = self.target(OPERATOR).call("GET", "/metrics")
        lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def wait_until_idle(self, limit_s: float = 30.0) -> bool:
        """Wait until no request runs or waits; False if some still do at the limit."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            metrics = self.metrics()
            if not metrics["ramify_requests_running"] + metrics["ramify_requests_waiting"]:
                return True
            time.sleep(0.2)
        return False

    def tracebacks(self) -> int:
        """Tracebacks in the log."""
        return self._log.read_text().count("Traceback (most recent call last)")

    def stop(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat request for one token, with further fields."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1} | fields
