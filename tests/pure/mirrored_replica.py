"""A replica that reports its cache, for tests of mirrors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from ramify.cache import CacheEvent, PrefixCache, SnapshotChunk, Subscription
from ramify.cluster.mirrors import Mirrors, SnapshotRequest
from tests.pure.cache_traffic import Traffic

INTERVAL_S, TIMEOUT_S = 1.0, 10.0
MAX_INTERVAL_S = 32 * INTERVAL_S


@dataclass(eq=False)
class Message:
    """What a replica sends after a step."""

    replica: str
    incarnation: int
    events: list[CacheEvent]
    part: tuple[int, SnapshotChunk] | None = None  # with the number of its request
    digest: tuple[int, bytes] | None = None

    def deliver(self, mirrors: Mirrors) -> None:
        mirrors.apply(self.replica, self.incarnation, self.events)
        if self.part is not None:
            mirrors.snapshot(self.replica, self.incarnation, *self.part)
        if self.digest is not None:
            mirrors.digest(self.replica, self.incarnation, *self.digest)


@dataclass(eq=False)
class Replica:
    """A cache, and the part of a replica that reports it."""

    name: str
    incarnation: int
    cache: PrefixCache
    seed: int = 0
    capacity: int = 40
    feed: Subscription = field(init=False)
    traffic: Traffic = field(init=False)
    request: tuple[int, int] | None = None  # number, and runs in a part
    chunks: Iterator[SnapshotChunk] | None = None

    def __post_init__(self) -> None:
        self.feed = self.cache.subscribe(self.capacity)
        self.traffic = Traffic(self.cache, Random(self.seed))

    def ask(self, request: SnapshotRequest, max_runs: int = 2) -> None:
        if request.incarnation == self.incarnation:
            self.request, self.chunks = (request.number, max_runs), None

    def message(self, *, with_digest: bool = False) -> Message:
        events, part = self.feed.take(), None
        if self.request is not None:
            number, max_runs = self.request
            # Captured when the events before it have been taken, and are sent before it.
            self.chunks = self.chunks or self.feed.snapshot_chunks(max_runs)
            chunk = next(self.chunks)
            part = number, chunk
            if chunk.is_last:
                self.request = self.chunks = None
        digest = self.feed.digest() if with_digest else None
        return Message(self.name, self.incarnation, events, part, digest)


def kept(cache: PrefixCache, stride: int) -> set[bytes]:
    """Hashes of those pages in a cache that an index with a stride keeps."""
    snapshot, names = cache.snapshot(), set()
    for run in snapshot.runs:
        hashes = run.page_hashes
        names |= {name for at, name in enumerate(hashes, run.start + 1) if at % stride == 0}
    return names


def assert_mirrored(mirrors: Mirrors, replica: Replica) -> None:
    """The mirror is complete, and has the cache's digest and pages, no others."""
    mirror, index = mirrors._mirrors[replica.name], mirrors.index
    expected = kept(replica.cache, index.stride)
    sequence, digest = replica.feed.digest()

    assert mirrors.is_known(replica.name)
    assert (mirror.sequence, mirror.digest) == (sequence, int.from_bytes(digest, "big"))
    assert all(index.has(mirror.column, name) for name in expected)
    assert mirrors.num_pages(replica.name) == len(expected)


def joined(mirrors: Mirrors, name: str = "a", incarnation: int = 1, num_pages: int = 64) -> Replica:
    """A replica with 2 tokens a page whose mirror is complete."""
    replica = Replica(name, incarnation, PrefixCache(num_pages, 2), capacity=1000)
    mirrors.add(name, incarnation)
    for request in mirrors.due_snapshots(0.0):
        replica.ask(request)
    replica.message().deliver(mirrors)
    assert_mirrored(mirrors, replica)
    return replica
