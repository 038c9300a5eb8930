"""The process of one local replica, as `local_processes` starts it: `python -m ramify.cluster.local_child`.

Its standard input brings a `ChildSpec`, then an empty line when it may compile kernels; its end means
that the parent has gone, and ends this process at once. Its standard output takes `Report`s.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ramify.cluster.credentials import Credentials, TlsFiles
from ramify.cluster.run_replica import ReplicaOptions, run_replica
from ramify.errors import RamifyError

COMPILER = "ramify.kernels.cpu.object_code"  # the logger that tells of compiling
PARENT_GONE = 3  # exit codes
NOT_STARTED = 2
PR_SET_PDEATHSIG = 1


class ChildSpec(Struct, frozen=True):
    """What a local replica is."""

    name: str
    model: str
    engine: dict[str, Any]
    secret: str
    parent: int  # its process id
    tls: TlsFiles | None = None
    cpus: tuple[int, ...] = ()
    warm: str | None = None
    public: str | None = None
    memory_parts: int = 1
    drain_s: float = 30.0
    log_json: bool = False
    log_file: str | None = None
    host: str = "127.0.0.1"

    def options(self) -> ReplicaOptions:
        """The same for `run_replica`.

        Raises:
            ConfigError: see `Credentials.from_files`.
        """
        secret, tls = self.secret, self.tls
        return ReplicaOptions(
            model=self.model,
            engine=self.engine,
            host=self.host,
            credentials=Credentials(secret=secret) if tls is None else tls.credentials(secret),
            warm=None if self.warm is None else Path(self.warm),
            public=None if self.public is None else Path(self.public),
            name=self.name,
            log_json=self.log_json,
            log_file=None if self.log_file is None else Path(self.log_file),
            drain_s=self.drain_s,
            memory_parts=self.memory_parts,
        )


class Report(Struct, frozen=True):
    """How far the start of a local replica is."""

    state: Literal["loaded", "ready", "failed"]
    port: int = 0  # once it is ready
    kv_cache_tokens: int = 0  # likewise
    has_compiled: bool = False  # kernels, which takes memory that is never given back
    error: str = ""


class CompilerWatch(logging.Filter):
    """Notes whether kernels were compiled in this process."""

    has_compiled = False

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`; passes every record."""
        self.has_compiled = self.has_compiled or record.getMessage().startswith("compiling ")
        return True


class PipeStages:
    """Writes reports to a pipe, and waits for the parent before kernels are compiled."""

    def __init__(self, reports: FileIO) -> None:
        self._reports, self._may_compile = reports, threading.Event()
        self._compiler = CompilerWatch()
        logging.getLogger(COMPILER).addFilter(self._compiler)

    def send(self, report: Report) -> None:
        """Write a report."""
        self._reports.write(msgspec.json.encode(report) + b"\n")

    async def loaded(self) -> None:
        """See `Stages`."""
        self.send(Report("loaded"))
        await asyncio.to_thread(self._may_compile.wait)

    def ready(self, port: int, kv_cache_tokens: int) -> None:
        """See `Stages`."""
        self.send(Report("ready", port, kv_cache_tokens, self._compiler.has_compiled))

    def watch(self, orders: FileIO) -> None:
        """Read what the parent sends until it has gone, then end this process."""
        while orders.readline():
            self._may_compile.set()
        os._exit(PARENT_GONE)


def end_with(parent: int) -> None:
    """Let the system end this process when its parent dies, even while this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(PARENT_GONE)


def main() -> int:
    """Be a replica; returns the exit code."""
    # Unbuffered: a thread that waits in a buffered file would hold its lock when the process ends.
    orders = os.fdopen(0, "rb", buffering=0, closefd=False)
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints must not write among the reports
    line = orders.readline()
    if not line:
        return PARENT_GONE
    spec = msgspec.json.decode(line, type=ChildSpec)
    end_with(spec.parent)
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)
    stages = PipeStages(reports)
    threading.Thread(target=stages.watch, args=(orders,), name="parent", daemon=True).start()
    try:
        return run_replica(spec.options(), stages)
    except (RamifyError, OSError) as error:
        stages.send(Report("failed", error=str(error)))
        return NOT_STARTED


if __name__ == "__main__":
    sys.exit(main())
