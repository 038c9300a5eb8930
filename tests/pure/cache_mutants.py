"""Faults that a prefix cache can have, each in a subclass: the state machine must find them all."""

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from ramify.cache import CacheKey, Lease, PageLedger, PrefixCache, RadixTree
from ramify.cache.eviction_queue import EvictionQueue
from ramify.cache.hash_index import HashIndex
from ramify.cache.key import chain_hashes
from ramify.cache.lease_ops import LeaseOps
from ramify.cache.node_store import NodeStore
from ramify.cache.pages import ID_BYTES, pack_pages
from ramify.cache.session_table import Session
from ramify.errors import LeaseError, PageOwnershipError

Found = tuple[list[int], int, int]  # what a tree finds: nodes, a node in part, how much of it


class Rewired(PrefixCache):
    """A cache with parts of other types, and an index that has splits and long nodes."""

    tree_type: ClassVar[type[RadixTree]] = RadixTree
    store_type: ClassVar[type[NodeStore]] = NodeStore
    ledger_type: ClassVar[type[PageLedger]] = PageLedger
    queue_type: ClassVar[type[EvictionQueue]] = EvictionQueue
    leasing_type: ClassVar[type[LeaseOps]] = LeaseOps

    def __init__(self, num_pages: int, page_size: int = 16, **options: Any) -> None:
        super().__init__(num_pages, page_size, **{**options, "index": "radix"})
        self._tree.__class__ = self.tree_type
        self._store.__class__ = self.store_type
        self._store.ledger.__class__ = self.ledger_type
        self._store.queue.__class__ = self.queue_type
        self._lease_ops.__class__ = self.leasing_type


# -- publish before compute ----------------------------------------------------------------


