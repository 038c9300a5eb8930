"""The prefix cache: match / acquire / reserve / announce / publish / withdraw / release / check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from ramify.cache.eviction import EvictionQueue
from ramify.cache.key import ATOM_BYTES, CacheKey
from ramify.cache.pages import PageLedger
from ramify.cache.tree import Node, RadixTree
from ramify.cache.values import CacheStats, Lease, Match
from ramify.errors import InvariantError, LeaseError, OutOfPagesError, PageOwnershipError


@dataclass(slots=True)
class _Held:
    """What the cache knows of a live lease."""

    lease: Lease
    node: Node  # the lease ends at this node's end; splits keep that true
    holder: int  # passed on from a lease to the one that replaces it
    asked: int  # tokens that its lookup added to the statistics
    hit: int  # and how many of them it found
    withdrawn: bool = False


class PrefixCache:
    """Which pages hold which prefix. Ints in, ints out; single-threaded by contract.

    Args:
        num_pages: pages 0 .. num_pages - 1 of the caller's storage.
        page_size: tokens per page, at least 1.
        policy: name of an eviction policy; see `ramify.cache.eviction.POLICIES`.

    Every call either succeeds or raises and changes nothing.
    """

    def __init__(self, num_pages: int, page_size: int = 16, *, policy: str = "lru") -> None:
        self.page_size = page_size
        self._tree = RadixTree(page_size)
        self._ledger = PageLedger(num_pages)
        self._queue = EvictionQueue(policy)
        self._held: dict[int, _Held] = {}
        self._ids = count(1)
        self._holders = count(1)
        self._clock = 0
        self._num_evictable = 0
        self._lookups = self._lookup_tokens = self._hit_tokens = self._evicted_pages = 0

    # -- looking ---------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages managed, whoever owns them."""
        return self._ledger.num_pages

    @property
    def num_available(self) -> int:
        """Pages that `reserve` could hand out now: free ones and evictable ones."""
        return self._ledger.num_free + self._num_evictable

    def is_free(self, page: int) -> bool:
        """Whether nobody owns this page."""
        return self._ledger.is_free(page)

    def match(self, key: CacheKey) -> Match:
        """The longest computed prefix of `key`, shorter than it; changes nothing.

        Cost: a few memcmps per node on the path.
        """
        node, covered = self._tree.walk(key, self._usable_pages(key), pending=False)
        pages = 0 if node is None else node.depth - len(node.pages) + covered
        return Match(pages * self.page_size, pages)

    def stats(self) -> CacheStats:
        """Counters and occupancy."""
        ledger = self._ledger
        return CacheStats(
            num_pages=ledger.num_pages,
            page_size=self.page_size,
            free_pages=ledger.num_free,
            private_pages=ledger.num_private,
            cached_pages=ledger.num_tree,
            evictable_pages=self._num_evictable,
            num_nodes=self._tree.num_nodes,
            num_leases=len(self._held),
            lookups=self._lookups,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            evicted_pages=self._evicted_pages,
        )

    # -- leases ----------------------------------------------------------------------------

    def acquire(self, key: CacheKey) -> Lease:
        """Pin the longest computed prefix of `key`, shorter than it; it may be empty."""
        return self._acquire(key, pending=False)

    def attach(self, key: CacheKey) -> Lease:
        """Like `acquire`, but pages that a live leader has announced count too.

        For a planner alone: it must run the caller and the leader in one step, or the caller
        after it.
        """
        return self._acquire(key, pending=True)

    def cancel(self, lease: Lease) -> None:
        """Undo an `acquire` or `attach` whose lease was not used: statistics too.

        Raises:
            LeaseError: the lease is not live, or grew by `announce` or `publish` (`release` it).
        """
        held = self._require(lease, withdrawn=True)
        if lease.num_tokens != held.hit:
            raise LeaseError(
                f"lease {lease.id} grew from {held.hit} to {lease.num_tokens} tokens; "
                "release it instead"
            )
        self._lookups -= 1
        self._lookup_tokens -= held.asked
        self._hit_tokens -= held.hit
        for node in self._tree.path(held.node):
            node.hits -= 1
        self._drop(held)

    def release(self, lease: Lease, private: Sequence[int] = ()) -> None:
        """End a lease; `private` pages of its owner become free. Published pages stay warm.

        Pages that this lease announced and never published are freed too.

        Raises:
            LeaseError: the lease is not live, or others depend on what it announced
                (`withdraw` first).
            PageOwnershipError: a page of `private` is not private.
        """
        held = self._require(lease, withdrawn=True)
        self._ledger.require_private(private)
        if announced := self._announced(held):
            if announced[0].pins > 1:
                raise LeaseError(
                    f"{announced[0].pins - 1} other leases depend on pages that lease {lease.id} "
                    "announced and did not compute; withdraw it first"
                )
            self._remove_pending(announced[0], [held])
        self._ledger.give_back(private)
        self._touch(held.node)
        self._drop(held)

    # -- pages -----------------------------------------------------------------------------

    def reserve(self, num_pages: int) -> list[int]:
        """Hand out pages as private ones, evicting the least valuable if too few are free.

        Raises:
            OutOfPagesError: even evicting everything would not give enough; nothing changed.
        """
        missing = num_pages - self._ledger.num_free
        if missing > self._num_evictable:
            raise OutOfPagesError(
                num_pages, self._ledger.num_free, self._num_evictable, self.num_pages
            )
        if missing > 0:
            self.evict(missing)
        return self._ledger.take(num_pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Private pages that belong to no lease become free."""
        self._ledger.give_back(pages)

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` pages, from the tails of the policy's leaves; returns how many.

        Cost: O(log n) per leaf touched.
        """
        evicted = 0
        while evicted < num_pages and (node := self._queue.pop()) is not None:
            parent = node.parent
            cut = self._tree.trim(node, min(len(node.pages), num_pages - evicted))
            self._ledger.reclaim(cut)
            self._num_evictable -= len(cut)
            evicted += len(cut)
            for next_leaf in (node, parent):
                assert next_leaf is not None
                self._queue.offer(next_leaf, self._tree.num_nodes)
            self._tree.drop_empty_root(node.namespace)
        self._evicted_pages += evicted
        return evicted

    def clear(self) -> int:
        """Evict everything that no lease pins; returns the number of pages."""
        return self.evict(self._num_evictable)

    # -- a prefix's way into the tree ------------------------------------------------------

    def announce(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> Lease:
        """Put the pages that are about to be computed into the tree as a pending node.

        `key` begins with the lease's prefix; its whole pages beyond it are taken from the head
        of `private`. If the tree already knows the next page, nothing is announced and the
        lease comes back as it is.

        Raises:
            LeaseError: the lease is not live, or `key` does not extend its prefix.
            PageOwnershipError: too few pages, or one that is not private.
        """
        held = self._require(lease)
        grown = self._extent(lease, key, private)
        start, end = lease.num_tokens, lease.num_tokens + grown * self.page_size
        atoms = key.atoms[start * ATOM_BYTES : end * ATOM_BYTES]
        if not grown or atoms[: self._tree.page_bytes] in held.node.children:
            return lease
        pages = list(private[:grown])
        self._ledger.adopt(pages)
        node = self._tree.add_child(held.node, atoms, pages, held.holder)
        node.pins = 1
        self._touch(node)
        num_pending = sum(len(step.pages) for step in self._tree.path(node) if step.holder)
        return self._replace(held, node, key.prefix(end), lease.pages + tuple(pages), num_pending)

    def publish(self, lease: Lease, key: CacheKey, private: Sequence[int] = ()) -> Lease:
        """Say that the K/V of `key` is computed: its whole pages become shared.

        What the lease announced becomes ready; further whole pages are taken from the head of
        `private`. Where the tree has such a page already, the private duplicate becomes free:
        use the pages of the returned lease from now on, then those of `private` beyond the
        `len(new.pages) - len(old.pages)` that were taken.

        Raises:
            LeaseError: the lease is not live; `key` is shorter than what it announced or does
                not extend its prefix; or it depends on pages that their leader has not
                published (publish the leader first).
            PageOwnershipError: too few pages, or one that is not private.
        """
        held = self._require(lease)
        grown = self._extent(lease, key, private)
        announced = self._announced(held)
        base = announced[0].parent if announced else held.node
        if base is not None and base.is_pending:
            raise LeaseError(
                f"lease {lease.id} depends on pages that are not computed yet; "
                "publish their leader first"
            )
        for node in announced:
            node.holder = 0
        start = len(lease.pages)
        node, pages = self._insert(held, key, start, list(private[:grown]))
        end = (start + len(pages)) * self.page_size
        return self._replace(held, node, key.prefix(end), lease.pages + tuple(pages), 0)

    def withdraw(self, lease: Lease) -> list[Lease]:
        """Take back what a lease announced and did not compute; its pages become free.

        Returns the other leases that depended on those pages. They, and `lease` itself, now pin
        only what is computed: their owners may read nothing through them, and release them.
        """
        held = self._require(lease)
        announced = self._announced(held)
        if not announced:
            return []
        doomed = set(self._tree.nodes(announced[0]))
        dependents = [other for other in self._held.values() if other.node in doomed]
        self._remove_pending(announced[0], dependents)
        return [other.lease for other in dependents if other is not held]

    def is_blocked(self, lease: Lease) -> bool:
        """Whether the prefix of a lease depends on pages that another leader is to publish."""
        held = self._require(lease, withdrawn=True)
        announced = self._announced(held)
        base = announced[0].parent if announced else held.node
        return base is not None and base.is_pending

    def is_withdrawn(self, lease: Lease) -> bool:
        """Whether a live lease lost pages to a withdrawal and can only be released."""
        return self._require(lease, withdrawn=True).withdrawn

    # -- checking --------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything: owners of pages, pins, evictable pages, links.

        Raises:
            InvariantError: a contradiction, which is a bug in Ramify.
        """
        self._tree.check()
        nodes = list(self._tree.nodes())
        self._ledger.check([page for node in nodes for page in node.pages])
        pins: Counter[int] = Counter()
        for held in self._held.values():
            at: Node | None = held.node
            while at is not None:
                pins[id(at)] += 1
                at = at.parent
        for node in [*nodes, *self._tree.roots.values()]:
            if node.pins != pins.pop(id(node), 0):
                raise InvariantError(f"a node's {node.pins} pins are not those of the leases")
        if pins:
            raise InvariantError(f"{len(pins)} pinned nodes have left the tree")
        holders = {held.holder for held in self._held.values()}
        if any(node.holder and node.holder not in holders for node in nodes):
            raise InvariantError("a pending node's leader is gone")
        evictable = sum(len(node.pages) for node in nodes if node.pins == 0)
        if evictable != self._num_evictable:
            raise InvariantError(f"{evictable} pages are evictable, {self._num_evictable} counted")

    # -- inside ----------------------------------------------------------------------------

    def _usable_pages(self, key: CacheKey) -> int:
        return max(0, len(key) - 1) // self.page_size  # at least one token is always computed

    def _acquire(self, key: CacheKey, *, pending: bool) -> Lease:
        tree = self._tree
        node, covered = tree.walk(key, self._usable_pages(key), pending=pending)
        if node is None:
            node = tree.root(key.namespace)
        elif covered < len(node.pages):
            node = tree.split(node, covered)
        pages: list[int] = []
        num_pending = 0
        for step in tree.path(node):
            step.hits += 1
            pages.extend(step.pages)
            num_pending += len(step.pages) if step.holder else 0
        self._pin(node)
        hit = len(pages) * self.page_size
        self._lookups += 1
        self._lookup_tokens += len(key)
        self._hit_tokens += hit
        lease = Lease(next(self._ids), key.prefix(hit), tuple(pages), num_pending)
        self._held[lease.id] = _Held(lease, node, next(self._holders), len(key), hit)
        return lease

    def _insert(
        self, held: _Held, key: CacheKey, start: int, private: list[int]
    ) -> tuple[Node, list[int]]:
        """Insert pages from page `start` of `key` on, below the lease's node.

        Returns the deepest node and the canonical pages on the way. Pins move along; duplicates
        become free.
        """
        tree, base, pages = self._tree, held.node, list[int]()
        goal = start + len(private)
        node, covered = tree.walk(key, goal, pending=False, start=base)
        assert node is not None
        if node is not base:
            node = tree.split(node, covered) if covered < len(node.pages) else node
            for step in tree.path(node):
                if step.depth > base.depth:
                    pages.extend(step.pages)
            self._pin(node, above=base)
        rest = private[len(pages) :]
        self._ledger.give_back(private[: len(pages)])
        begin = (start + len(pages)) * tree.page_bytes
        atoms = key.atoms[begin : goal * tree.page_bytes]
        if rest and atoms[: tree.page_bytes] not in node.children:
            self._ledger.adopt(rest)
            if node.pins == 1 and node.is_leaf and node.parent is not None:
                tree.extend(node, atoms, rest)  # nobody else's prefix ends in this node
            else:
                node = tree.add_child(node, atoms, rest, 0)
                node.pins = 1
            pages.extend(rest)
        self._touch(node)
        return node, pages

    def _extent(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> int:
        """How many whole pages of `key` lie beyond the lease; checks key and pages."""
        if key.namespace != lease.key.namespace or not key.atoms.startswith(lease.key.atoms):
            raise LeaseError(f"the key does not begin with the prefix of lease {lease.id}")
        self._ledger.require_private(private)
        grown = key.num_pages(self.page_size) - len(lease.pages)
        if grown > len(private):
            raise PageOwnershipError(
                f"the key has {grown} whole pages beyond lease {lease.id} but only "
                f"{len(private)} private pages were given"
            )
        return grown

    def _announced(self, held: _Held) -> list[Node]:
        """The pending nodes that this lease's holder is to compute, topmost first."""
        found, node = [], held.node
        while node.holder == held.holder and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def _remove_pending(self, top: Node, dependents: list[_Held]) -> None:
        """Remove a pending subtree, all of whose leases are `dependents`; they move up."""
        parent = top.parent
        assert parent is not None
        for node in reversed(list(self._tree.nodes(top))):
            self._tree.remove(node)
            self._ledger.reclaim(node.pages)
        for held in dependents:
            held.node, held.withdrawn = parent, True

    def _replace(
        self, held: _Held, node: Node, key: CacheKey, pages: tuple[int, ...], num_pending: int
    ) -> Lease:
        lease = Lease(next(self._ids), key, pages, num_pending)
        del self._held[held.lease.id]
        self._held[lease.id] = held
        held.lease, held.node = lease, node
        return lease

    def _require(self, lease: Lease, *, withdrawn: bool = False) -> _Held:
        held = self._held.get(lease.id)
        if held is None or held.lease is not lease:
            raise LeaseError(
                f"lease {lease.id} is not live here: it was released, replaced by a newer one, "
                "or belongs to another cache"
            )
        if held.withdrawn and not withdrawn:
            raise LeaseError(f"lease {lease.id} lost pages to a withdrawal; release it")
        return held

    def _drop(self, held: _Held) -> None:
        namespace = held.lease.key.namespace
        del self._held[held.lease.id]
        at: Node | None = held.node
        while at is not None:
            at.pins -= 1
            if at.pins == 0 and at.parent is not None:
                self._num_evictable += len(at.pages)
            at = at.parent
        self._queue.offer(held.node, self._tree.num_nodes)
        self._tree.drop_empty_root(namespace)

    def _pin(self, node: Node, above: Node | None = None) -> None:
        """One more pin on `node` and its ancestors, up to but without `above`."""
        at: Node | None = node
        while at is not None and at is not above:
            if at.pins == 0 and at.parent is not None:
                self._num_evictable -= len(at.pages)
            at.pins += 1
            at = at.parent

    def _touch(self, node: Node) -> None:
        """Make a path the most recently used. A pin alone does not: while it lasts, recency has no
        use, and when it is cancelled, nothing may have changed.
        """  # noqa: D205
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.last_access = self._clock
            at = at.parent
