"""Leases: references to a prefix's pages, and the registry of the live ones."""

from __future__ import annotations

from collections.abc import Sequence, ValuesView
from itertools import count
from typing import Any, Final

from ramify.cache.key import CacheKey, atoms_of
from ramify.cache.packed import ATOM_BYTES, shared_pages
from ramify.cache.pages import ID_BYTES, Pages, pack_pages
from ramify.cache.tree import RadixTree
from ramify.errors import LeaseError, PageOwnershipError

# In place of the number of a lookup: of a request whose lookup was counted before.
UNCOUNTED: Final = 0
# Of a lease that no lookup made. No lease has -1 tokens, so `PrefixCache.cancel` refuses it.
NO_LOOKUP_COUNTS = (0, -1, 0, 0, 0)


class Lease:
    """A reference to a prefix's pages; valid until it is released or replaced by a newer lease.

    `id`, `num_tokens`, `num_pending`, `is_again`, `key`, `full_key`, `pages` and `packed_pages` are
    public; the other fields are the cache's own. Not a frozen dataclass: making one would take longer
    than the lookup.
    """

    __slots__ = (
        "full_key",
        "id",
        "leader",
        "lookup_counts",
        "node",
        "num_pending",
        "num_tokens",
        "packed_pages",
        "withdrawn",
    )

    def __init__(
        self,
        number: int,
        full_key: CacheKey,
        num_tokens: int,
        packed_pages: bytes,
        node: int,
        num_pending: int,
        leader: int,
        lookup_counts: tuple[int, int, int, int, int],
    ) -> None:
        self.id: Final = number
        self.num_tokens: Final = num_tokens  # length of the pinned prefix, whole pages
        self.num_pending: Final = num_pending  # last pages that were not computed at its creation
        self.full_key: Final = full_key  # begins with the prefix
        self.packed_pages = packed_pages  # replaced when pages outside the window are released
        self.node = node  # the prefix ends at this node's end; splits keep that true
        self.leader: Final = leader  # the same for a lease and those that replace it
        # What its lookup added to the statistics, as `NodeStore.count_lookup` returned it: (tokens,
        # hit tokens, ideal hit tokens, reuse-gap bucket, number of the lookup).
        self.lookup_counts: Final = lookup_counts
        self.withdrawn = False

    @property
    def key(self) -> CacheKey:
        """The key of exactly the pinned prefix."""
        return self.full_key.prefix(self.num_tokens)

    @property
    def pages(self) -> Pages:
        """The prefix's pages, in order."""
        return Pages(self.packed_pages)

    @property
    def is_again(self) -> bool:
        """Whether the lookup of its request was counted before; see `PrefixCache.attach`."""
        return self.lookup_counts[4] == UNCOUNTED and self.lookup_counts[1] >= 0

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, num_tokens={self.num_tokens}, num_pending={self.num_pending})"


