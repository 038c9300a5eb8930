"""Faults that a prefix cache can have, each in a subclass: the state machine must find them all."""

from collections.abc import Sequence
from typing import ClassVar

from ramify.cache import CacheKey, Lease, Node, PageLedger, PrefixCache, RadixTree
from ramify.cache.eviction import EvictionQueue
from ramify.cache.prefix_cache import _Held
from ramify.errors import LeaseError


class Rewired(PrefixCache):
    """A cache with parts of other types."""

    tree_type: ClassVar[type[RadixTree]] = RadixTree
    ledger_type: ClassVar[type[PageLedger]] = PageLedger

    def __init__(self, num_pages: int, page_size: int = 16, *, policy: str = "lru") -> None:
        super().__init__(num_pages, page_size, policy=policy)
        self._tree = self.tree_type(page_size)
        self._ledger = self.ledger_type(num_pages)


# -- publish before compute ----------------------------------------------------------------


class ReadyWhenAnnounced(PrefixCache):
    """What is announced is ready at once."""

    def announce(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> Lease:
        new = super().announce(lease, key, private)
        for node in self._announced(self._held[new.id]):
            node.holder = 0
        return new


class _ForgetfulTree(RadixTree):
    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.holder = 0
        return upper


class SplitForgetsPending(Rewired):
    """The upper half of a node that is still being computed looks ready."""

    tree_type = _ForgetfulTree


# -- pin lost on split ---------------------------------------------------------------------


class _UnpinningTree(RadixTree):
    def split(self, node: Node, num_pages: int) -> Node:
        upper = super().split(node, num_pages)
        upper.pins = 0
        return upper


class UpperHalfUnpinned(Rewired):
    """A split gives the new upper half no pins."""

    tree_type = _UnpinningTree


class _UpsideDownTree(RadixTree):
    def split(self, node: Node, num_pages: int) -> Node:
        cut = num_pages * self.page_bytes
        tail = node.pages[num_pages:]
        lower = Node(node, node.atoms[cut:], tail, node.holder, node.namespace)
        lower.pins, lower.hits, lower.last_access = node.pins, node.hits, node.last_access
        lower.depth, lower.children = node.depth, node.children
        for child in lower.children.values():
            child.parent = lower
        node.depth -= len(tail)
        node.atoms, node.pages = node.atoms[:cut], node.pages[:num_pages]
        node.children = {lower.atoms[: self.page_bytes]: lower}
        self.num_nodes += 1
        return node


class OldObjectKeepsPrefix(Rewired):
    """A split leaves the prefix half in the existing object, on which the pins are held."""

    tree_type = _UpsideDownTree


# -- stale table after publish -------------------------------------------------------------


class DuplicatesReturned(PrefixCache):
    """Publishing returns the caller's own pages, also where they were freed as duplicates."""

    def publish(self, lease: Lease, key: CacheKey, private: Sequence[int] = ()) -> Lease:
        new = super().publish(lease, key, private)
        pages = lease.pages + tuple(private[: len(new.pages) - len(lease.pages)])
        stale = self._held[new.id].lease = Lease(new.id, new.key, pages, new.num_pending)
        return stale


# -- double release ------------------------------------------------------------------------


class DeadLeaseReleased(PrefixCache):
    """A lease can be released again, which takes its pins off once more."""

    def release(self, lease: Lease, private: Sequence[int] = ()) -> None:
        try:
            super().release(lease, private)
        except LeaseError:
            if lease.id in self._held:
                raise
            node, _ = self._tree.walk(lease.key, len(lease.pages), pending=True)
            while node is not None:
                node.pins -= 1
                node = node.parent


class _TrustingLedger(PageLedger):
    def require_private(self, pages: Sequence[int]) -> None:
        pass


class PagesFreedTwice(Rewired):
    """The ledger takes back pages that are free, shared, or named twice."""

    ledger_type = _TrustingLedger


# -- eviction of a pinned node -------------------------------------------------------------


class _PitilessQueue(EvictionQueue):
    tree: RadixTree

    def pop(self) -> Node | None:
        leaves = [node for node in self.tree.nodes() if node.is_leaf and not node.is_pending]
        return min(leaves, key=self._sort_key, default=None)


class PinnedEvicted(PrefixCache):
    """Eviction looks for the least recently used leaf, pinned or not."""

    def __init__(self, num_pages: int, page_size: int = 16, *, policy: str = "lru") -> None:
        super().__init__(num_pages, page_size, policy=policy)
        self._queue = queue = _PitilessQueue(policy)
        queue.tree = self._tree


# -- match off by one page -----------------------------------------------------------------


class WholePromptMatched(PrefixCache):
    """A prompt that is cached to its end is matched to its end: nothing is left to compute."""

    def _usable_pages(self, key: CacheKey) -> int:
        return key.num_pages(self.page_size)


class _OverreachingTree(RadixTree):
    def walk(
        self, key: CacheKey, max_pages: int, *, pending: bool, start: Node | None = None
    ) -> tuple[Node | None, int]:
        node, covered = super().walk(key, max_pages, pending=pending, start=start)
        return node, covered + (node is not None and covered < len(node.pages))


class OnePageTooMany(Rewired):
    """A match that ends inside a node takes one page more, which is not the key's."""

    tree_type = _OverreachingTree


class OnePageTooFew(PrefixCache):
    """The last page of every match is computed again."""

    def _usable_pages(self, key: CacheKey) -> int:
        return max(0, super()._usable_pages(key) - 1)


# -- leak on abort -------------------------------------------------------------------------


class PrivateLeaked(PrefixCache):
    """A request that ends does not give its private pages back."""

    def release(self, lease: Lease, private: Sequence[int] = ()) -> None:
        super().release(lease)


class AnnouncedLeaked(PrefixCache):
    """Pages that were announced and never computed leave the tree, but do not become free."""

    def _remove_pending(self, top: Node, dependents: list[_Held]) -> None:
        parent = top.parent
        assert parent is not None
        for node in reversed(list(self._tree.nodes(top))):
            self._tree.remove(node)
        for held in dependents:
            held.node, held.withdrawn = parent, True


class DependentsForgotten(PrefixCache):
    """A withdrawal does not name the requests that relied on the pages it takes away."""

    def withdraw(self, lease: Lease) -> list[Lease]:
        super().withdraw(lease)
        return []


# -- two namespaces, one tree --------------------------------------------------------------


class _OneRootTree(RadixTree):
    def walk(
        self, key: CacheKey, max_pages: int, *, pending: bool, start: Node | None = None
    ) -> tuple[Node | None, int]:
        return super().walk(CacheKey(key.atoms), max_pages, pending=pending, start=start)

    def root(self, namespace: bytes) -> Node:
        return super().root(b"")


class NamespacesShared(Rewired):
    """A request finds pages of another namespace."""

    tree_type = _OneRootTree


MUTANTS: dict[str, tuple[type[PrefixCache], ...]] = {
    "publish before compute": (ReadyWhenAnnounced, SplitForgetsPending),
    "pin lost on split": (UpperHalfUnpinned, OldObjectKeepsPrefix),
    "stale table after publish": (DuplicatesReturned,),
    "double release": (DeadLeaseReleased, PagesFreedTwice),
    "eviction of a pinned node": (PinnedEvicted,),
    "match off by one page": (WholePromptMatched, OnePageTooMany, OnePageTooFew),
    "leak on abort": (PrivateLeaked, AnnouncedLeaked, DependentsForgotten),
    "namespace ignored": (NamespacesShared,),
}
