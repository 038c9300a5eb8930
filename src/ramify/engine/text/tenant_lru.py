"""A cache whose size is bounded for each tenant and in all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Dropped(Generic[K]):
    """The key of a value that made room for another."""

    tenant: str
    key: K


class TenantLru(Generic[K, V]):
    """Values by tenant and key. A value has a cost, in bytes or tokens, which is bounded.

    Over a limit in all, the oldest value of the tenant with the highest cost is dropped: no tenant
    flushes the values of another that has less.

    Args:
        max_cost: of all values.
        max_tenant_cost: of the values of one tenant; a value above it is not kept.
        max_entries: values in all; None: any number.
    """

    def __init__(
        self, *, max_cost: int, max_tenant_cost: int, max_entries: int | None = None
    ) -> None:
        self.max_cost, self.max_tenant_cost = max_cost, min(max_cost, max_tenant_cost)
        self.max_entries = max_entries
        self.cost = 0
        self._entries: dict[str, OrderedDict[K, tuple[int, V]]] = {}  # oldest first
        self._tenant_cost: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenants that have a value."""
        return tuple(self._entries)

    def get(self, tenant: str, key: K) -> V | None:
        """The value of a key; None if there is none. Does not make it newer."""
        own = self._entries.get(tenant)
        entry = None if own is None else own.get(key)
        return None if entry is None else entry[1]

    def touch(self, tenant: str, key: K) -> None:
        """Make the value of a key the tenant's newest."""
        self._entries[tenant].move_to_end(key)

    def oldest(self, tenant: str) -> tuple[K, V] | None:
        """A tenant's oldest value with its key; None if it has none."""
        own = self._entries.get(tenant)
        if not own:
            return None
        key, (_, value) = next(iter(own.items()))
        return key, value

    def put(self, tenant: str, key: K, value: V, cost: int) -> list[Dropped[K]]:
        """Add or replace a value, as the tenant's newest; returns the keys of the dropped values."""
        replaced = self.pop(tenant, key)
        dropped = [] if replaced is None else [Dropped(tenant, key)]
        if cost > self.max_tenant_cost:
            return [*dropped, Dropped(tenant, key)]
        self._entries.setdefault(tenant, OrderedDict())[key] = (cost, value)
        self._tenant_cost[tenant] = self._tenant_cost.get(tenant, 0) + cost
        self.cost += cost
        while self._tenant_cost[tenant] > self.max_tenant_cost:
            dropped.append(self._drop_oldest(tenant))
        while self.cost > self.max_cost:
            _, most = max((cost, name) for name, cost in self._tenant_cost.items())
            dropped.append(self._drop_oldest(most))
        while self.max_entries is not None and len(self) > self.max_entries:
            _, most = max((len(own), name) for name, own in self._entries.items())
            dropped.append(self._drop_oldest(most))
        return dropped

    def pop(self, tenant: str, key: K) -> V | None:
        """Remove and return a value; None if there is none."""
        own = self._entries.get(tenant)
        entry = None if own is None else own.pop(key, None)
        if entry is None:
            return None
        cost, value = entry
        self.cost -= cost
        self._tenant_cost[tenant] -= cost
        if not self._entries[tenant]:
            del self._entries[tenant], self._tenant_cost[tenant]
        return value

    def _drop_oldest(self, tenant: str) -> Dropped[K]:
        key = next(iter(self._entries[tenant]))
        self.pop(tenant, key)
        return Dropped(tenant, key)
