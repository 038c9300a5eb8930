"""`EngineProcess`: an engine in a child of the process that a launcher has placed.

In a process of its own, since the launcher's has threads, signal handlers, an event loop of gRPC and
an `OMP_NUM_THREADS` of its own, and the bits of answers depend on the number of threads. It is the child
of `ramify serve --replicas N`: it ends with its parent, drains at SIGTERM, and ends itself when its
engine has failed or a step is stuck.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ramify.cluster.cpu_shares import CpuShare
from ramify.cluster.credentials import Credentials
from ramify.cluster.local_processes import COMMAND, Child, LocalOptions, start_child
from ramify.cluster.tier_claims import TierClaim, claim_directory
from ramify.cluster.tier_shares import has_own_directory, with_directory
from ramify.deploy.config import DeployConfig
from ramify.deploy.membership import Member, Work
from ramify.deploy.scaling import NUM_REQUESTS, WAIT_S

FRESH_S = 10.0  # after which what a server said of the work here is no longer true
STOP_S = 10.0  # beyond the drain


class EngineProcess:
    """Starts an engine, says where it is, and ends it.

    A cache directory is claimed for it below that of the options, until `stop` or the end of this process.

    Args:
        host: to listen at.
        memory_parts: engines that share the memory of this machine.
        command: of the child.

    Raises:
        ConfigError: the cache directory cannot be used.
    """

    def __init__(
        self,
        config: DeployConfig,
        host: str,
        *,
        memory_parts: int,
        command: tuple[str, ...] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.secret_file is None:
            secret = secrets.token_hex(32)
        else:
            secret = Credentials.from_files(Path(config.secret_file)).secret or ""
        self._name, self._secret, self._clock = secrets.token_hex(3), secret, clock
        self._stop_s = config.drain_s + STOP_S
        self._work, self._work_s = (0.0, 0), float("-inf")
        self._claim = _claim_for(config.engine)
        try:
            options = _options_of_child(config, host, self._claim, memory_parts)
            share = CpuShare(config.resources.num_threads)
            self._child = Child(
                self._name, share, options, secret, memory_parts=memory_parts, command=command
            )
        except BaseException:
            if self._claim is not None:
                self._claim.release()
            raise

    async def start(self) -> None:
        """Start; returns when it takes requests.

        Raises:
            ReplicaStartError: it has ended before; says why.
        """
        await start_child(self._child)

    @property
    def pid(self) -> int | None:
        """Of its process; None: there is none."""
        return self._child.pid

    def meet(self, work: Work) -> Member:
        """Take what a server knows of the work here; returns who this is."""
        if self._name in work:
            self._work, self._work_s = work[self._name], self._clock()
        return Member(self._name, self._child.address, self._secret)

    def stats(self) -> dict[str, float]:
        """What `WaitPolicy` adds up; nothing waits where no server has been heard of for long."""
        is_fresh = self._clock() - self._work_s < FRESH_S
        wait_s, num_requests = self._work if is_fresh else (0.0, 0)
        return {WAIT_S: float(wait_s), NUM_REQUESTS: float(num_requests)}

    async def stop(self) -> None:
        """Drain and end it; by force if that takes too long."""
        await self._child.stop(self._stop_s)
        if self._claim is not None:
            self._claim.release()


def _options_of_child(
    config: DeployConfig, host: str, claim: TierClaim | None, memory_parts: int
) -> LocalOptions:
    """The options of the child; its cache directory is that of the claim.

    Raises:
        ConfigError: `cache_disk` is no size.
    """
    engine = config.engine
    if claim is not None:
        # An update that starts an engine before it ends another has twice as many.
        num_engines = memory_parts * (2 if config.surge else 1)
        engine = with_directory(engine, claim.directory, num_engines)
    return LocalOptions(
        model=config.model,
        engine=engine,
        shares=(),
        warm=None if config.warm is None else Path(config.warm),
        public=None if config.public is None else Path(config.public),
        log_json=config.log_json,
        host=host,
        tls=config.tls,
        drain_s=config.drain_s,
    )


def _claim_for(engine: Mapping[str, Any]) -> TierClaim | None:
    """A directory for an engine with these options; None: it writes to none."""
    if not has_own_directory(engine):
        return None
    return claim_directory(Path(engine["cache_dir"]).expanduser())
