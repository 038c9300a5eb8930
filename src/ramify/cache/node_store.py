"""`NodeStore`: reference, insert and split nodes together with their pages; `eviction` evicts them.

Tree, page ledger, eviction queue and ghosts do not know each other. Every operation that changes
more than one of them is here or in `eviction`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ramify.cache.counters import MISS, CacheCounters, log2_bucket
from ramify.cache.events import EventLog
from ramify.cache.eviction_queue import EvictionQueue, Policy
from ramify.cache.ghosts import WITHDRAWN, Ghosts
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES, piece, shared_pages
from ramify.cache.pages import ID_BYTES, PageLedger
from ramify.cache.session_table import Session, SessionTable
from ramify.cache.tree import RadixTree

# A leaf that would exceed this gets a child instead: growing copies the whole leaf.
MAX_GROWN_BYTES: Final = 1 << 16


class NodeStore:
    """The radix tree with its pages, eviction queue, ghosts, counters and event log.

    Args:
        tree: empty, with its index.
        policy: makes the eviction policy from the tree and `num_pages`.
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
        self.sessions = SessionTable(tree, self.queue, clock)
        self.ghosts = Ghosts(tree, ghost_pages, self._on_forget)
        self.counters = CacheCounters(log_every)
        self.log = EventLog(tree)
        self.clock = clock
        self.num_lookups = 0  # lookups so far, cancelled ones included
        self.num_evictable = 0  # pages of nodes without references
        self._has_pending_ghosts = False  # whether evicted pages were ever announced again
        self._page_bytes = tree.page_bytes

    # -- references and lookups ------------------------------------------------------------

    def pin(self, node: int) -> None:
        """Add a reference to one node, whose ancestors have theirs already."""
        tree = self.tree
        if not tree.ref_count[node]:
            self.num_evictable -= tree.owned[node]
            if self.queue.ticket[node]:
                self.queue.remove(node)
        tree.ref_count[node] += 1

    def pin_path(self, root: int, path: Sequence[int]) -> None:
        """Add a reference to a root and to each node of a path below it."""
        tree, ref_count = self.tree, self.tree.ref_count
        ref_count[root] += 1
        for node in path:
            count = ref_count[node]
            if not count:
                self.num_evictable -= tree.owned[node]
            ref_count[node] = count + 1
        if path and self.queue.ticket[path[-1]]:
            self.queue.remove(path[-1])

    def unpin(self, node: int) -> None:
        """Drop a reference to a node and its ancestors; recency stays as it was."""
        tree, ref_count, num_unpinned, at = self.tree, self.tree.ref_count, 0, node
        while tree.parent[at]:
            ref_count[at] = count = ref_count[at] - 1
            if not count:
                num_unpinned += tree.owned[at]
            at = tree.parent[at]
        self._finish_unpin(node, at, num_unpinned)

    def release_used(self, node: int, num_known: int, since: int, session: Session | None) -> None:
        """Drop a reference to a node and its ancestors, which a request has used until now.

        Only this call refreshes recency and informs the policy: a lookup may still be cancelled.
        The request's lookup had the number `since` and hit `num_known` pages.
        """
        tree = self.tree
        if self.sessions.is_used:
            self.sessions.claim(node, session)
        ref_count, parent = tree.ref_count, tree.parent
        last_access, last_access_s = tree.last_access, tree.last_access_s
        num_lookups, now_s, num_unpinned, at = self.num_lookups, self.clock(), 0, node
        new, known = list[int](), list[int]()
        while above := parent[at]:
            ref_count[at] = count = ref_count[at] - 1
            if not count:
                num_unpinned += tree.owned[at]
            accessed = last_access[at]
            if 0 < accessed < since or tree.start[at] < num_known:
                known.append(at)
            elif not accessed:  # otherwise another request computed and used it in the meantime
                new.append(at)
            last_access[at] = num_lookups
            last_access_s[at] = now_s
            at = above
        if len(new) > 1:
            new.reverse()
        if len(known) > 1:
            known.reverse()
        try:
            self.policy.on_release(new, known, tree.start[node] + tree.length[node])
        finally:
            self._finish_unpin(node, at, num_unpinned)

    def _on_forget(self, node: int, num_pages: int) -> None:
        """Pages of a node stop being ghosts; if it has no others, it is about to leave the tree."""
        self.policy.on_forget(node, num_pages)
        if self.tree.session[node] > 0 and not self.tree.resident[node]:
            self.sessions.forget(node)

    def _finish_unpin(self, node: int, root: int, num_pages: int) -> None:
        """Drop the root's reference; `num_pages` pages up from `node` have become evictable."""
        tree = self.tree
        tree.ref_count[root] -= 1
        self.num_evictable += num_pages
        if not self.queue.ticket[node] and self.is_evictable(node):
            self.queue.push(node)
        if not tree.first_child[root]:
            tree.drop_empty_root(root)

    def count_lookup(
        self, path: Sequence[int], node: int, atoms: bytes, hit_tokens: int, end: int
    ) -> tuple[int, int, int, int, int]:
        """Count a lookup that hit `hit_tokens` tokens and ended at `node`.

        Returns (tokens, hit tokens, hit tokens if nothing had been evicted, histogram bucket of the
        seconds since the last use, number of the lookup): what `cancel_lookup` needs.
        """
        tree, counters, hits = self.tree, self.counters, self.tree.hits
        gap = MISS
        if path:
            for at in path:
                hits[at] += 1
            gap = log2_bucket(self.clock() - tree.last_access_s[node])
        ideal_tokens, position = hit_tokens, hit_tokens * ATOM_BYTES
        has_lost = tree.num_ghost_pages or tree.num_released or self._has_pending_ghosts
        if has_lost and position < end:
            for below, shared in tree.find_including_evicted(node, atoms, position, end):
                if self.ghosts.never_computed(below):
                    break
                ideal_tokens += shared * tree.page_size
        self.num_lookups += 1
        tokens = len(atoms) // ATOM_BYTES
        counters.lookup(tokens, hit_tokens, ideal_tokens, gap)
        if counters.lookups >= counters.next_log:
            ledger = self.ledger
            num_used = ledger.num_pages - ledger.num_free - self.num_evictable
            counters.write_log(num_used, self.num_evictable, ledger.num_free)
        return tokens, hit_tokens, ideal_tokens, gap, self.num_lookups

    def cancel_lookup(self, node: int, lookup_counts: tuple[int, int, int, int, int]) -> None:
        """Take a lookup that ended at `node` off the counters and hits."""
        self.counters.cancel(*lookup_counts)
        for at in self.tree.path(node):
            self.tree.hits[at] -= 1

    def node_ending_at(self, node: int, depth: int) -> int:
        """The node on the path to `node` that ends at page `depth`; splits a node if necessary."""
        tree = self.tree
        while tree.start[node] >= depth and tree.parent[node]:
            node = tree.parent[node]
        if tree.start[node] + tree.length[node] > depth:
            node = self.split(node, depth - tree.start[node])
        return node

    def split(self, node: int, num_pages: int) -> int:
        """Split a node after `num_pages` pages; returns the upper half, which the caller pins."""
        tree = self.tree
        upper = tree.split(node, num_pages)
        if self.queue.ticket[node] and not tree.resident[node]:
            self.queue.remove(node)
        if self.log.subscribers:
            self.log.split(upper, node)
        return upper

    def is_evictable(self, node: int) -> bool:
        """Whether a node is a leaf with resident pages and without references; never a root."""
        tree = self.tree
        return (
            not tree.ref_count[node]
            and not tree.resident_children[node]
            and tree.resident[node] > 0
        )

    def set_priority(self, node: int, priority: int) -> None:
        """Set the priority of a referenced node; raises its ancestors to at least that."""
        tree = self.tree
        if tree.parent[node]:
            tree.priority[node] = priority
            for above in tree.path(tree.parent[node]):
                tree.priority[above] = max(tree.priority[above], priority)

    def num_available_after_match(self, key: CacheKey, end: int) -> int:
        """Pages that a lookup of `key[:end]` would hit, plus those that `reserve` could take then."""
        tree = self.tree
        root = tree.roots.get(key.namespace, 0)
        available = self.ledger.num_free + self.num_evictable
        if not root:
            return available
        path, part, covered = tree.find(root, key.atoms, end, pending=False)
        num_pinned = sum(tree.owned[node] for node in path if not tree.ref_count[node])
        if part and not tree.ref_count[part]:
            num_pinned += max(0, covered - (tree.resident[part] - tree.owned[part]))
        return tree.num_matched_pages(path, part, covered) + available - num_pinned

    # -- inserting pages --------------------------------------------------------------------------

    def insert(self, node: int, key: CacheKey, position: int, packed: bytes) -> tuple[int, bytes]:
        """Insert private pages below `node`, where a lease ends; extends its references.

        Where the tree has a page already, the private duplicate becomes free. Stops before pages
        that another request still computes. Returns the deepest node and the pages that the tree
        has now, which may be fewer than `packed`.

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
        """`insert` where the tree already has the first page, below `node` in `child`."""
        tree, atoms, page_bytes, parts = self.tree, key.atoms, self._page_bytes, list[bytes]()
        self.ledger.require_private(packed)
        while tree.resident[child] and not tree.leader[child]:
            edge = tree.edges[child]
            shared = min(shared_pages(atoms, position, edge, page_bytes), len(packed) // ID_BYTES)
            resident, begin = tree.resident[child], 0
            if tree.owned[child] < resident:
                child, begin = self._restore_head(child, packed[: shared * ID_BYTES])
            self.ledger.give_back(packed[begin * ID_BYTES : min(shared, resident) * ID_BYTES])
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
        else:  # another request computes the next page, or the tree does not have it
            if not tree.resident[child]:
                self.ledger.adopt(packed)
                node = self.insert_nodes(node, child, key, position, packed, 0)
                parts.append(packed)
        return node, b"".join(parts)

    def insert_nodes(
        self, node: int, child: int, key: CacheKey, position: int, packed: bytes, leader: int
    ) -> int:
        """Insert pages that the tree owns below `node`; returns the deepest node.

        `child` is the ghost below `node` that begins with the first page, or 0. Ghosts with these
        atoms get the pages; the rest become new nodes, or lengthen `node`. Each new or refilled
        node has one reference. `leader` still computes the pages; 0: they are computed.
        """
        tree, atoms, page_bytes = self.tree, key.atoms, self._page_bytes
        max_pages, num_lookups, now_s = tree.index.max_pages, self.num_lookups, self.clock()
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
                shared = len(packed) // ID_BYTES if max_pages is None else max_pages
                edge = piece(atoms, position, position + shared * page_bytes)
                if not leader and max_pages is None and self._may_grow(node, len(edge)):
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
                tree.created_at_lookup[child] = num_lookups
                tree.created_s[child] = tree.last_access_s[child] = now_s
            if self.log.subscribers and not leader:
                self.log.stored(child)
            node = child
            position += shared * page_bytes
            packed = packed[shared * ID_BYTES :]
            child = tree.index.find(node, atoms, position) if packed else 0
        return node

    def mark_ready(self, nodes: Iterable[int]) -> None:
        """Mark pending nodes as computed, parents first."""
        for node in nodes:
            self.tree.leader[node] = 0
            if self.log.subscribers:
                self.log.stored(node)

    def _may_grow(self, node: int, num_bytes: int) -> bool:
        """Whether new pages may lengthen a leaf: only this lease refers to it, nobody used it."""
        tree = self.tree
        return (
            tree.ref_count[node] == 1
            and not (tree.hits[node] or tree.last_access[node] or tree.priority[node])
            and not tree.first_child[node]
            and tree.parent[node] != 0
            and tree.length[node] * self._page_bytes + num_bytes <= MAX_GROWN_BYTES
        )

    def _refill(self, node: int, packed: bytes) -> None:
        """Give new pages to a partly evicted node without references."""
        self.tree.refill(node, packed)
        self.num_evictable += len(packed) // ID_BYTES
        if self.tree.resident[node] == self.tree.length[node]:
            self.ghosts.remove(node)
        if self.log.subscribers:
            self.log.stored(node)

    def _restore_head(self, node: int, packed: bytes) -> tuple[int, int]:
        """Give pages to the released head of a node, whose first pages they are.

        Returns the node that begins like them (a new one if they are fewer), and how many it took.
        """
        tree = self.tree
        num_released = tree.resident[node] - tree.owned[node]
        if len(packed) < num_released * ID_BYTES:
            num_released = len(packed) // ID_BYTES
            node = self.split(node, num_released)
        head = packed[: num_released * ID_BYTES]
        self.ledger.adopt(head)
        tree.pages[node] = head + tree.pages[node][len(head) :]
        tree.owned[node] = tree.resident[node]
        tree.num_released -= num_released
        if not tree.ref_count[node]:
            self.num_evictable += num_released
        if self.log.subscribers:
            self.log.restored(node, num_released)
        return node, num_released

    def drop_pending(self, nodes: Iterable[int]) -> None:
        """Free the pages of nodes that will not be computed, and drop their references."""
        tree = self.tree
        for node in sorted(nodes, key=tree.start.__getitem__, reverse=True):  # deepest first
            tree.ref_count[node] = tree.leader[node] = 0
            self.ledger.reclaim(tree.evict_tail(node, tree.resident[node]))
            self.ghosts.add(node, self.ghosts.reason[node], self.clock())
        self.ghosts.trim()

    def retract(self, nodes: Sequence[int], start: int) -> tuple[int, bytes]:
        """Make pending pages from page `start` on private again.

        `nodes` are the pending nodes of one leader, topmost first, with one reference each. Returns
        the node at which the lease ends now, and the pages.
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
