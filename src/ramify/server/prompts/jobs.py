"""Prompt jobs: large bodies decoded, prompts rendered and tokenised, in threads shared fairly.

Threads, not processes: tokenizers and numpy release the interpreter lock, Jinja gives it up every
half a millisecond, and what holds it longer (one call of msgspec) is bounded by `http.json_limits`.
A process would have to send back what it decoded, and unpickling holds the lock for as long.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ramify.errors import RamifyError
from ramify.server.errors import ApiError

MAX_WAITING = 4096  # jobs in all
MAX_TENANT_WAITING = 1024
T = TypeVar("T")
J = TypeVar("J")


def num_threads() -> int:
    """Two, and more on machines with many cores: the others compute the model."""
    return max(2, min(4, (os.cpu_count() or 1) // 2))


@dataclass(slots=True)
class _Share(Generic[J]):
    """A tenant that has jobs."""

    used_s: float  # time of its ended jobs, counted from what the least served tenant had
    waiting: dict[J, None] = field(default_factory=dict)  # oldest first
    num_running: int = 0


class FairQueue(Generic[J]):
    """Jobs by tenant: the next job is of the tenant whose jobs took the least time.

    A tenant that comes back starts level with the least served one: idle time earns nothing.

    Args:
        max_running: jobs of one tenant at once, so that a thread is left for the others.
    """

    def __init__(self, *, max_running: int) -> None:
        self.max_running, self.num_waiting = max_running, 0
        self._shares: dict[str, _Share[J]] = {}  # the longest without a turn first
        self._floor_s = 0.0

    def num_waiting_of(self, tenant: str) -> int:
        """Waiting jobs of a tenant."""
        return len(self._shares[tenant].waiting) if tenant in self._shares else 0

    def put(self, tenant: str, job: J) -> None:
        """Append a job."""
        self._shares.setdefault(tenant, _Share(self._floor_s)).waiting[job] = None
        self.num_waiting += 1

    def remove(self, tenant: str, job: J) -> bool:
        """Remove a job that waits; returns whether it did."""
        share = self._shares.get(tenant)
        if share is None or job not in share.waiting:
            return False
        del share.waiting[job]
        self.num_waiting -= 1
        self._drop_if_idle(tenant)
        return True

    def take(self) -> tuple[str, J] | None:
        """Remove the next job to run, with its tenant; None if none may run. `finish` must follow."""
        ready = [
            (share.used_s, tenant)
            for tenant, share in self._shares.items()
            if share.waiting and share.num_running < self.max_running
        ]
        if not ready:
            return None
        _, tenant = min(ready, key=lambda entry: entry[0])
        share = self._shares.pop(tenant)
        self._shares[tenant] = share  # last among equals
        self._floor_s = max(self._floor_s, min(other.used_s for other in self._shares.values()))
        job = next(iter(share.waiting))
        del share.waiting[job]
        self.num_waiting -= 1
        share.num_running += 1
        return tenant, job

    def finish(self, tenant: str, took_s: float) -> None:
        """Count a job that was taken and has ended, even if its client has gone."""
        share = self._shares[tenant]
        share.num_running -= 1
        share.used_s += took_s
        self._drop_if_idle(tenant)

    def _drop_if_idle(self, tenant: str) -> None:
        share = self._shares[tenant]
        if not share.waiting and not share.num_running:
            self._floor_s = max(self._floor_s, min(s.used_s for s in self._shares.values()))
            del self._shares[tenant]


class AbandonedError(RamifyError):
    """The client of a running job has gone."""


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    is_abandoned: threading.Event = field(default_factory=threading.Event)


_is_abandoned: ContextVar[threading.Event | None] = ContextVar("is_abandoned", default=None)


def stop_if_abandoned() -> None:
    """End the job that runs in this thread if nobody waits for it; call it between its stages.

    Raises:
        AbandonedError: the client has gone.
    """
    event = _is_abandoned.get()
    if event is not None and event.is_set():
        raise AbandonedError


class PromptWorkers:
    """Threads that run prompt jobs, in the order of a `FairQueue`. Used by one event loop.

    Args:
        max_waiting, max_tenant_waiting: jobs in all, and of one tenant.
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        max_waiting: int = MAX_WAITING,
        max_tenant_waiting: int = MAX_TENANT_WAITING,
    ) -> None:
        self._num_idle = threads or num_threads()
        self._executor = ThreadPoolExecutor(self._num_idle, "ramify-prompts")
        self._queue: FairQueue[_Job] = FairQueue(max_running=max(1, self._num_idle - 1))
        self._max_waiting, self._max_tenant_waiting = max_waiting, max_tenant_waiting

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Return `work()`, run in a thread when it is the tenant's turn.

        If the caller is cancelled, a waiting job is dropped, and a running one ends at its next
        `stop_if_abandoned`.

        Raises:
            ApiError: 429, the tenant has too many waiting jobs; 503, all have. And what `work` raises.
        """
        num_own = self._queue.num_waiting_of(tenant)
        if num_own >= self._max_tenant_waiting:
            raise ApiError(
                429,
                f"{num_own} of your requests wait for their prompts to be tokenised; send fewer at once",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        if self._queue.num_waiting >= self._max_waiting:
            raise ApiError(
                503,
                "too many requests wait for their prompts to be tokenised; try again",
                code="overloaded",
                retry_after_s=1,
            )
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._queue.put(tenant, job)
        self._fill()
        try:
            result: T = await job.result
            return result
        except asyncio.CancelledError:
            job.is_abandoned.set()
            if self._queue.remove(tenant, job):
                self._fill()
            raise
        finally:
            del job, work  # its error's traceback has this frame: a cycle would keep the body

    def shutdown(self) -> None:
        """Take no more jobs."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        """Give jobs to the idle threads."""
        while self._num_idle and (taken := self._queue.take()):
            self._num_idle -= 1
            tenant, job = taken
            self._executor.submit(self._run, tenant, job, asyncio.get_running_loop())

    def _run(self, tenant: str, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        """Run a job, in a thread of the executor."""
        begin_s, result, error = time.perf_counter(), None, None
        token = _is_abandoned.set(job.is_abandoned)
        try:
            result = job.work()
        except BaseException as raised:  # noqa: BLE001 - for the caller
            error = raised
            if isinstance(raised, RamifyError):  # a refusal needs no traceback
                # Its frames would hold the body, in a cycle.
                raised.__traceback__ = raised.__context__ = raised.__cause__ = None
        finally:
            _is_abandoned.reset(token)
        took_s = time.perf_counter() - begin_s
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._end, tenant, job, took_s, result, error)

    def _end(
        self, tenant: str, job: _Job, took_s: float, result: Any, error: BaseException | None
    ) -> None:
        self._num_idle += 1
        self._queue.finish(tenant, took_s)
        if not job.result.done():
            if error is None:
                job.result.set_result(result)
            else:
                job.result.set_exception(error)
        self._fill()
