"""Bytes of request bodies in memory, by tenant."""

from __future__ import annotations

from ramify.server.errors import ApiError

MAX_BYTES = 1 << 30
MAX_TENANT_BYTES = 256 << 20


class BodyBudget:
    """Counts the bytes of bodies from their arrival to the end of their requests.

    Bytes count when they arrive: a Content-Length alone reserves nothing.
    """

    def __init__(
        self, *, max_bytes: int = MAX_BYTES, max_tenant_bytes: int = MAX_TENANT_BYTES
    ) -> None:
        self._max_bytes, self._max_tenant_bytes = max_bytes, max_tenant_bytes
        self.num_bytes = 0
        self._by_tenant: dict[str, int] = {}

    def bytes_of(self, tenant: str) -> int:
        """Bytes of a tenant's bodies."""
        return self._by_tenant.get(tenant, 0)

    def reserve(self, tenant: str, num_bytes: int) -> None:
        """Count bytes that have come; `release` must follow.

        Raises:
            ApiError: 429, the tenant has too many; 503, all have. The bytes are not counted.
        """
        own = self.bytes_of(tenant)
        if own + num_bytes > self._max_tenant_bytes:
            raise ApiError(
                429,
                f"the bodies of your live requests have {own} bytes, the limit is "
                f"{self._max_tenant_bytes}; wait for some to end",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        if self.num_bytes + num_bytes > self._max_bytes:
            raise ApiError(
                503,
                "the server holds too many large bodies now; try again",
                code="overloaded",
                retry_after_s=1,
            )
        self.num_bytes += num_bytes
        self._by_tenant[tenant] = own + num_bytes

    def release(self, tenant: str, num_bytes: int) -> None:
        """Forget bytes that were reserved."""
        self.num_bytes -= num_bytes
        left = self.bytes_of(tenant) - num_bytes
        if left:
            self._by_tenant[tenant] = left
        else:
            self._by_tenant.pop(tenant, None)


class BodyReservation:
    """The bytes of one request's body in a `BodyBudget`."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget, self._tenant = budget, tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Reserve further bytes.

        Raises:
            ApiError: as `BodyBudget.reserve`.
        """
        self._budget.reserve(self._tenant, num_bytes)
        self.num_bytes += num_bytes

    def close(self) -> None:
        """Release all. Idempotent."""
        if self.num_bytes:
            self._budget.release(self._tenant, self.num_bytes)
        self.num_bytes = 0
