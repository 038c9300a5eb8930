"""A reference prefix cache kept in dicts: the oracle of the state machine."""

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ramify.cache import CacheKey, Lease, PrefixCache
from ramify.errors import LeaseError, OutOfPagesError

LOWEST_BYTE = 0 if sys.byteorder == "little" else 3  # of an atom, which is all a token here has
Prefix = tuple[str, bytes]  # namespace, and all tokens (a byte each) up to the end of a page


@dataclass(eq=False)
class Request:
    """An engine's view of one request."""

    namespace: str
    tokens: bytes
    lease: Lease
    computed: int  # tokens whose K/V is written, or will be by the leaders it attached to
    lookup: tuple[int, int, int]  # tokens asked for, found, and found if nothing were evicted
    private: list[int] = field(default_factory=list)
    kept: int | None = None  # after a withdrawal: how many pages its lease still pins

    @property
    def table(self) -> list[int]:
        return [*self.lease.pages, *self.private]

    @property
    def pinned(self) -> int:
        return len(self.lease.pages) if self.kept is None else self.kept


class CacheModel:
    """A cache, its requests, and the invariants between them."""

    size: int  # tokens per page
    num_pages: int
    budget: int  # evicted pages that are remembered
    cache: PrefixCache

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Request] = []
        self.dead: list[Lease] = []
        self.ready: dict[Prefix, int] = {}
        self.pending: dict[Prefix, tuple[int, Request]] = {}  # page and leader
        self.memory: dict[int, Prefix] = {}  # page → what was written to it since it was reserved
        self.ghosts: set[Prefix] = set()  # evicted or withdrawn, and remembered
        self.uncomputed: set[Prefix] = set()  # were announced, and never computed since known
        self.lookups, self.lookup_tokens, self.hit, self.ideal, self.evicted = 0, 0, 0, 0, 0

    # -- what is known ---------------------------------------------------------------------

    def prompt(self, pages: str, tail: int) -> bytes:
        """Return tokens that share whole pages, parts of pages, or nothing with other prompts."""
        blank = bytes(self.size - 1)
        contents = (blank + b"\0", blank + b"\1", b"\2" + blank)
        return b"".join(contents[int(page)] for page in pages) + bytes(tail % (self.size + 1))

    def path(self, request: Request, num_pages: int) -> list[Prefix]:
        ends = range(self.size, num_pages * self.size + 1, self.size)
        return [(request.namespace, request.tokens[:end]) for end in ends]

    def find(self, namespace: str, tokens: bytes, *, pending: bool) -> list[int]:
        """Return the pages of the longest known prefix that is shorter than `tokens`."""
        pages = []
        for end in range(self.size, len(tokens), self.size):
            prefix = (namespace, tokens[:end])
            if prefix in self.ready:
                pages.append(self.ready[prefix])
            elif pending and prefix in self.pending:
                pages.append(self.pending[prefix][0])
            else:
                break
        return pages

    def find_ideal(self, namespace: str, tokens: bytes, hit_len: int) -> int:
        """Return how long a hit of `found` tokens would be if nothing had been evicted."""
        computed = (self.ghosts | self.pending.keys()) - self.uncomputed
        for end in range(hit_len + self.size, len(tokens), self.size):
            if (namespace, tokens[:end]) not in computed:
                break
            hit_len = end
        return hit_len

    def holders(self) -> list[Request]:
        """Return the requests whose prefixes are pinned."""
        return self.live

    def pins(self) -> set[Prefix]:
        return {prefix for holder in self.holders() for prefix in self.path(holder, holder.pinned)}

    def evictable(self) -> int:
        return len(self.ready.keys() - self.pins())

    def unpublished(self, request: Request, *, own: bool) -> list[Prefix]:
        """Return the pending prefixes of a request: its own, or those it waits for."""
        path = self.path(request, request.pinned)
        return [at for at in path if at in self.pending and own == (self.pending[at][1] is request)]

    def pick(self, who: int) -> Request:
        return self.live[who % len(self.live)]

    def key(self, request: Request, num_tokens: int) -> CacheKey:
        return CacheKey(list(request.tokens[:num_tokens]), request.namespace)

    def snapshot(self) -> tuple:
        """Return all state that a refused call must leave unchanged."""
        tree, store = self.cache._tree, self.cache._store
        nodes = [(tree.node(at), tree.length[at], list(tree.children(at))) for at in tree.nodes()]
        remembered = [
            (at, store.ghosts.reason[at], store.ghosts.evicted_s[at])
            for at in store.ghosts.oldest_first()
        ]
        return (
            self.cache.stats(),
            store.ledger._free.tobytes(),
            nodes,
            remembered,
            [*store.queue.nodes()],
            dict(tree.roots),
            [*self.cache._registry.live()],
        )

    def refused(self, error: type[Exception], call: Callable[..., object], *args: object) -> None:
        before = self.snapshot()
        try:
            call(*args)
        except error:
            assert self.snapshot() == before, f"{call.__name__} failed and changed something"
        else:
            raise AssertionError(f"{call.__name__} was not refused with {error.__name__}")

    def forget_evicted(self, expected: int, taken: Sequence[int] = ()) -> None:
        """Drop the evicted pages from the model: exactly `expected`, none of them pinned."""
        gone = [at for at, page in self.ready.items() if self.cache.is_free(page) or page in taken]
        assert len(gone) == expected, f"{len(gone)} pages were evicted, not {expected}"
        assert not self.pins().intersection(gone), "a pinned page was evicted"
        for prefix in gone:
            del self.ready[prefix]
        self.evicted += expected
        self.remember(gone)

    def remember(self, gone: Iterable[Prefix]) -> None:
        """Add evicted prefixes to the ghosts; drop ghosts only when the budget is exceeded."""
        known = self.ghosts.union(gone)
        _, self.ghosts = self.nodes()
        assert self.ghosts <= known, "what was not evicted is remembered as if it were"
        assert len(self.ghosts) <= self.budget, "more is remembered than may be"
        assert self.ghosts == known or len(known) > self.budget, "a ghost was lost"

    # -- steps, which rules combine --------------------------------------------------------

    def look_up(self, namespace: str, tokens: bytes, *, attach: bool) -> Request:
        pages = self.find(namespace, tokens, pending=attach)
        ideal = self.find_ideal(namespace, tokens, len(pages) * self.size)
        call = self.cache.attach if attach else self.cache.acquire
        lease = call(CacheKey(list(tokens), namespace))
        token_counts = (len(tokens), lease.num_tokens, ideal)
        request = Request(namespace, tokens, lease, lease.num_tokens, token_counts)
        assert list(lease.pages) == pages
        assert lease.key == self.key(request, len(pages) * self.size)
        assert not tokens or lease.num_tokens < len(tokens)
        assert lease.num_pending == sum(at in self.pending for at in self.path(request, len(pages)))
        self.live.append(request)
        self.lookups += 1
        self.lookup_tokens += token_counts[0]
        self.hit += token_counts[1]
        self.ideal += token_counts[2]
        return request

    def take(self, request: Request, num_pages: int) -> None:
        free = self.num_pages - len(self.in_use())
        if num_pages > free + self.evictable():
            self.refused(OutOfPagesError, self.cache.reserve, num_pages)
            return
        pages = self.cache.reserve(num_pages)
        assert len(set(pages)) == num_pages
        self.forget_evicted(max(0, num_pages - free), pages)
        for page in pages:
            self.memory.pop(page, None)
        request.private += pages

    def promise(self, request: Request, num_pages: int) -> None:
        """Announce up to `num_pages` pages, as far as tokens and pages allow."""
        whole = min(num_pages, len(request.tokens) // self.size, len(request.table))
        start = request.pinned
        if whole <= start:
            return
        new = self.path(request, whole)[start:]
        lease = self.cache.announce(
            request.lease, self.key(request, whole * self.size), request.private
        )
        if new[0] in self.ready or new[0] in self.pending:
            assert lease is request.lease
            return
        self.pending.update({at: (request.table[start + i], request) for i, at in enumerate(new)})
        self.uncomputed.update(at for at in new if at not in self.ghosts)
        self.ghosts.difference_update(new)
        self.replace(request, lease, request.table[:whole])

    def write(self, request: Request, end: int) -> None:
        """Compute a request up to token `end`, after the leaders that it waits for."""
        for prefix in self.unpublished(request, own=False):
            self.write(self.pending[prefix][1], len(prefix[1]))
        end = min(end, len(request.tokens), len(request.table) * self.size)
        own = {self.pending[at][0] for at in self.unpublished(request, own=True)}
        own.update(request.private)
        for start in range(request.computed // self.size * self.size, end, self.size):
            page = request.table[start // self.size]
            assert page in own, "a shared page is written"
            written = request.tokens[: min(end, start + self.size)]
            self.memory[page] = (request.namespace, written)
        request.computed = max(end, request.computed)

    def share(self, request: Request, num_tokens: int) -> None:
        """Publish `num_tokens` computed tokens; refused while a leader is behind."""
        key, whole = self.key(request, num_tokens), num_tokens // self.size
        if self.unpublished(request, own=False):
            self.refused(LeaseError, self.cache.publish, request.lease, key, request.private)
            return
        for prefix in self.unpublished(request, own=True):
            self.ready[prefix] = self.pending.pop(prefix)[0]
            self.uncomputed.discard(prefix)
        pages = list(request.lease.pages)
        for prefix in self.path(request, whole)[len(pages) :]:
            if prefix in self.pending:
                break  # somebody else is computing it: ours stay private
            pages.append(self.ready.setdefault(prefix, request.table[len(pages)]))
            self.ghosts.discard(prefix)
            self.uncomputed.discard(prefix)
        self.replace(request, self.cache.publish(request.lease, key, request.private), pages)

    def replace(self, request: Request, lease: Lease, pages: list[int]) -> None:
        """Replace a request's lease by a newer lease that holds exactly `pages`."""
        assert list(lease.pages) == pages
        assert lease.key == self.key(request, len(pages) * self.size)
        del request.private[: len(pages) - len(request.lease.pages)]
        self.dead.append(request.lease)
        request.lease = lease
        assert lease.num_pending == sum(at in self.pending for at in self.path(request, len(pages)))

    def end(self, request: Request) -> None:
        self.live.remove(request)
        self.dead.append(request.lease)

    def fail(self, request: Request) -> None:
        own = self.unpublished(request, own=True)
        if not own:
            before = self.snapshot()
            assert self.cache.withdraw(request.lease) == []
            assert self.snapshot() == before
            return
        kept = len(own[0][1]) // self.size - 1
        lost = [other for other in self.live if own[0] in self.path(other, other.pinned)]

        dependents = self.cache.withdraw(request.lease)

        assert {id(lease) for lease in dependents} == {
            id(at.lease) for at in lost if at is not request
        }
        below = [at for at in self.pending if at[0] == own[0][0] and at[1].startswith(own[0][1])]
        for prefix in below:
            del self.pending[prefix]
        self.remember(below)
        for other in lost:
            other.kept = kept

    def stop(self, request: Request, split: int = 0) -> None:
        """Finish or abort a request; refused while others depend on its announced pages."""
        own = self.unpublished(request, own=True)
        pinning = [at for at in self.live if own and own[0] in self.path(at, at.pinned)]
        if len(pinning) > 1:
            self.refused(LeaseError, self.cache.release, request.lease, request.private)
            return
        cut = split % (len(request.private) + 1)
        self.cache.release(request.lease, request.private[cut:])
        self.cache.give_back(request.private[:cut])
        for prefix in own:
            del self.pending[prefix]
        self.remember(own)
        self.end(request)

    # -- the oracle ------------------------------------------------------------------------

    def agree(self) -> None:
        """Check all invariants that hold between two calls."""
        self.every_page_has_one_owner()
        self.the_tree_is_the_model()
        self.shared_means_computed()
        self.statistics_are_right()

    def in_use(self) -> list[int]:
        """Return every page that has an owner, once per owner."""
        private = [page for request in self.live for page in request.private]
        return [*self.ready.values(), *(page for page, _ in self.pending.values()), *private]

    def every_page_has_one_owner(self) -> None:
        """Check that each page is free, private to one request, or in the tree."""
        free = [page for page in range(self.num_pages) if self.cache.is_free(page)]
        assert sorted(free + self.in_use()) == list(range(self.num_pages))
        self.cache.check()
        for request in self.live:
            known = [
                self.ready[at] if at in self.ready else self.pending[at][0]
                for at in self.path(request, request.pinned)
            ]
            assert list(request.lease.pages[: request.pinned]) == known
            assert self.cache.is_withdrawn(request.lease) == (request.kept is not None)
            if request.kept is None:
                others = bool(self.unpublished(request, own=False))
                assert self.cache.is_blocked(request.lease) == others

    def the_tree_is_the_model(self) -> None:
        """Check prefixes, pages, pending state and pin counts of the tree against the model."""
        pins = Counter(
            at for request in self.holders() for at in self.path(request, request.pinned)
        )
        model = {at: (page, False, pins[at]) for at, page in self.ready.items()}
        model |= {at: (page, True, pins[at]) for at, (page, _) in self.pending.items()}
        cached, ghosts = self.nodes()
        assert cached == model
        assert ghosts == self.ghosts

    def nodes(self) -> tuple[dict[Prefix, tuple[int, bool, int]], set[Prefix]]:
        """The tree page by page: (page, pending, pins) of what is cached, and what is not any more.

        Who is remembered as evicted is behind what is cached or remembered, and no hit.
        """
        cached: dict[Prefix, tuple[int, bool, int]] = {}
        ghosts: set[Prefix] = set()
        tree = self.cache._tree
        todo = [(child, b"") for root in tree.roots.values() for child in tree.children(root)]
        while todo:
            node, tokens = todo.pop()
            tokens += tree.edge(node)[LOWEST_BYTE::4]
            pages, start, length = tree.pages[node], tree.start[node], tree.length[node]
            namespace = tree.namespaces[tree.root[node]].decode()
            assert len(tokens) == (start + length) * self.size
            assert tree.hits[node] >= 0
            ends = range((start + 1) * self.size, len(tokens) + 1, self.size)
            for end, page in zip_longest(ends, array("i", pages)):
                prefix = (namespace, tokens[:end])
                assert prefix not in cached
                assert prefix not in ghosts
                if page is None:
                    ghosts.add(prefix)
                else:
                    cached[prefix] = (page, tree.leader[node] != 0, tree.ref_count[node])
            todo += [(child, tokens) for child in tree.children(node)]
        return cached, ghosts

    def shared_means_computed(self) -> None:
        """Check that shared pages and computed tokens hold the content of their prefix."""
        assert all(self.memory.get(page) == prefix for prefix, page in self.ready.items())
        for request in self.live:
            if request.kept is not None:
                continue
            path = self.path(request, request.computed // self.size)
            for prefix, page in zip(path, request.table, strict=False):
                waits = prefix in self.pending and self.pending[prefix][1] is not request
                assert waits or self.memory.get(page) == prefix
            if request.computed % self.size:
                page = request.table[len(path)]
                assert self.memory[page] == (request.namespace, request.tokens[: request.computed])

    def statistics_are_right(self) -> None:
        stats = self.cache.stats()
        assert stats.num_leases == len(self.live)
        assert stats.private_pages == sum(len(request.private) for request in self.live)
        assert stats.cached_pages == len(self.ready) + len(self.pending)
        assert stats.evictable_pages == self.evictable()
        assert self.cache.num_available == stats.free_pages + self.evictable()
        assert (stats.lookups, stats.lookup_tokens) == (self.lookups, self.lookup_tokens)
        assert (stats.hit_tokens, stats.ideal_hit_tokens) == (self.hit, self.ideal)
        assert stats.evicted_pages == self.evicted
        assert self.cache._store.queue.num_queued <= stats.num_nodes <= self.num_pages
        assert stats.ghost_pages == len(self.ghosts) <= self.budget
