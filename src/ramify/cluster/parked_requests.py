"""`ParkedRequests`: requests that wait at the server until a replica takes them."""

from __future__ import annotations

from ramify.cluster.remote_request import RemoteRequest

FULL_WAIT_S = 30.0  # of an answer that was cut off, while all other replicas are full
UPDATE_WAIT_S = 600.0  # while the only replicas replace their weights
MAX_PARKED = 1024


class ParkedRequests:
    """Each waits until its deadline, which begins when it is parked first and ends with `accept`."""

    def __init__(self) -> None:
        self._parked: dict[int, tuple[RemoteRequest, Exception]] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, request: RemoteRequest, error: Exception, wait_s: float, now_s: float) -> bool:
        """Let a request wait; returns False if it may not, or has waited long enough.

        Args:
            error: what ends it if no replica takes it.
            wait_s: 0 does not let it wait.
        """
        if not wait_s or len(self._parked) >= MAX_PARKED:
            return False
        if request.wait_until_s is None:
            request.wait_until_s = now_s + wait_s
        elif now_s >= request.wait_until_s:
            return False
        self._parked[request.id] = request, error
        return True

    def in_order(self) -> list[tuple[RemoteRequest, Exception]]:
        """Those that wait, the first deadline first."""
        return sorted(self._parked.values(), key=lambda entry: entry[0].wait_until_s or 0.0)

    def remove(self, request: RemoteRequest) -> None:
        """Let a request wait no longer, if it does."""
        self._parked.pop(request.id, None)
