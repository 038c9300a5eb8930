"""Leases: which are live, and which of them compute or wait for pending pages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, ValuesView
from itertools import count
from typing import Any, Final

from ramify.cache.key import CacheKey, atoms_of
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.pages import ID_BYTES, Pages, pack_pages
from ramify.cache.tree import RadixTree
from ramify.errors import LeaseError, PageOwnershipError

NO_LOOKUP_COUNTS = (0, -1, 0, 0, 0)  # of a lease that no lookup made: it cannot be cancelled


class Lease:
    """Proof that a prefix is pinned; good until it is released or replaced by a newer one.

    `id`, `num_tokens`, `num_pending`, `key` and `pages` are for everybody to read; the other fields
    are the cache's own. (A frozen dataclass would take longer to make than a lookup takes.)
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
        self.num_pending: Final = num_pending  # of its last pages, not computed when it was made
        self.full_key: Final = full_key  # begins with the prefix
        self.packed_pages: Final = packed_pages  # its pages
        self.node = node  # the prefix ends at this node's end; splits keep that true
        self.leader: Final = leader  # passed on from a lease to the one that replaces it
        self.lookup_counts: Final = lookup_counts  # what its lookup added to the statistics
        self.withdrawn = False

    @property
    def key(self) -> CacheKey:
        """Exactly the pinned prefix."""
        return self.full_key.prefix(self.num_tokens)

    @property
    def pages(self) -> Pages:
        """The prefix's pages, in order."""
        return Pages(self.packed_pages)

    @property
    def source(self) -> CacheKey:
        """Deprecated: `full_key`."""
        _warn_renamed("source", "full_key")
        return self.full_key

    @property
    def packed(self) -> bytes:
        """Deprecated: `packed_pages`."""
        _warn_renamed("packed", "packed_pages")
        return self.packed_pages

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, num_tokens={self.num_tokens}, num_pending={self.num_pending})"


def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(
        f"Lease.{old} is deprecated; use Lease.{new}",
        DeprecationWarning,
        stacklevel=3 if __file__.endswith(".py") else 1,  # compiled calls have no frames
    )


class LeaseRegistry:
    """The live leases of a cache.

    A pending node carries the holder that is to compute it; the leases of one request, each of
    which replaces the one before, have one holder.
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
        """A new lease with a holder of its own."""
        number = next(self._numbers)
        lease = Lease(
            number, full_key, num_tokens, packed_pages, node, num_pending, number, lookup_counts
        )
        self._live[number] = lease
        return lease

    def replace(
        self, old: Lease, full_key: CacheKey, num_tokens: int, packed_pages: bytes
    ) -> Lease:
        """The next lease of the same request, at the node to which the old one has moved."""
        number, at, tree = next(self._numbers), old.node, self._tree
        num_pending, holder = 0, tree.leader
        while holder[at]:
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
        """See `PrefixCache.sharing`: from each lease up to the first node that is known already."""
        tree, first = self._tree, dict[int, int]()  # node → the first lease below it
        found = []
        for i, lease in enumerate(leases):
            node = lease.node
            while tree.parent[node] and node not in first:
                first[node] = i
                node = tree.parent[node]
            if not tree.parent[node]:  # a root: nothing is shared
                found.append((-1, 0))
                continue
            other = first[node]  # it may hold less of the node, which has grown since
            end = (tree.start[node] + tree.length[node]) * tree.page_size
            found.append((other, min(end, lease.num_tokens, leases[other].num_tokens)))
        return found

    def close(self, lease: Lease) -> None:
        """End a lease."""
        del self._live[lease.id]

    def require(self, lease: Any, *, withdrawn: bool = False) -> None:
        """Raise LeaseError unless a lease is live, and not withdrawn unless that is allowed."""
        try:
            is_live = self._live.get(lease.id) is lease
        except AttributeError:
            raise LeaseError(f"a {type(lease).__name__} is no lease") from None
        if not is_live:
            raise LeaseError(
                f"lease {lease.id} is not live here: it was released, replaced by a newer one, "
                "or belongs to another cache"
            )
        if lease.withdrawn and not withdrawn:
            raise LeaseError(f"lease {lease.id} lost pages to a withdrawal; release it")

    def pack_extension(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> bytes:
        """Packed pages for the whole pages of `key` beyond the lease; checks key and their number."""
        atoms, pinned, own = atoms_of(key), lease.num_tokens * ATOM_BYTES, lease.full_key
        if key.namespace != own.namespace or (
            pinned
            and not atoms.startswith(
                own.atoms if len(own.atoms) == pinned else memoryview(own.atoms)[:pinned]
            )
        ):
            raise LeaseError(f"the key does not begin with the prefix of lease {lease.id}")
        packed, page_bytes = pack_pages(private), self._tree.page_bytes
        grown = len(atoms) // page_bytes - pinned // page_bytes
        if grown * ID_BYTES > len(packed):
            raise PageOwnershipError(
                f"the key has {grown} whole pages beyond lease {lease.id} but only "
                f"{len(packed) // ID_BYTES} private pages were given"
            )
        return packed[: grown * ID_BYTES]

    def pending_nodes(self, lease: Lease) -> list[int]:
        """The pending nodes that this lease's holder is to compute, topmost first."""
        found, node, holder = [], lease.node, self._tree.leader
        while holder[node] == lease.leader:
            found.append(node)
            node = self._tree.parent[node]
        return found[::-1]

    def is_blocked(self, lease: Lease) -> bool:
        """Whether another holder is to compute a part of the prefix."""
        holder, node = self._tree.leader, lease.node
        while holder[node] == lease.leader:
            node = self._tree.parent[node]
        return bool(holder[node])

    def dependents(self, top: int) -> list[Lease]:
        """The leases that pin a pending node."""
        holder, parent, found = self._tree.leader, self._tree.parent, []
        for lease in self._live.values():
            at = lease.node
            while holder[at] and at != top:
                at = parent[at]
            if at == top:
                found.append(lease)
        return found

    def withdraw(self, top: int, leases: list[Lease]) -> set[int]:
        """Move leases off a pending subtree, all of whose leases they are; returns its nodes."""
        parent, doomed = self._tree.parent, set[int]()
        above = parent[top]
        for lease in leases:
            while lease.node != above:
                doomed.add(lease.node)
                lease.node = parent[lease.node]
            lease.withdrawn = True
        return doomed
