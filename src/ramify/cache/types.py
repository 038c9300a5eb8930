"""Values that the prefix cache returns: `Match`, `Node`, `CacheStats`, `Histogram`."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Final, SupportsIndex

from ramify.cache.pages import Pages
from ramify.errors import ConfigError

NUM_BUCKETS: Final = 24
PER_SECOND: Final = 256  # the first bucket ends at 1/256 s, each further bucket at twice that


def validate_int(
    name: str, value: SupportsIndex, least: int | None = 0, most: int | None = None
) -> int:
    """`value` as an int; `least` and `most` are inclusive limits, None for no limit.

    Raises:
        ConfigError: `value` is not a whole number, or outside the limits.
    """
    try:
        number = index(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r} but it must be a whole number") from None
    if least is not None and number < least:
        raise ConfigError(f"{name}={number} but it must be {least} or more")
    if most is not None and number > most:
        raise ConfigError(f"{name}={number} but it must be {most} or less")
    return number


@dataclass(frozen=True, slots=True)
class Match:
    """The prefix that a lookup would hit: whole pages with K/V, fewer tokens than the key."""

    num_tokens: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by age: bucket i counts ages from `bounds_s[i - 1]` to below `bounds_s[i]` seconds."""

    counts: tuple[int, ...]

    @property
    def bounds_s(self) -> tuple[float, ...]:
        """Upper bounds of all buckets but the last: 1/256 s, 1/128 s, …, each twice the last."""
        return tuple(2.0**i / PER_SECOND for i in range(NUM_BUCKETS - 1))

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return sum(self.counts)

    def quantile_s(self, share: float) -> float:
        """The upper bound in seconds of the bucket that holds the quantile; 0 without counts."""
        num_below, total = 0, self.total
        for count, bound in zip(self.counts, (*self.bounds_s, float("inf")), strict=True):
            num_below += count
            if total and num_below >= share * total:
                return bound
        return 0.0


@dataclass(frozen=True, slots=True)
class Node:
    """A copy of a tree node's fields: for predicates, observers and tests."""

    id: int
    parent: int
    namespace: bytes
    atoms: bytes  # packed int32, with those of evicted pages; content atoms as in this process
    pages: Pages  # its resident pages, from its beginning on, computed or pending
    start: int  # pages above it
    pins: int  # leases that end at it or below
    holder: int  # 0: computed; else the leader that computes it
    hits: int  # lookups that matched it
    priority: int
    last_access: int  # in lookups since the cache was made
    created: int
    used_s: float  # the cache's clock at the last access
    num_children: int  # children with resident pages
    salt: bytes | None = None  # the last salt between the root and its end
    num_released: int = 0  # of `pages`: the first ones, freed since they are outside the window
    session_ended: bool = False  # it goes first

    @property
    def is_pending(self) -> bool:
        """Whether its K/V is still to be computed."""
        return self.holder != 0

    @property
    def is_leaf(self) -> bool:
        """Whether no cached page follows it."""
        return self.num_children == 0

    @property
    def depth(self) -> int:
        """Pages from the root to the end of this node's pages."""
        return self.start + len(self.pages)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was made, and how its pages are used now."""

    num_pages: int
    page_size: int
    free_pages: int
    private_pages: int  # owned by requests
    cached_pages: int  # in the tree, with pinned and pending pages
    evictable_pages: int
    pinned_pages: int  # under pins made by `pin`
    ghost_pages: int  # evicted and still remembered
    num_nodes: int
    num_leases: int  # without the leases of pins
    num_sessions: int  # alive
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    ideal_hit_tokens: int  # hits of a cache that evicts nothing, as far as ghosts remember
    recent_tokens: int  # of the last 512 to 1,024 lookups
    recent_hit_tokens: int
    evicted_pages: int  # for any reason
    evictions: dict[str, int]  # pages by reason
    ended_sessions: int
    residency: Histogram  # seconds from publish to eviction, by page
    idle: Histogram  # seconds from the last use to eviction, by page
    reuse_gap: Histogram  # seconds from the last use to the next hit, by lookup
    copied_tokens: int = 0  # of `hit_tokens`: copied from part of a page, see `partial_page`

    @property
    def hit_rate(self) -> float:
        """`hit_tokens / lookup_tokens`; 0 before the first lookup."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def recent_hit_rate(self) -> float:
        """`recent_hit_tokens / recent_tokens`: the hit rate of the last 512 to 1,024 lookups."""
        return self.recent_hit_tokens / self.recent_tokens if self.recent_tokens else 0.0

    @property
    def ideal_hit_rate(self) -> float:
        """The hit rate of a cache that never evicts: the most that more memory could reach.

        Too low once more pages were evicted than `ghost_pages` remembers.
        """
        return self.ideal_hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0