class ReadyWhenAnnounced(PrefixCache):
    """What is announced is ready at once."""

    def announce(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> Lease:
        new = super().announce(lease, key, private)
        for node in self._registry.pending_nodes(new):
            self._tree.leader[node] = 0
        return new


class _ForgetfulTree(RadixTree):
    def split(self, node: int, num_pages: int) -> int:
        upper = super().split(node, num_pages)
        self.leader[upper] = 0
        return upper


class SplitForgetsPending(Rewired):
    """The upper half of a node that is still being computed looks ready."""

    tree_type = _ForgetfulTree


# -- pin lost on split ---------------------------------------------------------------------


class _UnpinningTree(RadixTree):
    def split(self, node: int, num_pages: int) -> int:
        upper = super().split(node, num_pages)
        self.ref_count[upper] = 0
        return upper


class UpperHalfUnpinned(Rewired):
    """A split gives the new upper half no pins."""

    tree_type = _UnpinningTree


class _UpsideDownStore(NodeStore):
    leases: Iterable[Lease]

    def split(self, node: int, num_pages: int) -> int:
        upper = super().split(node, num_pages)
        for lease in self.leases:
            if lease.node == node:
                lease.node = upper
        return upper


class OldLeaseKeepsPrefix(Rewired):
    """A split leaves the prefix half to the leases that there are, and their pins on both."""

    store_type = _UpsideDownStore

    def __init__(self, num_pages: int, page_size: int = 16, **options: Any) -> None:
        super().__init__(num_pages, page_size, **options)
        assert isinstance(self._store, _UpsideDownStore)
        self._store.leases = self._registry.live()


# -- stale table after publish -------------------------------------------------------------


class DuplicatesReturned(PrefixCache):
    """Publishing returns the caller's own pages, also where they were freed as duplicates."""

    def publish(self, lease: Lease, key: CacheKey, private: Sequence[int] = ()) -> Lease:
        new = super().publish(lease, key, private)
        taken = pack_pages(private)[: len(new.packed_pages) - len(lease.packed_pages)]
        stale = Lease(
            new.id,
            new.full_key,
            new.num_tokens,
            lease.packed_pages + taken,
            new.node,
            new.num_pending,
            new.leader,
            new.lookup_counts,
        )
        self._registry._live[new.id] = stale
        return stale


# -- double release ------------------------------------------------------------------------


class DeadLeaseReleased(PrefixCache):
    """A lease can be released again, which takes its pins off once more."""

    def release(
        self, lease: Lease, private: Sequence[int] = (), session: Session | None = None
    ) -> None:
        try:
            super().release(lease, private, session)
        except LeaseError:
            if lease.id in self._registry._live:
                raise
            tree, key = self._tree, lease.key
            root = tree.roots.get(key.namespace, 0)
            path = tree.find(root, key.atoms, len(key.atoms), pending=True)[0] if root else []
            for node in path:
                tree.ref_count[node] -= 1


class _TrustingLedger(PageLedger):
    def give_back(self, packed: bytes) -> None:
        try:
            super().give_back(packed)
        except PageOwnershipError:
            self._free.frombytes(packed)


class PagesFreedTwice(Rewired):
    """The ledger takes back pages that are free, shared, or named twice."""

    ledger_type = _TrustingLedger


# -- eviction of a pinned node -------------------------------------------------------------


class _PitilessQueue(EvictionQueue):
    tree: RadixTree

    def first(self) -> int:
        tree = self.tree
        leaves = [
            node
            for node in tree.nodes()
            if tree.resident[node] and not tree.resident_children[node] and not tree.leader[node]
        ]
        return min(leaves, key=tree.last_access.__getitem__, default=0)

    def remove(self, node: int) -> None:
        if self.ticket[node]:
            super().remove(node)


class PinnedEvicted(Rewired):
    """Eviction looks for the least recently used leaf, pinned or not."""

    queue_type = _PitilessQueue

    def __init__(self, num_pages: int, page_size: int = 16, **options: Any) -> None:
        super().__init__(num_pages, page_size, **options)
        assert isinstance(self._store.queue, _PitilessQueue)
        self._store.queue.tree = self._tree


# -- match off by one page -----------------------------------------------------------------


class _WholePromptLeasing(LeaseOps):
    def matchable_bytes(self, key: CacheKey) -> int:
        return key.num_pages(self._page_size) * self._tree.page_bytes


class WholePromptMatched(Rewired):
    """A prompt that is cached to its end is matched to its end: nothing is left to compute."""

    leasing_type = _WholePromptLeasing


class _OverreachingTree(RadixTree):
    def find(self, root: int, atoms: bytes, end: int, *, pending: bool) -> Found:
        path, part, covered = super().find(root, atoms, end, pending=pending)
        if part and covered + 1 == self.resident[part] == self.length[part]:
            return [*path, part], 0, 0
        return path, part, covered + (part and covered < self.resident[part])


class OnePageTooMany(Rewired):
    """A match that ends inside a node takes one page more, which is not the key's."""

    tree_type = _OverreachingTree


class _HesitantLeasing(LeaseOps):
    def matchable_bytes(self, key: CacheKey) -> int:
        return max(0, super().matchable_bytes(key) - self._tree.page_bytes)


class OnePageTooFew(Rewired):
    """The last page of every match is computed again."""

    leasing_type = _HesitantLeasing


# -- leak on abort -------------------------------------------------------------------------


class PrivateLeaked(PrefixCache):
    """A request that ends does not give its private pages back."""

    def release(
        self, lease: Lease, private: Sequence[int] = (), session: Session | None = None
    ) -> None:
        super().release(lease, (), session)


class _LeakingStore(NodeStore):
    def drop_pending(self, nodes: Iterable[int]) -> None:
        tree = self.tree
        for node in sorted(nodes, key=tree.start.__getitem__, reverse=True):
            tree.ref_count[node] = tree.leader[node] = 0
            tree.evict_tail(node, tree.resident[node])
            self.ghosts.add(node, self.ghosts.reason[node], self.clock())
        self.ghosts.trim()


class AnnouncedLeaked(Rewired):
    """Pages that were announced and never computed leave the tree, but do not become free."""

    store_type = _LeakingStore


class DependentsForgotten(PrefixCache):
    """A withdrawal does not name the requests that relied on the pages it takes away."""

    def withdraw(self, lease: Lease) -> list[Lease]:
        super().withdraw(lease)
        return []


# -- two namespaces, one tree --------------------------------------------------------------


class _OneRoot(dict[bytes, int]):
    def get(self, key: bytes, default: Any = None) -> Any:
        return super().get(b"", default)


class _OneRootTree(RadixTree):
    def add_root(self, namespace: bytes) -> int:
        return super().add_root(b"")


class NamespacesShared(Rewired):
    """A request finds pages of another namespace."""

    tree_type = _OneRootTree

    def __init__(self, num_pages: int, page_size: int = 16, **options: Any) -> None:
        super().__init__(num_pages, page_size, **options)
        self._tree.roots = _OneRoot()


# -- memories taken for pages --------------------------------------------------------------


class _SeancingTree(RadixTree):
    def find(self, root: int, atoms: bytes, end: int, *, pending: bool) -> Found:
        path: list[int] = []
        for node, shared in self.find_including_evicted(root, atoms, 0, end):
            if self.leader[node] and not pending:
                break
            if shared < self.length[node]:
                return path, node, shared
            path.append(node)
        return path, 0, 0


class GhostsServed(Rewired):
    """What was evicted and is remembered counts as found."""

    tree_type = _SeancingTree


class _OptimisticTree(RadixTree):
    def find(self, root: int, atoms: bytes, end: int, *, pending: bool) -> Found:
        path, part, covered = super().find(root, atoms, end, pending=pending)
        if part and covered == self.resident[part] < self.length[part]:
            return [*path, part], 0, 0
        return path, part, covered


class PartTakenForWhole(Rewired):
    """A node that has lost its last pages is found as if it had them."""

    tree_type = _OptimisticTree


class _MixedUpTree(RadixTree):
    def refill(self, node: int, packed: bytes) -> None:
        super().refill(node, array("i", packed)[::-1].tobytes())


class RefilledBackwards(Rewired):
    """What comes back to life gets the right pages in the wrong order."""

    tree_type = _MixedUpTree


class _UnlistedStore(NodeStore):
    def _refill(self, node: int, packed: bytes) -> None:
        super()._refill(node, packed)
        self.num_evictable -= len(packed) // ID_BYTES


class RefilledNotEvictable(Rewired):
    """Pages that come back to a node that was partly evicted are lost to the count of what is."""

    store_type = _UnlistedStore


# -- a hash taken for what it names --------------------------------------------------------


class _CredulousIndex(HashIndex):
    def _matches(self, node: int, parent: int, page: bytes) -> bool:
        return True


class HashesBelieved(PrefixCache):
    """A flat index under a chain of 1 byte that does not look at what it has found."""

    def __init__(self, num_pages: int, page_size: int = 16, **options: Any) -> None:
        super().__init__(num_pages, page_size, **{**options, "index": "hash"})
        self._tree.index = _CredulousIndex(
            self._tree, lambda parent, page, size: chain_hashes(parent, page, size)[:1]
        )


# -- runs of private pages cut wrongly -----------------------------------------------------


class _LosingLedger(PageLedger):
    def _cut(self, head: bytes, size: int) -> bytes:
        first = super()._cut(head, size)
        second = [run for run in self._runs.values() if len(run) > ID_BYTES and run != first]
        with suppress(IndexError):
            self._runs[second[-1][:ID_BYTES]] = second[-1][:-ID_BYTES]
        return first


class CutLosesPage(Rewired):
    """Whoever uses pages from the middle of a run loses the last one."""

    ledger_type = _LosingLedger


class _OverlappingLedger(PageLedger):
    def _cut(self, head: bytes, size: int) -> bytes:
        run = self._runs[head]
        first = super()._cut(head, size)
        self._runs[head] = run[: size + ID_BYTES]
        return first


class CutKeepsPage(Rewired):
    """Whoever uses pages from the middle of a run still has the first of them afterwards."""

    ledger_type = _OverlappingLedger


MUTANTS: dict[str, tuple[type[PrefixCache], ...]] = {
    "publish before compute": (ReadyWhenAnnounced, SplitForgetsPending),
    "pin lost on split": (UpperHalfUnpinned, OldLeaseKeepsPrefix),
    "stale table after publish": (DuplicatesReturned,),
    "double release": (DeadLeaseReleased, PagesFreedTwice),
    "eviction of a pinned node": (PinnedEvicted,),
    "match off by one page": (WholePromptMatched, OnePageTooMany, OnePageTooFew),
    "leak on abort": (PrivateLeaked, AnnouncedLeaked, DependentsForgotten),
    "namespace ignored": (NamespacesShared,),
    "ghost taken for a page": (GhostsServed, PartTakenForWhole),
    "wrong pages on revival": (RefilledBackwards, RefilledNotEvictable),
    "hash not verified": (HashesBelieved,),
    "run of private pages cut wrongly": (CutLosesPage, CutKeepsPage),
}
