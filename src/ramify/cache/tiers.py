"""Cache tiers: the names of the pages in the pool, and which of them to copy out.

A tier maps page hashes to the bytes of pages, beside the tree and without a state in it: a page that
was loaded enters by `publish`, like a computed one. Only the thread that owns the pool copies pages,
between two calls of the executor, from and to *staging buffers* (`staging`). Other threads move
buffers to and from the stores. So no page of the pool is ever in transfer: a buffer is, and has one
owner. What is loaded for waiting requests is in `tier_loads`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from ramify.cache.events import CacheEvent
from ramify.cache.key import HASH_BYTES
from ramify.errors import InvariantError

# Reasons of an eviction that says nothing against the page: it is copied out.
DEMOTING: Final = frozenset(("capacity", "window"))
# Of one that says that the page is hardly read again: it is not copied, and what tiers have of it stays.
# All other reasons remove it from the tiers.
LEAVING: Final = frozenset(("session_ended",))


class PageName(NamedTuple):
    """What a store knows of a page: its hash, that of the page before it, and whose prompt it was."""

    hash: bytes
    parent: bytes  # of a first page: the hash of the namespace
    tenant: bytes = b""


class WriteQueue:
    """Pages of the pool with a name, and those of them that are to be copied out.

    A sink of the cache's events. An evicted page is *urgent*: it is free, and must be copied before
    anything is written to it. A page that was used again is *lazy*: it is in the tree, and is copied
    when there is time; an eviction makes it urgent. A page without a name is never copied.

    Args:
        num_pages: of the pool.
    """

    with_atoms = False

    def __init__(self, num_pages: int) -> None:
        self._names: list[PageName | None] = [None] * num_pages
        self._lazy: dict[int, PageName] = {}
        self._urgent: dict[int, PageName] = {}
        self._removed: list[bytes] = []  # hashes whose copies must go
        self._refused: set[bytes] = set()  # hashes of namespaces that are never copied
        self._tenants: dict[bytes, bytes] = {}  # by hash of the namespace
        self._demotes_all = False

    @property
    def num_urgent(self) -> int:
        """Evicted pages that are not copied yet."""
        return len(self._urgent)

    @property
    def num_lazy(self) -> int:
        """Cached pages that are to be copied when there is time."""
        return len(self._lazy)

    def name_of(self, page: int) -> PageName | None:
        """The name of a page in the tree; None: it must not be copied."""
        return self._names[page]

    def refuse_namespace(self, namespace_hash: bytes) -> None:
        """Never copy pages of a namespace: its K/V may be wrong, or no request reads it any more."""
        self._refused.add(namespace_hash)

    @contextmanager
    def demoting(self) -> Iterator[None]:
        """Copy out what is evicted until the block ends, whatever the reason: it is for want of pages."""
        self._demotes_all = True
        try:
            yield
        finally:
            self._demotes_all = False

    def set_tenant(self, namespace_hash: bytes, tenant: bytes) -> None:
        """Name the tenant of a namespace, for the records of its pages."""
        self._tenants[namespace_hash] = tenant

    def put(self, event: CacheEvent) -> None:
        """Follow a change of the cache; see `EventSink`."""
        if event.kind == "stored":
            self._stored(event)
        elif event.kind == "removed":
            self._evicted(event)
        elif event.kind == "cleared":
            self.forget()

    def _stored(self, event: CacheEvent) -> None:
        is_refused = event.namespace_hash in self._refused
        tenant = self._tenants.get(event.namespace_hash, b"")
        parent, hashes = event.parent_hash, event.hashes
        for index, page in enumerate(event.pages):
            end = (index + 1) * HASH_BYTES
            page_hash = hashes[end - HASH_BYTES : end]
            self._urgent.pop(page, None)  # overwritten since: only a fault of ours gets here
            self._lazy.pop(page, None)
            self._names[page] = None if is_refused else PageName(page_hash, parent, tenant)
            parent = page_hash

    def _evicted(self, event: CacheEvent) -> None:
        is_kept = self._demotes_all or event.reason in DEMOTING
        is_removed = not is_kept and event.reason not in LEAVING
        for index, page in enumerate(event.pages):
            name, self._names[page] = self._names[page], None
            self._lazy.pop(page, None)
            if is_removed:
                page_hash = event.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
                self._removed.append(page_hash)
                self.discard_urgent({page_hash})
            elif is_kept and name is not None:
                self._urgent[page] = name

    def forget(self) -> None:
        """Forget all names, and what was to be copied: no page has a trustworthy name any more."""
        self._names = [None] * len(self._names)
        self._lazy.clear()
        self._urgent.clear()

    def add_lazy(self, pages: Iterable[int]) -> None:
        """Queue pages of the tree; those without a name are skipped."""
        for page in pages:
            name = self._names[page] if 0 <= page < len(self._names) else None
            if name is not None:
                self._lazy[page] = name

    def take_urgent(self) -> list[tuple[int, PageName]]:
        """All evicted pages in the order of their eviction; the queue forgets them."""
        urgent, self._urgent = [*self._urgent.items()], {}
        return urgent

    def take_lazy(self, count: int) -> list[tuple[int, PageName]]:
        """Up to `count` pages that are in the tree, oldest first; the queue forgets them."""
        pages = [page for page, _ in zip(self._lazy, range(count), strict=False)]
        return [(page, self._lazy.pop(page)) for page in pages]

    def discard_urgent(self, hashes: Collection[bytes]) -> None:
        """Copy no evicted page of these hashes: it is removed, or would be written behind its removal."""
        for page in [page for page, name in self._urgent.items() if name.hash in hashes]:
            del self._urgent[page]

    def take_removed(self) -> list[bytes]:
        """Hashes of pages whose copies must go from every tier."""
        removed, self._removed = self._removed, []
        return removed

    def check(self) -> None:
        """Raise InvariantError if a page is queued twice, or under another name than its own."""
        for page, name in self._lazy.items():
            if self._names[page] != name:
                raise InvariantError(f"page {page} is to be copied under a name that it lost")
        for page in self._urgent:
            if self._names[page] is not None:
                raise InvariantError(f"page {page} was stored again before its copy was taken")
