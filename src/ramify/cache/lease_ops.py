"""`LeaseOps`: the calls that every request makes: acquire, publish, release, reserve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ramify.cache.eviction import evict
from ramify.cache.ghosts import CAPACITY, WINDOW
from ramify.cache.key import CacheKey, atoms_of
from ramify.cache.leases import UNCOUNTED, Lease, LeaseRegistry
from ramify.cache.node_store import NodeStore
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.pages import ID_BYTES, Pages, pack_pages
from ramify.cache.pins import PinTable
from ramify.cache.session_table import Session
from ramify.cache.types import validate_int
from ramify.errors import LeaseError, OutOfPagesError

NEVER_S: Final = float("inf")


class LeaseOps:
    """The hot path of `PrefixCache`: operations on leases and their pages.

    Arguments typed `Any` come from callers unchecked (compiled code would refuse them with a bare
    TypeError); they are checked before anything changes.
    """

    def __init__(self, store: NodeStore, registry: LeaseRegistry, max_pinned: int) -> None:
        self._store, self._registry = store, registry
        self._tree, self._page_size = store.tree, store.tree.page_size
        self.pins = PinTable(store.tree, max_pinned, store.clock, self.cancel_pin)

    def matchable_bytes(self, key: Any) -> int:
        """Bytes of a key's atoms that a lookup may match; at least one token is left to compute."""
        num_bytes, page_bytes = len(atoms_of(key)), self._tree.page_bytes
        return (num_bytes - 1) // page_bytes * page_bytes if num_bytes else 0

    def acquire(self, key: Any, pending: bool, again: bool = False) -> Lease:
        """Pin the longest cached proper prefix of a key, and count the lookup.

        Args:
            pending: match announced pages too.
            again: the request's lookup is counted already.
        """
        lease = self.pin_prefix(key, self.matchable_bytes(key), pending, True, again)
        if self.pins.next_expiry_s < NEVER_S:
            self.pins.refresh(self._tree.path(lease.node))
        return lease

    def pin_prefix(
        self,
        key: Any,
        end: int,
        pending: bool = False,
        is_lookup: bool = False,
        again: bool = False,
    ) -> Lease:
        """Pin the longest cached prefix of a key, up to byte `end` of its atoms."""
        tree, store = self._tree, self._store
        atoms: bytes = key.atoms
        root = tree.roots.get(key.namespace, 0)
        if not root:
            root, path = tree.add_root(key.namespace), list[int]()
        else:
            path, part, covered = tree.find(root, atoms, end, pending=pending)
            if part:
                path.append(store.split(part, covered))
        store.pin_path(root, path)
        node, packed, num_pending = root, b"", 0
        if path:
            node, packed = path[-1], tree.path_pages(path)
            if tree.leader[node]:
                num_pending = sum([tree.resident[at] for at in path if tree.leader[at]])
        num_tokens = len(packed) // ID_BYTES * self._page_size
        if not is_lookup:
            return self._registry.open(key, num_tokens, packed, node, num_pending)
        counts = (
            (0, num_tokens, 0, 0, UNCOUNTED)
            if again
            else store.count_lookup(path, node, atoms, num_tokens, end)
        )
        return self._registry.open(key, num_tokens, packed, node, num_pending, counts)

    def fork(self, lease: Any, num_tokens: Any) -> Lease:
        """See `PrefixCache.fork`."""
        self._registry.require(lease)
        tree, node = self._tree, lease.node
        if tree.leader[node]:
            raise LeaseError(
                f"lease {lease.id} has announced or attached to pages that are not computed yet; "
                "publish them first"
            )
        length = lease.num_tokens if num_tokens is None else num_tokens
        if not 0 <= length <= lease.num_tokens:
            raise LeaseError(
                f"num_tokens={length} but lease {lease.id} has {lease.num_tokens} tokens"
            )
        num_pages = validate_int("num_tokens", length) // self._page_size
        end, packed = num_pages * self._page_size, lease.packed_pages[: num_pages * ID_BYTES]
        if end < lease.num_tokens and not self.is_readable(packed, end):
            raise LeaseError(
                f"num_tokens={length} but pages of lease {lease.id} in the window before that were "
                "released; share all of it, or 0 tokens"
            )
        node = self._store.node_ending_at(node, num_pages)
        self._store.pin_path(tree.root[node], tree.path(node))
        return self._registry.open(lease.full_key, end, packed, node)

    def announce(self, lease: Any, key: Any, private: Any) -> Lease:
        """See `PrefixCache.announce`."""
        self._registry.require(lease)
        packed = self._registry.pack_extension(lease, key, private)
        tree, store, start = self._tree, self._store, lease.num_tokens * ATOM_BYTES
        child = tree.index.find(lease.node, key.atoms, start) if packed else 0
        if not packed or tree.resident[child]:
            store.ledger.require_private(packed)
            unchanged: Lease = lease
            return unchanged
        store.ledger.adopt(packed)
        lease.node = store.insert_nodes(lease.node, child, key, start, packed, lease.leader)
        end = lease.num_tokens + len(packed) // ID_BYTES * self._page_size
        return self._registry.replace(lease, key, end, lease.packed_pages + packed)

    def publish(self, lease: Any, key: Any, private: Any) -> Lease:
        """See `PrefixCache.publish`."""
        self._registry.require(lease)
        packed, store = self._registry.pack_extension(lease, key, private), self._store
        if self._tree.leader[lease.node]:
            if self._registry.is_blocked(lease):
                raise LeaseError(
                    f"lease {lease.id} depends on pages that are not computed yet; "
                    "publish their leader first"
                )
            store.ledger.require_private(packed)
            store.mark_ready(self._registry.pending_nodes(lease))
        lease.node, pages = store.insert(lease.node, key, lease.num_tokens * ATOM_BYTES, packed)
        end = lease.num_tokens + len(pages) // ID_BYTES * self._page_size
        return self._registry.replace(lease, key, end, lease.packed_pages + pages)

    def withdraw(self, lease: Any) -> list[Lease]:
        """See `PrefixCache.withdraw`."""
        self._registry.require(lease)
        announced = self._registry.pending_nodes(lease)
        if not announced:
            return []
        dependents = self._registry.dependents(announced[0])
        self._store.drop_pending(self._registry.withdraw(announced[0], dependents))
        return [other for other in dependents if other is not lease]

    def can_retract(self, lease: Any, num_tokens: Any) -> bool:
        """See `PrefixCache.can_retract`."""
        self._registry.require(lease)
        tree, start = self._tree, validate_int("num_tokens", num_tokens) // self._page_size
        return all(
            tree.ref_count[node] == 1  # the lease's own
            for node in self._registry.pending_nodes(lease)
            if tree.start[node] + tree.length[node] > start
        )

    def retract(self, lease: Any, num_tokens: Any) -> tuple[Lease, Pages]:
        """See `PrefixCache.retract`."""
        num_tokens = validate_int("num_tokens", num_tokens)
        if not self.can_retract(lease, num_tokens):
            raise LeaseError(
                f"others depend on pages that lease {lease.id} announced beyond token {num_tokens}"
            )
        announced, size = self._registry.pending_nodes(lease), self._page_size
        if not announced:
            return lease, Pages()
        start = max(num_tokens // size, self._tree.start[announced[0]])
        lease.node, packed = self._store.retract(announced, start)
        left = lease.packed_pages[: len(lease.packed_pages) - len(packed)]
        length = len(left) // ID_BYTES * size
        return self._registry.replace(lease, lease.full_key, length, left), Pages(packed)

    def release(self, lease: Any, private: Any, session: Session | None) -> None:
        """See `PrefixCache.release`."""
        self._registry.require(lease, withdrawn=True)
        packed = pack_pages(private)
        if self._tree.leader[lease.node] and (announced := self._registry.pending_nodes(lease)):
            self._store.ledger.require_private(packed)
            num_leases = self._tree.ref_count[announced[0]]
            if num_leases > 1:
                raise LeaseError(
                    f"lease {lease.id} announced pages that it did not compute; leases that depend on them: "
                    f"{num_leases - 1}; withdraw it first"
                )
            self._store.drop_pending(self._registry.withdraw(announced[0], [lease]))
        if packed:
            self._store.ledger.give_back(packed)
        self._registry.close(lease)
        _, hit_tokens, _, _, lookup_number = lease.lookup_counts
        # The first lookup of the request has informed the policy of the pages that it hit.
        num_known = hit_tokens // self._page_size if lookup_number else 0
        self._store.release_used(lease.node, num_known, lookup_number, session)

    def reserve(self, num_pages: Any) -> Pages:
        """See `PrefixCache.reserve`."""
        # The usual case needs no validation.
        is_count = type(num_pages) is int and num_pages >= 0
        count: int = num_pages if is_count else validate_int("num_pages", num_pages)
        store = self._store
        missing = count - store.ledger.num_free
        if missing > 0:
            if self.pins.next_expiry_s < NEVER_S:
                self.pins.expire()
            if missing > store.num_evictable:
                free, evictable = store.ledger.num_free, store.num_evictable
                raise OutOfPagesError(
                    count, free, evictable, store.ledger.num_pages, self.pins.holdings()
                )
            evict(store, missing, CAPACITY)
        return Pages(store.ledger.take(count))

    def cancel(self, lease: Any) -> None:
        """See `PrefixCache.cancel`."""
        self._registry.require(lease, withdrawn=True)
        _, hit_tokens, *_ = lease.lookup_counts
        if lease.num_tokens != hit_tokens:
            raise LeaseError(
                f"lease {lease.id} grew to {lease.num_tokens} tokens after its lookup, or comes "
                "from no lookup; release it instead"
            )
        if lease.lookup_counts[4]:
            self._store.cancel_lookup(lease.node, lease.lookup_counts)
        self.cancel_pin(lease)

    # -- outside the window ----------------------------------------------------------------

    def is_readable(self, packed: bytes, num_tokens: int) -> bool:
        """See `ramify.cache.window.is_readable`."""
        tree = self._tree
        if tree.window is None:
            return True
        first = max(0, num_tokens + 1 - tree.window) // self._page_size
        return Pages(tree.released_id)[0] not in Pages(packed[first * ID_BYTES :])

    def has_next_page(self, lease: Lease, key: CacheKey) -> bool:
        """See `ramify.cache.window.has_next_page`; the page may be released."""
        start = lease.num_tokens * ATOM_BYTES
        if start + self._tree.page_bytes > len(key.atoms):
            return False
        return self._tree.resident[self._tree.index.find(lease.node, key.atoms, start)] > 0

    def heads_outside_window(
        self, leases: Sequence[Lease], num_computed: Sequence[int]
    ) -> dict[int, int]:
        """Map each node to its number of leading pages that are outside the window of every lease on it.

        See `ramify.cache.window.release_outside_window`. O(nodes above the leases).
        """
        tree, size = self._tree, self._page_size
        num_readers, first_read = dict[int, int](), dict[int, int]()
        if tree.window is None:
            return first_read
        seen = set[int]()
        for lease, num_tokens in zip(leases, num_computed, strict=True):
            self._registry.require(lease, withdrawn=True)
            if lease.id in seen:
                raise LeaseError(f"lease {lease.id} is named twice")
            seen.add(lease.id)
            first, node = max(0, num_tokens + 1 - tree.window) // size, lease.node
            while tree.parent[node]:
                num_readers[node] = num_readers.get(node, 0) + 1
                first_read[node] = min(first, first_read.get(node, first))
                node = tree.parent[node]
        heads = dict[int, int]()
        for node, first in first_read.items():
            num_pages = min(tree.resident[node], first - tree.start[node])
            if (
                num_readers[node] == tree.ref_count[node]
                and not tree.leader[node]
                and num_pages > tree.resident[node] - tree.owned[node]
            ):
                heads[node] = num_pages
        return heads

    def release_outside_window(self, leases: Sequence[Lease], num_computed: Sequence[int]) -> int:
        """See `ramify.cache.window.release_outside_window`."""
        num_pages, heads = 0, self.heads_outside_window(leases, num_computed)
        try:
            for node, count in heads.items():
                num_pages += self._release_head(node, count)
        finally:  # the clock is the caller's code and may raise; no lease may keep a freed page
            if num_pages:
                for lease in leases:
                    if lease.withdrawn:
                        continue  # its owner reads no page
                    packed = self._tree.path_pages(self._tree.path(lease.node))
                    # A lease may hold less than its node, which can have grown since.
                    lease.packed_pages = packed[: len(lease.packed_pages)]
        return num_pages

    def _release_head(self, node: int, num_pages: int) -> int:
        """Free the first `num_pages` pages of a referenced node; returns how many it still had."""
        tree, store, log = self._tree, self._store, self._store.log
        num_released, packed, now_s = (
            tree.resident[node] - tree.owned[node],
            tree.pages[node],
            store.clock(),
        )
        freed = packed[num_released * ID_BYTES : num_pages * ID_BYTES]
        tree.pages[node] = tree.released_id * num_pages + packed[num_pages * ID_BYTES :]
        tree.owned[node] = tree.resident[node] - num_pages
        tree.num_released += num_pages - num_released
        tree.ever_released = True
        store.ledger.reclaim(freed)
        store.ghosts.evicted_s[node] = now_s
        age_s, idle_s = now_s - tree.created_s[node], now_s - tree.last_access_s[node]
        store.counters.evicted(WINDOW, num_pages - num_released, age_s, idle_s)
        if log.subscribers or log.observers:
            log.removed(node, freed, WINDOW, num_released)
        return num_pages - num_released

    def cancel_pin(self, lease: Lease) -> None:
        """End a lease without counting its pages as used."""
        self._registry.close(lease)
        self._store.unpin(lease.node)
