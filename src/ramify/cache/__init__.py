"""The cache core: who holds which page, and which prefixes are known. Standard library only."""

from ramify.cache.content_atoms import Media, Salt
from ramify.cache.events import CacheEvent, Evicted, Snapshot, Subscription
from ramify.cache.explain import Explanation
from ramify.cache.hash_index import INDICES
from ramify.cache.key import CacheKey, namespace_of, namespace_parts
from ramify.cache.leases import Lease
from ramify.cache.pages import PageLedger, Pages
from ramify.cache.pins import Pin
from ramify.cache.policies import POLICIES
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.tree import RadixTree
from ramify.cache.types import CacheStats, Histogram, Match, Node

__all__ = [
    "INDICES",
    "POLICIES",
    "CacheEvent",
    "CacheKey",
    "CacheStats",
    "Evicted",
    "Explanation",
    "Histogram",
    "Lease",
    "Match",
    "Media",
    "Node",
    "PageLedger",
    "Pages",
    "Pin",
    "PrefixCache",
    "RadixTree",
    "Salt",
    "Snapshot",
    "Subscription",
    "namespace_of",
    "namespace_parts",
]
