"""`ExpiringStore`: values by tenant and id, bounded in number, bytes and age."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ramify.engine.text.tenant_lru import TenantLru

MAX_ENTRIES = 4096
MAX_BYTES = 256 << 20
MAX_TENANT_BYTES = 64 << 20
TTL_S = 24 * 3600.0


class Sized(Protocol):
    """A value that knows its size."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        ...


V = TypeVar("V", bound=Sized)


class ExpiringStore(Generic[V]):
    """Values by tenant and id. Used by one thread.

    Over a limit in all, the oldest value of the tenant with most is forgotten.

    Args:
        max_entries, max_bytes: of all values.
        max_tenant_bytes: of the values of one tenant; a value above it is not kept.
        ttl_s: seconds from the last `put` of a value to its end.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ttl_s, self._clock = ttl_s, clock
        # Each value with the time at which it expires.
        self._entries: TenantLru[str, tuple[float, V]] = TenantLru(
            max_cost=max_bytes, max_tenant_cost=max_tenant_bytes, max_entries=max_entries
        )

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return self._entries.cost

    @property
    def max_tenant_bytes(self) -> int:
        """The most bytes that the values of a tenant may have."""
        return self._entries.max_tenant_cost

    def put(self, tenant: str, name: str, value: V) -> None:
        """Add or replace a value, and forget those that have expired."""
        now = self._clock()
        for other in self._entries.tenants:
            while (oldest := self._entries.oldest(other)) and oldest[1][0] <= now:
                self._entries.pop(other, oldest[0])
        self._entries.put(tenant, name, (now + self.ttl_s, value), value.num_bytes)

    def get(self, tenant: str, name: str) -> V | None:
        """A tenant's value; None if it is unknown or expired."""
        entry = self._entries.get(tenant, name)
        return None if entry is None or entry[0] <= self._clock() else entry[1]

    def forget(self, tenant: str, name: str) -> bool:
        """Forget a value; returns whether it was there."""
        return self._entries.pop(tenant, name) is not None
