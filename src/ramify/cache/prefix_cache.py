"""`PrefixCache`, the public calls: match, acquire, reserve, announce, publish, release, check.

The state is in four parts. `RadixTree` has the structure: which pages follow which. `NodeStore` keeps
the tree, the pages, the eviction queue and the ghosts consistent. `LeaseRegistry` knows the live
leases, and which pages they still have to compute. `PageLedger` knows the owner of every page.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence

from ramify.cache import eviction
from ramify.cache.call_guard import UNNAMED, CallGuard, guarded
from ramify.cache.draft_lookup import draft_tokens
from ramify.cache.events import Evicted, Snapshot, Subscription
from ramify.cache.explain import explain_key
from ramify.cache.ghosts import ASKED
from ramify.cache.hash_index import INDICES
from ramify.cache.invariants import check_cache
from ramify.cache.key import CacheKey, atoms_of, pack
from ramify.cache.lease_ops import LeaseOps
from ramify.cache.leases import Lease, LeaseRegistry
from ramify.cache.node_store import NodeStore
from ramify.cache.pages import Pages, pack_pages
from ramify.cache.pins import Pin, validate_ttl
from ramify.cache.policies import POLICIES
from ramify.cache.session_table import Session
from ramify.cache.statistics import collect_stats
from ramify.cache.tree import RadixTree
from ramify.cache.types import CacheStats, Match, Node, validate_int
from ramify.errors import ConfigError
from ramify.outputs import Explanation

# Times `num_pages`: below 2 the policy learns too little, beyond 4 no gain was measured.
GHOST_POOLS = 4
FLOAT_SLACK = 1e-9  # pages; 0.29 * 100 is 28.999… but means 29


class PrefixCache:
    """Maps token prefixes to the pages with their K/V; for one thread at a time (`CallGuard`).

    Args:
        num_pages: pages 0 .. num_pages - 1 of the caller's storage.
        page_size: tokens per page, at least 1.
        policy: name of an eviction policy; see `ramify.cache.policies.POLICIES`.
        index: "radix" or "hash": how the child of a node is found.
        window: last tokens that a query reads, itself included; None: all. See `cache.window`.
        ghost_pages: evicted pages to remember, for explanations, the ideal hit rate and "auto"; by
            default 4 * `num_pages`. A token takes 4 to 6 bytes, a run of pages 500. 0: none.
        max_pinned_share: share of the pages that `pin` may keep from eviction, 0 to 1.
        log_every: lookups between two log lines; 0 logs nothing.
        clock: returns seconds and never goes back; for ages and times to live.

    A call that raises has changed nothing, unless a callback of yours raised: callbacks must not.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        policy: str = "auto",
        index: str = "radix",
        window: int | None = None,
        ghost_pages: int | None = None,
        max_pinned_share: float = 0.5,
        log_every: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, table, kind in ((policy, POLICIES, "eviction policy"), (index, INDICES, "index")):
            if not isinstance(name, str) or name not in table:
                raise ConfigError(f"unknown {kind} {name!r}; one of {sorted(table)}")
        num_pages = validate_int("num_pages", num_pages, 1)
        page_size = validate_int("page_size", page_size, 1)
        validate_int("log_every", log_every)
        window = None if window is None else validate_int("window", window, 1)
        ghost_pages = GHOST_POOLS * num_pages if ghost_pages is None else ghost_pages
        ghost_pages = validate_int("ghost_pages", ghost_pages)
        if not isinstance(max_pinned_share, int | float) or not 0 <= max_pinned_share <= 1:
            raise ConfigError(
                f"max_pinned_share={max_pinned_share} but it must be a number from 0 to 1"
            )
        if not callable(clock):
            raise ConfigError(f"clock={clock!r} but it must be a function that returns seconds")
        self.guard = CallGuard()
        self.page_size = page_size
        self.policy, self.index, self.window = policy, index, window
        self._tree = tree = RadixTree(page_size, window, num_pages)
        tree.index = INDICES[index](tree)
        self._store = NodeStore(tree, num_pages, POLICIES[policy], ghost_pages, log_every, clock)
        self._page_bytes, self._registry = tree.page_bytes, LeaseRegistry(tree)
        max_pinned = int(num_pages * max_pinned_share + FLOAT_SLACK)
        self._lease_ops = LeaseOps(self._store, self._registry, max_pinned)
        self._pin_table = self._lease_ops.pins

    # -- looking ---------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages managed, whoever owns them."""
        return self._store.ledger.num_pages

    @property
    @guarded
    def num_available(self) -> int:
        """Pages that `reserve` could hand out now: the free and the evictable pages."""
        self._pin_table.expire()
        return self._store.ledger.num_free + self._store.num_evictable

    @guarded
    def is_free(self, page: int) -> bool:
        """Whether nobody owns this page. O(num_pages): for checks.

        Raises:
            ConfigError: `page` is not a whole number.
        """
        return self._store.ledger.is_free(validate_int("page", page, None))

    def match(self, key: CacheKey) -> Match:
        """The longest computed proper prefix of `key`, in whole pages; changes nothing.

        Cost: a few memcmps per node on the path.
        """
        guard = self.guard
        if guard.thread:
            guard.require("PrefixCache.match")
            return self._match(key)
        guard.thread = UNNAMED
        try:
            return self._match(key)
        finally:
            guard.thread = 0

    def _match(self, key: CacheKey) -> Match:
        tree, end = self._tree, self._lease_ops.matchable_bytes(key)
        root = tree.roots.get(key.namespace)
        if root is None:
            return Match(0, 0)
        pages = tree.num_matched_pages(*tree.find(root, key.atoms, end, pending=False))
        return Match(pages * self.page_size, pages)

    @guarded
    def explain(
        self,
        key: CacheKey,
        *,
        may_tell: Callable[[bytes], bool] | None = None,
        pending: bool = False,
    ) -> Explanation:
        """Why a lookup of `key` hits no more tokens; see `explain_key`. Changes nothing.

        Args:
            may_tell: whether another namespace may be named; None: each may.
            pending: explain what `attach` would hit, announced pages included.
        """
        store, end = self._store, self._lease_ops.matchable_bytes(key)
        refusal = self._pin_table.last_refusal(key)
        return explain_key(
            self._tree, store.ghosts, key, end, store.clock(), refusal, may_tell, pending=pending
        )

    @guarded
    def continuation(self, lease: Lease, tail: Iterable[int], limit: int) -> array[int]:
        """Up to `limit` tokens that once followed a lease's prefix and `tail`; often none.

        A draft for speculative decoding, read from cached and evicted pages alike. Of several
        continuations it takes the most recently used. Changes nothing.

        Raises:
            LeaseError: the lease is not live, or was withdrawn.
        """
        self._registry.require(lease)
        return draft_tokens(self._tree, lease.node, pack(tail), limit)

    @guarded
    def can_reserve(self, num_pages: int) -> bool:
        """Whether `reserve` would succeed now."""
        return 0 <= validate_int("num_pages", num_pages, None) <= self.num_available

    @guarded
    def can_allocate(self, key: CacheKey, num_tokens: int = 0) -> bool:
        """Whether `acquire(key)`, then `reserve` for the rest of it and `num_tokens` more, succeed.

        A cached page that the lease would pin counts as a hit, not as evictable too.
        """
        self._pin_table.expire()
        end = self._lease_ops.matchable_bytes(key)
        num_pages = -(-(len(key) + validate_int("num_tokens", num_tokens)) // self.page_size)
        return num_pages <= self._store.num_available_after_match(key, end)

    @guarded
    def stats(self) -> CacheStats:
        """Counters since the cache was made, and how its pages are used now."""
        return collect_stats(self._store, self._registry, self._pin_table)

    # -- leases ----------------------------------------------------------------------------

    def acquire(self, key: CacheKey) -> Lease:
        """Pin the longest computed proper prefix of `key`, which may be empty; counts a lookup."""
        guard = self.guard
        if guard.thread:
            guard.require("PrefixCache.acquire")
            return self._lease_ops.acquire(key, False)
        guard.thread = UNNAMED
        try:
            return self._lease_ops.acquire(key, False)
        finally:
            guard.thread = 0

    @guarded
    def attach(self, key: CacheKey, *, again: bool = False) -> Lease:
        """Like `acquire`, but it also hits pages that a live leader announced and still computes.

        For planners: the caller must run in the leader's step or after it. `again` counts no lookup.
        """
        return self._lease_ops.acquire(key, True, again)

    @guarded
    def fork(self, lease: Lease, num_tokens: int | None = None) -> Lease:
        """A second, independent lease on the same prefix; no page is copied.

        Args:
            lease: stays as it is.
            num_tokens: share only the whole pages of the first `num_tokens` tokens; default: all.

        Raises:
            LeaseError: the lease is not live, is shorter, or depends on pages that are not
                computed yet, or were released where a query after the shorter prefix reads.
        """
        return self._lease_ops.fork(lease, num_tokens)

    @guarded
    def cancel(self, lease: Lease) -> None:
        """End an unused lease of `acquire` or `attach`, and take its lookup off the statistics.

        Raises:
            LeaseError: the lease is not live, or grew by `announce` or `publish` (`release` it).
        """
        self._lease_ops.cancel(lease)

    def release(
        self, lease: Lease, private: Sequence[int] = (), session: Session | None = None
    ) -> None:
        """End a lease of a request, which was in `session`; published pages stay cached.

        The `private` pages become free, and those that it announced and never published.

        Raises:
            LeaseError: it is not live, or others depend on what it announced (`withdraw` first).
            PageOwnershipError: a page of `private` is not private.
        """
        guard = self.guard
        if guard.thread:
            guard.require("PrefixCache.release")
            return self._lease_ops.release(lease, private, session)
        guard.thread = UNNAMED
        try:
            self._lease_ops.release(lease, private, session)
        finally:
            guard.thread = 0

    @guarded
    def pin(
        self,
        key: CacheKey,
        owner: str,
        ttl: float | None = None,
        *,
        max_owner_pages: int | None = None,
        room_pages: int = 0,
        max_nested: int | None = None,
    ) -> Pin:
        """Keep the longest computed prefix of `key`, up to all its whole pages, from eviction.

        Args:
            key: its whole pages are pinned, as far as they are cached.
            owner: name to list the pin under; see `pins`.
            ttl: seconds until the pin expires. Each lookup that hits the whole prefix restarts it,
                even if it is cancelled later. None: until `unpin`.
            max_owner_pages: limit of the pages that the owner pins and no other owner does.
            room_pages: pages that must stay without a pin.
            max_nested: pins of the owner inside the prefix; of more, the longest is replaced.

        Raises:
            ConfigError: `ttl` is not positive.
            PinError: no page of the prefix is cached, or more pages would be pinned than
                `max_pinned_share` of all, `max_owner_pages` or `room_pages` allow.
        """
        max_pages = max(0, self.num_pages - validate_int("room_pages", room_pages))
        ttl_s = validate_ttl(ttl)
        end = len(atoms_of(key)) // self._page_bytes * self._page_bytes
        self._pin_table.expire()
        self._pin_table.check_budget(key, end, owner, max_pages, max_owner_pages)
        lease = self._lease_ops.pin_prefix(key, end)
        return self._pin_table.add(lease, owner, ttl_s, max_nested)

    @guarded
    def unpin(self, pin: Pin | int) -> None:
        """End a pin; its pages are ordinary cached pages again.

        Raises:
            PinError: the pin has expired or was unpinned before.
        """
        self._pin_table.expire()
        self._pin_table.remove(pin)

    @guarded
    def pins(self, owner: str | None = None) -> list[Pin]:
        """The live pins, oldest first; with `owner`, only that owner's."""
        self._pin_table.expire()
        return self._pin_table.list(owner)

    # -- pages -----------------------------------------------------------------------------

    def reserve(self, num_pages: int) -> Pages:
        """Take `num_pages` private pages; evicts the least valuable pages if too few are free.

        Raises:
            OutOfPagesError: evicting every evictable page would not free enough.
        """
        guard = self.guard
        if guard.thread:
            guard.require("PrefixCache.reserve")
            return self._lease_ops.reserve(num_pages)
        guard.thread = UNNAMED
        try:
            return self._lease_ops.reserve(num_pages)
        finally:
            guard.thread = 0

    @guarded
    def give_back(self, pages: Sequence[int]) -> None:
        """Free private pages that belong to no lease."""
        self._store.ledger.give_back(pack_pages(pages))

    @guarded
    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` pages in the policy's order, leaves first; returns how many."""
        self._pin_table.expire()
        return eviction.evict(self._store, validate_int("num_pages", num_pages), ASKED)

    @guarded
    def evict_if(self, predicate: Callable[[Node], bool], num_pages: int | None = None) -> int:
        """Evict the unpinned leaves for which `predicate` is true; returns how many pages.

        A parent that becomes a leaf is tested in turn. Cost: one call for each evictable leaf.

        Args:
            predicate: gets a `Node` (age, hits, namespace, depth, …); must not call the cache.
            num_pages: evict at most this many pages; default: no limit.
        """
        self._pin_table.expire()
        limit = self.num_pages if num_pages is None else validate_int("num_pages", num_pages)
        return eviction.evict_if(self._store, lambda node: bool(predicate(node)), limit)

    @guarded
    def set_priority(self, key: CacheKey, priority: int) -> int:
        """Set the priority of the prefix that `match` finds; returns its number of tokens.

        Only the policy "priority" reads it. Nodes above are raised to at least `priority`.
        """
        priority = validate_int("priority", priority, -(2**31), 2**31 - 1)
        lease = self._lease_ops.pin_prefix(key, self._lease_ops.matchable_bytes(key))
        self._store.set_priority(lease.node, priority)
        self._lease_ops.cancel_pin(lease)
        return lease.num_tokens

    @guarded
    def clear(self) -> int:
        """Evict every cached page that no lease and no pin holds; returns how many."""
        self._pin_table.expire()
        return eviction.clear(self._store)

    # -- publishing: from private pages to shared ones ------------------------------------------------------

    @guarded
    def announce(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> Lease:
        """Insert the pages that the caller is about to compute as pending nodes.

        `key` begins with the lease's prefix; for its whole pages beyond that, pages are taken from
        the head of `private`. If the tree has the next page already, nothing is announced and
        `lease` itself is returned.

        Raises:
            LeaseError: the lease is not live, or `key` does not extend its prefix.
            PageOwnershipError: too few pages, or a page that is not private.
        """
        return self._lease_ops.announce(lease, key, private)

    def publish(self, lease: Lease, key: CacheKey, private: Sequence[int] = ()) -> Lease:
        """Share the whole pages of `key`, whose K/V is computed; returns the lease on them.

        Pages that the lease announced become ready; for further whole pages, pages are taken from
        the head of `private`. Where the tree has such a page already, the private duplicate
        becomes free. Go on with the pages of the new lease, followed by `private` without its
        first `len(new.pages) - len(old.pages)` pages.

        Raises:
            LeaseError: the lease is not live; `key` does not begin with its prefix, announced
                pages included; or it depends on pages that their leader has not published
                (publish the leader first).
            PageOwnershipError: too few pages, or a page that is not private.
        """
        guard = self.guard
        if guard.thread:
            guard.require("PrefixCache.publish")
            return self._lease_ops.publish(lease, key, private)
        guard.thread = UNNAMED
        try:
            return self._lease_ops.publish(lease, key, private)
        finally:
            guard.thread = 0

    @guarded
    def withdraw(self, lease: Lease) -> list[Lease]:
        """Free the pages that a lease announced and did not compute; returns its dependents.

        Those are the other leases that depended on these pages. They and `lease` are withdrawn:
        they pin only the nodes above, and their owners must release them without reading K/V.

        Raises:
            LeaseError: the lease is not live, or was withdrawn already.
        """
        return self._lease_ops.withdraw(lease)

    @guarded
    def can_retract(self, lease: Lease, num_tokens: int) -> bool:
        """Whether no other lease depends on pages announced by this lease beyond `num_tokens`."""
        return self._lease_ops.can_retract(lease, num_tokens)

    @guarded
    def retract(self, lease: Lease, num_tokens: int) -> tuple[Lease, Pages]:
        """Make announced pages beyond the whole pages of the first `num_tokens` tokens private.

        For speculative decoding that rejected drafts. Returns the lease that replaces `lease`, and
        the private pages.

        Raises:
            LeaseError: the lease is not live, or others depend on those pages.
        """
        return self._lease_ops.retract(lease, num_tokens)

    @guarded
    def is_blocked(self, lease: Lease) -> bool:
        """Whether a lease's prefix has pages that another leader has still to publish."""
        self._registry.require(lease, withdrawn=True)
        return self._registry.is_blocked(lease)

    @guarded
    def is_withdrawn(self, lease: Lease) -> bool:
        """Whether a live lease lost pages to a withdrawal and can only be released."""
        self._registry.require(lease, withdrawn=True)
        return lease.withdrawn

    @guarded
    def sharing(self, leases: Sequence[Lease]) -> list[tuple[int, int]]:
        """For each lease: the index of an earlier lease with a common prefix, and its tokens.

        (-1, 0) if no earlier lease shares a page. O(nodes): each node is visited once.
        """
        for lease in leases:
            self._registry.require(lease)
        return self._registry.sharing(leases)

    # -- watching --------------------------------------------------------------------------

    @guarded
    def subscribe(self, capacity: int = 16384, *, with_atoms: bool = False) -> Subscription:
        """Begin to log events: `stored`, `removed`, `split`, `cleared`, with page hashes.

        A subscriber that comes late or has lost events takes a `snapshot` and goes on with the
        events after it. The first subscriber hashes what is cached, then each published page is.

        Args:
            capacity: events kept until they are taken; the oldest are dropped and counted.
            with_atoms: with the tokens of stored pages, which are the text of prompts.
        """
        return self._store.log.subscribe(validate_int("capacity", capacity, 1), with_atoms)

    @guarded
    def snapshot(self) -> Snapshot:
        """All shared pages that are computed, parents first, with a digest. O(pages)."""
        return self._store.log.snapshot()

    @guarded
    def observe_evictions(self, observer: Callable[[Evicted], None]) -> Callable[[], None]:
        """Call `observer` for each evicted run of pages; returns a function that ends this.

        It runs at the end of the call that evicted: the pages are free but not yet reused, so their
        K/V can still be copied elsewhere. It must not call the cache.
        """
        return self._store.log.observe(self.guard.callback(observer))

    @guarded
    def check(self) -> None:
        """Recount nodes, pages and leases; raises InvariantError if they disagree. O(nodes + pages)."""
        check_cache(self._store, self._registry.live())
