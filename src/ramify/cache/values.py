"""What the prefix cache hands out: complete values that their receiver only reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ramify.cache.key import CacheKey
from ramify.cache.pages import Pages


@dataclass(frozen=True, slots=True)
class Match:
    """What a lookup would find: whole pages of computed K/V, shorter than the key."""

    num_tokens: int
    num_pages: int


class Lease:
    """Proof that a prefix is pinned; good until it is released or replaced by a newer one.

    The last `num_pending` of its pages were still to be computed when the lease was made. It is
    made by a cache and read by everybody; names with an underscore are the cache's own. (A frozen
    dataclass takes a microsecond to make, a tenth of a whole request.)
    """

    __slots__ = (
        "_counted",
        "_holder",
        "_key",
        "_node",
        "_packed",
        "_withdrawn",
        "id",
        "num_pending",
        "num_tokens",
    )

    def __init__(self, number: int, key: CacheKey, num_tokens: int, packed: bytes) -> None:
        self.id: Final = number
        self.num_tokens: Final = num_tokens  # length of the pinned prefix, whole pages
        self._key = key  # begins with that prefix
        self._packed = packed
        self.num_pending = 0
        self._node = 0  # the prefix ends at this node's end; splits keep that true
        self._holder = number  # passed on from a lease to the one that replaces it
        self._counted = (0, 0, 0)  # tokens asked for, found, and found by an infinite cache
        self._withdrawn = False

    @property
    def key(self) -> CacheKey:
        """Exactly the pinned prefix."""
        return self._key.prefix(self.num_tokens)

    @property
    def pages(self) -> Pages:
        """The prefix's pages, in order."""
        return Pages(self._packed)

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, num_tokens={self.num_tokens}, num_pending={self.num_pending})"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was made, and how its pages are used now."""

    num_pages: int
    page_size: int
    free_pages: int
    private_pages: int  # owned by requests
    cached_pages: int  # in the tree, pinned ones and pending ones included
    evictable_pages: int
    ghost_pages: int  # evicted and still remembered
    num_nodes: int
    num_leases: int
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    ideal_hit_tokens: int
    evicted_pages: int

    @property
    def hit_rate(self) -> float:
        """Tokens found over tokens looked up; 0 before the first lookup."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0