class LeaseRegistry:
    """The live leases of a cache, by id.

    A pending node carries the leader that is to compute it: the id of a request's first lease, which
    all leases that replace it keep.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._live: dict[int, Lease] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._live)

    def live(self) -> ValuesView[Lease]:
        """All live leases, oldest first."""
        return self._live.values()

    def open(
        self,
        full_key: CacheKey,
        num_tokens: int,
        packed_pages: bytes,
        node: int,
        num_pending: int = 0,
        lookup_counts: tuple[int, int, int, int, int] = NO_LOOKUP_COUNTS,
    ) -> Lease:
        """Make a lease that is its own leader; the caller has added its references."""
        number = next(self._numbers)
        lease = Lease(
            number, full_key, num_tokens, packed_pages, node, num_pending, number, lookup_counts
        )
        self._live[number] = lease
        return lease

    def replace(
        self, old: Lease, full_key: CacheKey, num_tokens: int, packed_pages: bytes
    ) -> Lease:
        """Replace a lease by a new one of the same leader, which ends at `old.node`."""
        number, at, tree = next(self._numbers), old.node, self._tree
        num_pending, leader = 0, tree.leader
        while leader[at]:
            num_pending += tree.resident[at]
            at = tree.parent[at]
        lease = Lease(
            number,
            full_key,
            num_tokens,
            packed_pages,
            old.node,
            num_pending,
            old.leader,
            old.lookup_counts,
        )
        del self._live[old.id]
        self._live[number] = lease
        return lease

    def sharing(self, leases: Sequence[Lease]) -> list[tuple[int, int]]:
        """See `PrefixCache.sharing`: walks up from each lease to the first node visited before."""
        tree, first = self._tree, dict[int, int]()  # node → the first lease at or below it
        shared = []
        for i, lease in enumerate(leases):
            node = lease.node
            while tree.parent[node] and node not in first:
                first[node] = i
                node = tree.parent[node]
            if not tree.parent[node]:  # a root: nothing is shared
                shared.append((-1, 0))
                continue
            other = first[node]
            end = (tree.start[node] + tree.length[node]) * tree.page_size
            # A lease may hold less than its node, which can have grown since.
            end = min(end, lease.num_tokens, leases[other].num_tokens)
            if tree.ever_released:  # a lease keeps the ids of pages that were computed again
                same = shared_pages(lease.packed_pages, 0, leases[other].packed_pages, ID_BYTES)
                end = min(end, same * tree.page_size)
                other = other if end else -1
            shared.append((other, end))
        return shared

    def close(self, lease: Lease) -> None:
        """Remove a lease; the caller drops its references."""
        del self._live[lease.id]

    def require(self, lease: Any, *, withdrawn: bool = False) -> None:
        """Raise LeaseError if a lease is not live, or if it is withdrawn and `withdrawn` is False."""
        try:
            is_live = self._live.get(lease.id) is lease
        except AttributeError:
            raise LeaseError(f"a {type(lease).__name__} is not a lease") from None
        if not is_live:
            raise LeaseError(
                f"lease {lease.id} is not live here: it was released, replaced by a newer one, "
                "or belongs to another cache"
            )
        if lease.withdrawn and not withdrawn:
            raise LeaseError(f"lease {lease.id} lost pages to a withdrawal; release it")

    def pack_extension(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> bytes:
        """The head of `private`, packed: one page for each whole page of `key` beyond the lease.

        Raises:
            LeaseError: `key` does not begin with the lease's prefix.
            PageOwnershipError: too few pages, or ids that are no int32.
        """
        atoms, pinned, own = atoms_of(key), lease.num_tokens * ATOM_BYTES, lease.full_key
        if key.namespace != own.namespace or (
            pinned
            and not atoms.startswith(
                own.atoms if len(own.atoms) == pinned else memoryview(own.atoms)[:pinned]
            )
        ):
            raise LeaseError(f"the key does not begin with the prefix of lease {lease.id}")
        packed, page_bytes = pack_pages(private), self._tree.page_bytes
        num_new = len(atoms) // page_bytes - pinned // page_bytes
        if num_new * ID_BYTES > len(packed):
            raise PageOwnershipError(
                f"the key has {num_new} whole pages beyond lease {lease.id} but only "
                f"{len(packed) // ID_BYTES} private pages were given"
            )
        return packed[: num_new * ID_BYTES]

    def pending_nodes(self, lease: Lease) -> list[int]:
        """The pending nodes that this lease's leader is to compute, topmost first."""
        nodes, node, leader = [], lease.node, self._tree.leader
        while leader[node] == lease.leader:
            nodes.append(node)
            node = self._tree.parent[node]
        return nodes[::-1]

    def is_blocked(self, lease: Lease) -> bool:
        """Whether another leader is to compute a part of the prefix."""
        leader, node = self._tree.leader, lease.node
        while leader[node] == lease.leader:
            node = self._tree.parent[node]
        return bool(leader[node])

    def dependents(self, top: int) -> list[Lease]:
        """The live leases that end at or below the pending node `top`. O(leases)."""
        leader, parent, leases = self._tree.leader, self._tree.parent, []
        for lease in self._live.values():
            at = lease.node
            while leader[at] and at != top:
                at = parent[at]
            if at == top:
                leases.append(lease)
        return leases

    def withdraw(self, top: int, leases: list[Lease]) -> set[int]:
        """Withdraw all leases in the pending subtree of `top`: each now ends above it.

        Returns the nodes of the subtree.
        """
        parent, doomed = self._tree.parent, set[int]()
        above = parent[top]
        for lease in leases:
            while lease.node != above:
                doomed.add(lease.node)
                lease.node = parent[lease.node]
            lease.withdrawn = True
        return doomed
