"""`NamedValues`: values that clients keep under names of their own; a limit refuses, nothing is forgotten."""

from __future__ import annotations

from array import array
from typing import Generic, Protocol, TypeVar

from ramify.server.errors import ApiError
from ramify.server.history.expiring_store import Sized

MAX_NAMES = 4096  # of all tenants
MAX_TENANT_NAMES = 64
MAX_BYTES = 256 << 20
MAX_TENANT_BYTES = 32 << 20
MIB = 1 << 20

V = TypeVar("V", bound=Sized)


class TokenPrefix(Sized, Protocol):
    """The beginning of prompts."""

    @property
    def ids(self) -> array[int]:
        """Its token ids."""
        ...


class NamedValues(Generic[V]):
    """Values by tenant and name, until they are removed. Written by one thread, read by any.

    Args:
        kind: what a value is, in errors.
        max_names, max_bytes: of all values.
        max_tenant_names, max_tenant_bytes: of the values of one tenant.
    """

    def __init__(
        self,
        kind: str,
        *,
        max_names: int = MAX_NAMES,
        max_tenant_names: int = MAX_TENANT_NAMES,
        max_bytes: int = MAX_BYTES,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
    ) -> None:
        self._kind = kind
        self._max_names, self._max_tenant_names = max_names, max_tenant_names
        self._max_bytes, self._max_tenant_bytes = max_bytes, max_tenant_bytes
        self._values: dict[str, dict[str, V]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(map(self._bytes_of, [*self._values]))

    def of(self, tenant: str) -> tuple[V, ...]:
        """The values of a tenant, oldest first."""
        return tuple(self._values.get(tenant, {}).values())

    def get(self, tenant: str, name: str) -> V | None:
        """The value of a name; None if the tenant has no such name."""
        return self._values.get(tenant, {}).get(name)

    def put(self, tenant: str, name: str, value: V) -> None:
        """Add or replace a value.

        Raises:
            ApiError: as `check_room`; nothing has changed.
        """
        self.check_room(tenant, name, value)
        own = self._values.setdefault(tenant, {})
        own.pop(name, None)
        own[name] = value

    def check_room(self, tenant: str, name: str, value: V) -> None:
        """Refuse a value for which there is no room.

        Raises:
            ApiError: 400, the tenant's limit of names or bytes; 503, that of all tenants.
        """
        earlier = self.get(tenant, name)
        num_bytes = value.num_bytes - (0 if earlier is None else earlier.num_bytes)
        num_names = int(earlier is None)
        num_own = len(self._values.get(tenant, {})) + num_names
        if num_own > self._max_tenant_names:
            raise ApiError(
                400,
                f"with {name!r} you would have {num_own} {self._kind}es; at most "
                f"{self._max_tenant_names}. Delete one",
                param="name",
                code="too_many_names",
            )
        own_bytes = self._bytes_of(tenant) + num_bytes
        if own_bytes > self._max_tenant_bytes:
            raise ApiError(
                400,
                f"with {name!r} your {self._kind}es would have {own_bytes / MIB:.1f} MiB; at most "
                f"{self._max_tenant_bytes / MIB:.1f} MiB. Delete one, or shorten this one",
                param="name",
                code="too_many_bytes",
            )
        is_full = len(self) + num_names > self._max_names
        if is_full or self.num_bytes + num_bytes > self._max_bytes:
            raise ApiError(503, f"this server has no room for another {self._kind}", code="no_room")

    def remove(self, tenant: str, name: str) -> V | None:
        """Remove and return a value; None if there is none."""
        own = self._values.get(tenant, {})
        value = own.pop(name, None)
        if not own:
            self._values.pop(tenant, None)
        return value

    def _bytes_of(self, tenant: str) -> int:
        return sum(value.num_bytes for value in self.of(tenant))
