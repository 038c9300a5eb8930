"""Server processes on free ports of loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_S = 240


@contextlib.contextmanager
def running_server(module: Sequence[str], scratch: Path, *arguments: str) -> Iterator[str]:
    """Start a server and stop it at the end; yields its URL.

    Args:
        module: the module, and its arguments before the port.
        scratch: a directory for its log.
        arguments: its arguments behind the port.
    """
    port = free_port()
    command = [sys.executable, "-m", *module, str(port), *arguments]
    log = scratch / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment_of_server(), stdout=out, stderr=out
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def environment_of_server() -> dict[str, str]:
    """Variables of a process that imports this checkout."""
    return os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}:{ROOT}/scripts"}


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for /readyz. Raises RuntimeError with the log's end if the server does not come up."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=5):
            return
        time.sleep(0.3)
    raise RuntimeError(f"a server did not start:\n{log.read_text()[-2000:]}")
