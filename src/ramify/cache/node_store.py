"""Cached pages and their nodes: pinned, split, filled, evicted and remembered, as one whole.

The four parts (tree, ledger, queue, ghosts) know nothing of each other; what moves a page changes
several of them, and does it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ramify.cache.counters import MISS, CacheCounters, log2_bucket
from ramify.cache.events import EventLog
from ramify.cache.eviction_queue import EvictionQueue, Policy
from ramify.cache.ghosts import CAPACITY, CLEARED, PREDICATE, WITHDRAWN, Ghosts
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES, piece, shared_pages
from ramify.cache.pages import ID_BYTES, PageLedger
from ramify.cache.tree import RadixTree
from ramify.cache.types import Node
from ramify.errors import OutOfPagesError


class NodeStore:
    """The tree with its pages; callers say when, never which part to change.

    Args:
        tree: empty, with its index.
        num_pages: pages of the caller's storage.
        policy: makes the order of eviction, from the tree and `num_pages`.
        ghost_pages: evicted pages to remember.
        log_every: lookups from one log line to the next.
        clock: seconds.
    """

    def __init__(
        self,
        tree: RadixTree,
        num_pages: int,
        policy: Callable[[RadixTree, int], Policy],
        ghost_pages: int,
        log_every: int,
        clock: Callable[[], float],
    ) -> None:
        self.tree = tree
        self.ledger = PageLedger(num_pages)
        self.policy = policy(tree, num_pages)
        self.queue = EvictionQueue(tree, self.policy)
        self.ghosts = Ghosts(tree, ghost_pages, self.policy.on_forget)
        self.counters = CacheCounters(log_every)
        self.log = EventLog(tree)
        self.clock = clock
        self.num_lookups = 0  # lookups so far, cancelled ones included
        self.num_evictable = 0  # pages of ready nodes that nobody pins
        self._has_pending_ghosts = False  # whether evicted pages were ever announced
        self._page_bytes = tree.page_bytes

    # -- pins ------------------------------------------------------------------------------

    def pin(self, node: int) -> None:
        """One more pin on a single node, whose ancestors have theirs."""
        tree = self.tree
        if not tree.ref_count[node]:
            self.num_evictable -= tree.resident[node]
            if self.queue.ticket[node]:
                self.queue.remove(node)
        tree.ref_count[node] += 1

    def pin_path(self, root: int, path: Sequence[int]) -> None:
        """One more pin on a root and the nodes below it, the last of which may be a leaf."""
        tree, pins = self.tree, self.tree.ref_count
        pins[root] += 1
        for node in path:
            count = pins[node]
            if not count:
                self.num_evictable -= tree.resident[node]
            pins[node] = count + 1
        if path and self.queue.ticket[path[-1]]:
            self.queue.remove(path[-1])

    def unpin(self, node: int) -> None:
        """One pin less on a node and all above, which were not used."""
        tree, pins, unpinned, at = self.tree, self.tree.ref_count, 0, node
        while tree.parent[at]:
            pins[at] = left = pins[at] - 1
            if not left:
                unpinned += tree.resident[at]
            at = tree.parent[at]
        self._unpinned(node, at, unpinned)

    def release_used(self, node: int, num_known: int, since: int) -> None:
        """One pin less on a node and all above, which a request has used until now.

        Only this refreshes recency and teaches the policy: a pin alone may yet be cancelled. The
        first `num_known` pages were there at the request's lookup, which was the `since`-th.
        """
        tree = self.tree
        pins, parent, last_access, used_s = (
            tree.ref_count,
            tree.parent,
            tree.last_access,
            tree.last_access_s,
        )
        clock, now_s, unpinned, at = self.num_lookups, self.clock(), 0, node
        new, known = list[int](), list[int]()
        while above := parent[at]:
            pins[at] = left = pins[at] - 1
            if not left:
                unpinned += tree.resident[at]
            used = last_access[at]
            if 0 < used < since or tree.start[at] < num_known:
                known.append(at)
            elif not used:
                new.append(at)  # else somebody else has computed it meanwhile, and used it
            last_access[at] = clock
            used_s[at] = now_s
            at = above
        if len(new) > 1:
            new.reverse()
        if len(known) > 1:
            known.reverse()
        try:
            self.policy.on_release(new, known, tree.start[node] + tree.length[node])
        finally:
            self._unpinned(node, at, unpinned)

    def _unpinned(self, node: int, root: int, num_pages: int) -> None:
        tree = self.tree
        tree.ref_count[root] -= 1
        self.num_evictable += num_pages
        if not self.queue.ticket[node] and self._is_evictable(node):
            self.queue.push(node)
        if not tree.first_child[root]:
            tree.drop_empty_root(root)

    def count_lookup(
        self, path: Sequence[int], node: int, atoms: bytes, found: int, end: int
    ) -> tuple[int, int, int, int, int]:
        """Count a lookup that found `found` tokens and ended at `node`.

        Returns tokens asked for, found, and known of; the bucket of the seconds since the last use;
        and its number.
        """
        tree, recorder, hits = self.tree, self.counters, self.tree.hits
        gap = MISS
        if path:
            for at in path:
                hits[at] += 1
            gap = log2_bucket(self.clock() - tree.last_access_s[node])
        ideal, position = found, found * ATOM_BYTES
        if (tree.num_ghost_pages or self._has_pending_ghosts) and position < end:
            for below, shared in tree.find_including_evicted(node, atoms, position, end):
                if self.ghosts.never_computed(below):
                    break
                ideal += shared * tree.page_size
        self.num_lookups += 1
        tokens = len(atoms) // ATOM_BYTES
        recorder.lookup(tokens, found, ideal, gap)
        if recorder.lookups >= recorder.next_log:
            ledger = self.ledger
            used = ledger.num_pages - ledger.num_free - self.num_evictable
            recorder.write_log(used, self.num_evictable, ledger.num_free)
        return tokens, found, ideal, gap, self.num_lookups

    def cancel_lookup(self, node: int, lookup_counts: tuple[int, int, int, int, int]) -> None:
        """Undo the count of a lookup that ended at `node`."""
        self.counters.cancel(*lookup_counts)
        for at in self.tree.path(node):
            self.tree.hits[at] -= 1

    def node_ending_at(self, node: int, depth: int) -> int:
        """The node at or above `node` that ends at page `depth`; it is made if need be."""
        tree = self.tree
        while tree.start[node] >= depth and tree.parent[node]:
            node = tree.parent[node]
        if tree.start[node] + tree.length[node] > depth:
            node = self.split(node, depth - tree.start[node])
        return node

    def split(self, node: int, num_pages: int) -> int:
        """Cut a node; returns the upper half, which the caller is going to pin."""
        tree = self.tree
        upper = tree.split(node, num_pages)
        if self.queue.ticket[node] and not tree.resident[node]:
            self.queue.remove(node)
        if self.log.subscribers:
            self.log.split(upper, node)
        return upper

    def _is_evictable(self, node: int) -> bool:
        """Whether a node is a leaf that nobody pins; a root never is."""
        tree = self.tree
        return (
            not tree.ref_count[node]
            and not tree.resident_children[node]
            and tree.resident[node] > 0
        )

    def _same_rank(self, node: int, other: int) -> bool:
        """Whether two nodes are alike in the order of eviction."""
        policy = self.policy
        return policy.segment(node) == policy.segment(other) and policy.rank(node) == policy.rank(
            other
        )

    def set_priority(self, node: int, priority: int) -> None:
        """Give a pinned node a priority, and those above at least that."""
        tree = self.tree
        if tree.parent[node]:
            tree.priority[node] = priority
            for above in tree.path(tree.parent[node]):
                tree.priority[above] = max(tree.priority[above], priority)

    def num_available_after_match(self, key: CacheKey, end: int) -> int:
        """Pages that a lookup of `key` would find, and those that could be reserved after it."""
        tree = self.tree
        root = tree.roots.get(key.namespace, 0)
        available = self.ledger.num_free + self.num_evictable
        if not root:
            return available
        path, part, covered = tree.find(root, key.atoms, end, pending=False)
        revived = sum(tree.resident[node] for node in path if not tree.ref_count[node])
        if part and not tree.ref_count[part]:
            revived += covered
        return tree.num_matched_pages(path, part, covered) + available - revived

    # -- pages in --------------------------------------------------------------------------

    def insert(self, node: int, key: CacheKey, position: int, packed: bytes) -> tuple[int, bytes]:
        """Insert a lease's private pages below the node it ends in; its pin moves along.

        Returns the deepest node and the canonical pages, which may be fewer; private pages that
        the tree has already become free.

        Raises:
            PageOwnershipError: a page is not private; nothing changed.
        """
        if not packed:
            return node, packed
        child = self.tree.index.find(node, key.atoms, position)
        if self.tree.resident[child]:
            return self._insert_existing(node, child, key, position, packed)
        self.ledger.adopt(packed)
        return self.insert_nodes(node, child, key, position, packed, 0), packed

    def _insert_existing(
        self, node: int, child: int, key: CacheKey, position: int, packed: bytes
    ) -> tuple[int, bytes]:
        """The same where somebody else has published some of it."""
        tree, atoms, page_bytes, parts = self.tree, key.atoms, self._page_bytes, list[bytes]()
        self.ledger.require_private(packed)
        while tree.resident[child] and not tree.leader[child]:
            edge = tree.edges[child]
            shared = min(shared_pages(atoms, position, edge, page_bytes), len(packed) // ID_BYTES)
            resident = tree.resident[child]
            self.ledger.give_back(packed[: min(shared, resident) * ID_BYTES])
            if shared > resident:
                fill = packed[resident * ID_BYTES : shared * ID_BYTES]
                self.ledger.adopt(fill)
                self._refill(child, fill)
            if shared < tree.length[child]:
                child = self.split(child, shared)
            self.pin(child)
            parts.append(tree.pages[child])
            packed = packed[shared * ID_BYTES :]
            position += shared * page_bytes
            node = child
            if not packed:
                break
            child = tree.index.find(node, atoms, position)
        else:  # what is left, somebody else is computing, or nobody has
            if not tree.resident[child]:
                self.ledger.adopt(packed)
                node = self.insert_nodes(node, child, key, position, packed, 0)
                parts.append(packed)
        return node, b"".join(parts)

    def insert_nodes(
        self, node: int, child: int, key: CacheKey, position: int, packed: bytes, leader: int
    ) -> int:
        """Put adopted pages below a node, whose child there, if any, is a ghost; pinned once.

        Where the tree remembers the atoms, its ghosts come back to life. Returns the deepest node.
        """
        tree, atoms, page_bytes = self.tree, key.atoms, self._page_bytes
        longest, clock, now_s = tree.index.max_pages, self.num_lookups, self.clock()
        while packed:
            if child:
                edge = tree.edges[child]
                shared = shared_pages(atoms, position, edge, page_bytes)
                shared = min(shared, len(packed) // ID_BYTES)
                tree.refill(child, packed[: shared * ID_BYTES])
                if shared < tree.length[child]:
                    child = tree.split(child, shared)
                else:
                    self.ghosts.remove(child)
                tree.leader[child] = leader
                tree.hits[child] = 0
                if leader:
                    self._has_pending_ghosts = True
            else:
                shared = len(packed) // ID_BYTES if longest is None else longest
                edge = piece(atoms, position, position + shared * page_bytes)
                if not leader and longest is None and self._may_grow(node, len(edge)):
                    tree.grow(node, edge, packed)
                    child = node
                else:
                    child = tree.add(node, edge, packed[: shared * ID_BYTES], leader)
                    if leader:
                        self.ghosts.reason[child] = WITHDRAWN
                if key.marks:
                    tree.set_content(child, key.marks)
            if child != node:
                tree.ref_count[child] = 1
                tree.created_at_lookup[child] = clock
                tree.created_s[child] = tree.last_access_s[child] = now_s
            if self.log.subscribers and not leader:
                self.log.stored(child)
            node = child
            position += shared * page_bytes
            packed = packed[shared * ID_BYTES :]
            child = tree.index.find(node, atoms, position) if packed else 0
        return node

    def mark_ready(self, nodes: Iterable[int]) -> None:
        """Pending nodes are computed, parents first."""
        for node in nodes:
            self.tree.leader[node] = 0
            if self.log.subscribers:
                self.log.stored(node)

    def _may_grow(self, node: int, num_bytes: int) -> bool:
        """Whether new pages may lengthen a node: it is the lease's own, and nobody used it."""
        tree = self.tree
        unused = not (tree.hits[node] or tree.last_access[node] or tree.priority[node])
        return tree.ref_count[node] == 1 and unused and tree.can_grow(node, num_bytes)

    def _refill(self, node: int, packed: bytes) -> None:
        """Bring back pages of an unpinned, partly evicted node."""
        self.tree.refill(node, packed)
        self.num_evictable += len(packed) // ID_BYTES
        if self.tree.resident[node] == self.tree.length[node]:
            self.ghosts.remove(node)
        if self.log.subscribers:
            self.log.stored(node)

    # -- pages out -------------------------------------------------------------------------

    def evict_for(self, num_pages: int, missing: int) -> None:
        """Evict the `missing` ones of `num_pages` pages that somebody asks for.

        Raises:
            OutOfPagesError: there are not so many to evict; nothing changed.
        """
        if missing > self.num_evictable:
            ledger = self.ledger
            raise OutOfPagesError(num_pages, ledger.num_free, self.num_evictable, ledger.num_pages)
        self.evict(missing, CAPACITY)

    def evict(self, num_pages: int, reason: int) -> int:
        """Evict up to `num_pages` pages in the order of the policy; returns how many."""
        tree, queue, evicted, now_s = self.tree, self.queue, 0, self.clock()
        resident, place = tree.resident, queue.ticket
        while evicted < num_pages and (node := queue.first()):
            while True:
                evicted += self._evict_from(node, num_pages - evicted, reason, now_s)
                if resident[node]:
                    if not place[node]:
                        queue.push(node)
                    break
                above = tree.parent[node]
                if not self._is_evictable(above):
                    break
                if evicted >= num_pages or not self._same_rank(node, above):
                    queue.push(above)
                    break
                node = above  # which would come next: no need to queue for it
        self.ghosts.trim()
        if self.log.observers:
            self.log.notify_observers()
        return evicted

    def evict_if(self, predicate: Callable[[Node], bool], num_pages: int) -> int:
        """Evict leaves of which the predicate is true, and parents that become such leaves.

        Cost: a look at every evictable leaf.
        """
        tree, now_s, evicted = self.tree, self.clock(), 0
        doomed = [node for node in sorted(self.queue.nodes()) if predicate(tree.node(node))]
        try:
            while doomed and evicted < num_pages:
                node = doomed.pop()
                parent = tree.parent[node]
                evicted += self._evict_from(node, num_pages - evicted, PREDICATE, now_s)
                if not tree.resident[node] and self._is_evictable(parent):
                    self.queue.push(parent)
                    if predicate(tree.node(parent)):
                        doomed.append(parent)
        finally:  # a predicate is somebody else's code
            self.ghosts.trim()
            self.log.notify_observers()
        return evicted

    def _evict_from(self, node: int, num_pages: int, reason: int, now_s: float) -> int:
        """Evict pages from the tail of an evictable leaf; when it has none left, it is no leaf."""
        tree, log = self.tree, self.log
        self.policy.on_evict(node)
        cut = tree.resident[node]
        if cut > num_pages:
            cut = num_pages
        elif self.queue.ticket[node]:
            self.queue.remove(node)
        packed = tree.evict_tail(node, cut)
        self.ledger.reclaim(packed)
        self.num_evictable -= cut
        self.counters.evicted(
            reason, cut, now_s - tree.created_s[node], now_s - tree.last_access_s[node]
        )
        if log.subscribers or log.observers:
            log.removed(node, packed, reason)
        self.ghosts.add(node, reason, now_s)
        return cut

    def drop_pending(self, nodes: Iterable[int]) -> None:
        """Take the pages of nodes that will not be computed, deepest first; nobody pins them."""
        tree = self.tree
        for node in sorted(nodes, key=tree.start.__getitem__, reverse=True):
            tree.ref_count[node] = tree.leader[node] = 0
            self.ledger.reclaim(tree.evict_tail(node, tree.resident[node]))
            self.ghosts.add(node, self.ghosts.reason[node], self.clock())
        self.ghosts.trim()

    def retract(self, nodes: Sequence[int], start: int) -> tuple[int, bytes]:
        """Take pending pages from page `start` on back from the tree: they are private again.

        `nodes` are the pending nodes of one holder, topmost first, with one pin each. Returns the
        node that is the last one now, and the pages.
        """
        tree, parts, last = self.tree, list[bytes](), nodes[-1]
        for node in reversed(nodes):
            if tree.start[node] + tree.length[node] <= start:
                break
            if tree.start[node] < start:
                tree.split(node, start - tree.start[node])
            last = tree.parent[node]
            tree.ref_count[node] = tree.leader[node] = 0
            parts.append(tree.evict_tail(node, tree.resident[node]))
            self.ghosts.add(node, self.ghosts.reason[node], self.clock())
        packed = b"".join(reversed(parts))
        self.ledger.disown(packed)
        self.ghosts.trim()
        return last, packed

    def clear(self) -> int:
        """Evict everything that no lease pins; returns the number of pages."""
        whole = self.num_evictable == self.ledger.num_tree
        if not whole:
            return self.evict(self.num_evictable, CLEARED)
        self.log.pause()
        try:
            return self.evict(self.num_evictable, CLEARED)
        finally:
            self.log.cleared()
