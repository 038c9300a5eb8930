"""`Replicas`: what a server shows of the engines behind one `EngineClient`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ramify.engine.cache_admin.branch_view import BranchQuery, BranchView
from ramify.engine.context import EngineStats


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica as its server sees it; reading it asks nobody."""

    number: int  # from 0; what clients see
    name: str  # in metrics and logs; of a replica that was started elsewhere, its address
    state: str  # "ready", "draining", or "not connected"
    error: str | None  # why it is not connected
    incarnation: int | None  # of the engine that is connected
    num_starts: int  # different engines that have connected in this place
    is_mirrored: bool  # its cache is known: no event was lost
    mirrored_pages: int  # that the router believes to be cached there
    queue_s: float  # work there before a further request


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """The counters of one replica, since its engine started."""

    number: int
    incarnation: int
    max_num_seqs: int  # of its batch
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """The counters of the connected replicas, as far as each has ever answered."""

    replicas: Mapping[str, ReplicaStats]  # by name
    sums: EngineStats | None  # None: none has answered


@dataclass(frozen=True, slots=True)
class MirrorCounts:
    """Messages about the caches of replicas, since the server started."""

    snapshots_asked: int = 0
    snapshots_applied: int = 0
    snapshots_failed: int = 0
    gaps: int = 0  # events were lost
    mismatches: int = 0  # a digest differed, though no event was lost
    late_messages: int = 0  # doubled, overtaken, or of an engine that has ended


@dataclass(frozen=True, slots=True)
class RoutingCounts:
    """Decisions of a router, since the server started. Tokens are those of finished requests."""

    decisions: Mapping[str, int]  # by reason
    refusals: Mapping[str, int]
    predicted_tokens: int = 0  # of prompts, that were expected to hit
    cached_tokens: int = 0  # that did hit
    wrong_tokens: int = 0  # absolute differences of the two, added up
    reroutes: int = 0  # requests sent elsewhere before their first token
    resumptions: int = 0  # requests that went on elsewhere after delivered tokens
    mirrors: MirrorCounts = MirrorCounts()


class Replicas(Protocol):
    """The engines of a cluster; `cluster.view.ClusterView`."""

    def states(self) -> Sequence[ReplicaState]:
        """All replicas, in the order of their numbers."""
        ...

    def counts(self) -> RoutingCounts:
        """Decisions and messages so far."""
        ...

    async def stats(self, timeout_s: float) -> ClusterStats:
        """Of the connected replicas; of one that does not answer in time, the last that it had."""
        ...

    async def branches(self, query: BranchQuery, timeout_s: float) -> BranchView:
        """Branches of the trees of the replicas that answer in time; `query.below` names a replica, too.

        Raises:
            ConfigError: there is no such node, or the tenant may not see it.
            NoReplicaError: no replica answers.
        """
        ...

    async def cached_tokens(
        self, token_ids: Sequence[int], tenant: str, salt: str, timeout_s: float
    ) -> Mapping[str, int]:
        """Tokens of a prompt that would hit on each replica that answers in time, by name."""
        ...
