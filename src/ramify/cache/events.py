"""What changed in a cache, for mirrors and stores: a bounded log with page hashes.

Hashes are computed only while somebody subscribes (or asks for a snapshot), once per page.
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
    """One change, about a run of pages.

    `kind` is "stored" (computed and shared from now on), "removed" (evicted; `reason` says why),
    "split" (the run now ends a node of its own; nothing came or went) or "cleared" (all that was
    stored is gone). A run's page i has the hash `page_hashes[i]` and follows the one before it;
    the first follows `parent_hash`, which is the namespace's hash for the first page of a prompt.
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
    """All that is stored, as one "stored" event per run, parents first.

    Who applies it, and then the events with a greater sequence, has the cache's state.
    `digest` is the XOR of all page hashes: equal digests mean equal contents.
    """

    sequence: int
    runs: tuple[CacheEvent, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an observer of evictions is told: page ids that are about to be reused."""

    namespace: bytes
    atoms: bytes  # packed, of the evicted pages only
    start: int  # pages before them
    pages: Pages
    reason: str


class Subscription:
    """A bounded queue of events; the oldest are dropped when nobody takes them.

    Args:
        capacity: events kept.
    """

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
        """Get no more events."""
        if self in self._log.subscribers:
            self._log.subscribers.remove(self)
            self._log.drop_hashes_if_unread()

    def put(self, event: CacheEvent) -> None:
        """Append an event, over the oldest if need be."""
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)


class EventLog:
    """Makes events of what happens to nodes."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.subscribers: list[Subscription] = []
        self.observers: list[Callable[[Evicted], None]] = []
        self._hashes: dict[int, bytes] = {}  # node → hashes of its stored pages
        self._pending_evictions: list[Evicted] = []
        self._sequence = 0
        self._digest = 0
        self._paused = False

    def subscribe(self, capacity: int) -> Subscription:
        """Begin to log; what is stored already is hashed now."""
        if not self.subscribers:
            self._hash_all()
        subscription = Subscription(self, capacity)
        self.subscribers.append(subscription)
        return subscription

    def snapshot(self) -> Snapshot:
        """What is stored, and the number of the last event that it includes."""
        if not self.subscribers:
            self._hash_all()
        runs = []
        for node in self._tree.nodes():
            if node in self._hashes:
                pages = Pages(self._tree.packed_pages(node))
                runs.append(self._event("stored", node, self._hashes[node], pages))
        snapshot = Snapshot(self._sequence, tuple(runs), self._digest.to_bytes(HASH_BYTES, "big"))
        if not self.subscribers:
            self.drop_hashes_if_unread()
        return snapshot

    def drop_hashes_if_unread(self) -> None:
        """Drop the hashes when nobody is left who reads them."""
        if not self.subscribers:
            self._hashes.clear()
            self._digest = 0
            self._sequence += 1  # whatever happens until somebody subscribes is a gap

    def adopt_subscribers(self, other: EventLog) -> None:
        """Tell those who listened to `other` that all is gone, and what comes from now on."""
        self.subscribers, self.observers = other.subscribers, other.observers
        self._sequence = other._sequence
        for subscriber in self.subscribers:
            subscriber._log = self  # noqa: SLF001 - of this module
        self.cleared()

    # -- what happens to nodes -------------------------------------------------------------

    def stored(self, node: int) -> None:
        """Pages of a node became shared: those that have no hash yet."""
        tree, known = self._tree, self._hashes.get(node, b"")
        count, first = tree.resident[node], len(known) // HASH_BYTES
        page_bytes = tree.page_bytes
        above = known[-HASH_BYTES:] or self._last_hash(tree.parent[node])
        hashes = chain_hashes(
            above,
            tree.edge(node)[first * page_bytes : count * page_bytes],
            page_bytes,
            tree.content_from(node, first),
        )
        self._hashes[node] = known + hashes
        self._digest ^= _xor_hashes(hashes)
        pages = Pages(tree.packed_pages(node)[first * ID_BYTES :])
        self._put(self._event("stored", node, hashes, pages, above))

    def split(self, upper: int, lower: int) -> None:
        """A node was cut in two."""
        known = self._hashes.pop(lower, b"")
        cut = self._tree.length[upper] * HASH_BYTES
        if known:
            self._hashes[upper] = known[:cut]
            pages = Pages(self._tree.packed_pages(upper))
            self._put(self._event("split", upper, known[:cut], pages))
        if known[cut:]:
            self._hashes[lower] = known[cut:]

    def removed(self, node: int, packed: bytes, reason: int) -> None:
        """Pages were taken off the tail of a node."""
        tree, count = self._tree, len(packed) // ID_BYTES
        start = tree.resident[node]
        if self.observers:
            at, page_bytes = tree.root[node], tree.page_bytes
            atoms = tree.edge(node)[start * page_bytes : (start + count) * page_bytes]
            above = tree.start[node] + start
            told = Evicted(tree.namespaces[at], atoms, above, Pages(packed), REASONS[reason])
            self._pending_evictions.append(told)
        known = self._hashes.pop(node, b"")
        if known:
            keep, gone = known[: start * HASH_BYTES], known[start * HASH_BYTES :]
            if keep:
                self._hashes[node] = keep
            self._digest ^= _xor_hashes(gone)
            above_hash = keep[-HASH_BYTES:] or self._last_hash(tree.parent[node])
            event = self._event("removed", node, gone, Pages(packed), above_hash, REASONS[reason])
            self._put(event)

    def cleared(self) -> None:
        """All that was stored is gone, which was not told page by page."""
        self._paused = False
        if self.subscribers:
            self._put(CacheEvent(0, "cleared"))

    def pause(self) -> None:
        """Tell nothing page by page until `cleared`."""
        self._paused = True

    def observe(self, observer: Callable[[Evicted], None]) -> Callable[[], None]:
        """Have an observer called from now on; returns how to stop that."""
        observers, is_on = self.observers, True
        observers.append(observer)

        def stop() -> None:
            nonlocal is_on
            if is_on:
                is_on = False
                observers.remove(observer)

        return stop

    def notify_observers(self) -> None:
        """Call the observers of what was evicted, now that the cache is consistent again."""
        told, self._pending_evictions = self._pending_evictions, []
        with ExitStack() as calls:  # all are called, also if one of them raises
            for evicted in reversed(told):
                for observer in reversed(self.observers):
                    calls.callback(observer, evicted)

    # -- inside ----------------------------------------------------------------------------

    def _hash_all(self) -> None:
        tree = self._tree
        for node in tree.nodes():
            if tree.resident[node] and not tree.leader[node]:
                atoms = tree.edge(node)[: tree.resident[node] * tree.page_bytes]
                above = self._last_hash(tree.parent[node])
                hashes = chain_hashes(above, atoms, tree.page_bytes, tree.content_from(node, 0))
                self._hashes[node] = hashes
                self._digest ^= _xor_hashes(hashes)

    def _last_hash(self, node: int) -> bytes:
        namespace = self._tree.namespaces.get(node)
        if namespace is not None:
            return namespace_hash(namespace)
        return self._hashes[node][-HASH_BYTES:]

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
    folded = 0
    for at in range(0, len(hashes), HASH_BYTES):
        folded ^= int.from_bytes(hashes[at : at + HASH_BYTES], "big")
    return folded
