"""A child process that answers each JSON line on its standard input with one on its standard output."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ProcessGoneError(Exception):
    """A process ended instead of answering; the message is the last line it wrote."""


class TooSlowError(Exception):
    """A process did not answer in time and was ended."""


class JsonProcess:
    """A process started by `command`, alone in a session with what it starts."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._buffer = b""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=folder,
            start_new_session=True,  # so that all of it can be ended
            env=dict(environment),
        )

    def ask(self, limit_s: float, command: Mapping[str, Any]) -> dict[str, Any]:
        """Send a command and return its answer.

        Raises:
            TooSlowError: no answer within the limit; the process is ended.
            ProcessGoneError: the process ended without an answer.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ProcessGoneError(self._last_line()) from None
        end = time.monotonic() + limit_s
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.kill()
                raise TooSlowError(f"over {limit_s:.0f} s")
            piece = os.read(pipe, 1 << 16)
            if not piece:
                raise ProcessGoneError(self._last_line())
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Close the process's input, wait up to 20 s for its exit, then kill it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(20)
        self.kill()
        self._errors.close()

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _last_line(self) -> str:
        self.kill()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        return (lines or [f"ended with status {self._process.returncode}"])[-1][:300]
