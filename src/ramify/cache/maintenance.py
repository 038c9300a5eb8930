"""Rare changes to a whole cache: evict a suffix or a suspect prefix, repair, start empty again."""

# ruff: noqa: SLF001 - these functions are methods of PrefixCache in a file of their own

from __future__ import annotations

from ramify.cache.call_guard import guarded
from ramify.cache.eviction import evict_from
from ramify.cache.ghosts import ASKED
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.prefix_cache import PrefixCache


@guarded
def evict_suffix(cache: PrefixCache, key: CacheKey, num_tokens: int) -> int:
    """Evict the cached pages of `key` after the whole pages of its first `num_tokens` tokens.

    Pages that a lease holds or that another prompt shares stay. Returns how many were evicted.
    Cost: one lookup.
    """
    tree, store, size = cache._tree, cache._store, cache.page_size
    root = tree.roots.get(key.namespace)
    if root is None:
        return 0
    page_bytes = size * ATOM_BYTES
    end = len(key.atoms) // page_bytes * page_bytes
    path, part, covered = tree.find(root, key.atoms, end, pending=False)
    if part:
        if covered < tree.resident[part]:  # another prompt shares the node
            return 0
        path.append(part)
    evicted, now_s = 0, store.clock()
    for node in reversed(path):
        beyond = tree.start[node] + tree.resident[node] - num_tokens // size
        cut = min(tree.resident[node], beyond)
        if cut <= 0 or not store.is_evictable(node):
            break
        evicted += evict_from(store, node, cut, ASKED, now_s)
        above = tree.parent[node]
        if tree.resident[node]:
            break
        if store.is_evictable(above) and not store.queue.ticket[above]:
            store.queue.push(above)
    store.ghosts.trim()
    store.log.notify_observers()
    return evicted


@guarded
def evict_suspect_prefix(cache: PrefixCache, key: CacheKey) -> list[int]:
    """Evict the first cached node of `key` and everything below it: its K/V may be wrong.

    Ends the pins on these nodes. Nodes that leases hold stay; call again after their release.
    Returns the pages, which are free now.
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
    for pin in cache.pins():  # `unpin` would read the clock again and might expire some of them
        if cache._registry._live[pin.id].node in doomed:
            cache._pin_table.remove(pin)
    pages = list[int]()
    stop = cache.observe_evictions(lambda evicted: pages.extend(evicted.pages))
    try:
        cache.evict_if(lambda node: node.id in doomed)
    finally:
        stop()
    return pages


@guarded
def repair(cache: PrefixCache) -> int:
    """Make a cache consistent again after one of its calls was interrupted.

    KeyboardInterrupt, or what another signal handler raises, may end a call anywhere. Afterwards
    there are no leases but those of pins, and no private pages. Published pages stay cached, unless
    the call had begun to change the tree: then the cache is empty, see `reset`.

    Returns how many pins were lost. May be interrupted, and called again. O(nodes + pages).
    """
    try:
        cache.check()
        _end_leases(cache)
        cache.check()
    except Exception:  # noqa: BLE001 - a damaged structure may raise anything
        return reset(cache)
    return 0


def _end_leases(cache: PrefixCache) -> None:
    """Withdraw and release every lease that no pin holds; free all private pages."""
    pins = {pin.id for pin in cache._pin_table.list()}
    for lease in [*cache._registry.live()]:
        if lease.id not in pins:
            if not lease.withdrawn:
                cache.withdraw(lease)
            cache.release(lease)
    cache._store.ledger.give_back_all()


@guarded
def reset(cache: PrefixCache) -> int:
    """Empty a cache whose bookkeeping is wrong, in place: afterwards every page is free.

    Its leases and pins become invalid. Subscribers get "cleared"; they and the observers stay.
    Counters go on. Returns how many pins were lost.
    """
    fresh = PrefixCache(
        cache.num_pages,
        cache.page_size,
        policy=cache.policy,
        index=cache.index,
        window=cache.window,
        ghost_pages=cache._store.ghosts.max_pages,
        log_every=0,
        clock=cache._store.clock,
    )
    old, new = cache._store, fresh._store
    new.counters, new.num_lookups = old.counters, old.num_lookups
    new.log.adopt_subscribers(old.log)
    new.sessions.adopt(old.sessions)
    num_pins = len(cache._pin_table)
    fresh._pin_table.max_pages = cache._pin_table.max_pages
    # Numbers go on, so that no old lease or pin passes for a new one.
    fresh._registry._numbers = cache._registry._numbers
    cache._tree, cache._store, cache._registry = fresh._tree, new, fresh._registry
    cache._lease_ops, cache._pin_table = fresh._lease_ops, fresh._pin_table
    return num_pins
