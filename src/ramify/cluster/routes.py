"""`Routes`: what a `ClusterLLM` asks before it sends a request; `LeastLoaded`, where there is no router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ramify.cluster.wire import Load, Run, SnapshotPart, TakeSnapshot


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why."""

    replica: str
    reason: str
    reservation: int  # until `finished` or `failed`
    cached_tokens: int = 0  # that are expected to hit there


@dataclass(frozen=True, slots=True)
class Refusal:
    """No replica takes a request now."""

    reason: str  # "no replica" or "full"
    retry_after_s: float


class Routes(Protocol):
    """Decides by what each replica has cached and has to do. Knows no socket and no clock."""

    def joined(self, replica: str, incarnation: int, identity: str, now: float) -> None:
        """A replica takes requests; nothing is known of its cache yet."""
        ...

    def draining(self, replica: str) -> None:
        """A replica takes no new requests."""
        ...

    def left(self, replica: str) -> None:
        """A replica is gone, with its cache and its reservations."""
        ...

    def choose(
        self,
        page_hashes: Sequence[bytes],
        num_tokens: int,
        *,
        now: float,
        max_tokens: int | None = None,
        exclude: Collection[str] = (),
    ) -> Decision | Refusal:
        """The replica for a prompt; none of `exclude`."""
        ...

    def admitted(self, reservation: int) -> None:
        """The replica has queued the request; before `load` of the same message."""
        ...

    def first_token(self, reservation: int) -> None:
        """The prompt is computed."""
        ...

    def finished(
        self, reservation: int, num_output: int = 0, cached_tokens: int | None = None
    ) -> None:
        """The request has ended; `cached_tokens` of its prompt had hit, if that is known."""
        ...

    def failed(self, reservation: int) -> None:
        """The request was refused or aborted, or its replica is gone."""
        ...

    def load(self, replica: str, load: Load) -> None:
        """What a replica has to do now."""
        ...

    def apply(self, replica: str, incarnation: int, runs: Sequence[Run], num_lost: int) -> None:
        """Changes of a replica's cache, after `num_lost` that were not sent."""
        ...

    def snapshot(self, replica: str, incarnation: int, part: SnapshotPart) -> None:
        """A part of all that a replica has cached."""
        ...

    def digest(self, replica: str, incarnation: int, sequence: int, digest: bytes) -> None:
        """The digest of a replica's cache at an event."""
        ...

    def due_snapshots(self, now: float) -> Sequence[tuple[str, TakeSnapshot]]:
        """What to ask of which replicas."""
        ...


class LeastLoaded:
    """The replica with the fewest live requests of this server; ties rotate. Knows no cache."""

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()
        self._replicas: dict[int, str] = {}  # by reservation
        self._drained: set[str] = set()
        self._turn = 0

    def joined(self, replica: str, incarnation: int, identity: str, now: float) -> None:
        """See `Routes`."""
        del incarnation, identity, now
        self._live[replica] = 0
        self._drained.discard(replica)

    def draining(self, replica: str) -> None:
        """See `Routes`."""
        self._drained.add(replica)

    def left(self, replica: str) -> None:
        """See `Routes`."""
        del self._live[replica]
        self._replicas = {
            number: name for number, name in self._replicas.items() if name != replica
        }

    def choose(
        self,
        page_hashes: Sequence[bytes],
        num_tokens: int,
        *,
        now: float,
        max_tokens: int | None = None,
        exclude: Collection[str] = (),
    ) -> Decision | Refusal:
        """See `Routes`."""
        del page_hashes, num_tokens, now, max_tokens
        names = sorted(self._live.keys() - self._drained - set(exclude))
        if not names:
            return Refusal("no replica", 1.0)
        self._turn += 1
        turn = self._turn % len(names)
        replica = min(names[turn:] + names[:turn], key=lambda name: self._live[name])
        self._live[replica] += 1
        self._replicas[self._turn] = replica
        return Decision(replica, "least work", self._turn)

    def admitted(self, reservation: int) -> None:
        """See `Routes`."""

    def first_token(self, reservation: int) -> None:
        """See `Routes`."""

    def finished(
        self, reservation: int, num_output: int = 0, cached_tokens: int | None = None
    ) -> None:
        """See `Routes`."""
        del num_output, cached_tokens
        self.failed(reservation)

    def failed(self, reservation: int) -> None:
        """See `Routes`."""
        replica = self._replicas.pop(reservation, None)
        if replica is not None:
            self._live[replica] -= 1

    @property
    def num_reserved(self) -> int:
        """Reservations that have not ended."""
        return len(self._replicas)

    def load(self, replica: str, load: Load) -> None:
        """See `Routes`."""

    def apply(self, replica: str, incarnation: int, runs: Sequence[Run], num_lost: int) -> None:
        """See `Routes`."""

    def snapshot(self, replica: str, incarnation: int, part: SnapshotPart) -> None:
        """See `Routes`."""

    def digest(self, replica: str, incarnation: int, sequence: int, digest: bytes) -> None:
        """See `Routes`."""

    def due_snapshots(self, now: float) -> Sequence[tuple[str, TakeSnapshot]]:
        """See `Routes`."""
        del now
        return ()
