"""`TenantShares`: live answers of each tenant, against an equal share of all queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ramify.cluster.remote_request import RemoteRequest
from ramify.cluster.wire import Welcome


class TenantShares:
    """Says whether a full replica may be asked to take a request.

    A full engine still takes requests of a tenant that has less than an equal share of its queue; that
    is for the engine to decide. A tenant with its share of all queues is refused without asking.
    """

    def __init__(self) -> None:
        self._num_answers = Counter[str]()

    def add(self, request: RemoteRequest) -> None:
        """Count a live request."""
        self._num_answers[request.options.tenant] += request.params.n

    def remove(self, request: RemoteRequest) -> None:
        """End `add`."""
        tenant = request.options.tenant
        self._num_answers[tenant] -= request.params.n
        if not self._num_answers[tenant]:
            del self._num_answers[tenant]

    def has_share_left(self, request: RemoteRequest, welcomes: Iterable[Welcome | None]) -> bool:
        """Whether the tenant of a live request has at most an equal share of the queues.

        Args:
            welcomes: of the replicas that are connected.
        """
        limit = sum(
            welcome.config.requested.scheduler.max_waiting or 0
            for welcome in welcomes
            if welcome is not None
        )
        return self._num_answers[request.options.tenant] <= limit // len(self._num_answers)
