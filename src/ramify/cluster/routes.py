"""`Routes`: what a `ClusterLLM` asks before it sends a request; by caches and load, or by load alone."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ramify.cluster.decisions import Decision, Refusal
from ramify.cluster.hot_prefixes import HotPrefixes
from ramify.cluster.mirrors import Mirrors
from ramify.cluster.router import Router
from ramify.cluster.wire import Load, Run, SnapshotPart, TakeSnapshot, Welcome
from ramify.server.replicas import MirrorCounts, RoutingCounts


@dataclass(frozen=True, slots=True)
class MirrorState:
    """What a router believes of one replica."""

    is_known: bool = False  # no event of its cache was lost
    num_pages: int = 0  # cached
    queue_s: float = 0.0  # work before a further request


@dataclass(frozen=True, slots=True)
class HotPrompt:
    """A prompt, and whose it is."""

    ids: array[int]
    tenant: str = ""
    salt: str = ""

    def cut(self, num_tokens: int) -> HotPrompt:
        """Its first tokens."""
        return HotPrompt(self.ids[:num_tokens], self.tenant, self.salt)


class Routes(Protocol):
    """Decides by what each replica has cached and has to do. Knows no socket and no clock."""

    def joined(self, replica: str, welcome: Welcome) -> None:
        """A replica takes requests; nothing is known of its cache yet."""
        ...

    def draining(self, replica: str) -> None:
        """A replica takes no new requests."""
        ...

    def left(self, replica: str) -> None:
        """A replica is gone, with its cache and its reservations."""
        ...

    def forgotten(self, replica: str) -> None:
        """A replica that has left will not join again under this name."""
        ...

    def choose(
        self,
        page_hashes: Sequence[bytes],
        num_tokens: int,
        *,
        max_tokens: int | None = None,
        exclude: Collection[str] = (),
        beyond_limits: bool = False,
    ) -> Decision | Refusal:
        """The replica for a prompt; none of `exclude`.

        Args:
            page_hashes: of the prompt, packed, in each namespace that replicas have.
            beyond_limits: also a replica whose queue is full, if all are: it decides by tenant.
        """
        ...

    def assign(
        self, replica: str, page_hashes: Sequence[bytes], num_tokens: int
    ) -> Decision | Refusal:
        """Reserve the work of a prompt at a replica that the caller has chosen, to warm its cache.

        It is no decision: neither it nor its end is counted.
        """
        ...

    def note(self, page_hashes: Sequence[bytes], num_shared: int, prompt: HotPrompt) -> None:
        """Count a prompt whose first `num_shared` tokens some replica has cached."""
        ...

    def missing(self, replica: str, max_pages: int) -> list[HotPrompt]:
        """Hot prefixes that a replica has not cached, the hottest first, of `max_pages` in all."""
        ...

    def is_known(self, replica: str) -> bool:
        """Whether all that a replica has cached is known."""
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
        """The request has ended; `cached_tokens` of its prompt had hit, if that is known.

        Args:
            num_output: tokens of its answer; of several answers, the mean.
        """
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

    def mirror(self, replica: str) -> MirrorState:
        """What is believed of a replica; of one that has not joined, nothing."""
        ...

    def counts(self, refusals: Mapping[str, int], reroutes: int, resumptions: int) -> RoutingCounts:
        """Decisions and messages so far, with counts that the caller keeps."""
        ...


class CacheRoutes:
    """By what each replica has cached and has to do: `Router` over `Mirrors`.

    Args:
        stride: keep every stride-th page of a prompt, for large clusters.
    """

    def __init__(self, *, stride: int = 1) -> None:
        self.stride = stride
        self._hot = HotPrefixes[HotPrompt]()
        self._router: Router | None = None  # made when the first replica joins: it says how

    @property
    def router(self) -> Router:
        """The router; there is one once a replica has joined."""
        assert self._router is not None, "no replica has joined"
        return self._router

    def queues(self) -> dict[str, tuple[float, int]]:
        """See `Router.queues`."""
        return {} if self._router is None else self._router.queues()

    @property
    def num_reserved(self) -> int:
        """Reservations that have not ended."""
        return 0 if self._router is None else self._router.num_in_flight

    def joined(self, replica: str, welcome: Welcome) -> None:
        """See `Routes`."""
        if self._router is None:
            mirrors = Mirrors(stride=self.stride, is_windowed=welcome.config.window is not None)
            self._router = Router(mirrors, welcome.config.page_size)
        self._router.mirrors.add(replica, welcome.incarnation)
        self._router.add(replica, welcome.identity.digest)

    def draining(self, replica: str) -> None:
        """See `Routes`."""
        self.router.drain(replica)

    def left(self, replica: str) -> None:
        """See `Routes`; what it has cached is kept until another incarnation joins in its place."""
        self.router.remove(replica)
        self.router.mirrors.leave(replica)

    def forgotten(self, replica: str) -> None:
        """See `Routes`."""
        if self._router is not None:
            self._router.mirrors.remove(replica)

    def choose(
        self,
        page_hashes: Sequence[bytes],
        num_tokens: int,
        *,
        max_tokens: int | None = None,
        exclude: Collection[str] = (),
        beyond_limits: bool = False,
    ) -> Decision | Refusal:
        """See `Routes`."""
        first, *others = page_hashes or [b""]
        return self.router.choose(
            first,
            num_tokens,
            other_hashes=others,
            max_tokens=max_tokens,
            exclude=exclude,
            beyond_limits=beyond_limits,
        )

    def assign(
        self, replica: str, page_hashes: Sequence[bytes], num_tokens: int
    ) -> Decision | Refusal:
        """See `Routes`."""
        first, *others = page_hashes or [b""]
        return self.router.assign(replica, first, num_tokens, other_hashes=others)

    def note(self, page_hashes: Sequence[bytes], num_shared: int, prompt: HotPrompt) -> None:
        """See `Routes`."""
        num_pages = num_shared // self.router.page_size
        self._hot.note(page_hashes, num_pages, prompt.cut(num_pages * self.router.page_size))

    def missing(self, replica: str, max_pages: int) -> list[HotPrompt]:
        """See `Routes`."""
        if not len(self._hot):
            return []
        missing = self._hot.missing(self.router.mirrors, replica, max_pages)
        return [prefix.prompt for prefix in missing]

    def is_known(self, replica: str) -> bool:
        """See `Routes`."""
        return self.router.mirrors.is_known(replica)

    def admitted(self, reservation: int) -> None:
        """See `Routes`."""
        self.router.admitted(reservation)

    def first_token(self, reservation: int) -> None:
        """See `Routes`."""
        self.router.first_token(reservation)

    def finished(
        self, reservation: int, num_output: int = 0, cached_tokens: int | None = None
    ) -> None:
        """See `Routes`."""
        self.router.finished(reservation, num_output, cached_tokens)

    def failed(self, reservation: int) -> None:
        """See `Routes`."""
        self.router.failed(reservation)

    def load(self, replica: str, load: Load) -> None:
        """See `Routes`."""
        self.router.load(replica, load)

    def apply(self, replica: str, incarnation: int, runs: Sequence[Run], num_lost: int) -> None:
        """See `Routes`; lost events are a gap in the sequence."""
        del num_lost
        self.router.mirrors.apply(replica, incarnation, runs)

    def snapshot(self, replica: str, incarnation: int, part: SnapshotPart) -> None:
        """See `Routes`."""
        self.router.mirrors.snapshot(replica, incarnation, part.request, part)

    def digest(self, replica: str, incarnation: int, sequence: int, digest: bytes) -> None:
        """See `Routes`."""
        self.router.mirrors.digest(replica, incarnation, sequence, digest)

    def due_snapshots(self, now: float) -> Sequence[tuple[str, TakeSnapshot]]:
        """See `Routes`."""
        if self._router is None:
            return ()
        return [
            (due.replica, TakeSnapshot(due.number))
            for due in self._router.mirrors.due_snapshots(now)
        ]

    def mirror(self, replica: str) -> MirrorState:
        """See `Routes`."""
        if self._router is None:
            return MirrorState()
        mirrors = self._router.mirrors
        return MirrorState(
            mirrors.is_known(replica), mirrors.num_pages(replica), self._router.queue_s(replica)
        )

    def counts(self, refusals: Mapping[str, int], reroutes: int, resumptions: int) -> RoutingCounts:
        """See `Routes`."""
        if self._router is None:
            return RoutingCounts({}, refusals, reroutes=reroutes, resumptions=resumptions)
        router, mirrors = self._router.counters, self._router.mirrors.counters
        return RoutingCounts(
            dict(router.num_decisions),
            refusals,
            router.predicted_tokens,
            router.cached_tokens,
            router.wrong_tokens,
            reroutes,
            resumptions,
            MirrorCounts(
                mirrors.num_asked,
                mirrors.num_snapshots,
                mirrors.num_failed_snapshots,
                mirrors.num_gaps,
                mirrors.num_mismatches,
                mirrors.num_late,
            ),
        )
