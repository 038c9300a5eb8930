"""What a router decides, and what it is told of a replica's work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ramify.outputs import Placement


class LoadReport(Protocol):
    """What a replica has to do, and how fast it is. `Load`, or its form on a wire."""

    @property
    def tokens_waiting(self) -> int:
        """Tokens to compute before a further prompt."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step."""
        ...

    @property
    def num_running(self) -> int:
        """Requests in the engine's batch."""
        ...

    @property
    def token_s(self) -> float:
        """Seconds to compute a token of a prompt."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds of a step that only decodes."""
        ...

    @property
    def max_waiting(self) -> int:
        """Requests that may wait; 0: no limit."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """See `LoadReport`."""

    tokens_waiting: int
    num_waiting: int
    num_running: int
    token_s: float
    step_s: float
    max_waiting: int = 0


@dataclass(frozen=True, slots=True)
class Alternative:
    """The replica with the longest cached prefix, where another one was chosen."""

    replica: str
    cached_tokens: int
    queue_s: float
    reason: str  # "queue": it would take longer there; "bound": it has more than its share of the work; "full"


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why.

    `reason`:
    - "cached": nobody has a longer prefix cached
    - "in flight": it computes the prefix at the moment, or will before this request
    - "spill": a replica with a longer prefix has too much to do: see `alternative`
    - "least work": nobody has anything of it
    - "unknown cache": likewise, as far as is known: a replica's cache is not known yet
    - "only": there is one replica
    - "assigned": see `Router.assign`; clients' requests never have it
    """

    replica: str
    reason: str
    reservation: int  # until `Router.finished` or `Router.failed`
    cached_tokens: int = 0  # that are expected to hit there
    cost_s: float = 0.0  # see `router`
    alternative: Alternative | None = None


def placement_of(decision: Decision, numbers: Mapping[str, int]) -> Placement:
    """A decision as clients see it.

    Args:
        numbers: of replicas, by name; a name may be an address.
    """
    other = decision.alternative
    placement = Placement(numbers[decision.replica], decision.reason, decision.cached_tokens)
    if other is None:
        return placement
    return replace(
        placement,
        other_replica=numbers[other.replica],
        other_tokens=other.cached_tokens,
        other_queue_s=other.queue_s,
        other_reason=other.reason,
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """No replica takes a request now: "no replica" is there, or all are "full"."""

    reason: str
    retry_after_s: float


@dataclass(slots=True)
class RouterCounters:
    """Of `Router.choose`, since the router was made. Predicted and actual tokens are of finished requests."""

    num_decisions: dict[str, int]  # by reason
    predicted_tokens: int = 0
    cached_tokens: int = 0
    wrong_tokens: int = 0  # sum of the differences' absolute values
