"""`ramify` in a process forked from one that has imported torch: a process of its own, no imports.

A command that must see other environment variables at import, or whose imports are what is tested,
is started with `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

_PRELOADED = (
    "ramify.cli",
    "ramify.engine.async_llm",
    "ramify.engine.execution.assembly",
    "ramify.models.loader",
    "ramify.server.run",
    "ramify.testing",
    "transformers",
)
LIMIT_S = 120.0


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


class ForkedCommand:
    """`ramify ARGS` that runs; the part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        args: list[str],
        stdin: Path | None,
        stdout: Path,
        stderr: Path,
        environment: Mapping[str, str],
    ) -> None:
        files = (stdin, stdout, stderr)
        self._process: ForkServerProcess = _context().Process(
            target=_run, args=(args, files, dict(environment), str(Path.cwd()))
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self._process.is_alive() and self._process.pid:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End the process."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        Raises:
            TimeoutError: it still runs after so many seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"still running after {timeout} s")
        return self._process.exitcode


def run_command(
    *args: str | Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `ramify ARGS` to its end with variables added to the environment, and return what it printed."""
    command = [*map(str, args)]
    with tempfile.TemporaryDirectory() as folder:
        source, out, err = (Path(folder) / name for name in ("in", "out", "err"))
        source.write_text(stdin, encoding="utf-8")
        process = ForkedCommand(command, source, out, err, environment)
        try:
            code = process.wait(LIMIT_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(
            command, code, out.read_text("utf-8"), err.read_text("utf-8")
        )


def _run(
    args: list[str], files: tuple[Path | None, Path, Path], environment: dict[str, str], folder: str
) -> None:
    """In the forked process: as `python -m ramify ARGS`."""
    for number, path in enumerate(files):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        descriptor = os.open(path or os.devnull, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # multiprocessing has replaced it.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["ramify", *args]
    from ramify.cli import main
    from tests.device_runner import install

    install()
    main()
