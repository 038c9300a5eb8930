"""What the prefix cache hands out: frozen, complete values."""

from __future__ import annotations

from dataclasses import dataclass

from ramify.cache.key import CacheKey


@dataclass(frozen=True, slots=True)
class Match:
    """What a lookup would find: whole pages of computed K/V, shorter than the key."""

    num_tokens: int
    num_pages: int


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Proof that a prefix is pinned; good until it is released or replaced by a newer one.

    `pages` are the prefix's pages in order; the last `num_pending` of them were still to be
    computed when the lease was made.
    """

    id: int
    key: CacheKey  # exactly the pinned prefix, whole pages
    pages: tuple[int, ...]
    num_pending: int = 0

    @property
    def num_tokens(self) -> int:
        """Length of the pinned prefix."""
        return len(self.key)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was made, and how its pages are used now."""

    num_pages: int
    page_size: int
    free_pages: int
    private_pages: int  # owned by requests
    cached_pages: int  # in the tree, pinned ones and pending ones included
    evictable_pages: int
    num_nodes: int
    num_leases: int
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    evicted_pages: int

    @property
    def hit_rate(self) -> float:
        """Tokens found over tokens looked up; 0 before the first lookup."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0
