"""Fixtures: `ramify serve` processes, one for each set of options."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from ramify.models.checkpoint.find import find_checkpoint
from tests.cpu.talker import TALKER_TEMPLATE
from tests.forked_command import ForkedCommand

START_S = 240  # the first start compiles kernels, perhaps on a busy machine


@dataclass
class Running:
    """A server process that is ready, and its clients."""

    url: str
    process: ForkedCommand
    log_file: Path
    clients: dict[tuple[type, str], Any] = field(default_factory=dict)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def openai(self, key: str = "none") -> Any:  # bodies are dictionaries, not the client's types
        return self._client(openai.OpenAI, key, f"{self.url}/v1")

    def anthropic(self, key: str = "none") -> Any:
        return self._client(anthropic.Anthropic, key, self.url)

    def _client(self, kind: type, key: str, url: str) -> Any:
        """A client for each key; closed by `start`, as collecting an open client is a warning."""
        if (kind, key) not in self.clients:
            self.clients[kind, key] = kind(base_url=url, api_key=key, max_retries=0)
        return self.clients[kind, key]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


Start = Callable[..., Running]


def start_server(log_file: Path, *options: str, model: str = "ramify-tiny") -> Running:
    """Start `ramify serve` with these options on a free port; returns when it is ready.

    Raises:
        AssertionError: the process has ended, or is not ready within `START_S`.
    """
    command = ["serve", model, "--port", "0", *options]
    process = ForkedCommand(command, None, log_file, log_file, {"NO_COLOR": "1"})
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log_file.read_text()
        log = log_file.read_text() if log_file.exists() else ""
        match = re.search(r"listening on (http://\S+)", log)
        if match and is_ready(match[1]):
            return Running(match[1], process, log_file)
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"not ready after {START_S} s: {log_file.read_text()}")


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Returns a server for given options; each is started once a session."""
    running: dict[tuple[str, ...], Running] = {}

    def get(*options: str, model: str = "ramify-tiny") -> Running:
        key = (model, *options)
        if key not in running:
            log = tmp_path_factory.mktemp("server") / "log"
            running[key] = start_server(log, *options, model=model)
        return running[key]

    yield get
    for server in running.values():
        for client in server.clients.values():
            client.close()
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the built-in model with a chat template that renders tools and drops earlier thinking."""
    path = tmp_path_factory.mktemp("model") / "talker"
    shutil.copytree(find_checkpoint("ramify-tiny"), path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TALKER_TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


@pytest.fixture(scope="session")
def server(start: Start) -> Running:
    """The server with default options."""
    return start()
