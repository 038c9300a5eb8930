"""A server process on a free loopback port: its start, its metrics, its processor time, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from engines.contract import AbsentError

from servers.contract import Launch, ServerEntry
from servers.own_figures import parse_metrics

END_S = 20.0
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RunningServer:
    """A server that answers; `close` ends it.

    Raises:
        AbsentError: it ended, or did not answer within `limit_s`.
    """

    def __init__(
        self, entry: ServerEntry, launch: Launch, port: int, python_path: str, limit_s: float
    ) -> None:
        self.entry, self.port = entry, port
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        start = time.monotonic()
        self._process = subprocess.Popen(
            list(launch.command),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"PYTHONPATH": python_path} | dict(launch.environment),
            start_new_session=True,  # so that processor time and end are those of all its processes
        )
        while not self._is_healthy():
            status, line = self._process.poll(), self.last_line()
            if status is not None:
                self.close()
                raise AbsentError(
                    f"it ended with status {status} (-4: compiled for another processor): {line}"
                )
            if time.monotonic() > start + limit_s:
                self.close()
                raise AbsentError(f"it did not answer within {limit_s:.0f} s: {line}")
            time.sleep(0.1)
        self.start_s = time.monotonic() - start

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return parse_metrics(answer.read().decode())

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        return session_cpu_s(self._process.pid)

    def end_reason(self) -> str:
        """How its process has ended, after a semicolon; "" while it runs."""
        status = self._process.poll()
        return "" if status is None else f"; it ended with status {status}: {self.last_line()}"

    def last_line(self) -> str:
        """The last line of its log."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2_000))
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no log")

    def close(self) -> None:
        """Ask the server to end; after `END_S` kill all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def session_cpu_s(session: int) -> float:
    """Processor time of the live processes of a session, by the number of its first process."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text("ascii", errors="replace")
        except OSError:  # it has ended since
            continue
        # After the name, in brackets: state, parent, group, session; user and system time are 11th and 12th.
        fields = text.rpartition(")")[2].split()
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_S
