"""KV events with page hashes: subscriptions, snapshots, observers of evictions.

Hashes are computed only while there is a subscriber (or for a snapshot), once per page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ramify.cache.ghosts import REASONS
from ramify.cache.key import HASH_BYTES, chain_hashes, namespace_hash, split_hashes
from ramify.cache.pages import ID_BYTES, Pages
from ramify.cache.tree import RadixTree

NO_PAGES = Pages()


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of a run of pages.

    `kind` is "stored" (computed, shared from now on), "removed" (evicted, for `reason`), "split" (the
    run now ends a node of its own; no page was added or removed) or "cleared" (no page is stored
    any more). Page i of the run has the hash `page_hashes[i]`. The first page follows `parent_hash`,
    which is the namespace's hash for the first page of a prompt.
    """

    sequence: int  # without gaps; a gap means that events were dropped
    kind: str
    namespace: bytes = b""
    parent_hash: bytes = b""
    hashes: bytes = b""  # packed, 16 bytes each
    pages: Pages = NO_PAGES
    reason: str = ""

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
class Evicted:
    """An eviction, as observers see it: these page ids are about to be reused."""

    namespace: bytes
    atoms: bytes  # packed, of the evicted pages only
    start: int  # pages before them
    pages: Pages
    reason: str


class Subscription:
    """A queue of at most `capacity` events; the oldest are dropped when it is full."""

    def __init__(self, log: EventLog, capacity: int) -> None:
        self._log = log
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self.num_dropped = 0

    def take(self) -> list[CacheEvent]:
        """All events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        """End the subscription."""
        if self in self._log.subscribers:
            self._log.subscribers.remove(self)
            self._log.drop_hashes_if_unread()

    def put(self, event: CacheEvent) -> None:
        """Append an event; drops the oldest if the queue is full."""
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)


class EventLog:
    """Makes events from changes of nodes, and delivers them."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.subscribers: list[Subscription] = []
        self.observers: dict[object, Callable[[Evicted], None]] = {}
        self._hashes: dict[int, bytes] = {}  # node → hashes of its stored pages
        self._pending_evictions: list[Evicted] = []
        self._sequence = 0
        self._digest = 0
        self._paused = False

    def subscribe(self, capacity: int) -> Subscription:
        """Start a subscription. The first one hashes all stored pages."""
        if not self.subscribers:
            self._hash_all()
        subscription = Subscription(self, capacity)
        self.subscribers.append(subscription)
        return subscription

    def snapshot(self) -> Snapshot:
        """All stored pages, and the sequence number of the last event included."""
        if not self.subscribers:
            self._hash_all()
        runs = []
        for node in self._tree.nodes():
            if node in self._hashes and (run := self._stored_run("stored", node)):
                runs.append(run)
        snapshot = Snapshot(self._sequence, tuple(runs), self._digest.to_bytes(HASH_BYTES, "big"))
        self.drop_hashes_if_unread()
        return snapshot

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
            subscriber._log = self  # noqa: SLF001 - of this module
        self.cleared()

    # -- changes of nodes ------------------------------------------------------------------

    def stored(self, node: int) -> None:
        """Pages of a node became shared: the pages that have no hash yet."""
        num_known = len(self._hashes.get(node, b"")) // HASH_BYTES
        above, hashes = self._hash_node(node)
        pages = Pages(self._tree.pages[node][num_known * ID_BYTES :])
        self._put(self._event("stored", node, hashes, pages, above))

    def split(self, upper: int, lower: int) -> None:
        """A node was split."""
        known = self._hashes.pop(lower, b"")
        cut = self._tree.length[upper] * HASH_BYTES
        if known:
            self._hashes[upper] = known[:cut]
            if run := self._stored_run("split", upper):
                self._put(run)
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
            above = tree.start[node] + begin
            evicted = Evicted(tree.namespaces[root], atoms, above, Pages(packed), REASONS[reason])
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
            event = self._event("removed", node, gone, Pages(packed), above_hash, REASONS[reason])
            self._put(event)

    def restored(self, node: int, num_pages: int) -> None:
        """The first `num_pages` pages of a node, which had been released, were computed again."""
        hashes = self._hashes[node][: num_pages * HASH_BYTES]
        self._digest ^= _xor_hashes(hashes)
        pages = Pages(self._tree.pages[node][: num_pages * ID_BYTES])
        self._put(self._event("stored", node, hashes, pages))

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
        namespace = self._tree.namespaces.get(node)
        if namespace is not None:
            return namespace_hash(namespace)
        return self._hashes[node][-HASH_BYTES:]

    def _stored_run(self, kind: str, node: int) -> CacheEvent | None:
        """An event about the pages that a node owns; None if all are released."""
        tree, known = self._tree, self._hashes[node]
        begin = tree.resident[node] - tree.owned[node]
        if not tree.owned[node]:
            return None
        above = known[: begin * HASH_BYTES][-HASH_BYTES:] or None
        pages = Pages(tree.pages[node][begin * ID_BYTES :])
        return self._event(kind, node, known[begin * HASH_BYTES :], pages, above)

    def _event(
        self,
        kind: str,
        node: int,
        hashes: bytes,
        pages: Pages,
        above: bytes | None = None,
        reason: str = "",
    ) -> CacheEvent:
        tree = self._tree
        parent_hash = self._last_hash(tree.parent[node]) if above is None else above
        namespace = tree.namespaces[tree.root[node]]
        return CacheEvent(0, kind, namespace, parent_hash, hashes, pages, reason)

    def _put(self, event: CacheEvent) -> None:
        if self._paused:
            return
        self._sequence += 1
        numbered = replace(event, sequence=self._sequence)
        for subscriber in self.subscribers:
            subscriber.put(numbered)


def _xor_hashes(hashes: bytes) -> int:
    """The XOR of packed hashes."""
    digest = 0
    for start in range(0, len(hashes), HASH_BYTES):
        digest ^= int.from_bytes(hashes[start : start + HASH_BYTES], "big")
    return digest
