"""The prefix cache: match / acquire / reserve / announce / publish / withdraw / release."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count

from ramify.cache.audit import check_cache
from ramify.cache.eviction import POLICIES, EvictionQueue
from ramify.cache.ghosts import ASKED, CAPACITY, CLEARED, WITHDRAWN, Ghosts
from ramify.cache.hash_index import HashIndex
from ramify.cache.key import ATOM_BYTES, CacheKey, shared_pages
from ramify.cache.pages import ID_BYTES, PageLedger, Pages, pack_pages
from ramify.cache.tree import SHARDS, ChildIndex, PageIndex, RadixTree
from ramify.cache.values import CacheStats, Lease, Match
from ramify.errors import ConfigError, LeaseError, OutOfPagesError, PageOwnershipError

INDICES: dict[str, Callable[[RadixTree], ChildIndex]] = {"radix": PageIndex, "hash": HashIndex}


class PrefixCache:
    """Which pages hold which prefix. Ints in, ints out; single-threaded by contract.

    Args:
        num_pages: pages 0 .. num_pages - 1 of the caller's storage.
        page_size: tokens per page, at least 1.
        policy: name of an eviction policy; see `ramify.cache.eviction.POLICIES`.
        index: "radix" or "hash": how pages are found. Same results, another cost.
        ghost_pages: evicted pages that are remembered, for explanations and the policy; by default
            as many as there are pages.
        clock: seconds, never going back; for ages and times to live.

    Every call either succeeds or raises and changes nothing.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        policy: str = "lru",
        index: str = "radix",
        ghost_pages: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"unknown eviction policy {policy!r}; one of {sorted(POLICIES)}")
        if index not in INDICES:
            raise ConfigError(f"unknown index {index!r}; one of {sorted(INDICES)}")
        self.page_size = page_size
        self.policy, self.index = policy, index
        self._tree = tree = RadixTree(page_size)
        tree.index = INDICES[index](tree)
        self._page_bytes = tree.page_bytes
        self._ledger = PageLedger(num_pages)
        self._queue = EvictionQueue(tree, POLICIES[policy])
        self._ghosts = Ghosts(tree, num_pages if ghost_pages is None else ghost_pages)
        self._now_s = clock
        self._leases: dict[int, Lease] = {}
        self._ids = count(1)
        self._clock = 0  # lookups, cancelled ones included
        self._num_evictable = 0
        self._lookups = self._lookup_tokens = self._hit_tokens = self._ideal_tokens = 0
        self._evicted_pages = 0

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
        """Whether nobody owns this page. O(num_pages): for checks."""
        return self._ledger.is_free(page)

    def match(self, key: CacheKey) -> Match:
        """The longest computed prefix of `key`, shorter than it; changes nothing.

        Cost: a few memcmps per node on the path.
        """
        tree = self._tree
        root = tree.roots.get(key.namespace)
        if root is None:
            return Match(0, 0)
        path, part, covered = tree.find(root, key.atoms, self._usable(key), pending=False)
        if part:
            pages = tree.start[part] + covered
        else:
            pages = tree.start[path[-1]] + tree.length[path[-1]] if path else 0
        return Match(pages * self.page_size, pages)

    def stats(self) -> CacheStats:
        """Counters and occupancy."""
        ledger, tree = self._ledger, self._tree
        return CacheStats(
            num_pages=ledger.num_pages,
            page_size=self.page_size,
            free_pages=ledger.num_free,
            private_pages=ledger.num_private,
            cached_pages=ledger.num_tree,
            evictable_pages=self._num_evictable,
            ghost_pages=tree.num_ghost_pages,
            num_nodes=tree.num_nodes - tree.num_ghosts,
            num_leases=len(self._leases),
            lookups=self._lookups,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            ideal_hit_tokens=self._ideal_tokens,
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
        self._require(lease, withdrawn=True)
        asked, found, ideal = lease._counted
        if lease.num_tokens != found:
            raise LeaseError(
                f"lease {lease.id} grew from {found} to {lease.num_tokens} tokens; "
                "release it instead"
            )
        self._lookups -= 1
        self._lookup_tokens -= asked
        self._hit_tokens -= found
        self._ideal_tokens -= ideal
        for node in self._tree.path(lease._node):
            self._tree.hits[node] -= 1
        self._drop(lease, touch=False)

    def release(self, lease: Lease, private: Sequence[int] = ()) -> None:
        """End a lease; `private` pages of its owner become free. Published pages stay warm.

        Pages that this lease announced and never published are freed too.

        Raises:
            LeaseError: the lease is not live, or others depend on what it announced
                (`withdraw` first).
            PageOwnershipError: a page of `private` is not private.
        """
        self._require(lease, withdrawn=True)
        packed = pack_pages(private)
        if self._tree.holder[lease._node] and (announced := self._announced(lease)):
            self._ledger.require_private(packed)
            pins = self._tree.pins[announced[0]]
            if pins > 1:
                raise LeaseError(
                    f"{pins - 1} other leases depend on pages that lease {lease.id} announced and "
                    "did not compute; withdraw it first"
                )
            self._remove_pending(announced[0], [lease])
        self._ledger.give_back(packed)
        self._drop(lease, touch=True)

    # -- pages -----------------------------------------------------------------------------

    def reserve(self, num_pages: int) -> Pages:
        """Hand out pages as private ones, evicting the least valuable if too few are free.

        Raises:
            OutOfPagesError: even evicting everything would not give enough; nothing changed.
        """
        ledger = self._ledger
        missing = num_pages - ledger.num_free
        if missing > 0:
            if missing > self._num_evictable:
                raise OutOfPagesError(
                    num_pages, ledger.num_free, self._num_evictable, ledger.num_pages
                )
            self._evict(missing, CAPACITY)
        return Pages(ledger.take(num_pages))

    def give_back(self, pages: Sequence[int]) -> None:
        """Private pages that belong to no lease become free."""
        self._ledger.give_back(pack_pages(pages))

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` pages, from the tails of the policy's leaves; returns how many.

        Cost: O(log n) per leaf touched.
        """
        return self._evict(num_pages, ASKED)

    def clear(self) -> int:
        """Evict everything that no lease pins; returns the number of pages."""
        return self._evict(self._num_evictable, CLEARED)

    def _evict(self, num_pages: int, reason: int) -> int:
        tree, queue, evicted = self._tree, self._queue, 0
        now, now_s = self._clock, self._now_s()
        while evicted < num_pages and (node := queue.first()):
            cut = min(tree.resident[node], num_pages - evicted)
            parent = tree.parent[node]
            self._ledger.reclaim(tree.evict_tail(node, cut))
            evicted += cut
            self._ghosts.add(node, reason, now, now_s)
            if not tree.resident[node]:
                queue.remove(node)
                self._offer(parent)
        self._num_evictable -= evicted
        self._evicted_pages += evicted
        self._ghosts.trim()
        return evicted

    def _offer(self, node: int) -> None:
        """Queue a node if it has become an evictable leaf."""
        tree = self._tree
        if (
            not tree.pins[node]
            and not tree.resident_children[node]
            and tree.resident[node]
            and not self._queue.place[node]
        ):
            self._queue.offer(node)

    # -- a prefix's way into the tree ------------------------------------------------------

    def announce(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> Lease:
        """Put the pages that are about to be computed into the tree as pending nodes.

        `key` begins with the lease's prefix; its whole pages beyond it are taken from the head
        of `private`. If the tree already knows the next page, nothing is announced and the
        lease comes back as it is.

        Raises:
            LeaseError: the lease is not live, or `key` does not extend its prefix.
            PageOwnershipError: too few pages, or one that is not private.
        """
        self._require(lease)
        packed = self._beyond(lease, key, private)
        tree, node = self._tree, lease._node
        start = lease.num_tokens * ATOM_BYTES
        child = tree.index.find(node, key.atoms, start) if packed else 0
        if not packed or tree.resident[child]:
            return lease
        self._ledger.adopt(packed)
        self._fill(lease, node, child, key, start, packed, lease._holder)
        end = lease.num_tokens + len(packed) // ID_BYTES * self.page_size
        num_pending, at = 0, lease._node
        while tree.holder[at]:
            num_pending += tree.resident[at]
            at = tree.parent[at]
        return self._replace(lease, key, end, lease._packed + packed, num_pending)

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
        self._require(lease)
        packed = self._beyond(lease, key, private)
        if self._tree.holder[lease._node]:
            if self.is_blocked(lease):
                raise LeaseError(
                    f"lease {lease.id} depends on pages that are not computed yet; "
                    "publish their leader first"
                )
            self._ledger.require_private(packed)
            for node in self._announced(lease):
                self._tree.holder[node] = 0
        pages = self._insert(lease, key, packed) if packed else b""
        end = lease.num_tokens + len(pages) // ID_BYTES * self.page_size
        return self._replace(lease, key, end, lease._packed + pages, 0)

    def withdraw(self, lease: Lease) -> list[Lease]:
        """Take back what a lease announced and did not compute; its pages become free.

        Returns the other leases that depended on those pages. They, and `lease` itself, now pin
        only what is left above: their owners may read nothing through them, and release them.
        """
        self._require(lease)
        announced = self._announced(lease)
        if not announced:
            return []
        top, holder, parent = announced[0], self._tree.holder, self._tree.parent
        dependents = []
        for other in self._leases.values():
            at = other._node
            while holder[at] and at != top:
                at = parent[at]
            if at == top:
                dependents.append(other)
        self._remove_pending(top, dependents)
        return [other for other in dependents if other is not lease]

    def is_blocked(self, lease: Lease) -> bool:
        """Whether the prefix of a lease depends on pages that another leader is to publish."""
        self._require(lease, withdrawn=True)
        holder, node = self._tree.holder, lease._node
        while holder[node] == lease._holder:
            node = self._tree.parent[node]
        return holder[node] != 0

    def is_withdrawn(self, lease: Lease) -> bool:
        """Whether a live lease lost pages to a withdrawal and can only be released."""
        self._require(lease, withdrawn=True)
        return lease._withdrawn

    def check(self) -> None:
        """Recount everything: owners of pages, pins, evictable pages, links.

        Raises:
            InvariantError: a contradiction, which is a bug in Ramify.
        """
        check_cache(self)

    # -- inside ----------------------------------------------------------------------------

    def _usable(self, key: CacheKey) -> int:
        """Bytes of a key that may be found: at least one token is always computed."""
        return max(0, len(key.atoms) - 1) // self._page_bytes * self._page_bytes

    def _acquire(self, key: CacheKey, *, pending: bool) -> Lease:
        tree, atoms, namespace = self._tree, key.atoms, key.namespace
        end = self._usable(key)
        root = tree.roots.get(namespace)
        if root is None:
            root = tree.root_of(namespace)
            path: list[int] = []
        else:
            path, part, covered = tree.find(root, atoms, end, pending=pending)
            if part:
                path.append(self._split(part, covered))
        hits, pins, resident, holder = tree.hits, tree.pins, tree.resident, tree.holder
        pages, parts, num_pending, pinned = tree.pages, list[bytes](), 0, 0
        for node in path:
            hits[node] += 1
            if not pins[node]:
                pinned += resident[node]
            pins[node] += 1
            if holder[node]:
                num_pending += resident[node]
            parts.append(pages[node % SHARDS][node])
        pins[root] += 1
        node = path[-1] if path else root
        self._num_evictable -= pinned
        if self._queue.place[node]:
            self._queue.remove(node)
        packed = b"".join(parts)
        found = len(packed) // ID_BYTES * self.page_size
        lease = Lease(next(self._ids), key, found, packed)
        lease.num_pending = num_pending
        lease._node = node
        asked, ideal = len(atoms) // ATOM_BYTES, found
        if tree.num_ghost_pages and found * ATOM_BYTES < end:
            for _, shared in tree.follow(node, atoms, found * ATOM_BYTES, end):
                ideal += shared * self.page_size
        lease._counted = (asked, found, ideal)
        self._clock += 1
        self._lookups += 1
        self._lookup_tokens += asked
        self._hit_tokens += found
        self._ideal_tokens += ideal
        self._leases[lease.id] = lease
        return lease

    def _split(self, node: int, num_pages: int) -> int:
        upper = self._tree.split(node, num_pages)
        if self._queue.place[node] and not self._tree.resident[node]:
            self._queue.remove(node)
        return upper

    def _insert(self, lease: Lease, key: CacheKey, packed: bytes) -> bytes:
        """Insert pages behind a lease; returns the canonical ones, which may be fewer.

        The lease moves along to the deepest node; duplicates become free.
        """
        tree, ledger, atoms, node = self._tree, self._ledger, key.atoms, lease._node
        position = lease.num_tokens * ATOM_BYTES
        end = position + len(packed) // ID_BYTES * self._page_bytes
        parts = []
        while position < end:
            child = tree.index.find(node, atoms, position)
            if not tree.resident[child]:  # nor has node 0
                ledger.adopt(packed)
                self._fill(lease, node, child, key, position, packed, 0)
                parts.append(packed)
                break
            if tree.holder[child]:
                break  # somebody else is computing it: ours stay private
            if not parts:
                ledger.require_private(packed)
            edge = tree.edges[child % SHARDS][child]
            shared = shared_pages(atoms, position, edge, self._page_bytes)
            shared = min(shared, (end - position) // self._page_bytes)
            resident = tree.resident[child]
            ledger.give_back(packed[: min(shared, resident) * ID_BYTES])
            if shared > resident:
                fill = packed[resident * ID_BYTES : shared * ID_BYTES]
                ledger.adopt(fill)
                self._refill(child, fill)
            if shared < tree.length[child]:
                child = self._split(child, shared)
            self._pin(child)
            parts.append(tree.pages[child % SHARDS][child])
            packed = packed[shared * ID_BYTES :]
            position += shared * self._page_bytes
            lease._node = node = child
        return b"".join(parts)

    def _fill(
        self,
        lease: Lease,
        node: int,
        child: int,
        key: CacheKey,
        position: int,
        packed: bytes,
        holder: int,
    ) -> None:
        """Put adopted pages below a node, whose child there, if any, is a ghost.

        Where the tree remembers the atoms, its ghosts come back to life. The lease moves along.
        """
        tree, atoms, page_bytes = self._tree, key.atoms, self._page_bytes
        longest = tree.index.max_pages
        while packed:
            if child:
                edge = tree.edges[child % SHARDS][child]
                shared = shared_pages(atoms, position, edge, page_bytes)
                shared = min(shared, len(packed) // ID_BYTES)
                tree.refill(child, packed[: shared * ID_BYTES])
                if shared < tree.length[child]:
                    child = tree.split(child, shared)
                else:
                    self._ghosts.remove(child)
                tree.holder[child] = holder
            else:
                shared = len(packed) // ID_BYTES if longest is None else longest
                edge = atoms[position : position + shared * page_bytes]
                if not holder and self._may_grow(node, len(edge)):
                    tree.grow(node, edge, packed)
                    child = node
                else:
                    child = tree.add(node, edge, packed[: shared * ID_BYTES], holder)
                if key.marks:
                    tree.mark(child, key.marks)
            tree.pins[child] = 1
            tree.created[child] = self._clock
            tree.created_s[child] = self._now_s()
            node = child
            position += shared * page_bytes
            packed = packed[shared * ID_BYTES :]
            child = tree.index.find(node, atoms, position) if packed else 0
        lease._node = node

    def _may_grow(self, node: int, num_bytes: int) -> bool:
        """Whether new pages may lengthen a node: it is the lease's own and nobody used it."""
        tree = self._tree
        return tree.pins[node] == 1 and not tree.hits[node] and tree.can_grow(node, num_bytes)

    def _refill(self, node: int, packed: bytes) -> None:
        """Bring pages of an unpinned, partly evicted node back."""
        self._tree.refill(node, packed)
        self._num_evictable += len(packed) // ID_BYTES
        if self._tree.resident[node] == self._tree.length[node]:
            self._ghosts.remove(node)

    def _pin(self, node: int) -> None:
        tree = self._tree
        if not tree.pins[node]:
            self._num_evictable -= tree.resident[node]
            if self._queue.place[node]:
                self._queue.remove(node)
        tree.pins[node] += 1

    def _beyond(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> bytes:
        """Packed pages for the whole pages of `key` beyond the lease; checks key and pages."""
        atoms, pinned, own = key.atoms, lease.num_tokens * ATOM_BYTES, lease._key
        if key.namespace != own.namespace or not (
            atoms.startswith(own.atoms)
            if len(own.atoms) == pinned
            else atoms.startswith(memoryview(own.atoms)[:pinned])
        ):
            raise LeaseError(f"the key does not begin with the prefix of lease {lease.id}")
        packed = pack_pages(private)
        grown = len(atoms) // self._page_bytes - lease.num_tokens // self.page_size
        if grown * ID_BYTES > len(packed):
            raise PageOwnershipError(
                f"the key has {grown} whole pages beyond lease {lease.id} but only "
                f"{len(packed) // ID_BYTES} private pages were given"
            )
        return packed[: grown * ID_BYTES]

    def _announced(self, lease: Lease) -> list[int]:
        """The pending nodes that this lease's holder is to compute, topmost first."""
        found, node, holder = [], lease._node, self._tree.holder
        while holder[node] == lease._holder:
            found.append(node)
            node = self._tree.parent[node]
        return found[::-1]

    def _remove_pending(self, top: int, dependents: list[Lease]) -> None:
        """Take the pages from a pending subtree, all of whose leases are `dependents`."""
        tree, above = self._tree, self._tree.parent[top]
        doomed = set[int]()
        for lease in dependents:
            node = lease._node
            while node != above:
                doomed.add(node)
                node = tree.parent[node]
            lease._node, lease._withdrawn = above, True
        for node in sorted(doomed, key=tree.start.__getitem__, reverse=True):
            tree.pins[node] = tree.holder[node] = 0
            self._ledger.reclaim(tree.evict_tail(node, tree.resident[node]))
            self._ghosts.add(node, WITHDRAWN, self._clock, self._now_s())
        self._ghosts.trim()

    def _replace(
        self, old: Lease, key: CacheKey, num_tokens: int, packed: bytes, num_pending: int
    ) -> Lease:
        lease = Lease(next(self._ids), key, num_tokens, packed)
        lease.num_pending, lease._node, lease._holder = num_pending, old._node, old._holder
        lease._counted = old._counted
        del self._leases[old.id]
        self._leases[lease.id] = lease
        return lease

    def _require(self, lease: Lease, *, withdrawn: bool = False) -> None:
        if self._leases.get(lease.id) is not lease:
            raise LeaseError(
                f"lease {lease.id} is not live here: it was released, replaced by a newer one, "
                "or belongs to another cache"
            )
        if lease._withdrawn and not withdrawn:
            raise LeaseError(f"lease {lease.id} lost pages to a withdrawal; release it")

    def _drop(self, lease: Lease, *, touch: bool) -> None:
        """Take a lease's pins off. A pin alone does not refresh recency, only its release does."""
        tree = self._tree
        pins, parent, last_access, used_s = tree.pins, tree.parent, tree.last_access, tree.used_s
        clock, now_s, unpinned = self._clock, self._now_s(), 0
        del self._leases[lease.id]
        node = lease._node
        while parent[node]:
            pins[node] = left = pins[node] - 1
            if not left:
                unpinned += tree.resident[node]
            if touch:
                last_access[node] = clock
                used_s[node] = now_s
            node = parent[node]
        pins[node] -= 1
        self._num_evictable += unpinned
        if lease._node != node:
            self._offer(lease._node)
        if not tree.first_child[node]:
            tree.drop_empty_root(node)
