"""Serve cache options of a request: pins, and the tenant's share of the pages."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from ramify.cache import CacheKey, Node, PrefixCache
from ramify.cache.inspection import count_pages
from ramify.cache.packed import ATOM_BYTES
from ramify.engine.prefix_namespaces import owner_of_node
from ramify.engine.request_options import RequestOptions
from ramify.errors import PinError

# A pin keeps its key, 4 bytes a token, also where all of its pages are under a longer pin.
MAX_TENANT_PINS = 512
MAX_NESTED_PINS = 8  # of a tenant inside the prefix of another of its pins


def enforce_cache_share(
    cache: PrefixCache, key: CacheKey, tenant: str, *, share: float, num_cached: int
) -> None:
    """Evict the tenant's own least recently used pages if a prompt needs others' pages.

    Those of its ended sessions before all others. At most the pages by which the tenant would exceed its share. The cached prefix of the prompt
    stays. Cost: O(cached nodes) if the free pages do not suffice, else O(1).

    Args:
        key: of the whole prompt.
        share: of all pages of the pool.
        num_cached: tokens of the prompt that are cached.
    """
    stats, size = cache.stats(), cache.page_size
    num_needed = -(-len(key) // size) - num_cached // size - stats.free_pages
    if num_needed <= 0:
        return
    atoms, page_bytes = key.atoms, size * ATOM_BYTES
    leaves: list[tuple[int, int]] = []  # rank, number of pages

    def is_own(node: Node) -> bool:
        return owner_of_node(node)[0] == tenant

    def is_evictable(node: Node) -> bool:
        # the cached prefix of this prompt is about to be read
        return is_own(node) and not atoms.startswith(
            node.atoms[:page_bytes], node.start * page_bytes
        )

    def rank_of(node: Node) -> int:
        return -1 if node.session_ended else node.last_access

    def visit(node: Node) -> bool:
        if node.is_leaf and is_evictable(node):
            leaves.append((rank_of(node), len(node.pages) - node.num_released))
        return is_own(node)

    num_over = count_pages(cache, visit) + num_needed - int(share * stats.num_pages)
    num_evict = min(num_over, num_needed)
    if num_evict <= 0 or not leaves:
        return
    leaves.sort()
    last = bisect_left(list(accumulate(num_pages for _, num_pages in leaves)), num_evict)
    highest, _ = leaves[min(last, len(leaves) - 1)]
    cache.evict_if(lambda node: rank_of(node) <= highest and is_evictable(node), num_evict)


def pin_prefixes(
    cache: PrefixCache, key: CacheKey, tenant: str, options: RequestOptions, *, room_pages: int
) -> int:
    """Pin the prefixes of `options.retention`, as whole pages; returns how many were refused.

    A prefix that the tenant has pinned already is left as it is: the lookup has refreshed it. Beyond
    `MAX_NESTED_PINS`, a pin replaces the longest one inside it that ends no later: so a conversation
    that pins each turn has a few pins, and its pages stay.

    Args:
        key: of the whole prompt, whose pages are cached.
        room_pages: pages that must stay without a pin if the tenant has a `pin_share`.
    """
    limits = {}
    if options.pin_share is not None:
        limits["max_owner_pages"] = int(options.pin_share * cache.num_pages)
        limits["room_pages"] = room_pages
    pinned = {pin.key for pin in cache.pins(tenant)}
    num_refused = 0
    for num_tokens, ttl_s in options.retention:
        prefix = key.prefix(min(num_tokens, len(key)) // cache.page_size * cache.page_size)
        if not len(prefix) or prefix in pinned:
            continue
        if len(pinned) >= MAX_TENANT_PINS:
            num_refused += 1
            continue
        try:
            pin = cache.pin(prefix, tenant, ttl_s, max_nested=MAX_NESTED_PINS, **limits)
        except PinError:
            num_refused += 1
        else:
            pinned.add(pin.key)
    return num_refused
