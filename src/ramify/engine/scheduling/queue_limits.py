"""Limits of the waiting queue: of all tenants together, and a fair share for each while it is full.

A tenant alone may fill the whole queue. When it is full, those who have less than an equal share of
it are still accepted, and the others are refused. So the queue holds at most `max_waiting` requests
and a share for each tenant that came later. Answers count, not requests: `n=128` counts 128 times.
The error of a refused tenant depends on its own requests alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ramify.config import ResolvedConfig
from ramify.engine.scheduling.waiting_queue import WaitingQueue
from ramify.errors import OverloadedError, TokensWaitError

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of a queue; None is no limit."""

    max_waiting: int | None = None  # answers
    max_waiting_tokens: int | None = None  # uncached prompt tokens

    @classmethod
    def of(cls, config: ResolvedConfig) -> QueueLimits:
        """Those of an engine."""
        return cls(config.requested.scheduler.max_waiting, config.max_waiting_tokens)

    @classmethod
    def total(cls, limits: Sequence[QueueLimits]) -> QueueLimits:
        """Sums over several queues; no limit where one of them has none."""
        return cls(
            _sum([limit.max_waiting for limit in limits]),
            _sum([limit.max_waiting_tokens for limit in limits]),
        )

    def check_answers(
        self, queue: WaitingQueue, tenant: str, *, num_own: int, num_all: int, now_s: float
    ) -> None:
        """Check that the queue takes one more request of a tenant.

        Args:
            num_own, num_all: answers that wait, those that wait for their prompt included.

        Raises:
            OverloadedError: the queue is full, and the tenant has its share of it.
        """
        limit = self.max_waiting
        if limit is None or num_all < limit:
            return
        if num_own >= max(1, limit // _num_tenants(queue, tenant)):
            raise OverloadedError(num_own, limit, _retry_after_s(queue, tenant, now_s))

    def check_tokens(
        self, queue: WaitingQueue, tenant: str, *, num_tokens: int, now_s: float
    ) -> None:
        """Check that the queue takes a prompt of `num_tokens` more tokens; the first of a tenant fits.

        Raises:
            TokensWaitError: too many tokens wait, and the tenant has its share of them.
        """
        limit, num_queued = self.max_waiting_tokens, queue.num_uncached
        if limit is None or not num_queued or num_queued + num_tokens <= limit:
            return
        num_own = sum(
            request.rank - request.virtual_arrival for request in queue if request.tenant == tenant
        )
        if num_own and num_own + num_tokens > limit // _num_tenants(queue, tenant):
            retry_after_s = _retry_after_s(queue, tenant, now_s)
            raise TokensWaitError(num_own, num_tokens, limit, retry_after_s)


def _sum(limits: Sequence[int | None]) -> int | None:
    numbers = [limit for limit in limits if limit is not None]
    return sum(numbers) if len(numbers) == len(limits) else None


def _num_tenants(queue: WaitingQueue, tenant: str) -> int:
    """Tenants that wait, and this one."""
    return queue.num_tenants_waiting + (not queue.num_waiting(tenant))


def _retry_after_s(queue: WaitingQueue, tenant: str, now_s: float) -> float:
    """Half the time that the tenant's oldest request has waited, within limits."""
    arrivals_s = [request.arrival_s for request in queue if request.tenant == tenant]
    waited_s = now_s - min(arrivals_s, default=now_s)
    return min(MAX_RETRY_S, max(MIN_RETRY_S, waited_s / 2))
