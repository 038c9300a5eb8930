"""`ramify replica`, and the replicas that `ramify serve --replicas N` starts: one engine behind a port."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ramify.cluster.credentials import Credentials
from ramify.cluster.replica import Replica
from ramify.engine.async_llm import AsyncLLM
from ramify.errors import RamifyError
from ramify.server.run import compile_kernels, frozen_heap, log_to_stderr

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
MAX_OPTIONS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The options of a replica."""

    model: str = "ramify-tiny"
    engine: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of `AsyncLLM`
    host: str = "127.0.0.1"
    port: int = 0
    secret: str | None = None
    drain_s: float = 30.0
    log_json: bool = False
    memory_parts: int = 1


def run_replica(
    options: ReplicaOptions, credentials: Credentials, *, parent: int | None = None
) -> int:
    """Serve an engine until a signal, then drain; returns the exit code.

    Writes a line of JSON with the port to stdout once it is ready.

    Args:
        parent: descriptor that is closed when the program that started this one has ended; None:
            there is none.

    Raises:
        ConfigError, ModelError: wrong options, or a model that cannot be loaded.
    """
    log_to_stderr(options.log_json)
    credentials.check_address(options.host)
    llm = AsyncLLM(options.model, memory_parts=options.memory_parts, **options.engine)
    return asyncio.run(_serve(options, credentials, llm, parent))


async def _serve(
    options: ReplicaOptions, credentials: Credentials, llm: AsyncLLM, parent: int | None
) -> int:
    loop, ends = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ends.set)
    if parent is not None:
        loop.add_reader(parent, ends.set)
    replica = Replica(llm, credentials)
    try:
        await compile_kernels(llm)
        port = await replica.start(options.host, options.port)
        sys.stdout.write(json.dumps({"port": port}) + "\n")
        sys.stdout.flush()
        with frozen_heap():
            await ends.wait()
        logger.info("draining: live requests have %.0f s to end", options.drain_s)
        await replica.drain(options.drain_s)
    finally:
        await replica.close()
    return 0


def main() -> int:
    """A child of `LocalProcesses`: its options are the first line of stdin, which ends with its parent."""
    if sys.platform == "linux":  # stdin is read between two steps; this ends a busy child, too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    line = sys.stdin.buffer.readline(MAX_OPTIONS_BYTES)
    if not line:
        return 1
    options = msgspec.json.decode(line, type=ReplicaOptions)
    try:
        return run_replica(options, Credentials(secret=options.secret), parent=sys.stdin.fileno())
    except RamifyError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    os._exit(main())
