"""`ReplicaWork`: what a replica has to do, by its last report and the requests sent since."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ramify.cluster.decisions import LoadReport


@dataclass(slots=True, eq=False)
class ReplicaWork:
    """What one replica has to do."""

    name: str
    identity: Hashable
    is_draining: bool = False
    # Sums of the last report and of the reservations that it does not include. Two are whole numbers as
    # floats, in which a decision computes: half the time of integers.
    waiting_tokens: float = 0.0
    num_requests: float = 0.0
    num_waiting: int = 0
    num_unseen: int = 0  # of these reservations
    unseen_tokens: int = 0
    token_s: float = 0.0  # 0: not reported yet
    max_waiting: int = 0
    is_full: bool = False  # it would refuse a request
    reservations: set[int] = field(default_factory=set)
    # Of the prompt that is being placed: what hits here, and of that what another replica keeps.
    hit_tokens: float = 0.0
    copied_tokens: float = 0.0

    def report(self, load: LoadReport) -> None:
        """Take a report."""
        self.waiting_tokens = float(load.tokens_waiting + self.unseen_tokens)
        self.num_waiting = load.num_waiting + self.num_unseen
        self.num_requests = float(load.num_running + self.num_waiting)
        self.token_s, self.max_waiting = load.token_s, load.max_waiting
        self.is_full = 0 < self.max_waiting <= self.num_waiting

    def count_unseen(self, num_requests: int, num_tokens: int) -> None:
        """Add reservations that the last report does not include; negative: it does, or they ended."""
        self.num_unseen += num_requests
        self.num_requests += num_requests
        self.num_waiting += num_requests
        self.unseen_tokens += num_tokens
        self.waiting_tokens += num_tokens
        self.is_full = 0 < self.max_waiting <= self.num_waiting
