"""`LocalProcesses`: replicas as child processes of the server, on its machine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ramify.cluster.cpu_shares import CpuShare
from ramify.cluster.credentials import Credentials, TlsFiles
from ramify.cluster.local_child import ChildSpec, Report
from ramify.cluster.tier_shares import tier_share
from ramify.cluster.wire import address_of
from ramify.errors import RamifyError
from ramify.module_command import module_command

logger = logging.getLogger(__name__)

COMMAND = module_command("ramify.cluster.local_child")
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0  # between an end and the next start
STEADY_S = 60.0  # a life of this length makes the next backoff the shortest
STOP_S = 15.0  # after the signal, to end a replica without requests, whose tiers take 10 s at most


class ReplicaStartError(RamifyError):
    """A local replica ended before it was ready; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """What all local replicas share."""

    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of `AsyncLLM`
    shares: Sequence[CpuShare]  # one for each replica
    warm: Path | None = None
    public: Path | None = None
    log_json: bool = False
    log_file: Path | None = None  # None: stderr
    host: str = "127.0.0.1"
    tls: TlsFiles | None = None
    drain_s: float = 30.0


class LocalProcesses:
    """Starts replicas, starts those again that end, and ends all; for one event loop.

    One of them compiles kernels before the others go on, so that an empty kernel cache is filled once.
    If it has compiled any, another process takes its place: a compiler's memory is never given back.

    Args:
        command: of a child; see `local_child`.
        min_backoff_s: from the end of a child to its next start; twice as long at each further end.
        stop_s: for a child to end by itself.
    """

    def __init__(
        self,
        options: LocalOptions,
        *,
        command: Sequence[str] = COMMAND,
        min_backoff_s: float = MIN_BACKOFF_S,
        stop_s: float = STOP_S,
    ) -> None:
        secret = secrets.token_hex(32)
        self.credentials = Credentials(secret=secret)
        self._children = [
            Child(
                str(number),
                share,
                options,
                secret,
                memory_parts=len(options.shares),
                command=command,
            )
            for number, share in enumerate(options.shares)
        ]
        self._min_backoff_s, self._stop_s = min_backoff_s, stop_s
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> dict[str, str]:
        """Start all; returns the address of each by name, once they are ready.

        Raises:
            ReplicaStartError: one has ended before it was ready; then all are ended.
        """
        has_kernels = asyncio.Event()
        first, *others = self._children
        starts = [
            asyncio.create_task(start_child(first, then=has_kernels.set)),
            *(asyncio.create_task(start_child(child, has_kernels.wait)) for child in others),
        ]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop()
            raise
        return {child.name: child.address for child in self._children}

    def keep(self, moved: Callable[[str, str], None]) -> None:
        """Start replicas again that end, from now on.

        Args:
            moved: gets the name and the address of each that was started again.
        """
        self._keepers = [
            asyncio.create_task(child.keep(moved, self._min_backoff_s)) for child in self._children
        ]

    def use_model(self, name: str, model: str) -> None:
        """Let a replica load another checkpoint whenever it is started again."""
        for child in self._children:
            if child.name == name:
                child.use_model(model)

    def pids(self) -> dict[str, int]:
        """The process of each replica that runs."""
        return {child.name: child.pid for child in self._children if child.pid is not None}

    async def stop(self) -> None:
        """End all replicas; none is left when this returns."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(child.stop(self._stop_s) for child in self._children))


async def _at_once() -> None:
    """Wait for nothing."""


async def start_child(
    child: Child,
    may_compile: Callable[[], Awaitable[object]] = _at_once,
    then: Callable[[], object] = bool,
) -> None:
    """Start a child, call `then`, and start the child once more if it has compiled kernels.

    Raises:
        ReplicaStartError: it has ended before it was ready; says why.
    """
    report = await child.start(may_compile)
    then()
    if report.has_compiled:
        await child.stop()
        await child.start()


class Child:
    """One local replica, through one process after the other.

    Args:
        name: in log lines.
        memory_parts: engines that share the memory of this machine.
    """

    def __init__(
        self,
        name: str,
        share: CpuShare,
        options: LocalOptions,
        secret: str,
        *,
        memory_parts: int,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.name, self.address = name, ""
        self._host, self._command = options.host, command
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(share.threads)}
        self._spec = ChildSpec(
            name=self.name,
            model=options.model,
            engine=tier_share(options.engine, name, len(options.shares)),
            secret=secret,
            parent=os.getpid(),
            cpus=share.cpus,
            warm=None if options.warm is None else str(options.warm.resolve()),
            public=None if options.public is None else str(options.public.resolve()),
            memory_parts=memory_parts,
            log_json=options.log_json,
            log_file=None if options.log_file is None else str(options.log_file.resolve()),
            host=options.host,
            tls=options.tls,
            drain_s=options.drain_s,
        )
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Of its process; None while there is none."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def start(self, may_compile: Callable[[], Awaitable[object]] = _at_once) -> Report:
        """Start a process; returns when it is ready.

        Args:
            may_compile: awaited once the model is loaded, before kernels are compiled or read.

        Raises:
            ReplicaStartError: it has ended before; says why.
        """
        # A session of its own: Ctrl-C in a terminal is for the server, which drains first.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, start_new_session=True, env=self._environment
        )
        try:
            return await self._until_ready(process, may_compile)
        except Exception:
            # One that is not ready is of no use, and would keep the next one waiting.
            await self.stop()
            raise

    async def _until_ready(
        self, process: Process, may_compile: Callable[[], Awaitable[object]]
    ) -> Report:
        """Read what a process reports until it is ready.

        Raises:
            ReplicaStartError: it ends, or reports what nobody can read.
        """
        assert process.stdin is not None and process.stdout is not None
        with suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(self._spec) + b"\n")
            while line := await self._line(process.stdout):
                try:
                    report = msgspec.json.decode(line, type=Report)
                except msgspec.DecodeError:  # of a package that prints while it is imported
                    logger.warning("replica %s writes to stdout: %r", self.name, line[:200])
                    continue
                if report.state == "ready":
                    self.address = address_of(self._host, report.port)
                    self._keep_memory(report.kv_cache_tokens)
                    return report
                if report.state == "failed":
                    raise ReplicaStartError(f"replica {self.name} cannot start: {report.error}")
                await may_compile()
                process.stdin.write(b"\n")
        try:
            code = await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            raise ReplicaStartError(
                f"replica {self.name} has closed its stdout, so nobody can know when it is ready; its "
                "last lines on stderr may say why"
            ) from None
        raise ReplicaStartError(
            f"replica {self.name} ended before it was ready: {ended(code)}; its last lines on stderr "
            "may say why"
        )

    async def _line(self, stdout: asyncio.StreamReader) -> bytes:
        try:
            return await stdout.readline()
        except ValueError as error:
            raise ReplicaStartError(
                f"replica {self.name} writes a line to stdout that is no report: {error}"
            ) from error

    def _keep_memory(self, kv_cache_tokens: int) -> None:
        """Let later processes have as much K/V: the others hold theirs, what is free is its own."""
        if kv_cache_tokens:
            engine = {**self._spec.engine, "kv_cache_tokens": kv_cache_tokens}
            self._spec = msgspec.structs.replace(self._spec, engine=engine, memory_parts=1)

    def use_model(self, model: str) -> None:
        """Load another checkpoint at the next start."""
        # A revision belongs to the hub model of the first start.
        engine = {name: value for name, value in self._spec.engine.items() if name != "revision"}
        self._spec = msgspec.structs.replace(self._spec, model=model, engine=engine)

    async def keep(self, moved: Callable[[str, str], None], min_backoff_s: float) -> None:
        """Start it again whenever it ends, until cancelled; later if it does not live long."""
        backoff_s, begin_s = min_backoff_s, time.monotonic()
        while True:
            assert self._process is not None
            code = await self._process.wait()
            if time.monotonic() - begin_s > STEADY_S:
                backoff_s = min_backoff_s
            logger.warning(
                "replica %s has ended (%s); starting it again in %.1f s",
                self.name,
                ended(code),
                backoff_s,
            )
            await asyncio.sleep(backoff_s)
            backoff_s, begin_s = min(MAX_BACKOFF_S, 2 * backoff_s), time.monotonic()
            try:
                await self.start()
                logger.info("replica %s is ready again at %s", self.name, self.address)
                moved(self.name, self.address)
            except (ReplicaStartError, OSError) as error:
                logger.error("replica %s: %s", self.name, error)
            except Exception:
                # Without further attempts it would never serve again.
                logger.exception("replica %s does not serve, by a bug", self.name)

    async def stop(self, stop_s: float = STOP_S) -> None:
        """End its process, by force if that takes longer."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), stop_s)
        except TimeoutError:
            logger.warning("replica %s does not end; killed", self.name)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def ended(code: int) -> str:
    """An exit code in words."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
