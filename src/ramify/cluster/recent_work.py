"""`RecentWork`: the work that each replica was sent of late."""

from __future__ import annotations

HORIZON = 64  # requests for each replica, after which work counts 1/e
MAX_SCALE = 1e12


class RecentWork:
    """Decayed sums of tokens by replica. Counted in requests, so that it needs no clock."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._scale = 1.0  # of what is added now; grows in place of the sums' decay

    def join(self, replica: str) -> None:
        """Begin with the mean of the others, so that a new replica does not get all that is free."""
        others = [value for name, value in self._sums.items() if name != replica]
        self._sums[replica] = sum(others) / len(others) if others else 0.0

    def leave(self, replica: str) -> None:
        """Forget a replica."""
        self._sums.pop(replica, None)

    def add(self, replica: str, num_tokens: float) -> None:
        """Count a request."""
        self._scale *= 1 + 1 / (HORIZON * len(self._sums))
        self._sums[replica] += num_tokens * self._scale
        if self._scale > MAX_SCALE:
            self._sums = {name: value / self._scale for name, value in self._sums.items()}
            self._scale = 1.0

    def of(self, replica: str) -> float:
        """For comparison with that of other replicas."""
        return self._sums[replica]
