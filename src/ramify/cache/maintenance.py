"""When a cache cannot be trusted: parts of it are dropped, or all of it is built anew."""

# ruff: noqa: SLF001 - methods of PrefixCache, in a file of their own: it has four parts, and these
# two are the only ones that exchange them

from __future__ import annotations

from ramify.cache.ghosts import ASKED
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.prefix_cache import PrefixCache


def evict_suffix(cache: PrefixCache, key: CacheKey, num_tokens: int) -> int:
    """Evict what is cached of `key` behind the whole pages of its first `num_tokens` tokens.

    Pages that somebody holds, or from which another prompt goes on, stay. Returns how many went.
    Cost: of one lookup.
    """
    tree, store, size = cache._tree, cache._store, cache.page_size
    root = tree.roots.get(key.namespace)
    if root is None:
        return 0
    page_bytes = size * ATOM_BYTES
    end = len(key.atoms) // page_bytes * page_bytes
    path, part, covered = tree.find(root, key.atoms, end, pending=False)
    if part:
        if covered < tree.resident[part]:  # another prompt goes on from there
            return 0
        path.append(part)
    evicted, now_s = 0, store.clock()
    for node in reversed(path):
        beyond = tree.start[node] + tree.resident[node] - num_tokens // size
        cut = min(tree.resident[node], beyond)
        if cut <= 0 or not store._is_evictable(node):
            break
        evicted += store._evict_from(node, cut, ASKED, now_s)
        above = tree.parent[node]
        if tree.resident[node]:
            break
        if store._is_evictable(above) and not store.queue.ticket[above]:
            store.queue.push(above)
    store.ghosts.trim()
    store.log.notify_observers()
    return evicted


def evict_suspect_prefix(cache: PrefixCache, key: CacheKey) -> list[int]:
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
        if cache._registry._live[pin.id].node in doomed:
            cache._pin_table.remove(pin)
    found = list[int]()
    stop = cache.observe_evictions(lambda told: found.extend(told.pages))
    try:
        cache.evict_if(lambda node: node.id in doomed)
    finally:
        stop()
    return found


def reset(cache: PrefixCache) -> int:
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
        clock=cache._store.clock,
    )
    old, new = cache._store, fresh._store
    new.counters, new.num_lookups = old.counters, old.num_lookups
    new.log.adopt_subscribers(old.log)
    num_pins = len(cache._pin_table)
    fresh._pin_table.max_pages = cache._pin_table.max_pages
    fresh._registry._numbers = (
        cache._registry._numbers
    )  # an old lease or pin must not be taken for a new one
    cache._tree, cache._store, cache._registry = fresh._tree, new, fresh._registry
    cache._lease_ops, cache._pin_table = fresh._lease_ops, fresh._pin_table
    return num_pins
