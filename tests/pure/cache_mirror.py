"""A copy of a cache's content, built only from its events and snapshots."""

from collections.abc import Iterable

from ramify.cache import CacheEvent, CacheKey, PrefixCache, Snapshot


class Mirror:
    """A cache's pages, parents and namespaces as its events and a snapshot describe them."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.pages: dict[bytes, int] = {}  # page hash → page
        self.parents: dict[bytes, bytes] = {}  # page hash → that of the page before
        self.namespaces: dict[bytes, bytes] = {}  # page hash → hash of its namespace
        self.starts: dict[bytes, int] = {}  # page hash → pages before it
        self.sequence = 0
        if snapshot is not None:
            self.sequence = snapshot.sequence
            for run in snapshot.runs:
                self._store(run)
            assert self.digest == snapshot.digest

    @property
    def digest(self) -> bytes:
        folded = 0
        for name in self.pages:
            folded ^= int.from_bytes(name, "big")
        return folded.to_bytes(16, "big")

    def apply(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            if event.sequence <= self.sequence:
                continue
            assert event.sequence == self.sequence + 1, "an event was lost"
            self.sequence += 1
            names = event.page_hashes
            chain = [(name, above) for name, above, _ in self._chain(event)]
            if event.kind == "stored":
                self._store(event)
            elif event.kind == "removed":
                assert len(event.pages) == len(names) > 0
                for (name, above), page in reversed(list(zip(chain, event.pages, strict=True))):
                    assert name not in self.parents.values(), "a page went before its followers"
                    assert (self.pages.pop(name), self.parents.pop(name)) == (page, above)
                    assert 0 <= self.starts.pop(name) - event.start < len(names)
                    assert self.namespaces.pop(name) == event.namespace_hash
            elif event.kind == "split":
                assert [(name, self.parents[name]) for name in names] == chain
                assert event.pages == [self.pages[name] for name in names]
                assert self.starts[names[0]] == event.start
            else:
                assert event.kind == "cleared"
                self.pages, self.parents, self.namespaces, self.starts = {}, {}, {}, {}

    def _store(self, event: CacheEvent) -> None:
        assert event.kind == "stored"
        for start, (name, above, page) in enumerate(self._chain(event), event.start):
            assert above in self.pages or above == event.namespace_hash
            assert name not in self.pages, "a page is stored twice"
            assert page not in self.pages.values(), "a page is in two places"
            self.pages[name], self.parents[name], self.starts[name] = page, above, start
            assert start == 1 + self.starts.get(above, -1)
            self.namespaces[name] = event.namespace_hash

    @staticmethod
    def _chain(event: CacheEvent) -> list[tuple[bytes, bytes, int]]:
        names = event.page_hashes
        return list(zip(names, [event.parent_hash, *names], event.pages, strict=False))


def content(cache: PrefixCache) -> dict[bytes, int]:
    """Page by page hash, for every page in the tree that is shared and ready."""
    tree, pages_by_hash = cache._tree, dict[bytes, int]()
    for number in tree.nodes():
        node = tree.node(number)
        if node.pages and not node.is_pending:
            atoms = b"".join(tree.edge(above) for above in tree.path(number))
            names = CacheKey(atoms, node.namespace).page_hashes(cache.page_size)
            pages_by_hash.update(zip(names[node.start :], node.pages, strict=False))
    return pages_by_hash
