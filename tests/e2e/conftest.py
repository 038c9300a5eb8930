"""Real server processes on real sockets, one per set of options."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

START_S = 240  # the first start compiles kernels, on a machine that may be busy


@dataclass
class Running:
    """A server process that is ready."""

    url: str
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def openai(self, key: str = "none") -> Any:  # bodies are dictionaries, not the client's types
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def anthropic(self, key: str = "none") -> Any:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


Start = Callable[..., Running]


def start_server(log_file: Path, *options: str) -> Running:
    """`ramify serve` with these options, on a free port.

    Raises:
        AssertionError: it ended, or was not ready in time.
    """
    command = [sys.executable, "-m", "ramify", "serve", "ramify-tiny", "--port", "0", *options]
    with log_file.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | {"NO_COLOR": "1"}
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log_file.read_text()
        found = re.search(r"listening on (http://\S+)", log_file.read_text())
        if found and is_ready(found[1]):
            return Running(found[1], process, log_file)
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"not ready after {START_S} s: {log_file.read_text()}")


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Servers by their options; each is started once."""
    running: dict[tuple[str, ...], Running] = {}

    def get(*options: str) -> Running:
        if options not in running:
            log = tmp_path_factory.mktemp("server") / "log"
            running[options] = start_server(log, *options)
        return running[options]

    yield get
    for server in running.values():
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def server(start: Start) -> Running:
    """The one with default options."""
    return start()
