"""KV events with page hashes: subscriptions, snapshots, observers of evictions.

Hashes are computed only while there is a subscriber (or for a snapshot), once per page.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from ramify.cache.ghosts import REASONS
from ramify.cache.key import HASH_BYTES, chain_hashes, namespace_hash, split_hashes
from ramify.cache.pages import ID_BYTES, Pages
from ramify.cache.tree import RadixTree
from ramify.cache.types import validate_int

NO_PAGES = Pages()
MAX_RUNS = 1000  # of a chunk of a snapshot: 4 ms between two steps, for runs of 4 pages


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of a run of pages.

    `kind` is "stored" (computed, shared from now on), "removed" (evicted, for `reason`), "split" (the
    run now ends a node of its own; no page was added or removed) or "cleared" (no page is stored
    any more). Page i of the run has the hash `page_hashes[i]`, and `start + i` pages before it. The
    first page follows `parent_hash`, which is `namespace_hash` for the first page of a prompt. The
    namespace itself is not here: it has the tenant and the salt in clear.
    """

    sequence: int  # without gaps; a gap means that events were dropped
    kind: str
    namespace_hash: bytes = b""
    parent_hash: bytes = b""
    start: int = 0  # pages before the run
    hashes: bytes = b""  # packed, 16 bytes each
    pages: Pages = NO_PAGES
    reason: str = ""
    atoms: bytes = b""  # packed, of stored pages, for a subscription `with_atoms`
    tier: str = (
        ""  # that has the pages; empty: the pool. Subscriptions of a cache get those of the pool.
    )

    @property
    def page_hashes(self) -> list[bytes]:
        """`CacheKey.page_hashes` of these pages."""
        return split_hashes(self.hashes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All stored pages, as one "stored" event per run, parents first.

    A mirror that applies it, and then the events of greater sequence, has the cache's state.
    `digest` is the XOR of all page hashes: equal digests mean equal contents.
    """

    sequence: int
    runs: tuple[CacheEvent, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A part of a snapshot. All chunks of a snapshot have its `sequence` and its `digest`."""

    sequence: int
    number: int  # 0, 1, 2 …
    runs: tuple[CacheEvent, ...]
    is_last: bool
    digest: bytes


@dataclass(frozen=True, slots=True)
class Evicted:
    """An eviction, as observers see it: these page ids are about to be reused."""

    namespace: bytes
    atoms: bytes  # packed, of the evicted pages only
    start: int  # pages before them
    pages: Pages
    reason: str


class EventSink(Protocol):
    """Gets each event while the change is made; must neither raise nor call the cache."""

    with_atoms: bool  # whether its "stored" events carry the tokens

    def put(self, event: CacheEvent) -> None:
        """Take an event. The pages of "removed" are free by then, and not yet reused."""
        ...


class Subscription:
    """A queue of at most `capacity` events; the oldest are dropped when it is full."""

    def __init__(self, log: EventLog, capacity: int, with_atoms: bool) -> None:
        self._log, self.with_atoms = log, with_atoms
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self.num_dropped = 0

    def take(self) -> list[CacheEvent]:
        """All events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def digest(self) -> tuple[int, bytes]:
        """The sequence number of the last event, and the digest that a snapshot would have. O(1)."""
        return self._log.digest()

    def snapshot_chunks(self, max_runs: int = MAX_RUNS) -> Iterator[SnapshotChunk]:
        """A snapshot of this moment in chunks of at most `max_runs` runs, each made when taken.

        The cache may change between two chunks: all of them describe the moment of the call, which
        copies a few columns of the tree.

        Raises:
            ConfigError: `max_runs` is below 1.
        """
        return self._log.snapshot_chunks(validate_int("max_runs", max_runs, 1), self.with_atoms)

    def close(self) -> None:
        """End the subscription."""
        self._log.detach(self)

    def put(self, event: CacheEvent) -> None:
        """Append an event; drops the oldest if the queue is full."""
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)


class EventLog:
    """Makes events from changes of nodes, and delivers them."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.subscribers: list[EventSink] = []
        self.observers: dict[object, Callable[[Evicted], None]] = {}
        self._hashes: dict[int, bytes] = {}  # node → hashes of its stored pages
        self._pending_evictions: list[Evicted] = []
        self._sequence = 0
        self._digest = 0
        self._paused = False

    def subscribe(self, capacity: int, with_atoms: bool = False) -> Subscription:
        """Start a subscription. The first one hashes all stored pages."""
        subscription = Subscription(self, capacity, with_atoms)
        self.attach(subscription)
        return subscription

    def attach(self, sink: EventSink) -> None:
        """Put all later events into a sink. The first one hashes all stored pages."""
        if not self.subscribers:
            self._hash_all()
        self.subscribers.append(sink)

    def detach(self, sink: EventSink) -> None:
        """End `attach`; does nothing if it has ended."""
        if sink in self.subscribers:
            self.subscribers.remove(sink)
            self.drop_hashes_if_unread()

    def digest(self) -> tuple[int, bytes]:
        """The sequence number of the last event, and the XOR of all page hashes."""
        if not self.subscribers:
            self._hash_all()
        state = self._sequence, self._digest.to_bytes(HASH_BYTES, "big")
        self.drop_hashes_if_unread()
        return state

    def snapshot(self) -> Snapshot:
        """All stored pages, and the sequence number of the last event included."""
        chunks = list(self.snapshot_chunks(sys.maxsize))
        return Snapshot(chunks[0].sequence, chunks[0].runs, chunks[0].digest)

    def snapshot_chunks(self, max_runs: int, with_atoms: bool = False) -> Iterator[SnapshotChunk]:
        """A snapshot of this moment in chunks, each made when it is taken."""
        if not self.subscribers:
            self._hash_all()
        digest = self._digest.to_bytes(HASH_BYTES, "big")
        captured = _Captured(self._tree, self._hashes, with_atoms)
        chunks = _chunks(captured, self._sequence, digest, max_runs)
        self.drop_hashes_if_unread()
        return chunks

    def drop_hashes_if_unread(self) -> None:
        """Drop the hashes if there is no subscriber."""
        if not self.subscribers:
            self._hashes.clear()
            self._digest = 0
            self._sequence += 1  # changes until the next subscription are a gap

    def adopt_subscribers(self, other: EventLog) -> None:
        """Take over the subscribers and observers of `other`, and tell them that all is cleared."""
        self.subscribers, self.observers = other.subscribers, other.observers
        self._sequence = other._sequence
        for subscriber in self.subscribers:
            if isinstance(subscriber, Subscription):
                subscriber._log = self  # noqa: SLF001 - of this module
        self.cleared()

    # -- changes of nodes ------------------------------------------------------------------

    def stored(self, node: int) -> None:
        """Pages of a node became shared: the pages that have no hash yet."""
        num_known = len(self._hashes.get(node, b"")) // HASH_BYTES
        above, hashes = self._hash_node(node)
        pages = Pages(self._tree.pages[node][num_known * ID_BYTES :])
        self._put(self._event("stored", node, num_known, above, hashes, pages))

    def split(self, upper: int, lower: int) -> None:
        """A node was split."""
        known = self._hashes.pop(lower, b"")
        cut = self._tree.length[upper] * HASH_BYTES
        if known:
            self._hashes[upper] = known[:cut]
            tree = self._tree
            begin = tree.resident[upper] - tree.owned[upper]
            if tree.owned[upper]:
                above = known[: begin * HASH_BYTES][-HASH_BYTES:]
                above = above or self._last_hash(tree.parent[upper])
                pages = Pages(tree.pages[upper][begin * ID_BYTES :])
                hashes = known[begin * HASH_BYTES : cut]
                self._put(self._event("split", upper, begin, above, hashes, pages))
        if known[cut:]:
            self._hashes[lower] = known[cut:]

    def removed(self, node: int, packed: bytes, reason: int, begin: int) -> None:
        """Pages from page `begin` of a node on were evicted, or released outside the window."""
        tree, count = self._tree, len(packed) // ID_BYTES
        if not count:
            self._hashes.pop(node, None)
            return
        if self.observers:
            root, page_bytes = tree.root[node], tree.page_bytes
            atoms = tree.edge(node)[begin * page_bytes : (begin + count) * page_bytes]
            start = tree.start[node] + begin
            evicted = Evicted(tree.namespaces[root], atoms, start, Pages(packed), REASONS[reason])
            self._pending_evictions.append(evicted)
        known = self._hashes.get(node, b"")
        if known:
            gone = known[begin * HASH_BYTES : (begin + count) * HASH_BYTES]
            above_hash = known[: begin * HASH_BYTES][-HASH_BYTES:]
            above_hash = above_hash or self._last_hash(tree.parent[node])
            # Evicted pages lose their hashes. Released ones keep theirs: those of later pages chain on.
            if tree.resident[node] <= begin:
                keep = known[: tree.resident[node] * HASH_BYTES]
                if keep:
                    self._hashes[node] = keep
                else:
                    del self._hashes[node]
            self._digest ^= _xor_hashes(gone)
            pages = Pages(packed)
            self._put(self._event("removed", node, begin, above_hash, gone, pages, REASONS[reason]))

    def restored(self, node: int, num_pages: int) -> None:
        """The first `num_pages` pages of a node, which had been released, were computed again."""
        hashes = self._hashes[node][: num_pages * HASH_BYTES]
        self._digest ^= _xor_hashes(hashes)
        pages = Pages(self._tree.pages[node][: num_pages * ID_BYTES])
        above = self._last_hash(self._tree.parent[node])
        self._put(self._event("stored", node, 0, above, hashes, pages))

    def cleared(self) -> None:
        """All stored pages are gone, without an event for each."""
        self._paused = False
        if self.subscribers:
            self._put(CacheEvent(0, "cleared"))

    def pause(self) -> None:
        """Suppress events until `cleared`."""
        self._paused = True

    def observe(self, observer: Callable[[Evicted], None]) -> Callable[[], None]:
        """Call an observer at each eviction; returns the function that stops it."""
        observers, key = self.observers, object()
        observers[key] = observer

        def stop() -> None:
            observers.pop(key, None)

        return stop

    def notify_observers(self) -> None:
        """Call the observers of evictions; the cache is consistent again."""
        evictions, self._pending_evictions = self._pending_evictions, []
        # An ExitStack calls them all, even if one raises.
        with ExitStack() as calls:
            for evicted in reversed(evictions):
                for observer in reversed(self.observers.values()):
                    calls.callback(observer, evicted)

    # -- inside ----------------------------------------------------------------------------

    def _hash_all(self) -> None:
        for node in self._tree.nodes():
            if self._tree.resident[node] and not self._tree.leader[node]:
                self._hash_node(node)

    def _hash_node(self, node: int) -> tuple[bytes, bytes]:
        """Hash the pages of a node that have no hash yet; returns the hash before them, and theirs."""
        tree, known = self._tree, self._hashes.get(node, b"")
        first, page_bytes = len(known) // HASH_BYTES, tree.page_bytes
        above = known[-HASH_BYTES:] or self._last_hash(tree.parent[node])
        atoms = tree.edge(node)[first * page_bytes : tree.resident[node] * page_bytes]
        hashes = chain_hashes(above, atoms, page_bytes, tree.content_from(node, first))
        self._hashes[node] = known + hashes
        num_released = max(0, tree.resident[node] - tree.owned[node] - first)
        self._digest ^= _xor_hashes(hashes[num_released * HASH_BYTES :])
        return above, hashes

    def _last_hash(self, node: int) -> bytes:
        if node in self._tree.namespaces:
            return self._root_hash(node)
        return self._hashes[node][-HASH_BYTES:]

    def _root_hash(self, root: int) -> bytes:
        return namespace_hash(self._tree.namespaces[root])

    def _event(
        self,
        kind: str,
        node: int,
        begin: int,
        above: bytes,
        hashes: bytes,
        pages: Pages,
        reason: str = "",
    ) -> CacheEvent:
        """An event about a node's pages from its page `begin` on."""
        tree, root = self._tree, self._tree.root[node]
        start = tree.start[node] + begin
        atoms = b""
        if kind == "stored" and any(reader.with_atoms for reader in self.subscribers):
            end = begin + len(hashes) // HASH_BYTES
            atoms = tree.edge(node)[begin * tree.page_bytes : end * tree.page_bytes]
        return CacheEvent(
            0, kind, self._root_hash(root), above, start, hashes, pages, reason, atoms
        )

    def _put(self, event: CacheEvent) -> None:
        if self._paused:
            return
        self._sequence += 1
        numbered = replace(event, sequence=self._sequence)
        without_atoms = replace(numbered, atoms=b"") if event.atoms else numbered
        for subscriber in self.subscribers:
            subscriber.put(numbered if subscriber.with_atoms else without_atoms)


class _Captured:
    """The stored pages of a tree at one moment, in copies of its columns.

    Copying takes 6 ms for 20,000 nodes, describing their runs 110 ms: that is left to whoever takes
    the chunks.
    """

    def __init__(self, tree: RadixTree, hashes: dict[int, bytes], with_atoms: bool) -> None:
        self.hashes, self.namespaces = dict(hashes), dict(tree.namespaces)
        self.edges = tree.edges[:] if with_atoms else None
        self.page_bytes = tree.page_bytes
        self.root, self.parent, self.start = tree.root[:], tree.parent[:], tree.start[:]
        self.resident, self.owned, self.pages = tree.resident[:], tree.owned[:], tree.pages[:]

    def runs(self, sequence: int) -> Iterator[CacheEvent]:
        """A "stored" event for each node with stored pages, parents first."""
        roots = {root: namespace_hash(name) for root, name in self.namespaces.items()}
        for node in sorted(self.hashes, key=self.start.__getitem__):
            if not self.owned[node]:
                continue
            known, parent = self.hashes[node], self.parent[node]
            begin = self.resident[node] - self.owned[node]
            above = known[: begin * HASH_BYTES][-HASH_BYTES:] or roots.get(parent)
            atoms = b""
            if self.edges is not None:
                first, end = begin * self.page_bytes, self.resident[node] * self.page_bytes
                atoms = bytes(self.edges[node][first:end])
            yield CacheEvent(
                sequence,
                "stored",
                roots[self.root[node]],
                self.hashes[parent][-HASH_BYTES:] if above is None else above,
                self.start[node] + begin,
                known[begin * HASH_BYTES :],
                Pages(self.pages[node][begin * ID_BYTES :]),
                atoms=atoms,
            )


def _chunks(
    captured: _Captured, sequence: int, digest: bytes, max_runs: int
) -> Iterator[SnapshotChunk]:
    """The runs of a captured tree, at most `max_runs` together; one empty chunk if there are none."""
    runs, number = captured.runs(sequence), 0
    following = tuple(islice(runs, max_runs))
    while True:
        part, following = following, tuple(islice(runs, max_runs))
        yield SnapshotChunk(sequence, number, part, not following, digest)
        if not following:
            return
        number += 1


def _xor_hashes(hashes: bytes) -> int:
    """The XOR of packed hashes."""
    digest = 0
    for start in range(0, len(hashes), HASH_BYTES):
        digest ^= int.from_bytes(hashes[start : start + HASH_BYTES], "big")
    return digest
