"""When a cache cannot be trusted: parts of it are dropped, or all of it is built anew."""

# ruff: noqa: SLF001 - methods of PrefixCache, in a file of their own: it has four parts, and these
# two are the only ones that exchange them

from __future__ import annotations

from ramify.cache.key import CacheKey
from ramify.cache.prefix_cache import PrefixCache


def condemn(cache: PrefixCache, key: CacheKey) -> list[int]:
    """Drop the first cached run of a key's pages and all that follows: their K/V is suspect.

    Pins on it end. What leases hold stays until they are released; who releases them may call
    again.

    Returns:
        the pages, which are free now.
    """
    tree = cache._tree
    root = tree.roots.get(key.namespace)
    top = (
        tree.index.find(root, key.atoms, 0)
        if root is not None and len(key) >= tree.page_size
        else 0
    )
    if not top:
        return []
    doomed = set(tree.nodes(top))
    for pin in cache.pins():  # not by `unpin`, which looks at the clock again
        if cache._book._live[pin.id].node in doomed:
            cache._pins.remove(pin)
    found = list[int]()
    stop = cache.observe_evictions(lambda told: found.extend(told.pages))
    try:
        cache.evict_if(lambda node: node.id in doomed)
    finally:
        stop()
    return found


def rebuild(cache: PrefixCache) -> int:
    """Empty a cache whose bookkeeping is wrong, in place; all its pages are free afterwards.

    Its leases and pins are void. Subscribers are told "cleared" and stay, as observers do; the
    counts of lookups and evictions go on.

    Returns:
        how many pins were lost.
    """
    fresh = PrefixCache(
        cache.num_pages,
        cache.page_size,
        policy=cache.policy,
        index=cache.index,
        ghost_pages=cache._store.ghosts.max_pages,
        log_every=0,
        clock=cache._store.now_s,
    )
    old, new = cache._store, fresh._store
    new.recorder, new.clock = old.recorder, old.clock
    new.log.take_over(old.log)
    num_pins = len(cache._pins)
    fresh._pins.max_pages = cache._pins.max_pages
    fresh._book._numbers = (
        cache._book._numbers
    )  # an old lease or pin must not be taken for a new one
    cache._tree, cache._store, cache._book = fresh._tree, new, fresh._book
    cache._leasing, cache._pins = fresh._leasing, fresh._pins
    return num_pins
