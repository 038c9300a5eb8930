"""`Activity`: what a server did in the last ten minutes, in buckets of seconds, by tenant.

Requests are counted when they arrive, have their first token, and end, and when somebody asks.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ramify.cache.types import CacheStats
from ramify.server.generation import CacheUsage

BUCKET_S: Final = 5.0
NUM_BUCKETS: Final = 120  # ten minutes
MAX_TENANTS: Final = 256  # the least recently active one is forgotten


@dataclass(slots=True)
class Bucket:
    """Sums over the requests that began in `BUCKET_S` seconds; `output` is of those that ended."""

    number: int  # of `BUCKET_S` since the epoch
    requests: int = 0
    read: int = 0
    shared: int = 0
    computed: int = 0
    output: int = 0
    ttft_s: float = 0.0  # sum
    max_ttft_s: float = 0.0
    max_running: int = 0
    max_waiting: int = 0

    def as_json(self) -> dict[str, Any]:
        """The mean time to the first token, and the sums."""
        return {
            "time": self.number * BUCKET_S,
            "requests": self.requests,
            "read": self.read,
            "shared": self.shared,
            "computed": self.computed,
            "output": self.output,
            "ttft_s": round(self.ttft_s / self.requests, 4) if self.requests else None,
            "max_ttft_s": round(self.max_ttft_s, 4) if self.requests else None,
            "running": self.max_running,
            "waiting": self.max_waiting,
        }


@dataclass(frozen=True, slots=True)
class CacheSample:
    """Counters of the cache at a time: what was looked up, hit, and could have been hit."""

    time: float
    lookup_tokens: int
    hit_tokens: int
    ideal_hit_tokens: int


class Activity:
    """Buckets of each tenant and of all together, and samples of the cache's counters.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._all: deque[Bucket] = deque(maxlen=NUM_BUCKETS)
        self._tenants: OrderedDict[str, deque[Bucket]] = OrderedDict()
        self._samples: deque[CacheSample] = deque(maxlen=NUM_BUCKETS)

    def observe(self, tenant: str | None, *, num_running: int, num_waiting: int) -> None:
        """Now so many requests of a tenant, or, with None, of all, answer and wait for their first token."""
        if not num_running and not num_waiting:
            return
        bucket = self._bucket(self._all if tenant is None else self._own(tenant))
        bucket.max_running = max(bucket.max_running, num_running)
        bucket.max_waiting = max(bucket.max_waiting, num_waiting)

    def begun(self, tenant: str, usage: CacheUsage | None, ttft_s: float) -> None:
        """A request has its first token, `ttft_s` after it arrived."""
        for bucket in self._buckets(tenant):
            bucket.requests += 1
            bucket.ttft_s += ttft_s
            bucket.max_ttft_s = max(bucket.max_ttft_s, ttft_s)
            if usage is not None:
                bucket.read += usage.read
                bucket.shared += usage.shared
                bucket.computed += usage.computed

    def ended(self, tenant: str, num_output: int) -> None:
        """A request has ended with so many tokens."""
        for bucket in self._buckets(tenant):
            bucket.output += num_output

    @property
    def wants_sample(self) -> bool:
        """Whether the last sample is older than a bucket."""
        return not self._samples or self._clock() - self._samples[-1].time >= BUCKET_S

    def sample(self, cache: CacheStats) -> None:
        """Remember the cache's counters."""
        self._samples.append(
            CacheSample(
                self._clock(), cache.lookup_tokens, cache.hit_tokens, cache.ideal_hit_tokens
            )
        )

    def as_json(self, tenant: str | None) -> dict[str, Any]:
        """The buckets of a tenant, or, with None, of all, with the samples."""
        buckets = self._all if tenant is None else self._tenants.get(tenant, ())
        oldest = self._number() - NUM_BUCKETS
        payload: dict[str, Any] = {
            "time": self._clock(),
            "bucket_s": BUCKET_S,
            "num_buckets": NUM_BUCKETS,
            "buckets": [bucket.as_json() for bucket in buckets if bucket.number > oldest],
        }
        if tenant is None:
            payload["cache"] = [
                {
                    "time": sample.time,
                    "lookup_tokens": sample.lookup_tokens,
                    "hit_tokens": sample.hit_tokens,
                    "ideal_hit_tokens": sample.ideal_hit_tokens,
                }
                for sample in self._samples
                if sample.time > oldest * BUCKET_S
            ]
        return payload

    def _number(self) -> int:
        return int(self._clock() // BUCKET_S)

    def _buckets(self, tenant: str) -> tuple[Bucket, Bucket]:
        """The present bucket of a tenant and that of all."""
        return self._bucket(self._own(tenant)), self._bucket(self._all)

    def _own(self, tenant: str) -> deque[Bucket]:
        """The buckets of a tenant, which is now the most recently active one."""
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = deque(maxlen=NUM_BUCKETS)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return own

    def _bucket(self, buckets: deque[Bucket]) -> Bucket:
        number = self._number()
        if not buckets or buckets[-1].number != number:
            buckets.append(Bucket(number))
        return buckets[-1]
