"""The cache core: who holds which page, and which prefixes are known. Standard library only."""

from ramify.cache.key import CacheKey, namespace_of
from ramify.cache.marks import Media, Salt
from ramify.cache.pages import PageLedger, Pages
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.tree import Node, RadixTree
from ramify.cache.values import CacheStats, Lease, Match

__all__ = [
    "CacheKey",
    "CacheStats",
    "Lease",
    "Match",
    "Media",
    "Node",
    "PageLedger",
    "Pages",
    "PrefixCache",
    "RadixTree",
    "Salt",
    "namespace_of",
]
