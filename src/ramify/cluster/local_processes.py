"""`LocalProcesses`: replicas as child processes of this one; each is started again when it dies."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec

from ramify.cluster.run_replica import ReplicaOptions
from ramify.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # before a dead child is started again
STABLE_S = 60.0  # a child that has lived this long begins with the shortest pause again
START_S = 600.0  # for a child to be ready: an empty kernel cache takes minutes
KILL_S = 5.0  # after its drain


class LocalProcesses:
    """Children by name. For one event loop.

    A child ends with this process, however that ends: its stdin is a pipe, and on Linux the kernel
    kills it.

    Args:
        names: of the children.
        options: of each.
        num_threads: for the arithmetic of each; part of what makes two answers equal.
        on_ready: gets name and port of a child that listens, each time that it is started.
    """

    def __init__(
        self,
        names: list[str],
        options: ReplicaOptions,
        *,
        num_threads: int,
        on_ready: Callable[[str, int], None],
    ) -> None:
        self.names = names
        self._options = replace(options, memory_parts=len(names))
        self._num_threads, self._on_ready = num_threads, on_ready
        self.processes: dict[str, Process] = {}
        self.num_restarts = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False

    async def start(self) -> None:
        """Start all children; returns when all are ready.

        Raises:
            ConfigError: one has ended before it was ready; the others are ended.
        """
        ready = [asyncio.get_running_loop().create_future() for _ in self.names]
        self._tasks = [
            asyncio.ensure_future(self._keep(name, future))
            for name, future in zip(self.names, ready, strict=True)
        ]
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*ready)
        except (ConfigError, TimeoutError) as error:
            await self.stop(0.0)
            text = str(error) or f"a replica was not ready within {START_S:.0f} s"
            raise ConfigError(text) from error

    async def _keep(self, name: str, ready: asyncio.Future[None]) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            begin_s = time.monotonic()
            process = await self._spawn()
            self.processes[name] = process
            port = await self._read_port(process)
            if port is not None:
                self._on_ready(name, port)
                if not ready.done():
                    ready.set_result(None)
            code = await process.wait()
            if self._is_ending:
                return
            if not ready.done():
                text = f"replica {name} has ended with code {code} before it was ready; see above"
                ready.set_exception(ConfigError(text))
                return
            if time.monotonic() - begin_s > STABLE_S:
                pause_s = MIN_PAUSE_S
            self.num_restarts += 1
            logger.warning(
                "replica %s has ended with code %d; it is started again in %.1f s",
                name,
                code,
                pause_s,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _spawn(self) -> Process:
        threads = str(self._num_threads)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ramify.cluster.run_replica",
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(self._options) + b"\n")
            await process.stdin.drain()
        return process

    async def _read_port(self, process: Process) -> int | None:
        """The port that a child listens at; None: it has ended."""
        assert process.stdout is not None
        line = await process.stdout.readline()
        return int(json.loads(line)["port"]) if line else None

    async def stop(self, drain_s: float) -> None:
        """End all children: a signal to drain, and after `drain_s` the end."""
        self._is_ending = True
        for process in self.processes.values():
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()
        for process in self.processes.values():
            try:
                async with asyncio.timeout(drain_s + KILL_S):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self.processes.values():
            if process.stdin is not None:
                process.stdin.close()
