"""What the prefix cache hands out: complete values that their receiver only reads."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Final, SupportsIndex

from ramify.cache.pages import Pages
from ramify.errors import ConfigError

NUM_BUCKETS: Final = 24
PER_SECOND: Final = 256  # the first bucket ends at 1/256 s, each further one at twice that


def validate_int(
    name: str, value: SupportsIndex, least: int | None = 0, most: int | None = None
) -> int:
    """A count, checked.

    Raises:
        ConfigError: it is no whole number, below `least`, or above `most`.
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
    """What a lookup would find: whole pages of computed K/V, shorter than the key."""

    num_tokens: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by age: bucket i has those below `bounds_s[i]` seconds, the last all others."""

    counts: tuple[int, ...]

    @property
    def bounds_s(self) -> tuple[float, ...]:
        """1/256 s, and each further one twice that."""
        return tuple(2.0**i / PER_SECOND for i in range(NUM_BUCKETS - 1))

    @property
    def total(self) -> int:
        """All that was counted."""
        return sum(self.counts)

    def quantile_s(self, share: float) -> float:
        """An upper bound in seconds that `share` of the counts stay below; 0 without counts."""
        seen, total = 0, self.total
        for count, bound in zip(self.counts, (*self.bounds_s, float("inf")), strict=True):
            seen += count
            if total and seen >= share * total:
                return bound
        return 0.0


@dataclass(frozen=True, slots=True)
class Node:
    """What is known of a node, copied: for predicates, observers and tests."""

    id: int
    parent: int
    namespace: bytes
    atoms: bytes  # packed int32, those of evicted pages included; marks as numbers of this process
    pages: Pages  # pages with K/V, or about to have it, from the node's beginning on
    start: int  # pages above it
    pins: int  # leases that end in it or below
    holder: int  # 0: computed; else who is computing it
    hits: int  # lookups that it served
    priority: int
    last_access: int  # in lookups since the cache was made
    created: int
    used_s: float  # the cache's clock at the last access
    num_children: int  # those with pages
    salt: bytes | None = None  # the last one on the way to its end, if there is any

    @property
    def is_pending(self) -> bool:
        """Whether its K/V is still to be computed."""
        return self.holder != 0

    @property
    def is_leaf(self) -> bool:
        """Whether nothing cached follows it."""
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
    cached_pages: int  # in the tree, pinned ones and pending ones included
    evictable_pages: int
    pinned_pages: int  # under pins that were asked for
    ghost_pages: int  # evicted and still remembered
    num_nodes: int
    num_leases: int  # without those of pins
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    ideal_hit_tokens: int  # what a cache that evicts nothing would have found, as far as remembered
    recent_tokens: int  # of the last 512 to 1,024 lookups
    recent_hit_tokens: int
    evicted_pages: int  # for whatever reason
    evictions: dict[str, int]  # pages by reason
    residency: Histogram  # seconds from publish to eviction, by page
    idle: Histogram  # seconds from the last use to eviction, by page
    reuse_gap: Histogram  # seconds from the last use to the next hit, by lookup

    @property
    def hit_rate(self) -> float:
        """Tokens found over tokens looked up; 0 before the first lookup."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def recent_hit_rate(self) -> float:
        """The same over the last 512 to 1,024 lookups."""
        return self.recent_hit_tokens / self.recent_tokens if self.recent_tokens else 0.0

    @property
    def ideal_hit_rate(self) -> float:
        """The hit rate of a cache that never evicts: what more memory could give at most.

        A lower bound once the ghost budget has been exceeded.
        """
        return self.ideal_hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0
